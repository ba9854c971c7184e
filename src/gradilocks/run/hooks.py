"""Hooks of `gradilocks run` in torch: backward, clip functions, scalers, optimizer steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradilocks import events
from gradilocks.errors import NonFiniteGradient
from gradilocks.run.step_observer import StepObserver

__all__ = ["Hooks"]


class Hooks:
    """Calls an observer at each backward, clip and step of a script.

    An error in the observer ends the recording, not the script.

    Args:
        observer: receives the calls.
    """

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._patches: list[tuple[Any, str, Any]] = []
        self._removals: list[Callable[[], None]] = []
        self._steps = 0
        self._is_clipping = False
        self.error: BaseException | None = None
        """The error that ended the recording."""

    def install(self) -> None:
        """Installs all hooks."""
        functions = torch.nn.utils.clip_grad
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            replacement = self._around(getattr(functions, name), self._clip)
            self._patch(functions, name, replacement)
            self._patch(torch.nn.utils, name, replacement)
        self._patch(torch.autograd, "backward", self._around(torch.autograd.backward, self._backward))
        self._patch(torch.autograd, "grad", self._around(torch.autograd.grad, self._grad))
        scaler = torch.amp.GradScaler
        for name, method in (("scale", self._scale), ("unscale_", self._unscale), ("step", self._scaler_step)):
            self._patch(scaler, name, self._around(getattr(scaler, name), method))
        optimizer = torch.optim.Optimizer
        self._patch(optimizer, "zero_grad", self._around(optimizer.zero_grad, self._zero_grad))
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before_step),
            (register_optimizer_step_post_hook, self._after_step),
        ):
            self._removals.append(register(hook).remove)
        self._removals.append(events.subscribe(_ControlCallback(self)))
        if self._observer.calls is not None:
            self._observer.calls.install()
            self._removals.append(self._observer.calls.remove)

    def install_control(self) -> None:
        """Installs the hook on controls, once the script has imported `gradilocks.control`."""
        control = sys.modules["gradilocks.control"].GradientControl
        self._patch(control, "step", self._around(control.step, self._control_step))

    def remove(self) -> None:
        """Removes all hooks."""
        for owner, name, original in reversed(self._patches):
            setattr(owner, name, original)
        for remove in self._removals:
            remove()
        self._patches, self._removals = [], []

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        self._patches.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _around(self, original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.error is not None or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        return run

    def notify(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Calls the observer; an error in it ends the recording."""
        if self.error is None:
            try:
                method(*args, **kwargs)
            except NonFiniteGradient:
                raise  # --guard stop.
            except Exception as error:
                self.error = error
                message = f"gradilocks: recording stopped ({type(error).__name__}: {error}); the script continues"
                print(message, file=sys.stderr, flush=True)

    # --- backward, clipping, scalers ----------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self.notify(self._observer.begin_backward, tensors)
        return original(tensors, *args, **kwargs)

    def _grad(self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = tuple(inputs) if isinstance(inputs, (Iterator, ValuesView)) else inputs
        results = original(outputs, inputs, *args, **kwargs)
        if self._observer.calls is not None:
            self.notify(self._observer.calls.note_gradients, inputs, results)
        return results

    def _clip(self, original: Callable[..., Any], parameters: Any, limit: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._is_clipping:
            return original(parameters, limit, *args, **kwargs)
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        positional = (limit,) if limit is not None else ()
        limit = kwargs.get("max_norm", limit)
        self.notify(self._observer.begin_clip, params)
        self._is_clipping = True
        try:
            norm = original(params, *positional, *args, **kwargs)
        finally:
            self._is_clipping = False
        if isinstance(norm, Tensor):
            self.notify(self._observer.end_clip, params, limit, norm)
        return norm

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self.notify(self._observer.note_scaled, outputs, scaled)
        return scaled

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        if scaler.is_enabled():
            self.notify(self._observer.begin_unscale, optimizer)
        return original(scaler, optimizer)

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        self.notify(self._observer.begin_scaler_step, scaler, optimizer)
        steps, has_stepped = self._steps, True
        try:
            result = original(scaler, optimizer, *args, **kwargs)
            has_stepped = self._steps > steps
        finally:
            self.notify(self._observer.end_scaler_step, optimizer, has_stepped=has_stepped)
        return result

    # --- steps --------------------------------------------------------------------------------------------------------

    def _zero_grad(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.notify(self._observer.note_cleared)
        return original(optimizer, *args, **kwargs)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self.notify(self._observer.begin_step, optimizer, has_closure=callable(closure))
        if not callable(closure) or self.error is not None:
            return None

        @functools.wraps(closure)
        def observed() -> Any:
            loss = closure()
            self.notify(self._observer.end_closure, optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._steps += 1
            self.notify(self._observer.end_step, optimizer)

    def _control_step(self, original: Callable[..., Any], control: Any, *args: Any, **kwargs: Any) -> Any:
        self.notify(self._observer.begin_control, control)
        try:
            return original(control, *args, **kwargs)
        finally:
            self.notify(self._observer.end_control)


class _ControlCallback:
    """Passes the steps and logged numbers of controls to the observer."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __call__(self, record: events.StepRecord) -> None:
        self._hooks.notify(self._hooks._observer.control_step, record)

    def log(self, **numbers: Any) -> None:
        self._hooks.notify(self._hooks._observer.log, **numbers)
