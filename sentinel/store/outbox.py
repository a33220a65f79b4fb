"""Keep alerts from the moment they are due until they were delivered or given up.

The functions work on the writer's connection, inside its transaction (`Store.run`), but for `listed`, which reads.
Every daemon that writes to a database shares its outbox; `claim` lets one of them have an alert.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, select, update

from sentinel.store import engine as engines
from sentinel.store import schema
from sentinel.store.history import History
from sentinel.store.tables import alerts
from sentinel.store.upsert import upsert
from sentinel.vocabulary import AlertChannel, AlertState

_DUE = alerts.c.state == AlertState.DUE.value


class Due(NamedTuple):
    """An alert that waits; those of one incident are sent in order of `time`."""

    id: str
    incident_id: str
    tries: int
    due_at: float


class Claimed(NamedTuple):
    """An alert that is ours to send now."""

    body: str
    delivered_before: bool  # another alert of this incident has reached the channel


def file(
    connection: Connection,
    *,
    alert_id: str,
    run_id: str,
    incident_id: str,
    channel: AlertChannel,
    body: str,
    time: float,
) -> None:
    """Have an alert sent. One that is there already stays as it is."""
    row = {
        "id": alert_id,
        "run_id": run_id,
        "incident_id": incident_id,
        "channel": channel.value,
        "state": AlertState.DUE.value,
        "body": body,
        "reason": None,
        "tries": 0,
        "time": time,
        "due_at": time,
    }
    upsert(connection, alerts, [row], keep=True)


def filed(connection: Connection, run_id: str, incident_id: str) -> list[dict[str, Any]]:
    """All alerts of an incident, oldest first."""
    question = select(alerts).where(alerts.c.run_id == run_id, alerts.c.incident_id == incident_id)
    return [dict(row) for row in connection.execute(question.order_by(alerts.c.time)).mappings()]


def due(connection: Connection, channel: AlertChannel) -> list[Due]:
    """What waits for a channel, oldest first."""
    question = (
        select(alerts.c.id, alerts.c.incident_id, alerts.c.tries, alerts.c.due_at)
        .where(_DUE, alerts.c.channel == channel.value)
        .order_by(alerts.c.time, alerts.c.id)
    )
    return [Due(*row) for row in connection.execute(question)]


def hurry(connection: Connection, now: float) -> None:
    """Nothing waits for its next try any longer: an earlier daemon may have died in the middle of one."""
    connection.execute(update(alerts).where(_DUE, alerts.c.due_at > now).values(due_at=now))


def give_up_older(connection: Connection, channel: AlertChannel, before: float, reason: str) -> int:
    """Alerts made before this time that were tried in vain become failed. How many they were."""
    question = update(alerts).where(
        _DUE, alerts.c.channel == channel.value, alerts.c.time < before, alerts.c.tries > 0
    )
    return connection.execute(question.values(state=AlertState.FAILED.value, reason=reason)).rowcount


def claim(connection: Connection, known: Due, next_at: float) -> Claimed | None:
    """Count a try before it is made, and say when the next is due should we die. None if another was faster."""
    ours = (
        update(alerts)
        .where(_DUE, alerts.c.id == known.id, alerts.c.tries == known.tries)
        .values(tries=known.tries + 1, due_at=next_at)
    )
    if connection.execute(ours).rowcount != 1:
        return None
    row = connection.execute(select(alerts).where(alerts.c.id == known.id)).mappings().one()
    before = select(alerts.c.id).where(
        alerts.c.run_id == row["run_id"],
        alerts.c.incident_id == known.incident_id,
        alerts.c.channel == row["channel"],
        alerts.c.state == AlertState.SENT.value,
    )
    return Claimed(row["body"], connection.execute(before).first() is not None)


def settle(connection: Connection, alert_id: str, state: AlertState, reason: str, due_at: float | None) -> None:
    """What became of a try. `due_at`: of the next one, where there is to be one."""
    values: dict[str, Any] = {"state": state.value, "reason": reason}
    if due_at is not None:
        values["due_at"] = due_at
    connection.execute(update(alerts).where(alerts.c.id == alert_id).values(**values))


def listed(url: str, run: str | None) -> Sequence[dict[str, Any]]:
    """The outbox, oldest first; `run`: only of this one. Raises NoSuchRunError."""
    question = select(alerts).order_by(alerts.c.time, alerts.c.id)
    with History(url) as history:
        if run is not None:
            question = question.where(alerts.c.run_id == history.resolve(run))
    engine = engines.reader(url)
    try:
        with engines.plain_errors(url), engine.connect() as connection, connection.begin():
            schema.check_readable(connection, url)
            return [dict(row) for row in connection.execute(question).mappings()]
    finally:
        engine.dispose()
