"""float32 masters of half-precision parameters: kept in the optimizer's state under "master".

A step of 1e-4 is lost on a bfloat16 weight of 1: the next number is 8e-3 away. The master takes it,
and the parameter is the master rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["HALF", "follow", "needs_master", "restore", "step_with"]

HALF = (torch.float16, torch.bfloat16)


def needs_master(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether this parameter is stepped through a float32 master."""
    return bool(group["master_weights"]) and param.dtype in HALF


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


def step_with(optimizer: Any, step: Callable[[], None]) -> None:
    """Runs torch's `step` on the masters instead of the parameters that have one.

    For devices without kernels of ours; needs a float32 copy of their gradients.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = list(_stand_ins(optimizer, group, pairs))
        step()
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        for param, master in pairs:
            state = optimizer.state.pop(master, {})
            master.grad = None
            optimizer.state[param] = {**state, "master": master}
            param.copy_(master)
            optimizer.versions[param] = param._version


def _stand_ins(
    optimizer: Any, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]
) -> Iterator[Tensor]:
    for param in group["params"]:
        if param.grad is None or not needs_master(param, group):
            yield param
            continue
        state = optimizer.state.pop(param, {})
        master = state.pop("master", None)
        if master is None:
            master = param.detach().float()
        elif optimizer.versions.get(param) != param._version:
            follow([param], [master])
        if state:
            optimizer.state[master] = state
        master.grad = param.grad.float()
        pairs.append((param, master))
        yield master
