"""How each framework teaches the lesson. A new adapter joins the suite with one class here."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import DataLoader, SequentialSampler

from tests.hooks.lesson import AtUpdate, Lesson, Parts

Options = dict[str, Any]


class Framework(Protocol):
    """One adapter and the framework below it."""

    name: str

    def callback(self, **options: Any) -> Any:
        """The adapter's object; has `run`."""
        ...

    def train(
        self,
        lesson: Lesson,
        parts: Parts,
        folder: Path,
        callback: Any,
        at_update: AtUpdate = lambda _n, _run: None,
        *,
        save_at: int = 0,
        resume: str | None = None,
    ) -> int:
        """Train; the framework's own count of updates at the end.

        `save_at`: write a checkpoint after so many updates, to `checkpoint(folder, save_at)`; `resume`: its path.
        """
        ...

    def checkpoint(self, folder: Path, updates: int) -> str: ...


class Transformers:
    name = "transformers"

    def callback(self, **options: Any) -> Any:
        from sentinel_hooks.transformers import SentinelCallback

        return SentinelCallback(**options)

    def train(
        self,
        lesson: Lesson,
        parts: Parts,
        folder: Path,
        callback: Any,
        at_update: AtUpdate = lambda _n, _run: None,
        *,
        save_at: int = 0,
        resume: str | None = None,
    ) -> int:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

        class InOrder(Trainer):
            def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
                return SequentialSampler(self.train_dataset)

        class Beat(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                at_update(state.global_step + 1, callback.run)

        arguments = TrainingArguments(
            output_dir=str(folder),
            run_name="lesson",
            per_device_train_batch_size=lesson.rows,
            per_device_eval_batch_size=lesson.rows,
            gradient_accumulation_steps=lesson.accumulation,
            max_grad_norm=lesson.clip or 0.0,
            num_train_epochs=1,
            eval_strategy="steps" if lesson.evaluate_every else "no",
            eval_steps=lesson.evaluate_every or None,
            save_strategy="steps" if save_at else "no",
            save_steps=save_at or 500,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            label_names=["targets"],
            prediction_loss_only=True,
            remove_unused_columns=False,
        )
        data = lesson.data()
        trainer = InOrder(
            model=parts.model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data[: 2 * lesson.rows],
            data_collator=default_data_collator,
            optimizers=(parts.optimizer, parts.scheduler),
            callbacks=[callback, Beat()],
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step

    def checkpoint(self, folder: Path, updates: int) -> str:
        return str(folder / f"checkpoint-{updates}")


class Lightning:
    name = "lightning"

    def callback(self, **options: Any) -> Any:
        from sentinel_hooks.lightning import SentinelCallback

        return SentinelCallback(**options)

    def train(
        self,
        lesson: Lesson,
        parts: Parts,
        folder: Path,
        callback: Any,
        at_update: AtUpdate = lambda _n, _run: None,
        *,
        save_at: int = 0,
        resume: str | None = None,
    ) -> int:
        from lightning.pytorch import Callback, LightningModule, Trainer

        class Lecture(LightningModule):
            def __init__(self, lr: float) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.model = parts.model

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.model(**batch)["loss"]

            def validation_step(self, batch: Any, batch_idx: int) -> Any:
                return self.model(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return [parts.optimizer], [{"scheduler": parts.scheduler, "interval": "step"}]

        class Beat(Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx % lesson.accumulation == 0:
                    at_update(trainer.global_step + 1, callback.run)

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if save_at and trainer.global_step == save_at and (batch_idx + 1) % lesson.accumulation == 0:
                    trainer.save_checkpoint(_lightning_file(folder, save_at))

        data = lesson.data()
        trainer = Trainer(
            default_root_dir=folder,
            max_epochs=1,
            accumulate_grad_batches=lesson.accumulation,
            gradient_clip_val=lesson.clip,
            val_check_interval=lesson.evaluate_every * lesson.accumulation or None,
            limit_val_batches=2 if lesson.evaluate_every else 0,
            num_sanity_val_steps=0,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback, Beat()],
        )
        loaders = [
            ResumableLoader(data, batch_size=lesson.rows),
            DataLoader(data[: 2 * lesson.rows], batch_size=lesson.rows),
        ]
        trainer.fit(Lecture(lr=1e-2), *loaders, ckpt_path=resume)
        return trainer.global_step

    def checkpoint(self, folder: Path, updates: int) -> str:
        return _lightning_file(folder, updates)


class ResumableLoader(DataLoader[Any]):
    """Keeps its place, as Lightning wants of a loader to resume within an epoch."""

    at = 0

    def __iter__(self) -> Any:
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


def _lightning_file(folder: Path, updates: int) -> str:
    return str(folder / f"{updates}.ckpt")


FRAMEWORKS: tuple[Callable[[], Framework], ...] = (Transformers, Lightning)
