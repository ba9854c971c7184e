"""Base class of the callbacks for experiment trackers."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from gradilocks.events import StepRecord
from gradilocks.step.decide import ROW
from gradilocks.step.host_copy import HostCopy

__all__ = ["StepCallback"]

_NAMES = ("loss", "lr", "scale", "norm", "limit", "clipped", "skipped", "nan", "inf")


class StepCallback:
    """Passes the numbers of each step to `write` when they have arrived on the host; no step waits for the device.

    Args:
        prefix: precedes all names. Steps of one optimizer (`step(only=)`) add "optimizer0/", "optimizer1/", and so on.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._pending: deque[tuple[StepRecord, dict[str, float], list[str], HostCopy]] = deque()

    def __call__(self, record: StepRecord) -> None:
        """Starts the copy of the numbers of one step, and writes the steps that have arrived."""
        if record.outcome.is_captured:  # Replays of the user's CUDA graph run no host code.
            return
        names, parts, fields = list(ROW), [record.outcome.row], {}
        for name, value in (("loss", record.loss), ("lr", next(iter(record.learning_rates), None))):
            if isinstance(value, Tensor):
                names.append(name)
                parts.append(value.detach().reshape(1).to(parts[0], non_blocking=True))
            elif value is not None:
                fields[name] = float(value)
        self._pending.append((record, fields, names, HostCopy(torch.cat(parts))))
        self._write_arrived(wait=False)

    def flush(self) -> None:
        """Writes all steps. Waits for the device."""
        self._write_arrived(wait=True)

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        """Writes the numbers of one step, by prefix and name, with the time of its end."""
        raise NotImplementedError

    def _write_arrived(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][-1].has_arrived()):
            record, fields, names, copy = self._pending.popleft()
            numbers = fields | dict(zip(names, copy.tensor().tolist(), strict=True))
            if numbers["limit"] == math.inf:
                del numbers["limit"]
            is_partial = len(record.optimizers) < len(record.control.optimizers)
            prefix = self.prefix + (f"optimizer{record.optimizers[0]}/" if is_partial else "")
            values = {prefix + name: numbers[name] for name in _NAMES if name in numbers}
            self.write(int(numbers["step"]), record.time, values)
