"""A Linear layer that stores in fp16 and computes in fp32, forward and backward.

This is what a tensor core does: fp16 in, fp32 accumulate, fp16 out. Rounding the storage around
fp32 arithmetic has the same numbers to lose (underflow to zero, overflow to inf) and runs on any
CPU at nearly the speed of fp32, where a real float16 matmul can be hundreds of times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def round_to_half(values: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest fp16 value, ties to even, kept as float32.

    Magnitudes up to 2^-25 become zero; from 65520 on they become inf.
    """
    return values.half().float()


def underflow_share(values: torch.Tensor) -> float:
    """Returns which share of the non-zero values fp16 rounds to zero; 0.0 if all are zero."""
    nonzero = values.count_nonzero().item()
    kept = round_to_half(values).count_nonzero().item()
    return 1.0 - kept / nonzero if nonzero else 0.0


class _HalfLinearFunction(torch.autograd.Function):
    """``y = x W^T + b``, with x, W, b, y and the four gradients rounded to fp16."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        inputs, weight = round_to_half(inputs), round_to_half(weight)
        ctx.save_for_backward(inputs, weight)
        return round_to_half(F.linear(inputs, weight, round_to_half(bias)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, weight = ctx.saved_tensors
        output_gradient = round_to_half(gradients[0])
        rows = output_gradient.flatten(0, -2)
        return (
            round_to_half(output_gradient @ weight),
            round_to_half(rows.T @ inputs.flatten(0, -2)),
            round_to_half(rows.sum(0)),
        )


class HalfLinear(nn.Linear):
    """``nn.Linear`` whose storage is rounded to fp16; the parameters themselves stay float32.

    The float32 parameters are the master weights of mixed precision training.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns ``inputs @ weight.T + bias`` for inputs of shape ``[..., in_features]``."""
        apply: Callable[..., torch.Tensor] = _HalfLinearFunction.apply
        return apply(inputs, self.weight, self.bias)
