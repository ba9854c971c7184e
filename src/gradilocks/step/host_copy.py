"""Numbers on a device → Python numbers: the one place where the host reads what a step measured.

`fetch` reads now and waits for the device. `HostCopy` sends numbers to pinned memory and reads them
once they have arrived, which is asked for at a later step, so that nobody waits: the Outcome's
count of non-finite steps, a schedule's flags and a recorder's batches travel so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradilocks.values import wide

__all__ = ["LAG", "HostCopy", "fetch"]

LAG = 4
"""After so many steps ranks that decide together read what is on its way, each waiting for it if
it must: by when it arrives they would decide at different steps. The host is seldom that far
ahead of its device, and where it is, the device has work for as many steps."""


def fetch(*scalars: Tensor) -> list[float]:
    """0-d tensors, or one 1-d tensor, as Python numbers, in one transfer."""
    if scalars[0].dim() == 1:
        numbers: list[float] = scalars[0].tolist()
        return numbers if scalars[0].is_floating_point() else list(map(float, numbers))
    home = scalars[0].device
    if home.type == "cpu":
        return [float(s) for s in scalars]
    return [float(v) for v in torch.stack([s.to(home, wide(home)) for s in scalars]).tolist()]


class HostCopy:
    """A tensor of up to one dimension on its way to the host, as it is at this point of its stream.

    Devices that are neither CPU nor CUDA are read at once, which waits for them.

    Args:
        tensor: what to copy; it may be overwritten as soon as this returns.
        flagged: whether `is_here` will be asked. It costs a second copy, of a single flag, that
            follows the first on the same stream: whoever sees the flag knows that the first is
            there.
    """

    def __init__(self, tensor: Tensor, *, flagged: bool = False) -> None:
        self._event: torch.cuda.Event | None = None
        self._flag: Tensor | None = None
        if not tensor.is_cuda:
            self._host = tensor.to("cpu", copy=True)
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        if flagged:
            self._flag = torch.zeros(1, dtype=torch.uint8, pin_memory=True)
            one = torch.ones(1, dtype=torch.uint8, device=tensor.device)
            self._flag.copy_(one, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def at_once(self) -> bool:
        """Whether the numbers were there as soon as they were asked for, on any machine."""
        return self._event is None

    def arrived(self) -> bool:
        """Whether `read` gives the numbers; asks the device, and does not wait for it."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def is_here(self) -> bool:
        """Whether `read` gives the numbers, found out without a call to any device.

        For a thread that must not call CUDA: it would break a graph that another one captures.
        """
        return self._event is None or (self._flag is not None and bool(self._flag))

    def wait(self) -> None:
        """Waits until the numbers have arrived."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> list[float]:
        """The numbers, once they have arrived; may be read again."""
        return fetch(self._host)

    def numbers(self) -> Tensor:
        """The same as a tensor, in memory that no device knows of."""
        return self._host if self._event is None else self._host.clone()
