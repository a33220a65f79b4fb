"""A raw loop on Accelerate needs no adapter: attach sees through its wrapped optimizer, schedule and clipping."""

from pathlib import Path

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader

import sentinel
from sentinel.records import RunEnd, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.training import equal, weights
from tests.hooks.lesson import Lesson, make, raw_loop
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
