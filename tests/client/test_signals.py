"""Every signal of a step has one right value, in every kind of loop."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.client.attach import attach
from sentinel.client.probes.gradients import exact_norm
from sentinel.records import StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.training import Setup, loader, make

STEPS = 6


def batches(count: int = STEPS) -> list[Any]:
    torch.manual_seed(3)
    return list(loader())[:count]


def records(daemon: FakeDaemon, count: int = STEPS) -> list[StepRecord]:
    return daemon.wait_for(lambda: found if len(found := daemon.of(StepRecord)) >= count else [])


def true_norm(model: nn.Module) -> float:
    squares = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.grad is not None)
    return math.sqrt(squares)


def test_loss_norm_lr_and_step_time_of_every_step_are_right(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    expected = []
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(setup.model(inputs), targets)
        setup.optimizer.zero_grad()
        loss.backward()
        expected.append((loss.item(), true_norm(setup.model)))
        setup.optimizer.step()
    run.detach()
    seen = records(daemon)
    assert [record.step for record in seen] == list(range(1, STEPS + 1))
    for record, (loss, norm) in zip(seen, expected, strict=True):
        assert record.loss == pytest.approx(loss, rel=1e-6)
        assert record.grad_norm == pytest.approx(norm, rel=1e-6)
        assert record.lr == 1e-2
        assert record.step_seconds is not None
        assert record.step_seconds > 0
        assert record.result is UpdateResult.APPLIED
    assert [record.applied for record in seen] == list(range(1, STEPS + 1))


def test_accumulation_gives_one_record_per_update_equal_to_the_whole_batch(daemon: FakeDaemon) -> None:
    whole, split = make(dropout=0.0), make(dropout=0.0)
    for module in (whole.model, split.model):
        module.eval()  # batch norm statistics would differ between pieces
    run = attach(whole.model, whole.optimizer, run_id="whole")
    other = attach(split.model, split.optimizer, run_id="split")
    for inputs, targets in batches():
        whole.optimizer.zero_grad()
        nn.functional.cross_entropy(whole.model(inputs), targets).backward()
        whole.optimizer.step()
        split.optimizer.zero_grad()
        for part, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (nn.functional.cross_entropy(split.model(part), wanted) / 4).backward()
        split.optimizer.step()
    run.detach()
    other.detach()
    seen = records(daemon, 2 * STEPS)
    half = len(seen) // 2
    assert len(seen) == 2 * STEPS
    by_step: dict[int, list[StepRecord]] = {}
    for record in seen:
        by_step.setdefault(record.step, []).append(record)
    assert half == STEPS
    for one, two in by_step.values():
        assert one.loss == pytest.approx(two.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-5)


@pytest.mark.parametrize("clip_first", [True, False])
def test_the_users_own_clipping_gives_the_norm_before_clipping(daemon: FakeDaemon, clip_first: bool) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    expected = []
    for inputs, targets in batches():
        setup.optimizer.zero_grad()
        (100 * nn.functional.cross_entropy(setup.model(inputs), targets)).backward()
        expected.append(true_norm(setup.model))
        if clip_first:
            nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
            assert true_norm(setup.model) == pytest.approx(1.0, rel=1e-3)
        setup.optimizer.step()
    run.detach()
    seen = records(daemon)
    assert [r.grad_norm for r in seen] == [pytest.approx(norm, rel=1e-5) for norm in expected]
    assert {r.grad_norm_source for r in seen} == {"clip" if clip_first else "own"}
    assert {r.clip_max_norm for r in seen} == ({1.0} if clip_first else {None})


def test_clipping_one_layer_alone_still_gives_the_whole_norm(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    expected = []
    for inputs, targets in batches():
        setup.optimizer.zero_grad()
        (100 * nn.functional.cross_entropy(setup.model(inputs), targets)).backward()
        expected.append(true_norm(setup.model))
        nn.utils.clip_grad_norm_(setup.model[0].parameters(), 0.1)
        nn.utils.clip_grad_norm_(setup.model[4].parameters(), 0.1)
        setup.optimizer.step()
    run.detach()
    assert [r.grad_norm for r in records(daemon)] == [pytest.approx(norm, rel=1e-5) for norm in expected]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_under_a_grad_scaler_loss_and_norm_are_unscaled_and_overflows_are_normal(
    daemon: FakeDaemon, fused: bool, unscale: bool
) -> None:
    setup = make(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = attach(setup.model, setup.optimizer)
    expected = []
    for place, (inputs, targets) in enumerate(batches()):
        setup.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(setup.model(inputs), targets)
        scaler.scale(loss).backward()
        if place == 3:
            setup.model[0].weight.grad[0, 0] = math.inf
        expected.append((loss.item(), true_norm(setup.model) / 1024.0))
        if unscale:
            scaler.unscale_(setup.optimizer)
            nn.utils.clip_grad_norm_(setup.model.parameters(), 1e9)
        scaler.step(setup.optimizer)
        if place != 3:
            scaler.update()
        else:
            scaler.update(1024.0)
    run.detach()
    seen = records(daemon)
    assert [r.result for r in seen] == [UpdateResult.APPLIED] * 3 + [UpdateResult.OVERFLOW] + [
        UpdateResult.APPLIED
    ] * 2
    assert [r.loss for r in seen] == [pytest.approx(loss, rel=1e-6) for loss, _ in expected]
    for place, record in enumerate(seen):
        if place != 3:
            assert record.grad_norm == pytest.approx(expected[place][1], rel=1e-5)
        assert record.loss_scale == 1024.0
    assert (seen[-1].applied, seen[-1].skipped) == (5, 1)


def test_two_optimizers_of_a_gan_give_one_record_per_iteration(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleList([generator, critic])
    first = torch.optim.Adam(critic.parameters(), lr=1e-3)
    second = torch.optim.Adam(generator.parameters(), lr=2e-3)
    run = attach(model, [first, second])
    sums = []
    for _ in range(STEPS):
        noise, real = torch.randn(8, 4), torch.randn(8, 4)
        loss_critic = critic(generator(noise).detach()).mean() - critic(real).mean()
        first.zero_grad()
        loss_critic.backward()
        first.step()
        loss_generator = -critic(generator(noise)).mean()
        second.zero_grad()
        loss_generator.backward()
        second.step()
        sums.append((loss_critic + loss_generator).item())
    run.detach()
    seen = records(daemon)
    assert [record.step for record in seen] == list(range(1, STEPS + 1))
    assert [record.loss for record in seen] == [pytest.approx(total, abs=1e-5) for total in sums]
    assert seen[0].optimizers is not None
    assert {name: entry["lr"] for name, entry in seen[0].optimizers.items()} == {
        "optimizer.0": 1e-3,
        "optimizer.1": 2e-3,
    }


@pytest.mark.parametrize("attach_first", [True, False])
def test_a_compiled_model_gives_the_same_series_as_an_eager_one(daemon: FakeDaemon, attach_first: bool) -> None:
    series = []
    for compiled in (False, True):
        torch._dynamo.reset()
        setup = make(dropout=0.0)
        model = torch.compile(setup.model, backend="aot_eager") if compiled else setup.model
        if compiled and not attach_first:
            model(batches()[0][0])
            setup = Setup(setup.model, setup.optimizer)
        before = len(daemon.of(StepRecord))
        torch._dynamo.utils.counters.clear()
        run = attach(model, setup.optimizer)
        for inputs, targets in batches():
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            setup.optimizer.step()
        run.detach()
        assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
        series.append([(r.loss, r.grad_norm) for r in records(daemon, before + STEPS)[before:]])
    if attach_first:
        for (loss, norm), (other_loss, other_norm) in zip(*series, strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-5)
            assert norm == pytest.approx(other_norm, rel=1e-5)
    assert all(loss is not None and norm is not None for loss, norm in series[1])


def test_sparse_and_tied_gradients_are_counted_right(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    run = attach(embedding, optimizer)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    run.detach()
    assert records(daemon, 1)[0].grad_norm == pytest.approx(math.sqrt(4 * 2**2 + 4 * 1))


def test_gradients_that_overflow_the_fp32_norm_are_large_not_infinite(daemon: FakeDaemon) -> None:
    layer = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    run = attach(layer, optimizer)
    for clip in (False, True):
        layer.weight.grad = torch.full_like(layer.weight, 1e20)
        if clip:
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    run.detach()
    for record in records(daemon, 2):
        assert record.grad_norm == pytest.approx(math.sqrt(3) * 1e20, rel=1e-5)
        assert record.result is UpdateResult.APPLIED


def test_a_report_belongs_to_the_attempt_whose_backward_ran_last(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    for place, (inputs, targets) in enumerate(batches()):
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        if place % 2:
            run.report(loss=torch.tensor(float(place)), tokens=10, accuracy=0.5)
        setup.optimizer.step()
        if not place % 2:
            run.report(loss=float(place), tokens=10, accuracy=0.5)
    run.detach()
    seen = records(daemon)
    assert [record.loss for record in seen] == [float(place) for place in range(STEPS)]
    assert {record.tokens for record in seen} == {10.0}
    assert seen[0].reported == {"accuracy": 0.5}


def test_losses_reported_per_micro_batch_are_averaged_by_tokens(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    inputs, targets = batches(1)[0]
    for loss, tokens in ((1.0, 30), (2.0, 10)):
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        run.report(loss=loss, tokens=tokens)
    setup.optimizer.step()
    run.detach()
    record = records(daemon, 1)[0]
    assert record.loss == pytest.approx(1.25)
    assert record.tokens == 40


def test_a_closure_optimizer_gives_one_record_per_step(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=5)
    inputs, wanted = torch.randn(16, 4), torch.randn(16, 1)
    run = attach(layer, optimizer)
    firsts = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layer(inputs), wanted)
        loss.backward()
        firsts.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
        firsts.append(math.nan)
    run.detach()
    seen = records(daemon, 2)
    assert [record.step for record in seen] == [1, 2]
    assert seen[0].loss == pytest.approx(firsts[0])
    assert all(record.grad_norm is not None for record in seen)


def test_a_wrong_report_is_told_and_never_raised(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    for _ in range(100):  # told once, and no reason to stop watching
        run.report(loss=torch.zeros(3), accuracy=0.5)
        run.report(loss="not a number")
    inputs, targets = next(iter(loader()))
    nn.functional.cross_entropy(setup.model(inputs), targets).backward()
    setup.optimizer.step()
    run.detach()
    told = capsys.readouterr().err
    assert told.count("run.report(loss=...) got a torch.float32 tensor of shape (3,)") == 1
    assert told.count("run.report(loss=...) got a str") == 1
    (record,) = daemon.of(StepRecord)
    assert record.reported == {"accuracy": 0.5}


def test_complex_gradients_that_overflow_are_large_and_those_with_an_infinite_part_are_not_finite() -> None:
    huge, infinite = complex(3e25, 4e25), complex(1.0, math.inf)
    assert exact_norm([torch.tensor([huge], dtype=torch.complex64)]) == pytest.approx(5e25, rel=1e-6)
    assert math.isinf(exact_norm([torch.tensor([1.0]), torch.tensor([infinite], dtype=torch.complex64)]))
