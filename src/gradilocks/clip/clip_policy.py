"""What a clip policy is, and the three that look at the gradients of this step alone.

A policy is a frozen configuration that says what it needs measured and turns a Measurement of the
scaled gradients into the limit that holds for the unscaled ones. What a policy learns from step to
step is a dict of tensors, its memory, which it changes in place on the memory's device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradilocks.policy import Adapted, Policy, number
from gradilocks.values import ClipLimit, Measurement, Scene, moved

__all__ = [
    "NOTHING",
    "ClipByNorm",
    "ClipByValue",
    "ClipPolicy",
    "ClipRules",
    "Memory",
    "NoClip",
    "check_max_norm",
    "check_order",
    "clip_coefficient",
    "moving_coefficient",
    "remap_memory",
    "resolve_clip",
    "same_parameters",
    "scene_of",
    "without_coefficient",
]

Memory = Mapping[str, Tensor]
"""What a policy has learned, by name; it is changed in place."""
NOTHING: Memory = MappingProxyType({})
"""The memory of a policy that remembers nothing."""
EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch does."""


@dataclass(frozen=True)
class ClipRules:
    """A clip policy in plain numbers, for a device that follows it without asking Python."""

    order: float
    """The p of the norm."""
    max_norm: float | None
    """The bound on the norm of all gradients together; None if there is none."""


class ClipPolicy(Policy):
    """What to measure, and what limit follows from it. The base of all clip policies.

    A subclass defines `limit`, and overrides what differs from the defaults below. Whoever asks a
    policy passes `state` only if `start` has returned one, so that a policy that remembers nothing
    may define `limit(self, measurement, scale)`.
    """

    order: float = 2.0
    """The p of the norm to be measured."""
    needs_largest: bool = False
    """Whether the largest magnitude must be measured too."""
    apart: bool = False
    """Whether it bounds gradients apart from each other."""
    by_group: bool = False
    """Whether what it bounds apart are groups, so that it need not know where a tensor ends."""
    by_unit: bool = False
    """Whether it bounds the rows of a tensor, or other units of elements, apart from each other."""
    by_parameter: tuple[str, ...] = ()
    """The names in its memory that have a number for each parameter."""

    @property
    def needs_scene(self) -> bool:
        """Whether `limit` may look at `measurement.scene`: whose gradients these are."""
        return True

    @property
    def learns(self) -> bool:
        """Whether it has a memory: `start` makes one, and `advance` moves it on."""
        return getattr(self.start, "__func__", None) is not ClipPolicy.start

    def rules(self) -> ClipRules | None:
        """Its rule in numbers, if a device can follow it by itself."""
        return None

    def misfits(
        self, names: Sequence[str], groups: Sequence[tuple[int, str | None]]
    ) -> dict[str | int, str]:
        """The groups and patterns that fit no parameter, each with what to tell the user.

        Args:
            names: of all parameters.
            groups: the number and the name of each parameter's group.
        """
        return {}

    def unit_count(self, name: str, shape: Sequence[int]) -> int:
        """Into how many units it divides a parameter, a row each; 0 if it leaves it alone.

        Asked of a policy that is `by_unit`, where several ranks hold the model: it then finds the
        units' norms over all ranks in `measurement.scene.lengths`.

        Args:
            name: of the parameter.
            shape: of all of it.
        """
        return 0

    def start(self, device: torch.device, count: int) -> dict[str, Tensor] | None:
        """Its memory before the first step of a model with `count` parameters; None for none."""
        return None

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        """The limit for gradients that were measured under `scale`; changes nothing."""
        raise NotImplementedError(f"{type(self).__name__} has no limit(measurement, scale).")

    def advance(
        self, state: Memory, measurement: Measurement, scale: Tensor, limit: ClipLimit, skip: Tensor
    ) -> None:
        """Moves its memory on in place. A skipped step (1) must leave it as it was."""


class _AdaptedClip(Adapted, ClipPolicy):
    """A user's policy that is no ClipPolicy, with the defaults for what it does not define."""

    _taken = (
        *("order", "needs_largest", "apart", "by_group", "by_unit", "by_parameter"),
        *("misfits", "unit_count", "start", "limit", "advance"),
    )


@dataclass(frozen=True)
class NoClip(ClipPolicy):
    """Leaves the gradients as long as they are; their norm is still measured.

        coefficient = 1

    Example:
        >>> NoClip().order
        2.0

    Reference: none is needed. Use it to watch the norms of a run before you choose a limit.
    """

    @property
    def needs_scene(self) -> bool:
        return type(self) is not NoClip  # A subclass may look at it, here and below.

    def rules(self) -> ClipRules | None:
        # A subclass may compute another limit, here and below.
        return ClipRules(self.order, None) if type(self) is NoClip else None

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        return without_coefficient(measurement, torch.zeros_like(measurement.nonfinite))


@dataclass(frozen=True)
class ClipByNorm(ClipPolicy):
    """Shortens all gradients together so that their norm is at most `max_norm`.

        coefficient = min(1, max_norm / (norm + 1e-6))

    The direction stays. A non-finite gradient gets coefficient 1: it is for the decision to skip
    the step, and scaling would only spread the NaN.

    Args:
        max_norm: the bound, not negative. As in torch, 0 leaves nothing of the gradients.
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
        check_order(self.order)

    @property
    def needs_scene(self) -> bool:
        return type(self) is not ClipByNorm

    def rules(self) -> ClipRules | None:
        return ClipRules(self.order, self.max_norm) if type(self) is ClipByNorm else None

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        norm = measurement.norm / scale
        coefficient = clip_coefficient(norm, self.max_norm, measurement.nonfinite)
        return ClipLimit(
            coefficient=coefficient,
            limit=torch.full_like(norm, self.max_norm),
            clipped=(coefficient < 1.0).to(torch.float32),
        )


@dataclass(frozen=True)
class ClipByValue(ClipPolicy):
    """Bounds every element on its own. The direction may turn.

        g = min(max(g, -value), value)

    Of a complex element the magnitude is bounded.

    Args:
        value: the bound, not negative.

    Example:
        >>> ClipByValue(0.5).needs_largest
        True

    Reference: Mikolov, "Statistical Language Models Based on Neural Networks", 2012. Use it where
    single elements must not pass a bound, as in small recurrent networks; else prefer ClipByNorm.
    """

    value: float
    needs_largest = True

    def __post_init__(self) -> None:
        check_max_norm(self.value, name="value")

    @property
    def needs_scene(self) -> bool:
        return type(self) is not ClipByValue

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        largest = measurement.tensors.largest
        assert largest is not None
        peak = largest.amax() if largest.numel() else largest.new_zeros(())
        over = (peak / scale > self.value) & (measurement.nonfinite == 0)
        return without_coefficient(measurement, over, value=float(self.value))


def without_coefficient(measurement: Measurement, clipped: Tensor, **more: Any) -> ClipLimit:
    """The ClipLimit of a policy that puts no bound on the norm of all gradients together.

    Args:
        measurement: the gradients.
        clipped: 0-d, whether it changes them all the same.
        more: how: the other fields of the ClipLimit.
    """
    norm = measurement.norm
    unbounded = torch.full_like(norm, math.inf)
    return ClipLimit(torch.ones_like(norm), unbounded, clipped.to(torch.float32), **more)


def moving_coefficient(norm: Tensor, limit: Tensor, nonfinite: Tensor) -> Tensor:
    """As `clip_coefficient`, for a limit that moves: exactly 1 for a norm that does not pass it."""
    over = (norm > limit) & (nonfinite == 0)
    finite = torch.clamp(norm, max=torch.finfo(norm.dtype).max)
    return torch.where(over, limit / finite, torch.ones_like(norm))


def clip_coefficient(norm: Tensor, max_norm: float | Tensor, nonfinite: Tensor) -> Tensor:
    """What the unscaled gradients are multiplied by, in [0, 1]; 1 if they are not finite."""
    finite = torch.clamp(norm, max=torch.finfo(norm.dtype).max)
    coefficient = torch.clamp(max_norm / (finite + EPSILON), max=1.0)
    return torch.where(nonfinite > 0, torch.ones_like(norm), coefficient)


def scene_of(measurement: Measurement, policy: ClipPolicy) -> Scene:
    """Whose gradients were measured, for a policy that cannot do without knowing it."""
    if measurement.scene is None:
        raise ValueError(
            f"{policy.policy_name} needs to know whose gradients were measured: use it through "
            "GradientControl(clip=...) or GradScaler(clip=...)."
        )
    return measurement.scene


def check_max_norm(value: object, *, name: str = "max_norm", none: str = "math.inf") -> float:
    """`value` as a float; a clear error if it is no number, negative or NaN."""
    max_norm = number(name, value)
    if not max_norm >= 0.0:
        raise ValueError(
            f"{name} must not be negative or NaN, got {value}. Use {none} to measure only."
        )
    return max_norm


def check_order(order: object) -> None:
    """Raises unless `order` is a number of at least 1, of which infinity is one."""
    if not number("order", order) >= 1.0:
        raise ValueError(f"order must be at least 1 or math.inf, got {order}.")


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
    return given if isinstance(given, ClipPolicy) else _AdaptedClip(given)


def same_parameters(whose: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Whether `whose` are just these parameters, in this order."""
    return len(whose) == len(params) and all(map(operator.is_, whose, params))


def remap_memory(
    policy: ClipPolicy,
    memory: Memory,
    whose: Sequence[Tensor],
    params: Sequence[Tensor],
    home: torch.device,
) -> Memory:
    """The memory of a policy after the parameters have changed; a new one starts afresh.

    Args:
        policy: whose memory it is.
        memory: as it was.
        whose: the parameters that it was of, in order.
        params: the parameters now, in order.
        home: where the memory is to be.
    """
    at = {id(param): place for place, param in enumerate(whose)}
    pairs = [(k, at[id(param)]) for k, param in enumerate(params) if id(param) in at]
    fresh = policy.start(home, len(params)) or {}
    if pairs:
        new, old = (torch.tensor(side, dtype=torch.int64) for side in zip(*pairs, strict=True))
        for name in policy.by_parameter:
            known = moved(memory[name], home)[moved(old, home)]
            fresh[name].index_copy_(0, moved(new, home), known)
    return {**memory, **{name: fresh[name] for name in policy.by_parameter}}
