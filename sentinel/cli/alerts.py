"""`sentinel alerts`: look at the alerts of this home, or send one to see whether it arrives."""

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import console, print_json
from sentinel.errors import MisuseError, NoSuchRunError
from sentinel.vocabulary import AlertChannel, AlertCondition, AlertOutcome, Kind, Severity, Tier

if TYPE_CHECKING:
    from sentinel.alert_settings import NotifySettings
    from sentinel.notify.alert import Alert
    from sentinel.notify.channel import Channel, Delivery


class Verb(StrEnum):
    """What `sentinel alerts` can do."""

    LIST = "list"
    TEST = "test"


VerbArgument = Annotated[
    Verb, typer.Argument(help="list: what is due, sent or given up; test: send one alert and say how it went.")
]
What = Annotated[
    str | None, typer.Argument(help="For list: a run (latest, id, prefix or name). For test: the channel.")
]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="A sentinel.toml; else SENTINEL_SETTINGS, else defaults.")
]


def command(
    verb: VerbArgument,
    what: What = None,
    settings: SettingsFile = None,
    as_json: AsJson = False,
    home: Home = None,
) -> None:
    """List alerts with what became of them, or test a channel."""
    if verb is Verb.LIST:
        _list(_outbox(home, what), as_json=as_json)
        return
    from sentinel.daemon.settings import load

    _test(load(settings, os.environ).notify, what, as_json=as_json)


# ---------------------------------------------------------------- list


def _outbox(home: Path | None, run: str | None) -> list[dict[str, Any]]:
    from sentinel.notify.alert import decode, rfc3339
    from sentinel.store.outbox import listed

    try:
        rows = listed(database_url(places_of(home)), run)
    except NoSuchRunError:
        if run is not None:
            raise
        return []
    found = []
    for row in rows:
        alert = decode(row["body"])
        found.append(
            {
                **{name: row[name] for name in ("id", "run_id", "incident_id", "channel")},
                "condition": alert.condition,
                "kind": alert.kind,
                "severity": alert.severity,
                **{name: row[name] for name in ("state", "reason", "tries")},
                "time": rfc3339(row["time"]),
                "due_at": rfc3339(row["due_at"]) if row["state"] == "due" else None,
            }
        )
    return found


def _list(found: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    if not found:
        out.print("No alerts.")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    names = ("run_id", "kind", "severity", "condition", "channel", "state", "tries", "reason")
    for name in names:
        widest = max(len(row["kind"]) for row in found) if name == "kind" else None  # a closed word, never cut
        table.add_column(name.removesuffix("_id"), justify="right" if name == "tries" else "left", min_width=widest)
    for row in found:
        table.add_row(*(Text(str("-" if row[name] is None else row[name])) for name in names))
    out.print(table)


# ---------------------------------------------------------------- test


def _test(settings: "NotifySettings", name: str | None, *, as_json: bool) -> None:
    channel = _channel(settings, name)
    alert = _example()
    began = time.monotonic()
    delivery = asyncio.run(_send(channel, alert, settings.attempt_seconds))
    ok = delivery.outcome is AlertOutcome.SENT
    if as_json:
        print_json(
            {
                "channel": channel.name,
                "id": alert.id,
                "ok": ok,
                "reason": delivery.reason,
                "seconds": round(time.monotonic() - began, 3),
            }
        )
    else:
        print(f"{channel.name}: {'delivered' if ok else 'not delivered'} ({delivery.reason})")
    if not ok:
        raise typer.Exit(1)


def _channel(settings: "NotifySettings", name: str | None) -> "Channel":
    from sentinel.notify.catalogue import build

    if name not in tuple(AlertChannel):
        raise MisuseError(f"channel {name or ''!r} does not exist; name one of {', '.join(AlertChannel)}")
    chosen = AlertChannel(str(name))
    channel = build(settings).get(chosen)
    if channel is None:
        raise MisuseError(
            f"channel {chosen} is off; set notify.{chosen}.url or url_file (SENTINEL_SETTINGS, --settings)"
        )
    return channel


async def _send(channel: "Channel", alert: "Alert", seconds: float) -> "Delivery":
    from sentinel.notify.sending import Sender

    async with Sender() as sender:
        return await sender.attempt(channel.request(alert, time.time()), seconds)


def _example() -> "Alert":
    """An incident that never was, already over, so that nobody has to end it."""
    from sentinel.notify.alert import Alert

    now = time.time()
    incident_id = f"test-{uuid.uuid4().hex}"
    return Alert(
        id=f"{incident_id}-resolved",
        condition=AlertCondition.RESOLVED,
        run_id="test",
        incident_id=incident_id,
        kind=Kind.SENTINEL_DEGRADED,
        severity=Severity.INFO,
        tier=Tier.T1,
        ranks=(0,),
        first_step=0,
        onset_step=0,
        last_step=0,
        status="resolved",
        summary="A test of this channel, sent by `sentinel alerts test`. Nothing is wrong.",
        cause="",
        evidence={},
        opened_at=now,
        resolved_at=now,
    )
