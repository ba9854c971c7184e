"""What a clip policy remembers of each parameter, when the parameters change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.values import moved

__all__ = ["remapped", "same"]


def same(whose: Sequence[weakref.ref[Tensor]], params: Sequence[Tensor]) -> bool:
    """Whether `whose` are just these parameters, in this order."""
    return len(whose) == len(params) and all(
        ref() is param for ref, param in zip(whose, params, strict=True)
    )


def remapped(
    policy: Any,
    memory: dict[str, Tensor],
    whose: Sequence[weakref.ref[Tensor]],
    params: Sequence[Tensor],
    home: torch.device,
) -> dict[str, Tensor]:
    """What was remembered of each parameter, at its new place; a new one starts afresh."""
    at = {id(param): place for place, ref in enumerate(whose) if (param := ref()) is not None}
    pairs = [(k, at[id(param)]) for k, param in enumerate(params) if id(param) in at]
    fresh: dict[str, Tensor] = policy.start(home, len(params))
    for name in getattr(policy, "by_parameter", ()):
        if not pairs:
            continue
        new, old = (torch.tensor(side, dtype=torch.int64) for side in zip(*pairs, strict=True))
        known = moved(memory[name], home)[moved(old, home)]
        fresh[name].index_copy_(0, moved(new, home), known)
    own = getattr(policy, "by_parameter", ())
    return {**fresh, **{name: tensor for name, tensor in memory.items() if name not in own}}
