"""`clip_grad_norm_` the short way: three launches, where the kernels take every gradient."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradilocks import kernels
from gradilocks.clip import clip_coefficient
from gradilocks.dropin import known
from gradilocks.dropin.once import writing_ourselves
from gradilocks.dropin.total import total

__all__ = ["clipped_shortly"]

_ORDERS = (2.0, 1.0, float("inf"))


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
    if order not in _ORDERS or not params or params[0].device.type == "meta":
        return None
    if not kernels.is_fused(params[0].device):
        return None
    limiting: Any = importlib.import_module("gradilocks.kernels.limiting")
    plain = limiting.plain_gradients(params)
    if plain is None:
        return None
    seen = known.recalled(plain.tensors) if order == 2.0 else None
    try:
        if seen is not None:
            found = total(seen, order, plain.double)
            norm, coefficient = found.norm, clip_coefficient(found.norm, bound, found.nonfinite)
        else:
            norm, coefficient = limiting.limit(plain, bound, order)
        norm = check(norm, plain.double)
        with writing_ourselves(params):
            limiting.multiply_(plain, coefficient)
    except kernels.KernelFailed:  # Which has been said, and nothing has been written.
        return None
    return norm
