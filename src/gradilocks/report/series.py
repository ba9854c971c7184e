"""Tracks → what the plots show, as plain data: lines, bands, marks and heat maps.

Numbers are rounded to what a plot can show, gaps are None, and long columns are thinned. A plot has
some hundred pixels across; all of a hundred thousand noisy steps would be a slab, and every n-th of
them would lose what lies between: spikes. So a column is cut into buckets, and of each the median
stays, for the line, and the smallest and the largest value, for a band around it. Whether a column
was thinned is in the data, so that the page can say so. Everything has two places across: a step,
and seconds of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import NamedTuple, Protocol

from gradilocks.report.formatting import clean, short_name
from gradilocks.report.tracks import ANOTHERS, Tensor, Track
from gradilocks.runfile import describe_bad

# As many points as a wide screen has pixels across are drawn one by one; of more, so many buckets.
MOST_POINTS = 1500
BUCKETS = 600
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


class Across(Protocol):
    """Where values stand on a plot's axis, by step and by time; a Track is one."""

    @property
    def at(self) -> Sequence[int]:
        """Steps."""

    @property
    def time(self) -> Sequence[float]:
        """Seconds of training."""


class Places(NamedTuple):
    """Of values that are not those of every step."""

    at: Sequence[int]
    time: Sequence[float]


@dataclass(frozen=True)
class Line:
    """Points, to be joined or marked; `thinned` from how many, 0 if they are all there."""

    x: list[int]
    t: list[float]
    y: list[Number]
    low: Sequence[Number] = ()
    """If a point stands for several values, of which `y` is the median: the smallest of them."""
    high: Sequence[Number] = ()
    thinned: int = 0
    words: Sequence[str] = ()
    """What to say about each, if they are marks."""

    @property
    def known(self) -> int:
        """How many points have a value."""
        return sum(value is not None for value in self.y)

    @property
    def has_loose_points(self) -> bool:
        """Whether a point has no neighbour to be joined with."""
        y = [None, *self.y, None]
        return any(
            value is not None and y[place] is None and y[place + 2] is None
            for place, value in enumerate(self.y)
        )


@dataclass(frozen=True)
class Heat:
    """A value for each row (tensor) and column (time)."""

    edges: list[float]
    """Where the columns begin, and where the last one ends."""
    times: list[float]
    """The same in seconds."""
    columns: list[str]
    """What each column covers, in words."""
    rows: list[str]
    z: list[list[Number]]
    thinned: int = 0
    """How many steps with detail there were, if a column stands for several; else 0."""
    folded: int = 0
    """How many tensors there were, if a row stands for several; else 0."""


def line(across: Across, values: Sequence[float]) -> Line | None:
    """A column that wanders: loss, norm. None if it has no value at all."""
    if all(map(math.isnan, values)):
        return None
    if len(values) <= MOST_POINTS:
        return _points(across, values, range(len(values)), 5)
    groups = list(buckets(len(values), BUCKETS))
    present = [[v for v in values[g.start : g.stop] if not math.isnan(v)] for g in groups]
    middles = [group[len(group) // 2] for group in groups]
    return Line(
        [across.at[i] for i in middles],
        [_rounded_time(across.time[i]) for i in middles],
        [_rounded(median(each), 5) if each else None for each in present],
        [_rounded(min(each), 4) if each else None for each in present],
        [_rounded(max(each), 4) if each else None for each in present],
        thinned=len(values),
    )


def staircase(across: Across, values: Sequence[float]) -> Line | None:
    """A column that stays and jumps: scale, limit. Only its jumps are kept, if that is less."""
    places = turns(values)
    if len(places) > MOST_POINTS or all(map(math.isnan, values)):
        return line(across, values)
    return _points(across, values, places, 6)


def _points(across: Across, values: Sequence[float], places: Sequence[int], digits: int) -> Line:
    return Line(
        [across.at[i] for i in places],
        [_rounded_time(across.time[i]) for i in places],
        [_rounded(values[i], digits) for i in places],
    )


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
        [_rounded_time(track.time[place]) for place in places],
        [_rounded(track.scale[place], 6) for place in places],
        thinned=len(track.skipped) if len(groups) < len(track.skipped) else 0,
        words=words,
    )


def _why_skipped(track: Track, place: int, *, lost: bool) -> str:
    step, spoilt = track.steps[place], track.spoilt[place]
    if step.reason == "rejected":
        return "rejected by the clip policy"
    if spoilt == ANOTHERS:
        return "NaN or Inf, and another optimizer's weights are spoilt"
    if spoilt:
        return f"NaN or Inf, and the weights are spoilt {spoilt}"
    short = [c._replace(name=short_name(clean(c.name), LONGEST_NAME)) for c in step.culprits]
    others = track.others.get(place, ())
    shown = step._replace(culprits=tuple(short))
    return describe_bad(shown, most=2, lost=lost, others=others) or "NaN or Inf"


def clipped_share(track: Track) -> Line | None:
    """The share of clipped steps among those taken, window by window; None if none was clipped."""
    if not any(track.clipped):
        return None
    return _shares(track, list(track.clipped), [float(not step.skipped) for step in track.steps])


def waiting_share(across: Across, waited: Sequence[float], seconds: Sequence[float]) -> Line | None:
    """The share of time between steps and forward passes, window by window; None if not known."""
    known = [not math.isnan(one + other) for one, other in zip(waited, seconds, strict=True)]
    if not any(known):
        return None
    part, whole = (
        [value if knows else 0.0 for value, knows in zip(column, known, strict=True)]
        for column in (waited, seconds)
    )
    return _shares(across, part, whole)


def _shares(across: Across, part: Sequence[float], whole: Sequence[float]) -> Line | None:
    """What part is of the whole, over windows of some steps; None of fewer than two windows."""
    windows = list(buckets(len(whole), min(MOST_SHARES, len(whole) // SHARE_OVER)))
    if len(windows) < 2:
        return None
    y: list[Number] = []
    for window in windows:
        every = sum(whole[window.start : window.stop])
        share = min(1.0, sum(part[window.start : window.stop]) / every) if every else None
        y.append(None if share is None else _rounded(share, 4))
    ends = [*(window.start for window in windows), len(whole) - 1]
    return Line(
        [across.at[place] for place in ends],
        [_rounded_time(across.time[place]) for place in ends],
        [*y, y[-1]],
    )


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
    reach = [(at[span.start], at[span.stop - 1]) for span in spans]
    time = [_rounded_time(track.time[place]) for place in track.detailed]
    return Heat(
        edges=[*(float(first) for first, _ in reach), float(_one_further(at))],
        times=[*(time[span.start] for span in spans), _one_further(time)],
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


def _one_further(places: Sequence[float]) -> float:
    return places[-1] + (places[-1] - places[-2] if len(places) > 1 else 1)


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
    first, last = (
        short_name(clean(track.tensors[i].name), most) for i in (row.start, row.stop - 1)
    )
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


def _rounded_time(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def buckets(length: int, most: int) -> Iterator[range]:
    """Cuts `length` places into at most `most` ranges of nearly the same size."""
    pieces = min(length, most)
    for piece in range(pieces):
        yield range(length * piece // pieces, length * (piece + 1) // pieces)


def turns(values: Sequence[float]) -> list[int]:
    """Returns the places where a column that moves in jumps takes a new value, and the last."""
    places = [
        next(place for place, _ in group)
        for _, group in groupby(enumerate(values), key=lambda item: repr(item[1]))
    ]
    if values and places[-1] != len(values) - 1:
        places.append(len(values) - 1)
    return places
