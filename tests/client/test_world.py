"""A process group that comes after attach, without a launcher's variables, turns acting off."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sentinel
from sentinel.records import Reflex, Trouble
from sentinel.testing import FakeDaemon
from tests.client.training import make


def test_a_world_that_grows_after_attach_is_only_observed(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=5))
    try:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)  # the peer does not matter here
        for value in (0.0, float("nan")):
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(setup.model(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)).backward()
            if value != value:
                setup.model[0].weight.grad.fill_(value)
            setup.optimizer.step()
    finally:
        dist.destroy_process_group()
    run.detach()
    assert [trouble.what for trouble in daemon.of(Trouble)] == ["ranks"]
    assert not daemon.of(Reflex)
    assert "only observed" in capsys.readouterr().err
