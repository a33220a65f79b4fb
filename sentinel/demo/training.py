"""One training run of the demo: an ordinary loop, with two lines of sentinel where it is asked for."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import sentinel
from sentinel.demo import corpus, data
from sentinel.demo.model import CharacterGPT
from sentinel.demo.plan import Faults, Plan

DAEMON_SECONDS = 20.0  # most time that the demo gives its daemon to start
_POLL = threading.Event()  # never set; its wait is the pause between two looks

Watcher = Callable[[int, float], None]  # called after every step with its number and loss


class Result(NamedTuple):
    """How a run ended."""

    validation_loss: float
    steps: int  # update attempts of the history that counts
    attempts: int  # all of them, with those that a rollback took back
    seconds: float
    faults_fired: int  # batches on which a fault struck
    run_id: str = ""  # with sentinel only


class Text(NamedTuple):
    """The corpus, encoded once for all runs."""

    training: Tensor
    validation: Tensor
    vocabulary: int


def load_text(plan: Plan) -> Text:
    numbers, vocabulary = corpus.encode(corpus.sources(plan.corpus_characters))
    return Text(*corpus.split(numbers), vocabulary)


def train(
    text: Text,
    plan: Plan,
    faults: Faults,
    watch: Watcher,
    *,
    protected: bool,
    enough: Callable[[], bool] = lambda: False,
) -> Result:
    """Train from the same start on the same data; `protected`: with sentinel attached. Ends early once `enough()`."""
    started = time.perf_counter()
    torch.manual_seed(plan.seed)
    model = CharacterGPT(text.vocabulary, plan.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.peak_lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_share(step, plan))
    batches: Any = data.loader(text.training, plan, poisoned=faults.poisoned_window)
    run = _attach(model, optimizer, scheduler, plan) if protected else None
    attempts, fired, step = 0, 0, 0
    for characters, following, numbers in run.batches(batches) if run else batches:
        number = int(numbers[0])
        loss = functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())
        loss.backward()
        struck = _strike(model, number, plan, faults, already=fired)
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if run:
            run.report(loss=loss, tokens=characters.numel())
        attempts, fired = attempts + 1, fired + struck
        step = run.step if run else step + 1
        watch(step, float(loss.detach()))
        if step >= plan.steps or enough():
            break
    if run:
        run.detach()
    return Result(
        validation_loss=evaluate(model, text, plan),
        steps=step,
        attempts=attempts,
        seconds=time.perf_counter() - started,
        faults_fired=fired,
        run_id=run.run_id if run else "",
    )


@torch.no_grad()
def evaluate(model: CharacterGPT, text: Text, plan: Plan) -> float:
    """Mean loss on the text that was kept aside; NaN if the weights are."""
    losses = [
        functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())
        for characters, following in data.validation(text.validation, plan)
    ]
    return float(torch.stack(losses).mean())


def _attach(model: CharacterGPT, optimizer: Any, scheduler: Any, plan: Plan) -> Any:
    run = sentinel.attach(
        model,
        optimizer,
        scheduler=scheduler,
        name="demo",
        config={"steps": plan.steps, "seed": plan.seed, "batch": plan.batch, "peak_lr": plan.peak_lr},
        settings={"snapshot": {"every_steps": plan.snapshot_every_steps}},
    )
    # `attach` never waits for its daemon. This run may be over before a slow machine has started one.
    deadline = time.monotonic() + DAEMON_SECONDS
    while not run.url and time.monotonic() < deadline:
        _POLL.wait(0.05)
    return run


def _strike(model: CharacterGPT, number: int, plan: Plan, faults: Faults, *, already: int) -> int:
    """Let the faults of this batch happen; 1 if there was one. The NaN is a glitch: it strikes once."""
    if faults.nan_gradient and number == plan.nan_batch and not already:
        gradient = model.blocks[0].forward_in.weight.grad  # type: ignore[union-attr] # a Block's Linear
        assert isinstance(gradient, Tensor)
        gradient[0, 0] = math.nan
        return 1
    return int(faults.poisoned_window and 0 <= number - plan.first_poisoned < plan.poisoned_batches)


def _lr_share(step: int, plan: Plan) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    progress = (step - plan.warmup_steps) / (plan.steps - plan.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
