"""Numbers of several seeds enter, the words that a verdict's sentence is made of leave.

One seed is told as it is; of several, means over what is finite, and how many were not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

__all__ = ["cases", "counted", "loss", "losses", "norm", "norms", "share"]


def loss(value: float, digits: int = 3) -> str:
    """A loss in so many digits after the point.

    Example:
        >>> loss(2.30151), loss(math.nan)
        ('2.302', 'NaN')
    """
    return f"{value:.{digits}f}" if math.isfinite(value) else "NaN"


def losses(values: Sequence[float], digits: int = 3) -> str:
    """The mean of several losses, and how many of them were not finite.

    Example:
        >>> losses([2.0, 3.0]), losses([2.0, math.nan, math.nan])
        ('2.500', 'NaN in 2 of 3 seeds and 2.000 in the rest')
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or len(finite) == len(values):
        return loss(fmean(values), digits)
    lost = counted(len(values) - len(finite), len(values))
    return f"NaN{lost} and {loss(fmean(finite), digits)} in the rest"


def counted(some: int, of: int) -> str:
    """In how many of the seeds; nothing if there is one.

    Example:
        >>> counted(2, 3), counted(3, 3), counted(1, 1)
        (' in 2 of 3 seeds', ' in all 3 seeds', '')
    """
    if of == 1:
        return ""
    return f" in all {of} seeds" if some == of else f" in {some} of {of} seeds"


def cases(told: Sequence[tuple[str, int]], of: int) -> str:
    """What happened, and in how many of the seeds; what happened in none is left out.

    Example:
        >>> cases([("falls", 2), ("is NaN", 0), ("rises", 1)], 3)
        'falls in 2 of 3 seeds and rises in 1 of 3 seeds'
    """
    return " and ".join(f"{words}{counted(some, of)}" for words, some in told if some)


def norm(value: float) -> str:
    """A gradient norm.

    Example:
        >>> norm(0.926), norm(385.26)
        ('0.93', '385')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def norms(first: Sequence[float], largest: Sequence[float]) -> str:
    """What the gradient norm does from the first step to its largest value.

    Example:
        >>> norms([0.9], [385.0]), norms([math.nan], [math.nan])
        ('goes from 0.90 to 385', 'is never finite')
    """
    first, largest = ([each for each in side if math.isfinite(each)] for side in (first, largest))
    if not largest:
        return "is never finite"
    if not first:
        return f"is not finite at the first step, {norm(fmean(largest))} at most after it"
    return f"goes from {norm(fmean(first))} to {norm(fmean(largest))}"


def share(value: float) -> str:
    """A percentage in two digits, however small.

    Example:
        >>> share(0.00001133), share(0.0697)
        ('0.0011%', '7%')
    """
    return f"{float(f'{value:.2g}') * 100:.6f}".rstrip("0").rstrip(".") + "%"
