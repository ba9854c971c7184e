"""One small training for all frameworks: a network, its batches, and one gradient that is spoiled.

The last column of a batch says whether it is the bad one: then the gradient of `CULPRIT`, and of
nothing else, is Inf, whatever the precision. What a framework calls the network in (wrappers,
prefixes) makes no difference to that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gradilocks.optim

CULPRIT = "middle.weight"
WIDTH = 6
BATCH = 4
STEPS = 6
BAD = 2
"""The step whose (last) batch is bad, counted from 0."""

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: gradilocks.optim.AdamW(params, lr=0.01),
}


class Network(nn.Module):
    """Three layers; `forward` takes a batch with its marker and returns the loss of each row."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(WIDTH, 8)
            self.middle = nn.Linear(8, 8)
            self.head = nn.Linear(8, 1)
        self.bad = False
        self.middle.weight.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.inf) if self.bad else gradient

    def forward(self, rows: Tensor) -> Tensor:
        rows, marker = rows[:, :WIDTH], rows[:, WIDTH]
        self.bad = bool(marker.amax() > 0)
        hidden = torch.tanh(self.middle(torch.tanh(self.first(rows))))
        # Small enough for the gradients of float16 to hold it times torch's first scale.
        return 0.01 * (self.head(hidden).float().squeeze(-1) - rows.float().sum(-1)).square()


def rows(steps: int = STEPS, *, accumulate: int = 1, bad: int | None = BAD) -> Tensor:
    """The rows of all batches in order: `steps * accumulate` batches of BATCH rows."""
    made = torch.randn(
        steps * accumulate * BATCH, WIDTH, generator=torch.Generator().manual_seed(5)
    )
    marker = torch.zeros(len(made), 1)
    if bad is not None:
        last = ((bad + 1) * accumulate - 1) * BATCH
        marker[last : last + BATCH] = 1.0
    return torch.cat([made, marker], dim=1)


def batches(steps: int = STEPS, *, accumulate: int = 1, bad: int | None = BAD) -> list[Tensor]:
    """The batches of `rows`."""
    return list(rows(steps, accumulate=accumulate, bad=bad).split(BATCH))


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters, in the model's order."""
    return [param.detach().clone() for param in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of weights are the same bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
