"""AdaGC: every gradient bounded by what is usual for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradilocks.clip.clip_policy import (
    ClipPolicy,
    Memory,
    check_count,
    check_fraction,
    check_max_norm,
    check_positive,
    clip_coefficient,
    pulled_down,
)
from gradilocks.clip.parts import among_all, at_places
from gradilocks.values import ClipLimit, Measurement, wide

__all__ = ["AdaGC"]


@dataclass(frozen=True)
class AdaGC(ClipPolicy):
    """Bounds the norm of each gradient by a multiple of its own usual norm.

        first `warmup` steps:  all together clipped to `warmup_norm`;  usual = min of the norms
        then, for each:        factor = min(1, ratio * usual / norm)
                               usual = beta usual + (1 - beta) factor norm

    A gradient of norm 0 says nothing of what is usual and is passed over, so that a layer that was
    idle for a step is not held at 0 for ever.

    Args:
        ratio: how far above the usual a norm may be.
        beta: how much of the usual stays at each step.
        warmup: so many taken steps are clipped together.
        warmup_norm: to this norm.

    Example:
        >>> AdaGC()
        AdaGC(ratio=1.05, beta=0.98, warmup=100, warmup_norm=1.0)

    Reference: Wang et al., "AdaGC: Improving Training Stability for Large Language Model
    Pretraining", 2025. Use it where single layers spike, which a norm over all of them hides.
    """

    ratio: float = 1.05
    beta: float = 0.98
    warmup: int = 100
    warmup_norm: float = 1.0
    apart = True
    by_parameter = ("usual",)

    def __post_init__(self) -> None:
        check_positive("ratio", self.ratio)
        check_fraction("beta", self.beta)
        check_count("warmup", self.warmup, lowest=1)
        check_max_norm(self.warmup_norm, name="warmup_norm")

    def start(self, device: torch.device, count: int) -> dict[str, Tensor]:
        usual = torch.full((count,), math.inf, dtype=wide(device), device=device)
        return {"count": torch.zeros((), dtype=torch.int64, device=device), "usual": usual}

    def limit(
        self, measurement: Measurement, scale: Tensor, state: Memory | None = None
    ) -> ClipLimit:
        assert state is not None
        norm, norms = measurement.norm / scale, measurement.tensors.norms / scale
        usual = at_places(state["usual"], measurement)
        warming = state["count"] < self.warmup
        together = clip_coefficient(norm, self.warmup_norm, measurement.nonfinite)
        bounds = torch.where(warming, math.inf, self.ratio * usual)
        factors = pulled_down(norms, bounds, measurement.nonfinite)
        coefficient = torch.where(warming, together, torch.ones_like(norm))
        clipped = (coefficient < 1.0) | (factors < 1.0).any()
        return ClipLimit(
            coefficient=coefficient,
            limit=torch.where(warming, self.warmup_norm, math.inf).to(norm.dtype),
            clipped=clipped.to(torch.float32),
            factors=factors,
        )

    def advance(
        self,
        state: Memory,
        measurement: Measurement,
        scale: Tensor,
        limit: ClipLimit,
        skip: Tensor,
    ) -> None:
        assert limit.factors is not None
        norms = measurement.tensors.norms / scale * limit.coefficient * limit.factors
        before = at_places(state["usual"], measurement)
        first = (state["count"] < self.warmup) | torch.isinf(before)
        after = torch.where(
            first, torch.minimum(before, norms), self.beta * before + (1.0 - self.beta) * norms
        )
        after = torch.where((skip == 0) & (norms > 0), after, before)
        state["usual"].copy_(among_all(state["usual"], after, measurement))
        state["count"].add_(skip == 0)
