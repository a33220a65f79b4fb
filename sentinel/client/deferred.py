"""Read numbers from a device without ever waiting for it: copied to pinned memory, looked at when they are there."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sentinel.client import reading
from sentinel.client.probes.loss import Value

Numbers = dict[str, Any]  # a float for a number or a tensor of shape (), a list of floats for one of shape (n,)

MOST_WAITING = 64  # attempts whose numbers are still on their way; beyond, the oldest is waited for


class _Copy(NamedTuple):
    """Numbers on their way from one device."""

    event: Any  # None: they are there
    flat: Tensor  # float64, on the host
    shapes: list[tuple[str, int | None]]  # name and length, None for a single number

    def take(self) -> Numbers:
        numbers, place = self.flat.tolist(), 0
        found: Numbers = {}
        for name, length in self.shapes:
            found[name] = numbers[place] if length is None else numbers[place : place + length]
            place += 1 if length is None else length
        return found


class _Waiting(NamedTuple):
    copy: _Copy | None
    ready: Numbers
    then: Callable[[Numbers], None]


class DeviceReader:
    """Hands over numbers in the order in which they were asked for."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()

    def read(self, values: dict[str, Value | None], then: Callable[[Numbers], None]) -> None:
        """Call `then` with plain floats: at once if nothing lives on a device, else from a later `poll`.

        Floats and integers pass through float64: an integer is exact up to 2**53.
        """
        on_device: dict[str, Tensor] = {}
        ready: Numbers = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                ready[name] = value
            elif reading.is_free(value):
                ready[name] = value.detach().to(torch.float64).tolist()
            else:
                on_device[name] = value.detach()
        if not on_device and not self._waiting:
            then(ready)
            return
        self._waiting.append(_Waiting(_start_copy(on_device) if on_device else None, ready, then))
        self.poll()

    def poll(self, *, wait: bool = False) -> None:
        """Finish what has arrived. `wait` is for the end of a run and for an overfull queue: the only sync."""
        while self._waiting:
            copy, ready, then = self._waiting[0]
            if copy is not None and copy.event is not None and not copy.event.query():
                if not wait and len(self._waiting) <= MOST_WAITING:
                    return
                copy.event.synchronize()
            self._waiting.popleft()
            then(ready if copy is None else ready | copy.take())


def _start_copy(values: dict[str, Tensor]) -> _Copy:
    """One copy for all of them: what lives on another device goes over the first one's."""
    device = next(iter(values.values())).device
    shapes = [(name, value.numel() if value.dim() else None) for name, value in values.items()]
    with torch.no_grad():
        flat = torch.cat([one.to(device, torch.float64).reshape(-1) for one in values.values()])
    if device.type != "cuda":
        return _Copy(None, flat.cpu(), shapes)
    pinned = torch.empty(flat.numel(), dtype=torch.float64, pin_memory=True)
    pinned.copy_(flat, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _Copy(event, pinned, shapes)
