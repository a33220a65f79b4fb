"""Answer `sentinel ctl`: one request over the Unix socket, one reply."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from sentinel.daemon.core import Core
from sentinel.daemon.dispatcher import Dispatcher, Result
from sentinel.daemon.rank import LiveRun, Rank
from sentinel.errors import NoSuchRunError, SentinelError
from sentinel.records import ControlReply, ControlRequest, Decision
from sentinel.store.history import History
from sentinel.vocabulary import Action, Outcome, Reason

RELEASE_SECONDS = 30.0  # for a paused loop to say that it goes on
FLUSH_SECONDS = 2.0
NO_SUCH_RUN = "no_such_run"
_log = structlog.get_logger()


class Control:
    """The verbs. What a person asks for goes through the same turns as the daemon's own decisions."""

    def __init__(self, core: Core, dispatcher: Dispatcher, database_url: str) -> None:
        self._fleet, self._writer, _ = core
        self._dispatcher = dispatcher
        self._database_url = database_url
        self._verbs: dict[str, Callable[[LiveRun, dict[str, Any]], Awaitable[ControlReply]]] = {
            "status": self._status,
            "pause": self._pause,
            "resume": self._resume,
            "rollback": self._rollback,
            "stop": self._stop,
            "checkpoint": self._checkpoint,
        }

    async def answer(self, request: ControlRequest) -> ControlReply:
        """Never raises; a failure is a reply too."""
        verb = self._verbs.get(request.verb)
        if verb is None:
            known = ", ".join(self._verbs)
            return _refused(Reason.UNKNOWN_VERB, f"{request.verb!r} is no verb of this version; known: {known}")
        try:
            run = self._find(request.run)
            if run is None:
                return await self._ended(request)
            return await verb(run, request.arguments)
        except NoSuchRunError as error:
            return ControlReply(ok=False, reason=NO_SUCH_RUN, body={"text": str(error)})
        except SentinelError as error:
            return _refused(Reason.ERROR, str(error))
        except Exception as error:  # noqa: BLE001 - whoever asked hears of it; the daemon goes on
            _log.exception("a control request failed", verb=request.verb)
            return _refused(Reason.ERROR, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------ verbs

    async def _status(self, run: LiveRun, arguments: dict[str, Any]) -> ControlReply:
        del arguments
        return ControlReply(ok=True, reason=Reason.OK, body=status_of(run, self._dispatcher.in_flight(run.run_id)))

    async def _pause(self, run: LiveRun, arguments: dict[str, Any]) -> ControlReply:
        if run.paused_by:
            return _refused(Reason.BUSY, "the run is paused already; `resume` lets it go on")
        limit = arguments.get("limit_seconds") or run.first.pause_limit_seconds
        return await self._carry_out(run, Action.PAUSE, "pause asked for by a person", limit_seconds=limit)

    async def _resume(self, run: LiveRun, arguments: dict[str, Any]) -> ControlReply:
        del arguments
        if not run.paused_by:
            return _refused(Reason.WRONG_PHASE, "the run is not paused")
        try:
            ack = await self._dispatcher.release(run, RELEASE_SECONDS)
        except TimeoutError:
            return _refused(Reason.EXPIRED, f"the loop did not go on within {RELEASE_SECONDS:g} s")
        return ControlReply(ok=True, reason=Reason.REQUESTED, body={"outcome": Outcome.APPLIED, "step": ack.step})

    async def _rollback(self, run: LiveRun, arguments: dict[str, Any]) -> ControlReply:
        skip = arguments.get("skip")
        text = "rollback asked for by a person"
        return await self._carry_out(
            run,
            Action.ROLLBACK,
            text,
            target_step=arguments.get("to"),
            data="replay" if skip is None else "skip",
            skip_batches=skip,
        )

    async def _stop(self, run: LiveRun, arguments: dict[str, Any]) -> ControlReply:
        del arguments
        if run.paused_by:
            try:
                await self._dispatcher.release(run, RELEASE_SECONDS)
            except TimeoutError:
                return _refused(Reason.EXPIRED, f"the paused loop did not answer within {RELEASE_SECONDS:g} s")
        return await self._carry_out(run, Action.STOP, "stop asked for by a person")

    async def _checkpoint(self, run: LiveRun, arguments: dict[str, Any]) -> ControlReply:
        del run, arguments
        return _refused(Reason.NO_DISK_TIER, "checkpoints on disk are not available in this version")

    # ------------------------------------------------------------------ below

    async def _carry_out(self, run: LiveRun, action: Action, text: str, **plan: Any) -> ControlReply:
        rank = run.first
        decision = Decision(action=action, reason=Reason.REQUESTED, text=text, step=rank.step, **plan)
        reason = self._dispatcher.refusal(run, decision)
        if reason is not None:
            return _refused(reason, _WHY_NOT.get(reason, ""))
        decision_id = uuid.uuid4().hex
        origin, generation, now = rank.origin, rank.generation, time.time()

        def record(store: Any) -> None:
            store.save_decision(decision_id, origin, generation, now, decision, Outcome.PENDING)

        result = await self._dispatcher.begin(rank, decision_id, decision, record)
        return ControlReply(ok=result.outcome is Outcome.APPLIED, reason=result.reason, body=_told(result))

    def _find(self, wanted: str) -> LiveRun | None:
        """A live run by `latest`, id, name or unique prefix; the youngest of several of one name."""
        runs = sorted(self._fleet.runs.values(), key=lambda run: run.order, reverse=True)
        if wanted == "latest":
            return runs[0] if runs else None
        for run in runs:
            if wanted in (run.run_id, run.name):
                return run
        matching = [run for run in runs if wanted and run.run_id.startswith(wanted)]
        if len(matching) > 1:
            ids = ", ".join(run.run_id for run in matching)
            raise NoSuchRunError(f"{wanted!r} is the beginning of {len(matching)} runs: {ids}")
        return matching[0] if matching else None

    async def _ended(self, request: ControlRequest) -> ControlReply:
        """The run is not live: known from the database, or not at all."""
        with contextlib.suppress(TimeoutError):  # its end may still be on its way there
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._writer.flushed()
        found = await asyncio.to_thread(_from_database, self._database_url, request.run)
        if request.verb == "status":
            return ControlReply(ok=True, reason=Reason.RUN_ENDED, body=found)
        body = {"text": f"run {found['run_id']} has ended ({found['status']})", "run_id": found["run_id"]}
        return ControlReply(ok=False, reason=Reason.RUN_ENDED, body=body)


def status_of(run: LiveRun, in_flight: bool) -> dict[str, Any]:
    """A live run in plain data."""
    first = run.first
    return {
        "run_id": run.run_id,
        "name": run.name,
        "status": "paused" if run.paused_by else "running",
        "mode": first.start.mode if first.start else None,
        "attempt": run.attempt,
        "generation": first.generation,
        "steps": first.step,
        "world_size": run.world_size,
        "ranks_connected": len(run.connected),
        "command_in_flight": in_flight,
        "ranks": [_rank(rank) for rank in run.ranks.values()],
    }


def _rank(rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.origin.rank,
        "connected": rank.connected,
        "step": rank.step,
        "phase": rank.phase,
        "heard_seconds_ago": round(time.monotonic() - rank.last_heard, 3),
        "produced": rank.produced_seq,
        "stored": rank.stored_seq,
    }


def _from_database(url: str, wanted: str) -> dict[str, Any]:
    with History(url) as history:
        row = history.run(history.resolve(wanted))
    names = ("run_id", "name", "status", "mode", "steps", "attempts", "generations", "world_size")
    return {name: row[name] for name in names}


def _told(result: Result) -> dict[str, Any]:
    return {
        "outcome": result.outcome,
        "text": result.text,
        "applied_step": result.applied_step,
        "target_step": result.target_step,
        "skipped_batches": result.skipped_batches,
        "seconds": result.seconds,
        "generation": result.generation,
    }


def _refused(reason: Reason, text: str) -> ControlReply:
    return ControlReply(ok=False, reason=reason, body={"outcome": Outcome.REFUSED, "text": text})


_WHY_NOT = {
    Reason.RANKS_MISSING: "not every rank of the world is connected",
    Reason.SEVERAL_RANKS: "turns on several ranks are not available in this version",
    Reason.OBSERVE_MODE: "the run is only observed (mode observe)",
    Reason.LOOP_CANNOT: "the loop does not offer what this needs",
    Reason.IN_FLIGHT: "another command has not ended yet",
    Reason.BUSY: "the run is paused; `resume` it first",
}
