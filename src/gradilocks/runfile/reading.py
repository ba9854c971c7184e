"""Lines of a run file → records; says clearly what is not a run file.

A run that was killed ends in half a line: that is left out and counted. Anything else that is not
as a run file must be is a `BadRunFile` with the line's number.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from gradilocks.errors import BadRunFile
from gradilocks.runfile.records import (
    VERSION,
    Culprit,
    Detail,
    End,
    Header,
    OptimizerInfo,
    Run,
    Step,
    Trace,
)

__all__ = ["Reader", "read_run"]


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
    with _opened(path) as (file, size), _uncollected():
        for at, raw in enumerate(file, start=1):
            reader.feed(raw, at)
            if progress is not None and at % 4096 == 0:
                progress(file.tell(), size)
        if progress is not None:
            progress(size, size)
    return reader.finish()


class Reader:
    """Takes a run file line by line, so that a file which still grows can be followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self.resumed: list[Header] = []
        self.optimizers: dict[int, OptimizerInfo] = {}
        self.steps: list[Step] = []
        self.traces: list[Trace] = []
        self.notes: list[dict[str, Any]] = []
        self.end: End | None = None
        self.audit: dict[str, Any] | None = None
        self.torn = 0
        self._broken: int | None = None  # the line that made no sense, if it was the last so far

    def feed(self, raw: bytes, at: int) -> None:
        """One line, with its number; half a line counts as torn.

        Raises:
            BadRunFile: the first line is no header, or the line before this one was no JSON.
        """
        fields = _parsed(raw)
        if self.header is None:
            self._begin(fields, raw)
            return
        if fields is None:
            if raw.strip():
                self._ruled_out()
                self._broken = at
            return
        kind = fields.get("kind")
        if kind == "header":  # A session that went on after a kill: what it tore stays torn.
            self.torn += self._broken is not None
            self._broken = None
        self._ruled_out()
        try:
            self._take(kind, fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRunFile(
                f"{self.path}, line {at}: a {kind!r} line that is not as a run file has it "
                f"({type(error).__name__}: {error}). The file was changed, or written by another "
                "version of gradilocks."
            ) from error

    def finish(self) -> Run:
        """Everything fed so far.

        Raises:
            BadRunFile: nothing was fed.
        """
        if self.header is None:
            raise BadRunFile(
                f"{self.path} is empty: the run that was to fill it wrote nothing. "
                "Expected a run file, as `gradilocks run` writes it."
            )
        return Run(
            path=self.path,
            header=self.header,
            optimizers=tuple(self.optimizers[key] for key in sorted(self.optimizers)),
            steps=self.steps,
            traces=tuple(self.traces),
            end=self.end,
            audit=self.audit,
            resumed=tuple(self.resumed),
            torn=self.torn + (self._broken is not None),
            notes=tuple(self.notes),
        )

    def _begin(self, fields: dict[str, Any] | None, raw: bytes) -> None:
        if not raw.strip():
            raise BadRunFile(f"{self.path} begins with an empty line: it is no run file.")
        if fields is None or fields.get("kind") != "header" or "gradilocks" not in fields:
            raise BadRunFile(
                f"{self.path} is no run file: its first line is {_excerpt(raw)}, not a header. "
                "Run files are written by `gradilocks run` or GradientControl(..., record=...)."
            )
        self.header = _header(self.path, fields)

    def _ruled_out(self) -> None:
        if self._broken is not None:
            raise BadRunFile(
                f"{self.path}, line {self._broken}: not JSON, and not the last line of a run. "
                "The file was changed or damaged; the lines before it are whole."
            )

    def _take(self, kind: object, fields: dict[str, Any]) -> None:
        if kind == "step":
            self.steps.append(_step(fields))
        elif kind == "optimizer":
            made = _optimizer(fields)
            self.optimizers[made.index] = made
        elif kind == "header":
            self.resumed.append(_header(self.path, fields))
            self.end = None
        elif kind == "trace":
            self.traces.append(_trace(fields))
        elif kind == "end":
            self.end = End(fields["time"], fields["status"], fields["exit"], fields["error"])
        elif kind == "audit":
            self.audit = fields
        else:
            self.notes.append(fields)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return fields if isinstance(fields, dict) else None


def _header(path: Path, fields: dict[str, Any]) -> Header:
    version = fields["gradilocks"]
    if version != VERSION:
        raise BadRunFile(
            f"{path} is a run file of version {version!r}; this gradilocks reads {VERSION}. "
            "Install the gradilocks that wrote it, or a newer one."
        )
    try:
        return Header(
            version=version,
            started=float(fields["started"]),
            command=tuple(fields["command"]),
            versions=dict(fields["versions"]),
            hardware=dict(fields["hardware"]),
            settings=dict(fields["settings"]),
            rank=int(fields["rank"]),
            ranks=int(fields["ranks"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRunFile(
            f"{path}: the header is not as a run file has it ({type(error).__name__}: {error})."
        ) from error


def _optimizer(fields: dict[str, Any]) -> OptimizerInfo:
    return OptimizerInfo(
        index=fields["optimizer"],
        kind=fields["class"],
        names=tuple(fields["names"]),
        sizes=tuple(fields["sizes"]),
        dtypes=tuple(fields["dtypes"]),
    )


def _step(fields: dict[str, Any]) -> Step:
    culprits, detail = fields["culprits"], fields.get("detail")
    return Step(
        fields["step"],
        fields["time"],
        fields["optimizer"],
        fields["loss"],
        fields["scale"],
        fields["norm"],
        fields["limit"],
        fields["clipped"],
        fields["skipped"],
        fields["reason"],
        tuple(Culprit(c["name"], c["nan"], c["inf"]) for c in culprits) if culprits else (),
        fields["lr"],
        fields["nan"],
        fields["inf"],
        None if detail is None else Detail(**detail),
    )


def _trace(fields: dict[str, Any]) -> Trace:
    return Trace(
        step=fields["step"],
        time=fields["time"],
        phase=fields["phase"],
        module=fields["module"],
        kind=fields["class"],
        what=fields["what"],
        inputs=tuple(fields["inputs"]),
        text=fields["text"],
    )


def _excerpt(raw: bytes) -> str:
    text = raw[:40].decode("utf-8", "replace").strip()
    return repr(text + ("…" if len(raw) > 40 else ""))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, int]]:
    try:
        if path.is_dir():
            raise BadRunFile(f"{path} is a folder; expected a run file, as {path / 'run.jsonl'}.")
        file = path.open("rb")
    except FileNotFoundError as error:
        raise BadRunFile(f"{path} does not exist. Run files are usually under runs/.") from error
    except OSError as error:
        raise BadRunFile(f"{path} cannot be read: {error.strerror or error}.") from error
    with file:
        # Checked before the lines are split: a binary file may have no newline for gigabytes.
        start = file.peek(64)[:64]
        if start and not start.lstrip().startswith(b"{"):
            raise BadRunFile(
                f"{path} is no run file: it begins with {_excerpt(start)}. "
                "Run files are written by `gradilocks run` or GradientControl(..., record=...)."
            )
        yield file, path.stat().st_size


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
