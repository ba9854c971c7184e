"""What the numbers of a run depend on: hardware, versions, and which kernels and walk serve.

Every benchmark imports this, directly or through `report`, before it uses Gradilocks, and so waits
for the native library to be built instead of measuring half a run without it. GRADILOCKS_NATIVE=off
in the environment still measures the way without.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

import gradilocks
import gradilocks.kernels

os.environ.setdefault("GRADILOCKS_NATIVE", "wait")


def environment(device: torch.device) -> dict[str, object]:
    """What the numbers depend on."""
    found: dict[str, object] = {
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "gradilocks": gradilocks.__version__,
        "system": platform.system(),
        "kernels": {what: _short(said) for what, said in gradilocks.kernels.describe().items()},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["cuda"] = torch.version.cuda
    return found


def _short(said: str) -> str:
    """Without the folders of paths: they are of the machine, and nothing depends on them."""
    return re.sub(r"(?<!\S)/\S*/", "", said)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
