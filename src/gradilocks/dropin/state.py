"""Checks a GradScaler's state_dict whole before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradilocks.errors import BadState, MissingKey

__all__ = ["check_state"]

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def check_state(state: Mapping[str, Any], *, lowest: float, highest: float) -> None:
    """Raises if `state` lacks a key or holds a scale that cannot be trained with."""
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise MissingKey(
            f"the state_dict has no {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, state))}. Expected what GradScaler.state_dict() returns."
        )
    scale = state["scale"]
    if not lowest <= scale <= highest:
        raise BadState(
            f"the scale in the state_dict must lie in [{lowest:g}, {highest:g}], got {scale}. A "
            "scale of 0 is what torch's scaler leaves behind after it has collapsed: start from a "
            "new one."
        )
