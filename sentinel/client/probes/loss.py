"""Take the loss of an attempt from the scalars that backward starts at, or from what the loop reports."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sentinel.client import reading

# Set on the tensor that GradScaler.scale returns, so that the root's unscaled value is had exactly.
UNSCALED = "_sentinel_unscaled"
SCALED_BY = "_sentinel_scaled_by"

MOST_EXPERTS = 1024  # of a reported load

Value = float | Tensor  # a float, or a tensor of shape () on a device that must not be synced


class Objective:
    """The sum of the scalar backward roots since the last attempt, unscaled."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total: Value = 0.0
        self.count = 0

    def add(self, root: Tensor, scale: Tensor | None) -> None:
        """`root` is one that backward started at; `scale` divides it when its unscaled value is not known."""
        unscaled = getattr(root, UNSCALED, None)
        value = (root if unscaled is None else unscaled).detach()
        if unscaled is None and scale is not None:
            value = value / scale.to(value.device)
        self.total = self.total + plain(value)
        self.count += 1

    def join(self, other: "Objective") -> None:
        self.total = self.total + other.total
        self.count += other.count

    @property
    def value(self) -> Value | None:
        return self.total if self.count else None


class Reported:
    """What the loop said of one attempt: the weighted mean of its losses, the sums of the rest."""

    __slots__ = ("expert_load", "flops", "loss_total", "loss_weight", "others", "samples", "tokens")

    def __init__(self) -> None:
        self.loss_total: Value | None = None
        self.loss_weight = 0.0
        self.tokens: Value | None = None
        self.samples: Value | None = None
        self.flops: Value | None = None
        self.others: dict[str, Value] = {}
        self.expert_load: Tensor | None = None  # shape (experts,), float64, summed over the reports

    def add(self, loss: Any, tokens: Any, samples: Any, others: dict[str, Any]) -> list[str]:
        """Take what is a number; returns a sentence about each value that is none."""
        wrong: list[str] = []
        if "expert_load" in others:
            others = dict(others)
            self._add_load(others.pop("expert_load"), wrong)
        given = {"loss": loss, "tokens": tokens, "samples": samples, **others}
        numbers = {name: _scalar(name, value, wrong) for name, value in given.items()}
        loss_value, tokens_value, samples_value = (numbers.pop(name) for name in ("loss", "tokens", "samples"))
        if loss_value is not None:
            amount = next((part for part in (tokens_value, samples_value) if isinstance(part, float)), 1.0)
            weighted = loss_value * amount
            self.loss_total = weighted if self.loss_total is None else self.loss_total + weighted
            self.loss_weight += amount
        self.tokens = _sum(self.tokens, tokens_value)
        self.samples = _sum(self.samples, samples_value)
        self.flops = _sum(self.flops, numbers.pop("flops", None))
        self.others |= {name: number for name, number in numbers.items() if number is not None}
        return wrong

    def _add_load(self, value: Any, wrong: list[str]) -> None:
        load = _vector(value)
        if load is None:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            wrong.append(
                f"run.report(expert_load=...) got {what}; a vector with one number per expert, 2 to {MOST_EXPERTS}, "
                "is wanted (it is left out)"
            )
        elif self.expert_load is not None and self.expert_load.shape == load.shape:
            self.expert_load = self.expert_load + load.to(self.expert_load.device)
        else:
            self.expert_load = load

    def join(self, other: "Reported") -> None:
        self.loss_total = _sum(self.loss_total, other.loss_total)
        self.loss_weight += other.loss_weight
        self.tokens = _sum(self.tokens, other.tokens)
        self.samples = _sum(self.samples, other.samples)
        self.flops = _sum(self.flops, other.flops)
        self.others = other.others | self.others

    @property
    def loss(self) -> Value | None:
        if self.loss_total is None or not self.loss_weight:
            return None
        return self.loss_total / self.loss_weight


def scalar_roots(outputs: Sequence[Any]) -> list[Tensor]:
    """The one-element floating tensors among what backward was called on."""
    return [
        output
        for output in outputs
        if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point()
    ]


def plain(value: Tensor) -> Value:
    """A float where reading costs nothing (CPU); else a detached tensor of shape (), never synced here."""
    if reading.is_free(value):
        return float(value)
    return value.detach().reshape(()).float()


def _scalar(name: str, value: Any, wrong: list[str]) -> Value | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            wrong.append(f"run.report({name}=...) got a {type(value).__name__}; a number is wanted (it is left out)")
            return None
    if value.numel() != 1 or value.is_complex():
        what = f"{value.dtype} tensor of shape {tuple(value.shape)}"
        wrong.append(f"run.report({name}=...) got a {what}; one number is wanted (it is left out)")
        return None
    if hasattr(value, "to_local"):
        value = value.to_local()
    with torch.no_grad():
        return plain(value.detach())


def _vector(value: Any) -> Tensor | None:
    try:
        with torch.no_grad():
            load = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
            fits = load.dim() == 1 and 2 <= load.numel() <= MOST_EXPERTS and not load.is_complex()
            return load.to(torch.float64, copy=True) if fits else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _sum(total: Value | None, value: Value | None) -> Value | None:
    if value is None:
        return total
    return value if total is None else total + value
