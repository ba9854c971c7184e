"""A Measurement in, a ClipLimit out: how far the gradients are pulled down, and the policies.

A policy is a frozen configuration that says what it needs measured and turns a Measurement of the
scaled gradients into the limit that holds for the unscaled ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradilocks.values import ClipLimit, Measurement

__all__ = [
    "ClipByNorm",
    "ClipByValue",
    "ClipPolicy",
    "NoClip",
    "check_max_norm",
    "clip_coefficient",
    "resolve_clip",
]

EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch does."""


class ClipPolicy(Protocol):
    """What to measure, and what limit follows from it."""

    @property
    def order(self) -> float:
        """The p of the norm to be measured."""

    @property
    def needs_largest(self) -> bool:
        """Whether the largest magnitude must be measured too."""

    def limit(self, measurement: Measurement, scale: Tensor) -> ClipLimit:
        """The limit for gradients that were measured under `scale`."""


@dataclass(frozen=True)
class NoClip:
    """Leaves the gradients as long as they are; their norm is still measured.

    Example:
        >>> NoClip().order
        2.0
    """

    @property
    def order(self) -> float:
        return 2.0

    @property
    def needs_largest(self) -> bool:
        return False

    def limit(self, measurement: Measurement, scale: Tensor) -> ClipLimit:
        norm = measurement.norm
        return ClipLimit(
            coefficient=torch.ones_like(norm),
            limit=torch.full_like(norm, math.inf),
            clipped=torch.zeros_like(measurement.nonfinite),
        )


@dataclass(frozen=True)
class ClipByNorm:
    """Shortens all gradients together so that their norm is at most `max_norm`.

        coefficient = min(1, max_norm / (norm + 1e-6))

    The direction stays. A non-finite gradient gets coefficient 1: it is for the decision to skip
    the step, and scaling would only spread the NaN.

    Args:
        max_norm: the bound, not negative.
        order: the p of the norm, at least 1; `math.inf` bounds the largest element.

    Example:
        >>> ClipByNorm(1.0)
        ClipByNorm(max_norm=1.0, order=2.0)

    Reference: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """

    max_norm: float
    order: float = 2.0

    def __post_init__(self) -> None:
        check_max_norm(self.max_norm)
        if isinstance(self.order, bool) or not isinstance(self.order, (int, float)):
            raise TypeError(f"order must be a number, got {type(self.order).__name__}.")
        if not self.order >= 1.0:
            raise ValueError(f"order must be at least 1 or math.inf, got {self.order}.")

    @property
    def needs_largest(self) -> bool:
        return False

    def limit(self, measurement: Measurement, scale: Tensor) -> ClipLimit:
        norm = measurement.norm / scale
        coefficient = clip_coefficient(norm, self.max_norm, measurement.nonfinite)
        return ClipLimit(
            coefficient=coefficient,
            limit=torch.full_like(norm, self.max_norm),
            clipped=(coefficient < 1.0).to(torch.float32),
        )


@dataclass(frozen=True)
class ClipByValue:
    """Bounds every element on its own: `g = min(max(g, -value), value)`. The direction may turn.

    Args:
        value: the bound, not negative.

    Example:
        >>> ClipByValue(0.5).needs_largest
        True
    """

    value: float

    def __post_init__(self) -> None:
        check_max_norm(self.value, name="value")

    @property
    def order(self) -> float:
        return 2.0

    @property
    def needs_largest(self) -> bool:
        return True

    def limit(self, measurement: Measurement, scale: Tensor) -> ClipLimit:
        norm, largest = measurement.norm, measurement.tensors.largest
        assert largest is not None
        peak = largest.amax() if largest.numel() else norm.new_zeros(())
        over = (peak / scale > self.value) & (measurement.nonfinite == 0)
        return ClipLimit(
            coefficient=torch.ones_like(norm),
            limit=torch.full_like(norm, math.inf),
            clipped=over.to(torch.float32),
            value=float(self.value),
        )


def clip_coefficient(norm: Tensor, max_norm: float, nonfinite: Tensor) -> Tensor:
    """What the unscaled gradients are multiplied by, in [0, 1]; 1 if they are not finite."""
    finite = torch.clamp(norm, max=torch.finfo(norm.dtype).max)
    coefficient = torch.clamp(max_norm / (finite + EPSILON), max=1.0)
    return torch.where(nonfinite > 0, torch.ones_like(norm), coefficient)


def check_max_norm(value: object, *, name: str = "max_norm", none: str = "math.inf") -> float:
    """`value` as a float; a clear error if it is no number, negative or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not value >= 0.0:
        raise ValueError(
            f"{name} must not be negative or NaN, got {value}. Use {none} to measure only."
        )
    return float(value)


def resolve_clip(given: object) -> ClipPolicy:
    """The policy meant by GradientControl's `clip=`: a policy, a number (max_norm) or None."""
    if given is None:
        return NoClip()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return ClipByNorm(check_max_norm(given, name="clip", none="None"))
    if isinstance(given, type) or not hasattr(given, "limit"):
        came = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        raise TypeError(
            "clip must be None, a number (the largest norm) or a clip policy such as "
            f"ClipByNorm(1.0), got {came}."
        )
    return given  # type: ignore[return-value]
