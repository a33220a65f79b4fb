"""Read a GradScaler without changing it: is it in use, how large is its scale, do gradients still carry it?"""

from typing import Any

from torch import Tensor

from sentinel.client.handle import Handle
from sentinel.client.probes.loss import Value, plain


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


def carried(scaler: Any, optimizer_ids: list[int]) -> Tensor | None:
    """The scale that an optimizer's gradients still carry; None after `unscale_`, of it or of a wrapper around it."""
    scale = scale_of(scaler)
    if scale is None:
        return None
    states = scaler._per_optimizer_states
    stages = [states[one]["stage"].name for one in optimizer_ids if one in states]
    return scale if all(stage == "READY" for stage in stages) else None
