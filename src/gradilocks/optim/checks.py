"""What the optimizers refuse, by the parameter's name, before anything is changed."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels.chunks import DTYPES

__all__ = ["check_group", "check_parameters", "check_settings", "refuse_gradients"]


def check_group(group: dict[str, Any], name: Callable[[Tensor], str]) -> None:
    """Refuses a new group of parameters that could not be stepped."""
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True was given, and a fused step cannot be differentiated through. "
            "Leave it out, or use torch.optim's optimizer of the same name with fused=False."
        )
    params = group["params"]
    check_parameters(params, name)
    if params:
        # A model on the CPU may be moved before its first step.
        device = params[0].device
        device = None if device.type in ("cpu", "meta") else device
        check_settings(group, device, name, params[0])


def check_parameters(params: Iterable[Tensor], name: Callable[[Tensor], str]) -> None:
    """Refuses a parameter of a dtype for which there is no kernel."""
    for param in params:
        if param.dtype not in DTYPES:
            raise TypeError(
                f"{name(param)} is {param.dtype}; float32, float16, bfloat16 and float64 have "
                f"kernels. Give it to an optimizer of torch.optim in a list of its own."
            )


def check_settings(
    group: dict[str, Any],
    device: torch.device | None,
    name: Callable[[Tensor], str],
    param: Tensor,
) -> None:
    """Refuses a learning rate or another setting that is a tensor no kernel can read.

    Args:
        group: of parameters.
        device: where they are; None if they may still move.
        name: tells a parameter's name, for the error message.
        param: one of the group.
    """
    for key in ("lr", "weight_decay", "eps", "momentum", "dampening"):
        value = group.get(key, 0.0)
        if not isinstance(value, Tensor):
            if not isinstance(value, numbers.Real):
                raise TypeError(
                    f"the {key} of {name(param)} is {value!r}, expected a number or a tensor with "
                    "one element."
                )
            continue
        if not value.is_floating_point():
            raise TypeError(
                f"the {key} of {name(param)} is a tensor of {value.dtype}, expected a floating "
                f"dtype. Use torch.tensor({key}, dtype=torch.float32)."
            )
        if value.numel() != 1:
            raise ValueError(
                f"the {key} of {name(param)} is a tensor of shape {tuple(value.shape)}, expected "
                "one number. Give parameters with another one a group of their own."
            )
        if device is not None and value.device.type != "cpu" and value.device != device:
            raise ValueError(
                f"the {key} of {name(param)} is a tensor on {value.device}, its parameter is on "
                f"{device}. Put it on that device or on the CPU."
            )


def refuse_gradients(optimizer: Any, name: Callable[[Tensor], str]) -> None:
    """Refuses a gradient with which neither the kernels nor torch's fused optimizers can step."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.device != param.device:
                raise ValueError(
                    f"the gradient of {name(param)} is on {grad.device}, the parameter on "
                    f"{param.device}. Move the model before the first backward(), or clear the "
                    "gradients after moving it."
                )
            if grad.shape != param.shape:
                raise ValueError(
                    f"the gradient of {name(param)} has shape {tuple(grad.shape)}, the parameter "
                    f"{tuple(param.shape)}. Clear the gradients after changing a parameter's shape."
                )
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of {name(param)} has layout {grad.layout}; only dense gradients "
                    "can be stepped here. Use torch.optim.SparseAdam or torch.optim.SGD for it."
                )
            if grad.dtype not in DTYPES:
                raise TypeError(
                    f"the gradient of {name(param)} is {grad.dtype}; float32, float16, bfloat16 "
                    "and float64 have kernels. Cast it, or give the parameter to an optimizer of "
                    "torch.optim in a list of its own."
                )
