"""The control's state and its judgement: what the scale is, and what becomes of this step.

Measures all gradients together and decides, by the stages or, where it can, by the short way that
does the same; then moves the scale on and counts the steps that were not finite.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks import checkpoint
from gradilocks.clip import ClipByNorm, ClipByValue, ClipPolicy, NoClip
from gradilocks.decide import decide
from gradilocks.diagnose import never_finite
from gradilocks.errors import NeverFinite
from gradilocks.express import Express
from gradilocks.gradients import Gradients, Names, every_parameter, replicas_of, roof_of
from gradilocks.kernels.captured import capturing
from gradilocks.measure import measure
from gradilocks.memory import remapped, same
from gradilocks.record import Outcome, Streak, fetch
from gradilocks.reduce import agreed, reduce, reduce_each
from gradilocks.roll import Called
from gradilocks.scale import NoScale, ScalePolicy, scale_loss
from gradilocks.values import (
    ROW,
    ClipLimit,
    Decision,
    Measurement,
    ScaleState,
    Scene,
    StepRecord,
    moved,
)

__all__ = ["Judge", "Verdict", "held_if"]

_SIMPLE = (NoClip, ClipByNorm, ClipByValue)


class Lesson(NamedTuple):
    """What a clip policy has seen, and what it made of it."""

    memory: dict[str, Tensor]
    measurement: Measurement
    scale: Tensor
    limit: ClipLimit


class Verdict(NamedTuple):
    """What became of a step."""

    decision: Decision
    outcome: Outcome
    record: StepRecord
    settled: bool
    """Whether the scale has moved on already."""
    lesson: Lesson | None = None
    """What a clip policy that learns is to learn from."""
    unscaled: bool = False
    """Whether the gradients had lost the scale already."""


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
        self.detail = False
        """Whether largest magnitudes and zeros are wanted of the next step, at whatever price."""
        self._names = names
        self._process_group = process_group
        self.memory: dict[str, Tensor] | None = None
        """What the clip policy remembers."""
        self._whose: list[weakref.ref[Tensor]] = []  # The parameters that it knows, in order.
        self._has_ranks = False
        self._loss: Tensor | None = None
        self._loss_nonfinite: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_whose": []}  # Weak references do not travel.

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
        asking = self.detail or getattr(self.scale_policy, "needs_largest", False)
        measurement = measure(
            tensors, home=home, order=float(policy.order), detail=policy.needs_largest or asking
        )
        self._has_ranks = has_ranks
        if has_ranks:
            measurement = self._over_ranks(measurement, replicas_of(found))
        scale = self.state.scale
        if unscaled:
            scale = torch.ones_like(scale)
        if type(policy) not in _SIMPLE:
            measurement = dataclasses.replace(measurement, scene=self._scene(found))
        memory = self._memory_on(home)
        if memory is None:
            limit = policy.limit(measurement, scale)
        else:
            limit = policy.limit(measurement, scale, memory)  # type: ignore[call-arg]
        decision = decide(measurement, scale, limit, roof=roof_of(tensors))
        overflow = decision.skip if decision.overflow is None else decision.overflow
        statistics = measurement.tensors
        numbers = [
            decision.skip + (decision.skip - overflow),  # 2 if it was rejected.
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
        record = StepRecord(row, overflow, lambda: statistics)
        # Weak: an Outcome that somebody keeps must not keep a parameter that was replaced.
        params = [weakref.ref(param) for part in found for param in part.params]
        outcome = Outcome(record, self._namer(params), step=self._number())
        lesson = None if memory is None else Lesson(memory, measurement, scale, limit)
        return Verdict(decision, outcome, record, False, lesson, unscaled)

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
        if verdict.lesson is not None:  # Before the scale moves, which it was judged under.
            policy: Any = self.clip_policy
            policy.advance(*verdict.lesson, verdict.decision.skip)
        self._advance_scale(verdict)
        self.steps.add_(1)
        return self.streak.note(verdict.record)

    def never_finite(self, outcome: Outcome) -> NeverFinite:
        """What to raise after too many non-finite steps in a row."""
        return never_finite(
            self.streak.symptoms(),
            in_a_row=int(fetch(self.streak.count)[0]),
            bounds=self.scale_policy.bounds(),
            culprits=outcome.culprits,
            described=outcome.describe(at_most=5),
        )

    def _advance_scale(self, verdict: Verdict) -> None:
        """Moves the scale on, unless a clip policy has rejected the step: nothing overflowed."""
        decision = verdict.decision
        rejected = None if decision.overflow is None else decision.skip - decision.overflow
        with held_if(rejected, self.state):
            self._advance_by_policy(verdict)

    def _advance_by_policy(self, verdict: Verdict) -> None:
        policy: Any = self.scale_policy
        record = verdict.record
        if not getattr(policy, "needs_largest", False):
            policy.advance(self.state, record.skip)
            return
        largest = record.statistics.largest
        assert largest is not None
        peak = largest.amax() if largest.numel() else torch.zeros_like(self.state.scale)
        if verdict.unscaled:
            peak = peak * self.state.scale
        broken = record.row[ROW.index("loss_nonfinite")]
        told = agreed(peak, broken, group=self._process_group, ranks=self._has_ranks)
        policy.advance(self.state, record.skip, largest=told[0], loss_nonfinite=told[1])

    def saved(self) -> dict[str, Any]:
        """Policies and state as a checkpoint."""
        return checkpoint.save(
            self.scale_policy,
            self.clip_policy,
            self.state,
            memory=self.memory,
            steps=int(fetch(self.steps)[0]),
            streak=int(fetch(self.streak.count)[0]),
        )

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; one that does not fit raises and changes nothing."""
        count = sum(1 for _ in every_parameter(self._names.optimizers))
        loaded = checkpoint.load(state_dict, self.scale_policy, self.clip_policy, count=count)
        if hasattr(loaded.clip_policy, "check"):
            every = list(every_parameter(self._names.optimizers))
            loaded.clip_policy.check(self._names.of(every), self._names.groups())
        self.scale_policy, self.clip_policy = loaded.scale_policy, loaded.clip_policy
        self.state.scale.fill_(loaded.scale)
        self.state.growth_tracker.fill_(loaded.growth_tracker)
        self.state.hysteresis.fill_(loaded.hysteresis)
        for name, tensor in self.scale_policy.start(self.state.scale.device).more.items():
            self.state.more.setdefault(name, tensor)  # In place: a captured graph holds them.
        for name, value in loaded.more.items():
            self.state.more[name].fill_(value)
        self.streak.restore(loaded.streak)
        if loaded.steps is not None:
            self.steps.fill_(loaded.steps)
            self._counted = loaded.steps
        home, memory = self.state.scale.device, loaded.memory
        self.memory = None if memory is None else {k: moved(t, home) for k, t in memory.items()}
        self._whose = []
        self.forget_loss()

    def recall(self, saved: Any) -> None:
        """Goes on with what the clip policy remembered, as `checkpoint.plain` wrote it."""
        count = sum(1 for _ in every_parameter(self._names.optimizers))
        self.memory = checkpoint.read_memory(self.clip_policy, saved, count)
        self._whose = []

    def _over_ranks(self, mine: Measurement, replicas: Sequence[int] | None) -> Measurement:
        policy = self.clip_policy
        if not getattr(policy, "apart", False):
            return reduce(mine, group=self._process_group, replicas=replicas)
        if replicas is None or self._process_group is not None or getattr(policy, "by_unit", False):
            raise ValueError(
                f"{type(policy).__name__} bounds gradients apart from each other, and ranks hold "
                "parts of them here that are not known to belong together. Use ClipByNorm, or "
                "another policy that bounds the norm of all."
            )
        return reduce_each(mine, replicas=replicas)

    def _memory_on(self, home: torch.device) -> dict[str, Tensor] | None:
        """What the clip policy remembers, if it is one that learns."""
        policy: Any = self.clip_policy
        if not hasattr(policy, "start"):
            return None
        every = list(every_parameter(self._names.optimizers))
        memory = self.memory
        if memory is None:
            memory = policy.start(home, len(every))
        elif self._whose and not same(self._whose, every):
            memory = remapped(policy, memory, self._whose, every, home)
        if not same(self._whose, every):
            self._whose = [weakref.ref(param) for param in every]
        self.memory = {name: moved(tensor, home) for name, tensor in memory.items()}
        return self.memory

    def _scene(self, found: Sequence[Gradients]) -> Scene:
        every = list(every_parameter(self._names.optimizers))
        params = [param for part in found for param in part.params]
        places: Sequence[int] = range(len(every))
        if len(params) != len(every):
            at = {id(param): place for place, param in enumerate(every)}
            places = [at[id(param)] for param in params]
        return Scene(
            params=params,
            tensors=[tensor for part in found for tensor in part.tensors],
            places=places,
            count=len(every),
            names=lambda: self._names.of(every),
            groups=self._names.groups,
        )

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
                more={name: moved(each, device) for name, each in self.state.more.items()},
            )
            self.steps = moved(self.steps, device)


@contextmanager
def held_if(rejected: Tensor | None, state: ScaleState) -> Iterator[None]:
    """Inside, `state` may be moved on; afterwards it is as it was if `rejected` is 1."""
    moving = [state.scale, state.growth_tracker, state.hysteresis, *state.more.values()]
    before = [] if rejected is None else [tensor.clone() for tensor in moving]
    yield
    if rejected is not None:
        held = moved(rejected, state.scale.device) > 0
        for tensor, old in zip(moving, before, strict=True):
            tensor.copy_(torch.where(held, old, tensor))
