"""Which tensors are the gradients, and what are they called.

Parameters enter; the tensors to be measured and multiplied leave: the values of a sparse gradient,
the local shard of a distributed one. Names are looked up only when somebody asks for them, so that
a healthy step pays nothing for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradilocks._torch import sparse_values
from gradilocks.errors import SharedParameter
from gradilocks.kernels.chunks import DTYPES
from gradilocks.ranks.layout import Layout, is_distributed, layout_of

__all__ = [
    "Gradients",
    "Names",
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
    return sparse_values(grad)


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


class Names:
    """Parameters' names: as the model names them, else as the optimizer does, else their place."""

    def __init__(
        self, model: nn.Module | Mapping[str, nn.Module] | None, optimizers: Sequence[Any]
    ) -> None:
        if not (model is None or isinstance(model, (nn.Module, Mapping))):
            raise TypeError(
                "model must be a torch.nn.Module, or a mapping from a prefix to one, got "
                f"{type(model).__name__}."
            )
        if isinstance(model, Mapping):
            for prefix, module in model.items():
                if not all((isinstance(prefix, str), isinstance(module, nn.Module))):
                    raise TypeError(
                        "a model mapping goes from a prefix (str) to a torch.nn.Module, got "
                        f"{type(prefix).__name__} to {type(module).__name__}."
                    )
        self._model = model
        self._optimizers = optimizers

    def of_optimizers(self, optimizers: Sequence[Any]) -> Names:
        """The same model's names, for the parameters of other optimizers."""
        return Names(self._model, optimizers)

    @property
    def optimizers(self) -> Sequence[Any]:
        """Whose parameters are named."""
        return self._optimizers

    @property
    def has_model(self) -> bool:
        """Whether a model names the parameters."""
        return self._model is not None

    def groups(self) -> list[tuple[int, str | None]]:
        """For each parameter the number of its group, counted over all optimizers, and its name."""
        every = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [(g, group.get("name")) for g, group in enumerate(every) for _ in group["params"]]

    def every(self) -> list[str]:
        """The names of all parameters of the model; none without a model."""
        return [name for name, _ in self._named_parameters()]

    def knows_all(self, params: Iterable[Tensor]) -> bool:
        """Whether all of `params` are the model's."""
        mine = {id(param) for _, param in self._named_parameters()}
        return all(id(param) in mine for param in params)

    def knows_any(self, params: Iterable[Tensor]) -> bool:
        """Whether one of `params` is the model's."""
        mine = {id(param) for _, param in self._named_parameters()}
        return any(id(param) in mine for param in params)

    def __call__(self, param: Tensor) -> str:
        return self.of([param])[0]

    def of(self, params: Iterable[Tensor]) -> list[str]:
        """The names of `params`, looked up now, so that replaced parameters are found too."""
        known = self._in_optimizers()
        known.update((id(param), name) for name, param in self._named_parameters())
        return [known.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in params]

    def in_backward_order(self, params: Sequence[weakref.ref[Tensor]]) -> list[tuple[int, str]]:
        """The places of `params` with their names, last gradient of the forward pass first.

        The model's own order, reversed; without a model, the optimizers' order, reversed. A
        parameter that is gone has no name and is left out.
        """
        order = {id(param): place for place, (_, param) in enumerate(self._named_parameters())}
        living = [(i, param) for i, ref in enumerate(params) if (param := ref()) is not None]
        living.sort(key=lambda pair: (order.get(id(pair[1]), -1), pair[0]), reverse=True)
        names = self.of(param for _, param in living)
        return [(place, name) for (place, _), name in zip(living, names, strict=True)]

    def _in_optimizers(self) -> dict[int, str]:
        """By parameter: the name that its optimizer was given, or else its place there."""
        known: dict[int, str] = {}
        taken: set[str] = set()
        for number, optimizer in enumerate(self._optimizers):
            prefix = f"optimizers[{number}]." if len(self._optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                given = group.get("param_names")
                for k, param in enumerate(group["params"]):
                    name = given[k] if given else f"{prefix}param_groups[{g}]['params'][{k}]"
                    if name in taken:  # Two optimizers whose models name their parts alike.
                        name = f"{prefix}{name}"
                    taken.add(name)
                    known[id(param)] = name
        return known

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        if isinstance(self._model, nn.Module):
            yield from self._model.named_parameters()
        elif self._model is not None:
            for prefix, module in self._model.items():
                yield from module.named_parameters(prefix=prefix)
