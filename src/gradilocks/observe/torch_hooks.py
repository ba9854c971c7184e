"""torch's own optimizers, scalers, clip functions and backward enter; StepEvents leave.

While it is installed, each of them tells `EVENTS` what is about to happen, runs as it is with the
same arguments, and tells what has happened. Compiled code that calls one of them gets the original.
Gradilocks' control, scaler and clip functions tell of themselves.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, KeysView
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradilocks import dropin
from gradilocks._torch import OptState, scale_of, scaler_state
from gradilocks.observe.interpreter import when_imported
from gradilocks.observe.patches import Patches
from gradilocks.step.events import EVENTS, Step
from gradilocks.values import moved

__all__ = ["TorchHooks"]

FSDP = "torch.distributed.fsdp"


class TorchHooks:
    """All hooks of a session."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._scalers: set[type] = set()
        self._is_clipping = self._is_unscaling = self._is_removed = False
        self._handles: list[Any] = []
        self._own: dict[int, Step] = {}  # By optimizer: the step that it was called for by itself.

    def install(self) -> None:
        """Takes their places."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        functions = (
            (torch.autograd.backward, self._backward),
            (torch.autograd.grad, self._grad),
            (torch.nn.utils.clip_grad_norm_, self._clip),
            (torch.nn.utils.clip_grads_with_norm_, self._clip),
            (torch.nn.utils.clip_grad_value_, self._clip),
        )
        for function, around in functions:
            self._patches.everywhere(function, _wrapped(function, around))
        methods = (
            (torch.optim.Optimizer, "__init__", self._new_optimizer),
            (torch.optim.Optimizer, "zero_grad", self._zero_grad),
            (torch.nn.Module, "zero_grad", self._zero_grad),
        )
        for owner, name, method in methods:
            self._patches.attribute(owner, name, _wrapped(vars(owner)[name], method))
        self._hook_scaler(torch.amp.GradScaler)
        # Ours tells of all else by itself.
        unscale = _wrapped(vars(dropin.GradScaler)["unscale_"], self._unscale)
        self._patches.attribute(dropin.GradScaler, "unscale_", unscale)
        when_imported(FSDP, self._hook_fsdp)

    def remove(self) -> None:
        """Leaves everything as it was."""
        self._is_removed = True
        for handle in self._handles:
            handle.remove()
        self._patches.undo()

    def _hook_scaler(self, kind: type) -> None:
        """Wraps the methods that this class of scalers has of its own."""
        self._scalers.add(kind)
        methods = (
            ("scale", self._scale),
            ("step", self._scaler_step),
            ("unscale_", self._unscale),
        )
        for name, around in methods:
            original = vars(kind).get(name)
            if original is not None:
                self._patches.attribute(kind, name, _wrapped(original, around))

    def _hook_fsdp(self) -> None:
        """FSDP1 has a clip of its own, a method of the model."""
        if not self._is_removed:
            kind = sys.modules[FSDP].FullyShardedDataParallel
            original = vars(kind)["clip_grad_norm_"]
            self._patches.attribute(kind, "clip_grad_norm_", _wrapped(original, self._clip_method))

    # --- optimizers ----------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        frame = _step_frame()
        around = EVENTS.step_around(optimizer)
        if around is not None:
            if around.frame is None:  # The first inside the step of a control or a scaler.
                around.frame = frame
                for listener in EVENTS.listeners:
                    listener.update_begins(around)
            return None
        closure = kwargs.get("closure")
        is_named = callable(closure)
        if not is_named:  # The first argument is the optimizer.
            closure = args[1] if len(args) > 1 and callable(args[1]) else None
        scale = getattr(optimizer, "grad_scale", None)
        step = Step(
            optimizer,
            (optimizer,),
            scale=scale if isinstance(scale, Tensor) else 1.0,
            has_closure=closure is not None,
            frame=frame,
        )
        EVENTS.begin_step(step)
        self._own[id(optimizer)] = step
        if closure is None:
            return None
        told = _telling(closure, step)
        if is_named:
            return args, {**kwargs, "closure": told}
        return (args[0], told, *args[2:]), kwargs

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        step = self._own.get(id(optimizer))
        if step is None or step.frame is not _step_frame():  # Of a step around it, or another's.
            return
        del self._own[id(optimizer)]
        if not EVENTS.goes_on(step):
            return
        found = getattr(optimizer, "found_inf", None)
        step.skip = found if isinstance(found, Tensor) else step.held
        EVENTS.end_step(step)

    def _new_optimizer(
        self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        for listener in EVENTS.listeners:
            listener.optimizer_made(optimizer)

    def _zero_grad(
        self, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for listener in EVENTS.listeners:
            listener.gradients_clear(owner)
        return original(owner, *args, **kwargs)

    # --- scalers -------------------------------------------------------------------------------

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        scale = scale_of(scaler)
        told = isinstance(scaler, dropin.GradScaler)
        if scaler.is_enabled() and scale is not None and not told:
            for listener in EVENTS.listeners:
                listener.loss_scaled(scaler, outputs, scaled, scale)
        return scaled

    def _scaler_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        scale = scale_of(scaler)
        if isinstance(scaler, dropin.GradScaler) or not scaler.is_enabled() or scale is None:
            return original(scaler, optimizer, *args, **kwargs)
        if type(scaler) not in self._scalers:
            self._hook_scaler(type(scaler))
        if EVENTS.step_around(optimizer) is not None:  # Of a control, or of a class below.
            return original(scaler, optimizer, *args, **kwargs)
        state = scaler_state(scaler, optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        step = EVENTS.begin_step(Step(scaler, (optimizer,), scale=scale, unscaled=unscaled))
        try:
            returned = original(scaler, optimizer, *args, **kwargs)
        except BaseException:
            EVENTS.fail_step(step)
            raise
        step.skip = step.held or _overflowed(state)
        EVENTS.end_step(step)
        return returned

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        scale = scale_of(scaler)
        if self._is_unscaling or not scaler.is_enabled() or scale is None:
            return original(scaler, optimizer)
        for listener in EVENTS.listeners:
            listener.unscale_begins(optimizer)
        self._is_unscaling = True  # A class below calls that of torch.
        try:
            returned = original(scaler, optimizer)
        finally:
            self._is_unscaling = False
        for listener in EVENTS.listeners:
            listener.unscale_ended(optimizer, scale)
        return returned

    # --- backward and clips --------------------------------------------------------------------

    def _backward(
        self,
        original: Callable[..., Any],
        tensors: Any = (),
        grad_tensors: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = grad_tensors if grad_tensors is not None else kwargs.get("grad_variables")
        for listener in EVENTS.listeners:
            listener.backward_begins(tensors, given)
        returned = original(tensors, grad_tensors, *args, **kwargs)
        for listener in EVENTS.listeners:
            listener.backward_ended()
        return returned

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for listener in EVENTS.listeners:
            listener.grad_begins(args[0] if args else kwargs.get("outputs"))
        return original(*args, **kwargs)

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `clip_grad_norm_`, `clip_grads_with_norm_` and `clip_grad_value_`."""
        if self._is_clipping:  # The first of them calls the second.
            return original(*args, **kwargs)
        names, needed = _arguments_of(original)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(given) != len(args) + len(kwargs) or not names >= given.keys() >= needed:
            return original(*args, **kwargs)  # They do not fit, which Python says better.
        params, handed_on = _listed(given["parameters"])
        by_value = "clip_value" in given
        limit = given["clip_value" if by_value else "max_norm"]
        order = given.get("norm_type", 2.0)
        clip = EVENTS.begin_clip(params, limit, by_value=by_value, order=order)
        # By place or by name, as it was called: somebody else's wrapper may have other names.
        if "parameters" in kwargs:
            kwargs["parameters"] = handed_on
        else:
            args = (handed_on, *args[1:])  # All three have it first.
        returned = self._clipped(original, *args, **kwargs)
        EVENTS.end_clip(clip, norm=given.get("total_norm", returned))
        return returned

    def _clip_method(
        self, original: Callable[..., Any], model: Any, max_norm: Any, norm_type: Any = 2.0
    ) -> Any:
        """Around the method of FSDP1's modules."""
        clip = EVENTS.begin_clip(list(model.parameters()), max_norm, order=norm_type)
        returned = self._clipped(original, model, max_norm, norm_type)
        EVENTS.end_clip(clip, norm=returned)
        return returned

    def _clipped(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a clip returns; those that it calls itself tell of nothing."""
        self._is_clipping = True
        try:
            return clip(*args, **kwargs)
        finally:
            self._is_clipping = False


@functools.cache  # Of three functions. To bind a signature takes 15 us at every call.
def _arguments_of(function: Callable[..., Any]) -> tuple[KeysView[str], frozenset[str]]:
    """The names of a function's arguments, in their order, and those that it cannot do without."""
    arguments = inspect.signature(function).parameters
    needed = (name for name, each in arguments.items() if each.default is each.empty)
    return dict.fromkeys(arguments).keys(), frozenset(needed)


def _wrapped(original: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    return call


def _telling(closure: Callable[..., Any], step: Step) -> Callable[..., Any]:
    """A closure that tells of its evaluations."""

    @functools.wraps(closure)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        for listener in EVENTS.listeners:
            listener.closure_begins(step)
        try:
            loss = closure(*args, **kwargs)
        except BaseException:
            for listener in EVENTS.listeners:
                listener.closure_ended(step, None, failed=True)
            raise
        for listener in EVENTS.listeners:
            listener.closure_ended(step, loss, failed=False)
        return loss

    return evaluate


def _listed(parameters: Any) -> tuple[list[Tensor], Any]:
    """The parameters as a list, and something to hand on that is still what it was."""
    if isinstance(parameters, Tensor):
        return [parameters], parameters
    listed = list(parameters)
    # torch makes a list of what it is given, and warns of a generator if that is empty.
    warns = not listed and isinstance(parameters, types.GeneratorType)
    handed_on = (each for each in listed) if warns else listed
    if _PLAIN.issuperset(map(type, listed)):
        return listed, handed_on
    return [each for each in listed if isinstance(each, Tensor)], handed_on


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _overflowed(state: dict[str, Any]) -> Tensor | bool:
    """Whether torch's scaler has held this step back, on the device."""
    flags = list(state["found_inf_per_device"].values())
    if not flags:
        return False
    home = flags[0].device
    total = torch.stack([moved(flag, home).reshape(()) for flag in flags]).sum()
    return (total != 0).to(torch.float32)


def _step_frame() -> FrameType | None:
    """The frame of torch's wrapper around `step`, which is above those of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "wrapper":
        frame = frame.f_back
    return frame
