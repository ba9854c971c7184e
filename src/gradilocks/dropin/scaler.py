"""Drop-in for torch.amp.GradScaler: the same numbers, fewer passes, and a name for the overflow.

What differs from torch is what torch gets wrong: the skip flag is exactly 0 or 1, the scale has a
floor, a step that raises leaves nothing behind, a gradient is never unscaled twice, bfloat16
gradients work on every device, and a fused SGD whose first step is skipped starts clean.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradilocks import kernels
from gradilocks.dropin import known
from gradilocks.dropin.state import check_state
from gradilocks.errors import SharedParameter
from gradilocks.gradients import Gradients, Names, collect
from gradilocks.measure import total_norm
from gradilocks.record import Outcome
from gradilocks.scale import LARGEST, SMALLEST, advance_dynamic
from gradilocks.update import handing_over, lacks_momentum, takes_scaler
from gradilocks.values import ScaleState, Statistics, StepRecord

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, with the same arguments and the same results.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale: the floor under the scale; by default the smallest normal float32.
        max_scale: the ceiling; a growth that would pass it is not taken.
        model: the module that names the parameters in `outcome` and in error messages.
        process_group: the ranks that must skip together when gradients are sharded plain tensors.

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
    ) -> None:
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
        self._outcome: Outcome | None = None
        self._start_iteration()

    @property
    def outcome(self) -> Outcome | None:
        """What became of the latest `step`, or None before the first. Reading it waits."""
        return self._outcome

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or every tensor of an iterable, by the scale; fp16 in float32."""
        if not self._enabled:
            return outputs
        self._scale_calls += 1
        return super().scale(_widened(outputs))

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
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        if "closure" in kwargs:
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled. "
                "gradilocks.GradientControl.step(closure) is."
            )
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            returned = self._step_fused(optimizer, state, args, kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not state["found_inf_per_device"]:
                raise AssertionError(
                    "No inf checks were recorded for this optimizer. None of its parameters has a "
                    "gradient: was backward() called, and does the loss depend on them?"
                )
            self._tell(optimizer, state)
            returned = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        known.forget()
        return returned

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale on, or sets it to `new_scale`; begins the next iteration."""
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        else:
            found = [
                flag.to(scale.device, non_blocking=True)
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            if not found:
                raise AssertionError(
                    "No inf checks were recorded prior to update. Call scaler.step(optimizer) on "
                    "an optimizer whose parameters have gradients first."
                )
            advance_dynamic(
                ScaleState(scale, tracker, torch.ones_like(tracker)),
                _any(found),
                growth_factor=self._growth_factor,
                backoff_factor=self._backoff_factor,
                growth_interval=self._growth_interval,
                min_scale=self._min_scale,
                max_scale=self._max_scale,
            )
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._start_iteration()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of this class or of torch's; changes nothing if it is bad."""
        if self._enabled and len(state_dict):
            check_state(state_dict, lowest=self._min_scale, highest=self._max_scale)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        # What belongs to this process or to a step that is over: names, ranks, the last outcome.
        state.update(_model=None, _process_group=None, _outcome=None, _found={}, _done={})
        return state

    def _start_iteration(self) -> None:
        self._scale_calls = 0
        self._found: dict[int, tuple[Gradients, list[Statistics]]] = {}
        self._done: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiplies the gradients by `inv_scale` while measuring them; a flag a device."""
        names = Names(self._model, (optimizer,))
        found = self._gradients(optimizer, names, allow_fp16)
        self._refuse_twice(found, names)
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in found.tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        flags: dict[torch.device, Tensor] = {}
        statistics = []
        with torch.no_grad():
            for device, tensors in by_device.items():
                serve = kernels.for_device(device)
                if allow_fp16:  # The inverse is 1: the caller only wants the flag.
                    measured = serve.measure(tensors)
                else:
                    measured = serve.multiply_and_measure_(tensors, inv_scale.to(device))
                broken = ((measured.nan + measured.inf).sum() > 0).to(torch.float32)
                flags[device] = torch.maximum(broken, found_inf.to(device))
                statistics.append(measured)
        self._agree_across_ranks(flags, found, found_inf)
        if not allow_fp16:
            self._mark_done(found)
            if len(by_device) == 1:
                known.remember(found.tensors, statistics[0])
        self._found[id(optimizer)] = found, statistics
        return flags

    def _gradients(self, optimizer: Any, names: Names, allow_fp16: bool) -> Gradients:
        params: list[Tensor] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                if not isinstance(param, Tensor):
                    raise AssertionError(
                        f"expected param to be torch.Tensor, got {type(param).__name__}"
                    )
                if not allow_fp16 and param.grad is not None and param.grad.dtype is torch.float16:
                    raise ValueError(
                        f"Attempting to unscale FP16 gradients. {names(param)} is float16: keep "
                        "the parameters in float32 and run the forward pass under torch.autocast, "
                        "or use an optimizer with fused=True and let scaler.step() unscale inside "
                        "it."
                    )
                params.append(param)
        return collect(params, name=names)

    def _refuse_twice(self, found: Gradients, names: Names) -> None:
        """A gradient that this iteration has unscaled must not be divided by the scale again.

        The same tensor is only safe to unscale again if it has been written to and another loss
        has been scaled since.
        """
        for param in found.params:
            done = self._done.get(id(param))
            if done is None or param.grad is None:
                continue
            before, version, calls = done
            if before() is param.grad and (
                param.grad._version == version or calls == self._scale_calls
            ):
                raise SharedParameter(
                    f"the gradient of {names(param)} has been unscaled already since the last "
                    "update() and would be divided by the scale twice. Put each parameter into one "
                    "optimizer, and give unscale_() and step() the same optimizer object."
                )

    def _mark_done(self, found: Gradients) -> None:
        for param in found.params:
            grad = param.grad
            if grad is not None:
                self._done[id(param)] = weakref.ref(grad), grad._version, self._scale_calls

    def _agree_across_ranks(
        self, flags: dict[torch.device, Tensor], found: Gradients, found_inf: Tensor
    ) -> None:
        if self._process_group is None and found.replicas is None:
            return
        import torch.distributed as dist

        if not flags:
            flags[found_inf.device] = found_inf.clone()
        together = _any(list(flags.values()))
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._process_group)
        for device in flags:
            flags[device] = together.to(device)

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
                stacklevel=3,
            )
            return optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[no-any-return]
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        assert scale is not None
        flags = [f.to(scale.device, non_blocking=True) for f in state["found_inf_per_device"].values()]
        found_inf = _any(flags) if flags else torch.zeros_like(scale)
        self._tell(optimizer, state)
        if lacks_momentum(optimizer) and found_inf.item():
            return None
        unscaled = state["stage"] is OptState.UNSCALED
        with handing_over(
            optimizer, grad_scale=None if unscaled else scale, found_inf=found_inf, consume=True
        ):
            returned: float | None = optimizer.step(*args, **kwargs)
        if id(optimizer) in self._found:
            self._mark_done(self._found[id(optimizer)][0])
        return returned

    def _tell(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Keeps what this step found, for `outcome`; everything stays on the device."""
        if id(optimizer) not in self._found or self._scale is None:
            return
        found, parts = self._found[id(optimizer)]
        if len(parts) != 1:
            self._outcome = None
            return
        (measured,) = parts
        unscaled = state["stage"] is OptState.UNSCALED
        skip = _any(list(state["found_inf_per_device"].values()))
        norm = total_norm(measured.norms, 2.0)
        record = StepRecord(
            step=0,
            scale=self._scale.clone(),
            norm=norm if unscaled else norm / self._scale.to(norm.device),
            limit=torch.full_like(norm, math.inf),
            clipped=torch.zeros_like(skip),
            skip=skip,
            loss_nonfinite=torch.zeros_like(skip),
            nan=measured.nan,
            inf=measured.inf,
        )
        names, params = Names(self._model, (optimizer,)), found.params
        self._outcome = Outcome(record, lambda: names.of(params))

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, (int, float)):
            if not 0.0 < new_scale < math.inf:
                raise ValueError(f"new_scale must be positive and finite, got {new_scale}.")
            scale.fill_(min(max(new_scale, self._min_scale), self._max_scale))
            return
        reason = (
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
        if (
            new_scale.device.type != self._device
            or new_scale.numel() != 1
            or new_scale.requires_grad
        ):
            raise AssertionError(
                f"{reason} Got {new_scale.numel()} element(s) on {new_scale.device.type}, "
                f"requires_grad={new_scale.requires_grad}."
            )
        scale.copy_(torch.clamp(new_scale.reshape(()), self._min_scale, self._max_scale))


def _any(flags: list[Tensor]) -> Tensor:
    """Exactly 1 if any flag is set, exactly 0 if none is; a sum of flags would be neither."""
    together = flags[0].clone()
    for flag in flags[1:]:
        together = torch.maximum(together, flag.to(together.device))
    return (together > 0).to(torch.float32)


def _widened(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype is torch.float16 else outputs
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(_widened, outputs))
    if isinstance(outputs, Iterable):
        return map(_widened, outputs)
    return outputs
