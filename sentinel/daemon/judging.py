"""Ask the judge of each rank about what it does, write its rulings down, and have its decisions carried out."""

import functools
import time
import uuid
from collections.abc import Iterable

import msgspec
import structlog

from sentinel.config import Settings
from sentinel.daemon.comparing import Comparing
from sentinel.daemon.core import Core
from sentinel.daemon.dispatcher import Dispatcher, Result
from sentinel.daemon.fuse import Fuse, Guarded
from sentinel.daemon.rank import Rank, Start
from sentinel.daemon.ruling import Clerk, nothing_more, outcome_of
from sentinel.daemon.settings import for_run, weaker
from sentinel.detect import catalogue
from sentinel.errors import SettingsError
from sentinel.records import Decision, Incident, Observation, Reflex, StepRecord
from sentinel.respond.judge import Judge, Ruling, Situation
from sentinel.vocabulary import Action, IncidentStatus, Kind, Mode, Outcome, Severity, Tier

_log = structlog.get_logger()


class Judging:
    """The judges and fuses of all ranks. Lives in the event loop; never raises."""

    def __init__(self, core: Core, dispatcher: Dispatcher, settings: Settings) -> None:
        self._fleet, self._writer, self._metrics = core
        self._dispatcher = dispatcher
        self._settings = settings
        self._fuses: dict[Rank, Fuse] = {}
        self._judges: dict[Rank, Judge] = {}
        self._comparing: dict[str, Comparing] = {}  # by run_id, where there are several ranks
        self._degraded: dict[Rank, list[Incident]] = {}
        self._clerk = Clerk()
        dispatcher.concluded = self._concluded

    def begin(self, rank: Rank, start: Start, learnt_from: Iterable[StepRecord] = ()) -> None:
        """A rank attached, or is known from before: from here on it is judged.

        `learnt_from`: records that an earlier daemon judged; detectors only learn from them.
        """
        mode = weaker(start.mode, self._settings.mode)
        rank.start = start._replace(mode=mode)
        rank.step = max(rank.step, start.step)
        try:
            settings = for_run(self._settings, start.settings)
        except SettingsError as error:
            _log.warning(
                "the run's settings cannot be used; the daemon's hold", run=rank.origin.run_id, error=str(error)
            )
            settings = self._settings
        fuse = self.fuse(rank)
        detectors = [Guarded(detector, fuse) for detector in catalogue.build(settings.detect)]
        learnt_from = list(learnt_from)
        for record in learnt_from:
            for detector in detectors:
                detector.observe(record)
        self._judges[rank] = Judge(rank.origin, detectors, settings, _new_id)
        if rank.world_size > 1:
            self._compare(rank, settings).learn(rank.origin.rank, learnt_from)
        rank.margin_steps = settings.rollback.margin_steps
        rank.pause_limit_seconds = settings.pause.limit_seconds
        run = self._metrics.run(rank.origin.run_id)
        run.info = {"name": start.name, "mode": mode, "world_size": str(start.world_size)}

    def end(self, rank: Rank) -> None:
        """The rank is over: close its incidents, forget its detectors."""
        judge = self._judges.pop(rank, None)
        if judge is not None:
            self._rule(rank, self.fuse(rank).guard("judge", judge.end, self._situation(rank)))
        self._end_comparing(rank)
        for incident in self._degraded.pop(rank, []):
            closed = msgspec.structs.replace(incident, status=IncidentStatus.RESOLVED, resolved_at=time.time())
            self._metrics.incident(closed)
            self._save_incident(closed)
        self._fuses.pop(rank, None)

    def observe(self, rank: Rank, seen: Observation) -> None:
        judge = self._judges.get(rank)
        if judge is None or rank.ended:
            return
        ruling = self.fuse(rank).guard("judge", judge.observe, seen, self._situation(rank))
        self._rule(rank, ruling, seen.outcome if isinstance(seen, Reflex) else Outcome.APPLIED)
        comparing = self._comparing.get(rank.origin.run_id)
        if comparing is not None:
            situation = functools.partial(self._situation, rank)
            self._rule_all(rank, comparing.observe(rank.origin.rank, seen, situation, self.fuse(rank)))

    def _compare(self, rank: Rank, settings: Settings) -> Comparing:
        """The comparison of this rank with the others of its attempt."""
        known = self._comparing.get(rank.origin.run_id)
        if known is None or known.attempt != rank.origin.attempt:
            known = Comparing(rank.origin, rank.world_size, settings, _new_id)
            self._comparing[rank.origin.run_id] = known
        return known

    def _end_comparing(self, rank: Rank) -> None:
        run = self._fleet.run_of(rank)
        if run is not None and all(other.ended or other is rank for other in run.ranks.values()):
            comparing = self._comparing.pop(run.run_id, None)
            if comparing is not None:
                self._rule_all(rank, comparing.end(self._situation(rank), self.fuse(rank)))

    def _rule_all(self, rank: Rank, ruling: Ruling | None) -> None:
        """A ruling about the whole run: it is written once, and every rank's ring hears of it."""
        run = self._fleet.run_of(rank)
        if ruling is None or run is None:
            return
        for other in run.connected:
            for mark in ruling.marks:
                other.send(mark)
        self._rule(run.first, ruling._replace(marks=()))

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

        self._rule(rank, self.fuse(rank).guard("judge", tell))

    def _rule(self, rank: Rank, ruling: Ruling | None, reflex: Outcome = Outcome.APPLIED) -> None:
        if ruling is None:
            return
        for mark in ruling.marks:
            rank.send(mark)
        if not (ruling.findings or ruling.incidents or ruling.decisions):
            return
        for incident in ruling.incidents:
            if self._metrics.incident(incident):
                _log.warning(
                    "incident", kind=incident.kind, status=incident.status, text=incident.summary, **rank.keys()
                )
        named = [(_new_id(), decision) for decision in ruling.decisions]
        record = self._clerk.record(rank, ruling, named, reflex)
        acting = [(name, decision) for name, decision in named if outcome_of(decision, reflex) is Outcome.PENDING]
        for _, decision in named:
            if decision.action is Action.SKIP_UPDATE:
                self._metrics.action(rank.origin.run_id, decision.action, reflex)
        if not acting:
            urgent = bool(ruling.incidents or ruling.decisions)
            self._writer.later(record, critical=urgent)
        for name, decision in acting:
            self._dispatcher.begin(rank, name, decision, record)
            record = nothing_more

    def _situation(self, rank: Rank) -> Situation:
        run = self._fleet.run_of(rank)
        start = rank.start
        return Situation(
            mode=start.mode if start else Mode.OBSERVE,
            world_size=run.world_size if run else rank.world_size,
            ranks_connected=len(run.connected) if run else 0,
            can=start.can if start else frozenset(),
            in_flight=self._dispatcher.in_flight(rank.origin.run_id),
            record_kept=not self._writer.trouble,
            time=time.time(),
        )

    def fuse(self, rank: Rank) -> Fuse:
        """The exception boundary of this rank."""
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
        self._metrics.parts_disabled += 1
        self._metrics.incident(incident)
        self._save_incident(incident)

    def _save_incident(self, incident: Incident) -> None:
        self._writer.later(lambda store: store.save_incident(incident))


def _new_id() -> str:
    return uuid.uuid4().hex
