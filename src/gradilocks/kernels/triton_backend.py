"""The kernels in Triton: many tensors in one launch, every number left on the device.

Same names and signatures as `reference`. One launch reads all tensors of a dtype, a chunk a
program; a second adds up each tensor's chunks, always in the same order, so the same gradients give
the same bits every time. H200, 1.1 B float32 in 201 tensors: 1.1 ms, the reading itself 0.98 ms or
4.5 TB/s, where a copy moves 4.3 TB/s. What the kernels cannot take, a strided view or an order
other than 1, 2 and inf, goes to `reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradilocks.kernels import reference
from gradilocks.kernels.chunks import Layout, Located, locate
from gradilocks.kernels.failure import KernelFailed
from gradilocks.kernels.triton_launch import TYPES, Launch, launch_for
from gradilocks.kernels.triton_measure import change_kernel, gather_kernel, measure_kernel
from gradilocks.values import NonFinite, Statistics

__all__ = [
    "change_located",
    "clamp_",
    "lanes_for",
    "measure",
    "measure_located",
    "multiply_",
    "multiply_and_check_",
    "multiply_each_",
    "nonfinite_of",
    "scratch_for",
    "statistics_of",
    "try_out",
]

BY_ADDRESS = True
"""Whether it reaches tensors by their addresses."""
TILE, WARPS = 1024, 8
"""Reading 1.1 B on an H200, sums in float64: float32 0.98 ms, bfloat16 0.53; with tiles of 2,048
0.99 and 0.66. Sums in float32 took 0.98 and 0.54."""
CHANGE_CHUNK, CHANGE_TILE, CHANGE_WARPS = 1 << 13, 4096, 16
"""Multiplying 1.1 B float32 in place on an H200: 2.13 ms, and 2.22 in chunks as for measuring."""
LANES = 1024
"""Tensors or chunks that are added up at a time, at most."""
ORDERS = {2.0: 2, 1.0: 1, math.inf: 0}


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False) -> Statistics:
    """As `reference.measure`; the largest magnitude and the zeros are always found."""
    try:
        return _measured(tensors, None, order)
    except KernelFailed:
        return reference.measure(tensors, order=order, detail=True)


def multiply_and_check_(tensors: Sequence[Tensor], multiplier: Tensor | None) -> NonFinite:
    """As `reference.multiply_and_check_`."""
    try:
        found = _measured(tensors, multiplier, 2.0)
        return NonFinite(found.nan, found.inf)
    except KernelFailed:
        return reference.multiply_and_check_(tensors, multiplier)


def multiply_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    """As `reference.multiply_`; a multiplier of 1 costs a launch and reads nothing."""
    try:
        _change(tensors, multiplier, clamp=False)
    except KernelFailed:
        reference.multiply_(tensors, multiplier)


def multiply_each_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """As `reference.multiply_each_`, in one launch; a factor of 1 reads nothing."""
    try:
        _change(tensors, factors, clamp=False)
    except KernelFailed:
        reference.multiply_each_(tensors, factors)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """As `reference.clamp_`; a bound of inf costs a launch and reads nothing."""
    try:
        _change(tensors, bound, clamp=True)
    except KernelFailed:
        reference.clamp_(tensors, bound)


def try_out(device: torch.device) -> None:
    """Runs each kernel twice on a few numbers; raises if one does not compile or is wrong.

    Twice, because the second launch of a kernel takes a shorter way than the first.
    """
    numbers, expected = [torch.tensor([3.0, -4.0], device=device)], [3.0, 4.0]
    for _ in range(2):
        _change(numbers, torch.full((), 2.0, device=device), clamp=False)
        _change(numbers, torch.full((), 7.0, device=device), clamp=True)
        found = _measured(numbers, torch.full((), 0.25, device=device), 2.0)
        expected = [min(2.0 * number, 7.0) * 0.25 for number in expected]
        norm = math.hypot(*expected)
        wrong = found.norms.sub(norm).abs().gt(1e-6)
        if _measured(numbers, None, 2.0).norms.ne(found.norms).any() or wrong.any():
            raise RuntimeError(f"the kernels give {found.norms} where {norm} is right")


def measure_located(
    located: Located,
    scratch: tuple[Tensor, Tensor],
    *,
    multiplier: Tensor | None = None,
    order: float = 2.0,
) -> None:
    """Measures each chunk of tensors that the kernels can take, into `scratch`.

    Args:
        located: the tensors.
        scratch: made by `scratch_for`.
        multiplier: 0-d; what they are multiplied by first.
        order: 1, 2 or inf.
    """
    layout, device = located.layout, located.device
    key = (order, None if multiplier is None else multiplier.dtype)
    args = (
        located.pointers, layout.sizes, layout.owner, layout.index,
        layout.sizes if multiplier is None else multiplier, *scratch,
    )  # fmt: skip
    launches = layout.launches.get(key)
    if launches is None:
        power = ORDERS[order]
        launches = [_measuring(b.kind, layout.chunk, power, multiplier) for b in layout.buckets]
        for launch in launches:
            launch.prepare(device, *args, 0, layout.chunks)
        layout.launches[key] = launches
    for bucket, launch in zip(layout.buckets, launches, strict=True):
        launch(bucket.chunks, device, *args, bucket.first, layout.chunks)


def scratch_for(located: Located) -> tuple[Tensor, Tensor]:
    """Room for what is found in each chunk: 28 bytes a chunk."""
    chunks = located.layout.chunks
    return (
        torch.empty(2, chunks, dtype=torch.float64, device=located.device),
        torch.empty(3, chunks, dtype=torch.int32, device=located.device),
    )


def _measuring(kind: Any, chunk: int, power: int, multiplier: Tensor | None) -> Launch:
    dtype, align = kind
    return launch_for(
        measure_kernel, WARPS, None if multiplier is None else multiplier.dtype,
        MULTIPLY=multiplier is not None, ORDER=power, DTYPE=TYPES[dtype],
        WORK=_work_type(dtype), CHUNK=chunk, TILE=min(TILE, chunk), ALIGN=align,
    )  # fmt: skip


def _measured(tensors: Sequence[Tensor], multiplier: Tensor | None, order: float) -> Statistics:
    located = locate(tensors)
    rest = located.rest
    if order not in ORDERS:
        rest = tuple(range(len(tensors)))
        found = torch.empty(5, len(tensors), dtype=torch.float64, device=located.device)
    else:
        found = _gathered(located, multiplier, order)
    if rest:
        _fill_in([tensors[i] for i in rest], rest, multiplier, order, found)
    if multiplier is not None:
        torch.autograd.graph.increment_version(tensors)
    return statistics_of(found)


def _gathered(located: Located, multiplier: Tensor | None, order: float) -> Tensor:
    layout, scratch = located.layout, scratch_for(located)
    found = torch.empty(5, layout.count, dtype=torch.float64, device=located.device)
    args = (layout.begin, layout.counts, *scratch, found, layout.chunks, layout.count)
    launch = launch_for(gather_kernel, 4, ORDER=ORDERS[order], BLOCK=lanes_for(layout))
    launch.prepare(located.device, *args)  # Before anything is multiplied.
    measure_located(located, scratch, multiplier=multiplier, order=order)
    launch(layout.count, located.device, *args)
    return found


def statistics_of(found: Tensor) -> Statistics:
    """The Statistics in what `gather_kernel` leaves."""
    counts = found[2:].to(torch.int64)
    return Statistics(found[0], counts[1], counts[2], largest=found[1], zeros=counts[0])


def nonfinite_of(found: Tensor) -> NonFinite:
    """The counts of NaN and Inf in what `gather_kernel` leaves."""
    counts = found[3:].to(torch.int64)
    return NonFinite(counts[0], counts[1])


def _fill_in(
    tensors: list[Tensor],
    places: Sequence[int],
    multiplier: Tensor | None,
    order: float,
    out: Tensor,
) -> None:
    """What the kernels cannot take, by the reference, put into its places."""
    if multiplier is not None:
        reference.multiply_(tensors, multiplier)
    found = reference.measure(tensors, order=order, detail=True)
    columns = (found.norms, found.largest, found.zeros, found.nan, found.inf)
    for row, column in zip(out, columns, strict=True):
        assert column is not None
        for number, place in zip(column.unbind(), places, strict=True):
            row[place] = number


def _change(tensors: Sequence[Tensor], number: Tensor, *, clamp: bool) -> None:
    located = locate(tensors, chunk=CHANGE_CHUNK)
    change_located(located, number, clamp=clamp)
    if located.rest:
        others = [tensors[i] for i in located.rest]
        if number.dim() == 1:
            reference.multiply_each_(others, torch.stack([number[i] for i in located.rest]))
        else:
            (reference.clamp_ if clamp else reference.multiply_)(others, number)
    torch.autograd.graph.increment_version(tensors)


def change_located(located: Located, number: Tensor, *, clamp: bool) -> None:
    """Multiplies by `number`, or bounds by it, the tensors that the kernels can take.

    Args:
        located: the tensors.
        number: 0-d, or 1-d with a number for each.
        clamp: bound, do not multiply.
    """
    layout, device = located.layout, located.device
    args = (located.pointers, layout.sizes, layout.owner, layout.index, number)
    key = ("change", clamp, number.dtype, number.dim())
    launches = layout.launches.get(key)
    if launches is None:
        launches = [_changing(b.kind, layout.chunk, number, clamp) for b in layout.buckets]
        for launch in launches:
            launch.prepare(device, *args, 0)
        layout.launches[key] = launches
    for bucket, launch in zip(layout.buckets, launches, strict=True):
        launch(bucket.chunks, device, *args, bucket.first)


def _changing(kind: Any, chunk: int, number: Tensor, clamp: bool) -> Launch:
    dtype, align = kind
    return launch_for(
        change_kernel, CHANGE_WARPS, number.dtype, CLAMP=clamp, EACH=number.dim() == 1,
        DTYPE=TYPES[dtype], WORK=_work_type(dtype), CHUNK=chunk, TILE=min(CHANGE_TILE, chunk),
        ALIGN=align,
    )  # fmt: skip


def lanes_for(layout: Layout) -> int:
    """As many as a program has to add up at most: the fewer, the sooner a launch is over."""
    lanes = 128
    while lanes < min(max(layout.count, layout.longest), LANES):
        lanes *= 2
    return lanes


def _work_type(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32
