"""`gradilocks demo` trains a small GPT in fp16: without a scale, with one that is too large, with a dynamic one.

Under `emulate("fp16")`, matrix products round their inputs and results to fp16 and compute in fp32, as tensor cores do;
real fp16 arithmetic is hundreds of times slower on most CPUs. One micro-batch represents a global batch of 4 million
tokens: its loss is divided by 4,096 before backward, and the gradients are multiplied by 4,096 in fp32 afterwards,
which equals the sum of 4,096 identical micro-batches. Gradients that fp16 rounds to zero in between stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradilocks.control import GradientControl
from gradilocks.emulate import emulate
from gradilocks.errors import GradilocksError
from gradilocks.record import Recorder

__all__ = ["TRAININGS", "Training", "train"]

ACCUMULATION = 4096
"""Micro-batches in a global batch."""
ROWS, LENGTH = 16, 64
"""Sequences per micro-batch and characters per sequence."""
STEPS = 200


@dataclass(frozen=True)
class Training:
    """One of the three training runs."""

    name: str
    label: str
    scale: object
    """The `scale=` of the GradientControl."""

    def path(self, folder: Path) -> Path:
        """Path of the run file."""
        return folder / f"{self.name}.jsonl"


TRAININGS = (
    Training("too-small", "too small: no scaling", None),
    Training("too-large", "too large: scale 2^32", 2.0**32),
    Training("just-right", "just right: dynamic scale from 2^16", "dynamic"),
)


def train(training: Training, folder: Path, *, steps: int = STEPS) -> Path:
    """Trains the GPT and returns the run file. An existing file is replaced.

    The text is Python's documentation, so the result depends on the version of Python.

    Args:
        training: one of `TRAININGS`.
        folder: for the run file.
        steps: number of optimizer steps.
    """
    codes, vocabulary = load_text()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(vocabulary)
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    config = {"accumulation": ACCUMULATION, "tokens of a step": ACCUMULATION * ROWS * LENGTH}
    recorder = Recorder(training.path(folder), config=config, overwrite=True, label=training.label)
    control = GradientControl(
        optimizer, model=model, scale=training.scale, clip=1.0, give_up_after=None, record=recorder
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The tensors are small, and sums must not depend on the number of cores.
    status = "KeyboardInterrupt"
    try:
        for _ in range(steps):
            indices = torch.randint(len(codes) - LENGTH, (ROWS, 1), generator=generator) + window
            with emulate("fp16"):
                logits = model(codes[indices])
            loss = F.cross_entropy(logits.flatten(0, 1), codes[indices + 1].flatten())
            _divide_gradient(loss, ACCUMULATION)
            control.backward(loss)
            for param in model.parameters():
                if param.grad is not None:
                    param.grad *= ACCUMULATION
            control.step()
            control.zero_grad()
        status = "finished"
    finally:
        torch.set_num_threads(threads)
        recorder.close(status)
    return recorder.path


def _divide_gradient(loss: Tensor, divisor: int) -> None:
    """Divides the gradient of the loss; the loss itself, which the run file records, is not divided."""
    register: Any = loss.register_hook
    register(lambda grad: grad / divisor)


@cache
def load_text() -> tuple[Tensor, int]:
    """Returns the texts of Python's `help("topics")` as character codes, and the size of the vocabulary.

    Raises:
        GradilocksError: this Python has no pydoc_data.topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise GradilocksError(
            "the demo trains on pydoc_data.topics, which this Python does not have. Install the full standard library."
        ) from error
    text = "".join(topics[name] for name in sorted(topics))
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


# --- the model --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.queries_keys_values(self.attention_norm(x)).view(rows, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = x + self.perceptron(x)
        return result


class GPT(nn.Module):
    """A decoder-only transformer over characters with learned positions."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        width, layers, heads = 64, 2, 4
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        """Maps codes of shape [rows, length] to logits of shape [rows, length, vocabulary]."""
        x = self.characters(codes) + self.positions(torch.arange(codes.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
