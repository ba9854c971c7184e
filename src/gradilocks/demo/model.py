"""A small GPT: characters enter, the logits of each next character leave.

Plain ``nn.Linear`` and ``scaled_dot_product_attention``: it knows nothing of number formats. Under
``gradilocks.emulate`` the same model, with the same parameters, trains in another one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and LayerNorm before each part.

    Args:
        vocabulary: how many characters there are.
        length: the longest input, in characters.
        width: the size of the residual stream.
        layers: how many blocks.
        heads: how many attention heads; must divide ``width``.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Maps ``[rows, length]`` codes to ``[rows, length, vocabulary]`` logits."""
        places = torch.arange(codes.shape[1], device=codes.device)
        stream = self.characters(codes) + self.positions(places)
        for block in self.blocks:
            stream = block(stream)
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        perceived: torch.Tensor = self.perceptron(self.perceptron_norm(stream))
        return stream + perceived


class Attention(nn.Module):
    """Causal self-attention: each character looks at itself and at those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        rows, length, width = stream.shape
        parts = self.queries_keys_values(stream).view(rows, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        outputs: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(rows, length, width))
        return outputs
