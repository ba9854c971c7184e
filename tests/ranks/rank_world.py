"""Worlds of 2 and 4 ranks over gloo that stay alive for many tests.

`World.run(program, *arguments)` calls a function of a test module on every rank and returns the results by rank. An
exception on any rank fails the test with that rank's traceback and ends the processes; the next test starts new ones.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankFailed", "World", "caught", "fork_context", "world"]

LIMIT = 600.0
"""Seconds before ranks that wait for each other in vain fail the test."""
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "rank_world",
]


class RankFailed(AssertionError):
    """A rank raised, or did not answer."""


class World:
    """Processes that form one process group.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls `program(rank, *arguments)` on every rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((program, arguments))
        results: dict[int, Any] = {}
        deadline, failure = time.monotonic() + LIMIT, None
        while len(results) < self.size and time.monotonic() < deadline:
            for ready in wait(self._pipes, timeout=0.1):
                rank = self._pipes.index(ready)  # type: ignore[arg-type]
                if rank in results:
                    continue
                try:
                    results[rank], error = self._pipes[rank].recv()
                except EOFError:
                    results[rank], error = None, "the process ended"
                if error is not None and failure is None:
                    # Other ranks may wait for this one, or fail by themselves in a moment.
                    failure, deadline = f"rank {rank}: {error}", time.monotonic() + 1.0
        if failure is not None or len(results) < self.size:
            self.stop()
            missing = sorted(set(range(self.size)) - set(results))
            raise RankFailed(failure or f"ranks {missing} did not answer within {LIMIT:g} s")
        return [results[rank] for rank in range(self.size)]

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = fork_context()
        store = os.path.join(tempfile.mkdtemp(prefix="gradilocks-ranks-"), "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def fork_context() -> Any:
    """The context of processes that are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


@functools.cache
def world(size: int) -> World:
    """The world of this size, shared by all tests of the session."""
    made = World(size)
    atexit.register(made.stop)
    return made


def caught(function: Callable[[], Any]) -> tuple[str, str]:
    """Type and message of the exception that a function raises; two empty strings if it raises none."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    gc.freeze()  # Without this every collection visits the million objects of torch.
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in (".*not a leaf Tensor", "FSDP2-wrapped module .* returned a view"):  # Of torch about itself.
        warnings.filterwarnings("ignore", message)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )
    while True:
        try:
            program, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((program(rank, *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
