"""Samples on the device → numbers on the host, many steps in one transfer, without a wait.

What is on the CPU is read at once: nothing is queued there. What is on a GPU is gathered, copied to
pinned memory and read when the copy has arrived, which is asked for at a later step. A second copy,
of a single flag, follows it on the same stream, so that a thread which must not call CUDA sees by
looking that the first is there. Devices of other kinds are read when the batch is due, which waits
for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.record.sample import Sample
from gradilocks.step.outcome import fetch
from gradilocks.values import wide

__all__ = ["Batch", "Held", "Underway"]

_SCALARS = (
    "loss",
    "scale",
    "norm",
    "limit",
    "clipped",
    "skip",
    "rejected",
    "lr",
    "next_scale",
    "carried",
)


class Held:
    """One step as the recorder holds it: numbers that are known, tensors that are on their way."""

    def __init__(self, sample: Sample, *, index: int, step: int, time: float, detail: bool) -> None:
        self.index, self.step, self.time, self.detail = index, step, time, detail
        self.places, self.elements, self.more = sample.places, sample.elements, sample.more
        self.scalars: dict[str, float | None] = dict.fromkeys(_SCALARS)
        self.columns: dict[str, list[float]] = {}
        self.waiting: list[tuple[tuple[str, ...] | str, Tensor]] = []
        self.streams: set[Any] = set()
        self._take_scalars(sample)
        self._take_columns(sample)
        for device in {tensor.device for _, tensor in self.waiting if tensor.is_cuda}:
            self.streams.add(torch.cuda.current_stream(device))

    def _take_scalars(self, sample: Sample) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name in _SCALARS:
            value = getattr(sample, name)
            if not isinstance(value, Tensor):
                self.scalars[name] = None if value is None else float(value)
            elif value.device.type == "cpu":
                self.scalars[name] = float(value.detach())
            else:
                groups.setdefault((value.device, value.dtype), []).append((name, value.detach()))
        for pairs in groups.values():  # One launch each; it is also the copy.
            stacked = torch.stack([value.reshape(()) for _, value in pairs])
            self.waiting.append((tuple(name for name, _ in pairs), stacked))

    def _take_columns(self, sample: Sample) -> None:
        found = sample.statistics
        columns: dict[str, Tensor | None] = {}
        if found is not None:
            columns |= {"nan": found.nan, "inf": found.inf}
        if self.detail:
            if found is not None:
                columns |= {"norms": found.norms, "largest": found.largest, "zeros": found.zeros}
            columns |= {"weight": sample.weight, "update": sample.update}
        for name, column in columns.items():
            if column is None:
                continue
            if column.device.type == "cpu":
                self.columns[name] = fetch(column.detach())
            else:
                self.waiting.append((name, column.detach()))

    def put(self, what: tuple[str, ...] | str, numbers: list[float]) -> None:
        """Takes what has arrived."""
        if isinstance(what, str):
            self.columns[what] = numbers
        else:
            self.scalars.update(zip(what, numbers, strict=True))


class Batch:
    """Steps that travel together."""

    def __init__(self, rows: Sequence[Held]) -> None:
        self.rows = rows
        self._travelling: list[_Transfer] = []
        devices = {tensor.device for row in rows for _, tensor in row.waiting}
        for device in devices:
            self._travelling.append(_Transfer(device, rows))
        for row in rows:
            row.waiting, row.streams = [], set()

    def arrived(self) -> bool:
        """Whether all numbers are on the host, or can be read at the price of a wait alone."""
        return all(transfer.arrived() for transfer in self._travelling)

    def is_here(self) -> bool:
        """Whether all numbers are on the host, found out without a call to any device."""
        return all(transfer.is_here() for transfer in self._travelling)

    def read(self) -> Sequence[Held]:
        """The steps with their numbers, once they are here; calls no device and lets go of nothing.

        Memory that a device has copied to is given back with calls to it.
        """
        for transfer in self._travelling:
            transfer.read()
        return self.rows

    def unpack(self) -> Sequence[Held]:
        """The steps with their numbers; waits for those that have not arrived."""
        for transfer in self._travelling:
            transfer.wait()
        self.read()
        self._travelling = []
        return self.rows


class Underway:
    """Steps that were handed over and are not in the file yet: held on their device, or sent.

    Args:
        most: so many are held before they are due.
        seconds: so long after the last were sent, those that are held are due.
        clock: tells the time in seconds.
    """

    def __init__(
        self, most: int, seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._seconds, self._clock = most, seconds, clock
        self._last = clock()
        self._held: list[Held] = []
        self._sent: deque[Batch] = deque()

    def hold(self, held: Held) -> None:
        """Another step."""
        self._held.append(held)

    def send_if_due(self) -> None:
        """Sends what is held, if there is enough of it or it has waited for long."""
        if len(self._held) >= self._most or self._clock() - self._last >= self._seconds:
            self.send()

    def send(self) -> None:
        """Sends what is held to the host, without a wait."""
        self._last = self._clock()
        if self._held:
            rows, self._held = self._held, []
            self._sent.append(Batch(rows))

    def next(self, *, wait: bool = True) -> Batch | None:
        """Takes the batch that was sent first; without `wait` only if it has arrived."""
        if self._sent and (wait or self._sent[0].arrived()):
            return self._sent.popleft()
        return None

    def first_here(self) -> Batch | None:
        """The batch that `next` would take, if it can be read without a call to any device."""
        held = self._held
        if held and not self._sent and not held[-1].more and not any(h.waiting for h in held):
            self._sent.append(Batch(held))
            self._held = []
        return self._sent[0] if self._sent and self._sent[0].is_here() else None

    def clear(self) -> None:
        """Forgets everything."""
        self._held, self._sent = [], deque()


class _Transfer:
    """What comes from one device."""

    def __init__(self, device: torch.device, rows: Sequence[Held]) -> None:
        mine = [
            (row, what, tensor)
            for row in rows
            for what, tensor in row.waiting
            if tensor.device == device
        ]
        self._event: Any = None
        if device.type == "cuda":
            _follow(device, rows, [tensor for _, _, tensor in mine])
        # Alike together: one gathering for each dtype, one conversion, one copy.
        self._order = sorted(mine, key=lambda entry: str(entry[2].dtype))
        parts: dict[torch.dtype, list[Tensor]] = {}
        for _, _, tensor in self._order:
            parts.setdefault(tensor.dtype, []).append(tensor)
        self._sizes = [tensor.numel() for _, _, tensor in self._order]
        flat = torch.cat([torch.cat(each).to(wide(device)) for each in parts.values()])
        self._host = flat
        if device.type == "cuda":
            self._host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._here = torch.zeros(1, dtype=torch.uint8, pin_memory=True)
            self._here.copy_(torch.ones(1, dtype=torch.uint8, device=device), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._order = [(row, what, _NOTHING) for row, what, _ in self._order]

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def is_here(self) -> bool:
        if self._event is None:
            return self._host.device.type == "cpu"
        return bool(self._here)

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> None:
        numbers = fetch(self._host)
        begin = 0
        for (row, what, _), size in zip(self._order, self._sizes, strict=True):
            row.put(what, numbers[begin : begin + size])
            begin += size


_NOTHING = torch.empty(0, device="cpu")


def _follow(device: torch.device, rows: Sequence[Held], tensors: Sequence[Tensor]) -> None:
    """Lets this stream wait, on the device, for those that made the tensors."""
    now = torch.cuda.current_stream(device)
    others = {s for row in rows for s in row.streams if s.device == device and s != now}
    for stream in others:
        now.wait_stream(stream)
    if others:  # Their memory must not be given away before this stream has read it.
        for tensor in tensors:
            tensor.record_stream(now)
