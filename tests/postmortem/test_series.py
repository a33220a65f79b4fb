"""Step records become columns in the order in which the updates were tried."""

import math

from sentinel.postmortem.series import gather
from sentinel.store.timeline import segments
from tests.postmortem.test_diagnosis import row

KNOWN = [
    {"attempt": 1, "generation": 0, "target_step": 0},
    {"attempt": 1, "generation": 1, "target_step": 2},
]


def test_a_generation_counts_up_to_where_the_next_one_starts():
    rows = [row(step) for step in range(1, 6)] + [row(step, 1) for step in range(3, 5)]
    found = gather(segments(KNOWN), rows)
    assert list(found.steps) == [1, 2, 3, 4, 5, 3, 4]
    assert [span[:] for span in found.spans] == [(1, 0, 0, 5, 2), (1, 1, 5, 7, 7)]
    assert (found.index_of(1, 0, 4), found.index_of(1, 1, 4), found.index_of(1, 1, 99)) == (3, 6, 6)
    assert found.index_of(2, 0, 1) is None


def test_of_several_ranks_the_loss_is_the_mean_and_the_rest_the_highest():
    rows = [row(1, rank=0, loss=1.0, step_seconds=0.1), row(1, rank=1, loss=3.0, step_seconds=0.4)]
    found = gather(segments(KNOWN[:1]), rows)
    assert (found.columns["loss"].at(0), found.columns["step_seconds"].at(0)) == (2.0, 0.4)


def test_a_number_that_is_not_finite_on_one_rank_hides_no_where():
    rows = [row(1, rank=0, loss=1.0), row(1, rank=1, loss=math.nan), row(2, rank=0, loss=None)]
    column = gather(segments(KNOWN[:1]), rows).columns["loss"]
    assert [column.at(index) for index in range(2)] == [None, None]
    assert column.nonfinite == {0: "nan"}, "absent is not NaN"
    assert column.is_recorded


def test_updates_that_were_not_applied_are_named():
    found = gather(segments(KNOWN[:1]), [row(1), row(2, result="reflex")])
    assert found.not_applied == {1: "reflex"}
