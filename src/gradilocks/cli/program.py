"""How this program was called, so that the commands it suggests can be typed as they are."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Returns what to type before a command: ``gradilocks`` if the shell would find this one.

    Otherwise the interpreter that is running, by the shortest name that works from here, and
    ``-m gradilocks``: ``make demo`` does not put its environment on the PATH.
    """
    interpreter = Path(sys.executable)
    found = shutil.which("gradilocks")
    if found is not None and Path(found).parent == interpreter.parent:
        return "gradilocks"
    for name in ("python", "python3"):
        if shutil.which(name) == str(interpreter):
            return f"{name} -m gradilocks"
    try:
        shown = os.path.relpath(interpreter)
    except ValueError:  # another drive
        return f"{interpreter} -m gradilocks"
    return f"{interpreter if shown.startswith(os.pardir) else shown} -m gradilocks"
