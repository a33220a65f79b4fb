"""Say in words what a report holds: numbers, spans of steps, actions. Plain text, no layout."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from sentinel.vocabulary import Action, Outcome

NONFINITE_WORDS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_INITIALS = {"oom", "gpu", "lr"}
_DONE = {
    Action.NONE: "nothing was done",
    Action.SKIP_UPDATE: "the update was skipped",
    Action.ROLLBACK: "the run was rolled back",
    Action.RETRY: "communication was set up anew",
    Action.RESIZE: "the micro-batch was made smaller",
    Action.SCALE_LR: "the learning rate was scaled",
    Action.RAISE_PRECISION: "precision was raised",
    Action.ACCUMULATE: "ranks synchronised less often",
    Action.COMPRESS: "gradients were compressed",
    Action.SHRINK: "the run went on with fewer replicas",
    Action.RESTART: "the run was restarted",
    Action.PAUSE: "the run was paused",
    Action.STOP: "the run was stopped",
}


def kind_words(kind: str) -> str:
    """`loss_spike` -> `loss spike`, `oom` -> `OOM`."""
    return " ".join(word.upper() if word in _INITIALS else word for word in kind.split("_"))


def duration(seconds: float | None) -> str:
    """`0.25 s`, `42.0 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def sentences(incident: Mapping[str, Any]) -> str:
    """What happened, and what was done about it."""
    onset, first = incident["onset_step"], incident["first_step"]
    seen = f"step {first}" if onset == first else f"step {first} (it began at {onset})"
    kind = kind_words(incident["kind"])
    text = f"{kind[0].upper()}{kind[1:]} at {seen}"
    done = [line for line in grouped_actions(incident["actions"]) if not line.startswith(_DONE[Action.NONE])]
    return f"{text}: {'; then '.join(done) or _DONE[Action.NONE]}."


def grouped_actions(actions: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per action; the same action with the same end several times in a row is one line."""
    lines = []
    for _, group in groupby(actions, key=lambda row: (row["action"], row["reason"], row["outcome"])):
        same = list(group)
        lines.append(action_line(same[0]) if len(same) == 1 else _several(same))
    return lines


def action_line(action: Mapping[str, Any]) -> str:
    """`the run was rolled back to step 120, skipping 14 batches (confirmed, 0.03 s)`."""
    words = _with_outcome(action)
    if action["target_step"] is not None:
        words += f" to step {action['target_step']}"
    if action["skipped_batches"]:
        words += f", skipping {counted(action['skipped_batches'], 'batch', 'batches')}"
    notes = [kind_words(action["reason"])]
    if action["seconds"] is not None:
        notes.append(duration(action["seconds"]))
    return f"{words} ({', '.join(notes)})"


def _several(same: list[Mapping[str, Any]]) -> str:
    steps = [row["requested_step"] for row in same]
    where = f"steps {min(steps)} to {max(steps)}"
    return f"{_with_outcome(same[0])} {len(same)} times, {where} ({kind_words(same[0]['reason'])})"


def _with_outcome(action: Mapping[str, Any]) -> str:
    words, outcome = _DONE[Action(action["action"])], action["outcome"]
    if outcome in {None, Outcome.APPLIED}:
        return words
    if outcome == Outcome.PENDING:
        return f"{kind_words(action['action'])} is under way"
    return f"{kind_words(action['action'])} was {'tried but failed' if outcome == Outcome.FAILED else outcome}"


def counted(number: int, one: str, many: str) -> str:
    """`1 batch`, `3 batches`."""
    return f"{number} {one if number == 1 else many}"
