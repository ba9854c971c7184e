"""`gradilocks.trace`: a model enters; the module in which a bad step's NaN or Inf arose leaves.

A Tracer keeps what it takes to run a step once more (`kept_calls`). When a step turns out bad and
its parameters are still those that it began with, the step is run again under hooks (`replay`), so
that a fault that comes once is found as well. If nothing is found so, the next step is followed as
it trains. A model whose parameters hold NaN or Inf is not followed: whatever a trace saw would come
from them.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradilocks.dropin import GradScaler
from gradilocks.eager import UNCOMPILED
from gradilocks.lab.tensors import tensors_in
from gradilocks.lab.trace.finding import (
    Finding,
    damaged_among,
    damaged_gradients,
    if_grown,
    in_loss,
    unwatched_among,
)
from gradilocks.lab.trace.kept_calls import KeptCalls, KeptStep
from gradilocks.lab.trace.rank_answers import Answer, RankAnswers, concluded
from gradilocks.lab.trace.replay import NOT_AGAIN, Replayed, replay
from gradilocks.lab.trace.step_trace import StepTrace
from gradilocks.lab.unchanged import waiting
from gradilocks.names import is_compiled, unwrapped
from gradilocks.ranks.layout import (
    flattened_among,
    has_other_ranks,
    is_distributed,
    ranks_in,
    replicas_of,
)
from gradilocks.runfile import Trace, describe_error
from gradilocks.step.events import EVENTS, Step, StepEvents, StepListener
from gradilocks.step.lr_schedule import Flag
from gradilocks.step.outcome import fetch
from gradilocks.values import ROW, moved

__all__ = ["Tracer", "called_modules", "skipped_for_nonfinite", "trace"]

_logger = logging.getLogger("gradilocks")
_MOST_REPLAYS = 20
_MOST_PENDING = 3  # Steps whose calls are kept until it is known whether they were bad.
_SPREAD = "the model is spread over ranks, which would have to run it together"
_MOST_LOSSES = 256  # Of a step: references to them are kept.
_ENOUGH = "no more bad steps are looked at"


class _Pending(NamedTuple):
    """A step whose flag is on its way."""

    flag: Flag
    step: int | Tensor
    driver: int
    in_gradients: Trace | None
    """What its gradients tell, if it was followed and nothing was found."""
    calls: KeptStep
    losses: Sequence[Tensor]


class Tracer(StepListener):
    """Finds the module in which NaN or Inf is born; made by `gradilocks.trace`.

    Attributes:
        findings: what was found, oldest first. Where several ranks train, rank 0's are those of all
            ranks, once they have answered, and each other rank's are its own.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        recorder: Any = None,
        most: int = 5,
        kept: KeptCalls | None = None,
    ) -> None:
        if type(most) is not int or most < 1:
            raise ValueError(f"most must be a whole number of at least 1, got {most!r}.")
        self.findings: list[Trace] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self.recorder = recorder
        self._most = most
        self._control: weakref.ref[Any] | None = None
        self._trace: StepTrace | None = None
        self._is_late = False
        self._found_nothing = False  # In the step that goes on, though it was followed.
        self._pending: list[_Pending] = []
        self._losses: list[Tensor] = []  # Of the step that goes on, as far as they are known.
        self._latest_step: int | Tensor = 0
        self._driver = 0
        self._replays = Counter[str]()  # Of steps with a bad loss, and of others.
        self._found_of = Counter[str]()
        self._ranks: RankAnswers | None = None
        self._step_hook: Any = None
        self._closed = False
        self._began = time.perf_counter()
        self.kept = KeptCalls() if kept is None else kept
        self.on_close: Callable[[], None] = _nothing
        self.replays = True
        """Whether bad steps are run once more."""
        self.looked: Callable[[int, KeptStep, str, str], str] | None = None
        """Told of each bad step that is looked at: its number, what was kept of it, what was found
        on this rank, and why its parameters may be others by now, which is "" if they are not. What
        it returns is added to what was found."""
        self.follow(models)

    @property
    def models(self) -> list[nn.Module]:
        """Those that are still there."""
        return [model for find in self._models if (model := find()) is not None]

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Traces these as well."""
        known = {id(model) for model in self.models}
        self._models = [find for find in self._models if find() is not None]
        self._models += [weakref.ref(model) for model in models if id(model) not in known]

    # --- a step that trains, followed ----------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether the model runs with hooks on all its modules at this moment."""
        return self._trace is not None

    def arm(self) -> None:
        """Follows the model from here on, until something is found or a step is taken.

        If its parameters hold NaN or Inf already, that is what is found, and nothing is followed.
        """
        if self._closed:
            raise RuntimeError("this tracer is closed. Make another with gradilocks.trace(model).")
        models = self.models
        if self._trace is not None or not models:
            return
        done = _number(self._latest_step)
        when = f"after step {done:,}" if done else "before the traced step"
        damaged = damaged_among(models, when)
        if damaged is not None:
            if not self._is_late:  # Once, until a step was well again.
                self._is_late = True
                self._answer(Answer(max(done, 1), damaged, driver=self._driver, is_last=False))
            return
        self._is_late = False
        self._trace = StepTrace(models, self._found)
        self._step_hook = register_optimizer_step_pre_hook(self._stepping)
        UNCOMPILED.__enter__()  # Compiled code would run past the hooks.

    def disarm(self) -> None:
        """Takes the hooks away; the tracer stays ready."""
        trace, self._trace = self._trace, None
        if trace is not None:
            UNCOMPILED.__exit__()
            trace.settle()
            self._found_nothing = trace.forwards > 0 and not trace.is_done
            trace.remove()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step is taken: what was to be seen has been seen."""
        if self._trace is None or not self._trace.forwards:
            return
        mine = {id(param) for model in self.models for param in model.parameters()}
        held = (param for group in optimizer.param_groups for param in group["params"])
        if any(id(param) in mine for param in held):
            self.disarm()

    def _found(self, finding: Finding) -> None:
        models = self.models
        damaged = damaged_among(models, "finite when the trace began")
        step = _number(self._latest_step) + 1
        found = damaged or if_grown(finding.trace(), models)
        if damaged is None and finding.doubt:
            found = _likely(found, finding.doubt)
        self._answer(Answer(step, found, driver=self._driver, is_last=False))
        self.disarm()

    # --- a bad step, run once more -------------------------------------------------------------

    def step_begins(self, step: Step) -> None:
        """For the control: one of its steps begins."""
        self.catch_up()

    def step_ended(self, step: Step) -> None:
        """For the control: one of its steps is over."""
        if step.record is not None:
            row = step.record.row
            self.note(row, step=row[ROW.index("step")].clone())

    def loss_counted(self, control: Any, loss: Tensor, *, first: bool, averaged: int = 0) -> None:
        """For the control: a loss of the step that goes on."""
        self.note_loss(loss)

    def note_loss(self, loss: Tensor) -> None:
        """The step that goes on has this loss, perhaps among others."""
        if len(self._losses) < _MOST_LOSSES:
            self._losses.append(loss.detach())

    def note(self, row: Tensor, *, step: int | Tensor | None = None, driver: int = 0) -> None:
        """A step is over that changed no parameter if it was bad.

        On a GPU the numbers travel without a wait and are looked at when they have arrived, one or
        more steps later.

        Args:
            row: begins with 1 if it had NaN or Inf, else with 0.
            step: its number, by default the one after the last. A tensor is read only if there is
                something to tell.
            driver: whose step: optimizers that count their steps by themselves have each a number.
        """
        if self.armed:
            self.disarm()
        step = self._latest_step + 1 if step is None else step
        self._latest_step = step
        calls = self.kept.take(driver)
        if self._closed:
            return
        # What the gradients hold after a step in which nothing was found, if it was followed.
        found_nothing, self._found_nothing = self._found_nothing, False
        in_gradients = damaged_gradients(self.models) if found_nothing else None
        if len(self._pending) >= _MOST_PENDING:
            self._pending[0].calls.forget()
        losses, self._losses = self._losses, []
        self._pending.append(_Pending(Flag(row), step, driver, in_gradients, calls, losses))
        self.catch_up(gradients_of=step)

    @property
    def is_behind(self) -> bool:
        """Whether there are steps of which it is not known yet whether they were bad."""
        return len(self._pending) > 0

    def catch_up(self, *, gradients_of: int | Tensor | None = None, wait: bool = False) -> None:
        """Looks at bad steps of which it has become known, before another changes the parameters.

        `gradients_of` is the step whose gradients are there still. With `wait` all steps are
        waited for.
        """
        bad = arrived = False
        while self._pending and (told := self._pending[0].flag.overflowed(wait=wait)) is not None:
            pending = self._pending.pop(0)
            arrived, bad = True, bad or told
            if told and pending.in_gradients is not None:
                number, gradients = _number(pending.step), pending.in_gradients
                self._answer(Answer(number, gradients=gradients, driver=pending.driver))
            elif told:
                doubt = "later steps had changed the parameters by then" if self._pending else ""
                self.look(
                    _number(pending.step),
                    pending.calls,
                    driver=pending.driver,
                    loss_is_bad=_any_bad(pending.losses),
                    doubt=doubt,
                    of_its_gradients=pending.step is gradients_of,
                )
        if arrived and not bad:
            self.well()

    def look(
        self,
        step: int,
        calls: KeptStep,
        *,
        driver: int = 0,
        loss_is_bad: bool | None = None,
        doubt: str = "",
        gone: bool = False,
        of_its_gradients: bool = True,
    ) -> None:
        """A step was bad, and the parameters are still those that it began with: runs it again.

        Args:
            step: its number.
            calls: what was kept of it.
            driver: whose step, as `note` has it.
            loss_is_bad: whether its loss was NaN or Inf, if that is known.
            doubt: why the parameters may be others, in half a sentence.
            gone: whether the bad step is about to be taken: what follows comes from it.
            of_its_gradients: whether the gradients that are there are still those of the step.
        """
        if self._is_late or self._closed:
            return
        self._driver = driver
        if isinstance(self._latest_step, int):  # Of which whatever is followed next comes after.
            self._latest_step = max(self._latest_step, step)
        answer = Answer(step, doubt=_ENOUGH, driver=driver)
        # Skips of a scale that looks for its place are many, and must not use up the looks that a
        # bad loss needs.
        kind = "overflow" if loss_is_bad is False and not gone else "fault"
        looks = self._found_of[kind] < self._most and self._replays[kind] < _MOST_REPLAYS
        with waiting():
            if self.replays and looks:
                self._replays[kind] += 1
                answer = self._look(
                    step,
                    calls,
                    loss_is_bad=loss_is_bad,
                    doubt=doubt,
                    of_its_gradients=of_its_gradients,
                )
            found = answer.found
            if found is not None and kind == "overflow" and _is_overflow(found):
                self.well()  # Of the scale alone.
                return
            self._found_of[kind] += found is not None
            if self.looked is not None:
                more = self.looked(step, calls, "" if found is None else found.text, doubt)
                if found is not None and more:
                    found = dataclasses.replace(found, text=f"{found.text}{more}")
            if self.replays:
                self._answer(answer._replace(found=found, is_gone=gone and looks))
                if looks and found is None and (answer.doubt or not answer.gradients) and not gone:
                    self.arm()
        if gone:
            self._is_late = True

    def _look(
        self,
        step: int,
        calls: KeptStep,
        *,
        loss_is_bad: bool | None,
        doubt: str,
        of_its_gradients: bool,
    ) -> Answer:
        models = self.models
        params = [param for model in models for param in model.parameters()]
        if flattened_among(params) or any(map(is_distributed, params)):
            found = Replayed(damaged_among(models, f"before step {step:,}"), _SPREAD)
        else:
            self.kept.paused = True
            try:
                found = replay(step, calls, models, loss_is_bad=loss_is_bad, doubt=doubt)
            except Exception as error:  # Whatever people keep in a model.
                found = Replayed(None, f"it could not be run once more ({describe_error(error)})")
            finally:
                self.kept.paused = False
        trace, doubt, gradients = found.trace, found.doubt, None
        if trace is not None and trace.where == "before" and not doubt:
            doubt = unwatched_among(models, self.kept.followed)
        if trace is not None and doubt:
            trace = _likely(trace, doubt)
        if trace is None and of_its_gradients:
            gradients = damaged_gradients(models)
            # Those of several ranks are averaged, and not what one of them has made.
            if gradients is not None and not (found.same_gradients or has_other_ranks()):
                gradients = dataclasses.replace(gradients, certainty="likely")
        if trace is None and gradients is None and loss_is_bad and not doubt:
            if of_its_gradients:  # Which are finite.
                trace = in_loss(models)
            else:
                doubt = NOT_AGAIN
        if trace is not None:
            self._is_late = trace.where == "parameters"
        return Answer(step, trace, gradients, doubt, self._driver)

    def well(self) -> None:
        """A step was good, so that its parameters are."""
        self._is_late = False
        if self._ranks is not None:
            self.settle()

    # --- what is told --------------------------------------------------------------------------

    def meet_ranks(self) -> None:
        """Opens the post by which ranks answer each other, if there are others."""
        if self._ranks is None and has_other_ranks():
            self._ranks = RankAnswers(self._tell)

    def settle(self) -> None:
        """Tells what other ranks have found meanwhile; does not wait."""
        if self._ranks is not None:
            self._ranks.settle()

    def finish(self) -> None:
        """Waits a few seconds for what other ranks tell of steps that were bad on this one."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _answer(self, answer: Answer) -> None:
        """This rank has found this of a step: it is told once the other ranks have answered."""
        now = time.perf_counter() - self._began
        if self.recorder is not None:
            now = self.recorder.elapsed()
        found, gradients = (
            None if trace is None else dataclasses.replace(trace, step=answer.step, time=now)
            for trace in (answer.found, answer.gradients)
        )
        answer = answer._replace(found=found, gradients=gradients, time=now)
        self.meet_ranks()
        ranks = self._ranks
        if ranks is None:
            told = concluded({0: [answer]}, (0,))
        else:
            groups = (replicas_of(part) for model in self.models for part in model.modules())
            partners = {rank for group in groups if group is not None for rank in ranks_in(group)}
            ranks.give(answer, sorted(partners) or ranks.ranks)
            writes = self.recorder is not None and self.recorder.recording
            told = ranks.alone(answer) if ranks.rank and (found or writes) else []
        for trace in told:
            self._tell(trace)

    def _tell(self, found: Trace) -> None:
        known = (found.where, found.module, found.phase, found.what, found.ranks)
        if any((f.where, f.module, f.phase, f.what, f.ranks) == known for f in self.findings):
            return  # The same place again: it has been told.
        self.findings.append(found)
        if self.recorder is None or not self.recorder.trace(found):
            _logger.warning("step %d traced: %s", found.step, found.text)

    def close(self) -> None:
        """Takes the hooks away for good."""
        self.disarm()
        self.finish()
        self._closed = True
        self._pending = []
        self.kept.close()
        self.on_close()
        control = self._control() if self._control is not None else None
        if control is not None:
            control._events.discard(self)
            self._control = None

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trace(model: nn.Module, *, control: Any = None, recorder: Any = None, most: int = 5) -> Tracer:
    """Finds the module in which NaN or Inf is born when a step is skipped.

    What it takes to run a step once more is kept as the model is called: two hooks on the model
    itself, and references to its inputs until the step is over. A bad step is run again at once,
    with the same random numbers, and the first module whose output, or whose output's gradient, is
    not finite is named, with the magnitudes of what went into it. Training goes on bit for bit as
    without: gradients, buffers and random generators are put back. What is found is in `findings`,
    in the log of `gradilocks`, and in the run file if there is a recorder.

    `certainty` of a finding is 'certain' if the step was run again just as it was, 'likely' if
    something may have been different, which its text says. If running it again shows nothing, the
    next step is followed as it trains. Only a finding whose `where` is 'module' names the origin:
    parameters or buffers that are NaN or Inf already, input data, the loss, and what arises between
    modules or gets into gradients after backward are told apart.

    With several ranks make one on each: every rank runs its own batch again, so that the guilty one
    finds it, logs it, and tells rank 0, which writes it down with the rank. Nobody waits for that.

    Args:
        model: the model, in DDP or compiled too; compiled code runs eagerly while it is traced.
        control: a GradientControl, or a gradilocks.GradScaler, whose bad steps are looked at. On a
            GPU it learns of them without waiting, a step or more later. Without one, call `arm()`.
        recorder: where findings are written too; by default the control's.
        most: after so many findings nothing is looked at any more, except by hand.

    Returns:
        The Tracer: a context manager; `close()` ends it.

    Example:
        >>> with gradilocks.trace(model, control=control) as tracer:
        ...     train(control)
        >>> [found.module for found in tracer.findings]
        ['blocks.3.norm']
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if recorder is None and control is not None:
        recorder = getattr(control, "recorder", None)
    tracer = Tracer([model], recorder=recorder, most=most)
    tracer.kept.follow(called_modules([model]))
    if isinstance(control, GradScaler):
        steps = _StepsOfScaler(tracer, control)
        EVENTS.add(steps)
        tracer.on_close = partial(EVENTS.discard, steps)
    elif control is not None:
        if not isinstance(getattr(control, "_events", None), StepEvents):
            hint = (
                ": use gradilocks.GradScaler in its place"
                if isinstance(control, torch.amp.GradScaler)
                else ""
            )
            raise TypeError(
                "control must be a gradilocks.GradientControl or a gradilocks.GradScaler, got "
                f"{type(control).__module__}.{type(control).__qualname__}{hint}."
            )
        control._events.add(tracer)  # Which holds it, so that nobody needs a variable for it.
        tracer._control = weakref.ref(control)
    atexit.register(_finish, weakref.ref(tracer))
    return tracer


class _StepsOfScaler(StepListener):
    """Tells a tracer of the steps of one scaler, among all those of the process."""

    def __init__(self, tracer: Tracer, scaler: GradScaler) -> None:
        self._tracer, self._scaler = tracer, weakref.ref(scaler, lambda _: EVENTS.discard(self))

    def loss_scaled(self, driver: Any, loss: Any, scaled: Any, scale: Tensor) -> None:
        if driver is self._scaler():
            for _, each in tensors_in(loss, ""):
                self._tracer.note_loss(each)

    def step_begins(self, step: Step) -> None:
        if step.driver is self._scaler():
            self._tracer.catch_up()

    def step_ended(self, step: Step) -> None:
        if step.driver is self._scaler():
            self._tracer.note(skipped_for_nonfinite(step))


def skipped_for_nonfinite(step: Step) -> Tensor:
    """Whether a scaler has held a step back for NaN or Inf, as a row that `Tracer.note` takes."""
    skip, rejected = map(_row, (step.skip, step.rejected))
    return skip - moved(rejected, skip.device)


def _row(flag: Tensor | bool) -> Tensor:
    flag = flag.detach() if isinstance(flag, Tensor) else torch.tensor(flag)
    return flag.reshape(1).to(torch.float32)


def _likely(found: Trace, doubt: str) -> Trace:
    text = f"{found.text}. Likely, not certain: {doubt}"
    return dataclasses.replace(found, certainty="likely", text=text)


def _is_overflow(found: Trace) -> bool:
    """Whether the gradient that the loss gives was Inf, and the loss was not: its scale was too
    large for the format, as it is until it has found its place."""
    return found.where == "after" and found.what == "Inf" and found.phase == "backward"


def _nothing() -> None:
    """By default, when a tracer is closed."""


def _finish(find: Callable[[], Tracer | None]) -> None:
    tracer = find()
    if tracer is not None:
        tracer.finish()


def called_modules(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Whose calls are to be kept: the model in its wrappers, but a compiled one with its wrapper.

    Compiled code would have the hooks of what is compiled in it, and would be compiled again.
    """
    return [model if is_compiled(model) else unwrapped(model) for model in models]


def _any_bad(losses: Sequence[Tensor]) -> bool | None:
    """Whether one is NaN or Inf; None if there are none. Waits for the device."""
    with waiting():
        return not all(bool(each.isfinite().all()) for each in losses) if losses else None


def _number(step: int | Tensor) -> int:
    """A step's number; reading a tensor waits for its device."""
    return int(fetch(step)[0]) if isinstance(step, Tensor) else step
