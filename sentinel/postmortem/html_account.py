"""Write the part of the page that accounts for a run: facts, snapshots, goodput, records, how to look again."""

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sentinel.postmortem.html_markup import Html, element, joined, table
from sentinel.postmortem.html_story import moment, pairs, shown
from sentinel.postmortem.wording import duration, kind_words

MOST_SNAPSHOTS = 40
MOST_TROUBLES = 20
# Whole words: `max_tokens` and `tokenizer` are no secrets.
_SECRET = re.compile(
    r"(?<![a-z])(secret|token|passw(or)?d|passphrase|credentials?|auth|(api|private|access)[-_]?key)(?![a-z])",
    re.IGNORECASE,
)
_HIDDEN = "(hidden)"


def facts(run: Mapping[str, Any], provenance: Mapping[str, Any]) -> Html:
    """What was run, where, with what."""
    git = provenance["git"] or {}
    commit = str(git.get("commit") or "")[:12] or "no repository"
    commit += ", with changes" if git.get("dirty") else ""
    known: list[tuple[str, object]] = [
        ("status", run["status"]),
        ("steps", f"{run['steps']:,}"),
        ("took", duration(_seconds(run))),
        ("ranks", run["world_size"] or "unknown"),
        ("attempts", run["attempts"]),
        ("generations", run["generations"]),
        ("started", moment(run["started_at"])),
        ("ended", moment(run["ended_at"])),
        ("host", provenance["host"]),
        ("devices", ", ".join(provenance["devices"]) or "cpu"),
        ("mode", provenance["mode"]),
        ("commit", commit),
    ]
    error = element("p", run["error"], class_="error") if run["error"] else None
    return joined(pairs(known), error, _details(provenance))


def _details(provenance: Mapping[str, Any]) -> Html:
    command = _without_secrets([str(word) for word in provenance["argv"] or []])
    config = [
        (name, _HIDDEN if _SECRET.search(name) else shown(value)) for name, value in _flat(provenance["config"])
    ]
    packages = [(name, shown(value)) for name, value in (provenance["packages"] or {}).items()]
    return element(
        "details",
        element("summary", "Command, configuration and packages"),
        element("pre", shlex.join(command)),
        pairs(config) if config else None,
        pairs(packages) if packages else None,
    )


def _without_secrets(words: Sequence[str]) -> list[str]:
    """A page is passed on: what looks like a secret stays behind (`--api-key x`, `--api-key=x`)."""
    found: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            found.append(_HIDDEN)
        elif equals and _SECRET.search(name):
            found.append(f"{name}={_HIDDEN}")
        else:
            found.append(word)
        hide_next = word.startswith("-") and not equals and _SECRET.search(word) is not None
    return found


def _flat(config: Mapping[str, Any] | None, prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in (config or {}).items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def account(report: Mapping[str, Any], troubles: Sequence[Mapping[str, Any]]) -> Html:
    """Everything below the incidents."""
    return joined(
        _goodput(report["goodput"]),
        _snapshots(report["checkpoints"]),
        _records(report["conservation"]),
        _troubles(troubles),
    )


def _goodput(goodput: Mapping[str, Any]) -> Html:
    ratio = goodput["ratio"]
    useful, lost = duration(goodput["useful_seconds"]), duration(goodput["lost_seconds"])
    if ratio is None:
        return joined(element("h2", "Goodput"), element("p", "No step has been timed yet."))
    bar = element(
        "div",
        element("div", class_="useful", style=f"width:{100 * ratio:.2f}%"),
        class_="bar",
        role="img",
        aria_label=f"{ratio:.1%} useful",
    )
    words = (
        f"{ratio:.1%}: {useful} in steps that count, {lost} in steps taken back, steps without an update, and turns."
    )
    return joined(element("h2", "Goodput"), bar, element("p", words))


def _snapshots(checkpoints: Sequence[Mapping[str, Any]]) -> Html:
    title = element("h2", "Snapshots and checkpoints")
    if not checkpoints:
        return joined(title, element("p", "None was taken.", class_="quiet"))
    rows: list[list[object]] = [
        [
            row["step"],
            row["generation"],
            row["tier"],
            element("span", row["quality"], class_=f"badge {row['quality'].lower()}"),
            "yes" if row["verified"] else "no",
            "yes" if row["kept"] else "no",
            row["reason"],
        ]
        for row in checkpoints[-MOST_SNAPSHOTS:]
    ]
    headings = ["step", "generation", "tier", "quality", "verified", "held", "why"]
    left_out = len(checkpoints) - len(rows)
    more = element("p", f"{left_out} older ones are in sentinel postmortem --json.", class_="quiet")
    found = table(headings, rows, numbers=frozenset({"step", "generation"}))
    return joined(title, found, more if left_out else None)


def _records(conservation: Sequence[Mapping[str, Any]]) -> Html:
    rows: list[list[object]] = []
    for row in conservation:
        holds = row["produced"] == row["stored"] + row["dropped"] + row["in_flight"]
        lost = ", ".join(f"{kind_words(reason)} {count}" for reason, count in row["dropped_by_reason"].items())
        word = element(
            "span", "balances" if holds else "does not balance", class_="good-word" if holds else "bad-word"
        )
        rows.append(
            [row["rank"], row["produced"], row["stored"], row["dropped"], row["in_flight"], lost or "–", word]
        )
    headings = ["rank", "produced", "stored", "dropped", "in flight", "dropped because", "books"]
    numbers = frozenset({"rank", "produced", "stored", "dropped", "in flight"})
    lead = element(
        "p", "Every record of every rank is stored, counted as dropped, or still on its way.", class_="quiet"
    )
    return joined(element("h2", "Records"), lead, table(headings, rows, numbers=numbers))


def _troubles(troubles: Sequence[Mapping[str, Any]]) -> Html | None:
    if not troubles:
        return None
    lines = [
        element("li", f"rank {row['rank']}, step {row['step']}: {row['text']}") for row in troubles[:MOST_TROUBLES]
    ]
    left_out = len(troubles) - len(lines)
    more = element("p", f"and {left_out} more", class_="quiet") if left_out else None
    return joined(element("h2", "Troubles of sentinel itself"), element("ul", lines), more)


def again(run_id: str, place: str) -> Html:
    """How to look at it again."""
    commands = (
        f"sentinel postmortem {run_id}\nsentinel postmortem {run_id} --json\nsentinel export {run_id} --format csv"
    )
    return joined(
        element("h2", "Look again"),
        element("pre", commands),
        element("p", "Database: ", element("code", place), class_="quiet"),
    )


def _seconds(run: Mapping[str, Any]) -> float | None:
    if run["started_at"] is None or run["ended_at"] is None:
        return None
    started, ended = (datetime.fromisoformat(run[name]) for name in ("started_at", "ended_at"))
    return (ended - started).total_seconds()
