"""Jobs enter, News leaves as it happens: two processes that train one arm each at a time.

Every arm trains on one thread, so that its numbers depend on nothing but its seed; two arms side by
side then use two cores. The parent imports no torch: it answers at once, also to Ctrl-C.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradilocks
from gradilocks.demo.values import Job, Result, Step
from gradilocks.errors import GradilocksError

__all__ = ["News", "work"]

MOST_WORKERS = 2
SECONDS_TO_END = 5.0
_RUN = "import sys; from gradilocks.demo.worker import main; sys.exit(main())"


@dataclass(frozen=True)
class News:
    """What happened in a job: it began (neither), took a step, or is done."""

    job: Job
    step: Step | None = None
    result: Result | None = None


def work(jobs: Sequence[Job], *, workers: int | None = None) -> Generator[News, None, None]:
    """Has the jobs done, and tells about it.

    Args:
        jobs: in the order in which they are begun.
        workers: how many processes; by default one a core, two at most.

    Raises:
        GradilocksError: a job cannot be done, or a process has died.
    """
    waiting = list(jobs)
    inbox: queue.Queue[tuple[_Worker, str, Any]] = queue.Queue()
    crew: list[_Worker] = []
    try:
        for _ in range(min(len(jobs), workers or min(MOST_WORKERS, _cores()))):
            crew.append(_Worker(inbox))
        done = 0
        while done < len(jobs):
            try:
                # With a timeout, because a wait without one hears no Ctrl-C on Windows.
                worker, kind, what = inbox.get(timeout=0.2)
            except queue.Empty:
                continue
            if kind == "ended":
                raise GradilocksError(
                    f"a process of the demo has ended by itself, with status {what}. If memory is "
                    "short, train one arm at a time: gradilocks demo --arm fp32."
                )
            if kind == "error":
                raise GradilocksError(what)
            if kind == "step":
                yield News(worker.doing, step=Step(**what))
                continue
            if kind == "result":
                done += 1
                yield News(worker.doing, result=Result.from_plain(what))
            if waiting:
                worker.give(waiting.pop(0))
                yield News(worker.doing)
            else:
                worker.dismiss()
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """A process, and the thread that listens to it."""

    def __init__(self, inbox: queue.Queue[tuple[_Worker, str, Any]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
            encoding="utf-8",
            # Out of the terminal's reach: Ctrl-C comes here, and this process passes it on.
            start_new_session=True,
        )
        self._inbox = inbox
        self._dismissed = False
        self._job: Job | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def doing(self) -> Job:
        """The job that it was given last."""
        assert self._job is not None
        return self._job

    def give(self, job: Job) -> None:
        """Hands it a job."""
        assert self._process.stdin is not None
        self._job = job
        with suppress(OSError):  # It has died, and the inbox will say so.
            self._process.stdin.write(json.dumps(job.to_plain()) + "\n")
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Tells it that there is nothing more to do."""
        assert self._process.stdin is not None
        self._dismissed = True
        with suppress(OSError):
            self._process.stdin.close()

    def end(self) -> None:
        """Ends it, whatever it is doing; its run file keeps what was done and says how it ended."""
        if self._process.poll() is None and not self._dismissed:
            with suppress(OSError, ValueError):  # Windows has no such signal.
                self._process.send_signal(signal.SIGINT)
        self.dismiss()
        try:
            self._process.wait(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, what = json.loads(line)
            self._inbox.put((self, kind, what))
        status = self._process.wait()
        if not self._dismissed:
            self._inbox.put((self, "ended", status))


def _environment() -> dict[str, str]:
    """This process's, with this very package first, whatever the folder it was started in."""
    source = str(Path(gradilocks.__file__).parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _cores() -> int:
    with suppress(AttributeError):  # Only Linux knows which cores are ours.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
