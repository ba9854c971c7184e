"""found_inf flags: one a device, brought together to exactly 0 or exactly 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.values import moved

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


def agree_across_ranks(flags: dict[torch.device, Tensor], found_inf: Tensor, *, group: Any) -> None:
    """Sets every flag if any rank of the group has one set; a rank without gradients takes part."""
    import torch.distributed as dist

    if not flags:
        flags[found_inf.device] = found_inf.clone()
    together = any_flag(list(flags.values()))
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    for device in flags:
        flags[device] = moved(together, device)


def has_gradients(optimizer: Any) -> bool:
    """Whether any parameter of the optimizer has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def refuse_overflow(flags: dict[torch.device, Tensor], optimizer: Any, scale: Tensor) -> None:
    """Sets the flag where finite gradients, divided by a scale below 1, are finite no longer.

    A fused optimizer divides where nobody looks. Looked at on the CPU alone, where it costs
    nothing to find out that the scale is not below 1.
    """
    cpu = torch.device("cpu")
    if scale.device != cpu or cpu not in flags or bool(scale >= 1.0):
        return
    roof = torch.finfo(torch.float32).max * scale.double()
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is not None and grad.device == cpu and grad.layout is torch.strided:
                over = grad.numel() > 0 and grad.dtype is not torch.float64
                if over and bool(grad.abs().max().double() > roof):
                    flags[cpu] = torch.ones_like(flags[cpu])
