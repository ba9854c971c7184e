"""Drop-in for torch.amp.GradScaler: the same numbers, and a name for the overflow.

What differs from torch is what torch gets wrong: the skip flag is exactly 0 or 1, the scale has a
floor, a step that raises leaves nothing behind, a gradient is never unscaled twice, bfloat16
gradients work on every device, and a fused SGD whose first step is skipped starts clean.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks._torch import OptState, new_scaler_state
from gradilocks.clip import resolve_clip
from gradilocks.dropin.clips import Clipped, Clips
from gradilocks.dropin.flags import has_gradients, largest_flag
from gradilocks.dropin.governed import Governed, governed
from gradilocks.dropin.looked import Looked
from gradilocks.dropin.once import UnscaledOnce
from gradilocks.dropin.saving import Saving
from gradilocks.dropin.state import set_scale
from gradilocks.eager import eager, users_line
from gradilocks.scale import LARGEST, SMALLEST, advance_dynamic
from gradilocks.step.gradients import Names
from gradilocks.step.judge import held_if
from gradilocks.step.outcome import Findings
from gradilocks.step.update import (
    handing_over,
    must_skip_on_host,
    takes_decision,
    takes_scaler,
)
from gradilocks.values import ScaleState, moved

__all__ = ["GradScaler"]


class GradScaler(Saving):
    """torch.amp.GradScaler, with the same arguments and the same results.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale: the floor under the scale; by default the smallest normal float32.
        max_scale: the ceiling; a growth that would pass it is not taken.
        model: the module that names the parameters in `outcome` and in error messages.
        process_group: the ranks that must skip together when gradients are sharded plain tensors,
            besides those that share a mesh of DTensors.
        policy: a scale policy in place of torch's rule and its numbers, such as HeadroomScale().
        clip: a number or a clip policy; `step` unscales and clips each optimizer's gradients, and
            with `enabled=False` it clips them as they are.

    Example:
        >>> scaler = GradScaler("cpu", model=model)
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.outcome.culprits
        ('head.weight',)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = SMALLEST,
        max_scale: float = LARGEST,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        process_group: Any = None,
        policy: object = None,
        clip: object = None,
    ) -> None:
        if isinstance(device, nn.Module):
            raise TypeError(
                "device must be a str such as 'cuda' or 'cpu', got a module. Write "
                "GradScaler('cuda', model=model)."
            )
        for name, number in (("init_scale", init_scale), ("min_scale", min_scale)):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise TypeError(f"{name} must be a number, got {type(number).__name__}.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().__init__(
                device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
            )
        for warning in caught:  # Again, so that it points at the caller's line and not at ours.
            warnings.warn(warning.message, warning.category, stacklevel=2)
        if self._enabled and not SMALLEST <= min_scale <= init_scale <= max_scale <= LARGEST:
            raise ValueError(
                "init_scale must be positive and finite and lie between min_scale and max_scale, "
                f"got init_scale={init_scale}, min_scale={min_scale}, max_scale={max_scale}."
            )
        self._min_scale, self._max_scale = float(min_scale), float(max_scale)
        Names(model, ())  # Refuses what is no model, now rather than at the first overflow.
        self._model = model
        self._process_group = process_group
        if process_group is not None and not (policy is None and clip is None):
            raise ValueError(
                "policy= and clip= of a GradScaler do not know process_group=: a rank would clip "
                "and scale by its own part of the gradients. Use GradientControl(process_group=)."
            )
        self._governed = governed(policy)
        self._clips = None if clip is None else Clips(resolve_clip(clip), model)
        if self._governed is not None:
            self._refuse_both(
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                min_scale=min_scale,
                max_scale=max_scale,
            )
            if self._enabled:
                self._follow(self._governed.policy)
        self._outcome: Findings | None = None
        self._hysteresis: Tensor | None = None
        self._start_iteration()

    @property
    def outcome(self) -> Findings | None:
        """What became of the latest `step`, or None before the first. Reading it waits."""
        return self._outcome

    @eager
    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or every tensor of an iterable, by the scale; fp16 in float32."""
        if not self._enabled:
            return outputs
        self._once.note_scaled(outputs)
        return super().scale(_widened(outputs, self._governed))

    @eager
    def unscale_(self, optimizer: Any) -> None:
        """Divides the optimizer's gradients by the scale, looking for NaN and Inf on the way."""
        super().unscale_(optimizer)

    @eager
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Unscales if that has not been done, then steps unless a gradient is NaN or Inf.

        Args:
            optimizer: any object with `param_groups` and `step`.
            args: handed to `optimizer.step`.
            kwargs: handed to `optimizer.step`; `closure` is refused, as in torch.

        Returns:
            What `optimizer.step` returns, or None when the host knows that it was skipped.
        """
        if not self._enabled:
            return self._step_disabled(optimizer, args, kwargs)
        if "closure" in kwargs:
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled. "
                "gradilocks.GradientControl.step(closure) is."
            )
        self._check_scale_growth_tracker("step")
        self._held[id(optimizer)] = optimizer
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if self._clips is not None:
            self._clip(optimizer, state)
        if takes_decision(optimizer) or takes_scaler(optimizer):
            returned = self._step_fused(optimizer, state, args, kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not state["found_inf_per_device"]:
                raise AssertionError(
                    "No inf checks were recorded for this optimizer. None of its parameters has a "
                    "gradient: was backward() called, and does the loss depend on them?"
                )
            flag = self._flag(optimizer, state)
            self._tell(optimizer, flag)
            # Under a rejection the flags for `update` stay as they are.
            asked = {**state, "found_inf_per_device": {flag.device: flag}}
            returned = self._maybe_opt_step(optimizer, asked, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        if self._clips is not None:
            self._clips.learn(optimizer)
        return returned

    @eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale on, or sets it to `new_scale`; begins the next iteration."""
        if not self._enabled:
            self._start_iteration()
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            lowest, highest = self._min_scale, self._max_scale
            if self._governed is not None:
                lowest, highest = self._governed.policy.bounds()
            set_scale(scale, new_scale, device=self._device, lowest=lowest, highest=highest)
        else:
            found = [
                moved(flag, scale.device)
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            if not found:
                raise AssertionError(
                    "No inf checks were recorded prior to update. Call scaler.step(optimizer) on "
                    "an optimizer whose parameters have gradients first."
                )
            self._advance(scale, tracker, largest_flag(found))
        self._per_optimizer_states = defaultdict(new_scaler_state)
        self._start_iteration()

    def _advance(self, scale: Tensor, tracker: Tensor, flag: Tensor) -> None:
        """Moves the scale on, unless a clip has rejected a step: nothing overflowed."""
        flags = [each.rejected for each in self._clipped.values() if each.rejected is not None]
        rejected = None
        if flags:  # One that overflowed, beside it, does count.
            rejected = largest_flag(flags)
            rejected = rejected * (1.0 - moved(flag, rejected.device))
        if self._governed is not None and self._governed.state is not None:
            with held_if(rejected, self._governed.state):
                self._governed.advance(flag)
            return
        if self._hysteresis is None or self._hysteresis.device != tracker.device:
            self._hysteresis = torch.ones_like(tracker)
        state = ScaleState(scale, tracker, self._hysteresis)  # Of 1: any skip backs off.
        with held_if(rejected, state):
            advance_dynamic(
                state,
                flag,
                growth_factor=self._growth_factor,
                backoff_factor=self._backoff_factor,
                growth_interval=self._growth_interval,
                min_scale=self._min_scale,
                max_scale=self._max_scale,
            )

    def _start_iteration(self) -> None:
        for each in (self._governed, self._clips):
            if each is not None:
                each.forget()
        self._found: dict[int, Looked] = {}
        self._clipped: dict[int, Clipped] = {}
        self._held: dict[int, Any] = {}  # Alive until `update`: no id means two optimizers.
        self._once = UnscaledOnce()
        self._only_looking: Tensor | None = None

    def _step_disabled(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> float | None:
        """Without scale and check, as torch has it; a clip policy is obeyed."""
        self._outcome = Looked.nothing()
        if self._clips is None:
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        if args or "closure" in kwargs:
            raise RuntimeError(
                "clip= cannot reach gradients that a closure makes inside optimizer.step(). "
                "gradilocks.GradientControl(scale=None, clip=...).step(closure) can."
            )
        self._clip(optimizer, {"stage": OptState.READY})
        clipped = self._clipped.pop(id(optimizer), None)
        returned: float | None = None
        if clipped is None or clipped.rejected is None:
            returned = optimizer.step(**kwargs)
        else:
            self._outcome = Looked.nothing(skip=clipped.skip + clipped.rejected)
            if takes_decision(optimizer):
                one = torch.ones_like(clipped.skip)
                if not must_skip_on_host(optimizer, clipped.skip, one):
                    with handing_over(
                        optimizer, grad_scale=None, found_inf=clipped.skip, consume=True
                    ):
                        returned = optimizer.step(**kwargs)
            else:
                asked = {"found_inf_per_device": {clipped.skip.device: clipped.skip}}
                returned = self._maybe_opt_step(optimizer, asked, **kwargs)
        self._clips.learn(optimizer)
        return returned

    def _step_fused(
        self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> float | None:
        if takes_scaler(optimizer):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed "
                "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
                "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
                "directly.",
                FutureWarning,
                stacklevel=users_line(),
            )
            kwargs["grad_scaler"] = self
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        scale, _ = self._check_scale_growth_tracker("step")
        unscaled = state["stage"] is OptState.UNSCALED
        if not unscaled:
            names = Names(self._model, (optimizer,))
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._once.refuse_twice(params, names)
            self._check_inf_per_device(optimizer)
        flags = list(state["found_inf_per_device"].values())
        if not flags and has_gradients(optimizer):
            raise AssertionError(
                "No inf checks were recorded for this optimizer. Its gradients came after "
                "unscale_() and still carry the scale: call backward() before unscale_()."
            )
        found_inf = torch.zeros_like(scale)
        if flags:
            found_inf = moved(self._flag(optimizer, state), scale.device)
        if flags:
            self._tell(optimizer, found_inf)
        if isinstance(optimizer, torch.optim.SGD):
            multiplier = torch.ones_like(scale) if unscaled else torch.reciprocal(scale)
            if must_skip_on_host(optimizer, found_inf, multiplier):
                return None
        with handing_over(
            optimizer, grad_scale=None if unscaled else scale, found_inf=found_inf, consume=True
        ):
            returned: float | None = optimizer.step(*args, **kwargs)
        if id(optimizer) in self._found and not unscaled:
            self._once.mark(self._found[id(optimizer)].params())
        return returned

    def _tell(self, optimizer: Any, skip: Tensor) -> None:
        """Keeps what this step found, for `outcome`; everything stays on the device."""
        looked = self._found.get(id(optimizer))
        if looked is not None and self._scale is not None:
            clipped = self._clipped.get(id(optimizer))
            if clipped is not None and clipped.rejected is not None:  # 2 says by whom.
                skip = skip + moved(clipped.rejected, skip.device)
            self._outcome = looked.findings(
                optimizer, skip=skip, scale=self._scale, model=self._model
            )


def _widened(outputs: Any, governed: Governed | None) -> Any:
    """fp16 as float32; the policy takes note of each loss as it comes by."""
    if isinstance(outputs, Tensor):
        if governed is not None:
            governed.note_loss(outputs)
        return outputs.float() if outputs.dtype is torch.float16 else outputs
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(_widened(each, governed) for each in outputs)
    if isinstance(outputs, Iterable):
        return (_widened(each, governed) for each in outputs)
    return outputs
