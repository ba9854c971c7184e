"""The engine that every step runs through: gradients are measured, ranks combined, a step decided.

A GradientControl has one for all of its optimizers, a GradScaler with `policy=` or `clip=` one for
each. It holds the table of gradients, the policies and everything of them that moves. Where both
policies say their rule in numbers and the gradients' back end can follow it, the device settles the
step by itself; else the policies are asked in Python, on the same measurement.

    find ─▶ measure ─▶ combine ranks ─▶ limit ─▶ decide ─▶ (update) ─▶ conclude

What the drop-ins need of it and keeps no state is there as functions: `measure_all`, `look` (while
unscaling), `norm_and_coefficient`, `multiply_`.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks._torch import (
    AMP_FLAG,
    current_device,
    current_stream,
    is_capturing,
    is_profiling,
)
from gradilocks.checks import refuse_misfits
from gradilocks.clip import (
    ClipPolicy,
    remap_memory,
    same_parameters,
    unit_norms,
    weights_of,
)
from gradilocks.errors import NeverFinite
from gradilocks.kernels import native
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.kernels.guards import Guard, attribute, item
from gradilocks.kernels.host_numbers import numbers_on
from gradilocks.kernels.reference import DOUBLE, summarize
from gradilocks.names import Names, OwnedParameters, Placed
from gradilocks.ranks.agreement import (
    ASKS,
    REPORT,
    RankAgreement,
    refuse_different,
    refuse_refused,
    refuse_uncounted,
)
from gradilocks.ranks.all_parameters import (
    NOBODY,
    AllParameters,
    held_parameters,
    owned_parameters,
    parameters_of_all,
)
from gradilocks.ranks.collective import reduce, reduce_apart, reduce_columns
from gradilocks.ranks.layout import (
    flattened_among,
    has_other_ranks,
    is_distributed,
    local_of,
    ranks_in,
    world_size,
)
from gradilocks.ranks.model_ranks import ModelRanks, tell_all
from gradilocks.ranks.parameter_table import (
    OwnPart,
    ParameterTable,
    TableOfRank,
    counts_of,
    table_of_meshes,
    table_of_model,
    told_by,
)
from gradilocks.scale import (
    NoScale,
    ScalePolicy,
    in_float32,
    scale_gradient,
    scale_loss,
)
from gradilocks.state import checkpoint
from gradilocks.step.diagnose import Symptom, never_finite
from gradilocks.step.framework_wrappers import KINDS, ours_inside
from gradilocks.step.measure import measure
from gradilocks.step.outcome import Outcome, Streak, fetch
from gradilocks.step.own_step import is_ours
from gradilocks.step.rank_drift import CARRIED, LoadCount, RankDrift
from gradilocks.step.table import (
    Gradients,
    GradientTable,
    TableGradients,
    addresses_of,
    every_parameter,
    lists_of,
    refuse_shared_gradient,
)
from gradilocks.step.together import TOLD, Together
from gradilocks.values import (
    ROW,
    ClipLimit,
    Decision,
    LocalDetail,
    Measurement,
    NonFinite,
    RankGroup,
    RecordingPlan,
    ScaleState,
    Scene,
    SharedDetail,
    Statistics,
    StepRecord,
    moved,
    wide,
)

__all__ = [
    "BoundStep",
    "Engine",
    "Evidence",
    "Look",
    "Losses",
    "Verdict",
    "decide",
    "held_if",
    "joined_counts",
    "look",
    "measure_all",
    "multiply_",
    "norm_and_coefficient",
    "peak_of",
]


class Lesson(NamedTuple):
    """What a clip policy that learns has seen of a step, and what limit it made of it."""

    memory: dict[str, Tensor]
    measurement: Measurement
    scale: Tensor
    limit: ClipLimit
    here: PartHere | None
    """This rank's part of it, if it is about the parameters of all ranks."""


class Verdict(NamedTuple):
    """What is to become of a step."""

    decision: Decision
    outcome: Outcome
    record: StepRecord
    settled: bool
    """Whether the device has settled the step: the scale has moved on and the step is counted."""
    lesson: Lesson | None = None
    """What a clip policy that learns is to learn from."""
    unscaled: bool = False
    """Whether the gradients had lost the scale already."""
    together: Together | None = None
    """What all ranks have found, if several hold the model."""


class BoundStep(NamedTuple):
    """A step that the device has settled and `gradilocks.optim` has taken, to be taken again.

    All that its launches were bound to, and what tells whether it is all as it was.
    """

    guards: Callable[[], bool]
    """Whether all that the step depended on, besides what `watch` looks at, is as it was."""
    watch: Any
    """Looks at the optimizer's groups, parameters, gradients and state, in C++."""
    optimizer: Any
    plan: Any
    """The optimizer's, of that step."""
    has_masters: bool
    """Whether parameters have float32 masters, so that what is written to them is followed."""
    at: Any
    """The addresses of the gradients."""
    device: torch.device
    stream: int | None
    """On which new addresses are written into the kernels' table; None if they cannot be."""
    loss_dtype: torch.dtype | None
    settling: kernels.BoundSettling
    stepping: Callable[[int | None], object]
    decision: Decision
    params: list[Tensor]
    """Those that have a gradient."""
    names: Callable[[], Sequence[tuple[int, str]]]
    """As an Outcome names them."""


class Evidence(NamedTuple):
    """What a scale policy hears of one step; 0-d each."""

    skip: Tensor
    """Whether the gradients were not finite."""
    rejected: Tensor | None
    """Whether a clip policy has rejected finite ones."""
    peak: Tensor | None = None
    """The largest magnitude of the scaled gradients, if the policy asks for it."""
    loss_nonfinite: Tensor | None = None
    """Whether a loss was NaN or Inf, likewise, if all ranks know."""


class PartHere(NamedTuple):
    """This rank's part of what a clip policy saw of the gradients of all ranks."""

    at: Tensor
    """The places of this rank's gradients among all of them."""
    table: ParameterTable
    gradients: Gradients
    mine: Measurement
    """Of this rank's gradients."""
    present: Tensor
    """Which of all parameters have a gradient anywhere."""

    def measurement(self, whole: Measurement) -> Measurement:
        """This rank's gradients with their own statistics, but for the norms: of whole tensors."""
        statistics = dataclasses.replace(
            self.mine.tensors, norms=whole.tensors.norms.index_select(0, self.at)
        )
        return dataclasses.replace(whole, tensors=statistics, scene=self.mine.scene)

    def limit(self, whole: ClipLimit) -> ClipLimit:
        """What holds for this rank's gradients and, in them, for the units that it has rows of."""
        return dataclasses.replace(
            whole,
            factors=None if whole.factors is None else whole.factors.index_select(0, self.at),
            norms=None if whole.norms is None else whole.norms.index_select(0, self.at),
            units=None if whole.units is None else list(self._units(whole.units)),
            parts=[(self.measurement(seen), self.limit(each)) for seen, each in whole.parts],
        )

    def _units(self, whole: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        """For each gradient the factors of the units that it has, as they broadcast."""
        for param, tensor in zip(self.gradients.params, self.gradients.tensors, strict=True):
            factors = whole[self.table.places[id(param)]]
            if factors is not None and param.dim() <= 1:
                factors = factors.reshape(())
            elif factors is not None:
                rows = self.table.rows_here(param, param.grad, factors)
                factors = factors if rows is None else factors.index_select(0, rows)
                factors = factors.reshape(-1, *(1,) * (tensor.dim() - 1))
            yield factors


class Seen(NamedTuple):
    """What a clip policy is asked about."""

    measurement: Measurement
    memory: dict[str, Tensor] | None
    here: PartHere | None
    """This rank's part of it, if it is about the gradients of all ranks."""


class Remembered(NamedTuple):
    """What a clip policy remembers, and of which parameters, in order."""

    memory: dict[str, Tensor] | None
    params: list[Tensor]


class Met(NamedTuple):
    """What the ranks that hold one model have told each other once."""

    names: Sequence[Sequence[str]] = ()
    """For each rank, its parameters in backward order."""
    owners: Sequence[Sequence[int]] = ()
    """For each rank and each of those, the number of its optimizer."""
    parameters: AllParameters = NOBODY
    plans: frozenset[RecordingPlan] = frozenset()
    """What the recorders of all ranks need."""
    at_once: bool = False
    """Whether all of them decide on a CPU, where reading what was told costs no wait."""


class Engine:
    """Holds the table of gradients, the policies, and their state on the device of the scale.

    Args:
        scale: the scale policy.
        clip: the clip policy.
        names: of the parameters.
        give_up_after: so many non-finite steps in a row are too many; None if none are.
    """

    def __init__(
        self,
        scale: ScalePolicy,
        clip: ClipPolicy,
        *,
        names: Names,
        give_up_after: int | None = None,
    ) -> None:
        self.use(scale, clip)
        self.state = scale.start(torch.device("cpu"))
        self.steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._counted: int | None = 0  # `steps`, as long as the host can know it.
        self.streak = Streak(give_up_after, together=has_other_ranks())
        self.detail = False
        """Whether largest magnitudes and zeros are wanted of the next step, at whatever price."""
        self.names = names
        self.memory: dict[str, Tensor] | None = None
        """What the clip policy remembers."""
        self._memory_of: list[Tensor] = []  # The parameters that it remembers, in order.
        # Where several ranks hold the model, or it was loaded: parameters, of other ranks too, and
        # what is remembered of each.
        self._of_all: tuple[Sequence[Placed], dict[str, Tensor]] | None = None
        self._recalled: frozenset[Placed] = frozenset()  # Of a checkpoint, until the ranks meet.
        self._rank_group: RankGroup | None = (
            None  # The ranks that the latest step was measured over.
        )
        self._agreement, self._drift = RankAgreement(), RankDrift()
        self.scaled_here = False
        """Of several ranks that hold the model, whether this one scales losses."""
        self.elsewhere = False
        """Whether other ranks may hold parameters that this one has nothing of."""
        self.others_come = False
        """Whether optimizers may still come, so that what fits no parameter so far may fit."""
        self.copies_elsewhere = True
        """Whether ranks that do not decide with this one may train copies of the model."""
        # What was worked out for the ranks that hold the model, and for which.
        self._table_of: ModelRanks | None = None
        self._met = Met()
        self.plans: Sequence[RecordingPlan] = ()
        """What the recorders of the coming step need of other ranks."""
        self.step_begun = False
        """Whether the ranks have decided on the coming step before: a closure does so often."""
        self._steps_since_met = 0
        # Of all ranks, for policies that bound tensors apart; and, for a scaler, made of which.
        self._every_parameter: ParameterTable | None = None
        self._told_params: list[Tensor] = []
        self._order_of: ModelRanks | None = None
        self._order: dict[int, int] = {}
        self._names_told: list[str] = []  # In backward order.
        self.losses = Losses()
        self.table = GradientTable()
        self.other_settings: Mapping[str, object] = {}
        """What its owner was given besides that must be alike on all ranks, by name."""
        self.owner: Callable[[], Any] | None = None
        """Of a GradScaler, which owns no optimizer: returns this one's as long as it lives."""
        self._settler: kernels.Settler | None = (
            None  # Settles steps on the device, where kernels serve it.
        )

    def __getstate__(self) -> dict[str, Any]:
        # Process groups and what lies on a device for kernels do not travel.
        left: dict[str, Any] = {"_rank_group": None, "_settler": None}
        left |= {"_table_of": None, "_every_parameter": None, "_told_params": [], "_met": Met()}
        left |= {"_order_of": None, "_names_told": []}
        return {**self.__dict__, **left}

    def use(self, scale: ScalePolicy, clip: ClipPolicy) -> None:
        """Goes by these policies from here on; what follows from them alone is worked out once."""
        self.scale_policy, self.clip_policy = scale, clip
        self.scales = not isinstance(scale, NoScale)
        """Whether gradients carry a scale at all."""
        self._asks_for_scene, self._learns = clip.needs_scene, clip.learns
        # Who remembers numbers of each parameter must see each of them whole, too.
        self._apart = clip.apart or len(clip.by_parameter) > 0
        self._rules = clip.rules(), scale.rules()

    def scaled(self, loss: Tensor, device: torch.device, *, as_it_is: bool = False) -> Tensor:
        """The loss times the scale; takes note of whether it is finite.

        Args:
            loss: of whatever is to be run backward.
            device: of the parameters.
            as_it_is: leave the loss as it is, and multiply what flows back from it. Then it is to
                be noted when something does.
        """
        if self.state.scale.device != device:
            self.move_to(device)
        if not as_it_is:
            self.losses.note(loss, self.state.scale.device)
        if not self.scales:
            return loss
        return (scale_gradient if as_it_is else scale_loss)(loss, self.state.scale)

    def find(self, optimizers: Sequence[Any]) -> Gradients:
        """The gradients of all optimizers; raises if one cannot be measured."""
        only: Any = optimizers[0] if len(optimizers) == 1 else None
        own = getattr(only, AMP_FLAG, False) and is_ours(only)
        if not own and KINDS.get(type(only)) is not None:  # A framework's wrapper.
            only = ours_inside(only)
            own = getattr(only, AMP_FLAG, False)
        if own and not self.table.adds_up:
            found: TableGradients | None = only.gradients()  # Its step will want the same.
            if found is not None and found.shared:
                refuse_shared_gradient(found.params, found.tensors, self.names)
            if found is not None:
                return found
        return self.table.find(lists_of(optimizers), name=self.names)

    def begin(self, gradients: Gradients) -> bool:
        """Has the device begin to measure, if it can settle a step on them by the policies' rules.

        Returns:
            Whether it has; for `decide`.
        """
        (clip, scale), home = self._rules, self.state.scale.device
        addressed = gradients.addressed
        if (
            addressed is None
            or gradients.device != home
            or not kernels.BACKENDS[home.type].BY_ADDRESS  # A kernel has failed just now.
            or clip is None
            or clip.order not in kernels.ORDERS
            or scale is None
        ):
            return False
        if self._settler is None or self._settler.device != home:
            backend = cast("kernels.SettlingBackend", kernels.BACKENDS[home.type])
            self._settler = backend.settler(home)
        try:
            self._settler.begin(addressed, clip, scale, largest_finite=gradients.largest_finite)
        except kernels.KernelFailed:  # The user has been warned, and nothing has been decided.
            return False
        return True

    def decide(
        self,
        gradients: Gradients,
        *,
        unscaled: bool,
        overflow: Tensor | None = None,
        model_ranks: ModelRanks | None = None,
        rank_groups: Sequence[RankGroup] = (),
        rating: Any = None,
        on_device: bool | None = None,
        moves: bool = True,
    ) -> Verdict:
        """Measures all gradients together and decides; changes no gradient and no parameter.

        Args:
            gradients: as `find` found them.
            unscaled: whether they have lost the scale already.
            overflow: 0-d, above 0 if NaN or Inf were found in them before; such a step is skipped.
            model_ranks: the ranks that hold the model together; None if each holds all of it.
            rank_groups: without `model_ranks`, the ranks that hold some of the tensors together
                with this one, each on a mesh of its own.
            rating: for a device that settles the step: "adam" or "sgd" and its tables, whose rates
                are worked out on the way.
            on_device: whether the device settles the step, which counts it, and has begun to
                (`begin`). None if that is to be done here; False while a closure may be evaluated
                again.
            moves: whether the scale may move on with this step; a GradScaler moves it later.
        """
        if on_device is None:
            alone = overflow is None and model_ranks is None and not rank_groups
            on_device = alone and self.begin(gradients)
        if on_device:
            try:
                return self._settled(
                    gradients, unscaled=unscaled, overflow=overflow, rating=rating, moves=moves
                )
            except kernels.KernelFailed:  # The user has been warned, and nothing has been decided.
                pass
        home, policy = self.state.scale.device, self.clip_policy
        order = float(policy.order)
        detail = policy.needs_largest or self.detail or self.scale_policy.needs_largest
        detail = detail or (model_ranks is not None and self._shares_detail)
        measurement = measure_all(gradients, home=home, order=order, detail=detail)
        self._rank_group = None if model_ranks is None else model_ranks.rank_group
        scene = self._scene(gradients) if self._asks_for_scene else None
        largest: float | Tensor = gradients.largest_finite
        together: Together | None = None
        peak: Tensor | None = None
        layouts = gradients.every_layout()
        counts: Sequence[bool] = ()
        if overflow is not None and model_ranks is not None:
            # Before the ranks tell each other: all skip, or none.
            flag = torch.maximum(measurement.nonfinite, moved(overflow, home))
            measurement, overflow = dataclasses.replace(measurement, nonfinite=flag), None
        if model_ranks is not None:
            measurement, largest, together = self._over_ranks(
                measurement, gradients, model_ranks, unscaled=unscaled
            )
            each = model_ranks.counts_each
            counts = gradients.once("each", model_ranks, lambda: each(gradients.params, layouts))
            peak = together.largest("peak")
        elif rank_groups:
            counts = [layout is None or layout.counts for layout in layouts]
            found = measurement.tensors.largest
            norms = measurement.tensors.norms
            peak = norms.new_zeros(()) if found is None or not found.numel() else found.amax()
            numbers, changed = [peak.reshape(1).to(norms.dtype)], False
            if policy.apart:
                changed = not self._has_told
                numbers.append(numbers_on(norms.device, (changed, -changed), norms.dtype))
            measurement, told = reduce_apart(
                measurement,
                rank_groups=rank_groups,
                ranks=[None if layout is None else layout.ranks for layout in layouts],
                counts=counts,
                told=torch.cat(numbers),
            )
            peak = told[0]
            # A rank that would have to wait for its device does not look, and waits for this one.
            if changed or (policy.apart and told.device.type == "cpu"):
                _, most, least = fetch(told)
                if most != -least:
                    raise ValueError(_CHANGED_ALONE.format(policy=policy.policy_name))
        if overflow is not None:
            flag = torch.maximum(measurement.nonfinite, moved(overflow, home))
            measurement = dataclasses.replace(measurement, nonfinite=flag)
        scale = torch.ones_like(self.state.scale) if unscaled else self.state.scale
        if scene is not None:
            measurement = dataclasses.replace(measurement, scene=scene)
        memory = self._memory_on(home) if self._learns else None
        seen = Seen(measurement, memory, None)
        if peak is not None:
            seen = self._seen_over_ranks(
                seen, gradients, counts, peak, model_ranks=model_ranks, rank_groups=rank_groups
            )
        limit = policy.limit(seen.measurement, scale, *(() if memory is None else (seen.memory,)))
        lesson = None
        if seen.memory is not None:
            lesson = Lesson(seen.memory, seen.measurement, scale, limit, seen.here)
        if seen.here is not None:
            limit = seen.here.limit(limit)
            measurement = seen.here.measurement(seen.measurement)
        decision = decide(measurement, scale, limit, largest_finite=largest)
        record = self._record(measurement, scale, limit, decision, together)
        captured = home.type == "cuda" and capturing()
        if captured:
            self._counted = None
        outcome = Outcome(
            record,
            self.namer(gradients.params),
            step=self.next_step,
            live=captured,
            on_ranks=None if together is None else together.blamed_now,
        )
        return Verdict(decision, outcome, record, False, lesson, unscaled, together)

    def norm(
        self, gradients: Gradients, *, unscaled: bool, model_ranks: ModelRanks | None
    ) -> Tensor:
        """The norm of the true gradients, float32 and 0-d; decides nothing.

        Args:
            gradients, unscaled, model_ranks: as in `decide`.
        """
        home, order = self.state.scale.device, float(self.clip_policy.order)
        if model_ranks is not None:  # As ranks that decide: they compare what they know there.
            verdict = self.decide(
                gradients, unscaled=unscaled, model_ranks=model_ranks, on_device=False
            )
            return verdict.outcome.tensors["norm"].float()
        settled = norm_and_coefficient(gradients, math.inf, order)
        found = (
            measure_all(gradients, home=home, order=order).norm
            if settled is None
            else moved(settled[0], home)
        )
        return (found if unscaled or not self.scales else found / self.state.scale).float()

    def joined_norm(self, norms: list[Tensor]) -> Tensor:
        """The norm over parts of which these are the norms; float32 and 0-d."""
        joined: Tensor = torch.linalg.vector_norm(torch.stack(norms), float(self.clip_policy.order))
        return joined.float()

    def _seen_over_ranks(
        self,
        mine: Seen,
        gradients: Gradients,
        counts: Sequence[bool],
        peak: Tensor,
        *,
        model_ranks: ModelRanks | None,
        rank_groups: Sequence[RankGroup],
    ) -> Seen:
        """What the clip policy sees, where several ranks hold the gradients.

        One that bounds the norm of all sees the largest magnitude of all. One that bounds gradients
        apart from each other sees all of them, those of other ranks too, and what is remembered of
        them: so that all ranks find the same, also of what they do not hold.

        Args:
            mine: the gradients of this rank, with the norm of all.
            gradients: these.
            counts: for each, whether this rank's elements count.
            peak: the largest magnitude of all ranks.
            model_ranks, rank_groups: as in `decide`.
        """
        policy, found = self.clip_policy, mine.measurement.tensors
        if not self._apart:
            if found.largest is None:
                return mine
            statistics = dataclasses.replace(found, largest=peak.reshape(1))
            return mine._replace(
                measurement=dataclasses.replace(mine.measurement, tensors=statistics)
            )
        params, remembered = gradients.params, mine.memory
        table = self._parameter_table(params, model_ranks, rank_groups)
        own = OwnPart(params, found.norms, counts, found.largest)
        kept = {} if remembered is None else {k: remembered[k] for k in policy.by_parameter}
        lengths: Sequence[tuple[Tensor, Tensor] | None] = ()
        if policy.by_unit:
            lengths, norms, known, present = table.whole_units(
                own,
                gradients.tensors,
                norms_of=unit_norms,
                weights_of=weights_of,
                memory=kept,
                known=self._memory_of,
            )
            largest = peak.expand_as(norms)
        else:
            norms, largest, known, present = table.whole_numbers(
                own, order=mine.measurement.order, memory=kept, known=self._memory_of
            )
        here = table.at(params, norms)
        nothing = torch.zeros(table.count, dtype=torch.int64, device=norms.device)
        statistics = Statistics(
            norms,
            nothing.index_copy(0, here, found.nan),
            nothing.index_copy(0, here, found.inf),
            largest=None if found.largest is None else largest,
        )
        at = {id(param): tensor for param, tensor in zip(params, gradients.tensors, strict=True)}
        scene = Scene(
            params=table.params,
            tensors=[None if param is None else at.get(id(param)) for param in table.params],
            places=range(table.count),
            count=table.count,
            names=lambda: table.names,
            groups=lambda: table.groups,
            lengths=lengths,
        )
        whole = dataclasses.replace(
            mine.measurement, tensors=statistics, double=table.double, scene=scene
        )
        part = PartHere(here, table, gradients, mine.measurement, present)
        return Seen(whole, None if remembered is None else {**remembered, **known}, part)

    def _parameter_table(
        self,
        params: Sequence[Tensor],
        model_ranks: ModelRanks | None,
        rank_groups: Sequence[RankGroup],
    ) -> ParameterTable:
        """The parameters of all ranks. They tell each other once, and again when some have changed.

        Raises, on all of them alike, if it is not known which parts belong together.
        """
        if model_ranks is not None:
            cut = [] if self.clip_policy.by_group else flattened_among(model_ranks.params)
            if cut:
                raise ValueError(
                    f"{self.clip_policy.policy_name} bounds gradients apart from each other, and "
                    f"{self.names(cut[0])} belongs to FullyShardedDataParallel (FSDP1), which cuts "
                    "tensors anywhere: which of its parts belong together is not known. Use "
                    "ClipByNorm, or another policy that bounds the norm of all; or FSDP2 "
                    "(fully_shard), whose shards say what they are."
                )
            if model_ranks.keys is None:
                raise ValueError(
                    f"{self.clip_policy.policy_name} bounds gradients apart from each other, and "
                    "ranks hold parts of them here that are not known to belong together. Use "
                    "ClipByNorm, or another policy that bounds the norm of all; or say who holds "
                    "what by mesh= and distinct= in the place of process_group=."
                )
            # Of a policy that looks at units the table has told which cannot be used.
            if model_ranks.ambiguous and not self.clip_policy.by_unit:
                key = min(model_ranks.ambiguous, key=repr)
                shown = key[0] if isinstance(key, tuple) else key
                raise ValueError(
                    f"{self.clip_policy.policy_name} bounds gradients apart from each other, and "
                    f"several ranks hold one copy of {shown}: whether these are different "
                    "tensors, such as experts, or parts of one is not known. Say who holds what by "
                    "mesh= and distinct=, give different tensors different names, or use "
                    "ClipByNorm, which bounds the norm of all."
                )
            assert self._every_parameter is not None
            return self._every_parameter
        if not self._has_told:  # On no rank of the meshes: else all have refused.
            every = self._own_parameters()
            told = self._told_of(every, range(len(every)), counts_of(every))
            self._every_parameter = table_of_meshes(every, rank_groups, told)
            self._told_params = every
        assert self._every_parameter is not None
        return self._every_parameter

    def _own_parameters(self) -> list[Tensor]:
        return list({id(p): p for p in every_parameter(self.names.optimizers)}.values())

    @property
    def _has_told(self) -> bool:
        """Of a scaler, whether the ranks of its meshes know the parameters that it has."""
        return same_parameters(self._told_params, self._own_parameters())

    def _told_of(
        self, params: Sequence[Tensor], keys: Sequence[Hashable], counts: Sequence[bool]
    ) -> TableOfRank:
        """What this rank tells of its parameters."""
        policy = self.clip_policy
        every = list(every_parameter(self.names.optimizers))
        groups = dict(zip(map(id, every), self.names.groups(), strict=True))
        return told_by(
            params,
            keys,
            names=self.names.of(params),
            groups=[groups[id(param)] for param in params],
            counts=counts,
            unit_count=policy.unit_count if policy.by_unit else None,
        )

    def _record(
        self,
        measurement: Measurement,
        scale: Tensor,
        limit: ClipLimit,
        decision: Decision,
        together: Together | None,
    ) -> StepRecord:
        overflow = decision.skip if decision.overflow is None else decision.overflow
        statistics = measurement.tensors
        numbers = [
            decision.skip + (decision.skip - overflow),  # 2 if it was rejected.
            self.state.scale,
            measurement.norm / scale,
            limit.limit,
            limit.clipped * (1 - decision.skip),
            self.steps + 1,
            *(
                (together.largest("loss"), together.elements("nan"), together.elements("inf"))
                if together is not None
                else (
                    self.losses.broken(measurement.norm.device),
                    statistics.nan.sum(),
                    statistics.inf.sum(),
                )
            ),
        ]
        row = torch.stack([number.to(measurement.norm.dtype) for number in numbers])
        return StepRecord(row, overflow, lambda: statistics)

    def _settled(
        self,
        gradients: Gradients,
        *,
        unscaled: bool,
        overflow: Tensor | None,
        rating: Any,
        moves: bool,
    ) -> Verdict:
        """The step as the device settles it, by the policies' rules."""
        device, addressed = self.state.scale.device, gradients.addressed
        assert addressed is not None
        assert self._settler is not None
        if self.streak.count.device != device:
            self.streak.move_to(device)
        decision, record = self._settler.settle(
            addressed,
            *self._rules,
            self.state,
            streak=self.streak.count,
            steps=self.steps,
            loss=self.losses.as_one(device),
            unscaled=unscaled,
            moves=moves,
            overflow=overflow,
            rating=rating,
        )
        captured = capturing()
        if captured:
            self._counted = None
        step = None if self._counted is None else self._counted + 1
        outcome = Outcome(record, self.namer(gradients.params), step=step, live=captured)
        return Verdict(decision, outcome, record, True)

    def bound(
        self,
        optimizer: Any,
        gradients: Gradients,
        *,
        guards: Sequence[Guard],
        unscaled: bool,
        moves: bool,
        rating: Any,
    ) -> BoundStep | None:
        """The step that `optimizer` has just taken as the device settled it, to be taken again.

        Args:
            optimizer: of `gradilocks.optim`, which has found `gradients` itself.
            guards: what the caller's part of the step depends on.
            gradients, unscaled, moves, rating: as in `decide`.

        Returns:
            None if it cannot be: there is no C++, or it does not make all of the launches.
        """
        plan, addressed, library = optimizer.plan, gradients.addressed, native.library()
        if None in (self._settler, plan, addressed, library) or capturing():
            return None
        assert self._settler is not None
        assert addressed is not None
        device = self.state.scale.device
        loss = self.losses.as_one(device)
        settling = self._settler.bound(loss=loss, unscaled=unscaled, moves=moves, rating=rating)
        stepping = plan.bound_step()
        if settling is None or stepping is None:
            return None
        at = addressed.at
        table, stream = at.own_table()
        watch = plan.watched_by(library, optimizer, table)
        if watch is None:
            return None
        depends_on = [
            *guards,
            # What else a settled step reads and moves on is replaced with these, or not at all.
            *attribute(self, "_rules", "state"),
            *attribute(self.streak, "count"),
            *item(kernels.BACKENDS, device.type),
            *at.guards(),
            *optimizer.guards(plan),
        ]
        return BoundStep(
            guards=library.guards(depends_on),
            watch=watch,
            optimizer=optimizer,
            plan=plan,
            has_masters=plan.has_masters,
            at=at,
            device=device,
            stream=stream,
            loss_dtype=None if loss is None else loss.dtype,
            settling=settling,
            stepping=stepping,
            decision=self._settler.decision,
            params=gradients.params,
            names=self.namer(gradients.params),
        )

    def again(self, bound: BoundStep) -> Verdict | None:
        """Takes a step once more, by the same launches, if all that they depend on is as it was.

        That is what most steps of a run are. Of the sixty calls of the whole way there are left two
        of C++ that look for changes, the launches, and what a step leaves behind.

        Args:
            bound: of the step before.

        Returns:
            None, and nothing has been decided, if something has changed: then the whole way finds
            out what.
        """
        device, plan = bound.device, bound.plan
        loss = self.losses.as_one(device)
        if (None if loss is None else loss.dtype) is not bound.loss_dtype or not bound.guards():
            return None
        stream = None
        if device.type == "cuda":
            stream = current_stream(device.index)
            if current_device() != device.index or is_capturing():
                return None
            if bound.stream is not None and stream != bound.stream:
                return None
        if is_profiling():  # A profile shows each step under its name.
            return None
        looked = bound.watch.look(bound.optimizer.param_groups, stream)
        if looked is None:
            return None
        held, numbers, same_entries = looked  # The gradients are held until all is launched.
        if numbers is not None:
            bound.at.numbers = numbers
        if not bound.settling.begin(stream):
            return None
        if not (same_entries or plan.follow(bound.optimizer, bound.watch)):
            return None
        if bound.has_masters:
            plan.follow_writes()
        record = bound.settling.settle(stream, loss, plan.settings)
        try:
            bound.stepping(stream)
        except BaseException:
            bound.optimizer.undo_rates(bound.decision.skip)
            self._put_back(record)
            raise
        step = None if self._counted is None else self._counted + 1
        outcome = Outcome(record, bound.names, step=step)
        verdict = Verdict(bound.decision, outcome, record, True)
        del held
        if bound.has_masters:
            plan.note_written()
        else:
            bound.watch.took()
        return verdict

    def undo(self, verdict: Verdict) -> None:
        """After an update that failed: nothing has been decided."""
        if verdict.settled:
            self._put_back(verdict.record)

    def _put_back(self, record: StepRecord) -> None:
        """What settling a step has moved on."""
        assert self._settler is not None
        self._settler.undo(record, self.state, self.streak.count, self.steps)

    def conclude(self, verdict: Verdict, *, moves: bool = True) -> bool:
        """After the update: policies learn, the scale moves on, the step is counted.

        Args:
            verdict: of this step.
            moves: whether the scale moves on with it.

        Returns:
            Whether there were too many non-finite steps in a row.
        """
        self.losses.forget()
        if self._counted is not None:
            self._counted += 1
        if verdict.settled:
            return self.streak.watch(verdict.record)
        if verdict.lesson is not None:  # Before the scale moves, under which the policy was asked.
            self._learn(verdict.lesson, verdict.decision.skip)
        if moves:
            self.advance_scale([self.evidence(verdict)])
        self.steps.add_(1)
        return self.streak.note(verdict.record)

    def _learn(self, lesson: Lesson, skip: Tensor) -> None:
        """Moves what the clip policy remembers on.

        Where several ranks hold the model, each learns of the parameters of all: any of them can
        save what all have learned, and load it where other ranks hold the parameters.
        """
        memory, here = lesson.memory, lesson.here
        each = self.clip_policy.by_parameter if here is not None else ()
        before = {name: memory[name].clone() for name in each}
        self.clip_policy.advance(memory, lesson.measurement, lesson.scale, lesson.limit, skip)
        if here is None or not each:
            self._of_all = None
            return
        assert self.memory is not None
        places = here.table.at(self._memory_of, skip)
        known: dict[str, Tensor] = {}
        for name in each:
            # A policy in one process sees only parameters that have a gradient.
            known[name] = torch.where(here.present, memory[name], before[name])
            self.memory[name].copy_(known[name].index_select(0, places))
        self._of_all = here.table.placed, known

    def steps_so_far(self) -> int:
        """How many steps were counted; waits for the device if the host cannot know it."""
        return int(fetch(self.steps)[0]) if self._counted is None else self._counted

    @property
    def next_step(self) -> int | None:
        """The number of the step that has not been concluded; None if only the device knows it."""
        return None if self._counted is None else self._counted + 1

    def never_finite(self, outcome: Outcome, replicas: Any = None) -> NeverFinite:
        """What to raise after too many non-finite steps in a row, in the same words on all ranks.

        Args:
            outcome: of the latest step.
            replicas: the process group of ranks with copies of the model, if there are any. Their
                gradients are the same and their losses are not, so they tell each other.
        """
        symptoms, described = self.streak.symptoms(), outcome.describe(at_most=5)
        culprits = outcome.culprits
        if replicas is not None:
            mine = [symptom.loss_nonfinite for symptom in symptoms], described, culprits
            told = tell_all(mine, ranks_in(replicas), replicas)
            broken = [
                True if any(flags) else None if None in flags else False
                for flags in zip(*(flags for flags, *_ in told), strict=True)
            ]
            symptoms = [
                dataclasses.replace(symptom, loss_nonfinite=flag)
                for symptom, flag in zip(symptoms, broken, strict=True)
            ]
            # Of a loss that was broken only the rank that had it can tell.
            _, described, culprits = next((each for each in told if each[0][-1]), told[0])
        lowest, highest = map(in_float32, self.scale_policy.bounds())
        return never_finite(
            symptoms,
            in_a_row=int(fetch(self.streak.count)[0]),
            bounds=(lowest, highest),
            culprits=culprits,
            described=described,
        )

    def evidence(self, verdict: Verdict) -> Evidence:
        """What a scale policy is to hear of a step, taken down before the scale moves."""
        decision, record = verdict.decision, verdict.record
        rejected = None if decision.overflow is None else decision.skip - decision.overflow
        if not self.scale_policy.needs_largest:
            return Evidence(record.skip, rejected)
        together = verdict.together
        peak = peak_of(record) if together is None else together.largest("peak")
        if verdict.unscaled:
            peak = peak * self.state.scale
        # Ranks that hold another copy of the model have seen other losses, and the same peak:
        # what not all of them know decides nothing.
        if has_other_ranks() and (
            together is None or (self.copies_elsewhere and len(together.ranks) != world_size())
        ):
            return Evidence(record.skip, rejected, peak)
        return Evidence(record.skip, rejected, peak, record.row[ROW.index("loss_nonfinite")])

    def advance_scale(self, seen: Sequence[Evidence]) -> None:
        """Moves the scale on by steps that were judged under it, as one step would.

        Not if a clip policy has rejected one and none overflowed: nothing was learned.
        """
        policy = self.scale_policy
        flag = _largest([each.skip for each in seen])
        rejected = [each.rejected for each in seen if each.rejected is not None]
        if not rejected and not policy.needs_largest:
            policy.advance(self.state, flag)
            return
        held = None
        if rejected:
            held = _largest(rejected) * (1.0 - moved(flag, rejected[0].device))
        with held_if(held, self.state):
            if not policy.needs_largest:
                policy.advance(self.state, flag)
                return
            peaks = [each.peak for each in seen if each.peak is not None]
            losses = [each.loss_nonfinite for each in seen if each.loss_nonfinite is not None]
            policy.advance(
                self.state,
                flag,
                largest=_largest(peaks),
                loss_nonfinite=_largest(losses) if len(losses) == len(seen) else None,
            )

    def saved(self) -> dict[str, Any]:
        """Policies and state as a checkpoint.

        What the clip policy remembers is there before the first step too: whoever loads into a
        fresh control by its own keys, as torch.distributed.checkpoint does, must find them.
        """
        placed, memory = self._placed_memory()
        streak = int(fetch(self.streak.count)[0])
        return checkpoint.save(
            self.scale_policy,
            self.clip_policy,
            self.state,
            memory=memory,
            parameters=placed,
            steps=self.count_of_steps(),
            streak=streak,
            symptoms=self._own_symptoms(streak),
        )

    def _own_symptoms(self, streak: int) -> list[Symptom]:
        """What is known here of the present run of non-finite steps, of which there are `streak`.

        Of ranks with copies of the model each knows whether its own loss was finite, and another
        may go on from what this one saves.
        """
        symptoms = self.streak.symptoms()[-streak:] if streak else []
        group = self._rank_group
        if not has_other_ranks() or (group is not None and len(group.ranks) == world_size()):
            return symptoms
        return [
            symptom if symptom.loss_nonfinite else dataclasses.replace(symptom, loss_nonfinite=None)
            for symptom in symptoms
        ]

    def forget_steps(self) -> None:
        """Counts from 0: somebody else goes on with what has been counted."""
        self.steps.zero_()
        self._counted = 0

    def count_of_steps(self) -> int:
        """How many steps have been judged. Waits for the device."""
        return int(fetch(self.steps)[0])

    def _placed_memory(self) -> tuple[Sequence[Placed], Mapping[str, Tensor] | None]:
        """What the clip policy remembers, and of which parameters: of all ranks' if it is known."""
        if self.memory is None:
            # Ranks that have not met do not know each other's parameters: it is of none of them.
            learns_each = has_other_ranks() and self.clip_policy.by_parameter
            names = [] if learns_each else self.names.of(every_parameter(self.names.optimizers))
            memory = self.clip_policy.start(torch.device("cpu"), len(names))
            return [(name, "") for name in names], memory
        every = list(every_parameter(self.names.optimizers))
        names = self.names.of(every)
        if self._of_all is None:
            return [(name, "") for name in names], self.memory_for(every)
        placed, known = self._of_all
        # Where ranks hold the same parameters, one that was added since is on all of them.
        told = {name for name, _ in placed}
        added = [] if any(place for _, place in placed) else [n for n in names if n not in told]
        if added:
            fresh = self.clip_policy.start(torch.device("cpu"), len(added)) or {}
            known = {
                name: torch.cat([each, moved(fresh[name], each.device)])
                for name, each in known.items()
            }
        return [*placed, *((name, "") for name in added)], {**self.memory, **known}

    def memory_for(self, params: Sequence[Tensor]) -> Mapping[str, Tensor] | None:
        """What the clip policy remembers, with a number for each of `params` where it has one."""
        memory = self.memory
        if memory is None or same_parameters(self._memory_of, params):
            return memory
        home = self.state.scale.device
        return remap_memory(self.clip_policy, memory, self._memory_of, params, home)

    def remembered(self, among: Iterable[Tensor]) -> Remembered | None:
        """What the clip policy remembers, if all that it is about are `among` these parameters.

        None if one is not, or if it is about parameters of other ranks too. One that its optimizer
        has no more is forgotten, as it would be at the next step.
        """
        present = set(map(id, every_parameter(self.names.optimizers)))
        whose = [param for param in self._memory_of if id(param) in present]
        if self._of_all is not None or not set(map(id, among)).issuperset(map(id, whose)):
            return None
        memory = self.memory_for(whose)
        return Remembered(None if memory is None else dict(memory), whose)

    def all_remembered(self) -> Remembered:
        """What the clip policy remembers, also where the optimizer is gone that it is about."""
        return Remembered(None if self.memory is None else dict(self.memory), self._memory_of)

    def remember(self, kept: Remembered) -> None:
        """Goes on with what the clip policy remembers of other parameters than the present ones."""
        self.memory, self._memory_of = kept

    def load(
        self,
        state_dict: Mapping[str, Any],
        model_ranks: ModelRanks | None = None,
        *,
        changed: bool = False,
    ) -> int | None:
        """Goes on from a checkpoint; one that does not fit raises and changes nothing.

        Args:
            state_dict: of this class, or of another scaler.
            model_ranks: the ranks that hold the model together, if several do.
            changed: whether parameters may have been added or taken away since it was saved.

        Returns:
            How many steps had been counted there; None if another scaler has saved it.
        """
        every = list(every_parameter(self.names.optimizers))
        owned = owned_parameters(every, self.names, model_ranks)
        loaded = checkpoint.load(
            state_dict, self.scale_policy, self.clip_policy, owned=owned, changed=changed
        )
        if not self.elsewhere and not self.others_come:
            refuse_misfits(loaded.clip_policy, self.names, loaded=True)
        if loaded.of_all is not None and self._every_parameter is not None:
            self._every_parameter.refuse_recalled(frozenset(loaded.of_all[0]))
        if loaded.clip_policy != self.clip_policy:  # It may need other numbers of the ranks.
            self._table_of, self._told_params = None, []
        self.use(loaded.scale_policy, loaded.clip_policy)
        checkpoint.refill(self.state, loaded.state)
        self.streak.restore(loaded.streak, loaded.symptoms)
        if loaded.steps is not None:
            self.steps.fill_(loaded.steps)
            self._counted = loaded.steps
        home, memory = self.state.scale.device, loaded.memory
        self.memory = None if memory is None else {k: moved(t, home) for k, t in memory.items()}
        known_here = range(len(every)) if loaded.known is None else loaded.known
        self._memory_of = [] if memory is None else [every[k] for k in known_here]
        self._of_all, self._recalled = None, frozenset()
        if loaded.of_all is not None:
            placed, known = loaded.of_all
            self._recalled = frozenset(placed)
            if not owned.alone:  # In an order that all ranks keep, and of other ranks' too.
                self._of_all = placed, {name: moved(each, home) for name, each in known.items()}
        self.losses.forget()
        return loaded.steps

    def load_scale(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with the scale of a checkpoint, before the parameters are known."""
        nobody = OwnedParameters((), apart=False, alone=True)
        ours = state_dict.get("gradilocks") if state_dict else None
        if isinstance(ours, Mapping):
            state_dict = {**state_dict, "gradilocks": {**ours, "clip_state": None}}
        loaded = checkpoint.load(state_dict, self.scale_policy, self.clip_policy, owned=nobody)
        self.use(loaded.scale_policy, loaded.clip_policy)
        checkpoint.refill(self.state, loaded.state)

    def forget_parameters(self) -> None:
        """It is about others from here on; what was learned of them comes with a checkpoint."""
        self.table = GradientTable()
        self.memory, self._memory_of, self._of_all = None, [], None
        self._recalled = frozenset()
        self._table_of, self._every_parameter, self._told_params = None, None, []
        self._met, self._order_of, self._names_told = Met(), None, []

    def set_clip(self, clip: ClipPolicy) -> None:
        """Clips by another policy, which has learned nothing yet."""
        self.use(self.scale_policy, clip)
        self.memory, self._memory_of, self._of_all = None, [], None
        self._recalled = frozenset()
        self._table_of, self._told_params = None, []

    def recall(self, saved: Any, whose: list[Tensor]) -> None:
        """Goes on with what the clip policy remembered of `whose`, as `save_memory` wrote it."""
        self.memory = checkpoint.load_memory(self.clip_policy, saved, len(whose))
        self._memory_of = [] if self.memory is None else whose

    def refuse(self, model_ranks: ModelRanks) -> None:
        """Tells the other ranks, as long as they listen, that this one refuses the step.

        At the first steps the host waits for them anyway. Later nobody waits: a rank that raises
        ends the run, as it does anywhere else.
        """
        if not model_ranks.is_like(self._table_of) or self._agreement.looks(self._step_number):
            self._refused(model_ranks)

    def all_have_changed(self, model_ranks: ModelRanks) -> bool:
        """Whether all ranks have other parameters than before; waits for them.

        Then all of them are here, and may ask each other. Else the step is refused: the others
        raise as this one must, or skip it where they would have to wait for a device to hear of it.

        Args:
            model_ranks: that held the model together before the parameters changed.
        """
        told = self._refused(model_ranks, anew=ASKS)[:, REPORT.index("anew")]
        return all(number == ASKS for number in fetch(told))

    def _refused(self, model_ranks: ModelRanks, *, anew: float | None = None) -> Tensor:
        """Takes part in the step's collective as a rank that refuses; what each has told."""
        order = float(self.clip_policy.order)
        nothing = measure((), home=self.state.scale.device, order=order)
        # Whoever does not listen any more skips the step.
        skip = dataclasses.replace(nothing, nonfinite=torch.ones_like(nothing.nonfinite))
        return self._gather(skip, model_ranks, counts=(), refused=True, wide=True, anew=anew)[1]

    def _over_ranks(
        self, mine: Measurement, gradients: Gradients, model_ranks: ModelRanks, *, unscaled: bool
    ) -> tuple[Measurement, Tensor, Together]:
        """The measurement of all ranks, what the gradients of all can hold, and what they found.

        Raises on all of them if it is not known who holds what.
        """
        rank_group = model_ranks.rank_group
        params, layouts = gradients.params, gradients.every_layout()
        counts = gradients.once("counts", model_ranks, lambda: model_ranks.counts(params, layouts))
        anew = not model_ranks.is_like(self._table_of)
        agreement, step = self._agreement, self._step_number
        agreement.consider(model_ranks, self.names.of)
        # Whether all ranks read what they are told now. One that alone has other parameters does,
        # too, and must not begin what the others would not take part in.
        looking = agreement.looks(step) and not (mine.norm.is_cuda and capturing())
        all_read = looking or self._met.at_once
        whole, every = self._gather(
            mine,
            model_ranks,
            counts=counts,
            found=self._told(mine.tensors, gradients, model_ranks, counts, unscaled=unscaled),
            wide=gradients.dtypes <= {torch.float64},
        )
        every, rows = every[:, : len(REPORT)], every[:, len(REPORT) :]
        met = self._met
        if anew or all_read:
            told = every if anew or looking else every[:, :1]
            news = rows[:, TOLD.index("news")]
            broken, *numbers = fetch(
                torch.cat([whole.nonfinite.reshape(1).to(told.dtype), news, told.flatten()])
            )
            fresh, flat = any(numbers[: len(news)]), numbers[len(news) :]
            all_anew = False
            if anew or looking:
                reports = [flat[at : at + len(REPORT)] for at in range(0, len(flat), len(REPORT))]
                agreement.check(model_ranks, reports, all_read=all_read)
                all_anew = all(report[REPORT.index("anew")] for report in reports)
                self.scaled_here = self.scales and self.losses.any_noted
            else:  # Where it costs no wait, nobody goes on alone.
                refuse_refused(model_ranks, flat)
            scale = torch.ones_like(self.state.scale) if unscaled else self.state.scale
            # Where others have not changed, they do not listen: a thaw or an addition on one rank.
            if all_anew:
                self._meet(model_ranks, usable=fresh and not broken, scale=scale)
                all_read = True
            elif all_read and not broken and (fresh or agreement.is_due(step)):
                agreement.compare_now(model_ranks, step=step, scale=fetch(scale)[0])
            self._table_of = model_ranks
        largest = _largest_finite_of(every[:, REPORT.index("narrow")])
        parted = self._drift.notice(rows[:, -len(CARRIED) :], rank_group.ranks, heard=all_read)
        if self._drift.has_news:
            agreement.look_again(step)
        skip = torch.maximum(whole.nonfinite, parted.to(whole.nonfinite.dtype))
        whole = dataclasses.replace(whole, nonfinite=skip)
        if not met.names:
            met = self._met  # Else the rows of this step name their places by what was told before.
        parameters = self._met.parameters
        local = self._local_detail(mine, gradients, model_ranks) if self._shares_detail else None
        if not self.step_begun:
            self.step_begun = True
            self._steps_since_met += 1
        together = Together(rank_group.ranks, rows, met.names, met.owners, parameters, local)
        return whole, largest, together

    def _told(
        self,
        found: Statistics,
        gradients: Gradients,
        model_ranks: ModelRanks,
        counts: tuple[bool, ...],
        *,
        unscaled: bool,
    ) -> Tensor:
        """This rank's numbers of TOLD."""
        params = gradients.params
        home, dtype = found.norms.device, found.norms.dtype
        loss = self.losses.broken(home).to(dtype)
        value = self.losses.total()
        known = torch.full_like(loss, float(value is not None))
        value = torch.zeros_like(loss) if value is None else moved(value, home).to(dtype)
        zero = torch.zeros_like(loss)
        told = {**dict.fromkeys(TOLD, zero), "loss": loss, "loss value": value, "losses": known}
        told["scale"] = zero + 1.0 if unscaled else self.state.scale.to(dtype)
        told["step"] = self.steps.to(dtype)
        told["gradients"] = torch.full_like(loss, len(params))
        unseen = self._agreement.unseen(params)
        if unseen:
            norms = found.norms.index_select(0, numbers_on(home, tuple(unseen), torch.int64))
            told["news"] = ((norms > 0) & torch.isfinite(norms)).sum().to(dtype)
        if not params:
            return torch.stack([told[name] for name in TOLD])
        order = self.backward_order(model_ranks)
        places = gradients.once("order", order, lambda: tuple([order[id(p)] for p in params]))
        at = numbers_on(home, places, dtype)
        counting = numbers_on(home, counts, dtype)
        nan, inf = found.nan.to(dtype), found.inf.to(dtype)
        bad = (nan + inf) > 0
        first = torch.where(bad, at, math.inf).amin()
        is_first = (at == first).to(dtype)
        largest = found.norms if found.largest is None else found.largest
        told |= {
            "peak": largest.amax().to(dtype),
            "nan": (nan * counting).sum(),
            "inf": (inf * counting).sum(),
            "bad": bad.sum().to(dtype),
            "place": torch.where(torch.isfinite(first), first, 0.0),
            "place counts": (counting * is_first).amax(),
            "place nan": (nan * is_first).sum(),
            "place inf": (inf * is_first).sum(),
        }
        return torch.stack([told[name] for name in TOLD])

    @property
    def _step_number(self) -> int:
        """The number of the step that goes on, since the ranks have met; alike on all of them."""
        return self._steps_since_met + (not self.step_begun)

    @property
    def _shares_detail(self) -> bool:
        """Whether the ranks have agreed to measure the coming step tensor by tensor."""
        since = self._steps_since_met - self.step_begun
        return any(plan.wants_detail(since) for plan in self._met.plans)

    def _local_detail(
        self, mine: Measurement, gradients: Gradients, model_ranks: ModelRanks
    ) -> LocalDetail:
        """What this rank found tensor by tensor, for `share_detail`."""
        params, tensors, found = gradients.params, gradients.tensors, mine.tensors
        counts = model_ranks.counts_each(params, gradients.every_layout())
        places = self._met.parameters.places
        # One that was added on this rank alone has no place.
        told = [at for at, param in enumerate(params) if id(param) in places]
        complete = mine.order == 2.0 and found.zeros is not None and found.largest is not None
        if len(told) != len(params) or not complete:
            chosen = [tensors[at] for at in told]
            found = measure(chosen, home=mine.norm.device, detail=True).tensors
        return LocalDetail(
            found,
            [places[id(params[at])] for at in told],
            [counts[at] for at in told],
            [tensors[at].numel() for at in told],
        )

    def share_detail(
        self, together: Together, model_ranks: ModelRanks, moved_by: tuple[Tensor, Tensor] | None
    ) -> SharedDetail:
        """What all ranks found of each parameter of a step; two collectives, no wait.

        Args:
            together: of this step.
            model_ranks: that hold the model together.
            moved_by: for each parameter of this rank its norm before the step, and by how much the
                step has changed it; None if they could not be found out.
        """
        local, places, params = together.local, together.parameters.places, model_ranks.params
        assert local is not None
        home = local.found.norms.device
        if moved_by is None:
            unknown = torch.full((len(params),), math.nan, device=home)
            moved_by = unknown, unknown
        counts = zip(params, counts_of(params, model_ranks), strict=True)
        return reduce_columns(
            local,
            weights=moved_by,
            weight_places=[places.get(id(param), 0) for param in params],
            weight_counts=[count and id(param) in places for param, count in counts],
            total=together.parameters.total,
            rank_group=model_ranks.rank_group,
        )

    def backward_order(self, model_ranks: ModelRanks) -> dict[int, int]:
        """By a parameter's id, its place in the order in which gradients come.

        The order is that of the names that the other ranks have been told; whoever is not among
        them comes last.
        """
        if not model_ranks.is_like(self._order_of):
            named = self.names.in_backward_order(model_ranks.params)
            if not self._names_told:
                self._names_told = [name for _, name in named]
            places = {name: place for place, name in enumerate(self._names_told)}
            self._order = {
                id(model_ranks.params[at]): places.get(name, len(places)) for at, name in named
            }
            self._order_of = model_ranks
        return self._order

    def settings(self) -> dict[str, object]:
        """What must be alike on all ranks that train one model, by name. Waits for the device."""
        return {
            "scale=": repr(self.scale_policy),
            "clip=": repr(self.clip_policy),
            "give_up_after=": self.streak.limit,
            **self.other_settings,
            "the current scale": fetch(self.state.scale)[0],
            "the number of steps": int(fetch(self.steps)[0]),
        }

    def compare_settings(self, group: Any) -> tuple[frozenset[RecordingPlan], LoadCount]:
        """What the recorders of all ranks of `group` need of each other; who counts their loads.

        Raises, on every rank alike, if their settings or scales are not the same.
        """
        ranks = ranks_in(group)
        told = tell_all((self.settings(), tuple(self.plans), uuid.uuid4().hex), ranks, group)
        refuse_different(ranks, [settings for settings, *_ in told])
        plans = frozenset(plan for _, plans, _ in told for plan in plans)
        return plans, LoadCount(told[0][-1], len(ranks))

    def _meet(self, model_ranks: ModelRanks, *, usable: bool, scale: Tensor) -> None:
        """The ranks tell each other which parameters they have: all of them, or none may.

        Raises, on all of them, if they have not the same settings, hold copies of what was said to
        be different, or other parameters than was said.

        Args:
            model_ranks: that hold the model together.
            usable: whether the gradients of this step show who holds copies.
            scale: 0-d, what they carry.
        """
        ranks, (group,) = model_ranks.rank_group.ranks, model_ranks.rank_group.groups
        if self._table_of is not None:
            self._names_told, self._order_of = [], None
        order, params = self.backward_order(model_ranks), model_ranks.params
        held = held_parameters(model_ranks, self.names.optimizers, self.names)
        placed = {
            order[id(param)]: each.optimizer for param, each in zip(params, held, strict=True)
        }
        owners = [placed[place] for place in sorted(placed)]
        table = None
        if self._apart and model_ranks.keys is not None:
            table = self._told_of(params, model_ranks.keys, counts_of(params, model_ranks))
        shown = self._agreement.shown(model_ranks, usable=usable, scale=fetch(scale)[0])
        at_once = self.state.scale.device.type == "cpu"
        mine = self._names_told, owners, held, table, tuple(self.plans), at_once
        told = tell_all((*mine, model_ranks.by_mesh, shown, self.settings()), ranks, group)
        names, owners_of, lists, tables, plans, on_cpus, by_mesh, shown_of, settings = zip(
            *told, strict=True
        )
        refuse_different(ranks, settings)
        refuse_uncounted(ranks, by_mesh)
        self._agreement.compare(model_ranks, shown_of, step=1)
        self._met = Met(
            names,
            owners_of,
            parameters_of_all(ranks, lists, held=held, ids=list(map(id, params))),
            frozenset(plan for theirs in plans for plan in theirs),
            all(on_cpus),
        )
        self._steps_since_met = 0
        if table is not None:
            order_of_all = [each.key for one in self._met.parameters.optimizers for each in one]
            every = self._every_parameter = table_of_model(model_ranks, tables, order_of_all)
            every.refuse_recalled(self._recalled)
            self._recalled = frozenset()
            for message in self.clip_policy.misfits(every.names, every.groups).values():
                raise ValueError(message)

    def _gather(
        self,
        mine: Measurement,
        model_ranks: ModelRanks,
        *,
        counts: Sequence[bool],
        wide: bool,
        found: Tensor | None = None,
        refused: bool = False,
        anew: float | None = None,
    ) -> tuple[Measurement, Tensor]:
        """The measurement of all ranks, and the notes of each."""
        norms = mine.tensors.norms
        scaled = not self.scales or self.losses.any_noted
        if anew is None:
            anew = not model_ranks.is_like(self._table_of)
        notes = self._agreement.report(
            model_ranks,
            step=self._step_number,
            refused=refused,
            wide=wide,
            scaled=scaled,
            anew=anew,
        )
        told = numbers_on(norms.device, tuple(notes), norms.dtype)
        if found is None:
            found = norms.new_zeros(len(TOLD))
        return reduce(
            mine,
            rank_group=model_ranks.rank_group,
            counts=counts,
            notes=[*told.unbind(), *found.unbind()],
        )

    def _memory_on(self, home: torch.device) -> dict[str, Tensor]:
        """What the clip policy remembers."""
        policy = self.clip_policy
        every = list(every_parameter(self.names.optimizers))
        memory = self.memory_for(every)
        if memory is None:
            memory = policy.start(home, len(every)) or {}
        self._memory_of = every
        self.memory = {name: moved(tensor, home) for name, tensor in memory.items()}
        return self.memory

    def _scene(self, gradients: Gradients) -> Scene:
        every = list(every_parameter(self.names.optimizers))
        places: Sequence[int] = range(len(every))
        if len(gradients.params) != len(every):
            at = {id(param): place for place, param in enumerate(every)}
            places = [at[id(param)] for param in gradients.params]
        return Scene(
            params=gradients.params,
            tensors=gradients.tensors,
            places=places,
            count=len(every),
            names=lambda: self.names.of(every),
            groups=self.names.groups,
        )

    def namer(self, params: Sequence[Tensor]) -> Callable[[], Sequence[tuple[int, str]]]:
        """What tells the places and names of `params` later, in backward order."""
        names = self.names
        roster = self.table.roster(params, names.optimizers)
        if self.owner is not None and roster.owner is None:
            roster.weaken_with(self.owner())
        return lambda: names.in_backward_order(roster.living())

    def follow(self, state: ScaleState) -> None:
        """Decides under a scale that a GradScaler holds and moves."""
        self.state = state
        if self.steps.device != state.scale.device:
            self.steps = moved(self.steps, state.scale.device)

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


_CHANGED_ALONE = (
    "{policy} bounds gradients apart from each other, for which ranks tell each other what they "
    "hold; parameters were added, removed or replaced on one rank, and not on all that share its "
    "meshes. Nothing has moved. Change the parameters of an optimizer on all ranks before the same "
    "step."
)


def measure_all(
    gradients: Gradients, *, home: torch.device, order: float, detail: bool = False
) -> Measurement:
    """Measures gradients as they stand.

    Args:
        gradients: may be none.
        home: the device on which the results are brought together.
        order: the p of the norm.
        detail: also find the largest magnitude and count the zeros.

    Returns:
        The Measurement, on `home`; nothing waits.
    """
    if gradients.device != home:
        return measure(gradients.tensors, home=home, order=order, detail=detail)
    backend, double = kernels.BACKENDS[home.type], not DOUBLE.isdisjoint(gradients.dtypes)
    found = backend.measure(gradients.tensors, order=order, detail=detail)
    return summarize(found, order=order, double=double)


class Look(NamedTuple):
    """What one pass over gradients found of NaN and Inf, device by device."""

    flags: dict[torch.device, Tensor]
    """float32, 0-d each: exactly 1 if an element is NaN or Inf, else exactly 0."""
    places: Sequence[int]
    """The places of the gradients in the order in which `counted` counts them."""
    counted: list[Callable[[], NonFinite]]
    """For each device, what counts NaN and Inf gradient by gradient."""

    def flag(self, home: torch.device) -> Tensor:
        """float32, 0-d, on `home`: 1 if any of them holds NaN or Inf, else 0."""
        if not self.flags:
            return torch.zeros((), dtype=torch.float32, device=home)
        return moved(_largest(list(self.flags.values())), home)

    def counts(self, home: torch.device) -> tuple[Tensor, Tensor]:
        """How many NaN and how many Inf each gradient has, in their order, on `home`."""
        nan, inf = joined_counts(self.counted, home)
        if len(self.counted) == 1:
            return nan, inf
        back = sorted(range(len(self.places)), key=list(self.places).__getitem__)
        order = numbers_on(home, tuple(back), torch.int64)
        return nan[order], inf[order]


def joined_counts(
    counts: Sequence[Callable[[], NonFinite]], home: torch.device
) -> tuple[Tensor, Tensor]:
    """How many NaN and how many Inf each gradient has, device by device, on `home`."""
    found = [count() for count in counts]
    nothing = torch.zeros(0, dtype=torch.int64, device=home)
    nan = torch.cat([nothing, *(moved(each.nan, home) for each in found)])
    return nan, torch.cat([nothing, *(moved(each.inf, home) for each in found)])


def look(gradients: Gradients, multiplier: Tensor | None) -> Look:
    """Multiplies the gradients in place, and says which hold NaN or Inf; nothing waits.

    Args:
        gradients: may be none.
        multiplier: 0-d; None to look without multiplying.
    """
    tensors = gradients.tensors
    if gradients.device is not None and (
        multiplier is None or multiplier.device == gradients.device
    ):
        backend = kernels.BACKENDS[gradients.device.type]
        flag, count = backend.multiply_and_check_(tensors, multiplier)
        return Look({gradients.device: flag}, range(len(tensors)), [count])
    flags: dict[torch.device, Tensor] = {}
    every: list[int] = []
    counts: list[Callable[[], NonFinite]] = []
    for device, places in kernels.by_device(tensors).items():
        factor = None if multiplier is None else moved(multiplier, device)
        here = [tensors[place] for place in places]
        flags[device], count = kernels.BACKENDS[device.type].multiply_and_check_(here, factor)
        every += places
        counts.append(count)
    return Look(flags, every, counts)


def norm_and_coefficient(
    gradients: Gradients, bound: float, order: float
) -> tuple[Tensor, Tensor] | None:
    """The norm, and what bounds it, in two launches; None if the device cannot settle it."""
    addressed = gradients.addressed
    if addressed is None or order not in kernels.ORDERS:
        return None
    backend = kernels.BACKENDS[addressed.at.device.type]
    if not backend.BY_ADDRESS:  # A kernel has failed since they were found.
        return None
    try:
        return cast("kernels.SettlingBackend", backend).limit(addressed, bound, order)
    except kernels.KernelFailed:  # The user has been warned, and nothing has been written.
        return None


def multiply_(gradients: Gradients, factor: Tensor) -> None:
    """Multiplies every gradient in place, one that several parameters share only once."""
    tensors = gradients.tensors
    if gradients.addressed is None:
        memory = zip(addresses_of(tensors), map(Tensor.numel, tensors), strict=True)
        once = dict(zip(memory, tensors, strict=True))
        tensors = tensors if len(once) == len(tensors) else list(once.values())
    if gradients.device is not None and gradients.device == factor.device:
        kernels.BACKENDS[factor.device.type].multiply_(tensors, factor)
        return
    for device, places in kernels.by_device(tensors).items():
        on_device = [tensors[place] for place in places]
        kernels.BACKENDS[device.type].multiply_(on_device, moved(factor, device))


def peak_of(record: StepRecord) -> Tensor:
    """The largest magnitude of a step's gradients as they stood; 0 if there are none."""
    largest = record.statistics.largest
    assert largest is not None
    return largest.amax() if largest.numel() else largest.new_zeros(())


def _largest(numbers: Sequence[Tensor]) -> Tensor:
    """The largest of 0-d tensors; with one, that one itself."""
    largest = numbers[0]
    for number in numbers[1:]:
        largest = torch.maximum(largest, moved(number, largest.device))
    return largest


def _largest_finite_of(narrow: Tensor) -> Tensor:
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


def decide(
    measurement: Measurement,
    scale: Tensor,
    limit: ClipLimit,
    *,
    largest_finite: float | Tensor = math.inf,
) -> Decision:
    """Step or skip, and one multiplier: decided on the device, on the gradients as they stand.

    Args:
        measurement: of the gradients as they stand.
        scale: 0-d, what they carry and must lose.
        limit: for the unscaled gradients.
        largest_finite: what the gradients' dtype holds, on all ranks that decide together.

    Returns:
        `skip`, exactly 0 or 1; `multiplier`, clip coefficient over scale; the bound on each element
        and the gradients' own factors if the limit has any. A multiplier that is not finite skips
        the step, and so does one above 1 that takes finite gradients beyond their dtype.
    """
    multiplier = limit.coefficient / scale
    too_large = (multiplier > 1.0) & (measurement.norm * multiplier > largest_finite)
    unusable = too_large | torch.logical_not(torch.isfinite(multiplier))
    skip = torch.maximum(measurement.nonfinite, unusable.to(torch.float32))
    overflow = None
    if limit.reject is not None:
        overflow, skip = skip, torch.maximum(skip, limit.reject)
    skipped = skip > 0
    bound = None
    if limit.value is not None:
        # It holds for what the multiplier leaves, and is applied before that.
        bound = limit.value / multiplier.clamp(min=torch.finfo(multiplier.dtype).tiny)
        bound = torch.where(skipped, math.inf, bound)
    return Decision(
        skip=skip,
        multiplier=torch.where(skipped, torch.ones_like(multiplier), multiplier),
        bound=bound,
        overflow=overflow,
        factors=None if limit.factors is None else torch.where(skipped, 1.0, limit.factors),
        units=None if limit.units is None else [_unless(skipped, unit) for unit in limit.units],
    )


def _unless(skipped: Tensor, unit: Tensor | None) -> Tensor | None:
    return None if unit is None else torch.where(skipped, torch.ones_like(unit), unit)


class Losses:
    """What is known of the losses whose gradients are waiting for a step."""

    def __init__(self) -> None:
        self._latest: Tensor | None = None
        self._broken: Tensor | None = None
        self.adds_up = False
        """Whether they are added up besides, for other ranks to hear of."""
        self._sum: Tensor | None = None
        self._is_unknown = False  # Whether one of them was no number.
        self.averaged = 0
        """Of how many their mean is the loss of the step; 0 if it is their sum."""

    @property
    def any_noted(self) -> bool:
        """Whether a loss was scaled whose gradients are waiting."""
        return self._latest is not None or self._broken is not None

    def note(self, loss: Tensor, home: torch.device, *, averaged: bool = False) -> None:
        """Another loss is about to be scaled.

        Args:
            loss: as the user computed it.
            home: where numbers are brought together.
            averaged: whether what runs backward divides by the number of losses, as pipelines do.
        """
        self.averaged += averaged
        if self._latest is not None:
            self.broken(home)
        self._latest = loss.detach()
        if self.adds_up:
            self._add(loss.detach())

    def _add(self, loss: Tensor) -> None:
        placements = loss.placements if is_distributed(loss) else ()  # type: ignore[attr-defined]
        if loss.numel() != 1 or not all(each.is_replicate() for each in placements):
            self._is_unknown = True
            return
        # A copy: the loss is the caller's, who may change it.
        mine = local_of(loss).reshape(()).to(wide(loss.device), copy=True)
        self._sum = mine if self._sum is None else moved(self._sum, mine.device) + mine

    def total(self) -> Tensor | None:
        """The loss of the step, if they are added up; None if there is none, or it is unknown."""
        if self._is_unknown or self._sum is None:
            return None
        return self._sum / self.averaged if self.averaged else self._sum

    def forget(self) -> None:
        """The gradients of the losses so far are gone."""
        self._latest = self._broken = self._sum = None
        self._is_unknown, self.averaged = False, 0

    def as_one(self, device: torch.device) -> Tensor | None:
        """The loss if there was one, else a number that is not finite if one of them was not."""
        loss = self._latest
        if loss is None and self._broken is None:
            return None
        if (
            loss is not None
            and self._broken is None
            and type(loss) is Tensor
            and loss.numel() == 1
            and loss.device == device
            and loss.is_floating_point()
        ):
            return loss
        flag = torch.where(self.broken(device) > 0, float("inf"), 0.0)
        if type(flag) is not Tensor:  # Of a loss of another class, as torch hands it on.
            flag = local_of(flag).as_subclass(Tensor)
        return flag

    def broken(self, home: torch.device) -> Tensor:
        """float32, 0-d, on `home`: 1 if one of them was NaN or Inf, else 0."""
        latest = self._latest
        if latest is not None:
            broken = torch.logical_not(torch.isfinite(latest).all()).to(torch.float32)
            if broken.device != home:
                broken = moved(broken, home)
            before, self._latest = self._broken, None
            self._broken = broken if before is None else torch.maximum(moved(before, home), broken)
        if self._broken is None:
            return torch.zeros((), dtype=torch.float32, device=home)
        return self._broken if self._broken.device == home else moved(self._broken, home)
