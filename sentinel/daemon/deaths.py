"""Notice at once when a training process ends, even if a forked child keeps its socket open."""

import asyncio
import os
from collections.abc import Callable

import psutil

POLL_SECONDS = 1.0  # where the kernel has no process handles
_SAME_START_SECONDS = 1.0  # two readings of one process's start differ by less


class Deaths:
    """Process handles (pidfd), so that a reused pid is never taken for the old process."""

    def __init__(self) -> None:
        self._handles: dict[int, Callable[[], None]] = {}  # descriptor -> what to do
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, pid: int, died: Callable[[], None]) -> Callable[[], None]:
        """Call `died` once when the process ends (soon, if it already has). Returns how to stop watching."""
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            handle = loop.call_soon(died)
            return handle.cancel
        except OSError:
            return self._poll(pid, died)

        def ended() -> None:
            self._close(descriptor)
            died()

        self._handles[descriptor] = ended
        loop.add_reader(descriptor, ended)
        return lambda: self._close(descriptor)

    def close(self) -> None:
        for descriptor in list(self._handles):
            self._close(descriptor)
        for task in self._tasks:
            task.cancel()

    def _close(self, descriptor: int) -> None:
        if self._handles.pop(descriptor, None) is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def _poll(self, pid: int, died: Callable[[], None]) -> Callable[[], None]:
        async def look() -> None:
            while is_alive(pid, None):  # noqa: ASYNC110 - the kernel has nothing to wait for here
                await asyncio.sleep(POLL_SECONDS)
            died()

        task = asyncio.get_running_loop().create_task(look())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def stop() -> None:
            task.cancel()

        return stop


def is_alive(pid: int, process_start: float | None) -> bool:
    """Whether that very process still runs; `process_start` tells it from a later one with the same pid."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process_start is None or abs(process.create_time() - process_start) < _SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
