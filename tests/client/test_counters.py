"""What is counted of a step: tokens, samples, operations; clippings that had an effect, absent gradients."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from sentinel.client import reading
from sentinel.client.attempt import Attempt
from sentinel.client.attempts import Attempts
from sentinel.client.clipping import REMEMBERED, Clipping
from sentinel.client.markers import Markers
from sentinel.client.probes.peaks import peak_named
from sentinel.client.probing import Probing
from sentinel.testing import FakeDaemon
from tests.client.training import Setup, loader, make
from tests.client.watching import watched

STEPS = 6


def update(setup: Setup, batch: Any, scale: float = 1.0) -> None:
    setup.optimizer.zero_grad()
    (scale * nn.functional.cross_entropy(setup.model(batch[0]), batch[1])).backward()
    setup.optimizer.step()


def batches() -> list[Any]:
    torch.manual_seed(3)
    return list(loader())[:STEPS]


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_counted_from_what_run_batches_drew(daemon: FakeDaemon, workers: int) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in found.run.batches(loader(size=40, workers=workers)):
            update(setup, batch)
    assert found.all("samples") == [16.0, 16.0, 8.0], "the last batch of the pass is smaller"


def test_samples_of_micro_batches_add_up_over_the_update(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for place, (inputs, targets) in enumerate(found.run.batches(loader(size=96))):
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            if place % 3 == 2:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
    assert found.all("samples") == [48.0, 48.0]


def test_what_is_reported_is_taken_over_what_was_drawn(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in found.run.batches(loader(size=32)):
            update(setup, batch)
            found.run.report(samples=5, tokens=700)
    assert found.all("samples") == [5.0, 5.0]
    assert found.all("tokens") == [700.0, 700.0]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields samples itself: no sampler names them."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(torch.randn(32, 16), torch.randint(0, 4, (32,)), strict=True)


def test_without_a_sampler_that_names_them_samples_are_absent(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in found.run.batches(torch.utils.data.DataLoader(Stream(), batch_size=16)):
            update(setup, batch)
    assert found.all("samples") == [None, None]


# ---------------------------------------------------------------- operations


def test_operations_per_token_and_the_peak_give_the_utilisation(daemon: FakeDaemon) -> None:
    setup = make()
    settings = {"throughput": {"flops_per_token": 6e6, "peak_flops_per_second": 1e12}}
    with watched(daemon, setup.model, setup.optimizer, settings=settings) as found:
        for batch in batches():
            update(setup, batch)
            found.run.report(tokens=100)
    assert found.all("flops") == [6e8] * STEPS
    expected = [6e8 / seconds / 1e12 for seconds in found.all("step_seconds")]
    assert found.all("mfu_ratio")[1:] == pytest.approx(expected[1:])
    assert found.records[0].mfu_ratio is None, "the first forward came before anything of ours saw the loop"


def test_of_a_loop_under_run_batches_the_first_step_is_whole_too(daemon: FakeDaemon) -> None:
    setup = make()
    settings = {"throughput": {"flops_per_sample": 1e6, "peak_flops_per_second": 1e12}}
    with watched(daemon, setup.model, setup.optimizer, settings=settings) as found:
        for batch in found.run.batches(loader(size=32)):
            update(setup, batch)
    assert found.all("flops") == [16e6, 16e6]
    expected = [16e6 / seconds / 1e12 for seconds in found.all("step_seconds")]
    assert found.all("mfu_ratio") == pytest.approx(expected)


def test_reported_operations_are_taken_over_those_of_the_settings(daemon: FakeDaemon) -> None:
    setup = make()
    settings = {"throughput": {"flops_per_token": 6e6, "flops_per_sample": 1.0}}
    with watched(daemon, setup.model, setup.optimizer, settings=settings) as found:
        for batch in batches():
            update(setup, batch)
            found.run.report(tokens=100, flops=7e9)
    assert found.all("flops") == [7e9] * STEPS
    assert found.all("mfu_ratio") == [None] * STEPS, "a CPU has no known peak"
    assert not any(found.all("reported")), "flops is a field of its own"


def test_where_nothing_tells_the_operations_they_are_absent(daemon: FakeDaemon) -> None:
    setup = make()
    settings = {"throughput": {"flops_per_token": 6e6, "peak_flops_per_second": 1e12}}
    with watched(daemon, setup.model, setup.optimizer, settings=settings) as found:
        for batch in batches():
            update(setup, batch)
    assert found.all("flops") == found.all("mfu_ratio") == [None] * STEPS


def test_only_a_whole_device_of_a_known_name_has_a_known_peak() -> None:
    assert peak_named("NVIDIA H100 80GB HBM3") == peak_named("NVIDIA H200") == 989e12
    assert peak_named("A100-SXM4-80GB") == 312e12, "older drivers leave the vendor out"
    for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "Tesla V100-SXM2-16GB", ""):
        assert peak_named(name) is None, name


# ---------------------------------------------------------------- clipping


def clip_at(setup: Setup, most: float) -> float:
    return float(nn.utils.clip_grad_norm_(setup.model.parameters(), most))


@pytest.mark.parametrize("late", [False, True], ids=["on the host", "read with the record"])
def test_clip_fraction_is_the_share_of_clippings_that_made_gradients_smaller(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Late: as on a device, no number is read before the record of its step is."""
    asked = []
    if late:
        monkeypatch.setattr(reading, "is_free", asked.append)
    setup = make()
    norms = []
    with watched(daemon, setup.model, setup.optimizer) as found:
        for place, (inputs, targets) in enumerate(batches()):
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            norms.append(clip_at(setup, 1e-3 if place % 3 == 0 else 1e3))
            setup.optimizer.step()
    assert bool(asked) is late
    assert all(1e-3 < norm < 1e3 for norm in norms), "one limit is below every norm, the other above"
    assert found.all("clip_fraction") == pytest.approx([1, 1 / 2, 1 / 3, 2 / 4, 2 / 5, 2 / 6])


def test_attempts_that_are_not_clipped_have_no_clip_fraction_and_do_not_count(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for place, (inputs, targets) in enumerate(batches()):
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            if place in {1, 3}:
                clip_at(setup, 1e-3 if place == 1 else 1e3)
            if place == 5:
                clip_at(setup, math.inf)  # only to have the norm
            setup.optimizer.step()
    assert found.all("clip_fraction") == [None, 1.0, None, 0.5, None, None]
    assert found.records[5].grad_norm_source == "clip", "that call was seen"


def test_the_clip_fraction_forgets_what_is_older_than_a_hundred_clippings() -> None:
    clipping = Clipping(Attempts([], Markers(Owner()), 0))
    seen = []
    for ratio in [2.0] * REMEMBERED + [0.5] * REMEMBERED:
        attempt = Attempt()
        attempt.clips.append(ratio)
        seen.append(clipping.fraction(attempt))
    assert (seen[REMEMBERED - 1], seen[REMEMBERED + 49], seen[-1]) == (1.0, 0.5, 0.0)


class Owner:
    """Of markers without a loop."""

    probes = Probing()


# ---------------------------------------------------------------- gradients, evaluations


def test_trainable_parameters_without_a_gradient_are_counted(daemon: FakeDaemon) -> None:
    setup = make()
    spare = nn.Parameter(torch.zeros(3))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    setup.optimizer.add_param_group({"params": [spare, frozen]})
    with watched(daemon, setup.model, setup.optimizer) as found:
        for place, batch in enumerate(batches()):
            setup.model[0].bias.requires_grad_(place < 3)
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(setup.model(batch[0]), batch[1]).backward()
            if place == 1:
                spare.grad = torch.zeros(3)
            setup.optimizer.step()
    assert found.all("gradients_absent") == [1, 0, 1, 1, 1, 1], "frozen parameters want none"


@pytest.mark.parametrize("clips", [False, True])
def test_a_model_with_all_its_gradients_has_none_absent(daemon: FakeDaemon, clips: bool) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for inputs, targets in batches():
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            if clips:
                clip_at(setup, 1.0)
            setup.optimizer.step()
    assert found.all("gradients_absent") == [0] * STEPS


def test_of_several_optimizers_the_absent_gradients_add_up(daemon: FakeDaemon) -> None:
    setup = make()
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    one = torch.optim.SGD([*setup.model[0].parameters(), first], lr=0.1)
    other = torch.optim.SGD([*setup.model[4].parameters(), second], lr=0.1)
    with watched(daemon, setup.model, [one, other]) as found:
        for inputs, targets in batches():
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            one.step()
            other.step()
            setup.model.zero_grad()
    assert found.all("gradients_absent") == [2] * STEPS


def test_an_optimizer_without_a_closure_has_no_evaluations(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for place, (inputs, targets) in enumerate(batches()):

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                setup.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(setup.model(inputs), targets)
                loss.backward()
                return loss

            if place % 2:
                setup.optimizer.step(closure)
            else:
                closure()
                setup.optimizer.step()
    assert found.all("evaluations") == [None, 1] * (STEPS // 2)
