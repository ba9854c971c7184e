"""Optimizer state as the kernels walk through it: on the parameter's device, in its order.

A kernel sees addresses. What lies elsewhere, in another order or in another dtype than it was told
would be read as something else, so whatever somebody has put into the state (offloaded, loaded,
reset by hand) is looked at here before its address is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels import pieces
from gradilocks.kernels.chunks import DTYPES

__all__ = ["alike", "check_shapes", "common_dtype", "tidy"]


def alike(param: Tensor, other: Tensor) -> bool:
    """Whether both are dense and lie in memory in the same order."""
    if param.is_contiguous() and other.is_contiguous():
        return True
    if param.shape != other.shape or not pieces.is_dense(param):
        return False
    # How far the next element is in a dimension of one does not matter.
    strides = zip(param.shape, param.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in strides)


def check_shapes(
    params: Sequence[Tensor], states: Any, columns: Sequence[str], name: Callable[[Tensor], str]
) -> None:
    """Refuses state of another shape than its parameter, before anything is changed."""
    for param in params:
        state = states.get(param)
        if not state:
            continue
        for column in (*columns, "master"):
            tensor = state.get(column)
            if tensor is not None and tensor.shape != param.shape:
                raise ValueError(
                    f"{name(param)} has shape {tuple(param.shape)} and its {column!r} has shape "
                    f"{tuple(tensor.shape)}. Put a {column!r} of the parameter's shape into "
                    "optimizer.state, or delete the parameter's entry to begin afresh."
                )


def common_dtype(param: Tensor, state: dict[str, Any], columns: Sequence[str]) -> torch.dtype:
    """The dtype of the moments if they agree, else the parameter's."""
    found: set[torch.dtype] = {state[name].dtype for name in columns if state.get(name) is not None}
    return found.pop() if len(found) == 1 and found <= set(DTYPES) else param.dtype


def tidy(
    body: Tensor,
    state: dict[str, Any],
    columns: Sequence[str],
    *,
    dtype: torch.dtype,
    odd: bool = False,
) -> None:
    """Replaces what does not lie as `body` does, or is not of `dtype`.

    Args:
        body: the parameter, or what is stepped in its place.
        state: of one parameter.
        columns: the names of its moments; a master is always float32.
        dtype: of the moments.
        odd: if true, everything is to be contiguous instead.
    """
    for name in (*columns, "master"):
        tensor = state.get(name)
        if tensor is None:
            continue
        wanted = torch.float32 if name == "master" else dtype
        made = tensor.to(body.device, wanted)
        if odd:
            made = made.contiguous()
        elif not alike(body, made):
            made = torch.empty_like(body, dtype=wanted).copy_(made)
        if made is not tensor:
            state[name] = made
