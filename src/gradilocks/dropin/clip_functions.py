"""The clip functions of `torch.nn.utils`, with torch's arguments and, except for these differences, torch's results.

Norms are accumulated in float64 and do not overflow. NaN or Inf leaves every gradient unchanged. A parameter listed
twice counts once. Sparse gradients work; DTensors on several meshes and plain tensors may be mixed. A negative bound is
an error, and so is a `norm_type` of 0 or less.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.ranks.collective import gather_flat
from gradilocks.ranks.layout import collective_device, is_dtensor, meshes_of
from gradilocks.step.gradients import by_device, dense_grads, elements
from gradilocks.torch_private import outside_compile

Tensors = Tensor | Iterable[Tensor]
Groups = Sequence[tuple[torch.device, Sequence[Tensor]]]
"""Tensors grouped by device; see `by_device`."""

_EPSILON = 1e-6
_dtype_of = attrgetter("dtype")


@outside_compile
def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients of `parameters` down in place so that their norm is at most `max_norm`.

    The norm of a DTensor is that of the whole tensor, so all ranks of its mesh must call this function.

    Args:
        parameters: a tensor or an iterable of tensors with gradients.
        max_norm: bound on the norm, not negative; inf to measure without clipping.
        norm_type: p of the norm; inf for the largest magnitude.
        error_if_nonfinite: raise if the norm is NaN or inf. Otherwise such gradients are left unchanged.
        foreach: accepted for compatibility, without effect.

    Returns:
        The norm before clipping: float32, or float64 if a gradient is. A DTensor if all gradients are DTensors on one
        mesh.
    """
    with torch.no_grad():
        params = _unique(parameters)
        if not params and isinstance(parameters, types.GeneratorType):
            text = "`parameters` is an empty generator, no gradient clipping will occur."
            warnings.warn(text, stacklevel=4)  # Points to the caller of the decorated function.
        bound, order = _bound("max_norm", max_norm), float(norm_type)
        grads = dense_grads(params)
        groups = by_device(grads)
        total, mesh = _total_norm(params, grads, groups, order)
        norm = _returned_norm(total, mesh, groups, order, error_if_nonfinite)
        # The rounded norm needs no conversion later; a DTensor cannot be combined with local tensors.
        _multiply(groups, norm if mesh is None and isinstance(total, Tensor) else total, bound)
        return norm


@outside_compile
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Multiplies gradients in place by min(1, max_norm / (total_norm + 1e-6)).

    Args:
        parameters: a tensor or an iterable of tensors with gradients.
        max_norm: bound on the norm, not negative.
        total_norm: from `get_total_norm`. NaN and inf leave the gradients unchanged.
        foreach: accepted for compatibility, without effect.
    """
    with torch.no_grad():
        groups, bound = by_device(dense_grads(_unique(parameters))), _bound("max_norm", max_norm)
        norm = _as_tensor(total_norm.full_tensor() if is_dtensor(total_norm) else total_norm)  # type: ignore[attr-defined]
        _multiply(groups, norm.to(torch.promote_types(norm.dtype, torch.float32)), bound)


@outside_compile
def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """Computes the norm of tensors as if they were one vector.

    Args:
        tensors: a tensor or an iterable of tensors, such as gradients.
        norm_type: p of the norm; inf for the largest magnitude.
        error_if_nonfinite: raise if the norm is NaN or inf.
        foreach: accepted for compatibility, without effect.

    Returns:
        The norm, as `clip_grad_norm_` returns it.
    """
    with torch.no_grad():
        inputs, order = [tensors] if isinstance(tensors, Tensor) else list(tensors), float(norm_type)
        grads: list[Tensor | None] = [elements(tensor) for tensor in inputs]
        groups = by_device(grads)
        total, mesh = _total_norm(inputs, grads, groups, order)
        return _returned_norm(total, mesh, groups, order, error_if_nonfinite)


@outside_compile
def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Clamps the elements of gradients to [-clip_value, clip_value] in place. NaN stays NaN.

    Args:
        parameters: a tensor or an iterable of tensors with gradients.
        clip_value: the bound, not negative.
        foreach: accepted for compatibility, without effect.
    """
    with torch.no_grad():
        params, bound = _unique(parameters), _bound("clip_value", clip_value)
        if any(param.is_complex() and param.grad is not None for param in params):
            raise NotImplementedError("clamp is not supported for complex types: complex numbers have no order.")
        for device, tensors in by_device(dense_grads(params)):
            dtype = torch.float32 if device.type == "mps" else torch.float64
            kernels.clamp_(tensors, torch.full((), bound, dtype=dtype, device=device))


def _unique(parameters: Tensors) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    params = list(parameters)
    if len(set(map(id, params))) == len(params):
        return params
    return list({id(param): param for param in params}.values())


def _bound(name: str, value: Any) -> float:
    bound = float(value)
    if not bound >= 0.0:
        raise ValueError(f"{name} must not be negative or NaN, got {bound}.")
    return bound


def _total_norm(
    owners: Sequence[Any], grads: Sequence[Tensor | None], groups: Groups, order: float
) -> tuple[Tensor | float, Any]:
    """The norm of all gradients, on the device of the first one, and their mesh if all are DTensors on it.

    Args:
        owners: the parameters, or the tensors themselves if their own norm is computed.
        grads: the local elements of each.
        groups: `grads` by device.
        order: p of the norm.

    Returns:
        A float if all gradients are on the CPU, otherwise 0-d float64.
    """
    if not order > 0.0:
        raise ValueError(f"norm_type must be above 0, got {order}.")
    if order != 2.0 and any(owner.is_complex() for owner in owners):
        grads = list(grads)
        for i, (owner, grad) in enumerate(zip(owners, grads, strict=True)):
            if owner.is_complex() and grad is not None:  # Magnitudes from real and imaginary parts.
                grads[i] = torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float64)
        groups = by_device(grads)
    meshes = meshes_of(owners) if torch.distributed.is_available() and torch.distributed.is_initialized() else []
    if not meshes and len(groups) == 1:
        return kernels.norm(groups[0][1], order), None
    plain = [grad for owner, grad in zip(owners, grads, strict=True) if not is_dtensor(owner)]
    device = groups[0][0] if groups else torch.device("cpu")
    norms = [_local_norm(plain, order, device), *(_norm_over_ranks(mesh, owners, grads, order) for mesh in meshes)]
    total = kernels.total_norm(torch.stack([norm.to(device) for norm in norms]), order)
    return total, meshes[0] if len(meshes) == 1 and not plain else None


def _local_norm(grads: Sequence[Tensor | None], order: float, device: torch.device) -> Tensor:
    """The norm of this rank's tensors on several devices, 0-d float64."""
    norms = [_as_tensor(kernels.norm(tensors, order)) for _, tensors in by_device(grads)]
    # Copying a zero from the host would wait for the device.
    norms = norms or [torch.zeros((), dtype=torch.float64, device=device)]
    return kernels.total_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)


def _as_tensor(number: Tensor | float) -> Tensor:
    return number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64, device="cpu")


def _norm_over_ranks(mesh: Any, owners: Sequence[Any], grads: Sequence[Tensor | None], order: float) -> Tensor:
    """The norm of the DTensors on a mesh, 0-d float64. A collective of all ranks of the mesh."""
    by_shards: dict[int, list[Tensor | None]] = {1: []}
    for owner, grad in zip(owners, grads, strict=True):
        if is_dtensor(owner) and owner.device_mesh == mesh:
            sizes = [
                mesh.size(dim)
                for dim, placement in enumerate(owner.placements)
                if not (placement.is_replicate() or placement.is_partial())
            ]
            by_shards.setdefault(math.prod(sizes), []).append(grad)
    # Each power is weighted with shards / ranks, so that every element counts once.
    device = collective_device(mesh.get_group(0), owners)
    norms = [
        _local_norm(local, order, device) * (shards / mesh.size()) ** (1.0 / order)
        for shards, local in by_shards.items()
    ]
    rows = torch.stack([norm.to(device) for norm in norms])
    for group in reversed(mesh.get_all_groups()):
        rows = gather_flat(rows, group)
    return kernels.total_norm(rows, order)


def _returned_norm(total: Tensor | float, mesh: Any, groups: Groups, order: float, error_if_nonfinite: bool) -> Tensor:
    """The norm as torch's functions return it."""
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "Gradients are unchanged. Set `error_if_nonfinite=False` to return the norm instead of this error."
        )
    has_float64 = any(torch.float64 in map(_dtype_of, tensors) for _, tensors in groups)
    dtype = torch.float64 if has_float64 else torch.float32
    norm = total.to(dtype) if isinstance(total, Tensor) else torch.tensor(total, dtype=dtype, device="cpu")
    if mesh is None:
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _multiply(groups: Groups, total: Tensor | float, max_norm: float) -> None:
    """Multiplies by torch's clip coefficient; by 1 if the norm is not finite."""
    if max_norm == math.inf:
        return
    if isinstance(total, Tensor):
        # 0 replaces a non-finite norm, so that the coefficient is inf, or NaN if max_norm is 0; then exactly 1.
        divisor = torch.nan_to_num_(total + _EPSILON, nan=0.0, posinf=0.0)
        coefficient = divisor.reciprocal_().mul_(max_norm).clamp_(max=1.0)
        coefficient = coefficient if max_norm else torch.nan_to_num_(coefficient, nan=1.0)
        for device, tensors in groups:
            kernels.multiply_(tensors, coefficient.to(device))
    elif total < math.inf and max_norm < total + _EPSILON:
        for _, tensors in groups:
            kernels.multiply_(tensors, max_norm / (total + _EPSILON))
