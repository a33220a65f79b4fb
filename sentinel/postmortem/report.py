"""Gather everything that explains a run in one plain object, the contract of `sentinel postmortem --json`.

Times are RFC 3339 in UTC; keys that a run has no answer for are null. What stands beside the contract's own keys:
`error` of the run (the exception that ended it), `attempt` and `generation` of an incident (steps repeat), `text` of
an action (one sentence), `attempt` and `kept` of a checkpoint (false: it left the ring), `in_flight` of conservation,
and `requests`, what a person asked for.

Goodput: `useful_seconds` are those of live steps whose update was applied. `lost_seconds` are those of steps that
became history, of live steps without an update (overflows and reflexes), and of turns. Time between two attempts is
in neither, because nobody can tell a crash from a night's rest.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from sentinel.store.history import History
from sentinel.vocabulary import Action, Outcome, Quality

Report = dict[str, Any]

_BEST_FIRST = (Quality.GOOD, Quality.PENDING, Quality.SUSPECT, Quality.BAD)
_RUN_KEYS = ("run_id", "name", "status", "steps", "attempts", "generations", "world_size")
_INCIDENT_KEYS = (
    *("id", "kind", "severity", "tier", "ranks", "first_step", "onset_step", "last_step"),
    *("status", "summary", "cause", "evidence", "attempt", "generation"),
)
_BOOK_KEYS = ("rank", "produced", "stored", "dropped", "dropped_by_reason", "in_flight")


def report(history: History, run_id: str) -> Report:
    """The report of one run. Floats in it may be non-finite (`sentinel.store.strict_json` writes them)."""
    actions = history.actions(run_id)
    of_incident = defaultdict(list)
    for row in actions:
        of_incident[row["incident_id"] or ""].append(row)
    return {
        "run": {**_run(history.run(run_id)), "error": _error(history.ranks(run_id))},
        "incidents": [_incident(row, of_incident[row["id"]]) for row in history.incidents(run_id)],
        "requests": [{**_action(row), "requested_at": rfc3339(row["time"])} for row in of_incident[""]],
        "checkpoints": _checkpoints(history.checkpoints(run_id)),
        "goodput": _goodput(history, run_id, actions),
        "conservation": [_books(row) for row in history.conservation(run_id)],
    }


def rfc3339(seconds: float | None) -> str | None:
    """A time of the database as text, e.g. 2026-01-31T12:00:00.250Z."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _run(row: Mapping[str, Any]) -> Report:
    return {
        **{name: row[name] for name in _RUN_KEYS},
        "started_at": rfc3339(row["started_at"]),
        "ended_at": rfc3339(row["ended_at"]),
    }


def _error(ranks: Iterable[Mapping[str, Any]]) -> str | None:
    """Of the rank that failed first in the latest attempt: the others are its victims."""
    found = [row for row in ranks if row["error"]]
    latest = max((row["attempt"] for row in found), default=None)
    failed = sorted((row for row in found if row["attempt"] == latest), key=lambda row: row["ended_at"] or 0.0)
    return f"rank {failed[0]['rank']}: {failed[0]['error']}" if failed else None


def _incident(row: Mapping[str, Any], actions: Iterable[Mapping[str, Any]]) -> Report:
    return {
        **{name: row[name] for name in _INCIDENT_KEYS},
        "opened_at": rfc3339(row["opened_at"]),
        "resolved_at": rfc3339(row["resolved_at"]),
        "actions": [_action(action) for action in actions],
    }


def _action(row: Mapping[str, Any]) -> Report:
    return {
        "action": row["action"],
        "reason": row["reason"],
        "requested_step": row["step"],
        "applied_step": row["applied_step"],
        "target_step": row["target_step"],
        "skipped_batches": row["skipped_batches"],
        "outcome": None if row["action"] == Action.NONE else row["outcome"],
        "seconds": row["seconds"],
        "text": row["text"],
    }


def _checkpoints(rows: Iterable[Mapping[str, Any]]) -> list[Report]:
    """One per snapshot of the job: as good as the worst of its ranks' parts."""
    parts = defaultdict(list)
    for row in rows:
        parts[row["attempt"], row["generation"], row["step"], row["tier"]].append(row)
    return [_checkpoint(found) for found in parts.values()]


def _checkpoint(parts: list[Mapping[str, Any]]) -> Report:
    worst = max(parts, key=lambda row: _BEST_FIRST.index(Quality(row["quality"])))
    return {
        **{name: worst[name] for name in ("step", "tier", "quality")},
        "verified": all(row["verified"] for row in parts),
        **{name: worst[name] for name in ("reason", "generation", "attempt")},
        "kept": all(row["kept"] for row in parts),
    }


def _goodput(history: History, run_id: str, actions: Iterable[Mapping[str, Any]]) -> Report:
    useful, lost = history.spent(run_id)
    # A reflex is part of its step, whose seconds are counted as lost already.
    lost += sum(
        row["seconds"] or 0.0
        for row in actions
        if row["outcome"] == Outcome.APPLIED.value and row["action"] != Action.SKIP_UPDATE.value
    )
    total = useful + lost
    return {"useful_seconds": useful, "lost_seconds": lost, "ratio": useful / total if total > 0 else None}


def _books(row: Mapping[str, Any]) -> Report:
    return {name: row[name] for name in _BOOK_KEYS}
