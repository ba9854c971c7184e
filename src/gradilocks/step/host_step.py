"""A CPU step decided in Python numbers, in 5 us; torch operations take 300 us."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.clip import ClipByNorm
from gradilocks.kernels import STATISTICS
from gradilocks.kernels.addresses import AddressReader
from gradilocks.optim.fused_step import FusedStep
from gradilocks.step.decide import Decision, StepInputs
from gradilocks.step.gradients import dense_grads
from gradilocks.step.measure import statistics_of
from gradilocks.step.state import StepState

_FLOAT32 = torch.finfo(torch.float32)
_FLAGS = torch.zeros((), device="cpu"), torch.ones((), device="cpu")  # The skip flag for False and for True.
_TYPES = {torch.int32: ctypes.c_int32, torch.int64: ctypes.c_int64, torch.float32: ctypes.c_float}


class Totals(NamedTuple):
    """Statistics of all gradients together."""

    norm: float
    """NaN or inf if a gradient is not finite."""
    largest: float
    nan: float
    inf: float


def decide_on_host(
    totals: Totals,
    clip: ClipByNorm,
    inputs: StepInputs,
    *,
    scale: float,
    step: int,
    max_gradient: float,
    statistics: Any,
) -> Decision:
    """`decide` in Python numbers, for one rank and one ClipByNorm.

    Args:
        totals: statistics of the gradients.
        clip: the clip policy.
        inputs, max_gradient: as for `decide`.
        scale: the current scale.
        step: number of this step.
        statistics: function that returns the statistics of each gradient.
    """
    is_unscaled, overflow = inputs.is_unscaled, inputs.overflow is not None and bool(inputs.overflow)
    norm, bad = totals.norm, totals.nan + totals.inf + overflow
    if _FLOAT32.tiny <= norm <= _FLOAT32.max:
        norm = array("f", [norm])[0]
    broken = bad > 0 or not math.isfinite(norm)
    gradient_scale = 1.0 if is_unscaled else scale
    coefficient = 1.0 if broken else min(1.0, clip.max_norm / (norm / gradient_scale + 1e-6))
    multiplier = coefficient / gradient_scale
    skipped = broken or (multiplier > 1.0 and norm * multiplier > max_gradient) or multiplier == math.inf
    multiplier = 1.0 if skipped else multiplier
    reported_norm = norm / gradient_scale if not bad else math.nan if totals.nan else math.inf
    clipped = coefficient < 1.0 and not skipped
    largest = totals.largest * scale if is_unscaled else totals.largest
    row = (skipped, False, scale, reported_norm, clip.max_norm, clipped, step, totals.nan, totals.inf, largest)
    return Decision(
        skip=_FLAGS[skipped],
        multiplier=multiplier,
        divisor=min(1.0 / multiplier, _FLOAT32.max) if multiplier else math.inf,
        overflow=_FLAGS[skipped],  # ClipByNorm rejects no step, so every skipped one overflowed.
        row=partial(torch.tensor, row, dtype=torch.float64, device="cpu"),
        statistics=statistics,
        is_skipped=skipped,
    )


class HostStep:
    """Measures, decides and optionally updates the float32 parameters of one rank on a CPU.

    The C extension measures every gradient; without it, plain torch measures the global norm, which takes half the time
    of a norm for each gradient, and each gradient only if a subscriber needs it.

    Args:
        params: parameters whose gradients are measured.
        state: scale and counters. Its tensors must not be replaced.
        clip: the clip policy.
        max_gradient: the largest finite number that all of the gradients' dtypes can hold.
        fused: updates `params`; None to decide only, as always without the C extension.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        state: StepState,
        clip: ClipByNorm,
        *,
        max_gradient: float,
        fused: FusedStep | None,
    ) -> None:
        self._params, self._state, self._clip, self._max_gradient = params, state, clip, max_gradient
        self._fused = fused
        self._reader = AddressReader(params) if fused is None else fused.reader
        self._sizes = array("q", self._reader.sizes)
        self._measure_at: Any = getattr(kernels.backend_for("cpu"), "measure_at", None)  # Of the C extension.
        self._growth_interval = state.rules.growth_interval if state.rules else 0
        # Adding to a 0-d tensor takes 2 us, through ctypes 0.1.
        self._tensors = [state.scale, state.steps, state.streak, state.tensors["growth_tracker"]]
        numbers: list[Any] = [_TYPES[tensor.dtype].from_address(tensor.data_ptr()) for tensor in self._tensors]
        self._scale, self._steps, self._streak, self._tracker = numbers

    def run(self, grads: list[Tensor | None], inputs: StepInputs) -> Decision | None:
        """Performs one step.

        Returns:
            None if this step needs torch operations: a gradient's layout is not its parameter's, or there is no C
            extension and the gradients are not finite.
        """
        addresses = None if self._measure_at is None else self._reader.read_gradients(grads)
        if self._measure_at is None:
            order, tensors = self._clip.order, dense_grads(self._params)
            norm = float(kernels.norm([tensor for tensor in tensors if tensor is not None], order))
            if not math.isfinite(norm):
                return None
            totals, statistics = Totals(norm, math.nan, 0.0, 0.0), _raise_unmeasured
            if inputs.needs_statistics:  # The decision keeps `norm`, so that a subscriber changes no bit.
                measured = statistics_of(tensors, order=order, detail=True)
                totals = Totals(norm, float(measured[STATISTICS.index("largest")].amax()), 0.0, 0.0)
                statistics = partial(torch.clone, measured)
        elif addresses is None:
            return None
        else:
            table = self._measure_at(addresses, self._sizes, self._clip.order)
            count = len(STATISTICS) * len(self._params)
            totals, statistics = Totals(*table[count:]), partial(_statistics, table, count)
        decision = decide_on_host(
            totals,
            self._clip,
            inputs,
            scale=self._scale.value,
            step=self._steps.value + 1,
            max_gradient=self._max_gradient,
            statistics=statistics,
        )
        if self._fused is not None and addresses is not None and not decision.is_skipped:
            self._fused.run_at(addresses, decision.divisor)
        self._steps.value += 1
        self._streak.value = self._streak.value + 1 if decision.is_skipped else 0
        if inputs.updates_scale and not decision.is_skipped and self._tracker.value + 1 < self._growth_interval:
            self._tracker.value += 1
        elif inputs.updates_scale:
            # The rules ignore `largest`.
            self._state.update_scale(decision.overflow > 0, torch.tensor(math.nan, device="cpu"))
        return decision


def _statistics(table: array[float], count: int) -> Tensor:
    return torch.frombuffer(table, dtype=torch.float64, count=count).view(len(STATISTICS), -1)


def _raise_unmeasured() -> Tensor:
    raise RuntimeError(
        "this step has no per-tensor statistics. Without the C extension, a CPU measures only the global "
        "norm: install with a C++ compiler, or subscribe to the control before the step."
    )
