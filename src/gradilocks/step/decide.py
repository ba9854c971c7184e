"""A Measurement, the scale and a ClipLimit in, a Decision out: step or skip, and one multiplier.

Skip is decided on the gradients as they stand, so on exactly what the optimizer would use.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradilocks.values import ClipLimit, Decision, Measurement

__all__ = ["decide"]


def decide(
    measurement: Measurement, scale: Tensor, limit: ClipLimit, *, roof: float | Tensor = math.inf
) -> Decision:
    """Decides one step, on the device.

    Args:
        measurement: of the gradients as they stand.
        scale: 0-d, what they carry and must lose.
        limit: for the unscaled gradients.
        roof: the largest number that the gradients' dtype holds, on all ranks that decide together.

    Returns:
        `skip`, exactly 0 or 1; `multiplier`, clip coefficient over scale; the bound on each element
        and the gradients' own factors if the limit has any. A multiplier that is not finite skips
        the step, and so does one above 1 that takes finite gradients beyond their dtype.
    """
    multiplier = limit.coefficient / scale
    too_large = (multiplier > 1.0) & (measurement.norm * multiplier > roof)
    unusable = too_large | torch.logical_not(torch.isfinite(multiplier))
    skip = torch.maximum(measurement.nonfinite, unusable.to(torch.float32))
    overflow = None
    if limit.reject is not None:
        overflow, skip = skip, torch.maximum(skip, limit.reject)
    skipped = skip > 0
    bound = None
    if limit.value is not None:
        # It holds for what the multiplier leaves, and is applied before that.
        bound = limit.value / multiplier.clamp(min=torch.finfo(multiplier.dtype).tiny)
        bound = torch.where(skipped, math.inf, bound)
    return Decision(
        skip=skip,
        multiplier=torch.where(skipped, torch.ones_like(multiplier), multiplier),
        bound=bound,
        overflow=overflow,
        factors=None if limit.factors is None else torch.where(skipped, 1.0, limit.factors),
        units=None if limit.units is None else [_unless(skipped, unit) for unit in limit.units],
    )


def _unless(skipped: Tensor, unit: Tensor | None) -> Tensor | None:
    return None if unit is None else torch.where(skipped, torch.ones_like(unit), unit)
