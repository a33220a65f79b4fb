"""One training task in every kind of loop: the series that sentinel tells must not depend on how it is written."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sentinel.testing import FakeDaemon
from tests.client.watching import Watched, norm_of, watched

STEPS, BATCH, TOKENS, WIDTH = 8, 16, 12, 8
Optimizer = Callable[[Any], torch.optim.Optimizer]


def plain_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


class Net(nn.Module):
    """Embedding, two layers and a head; `kind` picks what the head and the embedding are made of."""

    def __init__(self, kind: str = "", recompute: str = "") -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH, sparse=kind == "sparse")
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self._recompute = recompute
        self._tied_by_hand = kind == "tied by hand"
        if kind == "tied":
            self.head.weight = self.table.weight
        if self._tied_by_hand:
            del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for layer in (self.first, self.second):
            if self._recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=self._recompute == "reentrant")
            else:
                hidden = layer(hidden)
            hidden = torch.tanh(hidden)
        return hidden @ self.table.weight.t() if self._tied_by_hand else self.head(hidden)


class Truth(NamedTuple):
    """What the loop itself knows of a step."""

    loss: float
    norm: float
    lr: float


@dataclass(frozen=True)
class Loop:
    """How the loop is written. Whatever is chosen, the mathematics of the update stay the same, if not said so."""

    optimizer: Optimizer = plain_adamw
    kind: str = ""
    recompute: str = ""  # "reentrant", "not reentrant"
    pieces: int = 1
    backend: str = ""  # of torch.compile
    attached: str = "module"  # or the compiled "wrapper"
    warm: bool = False  # compiled and called before it is attached
    scale: float = 0.0  # of a GradScaler
    clip: float = 0.0
    autocast: bool = False  # other mathematics
    keep_zeros: bool = False
    groups: int = 1
    frozen: str = ""  # the layers before the head do not train: "given" to the optimizer, or "left out" of it
    closure: bool = False
    start: str = "Tensor.backward"
    batches: bool = False
    reports: bool = False
    prepare: Callable[[Net], Any] = lambda _: None

    def train(self, daemon: FakeDaemon) -> tuple[Watched, list[Truth]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(self.kind, self.recompute)
        self.prepare(model)
        running = torch.compile(model, backend=self.backend) if self.backend else model
        optimizer = self.optimizer(self._parameters(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale or 1.0, enabled=bool(self.scale))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = torch.randint(0, TOKENS, (STEPS, BATCH, 2))
        if self.warm:
            running(data[0, :, 0])
        truths: list[Truth] = []
        with watched(daemon, running if self.attached == "wrapper" else model, optimizer) as found:
            for batch in found.run.batches(list(data)) if self.batches else data:
                evaluate = functools.partial(self._evaluate, running, scaler, batch)
                truths.append(self._step(model, optimizer, scaler, evaluate))
                if self.reports:
                    found.run.report(loss=truths[-1].loss)
                scheduler.step()
        return found, truths

    def _parameters(self, model: Net) -> Any:
        if self.frozen:
            for one in (*model.first.parameters(), *model.second.parameters()):
                one.requires_grad_(False)
        parameters = [one for one in model.parameters() if one.requires_grad or self.frozen != "left out"]
        if self.groups == 1:
            return parameters
        return [{"params": parameters[start :: self.groups]} for start in range(self.groups)]

    def _step(self, model: Net, optimizer: Any, scaler: Any, evaluate: Callable[[], float]) -> Truth:
        lr = float(optimizer.param_groups[0]["lr"])
        if self.closure:
            norms: list[float] = []

            def closure() -> float:
                optimizer.zero_grad(set_to_none=not self.keep_zeros)
                loss = evaluate()
                norms.append(norm_of(model.parameters()))
                return loss

            return Truth(optimizer.step(closure), norms[-1], lr)
        optimizer.zero_grad(set_to_none=not self.keep_zeros)
        loss = evaluate()
        norm = norm_of(model.parameters()) / (self.scale or 1.0)
        if self.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        scaler.step(optimizer)
        scaler.update()
        return Truth(loss, norm, lr)

    def _evaluate(self, running: Any, scaler: Any, batch: Tensor) -> float:
        """One global batch forward and backward, in so many pieces; its loss."""
        total = 0.0
        for part in batch.chunk(self.pieces):
            with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(running(part[:, 0]), part[:, 1]) / self.pieces
            total += loss.item()
            root = scaler.scale(loss)
            if self.start == "Tensor.backward":
                root.backward()
            elif self.start == "autograd.backward":
                torch.autograd.backward(root)
            else:
                root.backward(gradient=torch.ones(()))
        return total
