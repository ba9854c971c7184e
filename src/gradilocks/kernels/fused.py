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
    "scratch_for",
    "settle",
    "statistics_of",
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
    located: Located,
    *,
    multiplier: Tensor | None = None,
    order: float = 2.0,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Measures tensors that the kernels can take.

    Args:
        located: the tensors.
        multiplier: 0-d; what they are multiplied by first.
        order: 1, 2 or inf.
        scratch: made by `scratch_for`, by a caller that measures again and again on one stream.

    Returns:
        float64 [5, tensors]: norms, largest magnitudes, and how many are 0, NaN and Inf.
    """
    layout, device = located.layout, located.device
    chunks, count = layout.chunks, layout.count
    reals, counts = scratch or scratch_for(located)
    found = torch.empty(5, count, dtype=torch.float64, device=device)
    key = (order, None if multiplier is None else multiplier.dtype)
    launches = layout.launches.get(key)
    if launches is None:
        launches = [
            _measuring(b.kind, layout.chunk, ORDERS[order], multiplier) for b in layout.buckets
        ]
        launches.append(launch_for(gather_kernel, 4, ORDER=ORDERS[order], BLOCK=1024))
        layout.launches[key] = launches
    for bucket, launch in zip(layout.buckets, launches, strict=False):
        launch(
            bucket.chunks, device, located.pointers, layout.sizes, layout.owner, layout.index,
            layout.sizes if multiplier is None else multiplier, reals, counts,
            bucket.first, chunks,
        )  # fmt: skip
    launches[-1](
        count, device, layout.begin, layout.counts, reals, counts, found, chunks, count
    )  # fmt: skip
    return found


def scratch_for(located: Located) -> tuple[Tensor, Tensor]:
    """Room for what is found in each chunk: 28 bytes a chunk."""
    chunks = located.layout.chunks
    return (
        torch.empty(2, chunks, dtype=torch.float64, device=located.device),
        torch.empty(3, chunks, dtype=torch.int32, device=located.device),
    )


def settle(
    found: Tensor,
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
        1, row.device, found, rules, state.scale, state.growth_tracker, state.hysteresis,
        streak, steps, row if loss is None else loss, skip, divisor, multiplier, row,
        found.shape[1],
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
        found = torch.empty(5, len(tensors), dtype=torch.float64, device=located.device)
    else:
        found = measure_located(located, multiplier=multiplier, order=order)
    if rest:
        _fill_in([tensors[i] for i in rest], rest, multiplier, order, found)
    if multiplier is not None:
        torch.autograd.graph.increment_version(tensors)
    return statistics_of(found)


def statistics_of(found: Tensor) -> Statistics:
    """The Statistics in what `measure_located` returns."""
    counts = found[2:].to(torch.int64)
    return Statistics(found[0], counts[1], counts[2], largest=found[1], zeros=counts[0])


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
