"""What hooks on a model need: the tensors in whatever a module takes or returns, each with a name;
what to know a tensor by that was seen before; and a hook that no copy of the model has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks._torch import sparse_values

__all__ = ["Hook", "anchor", "storage_of", "tensors_in"]

_DEPTH = 8


def tensors_in(thing: object, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists, mappings and dataclasses, with a name for each."""
    if isinstance(thing, Tensor):
        yield name, thing
    elif depth > _DEPTH:
        return
    elif isinstance(thing, (list, tuple)):
        fields = getattr(thing, "_fields", range(len(thing)))
        for key, value in zip(fields, thing, strict=False):
            inner = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]"
            yield from tensors_in(value, inner, depth + 1)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from tensors_in(value, f"{name}[{key!r}]" if name else str(key), depth + 1)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            yield from tensors_in(
                getattr(thing, field.name, None), f"{name}.{field.name}", depth + 1
            )


def storage_of(tensor: Tensor) -> Any:
    """The memory of a tensor's elements: one object as long as somebody uses that memory.

    A weak reference to it tells a tensor that was seen before from another. One to the tensor would
    make `torch.utils.swap_tensors` refuse parameters and gradients, also in `model.to(...)`. The
    tensor itself, if it is of a kind that has no storage.
    """
    try:
        values = sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor
        return values.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # As of CSR, or of a lazy parameter.
        return tensor


def anchor(tensor: Tensor) -> Any:
    """What a weak reference is made to, to know a tensor again that modules hand to each other."""
    return storage_of(tensor) if isinstance(tensor, nn.Parameter) else tensor


class Hook:
    """A hook that stays behind when the model is copied or pickled: the copy's does nothing.

    Calls `act` with `first` and whatever torch hands to the hook.
    """

    def __init__(self, act: Callable[..., None], *first: Any) -> None:
        self._act, self._first = act, first

    def __call__(self, *args: Any) -> None:
        self._act(*self._first, *args)

    def __reduce__(self) -> Any:
        # Takes anything, returns None, and is there wherever the pickle is read.
        return getattr, (nullcontext(), "__exit__")
