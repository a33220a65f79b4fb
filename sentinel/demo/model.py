"""A character GPT in one file: pre-norm blocks, causal attention, tied embeddings."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from sentinel.demo.plan import Shape


class CharacterGPT(nn.Module):
    """Logits of the next character."""

    def __init__(self, vocabulary: int, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.head.weight = self.characters.weight
        self.apply(_initialise)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, context) characters -> (batch, context, vocabulary) logits."""
        places = torch.arange(text.shape[1], device=text.device)
        stream = self.characters(text) + self.positions(places)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.forward_norm = nn.LayerNorm(shape.width)
        self.forward_in = nn.Linear(shape.width, 4 * shape.width)
        self.forward_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self._attend(self.attention_norm(stream))
        out: Tensor = stream + self.forward_out(functional.gelu(self.forward_in(self.forward_norm(stream))))
        return out

    def _attend(self, stream: Tensor) -> Tensor:
        batch, length, width = stream.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.queries_keys_values(stream).chunk(3, dim=-1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        return out


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
