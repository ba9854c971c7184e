"""A dynamic scale moved on in one launch, where the stages would take twenty."""

from __future__ import annotations

import torch
from torch import Tensor

from gradilocks.kernels.chunks import rules_for
from gradilocks.kernels.cuda_graph import keep_if_captured
from gradilocks.kernels.settling import advance_kernel
from gradilocks.kernels.triton_launch import launch_for

__all__ = ["advance"]


def advance(moving: tuple[Tensor, Tensor, Tensor], skip: Tensor, rules: tuple[float, ...]) -> None:
    """Moves scale, growth tracker and hysteresis on in place.

    Args:
        moving: float32, int32 and int32, all 0-d on one device.
        skip: 0-d, there too; above 0 if the step was skipped.
        rules: growth, backoff, interval, min, max, hysteresis.

    Raises:
        KernelFailed: the kernel does not compile; nothing has moved.
    """
    device: torch.device = moving[0].device
    sent = rules_for(rules, device)
    keep_if_captured(skip, *moving)
    launch_for(advance_kernel, 1, skip.dtype)(1, device, skip, sent, *moving)
