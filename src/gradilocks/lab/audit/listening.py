"""Hooks on a model, for as long as an audit lasts: gradients enter, counts leave.

The gradient of a parameter is taken as a backward pass makes it, before it is added to others,
clipped or unscaled: that is what is stored in the format. The gradient of a module's output is
taken by a hook on the tensor, not on the module: torch's module hooks put views around tensors,
and an in-place module behind one would raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.lab.audit.counting import Tally
from gradilocks.lab.audit.flowing import Flow
from gradilocks.lab.emulate import emulated_format
from gradilocks.lab.tensors import tensors_in

__all__ = ["Listener", "is_unit"]


class Listener:
    """Counts the gradients of the modules and parameters that it is told of.

    Attributes:
        outputs: by module: the gradients of what it returned, in the order of the first calls.
        parameters: by parameter: its gradients.
        flow: what the forward passes show.
        scale: what the gradients of the coming backward passes are to be divided by.
    """

    def __init__(self) -> None:
        self.outputs: dict[int, tuple[weakref.ref[nn.Module], Tally]] = {}
        self.parameters: dict[int, tuple[weakref.ref[Tensor], Tally]] = {}
        self.flow = Flow()
        self.scale: Tensor | float = 1.0
        self.divided: Tensor | float = 1.0
        """The last scale other than 1 that gradients carried."""
        self.autocast: set[torch.dtype] = set()
        """What torch.autocast computed in, if it was on in a forward pass."""
        self.emulated: set[str] = set()
        """The same of `gradilocks.emulate`."""
        self.dtypes: set[torch.dtype] = set()
        """Of the gradients that came."""
        self.guard: Callable[[Callable[[], None]], None] = _do
        """Does our own work inside a backward pass."""
        self._handles: list[Any] = []
        self._done = False

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Puts hooks on modules and their parameters."""
        for module in modules:
            if is_unit(module) and not isinstance(module, torch.jit.ScriptModule):
                before = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
                self._handles.append(before)
                self._handles.append(module.register_forward_hook(self.after_forward))
            self.follow_parameters(module.parameters(recurse=False))

    def follow_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Puts hooks on those that have none yet, and returns them."""
        fresh = [p for p in parameters if p.requires_grad and not self.knows(p)]
        for parameter in fresh:
            tally = Tally()
            self.parameters[id(parameter)] = weakref.ref(parameter), tally
            if parameter.is_leaf:
                hook = self._counts(tally)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        return fresh

    def carry(self, scale: Tensor | float) -> None:
        """The gradients of the coming backward passes carry this scale."""
        self.scale = scale.detach().clone() if isinstance(scale, Tensor) else scale
        self.divided = self.scale

    def count(self, parameter: Tensor, *, scale: Tensor | float) -> None:
        """Counts the gradient that a parameter has, for one that had no hook in time."""
        if parameter.grad is not None:
            self._add(self.parameters[id(parameter)][1], parameter.grad, scale)

    def knows(self, parameter: Tensor) -> bool:
        """Whether this parameter has a hook."""
        known = self.parameters.get(id(parameter))
        return known is not None and known[0]() is parameter

    def remove(self) -> None:
        """Takes every hook away; those on tensors do nothing from here on."""
        self._done = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_forward(self, module: nn.Module, given: Any) -> None:
        """A unit is called."""
        if not (self._done or torch.compiler.is_compiling()):
            self.flow.entering(module, given)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.before_forward(module, (args, kwargs))

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """A unit has returned: the gradients of its tensors will be counted."""
        if self._done or torch.compiler.is_compiling():
            return
        self.flow.leaving(module, args, output)
        tensors = {id(t): t for _, t in tensors_in(output, "") if t.requires_grad}
        if not tensors:
            return
        known = self.outputs.get(id(module))
        if known is None or known[0]() is not module:
            known = self.outputs[id(module)] = weakref.ref(module), Tally()
        for tensor in tensors.values():
            kind = tensor.device.type
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                self.autocast.add(torch.get_autocast_dtype(kind))
            if (format := emulated_format()) is not None:
                self.emulated.add(format.dtype or format.name)
            if not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
                tensor.register_hook(self._counts(known[1]))  # type: ignore[no-untyped-call]

    def _counts(self, tally: Tally) -> Callable[[Tensor], None]:
        def count(gradient: Tensor | None) -> None:
            if gradient is not None and not self._done:  # A backward of one's own may return None.
                self.guard(lambda: self._add(tally, gradient, self.scale))

        return count

    def _add(self, tally: Tally, gradient: Tensor, scale: Tensor | float) -> None:
        self.dtypes.add(gradient.dtype)
        tally.add(gradient, scale=scale)


def _do(act: Callable[[], None]) -> None:
    act()


def is_unit(module: nn.Module) -> bool:
    """Whether a module is one that computes: without parts, or with parameters of its own.

    A parametrized module (weight_norm and the like) is one, too: its parts make its weight.
    """
    parts = [name for name, _ in module.named_children() if name != "parametrizations"]
    return not parts or next(module.parameters(recurse=False), None) is not None
