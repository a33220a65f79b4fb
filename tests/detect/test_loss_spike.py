"""The loss spike detector: what it must find, how soon, and where it must stay silent."""

import math
import random

import pytest

from sentinel.detect.loss_spike import RELEARN_STEPS, LossSpike
from sentinel.detect_settings import LossSpikeSettings
from sentinel.vocabulary import Kind, Tier
from tests.detect.series import findings, record


def toy(seed: int, noise: float, steps: int = 300) -> list[float]:
    """4.5 to 2.5 within the first hundred steps, as a small model does."""
    chance = random.Random(seed)
    return [(2.4 + 2.1 * math.exp(-step / 35)) * chance.gauss(1.0, noise) for step in range(steps)]


def poisoned(losses: list[float], at: int, factor: float, steps: int = 15) -> list[float]:
    return [loss * (factor if at <= place < at + steps else 1.0) for place, loss in enumerate(losses)]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.05, 0.10])
def test_a_healthy_toy_loop_raises_no_alarm(noise):
    assert [seed for seed in range(60) if findings(LossSpike(LossSpikeSettings()), toy(seed, noise))] == []


@pytest.mark.parametrize(("factor", "noise"), [(1.3, 0.03), (1.5, 0.05), (2.0, 0.08), (3.0, 0.10), (50.0, 0.10)])
def test_a_poisoned_window_is_confirmed_within_five_steps(factor, noise):
    delays = []
    for seed in range(30):
        found = findings(LossSpike(LossSpikeSettings()), poisoned(toy(seed, noise), 150, factor), first_step=0)
        assert found, f"seed {seed} was missed"
        assert found[0].kind is Kind.LOSS_SPIKE
        assert found[0].tier is Tier.T2
        delays.append(found[0].step - 150)
    assert min(delays) >= 0
    assert max(delays) <= 4


@pytest.mark.parametrize("at", [5, 20, 45])
def test_the_rail_finds_a_jump_before_the_baseline_exists(at):
    for seed in range(30):
        found = findings(LossSpike(LossSpikeSettings()), poisoned(toy(seed, 0.05), at, 2.6), first_step=0)
        assert found, f"seed {seed} was missed"
        assert found[0].step - at <= 2
        assert found[0].evidence["rule"] == "rail"


def test_the_spike_of_the_second_step_is_found():
    losses = [6.9323, 23.6476, 9.6205, 6.3404, 6.2318, 7.448, 6.4688]  # openai/parameter-golf, seed 42
    assert next(finding.step for finding in findings(LossSpike(LossSpikeSettings()), losses)) == 3


@pytest.mark.parametrize("factor", [1.5, 1.9, 8.0])
def test_a_lone_high_step_is_no_spike(factor):
    losses = toy(1, 0.03)
    for at in range(60, 290, 23):
        losses[at] *= factor
    assert findings(LossSpike(LossSpikeSettings()), losses) == []


@pytest.mark.parametrize("losses", [[0.0] * 300, [1e-4] * 300, [math.nan] * 300, [None] * 300], ids=str)
def test_constant_and_absent_losses_raise_no_alarm(losses):
    assert findings(LossSpike(LossSpikeSettings()), losses) == []


def test_a_noisy_loss_near_zero_raises_no_alarm():
    chance = random.Random(5)
    losses = [1e-4 * math.exp(chance.gauss(0, 1.5)) for _ in range(2000)]
    assert findings(LossSpike(LossSpikeSettings()), losses) == []


def test_a_loss_that_turns_negative_leaves_log_space_and_is_still_watched():
    chance = random.Random(2)
    losses = [1.0 - 0.01 * step + chance.gauss(0, 0.05) for step in range(400)]
    assert findings(LossSpike(LossSpikeSettings()), losses) == []
    found = findings(LossSpike(LossSpikeSettings()), losses + [2.0] * 10)
    assert found[0].step in (402, 403)


def test_a_fallen_loss_is_never_a_spike():
    losses = [4.0] * 100 + [1.0] * 100 + [0.1] * 100
    assert findings(LossSpike(LossSpikeSettings()), losses) == []


def test_the_onset_is_the_first_high_step():
    losses = poisoned([2.0 + 0.01 * (step % 3) for step in range(200)], 120, 2.0)
    found = findings(LossSpike(LossSpikeSettings()), losses, first_step=0)
    assert (found[0].step, found[0].onset_step) == (121, 120)
    assert {finding.onset_step for finding in found} == {120}


def test_a_level_that_stays_becomes_the_new_normal():
    losses = [2.0 + 0.01 * (step % 3) for step in range(100)]
    losses += [4.0 + 0.01 * (step % 3) for step in range(RELEARN_STEPS + 200)]
    found = findings(LossSpike(LossSpikeSettings()), losses)
    assert 100 < found[0].step < 105
    assert found[-1].step <= 100 + RELEARN_STEPS + 1


def test_late_blow_up_is_found_at_its_first_jump():
    blow_up = [0.27, 0.23, 3.61, 8.54, 5.26, 322, 21.9, 131, 4977]  # case O11
    chance = random.Random(4)
    found = findings(LossSpike(LossSpikeSettings()), [0.1 * chance.gauss(1, 0.1) for _ in range(100)] + blow_up)
    assert found[0].step <= 103
    assert len({finding.onset_step for finding in found}) == 1


def test_a_nan_changes_nothing_that_was_learned():
    detector = LossSpike(LossSpikeSettings())
    findings(detector, toy(1, 0.05))
    before = detector.state()
    for value in (math.nan, math.inf, -math.inf, None):
        assert detector.observe(record(301, value)) is None
    assert detector.state() == before


@pytest.mark.parametrize("batch", [16, 32, 64])
@pytest.mark.parametrize("decay", [5, 20, 100])
def test_the_noise_of_a_small_batch_raises_no_alarm_in_the_first_steps(batch, decay):
    """Squared errors of a small batch: a chi-square loss whose first value may be low by chance."""
    alarms = 0
    for seed in range(40):
        chance = random.Random(seed)
        losses = [
            (math.exp(-step / decay) + 0.05) * sum(chance.gauss(0, 1) ** 2 for _ in range(batch)) / batch
            for step in range(120)
        ]
        alarms += bool(findings(LossSpike(LossSpikeSettings()), losses, first_step=0))
    assert alarms <= 1


def test_a_first_step_that_is_low_by_chance_makes_the_next_ones_no_spike():
    assert findings(LossSpike(LossSpikeSettings()), [0.4, 1.3, 1.2, 0.9, 1.4, 1.1, 0.8, 1.0], first_step=0) == []
    assert findings(LossSpike(LossSpikeSettings()), [6.9, 23.6, 9.6, 6.3, 6.2], first_step=0) != []
