"""What happens around a step, told once and alike, whoever drives the step.

Who takes steps enters: a GradientControl, a GradScaler, a clip function, torch's own parts in a
script that `gradilocks run` or `gradilocks audit` watches. Who wants to know of them subscribes: a
recorder, a tracer, an audit. Without a listener an emitter pays for a look at an empty tuple.

    emitter                    tells its listeners
    GradientControl
      scale_loss, backward     loss_scaled (before backward runs), then loss_counted (after it has)
      step                     step_begins; step_ended when the optimizers have stepped or not, the
                               scale has moved on and the call order is noted, but before
                               NonFiniteGradient or NeverFinite is raised; step_failed if it raises
      log                      numbers_logged
      load_state_dict          state_loaded
    gradilocks.log             numbers_logged; recorders of controls and scalers it tells itself
    gradilocks.GradScaler
      scale                    loss_scaled
      step                     step_begins, step_ended or step_failed; nothing if it is not enabled
    gradilocks' clip_grad_norm_, clip_grads_with_norm_, clip_grad_value_
                               clip_begins, clip_ended
    torch's own, while `observe.torch_hooks` is installed
      Optimizer.__init__       optimizer_made
      Optimizer.step           step_begins, step_ended; with a closure closure_begins and
                               closure_ended at each evaluation. Inside the step of a control or a
                               scaler only update_begins, for the first optimizer that steps there
      GradScaler.scale, step   as those of gradilocks.GradScaler
      GradScaler.unscale_      unscale_begins, unscale_ended; of gradilocks' scaler too
      clip functions           as those of gradilocks
      backward                 backward_begins, backward_ended
      autograd.grad            grad_begins
      zero_grad                gradients_clear, of an optimizer or a module

A control has a StepEvents of its own, with its recorder and its tracers; all others tell EVENTS,
whose listeners hear of everything in the process, the steps of controls included.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar

from torch import Tensor

from gradilocks.names import Names
from gradilocks.step.own_step import weakly
from gradilocks.step.rank_losses import RankedLosses
from gradilocks.step.together import Together
from gradilocks.values import RecordingPlan, SharedDetail, StepRecord

__all__ = ["EVENTS", "Clip", "PerDriver", "Step", "StepEvents", "StepListener"]


@dataclass(eq=False)
class Step:
    """One step, from its beginning to its end; what is known only at the end is filled in then."""

    driver: Any
    """The GradientControl, the GradScaler, or the optimizer that was called by itself."""
    optimizers: tuple[Any, ...]
    scale: Tensor | float = 1.0
    """What the loss was multiplied by: the driver's own tensor, which moves on with the step."""
    unscaled: bool = False
    """Whether the gradients have lost the scale already."""
    has_closure: bool = False
    """Whether the gradients are made inside the step, by a closure."""
    is_of_control: bool = False
    """Whether a GradientControl drives it."""
    names: Names | None = None
    """Of a control: of its parameters."""
    order: float = 2.0
    """Of a control: the order of the norm that it measures."""
    scales: bool = True
    """Of a control: whether it scales losses, so that they all go through it."""
    apart: bool = False
    """Whether the control steps only some of its optimizers; a scaler steps each alone."""
    frame: FrameType | None = None
    """Of torch's wrapper around the first optimizer's own step, once that has begun."""
    ranks: tuple[int, ...] = ()
    """Of a control whose model several ranks hold: those ranks."""
    # What follows is filled in later. To begin with, it is the class's: a step is made in 1 us.
    detail: bool = field(default=False, init=False)
    """For listeners: set at the beginning, it makes a control measure zeros and the largest."""
    plans: tuple[RecordingPlan, ...] = field(default=(), init=False)
    """For listeners: at the beginning, what they need of the other ranks of a control."""
    of_rank: bool = field(default=False, init=False)
    """Of a scaler that records: whether this rank holds, or may hold, a part of the model."""
    record: StepRecord | None = field(default=None, init=False)
    """At the end, of a control or of a scaler that records: what it has measured and decided."""
    measured: int | None = field(default=None, init=False)
    """At the end, of a control: how many gradients it has measured."""
    elements: Sequence[int] | None = field(default=None, init=False)
    """At the end, if `detail` was asked for: how many elements each of them has."""
    next_scale: Tensor | None = field(default=None, init=False)
    """At the end, of a control."""
    rank_losses: RankedLosses | None = field(default=None, init=False)
    """At the end, of a control whose model each rank holds: losses that the ranks have told."""
    together: Together | None = field(default=None, init=False)
    """At the end, of a control whose model several ranks hold: what all of them told."""
    shared: SharedDetail | None = field(default=None, init=False)
    """At the end, likewise: what all of them found of each parameter, if they shared it."""
    skip: Tensor | bool = field(default=False, init=False)
    """At the end: whether the parameters were left as they were."""
    guarded: bool = field(default=False, init=False)
    """For listeners: whether one of them keeps an optimizer from taking it, should it be bad."""
    held: Tensor | bool = field(default=False, init=False)
    """Whether somebody who listens has kept an optimizer from taking it."""
    rejected: Tensor | bool = field(default=False, init=False)
    """At the end: whether they were left so by a clip policy, on finite gradients."""
    found: StepRecord | None = field(default=None, init=False)
    """For listeners: what one of them has measured, if the driver is no control."""
    is_finite: bool | None = field(default=None, init=False)
    """For listeners: whether there is no NaN and no Inf in `found`; None if the host does not know
    yet."""
    clipped_found: StepRecord | None = field(default=None, init=False)
    """For listeners: the same of the gradients as they are now, if `found` is of before a clip."""
    loss: Tensor | None = field(default=None, init=False)
    """For listeners: the loss that one of them has found, likewise."""
    limit: Tensor | None = field(default=None, init=False)
    """At the end, of a scaler with a clip policy: the bound on the norm."""
    clipped: Tensor | None = field(default=None, init=False)
    """At the end, of a scaler with a clip policy: whether it made the gradients smaller."""

    @property
    def carried(self) -> Tensor | float:
        """The scale that the gradients carry."""
        return 1.0 if self.unscaled else self.scale

    def parameters(self) -> Iterable[Tensor]:
        """Of all its optimizers, as they are at this moment."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def covers(self, optimizer: Any) -> bool:
        """Whether it steps `optimizer`, or what wraps it."""
        if any(each is optimizer for each in self.optimizers):
            return True
        groups = getattr(optimizer, "param_groups", ())
        first = next((param for group in groups for param in group["params"]), None)
        return first is not None and any(param is first for param in self.parameters())


_Kept = TypeVar("_Kept")


class PerDriver(Generic[_Kept]):
    """What a listener keeps for each control or optimizer whose steps it hears of.

    Made by `make` at the first step. Known by a weak reference and not by the id alone, which
    Python gives to a new optimizer when the one that had it is gone.
    """

    def __init__(self, make: Callable[[], _Kept]) -> None:
        self._make = make
        self._kept: dict[int, tuple[Callable[[], Any], _Kept]] = {}

    def of(self, step: Step) -> _Kept:
        """What is kept for the control of this step; for the optimizer, if it steps alone."""
        whole = step.is_of_control and not step.apart
        whose = step.driver if whole else step.optimizers[0]
        known = self._kept.get(id(whose))
        if known is None or known[0]() is not whose:
            known = self._kept[id(whose)] = weakly(whose), self._make()
        return known[1]


@dataclass(eq=False)
class Clip:
    """One call of a clip function."""

    params: Sequence[Tensor]
    limit: Any
    """The bound on the norm, or on each element."""
    by_value: bool = False
    """Whether each element is bounded, and not the norm of all."""
    order: Any = 2.0
    norm: Any = None
    """At the end: what the norm was."""


class StepListener:
    """Hears of everything and makes nothing of it; override what you want to know of."""

    def loss_scaled(self, driver: Any, loss: Any, scaled: Any, scale: Tensor) -> None:
        """`loss` was multiplied by `scale`; both may be iterables. `scaled` may be run backward."""

    def loss_counted(self, control: Any, loss: Tensor, *, first: bool, averaged: int = 0) -> None:
        """Its gradients were added. `first` if nothing was left of a loss before it.

        `averaged` says of how many losses so far the mean is that of the step; 0: it is their sum.
        """

    def backward_begins(self, tensors: Any, gradients: Any) -> None:
        """`torch.autograd.backward(tensors, gradients)` is about to run."""

    def backward_ended(self) -> None:
        """`torch.autograd.backward` has run, and has not raised."""

    def grad_begins(self, outputs: Any) -> None:
        """`torch.autograd.grad(outputs, ...)` is about to run."""

    def gradients_clear(self, owner: Any) -> None:
        """`owner.zero_grad()` of an optimizer or a module is about to run."""

    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer of torch was made."""

    def unscale_begins(self, optimizer: Any) -> None:
        """The gradients of `optimizer` are about to be divided by the scale, in place."""

    def unscale_ended(self, optimizer: Any, scale: Tensor) -> None:
        """They were divided by `scale`."""

    def clip_begins(self, clip: Clip) -> None:
        """Gradients are about to be clipped."""

    def clip_ended(self, clip: Clip) -> None:
        """Gradients were clipped."""

    def step_begins(self, step: Step) -> None:
        """A step begins: the gradients are as they were left, unless a closure makes them. An
        optimizer that is called by itself is about to change its parameters."""

    def update_begins(self, step: Step) -> None:
        """The first optimizer of the step of a control or a scaler is about to change its
        parameters."""

    def closure_begins(self, step: Step) -> None:
        """The closure of the step is about to be evaluated."""

    def closure_ended(self, step: Step, loss: object, *, failed: bool) -> None:
        """The closure has returned `loss`, or raised."""

    def step_ended(self, step: Step) -> None:
        """The step is over: taken or skipped. May raise, to stop who trains."""

    def step_failed(self, step: Step) -> None:
        """The step raised; it is none, unless `step_ended` came before."""

    def numbers_logged(self, numbers: Mapping[str, Tensor | float], *, step: int | None) -> None:
        """The user has handed over numbers of their own, which were checked."""

    def state_loaded(self, control: Any, steps: Sequence[int]) -> None:
        """A control has loaded a checkpoint, in which it had counted so many steps of each of its
        optimizers."""


class StepEvents:
    """Who listens, to one control or to the whole process.

    Attributes:
        own: those that were added here, in the order in which they came.
        listeners: all to tell: these, and then those of the whole process.
    """

    def __init__(self, parent: StepEvents | None = None) -> None:
        self._parent = parent
        self.own: tuple[StepListener, ...] = ()
        self._children: weakref.WeakSet[StepEvents] = weakref.WeakSet()
        self.listeners: tuple[StepListener, ...] = ()
        if parent is not None:
            parent._children.add(self)
            self._update()

    def __reduce__(self) -> Any:
        # A copy of a control tells nobody of itself: its run file, say, is the original's.
        return "EVENTS" if self._parent is None else (StepEvents, (self._parent,))

    def add(self, listener: StepListener) -> None:
        """Tells `listener` too, from here on."""
        self.own = (*self.own, listener)
        self._update()

    def discard(self, listener: StepListener) -> None:
        """Tells `listener` nothing any more."""
        self.own = tuple(each for each in self.own if each is not listener)
        self._update()

    def _update(self) -> None:
        everywhere = () if self._parent is None else self._parent.listeners
        self.listeners = self.own + everywhere
        for child in list(self._children):
            child._update()

    def of_drivers(self) -> list[StepEvents]:
        """Those of the controls and scalers of the process that live."""
        return list(self._children)

    def begin_step(self, step: Step) -> Step:
        """A step begins; if a listener raises, which refuses it, it has not begun."""
        for listener in self.listeners:
            listener.step_begins(step)
        _running.append(step)
        return step

    def end_step(self, step: Step) -> None:
        """A step is over, and what is known of it is filled in."""
        _forget(step)
        for listener in self.listeners:
            listener.step_ended(step)

    def goes_on(self, step: Step) -> bool:
        """Whether a step has begun, and neither ended nor failed."""
        return len(_running) > 0 and (_running[-1] is step or any(e is step for e in _running))

    def fail_step(self, step: Step) -> None:
        """A step has raised, before or after it was over."""
        _forget(step)
        for listener in self.listeners:
            listener.step_failed(step)

    def begin_clip(
        self, params: Sequence[Tensor], limit: Any, *, by_value: bool = False, order: Any = 2.0
    ) -> Clip:
        """A clip function begins."""
        clip = Clip(params, limit, by_value=by_value, order=order)
        for listener in self.listeners:
            listener.clip_begins(clip)
        return clip

    def end_clip(self, clip: Clip, *, norm: Any = None) -> None:
        """A clip function has clipped, and found `norm` if it measures one."""
        clip.norm = norm
        for listener in self.listeners:
            listener.clip_ended(clip)

    def step_around(self, optimizer: Any) -> Step | None:
        """The step that goes on, and of which a step of `optimizer` would be a part."""
        for step in reversed(_running):
            if not step.covers(optimizer):
                continue
            if step.driver is not step.optimizers[0] or _goes_on(step.frame):
                return step
            self.fail_step(step)  # torch does not tell when an optimizer's step raises.
        return None


# Steps that have begun and not ended, of the whole process.
_running: list[Step] = []
EVENTS = StepEvents()


def _forget(step: Step) -> None:
    if _running and _running[-1] is step:
        _running.pop()
    else:
        _running[:] = [each for each in _running if each is not step]


def _goes_on(frame: FrameType | None) -> bool:
    """Whether a frame is one of those above this one."""
    above: FrameType | None = sys._getframe(1)
    while above is not None:
        if above is frame:
            return True
        above = above.f_back
    return False
