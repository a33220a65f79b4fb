"""Say what an incident came from, in the order gradient, learning rate, precision, data. Pure.

Every sentence follows from records: what they cannot tell is said to be unknown. "Usual" is the median of the steps
before the incident in the same generation, in log space, with the spread of a robust standard deviation.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

from sentinel.postmortem.series import Column, Series, Span
from sentinel.postmortem.wording import NONFINITE_WORDS, counted
from sentinel.vocabulary import Action, Outcome, UpdateResult

LOOKBACK_STEPS = 20  # before the onset, where a forerunner is looked for
BASELINE_STEPS = 100  # before that, what is usual
LEAST_BASELINE = 10  # fewer values make no baseline
PROOF_STEPS = 10  # steps after a rollback that must look usual before its data counts as the cause
_SIGMAS = 4.0
_LEAST_RISE = {"loss": 1.05, "grad_norm": 1.5}  # times the usual; below, a rise is noise
_LR_JUMP = 1.5  # a change between two neighbours beyond this is no schedule's
_EXPLAINED = ("nonfinite_loss", "nonfinite_gradient", "nonfinite_state", "loss_", "gradient_", "scale_collapse")


class Link(StrEnum):
    """One link of the chain, in the order in which it is asked."""

    GRADIENT = "gradient"
    LEARNING_RATE = "learning rate"
    PRECISION = "precision"
    DATA = "data"


class Verdict(StrEnum):
    POINTS = "points here"
    SHOWS = "shows it"  # a symptom, not a cause
    CLEARS = "not it"
    UNKNOWN = "unknown"


class Clue(NamedTuple):
    """What the records say about one link."""

    link: Link
    verdict: Verdict
    text: str


class Diagnosis(NamedTuple):
    """Of one incident. No clues: its kind is not explained by this chain."""

    incident_id: str
    clues: tuple[Clue, ...]
    conclusion: str


class _Scene(NamedTuple):
    """Where an incident stands in the columns."""

    incident: Mapping[str, Any]
    series: Series
    span: Span
    onset: int  # index
    last: int  # index of the last step on which it was looked at

    @property
    def onset_step(self) -> int:
        return self.series.steps[self.onset]


class _Usual(NamedTuple):
    level: float
    limit: float  # above this it is not usual


def diagnose(report: Mapping[str, Any], series: Series) -> list[Diagnosis]:
    """One per incident of the report, in its order."""
    return [_of_incident(incident, series) for incident in report["incidents"]]


def _of_incident(incident: Mapping[str, Any], series: Series) -> Diagnosis:
    scene = _scene(incident, series)
    if scene is None or not str(incident["kind"]).startswith(_EXPLAINED):
        return Diagnosis(incident["id"], (), incident["cause"])
    clues = (_gradient(scene), _learning_rate(scene), _precision(scene), _data(scene))
    return Diagnosis(incident["id"], clues, _conclusion(clues))


def _scene(incident: Mapping[str, Any], series: Series) -> _Scene | None:
    where = (incident["attempt"], incident["generation"])
    span = series.span(*where)
    onset = series.index_of(*where, incident["onset_step"])
    if span is None or onset is None:
        return None
    seen = [incident["first_step"], *(act["applied_step"] or 0 for act in incident["actions"][:1])]
    last = series.index_of(*where, max(seen))
    assert last is not None
    return _Scene(incident, series, span, onset, max(onset, last))


# ------------------------------------------------------------ gradient


def _gradient(scene: _Scene) -> Clue:
    column = scene.series.columns["grad_norm"]
    if not column.is_recorded:
        return Clue(Link.GRADIENT, Verdict.UNKNOWN, "No gradient norm was recorded.")
    bad = [index for index in range(_first_look(scene), scene.last + 1) if index in column.nonfinite]
    if bad:
        return Clue(Link.GRADIENT, Verdict.SHOWS, _nonfinite_gradient(scene, column, bad))
    usual = _usual(scene, "grad_norm")
    if usual is None:
        return Clue(
            Link.GRADIENT, Verdict.UNKNOWN, "Too few steps came before it to say which gradient norm is usual."
        )
    rise = _first_above(scene, column, usual)
    if rise is None:
        most = max(column.finite(_first_look(scene), scene.last + 1), default=usual.level)
        text = f"The gradient norm stayed usual: at most {most:.3g}, where {usual.level:.3g} is the median."
        return Clue(Link.GRADIENT, Verdict.CLEARS, text)
    value = column.at(rise) or 0.0
    height = f"to {value:.3g}, {value / usual.level:.1f} times the median of {usual.level:.3g}"
    return Clue(Link.GRADIENT, Verdict.SHOWS, f"{_who_rose_first(scene, rise)}: {height}.")


def _nonfinite_gradient(scene: _Scene, column: Column, bad: Sequence[int]) -> str:
    steps, series = scene.series.steps, scene.series
    text = f"The gradient norm was {NONFINITE_WORDS[column.nonfinite[bad[0]]]} at step {steps[bad[0]]}"
    text += f" and on {counted(len(bad) - 1, 'more step', 'more steps')}" if len(bad) > 1 else ""
    before = column.at(bad[0] - 1) if bad[0] > scene.span.start else None
    text += f"; one step earlier it was {before:.3g}, so nothing announced it" if before is not None else ""
    if all(index in series.not_applied for index in bad):
        return text + ". No such update reached the weights."
    return text + ". At least one such update was applied."


def _who_rose_first(scene: _Scene, rise: int) -> str:
    steps = scene.series.steps
    at = f"at step {steps[rise]}"
    usual = _usual(scene, "loss")
    of_loss = None if usual is None else _first_above(scene, scene.series.columns["loss"], usual)
    if of_loss is None:
        return f"The gradient norm rose {at}"
    ahead = of_loss - rise
    if ahead > 0:
        return f"The gradient norm rose {counted(ahead, 'step', 'steps')} before the loss, {at}"
    if ahead == 0:
        return f"The gradient norm rose together with the loss, {at}"
    return f"The gradient norm rose {counted(-ahead, 'step', 'steps')} after the loss, {at}, so it followed"


# ------------------------------------------------------------ learning rate


def _learning_rate(scene: _Scene) -> Clue:
    column, steps = scene.series.columns["lr"], scene.series.steps
    first = max(_first_look(scene), scene.span.start + 1)
    pairs = [
        (index, before, now)
        for index in range(first, scene.onset + 1)
        if (before := column.at(index - 1)) and (now := column.at(index)) is not None
    ]
    if not pairs:
        return Clue(Link.LEARNING_RATE, Verdict.UNKNOWN, "No learning rate was recorded before it.")
    index, before, now = max(pairs, key=lambda pair: pair[2] / pair[1])
    if now / before >= _LR_JUMP and steps[index] > 2:
        ahead = scene.onset - index
        when = f"{counted(ahead, 'step', 'steps')} before it began" if ahead else "when it began"
        text = f"The learning rate jumped from {before:.3g} to {now:.3g} at step {steps[index]}, {when}."
        return Clue(Link.LEARNING_RATE, Verdict.POINTS, text)
    start, end = pairs[0][1], pairs[-1][2]
    moved = (
        f"stayed at {end:.3g}" if math.isclose(start, end, rel_tol=1e-6) else f"went from {start:.3g} to {end:.3g}"
    )
    return Clue(
        Link.LEARNING_RATE, Verdict.CLEARS, f"The learning rate {moved} in the steps before it, without a jump."
    )


# ------------------------------------------------------------ precision


def _precision(scene: _Scene) -> Clue:
    column, steps = scene.series.columns["loss_scale"], scene.series.steps
    around = range(_first_look(scene), scene.last + 1)
    overflows = [index for index in around if scene.series.not_applied.get(index) == UpdateResult.OVERFLOW]
    scales = [(index, value) for index in around if (value := column.at(index)) is not None]
    if not scales:
        text = "No loss scale was recorded, so an overflow of a 16-bit format cannot be told from another fault."
        return Clue(Link.PRECISION, Verdict.UNKNOWN, text)
    first, last = scales[0][1], scales[-1][1]
    if len(overflows) > 2 or last <= first / 8:
        many = counted(len(overflows), "overflow", "overflows")
        text = f"From step {steps[scales[0][0]]} on the loss scale went from {first:.3g} to {last:.3g}, with {many}."
        return Clue(Link.PRECISION, Verdict.POINTS, text)
    seen = counted(len(overflows), "overflow", "overflows") if overflows else "no overflow"
    return Clue(Link.PRECISION, Verdict.CLEARS, f"The loss scale held at {last:.3g} with {seen}.")


# ------------------------------------------------------------ data


def _data(scene: _Scene) -> Clue:
    applied = [act for act in scene.incident["actions"] if act["outcome"] == Outcome.APPLIED]
    rollbacks = [act for act in applied if act["action"] == Action.ROLLBACK]
    if rollbacks:
        return _after_rollbacks(scene, rollbacks)
    at = scene.series.columns["data_position"].at(scene.onset)
    batch = f" (batch {at:.0f} of the data)" if at is not None else ""
    if any(act["action"] == Action.SKIP_UPDATE for act in applied):
        text = f"Only the update of step {scene.onset_step}{batch} was left out, and training went on:"
        return Clue(
            Link.DATA, Verdict.UNKNOWN, f"{text} that batch or a passing fault; the records cannot tell which."
        )
    return Clue(
        Link.DATA,
        Verdict.UNKNOWN,
        f"No data was left out at step {scene.onset_step}{batch}, so it was not put to the test.",
    )


def _after_rollbacks(scene: _Scene, rollbacks: Sequence[Mapping[str, Any]]) -> Clue:
    final = rollbacks[-1]
    skipped = final["skipped_batches"] or 0
    after = [span for span in scene.series.spans if span[:2] > scene.span[:2]]
    usual = _usual(scene, "loss")
    rolled = f"After the rollback to step {final['target_step']}"
    earlier = " (the one before did not suffice)" if len(rollbacks) > 1 else ""
    if not after or usual is None:
        return Clue(Link.DATA, Verdict.UNKNOWN, f"{rolled} too few steps were recorded to judge by.")
    span = after[min(len(rollbacks), len(after)) - 1]
    losses = scene.series.columns["loss"].finite(span.start, span.start + LOOKBACK_STEPS)
    if len(losses) < PROOF_STEPS:
        return Clue(Link.DATA, Verdict.UNKNOWN, f"{rolled} too few steps were recorded to judge by.")
    now = (
        f"{median(losses):.3g} in the next {counted(len(losses), 'step', 'steps')}, where {usual.level:.3g} was usual"
    )
    healthy = median(losses) <= usual.limit
    if healthy and skipped:
        text = f"{rolled}, with {counted(skipped, 'batch', 'batches')} left out{earlier}, the loss was {now}:"
        return Clue(Link.DATA, Verdict.POINTS, f"{text} without that data the trouble was gone.")
    if healthy:
        return Clue(
            Link.DATA, Verdict.CLEARS, f"{rolled} the same data was taken again and the loss was {now}: it passed."
        )
    return Clue(Link.DATA, Verdict.CLEARS, f"{rolled} the loss was {now}: leaving data out did not end it.")


# ------------------------------------------------------------ the conclusion


def _conclusion(clues: Sequence[Clue]) -> str:
    points = [clue.link for clue in clues if clue.verdict is Verdict.POINTS]
    if Link.LEARNING_RATE in points:
        return "Most likely the learning rate: it jumped right before."
    if Link.PRECISION in points:
        return "Most likely precision: the loss scale fell while it happened."
    if Link.DATA in points:
        cleared = [str(clue.link) for clue in clues if clue.verdict is Verdict.CLEARS]
        also = f" The {' and the '.join(cleared)} gave no sign." if cleared else ""
        return f"Most likely the data: it ended once that data was left out.{also}"
    if any(clue.verdict is Verdict.SHOWS for clue in clues):
        return "It showed in the gradient; the records do not tell what put it there."
    return "The records do not tell where it came from."


# ------------------------------------------------------------ what is usual


def _first_look(scene: _Scene) -> int:
    return max(scene.span.start, scene.onset - LOOKBACK_STEPS)


def _usual(scene: _Scene, name: str) -> _Usual | None:
    """Of the steps before the lookback; where those are few, of all before the onset."""
    column, start = scene.series.columns[name], scene.span.start
    values: list[float] = []
    for end in (scene.onset - LOOKBACK_STEPS, scene.onset):
        values = [value for value in column.finite(max(start, end - BASELINE_STEPS), end) if value > 0]
        if len(values) >= LEAST_BASELINE:
            break
    else:
        return None
    logs = [math.log(value) for value in values]
    level = median(logs)
    # 1.4826 makes the median absolute deviation comparable to a standard deviation.
    spread = 1.4826 * median(abs(value - level) for value in logs)
    rise = max(_SIGMAS * spread, math.log(_LEAST_RISE[name]))
    return _Usual(math.exp(level), math.exp(level + rise))


def _first_above(scene: _Scene, column: Column, usual: _Usual) -> int | None:
    """The first index from which on most values are too high: one that falls back at once does not count."""
    high = [
        (column.at(index) or 0.0) > usual.limit or index in column.nonfinite
        for index in range(_first_look(scene), scene.last + 1)
    ]
    for place, is_high in enumerate(high):
        following = high[place : place + 3]
        if is_high and sum(following) * 2 > len(following):
            return _first_look(scene) + place
    return None
