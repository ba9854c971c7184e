"""A Decision in; an optimizer stepped, or left exactly as it was, comes out.

An optimizer that can take the decision inside its own pass gets `grad_scale` and `found_inf`, and
unscaling and clipping cost no pass of their own. Any other gets its gradients multiplied in place
and is stepped or not, which the host has to know: one of the two places where it waits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.values import Decision

_LARGEST = float(torch.finfo(torch.float32).max)

__all__ = [
    "apply_bound",
    "apply_in_place",
    "check_update",
    "handing_over",
    "must_skip_on_host",
    "takes_decision",
    "takes_scaler",
    "update",
]


def update(optimizer: Any, decision: Decision, tensors: Sequence[Tensor]) -> None:
    """Steps `optimizer` on its gradients, or leaves it bit for bit as it was.

    Args:
        optimizer: any object with `param_groups` and `step`.
        decision: on one device; the bound on elements has been applied already.
        tensors: the elements of this optimizer's gradients.
    """
    if not tensors:
        return
    if takes_decision(optimizer) and not lacks_momentum(optimizer) and not _too_small(decision):
        grad_scale = torch.reciprocal(decision.multiplier).clamp(max=_LARGEST).to(torch.float32)
        with handing_over(optimizer, grad_scale=grad_scale, found_inf=decision.skip):
            optimizer.step()
    elif not decision.skip.item():
        apply_in_place(decision, tensors)
        optimizer.step()


def _too_small(decision: Decision) -> bool:
    """Whether 1 / multiplier is more than float32 holds, as a norm of 1e39 clipped to 1 makes it.

    Asked on the CPU alone, where asking is free. Elsewhere such a norm is clipped as far as float32
    goes, to 3e-39 of itself.
    """
    multiplier = decision.multiplier
    return multiplier.device.type == "cpu" and 0.0 < multiplier.item() < 1.0 / _LARGEST


def apply_in_place(decision: Decision, tensors: Sequence[Tensor]) -> None:
    """Multiplies the gradients themselves: one pass, none if the multiplier is 1."""
    for device, places in kernels.by_device(tensors).items():
        on_device = [tensors[place] for place in places]
        kernels.for_device(device).multiply_(on_device, decision.multiplier.to(device))


def apply_bound(decision: Decision, tensors: Sequence[Tensor]) -> None:
    """Bounds the elements of the gradients as they stand, if the decision has a bound."""
    if decision.bound is None:
        return
    for device, places in kernels.by_device(tensors).items():
        on_device = [tensors[place] for place in places]
        kernels.for_device(device).clamp_(on_device, decision.bound.to(device))


def check_update(
    optimizer: Any,
    params: Sequence[Tensor],
    tensors: Sequence[Tensor],
    name: Callable[[Tensor], str],
) -> None:
    """Refuses scaled fp16 gradients that would have to be unscaled in fp16, before any step."""
    if takes_decision(optimizer):
        return
    for param, tensor in zip(params, tensors, strict=True):
        if tensor.dtype is torch.float16:
            raise ValueError(
                f"Attempting to unscale FP16 gradients. {name(param)} is float16, and dividing its "
                "gradient by the scale in float16 would round small values to zero again. Keep the "
                "parameters in float32 and run the forward pass under torch.autocast; or give the "
                f"optimizer fused=True, as in {type(optimizer).__name__}(..., fused=True), which "
                "unscales in float32; or use scale=None."
            )


def takes_decision(optimizer: Any) -> bool:
    """Whether `step` reads `grad_scale` and `found_inf` off the optimizer, as torch's fused do."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if any(group.get("fused") is False for group in optimizer.param_groups):
        return False
    return not takes_scaler(optimizer)


def takes_scaler(optimizer: Any) -> bool:
    """Whether `step` has a parameter `grad_scaler`, the older contract of apex and others."""
    step = optimizer.step
    return _names_grad_scaler(getattr(step, "__func__", step))


@functools.lru_cache(maxsize=64)
def _names_grad_scaler(step: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def lacks_momentum(optimizer: Any) -> bool:
    """Whether a fused SGD would make its momentum buffers in this step.

    It makes them without filling them, and a step that is then skipped leaves them so: the next
    step adds whatever was in that memory to the weights. Such a step must be skipped by the host.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        param.grad is not None and optimizer.state[param].get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for param in group["params"]
    )


def must_skip_on_host(optimizer: Any, skip: Tensor) -> bool:
    """Whether a fused optimizer that cannot skip this one step itself has to."""
    return lacks_momentum(optimizer) and bool(skip.item())


_ABSENT = object()


@contextmanager
def handing_over(
    optimizer: Any, *, grad_scale: Tensor | None, found_inf: Tensor | None, consume: bool = False
) -> Iterator[None]:
    """Sets `grad_scale` and `found_inf` on the optimizer for one step, whatever becomes of it.

    A `grad_scale` that the user had set is multiplied in and put back afterwards; with `consume`
    it is put back only if the step raises, and taken away otherwise, as torch's scaler does.
    """
    before = {name: getattr(optimizer, name, _ABSENT) for name in ("grad_scale", "found_inf")}
    preset = before["grad_scale"]
    if preset is not _ABSENT and preset is not None:
        grad_scale = preset if grad_scale is None else grad_scale * preset  # type: ignore[assignment,operator]
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        yield
    except BaseException:
        consume = False
        raise
    finally:
        for name, value in before.items():
            if value is _ABSENT or consume:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, value)
