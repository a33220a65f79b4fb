"""Carry decisions out: prepare, commit or abort, and the outcome, one turn per run at a time.

Every command and every word is in the database before it is sent. In this version a turn has one rank; nothing here
but the refusal of several ranks depends on that.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import structlog

from sentinel.daemon.command import make_command, why_refused
from sentinel.daemon.core import Core
from sentinel.daemon.rank import LiveRun, Rank
from sentinel.daemon.turn import PASSING, Turn, TurnState, Verdict
from sentinel.daemon.writer import Job
from sentinel.errors import SentinelError
from sentinel.records import Ack, Decision, Word
from sentinel.vocabulary import Action, Outcome, Reason

PREPARE_SECONDS = 2.0  # for every rank to answer a prepare
RETRY_SECONDS = 0.25  # between two tries of a turn
MOST_TRIES = 3
MORE_ROOM = 1.5  # times the round trip that was measured, after a rank was too far
GRACE_SECONDS = 5.0  # after a command's deadline, for its outcome to arrive
_log = structlog.get_logger()


class Result(NamedTuple):
    """What became of a decision."""

    outcome: Outcome
    reason: Reason
    text: str = ""
    generation: int = 0
    applied_step: int | None = None
    target_step: int | None = None
    skipped_batches: int | None = None
    seconds: float | None = None


Concluded = Callable[[Rank, Decision, Result], None]


class Dispatcher:
    """All turns of all runs."""

    def __init__(self, core: Core) -> None:
        self._fleet, self._writer, self._metrics = core
        self._turns: dict[str, Turn] = {}  # by run: one in flight each
        self._waiters: dict[str, asyncio.Future[Result]] = {}  # by decision: whoever waits for its outcome
        self._releases: dict[str, asyncio.Future[Ack]] = {}  # by pause command
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.concluded: Concluded = _nobody_listens

    def in_flight(self, run_id: str) -> bool:
        return run_id in self._turns

    def refusal(self, run: LiveRun, decision: Decision) -> Reason | None:
        """Why a decision cannot be carried out now, before anything is sent."""
        reason = why_refused(run, decision)
        return Reason.IN_FLIGHT if reason is None and self.in_flight(run.run_id) else reason

    def begin(self, rank: Rank, decision_id: str, decision: Decision, record: Job[Any]) -> "asyncio.Future[Result]":
        """Start a turn. `record` writes what led to it, in the same commit as the command. Returns at once."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiters[decision_id] = future
        run = self._fleet.run_of(rank)
        reason = self.refusal(run, decision) if run else Reason.RUN_ENDED
        if run is None or reason is not None:
            self._writer.later(record)
            self._conclude(rank, decision_id, decision, Result(Outcome.REFUSED, reason or Reason.RUN_ENDED))
            return future
        command = make_command(run, decision)
        turn = Turn(decision_id, decision, command, run.ranks)
        self._turns[run.run_id] = turn
        self._spawn(self._prepare(run, turn, record))
        return future

    def answer(self, rank: Rank, ack: Ack) -> bool:
        """Take a rank's ack. False when it belongs to no turn of this daemon."""
        release = self._releases.get(ack.command_id)
        if ack.state == "released":
            return self._released(rank, ack, release)
        turn = self._turns.get(rank.origin.run_id)
        if turn is None or turn.command.id != ack.command_id:
            return False
        run = self._fleet.run_of(rank)
        if run is None:
            return False
        if turn.state is TurnState.PREPARING:
            if turn.answered(rank.origin.rank, ack):
                self._decide(run, turn, turn.verdict(run.first.margin_steps))
        elif turn.state is TurnState.COMMITTED:
            self._outcome(run, turn, rank, ack)
        return True

    async def release(self, run: LiveRun, seconds: float) -> Ack:
        """End a pause and wait until the loop goes on. Raises TimeoutError, TemporaryError."""
        word = Word(command_id=run.paused_by, commit=False, reason=Reason.REQUESTED)
        await self._writer.now(lambda store: store.save_word(word, time.time()))
        future: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        self._releases[word.command_id] = future
        for rank in run.connected:
            rank.send(word)
        try:
            async with asyncio.timeout(seconds):
                return await future
        finally:
            self._releases.pop(word.command_id, None)

    def rank_ended(self, rank: Rank) -> None:
        """The rank will never answer again."""
        turn = self._turns.get(rank.origin.run_id)
        if turn is not None:
            self._finish(rank, turn, Result(Outcome.ABORTED, Reason.RUN_ENDED, "the run ended before it was done"))

    async def close(self) -> None:
        """Abort what is only prepared; a committed turn is the rank's own by now."""
        for run_id, turn in list(self._turns.items()):
            run = self._fleet.runs.get(run_id)
            if run is not None and turn.state is TurnState.PREPARING:
                turn.tries = MOST_TRIES
                self._decide(run, turn, Verdict(False, Reason.ERROR, text="the daemon leaves"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------ prepare

    async def _prepare(self, run: LiveRun, turn: Turn, record: Job[Any] | None) -> None:
        began = time.monotonic()
        command = turn.command

        def save(store: Any) -> None:
            with store.transaction(critical=True):
                if record is not None:
                    record(store)
                store.save_command(command, turn.decision_id, time.time())

        try:
            await self._writer.now(save)
        except SentinelError as error:
            if record is not None:
                self._writer.later(record)
            self._finish(run.first, turn, Result(Outcome.REFUSED, Reason.NO_RECORD, str(error)))
            return
        if turn.state is not TurnState.PREPARING:
            return
        turn.sent_at = began
        for rank in run.connected:
            rank.send(command)
        _log.info("command sent", run=run.run_id, action=command.action, apply_at=command.apply_at, try_=turn.tries)
        self._deadline(turn, PREPARE_SECONDS, lambda: self._no_answer(run, turn))

    def _no_answer(self, run: LiveRun, turn: Turn) -> None:
        if turn.state is TurnState.PREPARING:
            missing = sorted(turn.waiting_for - turn.answers.keys())
            text = f"ranks {missing} did not answer within {PREPARE_SECONDS:g} s"
            self._decide(run, turn, Verdict(False, Reason.EXPIRED, text=text))

    # ------------------------------------------------------------------ the word

    def _decide(self, run: LiveRun, turn: Turn, verdict: Verdict) -> None:
        turn.state = TurnState.COMMITTED if verdict.commit else TurnState.ABORTED
        if turn.sent_at is not None:
            for number in turn.answers:
                run.ranks[number].took(time.monotonic() - turn.sent_at)
        self._spawn(self._say(run, turn, verdict))

    async def _say(self, run: LiveRun, turn: Turn, verdict: Verdict) -> None:
        command = turn.command
        word = Word(command.id, verdict.commit, verdict.reason, verdict.target_step)
        try:
            await self._writer.now(lambda store: store.save_word(word, time.time()))
        except SentinelError as error:
            verdict = Verdict(False, Reason.NO_RECORD, text=str(error))
            word = Word(command.id, False, Reason.NO_RECORD)
            turn.state = TurnState.ABORTED
        for rank in run.connected:
            rank.send(word)
        if verdict.commit:
            seconds = max(0.0, command.not_after - time.monotonic()) + GRACE_SECONDS
            self._deadline(turn, seconds, lambda: self._no_outcome(run, turn))
        elif turn.state is TurnState.ABORTED:
            await self._again(run, turn, verdict.reason, verdict.text)

    async def _again(self, run: LiveRun, turn: Turn, reason: Reason, text: str) -> None:
        """Another try later, where that can help; else the decision is refused."""
        if reason not in PASSING or turn.tries >= MOST_TRIES:
            outcome = Outcome.ABORTED if reason in PASSING else Outcome.REFUSED
            self._finish(run.first, turn, Result(outcome, reason, text))
            return
        await asyncio.sleep(0 if reason is Reason.TOO_LATE else RETRY_SECONDS)
        if self._turns.get(run.run_id) is not turn:
            return
        if run.ended or not run.may_act:
            self._finish(run.first, turn, Result(Outcome.ABORTED, Reason.RANKS_MISSING, text))
            return
        if reason is Reason.TOO_LATE:
            run.first.round_trip_seconds *= MORE_ROOM
        turn.again(make_command(run, turn.decision), run.ranks)
        await self._prepare(run, turn, None)

    # ------------------------------------------------------------------ the outcome

    def _outcome(self, run: LiveRun, turn: Turn, rank: Rank, ack: Ack) -> None:
        if ack.state == "aborted" and ack.reason in PASSING and turn.tries < MOST_TRIES:
            turn.state = TurnState.ABORTED
            self._spawn(self._again(run, turn, ack.reason, ack.text))
            return
        outcome = {"applied": Outcome.APPLIED, "failed": Outcome.FAILED, "aborted": Outcome.ABORTED}.get(ack.state)
        if outcome is None:
            outcome = Outcome.REFUSED
        if outcome is Outcome.APPLIED and turn.command.action is Action.PAUSE:
            run.paused_by = turn.command.id
        if ack.generation > rank.generation:
            rank.turned(ack)
        reason = turn.decision.reason if outcome is Outcome.APPLIED else ack.reason
        applied_step = ack.step if outcome is Outcome.APPLIED else None
        if turn.command.action is Action.ROLLBACK and outcome is Outcome.APPLIED:
            applied_step = turn.command.apply_at
        self._finish(
            rank,
            turn,
            Result(
                outcome,
                reason,
                ack.text,
                ack.generation,
                applied_step,
                ack.target_step,
                ack.skipped_batches,
                ack.seconds,
            ),
        )

    def _no_outcome(self, run: LiveRun, turn: Turn) -> None:
        if turn.state is TurnState.COMMITTED:
            self._finish(run.first, turn, Result(Outcome.FAILED, Reason.EXPIRED, "no outcome was ever reported"))

    def _finish(self, rank: Rank, turn: Turn, result: Result) -> None:
        if turn.state is TurnState.DONE:
            return
        turn.state = TurnState.DONE
        self._turns.pop(rank.origin.run_id, None)
        timer = self._timers.pop(turn.decision_id, None)
        if timer is not None:
            timer.cancel()
        self._conclude(rank, turn.decision_id, turn.decision, result)

    def _conclude(self, rank: Rank, decision_id: str, decision: Decision, result: Result) -> None:
        """Write the outcome down, tell whoever waits, and let the judge know before the next record is seen."""
        origin = rank.origin

        def save(store: Any) -> None:
            with store.transaction(critical=True):
                store.save_outcome(
                    decision_id,
                    result.outcome,
                    result.reason,
                    result.applied_step,
                    result.target_step,
                    result.skipped_batches,
                    result.seconds,
                )
                if result.outcome is Outcome.APPLIED and result.target_step is not None:
                    step = result.applied_step if result.applied_step is not None else result.target_step
                    store.save_generation(
                        origin, result.generation, result.target_step, step, time.time(), str(decision.reason)
                    )

        self._writer.later(save)
        self._metrics.action(origin.run_id, decision.action, result.outcome)
        _log.info("decision carried out", run=origin.run_id, action=decision.action, **_words(result))
        waiter = self._waiters.pop(decision_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(result)
        self.concluded(rank, decision, result)

    def _released(self, rank: Rank, ack: Ack, release: "asyncio.Future[Ack] | None") -> bool:
        self._releases.pop(ack.command_id, None)
        run = self._fleet.run_of(rank)
        if run is not None and run.paused_by in ("", ack.command_id):
            run.paused_by = ""
        if release is not None and not release.done():
            release.set_result(ack)
        return True

    def _deadline(self, turn: Turn, seconds: float, act: Callable[[], None]) -> None:
        earlier = self._timers.pop(turn.decision_id, None)
        if earlier is not None:
            earlier.cancel()
        self._timers[turn.decision_id] = asyncio.get_running_loop().call_later(seconds, act)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _nobody_listens(rank: Rank, decision: Decision, result: Result) -> None:
    del rank, decision, result


def _words(result: Result) -> dict[str, object]:
    return {"outcome": result.outcome, "reason": result.reason, "text": result.text, "target": result.target_step}
