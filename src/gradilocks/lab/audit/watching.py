"""A script's models and optimizers, met as they run: their gradients are counted from the start.

Nothing says which modules will be trained before an optimizer steps, so every module is followed,
by torch's global hooks. What belongs to no optimizer's model is left out in the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from gradilocks.control import GradientControl
from gradilocks.eager import UNCOMPILED
from gradilocks.lab.audit.module_hooks import Listener, gather, is_unit
from gradilocks.lab.audit.result import Audit
from gradilocks.lab.formats import Format
from gradilocks.lab.trace.magnitudes import tensors_in
from gradilocks.observe.controls import Controls
from gradilocks.observe.hooks import Hooks
from gradilocks.observe.importing import when_imported
from gradilocks.observe.naming import owners_of
from gradilocks.observe.watching import Attempt, Watch
from gradilocks.record import Recorder
from gradilocks.step.gradients import every_parameter

__all__ = ["AuditHooks", "AuditWatch"]

_Result = TypeVar("_Result")


class AuditWatch(Watch):
    """Records the steps as a Watch does, counts them, and keeps the models that they train.

    Args:
        make_recorder: called at the first step.
        warn: told in words when auditing had to end.
        stepped: told how many steps the busiest optimizer has taken; may raise to stop the script.
        stop: raises, when auditing had to end.
    """

    def __init__(
        self,
        make_recorder: Callable[[], Recorder],
        *,
        warn: Callable[[str], None],
        stepped: Callable[[int], None],
        stop: Callable[[], None],
    ) -> None:
        super().__init__(make_recorder, trace=False, warn=lambda said: warn(_of_ours(said)))
        self.listener = Listener()
        self.listener.guard = self.safely
        self._stepped, self._stop = stepped, stop
        self._counts: dict[int, int] = {}
        self._models: dict[int, nn.Module] = {}  # Held: a script may be done with them before us.
        self._params: dict[Tensor, str] = {}  # With the names of those that no model owns.
        self._coming: Tensor | float = 1.0

    @property
    def steps(self) -> int:
        """How many the busiest optimizer has taken."""
        return max(self._counts.values(), default=0)

    def safely(self, act: Callable[[], _Result]) -> _Result | None:
        """As a Watch does it, but a failure of ours ends the script: it runs for us alone."""
        result = super().safely(act)
        if self.failed:
            self._stop()
        return result

    def begin(
        self,
        optimizer: Any,
        *,
        scale: Tensor | float = 1.0,
        carried: Tensor | float = 1.0,
        look: bool = True,
    ) -> Attempt | None:
        attempt = super().begin(optimizer, scale=scale, carried=carried, look=look)
        if attempt is not None:
            self.meet(attempt.params, carried=carried)
        return attempt

    def conclude(
        self, attempt: Attempt, *, skip: Tensor | bool = False, rejected: Tensor | bool = False
    ) -> None:
        super().conclude(attempt, skip=skip, rejected=rejected)
        self.count(id(attempt.known.optimizer()))

    def meet(self, params: Sequence[Tensor], *, carried: Tensor | float) -> None:
        """An optimizer is about to step: these are trained."""
        fresh = self.listener.follow_parameters(params)
        for param in fresh:  # Of no module that was called: this once, as it stands.
            self.listener.count(param, scale=carried)
        if any(param not in self._params for param in params):
            self._models.update((id(model), model) for model in owners_of(params))
            for place, param in enumerate(params):
                self._params.setdefault(param, f"parameter {place}")

    def count(self, whose: int) -> None:
        """A step is over."""
        self._counts[whose] = self._counts.get(whose, 0) + 1
        self._stepped(self.steps)

    def bind_scale(self, scaled: Any, scale: Tensor) -> None:
        """These losses were multiplied by a scale: whenever they are run backward, it is carried.

        The hook is the first thing that happens in a loss's own backward pass.
        """
        held = scale.detach().clone()
        for _, loss in tensors_in(scaled, ""):
            if loss.requires_grad:
                loss.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: self.listener.carry(held)
                )

    @contextmanager
    def with_scale(self, scale: Tensor) -> Iterator[None]:
        """A backward pass inside carries this scale."""
        self._coming = scale.detach().clone()
        try:
            yield
        finally:
            self._coming = 1.0

    def before_backward(self) -> None:
        """A backward pass begins; one within another, as of a checkpoint, changes nothing."""
        if torch._C._current_graph_task_id() != -1:
            return
        if isinstance(self._coming, Tensor):
            self.listener.carry(self._coming)
        else:
            self.listener.scale = 1.0

    def gather(self, formats: Sequence[Format]) -> Audit:
        """What was counted, judged."""
        return gather(
            self.listener,
            list(self._models.values()),
            steps=self.steps,
            formats=formats,
            others=self._params,
        )

    def close(self) -> None:
        super().close()
        self.listener.remove()


def _of_ours(said: str) -> str:
    return said.replace("watching ended, the script goes on", "the audit failed")


class AuditHooks(Hooks):
    """The hooks of a session, and those on every module."""

    def __init__(self, watch: AuditWatch) -> None:
        super().__init__(watch)
        self._audit = watch
        self._controls = _AuditControls(watch)
        self._met: dict[int, weakref.ref[nn.Module]] = {}
        self._uncompiled = False

    def install(self) -> None:
        super().install()
        self._handles += [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        self._wrap(torch.autograd.grad, self._grad)
        when_imported("torch._dynamo", self._run_eagerly)

    def remove(self) -> None:
        super().remove()
        if self._uncompiled:
            UNCOMPILED.__exit__()
            self._uncompiled = False

    def _run_eagerly(self) -> None:
        """Compiled code would run past the hooks."""
        UNCOMPILED.__enter__()
        self._uncompiled = True

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if is_unit(module):
            self._audit.safely(lambda: self._audit.listener.before_forward(module, args))
        met = self._met.get(id(module))
        if met is not None and met() is module:
            return
        for part in module.modules():
            self._met[id(part)] = weakref.ref(part)
        self._audit.safely(lambda: self._audit.listener.follow_parameters(module.parameters()))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and is_unit(module):
            self._audit.safely(lambda: self._audit.listener.after_forward(module, args, output))

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = super()._scale(original, scaler, outputs)
        scale = getattr(scaler, "_scale", None)
        if scaler.is_enabled() and isinstance(scale, Tensor):
            self._audit.safely(lambda: self._audit.bind_scale(scaled, scale))
        return scaled

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._audit.before_backward()
        return super()._backward(original, *args, **kwargs)

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._audit.before_backward()
        return original(*args, **kwargs)


class _AuditControls(Controls):
    """A script's own GradientControls."""

    def __init__(self, watch: AuditWatch) -> None:
        super().__init__(watch)
        self._audit = watch

    def calling(
        self, original: Callable[..., Any], control: GradientControl, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `backward`, which runs the loss, and `scale_loss`, which returns it."""
        scale = control._judge.state.scale.detach().clone()
        with self._audit.with_scale(scale):
            returned = super().calling(original, control, *args, **kwargs)
        self._audit.safely(lambda: self._audit.bind_scale(returned, scale))
        return returned

    def stepping(
        self, original: Callable[..., Any], control: GradientControl, *args: Any, **kwargs: Any
    ) -> Any:
        params = list(every_parameter(control._optimizers))
        carried = self._audit.listener.scale
        self._audit.safely(lambda: self._audit.meet(params, carried=carried))
        outcome = super().stepping(original, control, *args, **kwargs)
        self._audit.count(id(control))
        return outcome
