"""From gradients to a decision in two launches, for the policies that everybody uses.

The stages say what a step means, and serve every device and every policy. On a GPU they would cost
some forty small launches a step, each a few microseconds of the host's time. Where the Triton
kernels serve and the policies are the known ones, this does the same in two: read; add up
and settle.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.clip import ClipByNorm, ClipPolicy, NoClip
from gradilocks.kernels.chunks import ORDERS, send
from gradilocks.kernels.cuda_graph import capturing, keep_if_captured
from gradilocks.scale import DynamicScale, NoScale, ScalePolicy, StaticScale
from gradilocks.step.own_step import is_ours
from gradilocks.step.roll import Called, Roll
from gradilocks.values import Decision, ScaleState, StepRecord

__all__ = ["Express"]

_MOST = torch.iinfo(torch.int32).max


class Express:
    """Knows when the short way can be taken, and takes it."""

    def __init__(self) -> None:
        self._roll = Roll()
        self.captured: list[object] = []
        """What the CUDA graphs of this control's steps need."""
        self._made_for: tuple[object, ...] = ()
        self._device: torch.device | None = None
        self._standing_of: ScaleState | None = None
        self._streak: Tensor | None = None

    def __reduce__(self) -> Any:
        return Express, ()  # All that is kept here can be made again.

    def call(
        self, optimizers: Sequence[Any], scale: ScalePolicy, clip: ClipPolicy
    ) -> Called | None:
        """The gradients of all optimizers, or None if the stages have to do it."""
        if type(scale) not in (NoScale, StaticScale, DynamicScale):
            return None
        if isinstance(scale, DynamicScale) and (scale.delay or scale.tolerance):
            return None
        if type(clip) is not NoClip and (type(clip) is not ClipByNorm or clip.order not in ORDERS):
            return None
        if len(optimizers) == 1 and is_ours(optimizers[0]):
            called = optimizers[0].gradients()  # The optimizer's step will want the same.
            return called if isinstance(called, Called) else None
        groups = []
        for optimizer in optimizers:
            groups += [group["params"] for group in optimizer.param_groups]
            groups.append([])  # So that a group that moves to another optimizer is noticed.
        return self._roll.call(groups)

    def settle(
        self,
        called: Called,
        *,
        scale: ScalePolicy,
        clip: ClipPolicy,
        state: ScaleState,
        streak: Tensor,
        steps: Tensor,
        loss: Tensor | None,
        unscaled: bool,
        rating: Any = None,
    ) -> tuple[Decision, StepRecord]:
        """Measures, decides, and moves the scale, the streak and the count of steps on."""
        self._prepare(called, scale, clip)
        located, fused, order = called.located, self._fused, clip.order
        fused.measure_located(located, self._scratch, order=order)
        found = torch.empty(5, located.layout.count, dtype=torch.float64, device=called.device)
        row = torch.empty(12, dtype=torch.float64, device=called.device)
        if self._standing_of is not state or self._streak is not streak:
            self._standing_of, self._streak = state, streak
            moving = (state.scale, state.growth_tracker, state.hysteresis, streak, steps)
            self._before = (self._arrived, self._rules, *moving)
        fused.settle(
            located, self._scratch, found, row,
            fused.Standing(self._before, self._after), loss, rating,
            order=order, clip=type(clip) is ClipByNorm, dynamic=type(scale) is DynamicScale,
            unscaled=unscaled,
        )  # fmt: skip
        keep_if_captured(self._before, self._after, self._scratch)
        return self._decision, StepRecord(row, self._skip, lambda: fused.statistics_of(found))

    @staticmethod
    def undo(record: StepRecord, state: ScaleState, streak: Tensor, steps: Tensor) -> None:
        """Puts back what `settle` has moved on."""
        state.scale.copy_(record.row[1])
        for number, tensor in zip(
            record.row[9:].unbind(), (state.growth_tracker, state.hysteresis, streak), strict=True
        ):
            tensor.copy_(number)
        steps.sub_(1)

    def _prepare(self, called: Called, scale: ScalePolicy, clip: ClipPolicy) -> None:
        if called.device != self._device:
            self._device = called.device
            self._skip = torch.zeros((), dtype=torch.float32, device=called.device)
            self._divisor = torch.ones((), dtype=torch.float32, device=called.device)
            self._multiplier = torch.ones((), dtype=torch.float64, device=called.device)
            self._arrived = torch.zeros((), dtype=torch.int32, device=called.device)
            self._after = (self._skip, self._divisor, self._multiplier)
            self._decision = Decision(self._skip, self._multiplier, divisor=self._divisor)
            self._fused: Any = importlib.import_module("gradilocks.kernels.fused")
            self._made_for = ()
        # Weak: a number would be taken for the next one's, and the old parameters would be kept.
        made_for: tuple[object, ...] = (weakref.ref(called), scale, clip)
        if made_for != self._made_for:
            rules = [getattr(clip, "max_norm", float("inf")), called.roof]
            if isinstance(scale, DynamicScale):
                rules += [scale.growth_factor, scale.backoff_factor]
                rules += [min(scale.growth_interval, _MOST), scale.min_scale, scale.max_scale]
                rules += [scale.hysteresis]
            host = torch.tensor([float(rule) for rule in rules], dtype=torch.float64, device="cpu")
            self._rules = send(host, called.device)
            if capturing():  # What a graph sends is there only when it is replayed.
                made_for, self._device = (), None
            self._scratch = self._fused.scratch_for(called.located)
            self._standing_of = None
            self._made_for = made_for
