"""A tensor, or whatever holds some, enters; what can be measured of it leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradilocks._torch import sparse_values
from gradilocks.ranks.layout import is_distributed

__all__ = ["measurable", "tensors_in"]

_DEPTH = 8
_PLAIN = {Tensor, nn.Parameter}


def measurable(tensor: Tensor, *, any_subclass: bool = False) -> Tensor | None:
    """A tensor's own elements, or None if nothing can be measured; it stays as it is.

    The local shard of a DTensor, the values of a sparse tensor.

    Args:
        tensor: a gradient, an activation or a parameter.
        any_subclass: whether those of a class that nobody knows are taken as they are.
    """
    if type(tensor) not in _PLAIN:
        if is_distributed(tensor):
            tensor = cast("Tensor", cast("Any", tensor).to_local())
        if type(tensor) not in _PLAIN and not any_subclass:
            return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor if tensor.is_coalesced() else tensor.detach().coalesce()
        tensor = sparse_values(tensor)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype.itemsize == 1:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return tensor.detach()


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
