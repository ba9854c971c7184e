"""`gradilocks.trace`: a handle that is quiet until a step was skipped, and then follows the next.

Off, there is no hook on the model at all. Armed, the model runs with hooks, slowly and waiting for
the device, until something non-finite is found or a step is taken. A model whose parameters hold
NaN or Inf is not followed: whatever a trace saw would come from them.
"""

from __future__ import annotations

import logging
import time
import weakref
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from gradilocks.eager import UNCOMPILED
from gradilocks.lab.trace.finding import (
    Finding,
    NoModule,
    TooLate,
    damaged_gradients,
    damaged_parameters,
)
from gradilocks.lab.trace.following import Following
from gradilocks.names import unwrapped
from gradilocks.runfile import Trace
from gradilocks.step.events import Step, StepEvents, StepListener
from gradilocks.step.lr_schedule import Flag

__all__ = ["Tracer", "trace"]

_logger = logging.getLogger("gradilocks")


class Tracer(StepListener):
    """Finds the module in which NaN or Inf is born; made by `gradilocks.trace`.

    Attributes:
        findings: what was found, oldest first.
    """

    def __init__(self, model: nn.Module, *, recorder: Any = None, most: int = 5) -> None:
        given: tuple[object, object] = model, most
        if not isinstance(given[0], nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if type(given[1]) is not int or most < 1:
            raise ValueError(f"most must be a whole number of at least 1, got {most!r}.")
        self.findings: list[Trace] = []
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._most = most
        self._control: weakref.ref[Any] | None = None
        self._following: Following | None = None
        self._is_late = False
        self._looked = False  # Whether the step that goes on was followed, and nothing was found.
        # Of each step whose flag is on its way: also its number, and what its gradients tell.
        self._flags: list[tuple[Flag, int, NoModule | None]] = []
        self._steps = 0
        self._step_hook: Any = None
        self._closed = False
        self._began = time.perf_counter()

    @property
    def armed(self) -> bool:
        """Whether the model has hooks at this moment."""
        return self._following is not None

    def arm(self) -> None:
        """Follows the model from here on, until something is found or a step is taken.

        If its parameters hold NaN or Inf already, that is what is found, and nothing is followed.
        """
        if self._closed:
            raise RuntimeError("this tracer is closed. Make another with gradilocks.trace(model).")
        model = self._model()
        if self._following is not None or model is None:
            return
        when = f"after step {self._steps:,}" if self._steps else "before the traced step"
        damaged = damaged_parameters(unwrapped(model), when)
        if damaged is not None:
            if not self._is_late:  # Once, until a step was well again.
                self._is_late = True
                self._tell(damaged, step=max(self._steps, 1))
            return
        self._is_late = False
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._following = Following(model, self._found)
        self._step_hook = register_optimizer_step_pre_hook(self._stepping)
        UNCOMPILED.__enter__()  # Compiled code would run past the hooks.

    def disarm(self) -> None:
        """Takes the hooks away; the tracer stays ready."""
        following, self._following = self._following, None
        if following is not None:
            UNCOMPILED.__exit__()
            following.settle()
            self._looked = following.forwards > 0 and not following.answered
            following.remove()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def close(self) -> None:
        """Takes the hooks away for good."""
        self.disarm()
        self._closed = True
        self._flags = []
        control = self._control() if self._control is not None else None
        if control is not None:
            control._events.discard(self)
            self._control = None

    def step_ended(self, step: Step) -> None:
        """For the control: one of its steps is over."""
        if step.record is not None:
            self.note(step.record.row)

    def note(self, row: Tensor) -> None:
        """A step is over; `row[0]` is 1 if it had NaN or Inf.

        On a GPU the number travels without a wait and is looked at when it has arrived, one or
        more steps later.
        """
        if self.armed:
            self.disarm()
        self._steps += 1
        if self._closed:
            return
        self._flags.append((Flag(row), self._steps, self._in_no_module()))
        bad = False
        while self._flags and (told := self._flags[0][0].overflowed()) is not None:
            _, step, in_no_module = self._flags.pop(0)
            if told and in_no_module is not None:
                self._tell(in_no_module, step=step)
            bad = bad or told
        if not bad:
            self._is_late = False
        elif len(self.findings) < self._most and not self._is_late:
            self.arm()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step is taken: what was to be seen has been seen."""
        model = self._model()
        if self._following is None or not self._following.forwards or model is None:
            return
        mine = {id(param) for param in model.parameters()}
        held = (param for group in optimizer.param_groups for param in group["params"])
        if any(id(param) in mine for param in held):
            self.disarm()

    def _found(self, finding: Finding) -> None:
        model, when = self._model(), "finite when the trace began"
        damaged = None if model is None else damaged_parameters(unwrapped(model), when)
        self._tell(finding if damaged is None else damaged)
        self.disarm()

    def _in_no_module(self) -> NoModule | None:
        """What the gradients hold after a step in which nothing was found, if it was followed."""
        looked, self._looked = self._looked, False
        model = self._model()
        return None if model is None or not looked else damaged_gradients(unwrapped(model))

    def _tell(self, finding: Finding | NoModule | TooLate, *, step: int | None = None) -> None:
        now = time.perf_counter() - self._began
        if self._recorder is not None:
            now = self._recorder.elapsed()
        found = finding.trace(step=self._steps + 1 if step is None else step, time=now)
        self.findings.append(found)
        _logger.warning("step %d traced: %s", found.step, found.text)
        if self._recorder is not None:
            self._recorder.trace(found)


def trace(model: nn.Module, *, control: Any = None, recorder: Any = None, most: int = 5) -> Tracer:
    """Finds the module in which NaN or Inf is born, after a step was skipped.

    The step after a skip runs with hooks, and the first module whose output, or whose output's
    gradient, is not finite is named, with the magnitudes of what went into it. Otherwise there is
    no hook on the model, so that it costs nothing. What is found is in `findings`, in the log of
    `gradilocks`, and in the run file if there is a recorder.

    A fault that came once and not again in that step is not found. Only a finding whose `where` is
    'module' names the origin: parameters or buffers that are NaN or Inf already, input data, the
    loss, and what arises between modules or gets into gradients after backward are told apart.

    Args:
        model: the model, in DDP or compiled too; compiled code runs eagerly while it is traced.
        control: a GradientControl whose skips arm the tracer. On a GPU it learns of them without
            waiting, a step or more later. Without one, call `arm()`.
        recorder: where findings are written too; by default the control's.
        most: after so many findings it is not armed any more, except by hand.

    Returns:
        The Tracer: a context manager; `close()` ends it.

    Example:
        >>> with gradilocks.trace(model, control=control) as tracer:
        ...     train(control)
        >>> [found.module for found in tracer.findings]
        ['blocks.3.norm']
    """
    if recorder is None and control is not None:
        recorder = getattr(control, "recorder", None)
    tracer = Tracer(model, recorder=recorder, most=most)
    if control is not None:
        if not isinstance(getattr(control, "_events", None), StepEvents):
            raise TypeError(
                f"control must be a gradilocks.GradientControl, got {type(control).__name__}."
            )
        control._events.add(tracer)  # Which holds it, so that nobody needs a variable for it.
        tracer._control = weakref.ref(control)
    return tracer
