"""Lines → a file that stays whole: made or refused at the start, never a reason to stop training.

What is there already is overwritten only if it is a run file: nobody's script or data are lost to a
name that was mistyped. A run that has ended before its first step keeps nobody from its name. Every
write is of whole lines, in one call, at a place that is known. One that fails is cut off again, so
that a full disk leaves no half line behind; a process that is killed can leave one, at the very
end, and whoever goes on in the file closes it with a newline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from gradilocks.errors import BadRunFile
from gradilocks.runfile import Reader, Resume, is_abandoned, line_batches, refuse_foreign

__all__ = ["EXISTS", "RunFileWriter", "Taken", "Unwritable"]

EXISTS = ("refuse", "append", "replace")


class Taken(BadRunFile):
    """There is a run file of that name, which is to be left alone."""


class Unwritable(BadRunFile):
    """There is no room, or no permission: nothing that is wrong with the name."""


class RunFileWriter:
    """An open run file, which begins with a header; its folder is made.

    Attributes:
        steps_before: of a file that it goes on with, by the index that its sessions had for an
            optimizer: the number of its last step.
        seconds_before: likewise the time of the last step.
        resumes: likewise where optimizers have gone on from an earlier step.

    Raises:
        BadRunFile: it cannot be written, or exists and is to be left alone, or is no run file. If
            it was not there before, nothing is left behind.
    """

    def __init__(self, path: Path, *, exists: str, header: str) -> None:
        self._path = path
        self.steps_before: dict[int, int] = {}
        self.seconds_before = 0.0
        self.resumes: list[Resume] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            replaces = exists == "refuse" and is_abandoned(path)
            if replaces:
                exists = "replace"
            flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if exists == "refuse" else 0)
            flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            self._fd = os.open(path, flags, 0o666)
        except FileExistsError as error:
            if not path.is_file():
                raise _unwritable(path, error) from error
            refuse_foreign(path)
            raise _taken(path) from error
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            self._begin(exists, header, replaces=replaces)
        except BaseException as error:
            self.close()
            if is_new:
                with contextlib.suppress(OSError):
                    path.unlink()
            if isinstance(error, OSError):
                raise _unwritable(path, error) from error
            raise

    def _is_still_abandoned(self) -> bool:
        """Looks once more, when no other process can find the same; the lock goes with the file."""
        try:
            import fcntl

            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # There are none of these locks on Windows.
            pass
        except OSError:
            return False
        return is_abandoned(self._path)

    def _begin(self, exists: str, header: str, *, replaces: bool) -> None:
        found = os.fstat(self._fd)
        self._identity = found.st_dev, found.st_ino
        if replaces and not self._is_still_abandoned():
            raise _taken(self._path)
        if stat.S_ISBLK(found.st_mode):
            raise BadRunFile(f"{self._path} is a device; give the path of a file.")
        if stat.S_ISREG(found.st_mode):
            refuse_foreign(self._path)
            if exists == "replace":
                os.ftruncate(self._fd, 0)
        self._size = found.st_size if exists == "append" else 0
        if self._size and not self._read_before():
            self.write(["\n"])
        self._header_at = self._size
        self.write([header])
        self._header = header

    def _read_before(self) -> bool:
        """Finds out what the file holds, and says whether its last line is whole."""
        reader = Reader(self._path)
        lines = [b""]
        with self._path.open("rb") as file:
            for lines in line_batches(self._path, file):
                known = len(reader.resumes)
                reader.feed_many(lines)
                # Steps and resumes that come together, in the order in which they were.
                told = [(each.time, each.optimizer, each.step) for each in reader.resumes[known:]]
                told += [(s.time, reader.told_as[s.optimizer], s.step) for s in reader.steps]
                if len(reader.resumes) > known:
                    told.sort()
                for time, optimizer, number in told:
                    self.steps_before[optimizer] = number
                    self.seconds_before = max(self.seconds_before, time)
                reader.steps.clear()
        self.resumes = reader.resumes
        return lines[-1].endswith(b"\n")

    def replace_header(self, header: str) -> None:
        """Writes another header in place of the first, unless something has followed it.

        Raises:
            OSError: not even the first could be written again.
        """
        if self._size != self._header_at + len(self._header.encode()):
            return
        self._size = self._header_at
        try:
            self.write([header])
            self._header = header
        except OSError:  # The first one did fit. Whoever writes next will hear of it.
            self.write([self._header])

    def write(self, lines: Sequence[str]) -> None:
        """Adds whole lines, or nothing.

        Raises:
            OSError: it could not; the file is as it was.
        """
        now = os.fstat(self._fd)
        if (now.st_dev, now.st_ino) != self._identity:  # It may be another file's by now.
            raise OSError(0, "its descriptor was closed by somebody else")
        if stat.S_ISREG(now.st_mode) and not now.st_nlink:
            raise OSError(0, "it was deleted")
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
            if self._fd >= 0:
                now = os.fstat(self._fd)
                if (now.st_dev, now.st_ino) == self._identity:
                    os.close(self._fd)
        self._fd = -1


_PASSING = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EFBIG, errno.EIO}


def _taken(path: Path) -> Taken:
    return Taken(
        f"{path} exists already and is not overwritten. Take another name, go on in it with "
        "Recorder(path, exists='append'), or overwrite it with Recorder(path, exists='replace')."
    )


def _unwritable(path: Path, error: OSError) -> BadRunFile:
    kind = Unwritable if error.errno in _PASSING else BadRunFile
    return kind(
        f"{path} cannot be written: {error.strerror or error}. Record to a folder that can be "
        "written and has room."
    )
