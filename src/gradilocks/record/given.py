"""What a Recorder is given, checked: what came, what was expected; and how it speaks up."""

from __future__ import annotations

import math
import warnings

from gradilocks.eager import users_line
from gradilocks.runfile import Header, header_line

__all__ = ["check_every", "check_seconds", "first_line", "warn"]


def check_every(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__}.")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be more than 0 and finite, got {value}.")


def first_line(header: Header) -> str:
    try:
        return header_line(header)
    except (TypeError, ValueError) as error:
        raise TypeError(f"settings must be what JSON can hold: {error}.") from error


def warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=users_line())
