"""`--swap`: torch's scaler and clip functions are Gradilocks' for as long as the script runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradilocks import dropin, optim
from gradilocks.observe.replacing import Replacements

__all__ = ["OPTIMIZERS", "swap"]

OPTIMIZERS = ("AdamW", "Adam", "SGD")
_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


def swap(replaced: Replacements, *, parts: bool, optimizers: Iterable[str]) -> None:
    """Puts Gradilocks' parts in the place of torch's, wherever they are imported from.

    Args:
        replaced: puts them back later.
        parts: whether the scaler and the clip functions are swapped.
        optimizers: which optimizers are, by name.
    """
    if parts:
        for name in _FUNCTIONS:
            _put(replaced, getattr(torch.nn.utils, name), getattr(dropin, name))
        for home in (torch.cuda.amp, torch.cpu.amp):
            kind: Any = home.GradScaler
            _put(replaced, kind, _for_device(home.__name__.split(".")[1], kind))
        _put(replaced, torch.amp.GradScaler, dropin.GradScaler)
    for name in optimizers:
        _put(replaced, getattr(torch.optim, name), getattr(optim, name))


def _put(replaced: Replacements, original: Any, ours: Any) -> None:
    # Gradilocks' own modules go on with torch's: they are built on them.
    replaced.everywhere(original, ours, spare="gradilocks")


def _for_device(device: str, original: type) -> type:
    """Our scaler with the older signature, which leaves the device out."""

    class GradScaler(dropin.GradScaler):
        __doc__ = original.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(device, *args, **kwargs)

    GradScaler.__module__ = original.__module__
    GradScaler.__qualname__ = "GradScaler"
    return GradScaler
