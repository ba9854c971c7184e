"""What ran, and on what: the facts for a run file's header. Touches no GPU that is not in use."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradilocks._version import __version__

__all__ = ["command_here", "hardware_here", "rank_here", "versions_here"]


def command_here() -> tuple[str, ...]:
    """The command line of this process."""
    program, *arguments = sys.orig_argv or ("python",)
    return Path(program).name, *arguments


def versions_here() -> dict[str, str]:
    """Of python, torch, gradilocks and, if torch was built with it, cuda."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradilocks": __version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def hardware_here() -> dict[str, Any]:
    """The machine, its processor, its memory and its GPUs."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpu = next(_values("/proc/cpuinfo", "model name"), "")
    memory = next(_values("/proc/meminfo", "MemTotal"), None)
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "memory": None if memory is None else int(memory.split()[0]) * 1024,
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


def _gpus() -> list[str]:
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if ready:
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    # Asking torch would start CUDA, and a process that has started it can no longer fork workers.
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [name for file in files for name in _values(file, "Model")]


def _values(path: str | Path, name: str) -> Iterator[str]:
    """The values of the lines `name: value` of a file of the system, if it has that file."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        if line.startswith(name):
            yield line.partition(":")[2].strip()
