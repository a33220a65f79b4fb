"""Turn what happens to an incident into alerts, in the transaction that writes the incident."""

import time
from collections.abc import Callable
from typing import Any

import structlog
from sqlalchemy import Connection

from sentinel.alert_settings import NotifySettings
from sentinel.notify import alert as alerts
from sentinel.notify.routes import channels_for
from sentinel.records import Incident
from sentinel.store import outbox
from sentinel.store.strict_json import strict
from sentinel.vocabulary import AlertChannel, AlertCondition, IncidentStatus

_APART_SECONDS = 1e-5  # alerts of one incident keep their order, whatever the clock does
_log = structlog.get_logger()


class Announcer:
    """Called by the store for every version of every incident, in the writer's thread. What is filed stays filed."""

    def __init__(
        self, settings: NotifySettings, channels: frozenset[AlertChannel], on_filed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._channels = channels
        self._on_filed = on_filed

    def announce(self, connection: Connection, incident: Incident) -> None:
        """File what is new. Raises only what the database raises: the whole transaction is then tried again."""
        reached = channels_for(self._settings, self._channels, incident)
        over = incident.status is not IncidentStatus.OPEN
        if not (reached or (over and self._channels)):
            return
        known = outbox.filed(connection, incident.run_id, incident.id)
        for channel in sorted(self._channels):
            of_channel = [row for row in known if row["channel"] == channel]
            if channel in reached:
                self._file(connection, incident, AlertCondition.FIRING, channel, of_channel)
            if over and (of_channel or channel in reached):
                self._file(connection, incident, AlertCondition.RESOLVED, channel, of_channel)

    def _file(
        self,
        connection: Connection,
        incident: Incident,
        condition: AlertCondition,
        channel: AlertChannel,
        known: list[dict[str, Any]],
    ) -> None:
        alert_id = alerts.alert_id(incident, condition, channel)
        if any(row["id"] == alert_id for row in known):
            return
        try:
            earlier = tuple(alerts.decode(row["body"]).face for row in known)
            alert = alerts.of_incident(
                incident, condition, channel, evidence=strict(incident.evidence), earlier=earlier
            )
            body = alerts.encode(alert)
        except Exception:  # noqa: BLE001 - an alert that cannot be made must not cost the record of the incident
            _log.exception("an alert could not be made", incident=incident.id, channel=channel)
            return
        moment = max(time.time(), *(row["time"] + _APART_SECONDS for row in known), 0.0)
        outbox.file(
            connection,
            alert_id=alert_id,
            run_id=incident.run_id,
            incident_id=incident.id,
            channel=channel,
            body=body,
            time=moment,
        )
        known.append({"id": alert_id, "channel": channel.value, "body": body, "time": moment})
        self._on_filed()
