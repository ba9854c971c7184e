"""The code blocks of docs/frameworks.md, and the batches that the tests train with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
BAD = 5
"""Index of the batch whose loss is Inf, where one is planted."""


def recipe(framework: str) -> dict[str, Any]:
    """Runs the blocks of a section that this environment runs; returns their names."""
    text = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {framework}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    blocks = re.findall(r"`make test-frameworks` runs it\.\*\n\n```python\n(.*?)^```", section, flags=re.M | re.S)
    assert blocks, f"no block of {framework} is run here"
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    return namespace


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(10, 8, 8, generator=torch.Generator().manual_seed(1))
    return [(inputs, 10 * inputs.sum(1, keepdim=True)) for inputs in x]


class PlantedLoss(nn.Module):
    """Mean squared error, multiplied by Inf for one batch."""

    def __init__(self, bad: int | None) -> None:
        super().__init__()
        self.bad, self.index = bad, -1

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.index += 1
        loss = nn.functional.mse_loss(outputs, targets)
        return loss * float("inf") if self.index == self.bad else loss


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_equal(ours: list[Tensor], theirs: list[Tensor], *, is_exact: bool) -> None:
    tolerance = 0.0 if is_exact else 1e-6
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
