"""Which calls of torch store in the format, and how: a table from the function to what is done.

They are those that torch.autocast runs in half precision on a GPU: products of matrices,
convolutions, attention and recurrent layers. Everything else stays in float32, as normalisations,
losses and sums do under autocast.

Attention is stored as a fused kernel on tensor cores has it: queries, keys, values, a mask that is
added and the result are stored in the format. In between, scores stay in float32, where the softmax
is taken; only what enters another product is rounded again: the weights on the way forward, and the
gradient of the scores on the way back. Those gradients are the smallest in a transformer, and the
first to be lost.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F

from gradilocks.errors import GradilocksError
from gradilocks.lab.emulate.recurrent import CELLS, LAYERS, recurrent_cell, recurrent_layer
from gradilocks.lab.emulate.rounding import Storage

__all__ = ["COMPOSED", "OPERATIONS", "Operation", "concerns"]

Function = Callable[..., Any]
Operation = Callable[..., Any]
"""Called with the Storage and the function, then with what the function was called with."""


def product(storage: Storage, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Stores what goes in, computes in float32, stores what comes out."""
    if kwargs.get("out") is not None:
        given = _tensors((args, kwargs.values()))
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            return function(*args, **kwargs)  # Which torch refuses, in its own words.
        out = kwargs.pop("out")
        result = product(storage, function, *args, **kwargs)
        return out.resize_(result.shape).copy_(result)
    result = function(
        *(_stored(storage, each) for each in args),
        **{name: _stored(storage, each) for name, each in kwargs.items()},
    )
    return result if result is NotImplemented else storage.store(result)


def sum_of_products(storage: Storage, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """``einsum``: only if something is summed over two factors is there a product of matrices."""
    if isinstance(args[0], str) and not _contracts(args[0]):
        return function(*args, **kwargs)
    return product(storage, function, *args, **kwargs)


def _contracts(equation: str) -> bool:
    """Whether an index is in two factors and not in the result."""
    factors, arrow, result = equation.replace(" ", "").partition("->")
    letters = [set(factor) & _LETTERS for factor in factors.split(",")]
    shared = {letter for letter in _LETTERS if sum(letter in each for each in letters) > 1}
    return bool(shared - set(result)) if arrow else bool(shared)


def convolution(
    storage: Storage,
    function: Function,
    /,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """A product whose bias is added to what is stored already, as the libraries of a GPU do."""
    result: torch.Tensor = product(storage, function, input, weight, None, *args, **kwargs)
    if bias is None:
        return result
    # One for each channel: the dimension before those that the weight slides along.
    channels = storage.store(bias).view(-1, *[1] * (weight.dim() - 2))
    return storage.store(result + channels)


def in_place(storage: Storage, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """A product by a method that writes into its tensor."""
    outside = getattr(torch, function.__name__.removesuffix("_"))
    return args[0].copy_(product(storage, outside, *args, **kwargs))


def attention(
    storage: Storage,
    function: Function,
    /,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands for ``scaled_dot_product_attention``; takes what it takes."""
    query, key, value = (storage.store(each) for each in (query, key, value))
    if enable_gqa:
        key, value = (_shared(each, query.shape[-3]) for each in (key, value))
    # Times the scale first, and not the scores after: a gradient of the scores is then rounded
    # before the scale meets it, as the kernels have it.
    query = query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = storage.store_gradient(query @ key.mT)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores + _added(storage, allowed)
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        scores = scores + _added(storage, attn_mask)
        # A query that may look at nothing gets nothing, and no NaN.
        blind = scores.detach().isneginf().all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if dropout_p != 0.0:
        weights = torch.dropout(weights, dropout_p, train=True)
    return storage.store(storage.store_values(weights) @ value)


def _shared(each: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values of which several heads of queries share one."""
    if heads % each.shape[-3]:
        raise RuntimeError(
            f"Number of heads in key and value must divide the number of heads in query, got "
            f"{each.shape[-3]} and {heads}."
        )
    return each.repeat_interleave(heads // each.shape[-3], -3)


def _added(storage: Storage, mask: torch.Tensor) -> torch.Tensor:
    """What is added to the scores: of a bool mask nothing where it allows a key, else -inf."""
    if mask.is_floating_point():
        return storage.store(mask)
    if mask.dtype != torch.bool:
        raise RuntimeError(f"attn_mask must be bool or floating point, got {mask.dtype}.")
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -math.inf)


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
    tensors = list(_tensors((args, kwargs.values())))
    if any(tensor.is_nested for tensor in tensors):
        raise GradilocksError(
            f"{function.__name__} got a nested tensor under gradilocks.emulate, which rounds dense "
            "ones. Pad it: torch.nested.to_padded_tensor(tensor, 0.0)."
        )
    if any(tensor.layout != torch.strided for tensor in tensors):
        return False
    kinds = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    for kind in kinds:
        if kind.itemsize < 4:
            raise GradilocksError(
                f"{function.__name__} got {kind} under gradilocks.emulate, which rounds float32 "
                "tensors. Keep the model and its inputs in float32: model.float()."
            )
    return kinds == {torch.float32}


_LETTERS = set(string.ascii_letters)
_NAMES = ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm")
_SLIDING = [f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)]

OPERATIONS: dict[Function, Operation] = {
    F.linear: product,
    F.scaled_dot_product_attention: attention,
    torch.einsum: sum_of_products,
    torch.chain_matmul: product,
    torch.linalg.matmul: product,
    torch.linalg.multi_dot: product,
    torch.Tensor.__rmatmul__: product,
    **{getattr(torch, name): product for name in _NAMES},
    **{getattr(torch, name): convolution for name in (*_SLIDING, "convolution")},
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
