"""Loops that step, clear and combine gradients in their own way: what is told is still what was applied."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.training import CLASSES, FEATURES, Setup, loader, make
from tests.client.watching import norm_of, watched

STEPS = 6
NAN = float("nan")


def batches(count: int = STEPS) -> list[Any]:
    torch.manual_seed(3)
    return list(loader())[:count]


def loss_of(setup: Setup, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(setup.model(inputs), targets)


@pytest.mark.parametrize("when", ["before its backward", "after it"])
def test_an_optimizer_that_steps_inside_the_backward_makes_one_attempt_with_its_loss(
    daemon: FakeDaemon, when: str
) -> None:
    """One optimizer for each parameter, which steps as soon as the gradient is there and drops it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizers = {one: torch.optim.AdamW([one], lr=1e-2) for one in model.parameters()}
    squares: list[float] = []
    steps: list[int] = []

    def step(parameter: Tensor) -> None:
        squares.append(float(parameter.grad.double().pow(2).sum()))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        steps.append(1)

    def arrange() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    if when == "after it":  # sentinel's hooks on parameters come first, or last
        arrange()
    losses, norms = [], []
    with watched(daemon, model, list(optimizers.values())) as found:
        if when != "after it":
            arrange()
        for inputs, targets in batches():
            squares.clear()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
            norms.append(math.sqrt(sum(squares)))
    assert len(steps) == 4 * STEPS, "each stepped in each backward"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.all("step") == list(range(1, STEPS + 1))
    assert found.all("loss") == pytest.approx(losses)
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("reports", [False, True])
def test_a_batch_that_the_loop_throws_away_is_none_of_the_next_updates(
    daemon: FakeDaemon, clips: bool, reports: bool
) -> None:
    """`if the loss is bad: zero_grad(); continue`, as many loops protect themselves."""
    setup = make(dropout=0.0)
    losses, norms, thrown = [], [], 0
    with watched(daemon, setup.model, setup.optimizer) as found:
        for place, batch in enumerate(batches(3 * STEPS)):
            loss = loss_of(setup, batch)
            bad = place % 3 == 1
            if bad:
                loss = loss * NAN
            loss.backward()
            norm = norm_of(setup.model.parameters())
            if reports:
                found.run.report(loss=loss, tokens=10)
            if clips:
                nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
            if bad:
                assert math.isnan(norm), "it would have poisoned the weights"
                setup.optimizer.zero_grad()
                thrown += 1
                continue
            losses.append(loss.item())
            norms.append(norm)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
    assert thrown == STEPS
    assert found.all("loss") == pytest.approx(losses)
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-5)
    assert set(found.all("tokens")) == ({10.0} if reports else {None})
    assert set(found.all("result")) == {UpdateResult.APPLIED}


def test_an_accumulation_that_is_left_unfinished_is_none_of_the_next_updates(daemon: FakeDaemon) -> None:
    """The last micro-batches of an epoch, cleared at the begin of the next."""
    setup = make(dropout=0.0)
    losses = []
    with watched(daemon, setup.model, setup.optimizer) as found:
        for _ in range(3):
            setup.optimizer.zero_grad()
            total = 0.0
            for place, batch in enumerate(batches(7), 1):
                loss = loss_of(setup, batch) / 3
                loss.backward()
                total += loss.item()
                if place % 3 == 0:
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()
                    losses.append(total)
                    total = 0.0
            assert total > 0, "one micro-batch is left over"
    assert found.all("loss") == pytest.approx(losses)


def test_gradients_of_several_tasks_that_the_loop_combines_itself_are_one_update_with_all_losses(
    daemon: FakeDaemon,
) -> None:
    """As gradient surgery does: one backward per task, its gradients taken away, a combination put in their place."""
    setup = make(dropout=0.0)
    parameters = list(setup.model.parameters())
    losses, norms = [], []
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in batches():
            total = 0.0
            taken = []
            for factor in (1.0, 0.5):
                setup.optimizer.zero_grad()
                loss = factor * loss_of(setup, batch)
                loss.backward()
                total += loss.item()
                taken.append([one.grad for one in parameters])
            for parameter, pair in zip(parameters, zip(*taken, strict=True), strict=True):
                parameter.grad = pair[0] + pair[1]
            losses.append(total)
            norms.append(norm_of(parameters))
            setup.optimizer.step()
    assert found.all("loss") == pytest.approx(losses)
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)


def test_a_second_step_on_the_same_gradients_is_an_attempt_without_a_loss(daemon: FakeDaemon) -> None:
    setup = make(dropout=0.0)
    losses, norms = [], []
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in batches():
            setup.optimizer.zero_grad()
            loss = loss_of(setup, batch)
            loss.backward()
            losses += [loss.item(), None]
            norms += 2 * [norm_of(setup.model.parameters())]
            setup.optimizer.step()
            setup.optimizer.step()
    assert found.all("step") == list(range(1, 2 * STEPS + 1))
    assert found.all("loss") == [loss if loss is None else pytest.approx(loss) for loss in losses]
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)
    assert all((one.backward_seconds is None) == (one.loss is None) for one in found.records)


def several_roots(setup: Setup, batch: Any) -> float:
    loss = loss_of(setup, batch)
    torch.autograd.backward([0.25 * loss, 0.75 * loss])
    return loss.item()


def one_root_twice(setup: Setup, batch: Any) -> float:
    loss = loss_of(setup, batch) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    return 2 * loss.item()


def one_element(setup: Setup, batch: Any) -> float:
    loss = loss_of(setup, batch).reshape(1, 1)
    loss.backward()
    return loss.item()


def in_evaluation_mode(setup: Setup, batch: Any) -> float:
    setup.model.eval()
    loss = loss_of(setup, batch)
    loss.backward()
    return loss.item()


def of_inputs_too(setup: Setup, batch: Any) -> float:
    """Gradients of the inputs are asked for first, as adversarial training does."""
    inputs, targets = batch
    inputs = inputs.clone().requires_grad_()
    slopes = torch.autograd.grad(nn.functional.cross_entropy(setup.model(inputs), targets), inputs)[0]
    loss = nn.functional.cross_entropy(setup.model(inputs.detach() + 0.1 * slopes.sign()), targets)
    loss.backward()
    return loss.item()


BACKWARDS: dict[str, Callable[[Setup, Any], float]] = {
    "several roots": several_roots,
    "one root twice": one_root_twice,
    "one element of two dimensions": one_element,
    "evaluation mode": in_evaluation_mode,
    "gradients of the inputs": of_inputs_too,
}


@pytest.mark.parametrize("kind", BACKWARDS)
def test_the_loss_is_the_sum_of_what_backward_began_at(daemon: FakeDaemon, kind: str) -> None:
    setup = make(dropout=0.0)
    losses, norms = [], []
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in batches():
            setup.optimizer.zero_grad()
            losses.append(BACKWARDS[kind](setup, batch))
            norms.append(norm_of(setup.model.parameters()))
            with torch.no_grad():
                setup.optimizer.step()
    assert found.all("loss") == pytest.approx(losses)
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)


def test_the_backward_of_another_model_is_no_loss_of_ours_not_even_in_the_first_step(daemon: FakeDaemon) -> None:
    setup, teacher = make(dropout=0.0), make(seed=5)
    losses, others = [], []
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in batches():
            setup.optimizer.zero_grad()
            other = 1e3 * loss_of(teacher, batch)
            other.backward()
            others.append(other.item())
            loss = loss_of(setup, batch)
            loss.backward()
            losses.append(loss.item())
            setup.optimizer.step()
    assert min(others) > 1e3 * 0.1
    assert found.all("loss") == pytest.approx(losses)


def test_a_norm_is_of_all_micro_batches_though_the_loop_clipped_before_the_last(daemon: FakeDaemon) -> None:
    setup = make(dropout=0.0)
    clipped, norms = [], []
    with watched(daemon, setup.model, setup.optimizer) as found:
        for batch in batches():
            setup.optimizer.zero_grad()
            loss_of(setup, batch).backward()
            clipped.append(norm_of(setup.model.parameters()))
            nn.utils.clip_grad_norm_(setup.model.parameters(), 0.1)
            loss_of(setup, batch).backward()
            norms.append(norm_of(setup.model.parameters()))
            setup.optimizer.step()
    assert norms != pytest.approx(clipped, rel=1e-3)
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, NAN])
def test_of_two_optimizers_whose_first_overflows_no_finite_norm_is_told(daemon: FakeDaemon, bad: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.AdamW(model[2].parameters())]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    with watched(daemon, model, optimizers) as found:
        for place, (inputs, targets) in enumerate(batches()):
            model.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
            if place == 3:
                model[0].weight.grad[0, 0] = bad
            norms.append(norm_of(model.parameters()) / 1024.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update(1024.0)
    results = [UpdateResult.APPLIED] * STEPS
    results[3] = UpdateResult.OVERFLOW
    assert found.all("result") == results
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-5, nan_ok=True)
    assert not math.isfinite(found.records[3].grad_norm)


def test_sparse_and_dense_gradients_of_one_optimizer_make_one_norm(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, 8, sparse=True), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    norms = []
    with watched(daemon, model, optimizer) as found:
        for _, targets in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(targets), targets).backward()
            assert [one.grad.is_sparse for one in model.parameters()] == [True, False, False]
            norms.append(norm_of(model.parameters()))
            optimizer.step()
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_the_norm_is_right_in_every_type(daemon: FakeDaemon, dtype: torch.dtype) -> None:
    """The model is moved to the type after its optimizer was made."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(dtype)
    losses, norms = [], []
    with watched(daemon, model, optimizer) as found:
        for inputs, _ in batches():
            optimizer.zero_grad()
            loss = model(inputs.to(dtype)).abs().float().square().mean()
            loss.backward()
            losses.append(loss.item())
            norms.append(norm_of(model.parameters()))
            optimizer.step()
    assert {one.grad.dtype for one in model.parameters()} == {dtype}
    assert found.all("loss") == pytest.approx(losses)
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_that_clipping_computed_in_few_bits_is_as_good_as_these(
    daemon: FakeDaemon, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with watched(daemon, model, optimizer) as found:
        for inputs, _ in batches():
            optimizer.zero_grad()
            model(inputs.to(dtype)).float().square().mean().backward()
            norms.append(norm_of(model.parameters()))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert set(found.all("grad_norm_source")) == {"clip"}
    assert found.all("grad_norm") == pytest.approx(norms, rel=2 * torch.finfo(dtype).eps)
