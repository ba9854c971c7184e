"""What a control's clip policy has learned, read as a user can: off its checkpoint."""

from __future__ import annotations

import math
from typing import Any

from gradilocks import GradientControl


def learned(control: GradientControl) -> dict[str, Any]:
    """The memory of the clip policy, numbers and lists by name."""
    saved = control.state_dict()["gradilocks"]["clip_state"] or {}
    return {name: _numbers(value) for name, value in saved.items()}


def _numbers(value: Any) -> Any:
    """JSON has no infinity: a checkpoint writes None."""
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return math.inf if value is None else value
