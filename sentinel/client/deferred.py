"""Read numbers from a device without ever waiting for it: copied to pinned memory, looked at when they are there."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sentinel.client.probes.loss import Value

Numbers = dict[str, float | None]

MOST_WAITING = 64  # attempts whose numbers are still on their way; beyond, the oldest is waited for


class DeviceReader:
    """Hands over numbers in the order in which they were asked for."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, Tensor | None, list[str], Numbers, Callable[[Numbers], None]]] = deque()

    def read(self, values: dict[str, Value | None], then: Callable[[Numbers], None]) -> None:
        """Call `then` with plain floats: at once if nothing lives on a device, else from a later `poll`."""
        on_device = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        ready: Numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        if not on_device and not self._waiting:
            then(ready)
            return
        event, copied = _start_copy(list(on_device.values())) if on_device else (None, None)
        self._waiting.append((event, copied, list(on_device), ready, then))
        self.poll()

    def poll(self, *, wait: bool = False) -> None:
        """Finish what has arrived. `wait` is for the end of a run and for an overfull queue: the only sync."""
        while self._waiting:
            event, copied, names, ready, then = self._waiting[0]
            if event is not None and not event.query():
                if not wait and len(self._waiting) <= MOST_WAITING:
                    return
                event.synchronize()
            self._waiting.popleft()
            if copied is not None:
                ready |= dict(zip(names, copied.tolist(), strict=True))
            then(ready)


def _start_copy(values: list[Tensor]) -> tuple[Any, Tensor]:
    device = values[0].device
    with torch.no_grad():
        stacked = torch.stack([value.detach().to(device, torch.float64).reshape(()) for value in values])
    if device.type != "cuda":
        return None, stacked.cpu()
    pinned = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
    pinned.copy_(stacked, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event, pinned
