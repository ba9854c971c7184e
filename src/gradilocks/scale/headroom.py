"""HeadroomScale: the scale that the gradients have room for, found without wasting a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradilocks.policy import check_count
from gradilocks.scale.scale_policy import ScalePolicy, check_moving, check_scale, new_state
from gradilocks.values import ScaleState, wide

__all__ = ["HeadroomScale"]

_FROM_NOTHING = 16.0
"""By how much the scale grows as long as every gradient has been zero: they may have vanished."""


@dataclass(frozen=True)
class HeadroomScale(ScalePolicy):
    """Keeps `margin` doublings between the largest gradient and the largest number of the format.

        taken step:    held = scale
                       room = floor(log2(largest_value / largest magnitude)) - margin
                       scale = scale * 2^room, but not above the ceiling
                       every `growth_interval` taken steps in a row:  ceiling *= growth_factor
        all are zero:  room = 4, as long as no step has had a gradient other than zero; else 0
        overflow:      ceiling = scale = scale * backoff_factor;  held, if that is less
        loss is NaN:   nothing; no scale can help (but see below)

    So it starts low, is where it belongs after one or two steps, and comes down before gradients
    overflow that grow slowly. An overflow may start in the gradient of an activation, which no
    parameter's gradient shows; so the scale that overflowed is remembered, and tried again only
    after `growth_interval` finite steps. If it was a leap that overflowed, the scale falls back to
    the last one that held and feels its way up from there, doubling at each step until one fails.

    Gradients that are all zero may have vanished, so the scale grows 16-fold at each such step, up
    to its bounds. That ends for good with the first gradient that is not zero, be it Inf: from then
    on a step of zeros leaves the scale as it is.

    Of ranks that average their gradients (DistributedDataParallel) each knows its own loss only,
    and all must keep one scale without a word: there a loss that is NaN counts as an overflow.

    Args:
        init_scale: the scale of the first step.
        margin: how many doublings are kept free.
        largest_value: of the format in which gradients are computed; float16's by default.
        growth_factor: by how much the ceiling is lifted.
        backoff_factor: what remains of the scale after an overflow.
        growth_interval: how many finite steps in a row lift the ceiling.
        min_scale, max_scale: the bounds.

    Example:
        >>> HeadroomScale(margin=3).margin
        3

    Reference: the idea of a scale from the largest magnitude is that of Kuchaiev et al.,
    "Mixed-Precision Training for NLP and Speech Recognition with OpenSeq2Seq", 2018, and of the fp8
    recipes; the ceiling that remembers an overflow is ours. Use it for float16 instead of
    `DynamicScale`, whose first steps are lost to overflows: torch's starts at 65536, Megatron's at
    2^32, and each overflow costs a step.
    """

    init_scale: float = 2.0**8
    margin: int = 4
    largest_value: float = 65504.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**32
    needs_largest = True
    kept_scales = ("ceiling", "held")

    def __post_init__(self) -> None:
        check_moving(self)
        check_scale("largest_value", self.largest_value)
        for name, lowest in (("margin", 0), ("growth_interval", 1)):
            check_count(name, getattr(self, name), lowest=lowest)

    def start(self, device: torch.device) -> ScaleState:
        state = new_state(device, scale=self.init_scale)
        for name in ("ceiling", "held"):  # As long as no step has held, none was a leap.
            state.more[name] = torch.full((), self.max_scale, dtype=wide(device), device=device)
        for name in ("feeling", "seen"):
            state.more[name] = torch.zeros((), dtype=torch.int32, device=device)
        return state

    def advance(
        self,
        state: ScaleState,
        skip: Tensor,
        *,
        largest: Tensor | None = None,
        loss_nonfinite: Tensor | None = None,
    ) -> None:
        scale = state.scale.to(wide(state.scale.device))
        ceiling, overflow = state.more["ceiling"], skip > 0
        if loss_nonfinite is not None:
            blameless = loss_nonfinite > 0
            overflow = overflow & torch.logical_not(blameless)
        else:
            blameless = torch.zeros_like(overflow)
        room = torch.zeros_like(scale)
        if largest is not None:
            peak = largest.to(scale.dtype)
            found = torch.floor(torch.log2(self.largest_value / peak)) - self.margin
            # Until something has been seen, nothing may be because all has vanished.
            empty = torch.where(state.more["seen"] > 0, 0.0, math.log2(_FROM_NOTHING))
            room = torch.where(peak > 0, found, empty)
            state.more["seen"].copy_(torch.maximum(state.more["seen"], (peak > 0).int()))
            room = torch.where(torch.isfinite(peak), room, torch.zeros_like(room))
        tracker = torch.where(overflow, 0, state.growth_tracker + 1)
        full = tracker >= self.growth_interval
        held, feeling = state.more["held"], state.more["feeling"]
        lifted = torch.where(full | (feeling > 0), ceiling * self.growth_factor, ceiling)
        fitting = torch.minimum(scale * torch.exp2(room), lifted)
        fallen = torch.minimum(scale * self.backoff_factor, held)
        leapt = (held < scale * self.backoff_factor) & (feeling == 0)
        moved = torch.where(overflow, fallen, fitting).clamp(self.min_scale, self.max_scale)
        new_ceiling = torch.where(overflow, moved, lifted.clamp(max=self.max_scale))
        # It has felt its way when the gradients want no more than it may give.
        unsure = (feeling > 0) & (fitting >= lifted) & (lifted < self.max_scale)
        feeling.copy_(torch.where(blameless, feeling, torch.where(overflow, leapt, unsure)))
        state.scale.copy_(torch.where(blameless, scale, moved))
        held.copy_(torch.where(blameless | overflow, held, scale))
        ceiling.copy_(torch.where(blameless, ceiling, new_ceiling))
        counted = torch.where(full, 0, tracker)
        state.growth_tracker.copy_(torch.where(blameless, state.growth_tracker, counted))

    def bounds(self) -> tuple[float, float]:
        return self.min_scale, self.max_scale
