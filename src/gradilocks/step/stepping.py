"""How a GradientControl takes a step: the stages in the one right order.

collect ─▶ measure ─▶ reduce ─▶ clip ─▶ decide ─▶ update ─▶ record, or the short way, which does the
same in few launches; with a closure, at each of its evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from gradilocks import kernels
from gradilocks.checks import check_any_gradient
from gradilocks.errors import NoGradients
from gradilocks.names import Names
from gradilocks.ranks.layout import Team, any_distributed, team_of
from gradilocks.step import update
from gradilocks.step.call_order import CallOrder
from gradilocks.step.closure import step_with_closure
from gradilocks.step.events import Step, StepEvents
from gradilocks.step.gradients import Gradients, collect, every_parameter, parameters_of
from gradilocks.step.judge import Judge, Verdict
from gradilocks.step.lr_schedule import Listeners
from gradilocks.step.outcome import Outcome, nonfinite
from gradilocks.step.own_step import is_ours
from gradilocks.step.roll import Called, ends_of, split

__all__ = ["Stepping"]


class Stepping:
    """The part of a GradientControl that steps its optimizers."""

    _optimizers: tuple[Any, ...]
    _names: Names
    _judge: Judge
    _order: CallOrder
    _schedulers: Listeners
    _events: StepEvents
    _step: Step | None
    _on_nonfinite: str
    _process_group: Any

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
            self._team()  # Refuses plain tensors that are known to be shards.
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
        found, verdict = self._judge_by_stages()
        return self._conclude(self._updated(verdict, [part.tensors for part in found]))

    def _step_shortly(self, called: Called) -> Outcome:
        """By the short way. An optimizer of ours has its rates worked out where it is settled."""
        unscaled = self._order.unscaled
        if not update.takes_directly(self._optimizers):
            verdict = self._judge.settle(called, unscaled=unscaled)
            for optimizer in self._optimizers:
                if is_ours(optimizer):
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

    def _judge_by_stages(self, *, in_place: bool = False) -> tuple[list[Gradients], Verdict]:
        """Finds, checks and judges the gradients.

        Args:
            in_place: whether they are made true in place, whoever steps.
        """
        team = self._team()
        try:
            found = self._find_gradients()
            for part, optimizer in zip(found, self._optimizers, strict=True):
                multiplied = in_place or not update.takes_decision(optimizer)
                self._check_unscaling(optimizer, part, in_place=multiplied)
        except Exception:
            if team is not None:  # Else the other ranks would wait for this one.
                self._judge.refuse(team)
            raise
        first = next(self._parameters(), None)
        if first is not None and not self._judge.scales:
            self._judge.move_to(first.device)  # No loss was scaled, which would have brought it.
        return found, self._judge.judge(found, unscaled=self._order.unscaled, team=team)

    def _after_a_failed_update(self, verdict: Verdict) -> None:
        """As if nothing had been decided; several optimizers are not to be stepped twice."""
        self._judge.undo(verdict)
        if len(self._optimizers) > 1:
            self._order.note_step(self._parameters())

    def _conclude(self, verdict: Verdict) -> Outcome:
        """Moves the scale on, takes note of the step, and raises if the caller wants to know."""
        outcome = verdict.outcome
        hopeless = self._judge.conclude(verdict)
        for scheduler in self._schedulers:
            scheduler.note(verdict.record.row)
        self._order.note_step(self._parameters())
        if self._step is not None:
            self._step.record, self._step.next_scale = verdict.record, self._judge.state.scale
            self._events.end_step(self._step)
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
            (found,), last = self._judge_by_stages(in_place=True)
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

    def _team(self) -> Team | None:
        """The ranks that hold the model together; raises if they are not known."""
        return team_of(list(self._parameters()), group=self._process_group, name=self._names)

    def _has_ranks(self) -> bool:
        return self._process_group is not None or any_distributed(self._parameters())

    def _parameters(self) -> Iterator[Tensor]:
        return every_parameter(self._optimizers)
