"""The Triton kernels: measure, reduce and decide, optimizers, elementwise changes.

A program of `_measure_kernel`, `_update_kernel` and `_elementwise_kernel` works on one chunk, which it finds through
the tables of `pointer_table`. A gradient with address 0 does not exist: statistics are 0, the parameter is left
unchanged and its step is not counted.

Offsets are int64, arithmetic is float32, sums are float64, so a norm does not depend on the division into chunks. Whole
chunks at addresses divisible by 16 (WHOLE) are read without a mask, 16 bytes at a time.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradilocks.kernels.pointer_table import Chunks

TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""Element types that the kernels process."""
ORDERS = {2.0: 2, 1.0: 1, math.inf: 0}
"""Orders of the norm that the kernels compute, and their codes."""

MEASURE_TILE, MEASURE_WARPS = 1024, 8
"""Reading 1.1 B elements on an H200 with float64 sums takes 0.98 ms in float32, 0.53 in bfloat16; with tiles of 2,048
elements, 0.99 and 0.66. With float32 sums it took 0.98 and 0.54."""
UPDATE_TILE, UPDATE_WARPS = 1024, 8
ELEMENTWISE_TILE, ELEMENTWISE_WARPS = 4096, 16
_MAX_LANES = 1024


def _kernel(function):
    """`triton.jit` that does not compile again for other values of numbers or alignments of tables."""
    names = list(inspect.signature(function).parameters)
    return triton.jit(
        function,
        do_not_specialize=[name for name in names if name.islower() and not name.endswith("_ptr")],
        do_not_specialize_on_alignment=[name for name in names if name.endswith("_ptr")],
    )


@triton.jit
def _pointer(address, start, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    """The pointer to element `start` of the tensor at `address`."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _load(x_ptr, at, left, WHOLE: tl.constexpr):
    """One tile as float32; 0 beyond the end of the tensor."""
    if WHOLE:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < left, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store(x_ptr, at, x, left, WHOLE: tl.constexpr):
    """Stores one tile, rounded to the type of the tensor."""
    x = x.to(x_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(x_ptr + at, x)
    else:
        tl.store(x_ptr + at, x, mask=at < left)


@triton.jit
def _measure_tiles(
    address, start, left,
    ORDER: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum of |x|^p, largest |x| and number of zeros in one chunk."""
    x_ptr = _pointer(address, start, DTYPE, WHOLE)
    powers = tl.zeros([TILE], tl.float64)
    peaks = tl.zeros([TILE], tl.float32)
    zeros = tl.zeros([TILE], tl.int32)
    for offset in range(0, CHUNK if WHOLE else left, TILE):
        at = offset + tl.arange(0, TILE)
        magnitude = tl.abs(_load(x_ptr, at, left, WHOLE))
        if WHOLE:
            zeros += (magnitude == 0.0).to(tl.int32)
        else:
            zeros += ((magnitude == 0.0) & (at < left)).to(tl.int32)
        wide = magnitude.to(tl.float64)
        powers += wide * wide if ORDER == 2 else wide
        peaks = tl.maximum(peaks, magnitude)
    return tl.sum(powers), tl.max(peaks), tl.sum(zeros)


@_kernel
def _measure_kernel(
    grads_ptr, sizes_ptr, owner_ptr, index_ptr, partial_ptr,
    first, chunks,
    ORDER: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Statistics of one chunk: sum |x|^p, max |x|, number of zeros, NaN and Inf.

    ORDER is 1, 2, or 0 for the largest magnitude. NaN and Inf make the float64 sum non-finite, which squares of finite
    float32 numbers cannot do. Only such a chunk is read a second time, to count them.

    Writes: partial[5, chunks].
    """
    program = first + tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    start = tl.load(index_ptr + program).to(tl.int64) * CHUNK
    address = tl.load(grads_ptr + owner)
    size = tl.where(address == 0, 0, tl.load(sizes_ptr + owner))
    left = tl.minimum(tl.maximum(size - start, 0), CHUNK).to(tl.int32)
    if (left == CHUNK) & (address % 16 == 0):
        power, peak, zeros = _measure_tiles(address, start, left, ORDER, DTYPE, CHUNK, TILE, True)
    else:
        power, peak, zeros = _measure_tiles(address, start, left, ORDER, DTYPE, CHUNK, TILE, False)
    largest = peak.to(tl.float64)
    nan = 0
    inf = 0
    if power < float("inf"):
        pass
    else:
        x_ptr = _pointer(address, start, DTYPE, False)
        nans = tl.zeros([TILE], tl.int32)
        infs = tl.zeros([TILE], tl.int32)
        peaks = tl.zeros([TILE], tl.float32)
        for offset in range(0, left, TILE):
            x = _load(x_ptr, offset + tl.arange(0, TILE), left, False)
            nans += (x != x).to(tl.int32)
            infs += (tl.abs(x) == float("inf")).to(tl.int32)
            peaks = tl.maximum(peaks, tl.where(x != x, 0.0, tl.abs(x)))
        nan = tl.sum(nans)
        inf = tl.sum(infs)
        largest = tl.max(peaks).to(tl.float64)
    tl.store(partial_ptr + program, power)
    tl.store(partial_ptr + chunks + program, largest)
    tl.store(partial_ptr + 2 * chunks + program, zeros)
    tl.store(partial_ptr + 3 * chunks + program, nan)
    tl.store(partial_ptr + 4 * chunks + program, inf)


@triton.jit
def _root(powers, ORDER: tl.constexpr):
    """The norm from p-th powers; for p = inf from largest magnitudes."""
    if ORDER == 2:
        norm = tl.sqrt(tl.sum(powers))
    elif ORDER == 1:
        norm = tl.sum(powers)
    else:
        norm = tl.max(powers)
    return norm


@triton.jit
def _reduce_tensor(
    first_ptr, count_ptr, partial_ptr, statistics_ptr, chunks, tensors, ORDER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Statistics of one tensor from those of its chunks, in the order of `kernels.STATISTICS`."""
    tensor = tl.program_id(0)
    begin = tl.load(first_ptr + tensor)
    end = begin + tl.load(count_ptr + tensor)
    powers = tl.zeros([BLOCK], tl.float64)
    peaks = tl.zeros([BLOCK], tl.float64)
    zeros = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    for chunk in range(begin, end, BLOCK):
        at = chunk + tl.arange(0, BLOCK)
        inside = at < end
        powers += tl.load(partial_ptr + at, mask=inside, other=0.0)
        peaks = tl.maximum(peaks, tl.load(partial_ptr + chunks + at, mask=inside, other=0.0))
        zeros += tl.load(partial_ptr + 2 * chunks + at, mask=inside, other=0.0)
        nans += tl.load(partial_ptr + 3 * chunks + at, mask=inside, other=0.0)
        infs += tl.load(partial_ptr + 4 * chunks + at, mask=inside, other=0.0)
    nan = tl.sum(nans)
    inf = tl.sum(infs)
    norm = _root(peaks if ORDER == 0 else powers, ORDER)
    norm = tl.where(nan > 0.0, float("nan"), tl.where(inf > 0.0, float("inf"), norm))
    tl.store(statistics_ptr + tensor, norm)
    tl.store(statistics_ptr + tensors + tensor, tl.max(peaks))
    tl.store(statistics_ptr + 2 * tensors + tensor, tl.sum(zeros))
    tl.store(statistics_ptr + 3 * tensors + tensor, nan)
    tl.store(statistics_ptr + 4 * tensors + tensor, inf)


@_kernel
def _reduce_kernel(
    first_ptr, count_ptr, partial_ptr, statistics_ptr,
    chunks, tensors,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduces chunks to tensors, one program per tensor. Writes: statistics[5, tensors]."""
    _reduce_tensor(first_ptr, count_ptr, partial_ptr, statistics_ptr, chunks, tensors, ORDER, BLOCK)


@triton.jit
def _write_rank_row(
    statistics_ptr, shares_ptr, overflow_ptr, scale_ptr, steps_ptr, row_ptr, tensors,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes this rank's row: the columns of `ranks.collective.RANK_ROW`, then the number of NaN and of Inf.

    The two columns of the loss are left to the host.
    """
    powers = tl.zeros([BLOCK], tl.float64)
    peaks = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    first_bad = tl.full([BLOCK], -1, tl.int32)  # The first in backward order has the last index.
    for begin in range(0, tensors, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < tensors
        norm = tl.load(statistics_ptr + at, mask=inside, other=0.0)
        nan = tl.load(statistics_ptr + 3 * tensors + at, mask=inside, other=0.0)
        inf = tl.load(statistics_ptr + 4 * tensors + at, mask=inside, other=0.0)
        is_bad = nan + inf > 0.0
        norm = tl.where(is_bad, 0.0, norm)
        if ORDER == 0:
            powers = tl.maximum(powers, norm)
        else:
            share = tl.load(shares_ptr + at, mask=inside, other=0.0)
            powers += (norm * norm if ORDER == 2 else norm) * share
        peaks = tl.maximum(peaks, tl.load(statistics_ptr + tensors + at, mask=inside, other=0.0))
        nans += nan
        infs += inf
        first_bad = tl.maximum(first_bad, tl.where(is_bad, at, -1))
    nan = tl.sum(nans)
    inf = tl.sum(infs)
    power = tl.max(powers) if ORDER == 0 else tl.sum(powers)
    is_bad = nan + inf > 0.0
    tl.store(row_ptr, tl.where(is_bad, 0.0, power))
    tl.store(row_ptr + 1, nan + inf + tl.load(overflow_ptr).to(tl.float64))
    tl.store(row_ptr + 2, tl.max(first_bad).to(tl.float64))
    tl.store(row_ptr + 5, tl.max(peaks))
    tl.store(row_ptr + 6, tl.load(scale_ptr).to(tl.float64))
    tl.store(row_ptr + 7, (tl.load(steps_ptr) + 1).to(tl.float64))
    tl.store(row_ptr + 8, nan)
    tl.store(row_ptr + 9, inf)


@_kernel
def _decide_kernel(
    first_ptr, count_ptr,
    partial_ptr, arrived_ptr, shares_ptr, overflow_ptr, row_ptr, rows_ptr, statistics_ptr, launches_ptr, ring_ptr,
    rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, streak_ptr, steps_ptr, skip_ptr, divisor_ptr, multiplier_ptr,
    table_ptr, groups_ptr, settings_ptr, coefficients_ptr,
    chunks, tensors, ranks, statistics_size, ring_size,
    ORDER: tl.constexpr, REDUCE: tl.constexpr, DECIDE: tl.constexpr,
    UNSCALED: tl.constexpr, UPDATES_SCALE: tl.constexpr, UPDATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decides one step, updates the scale, and computes the optimizers' coefficients unless the step is skipped.

        norm = (Σ power)^(1/p), rounded once to float32;  unscaled = norm / scale
        multiplier = min(1, max_norm / (unscaled + 1e-6)) / scale
        skip if any element is NaN or Inf, if ranks differ in scale or step, or if a result would overflow

    With REDUCE there is one program per tensor, which reduces its chunks; the last one to finish writes this rank's row
    and continues. With DECIDE it decides from the rows of all ranks. A single rank does both in one launch.

    rules: max_norm, largest finite gradient, growth factor, backoff factor, growth interval, smallest scale, largest
    scale, hysteresis. The ring's row has the columns of `step.decide.ROW`.
    """
    arrived = tensors - 1
    if REDUCE:
        statistics_ptr += (tl.load(launches_ptr) % statistics_size) * 5 * tensors
        _reduce_tensor(first_ptr, count_ptr, partial_ptr, statistics_ptr, chunks, tensors, ORDER, BLOCK)
        tl.debug_barrier()  # This program must write its statistics before it counts itself as arrived.
        arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == tensors - 1:
        if REDUCE:
            tl.store(arrived_ptr, 0)
            _write_rank_row(
                statistics_ptr, shares_ptr, overflow_ptr, scale_ptr, steps_ptr, row_ptr, tensors, ORDER, BLOCK
            )  # fmt: skip
            tl.debug_barrier()  # The row is read again below.
        if DECIDE:
            lanes = tl.arange(0, BLOCK)
            powers = tl.zeros([BLOCK], tl.float64)
            peaks = tl.zeros([BLOCK], tl.float64)
            nonfinites = tl.zeros([BLOCK], tl.float64)
            differences = tl.zeros([BLOCK], tl.int32)
            for begin in range(0, ranks, BLOCK):
                inside = begin + lanes < ranks
                rank_row = rows_ptr + (begin + lanes) * 8
                power = tl.load(rank_row, mask=inside, other=0.0)
                powers = tl.maximum(powers, power) if ORDER == 0 else powers + power
                nonfinites += tl.load(rank_row + 1, mask=inside, other=0.0)
                peaks = tl.maximum(peaks, tl.load(rank_row + 5, mask=inside, other=0.0))
                is_same_scale = tl.load(rank_row + 6, mask=inside, other=0.0) == tl.load(rows_ptr + 6)
                is_same_step = tl.load(rank_row + 7, mask=inside, other=0.0) == tl.load(rows_ptr + 7)
                differences += (inside & ((is_same_scale & is_same_step) == 0)).to(tl.int32)
            norm = _root(powers, ORDER)
            fits = (norm >= 1.1754943508222875e-38) & (norm <= 3.4028234663852886e38)
            norm = tl.where(fits, norm.to(tl.float32).to(tl.float64), norm)
            is_nonfinite = tl.sum(nonfinites) > 0.0
            is_broken = is_nonfinite | (tl.sum(differences) > 0) | (norm == float("inf"))

            scale = tl.load(scale_ptr).to(tl.float64)
            gradient_scale = scale * 0.0 + 1.0 if UNSCALED else scale
            unscaled = norm / gradient_scale
            limit = tl.load(rules_ptr)
            coefficient = limit / (unscaled + 1e-6)
            coefficient = tl.where((coefficient < 1.0) & (is_broken == 0), coefficient, 1.0)
            multiplier = coefficient / gradient_scale
            # A multiplier above 1 can overflow the gradients' own format.
            is_too_large = (multiplier > 1.0) & (norm * multiplier > tl.load(rules_ptr + 1))
            is_skipped = is_broken | is_too_large | (multiplier == float("inf"))
            multiplier = tl.where(is_skipped, 1.0, multiplier)
            # The fused optimizers take a float32 divisor; it is infinite only for a multiplier of 0.
            divisor = tl.minimum(1.0 / tl.where(multiplier > 0.0, multiplier, 1.0), 3.4028234663852886e38)
            divisor = tl.where(multiplier > 0.0, divisor, float("inf"))
            skip = tl.where(is_skipped, 1.0, 0.0)
            tl.store(skip_ptr, skip.to(tl.float32))
            tl.store(divisor_ptr, divisor.to(tl.float32))
            tl.store(multiplier_ptr, multiplier)

            nan = tl.load(row_ptr + 8)
            launch = tl.load(launches_ptr)
            step = tl.load(steps_ptr) + 1
            ring_ptr += (launch % ring_size) * 10
            nonfinite_norm = tl.where(nan > 0.0, float("nan"), float("inf"))
            tl.store(ring_ptr, skip)
            tl.store(ring_ptr + 1, 0.0)
            tl.store(ring_ptr + 2, scale)
            tl.store(ring_ptr + 3, tl.where(is_nonfinite, nonfinite_norm, unscaled))
            tl.store(ring_ptr + 4, limit)
            tl.store(ring_ptr + 5, tl.where((coefficient < 1.0) & (is_skipped == 0), 1.0, 0.0))
            tl.store(ring_ptr + 6, step.to(tl.float64))
            tl.store(ring_ptr + 7, nan)
            tl.store(ring_ptr + 8, tl.load(row_ptr + 9))
            tl.store(ring_ptr + 9, tl.max(peaks) * scale if UNSCALED else tl.max(peaks))
            tl.store(launches_ptr, launch + 1)
            tl.store(steps_ptr, step)
            tl.store(streak_ptr, tl.where(is_skipped, tl.load(streak_ptr) + 1, 0))
            if UPDATES_SCALE:
                _update_scale(rules_ptr + 2, scale_ptr, tracker_ptr, hysteresis_ptr, is_skipped)
            if UPDATE:
                if is_skipped == 0:
                    for begin in range(0, tensors, BLOCK):
                        _write_coefficients(
                            table_ptr, groups_ptr, settings_ptr, coefficients_ptr, begin + lanes, tensors
                        )  # fmt: skip


@triton.jit
def _update_scale(rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, is_skipped):
    """Updates the scale by the rule of DynamicScale."""
    growth_factor = tl.load(rules_ptr)
    backoff_factor = tl.load(rules_ptr + 1)
    growth_interval = tl.load(rules_ptr + 2)
    min_scale = tl.load(rules_ptr + 3)
    max_scale = tl.load(rules_ptr + 4)
    scale = tl.load(scale_ptr).to(tl.float64)
    hysteresis = tl.load(hysteresis_ptr)
    hysteresis = tl.where(is_skipped, hysteresis - 1, hysteresis)
    finite_steps = tl.where(is_skipped, 0, tl.load(tracker_ptr) + 1)
    grows = finite_steps.to(tl.float64) >= growth_interval
    grown = scale * growth_factor
    grown = tl.where(grown <= max_scale, grown, scale)
    moved = tl.where(is_skipped & (hysteresis <= 0), scale * backoff_factor, scale)
    moved = tl.where(grows, grown, moved)
    moved = tl.where(moved < min_scale, min_scale, tl.where(moved > max_scale, max_scale, moved))
    tl.store(scale_ptr, moved.to(tl.float32))
    tl.store(tracker_ptr, tl.where(grows, 0, finite_steps))
    tl.store(hysteresis_ptr, tl.where(grows, tl.load(rules_ptr + 5).to(tl.int32), hysteresis))


@_kernel
def _coefficients_kernel(
    table_ptr, groups_ptr, settings_ptr, skip_ptr, coefficients_ptr, tensors, BLOCK: tl.constexpr
):  # fmt: skip
    """Counts Adam's steps and computes the coefficients, for an update with a given skip flag."""
    if tl.load(skip_ptr) == 0.0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        _write_coefficients(table_ptr, groups_ptr, settings_ptr, coefficients_ptr, at, tensors)


@triton.jit
def _write_coefficients(table_ptr, groups_ptr, settings_ptr, coefficients_ptr, at, tensors):
    """Writes the numbers that all elements of a tensor share, in float64, one lane per tensor.

    Adam (the parameter has a step count):  step += 1;  lr / (1 - beta1^step), weight decay (times lr if decoupled),
    sqrt(1 - beta2^step), eps, beta1, 1 - beta1, beta2, 1 - beta2.
    SGD:  lr, weight decay, momentum, nesterov.
    """
    inside = at < tensors
    has_grad = tl.load(table_ptr + at, mask=inside, other=0) != 0
    step_address = tl.load(table_ptr + 2 * tensors + at, mask=inside, other=0)
    is_adam = has_grad & (step_address != 0)
    step_ptr = step_address.to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr, mask=is_adam, other=0.0) + 1.0
    tl.store(step_ptr, step, mask=is_adam)
    setting = settings_ptr + tl.load(groups_ptr + at, mask=inside, other=0) * 8
    lr = tl.load(setting, mask=has_grad, other=0.0)
    decay = tl.load(setting + 1, mask=has_grad, other=0.0)
    beta1 = tl.load(setting + 2, mask=has_grad, other=0.5)
    beta2 = tl.load(setting + 3, mask=has_grad, other=0.5)
    eps = tl.load(setting + 4, mask=is_adam, other=0.0)
    is_decoupled = tl.load(setting + 5, mask=is_adam, other=0.0) != 0.0
    # beta^step; the logarithm of 0 is -inf, whose exponential is 0 again.
    wide = step.to(tl.float64)
    correction1 = 1.0 - tl.exp(wide * tl.log(tl.where(is_adam, beta1, 0.5)))
    correction2 = 1.0 - tl.exp(wide * tl.log(tl.where(is_adam, beta2, 0.5)))
    numbers = coefficients_ptr + at * 8
    tl.store(numbers, tl.where(is_adam, lr / correction1, lr), mask=has_grad)
    tl.store(numbers + 1, tl.where(is_decoupled, lr * decay, decay), mask=has_grad)
    tl.store(numbers + 2, tl.where(is_adam, tl.sqrt(correction2), beta1), mask=has_grad)
    tl.store(numbers + 3, tl.where(is_adam, eps, beta2), mask=has_grad)
    tl.store(numbers + 4, beta1, mask=is_adam)
    tl.store(numbers + 5, 1.0 - beta1, mask=is_adam)
    tl.store(numbers + 6, beta2, mask=is_adam)
    tl.store(numbers + 7, 1.0 - beta2, mask=is_adam)


@triton.jit
def _update_tiles(
    g_address, p_address, m_address, v_address, w_address, start, left, numbers_ptr, divisor,
    RULE: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, MASTER: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    ADAM: tl.constexpr = (RULE == "adam") | (RULE == "adamw")
    g_ptr = _pointer(g_address, start, GRAD, WHOLE)
    p_ptr = _pointer(p_address, start, PARAM, WHOLE)
    m_ptr = _pointer(m_address, start, STATE, WHOLE)
    v_ptr = _pointer(v_address, start, STATE, WHOLE)
    w_ptr = _pointer(w_address, start, tl.float32, WHOLE)
    lr = tl.load(numbers_ptr).to(tl.float32)
    decay = tl.load(numbers_ptr + 1).to(tl.float32)
    if ADAM:
        root = tl.load(numbers_ptr + 2).to(tl.float32)
        eps = tl.load(numbers_ptr + 3).to(tl.float32)
        beta1 = tl.load(numbers_ptr + 4).to(tl.float32)
        rest1 = tl.load(numbers_ptr + 5).to(tl.float32)
        beta2 = tl.load(numbers_ptr + 6).to(tl.float32)
        rest2 = tl.load(numbers_ptr + 7).to(tl.float32)
    else:
        momentum = tl.load(numbers_ptr + 2).to(tl.float32)
        nesterov = tl.load(numbers_ptr + 3)
    # Partial chunks are processed with one element per thread, so that loads and stores have the same layout. With a
    # conversion between two layouts the kernel needs 62 registers instead of 40, and 7.3 B bfloat16 took 26.6 ms
    # instead of 24.8.
    STEP: tl.constexpr = TILE if WHOLE else TILE // 4
    for offset in range(0, CHUNK if WHOLE else left, STEP):
        at = offset + tl.arange(0, STEP)
        # All loads come first: with the loads of m and v after the division, the same step took 30.5 ms.
        g = _load(g_ptr, at, left, WHOLE)
        m = _load(m_ptr, at, left, WHOLE) if RULE != "sgd" else g
        v = _load(v_ptr, at, left, WHOLE) if ADAM else g
        p = _load(w_ptr, at, left, WHOLE) if MASTER else _load(p_ptr, at, left, WHOLE)
        g = tl.div_rn(g, divisor)
        if RULE != "adamw":
            g = tl.where(decay != 0.0, g + decay * p, g)
        if ADAM:
            # Interpolated from the nearer end: rounded once, and exact where m has converged to g.
            m = tl.where(rest1 < 0.5, m + rest1 * (g - m), g - beta1 * (g - m))
            v = tl.where(rest2 < 0.5, v + rest2 * (g * g - v), g * g - beta2 * (g * g - v))
            change = lr * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
            if RULE == "adamw":
                change = tl.where(decay != 0.0, change + decay * p, change)
            p -= change
            _store(v_ptr, at, v, left, WHOLE)
        else:
            if RULE == "momentum":
                # Explicit, because the compiler fuses multiply and add in some kernels and not in others.
                m = tl.fma(momentum, m, g)
                g = tl.where(nesterov != 0.0, g + momentum * m, m)
            p -= lr * g
        if RULE != "sgd":
            _store(m_ptr, at, m, left, WHOLE)
        _store(p_ptr, at, p, left, WHOLE)
        if MASTER:
            _store(w_ptr, at, p, left, WHOLE)


@_kernel
def _update_kernel(
    table_ptr, sizes_ptr, owner_ptr, index_ptr, coefficients_ptr, skip_ptr, divisor_ptr,
    first, tensors,
    RULE: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, MASTER: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Steps one chunk of a parameter with g = gradient / divisor.

        "adamw":     m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g²
                     p = p - lr weight_decay p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        "adam":      the same with g + weight_decay p instead of the decay of p
        "momentum":  m = momentum m + g + weight_decay p;  p = p - lr m
        "sgd":       p = p - lr (g + weight_decay p)

    References: Kingma and Ba 2015; Loshchilov and Hutter 2019.
    """
    program = first + tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    start = tl.load(index_ptr + program).to(tl.int64) * CHUNK
    g = tl.load(table_ptr + owner)
    p = tl.load(table_ptr + tensors + owner)
    m = tl.load(table_ptr + 3 * tensors + owner)
    v = tl.load(table_ptr + 4 * tensors + owner)
    w = tl.load(table_ptr + 5 * tensors + owner)
    left = tl.minimum(tl.load(sizes_ptr + owner) - start, CHUNK).to(tl.int32)
    numbers_ptr = coefficients_ptr + owner * 8
    divisor = tl.load(divisor_ptr)
    # This test follows the loads, so that they do not wait for each other.
    if (tl.load(skip_ptr) != 0.0) | (g == 0):
        return
    if ((g | p | m | v | w) % 16 == 0) & (left == CHUNK):
        _update_tiles(
            g, p, m, v, w, start, left, numbers_ptr, divisor, RULE, PARAM, GRAD, STATE, MASTER, CHUNK, TILE, True
        )  # fmt: skip
    else:
        _update_tiles(
            g, p, m, v, w, start, left, numbers_ptr, divisor, RULE, PARAM, GRAD, STATE, MASTER, CHUNK, TILE, False
        )  # fmt: skip


@triton.jit
def _change_tiles(
    address, start, left, number, flag_ptr,
    OPERATION: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    x_ptr = _pointer(address, start, DTYPE, WHOLE)
    STEP: tl.constexpr = TILE if WHOLE else TILE // 8  # As in `_update_tiles`.
    bad = tl.zeros([STEP], tl.int32)
    for offset in range(0, CHUNK if WHOLE else left, STEP):
        at = offset + tl.arange(0, STEP)
        x = _load(x_ptr, at, left, WHOLE)
        if OPERATION == "clamp":
            x = tl.where(x > number, number, tl.where(x < -number, -number, x))
        else:
            x *= number
        _store(x_ptr, at, x, left, WHOLE)
        if OPERATION == "unscale":
            y = x.to(DTYPE).to(tl.float32)
            bad |= ((y - y) != 0.0).to(tl.int32)  # y - y is NaN for NaN and Inf.
    if OPERATION == "unscale":
        if tl.max(bad) != 0:
            tl.store(flag_ptr, 1.0)


@_kernel
def _elementwise_kernel(
    addresses_ptr, sizes_ptr, owner_ptr, index_ptr, number_ptr, flag_ptr,
    first,
    OPERATION: tl.constexpr, EACH: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x = x * number, or x clamped to [-number, number], on one chunk; no memory traffic if that changes nothing.

    OPERATION is "multiply", "clamp" or "unscale", which multiplies and sets the flag if a product is NaN or Inf. With
    EACH there is one number per tensor.
    """
    program = first + tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    if EACH:
        number_ptr += owner
    number = tl.load(number_ptr).to(tl.float32)
    if OPERATION == "multiply":
        if number == 1.0:
            return
    if OPERATION == "clamp":
        if number > LARGEST:  # The largest finite number of DTYPE.
            return
    start = tl.load(index_ptr + program).to(tl.int64) * CHUNK
    address = tl.load(addresses_ptr + owner)
    left = tl.minimum(tl.load(sizes_ptr + owner) - start, CHUNK).to(tl.int32)
    if (left == CHUNK) & (address % 16 == 0):
        _change_tiles(address, start, left, number, flag_ptr, OPERATION, DTYPE, CHUNK, TILE, True)
    else:
        _change_tiles(address, start, left, number, flag_ptr, OPERATION, DTYPE, CHUNK, TILE, False)


class StepTensors(NamedTuple):
    """Tensors that a decision reads and updates, in the order of the kernel's arguments. All but `rules` are 0-d."""

    rules: Tensor
    """float64 [8], see `_decide_kernel`"""
    scale: Tensor
    growth_tracker: Tensor
    hysteresis: Tensor
    streak: Tensor
    steps: Tensor
    skip: Tensor
    """float32: exactly 1 if the step is skipped, else exactly 0"""
    divisor: Tensor
    """float32: divides the gradients"""
    multiplier: Tensor
    """float64: the reciprocal of the divisor"""


class StepBuffers(NamedTuple):
    """Intermediate results and results of a decision, in the order of the kernel's arguments."""

    partial: Tensor
    """float64 [5, chunks], written by `launch_measure`"""
    arrived: Tensor
    """int32, 0-d, zero before and after a launch"""
    shares: Tensor
    """float64 [n], weights of this rank's powers"""
    overflow: Tensor
    """float32, 0-d, above 0 to skip the step"""
    row: Tensor
    """float64 [10], see `_write_rank_row`"""
    rows: Tensor
    """float64 [ranks, 8]; for a single rank the memory of `row`"""
    statistics: Tensor
    """float64 [k, 5, n], ring of statistics"""
    launches: Tensor
    """int64, 0-d, number of steps decided so far"""
    ring: Tensor
    """float64 [k, 10], ring of rows"""


def _lanes(*counts: int) -> int:
    """Number of lanes, a power of two. With fewer lanes a small launch takes less time."""
    return min(_MAX_LANES, max(128, 1 << (max(counts) - 1).bit_length()))


def launch_measure(grads: Tensor, chunks: Chunks, partial: Tensor, *, order: float) -> None:
    """Measures each chunk.

    Args:
        grads: int64 [n], addresses.
        chunks: their kinds are dtypes.
        partial: float64 [5, chunks.total], overwritten.
        order: 1, 2 or inf.
    """
    for dtype, first, count in chunks.buckets:
        _measure_kernel[(count,)](
            grads, chunks.sizes, chunks.owner, chunks.index, partial, first, chunks.total,
            ORDER=ORDERS[order], DTYPE=TYPES[dtype], CHUNK=chunks.size, TILE=min(MEASURE_TILE, chunks.size),
            num_warps=MEASURE_WARPS,
        )  # fmt: skip


def launch_reduce(chunks: Chunks, partial: Tensor, statistics: Tensor, *, order: float) -> None:
    """Reduces the results of `launch_measure` to `statistics`, float64 [5, n]."""
    tensors = statistics.shape[1]
    _reduce_kernel[(tensors,)](
        chunks.first, chunks.count, partial, statistics, chunks.total, tensors,
        ORDER=ORDERS[order], BLOCK=_lanes(chunks.longest), num_warps=4,
    )  # fmt: skip


def launch_decide(
    chunks: Chunks,
    buffers: StepBuffers,
    step: StepTensors,
    update: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    *,
    order: float,
    reduce: bool,
    decide: bool,
    unscaled: bool,
    updates_scale: bool,
) -> None:
    """Reduces the results of `launch_measure`, writes this rank's row and decides the step.

    Args:
        chunks, order: as for `launch_measure`.
        buffers, step: tensors that the kernel reads and writes.
        update: table of addresses, group of each parameter, settings, coefficients; None without fused optimizers.
        reduce: True to reduce and write the row.
        decide: True to decide from the rows of all ranks.
        unscaled: True if the gradients are already unscaled.
        updates_scale: True to update the scale.
    """
    tensors, ranks = buffers.statistics.shape[2], buffers.rows.shape[0]
    _decide_kernel[(tensors if reduce else 1,)](
        chunks.first, chunks.count, *buffers, *step, *(update or (buffers.row,) * 4),
        chunks.total, tensors, ranks, buffers.statistics.shape[0], buffers.ring.shape[0],
        ORDER=ORDERS[order], REDUCE=reduce, DECIDE=decide, UNSCALED=unscaled,
        UPDATES_SCALE=updates_scale, UPDATE=update is not None,
        BLOCK=_lanes(chunks.longest, tensors, ranks), num_warps=4,
    )  # fmt: skip


def launch_coefficients(update: tuple[Tensor, Tensor, Tensor, Tensor], skip: Tensor) -> None:
    """Computes coefficients and counts steps for an update with a given skip flag."""
    table, groups, settings, coefficients = update
    tensors = table.shape[1]
    _coefficients_kernel[(-(-tensors // 256),)](
        table, groups, settings, skip, coefficients, tensors, BLOCK=256, num_warps=4
    )  # fmt: skip


def launch_update(table: Tensor, chunks: Chunks, coefficients: Tensor, skip: Tensor, divisor: Tensor) -> None:
    """Steps the parameters of each chunk, unless `skip` is 1.

    Args:
        table: int64 [6, n], addresses.
        chunks: their kinds are OptimizerKinds.
        coefficients: float64 [n, 8].
        skip, divisor: float32, 0-d.
    """
    for kind, first, count in chunks.buckets:
        _update_kernel[(count,)](
            table, chunks.sizes, chunks.owner, chunks.index, coefficients, skip, divisor, first, table.shape[1],
            RULE=kind.rule, PARAM=TYPES[kind.param], GRAD=TYPES[kind.grad], STATE=TYPES[kind.state],
            MASTER=kind.has_master, CHUNK=chunks.size, TILE=min(UPDATE_TILE, chunks.size), num_warps=UPDATE_WARPS,
        )  # fmt: skip


def launch_elementwise(
    operation: str, addresses: Tensor, chunks: Chunks, number: Tensor, flag: Tensor | None = None
) -> None:
    """Multiplies, clamps or unscales each chunk in place.

    Args:
        operation: see `_elementwise_kernel`.
        addresses: int64 [n].
        chunks: their kinds are dtypes.
        number: 0-d, or one per tensor.
        flag: float32, 0-d; for "unscale".
    """
    for dtype, first, count in chunks.buckets:
        _elementwise_kernel[(count,)](
            addresses, chunks.sizes, chunks.owner, chunks.index, number, number if flag is None else flag, first,
            OPERATION=operation, EACH=number.dim() == 1, DTYPE=TYPES[dtype], LARGEST=torch.finfo(dtype).max,
            CHUNK=chunks.size, TILE=min(ELEMENTWISE_TILE, chunks.size), num_warps=ELEMENTWISE_WARPS,
        )  # fmt: skip
