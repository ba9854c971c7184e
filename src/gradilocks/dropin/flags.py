"""found_inf flags: one a device, brought together to exactly 0 or exactly 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.ranks.collective import largest_of_all
from gradilocks.values import Meeting, moved, wide

__all__ = [
    "agree_across_ranks",
    "any_flag",
    "has_gradients",
    "largest_flag",
    "refuse_overflow",
]


def largest_flag(flags: Sequence[Tensor]) -> Tensor:
    """Above 0 if any flag is set; with one flag, that one itself."""
    together = flags[0]
    for flag in flags[1:]:
        together = torch.maximum(together, moved(flag, together.device))
    return together


def any_flag(flags: Sequence[Tensor]) -> Tensor:
    """Exactly 1 if any flag is set, exactly 0 if none is; a sum of flags would be neither."""
    return (largest_flag(flags) > 0).to(torch.float32)


def agree_across_ranks(
    flags: dict[torch.device, Tensor],
    found_inf: Tensor,
    meetings: Sequence[Meeting],
    beside: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Sets every flag if a rank of the meetings has one set; one without gradients takes part.

    Args:
        flags: this rank's, a device; changed in place.
        found_inf: what a rank without gradients says.
        meetings: the ranks that hold gradients together with this one.
        beside: 0-d numbers that travel along.

    Returns:
        The largest on any rank of each number that travelled along.
    """
    if not flags:
        flags[found_inf.device] = found_inf.clone()
    mine = any_flag(list(flags.values()))
    home = wide(mine.device)
    numbers = [mine.to(home), *(moved(each, mine.device).to(home) for each in beside)]
    together = largest_of_all(torch.stack(numbers), meetings)
    for device in flags:
        flags[device] = moved(together[0].float(), device)
    return list(together[1:].unbind())


def has_gradients(optimizer: Any) -> bool:
    """Whether any parameter of the optimizer has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def refuse_overflow(
    flags: dict[torch.device, Tensor], tensors: Iterable[Tensor], scale: Tensor
) -> None:
    """Sets the flag where finite gradients, divided by a scale below 1, are finite no longer.

    A fused optimizer divides where nobody looks. Looked at on the CPU alone, where it costs
    nothing to find out that the scale is not below 1.
    """
    cpu = torch.device("cpu")
    if scale.device != cpu or cpu not in flags or bool(scale >= 1.0):
        return
    roof = torch.finfo(torch.float32).max * scale.double()
    for tensor in tensors:
        over = tensor.device == cpu and tensor.numel() > 0 and tensor.dtype is not torch.float64
        if over and bool(tensor.abs().max().double() > roof):
            flags[cpu] = torch.ones_like(flags[cpu])
