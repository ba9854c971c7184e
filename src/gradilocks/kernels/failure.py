"""A kernel that does not compile: whoever launches it catches KernelFailed and goes another way.

Whoever chooses the back ends is told by `report`, so that plain torch serves the device from then
on; the kernels themselves know nothing of that choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["KernelFailed", "report", "report_to"]

Listener = Callable[[torch.device, str, Exception], None]
_listeners: list[Listener] = []


class KernelFailed(RuntimeError):
    """A kernel does not compile here. It has not run; plain torch serves the device from now on.

    Raised to whoever launches, who then takes the other way; no user sees it.
    """


def report(device: torch.device, what: str, error: Exception) -> None:
    """Tells whoever chooses the back ends that `what` has failed on `device`, and how."""
    for listener in _listeners:
        listener(device, what, error)


def report_to(listener: Listener) -> None:
    """Has `listener` told of every failure from here on."""
    _listeners.append(listener)
