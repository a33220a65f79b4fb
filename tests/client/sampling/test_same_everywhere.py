"""What is sampled does not depend on how the loop is written, to 1e-5."""

import pytest

from sentinel.sample import Sample
from sentinel.testing import FakeDaemon
from tests.client.loops import Loop
from tests.client.sampling.conftest import EVERY
from tests.client.sampling.samples import moved, samples
from tests.client.test_identical_series import EQUAL, PAIRS, RELATIVE

# A closure's gradients are made inside the step; fused GradScaler steps see them scaled; and so on: all of them.
KINDS = [kind for kind in EQUAL if kind != "reported losses"]


def must_be_equal(one: Sample, other: Sample) -> None:
    assert one.group_norms == pytest.approx(other.group_norms, rel=RELATIVE)
    assert one.update_norm == pytest.approx(other.update_norm, rel=1e-4)  # a small difference of large numbers
    assert one.weight_norm == pytest.approx(other.weight_norm, rel=RELATIVE)
    assert one.histogram is not None
    assert other.histogram is not None
    assert sum(one.histogram) + one.zeros == sum(other.histogram) + other.zeros > 0
    assert moved(one.histogram, other.histogram) <= 1, "a rounding error may carry a value over an edge"
    assert abs(one.zeros - other.zeros) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_that_of_the_plain_loop(daemon: FakeDaemon, kind: str) -> None:
    plain, _ = Loop().train(daemon)
    found, _ = EQUAL[kind].train(daemon)
    must_be_equal(samples(found.records)[EVERY], samples(plain.records)[EVERY])


@pytest.mark.parametrize("kind", PAIRS)
def test_samples_of_both_are_the_same(daemon: FakeDaemon, kind: str) -> None:
    one, other = (loop.train(daemon)[0] for loop in PAIRS[kind])
    must_be_equal(samples(one.records)[EVERY], samples(other.records)[EVERY])
