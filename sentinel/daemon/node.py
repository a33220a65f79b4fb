"""Measure what a training process cannot cheaply see of itself: the memory of its process tree, and the machine."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from sentinel.daemon.metrics import Metrics
from sentinel.daemon.node_metrics import Workers
from sentinel.daemon.probes.disk import Disk
from sentinel.daemon.probes.host import Host
from sentinel.daemon.probes.network import Network
from sentinel.daemon.probes.nvml import Nvml
from sentinel.daemon.probes.probe import Probe, Reading
from sentinel.daemon.probes.processes import Tree, tree_of
from sentinel.daemon.probes.rdma import Rdma
from sentinel.daemon.probes.watch import Watched
from sentinel.daemon.rank import Fleet, Rank
from sentinel.daemon.writer import Writer

EVERY_SECONDS = 0.9  # at least 1 Hz, with room for the measurement itself
FIRST_SECONDS = 1.0  # most time that a greeting waits for the first measurement
COST_SHARE = 0.1  # of one core, at most: huge address spaces are measured less often
TICK_SECONDS = 0.25  # how often probes of the machine are looked at
MACHINE_SECONDS = 10.0  # between two samples of the whole machine in the database
MOST_VALUES = 512  # of the machine in one sample, about 20 KB
MOST_WORKERS = 4  # of a rank that are named in its sample, the largest
ALWAYS = ("machine_memory_bytes{available}", "disk_free_bytes{home}")  # in every sample of every rank


class Node:
    """The probes of this machine: one thread for the ranks' memory, one for each other probe while it measures."""

    def __init__(self, fleet: Fleet, writer: Writer, metrics: Metrics, home: Path) -> None:
        self._fleet = fleet
        self._writer = writer
        self._metrics = metrics
        self._home = home
        self._pids: dict[Rank, int] = {}
        self._trees: dict[Rank, Tree] = {}
        self._folders: dict[Rank, Path] = {}  # where each rank works
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sentinel-node")
        self._cost_seconds = 0.0
        self._machine_saved = float("-inf")
        probes: tuple[Probe, ...] = (Nvml(), Network(), Rdma(), Disk(self._places), Host(self._any_pid))
        self._watched = [Watched(probe) for probe in probes]
        self._disabled = 0
        metrics.machine.readings = self.readings
        metrics.machine.workers = self._workers

    async def follow(self, rank: Rank, pid: int) -> None:
        """Measure a rank that just came, so that already its first record has a number, and from now on."""
        self._pids[rank] = pid
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                tree = await loop.run_in_executor(self._thread, tree_of, pid)
                self._keep(rank, tree)
        except TimeoutError:
            rank.host_memory_bytes = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._measure_ranks())
            both.create_task(self._measure_machine())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def readings(self) -> list[Reading]:
        """What is known of the machine now."""
        return [reading for watched in self._watched for reading in watched.readings()]

    # ------------------------------------------------------------------ the ranks

    async def _measure_ranks(self) -> None:
        while True:
            await asyncio.sleep(max(EVERY_SECONDS, self._cost_seconds / COST_SHARE))
            self._forget_gone()
            if self._pids:
                await self._measure_all()

    async def _measure_all(self) -> None:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, _measure, dict(self._pids))
        self._cost_seconds = time.monotonic() - began
        for rank, (tree, folder) in found.items():
            self._keep(rank, tree)
            if folder is not None:
                self._folders[rank] = folder
        self._save()

    def _keep(self, rank: Rank, tree: Tree | None) -> None:
        rank.host_memory_bytes = None if tree is None else tree.uss_bytes
        if tree is None:
            self._trees.pop(rank, None)
        else:
            self._trees[rank] = tree

    def _forget_gone(self) -> None:
        self._pids = {rank: pid for rank, pid in self._pids.items() if rank.connected}
        self._trees = {rank: tree for rank, tree in self._trees.items() if rank in self._pids}
        self._folders = {rank: folder for rank, folder in self._folders.items() if rank in self._pids}

    # ------------------------------------------------------------------ the machine

    async def _measure_machine(self) -> None:
        while True:
            for watched in self._watched:
                watched.tick(idle=not self._pids)
            disabled = sum(watched.off for watched in self._watched)
            self._metrics.parts_disabled += disabled - self._disabled
            self._disabled = disabled
            await asyncio.sleep(TICK_SECONDS)

    def _places(self) -> Mapping[str, list[Path]]:
        return {"home": [self._home], "cwd": list(self._folders.copy().values())}

    def _any_pid(self) -> int:
        return next(iter(self._pids.copy().values()), 0)

    def _workers(self) -> Mapping[tuple[str, int], Workers]:
        found = {}
        for rank, tree in self._trees.copy().items():
            workers = tree.workers
            held = sum(worker.uss_bytes for worker in workers)
            found[rank.origin.run_id, rank.origin.rank] = Workers(len(workers), held)
        return found

    # ------------------------------------------------------------------ the record

    def _save(self) -> None:
        """Every rank's own, and now and then the whole machine's with the first rank of each run."""
        now = time.time()
        machine = _flat(self.readings())
        always = {name: machine[name] for name in ALWAYS if name in machine}
        whole = time.monotonic() - self._machine_saved >= MACHINE_SECONDS
        if whole:
            self._machine_saved = time.monotonic()
        first: set[str] = set()
        for rank in sorted(self._pids, key=lambda rank: rank.origin):
            values = {**always, **_of_tree(self._trees.get(rank))}
            if whole and rank.origin.run_id not in first:
                values |= machine
            first.add(rank.origin.run_id)
            self._save_one(rank, now, values)

    def _save_one(self, rank: Rank, now: float, values: dict[str, float]) -> None:
        run_id, attempt, number = rank.origin
        self._writer.later(
            lambda store: store.save_system_sample(run_id, attempt, number, now, values), critical=False
        )


def _measure(pids: dict[Rank, int]) -> dict[Rank, tuple[Tree | None, Path | None]]:
    return {rank: (tree_of(pid), _folder_of(pid)) for rank, pid in pids.items()}


def _folder_of(pid: int) -> Path | None:
    try:
        return Path(psutil.Process(pid).cwd())
    except psutil.Error:
        return None


def _of_tree(tree: Tree | None) -> dict[str, float]:
    if tree is None:
        return {}
    workers = tree.workers
    values = {"host_memory_bytes": float(tree.uss_bytes), "data_workers": float(len(workers))}
    if workers:
        values["data_worker_memory_bytes"] = float(sum(worker.uss_bytes for worker in workers))
    for worker in workers[:MOST_WORKERS]:
        values[f"data_worker_memory_bytes{{{worker.pid}}}"] = float(worker.uss_bytes)
    return values


def _flat(readings: list[Reading]) -> dict[str, float]:
    """As in the database: the name, with the labels' values in braces."""
    pairs = ((f"{name}{{{','.join(labels)}}}" if labels else name, float(value)) for name, labels, value in readings)
    return dict(list(pairs)[:MOST_VALUES])
