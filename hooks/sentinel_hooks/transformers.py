"""Watch and protect a transformers Trainer: `Trainer(..., callbacks=[SentinelCallback()])`.

The Trainer's own events come too late for gradients (after clipping) and hide NaN from its log, so losses, norms and
updates are seen by what `sentinel.attach` hooks in torch. The events here only say when training begins, evaluates
and ends, and what the Trainer alone knows.
"""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import sentinel
from sentinel_hooks.attachment import Attachment, Options

_MARK = "_sentinel_tells_callbacks"


class SentinelCallback(TrainerCallback):
    """Attached from `on_train_begin` to the end of `Trainer.train`, however it ends. On every rank.

    Takes the arguments of `sentinel.attach` that the Trainer cannot know (`Options`). The name of the run is
    `TrainingArguments.run_name`, its config the arguments, its first step the global step that was resumed from.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self._attachment = Attachment(options)
        self._tokens_seen = 0
        _let_trainers_tell_errors()

    @property
    def run(self) -> sentinel.Run | None:
        """The Run while training goes on."""
        return self._attachment.run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        del control
        optimizer = parts["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        named = {"name": args.run_name} if args.run_name else {}
        self._tokens_seen = state.num_input_tokens_seen
        self._attachment.begin(
            parts["model"],
            optimizer,
            scheduler=parts.get("lr_scheduler"),
            scaler=scaler if isinstance(scaler, torch.amp.GradScaler) else None,
            config=args.to_sanitized_dict(),
            step=state.global_step,
            **named,
        )

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._attachment.leave()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Between the last backward of the update and its step: what is reported now belongs to this update."""
        del control
        if self.run is None:
            return
        tokens = state.num_input_tokens_seen - self._tokens_seen
        self._tokens_seen = state.num_input_tokens_seen
        self.run.report(tokens=tokens or None, samples=_samples(args, parts.get("train_dataloader")))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        del args, state
        if self._attachment.stopped:
            control.should_training_stop = True
        if control.should_evaluate:
            self._attachment.enter("eval")
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        return self.on_step_end(args, state, control)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._attachment.enter("eval")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._attachment.leave()

    def on_predict(self, *_: Any, **__: Any) -> None:
        self._attachment.leave()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._attachment.end()

    def on_train_error(self, error: BaseException) -> None:
        """Not an event of the Trainer's, which has none for this: see below."""
        self._attachment.end(error)


def _samples(args: TrainingArguments, loader: Any) -> int | None:
    """Rows in the batches of this update. None in the last one of an epoch, which may be smaller, or if unknown."""
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int) or getattr(loader, "end_of_dataloader", True):
        return None
    return size * args.gradient_accumulation_steps


def _let_trainers_tell_errors() -> None:
    """Once per process: `Trainer.train` tells its SentinelCallbacks of the exception that it ends with."""
    train = Trainer.train
    if not hasattr(train, _MARK):
        telling = _telling(train)
        setattr(telling, _MARK, True)
        Trainer.train = telling  # type: ignore[method-assign] # the Trainer has no event for it


def _telling(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def train_and_tell(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, SentinelCallback):
                    callback.on_train_error(error)
            raise

    return train_and_tell
