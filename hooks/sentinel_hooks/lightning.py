"""Watch and protect a Lightning Trainer: `Trainer(callbacks=[SentinelCallback()])`.

Lightning runs forward, backward and clipping inside `optimizer.step(closure)`; what `sentinel.attach` hooks in torch
looks after the closure. The events here only say when fitting begins, validates and ends, and what Lightning alone
knows. Automatic and manual optimization, one optimizer or several.
"""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import sentinel
from sentinel_hooks.attachment import Attachment, Options


class SentinelCallback(Callback):
    """Attached from `on_train_start`, when a checkpoint has been loaded, to the end of the fit. On every rank.

    Takes the arguments of `sentinel.attach` that Lightning cannot know (`Options`). The name of the run is the
    module's class, its config the module's `hparams`, its first step the global step that was resumed from.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__()
        self._attachment = Attachment(options)
        self._samples: int | None = None  # of the batch whose backward has not run yet

    @property
    def run(self) -> sentinel.Run | None:
        """The Run while fitting goes on."""
        return self._attachment.run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._attachment.begin(
            pl_module,
            trainer.optimizers,
            scheduler=schedulers or None,
            scaler=scaler if isinstance(scaler, torch.amp.GradScaler) else None,
            config=_config(trainer, pl_module),
            # Lightning counts the step of each optimizer.
            step=trainer.global_step // len(trainer.optimizers),
            name=type(pl_module).__name__,
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        del trainer, pl_module, batch_idx
        self._samples = _rows(batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once a batch, however many backwards it has: what is reported now belongs to the update of the latest."""
        del trainer, pl_module
        samples, self._samples = self._samples, None
        if self.run is not None and samples is not None:
            self.run.report(samples=samples)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del pl_module, outputs, batch, batch_idx
        if self._attachment.stopped and not trainer.should_stop:
            # A stop holds at once, also before the least number of epochs or steps.
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module
        self._attachment.enter("eval")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module
        self._attachment.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module
        self._attachment.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        del trainer, pl_module
        self._attachment.end(exception)

    def __getstate__(self) -> dict[str, Any]:
        # Lightning hangs the module's own log functions on every callback: a copy is to leave the module alone.
        return {"_attachment": self._attachment, "_samples": None}


def _config(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The module's hyperparameters, and of the trainer's those that change the mathematics."""
    names = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    of_trainer = {name: getattr(trainer, name) for name in (*names, "precision")}
    return {**of_trainer, **dict(module.hparams)}


def _rows(batch: Any) -> int | None:
    """The length of the first tensor in a batch of tensors, lists, tuples and mappings; None without one."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((rows for part in batch if (rows := _rows(part)) is not None), None)
    return None
