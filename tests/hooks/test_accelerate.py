"""A raw loop on Accelerate needs no adapter: attach sees through its wrapped optimizer, schedule and clipping."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader

import sentinel
from sentinel.records import RunEnd, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.training import equal, weights
from tests.hooks.lesson import Lesson, batches, make, raw_loop
from tests.hooks.test_conformance import must_equal, records


@pytest.mark.parametrize("accumulation", [1, 2])
def test_its_series_equal_the_raw_loops(daemon: FakeDaemon, tmp_path: Path, accumulation: int) -> None:
    lesson = Lesson(accumulation=accumulation, clip=0.5, nan_at=frozenset({9}))
    parts = make(lesson)
    raw_loop(lesson, parts)
    wanted = records(daemon)
    daemon.messages.clear()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    mine = make(lesson)
    model, optimizer, scheduler, loader = accelerator.prepare(
        *mine, DataLoader(lesson.data(), batch_size=lesson.rows)
    )
    run = sentinel.attach(model, optimizer, scheduler=scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), lesson.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    run.detach()
    daemon.wait_for(lambda: daemon.of(RunEnd))
    must_equal(daemon.of(StepRecord), wanted)
    assert [record.result for record in wanted].count(UpdateResult.REFLEX) == 1
    assert equal(weights(mine.model), weights(parts.model))


def test_an_overflow_that_its_grad_scaler_skips_is_counted_as_one(daemon: FakeDaemon) -> None:
    lesson = Lesson(nan_at=frozenset({4}))
    Accelerator(cpu=True)  # AcceleratedOptimizer asks for the state that it makes
    model, inner, _ = make(lesson)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    run = sentinel.attach(model, optimizer, scaler=scaler)
    for batch in batches(lesson):
        scaler.scale(model(**batch)["loss"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.detach()
    daemon.wait_for(lambda: daemon.of(RunEnd))
    seen = daemon.of(StepRecord)
    assert model.nan_fired == 1
    assert [record.step for record in seen] == list(range(1, lesson.updates + 1))
    assert [record.step for record in seen if record.result is UpdateResult.OVERFLOW] == [5]
    assert [record.loss_scale for record in seen] == [1024.0] * 5 + [512.0] * 7
    assert all(record.loss < 20.0 for record in seen), "the loss is unscaled"
    assert all(record.grad_norm < 20.0 for record in seen if record.result is UpdateResult.APPLIED)
