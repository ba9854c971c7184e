"""Tensors enter, in whatever they are wrapped; their magnitudes leave, as numbers on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks._torch import sparse_values

__all__ = ["Magnitude", "magnitude", "tensors_in"]

_DEPTH = 8


class Magnitude(NamedTuple):
    """What a tensor holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    largest: float | None
    """The largest magnitude, None if an element is not finite."""
    nan: int
    inf: int

    @property
    def finite(self) -> bool:
        """Whether no element is NaN or Inf."""
        return not (self.nan or self.inf)

    @property
    def what(self) -> str:
        """'NaN', 'Inf' or 'NaN and Inf'."""
        return " and ".join(word for word, n in (("NaN", self.nan), ("Inf", self.inf)) if n)

    def named(self, name: str) -> Magnitude:
        """The same under another name."""
        return self._replace(name=name)


@torch.no_grad()
def magnitude(tensor: Tensor, name: str) -> Magnitude | None:
    """Reads a tensor, and waits for its device; None if it holds no floating-point numbers."""
    inner = _plain(tensor)
    if inner is None:
        return None
    nan = inf = 0
    largest = 0.0
    if inner.numel():
        size = inner.abs()
        largest = float(size.amax())  # NaN if one is.
        if not math.isfinite(largest):
            nan, inf = int(torch.isnan(size).sum()), int(torch.isinf(size).sum())
    kind = str(tensor.dtype).removeprefix("torch.")
    held = None if nan or inf else largest
    return Magnitude(name, tuple(tensor.shape), kind, held, nan, inf)


def _plain(tensor: Tensor) -> Tensor | None:
    inner: Any = tensor.detach()
    if hasattr(inner, "to_local"):
        inner = inner.to_local()
    if inner.layout is torch.sparse_coo:
        inner = sparse_values(inner)
    if inner.layout is not torch.strided or inner.is_meta:
        return None
    if inner.dtype.itemsize == 1 or not (inner.is_floating_point() or inner.is_complex()):
        return None
    return inner  # type: ignore[no-any-return]


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
