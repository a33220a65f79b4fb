"""A process that loads data with two workers, one of which grows by 8 MiB with each of its samples: FOLDER ways."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

GROWTH_BYTES = 8 << 20


class Leaking(Dataset[int]):
    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        if worker is not None and worker.id == 1 and len(self.kept) < 8:
            self.kept.append(b"x" * GROWTH_BYTES)
        return index


def main(folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    loader = DataLoader(Leaking(), batch_size=1, num_workers=2, prefetch_factor=8, multiprocessing_context=how)
    iterator = iter(loader)
    for _ in range(40):
        next(iterator)
    (folder / "ready").touch()
    while not (folder / "stop").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
