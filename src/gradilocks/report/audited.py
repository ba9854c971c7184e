"""What an audit found, as plain data → the same, typed and checked; or one sentence on why not.

The data come from a file that anybody may have written: what is missing, of the wrong type or out
of all bounds is refused here, so that whoever draws it need not look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gradilocks.report.formatting import clean, listed, power, shortened

__all__ = [
    "Audit",
    "Fate",
    "Format",
    "Histogram",
    "Module",
    "Shares",
    "UnreadableAudit",
    "audited",
    "mentioned",
    "recommended",
]

VERSION = 1
# No float64 has an exponent outside: what claims one would draw an endless axis.
LOWEST, HIGHEST = -1074, 1023

T = TypeVar("T")


class UnreadableAudit(ValueError):
    """The data are not those of an audit that can be shown."""


@dataclass(frozen=True)
class Shares:
    """What becomes of the values that are finite and not zero; None where there are none."""

    lost: float | None
    subnormal: float | None
    overflow: float | None
    headroom: float | None
    """How many doublings are left before the largest value overflows."""

    @property
    def normal(self) -> float | None:
        """The share that keeps its full precision."""
        if self.lost is None or self.subnormal is None or self.overflow is None:
            return None
        return max(0.0, 1.0 - self.lost - self.subnormal - self.overflow)


@dataclass(frozen=True)
class Fate:
    """The same values at scale 1, and at the scale that the audit recommends for the format."""

    unscaled: Shares
    scaled: Shares


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values with an exponent of `first + i`."""

    first: int
    counts: tuple[int, ...]
    zeros: int
    nonfinite: int

    @property
    def total(self) -> int:
        """How many values are finite and not zero."""
        return sum(self.counts)


@dataclass(frozen=True)
class Format:
    """A format: the ends of its window, and what the audit says about it."""

    name: str
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    scale: float
    holds: bool
    keep: tuple[str, ...]
    words: str
    fate: Fate

    @property
    def edges(self) -> tuple[float, float, float]:
        """As log2: below the first a value is lost, below the second subnormal; above the third
        it overflows. Half of the smallest subnormal is the largest value that rounds to zero."""
        return (
            math.log2(self.smallest_subnormal) - 1,
            math.log2(self.smallest_normal),
            math.log2(self.largest),
        )


@dataclass(frozen=True)
class Module:
    """The gradients of a module's own parameters and of its output, and their fate by format."""

    name: str
    type: str
    parameters: Histogram | None
    activations: Histogram | None
    fates: Mapping[str, Fate]


@dataclass(frozen=True)
class Audit:
    """Everything that an audit found."""

    steps: int
    precision: str
    loss_scale: float
    formats: tuple[Format, ...]
    chosen: str
    """The name of the format it recommends; one of `formats`, or another that needs no window."""
    scale: float
    keep: tuple[str, ...]
    words: tuple[str, ...]
    modules: tuple[Module, ...]
    parameters: Histogram | None
    activations: Histogram | None

    @property
    def first(self) -> Format:
        """The format to show first: the recommended one, if it is among them."""
        return next((each for each in self.formats if each.name == self.chosen), self.formats[0])

    @property
    def is_good_news(self) -> bool:
        """Whether a format was found that holds all there was."""
        seen = [each for each in (self.parameters, self.activations) if each is not None]
        found = self.first.name == self.chosen and self.first.holds
        return found and not any(each.nonfinite for each in seen)

    @property
    def in_short(self) -> str:
        """The recommendation in half a line."""
        kept = f", with {listed(self.keep)} in higher precision" if self.keep else ""
        at = "without a loss scale" if self.scale == 1 else f"at scale {power(self.scale)}"
        return f"{self.chosen} {at}{kept}"


def audited(data: Mapping[str, Any]) -> Audit:
    """Reads an audit.

    Args:
        data: as `gradilocks audit` writes it, and as a run file's line holds it.

    Raises:
        UnreadableAudit: something is missing, of the wrong type or another version's.
    """
    if not isinstance(data, Mapping):
        raise UnreadableAudit(f"an audit is an object, not {type(data).__name__}")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise UnreadableAudit(
            f"it is of version {_short(version)}, and this gradilocks shows version {VERSION}"
        )
    formats = _each(data, "formats", _format)
    names = [each.name for each in formats]
    if not formats or len(set(names)) < len(names):
        raise UnreadableAudit("'formats' must name at least one format, and each once")
    chosen = _object(data, "recommendation")
    total = _object(data, "total")
    return Audit(
        steps=_count(data, "steps"),
        precision=_text(data, "precision"),
        loss_scale=_positive(data, "loss_scale"),
        formats=formats,
        chosen=_text(chosen, "format"),
        scale=_positive(chosen, "scale"),
        keep=_texts(chosen, "keep"),
        words=_texts(chosen, "words"),
        modules=_each(data, "modules", lambda module: _module(module, names)),
        parameters=_histogram(total, "parameters"),
        activations=_histogram(total, "activations"),
    )


def mentioned(data: Mapping[str, Any]) -> str:
    """Returns one line for a terminal: what the audit recommends, or that it cannot be read."""
    try:
        return f"Audit: {audited(data).in_short}."
    except UnreadableAudit as error:
        return f"The audit in the run file could not be shown: {error}."


def recommended(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what the audit recommends, for JSON; None if it cannot be read."""
    try:
        audit = audited(data)
    except UnreadableAudit:
        return None
    return {
        "format": audit.chosen,
        "scale": audit.scale,
        "keep": list(audit.keep),
        "words": list(audit.words),
    }


def _format(data: Mapping[str, Any]) -> Format:
    made = Format(
        name=_text(data, "name"),
        largest=_positive(data, "largest"),
        smallest_normal=_positive(data, "smallest_normal"),
        smallest_subnormal=_positive(data, "smallest_subnormal"),
        scale=_positive(data, "scale"),
        holds=_taken(data, "holds", lambda value: isinstance(value, bool), "true or false"),
        keep=_texts(data, "keep"),
        words=_text(data, "words"),
        fate=_fate(data),
    )
    if not made.smallest_subnormal <= made.smallest_normal < made.largest:
        raise UnreadableAudit(f"the window of {made.name} has its ends in the wrong order")
    return made


def _module(data: Mapping[str, Any], formats: Sequence[str]) -> Module:
    fates = _object(data, "fates")
    return Module(
        name=_text(data, "name"),
        type=_text(data, "type"),
        parameters=_histogram(data, "parameters"),
        activations=_histogram(data, "activations"),
        fates={name: _fate(_object(fates, name)) for name in formats},
    )


def _histogram(data: Mapping[str, Any], name: str) -> Histogram | None:
    if name in data and data[name] is None:
        return None
    given = _object(data, name)
    first = _taken(given, "first", lambda value: type(value) is int, "a whole number")
    counts = _taken(
        given, "counts", lambda c: isinstance(c, list) and all(map(_counted, c)), "counts"
    )
    if first < LOWEST or first + len(counts) - 1 > HIGHEST:
        raise UnreadableAudit(f"a histogram of {name} lies beyond every number")
    return Histogram(first, tuple(counts), _count(given, "zeros"), _count(given, "nonfinite"))


def _fate(data: Mapping[str, Any]) -> Fate:
    return Fate(_shares(_object(data, "unscaled")), _shares(_object(data, "scaled")))


def _shares(data: Mapping[str, Any]) -> Shares:
    lost, subnormal, overflow = (
        _taken(data, name, lambda v: v is None or (_finite(v) and 0 <= v <= 1), "a share, 0 to 1")
        for name in ("lost", "subnormal", "overflow")
    )
    headroom = _taken(data, "headroom", lambda v: v is None or _finite(v), "a number or null")
    return Shares(lost, subnormal, overflow, headroom)


def _each(
    data: Mapping[str, Any], name: str, make: Callable[[Mapping[str, Any]], T]
) -> tuple[T, ...]:
    given = _taken(
        data,
        name,
        lambda v: isinstance(v, list) and all(isinstance(each, Mapping) for each in v),
        "a list of objects",
    )
    return tuple(make(each) for each in given)


def _object(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _taken(data, name, lambda v: isinstance(v, Mapping), "an object")
    return found


def _text(data: Mapping[str, Any], name: str) -> str:
    return clean(_taken(data, name, lambda value: isinstance(value, str), "a text"))


def _texts(data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    given = _taken(
        data,
        name,
        lambda v: isinstance(v, (list, tuple)) and all(isinstance(each, str) for each in v),
        "a list of texts",
    )
    return tuple(map(clean, given))


def _count(data: Mapping[str, Any], name: str) -> int:
    return int(_taken(data, name, _counted, "a count"))


def _positive(data: Mapping[str, Any], name: str) -> float:
    return float(_taken(data, name, lambda v: _finite(v) and v > 0, "a positive number"))


def _taken(data: Mapping[str, Any], name: str, good: Callable[[Any], bool], expected: str) -> Any:
    if name not in data:
        raise UnreadableAudit(f"{name!r} is missing")
    if not good(data[name]):
        raise UnreadableAudit(f"{name!r} must be {expected}, not {_short(data[name])}")
    return data[name]


def _finite(value: object) -> bool:
    """Whether it is a number that a float64 holds; a whole number may be longer."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _counted(value: object) -> bool:
    return type(value) is int and _finite(value) and value >= 0


def _short(value: object) -> str:
    try:
        return shortened(clean(repr(value)), 40)
    except ValueError:  # a whole number of thousands of digits
        return f"{type(value).__name__} beyond all bounds"
