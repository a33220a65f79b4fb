"""Show a report to a person, on a terminal or in a file: compact, one card per incident."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sentinel.postmortem.wording import duration, grouped_actions, kind_words, sentences

_STATUS_STYLE = {"completed": "green", "running": "cyan", "failed": "red", "lost": "red"}
_INCIDENT_STYLE = {"resolved": "green", "open": "yellow", "gave_up": "red"}
_QUALITY_STYLE = {"GOOD": "green", "PENDING": "cyan", "SUSPECT": "yellow", "BAD": "red"}
_SEVERITY_STYLE = {"critical": "red", "warning": "yellow", "info": "cyan"}
_MOST_CHECKPOINTS = 12
_MOST_EVIDENCE = 6


def show(report: Mapping[str, Any], place: str, console: Console) -> None:
    """Print the whole postmortem. `place`: where the database is."""
    console.print(_header(report["run"]))
    console.print(_story(report))
    for incident in report["incidents"]:
        console.print(_card(incident))
    if report["requests"]:
        console.print(_section("Asked for by a person", grouped_actions(report["requests"])))
    if report["checkpoints"]:
        console.print(_checkpoints(report["checkpoints"]))
    console.print(_balance(report))
    console.print(Text.assemble(("Database ", "bold"), place), soft_wrap=True)
    again = f"sentinel postmortem {report['run']['run_id']}"
    console.print(Text.assemble(("Look again ", "bold"), again), soft_wrap=True)


def _header(run: Mapping[str, Any]) -> Panel:
    status = Text(run["status"], style=f"bold {_STATUS_STYLE.get(run['status'], 'white')}")
    facts = _grid()
    facts.add_row("status", status, "steps", str(run["steps"]))
    facts.add_row("attempts", str(run["attempts"]), "generations", str(run["generations"]))
    facts.add_row("ranks", _or_unknown(run["world_size"]), "took", duration(_seconds_between(run)))
    facts.add_row("started", _moment(run["started_at"], "unknown"), "ended", _moment(run["ended_at"], "not yet"))
    parts: list[RenderableType] = [facts]
    if run["error"]:
        parts.append(Text.assemble(("ended by  ", "dim"), (run["error"], "red")))
    title = Text.assemble((run["name"] or "run", "bold"), "  ", (run["run_id"], "dim"))
    return Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _story(report: Mapping[str, Any]) -> RenderableType:
    run, incidents = report["run"], report["incidents"]
    if not incidents:
        return _section("What happened", [f"Nothing wrong was found in {run['steps']} steps."])
    return _section("What happened", [sentences(incident) for incident in incidents])


def _card(incident: Mapping[str, Any]) -> Panel:
    facts = _grid()
    facts.add_row("first step", str(incident["first_step"]), "onset", str(incident["onset_step"]))
    facts.add_row("last step", str(incident["last_step"]), "ranks", _listed(incident["ranks"]))
    parts: list[RenderableType] = [Text(incident["summary"]), facts]
    if incident["cause"]:
        parts.append(Text.assemble(("cause  ", "dim"), incident["cause"]))
    evidence = [f"{name}={_short(value)}" for name, value in list(incident["evidence"].items())[:_MOST_EVIDENCE]]
    if evidence:
        parts.append(Text.assemble(("evidence  ", "dim"), ", ".join(evidence)))
    if incident["actions"]:
        parts.append(_actions(incident["actions"]))
    severity = _SEVERITY_STYLE.get(incident["severity"], "white")
    title = Text.assemble(
        (kind_words(incident["kind"]), f"bold {severity}"),
        f"  {incident['severity']} {incident['tier']}  ",
        (kind_words(incident["status"]), _INCIDENT_STYLE.get(incident["status"], "white")),
    )
    return Panel(
        Group(*parts), title=title, title_align="left", box=box.ROUNDED, border_style=severity, padding=(0, 1)
    )


def _actions(actions: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for name in ("action", "why", "at step", "back to", "skipped batches", "outcome", "cost"):
        table.add_column(
            name, justify="right" if name in {"at step", "back to", "skipped batches", "cost"} else "left"
        )
    for same in _runs_of_equals(actions):
        first, last = same[0], same[-1]
        many = len(same) > 1
        step = _step_of(first)
        table.add_row(
            kind_words(first["action"]) + (f" ({len(same)} times)" if many else ""),
            kind_words(first["reason"]),
            f"{step} to {_step_of(last)}" if many else str(step),
            _or_dash(first["target_step"]),
            _or_dash(first["skipped_batches"]),
            first["outcome"] or "-",
            "-" if first["seconds"] is None else duration(sum(row["seconds"] or 0.0 for row in same)),
        )
    return table


def _runs_of_equals(actions: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Neighbours that differ only in their step, together."""
    same: list[Mapping[str, Any]] = []
    for action in actions:
        if same and any(action[name] != same[0][name] for name in ("action", "reason", "outcome", "target_step")):
            yield same
            same = []
        same.append(action)
    if same:
        yield same


def _checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> Group:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for name in ("step", "generation", "tier", "quality", "verified", "held", "why"):
        table.add_column(name, justify="right" if name in {"step", "generation"} else "left")
    for row in checkpoints[-_MOST_CHECKPOINTS:]:
        table.add_row(
            str(row["step"]),
            str(row["generation"]),
            row["tier"],
            Text(row["quality"], style=_QUALITY_STYLE.get(row["quality"], "white")),
            "yes" if row["verified"] else "no",
            "yes" if row["kept"] else "no",
            Text(row["reason"]),
        )
    left_out = len(checkpoints) - _MOST_CHECKPOINTS
    title = "Checkpoints" + (
        f" (the newest {_MOST_CHECKPOINTS}; {left_out} older ones in --json)" if left_out > 0 else ""
    )
    return Group(Text(title, style="bold"), table)


def _balance(report: Mapping[str, Any]) -> Group:
    goodput = report["goodput"]
    ratio = "unknown" if goodput["ratio"] is None else f"{goodput['ratio']:.1%}"
    useful, lost = duration(goodput["useful_seconds"]), duration(goodput["lost_seconds"])
    lines = [Text.assemble(("Goodput ", "bold"), f"{ratio} ({useful} useful, {lost} lost)")]
    for row in report["conservation"]:
        balanced = row["produced"] == row["stored"] + row["dropped"] + row["in_flight"]
        words = f"rank {row['rank']}: {row['produced']} produced = {row['stored']} stored + {row['dropped']} dropped"
        words += f" + {row['in_flight']} in flight" if row["in_flight"] else ""
        reasons = ", ".join(f"{kind_words(reason)} {count}" for reason, count in row["dropped_by_reason"].items())
        words += f" ({reasons})" if reasons else ""
        mark = ("  balances", "green") if balanced else ("  DOES NOT BALANCE", "bold red")
        lines.append(Text.assemble(("Records ", "bold"), words, mark))
    return Group(*lines)


def _section(title: str, lines: Sequence[str]) -> Group:
    listed = Table.grid(padding=(0, 1))
    for line in lines:
        listed.add_row(" -", Text(line))
    return Group(Text(title, style="bold"), listed)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(min_width=12)
    grid.add_column(style="dim")
    grid.add_column()
    return grid


def _seconds_between(run: Mapping[str, Any]) -> float | None:
    if run["started_at"] is None or run["ended_at"] is None:
        return None
    started, ended = (datetime.fromisoformat(run[name]) for name in ("started_at", "ended_at"))
    return (ended - started).total_seconds()


def _moment(time: str | None, otherwise: str) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S UTC") if time else otherwise


def _step_of(action: Mapping[str, Any]) -> int:
    applied = action["applied_step"]
    return int(action["requested_step"] if applied is None else applied)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "-"


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)
