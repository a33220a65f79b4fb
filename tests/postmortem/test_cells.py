"""Heat maps and stacks are gathered in bounded memory, and nothing that was added is lost."""

import operator

from hypothesis import given
from hypothesis import strategies as st

from sentinel.postmortem.cells import MOST_CELLS, Cells

LIVE = (0, True)


def filled(count: int, fold=max) -> Cells:
    cells = Cells(fold)
    for place in range(count):
        cells.add(place, place + 1, LIVE, {"a": float(place % 1000 == 777), "b": 1.0})
    return cells


def test_a_short_run_has_a_cell_for_each_place():
    cells = filled(100)
    assert [(cell.first, cell.last, cell.first_step) for cell in cells.cells] == [(n, n, n + 1) for n in range(100)]


def test_a_long_run_has_no_more_cells_and_they_cover_it():
    cells = filled(200_000)
    assert MOST_CELLS <= len(cells) <= 2 * MOST_CELLS
    assert (cells.cells[0].first, cells.cells[-1].last) == (0, 199_999)
    assert all(one.last + 1 == after.first for one, after in zip(cells.cells, cells.cells[1:], strict=False))


def test_the_highest_is_never_lost():
    cells = filled(100_000)
    high = [cell for cell in cells.cells if cell.values["a"] == 1.0]
    assert len(high) == 100, "one for each of the places that stood out"


def test_sums_and_counts_give_a_mean():
    cells = filled(10_000, operator.add)
    assert sum(cell.count for cell in cells.cells) == 10_000
    assert sum(cell.values["b"] for cell in cells.cells) == 10_000.0


@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=12))
def test_no_cell_covers_two_generations_or_what_counts_and_what_does_not(lengths):
    cells = Cells(max)
    stretches = [(number, live) for number, (length, live) in enumerate(lengths) for _ in range(length)]
    for place, stretch in enumerate(stretches):
        cells.add(place, place, stretch, {"a": 1.0})
    for cell in cells.cells:
        assert {stretches[place] for place in range(cell.first, cell.last + 1)} == {cell.stretch}
    assert sum(cell.count for cell in cells.cells) == len(stretches)


def test_a_run_of_thousands_of_generations_is_gathered_all_the_same():
    cells = Cells(max)
    for place in range(20_000):
        cells.add(place, place, (place // 2, True), {"a": 1.0})
    assert len(cells) <= 2 * MOST_CELLS
    assert sum(cell.count for cell in cells.cells) == 20_000
    assert all(one.last + 1 == after.first for one, after in zip(cells.cells, cells.cells[1:], strict=False))
