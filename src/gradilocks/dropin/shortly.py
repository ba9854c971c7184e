"""The drop-ins' short ways, where the kernels take every gradient: few launches and few looks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.dropin.once import writing_ourselves
from gradilocks.kernels.chunks import ORDERS
from gradilocks.values import NonFinite, moved

__all__ = ["clipped_shortly", "looked_shortly"]


def clipped_shortly(
    params: Sequence[Tensor],
    bound: float,
    order: float,
    check: Callable[[Tensor, bool], Tensor],
) -> Tensor | None:
    """Clips the gradients of `params`, if all of them are plain and where the kernels serve.

    Args:
        params: parameters.
        bound: the largest norm.
        order: the p of the norm.
        check: is given the norm, and whether a gradient is float64, before anything is written;
            may raise, and makes of it what the user gets.

    Returns:
        What `check` returned; None if the long way has to be taken, and nothing has been done.
    """
    if order not in ORDERS or not params or not kernels.is_fused(params[0].device):
        return None
    limiting: Any = importlib.import_module("gradilocks.kernels.limiting")
    plain = limiting.plain_gradients(params)
    if plain is None:
        return None
    double = torch.float64 in plain.dtypes
    try:
        norm, coefficient = limiting.limit(plain, bound, order)
        norm = check(norm, double)
        with writing_ourselves(params):
            limiting.multiply_(plain, coefficient)
    except kernels.KernelFailed:  # Which has been said, and nothing has been written.
        return None
    return norm


class Look(NamedTuple):
    """What `unscale_` found in the gradients of an optimizer."""

    device: torch.device
    params: list[Tensor]
    flag: Tensor
    """float32, 0-d: exactly 1 if an element is NaN or Inf, else exactly 0."""
    counted: Callable[[], NonFinite]


def looked_shortly(
    params: Sequence[Tensor], multiplier: Tensor | None, *, allow_fp16: bool
) -> Look | None:
    """Multiplies the gradients of `params` while looking at them, if all of them are plain.

    Returns:
        What was found; None if the long way has to be taken, and nothing has been done.
    """
    if not params or not kernels.is_fused(params[0].device):
        return None
    limiting: Any = importlib.import_module("gradilocks.kernels.limiting")
    plain = limiting.plain_gradients(params)
    if plain is None or (torch.float16 in plain.dtypes and not allow_fp16):
        return None
    factor = None if multiplier is None else moved(multiplier, plain.device)
    try:
        seen = limiting.look(plain, factor)
    except kernels.KernelFailed:  # Which has been said, and nothing has been written.
        return None
    having = [param for param in params if param.grad is not None]
    counted = functools.partial(limiting.nonfinite_of, seen.found)
    return Look(plain.device, having, seen.skip, counted)
