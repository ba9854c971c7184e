"""Histograms enter; for each format a scale, what to keep out of it, and a verdict leave.

What is judged is range: what rounds to zero and what overflows. How coarse the steps of a format
are does not depend on the gradients, and no scale can change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradilocks.auditing.histogram import Histogram, Shares, shares_of
from gradilocks.precision import Format

__all__ = ["FEW", "HEADROOM", "LOST", "LOST_IN_MODULE", "LOST_NORM", "Judgement", "judge", "prefer"]

HEADROOM = 4
"""Doublings that the scale leaves above the largest value that was seen. A few batches do not show
the largest gradient of a run: what comes may be sixteen times as large."""
LOST = 0.05
"""A format holds if at most this share of all values is lost to zero at its scale,"""
LOST_IN_MODULE = 0.5
"""and no module loses more than this share of its values,"""
LOST_NORM = 0.01
"""nor more than this share of the squared norm of its gradients."""
FEW = 0.25
"""At most this share of the modules (or one) may be kept out to make a format hold."""
_LOWEST, _HIGHEST = -24, 32  # Exponents of the scales that a DynamicScale takes by itself.


@dataclass(frozen=True)
class Judgement:
    """One format."""

    format: Format
    scale: float
    keep: tuple[str, ...]
    holds: bool
    unscaled: Shares
    """Of all values at scale 1, those of `keep` included."""
    scaled: Shares
    """Of all values at `scale`."""
    rest: Shares
    """Of the values that are not kept out, at `scale`."""
    loud: tuple[str, ...] = ()
    """Those of `keep` whose values are too large for the scale that the rest needs."""


def judge(format: Format, modules: Mapping[str, Histogram]) -> Judgement:
    """The scale for a format, and whether it holds what was seen.

    The loudest modules, whose largest values force a small scale, are left out one by one; at each
    scale so found, those that underflow are left out as well. The fewest win.
    """
    having = {name: seen for name, seen in modules.items() if seen.values}
    total = Histogram.total(having.values())
    loudest = sorted(having, key=lambda name: having[name].largest or 0.0, reverse=True)
    most = max(1, int(FEW * len(having))) if len(having) > 1 else 0
    best: tuple[float, tuple[str, ...], tuple[str, ...]] | None = None
    for count in range(most + 1):
        loud = loudest[:count]
        rest = {name: seen for name, seen in having.items() if name not in loud}
        scale = scale_for(format, Histogram.total(rest.values()))
        quiet = [name for name, seen in rest.items() if _breaks(seen, format, scale)]
        left = Histogram.total(seen for name, seen in rest.items() if name not in quiet)
        if shares_of(left, format, scale).lost > LOST or len(loud) + len(quiet) > most:
            continue
        if best is None or len(loud) + len(quiet) < len(best[1]):
            keep = tuple(name for name in having if name in loud or name in quiet)
            best = scale, keep, tuple(name for name in keep if name in loud)
    scale, keep, kept_loud = best or (scale_for(format, total), (), ())
    left = Histogram.total(seen for name, seen in having.items() if name not in keep)
    return Judgement(
        format=format,
        scale=scale,
        keep=keep,
        holds=best is not None,
        unscaled=shares_of(total, format, 1.0),
        scaled=shares_of(total, format, scale),
        rest=shares_of(left, format, scale),
        loud=kept_loud,
    )


def scale_for(format: Format, seen: Histogram) -> float:
    """The largest power of two that leaves the headroom; 1 for a format with float32's range."""
    if seen.largest is None or format.exponent_bits >= 8:
        return 1.0
    room = math.log2(format.largest) - math.log2(seen.largest) - HEADROOM
    return math.ldexp(1.0, min(max(math.floor(room), _LOWEST), _HIGHEST))


def prefer(judgements: Sequence[Judgement]) -> Judgement | None:
    """The format with the finest steps that holds; None if that is only float32.

    float32 and tf32 take no less room than float32, so they are what is left, not a choice.
    """
    narrow = [each for each in judgements if each.format.name not in ("fp32", "tf32")]
    holding = [each for each in narrow if each.holds]
    return max(holding, key=lambda each: each.format.mantissa_bits, default=None)


def _breaks(seen: Histogram, format: Format, scale: float) -> bool:
    shares = shares_of(seen, format, scale)
    if shares.overflow or shares.lost > LOST_IN_MODULE:
        return True
    return lost_norm(seen, format, scale) > LOST_NORM


def lost_norm(seen: Histogram, format: Format, scale: float) -> float:
    """The share of the squared norm that is lost to zero, as the bins have it."""
    every = seen.mass()
    return seen.mass(format.smallest_subnormal / 2.0 / scale) / every if every else 0.0
