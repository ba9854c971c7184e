"""What scale and clip policies have in common: who they are, and how their settings are checked.

A policy is a frozen configuration. An object of the user's own that has the documented methods and
no base of ours enters as well; `Adapted` gives it what it does not define.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = [
    "Adapted",
    "Policy",
    "check_count",
    "check_fraction",
    "check_positive",
    "number",
]


class Policy:
    """The base of scale and clip policies."""

    @property
    def as_given(self) -> Any:
        """The object that the user handed over: this one, unless it stands for another."""
        return self

    @property
    def policy_name(self) -> str:
        """The name of the user's class, for messages and checkpoints."""
        return type(self.as_given).__name__


class Adapted(Policy):
    """Stands for a user's object; mixed into a policy class, whose defaults fill the gaps."""

    _taken: tuple[str, ...]
    """The attributes and methods that are the object's own, where it has them."""

    def __init__(self, given: Any) -> None:
        self._given = given
        for name in self._taken:
            if hasattr(given, name):
                setattr(self, name, getattr(given, name))

    def __reduce__(self) -> Any:
        return type(self), (self._given,)

    def __repr__(self) -> str:
        return repr(self._given)

    def __eq__(self, other: object) -> bool:
        return bool(self._given == (other._given if isinstance(other, Adapted) else other))

    def __hash__(self) -> int:
        return hash(self._given)

    @property
    def as_given(self) -> Any:
        return self._given


def number(name: str, value: object) -> float:
    """`value` as a float, or a TypeError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:  # An int beyond every float.
        return math.inf


def check_fraction(name: str, value: object) -> None:
    """Raises unless `value` is a number between 0 and 1, neither of them."""
    if not 0.0 < number(name, value) < 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def check_positive(name: str, value: object) -> None:
    """Raises unless `value` is a positive, finite number."""
    if not 0.0 < number(name, value) < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}.")


def check_count(name: str, value: object, *, lowest: int) -> None:
    """Raises unless `value` is a whole number of at least `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}.")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}.")
