"""Read a GradScaler without changing it: is it in use, how large is its scale, do gradients still carry it?"""

from typing import Any

import torch
from torch import Tensor

from sentinel.client.probes.loss import Value, plain
from sentinel.client.subject import Handle


def live(handle: Handle | None) -> Any:
    """The GradScaler behind the handle; None without one or when it is disabled."""
    scaler = handle() if handle is not None else None
    return scaler if scaler is not None and scaler._enabled else None


def scale_of(scaler: Any) -> Tensor | None:
    """Its scale as it is, on its device; None before its first use, without one, or when it is disabled."""
    return scaler._scale if scaler is not None and scaler._enabled else None


def value_of(scaler: Any) -> Value | None:
    scale = scale_of(scaler)
    return None if scale is None else plain(scale)


def carried(scaler: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The scale that this optimizer's gradients still carry; None after `unscale_`."""
    scale = scale_of(scaler)
    if scale is None:
        return None
    state = scaler._per_optimizer_states.get(id(optimizer))
    return scale if state is None or state["stage"].name == "READY" else None
