"""How much host memory is free for snapshots: the machine's, or the container's where that is less."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP_V2 = Path("/sys/fs/cgroup")
CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_bytes() -> int:
    """Bytes that can be taken without swapping; 0 if the system does not say."""
    return min((amount for amount in (_machine(), *_container()) if amount is not None), default=0)


def _machine() -> int | None:
    try:
        for line in MEMINFO.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _container() -> list[int | None]:
    pairs = [
        (CGROUP_V2 / "memory.max", CGROUP_V2 / "memory.current"),
        (CGROUP_V1 / "memory.limit_in_bytes", CGROUP_V1 / "memory.usage_in_bytes"),
    ]
    return [_room(limit, usage) for limit, usage in pairs]


def _room(limit: Path, usage: Path) -> int | None:
    try:
        text = limit.read_text(encoding="ascii").strip()
        return None if text == "max" else max(0, int(text) - int(usage.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None
