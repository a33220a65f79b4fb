"""The gradient noise scale follows McCandlish et al. (2018, appendix A.1), where the truth is known."""

import doctest
import math

import pytest

from sentinel.daemon.noise_scale import RunNoiseScale
from sentinel.detect import noise_scale
from sentinel.detect.noise_scale import DECAY, SAMPLES_BEFORE_TOLD, Moments, NoiseScale, moments
from sentinel.records import StepRecord
from sentinel.sample import Sample
from sentinel.vocabulary import UpdateResult


def test_the_seeded_example_finds_the_known_noise_scale() -> None:
    result = doctest.testmod(noise_scale)
    assert result.attempted > 0
    assert result.failed == 0


def test_moments_of_equal_batches_are_the_papers_formula() -> None:
    small, big = 16.0, 64.0
    local, whole = [3.0, 2.5, 3.5, 2.0], 1.75
    found = moments(local, [small] * 4, whole)
    mean = sum(norm**2 for norm in local) / 4
    assert found is not None
    assert found.signal == pytest.approx((big * whole**2 - small * mean) / (big - small))
    assert found.noise == pytest.approx((mean - whole**2) / (1 / small - 1 / big))


def test_moments_without_noise_see_none() -> None:
    assert moments([2.0, 2.0], [8.0, 8.0], 2.0) == Moments(0.0, 4.0)


@pytest.mark.parametrize(("norms", "sizes"), [([1.0], [4.0]), ([1.0, 1.0], [4.0, 0.0]), ([1.0, 1.0], [4.0])])
def test_one_rank_or_an_unknown_batch_tells_nothing(norms: list[float], sizes: list[float]) -> None:
    assert moments(norms, sizes, 1.0) is None


def test_numerator_and_denominator_are_averaged_separately() -> None:
    scale, steps = NoiseScale(), [Moments(4.0, 8.0 if n % 2 else 0.5) for n in range(20)]
    for step in steps:
        found = scale.learn(step)
    noise = signal = 0.0
    for number, step in enumerate(steps):
        weight = max(1.0 - DECAY, 1.0 / (number + 1))
        noise, signal = noise + weight * (step.noise - noise), signal + weight * (step.signal - signal)
    assert found == pytest.approx(noise / signal)
    quotients = [step.noise / step.signal for step in steps]
    assert found != pytest.approx(sum(quotients) / len(quotients), rel=0.05), "the test could not tell them apart"


def test_too_few_samples_a_nan_and_a_negative_signal_tell_nothing() -> None:
    scale = NoiseScale()
    told = [scale.learn(Moments(2.0, 1.0)) for _ in range(SAMPLES_BEFORE_TOLD)]
    assert told == [None] * (SAMPLES_BEFORE_TOLD - 1) + [2.0]
    assert scale.learn(Moments(math.nan, 1.0)) == 2.0
    for _ in range(50):
        found = scale.learn(Moments(2.0, -1.0))
    assert found is None


def record(local: float | None, whole: float, **units: float) -> StepRecord:
    sampled = Sample(local_grad_norm=local)
    return StepRecord(1, 0, 50, 1.0, UpdateResult.APPLIED, grad_norm=whole, sampled=sampled, **units)


def test_a_run_is_told_in_samples_where_reported_else_in_tokens() -> None:
    for unit in ("samples", "tokens"):
        of_run = RunNoiseScale()
        found = [of_run({rank: record(2.0, 1.5, **{unit: 8.0}) for rank in (0, 1)}) for _ in range(5)][-1]
        expected = moments([2.0, 2.0], [8.0, 8.0], 1.5)
        assert expected is not None
        assert found == pytest.approx(expected.noise / expected.signal)
    assert [RunNoiseScale()({0: record(2.0, 1.5), 1: record(2.0, 1.5)}) for _ in range(6)][-1] is None


def test_a_step_that_a_rank_did_not_tell_or_of_different_gradients_is_left_out() -> None:
    of_run = RunNoiseScale()
    good = {rank: record(2.0, 1.5, samples=8.0) for rank in (0, 1)}
    told = [of_run(good) for _ in range(5)][-1]
    assert told is not None
    for other in (record(None, 1.5, samples=8.0), record(9.0, 1.5), record(9.0, 7.0, samples=8.0)):
        assert of_run({0: good[0], 1: other}) == told
    assert of_run({0: good[0], 1: record(2.1, 1.5, samples=8.0)}) != told
