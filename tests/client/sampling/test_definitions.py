"""Each sampled signal against an independent computation of what it is defined to be."""

import gc
import math
import weakref
from bisect import bisect_left
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sentinel.client.sampling.buckets import _compared, bucket_counts
from sentinel.records import Reflex
from sentinel.sample import HISTOGRAM_EDGES, Sample
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.loops import Net
from tests.client.sampling.conftest import EVERY
from tests.client.sampling.samples import counted, gradients, moved, norm, samples
from tests.client.training import CLASSES, FEATURES, loader, make
from tests.client.watching import watched

GROUPS = {"table": ["table.weight"], "first": ["first.weight", "first.bias"]}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    inputs, targets = torch.randn(16, FEATURES), torch.randint(CLASSES, (16,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()


def test_group_norms_and_histogram_are_of_the_gradients_before_clipping_unscaled(daemon: FakeDaemon) -> None:
    scale, truth = 4096.0, {}
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with watched(daemon, model, optimizer) as found:
        for number in range(1, EVERY + 1):
            torch.manual_seed(number)
            inputs, targets = torch.randn(16, FEATURES), torch.randint(CLASSES, (16,))
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
            truth = {name: one / scale for name, one in gradients(model).items()}
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
    sample = samples(found.records)[EVERY]
    assert norm(truth.values()) > 1e-2, "it was clipped"
    expected = {group: norm(one for name, one in truth.items() if name.split(".")[0] == group) for group in "014"}
    assert sample.group_norms == pytest.approx(expected, rel=1e-5)
    assert math.hypot(*sample.group_norms.values()) == pytest.approx(found.records[-1].grad_norm, rel=1e-5)
    counts, zeros = counted(truth.values())
    assert moved(sample.histogram, counts) == 0
    assert sample.zeros == zeros
    assert len([count for count in counts if count]) > 5, "the values are spread"


@pytest.mark.parametrize("kind", ["tied", "sparse"])
def test_a_tied_weight_counts_once_and_a_sparse_gradient_with_its_zeros(daemon: FakeDaemon, kind: str) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(daemon, model, optimizer) as found:
        for _ in range(EVERY):
            tokens = torch.randint(4, (8,))  # most rows of the table get no gradient; one row twice and more
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            truth = gradients(model)
            optimizer.step()
    sample = samples(found.records)[EVERY]
    for group, names in GROUPS.items():
        assert sample.group_norms[group] == pytest.approx(norm(truth[name] for name in names), rel=1e-5)
    assert ("head" in sample.group_norms) is (kind != "tied")
    counts, zeros = counted(truth.values())
    assert moved(sample.histogram, counts) == 0
    assert sample.zeros == zeros
    assert zeros > 0 or kind == "tied"
    assert sum(counts) + zeros == sum(one.numel() for one in truth.values())


def test_values_that_are_not_finite_are_in_no_bucket_and_norms_say_so(daemon: FakeDaemon) -> None:
    model, optimizer = make()
    with watched(daemon, model, optimizer, mode="observe") as found:
        for number in range(1, EVERY + 1):
            step(model, optimizer, number)
            model[4].bias.grad[:3] = torch.tensor([math.nan, math.inf, 0.0])
            counts, zeros = counted(gradients(model).values())
            optimizer.step()
            model.load_state_dict(make().model.state_dict())
    sample = samples(found.records)[EVERY]
    assert sample.histogram[-1] == counts[-1] == 1, "the infinity, and not the NaN"
    assert (sample.histogram, sample.zeros) == (counts, zeros)
    assert math.isnan(sample.group_norms["4"])
    assert math.isfinite(sample.group_norms["0"])


def test_update_and_weight_norm_are_of_the_weights_before_and_after(daemon: FakeDaemon) -> None:
    model, optimizer = make()
    with watched(daemon, model, optimizer) as found:
        for number in range(1, EVERY + 1):
            step(model, optimizer, number)
            before = [one.detach().double().clone() for one in model.parameters()]
            optimizer.step()
            after = [one.detach().double() for one in model.parameters()]
    sample = samples(found.records)[EVERY]
    changes = [new - old for new, old in zip(after, before, strict=True)]
    assert sample.update_norm == pytest.approx(norm(changes), rel=1e-5)
    assert sample.weight_norm == pytest.approx(norm(before), rel=1e-5)
    assert 1e-3 < sample.update_norm / sample.weight_norm < 1.0


def test_a_small_update_of_half_precision_weights_is_not_rounded_away(daemon: FakeDaemon) -> None:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with watched(daemon, model, optimizer) as found:
        for _ in range(EVERY):
            optimizer.zero_grad()
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().mul(0.01).backward()
            before = [one.detach().double().clone() for one in model.parameters()]
            optimizer.step()
    changes = [one.detach().double() - old for one, old in zip(model.parameters(), before, strict=True)]
    sample = samples(found.records)[EVERY]
    assert sample.update_norm == pytest.approx(norm(changes), rel=1e-6)
    assert sample.update_norm > 0.0


def test_a_skipped_update_has_no_update_norm(daemon: FakeDaemon) -> None:
    model, optimizer = make()
    with watched(daemon, model, optimizer) as found:
        daemon.wait_for(lambda: found.run.url or daemon.connections, 10.0)
        for number in range(1, EVERY + 1):
            step(model, optimizer, number)
            if number == EVERY:
                model[0].weight.grad[0, 0] = math.nan
            optimizer.step()
    assert found.records[-1].result is UpdateResult.REFLEX, "the update was skipped"
    assert len(daemon.of(Reflex)) == 1
    sample = samples(found.records)[EVERY]
    assert sample.update_norm is None
    assert sample.weight_norm is None
    assert math.isnan(sample.group_norms["0"])


def test_several_optimizers_give_one_sample_over_all_parameters(daemon: FakeDaemon) -> None:
    model, _ = make()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:])]
    with watched(daemon, model, optimizers) as found:
        for number in range(1, EVERY + 1):
            torch.manual_seed(number)
            model.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(16, FEATURES)), torch.zeros(16).long()).backward()
            truth, before = gradients(model), [one.detach().clone() for one in model.parameters()]
            for optimizer in optimizers:
                optimizer.step()
    sample = samples(found.records)[EVERY]
    assert math.hypot(*sample.group_norms.values()) == pytest.approx(norm(truth.values()), rel=1e-5)
    assert sum(sample.histogram) + sample.zeros == sum(one.numel() for one in truth.values())
    changes = [one.detach() - old for one, old in zip(model.parameters(), before, strict=True)]
    assert sample.update_norm == pytest.approx(norm(changes), rel=1e-5)


def large(optimizer: Any = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Conv1d(1, 4, 5))
    model.to(memory_format=torch.preserve_format)
    return model, optimizer(model.parameters(), lr=0.1)


def test_beyond_the_bound_every_nth_value_stands_for_its_neighbours(daemon: FakeDaemon) -> None:
    taken: list[Sample] = []
    for most in (2**20, 2048):
        model, optimizer = large()
        settings = {"sampling": {"histogram_elements": most, "update_elements": most}}
        with watched(daemon, model, optimizer, settings=settings) as found:
            for number in range(1, EVERY + 1):
                torch.manual_seed(number)
                optimizer.zero_grad()
                model(torch.randn(8, 1, 64)).square().mean().backward()
                optimizer.step()
        taken.append(samples(found.records)[EVERY])
    whole, part = taken
    values = sum(one.numel() for one in model.parameters())
    assert values > 10 * 2048, "most of them were left out"
    assert sum(whole.histogram) + whole.zeros == values
    assert sum(part.histogram) + part.zeros == pytest.approx(values, rel=1e-3)
    assert moved(part.histogram, whole.histogram) < 0.05 * values
    assert part.histogram != whole.histogram
    assert part.update_norm == pytest.approx(whole.update_norm, rel=0.1)
    assert part.weight_norm == pytest.approx(whole.weight_norm, rel=0.05)


def test_what_was_copied_of_the_weights_is_freed_after_the_step(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, copies = Tensor.clone, []

    def remember(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = clone(self, *args, **kwargs)
        copies.append((copy.numel(), weakref.ref(copy)))
        return copy

    model, optimizer = large()
    settings = {"snapshot": {"enabled": False}, "sampling": {"update_elements": 2048}}
    with watched(daemon, model, optimizer, settings=settings):
        for number in range(1, EVERY + 1):
            optimizer.zero_grad()
            model(torch.randn(8, 1, 64)).square().mean().backward()
            monkeypatch.setattr(Tensor, "clone", remember if number == EVERY else clone)
            optimizer.step()
        monkeypatch.undo()
        gc.collect()
        assert sum(size for size, _ in copies) in range(1024, 2048 + len(list(model.parameters())))
        assert not [copy for _, copy in copies if copy() is not None]


def test_a_step_that_raises_leaves_no_copy_behind(daemon: FakeDaemon) -> None:
    class Broken(torch.optim.SGD):
        breaks = False

        def step(self, closure: Any = None) -> Any:
            if self.breaks:
                raise RuntimeError("on purpose")
            return super().step(closure)

    model, optimizer = large(Broken)
    with watched(daemon, model, optimizer) as found:
        for number in range(1, 2 * EVERY + 2):
            optimizer.zero_grad()
            model(torch.randn(8, 1, 64)).square().mean().backward()
            optimizer.breaks = number == EVERY
            if optimizer.breaks:
                with pytest.raises(RuntimeError, match="on purpose"):
                    optimizer.step()
            else:
                optimizer.step()
    assert found.all("step") == list(range(1, 2 * EVERY + 1)), "the broken step was no attempt"
    assert all(sample.update_norm for sample in samples(found.records).values())


def test_the_cost_of_a_sample_is_told_and_is_part_of_the_hook_time(daemon: FakeDaemon) -> None:
    model, optimizer = make()
    with watched(daemon, model, optimizer) as found:
        for inputs, targets in loader(size=16 * (2 * EVERY + 2)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    for number, sample in samples(found.records).items():
        # It is armed at the end of the step before, and told at the beginning of the next.
        around = [record.hook_seconds for record in found.records[number - 2 : number + 1]]
        assert 0.0 < sample.seconds < sum(around)


@pytest.mark.parametrize("scale", [1.0, 65536.0, 1 / 3])
def test_however_values_are_counted_the_buckets_are_the_same(scale: float) -> None:
    """By search, by cells, and by comparing as on a device; edges belong to the bucket below them."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(20_000, generator=generator) * torch.randn(20_000, generator=generator).mul(6).exp()).abs()
    edges = torch.tensor(HISTOGRAM_EDGES) * scale
    values[: len(edges)] = edges
    values[100:110] = torch.tensor([0.0, 0.0, math.inf, math.nan, math.nan, 1e-40, 1e-12, 1e30, 3e38, 1.0])
    known = [value for value in values.double().tolist() if value == value and value != 0.0]
    expected = [0] * (len(edges) + 1)
    for value in known:
        expected[bisect_left(edges.double().tolist(), value)] += 1
    assert min(expected) > 0, "every bucket is met"
    assert bucket_counts(values, edges).tolist() == [*expected, 2]
    assert bucket_counts(values.double(), edges.double()).tolist() == [*expected, 2]
    compared = _compared(values, edges)
    compared[0] -= 2
    assert compared.tolist() == expected
