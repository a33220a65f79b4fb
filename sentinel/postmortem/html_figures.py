"""Describe the plots: one line chart per signal, and the timeline above them. Pure; plain data for plotly.js.

Every trace has `x`, the number of the update in the order tried, and `steps`, the step numbers of the same points:
the page can show either. A colour is `@name`, a name of the style sheet, so that one page is light and dark.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from sentinel.postmortem.html_charts import CHARTS, WIDE, Chart, Line
from sentinel.postmortem.html_marks import Marks
from sentinel.postmortem.html_points import Stretch, stretches, thin
from sentinel.postmortem.series import Column, Series
from sentinel.postmortem.wording import NONFINITE_WORDS

Figure = dict[str, Any]

BUCKETS = 1000  # of a wide plot's line, half as many of another, a quarter of a sampled one; each keeps two points
_MOST_MARKED = 100  # samples that get a marker each
_LOG_RATIO = 20.0  # a highest value this many times the median is drawn on a logarithmic axis


def figures(series: Series, marks: Marks) -> list[Figure]:
    """Of every chart that has something recorded."""
    keep = marks.keep
    found = []
    for chart in CHARTS:
        lines = [line for line in chart.lines if series.columns[line.signal].is_recorded]
        if lines:
            found.append(_figure(chart, lines, series, keep))
    return found


def _figure(chart: Chart, lines: Sequence[Line], series: Series, keep: set[int]) -> Figure:
    traces = []
    for line in lines:
        traces += _line(line, series, keep, BUCKETS if chart.name in WIDE else BUCKETS // 2)
    bad = [
        (line, stretch)
        for line in lines
        for stretch in stretches(series.columns[line.signal], {span.start for span in series.spans})
    ]
    if bad:
        traces.append(_nonfinite(bad, series))
    counted = {line.label: len(series.columns[line.signal].nonfinite) for line in lines}
    return {
        "name": chart.name,
        "title": chart.title,
        "unit": chart.unit,
        "group": chart.group,
        "prefixes": chart.prefixes,
        "log": any(_wants_log(series.columns[line.signal]) for line in lines),
        "legend": len(lines) > 1,
        "empty": not any(series.columns[line.signal].finite(0, len(series)) for line in lines),
        "nonfinite": {label: count for label, count in counted.items() if count},
        "traces": traces,
    }


def _line(line: Line, series: Series, keep: set[int], buckets: int) -> list[Figure]:
    """What counts, and behind it in grey what a rollback or restart made history."""
    column = series.columns[line.signal]
    if line.sampled:  # hardly ever one at each step around an incident
        buckets, keep = buckets // 2, set()
    bucket = max(1, math.ceil(len(series) / buckets))
    # History begins at the last step that counts, so that no hole opens between the two lines.
    taken_back = [(max(span.start, span.live_end - 1), span.end) for span in series.spans if span.end > span.live_end]
    counting = [(span.start, span.live_end) for span in series.spans]
    history, live = (
        _points(column, series, [thin(column.values, *part, bucket, keep) for part in parts], sampled=line.sampled)
        for parts in (taken_back, counting)
    )
    few = line.sampled and len(live["x"]) <= _MOST_MARKED
    shared = {"mode": "lines+markers" if few else "lines", "size": 5, "label": line.label}
    found = [{**live, **shared, "name": line.label, "color": line.colour, "width": 1.8}]
    if history["x"]:
        name = f"{line.label}, taken back"
        found.insert(0, {**history, **shared, "name": name, "color": "@history", "width": 1.3})
    return found


def _points(column: Column, series: Series, parts: Sequence[Sequence[int]], *, sampled: bool) -> Figure:
    places: list[int | None] = []
    for part in parts:
        chosen = [place for place in part if not sampled or column.at(place) is not None]
        if chosen:
            places += [*([None] if places else []), *chosen]
    return {
        "x": [None if place is None else place + 1 for place in places],
        "steps": [None if place is None else series.steps[place] for place in places],
        "y": [None if place is None else _short(column.at(place)) for place in places],
    }


def _nonfinite(bad: Sequence[tuple[Line, Stretch]], series: Series) -> Figure:
    """Crosses at the top edge, two per stretch of several steps."""
    x: list[int | None] = []
    steps: list[int | None] = []
    text: list[str | None] = []
    for line, stretch in bad:
        first, last = series.steps[stretch.first], series.steps[stretch.last]
        words = " or ".join(NONFINITE_WORDS[word] for word in stretch.words)
        where = f"step {first}" if stretch.steps == 1 else f"steps {first} to {last}"
        for place in dict.fromkeys((stretch.first, stretch.last)):
            x.append(place + 1)
            steps.append(series.steps[place])
            text.append(
                f"{line.label} is {words} at {where}" + (f", {stretch.steps} of them" if stretch.steps > 1 else "")
            )
        x.append(None)
        steps.append(None)
        text.append(None)
    return {
        "x": x,
        "steps": steps,
        "y": [None if place is None else 0.965 for place in x],
        "text": text,
        "name": "not finite",
        "mode": "lines+markers",
        "symbol": "x",
        "color": "@bad",
        "width": 3,
        "edge": True,
    }


def _wants_log(column: Column) -> bool:
    values = column.finite(0, len(column.values))
    if not values or min(values) <= 0:
        return False
    return max(values) > _LOG_RATIO * median(values)


def _short(value: float | None) -> float | None:
    """Six digits: more cannot be seen, and would double the page."""
    return None if value is None else float(f"{value:.6g}")
