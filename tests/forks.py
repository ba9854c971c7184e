"""Forking a process that has run other tests."""

from __future__ import annotations

import gc
import os

__all__ = ["fork"]


def fork() -> int:
    """As `os.fork`; the child does not collect what earlier tests have left behind.

    Some of it, such as a process group, waits in its destructor for threads that a fork does not
    have.
    """
    gc.collect()
    gc.disable()
    try:
        child = os.fork()
        if not child:
            gc.freeze()
    finally:
        gc.enable()
    return child
