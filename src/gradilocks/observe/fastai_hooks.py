"""fastai's own optimizers and its mixed precision enter; StepEvents leave.

fastai's optimizers are none of torch's, so torch's hooks do not see them; its `OptimWrapper` steps
one of torch's, which they do. Its MixedPrecision poses as an optimizer before its scaler, and has
the optimizer step later, if it is not to be skipped: both are one step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from gradilocks._torch import scale_of
from gradilocks.observe.interpreter import when_imported
from gradilocks.observe.patches import Patches
from gradilocks.step.events import EVENTS, Step

__all__ = ["FastaiHooks", "told_step"]

_OPTIMIZERS = "fastai.optimizer"
_MIXED_PRECISION = "fastai.callback.fp16"


class FastaiHooks:
    """Those of a session; they do nothing until a script imports fastai."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._is_removed = False
        self._posed: Step | None = None  # Looked at by a scaler, and not yet taken.

    def install(self) -> None:
        """Takes their places, once they are there."""
        when_imported(_OPTIMIZERS, self._hook_optimizers)
        when_imported(_MIXED_PRECISION, self._hook_mixed_precision)

    def remove(self) -> None:
        """Leaves everything as it was."""
        self._is_removed = True
        self._patches.undo()

    def _hook_optimizers(self) -> None:
        if not self._is_removed:
            kind = sys.modules[_OPTIMIZERS].Optimizer
            for name, around in (
                ("__init__", _told_making),
                ("zero_grad", _told_clearing),
                ("step", told_step),
            ):
                self._patches.attribute(kind, name, around(vars(kind)[name]))

    def _hook_mixed_precision(self) -> None:
        if not self._is_removed:
            kind = sys.modules[_MIXED_PRECISION].MixedPrecision
            for name, around in (
                ("before_step", self._before_step),
                ("after_step", self._after_step),
            ):
                self._patches.attribute(kind, name, around(vars(kind)[name]))

    def _before_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Around what has the scaler look at the gradients, and raises if it is to be skipped."""

        @functools.wraps(original)
        def before_step(callback: Any) -> Any:
            return self._look(callback, original)

        return before_step

    def _look(self, callback: Any, original: Callable[..., Any]) -> Any:
        if self._posed is not None:  # Another callback has cancelled it.
            EVENTS.fail_step(self._posed)
            self._posed = None
        scaler, optimizer = callback.learn.scaler, callback.learn.opt
        scale = scale_of(scaler)
        if not scaler.is_enabled() or scale is None or EVENTS.step_around(optimizer) is not None:
            return original(callback)
        step = EVENTS.begin_step(Step(scaler, (_innermost(optimizer),), scale=scale))
        try:
            returned = original(callback)
        except sys.modules[_MIXED_PRECISION].CancelStepException:
            step.skip = True
            EVENTS.end_step(step)
            raise
        except BaseException:
            EVENTS.fail_step(step)
            raise
        self._posed = step
        return returned

    def _after_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Around what comes when the optimizer has stepped, or was not to."""

        @functools.wraps(original)
        def after_step(callback: Any) -> Any:
            step, self._posed = self._posed, None
            if step is not None:
                step.skip = step.held
                EVENTS.end_step(step)
            return original(callback)

        return after_step


def told_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """The step of an optimizer that is none of torch's, told of as theirs are."""

    @functools.wraps(original)
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        around = EVENTS.step_around(optimizer)
        if around is not None:
            if around.frame is None:
                around.frame = sys._getframe()
                for listener in EVENTS.listeners:
                    listener.update_begins(around)
            return original(optimizer, *args, **kwargs)
        told = EVENTS.begin_step(Step(optimizer, (optimizer,), frame=sys._getframe()))
        try:
            returned = original(optimizer, *args, **kwargs)
        except BaseException:
            EVENTS.fail_step(told)
            raise
        told.skip = told.held
        EVENTS.end_step(told)
        return returned

    step.hooked = True  # type: ignore[attr-defined] # As torch marks those that it has wrapped.
    return step


def _told_making(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        for listener in EVENTS.listeners:
            listener.optimizer_made(optimizer)

    return make


def _told_clearing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in EVENTS.listeners:
            listener.gradients_clear(optimizer)
        return original(optimizer, *args, **kwargs)

    return zero_grad


def _innermost(optimizer: Any) -> Any:
    """What really steps: inside of OptimWrapper, or of Lookahead."""
    while not isinstance(optimizer, torch.optim.Optimizer) and "opt" in vars(optimizer):
        optimizer = optimizer.opt
    return optimizer
