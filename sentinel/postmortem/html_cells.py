"""Describe the plots that are made of cells: the parts of a step in a stack, and heat maps. Pure; data for plotly.js.

A cell lies between two places, `x` in the order tried and `steps` by number; the page leaves out cells that were
taken back where it shows step numbers, because what replaced them stands there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sentinel.detect.step_parts import PARTS
from sentinel.postmortem.cells import Cell, Cells
from sentinel.postmortem.html_charts import EXPERTS, GRADIENTS, TIME
from sentinel.postmortem.html_figures import Figure
from sentinel.postmortem.series import Series
from sentinel.sample import HISTOGRAM_EDGES

_COLOURS = dict(zip(PARTS, ("@time", "@loss", "@grad", "@bad", "@lr", "@history"), strict=True))


def cell_figures(series: Series) -> list[Figure]:
    """Of everything that has something recorded."""
    cells = series.cells
    found = [
        _histogram(cells["histogram"], series),
        _heat("groups", "Gradient norm by layer group", "L2, highest, sampled", GRADIENTS)
        | {"log": True, **_grid(cells["groups"], series, held=True)},
        _parts(cells["parts"], series),
        _heat("waits", "Waiting for other ranks", "s, longest; the late rank waits least", TIME)
        | _grid(cells["waits"], series),
        _heat("experts", "Expert load", "share of the choices, sampled", EXPERTS)
        | _grid(cells["experts"], series, mean=True, held=True),
        _heat("imbalance", "Expert imbalance by router", "0 is even, sampled", EXPERTS)
        | _grid(cells["imbalance"], series, held=True),
    ]
    return [figure for figure in found if figure["x"]]


def _heat(name: str, title: str, unit: str, group: str) -> Figure:
    return {"kind": "heat", "name": name, "title": title, "unit": unit, "group": group, "log": False, "traces": []}


def _parts(cells: Cells, series: Series) -> Figure:
    """Bars, as wide as their cell, of a mean step's parts."""
    rows = [name for name in PARTS if name in cells.rows]
    grid = _grid(cells, series, mean=True, rows=rows)
    colours = [_COLOURS[name] for name in rows]
    labels = [name.replace("_", " ") for name in rows]
    shown = {"kind": "bars", "name": "parts", "title": "Where a step's time goes", "unit": "s", "group": TIME}
    return {**shown, "legend": True, "traces": [], **grid, "rows": labels, "colors": colours}


def _histogram(cells: Cells, series: Series) -> Figure:
    """Shares of the values that are not 0, so that a cell of many samples looks like a cell of one."""
    used = [number for number in range(len(HISTOGRAM_EDGES) + 1) if _is_used(cells, str(number))]
    between = [str(number) for number in range(min(used), max(used) + 1)] if used else []
    grid = _grid(cells, series, rows=between, held=True, share=True)
    figure = _heat("histogram", "Gradient values by magnitude", "share of those not 0, sampled", GRADIENTS)
    return figure | grid | {"rows": [_edge(int(number)) for number in between], "upwards": True}


def _is_used(cells: Cells, row: str) -> bool:
    return any(cell.values.get(row) for cell in cells.cells)


def _edge(number: int) -> str:
    if number == len(HISTOGRAM_EDGES):
        return f"over {HISTOGRAM_EDGES[-1]:.0e}"
    return f"to {HISTOGRAM_EDGES[number]:.0e}"


def _grid(
    cells: Cells,
    series: Series,
    *,
    rows: Sequence[str] | None = None,
    mean: bool = False,
    share: bool = False,
    held: bool = False,
) -> Figure:
    """`z` by row and cell; with `held` a value stands until the next one of its generation."""
    names = list(cells.rows) if rows is None else list(rows)
    ends = [(cell.last, cell.last_step) for cell in cells.cells] if not held else list(_until_next(cells, series))
    divisors = [_divisor(cell, mean=mean, share=share) for cell in cells.cells]
    return {
        "x": [[cell.first + 0.5, last + 1.5] for cell, (last, _) in zip(cells.cells, ends, strict=True)],
        "steps": [[cell.first_step - 0.5, step + 0.5] for cell, (_, step) in zip(cells.cells, ends, strict=True)],
        "live": [int(cell.counts) for cell in cells.cells],
        "rows": names,
        "z": [
            [_short(cell.values, row, by) for cell, by in zip(cells.cells, divisors, strict=True)] for row in names
        ],
    }


def _until_next(cells: Cells, series: Series) -> Iterator[tuple[int, int]]:
    following: list[Cell | None] = [*cells.cells[1:], None]
    for cell, after in zip(cells.cells, following, strict=False):
        number, counts = cell.stretch
        span = series.spans[number]
        last = (span.live_end if counts else span.end) - 1
        if after is not None and after.stretch == cell.stretch:
            last = after.first - 1
        yield last, series.steps[last]


def _divisor(cell: Cell, *, mean: bool, share: bool) -> float:
    if share:
        return sum(cell.values.values()) or 1.0
    return float(cell.count) if mean else 1.0


def _short(values: Mapping[str, Any], row: str, by: float) -> float | None:
    """Three digits: a colour shows no more."""
    return None if row not in values else float(f"{values[row] / by:.3g}")
