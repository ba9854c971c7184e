"""The control's state and its judgement: what the scale is, and what becomes of this step.

Measures all gradients together and decides, by the stages or, where it can, by the short way that
does the same; then moves the scale on and counts the steps that were not finite.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks.clip import ClipPolicy
from gradilocks.decide import decide
from gradilocks.express import Express
from gradilocks.gradients import Gradients, Names, replicas_of, roof_of
from gradilocks.kernels.captured import capturing
from gradilocks.measure import measure
from gradilocks.record import Outcome, Streak
from gradilocks.reduce import reduce
from gradilocks.roll import Called
from gradilocks.scale import NoScale, ScalePolicy, scale_loss
from gradilocks.values import Decision, ScaleState, StepRecord, moved

__all__ = ["Judge", "Verdict"]


class Verdict(NamedTuple):
    """What became of a step."""

    decision: Decision
    outcome: Outcome
    record: StepRecord
    settled: bool
    """Whether the scale has moved on already."""


class Judge:
    """Holds the policies and everything that moves, on one device: the home of the scale."""

    def __init__(
        self,
        scale: ScalePolicy,
        clip: ClipPolicy,
        *,
        names: Names,
        give_up_after: int | None,
        process_group: Any,
    ) -> None:
        self.scale_policy, self.clip_policy = scale, clip
        self.state = scale.start(torch.device("cpu"))
        self.steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._counted: int | None = 0  # `steps`, as long as the host can know it.
        self.streak = Streak(give_up_after)
        self.express = Express()
        self._names = names
        self._process_group = process_group
        self._loss: Tensor | None = None
        self._loss_nonfinite: Tensor | None = None

    @property
    def scales(self) -> bool:
        """Whether gradients carry a scale at all."""
        return not isinstance(self.scale_policy, NoScale)

    def scaled(self, loss: Tensor, device: torch.device) -> Tensor:
        """The loss times the scale; takes note of whether it is finite."""
        self.move_to(device)
        if self._loss is not None:
            self._fold_loss()
        self._loss = loss.detach()
        return scale_loss(loss, self.state.scale) if self.scales else loss

    def forget_loss(self) -> None:
        """The gradients of the losses so far are gone."""
        self._loss = self._loss_nonfinite = None

    def judge(self, found: Sequence[Gradients], *, unscaled: bool, has_ranks: bool) -> Verdict:
        """Measures all gradients together and decides, by the stages. Changes nothing."""
        tensors = [tensor for part in found for tensor in part.tensors]
        home = self.state.scale.device
        policy = self.clip_policy
        measurement = measure(
            tensors, home=home, order=float(policy.order), detail=policy.needs_largest
        )
        if has_ranks:
            measurement = reduce(
                measurement, group=self._process_group, replicas=replicas_of(found)
            )
        scale = self.state.scale
        if unscaled:
            scale = torch.ones_like(scale)
        limit = policy.limit(measurement, scale)
        decision = decide(measurement, scale, limit, roof=roof_of(tensors))
        statistics = measurement.tensors
        numbers = [
            decision.skip,
            self.state.scale,
            measurement.norm / scale,
            limit.limit,
            limit.clipped * (1 - decision.skip),
            self.steps + 1,
            self._broken_loss(),
            statistics.nan.sum(),
            statistics.inf.sum(),
        ]
        row = torch.stack([number.to(measurement.norm.dtype) for number in numbers])
        record = StepRecord(row, decision.skip, lambda: statistics)
        # Weak: an Outcome that somebody keeps must not keep a parameter that was replaced.
        params = [weakref.ref(param) for part in found for param in part.params]
        outcome = Outcome(record, self._namer(params), step=self._number())
        return Verdict(decision, outcome, record, False)

    def settle(self, called: Called, *, unscaled: bool, rating: Any = None) -> Verdict:
        """As `judge` and the first half of `conclude`, the short way."""
        self.streak.move_to(self.state.scale.device)
        decision, record = self.express.settle(
            called,
            scale=self.scale_policy,
            clip=self.clip_policy,
            state=self.state,
            streak=self.streak.count,
            steps=self.steps,
            loss=self._one_loss(called.device),
            unscaled=unscaled,
            rating=rating,
        )
        captured = capturing()
        if captured:
            self._counted = None
        outcome = Outcome(record, self._namer(called.refs), step=self._number(), live=captured)
        return Verdict(decision, outcome, record, True)

    def undo(self, verdict: Verdict) -> None:
        """After an update that failed: nothing has been decided."""
        if verdict.settled:
            self.express.undo(verdict.record, self.state, self.streak.count, self.steps)

    def conclude(self, verdict: Verdict) -> bool:
        """Moves the scale on; True if there were too many non-finite steps in a row."""
        self.forget_loss()
        if self._counted is not None:
            self._counted += 1
        if verdict.settled:
            return self.streak.watch(verdict.record)
        self.scale_policy.advance(self.state, verdict.record.skip)
        self.steps.add_(1)
        return self.streak.note(verdict.record)

    def set_steps(self, steps: int) -> None:
        """Goes on counting from a checkpoint."""
        self.steps.fill_(steps)
        self._counted = steps

    def _number(self) -> int | None:
        """The number of the step that is being judged; None if graphs have been replayed."""
        return None if self._counted is None else self._counted + 1

    def _namer(
        self, params: Sequence[weakref.ref[Tensor]]
    ) -> Callable[[], Sequence[tuple[int, str]]]:
        return lambda: self._names.in_backward_order(params)

    def _one_loss(self, device: torch.device) -> Tensor | None:
        """The loss if there was one, else their flag as a number that is not finite if one was."""
        loss = self._loss
        if loss is None and self._loss_nonfinite is None:
            return None
        if (
            loss is not None
            and self._loss_nonfinite is None
            and type(loss) is Tensor
            and loss.numel() == 1
            and loss.device == device
            and loss.is_floating_point()
        ):
            return loss
        return torch.where(self._broken_loss() > 0, float("inf"), 0.0)

    def _broken_loss(self) -> Tensor:
        """float32, 0-d: 1 if a loss since the last step was NaN or Inf, else 0."""
        if self._loss is not None:
            self._fold_loss()
        if self._loss_nonfinite is None:
            return torch.zeros_like(self.state.scale)
        return self._loss_nonfinite

    def _fold_loss(self) -> None:
        assert self._loss is not None
        broken = torch.logical_not(torch.isfinite(self._loss).all()).to(torch.float32)
        broken = moved(broken, self.state.scale.device)
        before = self._loss_nonfinite
        self._loss_nonfinite = broken if before is None else torch.maximum(before, broken)
        self._loss = None

    def move_to(self, device: torch.device) -> None:
        """Keeps what moves on `device` from here on."""
        if device.type != "meta" and self.state.scale.device != device:
            self.state = ScaleState(
                scale=moved(self.state.scale, device),
                growth_tracker=moved(self.state.growth_tracker, device),
                hysteresis=moved(self.state.hysteresis, device),
            )
            self.steps = moved(self.steps, device)
