"""A path that somebody gave → where a file may be written, or one clear line on why not there.

A file is written beside its place and moved onto it. That would replace a symlink, a pipe or a
device by a file: a link is followed first, and anything but a file is refused.
"""

from __future__ import annotations

import stat
from pathlib import Path

from gradilocks.errors import GradilocksError

__all__ = ["settled"]

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


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
    try:
        target = place.resolve() if place.is_symlink() else place
        kind = stat.S_IFMT(target.stat().st_mode)
    except FileNotFoundError:
        return place.resolve() if place.is_symlink() else place
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a link to itself, a long name
        why = getattr(error, "strerror", None) or error
        raise GradilocksError(f"{place} cannot be written: {why}.") from error
    if kind in _KINDS:
        raise GradilocksError(
            f"{place} is {_KINDS[kind]}, not a file; give the path of a file with {option}."
        )
    return target
