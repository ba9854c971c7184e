"""The kernel that settles a step: norm, clip coefficient, skip flag, next scale, in one launch.

It computes what `clip`, `decide`, `scale` and `record` compute for the policies that everybody
uses, with the same formulas, in one program of a few hundred bytes instead of forty small launches.
"""

# Kernel arguments have no types that a checker knows, and tl.constexpr names are capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from gradilocks.kernels.triton_launch import unspecialized
from gradilocks.kernels.triton_measure import gather
from gradilocks.kernels.triton_optimizers import adam_rates, sgd_rates

__all__ = ["advance_kernel", "settle_kernel"]


@unspecialized
def settle_kernel(
    begin_ptr, chunk_counts_ptr, reals_ptr, counts_ptr, found_ptr, arrived_ptr, rules_ptr,
    scale_ptr, tracker_ptr, hysteresis_ptr, streak_ptr, steps_ptr, loss_ptr,
    skip_ptr, divisor_ptr, multiplier_ptr, row_ptr,
    own_ptr, groups_ptr, settings_ptr, rates_ptr,
    chunks, tensors,
    ORDER: tl.constexpr, CLIP: tl.constexpr, DYNAMIC: tl.constexpr, UNSCALED: tl.constexpr,
    LOSS: tl.constexpr, DOUBLE: tl.constexpr, RATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up each tensor, a program a tensor; the program that is last decides the step.

    With RATES 1 or 2 it also works out the rates of Adam or SGD, which saves that launch.
    """
    gather(
        begin_ptr, chunk_counts_ptr, reals_ptr, counts_ptr, found_ptr, chunks, tensors, ORDER, BLOCK
    )
    tl.debug_barrier()  # All of this program's numbers are there before it says so.
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == tensors - 1:
        tl.store(arrived_ptr, 0)
        skipped = _settle(
            found_ptr, rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, streak_ptr, steps_ptr,
            loss_ptr, skip_ptr, divisor_ptr, multiplier_ptr, row_ptr, tensors,
            ORDER, CLIP, DYNAMIC, UNSCALED, LOSS, DOUBLE, BLOCK,
        )  # fmt: skip
        if skipped == 0:
            lanes = tl.arange(0, BLOCK)
            for place in range(0, tensors, BLOCK):
                if RATES == 1:
                    adam_rates(own_ptr, groups_ptr, settings_ptr, rates_ptr, place + lanes, tensors)
                if RATES == 2:
                    sgd_rates(own_ptr, groups_ptr, settings_ptr, rates_ptr, place + lanes, tensors)


@triton.jit
def _settle(
    found_ptr, rules_ptr,
    scale_ptr, tracker_ptr, hysteresis_ptr, streak_ptr, steps_ptr, loss_ptr,
    skip_ptr, divisor_ptr, multiplier_ptr, row_ptr, tensors,
    ORDER: tl.constexpr, CLIP: tl.constexpr, DYNAMIC: tl.constexpr, UNSCALED: tl.constexpr,
    LOSS: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decides one step and moves the scale on; returns whether it is skipped.

    `found`: as `gather` leaves it.
    `rules`: largest norm, roof, growth, backoff, interval, min, max, hysteresis.
    `row`: skip, scale, norm, limit, clipped, step, loss not finite, NaN, Inf, and the tracker, the
    hysteresis and the streak as they were.
    """
    lanes = tl.arange(0, BLOCK)
    units = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    for place in range(0, tensors, BLOCK):
        at = place + lanes
        inside = at < tensors
        norms = tl.load(found_ptr + at, mask=inside, other=0.0)
        units = tl.maximum(units, tl.where(norms == norms, norms, 0.0))
        nans += tl.load(found_ptr + 3 * tensors + at, mask=inside, other=0.0)
        infs += tl.load(found_ptr + 4 * tensors + at, mask=inside, other=0.0)
    nan = tl.sum(nans)
    inf = tl.sum(infs)
    largest = tl.max(units)
    usable = (largest > 0.0) & (largest < float("inf"))
    unit = tl.where(usable, largest, 1.0)
    sums = tl.zeros([BLOCK], tl.float64)
    for place in range(0, tensors, BLOCK):
        at = place + lanes
        norms = tl.load(found_ptr + at, mask=at < tensors, other=0.0) / unit
        sums += norms * norms if ORDER == 2 else norms
    norm = tl.sum(sums)
    if ORDER == 2:
        norm = tl.sqrt(norm)
    norm = tl.where(usable, norm * unit, largest)
    if ORDER == 0:
        norm = largest
    if DOUBLE == 0:  # Rounded once, as `total.rounded` does it.
        fits = (norm >= 1.1754943508222875e-38) & (norm <= 3.4028234663852886e38)
        norm = tl.where(fits, norm.to(tl.float32).to(tl.float64), norm)
    norm = tl.where(nan > 0.0, float("nan"), norm)
    broken = (nan + inf) > 0.0

    stored = tl.load(scale_ptr)
    scale = stored.to(tl.float64)
    carried = scale * 0.0 + 1.0 if UNSCALED else scale
    true_norm = norm / carried
    coefficient = carried * 0.0 + 1.0
    limit = tl.load(rules_ptr)
    if CLIP:
        finite = tl.where(true_norm > 1.7976931348623157e308, 1.7976931348623157e308, true_norm)
        coefficient = limit / (finite + 1e-6)
        coefficient = tl.where(coefficient < 1.0, coefficient, 1.0)
        coefficient = tl.where(broken, 1.0, coefficient)
    multiplier = coefficient / carried
    roof = tl.load(rules_ptr + 1)
    too_large = (multiplier > 1.0) & (norm * multiplier > roof)
    usable_multiplier = multiplier < float("inf")
    skipped = broken | too_large | (usable_multiplier == 0)
    clipped = (coefficient < 1.0) & (skipped == 0)
    multiplier = tl.where(skipped, 1.0, multiplier)
    # As the fused optimizers take it: float32, and infinite only for a multiplier of 0.
    divisor = 1.0 / tl.where(multiplier > 0.0, multiplier, 1.0)
    divisor = tl.where(divisor > 3.4028234663852886e38, 3.4028234663852886e38, divisor)
    divisor = tl.where(multiplier > 0.0, divisor, float("inf"))
    skip = tl.where(skipped, 1.0, 0.0)
    tl.store(skip_ptr, skip.to(tl.float32))
    tl.store(divisor_ptr, divisor.to(tl.float32))
    tl.store(multiplier_ptr, multiplier)

    tracker = tl.load(tracker_ptr)
    hysteresis = tl.load(hysteresis_ptr)
    streak = tl.load(streak_ptr)
    steps = tl.load(steps_ptr) + 1
    if LOSS:
        value = tl.load(loss_ptr).to(tl.float64)
        loss = tl.where(tl.abs(value) < float("inf"), 0.0, 1.0)
    else:
        loss = scale * 0.0
    tl.store(row_ptr, skip)
    tl.store(row_ptr + 1, scale)
    tl.store(row_ptr + 2, true_norm)
    tl.store(row_ptr + 3, limit)
    tl.store(row_ptr + 4, tl.where(clipped, 1.0, 0.0))
    tl.store(row_ptr + 5, steps.to(tl.float64))
    tl.store(row_ptr + 6, loss)
    tl.store(row_ptr + 7, nan)
    tl.store(row_ptr + 8, inf)
    tl.store(row_ptr + 9, tracker.to(tl.float64))
    tl.store(row_ptr + 10, hysteresis.to(tl.float64))
    tl.store(row_ptr + 11, streak.to(tl.float64))
    tl.store(streak_ptr, tl.where(skipped, streak + 1, 0))
    tl.store(steps_ptr, steps)
    if DYNAMIC:
        _advance(rules_ptr + 2, scale_ptr, tracker_ptr, hysteresis_ptr, skipped)
    return skipped.to(tl.int32)


@unspecialized
def advance_kernel(skip_ptr, rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr):
    """Moves a dynamic scale on after a step that was taken or skipped."""
    _advance(rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, tl.load(skip_ptr) > 0.0)


@triton.jit
def _advance(rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, skipped):
    """The rule of `DynamicScale`; `rules`: growth, backoff, interval, min, max, hysteresis."""
    growth = tl.load(rules_ptr)
    backoff = tl.load(rules_ptr + 1)
    interval = tl.load(rules_ptr + 2)
    lowest = tl.load(rules_ptr + 3)
    highest = tl.load(rules_ptr + 4)
    refill = tl.load(rules_ptr + 5)
    scale = tl.load(scale_ptr).to(tl.float64)
    tracker = tl.load(tracker_ptr)
    hysteresis = tl.load(hysteresis_ptr)
    remaining = tl.where(skipped, hysteresis - 1, hysteresis)
    counted = tl.where(skipped, 0, tracker + 1)
    full = counted.to(tl.float64) >= interval
    grown = tl.where(scale * growth <= highest, scale * growth, scale)
    moved = tl.where(skipped & (remaining <= 0), scale * backoff, scale)
    moved = tl.where(full, grown, moved)
    moved = tl.where(moved < lowest, lowest, tl.where(moved > highest, highest, moved))
    tl.store(scale_ptr, moved.to(tl.float32))
    tl.store(tracker_ptr, tl.where(full, 0, counted))
    tl.store(hysteresis_ptr, tl.where(full, refill.to(tl.int32), remaining))
