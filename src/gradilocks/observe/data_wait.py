"""Ends of steps, calls of modules and batches of a DataLoader enter; seconds of waiting leave.

From the end of a step to the next call of a module a script loads and prepares its next batch, and
does whatever else stands there: logging, a checkpoint, `loss.item()`. The batches that it draws
from a DataLoader at other times, for micro-batches say, are added. It is the host's clock alone: no
device is asked.

The next forward is seen by a hook on all modules that takes itself away when it has fired, so that
modules run without one, the first after a step excepted. A compiled module warns of such hooks;
therefore its own call, too, tells of itself first.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader

from gradilocks._torch import DYNAMO
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
        self._hooks: dict[int, Any] = {}  # torch's own, and under which key ours comes and goes.
        self._key = -1
        self._thread: int | None = None  # That which steps, once it has.
        self._patches = Patches()
        self._is_patched = False
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
        """What follows, until a module is called, is waiting."""
        if not self._is_patched:
            self._watch_compiled()
        if self._key < 0:
            handle = register_module_forward_pre_hook(self._module_called)
            self._hooks, self._key = handle.hooks_dict_ref() or {}, handle.id
        elif self._key not in self._hooks:  # A handle at every step would cost 5 microseconds.
            self._hooks[self._key] = self._module_called
        self._thread = threading.get_ident()
        self._since = self._clock()

    def take(self) -> float | None:
        """How long it was since the last step that took it; None if no module was called since."""
        waited, self._waited = self._waited, None
        return waited

    def close(self) -> None:
        """Takes everything away."""
        self._forward_begins()
        self._patches.undo()

    def _module_called(self, module: Any, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._forward_begins()

    def _forward_begins(self) -> None:
        self._hooks.pop(self._key, None)
        since, self._since = self._since, None
        if since is not None:
            self._waited = (self._waited or 0.0) + self._clock() - since

    def _watch_compiled(self) -> None:
        """Once somebody has imported what compiles modules."""
        kind = getattr(sys.modules.get(f"{DYNAMO}.eval_frame"), "OptimizedModule", None)
        if kind is None or "__call__" not in vars(kind):
            return
        self._is_patched = True
        original = vars(kind)["__call__"]

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._forward_begins()
            return original(module, *args, **kwargs)

        self._patches.attribute(kind, "__call__", call)

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
