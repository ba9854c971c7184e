"""What a clip policy is, and the three that remember nothing.

A policy is a frozen configuration that says what it needs measured and turns a Measurement of the
scaled gradients into the limit that holds for the unscaled ones. One that learns from the steps
before is a MovingClip: what moves is a dict of tensors, changed in place on its device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradilocks.values import ClipLimit, Measurement

__all__ = [
    "ByTwoNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipPolicy",
    "Memory",
    "MovingClip",
    "NoClip",
    "bounded",
    "check_count",
    "check_fraction",
    "check_max_norm",
    "check_positive",
    "clip_coefficient",
    "pulled_down",
    "resolve_clip",
]

Memory = Mapping[str, Tensor]
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


class MovingClip(Protocol):
    """A ClipPolicy that learns from the steps before."""

    @property
    def order(self) -> float:
        """The p of the norm to be measured."""

    @property
    def needs_largest(self) -> bool:
        """Whether the largest magnitude must be measured too."""

    def start(self, device: torch.device, count: int) -> dict[str, Tensor]:
        """What it remembers before the first step, of a model with `count` parameters."""

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory) -> ClipLimit:
        """The limit for gradients that were measured under `scale`; changes nothing."""

    def advance(
        self,
        state: Memory,
        measurement: Measurement,
        scale: Tensor,
        limit: ClipLimit,
        skip: Tensor,
    ) -> None:
        """Moves `state` on in place. A skipped step (1) must leave it as it was."""


class ByTwoNorm:
    """Of a policy that measures the 2-norm of gradients and nothing else."""

    @property
    def order(self) -> float:
        return 2.0

    @property
    def needs_largest(self) -> bool:
        return False


@dataclass(frozen=True)
class NoClip(ByTwoNorm):
    """Leaves the gradients as long as they are; their norm is still measured.

        coefficient = 1

    Example:
        >>> NoClip().order
        2.0

    Reference: none is needed. Use it to watch the norms of a run before you choose a limit.
    """

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

    Reference: Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
    2013. Use it unless you know why not: 1.0 is what most language models are trained with.
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
    """Bounds every element on its own. The direction may turn.

        g = min(max(g, -value), value)

    Args:
        value: the bound, not negative.

    Example:
        >>> ClipByValue(0.5).needs_largest
        True

    Reference: Mikolov, "Statistical Language Models Based on Neural Networks", 2012. Use it where
    single elements must not pass a bound, as in small recurrent networks; else prefer ClipByNorm.
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


def pulled_down(norm: Tensor, limit: Tensor, nonfinite: Tensor) -> Tensor:
    """As `clip_coefficient`, for a limit that moves: exactly 1 for a norm that does not pass it."""
    over = (norm > limit) & (nonfinite == 0)
    finite = torch.clamp(norm, max=torch.finfo(norm.dtype).max)
    return torch.where(over, limit / finite, torch.ones_like(norm))


def bounded(norm: Tensor, limit: Tensor, nonfinite: Tensor) -> ClipLimit:
    """The ClipLimit that bounds the norm of all gradients together by a limit that moves."""
    coefficient = pulled_down(norm, limit, nonfinite)
    return ClipLimit(
        coefficient=coefficient, limit=limit, clipped=(coefficient < 1.0).to(torch.float32)
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


def check_count(name: str, value: object, *, lowest: int) -> None:
    """Raises unless `value` is a whole number of at least `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}.")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}.")


def check_fraction(name: str, value: object) -> None:
    """Raises unless `value` is a number between 0 and 1, neither of them."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def check_positive(name: str, value: object) -> None:
    """Raises unless `value` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}.")


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
