"""The slow drift detector: what it must find, and where it must stay silent."""

import math
import random

import pytest

from sentinel.detect.loss_divergence import LossDivergence
from sentinel.detect_settings import LossDivergenceSettings
from sentinel.vocabulary import Tier
from tests.detect.series import findings


def healthy(seed: int, steps: int, noise: float = 0.05) -> list[float]:
    chance = random.Random(seed)
    return [(2.0 + math.exp(-step / 50)) * chance.gauss(1.0, noise) for step in range(steps)]


def first(found, tier):
    return next(finding for finding in found if finding.tier is tier)


def test_a_slow_spike_is_confirmed_within_sixty_steps_and_its_onset_precedes_the_damage():
    losses = healthy(1, 300) + [2.0 * 1.02**step for step in range(300)]  # case O09
    found = findings(LossDivergence(LossDivergenceSettings()), losses)
    assert first(found, Tier.T3).step <= 360
    assert first(found, Tier.T1).step < first(found, Tier.T3).step
    assert 290 <= first(found, Tier.T3).onset_step <= 312


def test_a_ramp_of_fifteen_hundredths_of_a_per_cent_is_found():
    losses = healthy(2, 300)
    losses += [loss * 1.0015**step for step, loss in enumerate(healthy(3, 900)[300:])]
    assert first(findings(LossDivergence(LossDivergenceSettings()), losses), Tier.T3).step < 500


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_healthy_runs_raise_no_alarm(noise):
    bad = [
        seed for seed in range(20) if findings(LossDivergence(LossDivergenceSettings()), healthy(seed, 1500, noise))
    ]
    assert bad == []


@pytest.mark.parametrize("losses", [[0.0] * 500, [1e-4] * 500, [-1.0] * 500, [math.nan] * 500], ids=str)
def test_constant_negative_and_absent_losses_raise_no_alarm(losses):
    assert findings(LossDivergence(LossDivergenceSettings()), losses) == []


def test_a_short_jump_is_not_a_drift():
    losses = healthy(4, 300)
    losses[200:210] = [6.0] * 10
    assert findings(LossDivergence(LossDivergenceSettings()), losses) == []


def test_a_level_that_stays_is_reported_for_a_bounded_time():
    losses = [2.0] * 200 + [3.0] * 2000
    found = findings(LossDivergence(LossDivergenceSettings()), losses)
    assert found[-1].step < 600
