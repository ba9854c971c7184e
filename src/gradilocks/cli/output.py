"""Standard output that takes any name, whatever its encoding."""

from __future__ import annotations

import io
import sys


def forgive_encoding() -> None:
    """Writes what standard output's encoding lacks as ``\\xfc`` instead of failing on it.

    For commands that show names from a file: a parameter may be called anything.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
