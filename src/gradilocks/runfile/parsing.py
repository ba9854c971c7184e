"""The fields of a line → a record, or a sentence that says which field is not as it must be.

Fields that nobody knows are left aside: a newer gradilocks may write more of them. Steps are made
many at a time, column by column: a million of them is what this must be fast for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from gradilocks.runfile.records import (
    VERSION,
    Culprit,
    Detail,
    End,
    Header,
    OptimizerInfo,
    Step,
    Trace,
)

__all__ = [
    "FIELDS",
    "OPTIONAL",
    "Malformed",
    "end",
    "header",
    "loads",
    "optimizer",
    "steps",
    "trace",
]

Fields = dict[str, Any]
_Types = frozenset[type]


class Malformed(ValueError):
    """A line of a known kind whose fields are not as they must be; says which, and what came."""


_INT: _Types = frozenset({int})
_BOOL: _Types = frozenset({bool})
_LIST: _Types = frozenset({list})
_OBJECT: _Types = frozenset({dict})
_STR: _Types = frozenset({str})
_NUMBER: _Types = frozenset({int, float})
_NOTHING: _Types = frozenset({type(None)})
_NUMBER_OR_NULL, _STR_OR_NULL = _NUMBER | _NOTHING, _STR | _NOTHING
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_WORDS |= {dict: "an object", str: "text", type(None): "null"}

# What each kind of line must have. docs/run-file.md has the same in words, and a test compares.
FIELDS: Mapping[str, Mapping[str, _Types]] = {
    "header": {
        "gradilocks": _INT,
        "started": _NUMBER,
        "command": _LIST,
        "versions": _OBJECT,
        "hardware": _OBJECT,
        "settings": _OBJECT,
        "rank": _INT,
        "ranks": _INT,
    },
    "optimizer": {
        "optimizer": _INT,
        "class": _STR,
        "names": _LIST,
        "sizes": _LIST,
        "dtypes": _LIST,
    },
    "step": {
        "step": _INT,
        "time": _NUMBER,
        "optimizer": _INT,
        "loss": _NUMBER_OR_NULL,
        "scale": _NUMBER_OR_NULL,
        "norm": _NUMBER_OR_NULL,
        "limit": _NUMBER_OR_NULL,
        "clipped": _BOOL,
        "skipped": _BOOL,
        "reason": _STR_OR_NULL,
        "culprits": _LIST,
        "lr": _NUMBER_OR_NULL,
        "nan": _INT,
        "inf": _INT,
    },
    "trace": {
        "step": _INT,
        "time": _NUMBER,
        "phase": _STR,
        "module": _STR,
        "class": _STR,
        "what": _STR,
        "inputs": _LIST,
        "text": _STR,
    },
    "end": {"time": _NUMBER, "status": _STR, "exit": _INT, "error": _STR_OR_NULL},
}
# What a line may have; older files do not.
OPTIONAL: Mapping[str, Mapping[str, _Types]] = {
    "step": {"loss_nonfinite": _BOOL, "finite_gradients": _INT, "finite_after": _STR},
    "trace": {"damaged": _LIST, "where": _STR},
}

_STEP = tuple(FIELDS["step"].items())
_CULPRITS = list(FIELDS["step"]).index("culprits")
_step_columns = itemgetter(*FIELDS["step"])
_kind = itemgetter("kind")
_make_step = partial(tuple.__new__, Step)  # Step._make, less its check: zip made the columns

# NaN and Infinity are not JSON, but Python writes and reads them: here they are null too.
loads = json.JSONDecoder(parse_constant=lambda _: None).decode


def header(fields: Fields) -> Header:
    """Who ran; of this version, as the caller has checked."""
    _check("header", fields)
    return Header(
        version=VERSION,
        started=float(fields["started"]),
        command=tuple(map(str, fields["command"])),
        versions=fields["versions"],
        hardware=fields["hardware"],
        settings=fields["settings"],
        rank=fields["rank"],
        ranks=fields["ranks"],
    )


def optimizer(fields: Fields) -> OptimizerInfo:
    """An optimizer, with as many sizes and dtypes as names."""
    _check("optimizer", fields)
    names, sizes, dtypes = fields["names"], fields["sizes"], fields["dtypes"]
    if not len(names) == len(sizes) == len(dtypes):
        raise Malformed(
            f"{len(names)} names, {len(sizes)} sizes and {len(dtypes)} dtypes: expected as many "
            "of each"
        )
    for name, values, allowed in (
        ("names", names, _STR),
        ("sizes", sizes, _INT),
        ("dtypes", dtypes, _STR),
    ):
        _check_all(f"an entry of {name!r}", values, allowed)
    return OptimizerInfo(
        fields["optimizer"], fields["class"], tuple(names), tuple(sizes), tuple(dtypes)
    )


def steps(lines: Sequence[Fields]) -> list[Step]:
    """The steps of many lines, all of which must be steps.

    Raises:
        Malformed: one is not; which, is found by asking for each alone.
    """
    kinds = list(map(_kind, lines))
    if kinds.count("step") != len(kinds):
        raise Malformed("not a step")
    try:
        columns: list[Sequence[Any]] = list(zip(*map(_step_columns, lines), strict=True))
    except KeyError as error:
        raise Malformed(f"without {error}") from error
    for at, (name, allowed) in enumerate(_STEP):
        types = set(map(type, columns[at]))
        if not types <= allowed:
            _check_all(repr(name), columns[at], allowed)
        if float in allowed and int in types:
            columns[at] = _floats(name, columns[at])
    columns[_CULPRITS] = [_culprits(found) if found else () for found in columns[_CULPRITS]]
    details = [_detail(line["detail"]) if "detail" in line else None for line in lines]
    further = [_optional(name, allowed, lines) for name, allowed in OPTIONAL["step"].items()]
    return list(map(_make_step, zip(*columns, details, *further, strict=True)))


def trace(fields: Fields) -> Trace:
    """Where a value first turned non-finite."""
    _check("trace", fields)
    _check_all("an entry of 'inputs'", fields["inputs"], _OBJECT)
    return Trace(
        step=fields["step"],
        time=float(fields["time"]),
        phase=fields["phase"],
        module=fields["module"],
        kind=fields["class"],
        what=fields["what"],
        inputs=tuple(fields["inputs"]),
        text=fields["text"],
        damaged=_damaged(fields["damaged"]) if "damaged" in fields else None,
        where=_where(fields),
    )


def _where(fields: Fields) -> str:
    if "where" in fields:
        _check_all("'where'", [fields["where"]], OPTIONAL["trace"]["where"])
        return str(fields["where"])
    text = fields["text"]  # An older file, in which only the sentence says it.
    if " in the input data" in text:
        return "input"
    return "after" if " in the loss" in text else "module"


def _damaged(found: Any) -> tuple[str, ...]:
    _check_all("'damaged'", [found], OPTIONAL["trace"]["damaged"])
    _check_all("an entry of 'damaged'", found, _STR)
    return tuple(found)


def end(fields: Fields) -> End:
    """How the run ended."""
    _check("end", fields)
    return End(float(fields["time"]), fields["status"], fields["exit"], fields["error"])


def _culprits(found: list[Any]) -> tuple[Culprit, ...]:
    _check_all("an entry of 'culprits'", found, _OBJECT)
    made = tuple(Culprit(c.get("name"), c.get("nan"), c.get("inf")) for c in found)
    for name, allowed, values in zip(
        Culprit._fields, (_STR, _INT, _INT), zip(*made, strict=True), strict=True
    ):
        _check_all(f"{name!r} of a culprit", values, allowed)
    return made


def _optional(name: str, allowed: _Types, lines: Sequence[Fields]) -> list[Any]:
    """A column of a field that a line may lack: None where it does."""
    column = [line.get(name) for line in lines]
    if not set(map(type, column)) <= allowed | _NOTHING:
        _check_all(repr(name), column, allowed | _NOTHING)
    return column


def _detail(found: Any) -> Detail | None:
    if found is None:
        return None
    _check_all("'detail'", [found], _OBJECT)
    lists = [found.get(name) for name in Detail._fields]
    for name, values in zip(Detail._fields, lists, strict=True):
        _check_all(f"{name!r} of 'detail'", [values], _LIST)
        if len(values) != len(lists[0]):
            raise Malformed(
                f"'detail' has {len(lists[0])} entries of 'norm' and {len(values)} of {name!r}"
            )
        if not set(map(type, values)) <= _NUMBER_OR_NULL:
            _check_all(f"an entry of {name!r} of 'detail'", values, _NUMBER_OR_NULL)
    return Detail(*lists)


def _check(kind: str, fields: Fields) -> None:
    for name, allowed in FIELDS[kind].items():
        if name not in fields:
            raise Malformed(f"without {name!r}")
        _check_all(repr(name), [fields[name]], allowed)


def _check_all(name: str, values: Sequence[Any], allowed: _Types) -> None:
    for value in values:
        if type(value) not in allowed:
            whole = {kind for kind in allowed if not (kind is int and float in allowed)}
            expected = " or ".join(sorted(_WORDS[kind] for kind in whole))
            raise Malformed(f"{name} must be {expected}, got {_short(value)}")


def _floats(name: str, column: Sequence[Any]) -> list[float | None]:
    try:
        return [None if value is None else float(value) for value in column]
    except OverflowError as error:
        raise Malformed(f"{name!r} must be a number that fits a float64") from error


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
