"""Histograms enter; for each format a scale, what to keep out of it, and a verdict leave.

What is judged is range: what rounds to zero and what overflows. How coarse the steps of a format
are does not depend on the gradients, and no scale can change it.

The gradient of an output is summed up on its way to the parameters, so of those the sum of the
magnitudes counts: small values of one sign, lost, bend the sum. A parameter's gradient is all that
one weight learns from, so of those the number of values counts as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradilocks.auditing.histogram import Histogram, Shares, shares_of
from gradilocks.auditing.modules import ModuleGradients
from gradilocks.precision import Format

__all__ = ["FEW", "HEADROOM", "LOST_MASS", "LOST_VALUES", "Judgement", "judge", "prefer"]

HEADROOM = 4
"""Doublings that the scale leaves above the largest value that was seen. A few batches do not show
the largest gradient of a run: what comes may be sixteen times as large."""
LOST_MASS = 0.01
"""A format holds if no module loses more than this share of the sum of its gradients' magnitudes,
be it of its output or of its parameters. (A character GPT in emulated fp16, 150 steps: a module
that loses 0.03 % leaves the final loss as in float32, 4 % makes it 0.4 % worse, 25 % makes it 2 %
worse, 70 % makes it 26 % worse.)"""
LOST_VALUES = 0.05
"""Nor may more than this share of a module's parameters have their gradients rounded to zero."""
FEW = 0.25
"""At most this share of the modules (or one), with at most this share of the values, may be kept
out to make a format hold."""
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
    lost_mass: float = 0.0
    """The share of the sum of magnitudes that is lost at `scale`, without the kept ones."""
    broken: tuple[str, ...] = ()
    """If it does not hold: the modules that lose too much."""


def judge(format: Format, modules: Sequence[ModuleGradients]) -> Judgement:
    """The scale for a format, and whether it holds what was seen.

    The loudest modules, whose largest values force a small scale, are left out one by one; at each
    scale so found, those that underflow are left out as well. The fewest win.
    """
    having = [module for module in modules if module.together.values]
    loudest = sorted(having, key=lambda module: module.together.largest or 0.0, reverse=True)
    most = max(1, int(FEW * len(having)))
    total = _total(having)
    plain = scale_for(format, total.largest)
    best: tuple[float, list[ModuleGradients], list[ModuleGradients]] | None = None
    tried: float | None = None
    for count in range(most + 1):
        loud, rest = loudest[:count], loudest[count:]
        scale = scale_for(format, rest[0].together.largest if rest else None)
        if scale == tried or (best is not None and count >= len(best[1])):
            continue  # One more is kept out, and nothing is won by it.
        tried = scale
        out = [*loud, *(module for module in rest if breaks(module, format, scale))]
        few = sum(module.together.values for module in out) <= FEW * total.values
        if len(out) <= most and few and (best is None or len(out) < len(best[1])):
            best = scale, out, loud
    scale, out, loud = best or (plain, [], [])
    left = _total(module for module in having if module not in out)
    return Judgement(
        format=format,
        scale=scale,
        keep=tuple(module.name for module in having if module in out),
        holds=best is not None,
        unscaled=shares_of(total, format, 1.0),
        scaled=shares_of(total, format, scale),
        rest=shares_of(left, format, scale),
        lost_mass=lost_mass(left, format, scale),
        loud=tuple(module.name for module in having if module in loud),
        broken=()
        if best is not None
        else tuple(module.name for module in having if breaks(module, format, plain)),
    )


def scale_for(format: Format, largest: float | None) -> float:
    """The largest power of two that leaves the headroom; 1 for a format with float32's range."""
    if largest is None or format.exponent_bits >= 8:
        return 1.0
    room = math.log2(format.largest) - math.log2(largest) - HEADROOM
    return math.ldexp(1.0, min(max(math.floor(room), _LOWEST), _HIGHEST))


def prefer(judgements: Sequence[Judgement]) -> Judgement | None:
    """The format with the finest steps that holds; None if that is only float32.

    float32 and tf32 are stored in 32 bits, so they are what is left, not a choice.
    """
    narrow = [each for each in judgements if each.format.name not in ("fp32", "tf32")]
    holding = [each for each in narrow if each.holds]
    return max(holding, key=lambda each: each.format.mantissa_bits, default=None)


def breaks(module: ModuleGradients, format: Format, scale: float) -> bool:
    """Whether the format loses too much of a module's gradients."""
    largest = module.together.largest
    if largest is not None and largest * scale > format.largest:
        return True
    parts = [part for part in (module.parameters, module.activations) if part is not None]
    if any(lost_mass(part, format, scale) > LOST_MASS for part in parts):
        return True
    owned = module.parameters
    return owned is not None and shares_of(owned, format, scale).lost > LOST_VALUES


def lost_mass(seen: Histogram, format: Format, scale: float) -> float:
    """The share of the sum of magnitudes that is lost to zero, as the bins have it."""
    every = seen.mass()
    return seen.mass(format.smallest_subnormal / 2.0 / scale) / every if every else 0.0


def _total(modules: Iterable[ModuleGradients]) -> Histogram:
    return Histogram.total(module.together for module in modules)
