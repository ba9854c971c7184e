"""Scaled dot-product attention as a fused kernel on tensor cores has it.

Queries, keys, values, a mask that is added and the result are stored in the format. In between,
scores stay in float32, where the softmax is taken; only what enters another product is rounded
again: the weights on the way forward, and the gradient of the scores on the way back. Those
gradients are the smallest in a transformer, and the first to be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gradilocks.lab.emulate.storage import Storage

__all__ = ["attention"]


def attention(
    storage: Storage, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Stands for ``scaled_dot_product_attention``; takes what it takes."""
    return _attend(storage, *args, **kwargs)


def _attend(
    storage: Storage,
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
