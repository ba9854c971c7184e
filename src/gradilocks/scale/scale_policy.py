"""What a scale policy is, those that never move, and the loss times the scale.

A policy is a frozen configuration. What moves is a ScaleState, advanced in place on its device, so
that neither the host nor a captured graph has to know what the scale is.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradilocks.policy import Adapted, Policy, number
from gradilocks.values import ScaleState, moved

__all__ = [
    "HIGHEST",
    "LARGEST",
    "SMALLEST",
    "AdaptedScale",
    "NoScale",
    "ScalePolicy",
    "ScaleRules",
    "StaticScale",
    "bounds_in_float32",
    "check_moving",
    "check_scale",
    "in_float32",
    "new_state",
    "scale_gradient",
    "scale_loss",
]

SMALLEST = 2.0**-126
"""The smallest scale whose reciprocal, and whose own float32 value, are both normal numbers."""
LARGEST = float(torch.finfo(torch.float32).max)
_LONGEST = torch.iinfo(torch.int32).max
HIGHEST = 2.0**127
"""The largest power of two in float32: a scale that starts as one stays one."""


@dataclass(frozen=True)
class ScaleRules:
    """A scale policy in plain numbers, for a device that follows it without asking Python."""

    moves: bool
    """Whether the scale moves at all. If it does not, the numbers below do not matter."""
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = 0
    """How many finite steps in a row it takes to grow; below 1 for never."""
    min_scale: float = SMALLEST
    max_scale: float = LARGEST
    hysteresis: int = 1
    """How many non-finite steps it takes to back off."""

    def numbers(self) -> tuple[float, ...]:
        """Growth, backoff, interval, lowest, highest and hysteresis, as kernels read them."""
        return self._numbers

    @functools.cached_property
    def _numbers(self) -> tuple[float, ...]:
        # The tracker is an int32: a longer interval is one that no run reaches.
        never = self.growth_interval < 1
        interval = math.inf if never else min(self.growth_interval, _LONGEST)
        return (
            float(self.growth_factor), float(self.backoff_factor), float(interval),
            float(self.min_scale), float(self.max_scale), float(self.hysteresis),
        )  # fmt: skip


class ScalePolicy(Policy):
    """How the scale starts and how it moves on after each step. The base of all scale policies.

    A subclass defines `start` and, if the scale moves, `advance`; and overrides what differs from
    the defaults below. Whoever advances a policy passes `largest` and `loss_nonfinite` only if it
    `needs_largest`, so that any other may define `advance(self, state, skip)`.
    """

    needs_largest: bool = False
    """Whether it asks for the largest magnitude, and whether the loss was finite."""
    delay: int = 0
    """How far below 0 the growth tracker of its state may start."""
    kept_scales: tuple[str, ...] = ()
    """The names in `state.more` of its state that are scales: they lie within its bounds."""

    def rules(self) -> ScaleRules | None:
        """Its rule in numbers, if a device can follow it by itself."""
        return None

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest scale that this policy can reach."""
        return SMALLEST, LARGEST

    def start(self, device: torch.device) -> ScaleState:
        """The state before the first step."""
        raise NotImplementedError(f"{type(self).__name__} has no start(device).")

    def advance(
        self,
        state: ScaleState,
        skip: Tensor,
        *,
        largest: Tensor | None = None,
        loss_nonfinite: Tensor | None = None,
    ) -> None:
        """Moves `state` on in place, or leaves it as it is, as here.

        Args:
            state: of this policy.
            skip: 0-d, exactly 1 if a gradient was not finite, else exactly 0.
            largest: 0-d, the largest magnitude of the scaled gradients; None if it is not known.
            loss_nonfinite: 0-d, 1 if the loss itself was NaN or Inf; None if it is not known.
        """


class AdaptedScale(Adapted, ScalePolicy):
    """A user's policy that is no ScalePolicy, with the defaults for what it does not define."""

    _taken = ("needs_largest", "delay", "kept_scales", "bounds", "start", "advance")


@dataclass(frozen=True)
class NoScale(ScalePolicy):
    """Leaves the loss as it is; gradients are still measured, guarded and clipped.

        scale = 1

    Example:
        >>> NoScale().start(torch.device("cpu")).scale.item()
        1.0

    Reference: none is needed. Use it for float32 and for bfloat16, whose range is that of float32.
    """

    def start(self, device: torch.device) -> ScaleState:
        return new_state(device, scale=1.0)

    def rules(self) -> ScaleRules | None:
        return ScaleRules(moves=False) if type(self) is NoScale else None

    def bounds(self) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True)
class StaticScale(ScalePolicy):
    """Multiplies the loss by the same number at every step.

        scale = scale

    Args:
        scale: the factor; a power of two costs no precision.

    Example:
        >>> StaticScale(1024.0).start(torch.device("cpu")).scale.item()
        1024.0

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2. Use it where
    a scale is known to hold for the whole run; an overflow only skips the step.
    """

    scale: float

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)

    def start(self, device: torch.device) -> ScaleState:
        return new_state(device, scale=self.scale)

    def rules(self) -> ScaleRules | None:
        return ScaleRules(moves=False) if type(self) is StaticScale else None

    def bounds(self) -> tuple[float, float]:
        return self.scale, self.scale


def scale_loss(loss: Tensor, scale: Tensor) -> Tensor:
    """The loss times the scale; a half-precision loss is widened first, so it cannot overflow."""
    if loss.dtype is torch.float16:
        loss = loss.float()
    return loss * (scale if scale.device == loss.device else moved(scale, loss.device))


class _GradientTimes(torch.autograd.Function):
    """The loss as it is; what flows back through it is multiplied by a scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return loss.clone()  # No view: a zero-bubble pipeline detaches its losses in place.

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradients[0] * scale.to(gradients[0].dtype), None


def scale_gradient(loss: Tensor, scale: Tensor) -> Tensor:
    """The loss as it is, whose gradients carry the scale as those of `scale_loss` do."""
    if loss.dtype is torch.float16:
        loss = loss.float()
    apply: Any = _GradientTimes.apply
    scaled: Tensor = apply(loss, moved(scale, loss.device).clone())
    return scaled


def new_state(
    device: torch.device, *, scale: float, tracker: int = 0, hysteresis: int = 0
) -> ScaleState:
    """A ScaleState of these numbers on `device`."""
    return ScaleState(
        scale=torch.full((), scale, dtype=torch.float32, device=device),
        growth_tracker=torch.full((), tracker, dtype=torch.int32, device=device),
        hysteresis=torch.full((), hysteresis, dtype=torch.int32, device=device),
    )


def bounds_in_float32(lowest: float, highest: float) -> tuple[float, float]:
    """The bounds that a scale keeps, which is a float32: rounding may take it past the given ones.

    Args:
        lowest, highest: as the user wrote them, such as 1e-4, which no float32 is.
    """
    return min(lowest, in_float32(lowest)), max(highest, in_float32(highest))


def in_float32(value: float) -> float:
    """The float32 that is nearest to `value`: what a scale is that was set to it."""
    return ctypes.c_float(value).value


def check_scale(name: str, value: float) -> None:
    """Raises unless `value` can be a scale."""
    if not SMALLEST <= number(name, value) <= LARGEST:
        raise ValueError(
            f"{name} must be a positive float32 whose reciprocal is finite, between {SMALLEST:.3g} "
            f"and {LARGEST:.3g}, got {number(name, value)}."
        )


def check_moving(policy: Any) -> None:
    """Raises unless the bounds and factors of a scale that moves make sense."""
    for name in ("init_scale", "min_scale", "max_scale"):
        check_scale(name, getattr(policy, name))
    if not policy.min_scale <= policy.init_scale <= policy.max_scale:
        raise ValueError(
            f"init_scale must lie between min_scale and max_scale, got {policy.init_scale} "
            f"outside [{policy.min_scale}, {policy.max_scale}]."
        )
    if not 1.0 < number("growth_factor", policy.growth_factor) < math.inf:
        raise ValueError(f"growth_factor must be greater than 1, got {policy.growth_factor}.")
    if not 0.0 < number("backoff_factor", policy.backoff_factor) < 1.0:
        raise ValueError(f"backoff_factor must be between 0 and 1, got {policy.backoff_factor}.")
