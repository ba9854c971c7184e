"""A small GPT and what it learns: Python's own documentation, as batches of characters.

The model is plain ``nn.Linear`` and ``scaled_dot_product_attention`` and knows nothing of number
formats; under ``gradilocks.emulate`` the same model, with the same parameters, trains in another
one. The text is what ``help("topics")`` prints, shipped with every full Python as
``pydoc_data.topics``, so nothing is downloaded. It differs a little between Python versions, and
the vocabulary with it; within one version the batches depend on the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from gradilocks.errors import GradilocksError


@dataclass(frozen=True)
class Text:
    """A text as numbers: ``codes[i]`` is the place of character ``i`` in ``vocabulary``."""

    vocabulary: str
    codes: torch.Tensor


def python_documentation() -> Text:
    """Reads the corpus: every help topic, in alphabetical order, joined into one text.

    Raises:
        GradilocksError: this Python was installed without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise GradilocksError(
            "The demo trains on Python's own documentation, the module pydoc_data.topics, and this "
            "Python came without it. Install the full standard library of this Python."
        ) from error
    return encode("".join(topics[name] for name in sorted(topics)))


def encode(text: str) -> Text:
    """Numbers the characters of a text by their place in its sorted vocabulary."""
    vocabulary = "".join(sorted(set(text)))
    place = {character: index for index, character in enumerate(vocabulary)}
    return Text(vocabulary, torch.tensor([place[character] for character in text]))


class Batches:
    """Endless random windows of a text, each with the same window one character later.

    Args:
        text: what to draw from.
        rows: how many windows a batch has.
        length: how many characters a window has.
        seed: batches are a function of the text, the shape and this number alone.
    """

    def __init__(self, text: Text, *, rows: int, length: int, seed: int) -> None:
        if len(text.codes) <= length:
            raise ValueError(
                f"length must be less than the {len(text.codes)} characters of the text, "
                f"got {length}."
            )
        self._codes = text.codes
        self._rows = rows
        self._window = torch.arange(length)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next batch: inputs and targets, both ``[rows, length]``."""
        last_start = len(self._codes) - len(self._window)
        starts = torch.randint(last_start, (self._rows, 1), generator=self._generator)
        places = starts + self._window
        return self._codes[places], self._codes[places + 1]


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
        self, *, vocabulary: int, length: int, width: int = 64, layers: int = 2, heads: int = 4
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
