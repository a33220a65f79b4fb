"""A long series is drawn with few points, and none of what matters is lost."""

import math
import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from sentinel.postmortem.html_points import Stretch, stretches, thin
from sentinel.postmortem.series import Column

NUMBERS = st.one_of(st.floats(allow_infinity=False, width=32), st.just(math.nan))


@given(st.lists(NUMBERS, max_size=80), st.integers(1, 20), st.sets(st.integers(0, 79)))
def test_every_buckets_extremes_and_all_that_is_to_be_kept_are_drawn(values, bucket, keep):
    chosen = thin(values, 0, len(values), bucket, keep)
    assert chosen == sorted(set(chosen))
    assert {place for place in keep if place < len(values)} <= set(chosen)
    for first in range(0, len(values), bucket):
        finite = [value for value in values[first : first + bucket] if not math.isnan(value)]
        drawn = [values[place] for place in chosen if first <= place < first + bucket]
        if finite:
            assert min(finite) in drawn
            assert max(finite) in drawn
        else:
            assert drawn, "an empty bucket breaks the line"


def test_a_short_series_is_drawn_whole():
    assert thin([3.0, 1.0, 2.0], 0, 3, 1, ()) == [0, 1, 2]


def test_neighbouring_nonfinite_steps_are_one_stretch_but_not_across_a_generation():
    column = Column(array("d", [math.nan] * 10), {2: "nan", 3: "inf", 4: "nan", 7: "-inf"})
    assert stretches(column, {0, 4}) == [
        Stretch(2, 3, 2, ("inf", "nan")),
        Stretch(4, 4, 1, ("nan",)),
        Stretch(7, 7, 1, ("-inf",)),
    ]


def test_ten_thousand_stretches_are_drawn_as_few_and_all_are_counted():
    chance = random.Random(1)
    places = sorted(chance.sample(range(200_000), 10_000))
    column = Column(array("d", [math.nan] * 200_000), dict.fromkeys(places, "nan"))
    found = stretches(column, {0, 100_000})
    assert len(found) <= 400
    assert sum(stretch.steps for stretch in found) == 10_000
    assert (found[0].first, found[-1].last) == (places[0], places[-1])
