"""A run file on disk → records; says clearly what is not a run file.

A path enters; a `Run` leaves, or a `BadRunFile` that says in one line what came, with the number of
the line that is wrong. A run that was killed ends in half a line: that is left out and counted. So
is a line that is damaged, with a warning: the others are as good as they were.
Nothing of a file is trusted before its first bytes were looked at: a binary file may have no
newline for gigabytes.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields as fields_of
from dataclasses import replace
from io import BufferedReader, BytesIO
from itertools import groupby
from operator import methodcaller
from os import PathLike
from pathlib import Path
from typing import Any

from gradilocks.errors import BadRunFile
from gradilocks.runfile.describe import describe_damage
from gradilocks.runfile.lines import (
    Malformed,
    end_from,
    header_from,
    loads,
    logged_from,
    losses_from,
    optimizer_from,
    precision_from,
    resume_from,
    steps_from,
    trace_from,
)
from gradilocks.runfile.records import (
    VERSION,
    End,
    Header,
    Logged,
    OptimizerInfo,
    RankLosses,
    Resume,
    Run,
    Step,
    Trace,
)
from gradilocks.runfile.writing_process import is_running

__all__ = [
    "Reader",
    "fresh_file",
    "is_abandoned",
    "line_batches",
    "open_run_file",
    "os_errors",
    "rank_file",
    "read_quietly",
    "read_run",
    "read_start",
    "refuse_foreign",
    "refuse_source_name",
]

BATCH_BYTES = 1 << 16
"""Bytes of lines that are parsed together: more than twice as fast as each line alone (a million
steps on a busy core of a Xeon at 2.8 GHz: 21 s against 7 to 9 s); larger parts gain nothing."""

LONGEST_HEADER = 1 << 24
"""Bytes. A file without a newline for so long is none of ours, and need not be read whole."""

_WRITTEN_BY = "Run files are written by `gradilocks run` or GradientControl(..., record=...)."
_SOURCES = {".py", ".pyi", ".pyw", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".h", ".sh"}
_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def read_run(
    path: str | PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Run:
    """Reads a run file.

    Args:
        path: the file.
        progress: called now and then with (bytes read, bytes in all).

    Returns:
        Everything in it, typed; `Run.steps` in the order of the file. Lines that are damaged are
        left out, with a RuntimeWarning: `Run.damaged` says which.

    Raises:
        BadRunFile: it is missing, unreadable, empty, of another version, or no run file.

    Example:
        >>> run = gradilocks.read_run("runs/a.jsonl")  # doctest: +SKIP
        >>> sum(step.skipped for step in run.steps)  # doctest: +SKIP
        3
    """
    run = read_quietly(Path(path), progress=progress)
    if run.damaged:
        warnings.warn(f"{path}: {describe_damage(run.damaged)}", RuntimeWarning, stacklevel=2)
    return run


def read_quietly(path: Path, *, progress: Callable[[int, int], None] | None = None) -> Run:
    """As `read_run`, for those who tell of damaged lines themselves."""
    reader = Reader(path)
    with open_run_file(path) as (file, size), _without_cycle_collector():
        done = 0
        for lines in line_batches(path, file):
            reader.feed_many(lines)
            done += sum(map(len, lines))
            if progress is not None:
                progress(done, max(size, done))  # a pipe has no size
    return reader.finish()


def read_start(path: Path) -> Header:
    """Reads no more of a run file than its header.

    Raises:
        BadRunFile: as `read_run` has it.
    """
    reader = Reader(path)
    with open_run_file(path) as (file, _), os_errors(path):
        for raw in file:
            reader.feed(raw)
            if reader.header is not None:
                return reader.header
    return reader.finish().header


def rank_file(path: Path, rank: int) -> Path:
    """The run file of one rank, where every rank writes one: 'a.rank1.jsonl'; rank 0's is as given.

    Example:
        >>> rank_file(Path("runs/a.jsonl"), 3).as_posix()
        'runs/a.rank3.jsonl'
    """
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def fresh_file(folder: Path, stem: str) -> Path:
    """A run file in that folder whose name nobody has taken: 'train-20261116-124023.jsonl'."""
    base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 1
    while _is_given(path := folder / f"{name}.jsonl"):
        number += 1
        name = f"{base}-{number}"
    return path


_given: set[str] = set()
"""Names that this process has found, of files that may be made later: `gradilocks run` makes its
own at the first step, and the script that it runs may ask for one before."""


def _is_given(path: Path) -> bool:
    """Whether a name is taken; it is from here on."""
    name = os.path.abspath(path)
    taken = name in _given or os.path.lexists(name)
    _given.add(name)
    return taken


def is_abandoned(path: Path) -> bool:
    """Whether it is surely a run file of a run that has ended before anything came of it.

    It tells of no step, and of nothing else that happened in the run; and nobody will add to it:
    it has an end, or the process that was to write it is gone. Where that is not known, False.
    """
    reader = Reader(path)
    try:
        if not path.is_file():  # To open a pipe is to wait for whoever writes to it.
            return False
        with open_run_file(path) as (file, _):
            for raw in file:
                reader.feed(raw)
                if reader.tells_of_more_than_its_start:
                    return False
        run = reader.finish()
    except (BadRunFile, OSError):
        return False
    latest = (run.header, *run.resumed)[-1]
    return not run.torn and (run.end is not None or is_running(latest.process) is False)


def refuse_source_name(path: Path) -> None:
    """Keeps run files out of the places of source files, even of those in which nothing is.

    Raises:
        BadRunFile: it is named as a source file.
    """
    if path.suffix.lower() in _SOURCES:
        raise BadRunFile(
            f"{path} has the name of a source file, to which no run file is written. Choose "
            "another name, as runs/a.jsonl."
        )


def refuse_foreign(path: Path) -> None:
    """Lets a run file pass, by its header, and a file in which nothing is.

    Raises:
        BadRunFile: it is something else by what it holds or by its name, or cannot be read.
    """
    reader = Reader(path)
    try:
        with open_run_file(path) as (file, _):
            for raw in file:  # A kill may have left half a header before a whole one.
                reader.feed(raw)
                if reader.header is not None:
                    return
        refuse_source_name(path)  # Nothing is in it, but its name says what it is for.
    except BadRunFile as error:
        raise BadRunFile(
            f"{error} Only a run file is ever overwritten or gone on in: choose another name."
        ) from error


@contextmanager
def open_run_file(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """Opens a run file, at its start, and says how many bytes it has; 0 for a pipe.

    Raises:
        BadRunFile: it cannot be opened or read, or begins as no run file does.
    """
    with os_errors(path):
        if path.is_dir():
            raise BadRunFile(f"{path} is a folder; expected a run file, as {path / 'run.jsonl'}.")
        opened = path.open("rb")
    with opened as file:
        with os_errors(path):
            _refuse_start(path, file.peek(64)[:64])
            if file.seekable():
                first = file.readline(LONGEST_HEADER)
                file.seek(0)
                if len(first) == LONGEST_HEADER and not first.endswith(b"\n"):
                    raise BadRunFile(
                        f"{path} is no run file: its first line is longer than "
                        f"{LONGEST_HEADER >> 20} MiB. {_WRITTEN_BY}"
                    )
            size = path.stat().st_size
        yield file, size


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Turns an OSError, or a ValueError about the path, into a BadRunFile."""
    try:
        yield
    except BadRunFile:
        raise
    except FileNotFoundError as error:
        raise BadRunFile(f"{path} does not exist. Run files are usually under runs/.") from error
    except OSError as error:
        raise BadRunFile(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise BadRunFile(f"{str(path)!r} is no path: {error}.") from error


def line_batches(path: Path, file: BufferedReader) -> Iterator[list[bytes]]:
    """The lines from here to the end, some at a time; only the very last may lack its newline.

    Not `readlines`: where the file grows meanwhile, that gives half a line, and then its rest.
    """
    rest = bytearray()
    while True:
        with os_errors(path):
            data = file.read(BATCH_BYTES)
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
        self.resumes: list[Resume] = []
        self.superseded: list[Step] = []
        self.superseded_logs: list[Logged] = []
        self.optimizers: list[OptimizerInfo] = []
        self.steps: list[Step] = []
        self.traces: list[Trace] = []
        self.logs: list[Logged] = []
        self.notes: list[dict[str, Any]] = []
        self.end: End | None = None
        self.audit: dict[str, Any] | None = None
        self.computed_in: tuple[str, ...] | None = None
        self.torn = 0
        self.damaged: dict[int, str] = {}
        self.lines = 0
        self._broken: int | None = None  # The line that was no JSON, if it was the last so far.
        self._index: dict[int, int] = {}  # Optimizers as the session numbers them → as we do.
        self.told_as: list[int] = []
        """For each of `optimizers`, the number by which the session that described it knew it."""
        self._renumbered = False
        self._may_lack_optimizer = False  # A line that is damaged may have described it.

    def feed(self, raw: bytes) -> None:
        """The next line; half a line counts as torn at the end of a session, else as damaged.

        Raises:
            BadRunFile: the first line is no header, or a header is of another version.
        """
        self.lines += 1
        (fields,) = _parsed([raw]) or (None,)
        if fields is not None and self.header is not None:
            self._accept(fields)
        elif raw.strip():
            if self.header is None:
                self._begin(fields, raw)
            else:
                self._note_broken_before()
                self._broken = self.lines

    @property
    def tells_of_more_than_its_start(self) -> bool:
        """Whether anything came but headers, optimizers, formats and ends."""
        come = (self.steps, self.superseded, self.resumes, self.logs, self.traces, self.notes)
        return any(come) or bool(self.damaged) or self.audit is not None

    def feed_many(self, lines: Sequence[bytes]) -> None:
        """The next lines: as `feed` for each of them, and faster."""
        many = None if self.header is None or self._broken is not None else _parsed(lines)
        if many is None:
            for raw in lines:
                self.feed(raw)
            return
        for kind, group in groupby(many, key=methodcaller("get", "kind")):
            alike = list(group)
            if kind == "step":
                with suppress(Malformed):  # Which of them is wrong, is for `_accept` to find.
                    self.steps += self._placed(steps_from(alike))
                    self.lines += len(alike)
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
        held = {each.name: getattr(self, each.name) for each in fields_of(Run)}
        lists = {name: tuple(held[name]) for name in held if isinstance(held[name], list)}
        torn = self.torn + (self._broken is not None)
        return Run(**{**held, **lists, "steps": self.steps, "torn": torn})

    def _begin(self, fields: dict[str, Any] | None, raw: bytes) -> None:
        if fields is None and _is_half_a_header(raw):  # Killed at once; another session may follow.
            self._broken = self.lines
            return
        if fields is None or fields.get("kind") != "header" or "gradilocks" not in fields:
            raise BadRunFile(
                f"{self.path} is no run file: its first line is {_excerpt(raw)}, not a header. "
                f"{_WRITTEN_BY}"
            )
        try:
            self.header = self._checked_header(fields)
        except Malformed as error:
            raise BadRunFile(
                f"{self.path}, line {self.lines}: a header that is not as a run file has it: "
                f"{error}."
            ) from error
        self._count_torn()

    def _checked_header(self, fields: dict[str, Any]) -> Header:
        version = fields.get("gradilocks")
        if version != VERSION:
            raise BadRunFile(
                f"{self.path} is a run file of version {version!r}; this gradilocks reads "
                f"{VERSION}. Install the gradilocks that wrote it, or a newer one."
            )
        return header_from(fields)

    def _count_torn(self) -> None:
        """Another session has begun: the line before its header was torn by a kill."""
        self.torn += self._broken is not None
        self._broken = None

    def _note_broken_before(self) -> None:
        """A line that is no JSON and not the last of a session was not torn by a kill."""
        if self._broken is not None:
            self.damaged[self._broken] = "not JSON"
            self._broken, self._may_lack_optimizer = None, True

    def _accept(self, fields: dict[str, Any]) -> None:
        kind = fields.get("kind")
        if kind == "header":
            self._count_torn()
        self._note_broken_before()
        try:
            self._take(kind, fields)
        except Malformed as error:
            self.damaged[self.lines] = f"of kind {kind!r}: {error}"
            self._may_lack_optimizer |= kind == "optimizer"

    def _take(self, kind: object, fields: dict[str, Any]) -> None:
        if kind == "step":
            self.steps += self._placed(steps_from([fields]))
        elif kind == "optimizer":
            self._take_optimizer(optimizer_from(fields))
        elif kind == "header":
            self.resumed.append(self._checked_header(fields))
            self.begins.append(len(self.steps))
            self.end = None
        elif kind == "precision":
            self.computed_in = precision_from(fields).dtypes
        elif kind == "losses":
            self._take_losses(losses_from(fields))
        elif kind == "resume":
            self._take_resume(resume_from(fields))
        elif kind == "log":
            self.logs.append(logged_from(fields))
        elif kind == "trace":
            self.traces.append(trace_from(fields))
        elif kind == "end":
            self.end = end_from(fields)
        elif kind == "audit":
            self.audit = fields
        else:
            self.notes.append(fields)

    def _take_losses(self, told: RankLosses) -> None:
        """Steps that were read before get the losses of all ranks; those handed out stay."""
        index = self._index.get(told.optimizer)
        for at in range(len(self.steps) - 1, -1, -1):
            step = self.steps[at]
            place = step.step - told.first
            if step.optimizer != index or place >= len(told.losses):
                continue
            if place < 0:
                break
            bad = tuple(told.bad.get(str(step.step), ()))
            loss = told.losses[place]
            if loss is None and not bad:  # No rank knew a loss.
                continue
            self.steps[at] = step._replace(
                loss=loss, loss_nonfinite=bool(bad), loss_ranks=told.ranks, bad_loss_ranks=bad
            )

    def concerned(self, resume: Resume) -> set[int]:
        """The optimizers whose steps before a resume it is about, as `Step.optimizer` has them."""
        return {at for at, told in enumerate(self.told_as) if told == resume.optimizer}

    def _take_resume(self, resume: Resume) -> None:
        """Puts away the steps that it supersedes, and what was logged and traced since them."""
        mine = self.concerned(resume)
        gone = [
            at
            for at, step in enumerate(self.steps)
            if step.optimizer in mine and step.step > resume.step
        ]
        if gone:
            put_away = set(gone)
            since = min(self.steps[at].time for at in gone)
            self.superseded += [self.steps[at] for at in gone]
            self.steps[:] = [s for at, s in enumerate(self.steps) if at not in put_away]
            self.begins = [begin - bisect_left(gone, begin) for begin in self.begins]
            self.superseded_logs += [each for each in self.logs if each.time >= since]
            self.logs = [each for each in self.logs if each.time < since]
            self.traces = [each for each in self.traces if each.step <= resume.step]
        self.resumes.append(resume)
        self.begins.append(len(self.steps))

    def _take_optimizer(self, info: OptimizerInfo) -> None:
        """A session that goes on describes its optimizers again: the same one, or another."""
        before = self._index.get(info.index)
        if before is not None and replace(self.optimizers[before], index=info.index) == info:
            return
        here = len(self.optimizers)
        self._index[info.index] = here
        self.told_as.append(info.index)
        self._renumbered |= here != info.index
        self.optimizers.append(replace(info, index=here))

    def _placed(self, steps: list[Step]) -> list[Step]:
        """Steps with their optimizers as this reader numbers them; details as long as those."""
        for unknown in {step.optimizer for step in steps} - self._index.keys():
            if not self._may_lack_optimizer:
                raise Malformed(f"optimizer {unknown}, which no line before it describes")
            self._take_optimizer(OptimizerInfo(unknown, "unknown", (), (), ()))
        if self._renumbered:
            steps = [step._replace(optimizer=self._index[step.optimizer]) for step in steps]
        for at, step in enumerate(steps):
            if step.detail is None:
                continue
            entries, names = len(step.detail.norm), len(self.optimizers[step.optimizer].names)
            if not names and self._may_lack_optimizer:
                steps[at] = step._replace(detail=None)  # Nobody knows what it is of.
            elif entries != names:
                raise Malformed(
                    f"'detail' has {entries} entries, and its optimizer {names} parameters"
                )
        return steps


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any]] | None:
    """The fields of every line; None if one of them is not whole."""
    if not lines or not lines[-1].endswith(b"\n"):
        return None
    joined = b",".join(lines)
    try:
        many = loads(f"[{joined.decode()}]")
        if b"\\ud" in joined:  # Perhaps half a character.
            many = _encodable(many)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError.
        return None
    # Two lines that are broken in matching ways could pass for one: count them.
    whole = len(many) == len(lines) and set(map(type, many)) == {dict}
    return many if whole else None


def _encodable(value: Any) -> Any:
    """Half a character (a lone surrogate) in a name would fail wherever the name is written."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return value


def _refuse_start(path: Path, start: bytes) -> None:
    if start.startswith(b"\x1f\x8b"):
        raise BadRunFile(f"{path} is compressed with gzip. Unpack it first: gunzip -k {path}")
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            raise BadRunFile(
                f"{path} begins with a byte order mark ({name}), which some editors put there; run "
                "files are UTF-8 without one. Save it so, or take the original."
            )
    if start and not start.startswith((b"{", b"\n", b"\r\n")):
        raise BadRunFile(f"{path} is no run file: it begins with {_excerpt(start)}. {_WRITTEN_BY}")


def _is_half_a_header(raw: bytes) -> bool:
    start = b'{"kind":"header"'
    return raw.startswith(start) or start.startswith(raw.rstrip(b"\n"))


def _excerpt(raw: bytes) -> str:
    text = raw[:40].decode("utf-8", "replace").strip()
    text = text.rstrip("\ufffd") if len(raw) > 40 else text  # a character cut in two
    if any(not c.isprintable() or c == "\ufffd" for c in text.replace("\n", "")):
        return f"binary data ({raw[:8].hex(' ')})"
    return repr(text + ("…" if len(raw) > 40 else ""))


@contextmanager
def _without_cycle_collector() -> Iterator[None]:
    """A million small tuples make the cycle collector run in vain: twice the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
