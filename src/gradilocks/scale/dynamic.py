"""DynamicScale: the rule of torch's GradScaler, and with other settings that of other systems."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.policy import check_count, check_positive, number
from gradilocks.scale.scale_policy import (
    HIGHEST,
    LARGEST,
    SMALLEST,
    AdaptedScale,
    NoScale,
    ScalePolicy,
    ScaleRules,
    StaticScale,
    check_moving,
    new_state,
)
from gradilocks.values import ScaleState

__all__ = ["DynamicScale", "advance_dynamic", "resolve_scale"]

Device = torch.device  # For DynamicScale, where `torch` is a method.
_MOST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class DynamicScale(ScalePolicy):
    """Grows the scale while all is well and backs off when a gradient overflows.

        skipped step:  tracker = -delay;  hysteresis -= 1
                       if hysteresis <= 0 and the share of overflows >= tolerance:
                           scale = max(scale * backoff_factor, min_scale)
        taken step:    tracker += 1;  with consecutive_hysteresis, hysteresis is full again
                       if tracker >= growth_interval:  tracker = 0;  hysteresis is full again
                           if scale * growth_factor <= max_scale:  scale *= growth_factor

    With `hysteresis=1`, `delay=0` and `tolerance=0` this is the rule of torch's GradScaler, bounded
    at both ends. With more hysteresis, the scale survives that many non-finite steps less one
    before it first backs off.

    Args:
        init_scale: the scale of the first step.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: how many finite steps in a row it takes to grow.
        min_scale: the floor. There the scale stops shrinking and stays usable.
        max_scale: the ceiling. A growth that would pass it is not taken, so that a scale that is a
            power of two stays one.
        hysteresis: how many non-finite steps it takes to back off; refilled on growth.
        delay: so many more finite steps before the first growth after a start or an overflow.
        tolerance: back off only when the non-finite steps since the last time are this share of
            the steps since the scale last moved; 0 for every time.
        consecutive_hysteresis: whether every finite step refills the hysteresis, so that only
            non-finite steps in a row use it up.

    Example:
        >>> policy = DynamicScale(init_scale=8.0)
        >>> state = policy.start(torch.device("cpu"))
        >>> policy.advance(state, torch.tensor(1.0))
        >>> state.scale.item()
        4.0

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018. Use it for float16 when a
    run is to go as everybody's does; HeadroomScale loses fewer steps.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**32
    hysteresis: int = 1
    delay: int = 0
    tolerance: float = 0.0
    consecutive_hysteresis: bool = False

    @classmethod
    def torch(
        cls,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> DynamicScale:
        """As torch.amp.GradScaler: from 2^16, ×2 after 2000 finite steps, ÷2 at every overflow.
        (torch's has no floor; here it is the smallest normal float32.)

        Reference: torch/amp/grad_scaler.py. Use it to go on with a run of torch's scaler.
        """
        return cls(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=SMALLEST,
            max_scale=LARGEST,
        )

    @classmethod
    def megatron(
        cls,
        *,
        init_scale: float = 2.0**32,
        growth_interval: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
    ) -> DynamicScale:
        """As Megatron-LM: from 2^32 and never below 1; the second overflow backs off, and growth
        alone forgives the first.

        Reference: DynamicGradScaler in megatron/core/optimizer/grad_scaler.py. Use it to go on with
        a run of Megatron's, or where single overflows should not cost half the scale.
        """
        return cls(
            init_scale=init_scale,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=HIGHEST,
            hysteresis=hysteresis,
        )

    @classmethod
    def deepspeed(
        cls,
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> DynamicScale:
        """As DeepSpeed: from 2^16 and never below 1, with hysteresis; after a start or an overflow
        the first growth takes one finite step more. DeepSpeed ends a run that overflows at the
        floor; here the scale stays there, and `give_up_after` of a GradientControl ends the run.

        Reference: DynamicLossScaler in deepspeed/runtime/fp16/loss_scaler.py. Use it to go on with
        a run of DeepSpeed's.
        """
        return cls(
            init_scale=init_scale,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=HIGHEST,
            hysteresis=hysteresis,
            delay=1,
            consecutive_hysteresis=consecutive_hysteresis,
        )

    @classmethod
    def fairseq(
        cls,
        *,
        init_scale: float = 2.0**7,
        growth_interval: int = 2**14,
        tolerance: float = 0.0,
        min_loss_scale: float = 1e-4,
    ) -> DynamicScale:
        """As fairseq: from 2^7 and always above `min_loss_scale`; backs off when the share of
        overflows since the scale last moved reaches `tolerance`. Divide the interval by the number
        of data-parallel ranks and of accumulated batches, as fairseq does. fairseq ends the run
        where the scale would fall to `min_loss_scale`; here it stays above it, and `give_up_after`
        of a GradientControl ends the run.

        Reference: DynamicLossScaler in fairseq/optim/dynamic_loss_scaler.py. Use it to go on with a
        run of fairseq's.
        """
        check_positive("min_loss_scale", min_loss_scale)
        check_positive("init_scale", init_scale)
        lowest = number("init_scale", init_scale)
        while lowest / 2.0 > min_loss_scale and lowest / 2.0 >= SMALLEST:
            lowest /= 2.0
        return cls(
            init_scale=init_scale,
            growth_interval=growth_interval,
            min_scale=lowest,
            max_scale=HIGHEST,
            tolerance=tolerance,
        )

    def __post_init__(self) -> None:
        check_moving(self)
        for name, lowest in (("growth_interval", 1), ("hysteresis", 1), ("delay", 0)):
            check_count(name, getattr(self, name), lowest=lowest)
        if not 0.0 <= number("tolerance", self.tolerance) <= 1.0:
            raise ValueError(f"tolerance must lie between 0 and 1, got {self.tolerance}.")
        given: object = self.consecutive_hysteresis
        if not isinstance(given, bool):
            raise TypeError(
                f"consecutive_hysteresis must be True or False, got {type(given).__name__}."
            )
        if self.hysteresis > _MOST:
            raise ValueError(f"hysteresis must be at most {_MOST}, got {self.hysteresis}.")

    def start(self, device: Device) -> ScaleState:
        state = new_state(
            device, scale=self.init_scale, tracker=-self.delay, hysteresis=self.hysteresis
        )
        if self.tolerance:
            for name in ("since", "overflows"):
                state.more[name] = torch.zeros((), dtype=torch.int32, device=device)
        return state

    def advance(self, state: ScaleState, skip: Tensor, **unused: Tensor | None) -> None:
        advance_dynamic(
            state,
            skip,
            self._rules,
            delay=self.delay,
            tolerance=self.tolerance,
            consecutive=self.consecutive_hysteresis,
        )

    def rules(self) -> ScaleRules | None:
        more = self.delay or self.tolerance or self.consecutive_hysteresis
        return self._rules if type(self) is DynamicScale and not more else None

    @functools.cached_property
    def _rules(self) -> ScaleRules:
        return ScaleRules(
            moves=True,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            hysteresis=self.hysteresis,
        )

    def bounds(self) -> tuple[float, float]:
        return self.min_scale, self.max_scale


def advance_dynamic(
    state: ScaleState,
    skip: Tensor,
    rules: ScaleRules,
    *,
    delay: int = 0,
    tolerance: float = 0.0,
    consecutive: bool = False,
) -> None:
    """The rule of DynamicScale, also for a GradScaler, whose factors may change in mid-run.

    Args:
        state: moved on in place.
        skip: 0-d, 1 if the step was skipped, else 0.
        rules: factors, interval, bounds and hysteresis.
        delay: as DynamicScale's.
        tolerance: as DynamicScale's; `state.more` has "since" and "overflows" then.
        consecutive: as DynamicScale's `consecutive_hysteresis`.
    """
    device = state.scale.device
    backend = kernels.BACKENDS[device.type]
    alone = not (delay or tolerance or consecutive)
    if backend.BY_ADDRESS and alone and skip.device == device:
        try:
            cast("kernels.SettlingBackend", backend).advance(state, skip, rules.numbers())
        except kernels.KernelFailed:  # The user has been warned, and nothing has moved.
            pass
        else:
            return
    # The tracker is an int32: a longer interval is one that no run reaches.
    interval = min(rules.growth_interval, _MOST) if rules.growth_interval > 0 else math.inf
    skipped = skip > 0
    scale = state.scale.to(torch.float32 if device.type == "mps" else torch.float64)
    tracker = torch.where(skipped, -delay, state.growth_tracker + 1)
    full = tracker >= interval
    kept = rules.hysteresis if consecutive else state.hysteresis
    left = torch.where(skipped, state.hysteresis - 1, kept)
    backs_off = skipped & (left <= 0)
    if tolerance:
        since, overflows = state.more["since"] + 1, state.more["overflows"] + skipped
        share = overflows.to(scale.dtype) / since.to(scale.dtype)
        backs_off = backs_off & (share >= tolerance)
        state.more["since"].copy_(torch.where(backs_off | full, 0, since))
        state.more["overflows"].copy_(torch.where(backs_off, 0, overflows))
    grown = scale * rules.growth_factor
    grown = torch.where(grown <= rules.max_scale, grown, scale)
    scale = torch.where(backs_off, scale * rules.backoff_factor, scale)
    scale = torch.where(full, grown, scale).clamp(rules.min_scale, rules.max_scale)
    state.scale.copy_(scale)
    state.growth_tracker.copy_(torch.where(full, 0, tracker))
    state.hysteresis.copy_(torch.where(full, rules.hysteresis, left))


def resolve_scale(given: object, *, name: str = "scale") -> ScalePolicy:
    """The policy meant by GradientControl's `scale=`: a policy, "dynamic", a number or None."""
    if given is None:
        return NoScale()
    if given == "dynamic":
        return DynamicScale()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return StaticScale(float(given))
    if isinstance(given, type) or not (hasattr(given, "start") and hasattr(given, "advance")):
        came = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        raise TypeError(
            f"{name} must be 'dynamic', None, a number or a scale policy such as "
            f"DynamicScale(init_scale=1024.0), got {came}."
        )
    return given if isinstance(given, ScalePolicy) else AdaptedScale(given)
