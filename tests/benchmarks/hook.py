"""What one step costs the loop's thread in sentinel's hooks: `python -m tests.benchmarks.hook`.

Four parts, all in CPU time of the loop's thread, interleaved, medians:
emit -- one record made, encoded and put into the outbox;
hook -- a loop whose own work is next to nothing (an optimizer that does nothing, a backward that reaches two
parameters), bare and attached, so that the difference is all hooks, seams and wrappers together. Once sentinel
computes the norm itself (its cost is taken off, see the next part), once the loop clips and its norm is used;
norm -- the own norm against `torch._foreach_norm` over the same gradients and the same last combination;
GPT -- the loop of `tests.benchmarks.overhead` with 10 million parameters, where caches are cold: what the Run itself
accounts as its time (`hook_seconds`), and which part of it is the norm.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sentinel
from sentinel import wire
from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.outbox import Outbox
from sentinel.client.wrapping import Wrappers
from tests.benchmarks import overhead

COUNTS = (10, 76, 100, 1000)  # parameter tensors; 76 are a GPT's of 6 layers
ROUNDS, STEPS, WARM = 9, 200, 30  # blocks of each kind, steps of a block, and those of it that do not count
QUIET = {"snapshot": {"enabled": False}}  # a snapshot is work proportional to the state, with a budget of its own


class Still(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Nothing."""


class Cost(NamedTuple):
    """Seconds a step."""

    hooks: float  # attached less bare
    norm: float  # of the own norm, 0 where there is none


def main() -> None:
    """Print a line of numbers per part."""
    torch.set_num_threads(1)
    with overhead._home(), redirect_stderr(StringIO()):
        print(f"emit                       {emit() * 1e6:8.2f} us")
        for count in COUNTS:
            own, clipped = hooks(count, clip=False), hooks(count, clip=True)
            ours, bare = norms(gradients_of(count))
            print(
                f"{count:5} tensors: hook, own norm {own.hooks * 1e6:8.1f} us ({(own.hooks - own.norm) * 1e6:.1f} "
                f"without the norm); hook, user's clip {clipped.hooks * 1e6:8.1f} us; "
                f"norm {ours * 1e6:8.1f} us, bare {bare * 1e6:8.1f} us, ratio {ours / bare:.3f}"
            )
        for clip in (False, True):
            total, norm = in_gpt(clip=clip)
            print(
                f"GPT, {'the user clips' if clip else 'own norm':14}: accounted {total * 1e6:8.1f} us a step, "
                f"{norm * 1e6:.1f} of it the norm"
            )


def emit(steps: int = 20000) -> float:
    """Seconds of thread CPU for one record: made, encoded, put into an outbox that somebody empties."""
    outbox, taken = Outbox(8192), []
    attempts = [_filled() for _ in range(64)]
    for start in range(0, steps, 64):
        started = time.thread_time()
        for attempt in attempts:
            attempt.values()
            record = attempt.record(start, 0, {})
            wire.encode(record)
            outbox.push(record)
        taken.append((time.thread_time() - started) / len(attempts))
        for message in outbox.take(len(attempts)):
            outbox.acknowledge(message.seq)  # type: ignore[union-attr]
    return median(taken)


def _filled() -> Attempt:
    from sentinel.client.guard import Measure

    attempt = Attempt()
    attempt.step, attempt.backwards, attempt.objective.total, attempt.objective.count = 12, 1, 2.5, 1
    attempt.measures["optimizer"] = Measure(1.25, "own")
    attempt.lrs["optimizer"] = 1e-3
    attempt.reported.add(2.5, 4096.0, None, {})
    attempt.step_seconds = 0.1
    return attempt


def hooks(count: int, *, clip: bool) -> Cost:
    """Seconds a step of a loop that does next to nothing, attached less bare; and of the norm within."""
    bare, attached, norm = [], [], []
    for _ in range(ROUNDS):
        bare.append(_block(count, clip=clip, attach=False)[0])
        seconds, ours = _block(count, clip=clip, attach=True)
        attached.append(seconds)
        norm.append(ours)
    return Cost(median(attached) - median(bare), median(norm))


def _block(count: int, *, clip: bool, attach: bool) -> tuple[float, float]:
    model = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(count)])
    parameters = list(model)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer = Still(parameters)
    run = sentinel.attach(model, optimizer, settings=QUIET) if attach else None
    taken = []
    first, last = parameters[0], parameters[-1]
    for number in range(WARM + STEPS):
        started = time.thread_time()
        (first[0] + last[0]).backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if number >= WARM:
            taken.append(time.thread_time() - started)
    ours = 0.0
    if run is not None:
        watched = run._loop.watched[0]  # type: ignore[attr-defined]
        ours = 0.0 if clip else _least(watched.norm)
        run.detach()
    return median(taken), ours


def gradients_of(count: int) -> list[Tensor]:
    """Parameters with gradients, 10 million values in all, as unequal as a GPT's."""
    sizes = [10_000_000 // count if place % 2 else 400 for place in range(count)]
    made = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for one in made:
        one.grad = torch.randn_like(one)
    return list(made)


def norms(parameters: list[Tensor]) -> tuple[float, float]:
    """Seconds of our norm and of the bare one, over the same gradients."""
    optimizer = Still(parameters)
    watched = WatchedOptimizer(optimizer, "optimizer", Wrappers())

    def bare() -> Tensor:
        gradients = [one.grad for one in parameters if one.grad is not None]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double())

    assert float(bare()) == float(watched.norm())  # type: ignore[arg-type]
    ours, theirs = [], []
    for _ in range(30):
        for timed, into in ((bare, theirs), (watched.norm, ours), (watched.norm, ours), (bare, theirs)):
            started = time.thread_time()
            timed()
            into.append(time.thread_time() - started)
    return median(ours), median(theirs)


def in_gpt(*, clip: bool, steps: int = 25) -> tuple[float, float]:
    """What a Run accounts as its own time in a step of the GPT loop, and its norm's share; medians, seconds."""
    case = overhead._gpt()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-4)
    run: Any = sentinel.attach(case.model, optimizer, settings=QUIET)
    totals, parts = [], []
    for number in range(steps):
        before = run._loop.hook_seconds, getattr(run._loop, "norm_seconds", 0.0)
        case.loss(case.model).backward()
        if clip:
            nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number >= 3:
            totals.append(run._loop.hook_seconds - before[0])
            parts.append(getattr(run._loop, "norm_seconds", 0.0) - before[1])
    run.detach()
    return median(totals), median(parts)


def _least(timed: Callable[[], object], times: int = 50) -> float:
    taken = []
    for _ in range(times):
        started = time.thread_time()
        timed()
        taken.append(time.thread_time() - started)
    return median(taken)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main()
