"""Recorder: samples of steps in, a run file out; the one object of recording that has a state.

Steps are held until there are `flush_every` of them or `flush_seconds` have passed, sent to the
host together, and written when they have arrived: by the next step, or by a thread if none comes.
Whatever goes wrong on the way is said once, and training goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from gradilocks.record.batch import Batch, Held, Underway
from gradilocks.record.ending import closed_at_exit, how_it_ended, refuse_capture
from gradilocks.record.environment import command_here, hardware_here, rank_here, versions_here
from gradilocks.record.file import EXISTS, RunFile, Unwritable
from gradilocks.record.given import check_every, check_seconds, first_line, warn
from gradilocks.record.roster import info_of, is_whole, order_of
from gradilocks.record.rows import Known, step_of
from gradilocks.record.sample import Sample
from gradilocks.record.sinks import Sink, Sinks
from gradilocks.record.skips import SkipLog
from gradilocks.record.timer import Timer
from gradilocks.runfile import (
    VERSION,
    BadSteps,
    End,
    Header,
    Step,
    Trace,
    audit_line,
    end_line,
    optimizer_line,
    step_line,
    trace_line,
)
from gradilocks.step.gradients import every_parameter
from gradilocks.step.own_step import weakly

__all__ = ["Recorder"]


class Recorder:
    """Writes what every step of a training run leaves behind to a run file.

        step(index, sample):  hold it on the device
                              every flush_every steps or flush_seconds: send them, without a wait
                              as they arrive: write them, tell the sinks, log the skips

    `GradientControl(..., record="runs/a.jsonl")` makes one; make it yourself for other settings, or
    to record several controls in one file. Close it, or use it as a context manager; at the end of
    the process it closes itself. With several ranks only rank 0 writes.

    Args:
        path: the run file; its folder is made.
        flush_every: so many steps reach the host and the file together. A kill loses at most these.
        flush_seconds: steps are not kept back for longer than this, however few they are. If
            training stands still, those whose numbers have reached the host are written too.
        detail_every: every so many steps are recorded tensor by tensor, from the first; None: none.
        exists: what to do if the file is there: "refuse", "append" or "replace". What is no run
            file is neither continued nor overwritten.
        settings: what else the header is to tell; anything that JSON can hold.
        command: what ran; by default this process's command line.
        sinks: objects that hear of the run too, as they are in `gradilocks.record.Sink`.
        log: whether skipped steps are told through `logging`.
        all_ranks: whether the other ranks write too, to `a.rank1.jsonl` and so on.

    Raises:
        BadRunFile: the file is there already, or is a folder or no run file. One that cannot be
            written, for want of room or permission, is a warning: training goes on unrecorded.

    Example:
        >>> with Recorder("runs/a.jsonl", flush_every=10) as recorder:
        ...     control = GradientControl(optimizer, model=model, record=recorder)
        ...     train(control)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        flush_every: int = 50,
        flush_seconds: float = 5.0,
        detail_every: int | None = 10,
        exists: str = "refuse",
        settings: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
        sinks: Sequence[Sink] = (),
        log: bool = True,
        all_ranks: bool = False,
    ) -> None:
        self._file: RunFile | None = None  # First: whatever is refused below, `close` works.
        self._pid = os.getpid()
        check_every("flush_every", flush_every)
        check_seconds("flush_seconds", flush_seconds)
        if detail_every is not None:
            check_every("detail_every", detail_every)
        if exists not in EXISTS:
            raise ValueError(f"exists must be one of {', '.join(EXISTS)}, got {exists!r}.")
        self._detail_every = detail_every
        rank, ranks = rank_here()
        self._alone = ranks == 1
        self.path = Path(path)
        if all_ranks and rank:
            self.path = self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")
        self.steps = 0
        """How many steps have reached the file in this session; exact after `flush`."""
        self.skipped = 0
        """How many of them were skipped."""
        self.bad: dict[int, BadSteps] = {}
        """By the index of the optimizer: which of them had NaN or Inf, and whether that stayed."""
        self._sinks = Sinks(sinks, warn)
        self._known: list[Known] = []
        self._whose: list[Callable[[], Any]] = []
        self._underway = Underway(flush_every, flush_seconds)
        self._untold: deque[tuple[Batch, Sequence[Step]]] = deque()  # But written.
        self._timer = Timer(self._write_late, flush_seconds)
        self._skips = SkipLog() if log else None
        self._lock = threading.RLock()
        self._busy = False
        self._put_off: tuple[str, int, str | None] | None = None
        self._owed: list[str] = []  # Lines that later ones need, and that could not be written.
        self._has_warned = False
        if rank and not all_ranks:
            return
        self._header = Header(
            version=VERSION,
            started=time.time(),
            command=command_here() if command is None else tuple(map(str, command)),
            versions=versions_here(),
            hardware=hardware_here(),
            settings={
                "flush_every": flush_every,
                "detail_every": detail_every,
                **(settings or {}),
            },
            rank=rank,
            ranks=ranks,
        )
        first = first_line(self._header)  # Before the file is made: settings may be no JSON.
        try:
            file = RunFile(self.path, exists=exists)
            file.begin(first)
        except Unwritable as error:
            self.warn_once(f"{error} Training goes on, and nothing is recorded.")
            return
        before = file.before
        self._steps_before = {} if before is None else before.steps
        passed = 0.0 if before is None else before.time
        self._began = time.perf_counter() - passed
        self._file = file
        self._sinks.tell("open", self._header)
        closed_at_exit.add(self)

    def __repr__(self) -> str:
        return f"Recorder({str(self.path)!r}, recording={self.recording})"

    @property
    def recording(self) -> bool:
        """Whether steps are recorded: not after `close`, on other ranks, or in a forked process."""
        return self._file is not None and self._pid == os.getpid()

    def elapsed(self) -> float:
        """Seconds since the run began: the `time` of a step that is recorded now."""
        return time.perf_counter() - self._began if self._file is not None else 0.0

    def describe(self, **settings: Any) -> None:
        """Adds to the settings in the header, as long as nothing has followed it."""
        if not self.recording:
            return
        assert self._file is not None
        merged = {**settings, **self._header.settings}
        self._header = Header(**{**vars(self._header), "settings": merged})
        with self._working(), contextlib.suppress(OSError):
            self._file.begin_again(first_line(self._header))

    def add_optimizer(
        self,
        optimizer: Any,
        *,
        names: Mapping[Tensor, str] | None = None,
        ordered: bool = True,
    ) -> int:
        """Takes an optimizer in, before its first step; again if its parameters have changed.

        Args:
            optimizer: any object with `param_groups`.
            names: its parameters' names, in the model's order. Those that it lacks are named as
                the optimizer names them, and then the order is not known.
            ordered: False if `names` has them in another order than the model's. Without the order
                several bad gradients do not tell where the first of them arose.

        Returns:
            The index by which `step` knows it.
        """
        index = next((i for i, whose in enumerate(self._whose) if whose() is optimizer), None)
        if index is None:
            index = len(self._known)
            self._whose.append(weakly(optimizer))
        info = info_of(optimizer, index=index, names=names)
        if index < len(self._known) and self._known[index].info == info:
            return index
        done = self._steps_before.get(index, 0) if self.recording else 0
        order = order_of(optimizer, names)
        ordered = ordered and all(p in (names or {}) for p in every_parameter((optimizer,)))
        # Of several ranks' losses this one sees its own: another's may have made the gradients bad.
        whole = is_whole(optimizer) and self._alone
        if index < len(self._known):
            done = self._known[index].steps
            self.flush()  # Steps on their way are of the parameters as they were.
            self._known[index] = Known(info, order, ordered, whole, steps=done)
        else:
            self._known.append(Known(info, order, ordered, whole, steps=done))
        if self.recording:
            with self._working():
                self._write([optimizer_line(info)], ())
                self._sinks.tell("optimizer", info)
        return index

    def wants_detail(self, index: int) -> bool:
        """Whether the coming step of that optimizer is one to be recorded tensor by tensor."""
        if self._detail_every is None or not self.recording:
            return False
        return self._known[index].steps % self._detail_every == 0

    def step(self, index: int, sample: Sample) -> None:
        """Records one step, taken or skipped. Does not wait for the device.

        Args:
            index: of the optimizer.
            sample: what there is to tell.
        """
        if not self.recording:
            return
        refuse_capture()
        known = self._known[index]
        with self._working():
            try:
                detail = self.wants_detail(index)
                known.steps += 1
                now = self.elapsed()
                self._underway.hold(
                    Held(sample, index=index, step=known.steps, time=now, detail=detail)
                )
                if not sample.more:
                    self._underway.send_if_due()
                while (batch := self._underway.next(wait=False)) is not None:
                    self._take(batch)
                self._tell()
                self._timer.start()
            except Exception as error:
                self._stop(f"{type(error).__name__}: {error}")

    def trace(self, trace: Trace) -> None:
        """Writes down where a value first turned non-finite, at once."""
        if self.recording:
            with self._working():
                self._write([trace_line(trace)], ())

    def audit(self, plain: Mapping[str, Any]) -> None:
        """Writes down what `gradilocks.audit` found, as `Audit.to_plain()` has it, at once."""
        if self.recording:
            with self._working():
                self._write([audit_line(plain)], ())

    def flush(self) -> None:
        """Writes everything that was recorded. Waits for the device."""
        if not self.recording:
            return
        with self._working():
            try:
                self._underway.send()
                while (batch := self._underway.next()) is not None:
                    self._take(batch)
                self._tell()
                if self._skips is not None:
                    self._skips.settle()
            except Exception as error:
                self._stop(f"{type(error).__name__}: {error}")

    def close(self, *, status: str = "finished", exit: int = 0, error: str | None = None) -> None:
        """Writes everything, then how the run ended, and lets go of the file.

        Args:
            status: "finished", "error", "interrupted" or "exit".
            exit: the exit status.
            error: the last line of the traceback.
        """
        if not self.recording:
            return
        with self._lock:
            if self._busy:  # Called from a signal that came in the midst of a write.
                self._put_off = status, exit, error
                return
        self.flush()
        with self._working():
            end = End(self.elapsed(), status, exit, error)
            self._write([end_line(end)], ())
            self._sinks.tell("close", end)
            if self._skips is not None:
                self._skips.close()
            self._let_go()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(**how_it_ended(error))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Recorder is an open file and cannot be copied or pickled. Copy the GradientControl: "
            "its copy records nothing."
        )

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._lock:
            outer, self._busy = self._busy, True
            try:
                yield
            finally:
                self._busy = outer
        put_off = self._put_off
        if put_off is not None and not outer:
            self._put_off = None
            self.close(status=put_off[0], exit=put_off[1], error=put_off[2])

    def _take(self, batch: Batch) -> None:
        """Writes a batch; `_tell` comes after."""
        steps = [step_of(held, self._known[held.index]) for held in batch.unpack()]
        self._write([step_line(step) for step in steps], steps)
        self._untold.append((batch, steps))

    def _tell(self) -> None:
        """The log and the sinks hear of what was written, in the thread that trains."""
        while self._untold:
            batch, steps = self._untold.popleft()
            if self._skips is not None:
                for held, step in zip(batch.rows, steps, strict=True):
                    after = held.scalars["next_scale"]
                    self._skips.take(step, next_scale=after, more=held.more)
            for step in steps:
                self._sinks.tell("step", step)

    def _write_late(self) -> bool:
        """For the timer: writes what has reached the host; whether to come again.

        In a thread of its own: it gives way to the one that trains, calls no device, tells nobody,
        and drops nothing that a device knows of. What fails here, the other one meets again.
        """
        if self.recording and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(Exception):
                    while (batch := self._underway.first_here()) is not None:
                        self._put_late(batch)
                        self._underway.next()
            finally:
                self._lock.release()
        return self.recording

    def _put_late(self, batch: Batch) -> None:
        assert self._file is not None
        steps = [step_of(held, self._known[held.index]) for held in batch.read()]
        self._file.write([*self._owed, *map(step_line, steps)])
        self._count(steps)
        self._untold.append((batch, steps))

    def _write(self, lines: list[str], steps: Sequence[Step]) -> None:
        if self._file is None:
            return
        try:
            self._file.write([*self._owed, *lines])
        except OSError as error:
            self._owed += [] if steps else lines
            self.warn_once(
                f"{self.path} could not be written: {error.strerror or error}. Training goes on; "
                "what cannot be written is not recorded."
            )
            return
        self._count(steps)

    def _count(self, steps: Sequence[Step]) -> None:
        self._owed = []
        self.steps += len(steps)
        self.skipped += sum(step.skipped for step in steps)
        for step in steps:
            self.bad.setdefault(step.optimizer, BadSteps()).take(step)

    def _stop(self, why: str) -> None:
        """Something that should not have happened: training must not suffer from it."""
        self._underway.clear()
        self._untold.clear()
        self._let_go()
        self.warn_once(f"recording to {self.path} has stopped: {why}. Training goes on.")

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._timer.end()
        closed_at_exit.discard(self)

    def warn_once(self, message: str) -> None:
        """Says that something cannot be recorded, the first time that there is such a thing."""
        if not self._has_warned:
            self._has_warned = True
            warn(message)
