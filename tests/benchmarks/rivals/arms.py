"""Everything that may follow the loop, in a list that one can see; each is opened for its block and closed after."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import sentinel
from tests.benchmarks.rivals.loop import Trainer, Use
from tests.waiting import until

BARE, AGAIN, SENTINEL = "bare", "bare, again", "sentinel"

# No tracker may speak to anything but this machine, and none is asked to report on its use.
QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}


class Arm(NamedTuple):
    """One way to follow the loop."""

    name: str
    includes: str  # what the loop does for it in every step, besides what the bare loop does
    open: Callable[[Trainer, Path], AbstractContextManager[Use]]  # the folder is new and empty
    module: str = ""  # which must be installed


def _bare(_trainer: Trainer, _folder: Path) -> AbstractContextManager[Use]:
    return nullcontext(Use())


@contextmanager
def _sentinel(trainer: Trainer, _folder: Path) -> Iterator[Use]:
    with _silence():  # its greeting is not what we print here
        run: Any = sentinel.attach(trainer.model, trainer.optimizer)
    try:
        until(lambda: run.url, 30.0, "the daemon greets the run")
        yield Use(hook_seconds=lambda: run._loop.hook_seconds, snapshots=lambda: len(run._ring.snapshots))
    finally:
        run.detach()


def _reads(_trainer: Trainer, _folder: Path) -> AbstractContextManager[Use]:
    return nullcontext(Use(log=lambda _step, _values: None))  # the loop has called .item() for the values


@contextmanager
def _json_lines(_trainer: Trainer, folder: Path) -> Iterator[Use]:
    with (folder / "log.jsonl").open("w", encoding="utf-8") as file:

        def log(step: int, values: dict[str, float]) -> None:
            file.write(json.dumps({"step": step, **values}) + "\n")
            file.flush()

        yield Use(log)


@contextmanager
def _prometheus(_trainer: Trainer, _folder: Path) -> Iterator[Use]:
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}

    def log(_step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name not in gauges:
                gauges[name] = Gauge(f"train_{name}", name, registry=registry)
            gauges[name].set(value)

    yield Use(log)


@contextmanager
def _tensorboard(_trainer: Trainer, folder: Path) -> Iterator[Use]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def log(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield Use(log)


@contextmanager
def _wandb(_trainer: Trainer, folder: Path) -> Iterator[Use]:
    import wandb

    with _silence():
        run = wandb.init(project="overhead", mode="offline", dir=str(folder))
    try:
        yield Use(lambda step, values: run.log(values, step=step))
    finally:
        with _silence():
            run.finish()


def _mlflow(*, synchronous: bool) -> Callable[[Trainer, Path], AbstractContextManager[Use]]:
    @contextmanager
    def opened(_trainer: Trainer, folder: Path) -> Iterator[Use]:
        import mlflow

        with _silence():
            # One database for all blocks: to make its tables takes seconds.
            mlflow.set_tracking_uri(f"sqlite:///{folder.parent / 'mlflow.db'}")
            mlflow.set_experiment("overhead")
            mlflow.start_run()
        try:
            yield Use(lambda step, values: mlflow.log_metrics(values, step=step, synchronous=synchronous))
        finally:
            with _silence():
                mlflow.flush_async_logging()
                mlflow.end_run()

    return opened


@contextmanager
def _trackio(_trainer: Trainer, folder: Path) -> Iterator[Use]:
    os.environ["TRACKIO_DIR"] = str(folder.parent / "trackio")
    import trackio

    with _silence():
        trackio.init(project="overhead")
    try:
        yield Use(lambda step, values: trackio.log(values, step=step))
    finally:
        with _silence():
            trackio.finish()


ARMS = (
    Arm(BARE, "nothing", _bare),
    Arm(SENTINEL, "its hooks; without the loop's own clipping a gradient norm of its own", _sentinel),
    Arm("values read", "`.item()` of loss and norm, lr, memory, step time; nothing is logged", _reads),
    Arm("JSON lines", "the values read; `json.dumps` and a flush to a file", _json_lines),
    Arm("Prometheus gauges", "the values read; five gauges set in the process", _prometheus, "prometheus_client"),
    Arm(AGAIN, "nothing; what differs from the other bare blocks is chance", _bare),
    Arm("TensorBoard", "the values read; five `add_scalar`", _tensorboard, "tensorboard"),
    Arm("W&B, offline", "the values read; `run.log`", _wandb, "wandb"),
    Arm("trackio", "the values read; `trackio.log`", _trackio, "trackio"),
    Arm("MLflow, asynchronous", "the values read; `log_metrics` to SQLite", _mlflow(synchronous=False), "mlflow"),
    Arm("MLflow", "the values read; `log_metrics` to SQLite", _mlflow(synchronous=True), "mlflow"),
)


@contextmanager
def _silence() -> Iterator[None]:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield
