"""A model that runs with hooks enters; the first value that was NaN or Inf leaves, as a Finding.

For the length of a step, or of a call that is run once more. What is seen first in time counts, and
every look waits for the device. Gradients are seen by hooks on the tensors that go in and out of
modules, not on the modules: torch's module hooks put views around tensors, and an in-place module
behind one would raise.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradilocks._torch import drop_empty_hooks, in_backward
from gradilocks.lab.tensors import Hook, tensors_in
from gradilocks.lab.trace.finding import Finding, Magnitude, magnitude, nan_buffers
from gradilocks.lab.trace.kept_calls import KeptInput
from gradilocks.names import is_wrapper, named_modules, prefixed, unwrapped

__all__ = ["StepTrace"]

_MANY = 10_000


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
    outputs: list[Magnitude] = field(default_factory=list)
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
        after = self.gradients if backward else self.outputs if where == "loss" else ()
        inputs = [*self.inputs, *after]
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
        self._listeners: list[StepTrace] = []
        self._replaced: list[tuple[str, Any, Any]] = []

    def add(self, listener: StepTrace) -> None:
        with self._lock:
            self._listeners.append(listener)
            if not self._replaced:
                for name, first in (("backward", "tensors"), ("grad", "outputs")):
                    original = getattr(torch.autograd, name)
                    around = self._around(original, first)
                    setattr(torch.autograd, name, around)
                    self._replaced.append((name, original, around))

    def discard(self, listener: StepTrace) -> None:
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


class StepTrace:
    """Hooks on every module of some models.

    Args:
        models: outermost modules.
        found: told of the first value that was not finite.
        root: the module whose call begins another forward pass; by default each of the models.
        replays: for a call that is run once more, by the id of what it is given now what it was
            given then; None to follow a step that is trained.
        loss_is_bad: whether what is run backward is not finite, if that is known before.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        found: Callable[[Finding], None],
        *,
        root: nn.Module | None = None,
        replays: Mapping[int, KeptInput] | None = None,
        loss_is_bad: bool | None = None,
    ) -> None:
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
        self._replays = replays
        self._loss_is_bad = loss_is_bad
        roots = [unwrapped(model) for model in models] if root is None else [root]
        self._roots = {id(each) for each in roots}
        self._params = {id(param) for model in models for param in model.parameters()}
        self._models = [(prefix, weakref.ref(model)) for prefix, model in prefixed(models).items()]
        self._handles: list[Any] = []
        for name, module in self._modules():
            before = Hook(self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            after = Hook(self._after, name)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        self._parameter_handles: list[Any] = []
        if replays is None:
            _BACKWARD.add(self)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Those of the models, with their names; of a wrapper what it wraps."""
        for prefix, find in self._models:
            model = find()
            for name, module in () if model is None else named_modules(model, prefix):
                if not is_wrapper(module):
                    yield name, module

    def remove(self) -> None:
        """Takes every hook away; those on tensors do nothing from here on."""
        for handle in self._handles:
            handle.remove()
        self._unhook_parameters()
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
        if id(module) in self._roots and not in_backward():
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
        kept = (self._replays or {}).get(id(tensor))
        has_graph = tensor.grad_fn is not None if kept is None else kept.has_graph
        if not has_graph:  # After a module has run, it may be what that made, detached.
            return "input" if self.forwards == 1 else "outside"
        original = tensor if kept is None else kept.original()
        # In which operation of another model it arose, if one had a part in it, is not known.
        known = original is not None and _leaves(original) <= self._params
        return "before" if known else "outside"

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
            call.outputs.append(seen)
            if not seen.finite:
                finite = False
                if self._suspect is None:
                    self._suspect, self._source = call.finding("forward", seen), None
            watched = self._watch(tensor)
            watched.made_by.append((call, place))
            watched.inside = above
            if not seen.finite and id(module) in self._roots:
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
        """`tensors`, the loss most often, are about to be run backward."""
        if self.is_done:
            return
        self.watch_parameters()
        found = [magnitude(tensor, "") for _, tensor in tensors_in(tensors, "")]
        known = [seen.finite for seen in found if seen is not None]
        self._loss_is_bad = not all(known) if known else None

    def watch_parameters(self) -> None:
        """Backward is about to run. Only now parameters get their hooks: `torch.utils.swap_tensors`
        leaves them behind."""
        for name, module in () if in_backward() else self._modules():
            for key, param in module.named_parameters(recurse=False):
                if param.requires_grad and param.is_leaf:
                    hook = Hook(self._parameter, name, weakref.ref(module), key)
                    self._parameter_handles.append(param.register_hook(hook))  # type: ignore[no-untyped-call]

    def backward_ended(self) -> None:
        """Something was run backward, or has raised."""
        if not in_backward():  # Else within something else.
            self._unhook_parameters()

    def _unhook_parameters(self) -> None:
        for handle in self._parameter_handles:
            handle.remove()
        for _, module in self._modules() if self._parameter_handles else ():
            for param in module.parameters(recurse=False):
                drop_empty_hooks(param)
        self._parameter_handles = []

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
            if seen.broken is not None and not self._loss_is_bad:
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
