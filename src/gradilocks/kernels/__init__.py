"""The implementations behind `measure` and `update`, chosen by device in one table.

Every implementation is a module with the functions of `reference`, same names and signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from gradilocks.kernels import reference
from gradilocks.values import Statistics

__all__ = ["Kernels", "by_device", "for_device"]


class Kernels(Protocol):
    """What an implementation offers. All tensors of one call lie on one device."""

    def measure(
        self, tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False
    ) -> Statistics:
        """Reads every tensor and says what is in it."""

    def multiply_(self, tensors: Sequence[Tensor], multiplier: Tensor) -> None:
        """Multiplies every tensor in place."""

    def multiply_and_check_(
        self, tensors: Sequence[Tensor], multiplier: Tensor | None
    ) -> Statistics:
        """Multiplies every tensor in place and says what is in the result; norms where known."""

    def clamp_(self, tensors: Sequence[Tensor], bound: Tensor) -> None:
        """Bounds the magnitude of every element in place; NaN stays NaN."""


# Device type -> implementation. A device that is not listed is served by the reference.
_TABLE: dict[str, Kernels] = {
    "cpu": cast("Kernels", reference),
}


def for_device(device: torch.device) -> Kernels:
    """The implementation that serves `device`."""
    return _TABLE.get(device.type, cast("Kernels", reference))


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """The tensors' places in the sequence, device by device."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return places
