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
from gradilocks.kernels.launch import Launch, launch_for
from gradilocks.kernels.located import Located, locate
from gradilocks.kernels.programs import change_kernel, gather_kernel, measure_kernel
from gradilocks.kernels.settling import settle_kernel
from gradilocks.values import ScaleState, Statistics

__all__ = [
    "clamp_",
    "measure",
    "measure_located",
    "multiply_",
    "multiply_and_check_",
    "settle",
    "try_out",
]

TILE = 2048
WARPS = 8
TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}
ORDERS = {2.0: 2, 1.0: 1, math.inf: 0}


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False) -> Statistics:
    """As `reference.measure`; the largest magnitude and the zeros are always found."""
    return _measured(tensors, None, order)


def multiply_and_check_(tensors: Sequence[Tensor], multiplier: Tensor | None) -> Statistics:
    """As `reference.multiply_and_check_`; every norm is known."""
    return _measured(tensors, multiplier, 2.0)


def multiply_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    """As `reference.multiply_`; a multiplier of 1 costs a launch and reads nothing."""
    _change(tensors, multiplier, clamp=False)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """As `reference.clamp_`; a bound of inf costs a launch and reads nothing."""
    _change(tensors, bound, clamp=True)


def try_out(device: torch.device) -> None:
    """Runs each kernel twice on a few numbers; raises if one does not compile or is wrong.

    Twice, because the second launch of a kernel takes a shorter way than the first.
    """
    numbers, expected = [torch.tensor([3.0, -4.0], device=device)], [3.0, 4.0]
    for _ in range(2):
        multiply_(numbers, torch.full((), 2.0, device=device))
        clamp_(numbers, torch.full((), 7.0, device=device))
        found = multiply_and_check_(numbers, torch.full((), 0.25, device=device))
        expected = [min(2.0 * number, 7.0) * 0.25 for number in expected]
        norm = math.hypot(*expected)
        wrong = found.norms.sub(norm).abs().gt(1e-6)
        if measure(numbers).norms.ne(found.norms).any() or wrong.any():
            raise RuntimeError(f"the kernels give {found.norms} where {norm} is right")


def measure_located(
    located: Located, *, multiplier: Tensor | None = None, order: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Measures tensors that the kernels can take.

    Returns:
        float64 [2, tensors], the norms and the largest magnitudes; int64 [3, tensors], how many
        elements are 0, NaN and Inf.
    """
    layout, device = located.layout, located.device
    chunks, count = layout.chunks, layout.count
    reals = torch.empty(2, chunks, dtype=torch.float64, device=device)
    counts = torch.empty(3, chunks, dtype=torch.int32, device=device)
    out_reals = torch.empty(2, count, dtype=torch.float64, device=device)
    out_counts = torch.empty(3, count, dtype=torch.int64, device=device)
    power = ORDERS[order]
    for bucket in layout.buckets:
        _measuring(bucket.kind, layout.chunk, power, multiplier)(
            bucket.chunks, device, located.pointers, layout.sizes, layout.owner, layout.index,
            layout.sizes if multiplier is None else multiplier, reals, counts,
            bucket.first, chunks,
        )  # fmt: skip
    launch_for(gather_kernel, 4, ORDER=power, BLOCK=1024)(
        count, device, layout.begin, layout.counts, reals, counts, out_reals, out_counts,
        chunks, count,
    )  # fmt: skip
    return out_reals, out_counts


def settle(
    reals: Tensor,
    counts: Tensor,
    rules: Tensor,
    state: ScaleState,
    streak: Tensor,
    steps: Tensor,
    loss: Tensor | None,
    skip: Tensor,
    divisor: Tensor,
    multiplier: Tensor,
    row: Tensor,
    *,
    order: float,
    clip: bool,
    dynamic: bool,
    unscaled: bool,
) -> None:
    """Decides a step and moves the scale on, in one launch; see `settling` for the arguments."""
    like = None if loss is None else loss.dtype
    launch_for(
        settle_kernel, 4, like, ORDER=ORDERS[order], CLIP=clip, DYNAMIC=dynamic,
        UNSCALED=unscaled, LOSS=loss is not None, BLOCK=1024,
    )(
        1, row.device, reals, counts, rules, state.scale, state.growth_tracker, state.hysteresis,
        streak, steps, row if loss is None else loss, skip, divisor, multiplier, row,
        reals.shape[1],
    )  # fmt: skip


def _measuring(kind: Any, chunk: int, power: int, multiplier: Tensor | None) -> Launch:
    dtype, align = kind
    return launch_for(
        measure_kernel, WARPS, None if multiplier is None else multiplier.dtype,
        MULTIPLY=multiplier is not None, ORDER=power, DTYPE=TYPES[dtype],
        SUM=_sum_type(dtype), CHUNK=chunk, TILE=min(TILE, chunk), ALIGN=align,
    )  # fmt: skip


def _measured(tensors: Sequence[Tensor], multiplier: Tensor | None, order: float) -> Statistics:
    located = locate(tensors)
    rest = located.rest
    if order not in ORDERS:
        rest = tuple(range(len(tensors)))
        shape = (3, len(tensors))
        reals = torch.empty(shape, dtype=torch.float64, device=located.device)
        counts = torch.empty(shape, dtype=torch.int64, device=located.device)
    else:
        reals, counts = measure_located(located, multiplier=multiplier, order=order)
    if rest:
        _fill_in([tensors[i] for i in rest], rest, multiplier, order, reals, counts)
    if multiplier is not None:
        torch.autograd.graph.increment_version(tensors)
    return Statistics(reals[0], counts[1], counts[2], largest=reals[1], zeros=counts[0])


def _fill_in(
    tensors: list[Tensor],
    places: Sequence[int],
    multiplier: Tensor | None,
    order: float,
    reals: Tensor,
    counts: Tensor,
) -> None:
    """What the kernels cannot take, by the reference, put into its places."""
    if multiplier is not None:
        reference.multiply_(tensors, multiplier)
    found = reference.measure(tensors, order=order, detail=True)
    assert found.largest is not None
    assert found.zeros is not None
    for column, place in enumerate(places):
        reals[0, place], reals[1, place] = found.norms[column], found.largest[column]
        counts[0, place] = found.zeros[column]
        counts[1, place], counts[2, place] = found.nan[column], found.inf[column]


def _change(tensors: Sequence[Tensor], number: Tensor, *, clamp: bool) -> None:
    located = locate(tensors)
    layout = located.layout
    for bucket in layout.buckets:
        kind: Any = bucket.kind
        dtype, align = kind
        launch = launch_for(
            change_kernel, WARPS, number.dtype, CLAMP=clamp, DTYPE=TYPES[dtype],
            SUM=_sum_type(dtype),
            CHUNK=layout.chunk, TILE=min(TILE, layout.chunk), ALIGN=align,
        )  # fmt: skip
        launch(
            bucket.chunks, located.device, located.pointers, layout.sizes, layout.owner,
            layout.index, number, bucket.first,
        )  # fmt: skip
    if located.rest:
        others = [tensors[i] for i in located.rest]
        (reference.clamp_ if clamp else reference.multiply_)(others, number)
    torch.autograd.graph.increment_version(tensors)


def _sum_type(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32
