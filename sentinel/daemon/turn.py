"""The state of one turn, and the choices that need no clock and no socket: when to act, and where to return to."""

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from sentinel.records import Ack, Command, Decision
from sentinel.vocabulary import Action, Quality, Reason


class TurnState(StrEnum):
    """Design section 8."""

    PREPARING = "preparing"  # the command is out, not every rank has answered
    COMMITTED = "committed"  # every rank is prepared and the word was commit
    ABORTED = "aborted"  # this try is over; another may follow
    DONE = "done"  # the outcome is known


# A refusal that can be different a moment later.
PASSING = frozenset(
    {Reason.TOO_LATE, Reason.BUSY, Reason.WRONG_PHASE, Reason.EXPIRED, Reason.NO_WORD, Reason.REPLAYED}
)

_BADNESS = {
    quality: place for place, quality in enumerate((Quality.GOOD, Quality.PENDING, Quality.SUSPECT, Quality.BAD))
}

LEAST_TURN_SECONDS = 30.0
TURN_STEPS = 10  # a command stays valid for so many steps, where steps are slow


class Verdict(NamedTuple):
    """Commit or abort, and why."""

    commit: bool
    reason: Reason
    target_step: int | None = None
    text: str = ""


class Turn:
    """One command on its way through all ranks of a run."""

    def __init__(self, decision_id: str, decision: Decision, command: Command, ranks: Iterable[int]) -> None:
        self.decision_id = decision_id
        self.decision = decision
        self.command = command
        self.state = TurnState.PREPARING
        self.tries = 1
        self.waiting_for = set(ranks)
        self.answers: dict[int, Ack] = {}
        self.sent_at: float | None = None  # monotonic; when the prepare began, its commit to disk included

    def again(self, command: Command, ranks: Iterable[int]) -> None:
        """Another try, with a new command for the same decision."""
        self.command = command
        self.state = TurnState.PREPARING
        self.tries += 1
        self.waiting_for = set(ranks)
        self.answers = {}
        self.sent_at = None

    def answered(self, rank: int, ack: Ack) -> bool:
        """Take a rank's answer to prepare. True when it was the last one missing."""
        if rank not in self.waiting_for or rank in self.answers:
            return False
        self.answers[rank] = ack
        return self.waiting_for <= self.answers.keys()

    def verdict(self, margin_steps: int) -> Verdict:
        """What the word shall be, once every rank has answered."""
        for ack in self.answers.values():
            if ack.state != "prepared":
                return Verdict(False, ack.reason, text=ack.text)
        if self.command.action is not Action.ROLLBACK:
            return Verdict(True, self.decision.reason)
        target = choose_target(self.command, self.answers.values(), margin_steps)
        if target is None:
            return Verdict(False, Reason.NO_SNAPSHOT, text=_why_no_target(self.command, self.answers.values()))
        return Verdict(True, self.decision.reason, target)


def choose_target(command: Command, acks: Iterable[Ack], margin_steps: int) -> int | None:
    """The newest step that every rank can return to and that is clean; None if there is none.

    Clean is GOOD and older than the onset by the margin; where the onset is exact, PENDING and older than the onset
    will do. A person may ask for any step whose snapshot is not known to be BAD.
    """
    common = _common(acks)
    if command.target_step is not None:
        quality = common.get(command.target_step)
        return command.target_step if quality is not None and quality is not Quality.BAD else None
    will_do = {Quality.GOOD, Quality.PENDING} if command.pending_ok else {Quality.GOOD}
    margin = 0 if command.pending_ok else margin_steps
    before = math.inf if command.onset_step is None else command.onset_step - margin
    clean = [step for step, quality in common.items() if quality in will_do and step < before]
    return max(clean, default=None)


def apply_at(step: int, step_seconds: float, round_trip_seconds: float) -> int:
    """The step at whose end every rank can have answered and heard the word (design section 8)."""
    return step + math.ceil(2 * round_trip_seconds / max(step_seconds, 1e-6)) + 1


def valid_seconds(step_seconds: float) -> float:
    """How long a command may be carried out after it was made."""
    return max(LEAST_TURN_SECONDS, TURN_STEPS * step_seconds)


def _common(acks: Iterable[Ack]) -> dict[int, Quality]:
    """Step -> the worst quality any rank gives it, of the steps that all ranks have."""
    common: dict[int, Quality] | None = None
    for ack in acks:
        have = {step: quality for step, quality, _ in ack.candidates}
        if common is None:
            common = have
        else:
            both = common.keys() & have.keys()
            common = {step: max(common[step], have[step], key=_BADNESS.__getitem__) for step in both}
    return common or {}


def _why_no_target(command: Command, acks: Iterable[Ack]) -> str:
    held = ", ".join(f"{step} {quality}" for step, quality in sorted(_common(acks).items())) or "none"
    if command.target_step is not None:
        return f"step {command.target_step} is not among the snapshots that can be restored: {held}"
    return f"no clean snapshot before onset step {command.onset_step}; held: {held}"
