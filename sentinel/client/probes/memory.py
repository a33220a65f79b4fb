"""Read what the device's allocator holds. Host memory is the daemon's to measure."""

from typing import NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """Bytes on the current CUDA device; all None without one."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None


ABSENT = DeviceMemory()


def device_memory() -> DeviceMemory:
    """One read of the caching allocator's counters: no sync, no driver call. Absent where CUDA is not in use."""
    if not torch.cuda.is_initialized():
        return ABSENT
    stats = torch.cuda.memory_stats_as_nested_dict()
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return DeviceMemory(allocated["current"], reserved["current"], allocated["peak"])
