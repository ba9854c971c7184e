"""The decision of one step: multiplier and skip flag.

The rule is implemented three times: as torch operations for every policy and device (`decide`), in Python numbers for
the common policies on a CPU (`step/host_step.py`), and as a Triton kernel (`kernels/triton_kernels.py`). Tests compare
the three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks.clip import ClipByNorm
from gradilocks.kernels import STATISTICS
from gradilocks.ranks.collective import RANK_ROW, combine, disagreement, gather_rows
from gradilocks.ranks.layout import Layout
from gradilocks.step.clip_stage import Clipping, ClipStage
from gradilocks.step.state import StepState

ROW = ("skipped", "rejected", "scale", "norm", "limit", "clipped", "step", "nan", "inf", "largest")
"""Numbers of one step, in float64. `norm` and `limit` are of the unscaled gradients, `largest` of the scaled ones.
`nan` and `inf` count elements of this rank."""

_FLOAT32 = torch.finfo(torch.float32)
_NAN, _INF = STATISTICS.index("nan"), STATISTICS.index("inf")


class StepInputs(NamedTuple):
    """The arguments of one step besides the gradients."""

    is_unscaled: bool = False
    """True if the gradients are already unscaled."""
    updates_scale: bool = True
    """True to update the scale after the step."""
    overflow: Tensor | None = None
    """0-d flag that `unscale_` computed, above 0 for NaN or Inf; None if it was not called."""
    loss: Tensor | None = None
    """0-d, the loss of this rank; None if it has none."""
    needs_statistics: bool = False
    """True if a subscriber reads the statistics of each gradient, which the decision may not need."""


@dataclass(frozen=True)
class Decision:
    """The choice to step or to skip, and the multiplier of the gradients.

    Tensors are on the device of the first parameter. Those of a recorded step are overwritten by the next one; `row`
    works for 1,024 steps and `statistics` for 64.
    """

    skip: Tensor
    """float32, 0-d: exactly 1 or exactly 0."""
    multiplier: Tensor | float
    """float64, 0-d: clip factor over scale; 1 for a skipped step. A Python number if the host decided."""
    divisor: Tensor | float
    """float32, 0-d, for optimizers that divide by `grad_scale`: 1 / multiplier, at most the largest float32; inf if the
    multiplier is 0. A Python number if the host decided."""
    overflow: Tensor
    """0-d, above 0 if the step is skipped for another reason than a clip policy: NaN, Inf, unscaled gradients that
    overflow, or ranks that differ."""
    row: Callable[[], Tensor]
    """Returns the numbers named by ROW, 1-d."""
    statistics: Callable[[], Tensor]
    """Returns the statistics of each gradient, [5, n]."""
    is_skipped: bool | None = None
    """The skip flag if the host decided; otherwise None."""
    clipping: Clipping | None = None
    """The result of the clip policies; None after a recorded step or a host step."""
    rank_rows: Tensor | None = None
    """[ranks, len(RANK_ROW)]; None for one rank."""

    @property
    def largest(self) -> Tensor:
        """0-d: largest magnitude of the scaled gradients."""
        return self.row()[ROW.index("largest")]


def as_clip_by_norm(policies: Sequence[object]) -> ClipByNorm | None:
    """Returns the policies as one ClipByNorm, or None if ClipByNorm cannot express them."""
    if not policies:
        return ClipByNorm(math.inf)
    return policies[0] if len(policies) == 1 and type(policies[0]) is ClipByNorm else None


def local_row(statistics: Tensor, order: float, layout: Layout | None, state: StepState, inputs: StepInputs) -> Tensor:
    """This rank's contribution to the decision: the numbers named by RANK_ROW.

    Args:
        statistics: [5, n] as `kernels.measure` returns them.
        order: p of the norm.
        layout: None for one rank.
        state: its scale and step number reveal ranks that diverged.
        inputs: loss and overflow flag.
    """
    loss, overflow = inputs.loss, inputs.overflow
    norms, largest, _, nan, inf = statistics.unbind()
    weights = 1.0 if layout is None else layout.weights(norms)
    power = norms.amax() if order == math.inf else ((norms**order) * weights).sum()
    is_bad = nan + inf > 0
    nonfinite = (nan + inf).sum() if overflow is None else (nan + inf).sum() + overflow.to(norms.device, norms.dtype)
    # argmax returns the first of equal values; in the flipped list that is the first gradient in backward order.
    first_bad = torch.where(is_bad.any(), len(is_bad) - 1.0 - is_bad.flip(0).to(torch.int8).argmax(), -1.0)
    numbers = {
        "power": torch.where(is_bad.any(), 0.0, power),
        "nonfinite": nonfinite,
        "first_bad": first_bad,
        "loss": torch.zeros_like(power) if loss is None else loss.to(power.device, power.dtype),
        "has_loss": torch.full_like(power, float(loss is not None)),
        "largest": largest.amax(),
        "scale": (state.scale if overflow is None else -state.scale).to(power.dtype),
        "step": (state.steps + 1).to(power.dtype),
    }
    return torch.stack([numbers[name] for name in RANK_ROW])


def decide(
    statistics: Tensor,
    tensors: Sequence[Tensor | None],
    clip: ClipStage,
    state: StepState,
    inputs: StepInputs,
    *,
    layout: Layout | None = None,
    max_gradient: float,
    has_float64: bool = False,
) -> Decision:
    """Decides one step with torch operations, without a host read.

    Args:
        statistics: [5, n], of the gradients, still scaled unless `inputs.is_unscaled`.
        tensors: the gradients.
        clip: the clip policies.
        state: scale and step number.
        inputs: the other arguments of the step.
        layout: ranks that decide together.
        max_gradient: the largest finite number that all of the gradients' dtypes can hold.
        has_float64: True if some gradients are float64, so that the norm is not rounded to float32.
    """
    order, wide, is_unscaled = clip.order, statistics.dtype, inputs.is_unscaled
    row = local_row(statistics, order, layout, state, inputs)
    rows = row.unsqueeze(0) if layout is None else gather_rows(row, layout)
    norm, nonfinite, largest = combine(rows, order)
    norm = norm if has_float64 else _round_to_float32(norm)
    broken = (nonfinite > 0) | ~torch.isfinite(norm)
    if layout is not None:
        broken = broken | disagreement(rows)
    gradient_scale = torch.ones_like(norm) if is_unscaled else state.scale.to(wide)
    unscaled = norm / gradient_scale
    clipping = clip.limit(statistics[0] / gradient_scale, unscaled, tensors, gradient_scale)
    multiplier = torch.where(broken, 1.0, clipping.factor) / gradient_scale
    # A multiplier above 1 can overflow the gradients' own format.
    too_large = (multiplier > 1.0) & (norm * multiplier > max_gradient)
    overflowed = broken | too_large | ~torch.isfinite(multiplier)
    skipped = overflowed | clipping.reject
    clipped = clipping.factor < 1.0
    for part in (clipping.factors, *(clipping.row_factors or ())):
        clipped = clipped if part is None else clipped | (part < 1.0).any()
    if clipping.value is not None:
        clipped = clipped | (largest / gradient_scale > clipping.value)
    nan, inf = statistics[_NAN].sum(), statistics[_INF].sum()
    nonfinite_norm = torch.where(nan > 0, math.nan, torch.full_like(norm, math.inf))
    numbers = {
        "skipped": skipped,
        "rejected": clipping.reject & ~overflowed,
        "scale": state.scale,
        "norm": torch.where(nonfinite > 0, nonfinite_norm, unscaled),
        "limit": clipping.bound,
        "clipped": clipped & ~skipped,
        "step": state.steps + 1,
        "nan": nan,
        "inf": inf,
        "largest": largest * state.scale if is_unscaled else largest,
    }
    values = torch.stack([numbers[name].to(wide) for name in ROW])
    multiplier = torch.where(skipped, 1.0, multiplier)
    return Decision(
        skip=skipped.to(torch.float32),
        multiplier=multiplier,
        # Clamped to the range of float32, so that the divisor is infinite only if the multiplier is 0.
        divisor=torch.where(multiplier > 0, (1.0 / multiplier).clamp(max=_FLOAT32.max), math.inf).to(torch.float32),
        overflow=overflowed,
        row=lambda: values,
        statistics=lambda: statistics,
        clipping=clipping,
        rank_rows=None if layout is None else rows,
    )


def _round_to_float32(norm: Tensor) -> Tensor:
    """Rounds once to float32 if that is a normal number, so that the norm does not depend on the number of ranks."""
    fits = (norm >= _FLOAT32.tiny) & (norm <= _FLOAT32.max)
    return torch.where(fits, norm.to(torch.float32).to(norm.dtype), norm)
