"""Decide whether the demo kept its promise: was the run saved, and does its postmortem say so."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sentinel.vocabulary import Action, Kind, Outcome

CLOSE_RATIO = 1.02  # with sentinel, at most so far above the clean run
BROKEN_RATIO = 1.5  # without, at least


class Check(NamedTuple):
    """One promise, whether it was kept, and the numbers."""

    promise: str
    kept: bool
    seen: str


def judge(losses: Mapping[str, float], report: Mapping[str, Any]) -> list[Check]:
    """All promises. `losses`: validation loss of the runs `clean`, `window alone`, `both faults`, `with sentinel`;
    `report`: the postmortem of the last of them.
    """
    clean = losses["clean"]
    ratios = {name: loss / clean for name, loss in losses.items()}
    incidents = report["incidents"]
    return [
        Check(
            "with sentinel the validation loss is within 2 % of the clean run's",
            ratios["with sentinel"] <= CLOSE_RATIO,
            f"{ratios['with sentinel']:.3f} times",
        ),
        Check(
            "without it the run ends in NaN or at least 1.5 times worse",
            is_broken(ratios["both faults"]),
            f"{ratios['both faults']:.3f} times",
        ),
        Check(
            "the poisoned window alone already makes it at least 1.5 times worse",
            is_broken(ratios["window alone"]),
            f"{ratios['window alone']:.3f} times",
        ),
        _told(incidents, (Kind.NONFINITE_GRADIENT, Kind.NONFINITE_LOSS), Action.SKIP_UPDATE),
        _told(incidents, (Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE), Action.ROLLBACK),
        _balance(report["conservation"]),
    ]


def is_broken(ratio: float) -> bool:
    return not math.isfinite(ratio) or ratio >= BROKEN_RATIO


def balances(books: Mapping[str, Any]) -> bool:
    """Whether every record of a rank is accounted for."""
    return bool(books["produced"] == books["stored"] + books["dropped"])


def _told(incidents: Sequence[Mapping[str, Any]], kinds: Sequence[Kind], action: Action) -> Check:
    found = [incident for incident in incidents if incident["kind"] in kinds]
    done = [
        (incident, act)
        for incident in found
        for act in incident["actions"]
        if act["action"] == action and act["outcome"] == Outcome.APPLIED
    ]
    promise = f"the postmortem names the {kinds[0]} and an applied {action}"
    if not done:
        return Check(promise, kept=False, seen=f"incidents: {[incident['kind'] for incident in incidents]}")
    incident, act = done[0]
    seen = f"{incident['kind']} at step {incident['first_step']}, {len(done)} applied"
    if act["target_step"] is not None:
        seen += f", first back to step {act['target_step']}"
    return Check(promise, kept=True, seen=seen)


def _balance(conservation: Sequence[Mapping[str, Any]]) -> Check:
    kept = bool(conservation) and all(balances(books) for books in conservation)
    seen = "; ".join(
        f"rank {books['rank']}: {books['produced']} = {books['stored']} + {books['dropped']}"
        for books in conservation
    )
    return Check("every record is accounted for: produced = stored + dropped", kept, seen or "no books")
