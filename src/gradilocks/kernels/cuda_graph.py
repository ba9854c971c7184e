"""What a CUDA graph needs for as long as it is replayed: tables, settings, and their sources.

A graph reads at fixed addresses, so what was sent while it was captured must stay. It stays with
the control or the optimizer whose step was captured, as the optimizer's own state does.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["capturing", "keep_if_captured", "keeping"]


class _Keepers(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[list[object], bool | None]] = []
        """Where things are kept, and `captured` as it was before."""
        self.captured: bool | None = None
        """Whether a graph is captured, as it was when the step that goes on began."""


_keepers = _Keepers()
_for_good: list[object] = []
"""For a function that nobody owns, such as a clip: a few tables, never a model."""


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    known = _keepers.captured
    if known is None:
        ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return ready and torch.cuda.is_current_stream_capturing()
    return known


def keep_if_captured(*needed: object) -> None:
    """Keeps what a graph that is being captured will read at every replay."""
    if capturing():
        (_keepers.stack[0][0] if _keepers.stack else _for_good).extend(needed)


class keeping:  # noqa: N801 (a context, as `torch.no_grad` is)
    """Inside, `kept` is where things are kept; of two such contexts the outer one counts.

    It may be entered again and again, also while it is entered.

    Whether a graph is captured is asked once, on entering: torch's answer takes a microsecond, and
    a step wants it six times.
    """

    def __init__(self, kept: list[object]) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        captured = ready and torch.cuda.is_current_stream_capturing()
        _keepers.stack.append((self._kept, _keepers.captured))
        _keepers.captured = captured

    def __exit__(self, *_: object) -> None:
        _keepers.captured = _keepers.stack.pop()[1]
