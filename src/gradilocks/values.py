"""What travels between the stages: plain data, no behaviour.

Every tensor here is small and lies on the device that made it. Passing these values around never
waits for that device; turning them into Python numbers does, and only named places do so
(`tests/test_architecture.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ROW",
    "ClipLimit",
    "Decision",
    "LocalDetail",
    "Measurement",
    "NonFinite",
    "RankGroup",
    "RecordingPlan",
    "ScaleState",
    "Scene",
    "SharedDetail",
    "Statistics",
    "StepRecord",
    "moved",
    "wide",
]


@dataclass(frozen=True)
class ScaleState:
    """The moving part of a scale policy. The tensors are updated in place and never replaced."""

    scale: Tensor
    """float32, 0-d: what the loss is multiplied by."""
    growth_tracker: Tensor
    """int32, 0-d: finite steps in a row since the scale last moved."""
    hysteresis: Tensor
    """int32, 0-d: how many more non-finite steps until the scale backs off."""
    more: dict[str, Tensor] = field(default_factory=dict)
    """0-d: whatever else a policy keeps."""


@dataclass(frozen=True)
class Statistics:
    """What a kernel finds in a list of tensors; one entry a tensor, on the tensors' device."""

    norms: Tensor
    """float64 (float32 where the device has no float64): the norm of each tensor."""
    nan: Tensor
    """int64: how many elements are NaN."""
    inf: Tensor
    """int64: how many elements are Inf or -Inf."""
    largest: Tensor | None = None
    """As `norms`: the largest magnitude, NaN left out. Only when detail was asked for."""
    zeros: Tensor | None = None
    """int64: how many elements are exactly zero. Only when detail was asked for."""


@dataclass(frozen=True)
class NonFinite:
    """How many elements of each tensor are not finite; one entry a tensor, on their device."""

    nan: Tensor
    """int64: how many are NaN."""
    inf: Tensor
    """int64: how many are Inf or -Inf."""


@dataclass(frozen=True)
class Scene:
    """Whose gradients were measured, for policies that look further than at norms.

    Where several ranks hold the model, a policy that bounds gradients apart from each other sees
    all of them on every rank, in an order of names that all ranks keep.
    """

    params: Sequence[Tensor | None]
    """The parameters, in the order of the Statistics; None for one that only other ranks hold."""
    tensors: Sequence[Tensor | None]
    """Their gradients' own elements; None where this rank has none."""
    places: Sequence[int]
    """Their places among all parameters, those without a gradient included."""
    count: int
    """How many parameters there are."""
    names: Callable[[], Sequence[str]]
    """Tells the names of all parameters."""
    groups: Callable[[], Sequence[tuple[int, str | None]]]
    """Tells the number and the name of each parameter's group."""
    lengths: Sequence[tuple[Tensor, Tensor] | None] = ()
    """Over several ranks, for each parameter that a policy divides into units: the norms of their
    gradients, still scaled, and of their weights, 1-d each. () if they are all here."""


@dataclass(frozen=True)
class Measurement:
    """All gradients of a step, measured as they stand: scaled, if the loss was scaled."""

    order: float
    tensors: Statistics
    norm: Tensor
    """0-d: the norm over all tensors, as if they were one vector, rounded once to float32."""
    nonfinite: Tensor
    """float32, 0-d: exactly 1 if any element of any gradient is NaN or Inf, else exactly 0."""
    double: bool = False
    """Whether a gradient is float64; `norm` is not rounded to float32 then."""
    scene: Scene | None = None
    """Whose gradients they are, where somebody knows."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that bring their numbers together, and how they reach each other."""

    ranks: tuple[int, ...]
    """Their numbers in the default group, ascending."""
    groups: tuple[Any, ...]
    """The process groups to go through, one after the other; None is the default group."""
    device: torch.device
    """Where the collectives run: a device that the groups have a backend for."""


class LocalDetail(NamedTuple):
    """This rank's part of a step that is measured tensor by tensor over all ranks."""

    found: Statistics
    """Of its gradients, as they stood: 2-norms, with largest magnitudes and zeros."""
    places: Sequence[int]
    """For each of them, the place of its parameter among those of all ranks."""
    counts: Sequence[bool]
    """For each of them, whether this rank's elements count."""
    elements: Sequence[int]
    """For each of them, how many elements are here."""


class SharedDetail(NamedTuple):
    """What all ranks found of each parameter: 1-d along the parameters of all of them."""

    norms: Tensor
    """2-norm of the gradient, as it stood."""
    largest: Tensor
    """Its largest magnitude; 0 where there is no gradient."""
    nan: Tensor
    inf: Tensor
    zeros: Tensor
    elements: Tensor
    """How many elements the gradient has; 0 where there is none."""
    weight: Tensor
    """Norm of the parameter before the step."""
    change: Tensor
    """Norm of what the step has changed it by."""


class RecordingPlan(NamedTuple):
    """What a recorder needs of all ranks: they agree on it once, at a control's first step."""

    flush_every: int
    """Losses travel at every so many steps."""
    detail_every: int | None
    """Every so many steps are measured tensor by tensor; None: none."""
    steps: int
    """How many steps were recorded before, also by earlier sessions."""
    log_on: str = "all"
    """Which ranks log losses that are NaN or Inf: "all", "first" or "none"."""

    def wants_detail(self, since: int) -> bool:
        """Whether the step is to be measured tensor by tensor before which there were `since`."""
        return self.detail_every is not None and (self.steps + since) % self.detail_every == 0


@dataclass(frozen=True)
class ClipLimit:
    """How far the unscaled gradients are to be pulled down."""

    coefficient: Tensor
    """0-d, in [0, 1]: every unscaled gradient is multiplied by it."""
    limit: Tensor
    """0-d: the bound that was put on the norm; inf if there is none."""
    clipped: Tensor
    """float32, 0-d: exactly 1 if the gradients change because of this limit, else exactly 0."""
    value: float | None = None
    """The bound on the magnitude of each unscaled element; None if there is none."""
    factors: Tensor | None = None
    """1-d, in [0, 1]: each gradient is multiplied by its own, besides; None if there are none."""
    units: Sequence[Tensor | None] | None = None
    """For each gradient what its parts are multiplied by, as it broadcasts; None for all of it."""
    norms: Tensor | None = None
    """1-d: the norm of each gradient as it will be, still scaled; None if it follows from above."""
    reject: Tensor | None = None
    """float32, 0-d: exactly 1 to skip a step that is finite, else exactly 0."""
    parts: Sequence[tuple[Measurement, ClipLimit]] = ()
    """Of a chain: what each policy saw, and what limit it set."""


@dataclass(frozen=True)
class Decision:
    """Step or skip, and by what every gradient is multiplied on the way into the optimizer."""

    skip: Tensor
    """float32, 0-d: exactly 1 or exactly 0."""
    multiplier: Tensor
    """0-d: clip coefficient over scale; 1 when the step is skipped."""
    bound: Tensor | None = None
    """0-d: the bound on each element of the gradients as they stand; inf when skipped."""
    divisor: Tensor | None = None
    """float32, 0-d: 1 / multiplier as fused optimizers take it, if it is known already."""
    overflow: Tensor | None = None
    """float32, 0-d: as `skip`, but 0 where a policy has rejected finite gradients; None if none
    can."""
    factors: Tensor | None = None
    """1-d: what each gradient is multiplied by on its own; 1 when skipped."""
    units: Sequence[Tensor | None] | None = None
    """What the parts of each gradient are multiplied by; 1 when skipped."""


@dataclass(eq=False)
class StepRecord:
    """What one step leaves behind, on the device, until somebody reads it."""

    kept_row: Tensor | Callable[[], Tensor]
    """The row, or what returns it when somebody asks; it keeps no statistics."""
    skip: Tensor
    """float32, 0-d: whether the gradients were not finite; good until the next step."""
    found: Callable[[], Statistics]
    """Makes `statistics` when somebody asks for them."""
    counted: Callable[[], Tensor] | None = None
    """Likewise `counts`, where that takes less than from `statistics`."""
    numbers: list[float] | None = None
    """The row on the host, once somebody has read it."""

    @functools.cached_property
    def row(self) -> Tensor:
        """float64 (float32 where the device has none), 1-d: the numbers that ROW names."""
        return self.kept_row if isinstance(self.kept_row, Tensor) else self.kept_row()

    @functools.cached_property
    def statistics(self) -> Statistics:
        """What was measured, gradient by gradient."""
        return self.found()

    def counts(self) -> Tensor:
        """1-d: how many NaN each gradient has, and after those how many Inf."""
        if self.counted is not None:
            return self.counted()
        return torch.cat((self.statistics.nan, self.statistics.inf))


ROW = (
    "skip",
    "scale",
    "norm",
    "limit",
    "clipped",
    "step",
    "loss_nonfinite",
    "nan",
    "inf",
)
"""Whether the step was skipped (1, or 2 if a policy rejected it), the scale that the gradients
carried, the norm of the unscaled gradients, the bound on it, whether they were pulled down, the
step's number, whether the loss was not finite, and how many NaN and Inf there were in all."""


def wide(device: torch.device) -> torch.dtype:
    """The dtype for scalars that must not overflow: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; without waiting, unless the host itself is where it goes.

    A copy to the host that does not wait may be read before it has arrived.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")
