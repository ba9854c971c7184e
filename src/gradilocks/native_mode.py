"""What GRADILOCKS_NATIVE asks for: whether C++ is built, waited for, or left alone.

The environment enters and one of `MODES` leaves, or an error that names them. Imports no torch: a
command that is about to run somebody's script refuses a typo before the script begins.
"""

from __future__ import annotations

import os

__all__ = ["MODES", "mode_asked_for"]

MODES = ("auto", "wait", "off")


def mode_asked_for() -> str:
    """What GRADILOCKS_NATIVE says; "auto" if it is not set, or empty.

    Raises:
        ValueError: it is something else than auto, wait or off.
    """
    given = os.environ.get("GRADILOCKS_NATIVE", "")
    mode = given.strip().lower() or "auto"
    if mode not in MODES:
        raise ValueError(
            "the environment variable GRADILOCKS_NATIVE must be auto (build the C++ library in the "
            "background, the default), wait (for that build) or off (Python and plain torch), got "
            f"{given!r}. Set it to one of these, or unset it."
        )
    return mode
