"""GradientControl: loss scaling, the NaN/Inf check, clipping and the optimizer step as one object."""

from __future__ import annotations

import importlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradilocks import checkpoint, kernels
from gradilocks.checks import check_number
from gradilocks.clip import resolve_clip
from gradilocks.errors import NoGradients, ScaleMisuse
from gradilocks.events import PROCESS_WIDE, Callback, StepRecord, subscribe
from gradilocks.names import Names
from gradilocks.outcome import Outcome, RankCheck, Streak, never_finite_error, nonfinite_error
from gradilocks.ranks.collective import common_to_all, handshake, reduce_powers
from gradilocks.ranks.layout import Layout, ShareFunction, is_dtensor, layout_of, replicas_of, world_size
from gradilocks.scale import LARGEST_SCALE, SMALLEST_SCALE, check_scale, resolve_scale
from gradilocks.schedule import Scheduler
from gradilocks.step.closure import step_with_closure
from gradilocks.step.decide import ROW, Decision, StepInputs
from gradilocks.step.gradients import by_device, check_float16, check_optimizers, dense_grads, first_device, parameters
from gradilocks.step.phase import OptimizerPhase, Phase, StepGuard
from gradilocks.step.plan import StepPlan
from gradilocks.step.state import StepState
from gradilocks.step.update import apply_in_place

if TYPE_CHECKING:
    from gradilocks.dropin.control_scaler import ControlScaler

_SCALED = "_gradilocks_is_scaled"
"""Attribute that marks the results of `scale_loss`."""


class GradientControl:
    """Scales the loss, checks and clips the gradients, and steps or skips the optimizers.

        backward(loss):  gradients += d(loss * scale)
        step():          measure every gradient once
                         if all are finite:  optimizer.step() with gradients * min(1, max_norm / norm) / scale
                         otherwise:          skip; parameters and optimizer state are bit for bit unchanged
                         update the scale

    Args:
        optimizers: one or more objects with `param_groups` and `step`. They share the scale, the norm and the decision.
            `gradilocks.optim` and torch's fused optimizers unscale and clip within their own pass over memory; for
            others the gradients are multiplied in place.
        model: a module, or a mapping from prefixes to modules, that names the parameters.
        scale: "dynamic", None for no scaling (bfloat16, float32), a number, or a scale policy.
        clip: None, a number (largest norm), or a clip policy.
        on_nonfinite: "skip", or "raise" to raise NonFiniteGradient after a skipped step. "raise" waits for the device
            at every step.
        give_up_after: raise NeverFinite after this many consecutive non-finite steps; None for no limit. Every
            `step(only=)` counts as a step: a finite step of one optimizer resets the count for all.
        mesh: DeviceMesh or ProcessGroup of the ranks that train the model; None for all ranks.
        distinct: names of the dimensions of `mesh` along which ranks hold different parameters, such as ("pp", "ep").
        share: function of (name, parameter) that returns the weight of this rank's elements in sums over ranks, or
            None for the default weight. Needed for plain tensors that are parts of a larger tensor.
        record: path of a run file, or a Recorder.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=1.0)
        >>> control.backward(model(torch.ones(8, 4)).square().mean())
        >>> outcome = control.step()
        >>> control.zero_grad()
        >>> outcome.skipped
        False
    """

    def __init__(
        self,
        *optimizers: Any,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        scale: object = "dynamic",
        clip: object = None,
        on_nonfinite: str = "skip",
        give_up_after: int | None = 100,
        mesh: Any = None,
        distinct: str | Iterable[str] = (),
        share: ShareFunction | None = None,
        record: object = None,
    ) -> None:
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite must be 'skip' or 'raise', got {on_nonfinite!r}.")
        if give_up_after is not None:
            check_number("give_up_after", give_up_after, at_least=1, integer=True)
        self._names = Names(model, optimizers)
        check_optimizers(optimizers, self._names)
        self.optimizers = optimizers
        """The optimizers, in the order given."""
        self.outcome: Outcome | None = None
        """Outcome of the latest step."""
        self._on_nonfinite = on_nonfinite
        self._state = StepState(resolve_scale(scale))
        self._clip = resolve_clip(clip)
        params = parameters(optimizers)
        names = self._names.of(params)
        self._layout = layout_of(params, names, mesh=mesh, distinct=distinct, share=share, models=self._names.models)
        # Only the last pipeline stage has a loss, so the phase of the other stages is unknown.
        self._has_stages = self._layout is not None and bool(self._layout.distinct_groups)
        # Replicas whose gradients DistributedDataParallel averages.
        self._replicas = replicas_of(params, self._names.models) if self._layout is None and mesh is None else None
        if self._layout is None:
            self._check_patterns()
        self._plans: dict[tuple[int, ...], StepPlan] = {}
        self._phases = [OptimizerPhase(optimizer) for optimizer in optimizers]
        self._losses: list[Tensor] = []
        self._streak = Streak(give_up_after, has_ranks=world_size() > 1)
        self._schedulers: list[Scheduler] = []
        self._callbacks: list[Callback] = []
        self._rank_check = RankCheck(self._layout)
        if self._state.policy is not None:
            for optimizer, phase in zip(optimizers, self._phases, strict=True):
                if isinstance(optimizer, torch.optim.Optimizer):
                    try:
                        handle = optimizer.register_step_pre_hook(StepGuard(phase))
                    except AttributeError:  # Accelerate's, whose step and zero_grad do nothing while accumulating.
                        raise TypeError(
                            f"{type(optimizer).__name__} wraps an optimizer without calling Optimizer.__init__, so it "
                            "has no step hooks. Pass the inner optimizer to GradientControl."
                        ) from None
                    weakref.finalize(self, handle.remove)
        if record is not None:
            recorder: Any = record
            if not callable(record):
                recorder = importlib.import_module("gradilocks.record").Recorder(record)
                weakref.finalize(self, recorder.close)
            self.subscribe(recorder)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a GradientControl cannot be copied or pickled. Construct a new one and load state_dict().")

    def __repr__(self) -> str:
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return f"GradientControl({optimizers}, scale={self._state.policy!r}, clip={list(self._clip)!r})"

    @property
    def scale(self) -> float:
        """The factor by which the next loss is multiplied; 1.0 without scaling. Waits for the device."""
        return float(self._state.scale)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiplies a loss by the scale, for code that calls `backward` itself.

        Args:
            loss: must require grad. Half precision is converted to float32, so that the product does not overflow.
        """
        argument: object = loss
        if not isinstance(argument, Tensor) or not argument.is_floating_point():
            kind = argument.dtype if isinstance(argument, Tensor) else type(argument).__name__
            raise TypeError(f"the loss must be a floating-point tensor, got {kind}.")
        if not loss.requires_grad:
            raise ValueError("the loss does not require grad: it does not depend on any trainable parameter.")
        if hasattr(loss, _SCALED):
            raise ScaleMisuse("this loss was already multiplied by the scale. Pass the unscaled loss to backward().")
        if self._state.policy is not None:
            unscaled = [phase.phase is Phase.UNSCALED for phase in self._phases]
            for phase in self._phases:
                phase.begin_backward(may_be_for_another_optimizer=not all(unscaled))
        value = loss.detach()
        value = value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]
        self._losses.append(value if value.dim() == 0 else value.sum())
        if self._state.policy is None:
            return loss
        self._state.to(first_device(self.optimizers))
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        scaled = wide * self._state.scale.to(loss.device, non_blocking=loss.is_cuda)
        setattr(scaled, _SCALED, True)
        return scaled

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiates the scaled loss and adds to the gradients.

        Args:
            loss: the unscaled loss.
            kwargs: passed to `Tensor.backward`.
        """
        self.scale_loss(loss).backward(**kwargs)  # type: ignore[no-untyped-call]
        for phase in self._phases:
            phase.end_backward()

    def step(self, closure: Callable[[], Tensor] | None = None, *, only: Any = None) -> Outcome:
        """Steps the optimizers, or skips the step, and updates the scale.

        Args:
            closure: function that clears the gradients, calls `control.backward(loss)` and returns the loss, for
                optimizers such as LBFGS. The control must have one optimizer.
            only: one of the optimizers, to step it alone. The scale is then updated by `update()`.
        """
        indices = self._indices(only)
        if closure is not None:
            if not callable(closure):
                raise TypeError(f"step() takes a closure or only=optimizer, got {type(closure).__name__}.")
            return self._step_with_closure(closure)
        inputs, plan = self._inputs(indices, updates_scale=only is None), self._plan(indices)
        if plan.names_by_rank is None:
            self._compare_ranks(plan)
        try:
            for i in indices:
                self._phases[i].is_stepping = True
            decision = plan.step(inputs)
        finally:
            for i in indices:
                self._phases[i].is_stepping = False
                self._phases[i].enter(Phase.USED)  # After an error too, so that a second step() cannot divide again.
        return self._finish(indices, decision, inputs)

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after one or more `step(only=)`. `step()` does this itself.

        Args:
            new_scale: the next scale, instead of the policy's.
        """
        decisions = [phase.pending for phase in self._phases if phase.pending is not None]
        flags = [phase.overflow for phase in self._phases if phase.overflow is not None]
        if new_scale is not None:
            if self._state.policy is None:
                raise ValueError("update(new_scale) needs a control that scales the loss; this one has scale=None.")
            if isinstance(new_scale, Tensor):
                self._state.scale.copy_(new_scale.detach().reshape(()).clamp(SMALLEST_SCALE, LARGEST_SCALE))
            else:
                check_scale("new_scale", new_scale)
                self._state.scale.fill_(new_scale)
        elif decisions or flags:
            if flags and self._layout is not None:  # `unscale_` has checked only this rank's gradients.
                flags = [reduce_powers(torch.stack(flags), self._layout, math.inf, over="group").amax()]
            self._state.update_scale_for(decisions, flags)
        elif all(phase.phase is not Phase.USED for phase in self._phases):
            raise ScaleMisuse(
                "update() without a step. Call step(only=optimizer) first; step() updates the scale itself."
            )
        else:
            return  # step() has already updated the scale.
        for phase in self._phases:
            phase.pending = None
            if phase.phase in (Phase.SCALED, Phase.UNSCALED):
                phase.enter(Phase.USED)  # Later gradients carry another scale and must not be added to these.

    def zero_grad(self, set_to_none: bool = True, *, only: Any = None) -> None:
        """Clears the gradients of all optimizers, or of one.

        Args:
            set_to_none: as in torch.
            only: one of the optimizers.
        """
        for i in self._indices(only):
            self.optimizers[i].zero_grad(set_to_none=set_to_none)
            self._phases[i].enter(Phase.CLEAR)
        if only is None:
            self._losses.clear()

    @torch.no_grad()
    def unscale_(self, only: Any = None) -> None:
        """Divides the gradients by the scale in place, so that they can be inspected or changed before `step`.

        A NaN or Inf found here skips the step even if it is removed from the gradients afterwards.

        Args:
            only: one of the optimizers.
        """
        indices = self._indices(only)
        if self._state.policy is None:
            return
        for i in indices:
            if not self._has_stages:
                self._phases[i].check_unscale()
            check_float16(parameters([self.optimizers[i]]), self._names)
        for i in indices:
            tensors = [tensor for tensor in dense_grads(parameters([self.optimizers[i]])) if tensor is not None]
            inverse = self._state.scale.double().reciprocal()
            flags = [
                kernels.unscale_(group, inverse.to(device)).to(inverse.device) for device, group in by_device(tensors)
            ]
            overflow = torch.stack(flags).amax() if flags else torch.zeros_like(self._state.scale)
            self._phases[i].enter(Phase.UNSCALED, overflow)

    @torch.no_grad()
    def norm(self, only: Any = None) -> Tensor:
        """The norm of the unscaled gradients: 0-d, on their device; NaN or inf if they are not finite.

        Reads the gradients once. With several ranks this is a collective, and the norm is that of all ranks.

        Args:
            only: one of the optimizers.
        """
        indices = self._indices(only)
        inputs, plan = self._inputs(indices), self._plan(indices)
        self._compare_ranks(plan)
        decision = plan.decide(dense_grads(plan.params), inputs)
        return decision.row()[ROW.index("norm")].to(torch.float32)

    def scheduler(self, scheduler: Any) -> Scheduler:
        """Wraps a torch LR scheduler so that skipped steps do not advance it; see `Scheduler`."""
        wrapped = Scheduler(scheduler, has_ranks=world_size() > 1)
        self._schedulers.append(wrapped)
        return wrapped

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Calls `callback(record)` with a StepRecord after every step; returns a function that unsubscribes it."""
        return subscribe(callback, self._callbacks)

    def log(self, **numbers: Any) -> None:
        """Adds numbers to the latest step of the run file (`record=`): `control.log(accuracy=0.9)`."""
        for callback in [*self._callbacks, *PROCESS_WIDE]:
            if hasattr(callback, "log"):  # As recorders have.
                callback.log(**numbers)

    def as_scaler(self) -> ControlScaler:
        """Returns a `torch.amp.GradScaler` that calls this control, for frameworks that take a scaler."""
        from gradilocks.dropin.control_scaler import ControlScaler

        return ControlScaler(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale, the counters and the clip policies' state. `torch.amp.GradScaler` can load it too."""
        return checkpoint.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the `state_dict()` of a control or of a `torch.amp.GradScaler`, or `{"scale": 1024.0}`.

        Only state is loaded; the settings remain those of the constructor. A scale outside the policy's bounds is set
        to the nearest bound.

        Raises:
            BadState: the state does not fit this control. Nothing is loaded.
        """
        checkpoint.load(self, state_dict)
        self._streak.restart(int(self._state.streak))
        if self._layout is None:
            for plan in self._plans.values():
                plan.names_by_rank = None  # DistributedDataParallel replicas compare their scales again.

    # --- internal -----------------------------------------------------------------------------------------------------

    def _indices(self, only: Any) -> tuple[int, ...]:
        if only is None:
            return tuple(range(len(self.optimizers)))
        for i, optimizer in enumerate(self.optimizers):
            if optimizer is only:
                return (i,)
        raise ValueError(
            f"this {type(only).__name__} is not an optimizer of the control. Pass it to GradientControl(...)."
        )

    def _plan(self, indices: tuple[int, ...]) -> StepPlan:
        plan = self._plans.get(indices)
        if plan is None:
            optimizers, layout = [self.optimizers[i] for i in indices], self._layout
            if layout is not None:
                shares = dict(zip(map(id, parameters(self.optimizers)), layout.shares, strict=True))
                layout = replace(layout, shares=tuple(shares[id(p)] for p in parameters(optimizers)), _weights={})
            plan = self._plans[indices] = StepPlan(optimizers, self._names, self._state, self._clip, layout)
        return plan

    def _inputs(self, indices: tuple[int, ...], *, updates_scale: bool = True) -> StepInputs:
        """Checks the phases and returns the arguments of the next step."""
        phases = [self._phases[i] for i in indices]
        if self._state.policy is not None and not self._has_stages:
            for phase in phases:
                phase.check_step()
        unscaled = [phase.phase is Phase.UNSCALED for phase in phases]
        if any(unscaled) and not all(unscaled):
            raise ScaleMisuse(
                "unscale_(only=) has unscaled the gradients of some optimizers only. Unscale all of them, or step them "
                "one by one with step(only=)."
            )
        flags = [phase.overflow for phase in phases if phase.overflow is not None]
        overflow = torch.stack(flags).amax() if len(flags) > 1 else flags[0] if flags else None
        loss = self._losses[0] if self._losses else None
        if len(self._losses) > 1:
            loss = torch.stack([value.float().to(self._losses[0].device) for value in self._losses]).sum()
        has_subscribers = bool(self._callbacks or PROCESS_WIDE)
        return StepInputs(all(unscaled) or self._state.policy is None, updates_scale, overflow, loss, has_subscribers)

    def _finish(self, indices: tuple[int, ...], decision: Decision, inputs: StepInputs) -> Outcome:
        for i in indices:
            self._phases[i].pending = None if inputs.updates_scale else decision
        self._losses.clear()
        plan, names = self._plans[indices], self._names
        outcome = Outcome(
            decision,
            lambda: (plan.names, names.backward_order(plan.params)),
            loss=inputs.loss,
            names_by_rank=plan.names_by_rank,
        )
        self.outcome = outcome
        not_stepped = [optimizer for i, optimizer in enumerate(self.optimizers) if i not in indices]
        for scheduler in self._schedulers:
            if not any(optimizer is getattr(scheduler, "optimizer", None) for optimizer in not_stepped):
                scheduler.note(decision.skip)
        if self._callbacks or PROCESS_WIDE:
            rates = tuple(group.get("lr") for i in indices for group in self.optimizers[i].param_groups)
            record = StepRecord(self, outcome, inputs.loss, indices, rates, time.time(), inputs.is_unscaled)
            for callback in [*self._callbacks, *PROCESS_WIDE]:
                callback(record)
        if decision.rank_rows is not None:
            self._rank_check.check(decision.rank_rows)
        if self._streak.reached(self._state.streak):
            raise never_finite_error(outcome, int(self._state.streak), min_scale=self._state.min_scale)
        if self._on_nonfinite == "raise" and outcome.skipped and not outcome.rejected:
            raise nonfinite_error(outcome)
        return outcome

    def _compare_ranks(self, plan: StepPlan) -> None:
        """At the first step of a plan: compares settings and names over ranks; raises if no rank has a gradient."""
        layout = plan.layout or self._replicas
        if plan.names_by_rank is not None:
            return
        if layout is None:
            plan.names_by_rank = (plan.names,)
            return
        settings = {
            "mesh=": "None" if plan.layout is None else f"{layout.size} ranks",
            "scale=": repr(self._state.policy),
            "clip=": repr(self._clip),
            "on_nonfinite=": self._on_nonfinite,
            "give_up_after=": str(self._streak.limit),
        }
        if plan.layout is None:
            # DistributedDataParallel replicas decide without communication, so they compare scales only here.
            settings["the loaded state"] = f"scale {self.scale:g} at step {int(self._state.steps)}"
            plan.names_by_rank = handshake(layout, settings, plan.names)
            return
        per_tensor = any(getattr(policy, "per", "model") == "tensor" for policy in self._clip)
        names_by_rank = handshake(layout, settings, plan.names, per_tensor=per_tensor)
        self._check_patterns()
        self._check_missing_on_all_ranks(plan, layout)
        plan.names_by_rank = names_by_rank

    def _check_missing_on_all_ranks(self, plan: StepPlan, layout: Layout) -> None:
        """Raises if no rank has a loss or a gradient. A single rank without them may be a stage or an idle expert."""
        has_loss = self._state.policy is None or any(phase.phase is not Phase.CLEAR for phase in self._phases)
        has_gradients = any(param.grad is not None for param in plan.params)
        missing = common_to_all([*["loss"] * (not has_loss), *["gradients"] * (not has_gradients)], layout)
        if "loss" in missing:
            raise ScaleMisuse(
                "step() without a scaled loss on any rank: dividing by the scale would make the gradients too small. "
                "Return control.scale_loss(loss) from the loss function of the pipeline, or pass scale=None."
            )
        if "gradients" in missing:
            raise NoGradients("no parameter has a gradient on any rank. Call backward() before step().")

    def _check_patterns(self) -> None:
        """Raises ValueError for keys of clip policies that match no parameter on any rank."""
        params = parameters(self.optimizers)
        names = self._names.of(params)
        unmatched = [
            f"{type(policy).__name__}: {key}"
            for policy in self._clip
            if hasattr(policy, "unmatched")
            for key in policy.unmatched(names, self._names.groups(params))
        ]
        unmatched = unmatched if self._layout is None else common_to_all(unmatched, self._layout)
        if unmatched:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(f"{'; '.join(unmatched)} matches no parameter. The parameters are {shown}")

    @torch.no_grad()
    def _step_with_closure(self, closure: Callable[[], Tensor]) -> Outcome:
        if len(self.optimizers) > 1:
            raise ValueError(f"step(closure) needs a control with one optimizer; this one has {len(self.optimizers)}.")
        plan, phase = self._plan((0,)), self._phases[0]
        evaluations: list[tuple[Decision, StepInputs]] = []

        def unscale_and_clip() -> bool:
            self._compare_ranks(plan)
            inputs = self._inputs((0,))
            if self._state.policy is not None and not inputs.is_unscaled:
                check_float16(plan.params, self._names)
            tensors = dense_grads(plan.params)
            decision = plan.decide(tensors, inputs)
            self._losses.clear()
            evaluations.append((decision, inputs))
            is_taken = not bool(decision.skip)
            if is_taken:
                apply_in_place(decision, tensors)
            phase.enter(Phase.USED)
            return is_taken

        phase.is_stepping = True
        try:
            step_with_closure(self.optimizers[0], closure, unscale_and_clip)
        finally:
            phase.is_stepping = False
        if not evaluations:
            raise ScaleMisuse(f"{type(self.optimizers[0]).__name__}.step did not call the closure.")
        plan.advance(evaluations[-1][0], updates_scale=True)
        return self._finish((0,), *evaluations[-1])
