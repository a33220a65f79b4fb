"""Turn the observations of one rank into findings, incidents and decisions. Pure: live, tests and replay run it."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sentinel.config import Settings
from sentinel.records import Decision, Finding, Incident, Mark, Observation, Origin, Reflex, SnapshotNote, StepRecord
from sentinel.respond import incident as incidents
from sentinel.respond.incident import Case, Change, Incidents
from sentinel.respond.kinds import Family, row
from sentinel.respond.policy import MOST_TRIES, Situation, Standing, decide, onset_of, rollback_onset
from sentinel.respond.rewind import Learner, Rewind
from sentinel.vocabulary import Action, IncidentStatus, Outcome, Reason, Tier

MOST_REFLEXES_TOLD = 10  # per incident; each is an action of its own in the report
_QUIET_REASONS = (Reason.UNCONFIRMED, Reason.NOTICE_ONLY)

__all__ = ["Judge", "Ruling", "Situation"]


class Ruling(NamedTuple):
    """All that follows from one observation."""

    findings: tuple[tuple[Finding, str], ...] = ()  # those that opened, widened or acted, with the incident's id
    incidents: tuple[Incident, ...] = ()  # new or changed, latest version of each
    decisions: tuple[Decision, ...] = ()  # `none` when a case opens or its reason changes, not on every step
    marks: tuple[Mark, ...] = ()  # for the client's ring


NOTHING = Ruling()


class Observer(Learner, Protocol):
    """What the judge asks of a detector; `respond` and `detect` do not import each other."""

    def observe(self, seen: Observation) -> Finding | None: ...


class _Draft:
    """A ruling in the making."""

    def __init__(self) -> None:
        self.findings: list[tuple[Finding, str]] = []
        self.incidents: dict[str, Incident] = {}
        self.decisions: list[Decision] = []
        self.marks: list[Mark] = []

    def write(self, case: Case) -> None:
        self.incidents[case.incident.id] = case.incident
        case.reported_step = case.incident.last_step

    def ruling(self) -> Ruling:
        return Ruling(tuple(self.findings), tuple(self.incidents.values()), tuple(self.decisions), tuple(self.marks))


class Judge:
    """One per rank of an attempt. Called in the order of arrival; not thread-safe."""

    def __init__(
        self, origin: Origin, detectors: Sequence[Observer], settings: Settings, new_id: Callable[[], str]
    ) -> None:
        self._detectors = detectors
        self._settings = settings
        self._cases = Incidents(origin, new_id)
        self._rewind = Rewind(detectors)
        self._generation = 0
        self._clock = 0  # step records seen; grows over generations, which step numbers do not
        self._step = 0
        self._position: int | None = None
        self._applied: deque[tuple[int, Family]] = deque(maxlen=256)  # (clock, family) of applied actions
        self._past: deque[Case] = deque(maxlen=16)  # closed cases that were acted on

    def observe(self, seen: Observation, situation: Situation) -> Ruling:
        """What follows from a step record, a reflex or a snapshot note. Older generations are history."""
        if isinstance(seen, SnapshotNote):
            self._rewind.note(seen)
        if seen.generation < self._generation:
            return NOTHING
        self._generation = seen.generation
        draft = _Draft()
        if isinstance(seen, StepRecord):
            self._clock += 1
            self._step = seen.step
            self._position = seen.data_position
        findings = [finding for each in self._detectors if (finding := each.observe(seen)) is not None]
        for finding in findings:
            self._file(finding, seen, situation, draft)
        if isinstance(seen, StepRecord):
            self._rewind.handled(seen.step, seen.data_position)
            self._settle(seen, {row(finding.kind).family for finding in findings}, situation, draft)
        return draft.ruling()

    def outcome(
        self,
        decision: Decision,
        outcome: Outcome,
        reason: Reason,
        *,
        generation: int,
        applied_step: int,
        target_step: int | None,
        situation: Situation,
    ) -> Ruling:
        """What became of a decision. An applied rollback takes the detectors back to its target and starts a
        generation; anything else leaves the case to be decided again, a bounded number of times.
        """
        del applied_step, situation  # part of the protocol: a later policy may weigh them
        case = self._cases.by_id(decision.incident_id)
        if case is not None:
            case.pending = False
        if outcome is not Outcome.APPLIED:
            if case is not None and outcome is not Outcome.PENDING:
                case.tries = MOST_TRIES if reason is Reason.NO_SNAPSHOT else case.tries + 1
            return NOTHING
        self._generation = max(generation, self._generation)
        if decision.action is Action.ROLLBACK and target_step is not None:
            self._rewind.restore(target_step)
            self._step = target_step
            for each in self._cases.open:
                each.quiet_steps = each.proven_steps = 0
        if case is None:
            return NOTHING
        self._note_applied(case, decision, target_step)
        return Ruling(incidents=(case.incident,))

    def end(self, situation: Situation) -> Ruling:
        """The run ended: what is open becomes resolved, if it went quiet for a known reason, or gave_up."""
        draft = _Draft()
        for case in tuple(self._cases.open):
            explained = case.acted or case.reflexes or case.told is Reason.HARMLESS or case.incident.tier is Tier.T1
            if case.quiet_steps and explained:
                self._cases.close(case, IncidentStatus.RESOLVED, situation.time, incidents.cause_of_end(case))
            else:
                self._cases.close(case, IncidentStatus.GAVE_UP, situation.time, incidents.ENDED)
            draft.write(case)
        return draft.ruling()

    def _file(self, finding: Finding, seen: Observation, situation: Situation, draft: _Draft) -> None:
        change = self._cases.take(finding, seen.generation, situation.time)
        case = change.case
        case.quiet_steps = case.proven_steps = 0
        if change.opened:
            self._open(case, finding)
        before = len(draft.decisions)
        self._decide(finding, seen, case, situation, draft)
        acts = len(draft.decisions) > before
        if change.opened or change.grew or acts:
            draft.findings.append((finding, case.incident.id))
            draft.write(case)
        elif finding.step - case.reported_step >= incidents.REPORT_EVERY_STEPS:
            draft.write(case)
        self._mark(change, finding, draft)

    def _open(self, case: Case, finding: Finding) -> None:
        case.first_position = self._position
        reach = self._settings.rollback.margin_steps + 2 * self._settings.detect.resolve_steps
        for past in reversed(self._past):
            if past.family is case.family and finding.onset_step <= past.incident.onset_step + reach:
                case.rung, case.targets, case.first_position = past.rung, [*past.targets], past.first_position
                incidents.add_evidence(case, recurrence_of=past.incident.id)
                return

    def _decide(self, finding: Finding, seen: Observation, case: Case, situation: Situation, draft: _Draft) -> None:
        if isinstance(seen, Reflex):
            case.reflexes += 1
            case.reflex_step = seen.step
            if case.reflexes <= MOST_REFLEXES_TOLD:
                draft.decisions.append(_reflex(seen, case))
        beside = finding.tier is Tier.T1 and case.incident.tier is not Tier.T1  # a notice within something surer
        if case.pending or beside:
            return
        decisions = decide(case, situation, self._standing(case, finding), self._settings)
        for decision in decisions:
            if decision.action is not Action.NONE:
                case.pending = True
                case.paused = case.paused or decision.action is Action.PAUSE
                case.told = None
        if case.pending:
            draft.decisions += decisions
            return
        (decision,) = decisions
        explained = case.reflex_step == seen.step and decision.reason in _QUIET_REASONS
        if decision.reason is not case.told and not explained:
            case.told = decision.reason
            draft.decisions.append(decision)

    def _standing(self, case: Case, finding: Finding) -> Standing:
        respond = self._settings.respond
        of_kind = [clock for clock, family in self._applied if family is case.family]
        onset = rollback_onset(case, finding, self._settings)
        exact = row(case.incident.kind).exact_onset
        # A loop that cannot skip goes on with the next data: waiting longer each time leads it out of a bad window.
        cooldown = respond.cooldown_steps * 2 ** max(0, case.rung - 1)
        return Standing(
            step=finding.step,
            finding=finding,
            cooling=bool(of_kind) and self._clock - of_kind[-1] < cooldown,
            spent=sum(self._clock - clock < respond.window_steps for clock in of_kind),
            position=self._position,
            target_position=self._rewind.position_before(onset - self._margin(exact=exact), pending_ok=exact),
        )

    def _mark(self, change: Change, finding: Finding, draft: _Draft) -> None:
        case = change.case
        exact = row(finding.kind).exact_onset
        kept_out = exact and (finding.tier is Tier.T1 or not _touches_state(finding))
        if case.marked or kept_out:
            return
        case.marked = True
        since = max(0, onset_of(case, finding) - self._margin(exact=exact))
        draft.marks.append(Mark(self._generation, since))

    def _margin(self, *, exact: bool) -> int:
        return 0 if exact else self._settings.rollback.margin_steps

    def _settle(self, seen: StepRecord, held: set[Family], situation: Situation, draft: _Draft) -> None:
        """Count the healthy step for every case it concerns, and close those that have enough of them."""
        for case in tuple(self._cases.open):
            if case.family in held or case.pending or seen.step == case.reflex_step:
                continue
            case.quiet_steps += 1
            margin = self._margin(exact=row(case.incident.kind).exact_onset)
            # Steps replayed from before the trouble prove nothing about it.
            case.proven_steps += not case.acted or seen.step >= case.incident.onset_step - margin
            if case.proven_steps < self._settings.detect.resolve_steps:
                continue
            self._cases.close(case, IncidentStatus.RESOLVED, situation.time, incidents.cause_of_end(case))
            draft.write(case)
            if case.acted:
                self._past.append(case)
            elif case.marked:
                draft.marks.append(Mark(self._generation, max(0, case.incident.onset_step - margin), clear=True))

    def _note_applied(self, case: Case, decision: Decision, target_step: int | None) -> None:
        case.tries = 0
        case.told = None
        if decision.action is Action.PAUSE:
            return
        case.acted = True
        case.marked = False  # the ring of the new generation has heard nothing yet
        case.rung += 1
        self._applied.append((self._clock, case.family))
        if target_step is not None:
            case.targets.append(target_step)


def _touches_state(finding: Finding) -> bool:
    """Whether weights or optimizer state may be bad after a finding with an exact onset."""
    return bool(finding.evidence.get("reached_weights", True) or finding.evidence.get("lasting"))


def _reflex(seen: Reflex, case: Case) -> Decision:
    skipped = seen.action is not Action.NONE
    return Decision(
        action=seen.action,
        reason=Reason.REFLEX if skipped else Reason.OBSERVE_MODE,
        text=f"{seen.kind} at step {seen.step}: {'the update was left out' if skipped else 'only observed'}",
        incident_id=case.incident.id,
        step=seen.step,
        onset_step=seen.step,
    )
