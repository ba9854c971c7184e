"""One step of the optimizers that step together: measure, decide, update."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.clip import ClipByNorm
from gradilocks.errors import NoGradients
from gradilocks.kernels.pointer_table import is_capturing, upload
from gradilocks.names import Names
from gradilocks.optim.fused_step import FusedStep
from gradilocks.ranks.layout import Layout, local
from gradilocks.step.clip_stage import ClipStage
from gradilocks.step.decide import Decision, StepInputs, as_clip_by_norm, decide
from gradilocks.step.gradients import check_float16, dense_grads, first_device, largest_finite, parameters
from gradilocks.step.host_step import HostStep
from gradilocks.step.measure import statistics_of
from gradilocks.step.state import StepState
from gradilocks.step.update import can_bypass_step, skips_by_found_inf, update
from gradilocks.torch_private import mark_stepped

if TYPE_CHECKING:
    from gradilocks.kernels.recorded_step import RecordedStep

_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
"""Dtypes of parameters that the host step and the recorded step process."""


class StepPlan:
    """Steps a fixed set of optimizers with one decision.

    With the common policies and dtypes, gradients on a GPU take a RecordedStep, and on a CPU a HostStep: the "fast
    step", which measures, decides, counts and updates the scale, and also updates the parameters if a FusedStep covers
    all optimizers. Everything else runs as torch operations: `decide`, `update`, `advance`.

    Args:
        optimizers: the optimizers that step together.
        names: of their parameters.
        state: scale and counters, shared by all plans of a control.
        policies: clip policies.
        layout: distribution of these parameters over ranks; None for one rank.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        names: Names,
        state: StepState,
        policies: Sequence[Any],
        layout: Layout | None,
    ) -> None:
        self.optimizers, self.layout, self._names = tuple(optimizers), layout, names
        self.params = parameters(optimizers)
        self.names = names.of(self.params)
        self.clip = ClipStage(policies, self.params, self.names, names.groups(self.params), layout)
        self.names_by_rank: tuple[Sequence[str], ...] | None = None
        """Names on every rank, or one list if all are equal; None until the ranks have exchanged them."""
        self._state = state
        dtypes = {param.dtype for param in self.params}
        self._has_float16 = torch.float16 in dtypes
        self._has_float64 = bool(dtypes & {torch.float64, torch.complex128})
        self._max_gradient = largest_finite(self.params)
        self._clip_by_norm = as_clip_by_norm(policies) if state.rules is not None else None
        """None if the policies, or later the parameters, need torch operations."""
        self._fast: RecordedStep | HostStep | None = None
        self._fused: FusedStep | None = None
        """Part of the fast step; None if `update` calls `optimizer.step()`."""
        # The settings for which the fast step was created, compared by `_is_fast_step_current`.
        self._bypasses_step = False
        self._state_tensors: dict[str, Tensor] | None = None
        self._sizes: tuple[int, ...] = ()

    def step(self, inputs: StepInputs) -> Decision:
        """Takes or skips one step."""
        if self._has_float16 and self._state.policy is not None and not inputs.is_unscaled:
            for optimizer in self.optimizers:
                if not skips_by_found_inf(optimizer):
                    check_float16(parameters([optimizer]), self._names)
        if not self._state.updates_scale:
            inputs = StepInputs(inputs.is_unscaled, False, *inputs[2:])
        grads = [param.grad for param in self.params]
        self._check_present(grads)
        fast = self._fast if self._is_fast_step_current() else self._make_fast_step()
        decision = None if fast is None else fast.run(grads, inputs)
        if decision is not None and self._fused is not None:
            for optimizer in self.optimizers:
                mark_stepped(optimizer)
            return decision
        with torch.no_grad():
            tensors = dense_grads(self.params)
            is_advanced = decision is not None
            decision = decision or self.decide(tensors, inputs)
            begin = 0
            for optimizer in self.optimizers:
                end = begin + sum(len(group["params"]) for group in optimizer.param_groups)
                update(optimizer, tensors[begin:end], decision, begin)
                begin = end
            if not is_advanced:
                self.advance(decision, updates_scale=inputs.updates_scale)
        return decision

    def decide(self, tensors: Sequence[Tensor | None], inputs: StepInputs) -> Decision:
        """Measures the gradients and decides the step with torch operations. Changes neither scale nor counters."""
        self._check_present(tensors)
        device = first_device(self.optimizers)
        self._state.to(device)
        if any(tensor is not None for tensor in tensors):
            # With one ClipByNorm and a built-in scale the largest magnitude is not used.
            is_detailed = inputs.needs_statistics or self._clip_by_norm is None
            statistics = statistics_of(tensors, order=self.clip.order, detail=is_detailed).to(device)
        else:  # The other ranks wait for this one, so it contributes zeros.
            statistics = torch.zeros(len(kernels.STATISTICS), len(tensors), dtype=torch.float64, device=device)
        return decide(
            statistics,
            tensors,
            self.clip,
            self._state,
            inputs,
            layout=self.layout,
            max_gradient=self._max_gradient,
            has_float64=self._has_float64,
        )

    @torch.no_grad()
    def advance(self, decision: Decision, *, updates_scale: bool) -> None:
        """Counts the step of a decision that `decide` returned; updates the scale and the clip policies."""
        state = self._state
        state.steps += 1
        state.streak.copy_(torch.where(decision.overflow, state.streak + 1, 0))
        if decision.clipping is not None:
            self.clip.update(decision.clipping, decision.skip == 0)
        if updates_scale:
            state.update_scale(decision.overflow, decision.largest, keep_scale=(decision.skip > 0) & ~decision.overflow)

    def _check_parameters(self) -> None:
        params = parameters(self.optimizers)
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            raise ValueError(
                f"the optimizers' parameters changed: {len(params)} now, {len(self.params)} at the first step. After "
                "add_param_group() construct a new GradientControl; load_state_dict() transfers the state."
            )

    def _check_present(self, grads: Sequence[Tensor | None]) -> None:
        if self.layout is None and not any(grad is not None for grad in grads):
            raise NoGradients(
                f"none of the {len(self.params)} parameters has a gradient. Call backward() before step(), and check "
                "that the loss depends on the parameters of this optimizer."
            )

    # --- the recorded step and the host step ------------------------------------------------------------------------

    def _make_fast_step(self) -> RecordedStep | HostStep | None:
        """Creates the recorded step or the host step; None if neither applies."""
        self._check_parameters()
        self._fast = self._fused = None
        device = first_device(self.optimizers)
        if self._clip_by_norm is None or self._clip_by_norm.order not in (1.0, 2.0, math.inf):
            return None
        is_recorded = kernels.has_recorded_step(device.type)
        if not is_recorded and (device.type != "cpu" or self.layout is not None):
            return None
        if is_capturing(device):
            raise RuntimeError(
                "the first step creates optimizer state and tables, which a CUDA graph cannot capture. Take a step "
                "before the capture, as torch recommends for warm-up."
            )
        dtypes = _DTYPES["cuda" if is_recorded else "cpu"]
        tensors = [local(param) for param in self.params]
        if not all(t.device == device and t.dtype in dtypes and t.layout is torch.strided for t in tensors):
            self._clip_by_norm = None
            return None
        self._state.to(device)
        self._state_tensors, self._sizes = self._state.tensors, tuple(map(Tensor.numel, self.params))
        self._bypasses_step = all(map(can_bypass_step, self.optimizers))
        self._fused = FusedStep.make(self.optimizers) if self._bypasses_step else None
        if is_recorded:
            self._fast = self._recorded_step(self._clip_by_norm, device)
        else:
            self._fast = HostStep(
                self.params,
                self._state,
                self._clip_by_norm,
                max_gradient=self._max_gradient,
                fused=self._fused,
            )
        return self._fast

    def _is_fast_step_current(self) -> bool:
        """True if the fast step still uses the current tensors of the state and of the optimizers."""
        if self._fast is None or self._state_tensors is not self._state.tensors:
            return False
        if self._bypasses_step != all(map(can_bypass_step, self.optimizers)):
            return False
        if self._fused is None:
            self._check_parameters()
            is_on_state_device = self.params[0].device == self._state.steps.device
            return is_on_state_device and self._sizes == tuple(map(Tensor.numel, self.params))
        return self._fused.is_current()

    def _recorded_step(self, rule: ClipByNorm, device: torch.device) -> RecordedStep:
        from gradilocks.kernels.recorded_step import RecordedStep
        from gradilocks.kernels.triton_kernels import StepTensors

        scale_state, rules = self._state.tensors, self._state.rules
        assert rules is not None
        numbers = [
            rule.max_norm,
            self._max_gradient,
            rules.growth_factor,
            rules.backoff_factor,
            rules.growth_interval,
            rules.min_scale,
            rules.max_scale,
            rules.hysteresis,
        ]
        tensors = StepTensors(
            rules=upload(array("d", numbers), device),
            scale=scale_state["scale"],
            growth_tracker=scale_state["growth_tracker"],
            hysteresis=scale_state["hysteresis"],
            streak=self._state.streak,
            steps=self._state.steps,
            skip=torch.zeros((), dtype=torch.float32, device=device),
            divisor=torch.ones((), dtype=torch.float32, device=device),
            multiplier=torch.ones((), dtype=torch.float64, device=device),
        )
        return RecordedStep(self.params, tensors, order=rule.order, fused=self._fused, layout=self.layout)
