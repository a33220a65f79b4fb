"""A healthy run ends with the same bits with and without sentinel, whatever kind of loop it is."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sentinel.client.attach import attach
from sentinel.records import SnapshotNote, StepRecord, Trouble
from sentinel.testing import FakeDaemon
from tests.client.training import CLASSES, FEATURES, Numbers, equal

STEPS = 40
Attach = Callable[..., None]
entropy = nn.functional.cross_entropy


def batch(step: int) -> tuple[Tensor, Tensor]:
    data = Numbers()
    return data.inputs[step * 8 : step * 8 + 8], data.targets[step * 8 : step * 8 + 8]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES)
    )


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer], closure_every: int = 3) -> Callable[[Attach], Any]:
    def loop(watch: Attach) -> Any:
        model = network()
        optimizer = make(model.parameters())
        watch(model, optimizer)
        for step in range(STEPS):
            inputs, targets = batch(step)

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = entropy(model(inputs), targets)
                loss.backward()
                return loss

            if step % closure_every == 0:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return model, optimizer

    return loop


def sparse(watch: Attach) -> Any:
    model = nn.ModuleList([nn.Embedding(CLASSES, 8, sparse=True), nn.Linear(8, CLASSES)])
    optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())]
    watch(model, optimizers)
    for step in range(STEPS):
        _, targets = batch(step)
        model.zero_grad()
        entropy(model[1](model[0](targets)), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model, *optimizers


def grows_a_group(watch: Attach) -> Any:
    model = network()
    optimizer = torch.optim.AdamW(model[0].parameters())
    watch(model, optimizer)
    for step in range(STEPS):
        if step == 15:
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 1e-2})
        model.zero_grad()
        inputs, targets = batch(step)
        entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, optimizer


def scaled(fused: bool, clip: bool) -> Callable[[Attach], Any]:
    def loop(watch: Attach) -> Any:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
        watch(model, optimizer)
        for step in range(STEPS):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            if step in {9, 10, 20}:
                model[0].weight.grad[0, 0] = float("inf")
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer, scaler

    return loop


def gradient_penalty(watch: Attach) -> Any:
    generator, critic = nn.Linear(4, FEATURES), nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    both = nn.ModuleList([generator, critic])
    of_critic, of_generator = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    watch(both, [of_critic, of_generator])
    for step in range(STEPS):
        real, _ = batch(step)
        mixed = (real + generator(torch.randn(8, 4)).detach()).requires_grad_()
        slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
        of_critic.zero_grad()
        (10 * ((slope.norm(dim=1) - 1) ** 2).mean() - critic(real).mean()).backward()
        of_critic.step()
        if step % 2:
            of_generator.zero_grad()
            (-critic(generator(torch.randn(8, 4))).mean()).backward()
            of_generator.step()
    return both, of_critic, of_generator


def double_backward(watch: Attach) -> Any:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch(model, optimizer)
    for step in range(STEPS):
        inputs, targets = batch(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about the cycle that create_graph makes
            entropy(model(inputs), targets).backward(create_graph=True, retain_graph=True)
        sum((parameter.grad**2).sum() for parameter in model.parameters()).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return model, optimizer


def checkpointed(watch: Attach) -> Any:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        hidden = checkpoint(model[0], inputs.clone().requires_grad_(), use_reentrant=bool(step % 2))
        entropy(model[1:](hidden), targets).backward()
        optimizer.step()
    return model, optimizer


def functional(watch: Attach) -> Any:
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    for step in range(STEPS):
        inputs, targets = batch(step)

        def loss(parameters: Any, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            return entropy(torch.func.functional_call(model, parameters, (inputs,)), targets)

        own = dict(model.named_parameters())
        gradients = torch.func.grad(loss)({name: parameter.detach() for name, parameter in own.items()})
        for name, parameter in own.items():
            parameter.grad = gradients[name]
        optimizer.step()
    return model, optimizer


def reparametrized_with_average(watch: Attach) -> Any:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, CLASSES)),
    )
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer, ema=average)
    with torch.autograd.set_detect_anomaly(True):
        for step in range(STEPS):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            entropy(model(inputs), targets).backward()
            optimizer.step()
            average.update_parameters(model)
    return model, optimizer, average


def complex_weights(watch: Attach) -> Any:
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64))})
    optimizer = torch.optim.Adam(model.parameters())
    watch(model, optimizer)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        entropy((inputs.to(torch.complex64) @ model["weight"]).abs(), targets).backward()
        optimizer.step()
    return model, optimizer


optim = torch.optim
LOOPS: dict[str, Callable[[Attach], Any]] = {
    "nesterov": with_optimizer(lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
    "adam single": with_optimizer(lambda p: optim.Adam(p, foreach=False, amsgrad=True)),
    "adam fused": with_optimizer(lambda p: optim.Adam(p, lr=torch.tensor(1e-3), fused=True)),
    "adamw foreach": with_optimizer(lambda p: optim.AdamW(p, lr=1e-3, foreach=True, maximize=True)),
    "adafactor": with_optimizer(optim.Adafactor),
    "rmsprop": with_optimizer(lambda p: optim.RMSprop(p, momentum=0.9, centered=True)),
    "adagrad": with_optimizer(optim.Adagrad),
    "nadam": with_optimizer(optim.NAdam),
    "radam": with_optimizer(optim.RAdam),
    "lbfgs": with_optimizer(lambda p: optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"), closure_every=1),
    "sparse": sparse,
    "a later group": grows_a_group,
    "scaler": scaled(fused=False, clip=False),
    "scaler, clipped": scaled(fused=False, clip=True),
    "scaler, fused": scaled(fused=True, clip=False),
    "scaler, fused, clipped": scaled(fused=True, clip=True),
    "gradient penalty": gradient_penalty,
    "double backward": double_backward,
    "checkpointing": checkpointed,
    "functional": functional,
    "reparametrized": reparametrized_with_average,
    "complex": complex_weights,
}


def leaves(value: Any) -> list[Tensor]:
    if hasattr(value, "state_dict"):
        return leaves(value.state_dict())
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, float):
        return [torch.tensor(value, dtype=torch.float64)]
    return [value.detach().clone()] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("kind", LOOPS)
def test_the_bits_are_the_same_with_and_without_sentinel(daemon: FakeDaemon, kind: str) -> None:
    torch.manual_seed(0)
    clean = leaves(LOOPS[kind](lambda *_, **__: None))
    runs: list[Any] = []
    torch.manual_seed(0)
    settings = {"snapshot": {"every_steps": 10}}
    watched = leaves(LOOPS[kind](lambda *what, **more: runs.append(attach(*what, settings=settings, **more))))
    runs[0].detach()
    assert equal(clean, watched)
    records = daemon.of(StepRecord)
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert all(record.loss is not None for record in records) or kind == "functional"
    assert len({note.step for note in daemon.of(SnapshotNote)}) >= 4, "snapshots were taken meanwhile"
    assert not daemon.of(Trouble)
