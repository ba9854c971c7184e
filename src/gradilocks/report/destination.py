"""A path that somebody gave → where a file may be written, so that nothing of value is lost.

A page about the same is replaced, another page of Gradilocks' if it is asked for, and nothing else.
A file is written beside its place and moved onto it, so that there is never half of one. That would
replace a symlink, a pipe or a device by a file: a link is followed first, and anything but a file
is refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gradilocks.errors import GradilocksError

GENERATOR = "gradilocks report"
"""What a page says it was made by, unless it is the demo's."""

# The marks of a page stand in its first lines.
HEAD_BYTES = 2048
_MARKS = tuple(f'<meta name="generator" content="{by}">' for by in (GENERATOR, "gradilocks demo"))
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def choose(runs: Sequence[Path], output: Path | None) -> Path:
    """Returns where the page goes, unless that is where one of the runs is.

    Raises:
        GradilocksError: a run file would be overwritten, or is named twice.
    """
    for nth, run in enumerate(runs):
        if any(_same(run, other) for other in runs[:nth]):
            raise GradilocksError(f"{run} is given twice; name each run file once.")
    if output is None:
        first = runs[0]
        output = first.with_name("report.html") if len(runs) > 1 else first.with_suffix(".html")
    settled(output)  # Says at once what is wrong with it: reading may take a while.
    if any(_same(output, run) for run in runs):
        raise GradilocksError(f"-o {output} is the run file itself; give the page another name.")
    return output


def labels(runs: Sequence[Path]) -> list[str]:
    """Returns what to call each run: its file's name, with as many folders as tell them apart."""
    for parts in range(1, max(len(run.parts) for run in runs) + 1):
        short = ["/".join(run.with_suffix("").parts[-parts:]) for run in runs]
        if len(set(short)) == len(runs):
            return short
    return [str(run) for run in runs]


def write(
    page: Path,
    render: Callable[[], str],
    *,
    identity: str,
    force: bool,
    what: str = "report on these runs",
    option: str = "-o",
    way_out: str = "choose another name with -o, or replace it with --force",
) -> None:
    """Writes a page beside its place and moves it there, so that there is never half of one.

    Args:
        page: where.
        render: makes the page; called once nothing stands in the way.
        identity: of what it is about, as in `gradilocks.report.report_page.identity`.
        force: whether to replace another page of Gradilocks' too.
        what: what the page is, in words.
        option: by which the place was given, for messages.
        way_out: what to do about a place that is taken.

    Raises:
        GradilocksError: something else is there, or the place cannot be written.
    """
    target = _free(page, identity, force, what=what, option=option, way_out=way_out)
    with written_whole(target, given=page) as unfinished:
        unfinished.write_text(render(), encoding="utf-8")


def check(page: Path, *, identity: str, what: str, option: str, way_out: str) -> None:
    """Tries a place before the page is there, as `write` will find it.

    Raises:
        GradilocksError: something else is there, or the place cannot be written.
    """
    target = _free(page, identity, False, what=what, option=option, way_out=way_out)
    with _beside(target, given=page):
        pass


def identity_of(about: str) -> str:
    """A short name for what a page is about, by which `write` knows one that it may replace."""
    return hashlib.sha256(about.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def is_page(path: Path) -> bool:
    """Whether a file is a page of Gradilocks'."""
    return any(mark in _head(path) for mark in _MARKS)


def is_page_about(path: Path, identity: str) -> bool:
    """Whether a file is there and is a page about what `identity` stands for."""
    return path.is_file() and _MARKS[0] in _head(path) and _own_mark(identity) in _head(path)


def _own_mark(identity: str) -> str:
    return f'<meta name="gradilocks-runs" content="{identity}">'


@contextmanager
def written_whole(target: Path, *, given: Path) -> Iterator[Path]:
    """Yields an empty file beside a place; it takes that place at the end, or goes if that fails.

    Raises:
        GradilocksError: the place, which messages call as it was given, cannot be written.
    """
    with _beside(target, given=given) as unfinished:
        yield unfinished
        unfinished.replace(target)


@contextmanager
def _beside(target: Path, *, given: Path) -> Iterator[Path]:
    """A new, empty file in the same folder, gone at the end unless it was moved."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        unfinished.open("x").close()
        yield unfinished
    except OSError as error:
        raise GradilocksError(f"{given} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # A file system that is read-only refuses that too.
            unfinished.unlink(missing_ok=True)


def _free(page: Path, identity: str, force: bool, *, what: str, option: str, way_out: str) -> Path:
    page = settled(page, option=option)
    if page.is_dir():
        raise GradilocksError(f"{page} is a folder; give the path of a page, as {page / 'a.html'}.")
    if not page.exists():
        return page
    head = _head(page)
    if head.strip() and not is_page(page):
        raise GradilocksError(
            f"{page} is already there and is no {what}, nor another page of gradilocks, so it is "
            f"never overwritten; give another path with {option}, or remove it first."
        )
    if not force and not (_MARKS[0] in head and _own_mark(identity) in head):
        raise GradilocksError(f"{page} is already there and is no {what}; {way_out}.")
    return page


def _head(page: Path) -> str:
    try:
        with page.open("rb") as file:
            return file.read(HEAD_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise GradilocksError(f"{page} cannot be read: {error.strerror or error}.") from error


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()


def settled(place: Path, *, option: str = "-o") -> Path:
    """Returns where a file goes: the place itself, or what it is a symlink to.

    Raises:
        GradilocksError: there is something else than a file or a folder, or the place is "-".
    """
    if str(place) == "-":
        raise GradilocksError(
            f"{option} - would be standard output; a file is written whole or not at all, so name "
            "one."
        )
    target = place
    try:
        target = place.resolve() if place.is_symlink() else place
        kind = stat.S_IFMT(target.stat().st_mode)
    except FileNotFoundError:
        return target
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a long name
        why = getattr(error, "strerror", None) or error
        raise GradilocksError(f"{place} cannot be written: {why}.") from error
    if kind in _KINDS:
        raise GradilocksError(
            f"{place} is {_KINDS[kind]}, not a file; give the path of a file with {option}."
        )
    return target
