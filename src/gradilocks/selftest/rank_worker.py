"""The names of checks enter one process a rank, what it found in each leaves; none waits for ever.

A collective that some rank does not join waits for ever on a GPU, and torch's own answer to that
ends the process. So a rank's checks run in a process of their own: one that hangs or dies is ended
by its own clock, has left word where it was, and the next one begins anew with a fresh process
group, while the process that the user started goes on.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradilocks.record.environment import hardware_here, versions_here
from gradilocks.selftest.check_list import Check, checks_for
from gradilocks.selftest.check_result import Found, published
from gradilocks.selftest.seat import Seat, meeting_place, part_of
from gradilocks.selftest.world import World

__all__ = ["GRACE", "START_LIMIT", "RankWorker", "joining"]

GRACE = 5.0
"""Seconds after torch's own time limit, so that its error, which says more, comes first."""
START_LIMIT = 120.0
"""Seconds for CUDA, NCCL and the first meeting of all ranks."""
_LAST_WORDS = 4000


class RankWorker:
    """The process that runs the checks of one rank; replaced whenever a check was not finished.

    Args:
        seat: of this rank.
        device: "cpu", "cuda", or "auto" for CUDA where there is some.
        limit: seconds for one check.
    """

    def __init__(self, seat: Seat, *, device: str, limit: float) -> None:
        self._seat, self._device, self._limit = seat, device, limit
        self._generation = 0
        self._process: Any = None
        self._pipe: Any = None
        made, words = tempfile.mkstemp(prefix="gradilocks-selftest-")
        os.close(made)
        self._words = Path(words)

    def start(self, waiting: Callable[[], None]) -> dict[str, Any]:
        """Begins a process; what it says of itself, or that it cannot."""
        self.end()
        self._generation += 1
        context: Any = multiprocessing.get_context(_way_to_start(self._device))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, self._seat, self._device, self._limit),
            kwargs={"generation": self._generation, "words": str(self._words)},
            daemon=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That torch's threads are not carried along.
            self._process.start()
        theirs.close()
        answer = self._answer(START_LIMIT + GRACE, waiting)
        return answer if isinstance(answer, dict) else {"refused": f"it {answer}"}

    def run(self, name: str, patience: float, waiting: Callable[[], None]) -> Found:
        """Runs one check.

        Args:
            name: of the check.
            patience: how many times the usual limit it may take.
            waiting: called now and then meanwhile.
        """
        began = time.monotonic()
        with suppress(OSError):
            self._pipe.send(name)
        answer = self._answer(self._limit * patience + GRACE, waiting)
        if isinstance(answer, Found):
            return answer
        taken = time.monotonic() - began
        hung = taken >= self._limit * patience
        where = _last_words(self._words)
        text = f"no end after {taken:.0f} s{where}" if hung else f"its process {answer}{where}"
        return Found([text], state="hung" if hung else "died", seconds=taken)

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def remove(self) -> None:
        """Ends the process, and leaves nothing behind."""
        self.end()
        self._words.unlink(missing_ok=True)

    def _answer(self, seconds: float, waiting: Callable[[], None]) -> Any:
        """What the process has sent; else how it ended, in words."""
        until = time.monotonic() + seconds + 2 * GRACE
        with suppress(EOFError, OSError):
            while time.monotonic() < until:
                if self._pipe.poll(0.1):
                    return self._pipe.recv()
                waiting()
            self._process.kill()
        self._process.join()
        code = self._process.exitcode
        if code < 0:
            with suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with {code}"


def _way_to_start(device: str) -> str:
    """Forked, a process has torch imported, but CUDA does not survive a fork that came after it.

    What a module of torch does to CUDA when it is imported is not known here. Elsewhere than on
    Linux a fork is not to be relied on at all.
    """
    without_gpus = device == "cpu" or (torch.version.cuda is None and torch.version.hip is None)
    return "fork" if sys.platform == "linux" and without_gpus else "spawn"


def _last_words(path: Path) -> str:
    """Where the process was when its clock rang, from the outermost call of ours inwards."""
    with suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
        main = text.rpartition("Current thread")[2] or text.rpartition("most recent call first")[2]
        found = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
        if found:
            at = " < ".join(f"{published(file)}:{line} ({name})" for file, line, name in found[:6])
            return f", in {at}"
    return ""


def _serve(
    pipe: Any, seat: Seat, device: str, limit: float, *, generation: int, words: str
) -> None:
    """The process: answers to the names of checks until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Who began it ends it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch's own, of what is suboptimal.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with open(words, "w", encoding="utf-8") as file:
        faulthandler.dump_traceback_later(START_LIMIT + GRACE, exit=True, file=file)
        try:
            world = World(seat.rank, seat.ranks, _device(seat, device))
            about = _about(world.device.type)
        except Exception as error:
            pipe.send({"refused": _in_words(error)})
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
        joins = joining(lambda world: _join(world, seat, limit, generation), limit)
        every = (joins, *checks_for(world.size, world.device.type))
        checks = {check.name: check for check in every}
        pipe.send(about)
        with suppress(EOFError, OSError):
            while True:
                check = checks[pipe.recv()]
                patience = limit * check.patience
                file.truncate(0)
                faulthandler.dump_traceback_later(patience + GRACE, exit=True, file=file)
                pipe.send(_found(check.run, world, patience))
                faulthandler.cancel_dump_traceback_later()
    # Not taken down in order: a group that has failed would wait once more.


def joining(join: Callable[[World], Found], limit: float) -> Check:
    """The first of all checks: the ranks meet in a process group, which may take its time."""
    return Check("the ranks meet", "start", join, patience=START_LIMIT / limit)


def _found(run: Callable[[World], Found], world: World, limit: float) -> Found:
    began = time.monotonic()
    try:
        found = run(world)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        found = Found([published(_in_words(error))], state="raised")
    found.seconds = time.monotonic() - began
    if found.state == "raised" and found.seconds >= limit:
        found.state = "hung"  # torch's own time limit has ended it.
    return found


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _device(seat: Seat, kind: str) -> torch.device:
    """Takes the device of this rank."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    _check_gpus(seat)
    here = torch.device("cuda", seat.local_rank)
    torch.cuda.set_device(here)
    return here


def _join(world: World, seat: Seat, limit: float, generation: int) -> Found:
    """Meets the other ranks in a process group."""
    cuda = world.device.type == "cuda"
    store, _ = meeting_place(seat, hosts=False, seconds=START_LIMIT)
    ours: dict[str, Any] = {"device_id": world.device} if cuda else {}
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=part_of(store, f"selftest ranks {seat.round} {generation}"),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=limit),
        **ours,
    )
    first = torch.ones((), device=world.device)
    dist.all_reduce(first)
    found = Found()
    if int(first) != world.size:
        found.problem(f"the sum of {world.size} ones over all ranks is {first.item():g}")
    return found


def _check_gpus(seat: Seat) -> None:
    there = torch.cuda.device_count()
    if not torch.cuda.is_available() or not there:
        raise ValueError("torch sees no GPU here. Take --device cpu, which runs over gloo.")
    if seat.local_rank >= there:
        raise ValueError(
            f"this is rank {seat.local_rank} of this machine, which has {there} "
            f"GPU{'s' if there > 1 else ''}, and NCCL needs one a rank. Start {there}: torchrun "
            f"--nproc-per-node {there} -m gradilocks selftest; or take --device cpu, which runs "
            "over gloo."
        )


def _about(kind: str) -> dict[str, Any]:
    """What the results of this rank depend on."""
    import importlib.metadata

    from gradilocks import kernels

    versions = versions_here()
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    hardware = hardware_here()
    if kind == "cuda":
        nccl: Any = torch.cuda.nccl
        versions["nccl"] = ".".join(map(str, nccl.version()))
        hardware["gpu"] = torch.cuda.get_device_name()
    return {
        "device": kind,
        "backend": "nccl" if kind == "cuda" else "gloo",
        "versions": versions,
        "hardware": hardware,
        "kernels": kernels.describe()[kind],
        "host_waits": "watched for" if kind == "cuda" else "not watched for: a CPU has none",
    }
