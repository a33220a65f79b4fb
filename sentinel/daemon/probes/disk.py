"""How much room is left where sentinel and the runs write?"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from sentinel.daemon.probes.probe import Reading

EVERY_SECONDS = 5.0

Places = Callable[[], Mapping[str, Iterable[Path]]]


class Disk:
    """The probe. Of several folders of one place, as the working directories of several runs, the fullest is told."""

    name = "disk"
    every_seconds = EVERY_SECONDS

    def __init__(self, places: Places) -> None:
        self._places = places

    def read(self) -> list[Reading]:
        found: list[Reading] = []
        for place, folders in self._places().items():
            asked = [state for folder in set(folders) if (state := _state(folder)) is not None]
            if asked:
                found.extend(_of(place, min(asked, key=lambda state: state.f_bavail * state.f_frsize)))
        return found


def _state(folder: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(folder)
    except OSError:  # the folder was removed, or is not ours to see
        return None


def _of(place: str, state: os.statvfs_result) -> Iterator[Reading]:
    yield Reading("disk_free_bytes", (place,), state.f_bavail * state.f_frsize)  # as a process without privileges has
    yield Reading("disk_size_bytes", (place,), state.f_blocks * state.f_frsize)
    if state.f_files:  # 0 where the file system makes inodes as it needs them (btrfs, many network ones)
        yield Reading("disk_free_inodes", (place,), state.f_favail)
