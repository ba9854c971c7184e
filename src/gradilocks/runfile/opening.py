"""A path → a file open for reading that may be a run file; or one clear line on why it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from gradilocks.errors import BadRunFile

__all__ = ["LONGEST_HEADER", "opened", "readable", "refuse_start"]

LONGEST_HEADER = 1 << 24
"""Bytes. A file without a newline for so long is none of ours, and need not be read whole."""

_WRITTEN_BY = "Run files are written by `gradilocks run` or GradientControl(..., record=...)."

_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@contextmanager
def opened(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """Opens a run file, at its start, and says how many bytes it has; 0 for a pipe.

    Raises:
        BadRunFile: it cannot be opened or read, or begins as no run file does.
    """
    with _open(path) as file:
        with readable(path):
            _look_at_start(path, file.peek(64)[:64])
            if file.seekable():
                _find_first_newline(path, file)
            size = path.stat().st_size
        yield file, size


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What the system says about a file, as one of ours.

    Raises:
        BadRunFile: instead of an OSError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise BadRunFile(f"{path} does not exist. Run files are usually under runs/.") from error
    except OSError as error:
        raise BadRunFile(f"{path} cannot be read: {error.strerror or error}.") from error


def _open(path: Path) -> BufferedReader:
    with readable(path):
        try:
            if path.is_dir():
                raise BadRunFile(
                    f"{path} is a folder; expected a run file, as {path / 'run.jsonl'}."
                )
            return path.open("rb")
        except ValueError as error:
            if isinstance(error, BadRunFile):
                raise
            raise BadRunFile(f"{str(path)!r} is no path: {error}.") from error


def refuse_start(path: Path, raw: bytes) -> NoReturn:
    """Says that a file which begins so is no run file."""
    raise BadRunFile(
        f"{path} is no run file: its first line is {_excerpt(raw)}, not a header. {_WRITTEN_BY}"
    )


def _look_at_start(path: Path, start: bytes) -> None:
    # Before the lines are split: a binary file may have no newline for gigabytes.
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


def _find_first_newline(path: Path, file: BufferedReader) -> None:
    first = file.readline(LONGEST_HEADER)
    file.seek(0)
    if len(first) == LONGEST_HEADER and not first.endswith(b"\n"):
        raise BadRunFile(
            f"{path} is no run file: its first line is longer than {LONGEST_HEADER >> 20} MiB. "
            f"{_WRITTEN_BY}"
        )


def _excerpt(raw: bytes) -> str:
    text = raw[:40].decode("utf-8", "replace").strip()
    text = text.rstrip("\ufffd") if len(raw) > 40 else text  # a character cut in two
    if any(not c.isprintable() or c == "\ufffd" for c in text.replace("\n", "")):
        return f"binary data ({raw[:8].hex(' ')})"
    return repr(text + ("…" if len(raw) > 40 else ""))
