"""A hundred thousand points → the few thousand that a screen can show, without losing a spike.

A plot has about a thousand pixels. Taking every n-th point would lose what lies between, and spikes
and skips lie between. So a column is cut into buckets, and of each bucket the smallest and the
largest value stay, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

__all__ = ["buckets", "extremes", "turns"]


def buckets(length: int, most: int) -> Iterator[range]:
    """Cuts `length` places into at most `most` ranges of nearly the same size."""
    pieces = min(length, most)
    for piece in range(pieces):
        yield range(length * piece // pieces, length * (piece + 1) // pieces)


def extremes(values: Sequence[float], *, most: int) -> Sequence[int]:
    """Returns the places to keep of a column: all if there are few, else each bucket's extremes.

    Args:
        values: the column; NaN is a gap.
        most: how many places may stay, about. At least 4.
    """
    if len(values) <= most:
        return range(len(values))
    kept = []
    for bucket in buckets(len(values), most // 2):
        present = [i for i in bucket if not math.isnan(values[i])]
        if not present:  # A gap as wide as a bucket stays a gap.
            kept.append(bucket.start)
            continue
        low, high = min(present, key=values.__getitem__), max(present, key=values.__getitem__)
        kept.extend(sorted({low, high}))
    if kept[-1] != len(values) - 1:
        kept.append(len(values) - 1)
    return kept


def turns(values: Sequence[float]) -> list[int]:
    """Returns the places where a column that moves in jumps takes a new value, and the last."""
    places = [
        next(place for place, _ in group)
        for _, group in groupby(enumerate(values), key=lambda item: repr(item[1]))
    ]
    if values and places[-1] != len(values) - 1:
        places.append(len(values) - 1)
    return places
