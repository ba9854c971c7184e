"""A run file that still grows → its new steps, each time somebody asks.

Half a line at the end is left until the rest of it is there. A file that was replaced, or cut and
begun again, is read again from its start; so is one whose run went on from before steps that were
handed out.
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
        restarts: how often the file was found to be another one, or steps that `poll` had handed
            out to be superseded. All that counts comes once more then.
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
        self._handed_out: dict[int, int] = {}  # By optimizer, the highest number of a step.

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
        for step in steps:
            self._handed_out[step.optimizer] = max(
                step.step, self._handed_out.get(step.optimizer, 0)
            )
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
            known = len(self.reader.resumes)
            self.reader.feed_many(lines)
            self._offset += sum(map(len, lines))
            if self._has_handed_out_superseded(known):
                self._begin_again()
                file.seek(0)
                self._read_on(file, None)  # Whole: further on it may be superseded once more.
                return
            if most is not None and self._offset - begun >= most:
                return

    def _has_handed_out_superseded(self, known: int) -> bool:
        """Whether one of the resumes that came after the first `known` is of before such steps."""
        return any(
            self._handed_out.get(index, 0) > resume.step
            for resume in self.reader.resumes[known:]
            for index in self.reader.concerned(resume)
        )

    def _begin_again(self) -> None:
        self.restarts += 1
        self.reader = Reader(self.path)
        self._offset, self._handed_out = 0, {}

    def _notice_another(self, file: BufferedReader) -> None:
        with os_errors(self.path):
            status = os.fstat(file.fileno())
            start = file.read(256)
        identity = (status.st_dev, status.st_ino)
        another = self._identity not in (None, identity) or status.st_size < self._offset
        # Overwritten in place: a header names its time, so two of them differ early.
        another = another or start[: len(self._start)] != self._start
        if another and self._offset:
            self._begin_again()
        self._identity, self._start, self.changed = identity, start, status.st_mtime
