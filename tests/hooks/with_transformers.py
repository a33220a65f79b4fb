"""The lesson, taught by the transformers Trainer."""

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from sentinel_hooks.transformers import SentinelCallback
from tests.hooks.frameworks import Training
from tests.hooks.lesson import AtUpdate


class InOrder(Trainer):
    """Takes the data in order, so that a fault strikes where the lesson says."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Beat(TrainerCallback):
    """Calls at every update."""

    def __init__(self, callback: SentinelCallback, at_update: AtUpdate) -> None:
        self.callback = callback
        self.at_update = at_update

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at_update(state.global_step + 1, self.callback.run)


class Transformers:
    name = "transformers"

    def callback(self, **options: Any) -> SentinelCallback:
        return SentinelCallback(**options)

    def train(self, training: Training) -> int:
        lesson, parts = training.lesson, training.parts
        data = lesson.data()
        trainer = InOrder(
            model=parts.model,
            args=arguments_of(training),
            train_dataset=data,
            eval_dataset=data[: 2 * lesson.rows],
            data_collator=default_data_collator,
            optimizers=(parts.optimizer, parts.scheduler),
            callbacks=[training.callback, Beat(training.callback, training.at_update)],
        )
        trainer.train(resume_from_checkpoint=training.resume)
        return trainer.state.global_step

    def checkpoint(self, folder: Path, updates: int) -> str:
        return str(folder / f"checkpoint-{updates}")


def arguments_of(training: Training) -> TrainingArguments:
    lesson = training.lesson
    return TrainingArguments(
        output_dir=str(training.folder),
        run_name="lesson",
        per_device_train_batch_size=lesson.rows,
        per_device_eval_batch_size=lesson.rows,
        gradient_accumulation_steps=lesson.accumulation,
        max_grad_norm=lesson.clip or 0.0,
        num_train_epochs=1,
        eval_strategy="steps" if lesson.evaluate_every else "no",
        eval_steps=lesson.evaluate_every or None,
        save_strategy="steps" if training.save_at else "no",
        save_steps=training.save_at or 500,
        logging_steps=1,
        logging_nan_inf_filter=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        label_names=["targets"],
        prediction_loss_only=True,
        remove_unused_columns=False,
    )


FRAMEWORK = Transformers()
