"""Jobs enter, News leaves as it happens: a pool of two processes that train one arm each at a time.

Every arm trains on one thread, so that its numbers depend on nothing but its seed; two arms side by
side then use two cores. The parent imports no torch: it answers at once, also to Ctrl-C.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType, ModuleType
from typing import Any

from gradilocks.demo.arms import Job, Result, Step
from gradilocks.errors import GradilocksError

MOST_WORKERS = 2
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class News:
    """What happened in a job: it began (neither), took a step, or is done."""

    job: Job
    step: Step | None = None
    result: Result | None = None


def work(jobs: Sequence[Job], *, workers: int | None = None) -> Generator[News, None, None]:
    """Has the jobs done, and tells about it. Closing the generator ends the processes.

    Args:
        jobs: in the order in which they are begun.
        workers: how many processes; by default one a core, two at most.

    Raises:
        GradilocksError: a job cannot be done, or a process has died.
    """
    waiting = list(enumerate(jobs))
    count = min(len(jobs), workers or min(MOST_WORKERS, _cores()))
    context = multiprocessing.get_context("spawn")  # A fork would carry the parent's threads along.
    steps: Any = context.SimpleQueue()
    pool = ProcessPoolExecutor(count, context, _prepare_worker, (steps,))
    running: dict[Future[Result], Job] = {}
    others = set(multiprocessing.active_children())
    processes: set[BaseProcess] = set()

    def begin() -> News:
        place, job = waiting.pop(0)
        running[pool.submit(_train, place, job)] = job
        return News(job)

    try:
        with _spawning():
            begun = [begin() for _ in range(count)]
            processes = set(multiprocessing.active_children()) - others
        yield from begun
        while running:
            # With a timeout: it is time to show the steps, and on Windows to hear Ctrl-C.
            done, _ = wait(running, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
            while not steps.empty():  # A job's steps are here before its result is.
                place, step = steps.get()
                yield News(jobs[place], step=step)
            for future in done:
                yield News(running.pop(future), result=future.result())
                if waiting:  # No sooner: a job that the pool has taken over cannot be called back.
                    yield begin()
            if any(process.exitcode is not None for process in processes):
                # The pool itself may not notice: its watch over the processes can begin before the
                # last of them is there (Python 3.11).
                raise BrokenProcessPool
    except BrokenProcessPool as error:
        _end(processes)
        pool.shutdown()
        codes = [process.exitcode for process in processes]
        # The pool has ended the others by SIGTERM.
        died = [code for code in codes if code not in (None, 0, -signal.SIGTERM)]
        raise GradilocksError(
            f"a process of the demo has ended by itself, with status "
            f"{(died or [-signal.SIGTERM])[0]:d}. If memory is short, train one arm at a time: "
            "gradilocks demo --arm fp32."
        ) from error
    finally:
        if running:
            _end(processes)
        pool.shutdown()


def _end(processes: set[BaseProcess]) -> None:
    """Ends the processes, whatever they do; a run file keeps what was done and says so."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + SECONDS_TO_END
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        process.kill()


@contextmanager
def _spawning() -> Iterator[None]:
    """Processes started inside never hear of Ctrl-C, and do not run the main script again.

    A terminal sends Ctrl-C to every process, but it is the parent's to handle: they are born with
    SIGINT blocked, and one that comes meanwhile reaches the parent at the end. And a spawned
    process imports its parent's ``__main__``, which these have no use for: a script that calls the
    command line without asking for its own name would call it again.
    """
    blocks = hasattr(signal, "pthread_sigmask")  # Windows has none.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else None
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cores() -> int:
    with suppress(AttributeError):  # Only Linux knows which cores are ours.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- in a worker ---------------------------------------------------------------------------------

_steps: Any = None
"""The queue on which this worker tells of its steps."""


def _prepare_worker(steps: Any) -> None:
    global _steps
    _steps = steps
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Where it could not be blocked.
    os.environ["OMP_NUM_THREADS"] = "1"  # Read when torch is imported.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed leaves no worker behind; the pool alone would not see to that."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _train(place: int, job: Job) -> Result:
    with warnings.catch_warnings():
        # torch says this, once, where there is no NumPy; the demo needs none.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from gradilocks.demo.training import train
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return train(job, lambda step: _steps.put((place, step)))
    except KeyboardInterrupt:
        # The pool would take this for the job's result and hand out the next one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Lets the run file be closed as an interrupted one; a second SIGTERM must not disturb that."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
