"""Parts of a step add up to it, and what was waited for other ranks is in one of them only."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.detect.step_parts import PARTS, StepTimes, parts_of

SECONDS = st.none() | st.floats(0.0, 1e3)
SOURCES = st.sampled_from([None, "ddp", "work", "of a later version"])


@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), SECONDS, SOURCES, st.floats(0.0, 1e3))
def test_parts_add_up_to_the_step_and_none_is_negative(measured, wait, source, rest):
    step = sum(seconds for seconds in measured if seconds is not None) + rest
    parts = parts_of(StepTimes(step, *measured, wait, source))
    assert list(parts) == [name for name in PARTS if name in parts]
    assert all(seconds >= 0.0 for seconds in parts.values())
    if parts:
        assert math.isclose(sum(parts.values()), step, rel_tol=1e-9, abs_tol=1e-9)
    assert ("communication_wait" in parts) == (wait is not None)


def test_a_wait_of_ddp_lies_in_backward():
    parts = parts_of(StepTimes(1.0, 0.0, 0.2, 0.5, 0.1, 0.3, "ddp"))
    assert parts["backward"] == pytest.approx(0.2)
    assert (parts["forward"], parts["communication_wait"], parts["other"]) == pytest.approx((0.2, 0.3, 0.2))


def test_a_wait_for_the_loops_own_collectives_is_taken_from_the_rest_first():
    parts = parts_of(StepTimes(1.0, 0.0, 0.2, 0.5, 0.1, 0.3, "work"))
    assert (parts["other"], parts["backward"], parts["forward"]) == pytest.approx((0.0, 0.4, 0.2))


def test_a_step_of_which_only_the_whole_is_known_has_no_parts():
    assert parts_of(StepTimes(1.0)) == {}
    assert parts_of(StepTimes(None, backward=0.5)) == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_absent(bad):
    assert parts_of(StepTimes(bad, backward=0.5)) == {}
    assert parts_of(StepTimes(1.0, bad, 0.25, communication_wait=bad)) == {"forward": 0.25, "other": 0.75}
