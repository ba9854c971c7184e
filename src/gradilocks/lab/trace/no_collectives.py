"""A model that one rank runs by itself enters; no collective of it ever begins.

A model whose forward or backward meets other ranks, as SyncBatchNorm's and Megatron's do, can only
be run by all of them together: a rank that does it alone would wait for the others for ever, or
take what they send for something else. Here a collective raises instead of beginning.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from gradilocks._torch import COLLECTIVE_NAMESPACES, DispatchMode, in_backward
from gradilocks.ranks.layout import has_other_ranks

__all__ = ["MeetsOthers", "NoCollectives"]

# How the methods of a process group begin by which ranks meet.
_MEETINGS = (
    *("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send"),
)


class MeetsOthers(BaseException):
    """A collective was about to begin; models that catch every Exception let it pass."""


class NoCollectives(DispatchMode):  # type: ignore[misc, unused-ignore]
    """Inside, collectives of this thread, and of what it runs backward, raise MeetsOthers.

    Seen are torch's operations, in the thread that entered, and the methods of process groups:
    on a GPU backward runs in threads of its own, which no mode of torch reaches. With one rank
    nothing is done.

    Attributes:
        met: whether a collective was about to begin.
    """

    supports_higher_order_operators = True  # Else torch refuses to run them, as flex_attention.

    def __init__(self) -> None:
        super().__init__()
        self.met = False
        self._thread = 0
        self._methods: dict[str, Any] = {}

    def __enter__(self) -> NoCollectives:
        if has_other_ranks():
            self._thread = threading.get_ident()
            group = _process_group()
            for name, method in list(vars(group).items()):
                if name.strip("_").startswith(_MEETINGS) and callable(getattr(group, name)):
                    self._methods[name] = method
                    setattr(group, name, self._around(method.__get__))
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread:
            super().__exit__(*error)
            self._thread = 0
        for name, method in self._methods.items():
            setattr(_process_group(), name, method)
        self._methods = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Lets one operation of torch pass, unless ranks meet by it."""
        if getattr(func, "namespace", "") in COLLECTIVE_NAMESPACES:
            self._refuse()
        return func(*args, **(kwargs or {}))

    def _around(self, bound_to: Any) -> Any:
        def meet(group: Any, *args: Any, **kwargs: Any) -> Any:
            # Other threads of the script, as one that saves a checkpoint, meet as ever.
            if threading.get_ident() == self._thread or in_backward():
                self._refuse()
            return bound_to(group, type(group))(*args, **kwargs)

        return meet

    def _refuse(self) -> None:
        self.met = True
        raise MeetsOthers


def _process_group() -> Any:
    return sys.modules["torch.distributed"].ProcessGroup
