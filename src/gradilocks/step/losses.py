"""The losses since the last step: whether one of them was NaN or Inf, before any scaling.

No gradient of such a loss says anything about the scale. The latest loss is kept as it came and
looked at only when somebody asks, or when the next one comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradilocks.values import moved

__all__ = ["Losses"]


class Losses:
    """What is known of the losses whose gradients are waiting for a step."""

    def __init__(self) -> None:
        self._latest: Tensor | None = None
        self._broken: Tensor | None = None

    def note(self, loss: Tensor, home: torch.device) -> None:
        """Another loss is about to be scaled."""
        self._fold(home)
        self._latest = loss.detach()

    def forget(self) -> None:
        """The gradients of the losses so far are gone."""
        self._latest = self._broken = None

    def as_one(self, device: torch.device) -> Tensor | None:
        """The loss if there was one, else a number that is not finite if one of them was not."""
        loss = self._latest
        if loss is None and self._broken is None:
            return None
        if (
            loss is not None
            and self._broken is None
            and type(loss) is Tensor
            and loss.numel() == 1
            and loss.device == device
            and loss.is_floating_point()
        ):
            return loss
        return torch.where(self.broken(device) > 0, float("inf"), 0.0)

    def broken(self, home: torch.device) -> Tensor:
        """float32, 0-d, on `home`: 1 if one of them was NaN or Inf, else 0."""
        self._fold(home)
        if self._broken is None:
            return torch.zeros((), dtype=torch.float32, device=home)
        return moved(self._broken, home)

    def _fold(self, home: torch.device) -> None:
        if self._latest is None:
            return
        broken = torch.logical_not(torch.isfinite(self._latest).all()).to(torch.float32)
        broken, before = moved(broken, home), self._broken
        self._broken = broken if before is None else torch.maximum(moved(before, home), broken)
        self._latest = None
