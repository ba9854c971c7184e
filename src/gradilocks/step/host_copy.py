"""Asynchronous copies of small tensors to the host."""

from __future__ import annotations

import torch
from torch import Tensor

LAG = 4
"""Ranks read asynchronous values exactly LAG steps after sending them, so all act at the same step. The host is rarely
further ahead of its device, so the wait is short."""


class HostCopy:
    """Asynchronous copy of a small CUDA tensor to pinned memory, in the order of the current stream.

    Tensors on other devices are copied synchronously.

    Args:
        tensor: the tensor to copy. It may be overwritten as soon as the constructor returns.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.detach().to("cpu", copy=True)
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_immediate(self) -> bool:
        """True if the copy was synchronous, as on a CPU."""
        return self._event is None

    def has_arrived(self) -> bool:
        """True if `read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> float:
        """Returns the value of a 0-d tensor; waits until it has arrived."""
        return float(self.tensor())

    def tensor(self) -> Tensor:
        """Returns the value as a tensor on the host; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
