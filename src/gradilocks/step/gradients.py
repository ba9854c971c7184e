"""Which tensors are the gradients.

Parameters enter; the tensors to be measured and multiplied leave: the values of a sparse gradient,
the local shard of a distributed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gradilocks.errors import SharedParameter
from gradilocks.kernels.located import DTYPES
from gradilocks.ranks.layout import Layout, is_distributed, layout_of

__all__ = [
    "Gradients",
    "collect",
    "every_parameter",
    "parameters_of",
    "roof_of",
]


@dataclass(frozen=True)
class Gradients:
    """The parameters that have a gradient, in optimizer order, and that gradient's own elements."""

    params: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout | None, ...] = ()
    """How each lies on the ranks: None for a plain tensor; () if no gradient is distributed."""


def collect(params: Iterable[Tensor], *, name: Callable[[Tensor], str]) -> Gradients:
    """Finds the gradients of `params`, each parameter once, and refuses what cannot be measured.

    A sparse gradient is coalesced first and put back: the same index listed twice is one element.

    Args:
        params: parameters, with or without a gradient.
        name: tells a parameter's name, for the error message.

    Returns:
        The gradients that there are.
    """
    seen: set[int] = set()
    having: list[Tensor] = []
    tensors: list[Tensor] = []
    layouts: dict[int, Layout] = {}
    known: dict[tuple[int, Any], Layout] = {}
    for param in params:
        grad = param.grad
        if grad is None or id(param) in seen:
            continue
        seen.add(id(param))
        plain = type(grad) is Tensor and grad.dtype in DTYPES and grad.layout is torch.strided
        if plain and not grad.is_meta:  # Nearly all are.
            having.append(param)
            tensors.append(grad)
            continue
        layout = None
        if grad.layout is not torch.strided:
            grad = _sparse_values(param, grad, name)
        elif type(grad) is not Tensor and is_distributed(grad):
            layout = layout_of(param, grad, name, known)
            grad = cast("Tensor", cast("Any", grad).to_local())
        if grad.is_meta:
            raise ValueError(
                f"the gradient of {name(param)} is on the meta device and has no values. Give the "
                "model real storage first, for example model.to_empty(device='cpu')."
            )
        if grad.dtype.itemsize == 1 or not (grad.is_floating_point() or grad.is_complex()):
            raise TypeError(
                f"the gradient of {name(param)} is {grad.dtype}, in which nothing is computed. "
                "Keep parameters in float32, bfloat16, float16 or float64 and use narrower formats "
                "inside the forward pass only."
            )
        having.append(param)
        tensors.append(grad)
        if layout is not None:
            layouts[len(tensors) - 1] = layout
    every = [layouts.get(place) for place in range(len(tensors))] if layouts else []
    return Gradients(tuple(having), tuple(tensors), tuple(every))


def _sparse_values(param: Tensor, grad: Tensor, name: Callable[[Tensor], str]) -> Tensor:
    if grad.layout is not torch.sparse_coo:
        raise ValueError(
            f"the gradient of {name(param)} has layout {grad.layout}; strided and sparse_coo "
            "gradients are supported. Convert it with grad.to_sparse() or grad.to_dense()."
        )
    if not grad.is_coalesced():
        grad = grad.coalesce()
        param.grad = grad
    return grad._values()


def roof_of(tensors: Sequence[Tensor]) -> float:
    """The largest number that all of them can hold; half precision is stepped in float32."""
    double = bool(tensors) and all(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.finfo(torch.float64 if double else torch.float32).max


def every_parameter(optimizers: Sequence[Any]) -> Iterator[Tensor]:
    """All parameters of all optimizers, in order, as they are at this moment."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def parameters_of(optimizers: Sequence[Any], *, name: Callable[[Tensor], str]) -> list[Tensor]:
    """All parameters of all optimizers, in order; one that is listed twice is refused by name."""
    params = list(every_parameter(optimizers))
    if len({id(param) for param in params}) != len(params):
        seen: set[int] = set()
        for param in params:
            if id(param) in seen:
                raise SharedParameter(
                    f"{name(param)} is listed twice among the optimizers' parameter groups and "
                    "would be stepped twice. List it once."
                )
            seen.add(id(param))
    return params
