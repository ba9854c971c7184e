"""`torch.amp.GradScaler` without torch's defects.

torch's class touches gradients in one method, `_unscale_grads_`, which `unscale_` and `step` call. torch's method is
called where it is correct and replaced where it is not. `step` repeats torch's code for optimizers that skip by
themselves; everything else extends torch's methods.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks import kernels
from gradilocks.checks import check_number
from gradilocks.names import Names
from gradilocks.ranks.layout import collective_device, meshes_of
from gradilocks.step.gradients import by_device, check_float16, dense_grads, parameters, params_without_momentum
from gradilocks.torch_private import OptState, supports_amp_scaling

_FLOAT32 = torch.finfo(torch.float32)
_TORCH_DTYPES = {
    "cpu": {torch.float32, torch.float64, torch.float16, torch.bfloat16},
    "cuda": {torch.float32, torch.float64, torch.float16},
}
"""Dtypes that torch's own pass over the gradients supports. 148 tensors of 1,000 elements on a CPU take 0.21 ms in
that pass and 0.28 ms in the C extension."""

_dtype_of = attrgetter("dtype")
Models = nn.Module | Mapping[str, nn.Module] | None


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with bounds for the scale and the names of overflowing parameters.

    Differences from torch's:

    - The flag of an optimizer is one tensor, exactly 0 or 1, for all devices and all ranks of a DTensor's mesh.
    - The scale stays within [min_scale, max_scale], and still grows after the growth interval was lowered below the
      growth tracker.
    - A step that raises does not leave `grad_scale` or `found_inf` on the optimizer.
    - Fused SGD discards the uninitialized momentum buffers of a skipped first step.
    - float16 losses are scaled in float32. Complex and bfloat16 gradients work on every device.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        model: a module, or a mapping from prefixes to modules, that names parameters in `outcome.culprits`.
        min_scale: lower bound of the scale, at least 2**-126.
        max_scale: upper bound of the scale.

    Examples:
        >>> scaler = GradScaler("cpu", model=model)
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.outcome.skipped, scaler.outcome.culprits
        (False, ())
        >>> scaler.update()
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
        model: Models = None,
        min_scale: float = _FLOAT32.tiny,
        max_scale: float = _FLOAT32.max,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if enabled:
            check_number("min_scale", min_scale, at_least=_FLOAT32.tiny)
            check_number("max_scale", max_scale, at_least=min_scale, at_most=_FLOAT32.max)
            check_number("init_scale", init_scale, at_least=min_scale, at_most=max_scale)
        Names(model, ())  # Rejects anything but modules.
        self._model = model
        self._min_scale, self._max_scale = min_scale, max_scale
        self._updates = 0
        self._outcome: ScalerOutcome | None = None

    @property
    def outcome(self) -> ScalerOutcome | None:
        """The result of the most recent `step`; None before the first one and for a disabled scaler."""
        return self._outcome

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or the tensors of an iterable, by the scale. See torch."""
        if self._outcome is not None:
            self._outcome.forget_gradients()
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            # A float16 tensor that is not 0-d would stay float16: 1 * 65536 is inf.
            return super().scale(outputs.float() if outputs.dtype is torch.float16 else outputs)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        return map(self.scale, outputs) if isinstance(outputs, Iterable) else super().scale(outputs)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        device, params = found_inf.device, parameters([optimizer])
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        meshes = meshes_of(params) if is_distributed else []
        torch_dtypes = _TORCH_DTYPES["cpu" if device.type == "cpu" else "cuda"]
        if not meshes and torch_dtypes.issuperset(map(_dtype_of, params)):
            try:
                flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            except ValueError:  # float16 gradients; nothing was changed yet.
                self._check_float16(optimizer)
                raise
        else:
            flags = self._unscale_by_kernels(optimizer, inv_scale, allow_fp16)
        if meshes:
            flag = _largest_over_ranks(_largest_flag(flags, found_inf), meshes, params)
            return {device: flag.to(device)}
        # torch adds up the flags of all devices, and its fused kernels skip only if the sum is exactly 1.
        return flags if len(flags) < 2 else {device: _largest_flag(flags, found_inf)}

    @torch.no_grad()
    def _unscale_by_kernels(self, optimizer: Any, inv_scale: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        groups = by_device(dense_grads(parameters([optimizer])))
        if not allow_fp16 and any(torch.float16 in {tensor.dtype for tensor in tensors} for _, tensors in groups):
            self._check_float16(optimizer)
        return {device: kernels.unscale_(tensors, inv_scale.to(device)) for device, tensors in groups}

    def _check_float16(self, optimizer: Any) -> None:
        check_float16(parameters([optimizer]), Names(self._model, [optimizer]))

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients unless `unscale_` has, then steps the optimizer if they are finite. See torch."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        user_scale = getattr(optimizer, "grad_scale", None)
        is_fused_sgd = isinstance(optimizer, torch.optim.SGD) and supports_amp_scaling(optimizer)
        without_buffer = params_without_momentum(optimizer) if is_fused_sgd else []
        is_fused = supports_amp_scaling(optimizer) and not _may_take_grad_scaler(optimizer.step)
        try:
            if is_fused and self._scale is not None and user_scale is None and not args and not kwargs:
                result = self._step_fused(optimizer, self._scale)
            else:
                result = super().step(optimizer, *args, **kwargs)
        except BaseException:
            vars(optimizer).pop("found_inf", None)
            vars(optimizer).pop("grad_scale", None)
            if user_scale is not None:
                optimizer.grad_scale = user_scale
            raise
        flags = self._found_inf_per_device(optimizer)
        self._outcome = (
            ScalerOutcome(self._scale, flags, optimizer, self._model) if flags and self._scale is not None else None
        )
        if without_buffer and self._outcome is not None and self._outcome.skipped:
            # torch allocates the buffers uninitialized, and the skipped step has not filled them.
            for param in without_buffer:
                optimizer.state.pop(param, None)
        return result

    def _step_fused(self, optimizer: Any, scale: Tensor) -> float | None:
        """torch's `step` for an optimizer that skips by itself, except that its signature is not inspected.

        Inspecting takes 17 us; with 2 tensors on a CPU the whole step takes 43 us instead of 60.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        flags = list(state["found_inf_per_device"].values())
        if state["stage"] is OptState.STEPPED or not flags:
            return super().step(optimizer)  # Raises, or there are no gradients.
        # Copies, as in torch: a step may write to them or keep them.
        optimizer.grad_scale = scale.clone() if state["stage"] is OptState.READY else None
        optimizer.found_inf = flags[0].to(scale.device, non_blocking=True, copy=True)
        result: float | None = optimizer.step()
        state["stage"] = OptState.STEPPED
        del optimizer.grad_scale, optimizer.found_inf
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale, or sets it to `new_scale`, within [min_scale, max_scale]. See torch."""
        if isinstance(new_scale, (int, float)):
            check_number("new_scale", new_scale, above=0.0, at_most=_FLOAT32.max)
        if self._outcome is not None:
            self._outcome.copy_numbers(has_more_optimizers=len(self._per_optimizer_states) > 1)
        super().update(new_scale)
        scale = self._scale if self._enabled else None
        if scale is None:
            return
        if scale.device.type == "cpu":
            if not self._min_scale <= scale.item() <= self._max_scale:
                scale.clamp_(self._min_scale, self._max_scale)
            return
        # An operation on a GPU takes 5 to 15 us. With the default bounds the scale is clamped once in `interval`
        # updates, to a floor above min_scale by the factor that it can fall in between.
        self._updates += 1
        interval = self._clamp_interval()
        if self._updates % interval == 0 or new_scale is not None:
            floor = self._min_scale / self._backoff_factor ** (interval - 1) if interval > 1 else self._min_scale
            scale.clamp_(floor, self._max_scale)

    def _clamp_interval(self) -> int:
        """Number of updates from one clamp to the next, in which the scale falls by a factor of at most 2**16."""
        has_widest_bounds = (self._min_scale, self._max_scale) == (_FLOAT32.tiny, _FLOAT32.max)
        if not has_widest_bounds or self._backoff_factor <= 0.0:
            return 1
        return max(1, int(16.0 / -math.log2(self._backoff_factor)))

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval. See torch."""
        super().set_growth_interval(new_interval)
        self._keep_tracker_below_interval()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or torch's. The scale must be positive and finite."""
        if self._enabled and "scale" in state_dict:
            check_number("scale in the state_dict", state_dict["scale"], above=0.0, at_most=_FLOAT32.max)
        super().load_state_dict(state_dict)
        if self._enabled:
            self._init_scale = min(max(self._init_scale, self._min_scale), self._max_scale)
            if self._scale is not None:
                self._scale.fill_(self._init_scale)
            self._keep_tracker_below_interval()

    def _keep_tracker_below_interval(self) -> None:
        # torch grows the scale when the tracker equals the interval. A tracker above the interval never equals it.
        if self._enabled and self._growth_interval > 0:
            self._init_growth_tracker = min(self._init_growth_tracker, self._growth_interval - 1)
            if self._growth_tracker is not None:
                self._growth_tracker.clamp_(max=self._growth_interval - 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None, "_outcome": None}


class ScalerOutcome:
    """The result of one `GradScaler.step`. Reading a property waits for the device."""

    def __init__(self, scale: Tensor, flags: Mapping[Any, Tensor], optimizer: Any, model: Models) -> None:
        self._scale: Tensor | float = scale
        self._flags: list[Any] = list(flags.values())
        self._model = model
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._culprits: tuple[str, ...] | None = None

    @property
    def skipped(self) -> bool:
        """True if the optimizer left its parameters and state unchanged."""
        return any(map(bool, self._flags))

    @property
    def scale(self) -> float:
        """The scale during this step."""
        return float(self._scale)

    @property
    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters with non-finite gradients, in backward order.

        The first access reads the gradients, so read it before they are cleared. Afterwards, and on ranks whose own
        gradients are finite, the result is empty. `torch.nn.utils.clip_grad_norm_` spreads one NaN to all gradients;
        `gradilocks.clip_grad_norm_` does not.
        """
        if self._culprits is None:
            optimizer = self._optimizer() if self.skipped else None
            params = [] if optimizer is None else parameters([optimizer])
            names = Names(self._model, [] if optimizer is None else [optimizer])
            grads = dense_grads(params)
            pairs = [(params[i], grads[i]) for i in names.backward_order(params)]
            culprits = [param for param, grad in pairs if grad is not None and not grad.isfinite().all()]
            self._culprits = tuple(names.of(culprits))
        return self._culprits

    def copy_numbers(self, *, has_more_optimizers: bool) -> None:
        """Copies the scale, and the flags if `update` will add those of other optimizers to them in place."""
        if isinstance(self._scale, Tensor):
            self._scale = self._scale.item() if self._scale.device.type == "cpu" else self._scale.clone()
            self._flags = [flag.clone() for flag in self._flags] if has_more_optimizers else self._flags

    def forget_gradients(self) -> None:
        """Drops the reference to the optimizer, because the next backward pass changes the gradients."""
        self._optimizer = lambda: None

    def __repr__(self) -> str:
        return f"ScalerOutcome(skipped={self.skipped}, scale={self.scale:g}, culprits={self.culprits})"


def _may_take_grad_scaler(step: Callable[..., Any]) -> bool:
    """True if `step` may have an argument `grad_scaler`, which torch's scaler passes to optimizers of apex."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is None or "grad_scaler" in code.co_varnames


def _largest_flag(flags: Mapping[torch.device, Tensor], found_inf: Tensor) -> Tensor:
    return torch.stack([found_inf, *(flag.to(found_inf.device) for flag in flags.values())]).amax()


def _largest_over_ranks(flag: Tensor, meshes: Sequence[Any], params: Sequence[Tensor]) -> Tensor:
    """The largest flag of all ranks of the meshes: a replica or shard must not step if another rank skips."""
    for mesh in meshes:
        for group in mesh.get_all_groups():
            flag = flag.to(collective_device(group, params))
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
    return flag
