"""float32 masters of half-precision parameters: kept in the optimizer's state under "master".

A step of 1e-4 is lost on a bfloat16 weight of 1: the next number is 8e-3 away. The master takes it,
and the parameter is the master rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import version

__all__ = ["HALF", "Marks", "ensure", "follow", "mark", "needs_master", "restore"]

HALF = (torch.float16, torch.bfloat16)

Marks = dict[Tensor, tuple[int, int]]
"""By parameter: its version and its address when it was last its master rounded."""


def needs_master(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether this parameter is stepped through a float32 master."""
    return bool(group["master_weights"]) and param.dtype in HALF


def mark(param: Tensor) -> tuple[int, int]:
    """Changes when somebody writes to the parameter, or gives it other storage."""
    plain = type(param) in (Tensor, torch.nn.Parameter)
    return version(param), param.data_ptr() if plain else 0


def ensure(param: Tensor, state: dict[str, Any], marks: Marks) -> None:
    """Makes a master, or lets the one that is there follow what was written to its parameter."""
    now = mark(param)
    master = state.get("master")
    if master is None:
        state["master"] = param.detach().float()
    elif marks.get(param) != now:
        if master.device != param.device or master.dtype is not torch.float32:
            master = state["master"] = master.to(param.device, torch.float32)
        follow([param], [master])
    marks[param] = now


def follow(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Takes over what somebody has written to the parameters, such as loaded weights.

    Where a parameter is still its master rounded, the master stays as exact as it is.
    """
    for param, master in zip(params, masters, strict=True):
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))


def restore(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Puts back what torch's `load_state_dict` has rounded to the parameters' dtype."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, param in zip(saved, params, strict=True):
        entries = state_dict["state"].get(key, {})
        if "master" not in entries:
            continue
        for name, value in entries.items():
            if isinstance(value, Tensor) and name != "step":
                # A copy: torch hands over what it does not have to convert.
                optimizer.state[param][name] = value.detach().to(param.device, copy=True)
