"""O46: is the norm that of before or after clipping (verl#2282, miles#2132, pytorch#1032)?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sentinel.testing import FakeDaemon
from tests.client.watching import norm_of, watched

STEPS, NORM, MAX_NORM = 6, 20.0, 1.0
Clip = Callable[[list[Tensor]], Any]


def by_total_norm(parameters: list[Tensor]) -> None:
    norm = nn.utils.get_total_norm([one.grad for one in parameters])
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm)


def in_place(parameters: list[Tensor]) -> None:
    factor = MAX_NORM / norm_of(parameters)
    for one in parameters:
        one.grad.mul_(factor)


def by_new_gradients(parameters: list[Tensor]) -> None:
    factor = MAX_NORM / norm_of(parameters)
    for one in parameters:
        one.grad = one.grad * factor


SEEN: dict[str, Clip] = {
    "by norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, MAX_NORM),
    "layer by layer": lambda parameters: [nn.utils.clip_grad_norm_(one, MAX_NORM / 2) for one in parameters],
    "in two calls": by_total_norm,
    "by value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.1),
    "infinity norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=float("inf")),
}
UNSEEN: dict[str, Clip] = {"in place": in_place, "by new gradients": by_new_gradients}


def train(daemon: FakeDaemon, clip: Clip, scaler: torch.amp.GradScaler | None = None):
    """Gradients of norm 20 in every step, clipped in every step; what was recorded, and their norms at the step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clipped = []
    with watched(daemon, model, optimizer) as found:
        for _ in range(STEPS):
            optimizer.zero_grad()
            outputs = model(torch.ones(1, 4)).sum()
            slopes = torch.autograd.grad(outputs, list(model.parameters()), retain_graph=True)
            loss = outputs * (NORM / float(torch.stack([one.norm() for one in slopes]).norm()))
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            assert norm_of(model.parameters()) == pytest.approx(NORM, rel=1e-4)
            clip(list(model.parameters()))
            clipped.append(norm_of(model.parameters()))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    assert max(clipped) <= 2 * MAX_NORM, "it was clipped"
    return found, clipped


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_run_that_is_clipped_in_every_step_tells_the_norm_before(
    daemon: FakeDaemon, kind: str, scaled: bool
) -> None:
    found, _ = train(daemon, SEEN[kind], torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None)
    assert found.all("grad_norm") == pytest.approx([NORM] * STEPS, rel=1e-4)
    assert set(found.all("grad_norm_source")) <= {"own", "clip"}


@pytest.mark.parametrize("kind", UNSEEN)
@pytest.mark.parametrize("scaled", [False, True])
def test_where_only_clipped_gradients_can_be_seen_the_label_says_so(
    daemon: FakeDaemon, kind: str, scaled: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    found, clipped = train(daemon, UNSEEN[kind], scaler)
    assert found.all("grad_norm") == pytest.approx(clipped, rel=1e-5)
    assert set(found.all("grad_norm_source")) == {"changed"}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
def test_gradients_that_nobody_wrote_to_carry_no_such_label(
    daemon: FakeDaemon, fused: bool, scaled: bool, pieces: int
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    with watched(daemon, model, optimizer) as found:
        for _ in range(STEPS):
            for _ in range(pieces):
                scaler.scale(model(torch.randn(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
    assert set(found.all("grad_norm_source")) == {"own"}


def test_clipping_inside_a_closure_tells_the_norm_before_of_the_last_evaluation(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    inputs = torch.randn(16, 4)
    before: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 100 * model(inputs).square().mean()
        loss.backward()
        before.append(norm_of(model.parameters()))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    ends = []
    with watched(daemon, model, optimizer) as found:
        for _ in range(3):
            optimizer.step(closure)
            ends.append(len(before))
    assert ends[0] > 1, "evaluated several times"
    assert found.all("grad_norm") == pytest.approx([before[end - 1] for end in ends], rel=1e-5)
