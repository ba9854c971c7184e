"""What ran, and on what: the facts for a run file's header. Touches no GPU that is not in use."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gradilocks._version import __version__

__all__ = [
    "checked_config",
    "command_here",
    "hardware_here",
    "program_here",
    "rank_here",
    "versions_here",
]


def command_here() -> tuple[str, ...]:
    """The command line of this process."""
    program, *arguments = sys.orig_argv or ("python",)
    return Path(program).name, *arguments


def program_here() -> str:
    """A short name of what runs, for files: 'train' of train.py; 'run' where it has none."""
    file = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "run")
    return file.absolute().parent.name if file.stem == "__main__" else file.stem


def checked_config(config: object) -> dict[str, Any] | None:
    """What the user says of a run, as JSON holds it: paths as text, tuples and sets as lists.

    Raises:
        TypeError: it is no mapping, or something in it is nothing that JSON could hold.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a mapping, as vars(args) or dataclasses.asdict(config), got "
            f"{type(config).__name__}."
        )
    return {str(name): _as_json(value, f"config[{name!r}]") for name, value in config.items()}


def _as_json(value: object, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(each, f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_as_json(each, f"{name}[{at}]") for at, each in enumerate(value)]
    raise TypeError(
        f"{name} must be a number, text, a list or a mapping, which the run file's header can "
        f"hold, got {type(value).__name__}. Convert it, or leave it out."
    )


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
