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

from gradilocks.checks import refuse_misfits
from gradilocks.clip import ClipByNorm, ClipByValue, ClipPolicy, NoClip
from gradilocks.clip.memory import remapped, same
from gradilocks.errors import NeverFinite
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.ranks.collective import agreed, reduce, reduce_apart, reduce_each
from gradilocks.ranks.copies import MARKS, fingerprint
from gradilocks.ranks.layout import NOTES, Company, Layout, Team
from gradilocks.scale import NoScale, ScalePolicy, scale_loss
from gradilocks.state import checkpoint
from gradilocks.state.plain import read_memory, refill
from gradilocks.step.decide import decide
from gradilocks.step.diagnose import never_finite
from gradilocks.step.express import Express
from gradilocks.step.gradients import Gradients, Names, every_parameter, roof_of
from gradilocks.step.losses import Losses
from gradilocks.step.measure import measure
from gradilocks.step.outcome import Outcome, Streak, fetch
from gradilocks.step.roll import Called
from gradilocks.values import (
    ROW,
    ClipLimit,
    Decision,
    Measurement,
    Meeting,
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
    ) -> None:
        self.scale_policy, self.clip_policy = scale, clip
        self.state = scale.start(torch.device("cpu"))
        self.steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._counted: int | None = 0  # `steps`, as long as the host can know it.
        self.streak = Streak(give_up_after)
        self.express = Express()
        self.detail = False
        """Whether largest magnitudes and zeros are wanted of the next step, at whatever price."""
        self.names = names
        self.memory: dict[str, Tensor] | None = None
        """What the clip policy remembers."""
        self._whose: list[weakref.ref[Tensor]] = []  # The parameters that it knows, in order.
        self._meeting: Meeting | None = None  # The ranks that the latest step was measured over.
        self._company = Company()
        self.losses = Losses()

    def __getstate__(self) -> dict[str, Any]:
        # Weak references and process groups do not travel.
        return {**self.__dict__, "_whose": [], "_meeting": None}

    @property
    def scales(self) -> bool:
        """Whether gradients carry a scale at all."""
        return not isinstance(self.scale_policy, NoScale)

    def scaled(self, loss: Tensor, device: torch.device) -> Tensor:
        """The loss times the scale; takes note of whether it is finite."""
        self.move_to(device)
        self.losses.note(loss, self.state.scale.device)
        return scale_loss(loss, self.state.scale) if self.scales else loss

    def judge(
        self,
        found: Sequence[Gradients],
        *,
        unscaled: bool,
        team: Team | None = None,
        meetings: Sequence[Meeting] = (),
    ) -> Verdict:
        """Measures all gradients together and decides, by the stages. Changes nothing.

        Args:
            found: the gradients, of each optimizer.
            unscaled: whether they have lost the scale already.
            team: the ranks that hold the model together; None if each holds all of it.
            meetings: without a team, the ranks that hold some of the tensors together with this
                one, each on a mesh of its own.
        """
        tensors = [tensor for part in found for tensor in part.tensors]
        home = self.state.scale.device
        policy = self.clip_policy
        asking = self.detail or getattr(self.scale_policy, "needs_largest", False)
        measurement = measure(
            tensors, home=home, order=float(policy.order), detail=policy.needs_largest or asking
        )
        self._meeting = None if team is None else team.meeting
        scene = None if type(policy) in _SIMPLE else self._scene(found)
        roof: float | Tensor = roof_of(tensors)
        if team is not None:
            measurement, roof = self._over_ranks(measurement, found, scene, team)
        elif meetings:
            layouts = _layouts(found)
            measurement = reduce_apart(
                measurement,
                meetings=meetings,
                ranks=[None if layout is None else layout.ranks for layout in layouts],
                counts=[layout is None or layout.counts for layout in layouts],
            )
        scale = self.state.scale
        if unscaled:
            scale = torch.ones_like(scale)
        if scene is not None:
            measurement = dataclasses.replace(measurement, scene=scene)
        memory = self._memory_on(home)
        if memory is None:
            limit = policy.limit(measurement, scale)
        else:
            limit = policy.limit(measurement, scale, memory)  # type: ignore[call-arg]
        decision = decide(measurement, scale, limit, roof=roof)
        overflow = decision.skip if decision.overflow is None else decision.overflow
        statistics = measurement.tensors
        numbers = [
            decision.skip + (decision.skip - overflow),  # 2 if it was rejected.
            self.state.scale,
            measurement.norm / scale,
            limit.limit,
            limit.clipped * (1 - decision.skip),
            self.steps + 1,
            self.losses.broken(home),
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
            loss=self.losses.as_one(called.device),
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
        self.losses.forget()
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
        peak = largest.amax() if largest.numel() else largest.new_zeros(())
        if verdict.unscaled:
            peak = peak * self.state.scale
        broken = record.row[ROW.index("loss_nonfinite")]
        told = agreed(peak, broken, meeting=self._meeting)
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
        count = sum(1 for _ in every_parameter(self.names.optimizers))
        loaded = checkpoint.load(state_dict, self.scale_policy, self.clip_policy, count=count)
        refuse_misfits(loaded.clip_policy, self.names)
        self.scale_policy, self.clip_policy = loaded.scale_policy, loaded.clip_policy
        fresh = self.scale_policy.start(torch.device("cpu"))
        fresh.scale.fill_(loaded.scale)
        fresh.growth_tracker.fill_(loaded.growth_tracker)
        fresh.hysteresis.fill_(loaded.hysteresis)
        for name, value in loaded.more.items():
            fresh.more[name].fill_(value)
        refill(self.state, fresh)
        self.streak.restore(loaded.streak)
        if loaded.steps is not None:
            self.steps.fill_(loaded.steps)
            self._counted = loaded.steps
        home, memory = self.state.scale.device, loaded.memory
        self.memory = None if memory is None else {k: moved(t, home) for k, t in memory.items()}
        self._whose = []
        self.losses.forget()

    def recall(self, saved: Any) -> None:
        """Goes on with what the clip policy remembered, as `plain` wrote it."""
        count = sum(1 for _ in every_parameter(self.names.optimizers))
        self.memory = read_memory(self.clip_policy, saved, count)
        self._whose = []

    def refuse(self, team: Team) -> None:
        """Tells the other ranks, as long as they listen, that this one refuses the step.

        At the first steps the host waits for them anyway. Later nobody waits: a rank that raises
        ends the run, as it does anywhere else.
        """
        if self._company.is_new(team):
            order = float(self.clip_policy.order)
            nothing = measure((), home=self.state.scale.device, order=order)
            # Whoever does not listen any more skips the step.
            skip = dataclasses.replace(nothing, nonfinite=torch.ones_like(nothing.nonfinite))
            self._gather(skip, team, layouts=(), refused=True, wide=True)

    def _over_ranks(
        self, mine: Measurement, found: Sequence[Gradients], scene: Scene | None, team: Team
    ) -> tuple[Measurement, Tensor]:
        """The measurement of all ranks, and their roof.

        Raises on all of them if it is not known who holds what.
        """
        policy, meeting = self.clip_policy, team.meeting
        apart = self._apart
        params = [param for part in found for param in part.params]
        tensors = [tensor for part in found for tensor in part.tensors]
        layouts = _layouts(found)
        waiting, looking = self._company.waiting(team), self._company.is_new(team)
        plain = [at for at, param in enumerate(params) if id(param) in waiting]
        shown = None
        if plain:
            chosen, home = [tensors[at] for at in plain], mine.norm.device
            shown = fingerprint(
                chosen,
                places=[waiting[id(params[at])] for at in plain],
                shapes=[tuple(params[at].shape) for at in plain],
                norms=measure(chosen, home=home).tensors.norms,
            )
        whole, every = self._gather(
            mine,
            team,
            layouts=layouts,
            marks=None if shown is None else shown.marks,
            wide=all(tensor.dtype is torch.float64 for tensor in tensors),
        )
        if looking:
            columns = [whole.nonfinite.reshape(1).to(every.dtype), every.flatten()]
            broken, *numbers = fetch(torch.cat(columns + ([] if shown is None else [shown.shown])))
            rows, rest = numbers[: every.numel()], numbers[every.numel() :]
            self._company.meet(
                team,
                [rows[at : at + len(NOTES)] for at in range(0, len(rows), len(NOTES))],
                compared=[params[at] for at, seen in zip(plain, rest, strict=True) if seen],
                finite=not broken,
                apart=apart,
                names=self.names.of,
            )
        roof = _roof(every[:, NOTES.index("narrow")])
        if not apart:
            return whole, roof
        assert scene is not None
        if team.parts or getattr(policy, "by_unit", False):
            raise ValueError(
                f"{apart} bounds gradients apart from each other, and ranks hold parts of them "
                "here that are not known to belong together. Use ClipByNorm, or another policy "
                "that bounds the norm of all."
            )
        each = reduce_each(
            whole,
            meeting=meeting,
            counts=team.counts(layouts),
            places=scene.places,
            count=scene.count,
        )
        return each, roof

    def _gather(
        self,
        mine: Measurement,
        team: Team,
        *,
        layouts: Sequence[Layout | None],
        wide: bool,
        marks: Tensor | None = None,
        refused: bool = False,
    ) -> tuple[Measurement, Tensor]:
        """The measurement of all ranks, and the notes of each."""
        norms = mine.tensors.norms
        notes = self._company.notes(
            team, refused=refused, wide=wide, apart=self._apart, names=self.names.of
        )
        told = moved(torch.tensor(notes, dtype=norms.dtype, device="cpu"), norms.device)
        if marks is None:
            marks = norms.new_zeros(len(MARKS))
        return reduce(
            mine,
            meeting=team.meeting,
            counts=team.counts(layouts),
            notes=[*told.unbind(), *marks.unbind()],
        )

    @property
    def _apart(self) -> str:
        """The clip policy's name if it bounds gradients apart from each other, else ""."""
        policy = self.clip_policy
        return type(policy).__name__ if getattr(policy, "apart", False) else ""

    def _memory_on(self, home: torch.device) -> dict[str, Tensor] | None:
        """What the clip policy remembers, if it is one that learns."""
        policy: Any = self.clip_policy
        if not hasattr(policy, "start"):
            return None
        every = list(every_parameter(self.names.optimizers))
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
        every = list(every_parameter(self.names.optimizers))
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
            names=lambda: self.names.of(every),
            groups=self.names.groups,
        )

    def _number(self) -> int | None:
        """The number of the step that is being judged; None if graphs have been replayed."""
        return None if self._counted is None else self._counted + 1

    def _namer(
        self, params: Sequence[weakref.ref[Tensor]]
    ) -> Callable[[], Sequence[tuple[int, str]]]:
        return lambda: self.names.in_backward_order(params)

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


def _layouts(found: Sequence[Gradients]) -> list[Layout | None]:
    """How each gradient lies on the ranks; None for a plain one."""
    return [each for part in found for each in part.layouts or [None] * len(part.params)]


def _roof(narrow: Tensor) -> Tensor:
    """The largest number that the gradients of all ranks can hold.

    Args:
        narrow: for each rank, above 0 if it has gradients that are not float64.
    """
    lower, higher = (
        torch.full((), torch.finfo(dtype).max, dtype=narrow.dtype, device=narrow.device)
        for dtype in (torch.float32, torch.float64)
    )
    return torch.where(narrow.amax() > 0, lower, higher)


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
