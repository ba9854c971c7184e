"""Tracks → what the plots show, as plain data: lines, marks and heat maps.

Numbers are rounded to what a plot can show, gaps are None, and long columns are thinned. A plot has
about a thousand pixels, and taking every n-th point would lose what lies between: spikes and skips.
So a column is cut into buckets, and of each bucket the smallest and the largest value stay, in
their order. Whether a column was thinned is in the data, so that the page can say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gradilocks.report.formatting import clean, shortened
from gradilocks.report.tracks import ANOTHERS, Tensor, Track
from gradilocks.runfile import describe_bad

# Twice what a wide screen has pixels across: the smallest and the largest of each pixel.
MOST_POINTS = 3000
# A mark for every skip, until they would cover each other anyway.
MOST_MARKS = 1500
# A share is taken over at least this many steps, and shown at most this often.
SHARE_OVER = 10
MOST_SHARES = 200
# Columns and rows of a heat map; all heat maps of a page together get CELLS, at about six bytes.
MOST_COLUMNS = 240
FEWEST_COLUMNS = 24
MOST_ROWS = 400
CELLS = 450_000
# Characters of a name that a hover label has room for.
LONGEST_NAME = 80

Number = float | None


@dataclass(frozen=True)
class Line:
    """Points, to be joined or marked; `thinned` from how many, 0 if they are all there."""

    x: list[int]
    y: list[Number]
    thinned: int = 0
    words: Sequence[str] = ()
    """What to say about each, if they are marks."""


@dataclass(frozen=True)
class Heat:
    """A value for each row (tensor) and column (time)."""

    edges: list[float]
    """Where the columns begin, and where the last one ends."""
    columns: list[str]
    """What each column covers, in words."""
    rows: list[str]
    z: list[list[Number]]
    thinned: int = 0
    """How many steps with detail there were, if a column stands for several; else 0."""
    folded: int = 0
    """How many tensors there were, if a row stands for several; else 0."""


def line(track: Track, values: Sequence[float]) -> Line | None:
    """A column that wanders: loss, norm. None if it has no value at all."""
    if all(map(math.isnan, values)):
        return None
    places = extremes(values, most=MOST_POINTS)
    thinned = len(values) if len(places) < len(values) else 0
    return Line([track.at[i] for i in places], [_rounded(values[i], 5) for i in places], thinned)


def staircase(track: Track, values: Sequence[float]) -> Line | None:
    """A column that stays and jumps: scale, limit. Only its jumps are kept, if that is less."""
    places = turns(values)
    if len(places) > MOST_POINTS or all(map(math.isnan, values)):
        return line(track, values)
    return Line([track.at[i] for i in places], [_rounded(values[i], 6) for i in places])


def skip_marks(track: Track) -> Line | None:
    """The skipped steps, at the scale they were skipped at, with reason and culprits."""
    if not track.skipped:
        return None
    groups = list(buckets(len(track.skipped), MOST_MARKS))
    places = [track.skipped[group.start] for group in groups]
    lost = set(track.lost)
    words = [
        _why_skipped(track, place, lost=place in lost)
        + (f", and {len(group) - 1:,} more until the next mark" if len(group) > 1 else "")
        for place, group in zip(places, groups, strict=True)
    ]
    return Line(
        [track.at[place] for place in places],
        [_rounded(track.scale[place], 6) for place in places],
        len(track.skipped) if len(groups) < len(track.skipped) else 0,
        words,
    )


def _why_skipped(track: Track, place: int, *, lost: bool) -> str:
    step, spoilt = track.steps[place], track.spoilt[place]
    if step.reason == "rejected":
        return "rejected by the clip policy"
    if spoilt == ANOTHERS:
        return "NaN or Inf, and another optimizer's weights are spoilt"
    if spoilt:
        return f"NaN or Inf, and the weights are spoilt {spoilt}"
    short = [c._replace(name=shortened(clean(c.name), LONGEST_NAME)) for c in step.culprits]
    others = track.others.get(place, ())
    shown = step._replace(culprits=tuple(short))
    return describe_bad(shown, most=2, lost=lost, others=others) or "NaN or Inf"


def clipped_share(track: Track) -> Line | None:
    """The share of clipped steps among those taken, window by window; None without a limit."""
    if all(map(math.isnan, track.limit)) and not any(track.clipped):
        return None
    x: list[int] = []
    y: list[Number] = []
    windows = min(MOST_SHARES, max(1, len(track.steps) // SHARE_OVER))
    for window in buckets(len(track.steps), windows):
        taken = sum(not track.steps[place].skipped for place in window)
        clipped = sum(track.clipped[window.start : window.stop])
        x.append(track.at[window.start])
        y.append(_rounded(clipped / taken, 4) if taken else None)
    return Line([*x, track.at[-1]], [*y, y[-1]])


def heat(track: Track, field: Callable[[Tensor], Sequence[float]], *, maps: int) -> Heat | None:
    """One field of every tensor over time; the largest where a cell stands for several values.

    Args:
        track: where the tensors are.
        field: which of a tensor's columns.
        maps: how many heat maps share the page, so that all of them together stay small.
    """
    if not track.tensors or all(all(map(math.isnan, field(tensor))) for tensor in track.tensors):
        return None
    rows = list(buckets(len(track.tensors), MOST_ROWS))
    room = CELLS // (maps * len(rows))
    spans = list(buckets(len(track.detailed), max(FEWEST_COLUMNS, min(MOST_COLUMNS, room))))
    # Where the columns begin; the last one is as wide as the detail steps are apart.
    at = [track.at[place] for place in track.detailed]
    gap = at[-1] - at[-2] if len(at) > 1 else 1
    reach = [(at[span.start], at[span.stop - 1]) for span in spans]
    return Heat(
        edges=[*(float(first) for first, _ in reach), float(at[-1] + gap)],
        columns=[
            f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
            for first, last in reach
        ],
        rows=unique([_row_name(track, row) for row in rows]),
        z=[
            [_largest(columns, span) for span in spans]
            for columns in ([field(track.tensors[i]) for i in row] for row in rows)
        ],
        thinned=len(at) if len(spans) < len(at) else 0,
        folded=len(track.tensors) if len(rows) < len(track.tensors) else 0,
    )


def _largest(columns: Sequence[Sequence[float]], span: range) -> Number:
    present = [
        value
        for column in columns
        for value in column[span.start : span.stop]
        if value == value  # not NaN; a call to math.isnan would take twice as long
    ]
    return _rounded(max(present), 3) if present else None


def _row_name(track: Track, row: range) -> str:
    most = LONGEST_NAME if len(row) == 1 else LONGEST_NAME // 2
    first, last = (shortened(clean(track.tensors[i].name), most) for i in (row.start, row.stop - 1))
    return first if len(row) == 1 else f"{first} … {last}"


def unique(names: list[str]) -> list[str]:
    """Names told apart: an axis would lay two rows of one name over each other."""
    seen: dict[str, int] = {}
    told = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        told.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return told


def _rounded(value: float, digits: int) -> Number:
    return None if math.isnan(value) else float(f"{value:.{digits}g}")


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
