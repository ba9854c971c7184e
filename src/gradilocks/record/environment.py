"""What ran, and on what: the facts for a run file's header. Touches no GPU that is not in use."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import gradilocks

__all__ = ["command_here", "hardware_here", "rank_here", "versions_here"]


def command_here() -> tuple[str, ...]:
    """The command line of this process."""
    given: Sequence[str] = sys.orig_argv or ("python",)
    return Path(given[0]).name, *given[1:]


def versions_here() -> dict[str, str]:
    """Of python, torch, gradilocks and, if torch was built with it, cuda."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradilocks": gradilocks.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def hardware_here() -> dict[str, Any]:
    """The machine, its processor, its memory and its GPUs."""
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        "memory": _memory(),
        "gpus": _gpus(),
    }


def rank_here() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) if it is alone."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    except (KeyError, ValueError):
        return 0, 1


def _cores() -> int:
    return os.cpu_count() or 1


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _gpus() -> list[str]:
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if ready:
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    # Asking torch would start CUDA, and a process that has started it can no longer fork workers.
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in _read(file).splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return names


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
