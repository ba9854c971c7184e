"""Whatever holds tensors enters: a module's input or output; each tensor in it leaves, named.

And what may be referred to weakly in place of a tensor, to know it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gradilocks._torch import sparse_values

__all__ = ["anchor", "storage_of", "tensors_in"]

_DEPTH = 8


def tensors_in(thing: object, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists, mappings and dataclasses, with a name for each."""
    if isinstance(thing, Tensor):
        yield name, thing
    elif depth > _DEPTH:
        return
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from tensors_in(value, f"{name}[{key!r}]" if name else str(key), depth + 1)
    elif isinstance(thing, (list, tuple)):
        fields = getattr(thing, "_fields", range(len(thing)))
        for key, value in zip(fields, thing, strict=False):
            inner = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]"
            yield from tensors_in(value, inner, depth + 1)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            yield from tensors_in(
                getattr(thing, field.name, None), f"{name}.{field.name}", depth + 1
            )


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor's elements: one object as long as somebody uses that memory.

    A weak reference to it tells a tensor that was seen before from another. One to the tensor would
    make `torch.utils.swap_tensors` refuse parameters and gradients, also in `model.to(...)`.
    """
    values = sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor
    return values.untyped_storage()


def anchor(tensor: Tensor) -> Tensor | torch.UntypedStorage:
    """What a weak reference is made to, to know a tensor again that modules hand to each other."""
    return storage_of(tensor) if isinstance(tensor, nn.Parameter) else tensor
