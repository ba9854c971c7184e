"""A run file that still grows → its new steps, each time somebody asks.

Half a line at the end is left until the rest of it is there. A file that was replaced, or cut and
begun again, is read again from its start.
"""

from __future__ import annotations

import os
from io import BufferedReader
from os import PathLike
from pathlib import Path

from gradilocks.errors import BadRunFile
from gradilocks.runfile.reader import Reader, line_batches, open_run_file, os_errors
from gradilocks.runfile.records import Step

__all__ = ["Follower"]


class Follower:
    """Reads on where it stopped.

    Attributes:
        reader: everything read so far but the steps, which `poll` hands out: header, optimizers,
            traces, end.
        restarts: how often the file was found to be another one.
        changed: when the file last changed, in seconds since 1970; None before it was seen.

    Example:
        >>> follower = Follower("runs/a.jsonl")  # doctest: +SKIP
        >>> while follower.reader.end is None:  # doctest: +SKIP
        ...     for step in follower.poll():
        ...         print(step.step, step.loss)
        ...     time.sleep(1)
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.reader = Reader(self.path)
        self.restarts = 0
        self.changed: float | None = None
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._start = b""

    def poll(self, *, most: int | None = None) -> list[Step]:
        """The steps that were added since the last call; none if the file does not exist yet.

        Args:
            most: about how many bytes to read at most, so that a long file can be shown on the
                way; `behind` says how many are left.

        Raises:
            BadRunFile: it cannot be read, or is no run file.
        """
        try:
            with open_run_file(self.path) as (file, _):
                self._read_on(file, most)
        except BadRunFile as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        steps, self.reader.steps = self.reader.steps, []
        return steps

    @property
    def size(self) -> int:
        """How many bytes the file has now; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def behind(self) -> int:
        """How many bytes of the file have not been read; half a line may be among them."""
        return max(0, self.size - self._offset)

    def _read_on(self, file: BufferedReader, most: int | None) -> None:
        self._notice_another(file)
        file.seek(self._offset)
        begun = self._offset
        for lines in line_batches(self.path, file):
            if not lines[-1].endswith(b"\n"):
                return
            self.reader.feed_many(lines)
            self._offset += sum(map(len, lines))
            if most is not None and self._offset - begun >= most:
                return

    def _notice_another(self, file: BufferedReader) -> None:
        with os_errors(self.path):
            status = os.fstat(file.fileno())
            start = file.read(256)
        identity = (status.st_dev, status.st_ino)
        another = self._identity not in (None, identity) or status.st_size < self._offset
        # Overwritten in place: a header names its time, so two of them differ early.
        another = another or start[: len(self._start)] != self._start
        if another and self._offset:
            self.restarts += 1
            self.reader = Reader(self.path)
            self._offset = 0
        self._identity, self._start, self.changed = identity, start, status.st_mtime
