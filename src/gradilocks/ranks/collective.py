"""Collectives of a step: one row of numbers per rank, and norms per tensor or group.

All ranks compute from the same gathered rows in the same order, so all reach the same decision bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from gradilocks.errors import RanksDiffer
from gradilocks.ranks.layout import Layout, format_ranks

RANK_ROW = ("power", "nonfinite", "first_bad", "loss", "has_loss", "largest", "scale", "step")
"""Numbers of one rank and step, in float64. power: sum of share · norm ** p; for p = inf the largest norm. nonfinite:
number of NaN and Inf. first_bad: index of the first parameter in backward order that has one, which is the last in the
list; -1 for none. scale: negative if `unscale_` was called."""


def gather_rows(row: Tensor, layout: Layout) -> Tensor:
    """All-gathers one row per rank.

    Args:
        row: 1-d, float64.
        layout: ranks that decide together.

    Returns:
        [ranks, len(row)] on the device of `row`, in the order of `layout.ranks`.
    """
    rows = row.to(layout.device)
    # The innermost dimension is gathered first, so that the rows end up in row-major order.
    for group in reversed(layout.groups):
        rows = gather_flat(rows, group)
    return rows.view(layout.size, -1).to(row.device)


def gather_flat(tensor: Tensor, group: Any) -> Tensor:
    """All-gathers a 1-d tensor over one process group and concatenates the parts by rank."""
    import torch.distributed as dist

    result = tensor.new_empty(group.size() * tensor.numel())
    # torch 2.13 renamed all_gather_into_tensor and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(result, tensor, group=group)
    return result


def reduce_powers(powers: Tensor, layout: Layout, order: float, *, over: Literal["spmd", "group"]) -> Tensor:
    """Sums p-th powers over ranks; for p = inf takes the largest.

    Args:
        powers: 1-d, one per tensor or group, weighted with the shares.
        layout: the ranks.
        order: p.
        over: "spmd" for the ranks with the same parameter list (`layout.spmd_groups`), "group" for all.
    """
    import torch.distributed as dist

    operation = dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM
    result = powers.to(layout.device, copy=True)
    for group in layout.spmd_groups if over == "spmd" else layout.groups:
        dist.all_reduce(result, operation, group=group)
    return result.to(powers.device)


def combine(rows: Tensor, order: float) -> tuple[Tensor, Tensor, Tensor]:
    """Combines the rows of all ranks.

    Args:
        rows: [ranks, len(RANK_ROW)].
        order: p of the norm.

    Returns:
        Norm, number of NaN and Inf, largest magnitude; each 0-d.
    """
    columns = dict(zip(RANK_ROW, rows.unbind(dim=1), strict=True))
    power = columns["power"]
    norm = power.amax() if order == math.inf else power.sum() ** (1.0 / order)
    return norm, columns["nonfinite"].sum(), columns["largest"].amax()


def disagreement(rows: Tensor) -> Tensor:
    """0-d bool: True if ranks are at different scales or steps. No host read."""
    columns = rows[:, RANK_ROW.index("scale") : RANK_ROW.index("step") + 1]
    return (columns != columns[:1]).any()


def first_culprits(rows: Tensor, names_by_rank: Sequence[Sequence[str]]) -> list[str]:
    """The first parameter in backward order that has NaN or Inf, of each rank that has one. Waits for the device.

    Args:
        rows: [ranks, len(RANK_ROW)].
        names_by_rank: as `handshake` returns them.
    """
    indices = rows[:, RANK_ROW.index("first_bad")].tolist()
    lists = names_by_rank if len(names_by_rank) > 1 else [names_by_rank[0]] * len(indices)
    return [names[int(index)] for names, index in zip(lists, indices, strict=True) if index >= 0]


def describe_disagreement(rows: Tensor, layout: Layout) -> str:
    """Returns the message of RanksDiffer for rows that disagree. Waits for the device."""
    parts = []
    for name in ("scale", "step"):
        numbers = rows[:, RANK_ROW.index(name)].tolist()
        values = [f"{number:g}" if number > 0 else f"{-number:g} after unscale_()" for number in numbers]
        if len(set(values)) > 1:
            parts.append(f"{name} differs: {_by_rank(values, layout.ranks)}")
    return (
        f"{'; '.join(parts)}. The step was skipped on every rank. Load the same checkpoint and make the same calls of "
        "step() and unscale_() on every rank."
    )


def handshake(
    layout: Layout, settings: Mapping[str, str], names: Sequence[str], *, per_tensor: bool = False
) -> tuple[Sequence[str], ...]:
    """Compares settings and parameter lists over all ranks, once, at the first step.

    Sends a few hundred bytes per rank. Names are sent only if parameter lists differ: along the `distinct=`
    dimensions if that explains all differences, otherwise to all ranks.

    Args:
        layout: ranks that decide together.
        settings: text by argument, compared over ranks in addition to `distinct=` and `share=`.
        names: names of this rank's parameters.
        per_tensor: True if per-tensor norms are reduced over ranks, which requires equal parameter lists.

    Returns:
        The names of every rank's parameters in the order of `layout.ranks`, or one list if all are equal.

    Raises:
        RanksDiffer: on every rank, if settings differ or ranks that should hold the same parameters do not.
        ValueError: on every rank, if per-tensor norms are needed and the layout cannot provide them.
    """
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=16).digest()
    # The default __repr__ of a policy contains its address, which differs between ranks.
    settings = {key: re.sub(r" at 0x[0-9a-f]+", "", text) for key, text in settings.items()}
    settings |= {"distinct=": repr(layout.distinct), "share=": "a function" if layout.has_share_function else "None"}
    entries = _gather_objects((settings, layout.has_tensor_norms, layout.stage, digest), layout.groups)
    for key in settings:
        values = [entry[key] for entry, *_ in entries]
        if len(set(values)) > 1:
            raise RanksDiffer(
                f"{key} differs: {_by_rank(values, layout.ranks)}. Construct the control identically on every rank."
            )
    if per_tensor and not all(has_tensor_norms for _, has_tensor_norms, *_ in entries):
        raise ValueError(
            "clip= needs the norm of each tensor, which is unknown: with both share= and distinct=, or with a "
            "DTensor that spans a distinct= dimension, parts of one parameter may be on several stages. Use a policy "
            "for the model or for groups, such as ClipByNorm or ClipPerGroup."
        )
    stages = [stage for _, _, stage, _ in entries]
    if len({digest for *_, digest in entries}) == 1:
        return (names,)
    if len({(stage, digest) for _, _, stage, digest in entries}) == len(set(stages)):
        by_stage = dict(_gather_objects((layout.stage, names), layout.distinct_groups))
        return tuple(by_stage[stage] for stage in stages)
    by_rank = tuple(_gather_objects(tuple(names), layout.groups))
    if per_tensor or not layout.has_share_function:
        _raise_for_different_lists(by_rank, stages, layout)
    return by_rank


def _raise_for_different_lists(by_rank: Sequence[Sequence[str]], stages: Sequence[int], layout: Layout) -> None:
    """Raises RanksDiffer for the first two ranks of one stage with different parameter lists."""
    for i, names in enumerate(by_rank):
        j = stages.index(stages[i])
        if names == by_rank[j]:
            continue
        ranks = layout.ranks[j], layout.ranks[i]
        extra = sorted(set(names) ^ set(by_rank[j]))
        owner = ranks[1] if extra and extra[0] in names else ranks[0]
        detail = f"only rank {owner} has {extra[0]}" if extra else "their order differs"
        raise RanksDiffer(
            f"{format_ranks(ranks)} should hold the same parameters, but {detail}. For pipeline stages or experts, "
            'pass mesh= and name their dimension in distinct=, such as distinct=("pp",).'
        )


def common_to_all(items: Sequence[str], layout: Layout) -> list[str]:
    """Returns the items that every rank passes, such as patterns without a match on any rank. A collective."""
    common = set.intersection(*map(set, _gather_objects(list(items), layout.groups)))
    return [item for item in items if item in common]


def _gather_objects(item: Any, groups: Sequence[Any]) -> list[Any]:
    """All-gathers a picklable object over groups, one after the other, in row-major order."""
    import torch.distributed as dist

    items = [item]
    for group in reversed(groups):
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, items, group=group)
        items = [item for part in parts for item in part]
    return items


def _by_rank(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Values with the ranks that have them: `1.0 on ranks 0-2, 0.5 on rank 3`."""
    return ", ".join(
        f"{value} on {format_ranks([rank for rank, other in zip(ranks, values, strict=True) if other == value])}"
        for value in dict.fromkeys(values)
    )
