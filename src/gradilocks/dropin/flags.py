"""found_inf flags: one a device, brought together to exactly 0 or exactly 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.values import moved

__all__ = ["agree_across_ranks", "any_flag"]


def any_flag(flags: Sequence[Tensor]) -> Tensor:
    """Exactly 1 if any flag is set, exactly 0 if none is; a sum of flags would be neither."""
    together = flags[0].clone()
    for flag in flags[1:]:
        together = torch.maximum(together, moved(flag, together.device))
    return (together > 0).to(torch.float32)


def agree_across_ranks(flags: dict[torch.device, Tensor], found_inf: Tensor, *, group: Any) -> None:
    """Sets every flag if any rank of the group has one set; a rank without gradients takes part."""
    import torch.distributed as dist

    if not flags:
        flags[found_inf.device] = found_inf.clone()
    together = any_flag(list(flags.values()))
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    for device in flags:
        flags[device] = together.to(device)
