"""Follows one step through a model, forward and backward, until something is not finite.

There only while a step is traced. Modules have hooks before and after their forward; gradients are
seen by hooks on the tensors that go in and out, not on the modules: torch's module hooks put views
around tensors, and an in-place module behind one would raise. What is seen first in time counts.
Every look waits for the device.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradilocks._torch import in_backward
from gradilocks.lab.trace.finding import Finding, nan_buffers
from gradilocks.lab.trace.magnitudes import Magnitude, magnitude, tensors_in
from gradilocks.names import is_wrapper, named_modules, unwrapped

__all__ = ["Following"]

_MANY = 10_000


class _Bad(NamedTuple):
    """A tensor that was not finite when a module was given it."""

    tensor: weakref.ref[Tensor]
    mask: bool
    """Whether -inf is all that is not finite in it."""

    @staticmethod
    def of(tensor: Tensor) -> _Bad:
        values = tensor.detach()
        other = torch.isnan(values).any() | (values == math.inf).any()
        return _Bad(weakref.ref(tensor), not bool(other) and not values.is_complex())


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
    taken: list[_Bad] = field(default_factory=list)
    """What it was given that was not finite."""
    suspected: bool = False
    """Whether something was suspicious before it was called."""

    def finding(
        self, where: str, seen: Magnitude, *, near: str = "", lost: bool | None = None
    ) -> Finding:
        """What is said if this call is where `seen` came up."""
        backward = where in ("backward", "inside", "parameter")
        inputs = [*self.inputs, *self.gradients] if backward else self.inputs
        return Finding(where, self.name, self.module, seen, inputs, near, self.buffers, lost)


@dataclass
class _Seen:
    """A tensor that went between modules, and whose gradient will come."""

    tensor: weakref.ref[Tensor]
    made_by: list[tuple[_Call, str]] = field(default_factory=list)
    """Innermost first."""
    used_by: list[tuple[_Call, str]] = field(default_factory=list)
    """Outermost first."""
    inside: _Call | None = None
    """The module that was running when it was made."""
    broken: Tensor | None = None
    """Of the model's output: which elements are not finite, if any."""


class _Hook:
    """A hook that stays behind when the model is copied or pickled: the copy's does nothing."""

    def __init__(self, act: Callable[..., None], *first: Any) -> None:
        self._act, self._first = act, first

    def __call__(self, *args: Any) -> None:
        self._act(*self._first, *args)

    def __reduce__(self) -> Any:
        # Takes anything, returns None, and is there wherever the pickle is read.
        return getattr, (nullcontext(), "__exit__")


class _Backward:
    """What torch runs backward, for as long as somebody listens.

    The first listener puts a function around `torch.autograd.backward` and `grad`, and the last
    takes it away, in whatever order they leave.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Any], None]] = []
        self._replaced: list[tuple[str, Any, Any]] = []

    def add(self, listener: Callable[[Any], None]) -> None:
        with self._lock:
            self._listeners.append(listener)
            if not self._replaced:
                for name, first in (("backward", "tensors"), ("grad", "outputs")):
                    original = getattr(torch.autograd, name)
                    around = self._around(original, first)
                    setattr(torch.autograd, name, around)
                    self._replaced.append((name, original, around))

    def discard(self, listener: Callable[[Any], None]) -> None:
        with self._lock:
            self._listeners = [each for each in self._listeners if each != listener]
            if not self._listeners:
                for name, original, around in self._replaced:
                    if getattr(torch.autograd, name) is around:  # Else somebody is around it.
                        setattr(torch.autograd, name, original)
                self._replaced = []

    def _around(self, original: Any, first: str) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                for listener in self._listeners:
                    listener(args[0] if args else kwargs.get(first))
            return original(*args, **kwargs)

        return call


BACKWARD = _Backward()


class Following:
    """Hooks on every module of a model, for the length of a step."""

    def __init__(self, model: nn.Module, found: Callable[[Finding], None]) -> None:
        self._found = found
        self._stack: list[_Call] = []
        self._seen: dict[int, _Seen] = {}
        self._suspect: Finding | None = None
        self._source: _Bad | None = None  # What a module was given that makes the suspect.
        self._harmless: dict[int, weakref.ref[Tensor]] = {}  # What modules have made nothing of.
        self.answered = False
        """Whether something was found."""
        self.forwards = 0
        self._lost: bool | None = None  # Whether what is run backward is not finite.
        self._root = id(unwrapped(model))
        self._params = {id(param) for param in model.parameters()}
        self._handles: list[Any] = []
        for name, module in named_modules(model):
            if is_wrapper(module):
                continue  # What it wraps is there too.
            before = _Hook(self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            after = _Hook(self._after, name)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
            for key, param in module.named_parameters(recurse=False):
                if param.requires_grad and param.is_leaf:
                    hook = _Hook(self._parameter, name, weakref.ref(module), key)
                    self._handles.append(param.register_hook(hook))  # type: ignore[no-untyped-call]
        BACKWARD.add(self._backward)

    def remove(self) -> None:
        """Takes every hook away; those on tensors do nothing from here on."""
        for handle in self._handles:
            handle.remove()
        BACKWARD.discard(self._backward)
        self._handles, self._seen, self._stack = [], {}, []
        self.answered = True

    def settle(self) -> None:
        """The step is over: what looked suspicious in forward is all there is."""
        if self._suspect is not None:
            self._answer(self._suspect)

    # --- forward -------------------------------------------------------------------------------

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self.answered or torch.compiler.is_compiling():
            return
        call = _Call(name, module, buffers=nan_buffers(module))
        if id(module) == self._root and not _in_backward():
            self.settle()
            self._stack, self._seen, self._harmless = [], {}, {}
        if not self._stack and not _in_backward():
            self.forwards += 1
            if len(self._seen) > _MANY:  # The model itself is never called, only its parts.
                self._seen = {k: s for k, s in self._seen.items() if s.tensor() is not None}
        above = self._stack[-1] if self._stack else None
        call.suspected = self._suspect is not None
        for place, tensor in _arguments(args, kwargs):
            seen = magnitude(tensor, place)
            if seen is None:
                continue
            call.inputs.append(seen)
            known = self._harmless.get(id(tensor))
            if not seen.finite and (known is None or known() is not tensor):
                bad = _Bad.of(tensor)
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
        if self.answered or torch.compiler.is_compiling() or not self._stack:
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
        if finite and any_output and not _in_backward():
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
            bad.tensor is source.tensor or (bad.mask and source.mask) for bad in call.taken
        )
        if given or not call.suspected:  # All that was suspicious came up in this call.
            self._suspect = self._source = None

    def _watch(self, tensor: Tensor) -> _Seen:
        """The record of a tensor; its gradient is looked at from here on."""
        known = self._seen.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        known = self._seen[id(tensor)] = _Seen(weakref.ref(tensor))
        if tensor.requires_grad and not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            tensor.register_hook(_Hook(self._gradient, known))  # type: ignore[no-untyped-call]
        return known

    # --- backward ------------------------------------------------------------------------------

    def _backward(self, tensors: Any) -> None:
        """`tensors`, the loss most often, are about to be run backward."""
        if not self.answered:
            found = [magnitude(tensor, "") for _, tensor in tensors_in(tensors, "")]
            known = [seen.finite for seen in found if seen is not None]
            self._lost = not all(known) if known else None

    def _gradient(self, seen: _Seen, gradient: Tensor) -> None:
        if self.answered:
            return
        found = magnitude(gradient, "gradient")
        if found is None:
            return
        for call, place in seen.made_by:
            call.gradients.append(found.named(f"gradient of {place}"))
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
            self._answer(call.finding("loss", found, near=place, lost=self._lost))

    def _parameter(
        self, name: str, module: weakref.ref[nn.Module], key: str, gradient: Tensor
    ) -> None:
        owner = module()
        if self.answered or owner is None:
            return
        found = magnitude(gradient, f"gradient of {key}")
        if found is None or found.finite:
            return
        if self._suspect is not None:
            self._answer(self._suspect)
            return
        calls = [c for s in self._seen.values() for c, _ in s.made_by if c.module is owner]
        call = calls[0] if calls else _Call(name, owner)
        self._answer(call.finding("parameter", found, near=key))

    def _answer(self, finding: Finding) -> None:
        if not self.answered:
            self.answered = True
            self._found(finding)


def _arguments(args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    found = list(tensors_in(tuple(args), "input")) if len(args) != 1 else []
    if len(args) == 1:
        found = list(tensors_in(args[0], "input"))
    return found + [pair for key, value in kwargs.items() for pair in tensors_in(value, key)]


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


def _in_backward() -> bool:
    """Whether this forward is a checkpoint's, run again for the gradients."""
    return in_backward()
