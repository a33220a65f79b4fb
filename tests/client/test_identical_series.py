"""Loss, norm, learning rate and counters do not depend on how the loop is written, to 1e-5."""

import functools

import pytest
import torch
from torch import nn

from sentinel.testing import FakeDaemon
from tests.client.loops import STEPS, Loop, Net, Truth
from tests.client.watching import Watched

RELATIVE = 1e-5


def adamw(**how: object) -> functools.partial[torch.optim.Optimizer]:
    return functools.partial(torch.optim.AdamW, lr=1e-2, **how)


def triple(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(3)


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

# What is named here must give the series of the plain loop.
EQUAL: dict[str, Loop] = {
    "fused": Loop(adamw(fused=True)),
    "foreach": Loop(adamw(foreach=True)),
    "four micro-batches": Loop(pieces=4),
    "recomputed, reentrant": Loop(recompute="reentrant"),
    "recomputed, not reentrant": Loop(recompute="not reentrant"),
    "recomputed, in micro-batches": Loop(recompute="reentrant", pieces=4),
    "compiled, eager": Loop(backend="eager"),
    "compiled, aot_eager": Loop(backend="aot_eager"),
    "compiled, the wrapper attached": Loop(backend="aot_eager", attached="wrapper"),
    "compiled before attach": Loop(backend="aot_eager", warm=True),
    "compiled before attach, the wrapper attached": Loop(backend="eager", attached="wrapper", warm=True),
    "compiled, in micro-batches": Loop(backend="aot_eager", pieces=4),
    "grad scaler": Loop(scale=1024.0),
    "grad scaler, fused": Loop(adamw(fused=True), scale=1024.0),
    "grad scaler, clipped": Loop(scale=1024.0, clip=1e9),
    "grad scaler, fused and clipped": Loop(adamw(fused=True), scale=1024.0, clip=1e9),
    "grad scaler, in micro-batches": Loop(adamw(fused=True), scale=1024.0, pieces=4),
    "clipped": Loop(clip=1e9),
    "zeros kept": Loop(keep_zeros=True),
    "two groups": Loop(groups=2),
    "a group without parameters": Loop(groups=30),
    "a closure": Loop(closure=True),
    "a closure, in micro-batches": Loop(closure=True, pieces=4),
    "autograd.backward": Loop(start="autograd.backward"),
    "a gradient handed to backward": Loop(start="gradient"),
    "run.batches": Loop(batches=True),
    "reported losses": Loop(reports=True),
    "learning rate in a tensor": Loop(
        # A new tensor each time: the scheduler decays it in place.
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2, dtype=torch.float64), foreach=False)
    ),
    "gradients double and halve on their way": Loop(
        prepare=lambda net: net.head.weight.register_hook(lambda gradient: gradient * 2 / 2)
    ),
}

# Of these the two must give the same series: their mathematics are another than the plain loop's.
PAIRS: dict[str, tuple[Loop, Loop]] = {
    "sparse embeddings": (Loop(SGD, kind="sparse"), Loop(SGD)),
    "sparse embeddings, in micro-batches": (Loop(SGD, kind="sparse", pieces=4), Loop(SGD)),
    "tied weights": (Loop(kind="tied"), Loop(kind="tied by hand")),
    "tied weights, fused and compiled": (
        Loop(adamw(fused=True), kind="tied", backend="aot_eager"),
        Loop(kind="tied"),
    ),
    "frozen layers": (Loop(frozen="given"), Loop(frozen="left out")),
    "frozen layers, compiled": (Loop(frozen="given", backend="aot_eager"), Loop(frozen="left out")),
    "frozen layers, recomputed": (Loop(frozen="given", recompute="not reentrant"), Loop(frozen="left out")),
    "autocast, fused": (Loop(adamw(fused=True), autocast=True), Loop(autocast=True)),
    "autocast and grad scaler": (Loop(autocast=True, scale=1024.0, clip=1e9), Loop(autocast=True)),
    "autocast, recomputed": (Loop(autocast=True, recompute="not reentrant"), Loop(autocast=True)),
    "clipped in every step": (Loop(adamw(fused=True), clip=1e-2, scale=256.0), Loop(clip=1e-2)),
    "a gradient changed by a hook": (
        Loop(prepare=lambda net: net.head.weight.register_hook(lambda gradient: gradient * 3)),
        Loop(prepare=lambda net: net.head.weight.register_post_accumulate_grad_hook(triple)),
    ),
    "double precision": (Loop(prepare=nn.Module.double), Loop(prepare=nn.Module.double, pieces=4, clip=1e9)),
}


def must_be_true(found: Watched, truths: list[Truth]) -> None:
    """What was told of every step is what the loop itself knows."""
    assert found.all("step") == list(range(1, STEPS + 1))
    assert found.all("loss") == pytest.approx([truth.loss for truth in truths], rel=RELATIVE)
    assert found.all("grad_norm") == pytest.approx([truth.norm for truth in truths], rel=RELATIVE)
    assert found.all("lr") == pytest.approx([truth.lr for truth in truths], rel=1e-6)


def must_be_equal(one: Watched, other: Watched) -> None:
    for name in ("loss", "grad_norm", "lr"):
        assert one.all(name) == pytest.approx(other.all(name), rel=RELATIVE), name
    for name in ("step", "result", "applied", "skipped"):
        assert one.all(name) == other.all(name), name


def must_move(found: Watched) -> None:
    """A series that stands still would prove nothing."""
    for name in ("loss", "grad_norm", "lr"):
        assert len({round(value, 6) for value in found.all(name)}) == STEPS, name


@pytest.mark.parametrize("kind", EQUAL)
def test_the_series_is_that_of_the_plain_loop(daemon: FakeDaemon, kind: str) -> None:
    plain, truths = Loop().train(daemon)
    must_be_true(plain, truths)
    must_move(plain)
    found, truths = EQUAL[kind].train(daemon)
    must_be_true(found, truths)
    must_be_equal(found, plain)


@pytest.mark.parametrize("kind", PAIRS)
def test_the_series_of_both_are_the_same(daemon: FakeDaemon, kind: str) -> None:
    one, other = (loop.train(daemon) for loop in PAIRS[kind])
    for found, truths in (one, other):
        must_be_true(found, truths)
        must_move(found)
    must_be_equal(one[0], other[0])


def test_the_variants_are_what_they_are_called() -> None:
    assert Net("sparse").table.sparse
    tied = Net("tied")
    assert tied.head.weight is tied.table.weight
    assert (
        len(list(tied.parameters()))
        == len(list(Net("tied by hand").parameters()))
        == len(list(Net().parameters())) - 1
    )
    assert any(not group["params"] for group in Loop(groups=30)._parameters(Net()))
