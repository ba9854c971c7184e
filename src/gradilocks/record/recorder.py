"""Recorder: samples of steps in, a run file out; the one object of recording that has a state.

Steps are held until there are `flush_every` of them or `flush_seconds` have passed, sent to the
host together, and written when they have arrived: by the next step, or by a thread if none comes.
Whatever goes wrong on the way is said once, and training goes on.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from gradilocks.eager import eager, users_line
from gradilocks.git_state import folder_of_main, git_state
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.ranks.all_parameters import HeldParameter
from gradilocks.record.batch import (
    Batch,
    Pending,
    PendingNumbers,
    PendingStep,
    RecordedOptimizer,
    StepQueue,
)
from gradilocks.record.environment import (
    checked_config,
    command_here,
    hardware_here,
    program_here,
    rank_here,
    versions_here,
)
from gradilocks.record.file_writer import EXISTS, RunFileWriter, Taken, Unwritable
from gradilocks.record.own_numbers import checked_numbers
from gradilocks.record.sample import Sample
from gradilocks.record.skip_log import SkipLog
from gradilocks.runfile import (
    VERSION,
    BadSteps,
    End,
    Header,
    Logged,
    OptimizerInfo,
    Precision,
    Resume,
    Step,
    Trace,
    audit_line,
    describe_error,
    end_line,
    fresh_file,
    header_line,
    log_line,
    losses_line,
    optimizer_line,
    precision_line,
    process_here,
    rank_file,
    resume_line,
    step_line,
    trace_line,
)
from gradilocks.step.own_step import weakly
from gradilocks.values import RecordingPlan

__all__ = ["LogSink", "Recorder", "ResumeSink", "Sink", "refuse_capture"]


@runtime_checkable
class Sink(Protocol):
    """Takes the records of one run: `open` first, `close` last.

    A sink may raise; whoever feeds it keeps that away from the training.
    """

    def open(self, header: Header) -> None:
        """The run begins."""

    def optimizer(self, info: OptimizerInfo) -> None:
        """An optimizer is about to take its first step."""

    def step(self, step: Step) -> None:
        """A step was taken or skipped."""

    def close(self, end: End | None) -> None:
        """The run ended; None if nobody knows how."""


@runtime_checkable
class ResumeSink(Protocol):
    """A sink that hears of a run that goes on from an earlier step; one that does not hears of the
    steps alone, whose numbers go back there."""

    def resume(self, resume: Resume) -> None:
        """An optimizer goes on from an earlier step."""


@runtime_checkable
class LogSink(Protocol):
    """A sink that takes the user's own numbers too; one that does not hears of the rest."""

    def log(self, logged: Logged) -> None:
        """Numbers were handed to `log`."""


class Recorder:
    """Writes what every step of a training run leaves behind to a run file.

        step(index, sample):  hold it on the device
                              every flush_every steps or flush_seconds: send them, without a wait
                              as they arrive: write them, tell the sinks, log the skips

    `GradientControl(..., record="runs/a.jsonl")` makes one; make it yourself for other settings, or
    to record several controls in one file. Close it, or use it as a context manager; at the end of
    the process it closes itself.

    With several ranks only rank 0 writes, whether the others have a recorder or not. Where they
    hold the model together, it writes what all of them found: losses and culprits travel in the
    step's own collective, tensors by two more at the steps that are recorded so (64 bytes a
    parameter of the model). Ranks of DistributedDataParallel tell each other their losses at every
    `flush_every`-th step (16 bytes a step). No host waits, and `close` waits for no rank.

    Args:
        path: the run file; its folder is made. If it ends with a slash, or is a folder, the file
            gets a name of its own in there, of the script and the time, as `gradilocks run` gives
            it: 'runs/' becomes 'runs/train-20261116-124023.jsonl'.
        flush_every: so many steps reach the host and the file together. A kill loses at most these.
        flush_seconds: steps are not kept back for longer than this, however few they are. If
            training stands still, those whose numbers have reached the host are written too.
        detail_every: every so many steps are recorded tensor by tensor, from the first; None: none.
        exists: what to do if the file is there: "refuse", "append" or "replace". What is no run
            file is neither continued nor overwritten. "refuse" takes the place of a run that has
            ended without a step and without numbers of its own. In a folder the file is new.
        settings: what else the header is to tell; anything that JSON can hold.
        config: what the run was made from, as `vars(args)`: a mapping of numbers, text, lists and
            mappings. It stands in the header, beside the commit of the code.
        command: what ran; by default this process's command line.
        sinks: objects that hear of the run too, as they are in `gradilocks.record.Sink`.
        log: whether skipped steps are told through `logging`.
        all_ranks: whether the other ranks write too, what each of them saw itself, to
            `a.rank1.jsonl` and so on. They need the name of a file for that.

    Raises:
        BadRunFile: the file is there already, or is no run file. One that cannot be
            written, for want of room or permission, is a warning: training goes on unrecorded.

    Example:
        >>> with Recorder("runs/a.jsonl", flush_every=10) as recorder:
        ...     control = GradientControl(optimizer, model=model, record=recorder)
        ...     train(control)
    """

    _log_on = "all"
    """Which data-parallel ranks log losses that are NaN or Inf, as a RecordingPlan has it."""

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
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._file: RunFileWriter | None = None  # First: whatever is refused below, `close` works.
        self._pid = os.getpid()
        _check_every("flush_every", flush_every)
        if isinstance(flush_seconds, bool) or not isinstance(flush_seconds, (int, float)):
            came = type(flush_seconds).__name__
            raise TypeError(f"flush_seconds must be a number of seconds, got {came}.")
        if not 0 < flush_seconds < math.inf:
            raise ValueError(f"flush_seconds must be more than 0 and finite, got {flush_seconds}.")
        if detail_every is not None:
            _check_every("detail_every", detail_every)
        if exists not in EXISTS:
            raise ValueError(f"exists must be one of {', '.join(EXISTS)}, got {exists!r}.")
        config = checked_config(config)
        self._flush_every, self._detail_every, self._log = flush_every, detail_every, log
        rank, ranks = rank_here()
        self.rank = rank
        """Which rank this is."""
        self._alone = ranks == 1
        self.path = Path(path)
        """The run file. Of a rank that writes none, and was given a folder, that folder."""
        in_folder = _is_folder(path)
        if in_folder and all_ranks:
            raise ValueError(
                f"all_ranks needs the name of a file, so that all ranks use one, got {str(path)!r}."
            )
        if all_ranks:
            self.path = rank_file(self.path, rank)
        self.steps = 0
        """How many steps have reached the file in this session; exact after `flush`."""
        self.skipped = 0
        """How many of them were skipped."""
        self.logs = 0
        """How often numbers of the user's own were handed over."""
        self.bad: dict[int, BadSteps] = {}
        """By the index of the optimizer: which of them had NaN or Inf, and whether that stayed."""
        self.knows_precision = False
        """Whether the file says in which formats the run computes."""
        self.end_facts: Mapping[str, Any] = {}
        """What else the End is to tell, as it names it; set by whoever knows."""
        self._sinks = list(sinks)
        _check_sinks(self._sinks)
        self._optimizers: list[RecordedOptimizer] = []
        self._latest: int | None = None  # The number of the last step, whoever took it.
        self._queue = StepQueue(flush_every, flush_seconds)
        self._arrived: deque[_Arrived] = deque()  # On the host, not written yet.
        self._written: deque[_Arrived] = deque()  # Sinks and log: not told yet.
        self._read_late: list[Batch] = []  # By the timer, which must not let go of them.
        self._turns = 0  # Of the timer.
        self._timer = _Timer(self._write_late, flush_seconds / _TURNS)
        self._skips = SkipLog() if log else None
        self._lock = threading.RLock()
        self._busy = False
        self._close_after: dict[str, Any] | None = None
        self._unwritten: list[str] = []  # For want of room; later lines need them.
        self._has_warned = False
        if rank and not all_ranks:
            return
        self._header = Header(
            version=VERSION,
            started=time.time(),
            command=command_here() if command is None else tuple(map(str, command)),
            versions=versions_here(),
            hardware=hardware_here(),
            settings={"flush_every": flush_every, "detail_every": detail_every, **(settings or {})},
            rank=rank,
            ranks=ranks,
            config=config,
            git=self._git_state(),
            process=process_here(),
        )
        first = _header_line(self._header)  # Before the file is made: settings may be no JSON.
        try:
            if in_folder:
                self._file = self._open_in(self.path, first)
            else:
                self._file = RunFileWriter(self.path, exists=exists, header=first)
        except Unwritable as error:
            self.warn_once(f"{error} Training goes on, and nothing is recorded.")
            return
        self._began = time.perf_counter() - self._file.seconds_before
        self._tell_sinks("open", self._header)
        _open_recorders.add(self)

    def _open_in(self, folder: Path, header: str) -> RunFileWriter:
        """A new file in that folder; another, if another process takes the name meanwhile."""
        while True:
            self.path = fresh_file(folder, program_here())
            with contextlib.suppress(Taken):
                return RunFileWriter(self.path, exists="refuse", header=header)

    def __repr__(self) -> str:
        return f"Recorder({str(self.path)!r}, recording={self.recording})"

    @property
    def recording(self) -> bool:
        """Whether steps are recorded: not after `close`, on other ranks, or in a forked process."""
        return self._file is not None and self._pid == os.getpid()

    def elapsed(self) -> float:
        """Seconds since the run began: the `time` of a step that is recorded now."""
        return time.perf_counter() - self._began if self._file is not None else 0.0

    def _git_state(self) -> Mapping[str, Any] | None:
        return git_state(folder_of_main(), Path.cwd())

    def describe(self, **settings: Any) -> None:
        """Adds to the settings in the header, as long as nothing has followed it."""
        if not self.recording:
            return
        assert self._file is not None
        self._header = replace(self._header, settings={**settings, **self._header.settings})
        with self._working(), contextlib.suppress(OSError):
            self._file.replace_header(_header_line(self._header))

    def add_optimizer(
        self,
        optimizer: Any,
        *,
        names: Mapping[Tensor, str] | None = None,
        ordered: bool = True,
        spread: Sequence[HeldParameter] | None = None,
    ) -> int:
        """Takes an optimizer in, before its first step; again if its parameters have changed.

        Args:
            optimizer: any object with `param_groups`.
            names: its parameters' names, in the model's order. Those that it lacks are named as
                the optimizer names them, and then the order is not known.
            ordered: False if `names` has them in another order than the model's. Without the order
                several bad gradients do not tell where the first of them arose.
            spread: its parameters on all ranks, where several hold the model.

        Returns:
            The index by which `step` knows it.
        """
        before = next((each for each in self._optimizers if each.optimizer() is optimizer), None)
        index = len(self._optimizers) if before is None else before.info.index
        steps = self._steps_before(index)
        made = RecordedOptimizer(
            optimizer,
            index=index,
            names=names or {},
            ordered=ordered,
            alone=self._alone,
            rank=self.rank,
            steps=steps if before is None else before.steps,
            spread=spread,
        )
        if before is None:
            self._optimizers.append(made)
        elif before.info == made.info:
            return index
        else:
            made.stepped = before.stepped
            self.flush()  # Steps on their way are of the parameters as they were.
            self._optimizers[index] = made
        if self.recording:
            with self._working():
                self._write([optimizer_line(made.info)])
                self._tell_sinks("optimizer", made.info)
        return index

    def replace_optimizer(self, before: Any, after: Any) -> None:
        """Takes an optimizer for one that it was told of, whose steps it goes on with."""
        for each in self._optimizers:
            if each.optimizer() is before:
                each.optimizer = weakly(after)

    def plan(self, index: int | None) -> RecordingPlan:
        """What it needs of the other ranks for the steps to come of that optimizer.

        Args:
            index: None for the first optimizer that it will be told of.
        """
        steps = 0
        if index is not None:
            steps = self._optimizers[index].steps
        else:
            steps = self._steps_before(len(self._optimizers))
        return RecordingPlan(
            self._flush_every, self._detail_every, steps, self._log_on if self._log else "none"
        )

    def _steps_before(self, index: int) -> int:
        return 0 if self._file is None else self._file.steps_before.get(index, 0)

    def last_step(self, optimizer: Any) -> int:
        """The number of its last step, by which it goes on; of one that it has not been told of,
        as if it were the next."""
        for each in self._optimizers:
            if each.optimizer() is optimizer:
                return each.steps
        return self._steps_before(len(self._optimizers))

    def latest_step(self) -> int:
        """The number of the last step, whoever took it; 0 if there is none."""
        if self._latest is None and self._file is not None:
            return max(self._file.steps_before.values(), default=0)
        return self._latest or 0

    def resume(self, index: int, *, counted: int, loaded: int | None = None) -> None:
        """An optimizer goes on, with its next step, as a control that counts steps itself has it.

        Its steps are numbered by the control's count, as far as that fits what the file holds: a
        control that has loaded the state of a checkpoint goes on after the checkpoint's step, and
        the steps after that one that are in the file are superseded, which a line says. One that
        has loaded none goes on after the last step in the file.

        Args:
            index: of the optimizer.
            counted: how many steps of it the control has counted.
            loaded: how many it had counted when it loaded a state; None if it has loaded none.
        """
        if not self.recording:
            return
        assert self._file is not None
        optimizer = self._optimizers[index]
        resumes = self._file.resumes
        last = optimizer.steps
        place = _number_of(counted if loaded is None else loaded, index, resumes)
        if loaded is None:
            now = place = max(place, last)
        else:
            now = place + counted - loaded
        goes_back = now != last or place != now
        renumbers = _number_of(counted, index, resumes) != now
        if optimizer.stepped and (goes_back or renumbers):
            self.flush()  # What was recorded before stands before the line.
            own = counted if loaded is None else loaded
            made = Resume(index, place, self.elapsed(), own)
            resumes.append(made)
            with self._working():
                self._write([resume_line(made)])
                if self._skips is not None:
                    self._skips.resume()
                self.bad.pop(index, None)
                self._tell_sinks("resume", made)
        optimizer.steps = self._latest = now

    def wants_detail(self, index: int) -> bool:
        """Whether the coming step of that optimizer is one to be recorded tensor by tensor."""
        every = self._detail_every
        if every is None or self._file is None:
            return False
        return self._optimizers[index].steps % every == 0

    def step(self, index: int, sample: Sample) -> None:
        """Records a step of the optimizer with that index, taken or skipped; does not wait."""
        if not self.recording:
            return
        refuse_capture()
        try:
            with self._lock:  # Against the timer alone: nothing is on its way to the file yet.
                optimizer = self._optimizers[index]
                detail = self.wants_detail(index)
                if sample.spread is not None:  # All ranks had to know beforehand.
                    detail = sample.spread.shared is not None
                optimizer.steps, optimizer.stepped = optimizer.steps + 1, True
                self._latest = number = optimizer.steps
                now = time.perf_counter() - self._began
                busy = self._queue.hold(
                    PendingStep(sample, index=index, step=number, time=now, detail=detail)
                )
                if not self._timer.started:
                    self._timer.start()
            if busy or self._arrived or self._written:
                with self._working():
                    self._queue.send_if_due()
                    self._write_batches(wait=False)
        except Exception as error:
            self._stop(error)

    @eager
    def log(
        self,
        values: Mapping[str, object] | None = None,
        /,
        *,
        step: int | None = None,
        **more: object,
    ) -> None:
        """Records numbers of your own: a validation loss, an accuracy; does not wait.

        Args:
            values: names and numbers, for names that are no Python names, as "val/loss".
            step: the step that they belong to. If None the last one that was recorded: of several
                optimizers, that of the one that stepped last.
            more: names and numbers: Python's, NumPy's, or tensors of one element.

        Raises:
            TypeError: a name is no text, or a value is no number.
            ValueError: a tensor of several elements, a name that cannot be shown, or given twice.

        Example:
            >>> recorder.log(val_loss=0.31, accuracy=0.92)  # doctest: +SKIP
        """
        numbers = checked_numbers(values, more, step=step)
        if not self.recording:
            return
        refuse_capture()
        if step is None:
            step = self.latest_step()
        with self._working():
            try:
                self._queue.hold(PendingNumbers(numbers, step=int(step), time=self.elapsed()))
                self.logs += 1
                self._queue.send_if_due()
                self._write_batches(wait=False)
                self._timer.start()
            except Exception as error:
                self._stop(error)

    def precision(self, formats: Sequence[str]) -> None:
        """Writes down in which formats a loss was computed, if that is known and nobody has."""
        if formats and not self.knows_precision and self.recording:
            self.knows_precision = True
            with self._working():
                self._write([precision_line(Precision(tuple(formats)))])

    def trace(self, trace: Trace) -> bool:
        """Writes down where a value first turned non-finite, at once.

        Returns:
            Whether it also logs it: after the step that it was found in, when that has arrived.
        """
        if not self.recording:
            return False
        with self._working():
            self._write([trace_line(trace)])
            if self._skips is not None:
                self._skips.trace(trace)
        return self._skips is not None

    def audit(self, plain: Mapping[str, Any]) -> None:
        """Writes down what `gradilocks.audit` found, as `Audit.to_plain()` has it, at once."""
        if self.recording:
            with self._working():
                self._write([audit_line(plain)])

    def flush(self) -> None:
        """Writes everything that was recorded. Waits for the device."""
        if not self.recording:
            return
        with self._working():
            try:
                self._queue.send()
                self._write_batches(wait=True)
                if self._skips is not None and not self._awaits_ranks():
                    self._skips.settle()
            except Exception as error:
                self._stop(error)

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
                self._close_after = {"status": status, "exit": exit, "error": error}
                return
        self.flush()
        with self._working():
            end = End(self.elapsed(), status, exit, error, **self.end_facts)
            self._write([end_line(end)])
            self._tell_sinks("close", end)
            if self._skips is not None:
                self._skips.close()
            self._let_go()

    def warn_once(self, message: str) -> None:
        """Says that something cannot be recorded, the first time that there is such a thing."""
        if not self._has_warned:
            self._has_warned = True
            _warn(message)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(**_how_it_ended(error))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Recorder is an open file and cannot be copied or pickled. Copy the GradientControl: "
            "its copy records nothing."
        )

    def _working(self) -> contextlib.AbstractContextManager[None]:
        return _Working(self)

    def _stop(self, error: Exception) -> None:
        """Ends the recording at what should not have happened: training must not suffer from it."""
        self._queue.clear()
        self._arrived.clear()
        self._written.clear()
        self._let_go()
        self.warn_once(
            f"recording to {self.path} has stopped: {type(error).__name__}: {error}. Training goes "
            "on."
        )

    def _write_batches(self, *, wait: bool) -> None:
        """Writes the batches that have arrived, or all; then the log and the sinks hear of them."""
        self._read_late.clear()
        while (batch := self._queue.next(wait=wait)) is not None:
            self._take(batch.unpack())
        ready = [self._arrived.popleft() for _ in range(self._settled())]
        if ready:
            self._write(_lines_of(ready), _steps_of(ready))
            self._written += ready
        while self._written:  # Also what was written late: they are told by the thread that trains.
            pending, record = self._written.popleft()
            if isinstance(pending, PendingNumbers):
                self._tell_sinks("log", record)
                continue
            assert isinstance(record, Step)
            if self._skips is not None:
                after = pending.scalars.get("next_scale")
                self._skips.take(record, next_scale=after, more=pending.more)
            self._tell_sinks("step", record)

    def _write_late(self) -> bool:
        """For the timer: writes what has reached the host; whether to come again.

        In a thread of its own: it gives way to the one that trains, calls no device, tells nobody,
        and drops nothing that a device knows of. What fails here, the other one meets again. What
        has left a device is written at every turn, what is held on the host at every fifth.
        """
        self._turns += 1
        if self.recording and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(Exception):
                    held = self._turns % _TURNS == 0
                    while (batch := self._queue.first_here(also_held=held)) is not None:
                        self._take(batch.read())
                        self._read_late.append(batch)
                        self._queue.next()
                    ready = list(islice(self._arrived, self._settled()))
                    if ready:
                        self._append(_lines_of(ready), _steps_of(ready))
                        self._written += ready
                        for _ in ready:
                            self._arrived.popleft()
            finally:
                self._lock.release()
        return self.recording

    def _take(self, arrived: Sequence[Pending]) -> None:
        """Takes steps, and numbers of the user's own, that have reached the host."""
        for each in arrived:
            if isinstance(each, PendingNumbers):
                self._arrived.append((each, each.to_logged()))
            else:
                self._arrived.append((each, each.to_step(self._optimizers[each.index])))

    def _settled(self) -> int:
        """How many of the steps in `_arrived`, from the first, are as they are to be written."""
        return len(self._arrived)

    def _awaits_ranks(self) -> bool:
        """Whether steps wait for what other ranks tell; what was found of them is told after."""
        return False

    def _write(self, lines: list[str], steps: Sequence[Step] = ()) -> None:
        """Adds lines to the file, and counts their steps; what cannot be written is a warning."""
        if self._file is None:
            return
        try:
            self._append(lines, steps)
        except OSError as error:
            self._unwritten += [] if steps else lines
            self.warn_once(
                f"{self.path} could not be written: {error.strerror or error}. Training goes on; "
                "what cannot be written is not recorded."
            )

    def _append(self, lines: list[str], steps: Sequence[Step]) -> None:
        assert self._file is not None
        self._file.write([*self._unwritten, *lines])
        self._unwritten = []
        self.steps += len(steps)
        self.skipped += sum(step.skipped for step in steps)
        for step in steps:
            self.bad.setdefault(step.optimizer, BadSteps()).take(step)

    def _tell_sinks(self, method: str, record: Any) -> None:
        """Calls one method of every sink with a record; a sink that raises hears nothing more."""
        for sink in list(self._sinks):
            if not isinstance(sink, _OPTIONAL.get(method, object)):
                continue
            try:
                getattr(sink, method)(record)
            except Exception as error:
                self._sinks.remove(sink)
                _warn(
                    f"the sink {type(sink).__name__} raised {type(error).__name__}: {error}. It "
                    "hears nothing more; recording and training go on."
                )

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._timer.end()
        _open_recorders.discard(self)


class _Working:
    """Keeps other threads out, and puts off a `close` that a signal asks for meanwhile.

    A class, and no generator: it is entered at every step, in half the time.
    """

    __slots__ = ("_outer", "_recorder")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder._lock.acquire()
        self._outer, recorder._busy = recorder._busy, True

    def __exit__(self, *error: object) -> None:
        recorder = self._recorder
        recorder._busy = self._outer
        recorder._lock.release()
        close_after = recorder._close_after
        if close_after is not None and not self._outer and error[0] is None:
            recorder._close_after = None
            recorder.close(**close_after)


_OPTIONAL: Mapping[str, type] = {"log": LogSink, "resume": ResumeSink}
"""By the name of a method that not every sink has: those that do."""
_Arrived = tuple[Pending, Step | Logged]
_TURNS = 5
"""How often the timer looks within `flush_seconds`."""


class _Timer:
    """Calls a method every few seconds, in a thread, until it returns False or its object is gone.

    For a recorder whose training stands still: what it holds should be in the file before somebody
    kills the process. The thread is none of `threading`'s, so a script that waits for all threads
    of its own does not wait for this one, and the process ends without it. A forked process has
    none.

    Args:
        act: a bound method; its object is not kept alive.
        seconds: between two calls.
    """

    def __init__(self, act: Callable[[], bool], seconds: float) -> None:
        self._act = weakref.WeakMethod(act)
        self._seconds = min(seconds, _thread.TIMEOUT_MAX)
        self._stop = _thread.allocate_lock()  # Held by whoever may still be called.
        self.started = False

    def start(self) -> None:
        """Begins, unless it has begun already."""
        if not self.started:
            self.started = True
            self._stop.acquire()
            with contextlib.suppress(RuntimeError):  # No room for a thread: nothing is lost by it.
                _thread.start_new_thread(_run_timer, (self._act, self._seconds, self._stop))

    def end(self) -> None:
        """Lets the thread go, now rather than at its next turn."""
        with contextlib.suppress(RuntimeError):  # It was not running.
            self._stop.release()


def _run_timer(
    act: weakref.WeakMethod[Callable[[], bool]], seconds: float, stop: _thread.LockType
) -> None:
    while not stop.acquire(timeout=seconds):
        method = act()
        if method is None or not method():
            return
        del method


def refuse_capture() -> None:
    """Raises while a CUDA graph is captured: its replays would tell nobody."""
    if capturing():
        raise RuntimeError(
            "a step cannot be recorded while a CUDA graph is captured: a replay would not tell of "
            "itself. Record without the graph, or capture a GradientControl without record=."
        )


def _lines_of(ready: Sequence[_Arrived]) -> list[str]:
    """The lines of steps, of what other ranks have told with them, and of the user's numbers."""
    lines = []
    for pending, record in ready:
        if isinstance(record, Logged):
            lines.append(log_line(record))
            continue
        lines.append(step_line(record))
        losses = pending.losses_of_ranks() if isinstance(pending, PendingStep) else None
        if losses is not None:
            lines.append(losses_line(losses))
    return lines


def _number_of(counted: int, index: int, resumes: Sequence[Resume]) -> int:
    """Which number in the file a step has that a control counts as `counted`.

    The same, unless the file says that a control which had counted otherwise went on in it. Of
    several that might be meant, the last.
    """
    for each in reversed(resumes):
        if each.optimizer == index and each.counted is not None and each.counted <= counted:
            return counted - each.counted + each.step
    return counted


def _steps_of(ready: Sequence[_Arrived]) -> list[Step]:
    return [record for _, record in ready if isinstance(record, Step)]


def _check_every(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def _check_sinks(sinks: Sequence[Sink]) -> None:
    methods = ("open", "optimizer", "step", "close")
    for sink in sinks:
        missing = [name for name in methods if not callable(getattr(sink, name, None))]
        if missing:
            raise TypeError(
                f"a sink needs the methods {', '.join(methods)}; {type(sink).__name__} has no "
                f"{', '.join(missing)}."
            )


def _is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path names the folder of a run file, and not the file."""
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path of a run file is empty. Expected one such as 'runs/a.jsonl'.")
    return text.endswith((os.sep, os.altsep or os.sep)) or os.path.isdir(text)


def _header_line(header: Header) -> str:
    try:
        return header_line(header)
    except (TypeError, ValueError) as error:
        raise TypeError(f"settings must be what JSON can hold: {error}.") from error


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=users_line())


def _how_it_ended(error: BaseException | None) -> dict[str, Any]:
    """The arguments of `close` for what ended a run."""
    if error is None:
        return {"status": "finished", "exit": 0, "error": None}
    told = describe_error(error)
    if isinstance(error, KeyboardInterrupt):
        return {"status": "interrupted", "exit": 130, "error": told}
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return {"status": "exit" if code else "finished", "exit": code, "error": None}
    return {"status": "error", "exit": 1, "error": told}


_open_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes the recorders that nobody has closed, when the process ends."""
    # What ended the process, if it was an exception that nobody caught.
    ended = _how_it_ended(getattr(sys, "last_value", None))
    for recorder in list(_open_recorders):
        recorder.close(**ended)
