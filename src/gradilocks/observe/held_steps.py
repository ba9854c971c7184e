"""A script's optimizers enter; steps with NaN or Inf leave no trace: `gradilocks run --guard`.

An optimizer that is called by itself, by no scaler and no control, takes whatever gradients it
finds. Here its own step is left out if they are not finite: parameters and state stay bit for bit
as they were, whichever optimizer it is. Where torch's fused optimizers can leave it out on their
device, they do; else the device is waited for. Each rank decides by the gradients that it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import AMP_FLAG
from gradilocks.observe.patches import Patches
from gradilocks.ranks.layout import any_distributed, flattened_among
from gradilocks.step.events import Step, StepListener

__all__ = ["HeldSteps"]

# They cannot ask each other: a collective of ours would hang where one of them does not step.
_SPREAD = (
    "--guard: the model is spread over ranks, and each of them holds back what is NaN or Inf in "
    "its own shards: one may skip a step that others take. A GradientControl decides for all"
)


class HeldSteps(StepListener):
    """Holds bad steps back.

    Args:
        bad: called, before it is held back, with a step that is known to be bad; may raise.
        waits: whether every step is waited for, also where a device can leave it out by itself.
        warn: told if ranks may decide differently.
    """

    def __init__(
        self, bad: Callable[[Step], None], *, waits: bool, warn: Callable[[str], None]
    ) -> None:
        self._bad, self._waits, self._warn = bad, waits, warn
        self._is_new = True
        self._patches = Patches()
        self._guarded: set[type] = set()
        self._step: Step | None = None  # That goes on, of an optimizer by itself.
        self.held = 0
        """How many were held back, as far as the host knows."""

    def close(self) -> None:
        """Leaves the optimizers as they were."""
        self._patches.undo()

    def optimizer_made(self, optimizer: Any) -> None:
        """From here on its class asks before it steps."""
        kind = type(optimizer)
        own = vars(kind).get("step")
        if kind in self._guarded or own is None:
            return  # A class that inherits its step has its parent's, which asks.
        self._guarded.add(kind)
        inner = getattr(own, "__wrapped__", own)  # torch's wrapper tells of the step.

        @functools.wraps(inner)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self._take(inner, this, *args, **kwargs)

        guarded: Any = torch.optim.Optimizer.profile_hook_step(step)
        guarded.hooked = True
        self._patches.attribute(kind, "step", guarded)

    def step_begins(self, step: Step) -> None:
        if step.driver is step.optimizers[0]:
            self._step = step
            if self._is_new:
                self._is_new = False
                params = list(step.parameters())
                if flattened_among(params) or any_distributed(params):
                    self._warn(_SPREAD)

    def step_ended(self, step: Step) -> None:
        if step is self._step:
            self._step = None

    def _take(self, inner: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of an optimizer's own step."""
        step = self._step
        if step is None or step.optimizers[0] is not optimizer:
            return inner(optimizer, *args, **kwargs)
        loss = None
        if step.has_closure:  # It makes the gradients; evaluated here first, and not again.
            evaluated, args, kwargs = _evaluated(args, kwargs)
            loss = evaluated.loss
        if step.statistics is None:
            return inner(optimizer, *args, **kwargs)
        flag = (step.statistics.nan + step.statistics.inf).sum() > 0
        if flag.device.type != "cpu" and _leaves_out(optimizer) and not self._waits:
            step.held = flag.to(torch.float32)
            return _on_device(step.held, inner, optimizer, *args, **kwargs)
        if not bool(flag):
            return inner(optimizer, *args, **kwargs)
        self.held += 1
        step.held = True
        self._bad(step)
        return loss


def _leaves_out(optimizer: Any) -> bool:
    """Whether it can leave a step out on its device: torch's fused ones take a flag for that."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return bool(fused) and bool(getattr(optimizer, AMP_FLAG, False))


def _on_device(
    flag: Tensor, inner: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    optimizer.grad_scale, optimizer.found_inf = None, flag.reshape(())
    try:
        return inner(optimizer, *args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf


class _Evaluated:
    """A closure that was evaluated once: hands that loss out, and evaluates anew after it."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        with torch.enable_grad():
            self.loss = closure()
        self._is_fresh = True

    def __call__(self) -> Any:
        if self._is_fresh:
            self._is_fresh = False
            return self.loss
        return self._closure()


def _evaluated(args: Any, kwargs: Any) -> tuple[_Evaluated, Any, Any]:
    """The closure among the arguments of a step, evaluated, and the arguments with it."""
    if callable(kwargs.get("closure")):
        made = _Evaluated(kwargs["closure"])
        return made, args, {**kwargs, "closure": made}
    made = _Evaluated(args[0])
    return made, (made, *args[1:]), kwargs
