"""`sentinel runs`: list the runs of a home."""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from sentinel.cli.options import AsJson, Home, database_url, places_of
from sentinel.cli.output import console, print_json
from sentinel.errors import NoSuchRunError
from sentinel.places import Places

_COUNTS = ("steps", "attempts", "generations", "world_size")


def command(as_json: AsJson = False, home: Home = None) -> None:
    """List the runs of this home, the one that started last first."""
    places = places_of(home)
    runs = _runs(places)
    if as_json:
        print_json(runs)
    else:
        _show(runs, places)


def _runs(places: Places) -> list[dict[str, Any]]:
    from sentinel.postmortem.report import rfc3339
    from sentinel.store.history import History

    url = daemon_url(places)
    try:
        with History(database_url(places)) as history:
            found = history.runs()
    except NoSuchRunError:
        return []
    return [
        {
            **{name: row[name] for name in ("run_id", "name", "status", *_COUNTS)},
            "started_at": rfc3339(row["started_at"]),
            "ended_at": rfc3339(row["ended_at"]),
            "host": row["host"],
            "url": url,
        }
        for row in found
    ]


def daemon_url(places: Places) -> str | None:
    """Where this home's daemon answers, None if none does. The file alone proves nothing: it outlives the daemon."""
    if not _answers(places):
        return None
    try:
        groups = json.loads(places.targets.read_text(encoding="utf-8"))
        return f"http://{groups[0]['targets'][0]}"
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _answers(places: Places) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(0.5)
        try:
            client.connect(str(places.socket))
        except OSError:
            return False
    return True


def _show(runs: Sequence[Mapping[str, Any]], places: Places) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    if not runs:
        out.print(f"No runs yet in {places.home}.", markup=False)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for name in ("run", "name", "status", "steps", "attempts", "ranks", "started", "ended"):
        table.add_column(name, justify="right" if name in {"steps", "attempts", "ranks"} else "left")
    for run in runs:
        numbers = [str(run[name] if run[name] is not None else "-") for name in ("steps", "attempts", "world_size")]
        times = [run["started_at"] or "-", run["ended_at"] or "-"]
        table.add_row(Text(run["run_id"]), Text(run["name"] or "-"), run["status"], *numbers, *times)
    out.print(table)
    if runs[0]["url"]:
        out.print(f"Live: {runs[0]['url']}", markup=False)
