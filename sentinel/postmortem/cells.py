"""Gather rows of values over a run of any length in bounded memory: what heat maps and stacked bars are drawn from.

A run is read once, from its first record to its last. Each cell covers neighbouring places; when there are too many,
pairs of neighbours become one. No cell covers both what counts and what was taken back, nor two generations, unless
there are more of these than cells: then the later one names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MOST_CELLS = 160  # drawn side by side; up to twice as many

Fold = Callable[[float, float], float]


@dataclass(slots=True)
class Cell:
    """A stretch of a run. `values`: row -> the fold of what was added there."""

    first: int  # index of the first place ...
    last: int  # ... and of the last one, both within
    first_step: int
    last_step: int
    stretch: tuple[int, bool]  # number of the span, and whether it counts
    count: int  # how many were added
    values: dict[str, float]

    @property
    def counts(self) -> bool:
        """False: a rollback or restart took it back."""
        return self.stretch[1]


@dataclass(slots=True)
class Cells:
    """`fold` makes one value of two: the highest, or the sum (divide by `Cell.count` for a mean)."""

    fold: Fold
    cells: list[Cell] = field(default_factory=list)
    rows: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    _width: int = 1

    def __len__(self) -> int:
        return len(self.cells)

    def add(self, place: int, step: int, stretch: tuple[int, bool], values: Mapping[str, float]) -> None:
        """Places come in rising order."""
        self.rows.update(dict.fromkeys(values))
        new = Cell(place, place, step, step, stretch, 1, dict(values))
        last = self.cells[-1] if self.cells else None
        if last is not None and last.stretch == stretch and last.count < self._width:
            self._join(last, new)
            return
        self.cells.append(new)
        if len(self.cells) > 2 * MOST_CELLS:
            self._halve()

    def _halve(self) -> None:
        self._width *= 2
        self.cells = self._paired(across=False)
        if len(self.cells) > 3 * MOST_CELLS // 2:
            self.cells = self._paired(across=True)

    def _paired(self, *, across: bool) -> list[Cell]:
        kept: list[Cell] = []
        free = False  # whether the last one kept may take in another
        for cell in self.cells:
            if free and (across or kept[-1].stretch == cell.stretch):
                self._join(kept[-1], cell)
                free = False
            else:
                kept.append(cell)
                free = True
        return kept

    def _join(self, cell: Cell, other: Cell) -> None:
        cell.last, cell.last_step = other.last, other.last_step
        cell.stretch = other.stretch
        cell.count += other.count
        for row, value in other.values.items():
            cell.values[row] = self.fold(cell.values[row], value) if row in cell.values else value
