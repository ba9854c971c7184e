"""Records ⇄ lines of a run file: the format itself, in both directions.

A record enters and a line leaves, one JSON object that ends in a newline; or the decoded fields of
a line enter and a record leaves, or a sentence that says which field is not as it must be.

Numbers that are not finite become ``null``. Per-tensor numbers keep six significant digits, which
is what a plot or a comparison can use; those of a step are written in full. Unknown fields are
ignored: a newer gradilocks may write more of them. Steps are read many at a time, column by column:
a million of them is what this must be fast for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from operator import itemgetter
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gradilocks.runfile.records import (
    Culprit,
    Detail,
    End,
    Header,
    Logged,
    OptimizerInfo,
    Precision,
    RankLosses,
    Resume,
    Step,
    Trace,
)

__all__ = [
    "FIELDS",
    "MOST_CULPRITS",
    "OPTIONAL",
    "Malformed",
    "audit_line",
    "end_from",
    "end_line",
    "header_from",
    "header_line",
    "loads",
    "log_line",
    "logged_from",
    "losses_from",
    "losses_line",
    "optimizer_from",
    "optimizer_line",
    "precision_from",
    "precision_line",
    "resume_from",
    "resume_line",
    "step_line",
    "steps_from",
    "trace_from",
    "trace_line",
]

MOST_CULPRITS = 32
"""So many culprits of a step are written."""

Fields = dict[str, Any]
_Types = frozenset[type]

_RECORDS: dict[str, Any] = {"header": Header, "optimizer": OptimizerInfo, "step": Step}
_RECORDS |= {"precision": Precision, "losses": RankLosses, "log": Logged, "trace": Trace}
_RECORDS |= {"resume": Resume, "end": End}
# Attributes of records that a line has under another name.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "header": {"version": "gradilocks"},
    "optimizer": {"index": "optimizer", "kind": "class"},
    "trace": {"kind": "class"},
}
_INT, _STR, _LIST = frozenset({int}), frozenset({str}), frozenset({list})
_OBJECT, _NULL, _NUMBER = frozenset({dict}), frozenset({type(None)}), frozenset({int, float})
_JSON_TYPES = {float: _NUMBER, tuple: _LIST, Mapping: _OBJECT}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_WORDS |= {dict: "an object", str: "text", type(None): "null"}


def _types_of(hint: Any) -> _Types:
    """What JSON has for an annotation in `records.py`."""
    if isinstance(hint, UnionType):
        return frozenset().union(*map(_types_of, get_args(hint)))
    kind = get_origin(hint) or hint
    return _JSON_TYPES.get(kind, frozenset({kind}))


def _schema(*, required: bool) -> dict[str, dict[str, _Types]]:
    schema: dict[str, dict[str, _Types]] = {}
    for kind, record in _RECORDS.items():
        hints, names = get_type_hints(record), _NAMES.get(kind, {})
        schema[kind] = {
            names.get(name, name): _types_of(hints[name]) - (frozenset() if required else _NULL)
            for name, parameter in signature(record).parameters.items()
            if name != "detail" and (parameter.default is parameter.empty) is required
        }
    return schema


# By the kind of a line: the fields that it must have, and those that it may have, which have a
# default in `records.py`: older files lack them. `detail` of a step is checked by itself.
# docs/run-file.md has the same in words, and a test compares.
FIELDS, OPTIONAL = _schema(required=True), _schema(required=False)

# NaN and Infinity are not JSON, but Python writes and reads them: here they are null too.
loads = json.JSONDecoder(parse_constant=lambda _: None).decode


# Records → lines.


def header_line(header: Header) -> str:
    """The first line of a file, and of every session that goes on in it."""
    fields = _fields("header", header)
    for name in OPTIONAL["header"]:
        if fields[name] is None:
            del fields[name]
    return _line(fields)


def optimizer_line(optimizer: OptimizerInfo) -> str:
    """An optimizer, before its first step."""
    return _line(_fields("optimizer", optimizer))


def step_line(step: Step) -> str:
    """One step of an optimizer, taken or skipped."""
    # What every step has is put together by hand: a quarter of the time that the encoder takes.
    text = (
        f'{{"kind":"step","step":{step.step},"time":{round(step.time, 6)},'
        f'"optimizer":{step.optimizer},"loss":{_number(step.loss)},"scale":{_number(step.scale)},'
        f'"norm":{_number(step.norm)},"limit":{_number(step.limit)},'
        f'"clipped":{_flag(step.clipped)},"skipped":{_flag(step.skipped)},'
        f'"reason":{_encode(step.reason) if step.reason else "null"},'
        f'"culprits":{_culprits_text(step.culprits)},"lr":{_number(step.lr)},'
        f'"nan":{step.nan},"inf":{step.inf}'
    )
    more: Fields = {}
    loss_is_finite = step.loss is not None and math.isfinite(step.loss)
    if not loss_is_finite and step.loss_nonfinite is not None:
        more["loss_nonfinite"] = step.loss_nonfinite
    if step.culprits:
        told = {"finite_gradients": step.finite_gradients, "finite_after": step.finite_after}
        more |= {name: value for name, value in told.items() if value is not None}
    if step.loss_ranks:
        more["loss_ranks"] = step.loss_ranks
    if step.bad_loss_ranks:
        more["bad_loss_ranks"] = step.bad_loss_ranks
    if step.of_rank:
        more["of_rank"] = step.of_rank
    if more:
        text += f",{_encode(more)[1:-1]}"
    if step.waited is not None:
        text += f',"waited":{round(step.waited, 6)}'
    if step.memory is not None:
        text += f',"memory":{step.memory}'
    if step.gpu_memory is not None:
        text += f',"gpu_memory":{step.gpu_memory}'
    if step.detail is not None:
        rows = [f'"{name}":{_short(row)}' for name, row in step.detail._asdict().items()]
        text += f',"detail":{{{",".join(rows)}}}'
    return f"{text}}}\n"


def _number(value: float | None) -> str:
    return "null" if value is None or not math.isfinite(value) else repr(value)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _culprits_text(culprits: Sequence[Culprit]) -> str:
    return _encode([each._asdict() for each in culprits[:MOST_CULPRITS]]) if culprits else "[]"


def precision_line(precision: Precision) -> str:
    """In which formats the run computes, when its first loss is known."""
    return _line(_fields("precision", precision))


def losses_line(losses: RankLosses) -> str:
    """What all ranks had as losses at steps that stand before it."""
    means = tuple(map(_finite, losses.losses))
    return _line(_fields("losses", replace(losses, losses=means)))


def resume_line(resume: Resume) -> str:
    """Where an optimizer goes on from an earlier step."""
    fields = _fields("resume", resume)
    if resume.counted is None:
        del fields["counted"]
    return _line(fields)


def log_line(logged: Logged) -> str:
    """Numbers of the user's own."""
    values = {name: _finite(value) for name, value in logged.values.items()}
    time = round(logged.time, 6)
    return _line({"kind": "log", "step": logged.step, "time": time, "values": values})


def trace_line(trace: Trace) -> str:
    """Where a value first turned non-finite."""
    fields = _fields("trace", trace)
    if trace.damaged is None:
        del fields["damaged"]
    if trace.where == "module":
        del fields["where"]
    if not trace.ranks:
        del fields["ranks"]
    return _line(fields)


def audit_line(audit: Mapping[str, Any]) -> str:
    """What an audit found; its numbers are finite or null already."""
    return _line({**audit, "kind": "audit"})


def end_line(end: End) -> str:
    """The last line of a run that ended by itself."""
    fields = _fields("end", end)
    for name in OPTIONAL["end"]:
        if fields[name] is None:
            del fields[name]
    return _line(fields)


def _fields(
    kind: str, record: Header | OptimizerInfo | Precision | RankLosses | Resume | Trace | End
) -> Fields:
    """A record as a line has it: its attributes in their order, under the line's names."""
    names = _NAMES.get(kind, {})
    fields: Fields = {"kind": kind}
    for attribute, value in vars(record).items():
        fields[names.get(attribute, attribute)] = (
            round(value, 6) if attribute == "time" else _plain(value)
        )
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _short(values: Sequence[float | None]) -> str:
    """Numbers of single tensors as JSON, to six digits; whole ones are counts and stay as they are.

    All at once where each is a finite float: 2,000 numbers in a third of the time.
    """
    kinds = set(map(type, values))
    if kinds == {float}:
        text = ",".join(["%.6g"] * len(values)) % tuple(values)
        if "n" not in text:  # As in "nan" and "inf".
            return f"[{text}]"
    elif kinds <= {int}:
        return f"[{','.join(map(str, values))}]"
    return f"[{','.join(map(_shortest, values))}]"


def _shortest(value: float | None) -> str:
    if value is None or isinstance(value, int):
        return "null" if value is None else str(value)
    return f"{value:.6g}" if math.isfinite(value) else "null"


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


# Made once: `json.dumps` makes one for each line, which takes as long as the line.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _line(fields: Fields) -> str:
    return _encode(fields) + "\n"


# Lines → records.


class Malformed(ValueError):
    """A line of a known kind whose fields are not as they must be; says which, and what came."""


def header_from(fields: Fields) -> Header:
    """What ran, from a line of this version of the format, as the caller has checked."""
    header = _attributes("header", fields)
    header["command"] = tuple(map(str, header["command"]))
    return Header(**header)


def optimizer_from(fields: Fields) -> OptimizerInfo:
    """An optimizer, with as many sizes and dtypes as names."""
    info = OptimizerInfo(**_attributes("optimizer", fields))
    names, sizes, dtypes = info.names, info.sizes, info.dtypes
    if not len(names) == len(sizes) == len(dtypes):
        raise Malformed(
            f"{len(names)} names, {len(sizes)} sizes and {len(dtypes)} dtypes: expected as many "
            "of each"
        )
    _check_all("an entry of 'names'", names, _STR)
    _check_all("an entry of 'sizes'", sizes, _INT)
    _check_all("an entry of 'dtypes'", dtypes, _STR)
    return info


def precision_from(fields: Fields) -> Precision:
    """In which formats the run computes."""
    precision = Precision(**_attributes("precision", fields))
    _check_all("an entry of 'dtypes'", precision.dtypes, _STR)
    return precision


def losses_from(fields: Fields) -> RankLosses:
    """What all ranks had as losses at some steps."""
    losses = RankLosses(**_attributes("losses", fields))
    _check_all("an entry of 'losses'", losses.losses, _NUMBER | _NULL)
    for step, ranks in losses.bad.items():
        _check_all(f"the ranks of step {step}", [ranks], _LIST)
        _check_all(f"a rank of step {step}", ranks, _INT)
    return losses


def resume_from(fields: Fields) -> Resume:
    """Where an optimizer goes on from an earlier step."""
    return Resume(**_attributes("resume", fields))


def logged_from(fields: Fields) -> Logged:
    """Numbers of the user's own."""
    logged = Logged(**_attributes("log", fields))
    _check_all("an entry of 'values'", list(logged.values.values()), _NUMBER | _NULL)
    values = _floats("values", list(logged.values.values()))
    return logged._replace(values=dict(zip(logged.values, values, strict=True)))


def trace_from(fields: Fields) -> Trace:
    """Where a value first turned non-finite."""
    trace = {"damaged": None, "where": None, **_attributes("trace", fields)}
    _check_all("an entry of 'inputs'", trace["inputs"], _OBJECT)
    _check_all("an entry of 'damaged'", trace["damaged"] or (), _STR)
    _check_all("an entry of 'ranks'", trace.get("ranks", ()), _INT)
    if trace["where"] is None:  # An older file, in which only the sentence says it.
        text = trace["text"]
        after = "after" if " in the loss" in text else "module"
        trace["where"] = "input" if " in the input data" in text else after
    return Trace(**trace)


def end_from(fields: Fields) -> End:
    """How the run ended."""
    return End(**_attributes("end", fields))


_STEP = tuple(FIELDS["step"].items())
_CULPRITS = list(FIELDS["step"]).index("culprits")
_step_columns = itemgetter(*FIELDS["step"])
_make_step = partial(tuple.__new__, Step)  # Step._make, less its check: zip made the columns


def steps_from(lines: Sequence[Fields]) -> list[Step]:
    """The steps of many lines, all of which are of kind "step".

    Raises:
        Malformed: one is not as a step must be; which, is found by asking for each alone.
    """
    try:
        columns: list[Sequence[Any]] = list(zip(*map(_step_columns, lines), strict=True))
    except KeyError as error:
        raise Malformed(f"without {error}") from error
    for at, (name, allowed) in enumerate(_STEP):
        types = _check_all(repr(name), columns[at], allowed)
        if float in allowed and int in types:
            columns[at] = _floats(name, columns[at])
    columns[_CULPRITS] = [_culprits(found) if found else () for found in columns[_CULPRITS]]
    columns.append([_detail(line["detail"]) if "detail" in line else None for line in lines])
    for name, allowed in OPTIONAL["step"].items():
        columns.append([line.get(name) for line in lines])
        _check_all(repr(name), columns[-1], allowed | _NULL)
        if list in allowed:
            columns[-1] = [tuple(value) if value else () for value in columns[-1]]
            for ranks in filter(None, columns[-1]):
                _check_all(f"an entry of {name!r}", ranks, _INT)
    return list(map(_make_step, zip(*columns, strict=True)))


def _culprits(found: list[Any]) -> tuple[Culprit, ...]:
    _check_all("an entry of 'culprits'", found, _OBJECT)
    made = tuple(Culprit(c.get("name"), c.get("nan"), c.get("inf")) for c in found)
    columns = zip(*made, strict=True)
    for name, allowed, values in zip(Culprit._fields, (_STR, _INT, _INT), columns, strict=True):
        _check_all(f"{name!r} of a culprit", values, allowed)
    return made


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
        types = _check_all(f"an entry of {name!r} of 'detail'", values, _NUMBER | _NULL)
        if int in types and name not in ("nan", "inf"):  # A whole number is written without a dot.
            lists[Detail._fields.index(name)] = _floats(name, values)
    return Detail(*lists)


def _attributes(kind: str, fields: Fields) -> dict[str, Any]:
    """The attributes of a record, by name, from the fields of its line."""
    attributes = {name: attribute for attribute, name in _NAMES.get(kind, {}).items()}
    found = {}
    for name, allowed in {**FIELDS[kind], **OPTIONAL[kind]}.items():
        if name in fields:
            value = fields[name]
            _check_all(repr(name), [value], allowed)
            if float in allowed:
                (value,) = _floats(name, [value])
            found[attributes.get(name, name)] = tuple(value) if list in allowed else value
        elif name in FIELDS[kind]:
            raise Malformed(f"without {name!r}")
    return found


def _check_all(name: str, values: Sequence[Any], allowed: _Types) -> set[type]:
    """The types of some values, all of which are allowed."""
    types = set(map(type, values))
    if not types <= allowed:
        wrong = next(value for value in values if type(value) not in allowed)
        kinds = {kind for kind in allowed if not (kind is int and float in allowed)}
        expected = " or ".join(sorted(_WORDS[kind] for kind in kinds))
        came = json.dumps(wrong)
        came = came if len(came) <= 40 else f"{came[:39]}…"
        raise Malformed(f"{name} must be {expected}, got {came}")
    return types


def _floats(name: str, column: Sequence[Any]) -> list[float | None]:
    try:
        return [None if value is None else float(value) for value in column]
    except OverflowError as error:
        raise Malformed(f"{name!r} must be a number that fits a float64") from error
