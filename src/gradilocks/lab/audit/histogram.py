"""Magnitudes by their exponent: counts enter, and what a format would do to them leaves; no torch.

A bin holds the values with the same floor(log2|x|). A format's borders lie between bins, at powers
of two, wherever the scale is a power of two; a border inside a bin is taken as if the bin's values
were spread evenly over its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from gradilocks.lab.formats import Format, Stored

__all__ = ["Histogram", "Shares", "shares_of"]


@dataclass(frozen=True)
class Histogram:
    """How many values have which exponent.

    Example:
        >>> seen = Histogram.of({-1: 3, 2: 1}, largest=4.5, smallest=0.5)
        >>> seen.first, seen.counts
        (-1, (3, 0, 0, 1))
    """

    first: int = 0
    """The exponent of the first bin."""
    counts: tuple[int, ...] = ()
    """`counts[i]` values have floor(log2|x|) == first + i; neither end is empty."""
    zeros: int = 0
    nonfinite: int = 0
    largest: float | None = None
    """The largest magnitude; None if no value is finite and other than zero."""
    smallest: float | None = None
    """The smallest magnitude above zero."""
    powers: tuple[int, ...] = ()
    """`powers[i]` of the values in bin i are exactly 2**(first + i); empty if none was counted.

    The mean over a batch of 8192 makes many such gradients, and half a format's smallest number is
    a power of two: it rounds to zero, while what is above it does not.
    """

    @classmethod
    def of(
        cls,
        bins: Mapping[int, int],
        *,
        zeros: int = 0,
        nonfinite: int = 0,
        largest: float | None = None,
        smallest: float | None = None,
        powers: Mapping[int, int] | None = None,
    ) -> Histogram:
        """Made of counts by exponent."""
        filled = [exponent for exponent, count in bins.items() if count]
        if not filled:
            return cls(zeros=zeros, nonfinite=nonfinite)
        first, last = min(filled), max(filled)
        counts = tuple(bins.get(exponent, 0) for exponent in range(first, last + 1))
        exact = tuple((powers or {}).get(exponent, 0) for exponent in range(first, last + 1))
        exact = exact if any(exact) else ()
        return cls(first, counts, zeros, nonfinite, largest, smallest, exact)

    @property
    def values(self) -> int:
        """How many are finite and other than zero: those that a format can lose."""
        return sum(self.counts)

    def bins(self) -> Iterator[tuple[int, int]]:
        """Exponent and count of every bin."""
        return enumerate(self.counts, start=self.first)

    def __add__(self, other: Histogram) -> Histogram:
        together = dict(self.bins())
        for exponent, count in other.bins():
            together[exponent] = together.get(exponent, 0) + count
        powers = dict(enumerate(self.powers, start=self.first))
        for exponent, count in enumerate(other.powers, start=other.first):
            powers[exponent] = powers.get(exponent, 0) + count
        return Histogram.of(
            together,
            powers=powers,
            zeros=self.zeros + other.zeros,
            nonfinite=self.nonfinite + other.nonfinite,
            largest=_either(max, self.largest, other.largest),
            smallest=_either(min, self.smallest, other.smallest),
        )

    @staticmethod
    def total(parts: Iterable[Histogram]) -> Histogram:
        """All of them together."""
        return reduce(Histogram.__add__, parts, Histogram())

    def below(self, bound: float) -> float:
        """How many values are smaller than `bound`."""
        place = math.log2(bound)
        return sum(count * _part(place, exponent) for exponent, count in self.bins())

    def exactly(self, bound: float) -> int:
        """How many values are `bound`, if that is a power of two."""
        mantissa, exponent = math.frexp(bound)
        place = exponent - 1 - self.first
        return self.powers[place] if mantissa == 0.5 and 0 <= place < len(self.powers) else 0

    def mass(self, bound: float = math.inf) -> float:
        """The sum of the magnitudes of the values up to `bound`, as the bins have it."""
        place = math.log2(bound) if bound < math.inf else math.inf
        below = sum(
            (count - exact) * _part(place, exponent) * _MEAN * 2.0**exponent
            for (exponent, count), exact in zip(self.bins(), self._exact(), strict=True)
        )
        return below + sum(
            exact * 2.0**exponent
            for exponent, exact in enumerate(self.powers, start=self.first)
            if exponent <= place
        )

    def _exact(self) -> tuple[int, ...]:
        return self.powers or (0,) * len(self.counts)

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "first": self.first,
            "counts": list(self.counts),
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            "smallest": self.smallest,
            "powers": list(self.powers),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Histogram:
        """The inverse of `to_plain`."""
        return cls(
            int(plain["first"]),
            tuple(map(int, plain["counts"])),
            int(plain["zeros"]),
            int(plain["nonfinite"]),
            plain["largest"],
            plain["smallest"],
            tuple(map(int, plain.get("powers", ()))),  # Not in the first audits.
        )


# The mean of x over [1, 2), if the logarithm of x is spread evenly.
_MEAN = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class Shares:
    """What becomes of values in a format at a scale: shares of those that are finite and not 0."""

    lost: float
    """They round to zero."""
    subnormal: float
    """They are stored with fewer bits than the format has."""
    overflow: float
    """They become inf or, where the format has none, the largest number."""
    headroom: float | None
    """Doublings left before the largest overflows, negative if it does; None without values."""

    def to_plain(self) -> dict[str, float | None]:
        """As JSON has it."""
        return dict(vars(self))


def shares_of(histogram: Histogram, format: Format, scale: float) -> Shares:
    """What `format` makes of the values, multiplied by `scale`."""
    total = histogram.values
    if not total or histogram.largest is None or histogram.smallest is None:
        return Shares(0.0, 0.0, 0.0, None)
    # What is at most half the smallest subnormal is lost: a tie goes to the even one, which is
    # zero. What rounds up to the smallest normal number counts as subnormal.
    half = format.smallest_subnormal / 2.0 / scale
    lost = histogram.below(half) + histogram.exactly(half)
    small = histogram.below(format.smallest_normal / scale)
    over = total - histogram.below(_too_large(format) / scale)
    over = max(over, 1.0) if _overflows(format, histogram.largest, scale) else 0.0
    return Shares(
        lost=lost / total,
        subnormal=(small - lost) / total,
        overflow=min(over, total) / total,
        headroom=math.log2(format.largest) - math.log2(histogram.largest) - math.log2(scale),
    )


def _overflows(format: Format, value: float, scale: float) -> bool:
    stored = format.round(value * scale)
    return Stored(format, value, scale, stored, "", stored / scale).fate == "overflow"


def _too_large(format: Format) -> float:
    """From here on a value is rounded beyond the largest: half a step above it."""
    return format.largest + math.ldexp(1.0, math.frexp(format.largest)[1] - 2) * format.epsilon


def _part(place: float, exponent: int) -> float:
    """How much of a bin lies below a place on the logarithm's axis."""
    return min(max(place - exponent, 0.0), 1.0)


def _either(choose: Any, one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return float(choose(one, other))
