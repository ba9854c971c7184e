"""What an audit of gradients has found, as data. Imports no torch.

`lab/audit` fills it; JSON files and the audit line of a run file hold it, in the fields that
docs/run-file.md describes; `report` draws it. A file may have been written by anybody, so what is
missing in it, of the wrong type or out of all bounds is refused by `AuditRecord.from_plain`, and
whoever draws or asks need not look.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple, TypeVar, get_type_hints

from gradilocks.errors import BadRunFile
from gradilocks.lab.formats import FORMATS, Format

__all__ = [
    "AuditRecord",
    "Fate",
    "FormatFinding",
    "Histogram",
    "ModuleGradients",
    "Outputs",
    "Recommendation",
    "Shares",
    "UnreadableAudit",
]

VERSION = 1
_EXPONENTS = range(-1074, 1024)  # Of a float64: what claims another would draw an endless axis.
_MEAN = 1.0 / math.log(2.0)  # Of x over [1, 2), if the logarithm of x is spread evenly.

_Record = TypeVar("_Record", bound="AuditRecord")
_Made = TypeVar("_Made")
_Object = Mapping[str, Any]
_Objects = tuple[_Object, ...]


class UnreadableAudit(BadRunFile):
    """The data are not those of an audit; `reason` says in half a sentence why."""

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"an audit that is not as it must be: {reason}.{way_out}")
        self.reason = reason


@dataclass(frozen=True)
class Histogram:
    """How many values have which exponent, floor(log2|x|).

    Example:
        >>> seen = Histogram.of({-1: 3, 2: 1}, largest=4.5, smallest=0.5)
        >>> seen.first, seen.counts
        (-1, (3, 0, 0, 1))
    """

    first: int = 0
    """The exponent of the first bin."""
    counts: tuple[int, ...] = ()
    """`counts[i]` values have the exponent first + i; neither end is empty."""
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
        span = range(min(filled), max(filled) + 1)
        counts = tuple(bins.get(exponent, 0) for exponent in span)
        exact = tuple((powers or {}).get(exponent, 0) for exponent in span)
        exact = exact if any(exact) else ()
        return cls(span[0], counts, zeros, nonfinite, largest, smallest, exact)

    @property
    def values(self) -> int:
        """How many are finite and other than zero: those that a format can lose."""
        return sum(self.counts)

    def bins(self) -> Iterator[tuple[int, int]]:
        """Exponent and count of every bin."""
        return enumerate(self.counts, start=self.first)

    def __add__(self, other: Histogram) -> Histogram:
        bins: Counter[int] = Counter()
        powers: Counter[int] = Counter()
        for each in (self, other):
            bins.update(dict(each.bins()))
            powers.update(dict(enumerate(each.powers, start=each.first)))
        largest = [h.largest for h in (self, other) if h.largest is not None]
        smallest = [h.smallest for h in (self, other) if h.smallest is not None]
        return Histogram.of(
            bins,
            powers=powers,
            zeros=self.zeros + other.zeros,
            nonfinite=self.nonfinite + other.nonfinite,
            largest=max(largest, default=None),
            smallest=min(smallest, default=None),
        )

    @staticmethod
    def total(parts: Iterable[Histogram | None]) -> Histogram:
        """All of them together."""
        return reduce(Histogram.__add__, filter(None, parts), Histogram())

    def below(self, bound: float) -> float:
        """How many values are smaller than `bound`: a bin that it lies in is taken as if its values
        were spread evenly over the logarithm."""
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
        total = 0.0
        for (exponent, count), exact in zip(
            self.bins(), self.powers or (0,) * len(self.counts), strict=True
        ):
            total += (count - exact) * _part(place, exponent) * _MEAN * 2.0**exponent
            total += exact * 2.0**exponent if exponent <= place else 0.0
        return total

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found: dict[str, Any] = _plain(self)
        return found

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Histogram:
        """The inverse of `to_plain`.

        Raises:
            UnreadableAudit: something is missing or of the wrong type.
        """
        return _checked_histogram(plain, "a histogram")


@dataclass(frozen=True)
class Shares:
    """What becomes of values in a format at a scale: shares of those that are finite and not 0."""

    lost: float
    """Rounded to zero."""
    subnormal: float
    """Stored with fewer bits than the format has."""
    overflow: float
    """Made inf or, where the format has none, the largest number."""
    headroom: float | None
    """Doublings left before the largest overflows, negative if it does; None without values."""

    @property
    def normal(self) -> float:
        """Stored with all the bits that the format has."""
        return max(0.0, 1.0 - self.lost - self.subnormal - self.overflow)

    @property
    def of_nothing(self) -> bool:
        """Whether there was no value to have a share of."""
        return self.headroom is None and self.normal == 1.0

    def to_plain(self) -> dict[str, float | None]:
        """As JSON has it."""
        return dict(vars(self))


class Fate(NamedTuple):
    """The same values at scale 1, and at the scale that is recommended for a format."""

    unscaled: Shares
    scaled: Shares


@dataclass(frozen=True)
class Outputs:
    """How large what a module returned was, and who took it."""

    largest: float
    """The largest finite magnitude."""
    nonfinite: int = 0
    takers: tuple[str, ...] = ()
    """The modules that computed with it, and so compute its gradient."""


@dataclass(frozen=True)
class ModuleGradients:
    """The gradients of one module."""

    name: str
    """As `model.named_modules()` has it; '' is the model itself."""
    kind: str
    """The module's class, as in 'Linear'."""
    parameters: Histogram | None
    """Of its own parameters; None if none had a gradient."""
    activations: Histogram | None
    """Of what it returned; None if that had no gradient."""
    outputs: Outputs | None = None
    """What it returned; None if that was not seen."""
    fates: Mapping[str, Fate] = field(default_factory=dict, hash=False)
    """By the name of a format; empty until formats have been judged."""

    @cached_property
    def together(self) -> Histogram:
        """Both kinds of gradients."""
        return Histogram.total((self.parameters, self.activations))

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found: dict[str, Any] = _plain(self)
        return found

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ModuleGradients:
        """The inverse of `to_plain`, for gradients that have not been judged.

        Raises:
            UnreadableAudit: something is missing or of the wrong type.
        """
        return _module(plain, ())


@dataclass(frozen=True)
class FormatFinding:
    """What one format would do to the gradients."""

    format: Format
    scale: float
    """The initial scale to take for this format."""
    holds: bool
    """Whether the format holds them at that scale, without the modules in `keep`."""
    keep: tuple[str, ...]
    words: str
    unscaled: Shares
    """Of all values at scale 1."""
    scaled: Shares
    """Of all values at `scale`."""

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.format.name

    @property
    def fate(self) -> Fate:
        """What becomes of all values."""
        return Fate(self.unscaled, self.scaled)


@dataclass(frozen=True)
class Recommendation:
    """What to train with."""

    format: str
    """'fp16', 'bf16', ... or 'fp32'."""
    scale: float
    """For `DynamicScale(init_scale=)` or `StaticScale`; 1 if none is needed."""
    keep: tuple[str, ...]
    """Modules to keep in float32."""
    words: tuple[str, ...]
    """Why, in sentences."""


@dataclass(frozen=True)
class AuditRecord:
    """Where a model's gradients lie, and what each format would lose of them."""

    steps: int
    """Batches, or steps of an optimizer, that were seen."""
    precision: str
    """What the gradients were computed in, as in 'float32' or 'float16 autocast'."""
    loss_scale: float
    """The scale that was divided out of them; 1 without."""
    modules: tuple[ModuleGradients, ...]
    """In forward order."""
    formats: tuple[FormatFinding, ...]
    recommendation: Recommendation
    parameters: Histogram
    """The gradients of all parameters."""
    activations: Histogram
    """The gradients of all modules' outputs."""

    @property
    def recommended(self) -> FormatFinding | None:
        """The finding on the format that is recommended; None if that was not asked for."""
        named = (each for each in self.formats if each.name == self.recommendation.format)
        return next(named, None)

    def to_plain(self) -> dict[str, Any]:
        """As a run file's audit line has it: dicts, lists, numbers and strings."""
        plain = _plain(self)
        total = {name: plain.pop(name) for name in ("parameters", "activations")}
        first = {name: plain[name] for name in ("steps", "precision", "loss_scale", "formats")}
        first["recommendation"] = plain["recommendation"]
        return {"kind": "audit", "version": VERSION, **first, **plain, "total": total}

    @classmethod
    def from_plain(cls: type[_Record], plain: Mapping[str, Any]) -> _Record:
        """The audit of a run file or a JSON file: `Audit.from_plain(read_run(path).audit)`.

        Raises:
            UnreadableAudit: a BadRunFile: it is no audit, one of another version, or not whole.
        """
        given: object = plain
        if not isinstance(given, Mapping) or given.get("kind") != "audit":
            raise UnreadableAudit(f"expected what Audit.to_plain() returns, got {_short(plain)}")
        version = plain.get("version")
        if type(version) is not int or version != VERSION:
            raise UnreadableAudit(
                f"it is of version {_short(version)}, and this gradilocks reads version {VERSION}",
                " Install the gradilocks that wrote it, or a newer one.",
            )
        listed = _take(plain, "formats", _Objects)
        names = [_take(each, "name", str) for each in listed]
        if not names or len(set(names)) < len(names):
            raise UnreadableAudit("'formats' must name at least one format, and each once")
        formats = tuple(map(_format, listed))
        total = _take(plain, "total", _Object)
        modules = _take(plain, "modules", _Objects)
        return cls(
            steps=_take(plain, "steps", int),
            precision=_take(plain, "precision", str),
            loss_scale=_take(plain, "loss_scale", float),
            modules=tuple(_module(each, names) for each in modules),
            formats=formats,
            recommendation=_read(Recommendation, _take(plain, "recommendation", _Object)),
            parameters=_histogram(total, "parameters") or Histogram(),
            activations=_histogram(total, "activations") or Histogram(),
        )


_ENDS = ("largest", "smallest_normal", "smallest_subnormal")
"""Of a format's window, as a file names them."""


def _plain(data: Any) -> Any:
    """Dataclasses, tuples, numbers and texts as JSON has them."""
    if isinstance(data, Mapping):
        return {name: _plain(each) for name, each in data.items()}
    if isinstance(data, Fate):
        return _plain(data._asdict())
    if isinstance(data, tuple):
        return [_plain(each) for each in data]
    if not is_dataclass(data):
        return data
    values = {each.name: getattr(data, each.name) for each in fields(data)}
    if isinstance(data, FormatFinding):
        format = values.pop("format")
        values = {"name": format.name, **{end: getattr(format, end) for end in _ENDS}, **values}
    return {"type" if name == "kind" else name: _plain(each) for name, each in values.items()}


def _part(place: float, exponent: int) -> float:
    """How much of a bin lies below a place on the logarithm's axis."""
    return min(max(place - exponent, 0.0), 1.0)


def _read(kind: Callable[..., _Made], data: Mapping[str, Any], **known: Any) -> _Made:
    """A dataclass, made of an object of a file and of what is `known` already."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in known}
    return kind(**known, **{name: _take(data, name, hint) for name, hint in hints.items()})


def _take(data: Mapping[str, Any], name: str, hint: Any) -> Any:
    """A field of an object of a file, which must be what its name or its type asks for."""
    if name not in data:
        raise UnreadableAudit(f"{name!r} is missing")
    value = data[name]
    expected, is_good = _NAMED.get(name) or _TYPED[hint]
    if not is_good(value):
        raise UnreadableAudit(f"{name!r} must be {expected}, not {_short(value)}")
    if hint in (float, float | None) and type(value) is int:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _format(data: Mapping[str, Any]) -> FormatFinding:
    name = data["name"]
    if name not in FORMATS:
        raise UnreadableAudit(f"there is no format {_short(name)}; known are {', '.join(FORMATS)}")
    format = FORMATS[name]
    if any(_take(data, end, float) != getattr(format, end) for end in _ENDS):
        raise UnreadableAudit(f"the window of {name} does not end where {name} does")
    return _read(FormatFinding, data, format=format, **_fate(data)._asdict())


def _module(data: Mapping[str, Any], formats: Iterable[str]) -> ModuleGradients:
    fates = _take(data, "fates", _Object)
    outputs = None
    if data.get("outputs") is not None:  # Not in the first audits.
        outputs = _read(Outputs, _take(data, "outputs", _Object))
        outputs = replace(outputs, largest=outputs.largest or 0.0)
    return ModuleGradients(
        name=_take(data, "name", str),
        kind=_take(data, "type", str),
        parameters=_histogram(data, "parameters"),
        activations=_histogram(data, "activations"),
        outputs=outputs,
        fates={name: _fate(_take(fates, name, _Object)) for name in formats},
    )


def _fate(data: Mapping[str, Any]) -> Fate:
    unscaled, scaled = (_read(Shares, _take(data, name, _Object)) for name in Fate._fields)
    return Fate(_without_null(unscaled), _without_null(scaled))


def _without_null(made: Shares) -> Shares:
    return Shares(made.lost or 0.0, made.subnormal or 0.0, made.overflow or 0.0, made.headroom)


def _histogram(data: Mapping[str, Any], name: str) -> Histogram | None:
    """The histogram of this name, or None where the file has null."""
    if name in data and data[name] is None:
        return None
    return _checked_histogram(_take(data, name, _Object), f"a histogram of {name}")


def _checked_histogram(data: Mapping[str, Any], called: str) -> Histogram:
    made = _read(Histogram, {"powers": [], **data})  # The first audits have no powers.
    if made.first not in _EXPONENTS or made.first + len(made.counts) - 1 > _EXPONENTS[-1]:
        raise UnreadableAudit(f"{called} lies beyond every number")
    if made.powers and len(made.powers) != len(made.counts):
        raise UnreadableAudit(
            f"{called} has {len(made.counts)} 'counts' and {len(made.powers)} 'powers'"
        )
    return made


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float64 holds; a whole number may be longer."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_count(value: object) -> bool:
    return type(value) is int and _is_finite(value) and value >= 0


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # A whole number of thousands of digits.
        return f"{type(value).__name__} beyond all bounds"
    return text if len(text) <= 40 else f"{text[:19]}…{text[-20:]}"


def _are(kind: type) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, (list, tuple)) and all(isinstance(each, kind) for each in v)


_Check = tuple[str, Callable[[Any], bool]]
_TYPED: dict[Any, _Check] = {
    bool: ("true or false", lambda v: isinstance(v, bool)),
    float: ("a positive number", lambda v: _is_finite(v) and v > 0),
    int: ("a count", _is_count),
    str: ("a text", lambda v: isinstance(v, str)),
    tuple[int, ...]: ("counts", lambda v: isinstance(v, list) and all(map(_is_count, v))),
    tuple[str, ...]: ("a list of texts", _are(str)),
    _Objects: ("a list of objects", _are(Mapping)),
    _Object: ("an object", lambda v: isinstance(v, Mapping)),
}
"""What a file may have for a field of a type: in words, and how to tell."""
_MAGNITUDE = ("a magnitude", lambda v: v is None or (_is_finite(v) and v >= 0))
_SHARE = ("a share, 0 to 1", lambda v: v is None or (_is_finite(v) and 0 <= v <= 1))
_NAMED: dict[str, _Check] = {
    "first": ("a whole number", lambda v: type(v) is int),
    "headroom": ("a number or null", lambda v: v is None or _is_finite(v)),
    **dict.fromkeys(("largest", "smallest"), _MAGNITUDE),
    **dict.fromkeys(("lost", "subnormal", "overflow"), _SHARE),
}
"""The same for fields that may hold less than others of their type, or null."""
