"""Describe the timeline: generations, incidents, actions and snapshots, on the axis of the plots below it. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sentinel.postmortem.html_figures import Figure
from sentinel.postmortem.html_marks import Band, Deed, Marks
from sentinel.postmortem.series import Series, Span
from sentinel.vocabulary import Action, Quality

T = TypeVar("T")

MOST_LANES = 8  # generations with a lane of their own
MOST_DRAWN = 400  # actions, and snapshots; those that matter most first
_SYMBOLS = {
    "rollback": "triangle-left",
    "skip_update": "x",
    "pause": "square",
    "stop": "octagon",
    "restart": "triangle-right",
}


def timeline(report: Mapping[str, Any], series: Series, marks: Marks) -> Figure:
    """Lanes from top to bottom; empty ones are left out."""
    traces = _generations(series)
    traces += _incidents(marks.bands, series)
    if marks.deeds:
        traces.append(_deeds(_some(marks.deeds, lambda deed: deed.action == Action.ROLLBACK), series))
    traces += _snapshots(report["checkpoints"], series)
    lanes = list(dict.fromkeys(lane for trace in traces for lane in trace["y"] if lane is not None))
    return {"name": "timeline", "title": "Timeline", "lanes": lanes, "traces": traces}


def _generations(series: Series) -> list[Figure]:
    filled = [span for span in series.spans if span.end > span.start]
    several = len({span.attempt for span in filled}) > 1
    traces = []
    for span in filled:
        lane = _lane(span, several=several) if len(filled) <= MOST_LANES else "generations"
        for first, end, colour, what in (
            (span.start, span.live_end, "@live", "counts"),
            (span.live_end, span.end, "@history", "taken back"),
        ):
            if end > first:
                words = (
                    f"{_lane(span, several=several)}: steps {series.steps[first]} to {series.steps[end - 1]}, {what}"
                )
                traces.append(_bar(series, (first, end - 1), lane, words) | {"color": colour, "width": 11})
    return traces


def _lane(span: Span, *, several: bool) -> str:
    return f"attempt {span.attempt}.{span.generation}" if several else f"generation {span.generation}"


def _incidents(bands: Sequence[Band], series: Series) -> Iterator[Figure]:
    """One trace per severity, however many incidents there are; a gap ends each."""
    for severity in dict.fromkeys(band.severity for band in bands):
        bars = [
            _bar(series, (band.first, band.last), "incidents", band.words)
            for band in bands
            if band.severity == severity
        ]
        yield {
            **{key: [item for bar in bars for item in (*bar[key], None)] for key in ("x", "steps", "y", "text")},
            "name": severity,
            "color": f"@{severity}",
            "width": 9,
            "mode": "lines+markers",
            "symbol": "diamond",
            "size": 11,
        }


def _bar(series: Series, ends: tuple[int, int], lane: str, words: str) -> Figure:
    return {
        "x": [place + 1 for place in ends],
        "steps": [series.steps[place] for place in ends],
        "y": [lane, lane],
        "text": [words, words],
        "name": words,
        "mode": "lines",
    }


def _deeds(deeds: Sequence[Deed], series: Series) -> Figure:
    return {
        "x": [deed.place + 1 for deed in deeds],
        "steps": [series.steps[deed.place] for deed in deeds],
        "y": ["actions"] * len(deeds),
        "text": [deed.words for deed in deeds],
        "symbols": [_SYMBOLS.get(deed.action, "circle") for deed in deeds],
        "colors": ["@action" if deed.outcome in {"applied", "pending"} else "@critical" for deed in deeds],
        "name": "actions",
        "mode": "markers",
        "size": 12,
    }


def _snapshots(checkpoints: Sequence[Mapping[str, Any]], series: Series) -> list[Figure]:
    placed = [
        (row, place)
        for row in _some(checkpoints, lambda row: row["quality"] in {Quality.BAD, Quality.SUSPECT})
        if (place := series.index_of(row["attempt"], row["generation"], row["step"])) is not None
    ]
    if not placed:
        return []
    return [
        {
            "x": [place + 1 for _, place in placed],
            "steps": [row["step"] for row, _ in placed],
            "y": ["snapshots"] * len(placed),
            "text": [_snapshot_words(row) for row, _ in placed],
            "colors": [f"@{row['quality'].lower()}" for row, _ in placed],
            "name": "snapshots",
            "mode": "markers",
            "symbol": "circle",
            "size": 8,
        }
    ]


def _snapshot_words(row: Mapping[str, Any]) -> str:
    held = "held" if row["kept"] else "dropped since"
    return f"{row['tier']} snapshot of step {row['step']}: {row['quality']}, {held} ({row['reason']})"


def _some(given: Sequence[T], matters: Callable[[T], bool]) -> list[T]:
    """At most MOST_DRAWN, in order: first what matters, then the newest of the rest."""
    if len(given) <= MOST_DRAWN:
        return list(given)
    places = sorted(range(len(given)), key=lambda place: (matters(given[place]), place))[-MOST_DRAWN:]
    return [given[place] for place in sorted(places)]
