"""Scale policies, which set the initial loss scale and update it after each step.

A policy is a frozen configuration with two pure functions, `init` and `update`. The state is a dict of 0-d tensors, and
`update` uses torch operations only, so the scale is updated on its device without a host synchronization.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gradilocks.checks import check_number

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "DynamicScale",
    "HeadroomScale",
    "ScalePolicy",
    "StaticScale",
    "check_scale",
    "initial_state",
    "resolve_scale",
]

SMALLEST_SCALE = 2.0**-126
"""Smallest scale that, like its reciprocal, is a normal float32."""
LARGEST_SCALE = float(torch.finfo(torch.float32).max)
_LARGEST_FLOAT16 = torch.finfo(torch.float16).max
_LARGEST_INT32 = torch.iinfo(torch.int32).max


class ScalePolicy:
    """Base class of scale policies.

    A custom policy is a subclass, or any object with the same `init` and `update`.
    """

    min_scale: float = SMALLEST_SCALE
    max_scale: float = LARGEST_SCALE

    def init(self) -> dict[str, Tensor]:
        """Returns the initial state: 0-d tensors, of which "scale" (float32) is required. See `initial_state`."""
        raise NotImplementedError(f"{type(self).__name__} must define init().")

    def update(self, state: Mapping[str, Tensor], overflow: Tensor, largest: Tensor) -> dict[str, Tensor]:
        """Returns the next state. A pure function; not called for steps that a clip policy rejected.

        Args:
            state: the current state.
            overflow: 0-d bool, True if a gradient contained NaN or Inf.
            largest: 0-d, largest magnitude of the scaled gradients.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(state, overflow, largest).")


@dataclass(frozen=True)
class StaticScale(ScalePolicy):
    """Multiplies the loss by a constant. An overflow skips the step and leaves the scale unchanged.

        scale = constant

    Args:
        scale: the constant. A power of two costs no precision.

    Examples:
        >>> StaticScale(1024.0).init()["scale"]
        tensor(1024.)

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    scale: float

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)
        object.__setattr__(self, "min_scale", self.scale)
        object.__setattr__(self, "max_scale", self.scale)

    def init(self) -> dict[str, Tensor]:
        return initial_state(self.scale)

    def update(self, state: Mapping[str, Tensor], overflow: Tensor, largest: Tensor) -> dict[str, Tensor]:
        return dict(state)


@dataclass(frozen=True)
class DynamicScale(ScalePolicy):
    """Grows the scale after a run of finite steps and backs off after overflows.

        overflow:  growth_tracker = 0;  hysteresis -= 1
                   if hysteresis <= 0:  scale = max(scale * backoff_factor, min_scale)
        finite:    growth_tracker += 1
                   if growth_tracker >= growth_interval:
                       growth_tracker = 0;  hysteresis is refilled
                       if scale * growth_factor <= max_scale:  scale *= growth_factor

    With `hysteresis=1` this is the rule of `torch.amp.GradScaler` with a floor and a ceiling. With 2 it is the rule of
    Megatron-LM.

    Args:
        init_scale: scale of the first step.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: number of consecutive finite steps before the scale grows.
        min_scale: lower bound. torch's scale can reach 0, after which every gradient is NaN.
        max_scale: upper bound. Growth beyond it is omitted, so that a scale that is a power of two remains one.
        hysteresis: the scale backs off at this many overflows since its last growth, and at each further overflow.

    Examples:
        >>> policy = DynamicScale(init_scale=8.0)
        >>> policy.update(policy.init(), overflow=torch.tensor(True), largest=torch.tensor(0.0))["scale"]
        tensor(4.)

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**32
    hysteresis: int = 1

    def __post_init__(self) -> None:
        _check_settings(self)
        check_number("hysteresis", self.hysteresis, at_least=1, at_most=_LARGEST_INT32, integer=True)

    def init(self) -> dict[str, Tensor]:
        return initial_state(self.init_scale, hysteresis=self.hysteresis)

    def update(self, state: Mapping[str, Tensor], overflow: Tensor, largest: Tensor) -> dict[str, Tensor]:
        scale = _widen(state["scale"])
        finite_steps = torch.where(overflow, 0, state["growth_tracker"] + 1)
        hysteresis = torch.where(overflow, state["hysteresis"] - 1, state["hysteresis"])
        grows = finite_steps >= self.growth_interval
        grown = scale * self.growth_factor
        grown = torch.where(grown <= self.max_scale, grown, scale)
        moved = torch.where(overflow & (hysteresis <= 0), scale * self.backoff_factor, scale)
        moved = torch.where(grows, grown, moved).clamp(self.min_scale, self.max_scale)
        return {
            "scale": moved.to(torch.float32),
            "growth_tracker": torch.where(grows, 0, finite_steps),
            "hysteresis": torch.where(grows, self.hysteresis, hysteresis),
        }


@dataclass(frozen=True)
class HeadroomScale(ScalePolicy):
    """Keeps `margin` doublings between the largest gradient and 65504, the largest float16.

        overflow:  scale = ceiling = scale * backoff_factor;  growth_tracker = 0
        finite:    growth_tracker += 1
                   if growth_tracker >= growth_interval:  growth_tracker = 0;  ceiling *= growth_factor
                   headroom = floor(log2(65504 / largest magnitude))
                   scale = min(scale * 2^(headroom - margin), ceiling)

    The scale fits the gradients after the first step, and falls before slowly growing gradients overflow. The ceiling
    is the scale after the last overflow: an overflow in the gradient of an activation cannot be predicted from the
    gradients of parameters. If all gradients are zero, the scale does not change.

    Args:
        init_scale: scale of the first step.
        margin: number of doublings kept free.
        growth_factor: raises the ceiling; above 1.
        backoff_factor: lowers scale and ceiling after an overflow; between 0 and 1.
        growth_interval: number of consecutive finite steps before the ceiling is raised.
        min_scale, max_scale: bounds of the scale.

    Examples:
        >>> policy = HeadroomScale(init_scale=256.0, margin=4)
        >>> policy.update(policy.init(), overflow=torch.tensor(False), largest=torch.tensor(0.25))["scale"]
        tensor(2097152.)

    Reference: Kuchaiev et al., "Mixed-Precision Training for NLP and Speech Recognition with OpenSeq2Seq", 2018, and
    FP8 recipes, which compute the scale from the largest magnitude.
    """

    init_scale: float = 2.0**8
    margin: int = 4
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        _check_settings(self)
        check_number("margin", self.margin, at_least=0, integer=True)

    def init(self) -> dict[str, Tensor]:
        return {**initial_state(self.init_scale), "ceiling": torch.full((), self.max_scale, dtype=torch.float32)}

    def update(self, state: Mapping[str, Tensor], overflow: Tensor, largest: Tensor) -> dict[str, Tensor]:
        scale, ceiling, largest = _widen(state["scale"]), _widen(state["ceiling"]), _widen(largest)
        finite_steps = torch.where(overflow, 0, state["growth_tracker"] + 1)
        grows = finite_steps >= self.growth_interval
        ceiling = torch.where(grows, ceiling * self.growth_factor, ceiling)
        headroom = torch.floor(torch.log2(_LARGEST_FLOAT16 / largest))
        fitting = torch.minimum(scale * torch.exp2(headroom - self.margin), ceiling)
        fitting = torch.where((largest > 0) & largest.isfinite(), fitting, scale)
        moved = torch.where(overflow, scale * self.backoff_factor, fitting).clamp(self.min_scale, self.max_scale)
        return {
            "scale": moved.to(torch.float32),
            "growth_tracker": torch.where(grows, 0, finite_steps),
            "hysteresis": state["hysteresis"],
            "ceiling": torch.where(overflow, moved, ceiling.clamp(max=self.max_scale)).to(torch.float32),
        }


def initial_state(scale: float, *, hysteresis: int = 0) -> dict[str, Tensor]:
    """Returns the state that every policy has: "scale", "growth_tracker" and "hysteresis", in torch's dtypes.

    Args:
        scale: initial scale.
        hysteresis: initial hysteresis; 0 for policies that do not use it.
    """
    return {
        "scale": torch.full((), scale, dtype=torch.float32),
        "growth_tracker": torch.zeros((), dtype=torch.int32),
        "hysteresis": torch.full((), hysteresis, dtype=torch.int32),
    }


def resolve_scale(scale: object) -> ScalePolicy | None:
    """Returns the policy for GradientControl's `scale=`.

    Args:
        scale: None (no scaling), "dynamic", a number (StaticScale), or a policy.

    Raises:
        TypeError: anything else, or a policy whose `init` or `update` returns the wrong type or keys.
    """
    if scale is None:
        return None
    if isinstance(scale, str) and scale == "dynamic":
        return DynamicScale()
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return StaticScale(float(scale))
    if isinstance(scale, type) or not all(callable(getattr(scale, name, None)) for name in ("init", "update")):
        raise TypeError(
            "scale must be None, 'dynamic', a number or a scale policy (init and update) such as DynamicScale(), "
            f"got {scale!r}."
        )
    policy = cast(ScalePolicy, scale)
    state = policy.init()
    new = policy.update(dict(state), torch.tensor(False), torch.tensor(1.0))
    values: list[object] = [*state.values(), *new.values()]
    is_valid = "scale" in state and set(new) == set(state)
    if not is_valid or not all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
        raise TypeError(
            f"init() and update() of {type(policy).__name__} must return dicts of 0-d tensors with the same keys, "
            f"'scale' among them, got {state} and {new}."
        )
    return policy


def check_scale(name: str, value: object) -> None:
    """Raises unless `value` is a number that, like its reciprocal, is a positive finite float32."""
    check_number(name, value, at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE)


def _check_settings(policy: DynamicScale | HeadroomScale) -> None:
    for name in ("init_scale", "min_scale", "max_scale"):
        check_scale(name, getattr(policy, name))
    check_number("init_scale", policy.init_scale, at_least=policy.min_scale, at_most=policy.max_scale)
    check_number("growth_factor", policy.growth_factor, above=1.0, below=math.inf)
    check_number("backoff_factor", policy.backoff_factor, above=0.0, below=1.0)
    check_number("growth_interval", policy.growth_interval, at_least=1, at_most=_LARGEST_INT32, integer=True)


def _widen(number: Tensor) -> Tensor:
    # A float32 product of a scale near its bounds could overflow before the clamp. MPS has no float64.
    return number if number.device.type == "mps" else number.to(torch.float64)
