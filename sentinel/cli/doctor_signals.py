"""Which signals can be had in this environment, and why not the others? The list that `sentinel doctor` ends with.

Nothing here imports torch, which takes seconds: what it can do is read from the files that it is installed as.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from sentinel import config
from sentinel.cli import doctor_machine
from sentinel.cli.doctor_machine import Found
from sentinel.config import SAMPLED, Settings
from sentinel.errors import SentinelError
from sentinel.places import Places
from sentinel.vocabulary import Mode

OLDEST_TORCH = (2, 11)
NO_TORCH = "torch is not installed here"
UNDER = {  # what a sampled signal needs beside its turn
    "histogram": "of every gradient, or of a stride through a large one",
    "update_ratio": "of every weight, or of a stride through a large one",
    "fingerprint": "under DDP, of the weights that it keeps alike on all ranks",
    "local_grad_norm": "under DDP; the gradient noise scale is made of it",
    "expert_load": "where routers are seen, or the loop reports it",
}


class Availability(StrEnum):
    AVAILABLE = "available"
    ABSENT = "absent"


class Signal(NamedTuple):
    """One group of signals: how it is had here, or why it is not."""

    name: str
    status: Availability
    reason: str


class Torch(NamedTuple):
    """How torch is built. Of a torch that is not installed all is empty."""

    version: str = ""
    accelerator: str = ""  # "CUDA 12.6" or "ROCm 6.2"; "" for a build without

    @property
    def absent(self) -> str:
        """Why no loop can be watched with it, "" where one can."""
        if not self.version:
            return NO_TORCH
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])
        oldest = ".".join(map(str, OLDEST_TORCH))
        return "" if numbers >= OLDEST_TORCH else f"torch {self.version} is older than {oldest}; upgrade it"


def find(places: Places, torch: Torch | None = None) -> list[Signal]:
    """All of them, always the same names in the same order, so that two machines can be compared."""
    try:
        settings, unusable = config.load_client(None, os.environ), ""
    except SentinelError as error:  # the check of the settings says more
        settings, unusable = Settings(), f"the settings cannot be used: {error}"
    built = installed_torch() if torch is None else torch
    off = "mode is off" if Mode.OFF in (settings.mode, os.environ.get("SENTINEL_MODE")) else ""
    machine = doctor_machine.read(places)
    loop = _loop(settings, built, machine[doctor_machine.ANY_GPU])
    return [*_shown(loop, unusable or off or built.absent), *_shown(machine.items(), unusable or off)]


def installed_torch() -> Torch:
    """Of this environment, from its `version.py`: finding a package does not import it."""
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return read_torch(Path(folders[0])) if folders else Torch()


def read_torch(folder: Path) -> Torch:
    """`folder`: the package's own."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return Torch()
    said = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*'([^'\n]*)'", text, re.MULTILINE))
    names = {"cuda": "CUDA", "hip": "ROCm"}
    built = (f"{name} {said[key]}" for key, name in names.items() if said.get(key))
    return Torch(said.get("__version__", ""), next(built, ""))


def _shown(found: Iterable[tuple[str, Found]], absent: str) -> Iterator[Signal]:
    """`absent`: what takes all of them away, "" for nothing."""
    for name, (there, reason) in found:
        status = Availability.AVAILABLE if there and not absent else Availability.ABSENT
        yield Signal(name, status, absent or reason)


def _loop(settings: Settings, torch: Torch, gpus: Found) -> Iterator[tuple[str, Found]]:
    captured = "what backward starts from, or what run.report(loss=...) says"
    reported = "only what run.report(loss=...) says: loss.capture is false"
    yield "loss", Found(True, captured if settings.loss.capture else reported)
    yield "gradient norm", Found(True, "the loop's own clipping tells it for nothing; else it is measured")
    yield "learning rate, loss scale, updates", Found(True, "read from optimizer and GradScaler")
    yield "step split", Found(True, "where its time goes, as the host sees it: kernels may run on")
    yield "throughput", Found(True, "where run.report(tokens=... or samples=...) says it, or run.batches counts")
    yield "MFU", _mfu(settings, gpus)
    yield from _waiting(torch)
    yield "device memory", _device_memory(torch, gpus)
    yield from _sampled(settings)


def _mfu(settings: Settings, gpus: Found) -> Found:
    """See client/probes/throughput.py: it needs the operations of a step and the peak of the device."""
    told = settings.throughput
    if not (told.peak_flops_per_second or gpus[0]):
        return Found(False, "no peak is known: no GPU is seen, and throughput.peak_flops_per_second is not set")
    if told.flops_per_token or told.flops_per_sample:
        return Found(True, "from [throughput]")
    return Found(True, "where run.report(flops=...) or [throughput] tells the operations of a step")


def _waiting(torch: Torch) -> Iterator[tuple[str, Found]]:
    """See client/probes/communication.py, which decides by the backend that a run then has."""
    there, ranks = sys.platform.startswith("linux"), "with two ranks or more"
    elsewhere = f"torch's process groups were not tried on {sys.platform}"
    ddp = f"from the last gradient to the end of backward, {ranks}" if there else elsewhere
    yield "communication wait, DDP on gloo", Found(there, ddp)
    yield "communication wait, FSDP2 on gloo", Found(there, f"inside Work.wait, {ranks}" if there else elsewhere)
    nccl = "its waits do not hold up the host, so nothing of them is seen"
    yield "communication wait, NCCL", Found(False, nccl if torch.accelerator else _cpu_only(torch))


def _device_memory(torch: Torch, gpus: Found) -> Found:
    if not torch.accelerator:
        return Found(False, _cpu_only(torch))
    if torch.accelerator.startswith("CUDA") and not gpus.there:
        return Found(False, f"torch is built for {torch.accelerator}, but no GPU is seen: {gpus.reason}")
    return Found(True, f"what torch's allocator holds, {torch.accelerator}")


def _cpu_only(torch: Torch) -> str:
    return f"torch {torch.version} is built for the CPU alone"


def _sampled(settings: Settings) -> Iterator[tuple[str, Found]]:
    sampling, taken = settings.sampling, settings.sampling.names()
    for name in SAMPLED:
        told = f"every {sampling.every_steps} steps or more, within {sampling.cost_ratio:.2%} of their time"
        found = Found(True, "; ".join(part for part in (told, UNDER.get(name, "")) if part))
        if name not in taken:
            found = Found(
                False, "sampling.signals leaves it out" if sampling.enabled else "sampling.enabled is false"
            )
        yield f"sampled {name}", found
