"""Puts one thing in another's place, wherever modules hold it, and back again.

`swap` does so with torch's scaler, clip functions and optimizers: `gradilocks run --swap`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from gradilocks import dropin, optim

__all__ = ["Patches", "swap"]

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


class Patches:
    """Everything that was replaced, so that it can be put back."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._attributes: list[tuple[Any, str, Any, Any]] = []

    def everywhere(self, original: Any, replacement: Any, *, spare: str | None = None) -> None:
        """Every module that holds `original` under any name holds `replacement`.

        Those that import it later get it from where it lives, which is such a module. The modules
        of the package `spare` keep what they have.
        """
        for place, module in list(sys.modules.items()):
            if spare is not None and place.split(".")[0] == spare:
                continue
            fields = getattr(module, "__dict__", None)
            if type(fields) is dict:
                for name, value in list(fields.items()):
                    if value is original:
                        fields[name] = replacement
                        self._places.append((fields, name, original, replacement))

    def attribute(self, owner: Any, name: str, replacement: Any) -> None:
        """`owner.name` is `replacement`; `owner` has it itself, not by inheritance."""
        self._attributes.append((owner, name, vars(owner)[name], replacement))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Puts everything back, the last first; what the script has changed since stays."""
        for owner, name, original, replacement in reversed(self._attributes):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        for fields, name, original, replacement in reversed(self._places):
            if fields.get(name) is replacement:
                fields[name] = original
        self._attributes, self._places = [], []


def swap(patches: Patches, *, parts: bool, optimizers: Iterable[str]) -> None:
    """Puts Gradilocks' parts in the place of torch's, wherever they are imported from.

    Args:
        patches: puts them back later.
        parts: whether the scaler and the clip functions are swapped.
        optimizers: which optimizers are, by name.
    """
    # Gradilocks' own modules go on with torch's: they are built on them.
    put = partial(patches.everywhere, spare="gradilocks")
    if parts:
        for name in _FUNCTIONS:
            put(getattr(torch.nn.utils, name), getattr(dropin, name))
        for home in (torch.cuda.amp, torch.cpu.amp):
            kind: Any = home.GradScaler
            put(kind, _for_device(home.__name__.split(".")[1], kind))
        put(torch.amp.GradScaler, dropin.GradScaler)
    for name in optimizers:
        put(getattr(torch.optim, name), getattr(optim, name))


def _for_device(device: str, original: type) -> type:
    """Our scaler with the older signature, which leaves the device out."""

    class GradScaler(dropin.GradScaler):
        __doc__ = original.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(device, *args, **kwargs)

    GradScaler.__module__ = original.__module__
    GradScaler.__qualname__ = "GradScaler"
    return GradScaler
