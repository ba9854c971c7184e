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
from gradilocks.eager import eager, users_line
from gradilocks.ranks.collective import reduce_apart
from gradilocks.ranks.layout import (
    common_mesh,
    has_other_ranks,
    is_distributed,
    rank_groups_of,
)
from gradilocks.step.call_order import own_write_begins, own_write_ended, refuse_scaled
from gradilocks.step.engine import measure_all, multiply_, norm_and_coefficient
from gradilocks.step.events import EVENTS
from gradilocks.step.table import Gradients, gradients_among, gradients_of
from gradilocks.values import Measurement, RankGroup, moved, wide

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]

_TensorOrTensors = Tensor | Iterable[Tensor]


@eager
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
        The norm before clipping: float32, or float64 if a gradient is float64. Where all gradients
        are DTensors on one mesh it is a DTensor too, whole on every rank.
    """
    with torch.no_grad():
        params = _listed(parameters, warn_if_empty_generator=True)
        clip = EVENTS.begin_clip(params, max_norm, order=norm_type) if EVENTS.listeners else None
        norm, mesh = _clip_by_norm(params, max_norm, norm_type, error_if_nonfinite, foreach)
        if clip is not None:
            EVENTS.end_clip(clip, norm=norm)
        return norm if mesh is None else _on_every_rank(norm, mesh)


def _clip_by_norm(
    params: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> tuple[Tensor, Any]:
    """The norm before clipping, and the mesh if all gradients are DTensors on one."""
    bound = _bound("max_norm", max_norm)
    refuse_scaled(params, "clip_grad_norm_", bound)
    order = _order(norm_type)
    rank_groups: Sequence[RankGroup] = ()
    if has_other_ranks():
        kernels.agree_with_ranks()
        rank_groups = rank_groups_of(params)
    gradients = _found(params, foreach)
    settled = None if rank_groups else norm_and_coefficient(gradients, bound, order)
    if settled is not None:
        norm, coefficient = settled
        double = torch.float64 in gradients.dtypes
    else:
        measurement = _measured(gradients, rank_groups, order)
        norm, double = measurement.norm, measurement.double
        coefficient = clip_coefficient(norm, bound, measurement.nonfinite)
    returned = _checked_norm(norm, order, double, error_if_nonfinite)
    if gradients.tensors:
        kept = own_write_begins(gradients.params)
        multiply_(gradients, coefficient)
        own_write_ended(kept)
    return returned, common_mesh(gradients.layouts)


@eager
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
    with torch.no_grad():
        params = _listed(parameters)
        clip = EVENTS.begin_clip(params, max_norm) if EVENTS.listeners else None
        bound = _bound("max_norm", max_norm)
        refuse_scaled(params, "clip_grads_with_norm_", bound)
        gradients = _found(params, foreach)
        if gradients.tensors:
            device = gradients.tensors[0].device
            norm = _on_device(total_norm, device)
            norm = norm.to(torch.promote_types(norm.dtype, torch.float32))
            nonfinite = torch.logical_not(norm.abs() < math.inf).to(torch.float32)
            kept = own_write_begins(gradients.params)
            multiply_(gradients, clip_coefficient(norm, bound, nonfinite))
            own_write_ended(kept)
        if clip is not None:
            EVENTS.end_clip(clip, norm=total_norm)


@eager
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
        The norm: float32, or float64 if a tensor is float64; a DTensor as in `clip_grad_norm_`.
    """
    with torch.no_grad():
        given = _listed(tensors)
        order = _order(norm_type)
        gradients = gradients_among(given, name=_place(given))
        if foreach:
            _check_foreach(gradients.tensors)
        rank_groups = rank_groups_of(given) if has_other_ranks() else []
        measurement = _measured(gradients, rank_groups, order)
        norm = _checked_norm(measurement.norm, order, measurement.double, error_if_nonfinite)
        mesh = common_mesh(gradients.layouts)
        return norm if mesh is None else _on_every_rank(norm, mesh)


@eager
def clip_grad_value_(
    parameters: _TensorOrTensors, clip_value: float, foreach: bool | None = None
) -> None:
    """Bounds every element of the gradients of `parameters` to [-clip_value, clip_value] in place.

    Args:
        parameters: a tensor or an iterable of tensors whose `.grad` is clipped.
        clip_value: the bound, not negative. NaN elements stay NaN.
        foreach: as in `clip_grad_norm_`.
    """
    with torch.no_grad():
        params = _listed(parameters)
        clip = EVENTS.begin_clip(params, clip_value, by_value=True) if EVENTS.listeners else None
        bound = _bound("clip_value", clip_value)
        refuse_scaled(params, "clip_grad_value_", bound)
        gradients = _found(params, foreach)
        if any(dtype.is_complex for dtype in gradients.dtypes):  # As torch, and in more words.
            raise NotImplementedError(
                "clamp is not supported for complex types: complex numbers have no order. "
                "GradientControl(clip=ClipByValue(...)) bounds their magnitudes."
            )
        kept = own_write_begins(gradients.params)
        for device, places in kernels.by_device(gradients.tensors).items():
            limit = torch.full((), bound, dtype=wide(device), device=device)
            tensors = [gradients.tensors[place] for place in places]
            kernels.BACKENDS[device.type].clamp_(tensors, limit)
        own_write_ended(kept)
        if clip is not None:
            EVENTS.end_clip(clip)


def _found(params: Sequence[Tensor], foreach: bool | None) -> Gradients:
    gradients = gradients_of(params, name=_place(params))
    if foreach:
        _check_foreach(gradients.tensors)
    return gradients


def _measured(gradients: Gradients, rank_groups: Sequence[RankGroup], order: float) -> Measurement:
    """Of all gradients together, on the first one's device; a distributed one over its mesh."""
    tensors = gradients.tensors
    home = tensors[0].device if tensors else torch.device("cpu")
    measurement = measure_all(gradients, home=home, order=order)
    if not rank_groups:
        return measurement
    layouts = gradients.every_layout()
    whole, _ = reduce_apart(
        measurement,
        rank_groups=rank_groups,
        ranks=[None if layout is None else layout.ranks for layout in layouts],
        counts=[layout is None or layout.counts for layout in layouts],
    )
    return whole


def _on_every_rank(norm: Tensor, mesh: Any) -> Tensor:
    """The norm as a DTensor, as torch returns it for gradients that are: every rank has all."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * mesh.ndim
    return DTensor.from_local(norm, mesh, placements, run_check=False)


def _on_device(number: Any, device: torch.device) -> Tensor:
    """A tensor or a Python number as a tensor on `device`; torch.as_tensor would wait."""
    if is_distributed(number):
        number = number.full_tensor()
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
    bound = float(value)  # type: ignore[arg-type]
    return bound if bound >= 0.0 else check_max_norm(bound, name=name)


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


def _check_foreach(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if not has_foreach(tensor.device):
            raise RuntimeError(
                "foreach=True was passed, but can't use the foreach API on "
                f"{tensor.device.type} tensors"
            )
