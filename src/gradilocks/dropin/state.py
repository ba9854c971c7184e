"""A state_dict or a new scale that a GradScaler is given, checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradilocks.errors import BadState, MissingKey

__all__ = ["check_state", "set_scale"]

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def check_state(state: Mapping[str, Any], *, lowest: float, highest: float, delay: int = 0) -> None:
    """Raises if `state` lacks a key or holds a scale that cannot be trained with.

    Args:
        state: a scaler's state_dict.
        lowest: the smallest scale.
        highest: the largest.
        delay: how far below 0 the growth tracker may start.
    """
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise MissingKey(
            f"the state_dict has no {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, state))}. Expected what GradScaler.state_dict() returns."
        )
    for key in _KEYS:
        if isinstance(state[key], bool) or not isinstance(state[key], (int, float)):
            raise BadState(f"{key} in the state_dict must be a number, got {state[key]!r}.")
        at_least = -1 - delay if key == "_growth_tracker" else 0
        if key != "scale" and not at_least < state[key] < math.inf:
            raise BadState(
                f"{key} in the state_dict must be positive and finite, got {state[key]}."
            )
    tracker = state["_growth_tracker"]
    if tracker != int(tracker) or tracker < -delay:
        raise BadState(
            "_growth_tracker in the state_dict must be a whole number, got "
            f"{state['_growth_tracker']}."
        )
    scale = state["scale"]
    if not lowest <= scale <= highest:
        collapsed = (
            " A scale of 0 is what torch's scaler leaves behind after it has collapsed: start from "
            "a new one."
        )
        raise BadState(
            f"the scale in the state_dict must lie in [{lowest:g}, {highest:g}], got {scale}."
            + (collapsed if scale == 0 else "")
        )


def set_scale(
    scale: Tensor, new_scale: object, *, device: str, lowest: float, highest: float
) -> None:
    """Fills `scale` with what the user gave, kept within its bounds."""
    if isinstance(new_scale, (int, float)):
        if not 0.0 < new_scale < math.inf:
            raise ValueError(f"new_scale must be positive and finite, got {new_scale}.")
        scale.fill_(min(max(float(new_scale), lowest), highest))
        return
    if not isinstance(new_scale, Tensor):
        raise TypeError(f"new_scale must be a float or a tensor, got {type(new_scale).__name__}.")
    if new_scale.device.type != device or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False. "
            f"Got {new_scale.numel()} element(s) on {new_scale.device.type}, "
            f"requires_grad={new_scale.requires_grad}."
        )
    given = new_scale.reshape(()).to(scale.dtype)
    scale.copy_(torch.where(torch.isnan(given), scale, given.clamp(lowest, highest)))
