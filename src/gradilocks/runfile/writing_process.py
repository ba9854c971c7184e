"""The process that writes a run file enters as a mark in its header; whether it still runs leaves.

A run that was killed cannot say so. A number of a process alone does not tell either, since numbers
are given again: with it stand when the process began, in which start of the machine and in which
namespace, as Linux numbers them. On another machine, and on other systems, nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["is_running", "process_here", "state_without_end"]

_ZOMBIE = "Z"


def process_here() -> dict[str, Any] | None:
    """The mark of this process; None where the system does not tell what it takes."""
    found = _began(os.getpid())
    around = _around()
    return (
        None if found is None or around is None else {"pid": os.getpid(), "began": found, **around}
    )


def is_running(mark: Mapping[str, Any] | None) -> bool | None:
    """Whether the process with this mark still runs; None if that cannot be known from here."""
    around = _around()
    if not mark or around is None or any(mark.get(name) != value for name, value in around.items()):
        return None
    pid = mark.get("pid")
    return _began(pid) == mark.get("began") if isinstance(pid, int) else None


def state_without_end(mark: Mapping[str, Any] | None) -> str:
    """How a run stands whose file has no end: 'running', 'killed', or 'no end' if nobody knows."""
    return {True: "running", False: "killed", None: "no end"}[is_running(mark)]


def _around() -> dict[str, Any] | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": os.stat("/proc/self/ns/pid").st_ino}
    except OSError:
        return None


def _began(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine's start; None if there is none."""
    try:
        # The name of the program, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0].decode() == _ZOMBIE else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
