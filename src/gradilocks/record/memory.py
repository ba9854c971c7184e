"""How much memory this process has held at most, so far: of the host, and of its GPUs.

Both are counts that the operating system and torch's allocator keep anyway. Reading them waits for
nothing and changes nothing; it takes some ten microseconds and is done once a batch of steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress

import torch

__all__ = ["peak_of_gpus", "peak_of_process"]


def peak_of_process() -> int | None:
    """Bytes of physical memory (the resident set) at its largest; None where nothing tells."""
    # Not `ru_maxrss` where there is another way: it begins at that of the process that forked.
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    with suppress(ImportError):
        import resource

        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024
    return None


def peak_of_gpus(devices: Iterable[torch.device]) -> int | None:
    """Bytes that tensors took on the GPU that had most of them; None if none is a GPU.

    As `torch.cuda.max_memory_allocated` has it: since the process began, or since the script has
    last called `torch.cuda.reset_peak_memory_stats`.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    return max(map(torch.cuda.max_memory_allocated, gpus), default=None)
