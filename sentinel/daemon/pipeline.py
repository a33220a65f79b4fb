"""Handle every message of every rank in order: metrics, database, detectors, and what the judge rules."""

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from sentinel.config import Settings
from sentinel.daemon import recovery
from sentinel.daemon.connection import Rejected, RejectedError
from sentinel.daemon.core import Core
from sentinel.daemon.dispatcher import Dispatcher, Result
from sentinel.daemon.fuse import Fuse, Guarded
from sentinel.daemon.rank import Rank, Start
from sentinel.daemon.settings import for_run, weaker
from sentinel.daemon.writer import Job
from sentinel.detect import catalogue
from sentinel.errors import SettingsError
from sentinel.records import (
    Ack,
    ControlRequest,
    Decision,
    FromRank,
    Gap,
    Heartbeat,
    Hello,
    Incident,
    IncidentStatus,
    Observation,
    PhaseNote,
    Reflex,
    RunEnd,
    RunStart,
    SnapshotNote,
    StepRecord,
    Stored,
    Trouble,
    Word,
)
from sentinel.respond.judge import Judge, Ruling, Situation
from sentinel.store.database import Entry
from sentinel.vocabulary import Action, Kind, Mode, Outcome, Reason, Severity, Tier

_log = structlog.get_logger()
_Route = Callable[[Rank, Any], None]


class Pipeline:
    """One per daemon; lives in the event loop. Never raises but for a message that no rank may send here."""

    def __init__(self, core: Core, dispatcher: Dispatcher, settings: Settings) -> None:
        self._fleet, self._writer, self._metrics = core
        self._dispatcher = dispatcher
        self._settings = settings
        self._fuses: dict[Rank, Fuse] = {}
        self._judges: dict[Rank, Judge] = {}
        self._degraded: dict[Rank, list[Incident]] = {}
        self._heard: dict[Rank, int] = {}
        self.said_goodbye: Callable[[Rank], None] = _nobody_listens
        self._routes: dict[type, _Route] = {
            StepRecord: self._step,
            Reflex: self._observe,
            SnapshotNote: self._observe,
            RunStart: self._start,
            RunEnd: self._end,
            Ack: self._ack,
            PhaseNote: self._phase,
            Trouble: self._trouble,
        }
        dispatcher.concluded = self._concluded

    def handle(self, rank: Rank, message: FromRank) -> None:
        """Called for every message of a rank, in the order in which the rank sent them."""
        rank.last_heard = time.monotonic()
        if isinstance(message, Heartbeat):
            rank.beat(message)
            self._measure(rank, message)
        elif isinstance(message, Gap):
            self._gap(rank, message)
        elif isinstance(message, Hello | ControlRequest):
            raise RejectedError(Rejected.UNEXPECTED, f"{type(message).__name__} from a rank that is connected")
        elif message.seq <= rank.seen_seq:
            self._repeated(rank, message.seq)
        else:
            self._numbered(rank, message)

    def begin(self, rank: Rank, start: Start) -> None:
        """A rank attached, or is known from before: from here on it is judged."""
        rank.start = start
        rank.step = max(rank.step, start.step)
        try:
            settings = for_run(self._settings, start.settings)
        except SettingsError as error:
            _log.warning(
                "the run's settings cannot be used; the daemon's hold", run=rank.origin.run_id, error=str(error)
            )
            settings = self._settings
        fuse = self._fuse(rank)
        detectors = [Guarded(detector, fuse) for detector in catalogue.build(settings.detect)]
        self._judges[rank] = Judge(rank.origin, detectors, settings, _new_id)
        rank.margin_steps = settings.rollback.margin_steps
        rank.pause_limit_seconds = settings.pause.limit_seconds
        mode = weaker(start.mode, self._settings.mode)
        run = self._metrics.run(rank.origin.run_id)
        run.info = {"name": start.name, "mode": mode, "world_size": str(start.world_size)}

    def end(self, rank: Rank) -> None:
        """The rank is over: close its incidents, forget its detectors."""
        judge = self._judges.pop(rank, None)
        if judge is not None:
            self._rule(rank, self._fuse(rank).guard("judge", judge.end, self._situation(rank)))
        for incident in self._degraded.pop(rank, []):
            closed = msgspec.structs.replace(incident, status=IncidentStatus.RESOLVED, resolved_at=time.time())
            self._metrics.incident(closed)
            self._save_incident(closed)
        self._fuses.pop(rank, None)

    def note_heard(self) -> None:
        """Keep what ranks said they produced; called about once a second."""
        news = {
            rank.origin: rank.produced_seq
            for rank in self._fleet.ranks()
            if rank.produced_seq > max(rank.seen_seq, self._heard.get(rank, 0))
        }
        self._heard = {rank: rank.produced_seq for rank in self._fleet.ranks()}
        if news:
            self._writer.later(lambda store: store.heard(news), critical=False)

    # ------------------------------------------------------------------ one message

    def _numbered(self, rank: Rank, message: Any) -> None:
        rank.seen_seq = message.seq
        rank.produced_seq = max(rank.produced_seq, message.seq)
        kind = type(message)
        if kind is StepRecord and message.host_memory_bytes is None and rank.host_memory_bytes is not None:
            message = msgspec.structs.replace(message, host_memory_bytes=rank.host_memory_bytes)
        self._measure(rank, message)
        self._writer.append(
            Entry(rank.origin, message, rank.host_memory_bytes), critical=message.delivery == "critical"
        )
        self._routes[kind](rank, message)

    def _repeated(self, rank: Rank, seq: int) -> None:
        if seq <= rank.stored_seq:
            rank.send(Stored(rank.stored_seq))

    def _gap(self, rank: Rank, gap: Gap) -> None:
        first = max(gap.first_seq, rank.seen_seq + 1)
        if gap.last_seq < first:
            self._repeated(rank, gap.last_seq)
            return
        news = Gap(first_seq=first, last_seq=gap.last_seq, reason=gap.reason)
        rank.seen_seq = gap.last_seq
        rank.produced_seq = max(rank.produced_seq, gap.last_seq)
        self._measure(rank, news)
        self._writer.append(Entry(rank.origin, news), critical=False)

    def _measure(self, rank: Rank, message: Any) -> None:
        if not rank.ended:
            series = self._metrics.rank(rank.origin.run_id, rank.origin.rank)
            self._fuse(rank).guard("metrics", series.take, message)

    def _step(self, rank: Rank, record: StepRecord) -> None:
        rank.saw(record)
        self._observe(rank, record)

    def _start(self, rank: Rank, start: RunStart) -> None:
        self.begin(rank, Start.of(start))
        series = self._metrics.rank(rank.origin.run_id, rank.origin.rank)
        series.new_attempt(start.devices[0] if start.devices else "")

    def _end(self, rank: Rank, end: RunEnd) -> None:
        rank.end_status = end.status
        rank.step = max(rank.step, end.step)
        self.said_goodbye(rank)

    def _ack(self, rank: Rank, ack: Ack) -> None:
        if self._dispatcher.answer(rank, ack):
            return
        if ack.state == "prepared":  # for a daemon that is no more: nobody will ever say the word
            rank.send(Word(ack.command_id, commit=False, reason=Reason.NO_WORD))
        if ack.state == "applied":
            rank.turned(ack)
        self._writer.alone(lambda store: recovery.settle_late(store, ack))

    def _phase(self, rank: Rank, note: PhaseNote) -> None:
        rank.phase = note.phase if note.entered else "train"

    def _trouble(self, rank: Rank, trouble: Trouble) -> None:
        _log.warning("a rank is degraded", what=trouble.what, text=trouble.text, **_whose(rank))

    # ------------------------------------------------------------------ what the judge rules

    def _observe(self, rank: Rank, seen: Observation) -> None:
        judge = self._judges.get(rank)
        if judge is None or rank.ended:
            return
        ruling = self._fuse(rank).guard("judge", judge.observe, seen, self._situation(rank))
        self._rule(rank, ruling, seen.outcome if isinstance(seen, Reflex) else Outcome.APPLIED)

    def _concluded(self, rank: Rank, decision: Decision, result: Result) -> None:
        judge = self._judges.get(rank)
        if judge is None:
            return

        def tell() -> Ruling:
            return judge.outcome(
                decision,
                result.outcome,
                result.reason,
                generation=result.generation or rank.generation,
                applied_step=rank.step if result.applied_step is None else result.applied_step,
                target_step=result.target_step,
                situation=self._situation(rank),
            )

        self._rule(rank, self._fuse(rank).guard("judge", tell))

    def _rule(self, rank: Rank, ruling: Ruling | None, reflex: Outcome = Outcome.APPLIED) -> None:
        if ruling is None:
            return
        for mark in ruling.marks:
            rank.send(mark)
        if not (ruling.findings or ruling.incidents or ruling.decisions):
            return
        for incident in ruling.incidents:
            self._metrics.incident(incident)
            _log.warning(
                "incident", kind=incident.kind, status=incident.status, text=incident.summary, **_whose(rank)
            )
        named = [(_new_id(), decision) for decision in ruling.decisions]
        record = _record(rank, ruling, named, reflex)
        acting = [(name, decision) for name, decision in named if _outcome_of(decision, reflex) is Outcome.PENDING]
        for _, decision in named:
            if decision.action is Action.SKIP_UPDATE:
                self._metrics.action(rank.origin.run_id, decision.action, reflex)
        if not acting:
            urgent = bool(ruling.incidents or ruling.decisions)
            self._writer.later(record, critical=urgent)
        for name, decision in acting:
            self._dispatcher.begin(rank, name, decision, record)
            record = _nothing_more

    def _situation(self, rank: Rank) -> Situation:
        run = self._fleet.run_of(rank)
        start = rank.start
        return Situation(
            mode=weaker(start.mode, self._settings.mode) if start else Mode.OBSERVE,
            world_size=run.world_size if run else rank.world_size,
            ranks_connected=len(run.connected) if run else 0,
            can=start.can if start else frozenset(),
            in_flight=self._dispatcher.in_flight(rank.origin.run_id),
            record_kept=not self._writer.trouble,
            time=time.time(),
        )

    # ------------------------------------------------------------------ what fails in here

    def _fuse(self, rank: Rank) -> Fuse:
        fuse = self._fuses.get(rank)
        if fuse is None:
            fuse = self._fuses[rank] = Fuse(lambda part, error: self._part_disabled(rank, part, error))
        return fuse

    def _part_disabled(self, rank: Rank, part: str, error: Exception) -> None:
        incident = Incident(
            id=_new_id(),
            run_id=rank.origin.run_id,
            attempt=rank.origin.attempt,
            generation=rank.generation,
            kind=Kind.SENTINEL_DEGRADED,
            severity=Severity.WARNING,
            tier=Tier.T1,
            ranks=(rank.origin.rank,),
            first_step=rank.step,
            onset_step=rank.step,
            last_step=rank.step,
            status=IncidentStatus.OPEN,
            summary=f"{part} failed and is switched off for this run",
            cause=f"{type(error).__name__}: {error}",
            evidence={"part": part},
            opened_at=time.time(),
        )
        self._degraded.setdefault(rank, []).append(incident)
        self._metrics.incident(incident)
        self._save_incident(incident)

    def _save_incident(self, incident: Incident) -> None:
        self._writer.later(lambda store: store.save_incident(incident))


def _record(rank: Rank, ruling: Ruling, named: list[tuple[str, Decision]], reflex: Outcome) -> Job[None]:
    """Everything a ruling says, to be written in one commit."""
    origin, generation, now = rank.origin, rank.generation, time.time()

    def save(store: Any) -> None:
        with store.transaction(critical=True):
            for finding, incident_id in ruling.findings:
                store.save_finding(origin, finding, generation, now, incident_id)
            for incident in ruling.incidents:
                store.save_incident(incident)
            for name, decision in named:
                outcome = _outcome_of(decision, reflex)
                store.save_decision(name, origin, generation, now, decision, outcome)
                if decision.action is Action.SKIP_UPDATE and outcome is not None:
                    store.save_outcome(name, outcome, decision.reason, decision.step)

    return save


def _outcome_of(decision: Decision, reflex: Outcome) -> Outcome | None:
    if decision.action is Action.NONE:
        return None
    return reflex if decision.action is Action.SKIP_UPDATE else Outcome.PENDING


def _nothing_more(store: Any) -> None:
    """The first decision of a ruling has brought the whole record along."""
    del store


def _nobody_listens(rank: Rank) -> None:
    del rank


def _new_id() -> str:
    return uuid.uuid4().hex


def _whose(rank: Rank) -> dict[str, Any]:
    run_id, attempt, number = rank.origin
    return {"run": run_id, "attempt": attempt, "rank": number, "step": rank.step, "generation": rank.generation}
