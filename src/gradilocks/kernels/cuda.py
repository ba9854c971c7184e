"""The kernels for CUDA tensors, and, with TRITON_INTERPRET=1, for CPU tensors.

float64 tensors, tensors that are not dense, and orders other than 1, 2 and inf are left to `reference`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradilocks.kernels import reference
from gradilocks.kernels.pointer_table import (
    MEASURE_CHUNK,
    MULTIPLY_CHUNK,
    Chunks,
    chunks_for,
    is_capturing,
    on_device,
    upload,
)
from gradilocks.kernels.triton_kernels import ORDERS, TYPES, launch_elementwise, launch_measure, launch_reduce
from gradilocks.torch_private import foreach_mul_, foreach_norm

_dtype_of = attrgetter("dtype")
DESCRIPTION = "Triton"
"""For `kernels.describe`."""

_MAX_FOREACH_TENSORS = 32
"""Up to this number of tensors torch's foreach norm is faster: 12 tensors take 84 us instead of 113, but 148 take 349
instead of 192 (H200)."""
_MAX_FOREACH_ELEMENTS = 1 << 22
"""Up to this number of elements torch's foreach product is faster. Our kernel reads nothing if the factor is 1."""
_captured: list[object] = []
"""Tables that the user's CUDA graphs read at each replay, and the pinned buffers from which they are copied."""


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = True) -> Tensor:
    """See `gradilocks.kernels.measure`."""
    unsupported = range(len(tensors)) if order not in ORDERS else _unsupported(tensors)
    if len(unsupported) == len(tensors):
        return reference.measure(tensors, order=order, detail=detail)
    addresses, chunks = _tables(tensors, MEASURE_CHUNK, unsupported)
    device = tensors[0].device
    partial = torch.empty(5, chunks.total, dtype=torch.float64, device=device)
    statistics = torch.empty(5, len(tensors), dtype=torch.float64, device=device)
    with on_device(device):
        launch_measure(addresses, chunks, partial, order=order)
        launch_reduce(chunks, partial, statistics, order=order)
    for i in unsupported:
        statistics[:, i] = reference.measure([tensors[i]], order=order)[:, 0]
    return statistics


def norm(tensors: Sequence[Tensor], order: float) -> Tensor:
    """See `gradilocks.kernels.norm`."""
    if order not in ORDERS or not all(tensor.dtype in TYPES for tensor in tensors):
        return reference.total_norm(measure(tensors, order=order, detail=False)[0], order)
    # Powers of float32 norms neither overflow nor vanish in float64.
    with torch.no_grad():
        if len(tensors) <= _MAX_FOREACH_TENSORS and all(map(Tensor.numel, tensors)):
            norms = torch.stack(foreach_norm(list(tensors), order, torch.float64))
        else:
            norms = measure(tensors, order=order, detail=False)[0]
        total: Tensor = torch.linalg.vector_norm(norms, order)
    return total


def multiply_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """See `gradilocks.kernels.multiply_`."""
    is_float32 = not factor.dim() and set(map(_dtype_of, tensors)) == {torch.float32}
    if is_float32 and sum(map(Tensor.numel, tensors)) <= _MAX_FOREACH_ELEMENTS:
        with torch.no_grad():
            foreach_mul_(list(tensors), factor.to(torch.float32))
        return
    _change(reference.multiply_, tensors, factor)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """See `gradilocks.kernels.clamp_`."""
    _change(reference.clamp_, tensors, bound)


def unscale_(tensors: Sequence[Tensor], inverse_scale: Tensor) -> Tensor:
    """See `gradilocks.kernels.unscale_`."""
    flag = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    for found in _change(reference.unscale_, tensors, inverse_scale, flag):
        flag = torch.maximum(flag, found)
    return flag


def _change(
    function: Callable[..., Any], tensors: Sequence[Tensor], number: Tensor, flag: Tensor | None = None
) -> list[Any]:
    """Does what a function of `reference` does; returns the results of those calls that the kernel cannot replace."""
    unsupported = _unsupported(tensors)
    if len(unsupported) < len(tensors):
        addresses, chunks = _tables(tensors, MULTIPLY_CHUNK, unsupported)
        with on_device(tensors[0].device):
            launch_elementwise(function.__name__.rstrip("_"), addresses, chunks, number, flag)
    results = [function([tensors[i]], number[i] if number.dim() else number) for i in unsupported]
    increment_version(tensors)
    return results


def _unsupported(tensors: Sequence[Tensor]) -> list[int]:
    return [
        i
        for i, tensor in enumerate(tensors)
        if tensor.dtype not in TYPES or not (tensor.is_contiguous() or reference.is_dense(tensor))
    ]


def _tables(tensors: Sequence[Tensor], size: int, excluded: Sequence[int]) -> tuple[Tensor, Chunks]:
    """Addresses and chunks of the tensors in device memory."""
    device = tensors[0].device
    addresses = list(map(Tensor.data_ptr, tensors))
    sizes = list(map(Tensor.numel, tensors))
    kinds: list[torch.dtype | None] = [tensor.dtype for tensor in tensors]
    for i in excluded:
        kinds[i] = None
    if min(addresses) < reference.LOW_ADDRESS and reference.without_address(tensors, addresses):
        raise TypeError("the CUDA kernels need tensors with an address; a wrapper subclass of Tensor has none.")
    keep: list[Tensor] | None = [] if is_capturing(device) else None
    table, chunks = upload(array("q", addresses), device, keep=keep), chunks_for(sizes, kinds, size, device, keep)
    if keep is not None:
        _captured.append((keep, table, chunks))
    return table, chunks
