"""O51: a norm that counts tied weights twice (Megatron-LM#7227, DeepSpeed#1252, torchtitan#3225)."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from sentinel.testing import FakeDaemon
from tests.client.watching import norm_of, watched


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def parameters(model: nn.Module, how: str) -> list[Tensor]:
    """`how`: as the model lists them, or collected module by module, which names the tied one twice."""
    if how == "of the model":
        return list(model.parameters())
    return [*model.table.parameters(), *model.head.parameters()]


@pytest.mark.parametrize("how", ["of the model", "of each module"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_tied_weight_counts_once(daemon: FakeDaemon, how: str, clip: bool) -> None:
    torch.manual_seed(0)
    model = Tied()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the parameter that is there twice
        optimizer = torch.optim.SGD(parameters(model, how), lr=0.01)
    norms = []
    with watched(daemon, model, optimizer) as found:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(10)).square().mean().backward()
            norms.append(norm_of(model.parameters()))
            if clip:
                nn.utils.clip_grad_norm_(parameters(model, how), 1e9)
            optimizer.step()
            by_name = math.sqrt(
                sum(float(one.grad.norm()) ** 2 for _, one in model.named_parameters(remove_duplicate=False))
            )
            assert by_name == pytest.approx(math.sqrt(2) * norms[-1]), "the sum by name is wrong"
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-5)
