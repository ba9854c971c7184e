"""A block of code enters; its collectives, and the bytes that this rank gave and got, leave.

torch's own counter of collectives sees every one, whoever calls it and by whatever interface; the
bytes are added here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from gradilocks._torch import COLLECTIVE_NAMESPACES

__all__ = ["CollectiveCounter"]

# They carry nothing, or only wait for or wrap what was counted when it began.
_SILENT = ("wait_tensor", "wrap_tensor_autograd", "barrier", "monitored_barrier")
# Where the first argument is what comes out; elsewhere it is what goes in.
_OUTPUT_FIRST = (
    *("allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("gather_", "scatter_", "alltoall_", "alltoall_base_"),
    *("allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter_tensor_coalesced_",
)


class CollectiveCounter(CommDebugMode):  # type: ignore[misc, unused-ignore]
    """Counts the collectives and messages between ranks that a block of code starts.

    Example:
        >>> with CollectiveCounter() as counter:
        ...     control.step()
        >>> counter.calls, counter.bytes_given
        (Counter({'allgather': 1}), 216)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.calls: Counter[str] = Counter()
        """How many of each kind."""
        self.bytes_given = 0
        """What this rank has put into all of them; of a gather its own row, not everybody's."""
        self.bytes_got = 0
        """What it has got out of them; of a gather everybody's rows."""

    @property
    def total(self) -> int:
        """How many of all kinds."""
        return sum(self.calls.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Counts one operation of torch, if it is a collective."""
        out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        if out is NotImplemented or getattr(func, "namespace", "") not in COLLECTIVE_NAMESPACES:
            return out
        name = func.overloadpacket.__name__
        if name.strip("_") not in _SILENT:
            given, got = (args[1], args[0]) if name in _OUTPUT_FIRST else (args[0], out)
            if func.namespace == "c10d" and name not in _OUTPUT_FIRST:
                got = args[0]  # In place.
            self.calls[name.strip("_")] += 1
            self.bytes_given += sum(each.nbytes for each in _tensors(given))
            self.bytes_got += sum(each.nbytes for each in _tensors(got))
        return out


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _tensors(each)
