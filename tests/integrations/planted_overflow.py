"""A small network and its batches; one batch makes the gradient of one parameter Inf, in any precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradilocks import optim

CULPRIT = "middle.weight"
WIDTH, ROWS, STEPS = 6, 4, 6
CLIP = 0.02
"""A norm that clips most steps."""
BAD_STEP = 2
"""The step, from 0, whose last batch is bad."""

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: optim.AdamW(params, lr=0.01),
}


class Network(nn.Module):
    """Three layers. The last column of a batch is 1 for a bad batch; the output is the loss of each row."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first, self.middle, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.is_bad = False
        self.middle.weight.register_hook(lambda grad: torch.full_like(grad, torch.inf) if self.is_bad else grad)

    def forward(self, rows: Tensor) -> Tensor:
        rows, marker = rows[:, :WIDTH], rows[:, WIDTH]
        self.is_bad = bool(marker.amax() > 0)
        hidden = torch.tanh(self.middle(torch.tanh(self.first(rows))))
        # Small enough that float16 gradients hold it times the first scale, 65,536.
        return 0.01 * (self.head(hidden).float().squeeze(-1) - rows.float().sum(-1)).square()


def batches(steps: int = STEPS, *, accumulate: int = 1, bad: int | None = BAD_STEP) -> list[Tensor]:
    """`steps * accumulate` batches; the last batch of step `bad` is the bad one."""
    rows = torch.randn(steps * accumulate, ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    marker = torch.zeros(steps * accumulate, ROWS, 1)
    if bad is not None:
        marker[(bad + 1) * accumulate - 1] = 1.0
    return list(torch.cat([rows, marker], dim=-1))


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [param.detach().clone() for param in model.parameters()]


def assert_same(ours: list[Tensor], expected: list[Tensor], *, tolerance: float = 0.0) -> None:
    """Fails unless the tensors are equal, bit for bit by default."""
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
