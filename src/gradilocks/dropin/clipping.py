"""Drop-ins for torch.nn.utils: `clip_grad_norm_`, `clip_grads_with_norm_`, `get_total_norm`,
`clip_grad_value_`.

Same arguments, same results where torch's are sound. Where they are not: the norm of half-precision
gradients is added in float64, the norm of finite gradients does not overflow, a NaN or Inf leaves
every gradient as it is, a negative bound is an error, a parameter listed twice counts once, and
sparse gradients work.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks._torch import has_foreach
from gradilocks.clip import check_max_norm, clip_coefficient
from gradilocks.dropin.once import writing_ourselves
from gradilocks.dropin.shortly import clipped_shortly
from gradilocks.dropin.total import by_device, measured
from gradilocks.eager import eager, users_line
from gradilocks.ranks.layout import meetings_of
from gradilocks.step.call_order import refuse_scaled
from gradilocks.step.gradients import Gradients, collect
from gradilocks.step.total import any_double
from gradilocks.values import moved, wide

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]

_TensorOrTensors = Tensor | Iterable[Tensor]


@eager
@torch.no_grad()
def clip_grad_norm_(
    parameters: _TensorOrTensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Shortens the gradients of `parameters` in place so that their norm is at most `max_norm`.

    The gradients are measured as they are now, whatever was measured before; if nothing is to be
    clipped, they are not written. A distributed gradient is measured whole, over the ranks of its
    own mesh, all of which must call this; a plain one is this rank's.

    Args:
        parameters: a tensor or an iterable of tensors whose `.grad` is clipped.
        max_norm: the bound, not negative; `math.inf` only measures.
        norm_type: the p of the norm; `math.inf` for the largest element.
        error_if_nonfinite: raise if the norm is NaN or inf.
        foreach: taken for compatibility; True on a device that has no foreach raises, as in torch.

    Returns:
        The norm before clipping: float32, or float64 if a gradient is float64.
    """
    params = _listed(parameters, warn_if_empty_generator=True)
    bound = _bound("max_norm", max_norm)
    refuse_scaled(params)
    order = _order(norm_type)

    def checked(norm: Tensor, double: bool) -> Tensor:
        return _checked_norm(norm, order, double, error_if_nonfinite)

    meetings = meetings_of(params)
    short = None if meetings else clipped_shortly(params, bound, order, checked)
    if short is not None:
        return short
    found = collect(params, name=_place(params))
    _check_foreach(foreach, found.tensors)
    devices, double = by_device(found.tensors), any_double(found.tensors)
    measurement = measured(found, order, devices, double=double, meetings=meetings)
    norm = checked(measurement.norm, double)
    if found.tensors:
        coefficient = clip_coefficient(measurement.norm, bound, measurement.nonfinite)
        _multiply_(found, devices, coefficient)
    return norm


@eager
@torch.no_grad()
def clip_grads_with_norm_(
    parameters: _TensorOrTensors,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Multiplies gradients in place by `min(1, max_norm / (total_norm + 1e-6))`.

    Args:
        parameters: a tensor or an iterable of tensors whose `.grad` is clipped.
        max_norm: the bound, not negative.
        total_norm: as `get_total_norm` returned it. NaN and inf leave the gradients as they are.
        foreach: as in `clip_grad_norm_`.
    """
    params = _listed(parameters)
    bound = _bound("max_norm", max_norm)
    refuse_scaled(params)
    found = collect(params, name=_place(params))
    _check_foreach(foreach, found.tensors)
    if found.tensors:
        device = found.tensors[0].device
        norm = _on_device(total_norm, device)
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32))
        nonfinite = torch.logical_not(norm.abs() < math.inf).to(torch.float32)
        coefficient = clip_coefficient(norm, bound, nonfinite)
        _multiply_(found, by_device(found.tensors), coefficient)


@eager
@torch.no_grad()
def get_total_norm(
    tensors: _TensorOrTensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of `tensors` as if they were one vector.

    Args:
        tensors: a tensor or an iterable of tensors, such as gradients.
        norm_type: the p of the norm; `math.inf` for the largest element.
        error_if_nonfinite: raise if the norm is NaN or inf.
        foreach: as in `clip_grad_norm_`.

    Returns:
        The norm: float32, or float64 if a tensor is float64.
    """
    given = _listed(tensors)
    # Measured as gradients are: sparse ones coalesced, distributed ones by their shard.
    holders = [_Holder(tensor) for tensor in given]
    found = collect(holders, name=_place(given))  # type: ignore[arg-type]
    _check_foreach(foreach, found.tensors)
    devices, double = by_device(found.tensors), any_double(found.tensors)
    order = _order(norm_type)
    norm = measured(found, order, devices, double=double, meetings=meetings_of(given)).norm
    return _checked_norm(norm, order, double, error_if_nonfinite)


@eager
@torch.no_grad()
def clip_grad_value_(
    parameters: _TensorOrTensors, clip_value: float, foreach: bool | None = None
) -> None:
    """Bounds every element of the gradients of `parameters` to [-clip_value, clip_value] in place.

    Args:
        parameters: a tensor or an iterable of tensors whose `.grad` is clipped.
        clip_value: the bound, not negative. NaN elements stay NaN.
        foreach: as in `clip_grad_norm_`.
    """
    params = _listed(parameters)
    bound = _bound("clip_value", clip_value)
    refuse_scaled(params)
    found = collect(params, name=_place(params))
    _check_foreach(foreach, found.tensors)
    with writing_ourselves(found.params):
        for device, tensors in by_device(found.tensors).items():
            limit = torch.full((), bound, dtype=wide(device), device=device)
            kernels.for_device(device).clamp_(tensors, limit)


class _Holder:
    """Stands where `collect` expects a parameter, for a caller who has only the gradient."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _on_device(number: Any, device: torch.device) -> Tensor:
    """A tensor or a Python number as a tensor on `device`; torch.as_tensor would wait."""
    if isinstance(number, Tensor):
        return moved(number.detach(), device)
    return torch.full((), number, dtype=torch.float32, device=device)


def _checked_norm(norm: Tensor, order: float, double: bool, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients by "
            "the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return norm.to(torch.float64 if double else torch.float32)


def _multiply_(
    found: Gradients, devices: dict[torch.device, list[Tensor]], coefficient: Tensor
) -> None:
    with writing_ourselves(found.params):
        for device, tensors in devices.items():
            kernels.for_device(device).multiply_(tensors, moved(coefficient, device))


def _listed(given: _TensorOrTensors, *, warn_if_empty_generator: bool = False) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    listed = list(given)
    if warn_if_empty_generator and not listed and isinstance(given, types.GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.",
            stacklevel=users_line(),
        )
    return listed


def _bound(name: str, value: object) -> float:
    return check_max_norm(float(value), name=name)  # type: ignore[arg-type]


def _order(norm_type: object) -> float:
    order = float(norm_type)  # type: ignore[arg-type]
    if math.isnan(order):
        raise ValueError("norm_type must be a number or math.inf, got nan.")
    return order


def _place(params: Sequence[object]) -> Callable[[object], str]:
    def name(param: object) -> str:
        index = next((i for i, p in enumerate(params) if p is param), 0)
        return f"parameters[{index}]"

    return name


def _check_foreach(foreach: bool | None, tensors: Sequence[Tensor]) -> None:
    if not foreach or not tensors:
        return
    for tensor in tensors:
        if not has_foreach(tensor.device):
            raise RuntimeError(
                "foreach=True was passed, but can't use the foreach API on "
                f"{tensor.device.type} tensors"
            )
