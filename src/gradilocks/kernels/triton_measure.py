"""The kernels themselves: what one program does with one chunk of one tensor.

A program finds its tensor through a table of pointers (`table`). Offsets are int64; arithmetic is
float32, or float64 for float64 tensors (WORK); sums are float64, so that a norm does not depend on
how its elements are spread over chunks. Full chunks are read without a mask, so that 16 bytes are
loaded at once.
"""

# Kernel arguments have no types that a checker knows, and tl.constexpr names are capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803, N806, SIM108

from __future__ import annotations

import triton
import triton.language as tl

from gradilocks.kernels.triton_launch import unspecialized

__all__ = ["change_kernel", "gather", "gather_kernel", "measure_kernel"]


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
