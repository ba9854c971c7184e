"""This rank's Measurement in, the ranks' Measurement out: one small collective a process group.

Every element counts once: of the ranks that hold the same elements one counts and the others send
0. p-th powers are added in float64, in units of the largest norm; the skip flag is the largest of
all flags. Every rank that a RankGroup names takes part, also one without gradients, and every rank
computes the same numbers from the same gathered values, so no two of them can decide differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels.host_numbers import numbers_on
from gradilocks.kernels.reference import rounded
from gradilocks.values import LocalDetail, Measurement, RankGroup, SharedDetail, moved

__all__ = [
    "largest_of_all",
    "mask_like",
    "reduce",
    "reduce_apart",
    "reduce_columns",
    "sum_of_all",
    "whole_columns",
]

_ROW = ("largest", "unit", "share", "nonfinite", "double")
"""What a rank tells of a list of tensors: the largest of their norms, the unit (that norm, or 1
where it cannot be one), the sum of their p-th powers in that unit, the skip flag, and whether one
is float64: the norm is rounded alike on all ranks, also on those that hold none."""


def reduce(
    measurement: Measurement,
    *,
    rank_group: RankGroup,
    counts: Sequence[bool] | None = None,
    notes: Sequence[Tensor] = (),
) -> tuple[Measurement, Tensor]:
    """Brings the measurements of ranks together that hold one model between them.

    Args:
        measurement: of the gradients that this rank holds.
        rank_group: the ranks, by one process group.
        counts: for each tensor, whether this rank's elements count; None if all do.
        notes: 0-d numbers that are to be told to every rank besides.

    Returns:
        A Measurement with the norm and the flag of all; the per-tensor numbers stay this rank's.
        And every rank's notes, a row a rank.
    """
    norms, order = measurement.tensors.norms, measurement.order
    mine = _row(norms, order, counts, measurement.nonfinite, double=measurement.double)
    told = torch.cat([mine, *(note.to(mine.dtype).reshape(1) for note in notes)])
    (group,) = rank_group.groups
    gathered = _gathered(told, group, rank_group.device)
    together = _combined(gathered[:, : len(_ROW)], order)
    return _whole(measurement, together), gathered[:, len(_ROW) :]


def whole_columns(columns: Tensor, *, order: float, rank_group: RankGroup) -> Tensor:
    """Numbers of each parameter over all ranks, for policies that bound tensors apart.

    Args:
        columns: a row a kind of number, a column a parameter, the same on every rank. In the first
            row the norm of this rank's elements, 0 where they do not count; in the second the
            largest magnitude; in all others what one rank tells and the others have 0 for.
        order: the p of the norm.
        rank_group: the ranks, by one process group or several to go through.
    """
    for group in rank_group.groups:
        rows = _gathered(columns.flatten(), group, rank_group.device).view(-1, *columns.shape)
        norms, peaks, told = rows[:, 0], rows[:, 1], rows[:, 2:]
        largest = norms.amax(dim=0)
        unit = _unit(largest)
        share = largest if order == math.inf else ((norms / unit) ** order).sum(dim=0)
        each = _norm(largest, unit, share, order)
        columns = torch.cat([torch.stack([each, peaks.amax(dim=0)]), told.sum(dim=0)])
    return columns


def reduce_apart(
    measurement: Measurement,
    *,
    rank_groups: Sequence[RankGroup],
    ranks: Sequence[tuple[int, ...] | None],
    counts: Sequence[bool],
    told: Tensor | None = None,
) -> tuple[Measurement, Tensor]:
    """Brings each tensor together over the ranks of its own mesh, and no others.

    Args:
        measurement: of the gradients that this rank holds.
        rank_groups: the ranks that hold tensors together with this one, in an order that is the
            same for all of them.
        ranks: for each tensor, over which ranks it lies; None for a plain one, which is this
            rank's own.
        counts: for each tensor, whether this rank's elements count.
        told: 1-d, numbers of this rank of which the largest of all is wanted, if there are any.

    Returns:
        A Measurement with the norm of all tensors of this rank, each one whole; the per-tensor
        numbers stay this rank's. And the largest of all for each of `told`; 0 if there is none.
    """
    order, norms, flag = measurement.order, measurement.tensors.norms, measurement.nonfinite
    largest = norms.new_zeros(1) if told is None else told.to(norms.dtype)
    if order <= 0.0:
        raise ValueError(
            f"norm_type must be positive where gradients are distributed, got {order:g}: what such "
            "a norm is over several ranks is not defined."
        )

    # Many tensors have the same tuple of perhaps a thousand ranks.
    different = dict(zip(map(id, ranks), ranks, strict=True))

    def row_of(theirs: tuple[int, ...] | None) -> Tensor:
        equal = {key for key, each in different.items() if each == theirs}
        at = [place for place, each in enumerate(ranks) if id(each) in equal]
        chosen = norms.index_select(0, numbers_on(norms.device, tuple(at), torch.int64))
        own = [counts[place] for place in at]
        return _row(chosen, order, own, flag, double=measurement.double)

    rows = [row_of(None)]
    for rank_group in rank_groups:
        row = row_of(rank_group.ranks)
        for group in rank_group.groups:
            gathered = _gathered(torch.cat([row, largest]), group, rank_group.device)
            row = _combined(gathered[:, : len(_ROW)], order)
            largest = gathered[:, len(_ROW) :].amax(dim=0)
        flag = row[_ROW.index("nonfinite")]
        rows.append(row)
    return _whole(measurement, _combined(torch.stack(rows), order)), largest


def reduce_columns(
    local: LocalDetail,
    *,
    weights: tuple[Tensor, Tensor],
    weight_places: Sequence[int],
    weight_counts: Sequence[bool],
    total: int,
    rank_group: RankGroup,
) -> SharedDetail:
    """What all ranks found of each parameter: one all_reduce of the largest, one of sums.

    64 bytes a parameter of the model travel, however many ranks there are. The results stay where
    the collectives run, so that under CPU offload nobody waits for them.

    Args:
        local: what this rank found of its gradients: 2-norms, with detail.
        weights: for each parameter of this rank its norm, and by how much the step changed it.
        weight_places: for each of those, its place among the parameters of all ranks.
        weight_counts: for each of those, whether this rank's elements count.
        total: how many parameters all ranks have.
        rank_group: as in `reduce`.
    """
    import torch.distributed as dist

    found, device = local.found, rank_group.device
    assert found.largest is not None
    assert found.zeros is not None
    dtype = found.norms.dtype

    def spread(column: Tensor, places: Sequence[int], counts: Sequence[bool]) -> Tensor:
        """A column along the parameters of all ranks; 0 where nothing counts."""
        at = numbers_on(device, tuple(places), torch.int64)
        there = moved(column, device).to(dtype)
        there = torch.where(mask_like(counts, there), there, torch.zeros_like(there))
        return there.new_zeros(total).index_add(0, at, there)

    def of_gradient(column: Tensor) -> Tensor:
        return spread(column, local.places, local.counts)

    def of_weight(column: Tensor) -> Tensor:
        return spread(column, weight_places, weight_counts)

    (group,) = rank_group.groups
    largest = of_gradient(found.largest)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    unit = _unit(largest)  # A norm is at most the root of its elements larger: no square overflows.
    elements = numbers_on(device, tuple(local.elements), dtype)
    sums = torch.stack(
        [
            (of_gradient(found.norms) / unit) ** 2,
            *map(of_gradient, (found.nan, found.inf, found.zeros, elements)),
            *(of_weight(column) ** 2 for column in weights),
        ]
    )
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    squares, nan, inf, zeros, count, weight, change = sums.unbind()
    return SharedDetail(
        norms=squares.sqrt() * unit,
        largest=largest,
        nan=nan,
        inf=inf,
        zeros=zeros,
        elements=count,
        weight=weight.sqrt(),
        change=change.sqrt(),
    )


def largest_of_all(numbers: Tensor, rank_groups: Sequence[RankGroup]) -> Tensor:
    """Each of `numbers`, the largest over the ranks of every group, on the device it came from.

    Args:
        numbers: 1-d, this rank's.
        rank_groups: in an order that is the same for all of their ranks.
    """
    import torch.distributed as dist

    together = numbers.clone()
    for rank_group in rank_groups:
        together = moved(together, rank_group.device)
        for group in rank_group.groups:
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    return moved(together, numbers.device)


def sum_of_all(numbers: Tensor, rank_group: RankGroup) -> Tensor:
    """Each of `numbers`, added up over the ranks of a group, on the device it came from.

    Unlike what is gathered, it does not grow with the number of ranks.

    Args:
        numbers: 1-d, this rank's.
        rank_group: by one process group or several to go through.
    """
    import torch.distributed as dist

    together = moved(numbers.clone(), rank_group.device)
    for group in rank_group.groups:
        dist.all_reduce(together, group=group)
    return moved(together, numbers.device)


def _row(
    norms: Tensor,
    order: float,
    counts: Sequence[bool] | None,
    nonfinite: Tensor,
    *,
    double: bool,
) -> Tensor:
    largest = norms.amax() if norms.numel() else norms.new_zeros(())
    unit = _unit(largest)
    share = norms.new_zeros(())
    if order != math.inf:
        powers = (norms / unit) ** order
        if counts is not None:
            powers = torch.where(mask_like(counts, norms), powers, torch.zeros_like(powers))
        share = powers.sum()
    wider = torch.full_like(largest, float(double))
    return torch.stack([largest, unit, share, nonfinite.to(norms.dtype), wider])


def mask_like(flags: Sequence[bool], like: Tensor) -> Tensor:
    """The flags as a tensor on the device of `like`."""
    return numbers_on(like.device, tuple(flags), torch.bool)


def _unit(largest: Tensor) -> Tensor:
    usable = (largest > 0) & torch.isfinite(largest)
    return torch.where(usable, largest, torch.ones_like(largest))


def _norm(largest: Tensor, unit: Tensor, share: Tensor, order: float) -> Tensor:
    """The norm whose p-th power is `share` in `unit`; 0, Inf and NaN are as in the largest."""
    if order == math.inf:
        return largest
    usable = (largest > 0) & torch.isfinite(largest)
    return torch.where(usable, unit * share ** (1.0 / order), largest)


def _gathered(mine: Tensor, group: Any, device: torch.device) -> Tensor:
    """Every rank's numbers, a row a rank, where `mine` lies; they travel by `device`."""
    import torch.distributed as dist

    there = moved(mine, device).contiguous()
    rows = there.new_zeros(dist.get_world_size(group), there.numel())
    dist.all_gather(list(rows.unbind(0)), there, group=group)
    return moved(rows, mine.device)


def _combined(rows: Tensor, order: float) -> Tensor:
    """One row from several."""
    norms, units, shares, flags, double = rows.unbind(dim=1)
    largest = norms.amax()
    unit = _unit(largest)
    share = torch.zeros_like(largest)
    if order != math.inf:
        # A row of nothing but zeros has unit 1 and share 0: it adds nothing, whatever the unit.
        share = torch.where(shares > 0, shares * (units / unit) ** order, 0.0).sum()
    return torch.stack([largest, unit, share, flags.amax(), double.amax()])


def _whole(measurement: Measurement, row: Tensor) -> Measurement:
    """The Measurement with the norm and the flag of all ranks."""
    largest, unit, share, flag, double = row.unbind()
    norm = _norm(largest, unit, share, measurement.order)
    norm = torch.where(double > 0, norm, rounded(norm))
    return replace(measurement, norm=norm, nonfinite=flag.to(torch.float32))
