"""Lines → a file that stays whole: made or refused at the start, never a reason to stop training.

What is there already is overwritten only if it is a run file: nobody's script or data are lost to a
name that was mistyped. Every write is of whole lines, in one call, at a place that is known. One
that fails is cut off again, so that a full disk leaves no half line behind; a process that is
killed can leave one, at the very end, and whoever goes on in the file closes it with a newline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradilocks.errors import BadRunFile
from gradilocks.runfile import Reader, refuse_foreign

__all__ = ["EXISTS", "Before", "RunFile", "Unwritable"]

EXISTS = ("refuse", "append", "replace")


@dataclass
class Before:
    """What is in a file that a recorder goes on with."""

    time: float = 0.0
    """Of the last step."""
    steps: dict[int, int] = field(default_factory=dict)
    """By optimizer: the number of its last step."""


class RunFile:
    """An open run file.

    Args:
        path: where; its folder is made if it is not there.
        exists: what to do if there is a run file already: "refuse", "append" or "replace".

    Raises:
        BadRunFile: it cannot be written, or exists and is to be left alone, or is no run file.
    """

    def __init__(self, path: Path, *, exists: str) -> None:
        self.path = path
        self.before: Before | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise BadRunFile(
                    f"{path} is a folder; give the file a name, as in {path / 'run.jsonl'}."
                )
            self._new = not path.exists()
            self._fd = os.open(path, _flags(exists), 0o666)
        except FileExistsError as error:
            if not path.is_file():
                raise _unwritable(path, error) from error
            refuse_foreign(path)
            raise BadRunFile(
                f"{path} exists already and is not overwritten. Take another name, go on in it "
                "with Recorder(path, exists='append'), or overwrite it with "
                "Recorder(path, exists='replace')."
            ) from error
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            self._same = _identity(os.fstat(self._fd))
            self._refuse_foreign()
            if exists == "replace" and stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, 0)
            self._size = os.fstat(self._fd).st_size if exists == "append" else 0
            if self._size:
                self.before, whole = _what_is_there(path)
                if not whole:
                    self.write(["\n"])
        except BaseException as error:
            self.close()
            self._take_back()
            if isinstance(error, OSError):
                raise _unwritable(path, error) from error
            raise
        self._header = self._size, ""

    def begin(self, header: str) -> None:
        """Writes the header.

        Raises:
            BadRunFile: it cannot be written.
        """
        begin = self._size
        try:
            self.write([header])
        except OSError as error:
            self.close()
            self._take_back()
            raise _unwritable(self.path, error) from error
        self._header = begin, header

    def begin_again(self, header: str) -> None:
        """Writes another header in place of the first, unless something has followed it."""
        begin, first = self._header
        if self._size != begin + len(first.encode()):
            return
        self._size = begin
        try:
            self.write([header])
            self._header = begin, header
        except OSError:  # The first one did fit. Whoever writes next will hear of it.
            self.write([first])

    def write(self, lines: Sequence[str]) -> None:
        """Adds whole lines, or nothing.

        Raises:
            OSError: it could not; the file is as it was.
        """
        self._check()
        rest = memoryview("".join(lines).encode())
        size = self._size + len(rest)
        try:
            os.lseek(self._fd, self._size, os.SEEK_SET)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size = size

    def close(self) -> None:
        """Lets go of the file."""
        with contextlib.suppress(OSError):
            if self._fd >= 0 and _identity(os.fstat(self._fd)) == self._same:
                os.close(self._fd)
        self._fd = -1

    def _refuse_foreign(self) -> None:
        kind = os.fstat(self._fd).st_mode
        if stat.S_ISBLK(kind):
            raise BadRunFile(f"{self.path} is a device; give the path of a file.")
        if stat.S_ISREG(kind):
            refuse_foreign(self.path)

    def _take_back(self) -> None:
        """A file that could not be begun is not left behind, if it was not there before."""
        if self._new:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _check(self) -> None:
        # A descriptor that somebody has closed may be another file's by now.
        now = os.fstat(self._fd)
        if _identity(now) != self._same:
            raise OSError(0, "its descriptor was closed by somebody else")
        if stat.S_ISREG(now.st_mode) and not now.st_nlink:
            raise OSError(0, "it was deleted")


def _flags(exists: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return flags | os.O_EXCL if exists == "refuse" else flags


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _what_is_there(path: Path) -> tuple[Before, bool]:
    """What a file holds, and whether its last line is whole; one line at a time in memory."""
    reader = Reader(path)
    before = Before()
    raw = b""
    with path.open("rb") as file:
        for raw in file:
            reader.feed(raw)
            if reader.steps:
                step = reader.steps.pop()
                before.steps[step.optimizer] = step.step
                before.time = max(before.time, step.time)
    return before, raw.endswith(b"\n")


class Unwritable(BadRunFile):
    """There is no room, or no permission: nothing that is wrong with the name."""


_PASSING = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EFBIG, errno.EIO}


def _unwritable(path: Path, error: OSError) -> BadRunFile:
    kind = Unwritable if error.errno in _PASSING else BadRunFile
    return kind(
        f"{path} cannot be written: {error.strerror or error}. Record to a folder that can be "
        "written and has room."
    )
