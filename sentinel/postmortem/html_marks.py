"""Find where on the plots incidents, rollbacks and actions stand. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sentinel.postmortem.series import Series
from sentinel.postmortem.wording import kind_words
from sentinel.vocabulary import Action

MOST_SHADED = 150  # incidents that are shaded in the plots; the timeline has them all
_KEPT_AROUND = 40  # points on each side of an incident's onset that are always drawn ...
_MOST_KEPT = 1000  # ... with many incidents fewer, so that the page stays small


class Band(NamedTuple):
    """An incident's stretch."""

    first: int  # index of the onset
    last: int
    severity: str
    words: str


class Turn(NamedTuple):
    """A place where history was rewritten: the records from `place` on are a new generation or attempt."""

    place: int  # index
    step_before: int  # the last step before it
    step_after: int  # the first step after it
    words: str


class Deed(NamedTuple):
    """An action, whoever asked for it."""

    place: int  # index
    action: str
    outcome: str
    words: str


class Marks(NamedTuple):
    bands: tuple[Band, ...]
    turns: tuple[Turn, ...]
    deeds: tuple[Deed, ...]

    @property
    def keep(self) -> set[int]:
        """Indices that no plot may leave out."""
        around = {place for turn in self.turns for place in (turn.place - 1, turn.place)}
        each = min(_KEPT_AROUND, _MOST_KEPT // (2 * len(self.bands) or 1))
        for band in self.bands[:_MOST_KEPT]:
            around |= {*range(band.first - each, band.first + each), band.first}
        return around


def marks_of(
    report: Mapping[str, Any],
    decisions: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
    series: Series,
) -> Marks:
    """`decisions` and `findings`: the rows of `History`, which know their generation."""
    deeds = [_deed(row, series) for row in decisions if row["action"] != Action.NONE]
    return Marks(
        tuple(_bands(report["incidents"], findings, series)),
        tuple(_turns(series)),
        tuple(deed for deed in deeds if deed is not None),
    )


def _bands(
    incidents: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]], series: Series
) -> Iterator[Band]:
    """One per incident and generation in which it was found: it may come back after a rollback."""
    stretches: dict[tuple[str, int, int], tuple[int, int]] = {}
    for row in (*incidents, *findings):
        is_finding = "incident_id" in row
        first, last = row["onset_step"], row["step"] if is_finding else row["first_step"]
        key = (row["incident_id"] if is_finding else row["id"], row["attempt"], row["generation"])
        if not is_finding and (span := series.span(row["attempt"], row["generation"])) and span.end > span.start:
            # The last step may be of a later generation; this one was bad to its end then.
            last = max(last, min(row["last_step"], series.steps[span.end - 1]))
        before = stretches.get(key, (first, last))
        stretches[key] = (min(before[0], first), max(before[1], last))
    for incident in incidents:
        words = f"{kind_words(incident['kind'])}, {incident['severity']} {incident['tier']}: {incident['summary']}"
        for (incident_id, *where), ends in stretches.items():
            if incident_id != incident["id"]:
                continue
            first, last = (series.index_of(where[0], where[1], step) for step in ends)
            if first is not None and last is not None:
                yield Band(first, last, incident["severity"], words)


def _deed(row: Mapping[str, Any], series: Series) -> Deed | None:
    step = row["applied_step"] if row["applied_step"] is not None else row["step"]
    index = series.index_of(row["attempt"], row["generation"], step)
    if index is None:
        return None
    words = f"{kind_words(row['action'])} at step {step}: {row['outcome'] or 'decided'} ({kind_words(row['reason'])})"
    if row["target_step"] is not None:
        words += f", back to step {row['target_step']}"
    if row["skipped_batches"]:
        words += f", {row['skipped_batches']} batches skipped"
    return Deed(index, row["action"], row["outcome"] or "", words)


def _turns(series: Series) -> list[Turn]:
    found = []
    filled = [span for span in series.spans if span.end > span.start]
    for before, after in pairwise(filled):
        last, first = series.steps[before.end - 1], series.steps[after.start]
        if after.attempt != before.attempt:
            words = f"attempt {after.attempt}, from step {first}"
        else:
            words = f"rollback to {first - 1}"
        found.append(Turn(after.start, last, first, words))
    return found
