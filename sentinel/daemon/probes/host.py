"""How busy is this machine, how much memory is left, and what does its control group allow?

`/proc` and the two layouts of control groups as in the kernel's Documentation/admin-guide/{cgroup-v1,cgroup-v2}.rst.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from sentinel.daemon.probes.probe import Reading

EVERY_SECONDS = 1.0
NO_LIMIT_BYTES = 2**60  # version 1 says "none" with a number near 2^63
RESOURCES = ("cpu", "memory", "io")
NANOSECONDS, MICROSECONDS = 1e-9, 1e-6


class Host:
    """The probe. `pid`: whose control group counts, 0 for the daemon's own; `root`: of the file system."""

    name = "host"
    every_seconds = EVERY_SECONDS

    def __init__(self, pid: Callable[[], int] = int, root: Path = Path("/")) -> None:
        self._pid = pid
        self._root = root
        psutil.cpu_percent(None)  # the next call tells of the time since this one

    def read(self) -> list[Reading]:
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        found = [
            Reading("cpu_utilization_ratio", (), psutil.cpu_percent(None) / 100),
            Reading("load_average", (), psutil.getloadavg()[0]),
            Reading("machine_memory_bytes", ("available",), memory.available),
            Reading("machine_memory_bytes", ("total",), memory.total),
            Reading("machine_memory_bytes", ("swap_used",), swap.used),
        ]
        return [*found, *self._pressure(), *self._of_group()]

    def _pressure(self) -> Iterator[Reading]:
        """Share of the last 10 seconds in which some process waited for it (Documentation/accounting/psi.rst)."""
        for resource in RESOURCES:
            with contextlib.suppress(OSError, StopIteration, ValueError):
                text = (self._root / "proc" / "pressure" / resource).read_text(encoding="ascii")
                some = next(line for line in text.splitlines() if line.startswith("some"))
                average = next(word for word in some.split() if word.startswith("avg10="))
                yield Reading("pressure_ratio", (resource,), float(average.removeprefix("avg10=")) / 100)

    def _of_group(self) -> Iterator[Reading]:
        paths = self._groups()
        for readings in (self._of_version_2(paths.get("")), self._of_version_1(paths)):
            found = list(readings)
            yield from found
            if found:
                return  # a hybrid has both, and the controllers are in one of them

    def _of_version_2(self, path: str | None) -> Iterator[Reading]:
        if path is None:
            return
        top = self._root / "sys" / "fs" / "cgroup"
        folders = _upwards(top, path)
        limits = [limit for folder in folders if (limit := _number(folder / "memory.max")) is not None]
        used = _first(folder / "memory.current" for folder in folders)
        if limits:
            yield Reading("cgroup_memory_bytes", ("limit",), min(limits))
        if used is not None:
            yield Reading("cgroup_memory_bytes", ("used",), used)
        held = _first_field([folder / "cpu.stat" for folder in folders], "throttled_usec")
        if held is not None:
            yield Reading("cgroup_cpu_throttled_seconds", (), held * MICROSECONDS)

    def _of_version_1(self, paths: dict[str, str]) -> Iterator[Reading]:
        top = self._root / "sys" / "fs" / "cgroup"
        folders = _upwards(top / "memory", paths.get("memory", "/"))
        limits = [limit for folder in folders if (limit := _number(folder / "memory.limit_in_bytes")) is not None]
        used = _first(folder / "memory.usage_in_bytes" for folder in folders)
        if limits and min(limits) < NO_LIMIT_BYTES:
            yield Reading("cgroup_memory_bytes", ("limit",), min(limits))
        if used is not None:
            yield Reading("cgroup_memory_bytes", ("used",), used)
        cpu = _upwards(top / "cpu", paths.get("cpu", "/"))
        held = _first_field([folder / "cpu.stat" for folder in cpu], "throttled_time")
        if held is not None:
            yield Reading("cgroup_cpu_throttled_seconds", (), held * NANOSECONDS)

    def _groups(self) -> dict[str, str]:
        """Path by controller; by "" that of version 2."""
        who = self._pid() or "self"
        with contextlib.suppress(OSError):
            lines = (self._root / "proc" / str(who) / "cgroup").read_text(encoding="utf-8").splitlines()
            parts = [line.split(":", 2) for line in lines if line.count(":") >= 2]
            return {name: path for _, names, path in parts for name in names.split(",")}
        return {}


def _upwards(top: Path, path: str) -> list[Path]:
    """The group's folder and those around it, innermost first. A limit of any of them holds.

    Inside a container the path may be the host's, which does not exist here: then the top is the container's own.
    """
    folder = top / path.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        return [top]
    return [folder, *(above for above in folder.parents if above.is_relative_to(top))]


def _number(path: Path) -> float | None:
    """None where there is no such file, and for "max"."""
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _first(paths: Iterator[Path]) -> float | None:
    return next((value for path in paths if (value := _number(path)) is not None), None)


def _first_field(paths: list[Path], field: str) -> float | None:
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            found = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
            if field in found:
                return float(found[field])
    return None
