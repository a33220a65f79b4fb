"""A tiny GPT-2 from its config, that learns to count, and the Trainer as a person would set it up."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from sentinel_hooks.transformers import SentinelCallback

WORDS, LENGTH, ROWS = 61, 24, 8
NOISE = 0.2  # share of words that nobody can foretell


class Counting(GPT2LMHeadModel):
    """Its gradient is NaN where a batch says so; the loss is finite."""

    nan_fired = 0

    def forward(self, input_ids: Any = None, labels: Any = None, fault: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **more)
        if self.training and fault is not None and bool(fault[0]):
            self.nan_fired += 1
            output.loss.register_hook(lambda gradient: gradient * float("nan"))
        return output


def rows(batches: int, *, nan_at: frozenset[int], poison: frozenset[int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(batches):
        starts = torch.randint(WORDS, (ROWS, 1), generator=generator)
        words = (starts + torch.arange(LENGTH)) % WORDS
        random = torch.randint(WORDS, words.shape, generator=generator)
        words = torch.where(torch.rand(words.shape, generator=generator) < NOISE, random, words)
        labels = words[:, torch.randperm(LENGTH, generator=generator)] if number in poison else words
        fault = torch.tensor(int(number in nan_at))
        found += [
            {"input_ids": one, "labels": wanted, "fault": fault} for one, wanted in zip(words, labels, strict=True)
        ]
    return found


def train(
    data: list[dict[str, torch.Tensor]], accumulation: int, folder: Path, watch: Callable[[int, Any], object]
) -> tuple[Counting, int]:
    """(the model, the Trainer's own count of updates)"""

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Beat(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch(state.global_step + 1, callback.run)

    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    model, callback = Counting(shape), SentinelCallback()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=5e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        include_num_input_tokens_seen="all",
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=data, callbacks=[callback, Beat()])
    trainer.train()
    return model, trainer.state.global_step
