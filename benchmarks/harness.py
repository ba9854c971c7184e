"""One way to time: contenders alternate in one process, each set up again outside the clock.

On the CPU a call has two times: the wall's, and the processor's, of this process alone, whatever
else the machine does. On a GPU it has three, all of the same call on a device that was idle before:
by events on the device, on the wall with a final synchronize, and of the host alone, until the call
returns. Asked for `queued`, a further call gives a fourth: by events, with the device still at work
when the call begins, as it is after a real backward, so that launches queue up and the time has no
host in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UP = 3

# About what an H100 or H200 runs at under load; only the length of a pause depends on it.
_CYCLES_PER_MS = 2_000_000


@dataclass(frozen=True)
class Ready:
    """What a contender has built: `run` is on the clock, `prepare` is not."""

    run: Callable[[], object]
    prepare: Callable[[], object]
    result: Callable[[], Sequence[Tensor]]
    """What `run` has changed, for comparison with the others."""
    ahead: int = 0
    """How many steps it took while it was built."""
    keeps: object = None
    """What must live as long as `run` does, if `run` itself does not hold on to it."""


@dataclass(frozen=True)
class Contender:
    """Who takes part."""

    name: str
    build: Callable[[], Ready]
    baseline: bool = False
    """One of those whose fastest the ratios are against: torch's own ways."""
    optional: bool = False
    """May fail or give another result: then it is left out with a note."""


Times = dict[str, list[float]]
"""Milliseconds, round by round, of each measure: "wall" and, on a CPU, "cpu", on a GPU "gpu",
"host", "queued"; of training steps also "loop"."""


def alternate(
    ready: Sequence[Ready],
    *,
    rounds: int,
    device: torch.device,
    queued: bool = False,
    warm_up: int = WARM_UP,
) -> list[Times]:
    """Times everybody once a round, after a few rounds that do not count."""
    clock = _GpuClock() if device.type == "cuda" else _CpuClock()
    times: list[Times] = [{} for _ in ready]
    for number in range(warm_up + rounds):
        # Another one begins each round, so that nobody always follows the same neighbour.
        shift = number % len(ready)
        order = [*range(shift, len(ready)), *range(shift)]
        for place in order:
            taken = clock.time(ready[place])
            if queued and isinstance(clock, _GpuClock):
                taken["queued"] = clock.time_queued(ready[place], host_ms=taken["host"])
            if number >= warm_up:
                for measure, value in taken.items():
                    times[place].setdefault(measure, []).append(value)
    return times


def synchronize(device: torch.device) -> None:
    """Waits for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class _CpuClock:
    def time(self, ready: Ready) -> dict[str, float]:
        ready.prepare()
        busy, start = time.process_time(), time.perf_counter()
        ready.run()
        end, busy_until = time.perf_counter(), time.process_time()
        return {"wall": (end - start) * 1e3, "cpu": (busy_until - busy) * 1e3}


class _GpuClock:
    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def time(self, ready: Ready) -> dict[str, float]:
        ready.prepare()
        torch.cuda.synchronize()
        self._start.record()
        start = time.perf_counter()
        ready.run()
        returned = time.perf_counter()
        self._end.record()
        torch.cuda.synchronize()
        end = time.perf_counter()
        return {
            "gpu": self._start.elapsed_time(self._end),
            "wall": (end - start) * 1e3,
            "host": (returned - start) * 1e3,
        }

    def time_queued(self, ready: Ready, *, host_ms: float) -> float:
        """By events, after a pause on the device that is longer than the host needs."""
        ready.prepare()
        torch.cuda.synchronize()
        torch.cuda._sleep(int((1.5 * host_ms + 1.0) * _CYCLES_PER_MS))
        self._start.record()
        ready.run()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end)
