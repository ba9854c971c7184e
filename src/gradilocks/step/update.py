"""Application of a Decision: step the optimizer or leave it bit for bit unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.optim.optimizers import SinglePassOptimizer
from gradilocks.step.decide import Decision
from gradilocks.step.gradients import by_device, device_indices, indexed_by_device, params_without_momentum
from gradilocks.step.phase import StepGuard
from gradilocks.torch_private import has_other_hooks


def update(optimizer: Any, tensors: Sequence[Tensor | None], decision: Decision, begin: int = 0) -> None:
    """Steps one optimizer with the unscaled, clipped gradients, or leaves it unchanged.

    Args:
        optimizer: any object with `param_groups` and `step`.
        tensors: the gradients of its parameters, in order.
        decision: the decision of this step.
        begin: index of its first parameter among all parameters of the decision.
    """
    if decision.is_skipped:
        return
    found_inf = decision.skip if decision.is_skipped is None else None
    # torch copies `grad_scale` and `found_inf` to the device of the gradients without waiting.
    is_on_one_device = found_inf is None or {found_inf.device}.issuperset(device for device, _ in by_device(tensors))
    if skips_by_found_inf(optimizer) and is_on_one_device:
        if found_inf is not None and _creates_momentum(optimizer):
            if bool(found_inf):
                return
            found_inf = None
        _apply_per_tensor(decision, tensors, begin)
        divisor: Tensor | None = None
        if isinstance(decision.divisor, Tensor) or decision.divisor != 1.0:
            divisor = torch.as_tensor(decision.divisor, dtype=torch.float32, device=decision.skip.device)
        with amp_attributes(optimizer, divisor, found_inf):
            optimizer.step()
        return
    if not bool(decision.skip):  # The host reads the flag: this optimizer cannot skip by itself.
        apply_in_place(decision, tensors, begin)
        optimizer.step()


def apply_in_place(decision: Decision, tensors: Sequence[Tensor | None], begin: int = 0) -> None:
    """Unscales and clips the gradients in place."""
    _apply_per_tensor(decision, tensors, begin)
    multiplier = torch.as_tensor(decision.multiplier, dtype=torch.float64, device=decision.skip.device)
    for device, on_device in by_device(tensors):
        kernels.multiply_(on_device, multiplier.to(device))


def _apply_per_tensor(decision: Decision, tensors: Sequence[Tensor | None], begin: int) -> None:
    """Applies all of the clipping but the common factor in place: per-tensor and per-row factors, bound on elements."""
    clipping = decision.clipping
    if clipping is None or (clipping.factors is None and clipping.row_factors is None and clipping.value is None):
        return
    is_taken = decision.skip == 0
    if clipping.row_factors is not None:
        for tensor, factor in zip(tensors, clipping.row_factors[begin:], strict=False):
            if tensor is not None and factor is not None:
                shape = (-1, *(1,) * (tensor.dim() - 1)) if tensor.dim() > 1 else ()
                factors = torch.where(is_taken, factor, 1.0).reshape(shape).to(tensor.device)
                tensor.copy_(tensor.to(factors.dtype) * factors)
    for on_device, indices in indexed_by_device(tensors):
        device = on_device[0].device
        if clipping.factors is not None:
            factors = torch.where(is_taken, clipping.factors, 1.0)
            factors = factors[device_indices(tuple(begin + i for i in indices), factors.device)]
            kernels.multiply_(on_device, factors.to(device))
        if clipping.value is not None:
            # The elements are still scaled, and the clip factor is applied after the clamp.
            bound = clipping.value / decision.multiplier
            kernels.clamp_(on_device, torch.where(is_taken, bound, torch.inf).to(device))


def _step_function(optimizer: Any) -> Any:
    """The function behind `optimizer.step` without torch's wrappers (LR schedulers, profiler, step hooks).

    Wrappers of other libraries stay, because they must be called.
    """
    function = optimizer.step
    while True:
        function = getattr(function, "__func__", function)
        is_of_torch = getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")
        if not is_of_torch or not hasattr(function, "__wrapped__"):
            return function
        function = function.__wrapped__


_FUSED_STEPS: tuple[Any, ...] = tuple(
    map(_step_function, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad))
)
_OWN_STEP: Any = _step_function(SinglePassOptimizer)


def skips_by_found_inf(optimizer: Any) -> bool:
    """True if the step is ours or torch's own fused one, which unscales by `grad_scale` and skips by `found_inf`.

    A subclass or wrapper with a `step` of its own may ignore both, so only the identical function counts. Attributes of
    a wrapper that is not an Optimizer do not reach the optimizer that it calls.
    """
    step = _step_function(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    # torch's flag for this is unset if `fused` was given in the param groups, as torchtitan does.
    return step is _OWN_STEP or (step in _FUSED_STEPS and all(group.get("fused") for group in optimizer.param_groups))


def can_bypass_step(optimizer: Any) -> bool:
    """True if kernels may replace the call of `optimizer.step`.

    The step is ours, has no hooks but the control's own, and the user has set no `grad_scale`.
    """
    return (
        isinstance(optimizer, SinglePassOptimizer)
        and _step_function(optimizer) is _OWN_STEP
        and not has_other_hooks(optimizer, StepGuard)
        and getattr(optimizer, "grad_scale", None) is None
    )


def _creates_momentum(optimizer: Any) -> bool:
    """True if torch's fused SGD is about to allocate momentum buffers, which it leaves uninitialized if it skips.

    The next step would add garbage to the weights (20 of 20 runs with torch 2.13), so the host reads the flag.
    """
    is_torch_sgd = isinstance(optimizer, torch.optim.SGD) and not isinstance(optimizer, SinglePassOptimizer)
    return is_torch_sgd and bool(params_without_momentum(optimizer))


@contextmanager
def amp_attributes(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Sets `grad_scale` and `found_inf` on a fused optimizer for one step and restores them afterwards.

    If the user has set a `grad_scale`, the two are multiplied.
    """
    before = {name: getattr(optimizer, name) for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)}
    user_scale = before.get("grad_scale")
    if user_scale is not None:
        grad_scale = user_scale if grad_scale is None else grad_scale * user_scale
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        yield
    finally:
        for name in ("grad_scale", "found_inf"):
            if name in before:
                setattr(optimizer, name, before[name])
            else:
                delattr(optimizer, name)
