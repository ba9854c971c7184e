"""GradientControl: the one stateful object. It runs the stages in the one right order.

loss ─scale─▶ backward ─▶ collect ─▶ measure ─▶ reduce ─▶ clip ─▶ decide ─▶ update ─▶ record
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks import checkpoint, update
from gradilocks.arguments import (
    check_closure,
    check_give_up_after,
    check_loss,
    check_parameters,
    checked_optimizers,
)
from gradilocks.clip import resolve_clip
from gradilocks.closure import step_with_closure
from gradilocks.decide import decide
from gradilocks.diagnose import never_finite
from gradilocks.errors import NoGradients, NonFiniteGradient
from gradilocks.gradients import (
    Gradients,
    Names,
    any_distributed,
    collect,
    parameters_of,
    replicas_of,
    roof_of,
)
from gradilocks.measure import measure
from gradilocks.order import CallOrder
from gradilocks.record import Outcome, Streak, fetch
from gradilocks.reduce import reduce
from gradilocks.scale import NoScale, resolve_scale, scale_loss
from gradilocks.values import Decision, ScaleState, StepRecord, moved

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
    ) -> None:
        self._optimizers = checked_optimizers((optimizer, *more))
        self._names = Names(model, self._optimizers)
        check_parameters(parameters_of(self._optimizers, name=self._names), self._names)
        self._scale_policy = resolve_scale(scale)
        self._clip_policy = resolve_clip(clip)
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite must be 'skip' or 'raise', got {on_nonfinite!r}.")
        check_give_up_after(give_up_after)
        self._on_nonfinite = on_nonfinite
        self._process_group = process_group
        self._streak = Streak(give_up_after)
        self._state = self._scale_policy.start(torch.device("cpu"))
        self._steps = 0
        unscaled = isinstance(self._scale_policy, NoScale)
        self._order = CallOrder(tuple if unscaled else self._parameters)
        self._loss_nonfinite: Tensor | None = None

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by. Reading it waits for the device."""
        return fetch(self._state.scale)[0]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for callers who run `backward` themselves."""
        scaled = self._scaled(loss)
        self._order.handed_out = True
        return scaled

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Adds the gradients of the scaled loss. Call it as often as gradients are accumulated.

        Args:
            loss: a scalar that requires grad.
            kwargs: handed to `Tensor.backward` (`retain_graph`, `create_graph`, `inputs`).
        """
        check_loss(loss)
        if loss.numel() != 1:
            raise ValueError(
                f"loss must be a scalar, got shape {tuple(loss.shape)}. Reduce it first, for "
                "example with loss.mean() or loss.sum()."
            )
        before = self._order.scaled
        try:
            self._scaled(loss).backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._order.scaled = before
            raise

    def unscale_(self) -> None:
        """Makes the gradients true in place, for code that reads or changes them before `step`.

        Costs a pass over the gradients; `step` then measures and decides on what it finds.
        """
        self._order.check_unscale()
        found = self._find_gradients()
        for part, optimizer in zip(found, self._optimizers, strict=True):
            self._check_unscaling(optimizer, part, in_place=True)
        multiplier = torch.reciprocal(self._state.scale)
        decision = Decision(skip=torch.zeros_like(multiplier), multiplier=multiplier)
        update.apply_in_place(decision, [t for part in found for t in part.tensors])
        self._order.unscaled = True

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
        if closure is not None:
            check_closure(closure)
            return self._step_with_closure(closure)
        found = self._find_gradients()
        for part, optimizer in zip(found, self._optimizers, strict=True):
            self._check_unscaling(optimizer, part, in_place=not update.takes_decision(optimizer))
        decision, outcome, record = self._judge(found)
        try:
            for part, optimizer in zip(found, self._optimizers, strict=True):
                update.apply_bound(decision, part.tensors)
                update.update(optimizer, decision, part.tensors)
        except BaseException:
            self._after_a_failed_update()
            raise
        return self._conclude(outcome, record)

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
            self._loss_nonfinite = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs; plain numbers and strings.

        With a DynamicScale it also carries the keys of torch's `GradScaler.state_dict()`, so
        torch's scaler loads it as it is.
        """
        return checkpoint.save(
            self._scale_policy,
            self._clip_policy,
            self._state,
            steps=self._steps,
            streak=int(fetch(self._streak.count)[0]),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint of this class or of torch's `GradScaler`.

        The policies' settings come from the checkpoint, as with torch's. A checkpoint that does not
        fit raises BadState and changes nothing.
        """
        loaded = checkpoint.load(state_dict, self._scale_policy, self._clip_policy)
        self._scale_policy, self._clip_policy = loaded.scale_policy, loaded.clip_policy
        self._state.scale.fill_(loaded.scale)
        self._state.growth_tracker.fill_(loaded.growth_tracker)
        self._state.hysteresis.fill_(loaded.hysteresis)
        self._streak.restore(loaded.streak)
        if loaded.steps is not None:
            self._steps = loaded.steps
        self._order.note_step(self._parameters())  # What is there carries another scale.
        self._loss_nonfinite = None

    def _scaled(self, loss: Tensor) -> Tensor:
        check_loss(loss)
        if not isinstance(self._scale_policy, NoScale):
            self._order.check_backward(self._parameters())
        first = next(self._parameters(), None)
        if first is None:
            check_parameters([], self._names)
        else:
            self._move_to(first.device)
        broken = torch.logical_not(torch.isfinite(loss.detach()).all()).to(torch.float32)
        broken = moved(broken, self._state.scale.device)
        before = self._loss_nonfinite
        self._loss_nonfinite = broken if before is None else torch.maximum(before, broken)
        self._order.scaled = True
        if isinstance(self._scale_policy, NoScale):
            return loss
        return scale_loss(loss, self._state.scale)

    def _find_gradients(self) -> list[Gradients]:
        """The gradients of each optimizer, after checking that a scaled loss made them."""
        parameters_of(self._optimizers, name=self._names)  # Refuses what is listed twice.
        found = [
            collect(parameters_of([optimizer], name=self._names), name=self._names)
            for optimizer in self._optimizers
        ]
        if not isinstance(self._scale_policy, NoScale):
            self._order.check_scaled("step()")
        if not self._has_ranks() and not any(part.params for part in found):
            raise NoGradients(
                "no parameter of the optimizer has a gradient. Check that the loss depends on the "
                "parameters the optimizer was given, and that they require grad."
            )
        return found

    def _judge(self, found: Sequence[Gradients]) -> tuple[Decision, Outcome, StepRecord]:
        """Measures all gradients together and decides. Changes nothing."""
        tensors = [tensor for part in found for tensor in part.tensors]
        home = self._state.scale.device
        policy = self._clip_policy
        measurement = measure(
            tensors, home=home, order=float(policy.order), detail=policy.needs_largest
        )
        if self._has_ranks():
            measurement = reduce(
                measurement, group=self._process_group, replicas=replicas_of(found)
            )
        scale = self._state.scale
        if self._order.unscaled:
            scale = torch.ones_like(scale)
        limit = policy.limit(measurement, scale)
        decision = decide(measurement, scale, limit, roof=roof_of(tensors))
        broken = self._loss_nonfinite
        record = StepRecord(
            step=self._steps + 1,
            scale=self._state.scale.clone(),
            norm=measurement.norm / scale,
            limit=limit.limit,
            clipped=limit.clipped * (1 - decision.skip),
            skip=decision.skip,
            loss_nonfinite=torch.zeros_like(decision.skip) if broken is None else broken,
            nan=measurement.tensors.nan,
            inf=measurement.tensors.inf,
        )
        # Weak: an Outcome that somebody keeps must not keep a parameter that was replaced.
        params = [weakref.ref(param) for part in found for param in part.params]
        return decision, Outcome(record, lambda: self._names.in_backward_order(params)), record

    def _after_a_failed_update(self) -> None:
        """So that a retry does not divide by the scale again, or step an optimizer twice."""
        if len(self._optimizers) > 1:
            self._order.note_step(self._parameters())
        elif not update.takes_decision(self._optimizers[0]):
            self._order.unscaled = True

    def _conclude(self, outcome: Outcome, record: StepRecord) -> Outcome:
        """Moves the scale on, takes note of the step, and raises if the caller wants to know."""
        self._scale_policy.advance(self._state, record.skip)
        self._steps += 1
        self._order.note_step(self._parameters())
        self._loss_nonfinite = None
        if self._streak.note(record):
            raise never_finite(
                self._streak.symptoms(),
                in_a_row=int(fetch(self._streak.count)[0]),
                bounds=self._scale_policy.bounds(),
                culprits=outcome.culprits,
                described=outcome.describe(at_most=5),
            )
        if self._on_nonfinite == "raise" and outcome.skipped:
            raise NonFiniteGradient(
                f"step {outcome.step} skipped: {outcome.describe()}; scale {outcome.scale:g}. "
                "Parameters and optimizer state are as they were.",
                culprits=outcome.culprits,
            )
        return outcome

    def _step_with_closure(self, closure: Callable[[], Tensor]) -> Outcome:
        if len(self._optimizers) != 1:
            raise ValueError(
                f"step(closure) drives one optimizer, this control has {len(self._optimizers)}. "
                "Give each optimizer that needs a closure a GradientControl of its own."
            )
        (optimizer,) = self._optimizers
        last: tuple[Outcome, StepRecord] | None = None

        def make_true() -> bool:
            nonlocal last
            (found,) = self._find_gradients()
            self._check_unscaling(optimizer, found, in_place=True)
            decision, outcome, record = self._judge([found])
            last = outcome, record
            if outcome.skipped:
                return False
            update.apply_bound(decision, found.tensors)
            update.apply_in_place(decision, found.tensors)
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
        return self._conclude(*last)

    def _check_unscaling(self, optimizer: Any, part: Gradients, *, in_place: bool) -> None:
        if in_place and not isinstance(self._scale_policy, NoScale):
            update.check_unscaling_in_place(optimizer, part.params, part.tensors, self._names)

    def _has_ranks(self) -> bool:
        return self._process_group is not None or any_distributed(self._parameters())

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _move_to(self, device: torch.device) -> None:
        if device.type != "meta" and self._state.scale.device != device:
            self._state = ScaleState(
                scale=self._state.scale.to(device),
                growth_tracker=self._state.growth_tracker.to(device),
                hysteresis=self._state.hysteresis.to(device),
            )
