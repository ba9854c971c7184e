"""`gradilocks.trace`: a model enters; after a skip, the module in which NaN or Inf was born leaves.

A Tracer is quiet until a step was skipped, and then follows the next. Off, there is no hook on the
model at all. Armed, the model runs with hooks (`_StepTrace`), slowly and waiting for the device,
until something non-finite is found or a step is taken. A model whose parameters hold NaN or Inf is
not followed: whatever a trace saw would come from them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradilocks._torch import drop_empty_hooks, in_backward
from gradilocks.eager import UNCOMPILED
from gradilocks.lab.tensors import Hook, tensors_in
from gradilocks.lab.trace.finding import (
    Finding,
    Magnitude,
    damaged_gradients,
    damaged_parameters,
    magnitude,
    nan_buffers,
)
from gradilocks.names import is_wrapper, named_modules, unwrapped
from gradilocks.runfile import Trace
from gradilocks.step.events import Step, StepEvents, StepListener
from gradilocks.step.lr_schedule import Flag
from gradilocks.step.outcome import fetch
from gradilocks.values import ROW

__all__ = ["Tracer", "trace"]

_logger = logging.getLogger("gradilocks")
_MANY = 10_000


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
        self._trace: _StepTrace | None = None
        self._is_late = False
        self._found_nothing = False  # In the step that goes on, though it was followed.
        # Of each step whose flag is on its way: also its number, and what its gradients tell.
        self._flags: list[tuple[Flag, int | Tensor, Trace | None]] = []
        self._latest_step: int | Tensor = 0
        self._step_hook: Any = None
        self._closed = False
        self._began = time.perf_counter()

    @property
    def armed(self) -> bool:
        """Whether the model has hooks at this moment."""
        return self._trace is not None

    def arm(self) -> None:
        """Follows the model from here on, until something is found or a step is taken.

        If its parameters hold NaN or Inf already, that is what is found, and nothing is followed.
        """
        if self._closed:
            raise RuntimeError("this tracer is closed. Make another with gradilocks.trace(model).")
        model = self._model()
        if self._trace is not None or model is None:
            return
        done = _number(self._latest_step)
        when = f"after step {done:,}" if done else "before the traced step"
        damaged = damaged_parameters(unwrapped(model), when)
        if damaged is not None:
            if not self._is_late:  # Once, until a step was well again.
                self._is_late = True
                self._tell(damaged, step=max(done, 1))
            return
        self._is_late = False
        self._trace = _StepTrace(model, self._found)
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
            row = step.record.row
            self.note(row, step=row[ROW.index("step")].clone())

    def note(self, row: Tensor, *, step: int | Tensor | None = None) -> None:
        """A step is over.

        On a GPU the numbers travel without a wait and are looked at when they have arrived, one or
        more steps later.

        Args:
            row: begins with 1 if it had NaN or Inf, else with 0.
            step: its number, by default the one after the last. A tensor is read only if there is
                something to tell.
        """
        if self.armed:
            self.disarm()
        step = self._latest_step + 1 if step is None else step
        self._latest_step = step
        if self._closed:
            return
        # What the gradients hold after a step in which nothing was found, if it was followed.
        found_nothing, self._found_nothing = self._found_nothing, False
        model = self._model() if found_nothing else None
        gradients = None if model is None else damaged_gradients(unwrapped(model))
        self._flags.append((Flag(row), step, gradients))
        bad = False
        while self._flags and (told := self._flags[0][0].overflowed()) is not None:
            _, number, in_no_module = self._flags.pop(0)
            if told and in_no_module is not None:
                self._tell(in_no_module, step=_number(number))
            bad = bad or told
        if not bad:
            self._is_late = False
        elif len(self.findings) < self._most and not self._is_late:
            self.arm()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step is taken: what was to be seen has been seen."""
        model = self._model()
        if self._trace is None or not self._trace.forwards or model is None:
            return
        mine = {id(param) for param in model.parameters()}
        held = (param for group in optimizer.param_groups for param in group["params"])
        if any(id(param) in mine for param in held):
            self.disarm()

    def _found(self, finding: Finding) -> None:
        model, when = self._model(), "finite when the trace began"
        damaged = None if model is None else damaged_parameters(unwrapped(model), when)
        self._tell(damaged or finding.trace(), step=_number(self._latest_step) + 1)
        self.disarm()

    def _tell(self, found: Trace, *, step: int) -> None:
        now = time.perf_counter() - self._began
        if self._recorder is not None:
            now = self._recorder.elapsed()
        found = dataclasses.replace(found, step=step, time=now)
        self.findings.append(found)
        if self._recorder is None or not self._recorder.trace(found):
            _logger.warning("step %d traced: %s", found.step, found.text)


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


def _number(step: int | Tensor) -> int:
    """A step's number; reading a tensor waits for its device."""
    return int(fetch(step)[0]) if isinstance(step, Tensor) else step


_Reference = Callable[[], "Tensor | None"]


def _reference(tensor: Tensor) -> _Reference:
    """Keeps no activation alive. A parameter is held, for the length of a step, as its module is:
    `torch.utils.swap_tensors` would refuse it if it had a weak reference."""
    return (lambda: tensor) if isinstance(tensor, nn.Parameter) else weakref.ref(tensor)


class _BadInput(NamedTuple):
    """A tensor that was not finite when a module was given it."""

    tensor: _Reference
    mask: bool
    """Whether -inf is all that is not finite in it."""

    @staticmethod
    def of(tensor: Tensor) -> _BadInput:
        values = tensor.detach()
        other = torch.isnan(values).any() | (values == math.inf).any()
        return _BadInput(_reference(tensor), not bool(other) and not values.is_complex())


@dataclass
class _Call:
    """One call of one module; a shared module has several."""

    name: str
    module: nn.Module
    inputs: list[Magnitude] = field(default_factory=list)
    gradients: list[Magnitude] = field(default_factory=list)
    """Of its outputs, as they came in backward."""
    buffers: list[Magnitude] = field(default_factory=list)
    """Its own that held NaN before it."""
    taken: list[_BadInput] = field(default_factory=list)
    """What it was given that was not finite."""
    suspected: bool = False
    """Whether something was suspicious before it was called."""

    def finding(
        self, where: str, seen: Magnitude, *, near: str = "", loss_is_bad: bool | None = None
    ) -> Finding:
        """What is said if this call is where `seen` came up."""
        backward = where in ("backward", "inside", "parameter")
        inputs = [*self.inputs, *self.gradients] if backward else self.inputs
        return Finding(where, self.name, self.module, seen, inputs, near, self.buffers, loss_is_bad)


@dataclass
class _Passed:
    """A tensor that passed between modules, and whose gradient will come."""

    tensor: _Reference
    made_by: list[tuple[_Call, str]] = field(default_factory=list)
    """Innermost first."""
    used_by: list[tuple[_Call, str]] = field(default_factory=list)
    """Outermost first."""
    inside: _Call | None = None
    """The module that was running when it was made."""
    broken: Tensor | None = None
    """Of the model's output: which elements are not finite, if any."""


class _BackwardCalls:
    """What torch runs backward, for as long as somebody listens.

    The first listener puts a function around `torch.autograd.backward` and `grad`, and the last
    takes it away, in whatever order they leave.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[_StepTrace] = []
        self._replaced: list[tuple[str, Any, Any]] = []

    def add(self, listener: _StepTrace) -> None:
        with self._lock:
            self._listeners.append(listener)
            if not self._replaced:
                for name, first in (("backward", "tensors"), ("grad", "outputs")):
                    original = getattr(torch.autograd, name)
                    around = self._around(original, first)
                    setattr(torch.autograd, name, around)
                    self._replaced.append((name, original, around))

    def discard(self, listener: _StepTrace) -> None:
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]
            if not self._listeners:
                for name, original, around in self._replaced:
                    if getattr(torch.autograd, name) is around:  # Else somebody is around it.
                        setattr(torch.autograd, name, original)
                self._replaced = []

    def _around(self, original: Any, first: str) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            listeners = [] if torch.compiler.is_compiling() else list(self._listeners)
            for listener in listeners:
                listener.backward_begins(args[0] if args else kwargs.get(first))
            try:
                return original(*args, **kwargs)
            finally:
                for listener in listeners:
                    listener.backward_ended()

        return call


_BACKWARD = _BackwardCalls()


class _StepTrace:
    """Hooks on every module of a model, for the length of a step.

    Modules have hooks before and after their forward; gradients are seen by hooks on the tensors
    that go in and out, not on the modules: torch's module hooks put views around tensors, and an
    in-place module behind one would raise. What is seen first in time counts. Every look waits for
    the device.
    """

    def __init__(self, model: nn.Module, found: Callable[[Finding], None]) -> None:
        self._found = found
        self._stack: list[_Call] = []
        self._passed: dict[int, _Passed] = {}
        self._suspect: Finding | None = None
        self._source: _BadInput | None = None  # What a module was given that makes the suspect.
        self._harmless: dict[
            int, Callable[[], Tensor | None]
        ] = {}  # What modules have made nothing of.
        self.is_done = False
        """Whether something was found."""
        self.forwards = 0
        self._loss_is_bad: bool | None = None  # Whether what is run backward is not finite.
        self._root = id(unwrapped(model))
        self._params = {id(param) for param in model.parameters()}
        self._handles: list[Any] = []
        for name, module in named_modules(model):
            if is_wrapper(module):
                continue  # What it wraps is there too.
            before = Hook(self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            after = Hook(self._after, name)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        self._model = weakref.ref(model)
        self._parameter_handles: list[Any] = []
        _BACKWARD.add(self)

    def remove(self) -> None:
        """Takes every hook away; those on tensors do nothing from here on."""
        for handle in self._handles:
            handle.remove()
        _BACKWARD.discard(self)
        self._handles, self._passed, self._stack = [], {}, []
        self.is_done = True

    def settle(self) -> None:
        """The step is over: what looked suspicious in forward is all there is."""
        if self._suspect is not None:
            self._answer(self._suspect)

    # --- forward -------------------------------------------------------------------------------

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self.is_done or torch.compiler.is_compiling():
            return
        call = _Call(name, module, buffers=nan_buffers(module))
        if id(module) == self._root and not in_backward():
            self.settle()
            self._stack, self._passed, self._harmless = [], {}, {}
        if not self._stack and not in_backward():
            self.forwards += 1
            if len(self._passed) > _MANY:  # The model itself is never called, only its parts.
                self._passed = {k: s for k, s in self._passed.items() if s.tensor() is not None}
        above = self._stack[-1] if self._stack else None
        call.suspected = self._suspect is not None
        for place, tensor in _arguments(args, kwargs):
            seen = magnitude(tensor, place)
            if seen is None:
                continue
            call.inputs.append(seen)
            known = self._harmless.get(id(tensor))
            if not seen.finite and (known is None or known() is not tensor):
                bad = _BadInput.of(tensor)
                call.taken.append(bad)
                if self._suspect is None:
                    self._source = bad
                    if above is None:
                        self._suspect = call.finding(self._outside(tensor), seen)
                    else:
                        self._suspect = above.finding("between", seen, near=name)
            self._watch(tensor).used_by.append((call, place))
        self._stack.append(call)

    def _outside(self, tensor: Tensor) -> str:
        """What is known of where a tensor comes from that no module of the model was given."""
        if tensor.grad_fn is None:  # After a module has run, it may be what that made, detached.
            return "input" if self.forwards == 1 else "outside"
        # In which operation of another model it arose, if one had a part in it, is not known.
        return "before" if _leaves(tensor) <= self._params else "outside"

    def _after(
        self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        if self.is_done or torch.compiler.is_compiling() or not self._stack:
            return
        while self._stack and self._stack[-1].module is not module:
            self._stack.pop()  # A module that raised, and whose caller went on.
        if not self._stack:
            return
        call = self._stack.pop()
        above = self._stack[-1] if self._stack else None
        finite, any_output = True, False
        for place, tensor in tensors_in(output, "output"):
            seen = magnitude(tensor, place)
            if seen is None:
                continue
            any_output = True
            if not seen.finite:
                finite = False
                if self._suspect is None:
                    self._suspect, self._source = call.finding("forward", seen), None
            watched = self._watch(tensor)
            watched.made_by.append((call, place))
            watched.inside = above
            if not seen.finite and id(module) == self._root:
                watched.broken = torch.logical_not(torch.isfinite(tensor.detach()))
        # Not in a checkpoint's forward that is run again for the gradients.
        if finite and any_output and not in_backward():
            self._clear(call)

    def _clear(self, call: _Call) -> None:
        """A module has made finite outputs of what it was given: nothing of it has come out.

        A mask of -inf, say. It may be a part or a copy of the one that the model was given.
        """
        for bad in call.taken:
            tensor = bad.tensor()
            if tensor is not None:
                self._harmless[id(tensor)] = bad.tensor
        source = self._source
        given = source is not None and any(
            bad.tensor() is source.tensor() or (bad.mask and source.mask) for bad in call.taken
        )
        if given or not call.suspected:  # All that was suspicious came up in this call.
            self._suspect = self._source = None

    def _watch(self, tensor: Tensor) -> _Passed:
        """The record of a tensor; its gradient is looked at from here on."""
        known = self._passed.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        known = self._passed[id(tensor)] = _Passed(_reference(tensor))
        if tensor.requires_grad and not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            tensor.register_hook(Hook(self._gradient, known))  # type: ignore[no-untyped-call]
        return known

    # --- backward ------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any) -> None:
        """`tensors`, the loss most often, are about to be run backward.

        Only now parameters get their hooks: `torch.utils.swap_tensors` leaves them behind.
        """
        model = self._model()
        if self.is_done or model is None:
            return
        for name, module in () if in_backward() else named_modules(model):
            for key, param in module.named_parameters(recurse=False):
                if param.requires_grad and param.is_leaf and not is_wrapper(module):
                    hook = Hook(self._parameter, name, weakref.ref(module), key)
                    self._parameter_handles.append(param.register_hook(hook))  # type: ignore[no-untyped-call]
        found = [magnitude(tensor, "") for _, tensor in tensors_in(tensors, "")]
        known = [seen.finite for seen in found if seen is not None]
        self._loss_is_bad = not all(known) if known else None

    def backward_ended(self) -> None:
        """Something was run backward, or has raised."""
        if in_backward():  # Within something else.
            return
        for handle in self._parameter_handles:
            handle.remove()
        self._parameter_handles = []
        model = self._model()
        for param in () if model is None else model.parameters():
            drop_empty_hooks(param)

    def _gradient(self, seen: _Passed, gradient: Tensor) -> None:
        if self.is_done:
            return
        found = magnitude(gradient, "gradient")
        if found is None:
            return
        for call, place in seen.made_by:
            call.gradients.append(found._replace(name=f"gradient of {place}"))
        counts = seen.broken is not None and bool((gradient.detach()[seen.broken] != 0).any())
        if found.finite and not counts:
            if seen.broken is not None:
                self._suspect = None  # What is not finite in the output has no part in the loss.
            return
        if self._suspect is not None:
            self._answer(self._suspect)
        elif seen.used_by:
            call, place = seen.used_by[-1]  # The innermost.
            self._answer(call.finding("backward", found, near=place))
        elif seen.inside is not None:
            made = seen.made_by[0][0]
            self._answer(seen.inside.finding("inside", found, near=made.name))
        else:
            call, place = seen.made_by[-1]
            self._answer(call.finding("loss", found, near=place, loss_is_bad=self._loss_is_bad))

    def _parameter(
        self, name: str, module: weakref.ref[nn.Module], key: str, gradient: Tensor
    ) -> None:
        owner = module()
        if self.is_done or owner is None:
            return
        found = magnitude(gradient, f"gradient of {key}")
        if found is None or found.finite:
            return
        if self._suspect is not None:
            self._answer(self._suspect)
            return
        calls = [c for s in self._passed.values() for c, _ in s.made_by if c.module is owner]
        call = calls[0] if calls else _Call(name, owner)
        self._answer(call.finding("parameter", found, near=key))

    def _answer(self, finding: Finding) -> None:
        if not self.is_done:
            self.is_done = True
            self._found(finding)


def _arguments(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield from tensors_in(args[0] if len(args) == 1 else tuple(args), "input")
    for key, value in kwargs.items():
        yield from tensors_in(value, key)


def _leaves(tensor: Tensor) -> set[int]:
    """The leaves from which a tensor was computed, by their ids; -1 for one that is not known."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [after for after, _ in node.next_functions if after is not None]
        if not following:
            leaves.add(id(node.variable) if hasattr(node, "variable") else -1)
        waiting += following
    return leaves
