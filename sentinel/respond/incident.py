"""Keep one incident per trouble, however many steps it lasts and findings it gathers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sentinel.records import Finding, Incident, Origin
from sentinel.respond.kinds import Family, row
from sentinel.vocabulary import Action, IncidentStatus, Kind, Reason, Severity, Tier

REPORT_EVERY_STEPS = 10  # a lasting incident is written again at most this often for its last_step alone
_SEVERITIES = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
_LASTING = {"reached_weights", "consecutive", "lasting"}  # once true, true of the incident
_SURENESS = (Tier.T1, Tier.T3, Tier.T2, Tier.T0)


@dataclass(slots=True)
class Case:
    """An open incident and what the policy has to remember about it."""

    incident: Incident
    family: Family
    rung: int = 0  # of the kind's ladder: actions of ours that were applied
    tries: int = 0  # decisions since the last applied action that came to nothing
    pending: bool = False  # a decision of ours is under way
    acted: bool = False  # at least one action was applied
    paused: bool = False  # a pause was applied or asked for: a person's turn now
    reflexes: int = 0
    told: Reason | None = None  # of the latest decision `none`, so that it is not repeated
    marked: bool = False  # the client's ring knows
    quiet_steps: int = 0  # steps without a finding
    proven_steps: int = 0  # those of them at or past the place where the trouble was
    reflex_step: int = -1  # of the latest reflex
    reported_step: int = 0  # last_step as it was last written
    first_position: int | None = None  # batches handed out when it opened
    targets: list[int] = field(default_factory=list)  # of the applied rollbacks


@dataclass(frozen=True, slots=True)
class Change:
    """What a finding did to the cases."""

    case: Case
    opened: bool
    grew: bool  # another kind, a surer tier or a higher severity


class Incidents:
    """The open cases of one rank. Fingerprint: the family of the kind."""

    def __init__(self, origin: Origin, new_id: Callable[[], str]) -> None:
        self._origin = origin
        self._new_id = new_id
        self.open: list[Case] = []

    def take(self, finding: Finding, generation: int, time: float) -> Change:
        """File a finding: with the open case of its family, else in a new one."""
        family = row(finding.kind).family
        for case in self.open:
            if case.family is family and (family is not Family.ALONE or case.incident.kind is finding.kind):
                return Change(case, opened=False, grew=_merge(case, finding))
        case = Case(self._fresh(finding, generation, time), family, reported_step=finding.step)
        self.open.append(case)
        return Change(case, opened=True, grew=True)

    def close(self, case: Case, status: IncidentStatus, time: float, cause: str) -> Incident:
        """The last version of an incident; its case is no longer open."""
        self.open.remove(case)
        case.incident = msgspec.structs.replace(case.incident, status=status, resolved_at=time, cause=cause)
        return case.incident

    def by_id(self, incident_id: str) -> Case | None:
        return next((case for case in self.open if case.incident.id == incident_id), None)

    def _fresh(self, finding: Finding, generation: int, time: float) -> Incident:
        return Incident(
            id=self._new_id(),
            run_id=self._origin.run_id,
            attempt=self._origin.attempt,
            generation=generation,
            kind=finding.kind,
            severity=finding.severity,
            tier=finding.tier,
            ranks=finding.ranks or (self._origin.rank,),
            first_step=finding.step,
            onset_step=finding.onset_step,
            last_step=finding.step,
            status=IncidentStatus.OPEN,
            summary=finding.summary,
            cause="",
            evidence=_evidence(finding),
            opened_at=time,
        )


def add_evidence(case: Case, **more: Any) -> None:
    case.incident = msgspec.structs.replace(case.incident, evidence={**case.incident.evidence, **more})


def _merge(case: Case, finding: Finding) -> bool:
    incident = case.incident
    kind, also = incident.kind, list(incident.evidence.get("also", []))
    same_step = finding.step == incident.first_step
    # A NaN loss makes the NaN gradient of its step; the loss's record only arrives later.
    upgraded = same_step and kind is Kind.NONFINITE_GRADIENT and finding.kind is Kind.NONFINITE_LOSS
    if upgraded:
        kind, other = finding.kind, incident.kind
    else:
        other = finding.kind
    if other is not kind and other not in also:
        also.append(other)
    severity = max(incident.severity, finding.severity, key=_SEVERITIES.index)
    tier = max(incident.tier, finding.tier, key=_SURENESS.index)
    grew = upgraded or severity is not incident.severity or tier is not incident.tier
    grew = grew or also != incident.evidence.get("also", [])
    evidence = {**incident.evidence, **(_evidence(finding) if grew and finding.kind is kind else {})}
    for key in _LASTING & incident.evidence.keys() & finding.evidence.keys():
        evidence[key] = max(incident.evidence[key], finding.evidence[key])
    if also:
        evidence["also"] = also
    case.incident = msgspec.structs.replace(
        incident,
        kind=kind,
        severity=severity,
        tier=tier,
        last_step=max(incident.last_step, finding.step),  # after a rollback step numbers come again
        summary=finding.summary if grew and finding.kind is kind else incident.summary,
        evidence=evidence,
    )
    return grew


def _evidence(finding: Finding) -> dict[str, Any]:
    values = {"value": finding.value, "expected": finding.expected}
    return {**{key: value for key, value in values.items() if value is not None}, **finding.evidence}


# What a case means in words, for `Incident.cause`.
HEALED = "it healed by itself"
ENDED = "the run ended before it was over"


SKIPPED = "the reflex kept it from the weights"
HARMLESS = "gradients and weights stayed finite"


def cause_of_end(case: Case) -> str:
    """Why a case that went quiet is over."""
    if case.acted:
        return f"healthy again after {Action.ROLLBACK}" + (f", {case.rung} times" if case.rung > 1 else "")
    if case.reflexes:
        return SKIPPED
    return HARMLESS if case.told is Reason.HARMLESS else HEALED
