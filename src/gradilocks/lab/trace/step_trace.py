"""A model that runs with hooks enters; the first value that was NaN or Inf leaves, as a Finding.

For the length of a step, or of a call that is run once more. Every look waits for the device.

Not all that is not finite is a fault: data mark what is missing with NaN, and masks are -inf. So
all that came up is suspected until a module, or the model, has made something finite of it. Of what
is left a module that has made NaN or +Inf of finite values comes first, then what the model was
given, then a mask; of its kind the first in time.

Gradients are seen by hooks on the tensors that go in and out of modules, not on the modules:
torch's module hooks put views around tensors, and an in-place module behind one would raise.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradilocks._torch import drop_empty_hooks, in_backward
from gradilocks.lab.tensors import Hook, tensors_in
from gradilocks.lab.trace.finding import Finding, Magnitude, magnitude, nan_buffers
from gradilocks.lab.trace.kept_calls import KeptInput
from gradilocks.names import is_wrapper, named_modules, prefixed, unwrapped
from gradilocks.ranks.layout import has_other_ranks
from gradilocks.step.table import measurable

__all__ = ["StepTrace"]

_logger = logging.getLogger("gradilocks")

_MANY = 10_000
_LIKE_A_MASK = "-inf is all that came of it, as of a mask, and what made NaN of that was not seen"
_OR_LOSS = "the model's output held {what} too, from {name}, and the loss may have used that"
_FILLED = "a module had made something finite of it before"
_REPLACED = "modules ran on finite values after that, so that it may have been replaced"
_OUTPUT_TOO = "that is an output of the model too, and the loss may have made it"
_GIVEN_TOO = "it was given NaN or Inf too, of which a module in it had made something finite"
_MASK_GIVEN = "it was given -inf too, as a mask holds it"
_NOT_TRAINED = "no gradient came to the output that it spoilt"
_LATER_TOO = "{name} made {what} of finite values as well, later"

_Reference = Callable[[], "Tensor | None"]


def _reference(tensor: Tensor) -> _Reference:
    """Keeps no activation alive. A parameter is held, for the length of a step, as its module is:
    `torch.utils.swap_tensors` would refuse it if it had a weak reference."""
    return (lambda: tensor) if isinstance(tensor, nn.Parameter) else weakref.ref(tensor)


class _BadTensor(NamedTuple):
    """A tensor that was not finite when a module was given it, or returned it."""

    tensor: _Reference
    mask: bool
    """Whether -inf is all that is not finite in it."""

    @staticmethod
    def of(tensor: Tensor, seen: Magnitude) -> _BadTensor:
        values = None if seen.nan else measurable(tensor.detach(), any_subclass=True)
        real = None if values is None or values.is_complex() else values
        mask = real is not None and not bool((real == math.inf).any())
        return _BadTensor(_reference(tensor), mask)


@dataclass
class _Call:
    """One call of one module; a shared module has several."""

    name: str
    module: nn.Module
    number: int = 0
    """Its place in time."""
    inputs: list[Magnitude] = field(default_factory=list)
    gradients: list[Magnitude] = field(default_factory=list)
    """Of its outputs, as they came in backward."""
    outputs: list[Magnitude] = field(default_factory=list)
    buffers: list[Magnitude] = field(default_factory=list)
    """Its own that held NaN before it."""
    taken: list[_BadTensor] = field(default_factory=list)
    """What it was given that was not finite."""
    main_is_bad: bool = False
    """Whether the first of what it was given was not finite: data, where others may be masks."""
    latest: int = 0
    """The place in time of the last thing that it was given."""
    has_parts: bool = False
    """Whether other modules ran in it."""

    def finding(
        self, where: str, seen: Magnitude, *, near: str = "", loss_is_bad: bool | None = None
    ) -> Finding:
        """What is said if this call is where `seen` came up."""
        backward = where in ("backward", "inside", "parameter")
        after = self.gradients if backward else self.outputs if where == "loss" else ()
        inputs = [*self.inputs, *after]
        return Finding(where, self.name, self.module, seen, inputs, near, self.buffers, loss_is_bad)


@dataclass(eq=False)
class _Suspect:
    """Something that was not finite, and of which nothing finite was seen to be made so far."""

    finding: Finding
    number: int
    """Its place in time, among those of calls."""
    given: bool
    """Whether the model was given it."""
    mask: bool
    """Whether -inf is all that it was, and was seen to become."""
    carriers: dict[int, _Reference] = field(default_factory=dict)
    """The tensors in which it was seen."""
    carried: bool = False
    """Whether a module was given it, and passed on what is not finite."""
    overtaken: bool = False
    """Whether modules ran on finite values that came after it, before any was given it."""

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The smallest is the one to blame."""
        return self.mask, self.given, self.number

    def is_in(self, taken: Sequence[_BadTensor]) -> bool:
        """Whether one of these is a tensor in which it was seen."""
        tensors = [tensor for bad in taken if (tensor := bad.tensor()) is not None]
        known = [self.carriers.get(id(tensor)) for tensor in tensors]
        return any(k is not None and k() is t for k, t in zip(known, tensors, strict=True))

    def carry(self, bad: _BadTensor) -> None:
        """It was seen in this tensor as well."""
        tensor = bad.tensor()
        if tensor is not None:
            self.carriers[id(tensor)] = bad.tensor

    def told(self) -> Finding:
        """The finding, with its doubt."""
        doubt = _LIKE_A_MASK if self.mask else _REPLACED if self.overtaken else ""
        return replace(self.finding, doubt=self.finding.doubt or doubt)


@dataclass
class _Passed:
    """A tensor that passed between modules, and whose gradient will come."""

    tensor: _Reference
    number: int
    """Its place in time, among those of calls."""
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
                listener._safely(listener.backward_begins, args[0] if args else kwargs.get(first))
            try:
                return original(*args, **kwargs)
            finally:
                for listener in listeners:
                    listener._safely(listener.backward_ended)

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
        received: the names of those tensors in the root's output to which a gradient comes; None if
            that is not known before.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        found: Callable[[Finding], None],
        *,
        root: nn.Module | None = None,
        replays: Mapping[int, KeptInput] | None = None,
        loss_is_bad: bool | None = None,
        received: Collection[str] | None = None,
    ) -> None:
        self._found = found
        self._stack: list[_Call] = []
        self._passed: dict[int, _Passed] = {}
        self._suspects: list[_Suspect] = []
        self._unused: _Suspect | None = None  # In an output to which no gradient comes.
        self._broken: set[int] = set()  # Outputs that are not finite, whose gradients will come.
        self._last: tuple[_Call, Magnitude] | None = None  # An output with -inf, all others finite.
        self._harmless: dict[int, _Reference] = {}  # Masks of which modules have made nothing.
        self._filled: list[_Suspect] = []  # What was given, and modules have made something of.
        self._numbers = 0
        self.is_done = False
        """Whether something was found."""
        self.forwards = 0
        self._replays = replays
        self._loss_is_bad = loss_is_bad
        self._received = received
        roots = [unwrapped(model) for model in models] if root is None else [root]
        self._roots = {id(each) for each in roots}
        self._params = {id(param) for model in models for param in model.parameters()}
        self._models = [(prefix, weakref.ref(model)) for prefix, model in prefixed(models).items()]
        self._handles: list[Any] = []
        for name, module in self._modules():
            before = Hook(self._safely, self._before, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            after = Hook(self._safely, self._after, name)
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

    def _safely(self, act: Callable[..., None], *args: Any) -> None:
        """Whatever goes wrong while a step trains ends the trace, and not the training."""
        try:
            act(*args)
        except Exception as error:
            if self._replays is not None:
                raise  # Of a call that is run once more, which tells why that failed.
            self.remove()
            why = f"{type(error).__name__}: {error}"
            _logger.warning("the step that goes on cannot be followed: %s", why)

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
        suspect = self._suspect
        if suspect is not None and suspect.mask and self._loss_is_bad is False:
            return  # With a loss that is finite, and no gradient that is not, it has hidden things.
        if suspect is not None and suspect.mask and self._loss_is_bad and self._last is not None:
            call, seen = self._last
            self._answer_loss(call, seen, near=seen.name)
        elif suspect is not None:
            self._answer(suspect.told())
        elif self._unused is not None and self._loss_is_bad and not self._unused.mask:
            found = self._unused.told()  # It may be detached, and given to a discriminator.
            doubt = found.doubt or (_NOT_TRAINED if self._received else "")
            self._answer(replace(found, doubt=doubt))

    @property
    def _suspect(self) -> _Suspect | None:
        return min(self._suspects, key=lambda each: each.order, default=None)

    # --- forward -------------------------------------------------------------------------------

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self.is_done or torch.compiler.is_compiling():
            return
        if id(module) in self._roots and not in_backward():
            if self._suspects and not all(each.mask for each in self._suspects):
                self.settle()
            self._stack, self._passed, self._harmless, self._filled = [], {}, {}, []
            self._last = None
        call = _Call(name, module, self._number(), buffers=nan_buffers(module))
        if not self._stack and not in_backward():
            self.forwards += 1
            if len(self._passed) > _MANY:  # The model itself is never called, only its parts.
                self._passed = {k: s for k, s in self._passed.items() if s.tensor() is not None}
        above = self._stack[-1] if self._stack else None
        if above is not None:
            above.has_parts = True
        for place, tensor in _arguments(args, kwargs):
            seen = magnitude(tensor, place)
            if seen is None:
                continue
            call.inputs.append(seen)
            passed = self._watch(tensor, call.number)
            call.latest = max(call.latest, passed.number)
            known = self._harmless.get(id(tensor))
            if not seen.finite and (known is None or known() is not tensor):
                call.main_is_bad = call.main_is_bad or len(call.inputs) == 1
                bad = _BadTensor.of(tensor, seen)
                call.taken.append(bad)
                again = [each for each in self._filled if each.is_in([bad])]
                if again:
                    self._filled.remove(again[0])
                    self._suspects.append(again[0])
                elif above is None:
                    if not self._suspects or not passed.made_by:
                        where = self._outside(tensor)
                        self._add(call.finding(where, seen), bad)
                elif not self._suspects or (not passed.made_by and self._is_origin(above, bad)):
                    self._add(above.finding("between", seen, near=name), bad, made_by=above)
                elif bad.mask and not passed.made_by:  # A part or a copy, as of a mask.
                    for suspect in self._suspects:
                        if suspect.mask and suspect.is_in(above.taken):
                            suspect.carry(bad)
            passed.used_by.append((call, place))
        self._stack.append(call)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _add(self, finding: Finding, bad: _BadTensor, *, made_by: _Call | None = None) -> None:
        """Suspects something; a call has made it, or the model was given it."""
        if in_backward():  # A checkpoint's forward is run again: all in it has been seen.
            return
        if made_by is not None and not self._suspects and any(not t.mask for t in made_by.taken):
            finding = replace(finding, doubt=_GIVEN_TOO)
        suspect = _Suspect(finding, self._number(), made_by is None, bad.mask)
        suspect.carry(bad)
        self._suspects.append(suspect)

    def _is_origin(self, call: _Call, bad: _BadTensor) -> bool:
        """Whether a call has made this of finite values, and nothing that ran in it explains it."""
        inside = any(each.number > call.number for each in self._suspects)
        if call.taken or inside:
            return False
        weights = [*call.module.parameters(recurse=False)]
        held = [magnitude(weight, "") for weight in ([] if bad.mask else weights)]
        return all(each is None or each.finite for each in held)

    def _outside(self, tensor: Tensor) -> str:
        """What is known of where a tensor comes from that no module of the model was given."""
        kept = (self._replays or {}).get(id(tensor))
        has_graph = tensor.grad_fn is not None if kept is None else kept.has_graph
        if not has_graph:  # After a module has run, it may be what that made, detached.
            trained = tensor.requires_grad if kept is None else kept.requires_grad
            sent = trained and has_other_ranks()  # As by a pipeline's earlier stage.
            return "input" if self.forwards == 1 and not sent else "outside"
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
        is_root = above is None and id(module) in self._roots
        any_output = False
        counted: list[tuple[_BadTensor, Magnitude]] = []
        for place, tensor in tensors_in(output, "output"):
            seen = magnitude(tensor, place)
            if seen is None:
                continue
            any_output = True
            call.outputs.append(seen)
            watched = self._watch(tensor, self._numbers)
            watched.made_by.append((call, place))
            watched.inside = above
            if seen.finite:
                continue
            counted.append((_BadTensor.of(tensor, seen), seen))
            if is_root:
                watched.broken = torch.logical_not(torch.isfinite(tensor.detach()))
                if self._received is not None and place in self._received:
                    self._broken.add(id(watched))
        if in_backward():  # A checkpoint's forward that is run again for the gradients.
            return
        if counted:
            self._suspect_outputs(call, counted)
        if is_root and self._received is not None:
            bad_outputs, suspect = counted, self._suspect
            counted = [each for each in counted if each[1].name in self._received]
            if bad_outputs and not counted:
                self._unused = suspect
        if counted and is_root and all(bad.mask for bad, _ in counted):
            self._last = call, counted[0][1]
        if any_output and not counted:
            self._clear(call)

    def _suspect_outputs(
        self, call: _Call, bad_outputs: Sequence[tuple[_BadTensor, Magnitude]]
    ) -> None:
        """A call has returned these, which are not finite."""
        bad, seen = min(bad_outputs, key=lambda each: each[0].mask)  # The first that is no mask.
        first = self._suspect
        finding = call.finding("forward", seen)
        if first is None or self._is_origin(call, bad):
            later = first is not None and call.latest > first.number
            if first is not None and later and not (bad.mask or first.mask or first.given):
                doubt = first.finding.doubt or _LATER_TOO.format(name=call.name, what=seen.what)
                first.finding = replace(first.finding, doubt=doubt)
            self._add(finding, bad, made_by=call)
            return
        inside = [each for each in self._suspects if each.number > call.number]
        if not call.has_parts:  # Then it was given all of these.
            inside = []
        for suspect in [each for each in self._suspects if each not in inside]:
            is_in = suspect.is_in(call.taken)
            if not call.has_parts and call.taken and (is_in or not suspect.overtaken):
                suspect.carried, suspect.overtaken = True, False
            if is_in and suspect.mask and not bad.mask:
                if call.main_is_bad:
                    suspect.mask = False
                elif not inside:
                    self._suspects.remove(suspect)
                    self._add(replace(finding, doubt=_MASK_GIVEN), bad, made_by=call)
                    inside = self._suspects[-1:]
            for each, _ in bad_outputs if is_in else ():
                suspect.carry(each)

    def _clear(self, call: _Call) -> None:
        """A module has made finite outputs of what it was given: nothing of it has come out.

        A mask of -inf, say. It may be a part or a copy of the one that the model was given.
        """
        for bad in call.taken:
            tensor = bad.tensor()
            if tensor is not None and bad.mask:
                self._harmless[id(tensor)] = bad.tensor
        any_mask = any(bad.mask for bad in call.taken)
        left = []
        for suspect in self._suspects:
            is_in = (suspect.mask and any_mask) or suspect.is_in(call.taken)
            if suspect.number > call.number or (is_in and (suspect.mask or suspect.given)):
                if suspect.given and not suspect.mask:
                    doubt = suspect.finding.doubt or _FILLED
                    suspect.finding = replace(suspect.finding, doubt=doubt)
                    self._filled.append(suspect)
                continue  # It came up in this call, or was given to it.
            if not call.taken and not suspect.carried and call.latest > suspect.number:
                suspect.overtaken = True
            left.append(suspect)
        self._suspects = left

    def _watch(self, tensor: Tensor, number: int) -> _Passed:
        """The record of a tensor; its gradient is looked at from here on."""
        known = self._passed.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        known = self._passed[id(tensor)] = _Passed(_reference(tensor), number)
        if tensor.requires_grad and not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            tensor.register_hook(Hook(self._safely, self._gradient, known))  # type: ignore[no-untyped-call]
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
                if param.requires_grad and param.is_leaf and not is_lazy(param):
                    hook = Hook(self._safely, self._parameter, name, weakref.ref(module), key)
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
        counts = hidden = False
        if seen.broken is not None:
            there = gradient.detach()[seen.broken]
            # Of what a loss hides the gradient is zero; of a mask also NaN, if all that came is.
            counts = bool(((there != 0) & ~there.isnan()).any())
            self._broken.discard(id(seen))
            hidden = not bool((there != 0).any()) and not self._broken
        if found.finite and not counts:
            if hidden and not self._loss_is_bad:
                self._suspects = []  # What is not finite in the output has no part in the loss.
            return
        if counts:  # Then it is no mask.
            for each in self._suspects:
                each.mask = each.mask and not each.is_in([_BadTensor(seen.tensor, True)])
        suspect = self._suspect
        of_output = bool(seen.made_by) and seen.inside is None
        mask = suspect is not None and suspect.mask and self._last is not None and not counts
        if of_output and (mask or hidden):
            call, place = seen.made_by[-1]
            self._answer_loss(call, found, near=place)
        elif suspect is not None:
            self._answer(suspect.told())
        elif seen.used_by and (seen.used_by[-1][0].gradients or not of_output):
            call, place = seen.used_by[-1]  # The innermost.
            doubt = _OUTPUT_TOO if of_output else ""
            self._answer(replace(call.finding("backward", found, near=place), doubt=doubt))
        elif seen.inside is not None:
            made = seen.made_by[0][0]
            self._answer(seen.inside.finding("inside", found, near=made.name))
        else:
            call, place = seen.made_by[-1]
            self._answer_loss(call, found, near=place)

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
            self._answer(self._suspect.told())
            return
        calls = [c for s in self._passed.values() for c, _ in s.made_by if c.module is owner]
        call = calls[0] if calls else _Call(name, owner)
        self._answer(call.finding("parameter", found, near=key))

    def _answer_loss(self, call: _Call, seen: Magnitude, *, near: str) -> None:
        """It came from the loss, whatever the model has given to it."""
        found = call.finding("loss", seen, near=near, loss_is_bad=self._loss_is_bad)
        suspect = self._suspect or self._unused
        if suspect is not None:
            what = "-inf" if suspect.mask else suspect.finding.seen.what
            name = suspect.finding.name or "the model itself"
            found = replace(found, doubt=_OR_LOSS.format(what=what, name=name))
        self._answer(found)

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
