"""Whatever holds tensors enters: a module's input or output; each tensor in it leaves, named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor

__all__ = ["tensors_in"]

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
