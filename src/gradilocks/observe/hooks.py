"""Where the script meets the Watch: hooks on every optimizer, on scalers, clips and backward.

Each hook tells the Watch what is about to happen, calls the original with the same arguments, and
tells what has happened. Compiled code that calls one of them gets the original.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradilocks import dropin
from gradilocks._torch import OptState, scale_of, scaler_state
from gradilocks.control import GradientControl
from gradilocks.dropin.clips import Clips
from gradilocks.observe.controls import Controls
from gradilocks.observe.replacing import Replacements
from gradilocks.observe.watching import Attempt, Watch
from gradilocks.values import ROW, moved

__all__ = ["Hooks"]


class Hooks:
    """All hooks of a session."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._controls = Controls(watch)
        self._replaced = Replacements()
        self._covered: set[type] = set()
        self._clipping = False
        self._handles: list[Any] = []

    def install(self) -> None:
        """Takes their places, once torch is there."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._handles = [
            register_optimizer_step_pre_hook(self._unless_compiling(self._before_step)),
            register_optimizer_step_post_hook(self._unless_compiling(self._after_step)),
        ]
        self._wrap(torch.autograd.backward, self._backward)
        for home in (torch.nn.utils, dropin):
            self._wrap(home.clip_grad_norm_, self._clip_norm)
            self._wrap(home.clip_grads_with_norm_, self._clip_with_norm)
            self._wrap(home.clip_grad_value_, self._clip_value)
        around = (
            (GradientControl, "step", self._controls.stepping),
            (GradientControl, "backward", self._controls.calling),
            (GradientControl, "scale_loss", self._controls.calling),
            (Clips, "learn", self._policy_clip),
            (torch.optim.Optimizer, "__init__", self._new_optimizer),
            (torch.optim.Optimizer, "zero_grad", self._zero_grad),
            (torch.nn.Module, "zero_grad", self._zero_grad),
        )
        for owner, name, wrapper in around:
            self._replaced.attribute(owner, name, _wrapped(vars(owner)[name], wrapper))
        for scaler in (torch.amp.GradScaler, dropin.GradScaler):
            self._cover(scaler)

    def remove(self) -> None:
        """Leaves everything as it was."""
        for handle in self._handles:
            handle.remove()
        self._replaced.undo()

    def _wrap(self, original: Any, around: Callable[..., Any]) -> None:
        self._replaced.everywhere(original, _wrapped(original, around))

    def _cover(self, kind: type) -> None:
        """Wraps the methods that this class of scalers has of its own."""
        self._covered.add(kind)
        for name, around in (("scale", self._scale), ("step", self._scaler_step)):
            original = vars(kind).get(name)
            if original is not None:
                self._replaced.attribute(kind, name, _wrapped(original, around))

    @staticmethod
    def _unless_compiling(hook: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            return None if torch.compiler.is_compiling() else hook(*args)

        return act

    # --- the optimizers ------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self._watch
        if watch.is_driven(optimizer):
            return None
        frame = _caller()
        around = watch.attempt_around(optimizer)
        running = watch.attempt_of(optimizer) if around is None else around
        if around is not None and around.frame is not None:
            return None  # Not the first of several inside what a scaler steps.
        if running is not None and running.frame is None:  # A scaler steps it, or its wrapper.
            running.frame = frame
            watch.safely(lambda: watch.weigh(running))
            return None
        if running is not None and _is_running(running.frame):
            return None  # A step that calls that of its base class.
        place, closure = _closure(args, kwargs)
        scale = getattr(optimizer, "grad_scale", None)
        scale = scale if isinstance(scale, Tensor) else 1.0
        attempt = watch.safely(
            lambda: watch.begin(optimizer, scale=scale, carried=scale, look=closure is None)
        )
        if attempt is None:
            return None
        attempt.frame = frame
        watch.safely(lambda: watch.weigh(attempt))
        if closure is None:
            return None
        watched = self._watched(closure, attempt)
        if isinstance(place, int):
            return (*args[:place], watched, *args[place + 1 :]), kwargs
        return args, {**kwargs, "closure": watched}

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch = self._watch
        attempt = watch.attempt_of(optimizer)
        if attempt is None or attempt.scaled or attempt.frame is not _caller():
            return
        found = getattr(optimizer, "found_inf", None)
        skip = found if isinstance(found, Tensor) else False
        watch.safely(lambda: watch.conclude(attempt, skip=skip))

    def _watched(self, closure: Callable[..., Any], attempt: Attempt) -> Callable[..., Any]:
        """The closure; what its first evaluation leaves is what the step is judged by.

        Losses from before the step stay: the closure may hold the last micro-batch, or nothing. If
        it computes the loss anew it clears the gradients, which is seen where that is done.
        """
        watch = self._watch

        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if attempt.look is not None:
                watch.losses.start()
            try:
                loss = closure(*args, **kwargs)
            except BaseException:
                watch.losses.start()
                raise
            if attempt.look is None:
                watch.safely(lambda: watch.look(attempt, loss))
            return loss

        return evaluate

    # --- scalers -------------------------------------------------------------------------------

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self._watch.safely(lambda: self._watch.losses.note_scaled(outputs, scaled))
        return scaled

    def _scaler_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        watch = self._watch
        if type(scaler) not in self._covered:
            self._cover(type(scaler))
        scale = scale_of(scaler)
        running = watch.attempt_of(optimizer)
        if running is not None and running.scaled:  # A step that calls that of its base class.
            return original(scaler, optimizer, *args, **kwargs)
        if not scaler.is_enabled() or scale is None or watch.is_driven(optimizer):
            return original(scaler, optimizer, *args, **kwargs)
        state = scaler_state(scaler, optimizer)
        carried = 1.0 if state["stage"] is OptState.UNSCALED else scale
        attempt = watch.safely(lambda: watch.begin(optimizer, scale=scale, carried=carried))
        if attempt is None:
            return original(scaler, optimizer, *args, **kwargs)
        attempt.scaled = True
        try:
            returned = original(scaler, optimizer, *args, **kwargs)
        except BaseException:
            watch.drop(attempt)
            raise
        clipped = getattr(scaler, "_clipped", {}).get(id(optimizer))
        rejected = False if clipped is None or clipped.rejected is None else clipped.rejected
        watch.safely(
            lambda: watch.conclude(attempt, skip=_flag(scaler, optimizer, state), rejected=rejected)
        )
        return returned

    def _policy_clip(self, original: Callable[..., Any], clips: Clips, optimizer: Any) -> Any:
        """A scaler with `clip=`: what its policy has decided."""
        attempt, pending = self._watch.attempt_of(optimizer), clips.pending.get(id(optimizer))
        if attempt is not None and pending is not None:
            row = pending[1].record.row
            limit, clipped = row[ROW.index("limit")], row[ROW.index("clipped")]
            attempt.more = {"limit": limit, "clipped": clipped}
        return original(clips, optimizer)

    # --- the loss and the clips ----------------------------------------------------------------

    def _backward(
        self,
        original: Callable[..., Any],
        tensors: Any = (),
        grad_tensors: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = grad_tensors if grad_tensors is not None else kwargs.get("grad_variables")
        self._watch.safely(lambda: self._watch.backward_begins(tensors, given))
        returned = original(tensors, grad_tensors, *args, **kwargs)
        self._watch.safely(self._watch.backward_ended)
        return returned

    def _new_optimizer(
        self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._watch.safely(lambda: self._watch.note_optimizer(optimizer))

    def _zero_grad(
        self, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        watch = self._watch
        if watch.losses.waiting:
            watch.safely(lambda: watch.before_clearing(owner))
        return original(owner, *args, **kwargs)

    def _clip_norm(
        self,
        original: Callable[..., Any],
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        watch = self._watch
        params, again = _listed(parameters)
        seen = watch.safely(lambda: watch.before_clip(params, detail=False))
        outer, self._clipping = self._clipping, True
        try:
            norm = original(again, max_norm, norm_type, *args, **kwargs)
        finally:
            self._clipping = outer
        watch.safely(
            lambda: watch.after_clip(params, seen, norm=norm, limit=max_norm, order=norm_type)
        )
        return norm

    def _clip_with_norm(
        self,
        original: Callable[..., Any],
        parameters: Any,
        max_norm: Any,
        total_norm: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        watch = self._watch
        if self._clipping:  # The other one calls this one.
            return original(parameters, max_norm, total_norm, *args, **kwargs)
        params, again = _listed(parameters)
        seen = watch.safely(lambda: watch.before_clip(params, detail=False))
        returned = original(again, max_norm, total_norm, *args, **kwargs)
        watch.safely(
            lambda: watch.after_clip(params, seen, norm=total_norm, limit=max_norm, order=2.0)
        )
        return returned

    def _clip_value(
        self,
        original: Callable[..., Any],
        parameters: Any,
        clip_value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        watch = self._watch
        params, again = _listed(parameters)
        seen = watch.safely(lambda: watch.before_clip(params, detail=True))
        returned = original(again, clip_value, *args, **kwargs)
        watch.safely(lambda: watch.after_value_clip(params, seen, bound=clip_value))
        return returned


def _wrapped(original: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    return call


def _listed(parameters: Any) -> tuple[list[Tensor], Any]:
    """The parameters as a list, and something to hand on that is still what it was."""
    if isinstance(parameters, Tensor):
        return [parameters], parameters
    listed = list(parameters)
    generator = isinstance(parameters, types.GeneratorType)  # torch warns of an empty one.
    again = (each for each in listed) if generator else listed
    return [each for each in listed if isinstance(each, Tensor)], again


def _flag(scaler: Any, optimizer: Any, state: dict[str, Any]) -> Tensor | bool:
    """Whether the scaler has held this step back, on the device."""
    flags: Sequence[Tensor] = list(state["found_inf_per_device"].values())
    if not flags:
        return False
    if isinstance(scaler, dropin.GradScaler):
        return scaler._flag(optimizer, state)
    home = flags[0].device
    total = torch.stack([moved(flag, home).reshape(()) for flag in flags]).sum()
    return (total != 0).to(torch.float32)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, Any]:
    if callable(kwargs.get("closure")):
        return None, kwargs["closure"]
    if len(args) > 1 and callable(args[1]):  # The first is the optimizer.
        return 1, args[1]
    return None, None


def _caller() -> FrameType | None:
    """The frame of torch's wrapper around `step`, which is above those of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "wrapper":
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType | None) -> bool:
    above: FrameType | None = sys._getframe(1)
    while above is not None:
        if above is frame:
            return True
        above = above.f_back
    return False
