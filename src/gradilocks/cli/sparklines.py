"""Numbers → one line of text that shows their course: ▁▂▃▅▇."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*#@"
"""For a terminal that cannot write the others."""
ROUNDING = 1e-6
"""A part of themselves by which numbers that are the same may differ once they were averaged."""


def sparkline(values: Sequence[float | None], *, width: int, bars: str = BARS) -> str:
    """Draws numbers as a row of bars from the least to the greatest of them.

    Args:
        values: in order; None leaves a gap.
        width: how many characters at most. More values than that are averaged.
        bars: the characters, lowest first.

    Example:
        >>> sparkline([1.0, 2.0, None, 8.0], width=10)
        '▁▂ █'
    """
    drawn = _squeezed(values, width)
    known = [value for value in drawn if value is not None]
    if not known:
        return " " * len(drawn)
    low, high = min(known), max(known)
    # Halved first: the distance from -1e308 to 1e308 is no float.
    span = high / 2 - low / 2
    flat = span <= ROUNDING * max(abs(low), abs(high))
    top = len(bars) - 1

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        share = 0.0 if flat else (value / 2 - low / 2) / span
        return bars[round(share * top)]

    return "".join(map(bar, drawn))


class Trail:
    """Keeps the course of a number over a run of any length in a few hundred places.

    When they are full, neighbours are merged and every place stands for twice as many steps.

    Args:
        merge: two neighbours → one, as `max` or `mean`.
        most: how many places; even.
    """

    def __init__(self, merge: Callable[[float, float], float], *, most: int = 512) -> None:
        self._merge = merge
        self._most = most
        self._places: list[float | None] = []
        self._per_place = 1
        self._open: float | None = None  # what the next place has so far
        self._in_open = 0

    def add(self, value: float | None) -> None:
        """The next value; None and what is not finite leave a gap if nothing is beside them."""
        if value is not None and not math.isfinite(value):
            value = None
        self._open = self._merged(self._open, value)
        self._in_open += 1
        if self._in_open == self._per_place:
            self._places.append(self._open)
            self._open, self._in_open = None, 0
            if len(self._places) == self._most:
                pairs = zip(self._places[::2], self._places[1::2], strict=True)
                self._places = [self._merged(a, b) for a, b in pairs]
                self._per_place *= 2

    @property
    def values(self) -> list[float | None]:
        """From the first step to the last."""
        return [*self._places, self._open] if self._in_open else list(self._places)

    def _merged(self, a: float | None, b: float | None) -> float | None:
        if a is None or b is None:
            return b if a is None else a
        return self._merge(a, b)


def mean(a: float, b: float) -> float:
    """Of two; without overflow."""
    return a / 2 + b / 2


def _squeezed(values: Sequence[float | None], width: int) -> list[float | None]:
    if len(values) <= width:
        return list(values)
    squeezed: list[float | None] = []
    for at in range(width):
        part = values[at * len(values) // width : (at + 1) * len(values) // width]
        known = [value for value in part if value is not None]
        squeezed.append(sum(value / len(known) for value in known) if known else None)
    return squeezed
