"""GradientControl: the one stateful object. It runs the stages in the one right order.

loss ─scale─▶ backward ─▶ collect ─▶ measure ─▶ reduce ─▶ clip ─▶ decide ─▶ update ─▶ record
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks import kernels, update
from gradilocks.arguments import (
    check_any_gradient,
    check_closure,
    check_give_up_after,
    check_loss,
    check_parameters,
    check_scalar_loss,
    checked_optimizers,
)
from gradilocks.clip import resolve_clip
from gradilocks.closure import step_with_closure
from gradilocks.eager import eager
from gradilocks.errors import NoGradients
from gradilocks.gradients import (
    Gradients,
    Names,
    any_distributed,
    collect,
    every_parameter,
    parameters_of,
)
from gradilocks.judge import Judge, Verdict
from gradilocks.kernels import KernelFailed
from gradilocks.kernels.captured import keeping
from gradilocks.order import CallOrder
from gradilocks.record import Outcome, fetch, nonfinite
from gradilocks.recording import Recorder
from gradilocks.recording.journal import journal_for
from gradilocks.roll import Called, ends_of, split
from gradilocks.scale import resolve_scale
from gradilocks.schedule import Listeners, Scheduler
from gradilocks.values import Decision

__all__ = ["GradientControl"]


class GradientControl:
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
        process_group: the ranks that together hold the model, when its plain tensors are shards.
            Data-parallel training needs none; DTensors bring their own.
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
        policies = resolve_scale(scale), resolve_clip(clip)
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite must be 'skip' or 'raise', got {on_nonfinite!r}.")
        check_give_up_after(give_up_after)
        if hasattr(policies[1], "check"):  # Groups and patterns that fit nothing.
            policies[1].check(self._names.of(self._parameters()), self._names.groups())
        self._on_nonfinite = on_nonfinite
        self._process_group = process_group
        self._judge = Judge(
            *policies,
            names=self._names,
            give_up_after=give_up_after,
            process_group=process_group,
        )
        self._schedulers = Listeners()
        # Not a method of its own: a control must go as soon as nobody holds it.
        parameters = functools.partial(every_parameter, self._optimizers)
        self._order = CallOrder(parameters if self._judge.scales else tuple)
        self._journal = journal_for(
            record, self._optimizers, self._names, scale=policies[0], clip=policies[1]
        )

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
        first = not self._order.scaled
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
        try:
            self._scaled(loss).backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._order.scaled = before
            raise
        self._journal.note_loss(loss, first=not before)

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
            self._judge.forget_loss()

    def scheduler(self, lr_scheduler: Any) -> Scheduler:
        """`lr_scheduler`, stepped only for steps that were taken, without a wait.

        Args:
            lr_scheduler: one of torch's, over an optimizer of this control.

        Returns:
            What to call `step()` on, after `control.step()`.
        """
        made = Scheduler(lr_scheduler)
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

    def _call(self) -> Called | None:
        """The gradients of all optimizers if the short way can be taken, checked once."""
        judge = self._judge
        first = next(self._parameters(), None)
        if self._process_group is not None or first is None:
            return None
        if not (kernels.is_fused(first.device) or kernels.is_fused(judge.state.scale.device)):
            return None  # At once: looking at every gradient would cost a CPU step 5 %.
        called = judge.express.call(self._optimizers, judge.scale_policy, judge.clip_policy)
        if called is not None and not judge.scales:
            judge.move_to(called.device)  # No loss was scaled, which would have brought it there.
        if called is None or called.device != judge.state.scale.device:
            return None
        if called.ends is None:
            parameters_of(self._optimizers, name=self._names)  # Refuses what is listed twice.
            called.ends = ends_of(called, self._optimizers)
        if judge.scales:
            self._order.check_scaled("step()")
            begin = 0
            for end, optimizer in zip(called.ends, self._optimizers, strict=True):
                if not update.takes_decision(optimizer):
                    part = called.params[begin:end], called.grads[begin:end]
                    update.check_unscaling_in_place(optimizer, *part, self._names)
                begin = end
        return called

    def _find_gradients(self) -> list[Gradients]:
        """The gradients of each optimizer, after checking that a scaled loss made them."""
        every = parameters_of(self._optimizers, name=self._names)  # Refuses what is listed twice.
        lists = [every]
        if len(self._optimizers) > 1:
            lists = [parameters_of([each], name=self._names) for each in self._optimizers]
        found = [collect(params, name=self._names) for params in lists]
        if self._judge.scales:
            self._order.check_scaled("step()")
        if not self._has_ranks():
            check_any_gradient(found)
        return found

    def _step_by_stages(self) -> Outcome:
        found = self._find_gradients()
        for part, optimizer in zip(found, self._optimizers, strict=True):
            in_place = not update.takes_decision(optimizer)
            self._check_unscaling(optimizer, part, in_place=in_place)
        verdict = self._judge_by_stages(found)
        return self._conclude(self._updated(verdict, [part.tensors for part in found]))

    def _step_shortly(self, called: Called) -> Outcome:
        """By the short way. An optimizer of ours has its rates worked out where it is settled."""
        unscaled = self._order.unscaled
        if not update.takes_directly(self._optimizers):
            verdict = self._judge.settle(called, unscaled=unscaled)
            for optimizer in self._optimizers:
                if getattr(type(optimizer), "is_ours", False):
                    optimizer.hold(called if len(self._optimizers) == 1 else None)
            return self._conclude(self._updated(verdict, split(called.grads, called.ends)))
        (optimizer,) = self._optimizers
        rating = optimizer.ready(called)
        verdict = self._judge.settle(called, unscaled=unscaled, rating=rating)
        try:
            optimizer.take(
                verdict.decision.skip, verdict.decision.divisor, rated=rating is not None
            )
        except BaseException:
            self._after_a_failed_update(verdict)
            raise
        return self._conclude(verdict)

    def _updated(self, verdict: Verdict, parts: Sequence[Sequence[Tensor]]) -> Verdict:
        """Steps each optimizer on its gradients, or none."""
        begin = 0
        try:
            for tensors, optimizer in zip(parts, self._optimizers, strict=True):
                update.apply_factors(verdict.decision, tensors, begin=begin)
                begin += len(tensors)
                update.apply_bound(verdict.decision, tensors)
                update.update(
                    optimizer, verdict.decision, tensors, multiplied=self._order.note_unscaled
                )
        except BaseException:
            self._after_a_failed_update(verdict)
            raise
        return verdict

    def _judge_by_stages(self, found: Sequence[Gradients]) -> Verdict:
        return self._judge.judge(found, unscaled=self._order.unscaled, has_ranks=self._has_ranks())

    def _after_a_failed_update(self, verdict: Verdict) -> None:
        """As if nothing had been decided; several optimizers are not to be stepped twice."""
        self._judge.undo(verdict)
        if len(self._optimizers) > 1:
            self._order.note_step(self._parameters())

    def _conclude(self, verdict: Verdict) -> Outcome:
        """Moves the scale on, takes note of the step, and raises if the caller wants to know."""
        outcome = verdict.outcome
        hopeless = self._judge.conclude(verdict)
        self._journal.after_step(verdict.record, self._judge)
        for scheduler in self._schedulers:
            scheduler.note(verdict.record.row)
        self._order.note_step(self._parameters())
        if hopeless:
            raise self._judge.never_finite(outcome)
        if self._on_nonfinite == "raise" and outcome.skipped and not outcome.rejected:
            raise nonfinite(outcome)
        return outcome

    def _step_with_closure(self, closure: Callable[[], Tensor]) -> Outcome:
        (optimizer,) = self._optimizers
        last: Verdict | None = None

        def make_true() -> bool:
            nonlocal last
            (found,) = self._find_gradients()
            self._check_unscaling(optimizer, found, in_place=True)
            last = self._judge_by_stages([found])
            if last.outcome.skipped:
                return False
            update.apply_factors(last.decision, found.tensors)
            update.apply_bound(last.decision, found.tensors)
            update.apply_in_place(last.decision, found.tensors)
            self._order.note_step(self._parameters())
            return True

        step_with_closure(
            optimizer,
            closure,
            make_true=make_true,
            gradients_are_waiting=self._order.scaled
            and any(param.grad is not None for param in self._parameters()),
        )
        if last is None:
            raise NoGradients("the optimizer did not call the closure, so nothing was measured.")
        return self._conclude(last)

    def _check_unscaling(self, optimizer: Any, part: Gradients, *, in_place: bool) -> None:
        if in_place and self._judge.scales:
            update.check_unscaling_in_place(optimizer, part.params, part.tensors, self._names)

    def _has_ranks(self) -> bool:
        return self._process_group is not None or any_distributed(self._parameters())

    def _parameters(self) -> Iterator[Tensor]:
        return every_parameter(self._optimizers)
