"""Checks of numeric arguments, shared by the configuration dataclasses."""

from __future__ import annotations

import math


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    below: float | None = None,
    integer: bool = False,
) -> None:
    """Raises unless `value` is a number within the bounds. NaN is never accepted.

    Args:
        name: the argument as the user wrote it.
        value: the argument. A bool is not accepted as a number.
        above, at_least, at_most, below: bounds. `below=math.inf` excludes infinity.
        integer: accept only an int.

    Raises:
        TypeError: not a number, or not an int where `integer` is set.
        ValueError: outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        kind = "an int" if integer else "a number"
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__} {value!r}.")
    fits_below = below is None or value < below
    if (value > above or above == -math.inf) and at_least <= value <= at_most and fits_below:
        return
    bounds = [
        f"above {above:g}" * (above > -math.inf),
        f"at least {at_least:g}" * (at_least > -math.inf),
        f"at most {at_most:g}" * (at_most < math.inf),
        "finite" if below == math.inf else f"below {below:g}" if below is not None else "",
    ]
    raise ValueError(f"{name} must be {' and '.join(filter(None, bounds))}, got {value}.")


def check_order(order: object) -> None:
    """Raises unless `order`, the p of a norm, is from 1 to 8, or inf.

    Higher powers of float32 numbers overflow the float64 sums.
    """
    if order != math.inf:
        check_number("order", order, at_least=1.0, at_most=8.0)
