"""How much memory do a training process and its children hold, and which of them are data workers?"""

from enum import StrEnum
from typing import NamedTuple

import psutil

TORCH_WORKER = "pt_data_worker"  # the name that a torch DataLoader gives its workers (torch 2.6 and later)
# How Python starts the children of multiprocessing; what serves the module itself does no work of the loop's.
SPAWNED, SERVANTS = "multiprocessing.spawn", ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
COMPILER = "compile_worker"  # of torch.compile


class ProcessKind(StrEnum):
    TRAINER = "trainer"
    DATA_WORKER = "data_worker"
    OTHER = "other"


class Member(NamedTuple):
    """One process of a rank's tree."""

    pid: int
    kind: ProcessKind
    name: str
    uss_bytes: int  # what would be free if it alone ended


class Tree(NamedTuple):
    """The training process first."""

    members: list[Member]

    @property
    def uss_bytes(self) -> int:
        return sum(member.uss_bytes for member in self.members)

    @property
    def workers(self) -> list[Member]:
        """The data workers, the largest first."""
        found = [member for member in self.members if member.kind is ProcessKind.DATA_WORKER]
        return sorted(found, key=lambda member: -member.uss_bytes)


class _Seen(NamedTuple):
    name: str
    command: str
    uss_bytes: int


def tree_of(pid: int) -> Tree | None:
    """None if the process is gone or not ours to see. Costs about as much as the kernel takes to walk its pages."""
    try:
        root = psutil.Process(pid)
        children = root.children(recursive=True)
        own = _look(root)
    except psutil.Error:
        return None
    trainer = Member(pid, ProcessKind.TRAINER, own.name, own.uss_bytes)
    seen: dict[int, _Seen] = {}
    for child in children:
        try:
            seen[child.pid] = _look(child)
        except psutil.Error:  # it ended while we looked
            continue
    by_name = any(each.name == TORCH_WORKER for each in seen.values())
    return Tree([trainer, *(_member(number, each, own, by_name) for number, each in seen.items())])


def _look(process: psutil.Process) -> _Seen:
    with process.oneshot():
        return _Seen(process.name(), " ".join(process.cmdline()), int(process.memory_full_info().uss))


def _member(pid: int, seen: _Seen, trainer: _Seen, by_name: bool) -> Member:
    """`by_name`: workers of torch are here, so that only these are. Other loaders' are known by how they started."""
    if seen.name == TORCH_WORKER:
        return Member(pid, ProcessKind.DATA_WORKER, seen.name, seen.uss_bytes)
    if any(servant in seen.command for servant in (*SERVANTS, COMPILER)):
        return Member(pid, ProcessKind.OTHER, seen.name, seen.uss_bytes)
    spawned, forked = SPAWNED in seen.command, bool(seen.command) and seen.command == trainer.command
    if not (spawned or forked):
        return Member(pid, ProcessKind.OTHER, seen.name, seen.uss_bytes)
    kind = ProcessKind.OTHER if by_name else ProcessKind.DATA_WORKER
    return Member(pid, kind, "spawned by multiprocessing" if spawned else "forked", seen.uss_bytes)
