"""Small mixtures of experts whose choices a test can compute itself."""

import torch
from torch import Tensor, nn

from tests.client.training import CLASSES, FEATURES

EXPERTS, TOP_K = 4, 2


class Layer(nn.Module):
    """The form of Mixtral's and Qwen's layers: a gate that is a Linear, experts in a list."""

    def __init__(self, named: str = "gate") -> None:
        super().__init__()
        self.num_experts, self.top_k = EXPERTS, TOP_K
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(EXPERTS))
        self.add_module(named, nn.Linear(FEATURES, EXPERTS, bias=False))
        self._named = named

    def forward(self, inputs: Tensor) -> Tensor:
        logits = self.get_submodule(self._named)(inputs)
        weights, places = logits.softmax(-1).topk(TOP_K)
        outputs = torch.stack([expert(inputs) for expert in self.experts], dim=-2)
        picked = outputs.gather(-2, places[..., None].expand(*places.shape, FEATURES))
        return inputs + (picked * weights[..., None]).sum(-2)


class Mixture(nn.Module):
    """Two such layers and a head."""

    def __init__(self, named: str = "gate") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(named) for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)
