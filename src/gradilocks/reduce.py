"""This rank's Measurement in, the run's Measurement out: one small collective.

Every element of the model counts once. A rank's contribution is divided by the number of ranks that
hold the same elements and all contributions are added; the skip flag is the largest of all flags.
Every rank takes part, also one without gradients, and every rank computes the same numbers from the
same gathered values, so no two ranks can decide differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradilocks.total import rounded
from gradilocks.values import Measurement, moved

__all__ = ["agreed", "reduce", "reduce_each"]


def reduce(
    measurement: Measurement, *, group: Any = None, replicas: Sequence[int] | None = None
) -> Measurement:
    """Brings the ranks' measurements together.

    Args:
        measurement: of the gradients that this rank holds.
        group: the process group whose ranks together hold the model; None for the default group.
        replicas: for each tensor, how many ranks of the group hold the same elements; None if no
            two ranks hold the same.

    Returns:
        A Measurement with the run's norm and flag; the per-tensor numbers stay this rank's.
    """
    import torch.distributed as dist

    order, norms = measurement.order, measurement.tensors.norms
    largest = norms.amax() if norms.numel() else norms.new_zeros(())
    safe = torch.where((largest > 0) & torch.isfinite(largest), largest, torch.ones_like(largest))
    if order == math.inf:
        share = norms.new_zeros(())
    else:
        powers = (norms / safe) ** order
        if replicas is not None:
            shared = torch.tensor(replicas, dtype=norms.dtype, device="cpu")
            powers = powers / moved(shared, norms.device)
        share = powers.sum()
    mine = torch.stack([largest, safe, share, measurement.nonfinite.to(norms.dtype)])
    gathered = mine.new_zeros(dist.get_world_size(group), mine.numel())
    dist.all_gather(list(gathered.unbind(0)), mine, group=group)
    return replace(
        measurement,
        norm=rounded(_total(gathered, order), double=measurement.double),
        nonfinite=gathered[:, 3].amax().to(torch.float32),
    )


def reduce_each(
    measurement: Measurement, *, replicas: Sequence[int], places: Sequence[int], count: int
) -> Measurement:
    """As `reduce` of distributed tensors, and the norm of each tensor over all ranks besides.

    Args:
        measurement: of the gradients that this rank holds; of one parameter another rank may have
            none.
        replicas: for each tensor, how many ranks hold the same elements.
        places: for each tensor, the place of its parameter among those of the model.
        count: how many parameters the model has, the same on every rank.
    """
    import torch.distributed as dist

    whole = reduce(measurement, replicas=replicas)
    norms = measurement.tensors.norms
    here = moved(torch.tensor(list(places), dtype=torch.int64), norms.device)
    mine = norms.new_zeros(count).index_copy(0, here, norms)
    gathered = norms.new_zeros(dist.get_world_size(), count)
    dist.all_gather(list(gathered.unbind(0)), mine)
    gathered = gathered[:, here]
    if measurement.order == math.inf:
        each = gathered.amax(dim=0)
    else:
        unit = gathered.amax(dim=0)
        unit = torch.where((unit > 0) & torch.isfinite(unit), unit, torch.ones_like(unit))
        shares = moved(torch.tensor(replicas, dtype=norms.dtype, device="cpu"), norms.device)
        powers = ((gathered / unit) ** measurement.order / shares).sum(dim=0)
        each = unit * powers ** (1.0 / measurement.order)
    return replace(whole, tensors=replace(measurement.tensors, norms=each))


def agreed(
    peak: Tensor, broken_loss: Tensor, *, group: Any, ranks: bool
) -> tuple[Tensor, Tensor | None]:
    """The largest magnitude, and whether a loss was not finite, alike on every rank.

    Where ranks hold parts of the model it takes a small collective. Where each holds all of it the
    gradients are the same, but a loss is a rank's own: then it is no evidence for anybody.

    Args:
        peak: 0-d, of this rank's gradients.
        broken_loss: 0-d, 1 if this rank's loss was NaN or Inf.
        group: the ranks that together hold the model; None for the default group.
        ranks: whether they hold parts of it.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return peak, broken_loss
    if not ranks:
        return peak, None
    both = torch.stack([peak, broken_loss.to(peak.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0], both[1]


def _total(gathered: Tensor, order: float) -> Tensor:
    """The norm from every rank's (largest, unit, sum of p-th powers in that unit)."""
    largest, units, shares = gathered[:, 0].amax(), gathered[:, 1], gathered[:, 2]
    if order == math.inf:
        return largest
    usable = (largest > 0) & torch.isfinite(largest)
    unit = torch.where(usable, largest, torch.ones_like(largest))
    # A rank with nothing but zeros has unit 1 and share 0: it adds nothing, whatever the unit.
    sums = torch.where(shares > 0, shares * (units / unit) ** order, torch.zeros_like(shares))
    return torch.where(usable, unit * sums.sum() ** (1.0 / order), largest)
