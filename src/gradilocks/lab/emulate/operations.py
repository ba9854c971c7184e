"""Which calls of torch store in the format, and how: a table from the function to what is done.

They are those that torch.autocast runs in half precision on a GPU: products of matrices,
convolutions, attention and recurrent layers. Everything else stays in float32, as normalisations,
losses and sums do under autocast.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F

from gradilocks.errors import GradilocksError
from gradilocks.lab.emulate.attention import attention
from gradilocks.lab.emulate.recurrent import CELLS, LAYERS, recurrent_cell, recurrent_layer
from gradilocks.lab.emulate.storage import Storage

__all__ = ["COMPOSED", "OPERATIONS", "Operation", "concerns"]

Function = Callable[..., Any]
Operation = Callable[[Storage, Function, tuple[Any, ...], dict[str, Any]], Any]


def product(
    storage: Storage, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Stores what goes in, computes in float32, stores what comes out."""
    if kwargs.get("out") is not None:
        return _written(storage, function, args, kwargs)
    result = function(
        *(_stored(storage, each) for each in args),
        **{name: _stored(storage, each) for name, each in kwargs.items()},
    )
    return result if result is NotImplemented else storage.store(result)


def _written(
    storage: Storage, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same into a tensor that is there; with gradients torch refuses it, in its own words."""
    given = (*_tensors((args, kwargs.values())),)
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        return function(*args, **kwargs)
    out = kwargs.pop("out")
    result = product(storage, function, args, kwargs)
    return out.resize_(result.shape).copy_(result)


def sum_of_products(
    storage: Storage, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``einsum``: only if something is summed over two factors is there a product of matrices."""
    if isinstance(args[0], str) and not _contracts(args[0]):
        return function(*args, **kwargs)
    return product(storage, function, args, kwargs)


def _contracts(equation: str) -> bool:
    """Whether an index is in two factors and not in the result."""
    factors, arrow, result = equation.replace(" ", "").partition("->")
    letters = [set(factor) & _LETTERS for factor in factors.split(",")]
    shared = {letter for letter in _LETTERS if sum(letter in each for each in letters) > 1}
    return bool(shared - set(result)) if arrow else bool(shared)


def convolution(
    storage: Storage, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same, but the bias is added to what is stored already, as the libraries of a GPU do."""
    return _convolve(storage, function, *args, **kwargs)


def _convolve(
    storage: Storage,
    function: Function,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    result: torch.Tensor = product(storage, function, (input, weight, None, *args), kwargs)
    if bias is None:
        return result
    # One for each channel: the dimension before those that the weight slides along.
    channels = storage.store(bias).view(-1, *[1] * (weight.dim() - 2))
    return storage.store(result + channels)


def in_place(
    storage: Storage, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same for a method that writes into its tensor."""
    outside = getattr(torch, function.__name__.removesuffix("_"))
    return args[0].copy_(product(storage, outside, args, kwargs))


def _stored(storage: Storage, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return storage.store(value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_stored(storage, each) for each in value)
    return value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
            yield from _tensors(value)


def concerns(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is of dense float32: others, and sparse matrices, are left alone.

    Raises:
        GradilocksError: it is of half precision, where there is nothing left to emulate, or nested.
    """
    kinds = {
        tensor.dtype
        for tensor in _tensors((args, kwargs.values()))
        if tensor.is_floating_point() or tensor.is_complex()
    }
    if any(tensor.is_nested for tensor in _tensors((args, kwargs.values()))):
        raise GradilocksError(
            f"{function.__name__} got a nested tensor under gradilocks.emulate, which rounds dense "
            "ones. Pad it: torch.nested.to_padded_tensor(tensor, 0.0)."
        )
    if any(tensor.layout != torch.strided for tensor in _tensors((args, kwargs.values()))):
        return False
    for kind in kinds:
        if kind.itemsize < 4:
            raise GradilocksError(
                f"{function.__name__} got {kind} under gradilocks.emulate, which rounds float32 "
                "tensors. Keep the model and its inputs in float32: model.float()."
            )
    return kinds == {torch.float32}


_LETTERS = set(string.ascii_letters)
_NAMES = ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm")
_CONVOLUTIONS = (
    *(f"conv{n}d" for n in (1, 2, 3)),
    *(f"conv_transpose{n}d" for n in (1, 2, 3)),
    "convolution",
)

OPERATIONS: dict[Function, Operation] = {
    F.linear: product,
    F.scaled_dot_product_attention: attention,
    torch.einsum: sum_of_products,
    torch.chain_matmul: product,
    torch.linalg.matmul: product,
    torch.linalg.multi_dot: product,
    torch.Tensor.__rmatmul__: product,
    **{getattr(torch, name): product for name in _NAMES},
    **{getattr(torch, name): convolution for name in _CONVOLUTIONS},
    torch.conv_tbc: product,
    **{getattr(torch.Tensor, name): product for name in _NAMES},
    **{getattr(torch.Tensor, f"{name}_"): in_place for name in _NAMES[4:8]},
    **{getattr(F, name): product for name in ("grouped_mm",) if hasattr(F, name)},
    **dict.fromkeys(CELLS, recurrent_cell),
    **dict.fromkeys(LAYERS, recurrent_layer),
}


def _seen_through(function: Any) -> Function:
    """The function without its question whether a mode stands in its way.

    torch asks at the top of a function written in Python and hands it over whole; what it calls
    would then pass unseen.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        inner = FunctionType(
            function.__code__,
            {**function.__globals__, **_NOBODY_ASKS},  # As they are now.
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        inner.__kwdefaults__ = function.__kwdefaults__
        return inner(*args, **kwargs)

    return call


_NOBODY_ASKS = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


COMPOSED: dict[Function, Function] = {
    getattr(F, name): _seen_through(getattr(F, name))
    for name in ("multi_head_attention_forward", "linear_cross_entropy")
    if hasattr(F, name)
}
"""Functions made of others, as they are to be called with the mode on."""
