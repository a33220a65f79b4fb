"""Measure, print, and write docs/performance.md: `make bench-overhead`. Takes less than ten minutes."""

import argparse
import datetime as dt
import importlib.metadata
import logging
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from statistics import fmean, median

import torch

from tests.benchmarks import hook, overhead
from tests.benchmarks.rivals import page, sweeps
from tests.benchmarks.rivals.arms import ARMS, QUIET, SENTINEL
from tests.benchmarks.rivals.compare import compare
from tests.benchmarks.rivals.goals import Parts, judge
from tests.benchmarks.rivals.loop import Trainer
from tests.daemon.daemon_process import DaemonProcess

SECONDS = 300.0  # for the sweeps; all the rest takes two minutes, and twice that on a busy machine
LONG_STEPS, LONG_SECONDS = 300, 60.0
TRACKERS = ("mlflow-skinny", "prometheus-client", "tensorboard", "trackio", "wandb")
TENSORS = 76  # of the GPT


def main() -> None:
    """Everything in one process of one environment, with one daemon beside."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=SECONDS, help="for the sweeps; fewer give wider intervals")
    options.add_argument("--no-write", action="store_true", help="leave docs/performance.md as it is")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with _place() as folder:
        report = _measured(folder, chosen.seconds, load)
    print(page.made(report))
    if not chosen.no_write:
        page.write(report)


def _measured(folder: Path, seconds: float, load: float) -> page.Report:
    parts = _parts()
    trainer = Trainer()
    found = sweeps.usable(ARMS, trainer, folder)
    blocks = sweeps.measure(found.arms, trainer, folder, seconds)
    tables = [compare(f"All arms where {kind}", blocks[kind]) for kind in sweeps.CLIPS]
    return page.Report(
        machine=_machine(load),
        parameters=trainer.size,
        goals=judge(parts, *tables),
        tables=tables,
        long=_long(trainer, folder),
        missing=found.missing,
    )


def _long(trainer: Trainer, folder: Path) -> page.Long:
    arm = next(arm for arm in ARMS if arm.name == SENTINEL)
    taken = sweeps.stretch(arm, trainer, folder / "long", LONG_STEPS, LONG_SECONDS)
    calls = [step.calls for step in taken.steps]
    return page.Long(
        steps=len(calls),
        median_seconds=median(calls),
        mean_seconds=fmean(calls),
        worst_seconds=max(calls),
        step_seconds=median(step.wall for step in taken.steps),
        snapshots=taken.snapshots,
    )


def _parts() -> Parts:
    """In the order of their names; each is a median already."""
    with redirect_stderr(StringIO()):
        own, clipped = hook.hooks(TENSORS, clip=False), hook.hooks(TENSORS, clip=True)
    ours, bare = hook.norms(hook.gradients_of(TENSORS))
    return Parts(hook.emit(), clipped.hooks, own.hooks - own.norm, ours, bare)


def _machine(load: float) -> page.Machine:
    versions = {}
    for name in TRACKERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return page.Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        load_before=load,
        load_after=os.getloadavg()[0],
        torch=torch.__version__,
        python=platform.python_version(),
        day=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        versions=versions,
    )


def _processor() -> str:
    """Its model, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


@contextmanager
def _place() -> Iterator[Path]:
    """A folder for all that is written, and a daemon that is there for the whole time, as beside a real run."""
    logging.disable(logging.WARNING)  # the trackers' own; what they say about themselves is not what we print
    warnings.simplefilter("ignore")
    os.environ.update(QUIET)
    with overhead._home(), tempfile.TemporaryDirectory(prefix="rivals-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with DaemonProcess(folder / "home") as daemon:
            os.environ.update({key: daemon.environ[key] for key in ("SENTINEL_HOME", "XDG_RUNTIME_DIR")})
            yield folder


if __name__ == "__main__":
    main()
