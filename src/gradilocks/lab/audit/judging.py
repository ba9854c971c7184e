"""Histograms of gradients enter; for each format a scale, what to keep out of it, and a verdict
leave. Imports no torch.

What is judged is range: what rounds to zero and what overflows. How coarse the steps of a format
are does not depend on the gradients, and no scale can change it. What the modules return in the
forward pass is stored in the format as well, and a loss scale does nothing for it.

The gradient of an output is summed up on its way to the parameters, so of those the sum of the
magnitudes counts: small values of one sign, lost, bend the sum. A parameter's gradient is all that
one weight learns from, so of those the number of values counts as well.

The gradient of an output is computed by the modules that took the output. So where it is what
breaks, they are kept out together with the module that returned it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradilocks.lab.audit_record import FormatFinding, Histogram, ModuleGradients, Shares
from gradilocks.lab.formats import Format, Stored, format_named

__all__ = [
    "FEW",
    "HEADROOM",
    "HIGHEST",
    "LOST_MASS",
    "LOST_VALUES",
    "LOWEST",
    "Judgement",
    "faults",
    "formats_named",
    "judge",
    "prefer",
    "refuse_blocks",
    "shares_of",
]

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
out to make a format hold; those that compute with what these return come on top of the count."""
LOWEST, HIGHEST = 2.0**-24, 2.0**32
"""The scales that a DynamicScale takes by itself."""


def formats_named(formats: Iterable[Any]) -> list[Format]:
    """The formats to judge, by name or dtype, each once.

    Raises:
        ValueError: there is none of a name, or no format at all.
    """
    if isinstance(formats, str) or not isinstance(formats, Iterable):
        formats = [formats]
    found = {each.name: each for each in map(format_named, formats)}
    if not found:
        raise ValueError("formats must name at least one format, got none.")
    refuse_blocks(found)
    return list(found.values())


def refuse_blocks(names: Iterable[str]) -> None:
    """fp4 lives under a scale for every block, which one loss scale says nothing about."""
    if "fp4 e2m1" in names:
        raise ValueError(
            "fp4 is stored with a scale for every block of values, so what one loss scale would "
            "lose says nothing about it. Train under gradilocks.emulate('fp4') to find out."
        )


def shares_of(histogram: Histogram, format: Format, scale: float) -> Shares:
    """What `format` makes of the values, multiplied by `scale`.

    Exact where the scale is a power of two, since the borders of a format then lie between bins;
    but for overflow, whose border lies inside the bin of the format's largest number.
    """
    total, largest = histogram.values, histogram.largest
    if not total or largest is None:
        return Shares(0.0, 0.0, 0.0, None)
    # What is at most half the smallest subnormal is lost: a tie goes to the even one, which is
    # zero. What rounds up to the smallest normal number counts as subnormal.
    half = format.smallest_subnormal / 2.0 / scale
    lost = histogram.below(half) + histogram.exactly(half)
    small = histogram.below(format.smallest_normal / scale)
    over = 0.0
    stored = format.round(largest * scale)
    if Stored(format, largest, scale, stored, "", stored / scale).fate == "overflow":
        # A value is rounded beyond the largest number from half a step above it.
        top = math.ldexp(1.0, math.frexp(format.largest)[1] - 2) * format.epsilon + format.largest
        over = min(max(total - histogram.below(top / scale), 1.0), total)
    return Shares(
        lost=lost / total,
        subnormal=(small - lost) / total,
        overflow=over / total,
        headroom=math.log2(format.largest) - math.log2(largest) - math.log2(scale),
    )


def lost_mass(seen: Histogram, format: Format, scale: float) -> float:
    """The share of the sum of magnitudes that is lost to zero, as the bins have it."""
    every = seen.mass()
    return seen.mass(format.smallest_subnormal / 2.0 / scale) / every if every else 0.0


@dataclass(frozen=True)
class Judgement(FormatFinding):
    """What was found on one format, and why; `words` are still to come."""

    rest: Shares
    """Of the values that are not kept out, at `scale`."""
    too_large: tuple[str, ...] = ()
    """Those of `keep` whose values are too large for the scale that the rest needs."""
    lost_mass: float = 0.0
    """The share of the sum of magnitudes that is lost at `scale`, without the kept ones."""
    faults: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What the format does to the modules that it breaks, those of `keep` included: see `faults`.
    """
    takers: tuple[str, ...] = ()
    """Those of `keep` that are in it only because they compute with what others there return."""

    def with_fault(self, *kinds: str) -> tuple[str, ...]:
        """The modules that the format breaks in one of these ways."""
        return tuple(name for name, found in self.faults.items() if found & set(kinds))


class _Choice(NamedTuple):
    """A scale, and what is kept out at it: `broken` for its own sake, of these `too_large` for
    the sake of the others' scale."""

    scale: float
    out: list[ModuleGradients]
    broken: list[ModuleGradients]
    too_large: list[ModuleGradients]


def judge(format: Format, modules: Sequence[ModuleGradients]) -> Judgement:
    """The scale for a format, and whether it holds what was seen.

    The modules whose largest values force a small scale are left out one by one; at each scale so
    found, those that the format breaks are left out as well, and where it is the gradient of an
    output that breaks, those that compute it. The fewest win.
    """
    having = [module for module in modules if module.together.values]
    by_size = sorted(having, key=lambda module: module.together.largest or 0.0, reverse=True)
    most = max(1, int(FEW * len(modules)))
    total = Histogram.total(module.together for module in having)
    best: _Choice | None = None
    tried: float | None = None
    for count in range(most + 1 if having else 0):
        too_large, rest = by_size[:count], by_size[count:]
        scale = scale_for(format, rest[0].together.largest if rest else None)
        if scale == tried or (best is not None and count >= len(best.out)):
            continue  # One more is kept out, and nothing is won by it.
        tried = scale
        broken = [m for m in modules if m in too_large or faults(m, format, scale)]
        names = {m.name for m in broken} | _takers(broken, format, scale)
        out = [module for module in modules if module.name in names]
        few = sum(module.together.values for module in out) <= FEW * total.values
        if len(broken) <= most and few and (best is None or len(out) < len(best.out)):
            best = _Choice(scale, out, broken, too_large)
    choice = best or _Choice(scale_for(format, total.largest), [], [], [])
    left = Histogram.total(module.together for module in having if module not in choice.out)
    found = {module.name: faults(module, format, choice.scale) for module in modules}
    return Judgement(
        format=format,
        scale=choice.scale,
        keep=tuple(module.name for module in choice.out),
        holds=best is not None,
        words="",
        unscaled=shares_of(total, format, 1.0),
        scaled=shares_of(total, format, choice.scale),
        rest=shares_of(left, format, choice.scale),
        lost_mass=lost_mass(left, format, choice.scale),
        too_large=tuple(module.name for module in modules if module in choice.too_large),
        faults={name: kinds for name, kinds in found.items() if kinds},
        takers=tuple(module.name for module in choice.out if module not in choice.broken),
    )


def _takers(broken: Iterable[ModuleGradients], format: Format, scale: float) -> set[str]:
    """Who computes what must not be stored in the format: an output, or its gradient."""
    return {
        name
        for module in broken
        if module.outputs is not None
        and (_returns_too_much(module, format) or _output_breaks(module, format, scale))
        for name in module.outputs.takers
    }


def _returns_too_much(module: ModuleGradients, format: Format) -> bool:
    return module.outputs is not None and module.outputs.largest > format.largest


def _output_breaks(module: ModuleGradients, format: Format, scale: float) -> bool:
    """Whether the gradient of its output is lost, overflows, or would force a smaller scale."""
    seen = module.activations
    if seen is None or seen.largest is None:
        return False
    too_large = seen.largest * scale > format.largest or scale_for(format, seen.largest) < scale
    return too_large or lost_mass(seen, format, scale) > LOST_MASS


def scale_for(format: Format, largest: float | None) -> float:
    """The largest power of two that leaves the headroom; 1 for a format with float32's range."""
    if largest is None or format.exponent_bits >= 8:
        return 1.0
    room = math.log2(format.largest) - math.log2(largest) - HEADROOM
    return min(max(math.ldexp(1.0, math.floor(room)), LOWEST), HIGHEST)


def prefer(judgements: Sequence[Judgement]) -> Judgement | None:
    """The format with the finest steps that holds; None if that is only float32.

    float32 and tf32 are stored in 32 bits, so they are what is left, not a choice.
    """
    narrow = [each for each in judgements if each.format.name not in ("fp32", "tf32")]
    holding = [each for each in narrow if each.holds]
    return max(holding, key=lambda each: each.format.mantissa_bits, default=None)


def faults(module: ModuleGradients, format: Format, scale: float) -> frozenset[str]:
    """What a format breaks of a module; nothing, if it holds it.

    'outputs': what it returns is too large. 'overflow': a gradient is. 'mass': too much of the sum
    of magnitudes is lost. 'values': too many parameters lose their gradient.
    """
    found: set[str] = set()
    if _returns_too_much(module, format):
        found.add("outputs")
    largest = module.together.largest
    if largest is not None and largest * scale > format.largest:
        found.add("overflow")
    parts = [part for part in (module.parameters, module.activations) if part is not None]
    if any(lost_mass(part, format, scale) > LOST_MASS for part in parts):
        found.add("mass")
    owned = module.parameters
    if owned is not None and shares_of(owned, format, scale).lost > LOST_VALUES:
        found.add("values")
    return frozenset(found)
