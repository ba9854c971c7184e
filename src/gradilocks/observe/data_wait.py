"""Ends of steps, calls of models and batches of a DataLoader enter; seconds of waiting leave.

From the end of a step to the next call of a model a script loads and prepares its next batch, and
does whatever else stands there: logging, a checkpoint, `loss.item()`. The batches that it draws
from a DataLoader at other times, for micro-batches say, are added. It is the host's clock alone: no
device is asked.

`script_calls.py` tells of the calls.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from gradilocks.observe.patches import Patches

__all__ = ["DataWait"]


class DataWait:
    """Seconds of waiting for each step, from the first one on.

    Args:
        clock: in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._waited: float | None = None
        self._thread: int | None = None  # That which steps, once it has.
        self._patches = Patches()
        self._timed: set[type] = set()  # Iterators of loaders.

    def install(self) -> None:
        """Begins to see what is drawn from loaders; `close` leaves torch as it was."""
        original = vars(DataLoader)["__iter__"]

        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            iterator = original(loader)
            self._watch_iterator(type(iterator))
            return iterator

        self._patches.attribute(DataLoader, "__iter__", iterate)

    def step_ended(self) -> None:
        """What follows, until a model is called, is waiting."""
        self._thread = threading.get_ident()
        self._since = self._clock()

    def take(self) -> float | None:
        """How long it was since the last step that took it; None if no model was called since."""
        waited, self._waited = self._waited, None
        return waited

    def close(self) -> None:
        """Leaves torch as it was."""
        self._patches.undo()

    def forward_begins(self) -> None:
        """A model is called."""
        since, self._since = self._since, None
        if since is not None:
            self._waited = (self._waited or 0.0) + self._clock() - since

    def _watch_iterator(self, kind: type) -> None:
        """The class among its bases that has `__next__` tells how long that took."""
        owner = next((each for each in kind.__mro__ if "__next__" in vars(each)), None)
        if owner is None or owner in self._timed:
            return
        self._timed.add(owner)
        original = vars(owner)["__next__"]

        @functools.wraps(original)
        def draw(iterator: Any) -> Any:
            begin = self._clock()
            try:
                return original(iterator)
            finally:
                # Else it is part of the time since the step. A thread that fetches ahead does not
                # wait, and neither does who has not stepped yet.
                if self._since is None and self._thread == threading.get_ident():
                    self._waited = (self._waited or 0.0) + self._clock() - begin

        self._patches.attribute(owner, "__next__", draw)
