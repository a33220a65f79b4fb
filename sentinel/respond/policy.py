"""Decide what to do about an incident.

A ladder per kind: each recurrence takes the next rung, and no two rungs are the same plan on the same data from the
same snapshot. For rollbacks that means: first the bad window is left out; then as much again ahead of where the loop
is, doubled; then from further back and with half the learning rate, where that is allowed; then a person is asked.
"""

from typing import NamedTuple

import msgspec

from sentinel.config import Settings
from sentinel.records import Decision, Finding
from sentinel.respond.incident import Case
from sentinel.respond.kinds import row
from sentinel.vocabulary import Action, Kind, Mode, Reason, Tier

MOST_TRIES = 3  # decisions about one rung that may be refused, fail or be aborted
LEAST_AHEAD_BATCHES = 10
LR_FACTOR = 0.5


class Situation(NamedTuple):
    """What the daemon knows when it asks."""

    mode: Mode
    world_size: int
    ranks_connected: int
    can: frozenset[str]  # what the loop offers, see RunStart.can
    in_flight: bool  # another command of this run has not ended
    record_kept: bool  # False: the database cannot be written
    time: float  # unix seconds


class Standing(NamedTuple):
    """What the judge knows when it asks: where the loop is and what was done lately."""

    step: int
    finding: Finding  # the one that asks
    cooling: bool  # the last action of this kind is too recent: respond.cooldown_steps, doubled with every rung
    spent: int  # actions of this kind within respond.window_steps
    position: int | None  # batches handed out so far
    target_position: int | None  # the same at the snapshot that a rollback would return to


def decide(case: Case, situation: Situation, standing: Standing, settings: Settings) -> tuple[Decision, ...]:
    """The decisions about an open case, now: `none` carries its reason.

    A `none` beside an action says what was left out of that action and why.
    """
    reason = _why_not(case, situation, standing)
    if reason is not None:
        return (nothing(case, reason, standing.step),)
    ladder = row(case.incident.kind).ladder
    spent = standing.spent >= settings.respond.budget or case.tries >= MOST_TRIES
    action = Action.PAUSE if spent else ladder[min(case.rung, len(ladder) - 1)]
    if action is Action.PAUSE:
        return (_pause(case, situation, standing, settings, Reason.BUDGET_SPENT if spent else Reason.RECURRED),)
    blocked = _blocked(action, situation, settings)
    if blocked is not None:
        return (nothing(case, blocked, standing.step, action),)
    return _rollback(case, situation, standing, settings)


def onset_of(case: Case, finding: Finding) -> int:
    """The first bad step of what the finding reports, in the numbers of the live generation."""
    same = finding.kind is case.incident.kind or case.acted
    return finding.onset_step if same else min(finding.onset_step, case.incident.onset_step)


def rollback_onset(case: Case, finding: Finding, settings: Settings) -> int:
    """What the target of a rollback must be older than. A plan whose data is the same needs an older snapshot.

    A loop that cannot skip data meets other data all the same: it goes on with what comes next.
    """
    onset = onset_of(case, finding)
    same_data = _data(case, settings) == "replay"
    return min(onset, case.targets[-1]) if case.targets and (case.rung >= 2 or same_data) else onset


def nothing(case: Case, reason: Reason, step: int, wanted: Action | None = None) -> Decision:
    """The decision to do nothing, with its reason in words."""
    text = _WORDS.get(reason, str(reason).replace("_", " "))
    return Decision(
        action=Action.NONE,
        reason=reason,
        text=f"{case.incident.kind}: nothing done, {text}{f' ({wanted} was due)' if wanted else ''}",
        incident_id=case.incident.id,
        step=step,
        onset_step=case.incident.onset_step,
    )


def _why_not(case: Case, situation: Situation, standing: Standing) -> Reason | None:
    return _of_finding(case, standing.finding) or _of_situation(case, situation, standing)


def _of_finding(case: Case, finding: Finding) -> Reason | None:
    if not row(case.incident.kind).ladder:
        return Reason.NO_ACTION_FOR_KIND
    if finding.tier is Tier.T1:
        return Reason.NOTICE_ONLY
    if finding.kind is not Kind.NONFINITE_LOSS:
        return None
    if finding.evidence.get("gradient") == "finite":
        return Reason.HARMLESS
    certain = finding.evidence.get("lasting") or finding.evidence.get("reached_weights")
    return None if certain else Reason.UNCONFIRMED


def _of_situation(case: Case, situation: Situation, standing: Standing) -> Reason | None:
    hindrances = (
        (situation.mode is not Mode.PROTECT, Reason.OBSERVE_MODE),
        (situation.ranks_connected < situation.world_size, Reason.RANKS_MISSING),
        (situation.world_size > 1, Reason.SEVERAL_RANKS),
        (not situation.record_kept, Reason.NO_RECORD),
        (situation.in_flight, Reason.IN_FLIGHT),
        (case.paused, Reason.BUDGET_SPENT),
        (standing.cooling, Reason.COOLDOWN),
    )
    return next((reason for holds, reason in hindrances if holds), None)


def _blocked(action: Action, situation: Situation, settings: Settings) -> Reason | None:
    enabled = action is not Action.ROLLBACK or settings.rollback.enabled
    if not settings.respond.allows(action) or not enabled:
        return Reason.NOT_ALLOWED
    return None if action in situation.can else Reason.LOOP_CANNOT


def _pause(case: Case, situation: Situation, standing: Standing, settings: Settings, reason: Reason) -> Decision:
    blocked = _blocked(Action.PAUSE, situation, settings)
    if blocked is not None:
        return nothing(case, blocked, standing.step, Action.PAUSE)
    limit = settings.pause.limit_seconds
    return Decision(
        action=Action.PAUSE,
        reason=reason,
        text=f"{case.incident.kind} goes on after {case.rung} actions: wait up to {limit:.0f} s for a person",
        incident_id=case.incident.id,
        step=standing.step,
        onset_step=case.incident.onset_step,
        limit_seconds=limit,
    )


def _rollback(case: Case, situation: Situation, standing: Standing, settings: Settings) -> tuple[Decision, ...]:
    incident, this = case.incident, row(case.incident.kind)
    data = _data(case, settings)
    skip = _ahead(case, standing) if case.rung and data == "skip" else None
    onset = rollback_onset(case, standing.finding, settings)
    decision = Decision(
        action=Action.ROLLBACK,
        reason=Reason.RECURRED if case.rung else Reason.CONFIRMED,
        text=_plan(incident.kind, onset, data, skip),
        incident_id=incident.id,
        step=standing.step,
        onset_step=onset,
        pending_ok=this.exact_onset,
        data=data,
        skip_batches=skip,
    )
    if case.rung < 2:
        return (decision,)
    blocked = _blocked(Action.SCALE_LR, situation, settings)
    if blocked is not None:
        return (nothing(case, blocked, standing.step, Action.SCALE_LR), decision)
    slower = f"{decision.text}; learning rate times {LR_FACTOR}"
    return (msgspec.structs.replace(decision, factor=LR_FACTOR, text=slower),)


def _data(case: Case, settings: Settings) -> str:
    if settings.rollback.data != "auto":
        return settings.rollback.data
    kinds = (case.incident.kind, *case.incident.evidence.get("also", ()))
    first = "replay" if Kind.NONFINITE_STATE in kinds else row(case.incident.kind).data
    return "skip" if case.rung else first


def _ahead(case: Case, standing: Standing) -> int | None:
    """Batches to leave out after the target: up to the live position, and the bad span so far doubled ahead of it."""
    if standing.position is None or standing.target_position is None:
        return None
    first = standing.position if case.first_position is None else case.first_position
    span = max(standing.position - first, LEAST_AHEAD_BATCHES)
    return max(standing.position - standing.target_position, 0) + span * int(2**case.rung)


def _plan(kind: Kind, onset: int, data: str, skip: int | None) -> str:
    what = "replay the data" if data == "replay" else f"leave out {skip} batches" if skip else "skip the bad window"
    return f"{kind}: go back to before step {onset} and {what}"


_WORDS = {
    Reason.NOTICE_ONLY: "a notice never acts",
    Reason.HARMLESS: "gradients and weights are finite",
    Reason.UNCONFIRMED: "it has not lasted yet",
    Reason.OBSERVE_MODE: "the run is only observed",
    Reason.NOT_ALLOWED: "respond.allow or rollback.enabled forbids it",
    Reason.COOLDOWN: "the last action is too recent",
    Reason.BUDGET_SPENT: "its actions are used up",
    Reason.RANKS_MISSING: "not every rank of the world is connected",
    Reason.SEVERAL_RANKS: "turns on more than one rank are not available in this version",
    Reason.IN_FLIGHT: "another command has not ended",
    Reason.NO_RECORD: "it could not be written down first",
    Reason.LOOP_CANNOT: "the loop does not offer what it needs",
    Reason.NO_ACTION_FOR_KIND: "no action is known for this kind",
}
