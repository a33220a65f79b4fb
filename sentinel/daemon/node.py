"""Measure what a training process cannot cheaply see of itself: the memory of its whole process tree, the disk."""

import asyncio
import contextlib
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from sentinel.daemon.rank import Fleet, Rank
from sentinel.daemon.writer import Writer

EVERY_SECONDS = 0.9  # at least 1 Hz, with room for the measurement itself
FIRST_SECONDS = 1.0  # most time that a greeting waits for the first measurement
COST_SHARE = 0.1  # of one core, at most: huge address spaces are measured less often


class Node:
    """The probes of this machine, in a thread of their own."""

    def __init__(self, fleet: Fleet, writer: Writer, home: Path) -> None:
        self._fleet = fleet
        self._writer = writer
        self._home = home
        self._pids: dict[Rank, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sentinel-node")
        self._cost_seconds = 0.0

    async def follow(self, rank: Rank, pid: int) -> None:
        """Measure a rank that just came, so that already its first record has a number, and from now on."""
        self._pids[rank] = pid
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                rank.host_memory_bytes = await loop.run_in_executor(self._thread, host_memory_bytes, pid)
        except TimeoutError:
            rank.host_memory_bytes = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(max(EVERY_SECONDS, self._cost_seconds / COST_SHARE))
            await self._measure_all()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _measure_all(self) -> None:
        self._pids = {rank: pid for rank, pid in self._pids.items() if rank.connected}
        if not self._pids:
            return
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, _measure, dict(self._pids), self._home)
        self._cost_seconds = time.monotonic() - began
        now = time.time()
        for rank, values in found.items():
            memory = values.get("host_memory_bytes")
            rank.host_memory_bytes = None if memory is None else int(memory)
            self._save(rank, now, values)

    def _save(self, rank: Rank, now: float, values: dict[str, float]) -> None:
        run_id, attempt, number = rank.origin
        self._writer.later(
            lambda store: store.save_system_sample(run_id, attempt, number, now, values), critical=False
        )


def host_memory_bytes(pid: int) -> int | None:
    """Unique memory (USS) of a process and all its descendants; None if it is gone or not ours to see."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        first = root.memory_full_info().uss
    except psutil.Error:
        return None
    return int(first) + sum(_uss(process) for process in tree[1:])


def _uss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:  # a worker that ended while we looked
        return 0


def _measure(pids: dict[Rank, int], home: Path) -> dict[Rank, dict[str, float]]:
    shared = {"available_memory_bytes": float(psutil.virtual_memory().available)}
    with contextlib.suppress(OSError):  # the home was removed
        shared["disk_free_bytes"] = float(shutil.disk_usage(home).free)
    found: dict[Rank, dict[str, float]] = {}
    for rank, pid in pids.items():
        memory = host_memory_bytes(pid)
        found[rank] = shared if memory is None else {**shared, "host_memory_bytes": float(memory)}
    return found
