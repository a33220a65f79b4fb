"""What an alert says, whichever channel it goes to."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from sentinel.records import Incident
from sentinel.vocabulary import AlertChannel, AlertCondition, Kind, Severity


class Face(NamedTuple):
    """How an incident looked when it was announced: what receivers know it by."""

    kind: Kind
    severity: Severity
    ranks: tuple[int, ...]


class Alert(msgspec.Struct, frozen=True):
    """One message about one incident for one channel. The same on every attempt, as its id promises."""

    id: str  # stable: receivers drop what they have seen
    condition: AlertCondition
    run_id: str
    incident_id: str
    kind: Kind
    severity: Severity
    tier: str
    ranks: tuple[int, ...]
    first_step: int
    onset_step: int
    last_step: int
    status: str
    summary: str
    cause: str
    evidence: dict[str, Any]  # finite numbers only
    opened_at: float  # unix seconds
    resolved_at: float | None
    earlier: tuple[Face, ...] = ()  # as it was announced before, where that differs

    @property
    def face(self) -> Face:
        return Face(self.kind, self.severity, self.ranks)


def of_incident(
    incident: Incident,
    condition: AlertCondition,
    channel: AlertChannel,
    *,
    evidence: dict[str, Any],
    earlier: tuple[Face, ...] = (),
) -> Alert:
    """The alert about an incident as it is now. `evidence`: the incident's, without non-finite numbers."""
    face = Face(incident.kind, incident.severity, incident.ranks)
    return Alert(
        id=alert_id(incident, condition, channel),
        condition=condition,
        run_id=incident.run_id,
        incident_id=incident.id,
        kind=incident.kind,
        severity=incident.severity,
        tier=incident.tier,
        ranks=incident.ranks,
        first_step=incident.first_step,
        onset_step=incident.onset_step,
        last_step=incident.last_step,
        status=incident.status,
        summary=incident.summary,
        cause=incident.cause,
        evidence=evidence,
        opened_at=incident.opened_at,
        resolved_at=incident.resolved_at,
        earlier=tuple(known for known in earlier if known != face),
    )


def alert_id(incident: Incident, condition: AlertCondition, channel: AlertChannel) -> str:
    """One per incident, condition and channel; a severity that rises is news of its own.

    No full stop in it: Standard Webhooks joins what it signs with them.
    """
    stage = f"firing-{incident.severity}" if condition is AlertCondition.FIRING else "resolved"
    return f"{incident.id}-{stage}-{channel}".replace(".", "_")


def encode(alert: Alert) -> str:
    """Strict JSON for the outbox."""
    return msgspec.json.encode(alert).decode()


def decode(body: str) -> Alert:
    """What `encode` wrote. Raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(body, type=Alert)


def rfc3339(time: float) -> str:
    """Unix seconds in UTC, to the millisecond."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


def shown_ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(str(rank) for rank in ranks)
