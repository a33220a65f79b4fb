"""O50: norms raise on sparse gradients, or are wrong where an index stands there twice (pytorch#4829)."""

import math

import pytest
import torch
from torch import nn

from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.watching import norm_of, watched

TWICE = torch.tensor([1, 1, 2])


def test_the_dangers_are_real() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    table(TWICE).sum().backward()
    gradient = table.weight.grad
    assert gradient.is_sparse
    assert not gradient.is_coalesced()
    assert float(gradient._values().norm()) == pytest.approx(math.sqrt(12)), "wrong: the values as they stand there"
    with pytest.raises(NotImplementedError):
        nn.utils.get_total_norm([gradient])


def test_the_norm_is_right_and_nothing_raises(daemon: FakeDaemon) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with watched(daemon, table, optimizer) as found:
        table(TWICE).sum().backward()
        assert not table.weight.grad.is_coalesced()
        optimizer.step()
        assert not table.weight.grad.is_coalesced(), "looking at it did not change it"
    (record,) = found.records
    assert record.grad_norm == pytest.approx(math.sqrt(4 * 2**2 + 4 * 1**2))


def test_sparse_and_dense_gradients_make_one_norm_over_both_optimizers(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(10, 4, sparse=True), "head": nn.Linear(4, 2)})
    sparse = torch.optim.SparseAdam(model["table"].parameters(), lr=0.1)
    dense = torch.optim.AdamW(model["head"].parameters(), lr=0.1)
    norms = []
    with watched(daemon, model, [sparse, dense]) as found:
        for _ in range(4):
            model.zero_grad()
            model["head"](model["table"](TWICE)).square().sum().backward()
            assert model["table"].weight.grad.is_sparse
            norms.append(norm_of(model.parameters()))
            sparse.step()
            dense.step()
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_sparse_gradient_is_skipped_like_a_dense_one(daemon: FakeDaemon, bad: float) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with watched(daemon, table, optimizer) as found:
        daemon.wait_for(lambda: found.run._loop.reflexes.acts)
        before = table.weight.detach().clone()
        (table(TWICE).sum() * bad).backward()
        optimizer.step()
    assert found.all("result") == [UpdateResult.REFLEX]
    assert torch.equal(before, table.weight)
