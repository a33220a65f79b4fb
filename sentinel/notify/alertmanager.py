"""Send an alert to a Prometheus Alertmanager, by POST /api/v2/alerts.

Alertmanager knows an alert by its labels, and ends one that it does not hear of again after its `resolve_timeout`.
sentinel sends each change once, so a firing alert gets an end far away, and the end of the incident moves it to the
past. Where the labels changed on the way (the severity rose), what was announced before ends with the change.
"""

from typing import Any

from sentinel.notify.alert import Alert, Face, rfc3339, shown_ranks
from sentinel.notify.channel import Request, json_body
from sentinel.vocabulary import AlertChannel, AlertCondition

OPEN_SECONDS = 7 * 86400.0  # how long Alertmanager keeps an incident whose end it never hears of


class Alertmanager:
    """Channel `alertmanager`. `url` is the server's root."""

    name = AlertChannel.ALERTMANAGER

    def __init__(self, url: str, token: str = "") -> None:
        self._url = f"{url.rstrip('/')}/api/v2/alerts"
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    def request(self, alert: Alert, now: float) -> Request:
        return Request(self._url, self._headers, json_body(_entries(alert, now)))


def _entries(alert: Alert, now: float) -> list[dict[str, Any]]:
    ended = [_entry(alert, face, now if alert.resolved_at is None else alert.resolved_at) for face in alert.earlier]
    if alert.condition is AlertCondition.FIRING:
        return [*ended, _entry(alert, alert.face, now + OPEN_SECONDS)]
    return [*ended, _entry(alert, alert.face, now if alert.resolved_at is None else alert.resolved_at)]


def _entry(alert: Alert, face: Face, ends_at: float) -> dict[str, Any]:
    labels = {
        "alertname": face.kind,
        "run_id": alert.run_id,
        "severity": face.severity,
        "rank": shown_ranks(face.ranks),
        "incident_id": alert.incident_id,  # two incidents of one kind never end each other
    }
    annotations = {
        "summary": alert.summary,
        "cause": alert.cause,
        "steps": f"{alert.first_step} to {alert.last_step}, onset {alert.onset_step}",
    }
    return {
        "labels": {name: str(text) for name, text in labels.items() if text},
        "annotations": {name: text for name, text in annotations.items() if text},
        "startsAt": rfc3339(min(alert.opened_at, ends_at)),  # a clock may have been set back meanwhile
        "endsAt": rfc3339(ends_at),
    }
