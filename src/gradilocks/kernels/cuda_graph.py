"""What a CUDA graph needs for as long as it is replayed: tables, settings, and their sources.

A graph reads at fixed addresses, so what was sent while it was captured must stay. It stays with
the control or the optimizer whose step was captured, as the optimizer's own state does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["capturing", "keep_if_captured", "keeping"]


class _Keepers(threading.local):
    def __init__(self) -> None:
        self.stack: list[list[object]] = []


_keepers = _Keepers()
_for_good: list[object] = []
"""For a function that nobody owns, such as a clip: a few tables, never a model."""


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()


def keep_if_captured(*needed: object) -> None:
    """Keeps what a graph that is being captured will read at every replay."""
    if capturing():
        (_keepers.stack[0] if _keepers.stack else _for_good).extend(needed)


@contextmanager
def keeping(kept: list[object]) -> Iterator[None]:
    """Inside, `kept` is where things are kept; of two such contexts the outer one counts."""
    _keepers.stack.append(kept)
    try:
        yield
    finally:
        _keepers.stack.pop()
