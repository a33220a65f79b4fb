"""O52: accumulation over micro-batches gives one loss and one norm per update (nanoGPT#206, transformers#34191)."""

from typing import Any

import pytest
import torch
from torch import nn

from sentinel.testing import FakeDaemon
from tests.client.training import CLASSES, FEATURES, loader
from tests.client.watching import norm_of, watched

STEPS, PIECES = 6, 4


def train(daemon: FakeDaemon, pieces: int, tell: bool = False) -> tuple[Any, list[float]]:
    """`tell`: the loop does not divide its losses but the gradients, and reports each loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    micro = []
    with watched(daemon, model, optimizer) as found:
        for inputs, targets in list(loader(32))[:STEPS]:
            optimizer.zero_grad()
            for part, wanted in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                loss = nn.functional.cross_entropy(model(part), wanted)
                micro.append(loss.item())
                (loss if tell else loss / pieces).backward()
                if tell:
                    found.run.report(loss=loss.detach())
            if tell:
                torch._foreach_div_([parameter.grad for parameter in model.parameters()], pieces)
            optimizer.step()
    return found, micro


def test_the_series_of_one_and_of_four_pieces_of_a_batch_are_equal(daemon: FakeDaemon) -> None:
    whole, _ = train(daemon, 1)
    split, micro = train(daemon, PIECES)
    assert len(micro) == PIECES * STEPS
    assert split.all("step") == whole.all("step") == list(range(1, STEPS + 1)), "one record per update"
    assert split.all("loss") == pytest.approx(whole.all("loss"), rel=1e-5)
    assert split.all("grad_norm") == pytest.approx(whole.all("grad_norm"), rel=1e-5)
    means = [sum(micro[at : at + PIECES]) / PIECES for at in range(0, len(micro), PIECES)]
    assert split.all("loss") == pytest.approx(means, rel=1e-5)


def test_losses_that_are_not_divided_are_told_as_their_mean_where_they_are_reported(daemon: FakeDaemon) -> None:
    whole, _ = train(daemon, 1)
    told, _ = train(daemon, PIECES, tell=True)
    assert told.all("loss") == pytest.approx(whole.all("loss"), rel=1e-5)
    assert told.all("grad_norm") == pytest.approx(whole.all("grad_norm"), rel=1e-5)


def test_a_micro_batch_whose_gradient_is_added_later_is_in_the_norm(daemon: FakeDaemon) -> None:
    """Clipped once per micro-batch, as some loops do by mistake: the last look before the update counts."""
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    norms = []
    with watched(daemon, layer, optimizer) as found:
        for _ in range(3):
            optimizer.zero_grad()
            for factor in (1.0, 10.0):
                (factor * layer(torch.ones(1, 4)).sum()).backward()
                norms.append(norm_of(layer.parameters()))
                nn.utils.clip_grad_norm_(layer.parameters(), 1e6)
            optimizer.step()
    assert found.all("grad_norm") == pytest.approx(norms[1::2], rel=1e-6)
