"""A script's losses, clips and steps enter as StepEvents; Samples for the Recorder leave.

Nothing waits for a device, nothing that the script can see changes, and a failure of ours ends the
recording and not the script: whatever listens to it has a Guard around it.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from operator import is_not
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from gradilocks import runfile
from gradilocks._torch import unseen_by_modes
from gradilocks.dropin import GradScaler
from gradilocks.errors import BadRunFile
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.names import Names, name_parameters, prefixed
from gradilocks.observe.between_steps import Losses, parameters_of
from gradilocks.observe.data_wait import DataWait
from gradilocks.observe.gradient_reader import (
    ClipEffect,
    ClippedGradients,
    GradientReader,
    Reading,
    WatchedGradients,
)
from gradilocks.observe.process_end import SignalsHeld
from gradilocks.observe.rank_parts import RankParts, letter_of, step_of_all
from gradilocks.observe.rank_post import RankPost
from gradilocks.observe.script_models import are_whole, owners_of
from gradilocks.ranks.layout import has_other_ranks
from gradilocks.record import Recorder, Sample, Weights
from gradilocks.record.batch import Pending, PendingNumbers, PendingStep, RecordedOptimizer
from gradilocks.record.environment import rank_here
from gradilocks.record.file_writer import RunFileWriter
from gradilocks.record.journal import Journal
from gradilocks.step.events import Clip, Step, StepListener
from gradilocks.step.half_sgd import hardly_steps
from gradilocks.step.table import every_parameter, parameter_list

__all__ = ["Guard", "ScriptRecorder", "StepRecorder"]

_logger = logging.getLogger("gradilocks")


class Guard:
    """Does our own work so that the script notices nothing of it, nor of its failure.

    Args:
        on_failure: told of the first error, after which nothing is done any more.
        after_failure: called from then on whenever something was to be done; may raise.

    Attributes:
        closed: whether nothing is done any more.
        failed: whether that is so because something has failed.
    """

    def __init__(
        self,
        on_failure: Callable[[Exception], None],
        after_failure: Callable[[], None] | None = None,
    ) -> None:
        self._on_failure, self._after_failure = on_failure, after_failure
        self._pid = os.getpid()
        self.closed = self.failed = False

    def __call__(self, act: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Calls `act` with these arguments; a signal that comes meanwhile waits for its end."""
        with SignalsHeld():
            self.in_memory(act)(*args, **kwargs)

    def in_memory(self, *acts: Callable[..., object]) -> Callable[..., None]:
        """What calls each of `acts` so, one after another, with the arguments that it is given.

        A signal may come in its midst, as it may in what the script has called: to hold signals
        takes longer than most of what is done. Who writes to a file holds them meanwhile. Once for
        all of them: to begin and to end takes as long.
        """

        def act_all(*args: Any, **kwargs: Any) -> None:
            if not (self.closed or os.getpid() != self._pid or capturing()):
                with unseen_by_modes():
                    try:
                        for act in acts:
                            act(*args, **kwargs)
                    except Exception as error:
                        self.closed = self.failed = True
                        self._on_failure(error)
            if self.failed and self._after_failure is not None:
                self._after_failure()

        return act_all

    def around(self, listeners: Sequence[StepListener]) -> StepListener:
        """Hears what any of `listeners` wants to hear, and hands it on to them, in their order."""
        guarded = StepListener()
        for name, unheard in vars(StepListener).items():
            hear = [
                getattr(each, name)
                for each in listeners
                if callable(unheard) and getattr(type(each), name) is not unheard
            ]
            if hear:
                setattr(guarded, name, self.in_memory(*hear))
        return guarded


_OF_RECORD = ("norm", "nan", "inf")
"""What is told of a step by what was found in its gradients; a script decides all else."""
_PATIENCE = 15.0
"""Seconds that a step waits on the host of rank 0 for what others tell of it. They tell it when
their recorders' batches are due, every 5 seconds or after as many steps, and at once on a CPU."""
_FAREWELL = 5.0
"""Seconds likewise when the script has ended."""


class _NoFile(RunFileWriter):
    """In place of the run file, on ranks that have none.

    Ranks number their steps alike: if rank 0 goes on in a file, this reads there from which on.
    """

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        self._path, self.steps_before, self.seconds_before = path, {}, 0.0
        self.resumes = []
        if goes_on:
            with suppress(OSError, BadRunFile):  # It may be on another machine.
                self._read_before()

    def write(self, lines: Sequence[str]) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is let go."""


class _WaitingStep(NamedTuple):
    """A step of this rank that may become one of all ranks."""

    pending: PendingStep
    own: runfile.Step
    optimizer: RecordedOptimizer
    number: int
    """Counted from the first of this session, as on every rank."""
    since: float


class _WithoutSignals:
    """Around what writes to the file: a signal that comes meanwhile ends the script after it."""

    __slots__ = ("_inner", "_signals")

    def __init__(self, inner: AbstractContextManager[None]) -> None:
        self._inner, self._signals = inner, SignalsHeld()

    def __enter__(self) -> None:
        self._signals.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._signals.__exit__()


class ScriptRecorder(Recorder):
    """Closed by the end of the session alone, which knows how the script ended.

    A Recorder closes itself when Python begins to leave; threads and `atexit` functions of the
    script may still step an optimizer then.

    Samples with a RankPart are told to rank 0, which writes them down as all ranks have told them;
    those of which not all have told in time as its own.
    """

    _log_on = "first"  # The ranks of torchrun share a terminal.

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        all_ranks: bool,
        git: Mapping[str, Any] | None,
        **settings: Any,
    ) -> None:
        self._git = git
        super().__init__(path, all_ranks=all_ranks, **settings)
        self.writes = self._file is not None
        """Whether there is a file. Other ranks record to tell the first one of it."""
        self.partly = 0
        """How many steps are of what this rank holds of a model that is, or may be, on several."""
        self.told: set[str] = set()
        """What traces have found, as far as the log tells it."""
        self.untold = False
        """Whether some are so because ranks have not told of them, and not because nobody says how
        ranks hold the model."""
        self._post: RankPost | None = None
        # Steps, for what other ranks tell of them, and numbers that came after those.
        self._waiting: deque[_WaitingStep | tuple[PendingNumbers, runfile.Logged]] = deque()
        self._letters: dict[tuple[int, int], dict[int, Any]] = {}  # By optimizer and step: of whom.
        self._told: dict[int, int] = {}  # By optimizer: up to which step nothing waits any more.
        self._heard: set[int] = set()
        self._left: set[int] = set()
        self._patience = _PATIENCE
        if self.rank and not all_ranks:
            goes_on = settings.get("exists") == "append"
            self._file = _NoFile(self.path, goes_on=goes_on)
            self._began = time.perf_counter()

    def _git_state(self) -> Mapping[str, Any] | None:
        return self._git  # As it was before the script began.

    def _working(self) -> AbstractContextManager[None]:
        return _WithoutSignals(super()._working())

    def begin_post(self) -> None:
        """The ranks are about to tell of their first step: opens what they tell it by."""
        if self._post is None:
            self._post = RankPost(*rank_here(), "steps")

    def _take(self, arrived: Sequence[Pending]) -> None:
        assert self._file is not None
        letters = []
        for pending in arrived:
            if isinstance(pending, PendingNumbers):
                behind = self._waiting if self._waiting else self._arrived
                behind.append((pending, pending.to_logged()))
                continue
            optimizer = self._optimizers[pending.index]
            own = pending.to_step(optimizer)
            if pending.part is None and not self._waiting:  # Nothing stands before it.
                self.partly += bool(own.of_rank)
                self._arrived.append((pending, own))
                continue
            number = pending.step - self._file.steps_before.get(pending.index, 0)
            step = _WaitingStep(pending, own, optimizer, number, time.monotonic())
            self._waiting.append(step)
            if pending.part is not None:
                letters.append(letter_of(pending, own, number))
        if letters and self._post is not None and self.rank:
            self._post.send({"rank": self.rank, "steps": letters})
        self._sort_in(self.rank, letters)

    def _sort_in(self, rank: int, letters: Sequence[Any]) -> None:
        for letter in letters:
            optimizer, number = letter["optimizer"], letter["step"]
            if number > self._told.get(optimizer, 0):
                self._letters.setdefault((optimizer, number), {})[rank] = letter

    def _settled(self) -> int:
        """Steps of which all ranks have told become those of all; others wait for a while."""
        for came in () if self._post is None else self._post.received():
            self._sort_in(came["rank"], came["steps"])
            self._heard.add(came["rank"])
            if came.get("leaves"):
                self._left.add(came["rank"])
        while self._waiting:
            waiting = self._waiting[0]
            if not isinstance(waiting, _WaitingStep):
                self._arrived.append(waiting)
                self._waiting.popleft()
                continue
            step, part = waiting.own, waiting.pending.part
            if part is not None:
                key = part.optimizer, waiting.number
                told = self._letters.get(key, {})
                missing = set(part.ranks) - told.keys()
                is_late = time.monotonic() >= waiting.since + self._patience
                if missing and not (self.rank or is_late or missing & self._left):
                    break
                if not missing:
                    theirs = {rank: told[rank] for rank in part.ranks}
                    step = step_of_all(step, waiting.optimizer, theirs) or step
                self._told[part.optimizer] = waiting.number
                self._letters.pop(key, None)
            self.partly += bool(step.of_rank)
            self.untold = self.untold or (bool(step.of_rank) and part is not None)
            self._arrived.append((waiting.pending, step))
            self._waiting.popleft()
        return len(self._arrived)

    def _awaits_ranks(self) -> bool:
        return bool(self._waiting)

    def trace(self, trace: runfile.Trace) -> bool:
        """As the Recorder's, and it alone logs it, if anybody does: a rank without a file has told
        rank 0, and a session that is to be quiet says nothing."""
        if self.writes and super().trace(trace) and _logger.isEnabledFor(logging.WARNING):
            self.told.add(trace.text)
        return True

    def close(self, *, status: str = "finished", exit: int = 0, error: str | None = None) -> None:
        """Leaves it open, whoever asks: `finish` closes it."""

    def end_sinks(self, *, status: str, exit: int, error: str | None) -> None:
        """Tells the sinks what there is and that the run has ended; they hear no more after it."""
        if self.recording and not self._busy:
            self.flush()
            self._tell_sinks("close", runfile.End(self.elapsed(), status, exit, error))
            self._sinks.clear()

    def finish(self, *, status: str, exit: int, error: str | None) -> None:
        """Closes it, with how the script ended; waits a moment for what ranks tell of the end."""
        if self._post is not None and self.recording and not self._busy:
            self.flush()
            if self.rank:
                self._post.send({"rank": self.rank, "steps": [], "leaves": True})
            until = time.monotonic() + _FAREWELL
            # Also for those who are about to leave: they would find the door shut.
            while (self._waiting or self._heard - self._left) and time.monotonic() < until:
                time.sleep(0.02)
                self.flush()
            self._patience = 0.0
            self._post.close(_FAREWELL)
        super().close(status=status, exit=exit, error=error)


class _Introduction:
    """The parameters that an optimizer had when the recorder was told of it, and its index there.

    A script that trains one model after another needs their memory, but weak references to them
    would make `torch.utils.swap_tensors` refuse them. So the optimizer, which holds them anyway,
    keeps this object, and we refer weakly to that. A copy of the optimizer gets an empty list.
    """

    def __init__(
        self, index: int, params: list[Tensor], *, whole: bool, parts: RankParts | None
    ) -> None:
        self.index, self._params, self.whole, self.parts = index, params, whole, parts
        self.ids = frozenset(map(id, params))  # Theirs as long as this object lives.
        self.gradients = WatchedGradients(params)
        """Finds those of the parameters."""

    def __reduce__(self) -> Any:
        return list, ()

    def is_of(self, params: list[Tensor]) -> bool:
        """Whether these are the same parameters."""
        return len(params) == len(self._params) and not any(map(is_not, params, self._params))

    def has_gradients_of(self, params: list[Tensor]) -> bool:
        """Whether those with a gradient among these are those with one among its own.

        `model.parameters()` may be in another order than the optimizer's groups, and may hold
        parameters that are not trained.
        """
        if self.is_of(params):
            return True
        given = set(map(id, params))
        if self.ids.isdisjoint(given) or len(given) != len(params):
            return False
        return not any(
            param.grad is not None
            for ours, theirs in ((params, self.ids), (self._params, given))
            for param in ours
            if id(param) not in theirs
        )

    def kept_by(self, optimizer: Any) -> Callable[[], _Introduction | None]:
        """Gives it to the optimizer, and returns what finds it as long as that lives."""
        try:
            vars(optimizer)["_gradilocks_introduction"] = self
        except TypeError:  # A class with slots.
            return lambda: self
        return weakref.ref(self)


@dataclass
class _Attempt:
    """A step that has begun."""

    params: list[Tensor]
    known: _Introduction
    detail: bool
    lr: Any
    # What follows is filled in later, and is the class's until then.
    counts: list[bool] | None = field(default=None, init=False)
    reading: Reading | None = field(default=None, init=False)
    loss: Tensor | None = field(default=None, init=False)
    weights: Weights | None = field(default=None, init=False)
    clip: Mapping[str, Any] | None = field(default=None, init=False)


class StepRecorder(StepListener):
    """Records every optimizer of this process.

    `make_recorder` is called at the first step, and `warn` told if weights cannot be recorded.

    Attributes:
        losses: listens by itself to what is run backward.
        data_wait: what the script does between its steps and forward passes; to be closed.
        measures: whether gradients are measured on every rank, for other listeners, also where
            rank 0 records them.
        seen: how many steps of optimizers and scalers have come by.
    """

    def __init__(
        self, make_recorder: Callable[[], ScriptRecorder], warn: Callable[[str], None]
    ) -> None:
        self._make_recorder, self._warn = make_recorder, warn
        self._reads_weights, self._has_told_of_stuck = True, False
        self.measures = False
        self.seen = 0
        self._introductions: dict[int, Callable[[], _Introduction | None]] = {}  # By optimizer.
        self._numbers: dict[int, int] = {}  # By index: among those of which ranks tell.
        self._attempts: dict[Step, _Attempt] = {}
        self._journals: WeakKeyDictionary[Any, Journal] = WeakKeyDictionary()  # By control.
        self._reader = GradientReader()
        self.losses = Losses(lambda: 0 if self.recorder is None else self.recorder.latest_step())
        self.data_wait = DataWait()
        self._clipping: tuple[ClippedGradients, WatchedGradients] | None = None
        self.recorder: ScriptRecorder | None = None

    def recorder_now(self) -> ScriptRecorder:
        """The recorder, made when it is first needed."""
        if self.recorder is None:
            self.recorder = self._make_recorder()
        return self.recorder

    # --- steps ---------------------------------------------------------------------------------

    def step_begins(self, step: Step) -> None:
        if step.is_of_control:
            self._control_begins(step)
            return
        (optimizer,) = step.optimizers
        params = parameter_list(step.optimizers)
        if not params:
            return
        recorder = self.recorder or self.recorder_now()
        if not (recorder.writes or has_other_ranks()):
            return
        is_new = id(optimizer) not in self._introductions
        known = self._introduced(optimizer, params)
        # Gradilocks' own scaler steps such an optimizer another way.
        if is_new and not isinstance(step.driver, GradScaler) and hardly_steps(optimizer):
            self._tell_of_stuck()
        detail = recorder.wants_detail(known.index)
        if not recorder.writes:
            parts = known.parts
            if parts is None and not self.measures:
                return  # There is nobody to tell.
            detail = detail and parts is not None and parts.has_detail
        lr = optimizer.param_groups[0].get("lr")
        lr = lr if isinstance(lr, (int, float, Tensor)) else None
        attempt = self._attempts[step] = _Attempt(params, known, detail, lr)
        if not step.has_closure:
            self._read(step, attempt)
        if detail and step.driver is optimizer:  # Which is about to change its parameters.
            self._read_weights(attempt)

    def _tell_of_stuck(self) -> None:
        """Once: the script may have many optimizers."""
        if not self._has_told_of_stuck:
            self._has_told_of_stuck = True
            self._warn(
                "torch's fused SGD leaves float16 and bfloat16 weights on a CPU as they are, but "
                "for a few elements at the end of each (pytorch issue 191763). Make it with "
                "fused=False, or run with --swap-optimizer SGD."
            )

    def _read(self, step: Step, attempt: _Attempt, loss: object = None) -> None:
        """Reads the gradients, and the loss that they came from."""
        known, recorder = attempt.known, self.recorder
        writes = recorder is not None and recorder.writes
        only_losses = not writes and self._only_losses(known)
        if only_losses:
            reading = Reading([], None, [], double=False)
        else:
            reading = self._reader.read(known.gradients, detail=attempt.detail)
        attempt.reading = reading
        if known.parts is not None:
            attempt.counts = known.parts.counts(attempt.params, reading)
        if only_losses and self.measures:
            seen = self._reader.read(known.gradients, detail=False)
            step.found, step.is_finite = seen.record, seen.is_finite()
        else:
            step.found, step.is_finite = reading.record, reading.is_finite()
            step.clipped_found = reading.clipped
        attempt.loss = self.losses.take()
        if recorder is not None and writes and not recorder.knows_precision:
            recorder.precision(self.losses.formats)
        if attempt.loss is None and isinstance(loss, Tensor) and loss.numel() == 1:
            attempt.loss = loss.detach().clone()
        step.loss = attempt.loss
        if reading.clip:
            attempt.clip, limit = reading.clip, reading.clip.get("limit")
            if limit is not None and isinstance(step.carried, Tensor):
                # The clip was of gradients that carry the scale, as they still do.
                effect = ClipEffect(limit, reading.clip["clipped"]).divided(step.carried.detach())
                attempt.clip = effect._asdict()

    def _only_losses(self, known: _Introduction) -> bool:
        """Whether rank 0, which has the same gradients or asks for none, needs nothing else of this
        rank."""
        silent = self.recorder is not None and not self.recorder.writes
        return silent and (known.parts is None or not known.parts.spread)

    def update_begins(self, step: Step) -> None:
        attempt = self._attempts.get(step)
        if attempt is not None:
            if attempt.reading is not None and self._reader.has_clips:
                # Of a clip between a scaler's look at the gradients and the optimizer's step.
                attempt.clip = self._reader.effects(attempt.params) or attempt.clip
            self._read_weights(attempt)

    def _read_weights(self, attempt: _Attempt) -> None:
        """Keeps what the parameters are, right before they change."""
        if attempt.detail and attempt.weights is None and self._reads_weights:
            try:
                attempt.weights = Weights(attempt.params)
            except Exception as error:  # Detail is worth less than the steps.
                self._reads_weights = False
                self._warn(f"weights are not recorded: {type(error).__name__}: {error}")

    # What the first evaluation of a closure leaves is what the step is judged by. Losses from
    # before the step stay: the closure may hold the last micro-batch, or nothing. If it computes
    # the loss anew it clears the gradients, which is seen where that is done.

    def closure_begins(self, step: Step) -> None:
        attempt = self._attempts.get(step)
        if attempt is not None and attempt.reading is not None:
            self.losses.start()

    def closure_ended(self, step: Step, loss: object, *, failed: bool) -> None:
        attempt = self._attempts.get(step)
        if attempt is None:
            return
        if failed:
            self.losses.start()
        elif attempt.reading is None:
            self._read(step, attempt, loss)

    def step_failed(self, step: Step) -> None:
        self._attempts.pop(step, None)
        if step.is_of_control:
            self.losses.start()

    def step_ended(self, step: Step) -> None:
        if step.is_of_control:
            if self.recorder_now().writes:
                journal = self._journal(step.driver)
                journal.waited = self.data_wait.take()
                journal.step_ended(step)
                self.data_wait.step_ended()
            self.losses.start()
            return
        attempt = self._attempts.pop(step, None)
        if attempt is None:
            return
        if step.has_closure and step.held is True:  # Perhaps by a later evaluation than the first.
            self._read(step, attempt)
        self.losses.end()
        self.seen += 1
        reading, known, recorder = attempt.reading, attempt.known, self.recorder
        if reading is None or recorder is None:
            return
        if known.parts is None and not recorder.writes:
            return
        weight = change = part = None
        if attempt.detail:
            found = reading.record
            home = attempt.params[0].device if found is None else found.row.device
            self._read_weights(attempt)  # If a scaler held the step back, nobody has yet.
            if attempt.weights is not None:
                weight, change = attempt.weights.norms(home)
        if known.parts is not None:
            part = known.parts.of_step(reading, attempt.counts, step.carried)
        clip = attempt.clip
        if step.clipped is not None:
            clip = {"limit": step.limit, "clipped": step.clipped}
        recorder.step(
            known.index,
            Sample(
                loss=attempt.loss,
                scale=step.scale,
                record=reading.record,
                of_record=_OF_RECORD,
                norm_is_scaled=True,
                skip=step.skip,
                rejected=step.rejected,
                lr=attempt.lr,
                carried=step.carried,
                places=reading.places,
                elements=reading.elements,
                weight=weight,
                change=change,
                of_rank=not known.whole,
                part=part,
                waited=self.data_wait.take(),
                **(clip or {}),
            ),
        )
        self.data_wait.step_ended()

    def _introduced(self, optimizer: Any, params: list[Tensor]) -> _Introduction:
        """What the recorder was told of an optimizer."""
        find = self._introductions.get(id(optimizer))
        known = None if find is None else find()
        if known is not None and known.is_of(params):
            return known
        every = self._models(params)
        mine = {id(param) for param in params}
        models = [model for model in every if not mine.isdisjoint(map(id, model.parameters()))]
        names, whole = name_parameters(every, params), are_whole(params, models)
        recorder = self.recorder_now()
        index, parts = recorder.add_optimizer(optimizer, names=names), None
        if RankParts.known(params, models):
            # Not the recorder's index: controls, of which other ranks do not tell, have one too.
            number = self._numbers.setdefault(index, len(self._numbers))
            named = [names.get(param, str(place)) for place, param in enumerate(params)]
            kind = type(optimizer).__name__
            parts = RankParts(params, models, number=number, names=named, kind=kind)
            recorder.begin_post()
        made = _Introduction(index, params, whole=whole, parts=parts)
        self._introductions[id(optimizer)] = made.kept_by(optimizer)
        self.losses.optimizer_made(optimizer)
        return made

    def _models(self, params: Sequence[Tensor]) -> list[nn.Module]:
        """The models of all optimizers that there are, these parameters' too.

        Two networks with an optimizer each may name their parts alike. All of them together are
        told apart by what the script calls them, whichever of the optimizers is met first.
        """
        every = {id(p): p for p in (*self.losses.parameters(), *params)}
        models = owners_of(every.values())
        if len(models) > 1:  # One that the script is done with may wait for the collector.
            del every, models
            gc.collect()
            models = owners_of({id(p): p for p in (*self.losses.parameters(), *params)}.values())
        return models

    # --- a script's own GradientControls -------------------------------------------------------

    def loss_counted(self, control: Any, loss: Tensor, *, first: bool, averaged: int = 0) -> None:
        if self.recorder_now().writes:
            self._journal(control).loss_counted(control, loss, first=first, averaged=averaged)

    def _control_begins(self, step: Step) -> None:
        if not self.recorder_now().writes:  # The ranks of a control tell each other by themselves.
            return
        journal = self._journal(step.driver)
        if journal.loss is None and not step.scales:
            # Not by way of the control: what `loss.backward()` was called on has no scale here.
            journal.loss = self.losses.take()
        journal.step_begins(step)

    def numbers_logged(self, numbers: Mapping[str, Tensor | float], *, step: int | None) -> None:
        recorder = self.recorder_now()
        if recorder.writes:
            recorder.log(numbers, step=step)

    def _journal(self, control: Any) -> Journal:
        journal = self._journals.get(control)
        if journal is None:
            journal = Journal(self.recorder_now(), find_names=self._found_names)
            self._journals[control] = journal
        return journal

    def _found_names(self, names: Names) -> Names:
        """Names from the models that are alive, for a control that was given none."""
        if names.has_model:
            return names
        models = self._models(list(every_parameter(names.optimizers)))
        return Names(prefixed(models), names.optimizers)

    # --- clips ---------------------------------------------------------------------------------

    def clip_begins(self, clip: Clip) -> None:
        if self._tells_only_losses(clip.params):
            return
        params = list(clip.params)
        every = [intro for find in self._introductions.values() if (intro := find()) is not None]
        known = next((intro for intro in every if intro.has_gradients_of(params)), None)
        if known is None:
            gradients = WatchedGradients(params, once=True)
            detail = clip.by_value or self._wants_detail(every, set(map(id, params)))
        else:
            gradients = known.gradients
            detail = clip.by_value or self.recorder_now().wants_detail(known.index)
        clipped = self._reader.before_clip(gradients, detail=detail)
        self._clipping = None if clipped is None else (clipped, gradients)

    def _tells_only_losses(self, params: Sequence[Tensor]) -> bool:
        """Whether this rank has nothing to say of these gradients: rank 0 has the same ones."""
        if self.recorder is None or self.recorder.writes:
            return False
        ids = {id(param) for param in params}
        known = [intro for find in self._introductions.values() if (intro := find()) is not None]
        return not any(
            each.parts is not None and each.parts.spread and not each.ids.isdisjoint(ids)
            for each in known
        )

    def _wants_detail(self, every: Sequence[_Introduction], params: set[int]) -> bool:
        """Whether a step that these are clipped for may be recorded in detail."""
        for known in every:
            if not known.ids.isdisjoint(params):
                params = params - known.ids
                if self.recorder is None or self.recorder.wants_detail(known.index):
                    return True
        return bool(params)  # Of an optimizer that has not stepped yet, whose first step is.

    def clip_ended(self, clip: Clip) -> None:
        clipping, self._clipping = self._clipping, None
        if clipping is not None:
            self._reader.after_clip(*clipping, clip)

    def unscale_begins(self, optimizer: Any) -> None:
        if self._reader.has_clips:
            self._reader.before_unscale(list(parameters_of(optimizer)))

    def unscale_ended(self, optimizer: Any, scale: Tensor) -> None:
        if self._reader.has_clips:
            self._reader.after_unscale(list(parameters_of(optimizer)), scale)

    def gradients_clear(self, owner: Any) -> None:
        if self._reader.has_clips:
            self._reader.gradients_clear(parameters_of(owner))
