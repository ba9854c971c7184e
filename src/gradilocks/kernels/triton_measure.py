"""The kernels that measure and change tensors, and their launches.

`measure_located` finds a few numbers in every chunk, `gather_kernel` adds them up tensor by tensor,
`change_located` multiplies or bounds. A program works on one chunk of one tensor, which it finds
through a table of pointers. Offsets are int64; arithmetic is float32, or float64 for float64
tensors (WORK); sums are float64, so that a norm does not depend on how its elements are spread over
chunks. Full chunks are read without a mask, so that 16 bytes are loaded at once.
"""

# Kernel arguments have no types that a checker knows, and tl.constexpr names are capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803, N806, SIM108

from __future__ import annotations

import threading
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradilocks.kernels.chunks import ORDERS, Chunking, Located
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.kernels.host_numbers import stream_of
from gradilocks.kernels.triton_launch import TYPES, BoundLaunch, Launch, launch_for, unspecialized

__all__ = [
    "bound_measuring",
    "change_located",
    "gather",
    "gather_kernel",
    "kept_scratch",
    "lanes_for",
    "measure_located",
    "scratch_for",
]

TILE, WARPS = 1024, 8
"""Reading 1.1 B on an H200, sums in float64: float32 0.98 ms, bfloat16 0.53; with tiles of 2,048
0.99 and 0.66. Sums in float32 took 0.98 and 0.54."""
CHANGE_TILE, CHANGE_WARPS = 4096, 16
LANES = 1024
"""Tensors or chunks that are added up at a time, at most."""


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
    for launch, programs, args in _measuring(located, scratch, multiplier, order):
        launch(programs, located.device, *args)


def bound_measuring(
    located: Located, scratch: tuple[Tensor, Tensor], *, order: float
) -> list[BoundLaunch]:
    """The launches of `measure_located`, to be made again and again."""
    device = located.device
    return [
        launch.bind(programs, device, args)
        for launch, programs, args in _measuring(located, scratch, None, order)
    ]


def _measuring(
    located: Located, scratch: tuple[Tensor, Tensor], multiplier: Tensor | None, order: float
) -> list[tuple[Launch, int, tuple[Any, ...]]]:
    """Launches, each with its programs and arguments; raises KernelFailed if one cannot be made."""
    chunking, device = located.chunking, located.device
    key = (order, None if multiplier is None else multiplier.dtype)
    args = (
        located.pointers, chunking.sizes, chunking.owner, chunking.index,
        chunking.sizes if multiplier is None else multiplier, *scratch,
    )  # fmt: skip
    launches = chunking.launches.get(key)
    if launches is None:
        power = ORDERS[order]
        launches = [_launch(b.kind, chunking.chunk, power, multiplier) for b in chunking.buckets]
        for launch in launches:
            launch.prepare(device, *args, 0, chunking.chunks)
        chunking.launches[key] = launches
    return [
        (launch, bucket.chunks, (*args, bucket.first, chunking.chunks))
        for bucket, launch in zip(chunking.buckets, launches, strict=True)
    ]


def kept_scratch(located: Located) -> tuple[Tensor, Tensor]:
    """As `scratch_for`, and the same at the next call of this thread on this stream.

    For functions that nobody owns, as a clip: each allocation takes an H200's host 8 µs.
    """
    if capturing():
        return scratch_for(located)
    kept = located.chunking.launches
    key = ("scratch", threading.get_ident(), stream_of(located.device))
    if key not in kept:
        kept[key] = [scratch_for(located)]
    scratch: tuple[Tensor, Tensor] = kept[key][0]
    return scratch


def scratch_for(located: Located) -> tuple[Tensor, Tensor]:
    """Room for what is found in each chunk: 28 bytes a chunk."""
    chunks = located.chunking.chunks
    return (
        torch.empty(2, chunks, dtype=torch.float64, device=located.device),
        torch.empty(3, chunks, dtype=torch.int32, device=located.device),
    )


def _launch(kind: Any, chunk: int, power: int, multiplier: Tensor | None) -> Launch:
    dtype, align = kind
    return launch_for(
        measure_kernel, WARPS, None if multiplier is None else multiplier.dtype,
        MULTIPLY=multiplier is not None, ORDER=power, DTYPE=TYPES[dtype],
        WORK=_work_type(dtype), CHUNK=chunk, TILE=min(TILE, chunk), ALIGN=align,
    )  # fmt: skip


def change_located(located: Located, number: Tensor, *, clamp: bool) -> None:
    """Multiplies by `number`, or bounds by it, the tensors that the kernels can take.

    Args:
        located: the tensors.
        number: 0-d, or 1-d with a number for each.
        clamp: bound, do not multiply.
    """
    chunking, device = located.chunking, located.device
    args = (located.pointers, chunking.sizes, chunking.owner, chunking.index, number)
    key = ("change", clamp, number.dtype, number.dim())
    launches = chunking.launches.get(key)
    if launches is None:
        launches = [_changing(b.kind, chunking.chunk, number, clamp) for b in chunking.buckets]
        for launch in launches:
            launch.prepare(device, *args, 0)
        chunking.launches[key] = launches
    for bucket, launch in zip(chunking.buckets, launches, strict=True):
        launch(bucket.chunks, device, *args, bucket.first)


def _changing(kind: Any, chunk: int, number: Tensor, clamp: bool) -> Launch:
    dtype, align = kind
    return launch_for(
        change_kernel, CHANGE_WARPS, number.dtype, CLAMP=clamp, EACH=number.dim() == 1,
        DTYPE=TYPES[dtype], WORK=_work_type(dtype), CHUNK=chunk, TILE=min(CHANGE_TILE, chunk),
        ALIGN=align,
    )  # fmt: skip


def lanes_for(chunking: Chunking) -> int:
    """As many as a program has to add up at most: the fewer, the sooner a launch is over."""
    lanes = 128
    while lanes < min(max(chunking.count, chunking.longest), LANES):
        lanes *= 2
    return lanes


def _work_type(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32


@triton.jit
def _sweep(
    base, start, left, multiplier,
    MULTIPLY: tl.constexpr, POWER: tl.constexpr, DTYPE: tl.constexpr, WORK: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """sum |x|^p, max |x| and the count of zeros of one chunk; NaN and Inf spoil the sum."""
    lanes = tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float64)
    peaks = tl.zeros([TILE], WORK)
    zeros = tl.zeros([TILE], tl.int32)
    for offset in range(0, CHUNK if FULL else left, TILE):
        at = base + (start + offset + lanes)
        inside = lanes < left - offset
        if FULL:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=inside, other=0.0)
        if MULTIPLY:
            x = (x.to(WORK) * multiplier).to(DTYPE)
            if FULL:
                tl.store(at, x)
            else:
                tl.store(at, x, mask=inside)
        size = tl.abs(x.to(WORK))
        if FULL:
            zeros += (size == 0.0).to(tl.int32)
        else:
            zeros += ((size == 0.0) & inside).to(tl.int32)
        wide = size.to(tl.float64)
        if POWER == 2:
            sums += wide * wide
        else:
            sums += wide
        peaks = tl.maximum(peaks, size)
    return tl.sum(sums), tl.max(peaks), tl.sum(zeros)


@unspecialized
def measure_kernel(
    pointers_ptr, sizes_ptr, owner_ptr, index_ptr, multiplier_ptr, reals_ptr, counts_ptr,
    first, chunks,
    MULTIPLY: tl.constexpr, ORDER: tl.constexpr, DTYPE: tl.constexpr, WORK: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """norm = (sum |x|^p)^(1/p), largest = max |x|, and how many are 0, NaN and Inf, of one chunk.

    ORDER is 1, 2, or 0 for the largest magnitude; with MULTIPLY, x is multiplied first and written
    back. A chunk whose sum is NaN, inf or too small to be trusted is read again, in units of its
    largest magnitude.
    """
    program = first + tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    start = tl.load(index_ptr + program).to(tl.int64) * CHUNK
    base = tl.multiple_of(tl.load(pointers_ptr + owner).to(tl.pointer_type(DTYPE)), ALIGN)
    size = tl.load(sizes_ptr + owner)
    left = tl.minimum(size - start, CHUNK).to(tl.int32)
    multiplier = tl.load(multiplier_ptr).to(WORK) if MULTIPLY else 1.0
    POWER: tl.constexpr = 1 if ORDER == 1 else 2
    if start + CHUNK <= size:
        total, peak, zeros = _sweep(
            base, start, left, multiplier, MULTIPLY, POWER, DTYPE, WORK, CHUNK, TILE, True
        )
    else:
        total, peak, zeros = _sweep(
            base, start, left, multiplier, MULTIPLY, POWER, DTYPE, WORK, CHUNK, TILE, False
        )
    largest = peak.to(tl.float64)
    norm = total
    if ORDER == 2:
        norm = tl.sqrt(norm)
    nan = 0
    inf = 0
    trusted = (total < float("inf")) & (total >= left * 1e-290)  # Squares of float64 may vanish.
    if trusted | ((total == 0.0) & (peak == 0.0)):  # All zero, as an idle expert's gradient is.
        pass
    else:
        if MULTIPLY:
            tl.debug_barrier()  # What this program has written is read again.
        lanes = tl.arange(0, TILE)
        nans = tl.zeros([TILE], tl.int32)
        infs = tl.zeros([TILE], tl.int32)
        tops = tl.zeros([TILE], tl.float64)
        for offset in range(0, left, TILE):
            at = base + (start + offset + lanes)
            y = tl.load(at, mask=lanes < left - offset, other=0.0).to(tl.float64)
            nans += (y != y).to(tl.int32)
            infs += (tl.abs(y) == float("inf")).to(tl.int32)
            tops = tl.maximum(tops, tl.where(y != y, 0.0, tl.abs(y)))
        nan = tl.sum(nans)
        inf = tl.sum(infs)
        largest = tl.max(tops)
        unit = tl.where((largest > 0.0) & (largest < float("inf")), largest, 1.0)
        sums = tl.zeros([TILE], tl.float64)
        for offset in range(0, left, TILE):
            at = base + (start + offset + lanes)
            y = tl.load(at, mask=lanes < left - offset, other=0.0).to(tl.float64) / unit
            if ORDER == 2:
                sums += y * y
            else:
                sums += tl.abs(y)
        norm = tl.sum(sums)
        if ORDER == 2:
            norm = tl.sqrt(norm)
        norm = norm * unit
    tl.store(reals_ptr + program, norm)
    tl.store(reals_ptr + chunks + program, largest)
    tl.store(counts_ptr + program, zeros)
    tl.store(counts_ptr + chunks + program, nan)
    tl.store(counts_ptr + 2 * chunks + program, inf)


@unspecialized
def gather_kernel(
    begin_ptr, chunk_counts_ptr, reals_ptr, counts_ptr, out_ptr,
    chunks, tensors,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tensor's numbers from those of its chunks; a program a tensor."""
    gather(
        begin_ptr, chunk_counts_ptr, reals_ptr, counts_ptr, out_ptr, chunks, tensors, ORDER, BLOCK
    )


@triton.jit
def gather(
    begin_ptr, chunk_counts_ptr, reals_ptr, counts_ptr, out_ptr, chunks, tensors,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up in the chunks' order.

    `out`, row by row: norm, largest magnitude, and how many are 0, NaN and Inf.
    """
    owner = tl.program_id(0)
    begin = tl.load(begin_ptr + owner)
    end = begin + tl.load(chunk_counts_ptr + owner)
    lanes = tl.arange(0, BLOCK)
    peaks = tl.zeros([BLOCK], tl.float64)
    units = tl.zeros([BLOCK], tl.float64)
    zeros = tl.zeros([BLOCK], tl.int64)
    nans = tl.zeros([BLOCK], tl.int64)
    infs = tl.zeros([BLOCK], tl.int64)
    for chunk in range(begin, end, BLOCK):
        at = chunk + lanes
        inside = at < end
        peaks = tl.maximum(peaks, tl.load(reals_ptr + chunks + at, mask=inside, other=0.0))
        norms = tl.load(reals_ptr + at, mask=inside, other=0.0)
        units = tl.maximum(units, tl.where(norms == norms, norms, 0.0))
        zeros += tl.load(counts_ptr + at, mask=inside, other=0).to(tl.int64)
        nans += tl.load(counts_ptr + chunks + at, mask=inside, other=0).to(tl.int64)
        infs += tl.load(counts_ptr + 2 * chunks + at, mask=inside, other=0).to(tl.int64)
    unit = tl.max(units)
    unit = tl.where((unit > 0.0) & (unit < float("inf")), unit, 1.0)
    sums = tl.zeros([BLOCK], tl.float64)
    for chunk in range(begin, end, BLOCK):
        at = chunk + lanes
        norms = tl.load(reals_ptr + at, mask=at < end, other=0.0) / unit
        if ORDER == 2:
            sums += norms * norms
        else:
            sums += norms
    norm = tl.sum(sums)
    if ORDER == 2:
        norm = tl.sqrt(norm)
    norm = norm * unit
    peak = tl.max(peaks)
    if ORDER == 0:
        norm = peak
    nan = tl.sum(nans)
    inf = tl.sum(infs)
    norm = tl.where(inf > 0, float("inf"), norm)
    norm = tl.where(nan > 0, float("nan"), norm)
    tl.store(out_ptr + owner, norm)
    tl.store(out_ptr + tensors + owner, peak)
    tl.store(out_ptr + 2 * tensors + owner, tl.sum(zeros).to(tl.float64))
    tl.store(out_ptr + 3 * tensors + owner, nan.to(tl.float64))
    tl.store(out_ptr + 4 * tensors + owner, inf.to(tl.float64))


@unspecialized
def change_kernel(
    pointers_ptr, sizes_ptr, owner_ptr, index_ptr, number_ptr,
    first,
    CLAMP: tl.constexpr, EACH: tl.constexpr, DTYPE: tl.constexpr, WORK: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """x = x * number, or x = min(max(x, -number), number); reads nothing if nothing changes.

    With EACH, `number` is one for each tensor.
    """
    program = first + tl.program_id(0)
    if EACH:
        number_ptr += tl.load(owner_ptr + program)
    number = tl.load(number_ptr).to(WORK)
    idle = number == float("inf") if CLAMP else number == 1.0
    if idle:
        return
    owner = tl.load(owner_ptr + program)
    start = tl.load(index_ptr + program).to(tl.int64) * CHUNK
    base = tl.multiple_of(tl.load(pointers_ptr + owner).to(tl.pointer_type(DTYPE)), ALIGN)
    size = tl.load(sizes_ptr + owner)
    left = tl.minimum(size - start, CHUNK).to(tl.int32)
    lanes = tl.arange(0, TILE)
    if start + CHUNK <= size:
        for offset in range(0, CHUNK, TILE):
            at = base + (start + offset + lanes)
            x = tl.load(at).to(WORK)
            if CLAMP:
                y = tl.where(x > number, number, tl.where(x < -number, -number, x))
            else:
                y = x * number
            tl.store(at, y.to(DTYPE))
    else:
        for offset in range(0, left, TILE):
            at = base + (start + offset + lanes)
            inside = lanes < left - offset
            x = tl.load(at, mask=inside, other=0.0).to(WORK)
            if CLAMP:
                y = tl.where(x > number, number, tl.where(x < -number, -number, x))
            else:
                y = x * number
            tl.store(at, y.to(DTYPE), mask=inside)
