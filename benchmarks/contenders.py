"""Training steps of torch and of both versions of Gradilocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Parameters, and settings that all contenders share."""

    params: Sequence[Tensor]
    loss: Callable[[], Tensor]
    limit: float
    scale: float | None
    """Initial loss scale; None for no scaling."""
    lr: float
    eps: float
    differentiate: Callable[[Tensor], object] = lambda scaled_loss: None
    """Computes the gradients. By default they exist already."""


def scaler_step(problem: Problem, package: Any, *, fused: bool | None = True) -> Callable[[], None]:
    """unscale_, clip_grad_norm_, step, update: torch's functions, or the drop-in ones of `package`.

    fused=None is torch's default, the foreach implementation; False would be a loop over the parameters.
    """
    params: Any = problem.params
    optimizer = torch.optim.AdamW(params, fused=fused, lr=problem.lr, eps=problem.eps)
    clip = torch.nn.utils.clip_grad_norm_ if package is None else package.clip_grad_norm_
    scaler_class = torch.amp.GradScaler if package is None else package.GradScaler
    device_type = params[0].device.type
    scaler = scaler_class(device_type, init_scale=problem.scale or 1.0, enabled=problem.scale is not None)

    def step() -> None:
        problem.differentiate(scaler.scale(problem.loss()))
        scaler.unscale_(optimizer)
        clip(params, problem.limit)
        scaler.step(optimizer)
        scaler.update()

    return step


def control_step(problem: Problem, package: Any, *, own: bool = True, layout: Any = None) -> Callable[[], None]:
    """GradientControl over gradilocks.optim.AdamW, or over torch's fused AdamW.

    A `layout` forces the step of one rank through the collective of several ranks.
    """
    params: Any = problem.params
    if own:
        optimizer = package.optim.AdamW(params, lr=problem.lr, eps=problem.eps)
    else:
        optimizer = torch.optim.AdamW(params, fused=True, lr=problem.lr, eps=problem.eps)
    scale = None if problem.scale is None else package.DynamicScale(init_scale=problem.scale)
    control = package.GradientControl(optimizer, scale=scale, clip=problem.limit)
    if layout is not None:
        control._layout = layout()

    def step() -> None:
        problem.differentiate(control.scale_loss(problem.loss()))
        control.step()

    return step
