"""The end of a step enters, and the next call of a module; the seconds between them leave.

That is the time in which a script loads and prepares its next batch, and does whatever else stands
there: logging, a checkpoint, `loss.item()`. It is the host's clock alone: no device is asked.

The next forward is seen by a hook on all modules that takes itself away when it has fired, so that
modules run without one, the first after a step excepted. A compiled module warns of such hooks;
therefore its own call, too, tells of itself first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gradilocks._torch import DYNAMO
from gradilocks.observe.patches import Patches

__all__ = ["DataWait"]


class DataWait:
    """Seconds between steps and forward passes, from the first step on.

    Args:
        clock: in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._waited: float | None = None
        self._hooks: dict[int, Any] = {}  # torch's own, and under which key ours comes and goes.
        self._key = -1
        self._patches = Patches()
        self._is_patched = False

    def step_ended(self) -> None:
        """What follows, until a module is called, is waiting."""
        if not self._is_patched:
            self._watch_compiled()
        if self._key < 0:
            handle = register_module_forward_pre_hook(self._module_called)
            self._hooks, self._key = handle.hooks_dict_ref() or {}, handle.id
        elif self._key not in self._hooks:  # A handle at every step would cost 5 microseconds.
            self._hooks[self._key] = self._module_called
        self._since = self._clock()

    def take(self) -> float | None:
        """How long it was since the last step that took it; None if no module was called since."""
        waited, self._waited = self._waited, None
        return waited

    def close(self) -> None:
        """Takes the hook away."""
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

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._forward_begins()
            return original(module, *args, **kwargs)

        self._patches.attribute(kind, "__call__", call)
