"""Lines of a run file → records; says clearly what is not a run file.

A run that was killed ends in half a line: that is left out and counted. Anything else that is not
as a run file must be is a `BadRunFile` with the line's number.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader, BytesIO
from itertools import groupby
from operator import attrgetter, methodcaller
from os import PathLike
from pathlib import Path
from typing import Any

from gradilocks.errors import BadRunFile
from gradilocks.runfile import parsing
from gradilocks.runfile.opening import opened, readable, refuse_start
from gradilocks.runfile.records import VERSION, End, Header, OptimizerInfo, Run, Step, Trace

__all__ = ["Reader", "batches", "read_run", "refuse_foreign"]

AT_ONCE = 1 << 16
"""Bytes of lines that are parsed together: more than twice as fast as each line alone (a million
steps on a busy core of a Xeon at 2.8 GHz: 21 s against 7 to 9 s); larger parts gain nothing."""


def read_run(
    path: str | PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Run:
    """Reads a run file.

    Args:
        path: the file.
        progress: called now and then with (bytes read, bytes in all).

    Returns:
        Everything in it, typed; `Run.steps` in the order of the file.

    Raises:
        BadRunFile: it is missing, unreadable, empty, of another version, or no run file.

    Example:
        >>> run = gradilocks.read_run("runs/a.jsonl")  # doctest: +SKIP
        >>> sum(step.skipped for step in run.steps)  # doctest: +SKIP
        3
    """
    path = Path(path)
    reader = Reader(path)
    with opened(path) as (file, size), _uncollected():
        done = 0
        for lines in batches(path, file):
            reader.feed_many(lines)
            done += sum(map(len, lines))
            if progress is not None:
                progress(done, max(size, done))  # a pipe has no size
    return reader.finish()


def refuse_foreign(path: Path) -> None:
    """Lets a run file pass, by its header, and a file in which nothing is.

    Raises:
        BadRunFile: it is something else, or cannot be read.
    """
    if not path.stat().st_size:
        return
    reader = Reader(path)
    try:
        with opened(path) as (file, _):
            for raw in file:  # A kill may have left half a header before a whole one.
                reader.feed(raw)
                if reader.header is not None:
                    return
    except BadRunFile as error:
        raise BadRunFile(
            f"{error} Only a run file is ever overwritten or gone on in: choose another name."
        ) from error


def batches(path: Path, file: BufferedReader) -> Iterator[list[bytes]]:
    """The lines from here to the end, some at a time; only the very last may lack its newline.

    Not `readlines`: where the file grows meanwhile, that gives half a line, and then its rest.
    """
    rest = bytearray()
    while True:
        with readable(path):
            data = file.read(AT_ONCE)
        if not data:
            break
        rest += data
        end = rest.rfind(b"\n", len(rest) - len(data)) + 1
        if end:
            yield BytesIO(rest[:end]).readlines()
            del rest[:end]
    if rest:
        yield [bytes(rest)]


class Reader:
    """Takes a run file line by line, so that a file which still grows can be followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self.resumed: list[Header] = []
        self.begins: list[int] = []
        self.optimizers: list[OptimizerInfo] = []
        self.steps: list[Step] = []
        self.traces: list[Trace] = []
        self.notes: list[dict[str, Any]] = []
        self.end: End | None = None
        self.audit: dict[str, Any] | None = None
        self.torn = 0
        self.lines = 0
        self._broken: int | None = None  # the line that made no sense, if it was the last so far
        self._index: dict[int, int] = {}  # optimizers as the session numbers them → as we do
        self._renumbered = False

    def feed(self, raw: bytes) -> None:
        """The next line; half a line counts as torn.

        Raises:
            BadRunFile: the first line is no header, or the line before this one was no JSON, or
                this one lacks what its kind must have.
        """
        self.lines += 1
        fields = _parsed(raw)
        if self.header is None:
            self._begin(fields, raw)
            return
        if fields is None:
            if raw.strip():
                self._ruled_out()
                self._broken = self.lines
            return
        self._accept(fields)

    def feed_many(self, lines: Sequence[bytes]) -> None:
        """The next lines: as `feed` for each of them, and faster.

        Raises:
            BadRunFile: as `feed` does.
        """
        many = None if self.header is None or self._broken is not None else _parsed_many(lines)
        if many is None:
            for raw in lines:
                self.feed(raw)
            return
        for kind, group in groupby(many, key=_kind_of):
            alike = list(group)
            if kind == "step" and self._take_steps(alike):
                continue
            for fields in alike:
                self.lines += 1
                self._accept(fields)

    def finish(self) -> Run:
        """Everything fed so far.

        Raises:
            BadRunFile: there was no header yet.
        """
        if self.header is None:
            half = "is empty" if self._broken is None else "holds only half a header line"
            raise BadRunFile(
                f"{self.path} {half}: the run that was to fill it got no further. "
                "Expected a run file, as `gradilocks run` writes it."
            )
        return Run(
            path=self.path,
            header=self.header,
            optimizers=tuple(self.optimizers),
            steps=self.steps,
            traces=tuple(self.traces),
            end=self.end,
            audit=self.audit,
            resumed=tuple(self.resumed),
            begins=tuple(self.begins),
            torn=self.torn + (self._broken is not None),
            notes=tuple(self.notes),
        )

    def _begin(self, fields: dict[str, Any] | None, raw: bytes) -> None:
        if not raw.strip():
            return
        if fields is None and _half_a_header(raw):  # killed at once; another session may follow
            self._broken = self.lines
            return
        if fields is None or fields.get("kind") != "header" or "gradilocks" not in fields:
            refuse_start(self.path, raw)
        self.header = self._headed(fields)
        self.torn += self._broken is not None
        self._broken = None

    def _headed(self, fields: dict[str, Any]) -> Header:
        version = fields.get("gradilocks")
        if version != VERSION:
            raise BadRunFile(
                f"{self.path} is a run file of version {version!r}; this gradilocks reads "
                f"{VERSION}. Install the gradilocks that wrote it, or a newer one."
            )
        try:
            return parsing.header(fields)
        except parsing.Malformed as error:
            raise BadRunFile(
                f"{self.path}, line {self.lines}: a header that is not as a run file has it: "
                f"{error}."
            ) from error

    def _ruled_out(self) -> None:
        if self._broken is not None:
            raise BadRunFile(
                f"{self.path}, line {self._broken}: not JSON, and not the last line of a run. "
                "The file was changed or damaged; the lines before it are whole."
            )

    def _accept(self, fields: dict[str, Any]) -> None:
        kind = fields.get("kind")
        if kind == "header":  # A session that went on after a kill: what it tore stays torn.
            self.torn += self._broken is not None
            self._broken = None
        self._ruled_out()
        try:
            self._take(kind, fields)
        except parsing.Malformed as error:
            raise BadRunFile(
                f"{self.path}, line {self.lines}: a line of kind {kind!r} that is not as a run "
                f"file has it: {error}. The file was changed, or written by another version of "
                "gradilocks."
            ) from error

    def _take_steps(self, lines: Sequence[dict[str, Any]]) -> bool:
        """Takes them all, or none if one is not as it must be; which, is for `_accept` to find."""
        try:
            made = parsing.steps(lines)
            if self._renumbered or not set(map(_optimizer_of, made)) <= self._index.keys():
                made = list(map(self._placed, made))
            elif any(map(_detail_of, made)):
                for step in made:
                    self._check_detail(step)
        except parsing.Malformed:
            return False
        self.lines += len(lines)
        self.steps += made
        return True

    def _take(self, kind: object, fields: dict[str, Any]) -> None:
        if kind == "step":
            self.steps.append(self._placed(*parsing.steps([fields])))
        elif kind == "optimizer":
            self._describe(parsing.optimizer(fields))
        elif kind == "header":
            self.resumed.append(self._headed(fields))
            self.begins.append(len(self.steps))
            self.end = None
        elif kind == "trace":
            self.traces.append(parsing.trace(fields))
        elif kind == "end":
            self.end = parsing.end(fields)
        elif kind == "audit":
            self.audit = fields
        else:
            self.notes.append(fields)

    def _describe(self, made: OptimizerInfo) -> None:
        """A session that goes on describes its optimizers again: the same one, or another."""
        before = self._index.get(made.index)
        if before is not None and replace(self.optimizers[before], index=made.index) == made:
            return
        here = len(self.optimizers)
        self._index[made.index] = here
        self._renumbered |= here != made.index
        self.optimizers.append(replace(made, index=here))

    def _placed(self, step: Step) -> Step:
        if step.optimizer not in self._index:
            raise parsing.Malformed(
                f"optimizer {step.optimizer}, which no line before it describes"
            )
        step = step._replace(optimizer=self._index[step.optimizer])
        self._check_detail(step)
        return step

    def _check_detail(self, step: Step) -> None:
        names = self.optimizers[step.optimizer].names
        if step.detail is not None and len(step.detail.norm) != len(names):
            raise parsing.Malformed(
                f"'detail' has {len(step.detail.norm)} entries, and its optimizer {len(names)} "
                "parameters"
            )


_kind_of = methodcaller("get", "kind")
_optimizer_of = attrgetter("optimizer")
_detail_of = attrgetter("detail")


def _parsed_many(lines: Sequence[bytes]) -> list[dict[str, Any]] | None:
    """The fields of every line; None if one of them is not whole."""
    if not lines or not lines[-1].endswith(b"\n"):
        return None
    joined = b",".join(lines)
    if b"\\ud" in joined:  # perhaps half a character, for `_parsed` to look after
        return None
    try:
        many = parsing.loads(f"[{joined.decode()}]")
    except (ValueError, RecursionError):
        return None
    # Two lines that are broken in matching ways could pass for one: count them.
    whole = len(many) == len(lines) and set(map(type, many)) == {dict}
    return many if whole else None


def _parsed(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        fields = parsing.loads(raw.decode())
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if b"\\ud" in raw:
        fields = _encodable(fields)
    return fields if isinstance(fields, dict) else None


def _encodable(value: Any) -> Any:
    """Half a character (a lone surrogate) in a name would fail wherever the name is written."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return value


def _half_a_header(raw: bytes) -> bool:
    start = b'{"kind":"header"'
    return raw.startswith(start) or start.startswith(raw.rstrip(b"\n"))


@contextmanager
def _uncollected() -> Iterator[None]:
    """A million small tuples make the cycle collector run in vain: twice the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
