"""The lesson, taught by Lightning's Trainer."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from sentinel_hooks.lightning import SentinelCallback
from tests.hooks.frameworks import Training
from tests.hooks.lesson import Parts

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Lecture(LightningModule):
    def __init__(self, parts: Parts, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.model = parts.model
        self.parts = parts

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return [self.parts.optimizer], [{"scheduler": self.parts.scheduler, "interval": "step"}]


class Beat(Callback):
    """Calls at every update, and writes the checkpoint that was asked for."""

    def __init__(self, training: Training, path: str) -> None:
        self.training = training
        self.path = path

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.training.lesson.accumulation == 0:
            self.training.at_update(trainer.global_step + 1, self.training.callback.run)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        complete = (batch_idx + 1) % self.training.lesson.accumulation == 0
        if complete and trainer.global_step == self.training.save_at:
            trainer.save_checkpoint(self.path)


class ResumableLoader(DataLoader[Any]):
    """Keeps its place, as Lightning wants of a loader to resume within an epoch."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        first = self.at
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.at = number + 1
                yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Lightning:
    name = "lightning"

    def callback(self, **options: Any) -> SentinelCallback:
        return SentinelCallback(**options)

    def train(self, training: Training) -> int:
        lesson, ranks = training.lesson, int(os.environ.get("WORLD_SIZE", "1"))
        trainer = Trainer(
            default_root_dir=training.folder,
            max_epochs=1,
            accumulate_grad_batches=lesson.accumulation,
            gradient_clip_val=lesson.clip,
            val_check_interval=lesson.evaluate_every * lesson.accumulation or None,
            limit_val_batches=2 if lesson.evaluate_every else 0,
            callbacks=[training.callback, Beat(training, self.checkpoint(training.folder, training.save_at))],
            **{**QUIET, "devices": ranks},
            strategy="auto" if ranks == 1 else DDPStrategy(process_group_backend="gloo"),
        )
        data = lesson.data()
        dealt = DistributedSampler(data, ranks, int(os.environ["RANK"]), shuffle=False) if ranks > 1 else None
        loader = ResumableLoader(data, batch_size=lesson.rows, sampler=dealt)
        checks = DataLoader(data[: 2 * lesson.rows], batch_size=lesson.rows)
        trainer.fit(Lecture(training.parts, lr=1e-2), loader, checks, ckpt_path=training.resume)
        return trainer.global_step

    def checkpoint(self, folder: Path, updates: int) -> str:
        return str(folder / f"{updates}.ckpt")


FRAMEWORK = Lightning()
