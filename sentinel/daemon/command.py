"""Make the command that carries a decision out, or say why there can be none."""

import time
import uuid

from sentinel.daemon.rank import LiveRun
from sentinel.daemon.turn import apply_at, valid_seconds
from sentinel.records import Command, Decision
from sentinel.vocabulary import Action, Mode, Reason

# What the loop must offer (RunStart.can) for an action that takes a turn.
_NEEDS = {Action.ROLLBACK: "rollback", Action.PAUSE: "pause", Action.STOP: "stop"}


def why_refused(run: LiveRun, decision: Decision) -> Reason | None:
    """Why this run cannot be asked for that now; None if it can."""
    start = run.first.start
    if len(run.connected) < run.world_size:
        return Reason.RANKS_MISSING
    if run.world_size > 1:
        return Reason.SEVERAL_RANKS
    if start is None or _NEEDS.get(decision.action) not in start.can:
        return Reason.LOOP_CANNOT
    if start.mode is not Mode.PROTECT:
        return Reason.OBSERVE_MODE
    return Reason.BUSY if run.paused_by else None


def make_command(run: LiveRun, decision: Decision) -> Command:
    """For the step that every rank can reach prepared; with the next number of the run's sequence."""
    furthest = max(run.connected, key=lambda rank: rank.step)
    return Command(
        id=uuid.uuid4().hex,
        run_id=run.run_id,
        attempt=run.attempt,
        generation=furthest.generation,
        sequence=run.next_sequence(),
        not_after=time.monotonic() + valid_seconds(furthest.step_seconds),
        action=decision.action,
        apply_at=apply_at(furthest.step, furthest.step_seconds, furthest.round_trip_seconds),
        reason=decision.reason,
        target_step=decision.target_step,
        onset_step=decision.onset_step,
        pending_ok=decision.pending_ok,
        data=decision.data,
        skip_batches=decision.skip_batches,
        limit_seconds=decision.limit_seconds,
        factor=decision.factor,
        size=decision.size,
    )
