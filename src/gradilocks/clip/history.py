"""Policies that learn what norms are usual: QuantileClip, ZScoreClip, SkipSpikes, AdaGC.

What they remember moves on the device. A step that is skipped, whoever skipped it, leaves it as it
was, so neither a NaN nor a rejected norm ever enters it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradilocks.clip.clip_policy import (
    NOTHING,
    ClipPolicy,
    Memory,
    check_max_norm,
    clip_coefficient,
    moving_coefficient,
)
from gradilocks.policy import check_count, check_fraction, check_positive
from gradilocks.values import ClipLimit, Measurement, moved, wide

__all__ = ["AdaGC", "QuantileClip", "SkipSpikes", "ZScoreClip"]


class _Windowed(ClipPolicy):
    """Of a policy that remembers the last `window` norms, as they were before clipping."""

    window: int

    def start(self, device: torch.device, count: int) -> dict[str, Tensor]:
        return {
            "norms": torch.zeros(self.window, dtype=wide(device), device=device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }

    def advance(
        self, state: Memory, measurement: Measurement, scale: Tensor, limit: ClipLimit, skip: Tensor
    ) -> None:
        norm = measurement.norm / scale
        values, _ = _entered(state, norm)
        # Finite gradients can have a norm beyond float64.
        taken = (skip == 0) & torch.isfinite(norm)
        state["norms"].copy_(torch.where(taken, values, state["norms"]))
        state["count"].add_(taken)


@dataclass(frozen=True)
class QuantileClip(_Windowed):
    """Bounds the norm by a quantile of the norms so far, this one included.

        limit = quantile(the last `window` norms, this one included, q)

    The quantile is interpolated between neighbours, as NumPy's default does. What is remembered is
    the norm before clipping. A low quantile clips nearly every step: 0.1 is what the authors use.

    Args:
        quantile: q, between 0 and 1.
        window: how many norms are remembered.
        warmup: so many taken steps are watched before anything is clipped.

    Example:
        >>> QuantileClip(0.1, window=1000)
        QuantileClip(quantile=0.1, window=1000, warmup=0)

    Reference: Seetharaman et al., "AutoClip: Adaptive Gradient Clipping for Source Separation
    Networks", 2020, which remembers all norms. Use it where a good bound is not known beforehand.
    """

    quantile: float = 0.1
    window: int = 1000
    warmup: int = 0

    def __post_init__(self) -> None:
        check_fraction("quantile", self.quantile)
        check_count("window", self.window, lowest=2)
        check_count("warmup", self.warmup, lowest=0)

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        norm = measurement.norm / scale
        values, filled = _entered(state, norm)
        ordered = torch.where(_places(values) < filled, values, math.inf).sort().values
        place = self.quantile * (filled - 1).to(norm.dtype)
        below = place.floor()
        low = ordered.gather(0, below.to(torch.int64).reshape(1))[0]
        high = ordered.gather(0, place.ceil().to(torch.int64).reshape(1))[0]
        bound = low + (place - below) * (high - low)
        bound = torch.where(state["count"] < self.warmup, math.inf, bound)
        return _bounded(norm, bound, measurement.nonfinite)


@dataclass(frozen=True)
class ZScoreClip(ClipPolicy):
    """Pulls a norm that stands out back towards the usual: the further it stands out, the more.

        z = (norm - mean) / (std + 1e-6)
        if z > threshold:  limit = mean + threshold^2 / z * std
        x = min(norm, limit);  mean = alpha mean + (1 - alpha) x
                               var  = alpha var  + (1 - alpha) (x - mean)^2

    Mean and variance start as those of the first `warmup` taken steps.

    Args:
        threshold: how many standard deviations are usual.
        alpha: how much of mean and variance stays at each step.
        warmup: so many taken steps are watched before anything is clipped.

    Example:
        >>> ZScoreClip(threshold=2.5)
        ZScoreClip(threshold=2.5, alpha=0.97, warmup=25)

    Reference: Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", 2025. Use it
    where the usual norm drifts over a run and spikes stand out from it.
    """

    threshold: float = 2.5
    alpha: float = 0.97
    warmup: int = 25

    def __post_init__(self) -> None:
        check_positive("threshold", self.threshold)
        check_fraction("alpha", self.alpha)
        check_count("warmup", self.warmup, lowest=1)

    def start(self, device: torch.device, count: int) -> dict[str, Tensor]:
        def zero(dtype: torch.dtype) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        return {"count": zero(torch.int64), "mean": zero(wide(device)), "var": zero(wide(device))}

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        norm = measurement.norm / scale
        deviation = state["var"].clamp(min=0.0).sqrt()
        z = (norm - state["mean"]) / (deviation + 1e-6)
        bound = state["mean"] + self.threshold**2 / z * deviation
        out = (z > self.threshold) & (state["count"] >= self.warmup)
        return _bounded(norm, torch.where(out, bound, math.inf), measurement.nonfinite)

    def advance(
        self, state: Memory, measurement: Measurement, scale: Tensor, limit: ClipLimit, skip: Tensor
    ) -> None:
        taken = (skip == 0) & torch.isfinite(measurement.norm)
        seen = torch.minimum(measurement.norm / scale, limit.limit)
        count, mean, var = state["count"], state["mean"], state["var"]
        number = (count + 1).to(mean.dtype)
        warm = count >= self.warmup
        keep = torch.where(warm, self.alpha, 1.0 - 1.0 / number)
        new_mean = keep * mean + (1.0 - keep) * seen
        # In warm-up the variance of all so far, after it of an average that forgets.
        apart = torch.where(warm, seen - new_mean, seen - mean)
        new_var = keep * var + (1.0 - keep) * (seen - new_mean) * apart
        mean.copy_(torch.where(taken, new_mean, mean))
        var.copy_(torch.where(taken, new_var, var))
        count.add_(taken)


@dataclass(frozen=True)
class SkipSpikes(_Windowed):
    """Skips a step whose norm is far above those of the last steps that were taken.

        bound = mean + sigmas * std of the last `window` accepted norms
        skip unless norm <= bound * (1 + 1e-6)

    The optimizer and the parameters stay as they were, as with a NaN. `std` is the sample's; of
    norms that never vary it is 0, and what rounding makes of such a norm is no spike.

    Args:
        sigmas: how many standard deviations above the mean are still taken.
        window: how many accepted norms are remembered.
        at_least: so many are needed before a step can be skipped.

    Example:
        >>> SkipSpikes()
        SkipSpikes(sigmas=6.0, window=128, at_least=64)

    Reference: OLMo's SkipStepOptimizer and axlearn's skip_and_clip_by_global_norm. Use it against
    single bad batches. A run whose norms jump for good would be skipped for ever, so watch
    `outcome.rejected`.
    """

    sigmas: float = 6.0
    window: int = 128
    at_least: int = 64

    def __post_init__(self) -> None:
        check_positive("sigmas", self.sigmas)
        check_count("window", self.window, lowest=2)
        check_count("at_least", self.at_least, lowest=2)
        if self.at_least > self.window:
            raise ValueError(
                f"at_least must not be above window, got at_least={self.at_least} and "
                f"window={self.window}: so many would never be remembered."
            )

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        norm = measurement.norm / scale
        values, count = state["norms"], state["count"]
        there = _places(values) < count
        number = count.clamp(max=self.window).to(values.dtype)
        mean = torch.where(there, values, 0.0).sum() / number.clamp(min=1.0)
        squares = torch.where(there, (values - mean) ** 2, 0.0).sum()
        bound = mean + self.sigmas * (squares / (number - 1.0).clamp(min=1.0)).sqrt()
        bound = torch.where(count >= self.at_least, bound, math.inf)
        # Written so that a NaN is rejected, and a norm that never varies is not.
        accepted = norm <= bound * (1.0 + 1e-6)
        nothing = torch.zeros_like(measurement.nonfinite)
        return ClipLimit(
            coefficient=torch.ones_like(norm),
            limit=bound,
            clipped=nothing,
            reject=torch.where(accepted, nothing, torch.ones_like(nothing)),
        )


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

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        norm, norms = measurement.norm / scale, measurement.tensors.norms / scale
        usual = state["usual"][_with_gradients(state["usual"], measurement)]
        warming = state["count"] < self.warmup
        together = clip_coefficient(norm, self.warmup_norm, measurement.nonfinite)
        bounds = torch.where(warming, math.inf, self.ratio * usual)
        factors = moving_coefficient(norms, bounds, measurement.nonfinite)
        coefficient = torch.where(warming, together, torch.ones_like(norm))
        clipped = (coefficient < 1.0) | (factors < 1.0).any()
        return ClipLimit(
            coefficient=coefficient,
            limit=torch.where(warming, self.warmup_norm, math.inf).to(norm.dtype),
            clipped=clipped.to(torch.float32),
            factors=factors,
        )

    def advance(
        self, state: Memory, measurement: Measurement, scale: Tensor, limit: ClipLimit, skip: Tensor
    ) -> None:
        assert limit.factors is not None
        norms = measurement.tensors.norms / scale * limit.coefficient * limit.factors
        here = _with_gradients(state["usual"], measurement)
        before = state["usual"][here]
        first = (state["count"] < self.warmup) | torch.isinf(before)
        after = torch.where(
            first, torch.minimum(before, norms), self.beta * before + (1.0 - self.beta) * norms
        )
        after = torch.where((skip == 0) & (norms > 0), after, before)
        state["usual"].index_copy_(0, here, after)
        state["count"].add_(skip == 0)


def _bounded(norm: Tensor, limit: Tensor, nonfinite: Tensor) -> ClipLimit:
    """The ClipLimit that bounds the norm of all gradients together by a limit that moves."""
    coefficient = moving_coefficient(norm, limit, nonfinite)
    return ClipLimit(
        coefficient=coefficient, limit=limit, clipped=(coefficient < 1.0).to(torch.float32)
    )


def _places(values: Tensor) -> Tensor:
    return torch.arange(values.numel(), device=values.device)


def _entered(state: Memory, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The window with `norm` in the place of the oldest, and how many there are then."""
    values, count = state["norms"], state["count"]
    here = _places(values) == count % values.numel()
    return torch.where(here, norm.to(values.dtype), values), (count + 1).clamp(max=values.numel())


def _with_gradients(every: Tensor, measurement: Measurement) -> Tensor:
    """The places, among all parameters, of those that have a gradient."""
    scene = measurement.scene
    if scene is None or len(scene.places) == every.numel():
        return _places(every)
    return moved(torch.tensor(list(scene.places), dtype=torch.int64), every.device)
