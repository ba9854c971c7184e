"""GradientControl: the one stateful object that users hold, and all that they can ask of it.

How a step is taken is in `stepping.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.checks import (
    check_closure,
    check_give_up_after,
    check_loss,
    check_parameters,
    check_scalar_loss,
    checked_optimizers,
    refuse_misfits,
    warn_of_strangers,
)
from gradilocks.clip import resolve_clip
from gradilocks.eager import eager
from gradilocks.kernels import KernelFailed
from gradilocks.kernels.cuda_graph import keeping
from gradilocks.record import Recorder
from gradilocks.record.journal import journal_for
from gradilocks.scale import resolve_scale
from gradilocks.step import update
from gradilocks.step.call_order import CallOrder
from gradilocks.step.gradients import (
    Names,
    every_parameter,
    parameters_of,
)
from gradilocks.step.judge import Judge
from gradilocks.step.lr_schedule import Listeners, Scheduler
from gradilocks.step.outcome import Outcome, fetch
from gradilocks.step.stepping import Stepping
from gradilocks.values import Decision

__all__ = ["GradientControl"]


class GradientControl(Stepping):
    """Scales, checks, clips and steps: one object between the loss and the optimizers.

        backward(loss):  gradients += d(loss * scale)
        step():          measure every gradient once
                         multiplier = min(1, max_norm / norm) / scale
                         if all are finite:  optimizer.step() on gradients * multiplier
                         else:               nothing changes
                         scale moves on

    Args:
        optimizer: any object with `param_groups` and `step`. torch's fused Adam, AdamW, SGD and
            Adagrad unscale and clip inside their own pass; others get one multiplication.
        more: further optimizers under the same scale, the same norm and the same decision.
        model: the module (or a mapping from a prefix to a module) that names the parameters.
        scale: "dynamic", None, a number or a scale policy.
        clip: None, a number (the largest norm) or a clip policy.
        on_nonfinite: "skip" leaves parameters as they were and goes on; "raise" does the same and
            then raises NonFiniteGradient, which waits for the device at every step.
        give_up_after: so many non-finite steps in a row raise NeverFinite; None for never.
        process_group: the ranks that together hold one whole model, when its plain tensors are
            parts of it, or when it lies as DTensors on some of the ranks only. Data-parallel
            training needs none; DTensors on all ranks need none.
        record: a path for a run file, a Recorder, or None. It changes no number.

    Example:
        >>> control = GradientControl(optimizer, model=model, clip=1.0)
        >>> for batch in batches:
        ...     control.backward(loss_of(batch))
        ...     outcome = control.step()
        ...     control.zero_grad()
    """

    def __init__(
        self,
        optimizer: Any,
        *more: Any,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        scale: object = "dynamic",
        clip: object = None,
        on_nonfinite: str = "skip",
        give_up_after: int | None = 100,
        process_group: Any = None,
        record: object = None,
    ) -> None:
        self._optimizers = checked_optimizers((optimizer, *more))
        self._names = Names(model, self._optimizers)
        check_parameters(parameters_of(self._optimizers, name=self._names), self._names)
        warn_of_strangers(model, self._parameters(), self._names)
        policies = resolve_scale(scale), resolve_clip(clip)
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite must be 'skip' or 'raise', got {on_nonfinite!r}.")
        check_give_up_after(give_up_after)
        refuse_misfits(policies[1], self._names)
        self._on_nonfinite = on_nonfinite
        self._process_group = process_group
        self._judge = Judge(
            *policies,
            names=self._names,
            give_up_after=give_up_after,
        )
        self._team()  # Refuses, now rather than at the first step, what no rank can know.
        self._schedulers = Listeners()
        # Not a method of its own: a control must go as soon as nobody holds it.
        parameters = functools.partial(every_parameter, self._optimizers)
        self._order = CallOrder(parameters if self._judge.scales else tuple)
        self._journal = journal_for(
            record, self._optimizers, self._names, scale=policies[0], clip=policies[1]
        )

    def __repr__(self) -> str:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        judge = self._judge
        return f"GradientControl({kinds}, scale={judge.scale_policy!r}, clip={judge.clip_policy!r})"

    @property
    def recorder(self) -> Recorder | None:
        """What records this control's steps; one that it has made goes when the control goes."""
        return self._journal.recorder

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by. Reading it waits for the device."""
        return fetch(self._judge.state.scale)[0]

    @eager
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for callers who run `backward` themselves."""
        first = self._begins_anew()
        scaled = self._scaled(loss)
        self._journal.note_loss(loss, first=first)
        self._order.handed_out = True
        return scaled

    @eager
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Adds the gradients of the scaled loss. Call it as often as gradients are accumulated.

        Args:
            loss: a scalar that requires grad.
            kwargs: handed to `Tensor.backward` (`retain_graph`, `create_graph`, `inputs`).
        """
        check_scalar_loss(loss)
        before = self._order.scaled
        first = self._begins_anew()
        try:
            self._scaled(loss).backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._order.scaled = before
            raise
        self._journal.note_loss(loss, first=first)

    @eager
    def unscale_(self) -> None:
        """Makes the gradients true in place, for code that reads or changes them before `step`.

        Costs a pass over the gradients; `step` then measures and decides on what it finds.
        """
        self._order.check_unscale()
        found = self._find_gradients()
        for part, optimizer in zip(found, self._optimizers, strict=True):
            self._check_unscaling(optimizer, part, in_place=True)
        multiplier = torch.reciprocal(self._judge.state.scale)
        decision = Decision(skip=torch.zeros_like(multiplier), multiplier=multiplier)
        update.apply_in_place(decision, [t for part in found for t in part.tensors])
        self._order.note_unscaled()

    @eager
    def step(self, closure: Callable[[], Tensor] | None = None) -> Outcome:
        """Decides on the gradients as they stand and steps every optimizer, or none.

        Args:
            closure: for an optimizer that evaluates the loss itself (LBFGS, SAM): clears the
                gradients, calls `control.backward(loss)` and returns the loss. It may be called
                several times; one non-finite evaluation undoes the whole step, which costs a copy
                of the parameters and of the optimizer's state.

        Returns:
            The Outcome. Reading it is what waits for the device.
        """
        with keeping(self._judge.express.captured):
            self._journal.before_step(self._judge, unscaled=self._order.unscaled)
            if closure is not None:
                check_closure(closure, len(self._optimizers))
                return self._step_with_closure(closure)
            called = self._call()
            if called is not None:
                try:
                    return self._step_shortly(called)
                except KernelFailed:  # Which has been said, and nothing has been decided.
                    pass
                finally:
                    called.release()
            return self._step_by_stages()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every optimizer."""
        for param in self._parameters():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach()
                param.grad.zero_()
        self._order.note_cleared()
        if not self._order.scaled:
            self._judge.losses.forget()

    def scheduler(self, lr_scheduler: Any) -> Scheduler:
        """`lr_scheduler`, stepped only for steps that were taken, without a wait.

        Args:
            lr_scheduler: one of torch's, over an optimizer of this control.

        Returns:
            What to call `step()` on, after `control.step()`.
        """
        made = Scheduler(lr_scheduler, self, self._parameters())
        self._schedulers.add(made)
        return made

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs; plain numbers and strings.

        With a DynamicScale it also carries the keys of torch's `GradScaler.state_dict()`, so
        torch's scaler loads it as it is.
        """
        return self._judge.saved()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint of this class or of torch's `GradScaler`.

        The policies' settings come from the checkpoint, as with torch's. A checkpoint that does not
        fit raises BadState and changes nothing.
        """
        self._judge.load(state_dict)
        self._order.note_step(self._parameters())  # What is there carries another scale.

    def _begins_anew(self) -> bool:
        """Whether nothing is left of losses from before this one."""
        if not self._order.scaled:
            return True
        if not self._order.dropped(self._parameters()):
            return False
        self._judge.losses.forget()
        return True

    def _scaled(self, loss: Tensor) -> Tensor:
        check_loss(loss)
        if self._judge.scales:
            self._order.check_backward(self._parameters())
        first = next(self._parameters(), None)
        if first is None:
            check_parameters([], self._names)
            raise AssertionError("an optimizer without parameters was not refused")
        scaled = self._judge.scaled(loss, first.device)
        self._order.scaled = True
        return scaled
