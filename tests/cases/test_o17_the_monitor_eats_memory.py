"""O17: a monitor whose consumer is stuck eats the trainer's memory (wandb#2644)."""

import psutil
import torch
from torch import nn

import sentinel
from sentinel.client.outbox import Outbox
from sentinel.records import Gap, StepRecord
from sentinel.testing import FakeDaemon

REPORTS = 20_000
BOUND = 2000  # records that the outbox may hold
MOST_GROWTH_BYTES = 20e6


def test_twenty_thousand_reports_to_a_stopped_consumer_cost_little_and_every_drop_is_counted(
    daemon: FakeDaemon,
) -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    inputs, process = torch.ones(1, 1), psutil.Process()
    run = sentinel.attach(layer, optimizer, settings={"outbox": {"records": BOUND}})
    outbox: Outbox = run._outbox  # type: ignore[attr-defined]

    def step() -> None:
        optimizer.zero_grad()
        loss = layer(inputs).square().sum()
        loss.backward()
        optimizer.step()
        run.report(loss=loss, tokens=128, accuracy=0.5)

    for _ in range(100):
        step()
    daemon.wait_for(lambda: len(daemon.of(StepRecord)) > 50)
    daemon.pause_reading()
    before, produced = process.memory_info().rss, outbox.last_seq
    for _ in range(REPORTS):
        step()
    growth = process.memory_info().rss - before
    assert outbox.last_seq >= produced + REPORTS, "all of them were produced"
    assert len(outbox) <= BOUND
    dropped = sum(outbox.dropped.values())
    assert dropped > REPORTS // 2, "the consumer did not take them"
    assert growth < MOST_GROWTH_BYTES, f"{growth / 1e6:.1f} MB"
    daemon.resume_reading()
    run.detach()
    told = sum(gap.count for gap in daemon.of(Gap))
    stored = {message.seq for message in daemon.messages if hasattr(message, "seq")}
    assert told == sum(outbox.dropped.values())
    assert len(stored) + told == outbox.last_seq
    assert not daemon.errors
