"""GradientControl: one object that does the whole step in the right order, on the device."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradilocks import kernels
from gradilocks._torch import infers_metadata, is_joining
from gradilocks.checks import (
    check_closure,
    check_give_up_after,
    check_loss,
    check_parameters,
    check_policies_from,
    check_scalar_loss,
    checked_optimizers,
    no_gradients,
    refuse_misfits,
    refuse_patterns,
    warn_of_misfits,
    warn_of_strangers,
)
from gradilocks.clip import NoClip, resolve_clip
from gradilocks.dropin.control_scaler import ControlScaler
from gradilocks.dropin.scaler_state import set_scale
from gradilocks.eager import eager, users_line
from gradilocks.errors import BadState, NoGradients, ScaleMisuse
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.names import Names
from gradilocks.ranks.collective import largest_of_all
from gradilocks.ranks.layout import (
    data_parallel_around,
    has_other_ranks,
    is_distributed,
    lie_alike,
    my_rank,
    rank_guards,
    ranks_in,
    ranks_on,
    replicas_of,
    whole_group,
    world_size,
)
from gradilocks.ranks.model_ranks import (
    NOTHING_SAID,
    Copies,
    ModelRanks,
    asks_others,
    checked_options,
    model_ranks_of,
    refuse_thawed,
)
from gradilocks.record.environment import checked_config
from gradilocks.record.journal import Journal, journal_of, recorder_for
from gradilocks.record.own_numbers import checked_numbers
from gradilocks.record.sample import Weights
from gradilocks.scale import DynamicScale, resolve_scale
from gradilocks.state.checkpoint import (
    SCALERS,
    check_scale,
    fitted,
    parts_in,
    scale_in,
    tell_bounded,
    tell_dropped,
    tell_replaced,
)
from gradilocks.state.optimizer_match import (
    may_be_as_well,
    places_of,
    signature_of,
    tell_of_a_stranger,
)
from gradilocks.step.call_order import CallOrder
from gradilocks.step.closure import step_with_closure
from gradilocks.step.engine import BoundStep, Engine, Evidence, Look, Verdict, look, multiply_
from gradilocks.step.events import EVENTS, Step, StepEvents
from gradilocks.step.framework_wrappers import ours_inside
from gradilocks.step.lr_schedule import Listeners, Scheduler
from gradilocks.step.outcome import Outcome, fetch, nonfinite
from gradilocks.step.own_step import inner_optimizers
from gradilocks.step.rank_drift import LoadCount
from gradilocks.step.rank_losses import LossExchange, exchange_for
from gradilocks.step.replica_check import Holdings, ReplicaCheck, check_every
from gradilocks.step.table import (
    Gradients,
    TableGradients,
    every_parameter,
    first_parameter,
    parameter_list,
    peek_parameters,
    requiring,
)
from gradilocks.step.together import Together
from gradilocks.step.update import (
    apply_in_place,
    refuse_unscaling_float16,
    takes_decision,
    update,
)
from gradilocks.values import SharedDetail

if TYPE_CHECKING:
    from gradilocks.record import Recorder

__all__ = ["GradientControl"]

_logger = logging.getLogger("gradilocks")


@functools.cache
def _warn_of_ranks(count: int) -> None:
    """Once in a process: it may have many controls."""
    _logger.warning(_NOBODY_SAID, count)


def _tell_of(gradients: Gradients, told: Step) -> None:
    """Tells listeners of what a step has measured, while the gradients are held."""
    told.measured = len(gradients.params)
    if told.detail:
        at = gradients.addressed
        told.elements = at.at.sizes if at else [each.numel() for each in gradients.tensors]


def _nobody() -> None:
    """In the place of a weak reference where there is nothing to refer to."""


class GradientControl:
    """Scales, checks, clips and steps: one object between the loss and the optimizers.

        backward(loss):  gradients += d(loss * scale)
        step():          measure every gradient once
                         multiplier = min(1, max_norm / norm) / scale
                         if all are finite:  optimizer.step() on gradients * multiplier
                         else:               nothing changes
                         scale moves on

    Args:
        optimizers: any objects with `param_groups` and `step`, under the same scale, the same norm
            and the same decision; one, usually. torch's fused Adam, AdamW, SGD and Adagrad unscale
            and clip inside their own pass; others get one multiplication. None if they are not
            made yet: `bind` gives them.
        model: the module (or a mapping from a prefix to a module) that names the parameters.
        scale: "dynamic", None, a number or a scale policy.
        clip: None, a number (the largest norm) or a clip policy.
        on_nonfinite: "skip" leaves parameters as they were and goes on; "raise" does the same and
            then raises NonFiniteGradient, which waits for the device at every step.
        give_up_after: so many non-finite steps in a row raise NeverFinite; None for never.
        process_group: ranks that hold other parts of the model, when its plain tensors are parts
            of it (FSDP1, pipeline stages), beside what the meshes of DTensors say. Data-parallel
            training needs none; DTensors on all ranks need none.
        mesh: the DeviceMesh of all ranks that train the model, where DTensors lie on a part of it.
        distinct: its dimensions along which ranks hold different parameters, such as pipeline
            stages and experts; along all others they hold the same.
        copies: how many ranks hold the same elements of a plain parameter: a number, or a function
            of its name and the parameter, which returns 0 where another rank counts them (also for
            a DTensor, as the second of tied embeddings), and None to go by all else that is known.
        check_replicas_every: compare, at the first step and every so many steps, whether ranks that
            hold the same parameters and gradients have the same bits, and raise
            ReplicasDiffer on all of them if not. Such a step reads parameters and gradients once
            more, has one more collective, and waits for the device.
        record: a path for a run file, a folder ("runs/") in which it gets a name of its own, a
            Recorder, or None. It changes no number. Of several ranks
            rank 0 writes, for all of them; give it on every rank or on rank 0.
        config: with a path as `record`, what its header is to tell of how the run was made, as
            `vars(args)`: a mapping of numbers, text, lists and mappings.
        keep_bad_step: a path: the first step that is skipped for NaN or Inf is written there, with
            parameters, buffers, optimizer state, the model's inputs and random states, to be run
            again by `gradilocks.BadStep`. Needs `model`. A file that is there already stays, and a
            number is added; so is the number of every rank but 0. On a GPU it is written one or
            more steps later, without a wait, and says if the parameters have moved on by then.

    Example:
        >>> control = GradientControl(optimizer, model=model, clip=1.0)
        >>> for batch in batches:
        ...     control.backward(loss_of(batch))
        ...     outcome = control.step()
        ...     control.zero_grad()
    """

    def __init__(
        self,
        *optimizers: Any,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        scale: object = "dynamic",
        clip: object = None,
        on_nonfinite: str = "skip",
        give_up_after: int | None = 100,
        process_group: Any = None,
        mesh: Any = None,
        distinct: str | Sequence[str] = (),
        copies: Copies | None = None,
        check_replicas_every: int | None = None,
        record: object = None,
        config: Mapping[str, Any] | None = None,
        keep_bad_step: str | os.PathLike[str] | None = None,
    ) -> None:
        policies = resolve_scale(scale), resolve_clip(clip)
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"on_nonfinite must be 'skip' or 'raise', got {on_nonfinite!r}.")
        check_give_up_after(give_up_after)
        self._on_nonfinite = on_nonfinite
        self._rank_options = checked_options(
            process_group=process_group, mesh=mesh, distinct=distinct, copies=copies
        )
        self._optimizers: tuple[Any, ...] = ()
        # As it was made: a checkpoint may bring other settings.
        self._given_scale, self._given_clip = policies
        self._names = self._told_names = Names(model, ())
        self._engine = Engine(*policies, names=self._names, give_up_after=give_up_after)
        # The parameters that `_ranks` is about, and whether each of them was trained.
        self._ranks_of: tuple[list[Tensor], bytes] = [], b""
        self._ranks: ModelRanks | None = None
        # Of DistributedDataParallel: its ranks have equal gradients and compare settings once.
        self._data_parallel: Callable[[], Any] = _nobody
        self._replicas: Any = None
        self._compared = True
        self._loads: LoadCount | None = None
        self._engine.other_settings = {
            "on_nonfinite=": on_nonfinite,
            "check_replicas_every=": check_replicas_every,
        }
        every = check_every(check_replicas_every)
        self._replica_check = None if every is None else ReplicaCheck(every, names=self._names.of)
        self._schedules = Listeners()
        self._order = CallOrder()
        self._events = StepEvents(EVENTS)
        self._told: Step | None = None  # The step that goes on, if somebody listens.
        self._outcome: Outcome | None = None
        # The step that was taken last, if it can be taken again as it is.
        self._bound: BoundStep | None = None
        self._asks_for_ranks = False  # Whether it has to be asked each time if others train along.
        # What was found while unscaling, if that is to decide.
        self._seen: Look | None = None
        self._is_seen_told = False  # Whether the scale has heard of it.
        # What steps one of its optimizers alone, with `only=`, by the id of that one; and what such
        # parts are to go on from, by the optimizer's number.
        self._parts: dict[int, GradientControl] = {}
        self._part_states: dict[int, Mapping[str, Any]] = {}
        # The same of a checkpoint, by the number there, of optimizers that have not been met; and
        # the number there of those that have been handed over one by one, by their number here.
        self._unclaimed: dict[int, Mapping[str, Any]] = {}
        self._numbers: dict[int, int] = {}
        # Of the latter, by the number there, what they were given.
        self._claimed: dict[int, Mapping[str, Any]] = {}
        # Steps of parts that the scale has not heard of yet; a part has the list of its whole.
        self._judged: list[Evidence] = []
        self._is_part = False
        self._is_stepping = False
        # Whether an optimizer that it does not have may still be handed to its scaler.
        self._grows = self._has_warned_of_misfits = False
        # Whether a part has stepped since the last loss.
        self._stepped_apart = False
        # Whether `norm` has measured for the coming step, so that the ranks have begun it.
        self._asked_ahead = False
        # Of a step that all ranks share tensor by tensor: the weights before it.
        self._weights: Weights | None = None
        # Of DistributedDataParallel, if a rank records: how its ranks hear of each other's losses.
        self._exchange: LossExchange | None = None
        # Of the last checkpoint, until it is in a run file: how many steps of each optimizer.
        self._loaded: Sequence[int] = ()
        # Loaded before there was an optimizer, or left by those that were released.
        self._waiting_state: Mapping[str, Any] | None = None
        # In the places of optimizers that were released, until others are bound or loaded for.
        self._released: tuple[Any, ...] = ()
        if optimizers:
            self._take(checked_optimizers(optimizers), model)
        config = checked_config(config)
        self._bad_step_path = keep_bad_step
        if keep_bad_step is not None and optimizers:
            self._keep_bad_step(keep_bad_step)
        if record is not None:
            self.attach(record, config=config)

    def _take(self, optimizers: tuple[Any, ...], model: Any, *, part: bool = False) -> None:
        """Controls these optimizers from here on; one that does not fit raises.

        Args:
            optimizers: checked.
            model: names their parameters.
            part: whether a control over more than these has been given them.
        """
        names = Names(model, optimizers)
        check_parameters(optimizers, names)
        if not part:
            warn_of_strangers(model, every_parameter(optimizers), names)
        engine, options = self._engine, self._rank_options
        # Stages of a pipeline hold different parameters: what fits none here may fit another's.
        told = options.process_group is not None or options.mesh is not None
        engine.elsewhere = part or (told and has_other_ranks())
        engine.others_come = self._grows
        loaded = self._waiting_state is not None and engine.clip_policy != self._given_clip
        if self._grows:
            refuse_patterns(engine.clip_policy, model, loaded=loaded)
        elif not engine.elsewhere:
            refuse_misfits(engine.clip_policy, names, loaded=loaded)
        self._optimizers, self._bound = optimizers, None
        self._names.use(model, optimizers)
        self._find_data_parallel()
        # Refuses, now rather than at the first step, what no rank can know. Names are looked up now
        # too: FSDP2 may leave other tensors in the model's places from a backward pass on.
        ranks = self._model_ranks()
        if ranks is not None:
            engine.backward_order(ranks)
        elif self._replica_check is not None and has_other_ranks() and self._replicas is None:
            raise ValueError(_NO_REPLICAS_KNOWN)
        engine.losses.adds_up = ranks is not None or self._replicas is not None
        # Not a method of its own: a control must go as soon as nobody holds it.
        self._order.know(functools.partial(every_parameter, optimizers), engine)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """What it steps."""
        return self._optimizers

    def bind(
        self, *optimizers: Any, model: nn.Module | Mapping[str, nn.Module] | None = None
    ) -> None:
        """Gives it its optimizers, or others in their place.

        For frameworks, which make them later, or make them anew. The scale, what the policies have
        learned, the step count and the recorder go on. What a clip policy knows of each parameter
        stays with it, in whatever order and among whatever others it comes; where parameters have
        become others, it is found again by their names.

        Args:
            optimizers: all that it is to step from here on.
            model: names their parameters; None for the one that it has.

        Raises:
            BadState: the clip policy has learned of parameters that are not among them, and the
                names of those that are do not tell which is which; or of several optimizers that
                cannot be told apart. Then nothing has changed.
        """
        checked = checked_optimizers(optimizers)
        if not checked:
            raise TypeError("bind() takes the optimizers that the control is to step, got none.")
        known = self._names.model if model is None else model
        bound, names = self._optimizers, self._names.model
        before = bound or self._released
        waited = None if self._released else self._waiting_state
        unclaimed = self._unclaimed if self._released else self._all_unclaimed()
        claims = self._claims(checked, unclaimed, known, had=before)
        losses, parts = self._engine.losses, self._states_of_parts()
        state = whole = self._engine.saved() if bound else self._waiting_state
        if waited is not None and state is waited:
            state = self._of_those_met(waited)
        kept = self._engine.remembered(every_parameter(checked)) if bound else None
        # By their new places; of one that is made anew, by the place of the one before.
        places = {id(optimizer): k for k, optimizer in enumerate(checked)}
        parts = {
            places.get(id(before[k]), k) if k < len(before) else k: saved
            for k, saved in parts.items()
        }
        numbers = {
            places[id(before[k])]: number
            for k, number in self._numbers.items()
            if id(before[k]) in places
        }
        claimed = {k: unclaimed[number] for k, number in claims.items()}
        if len(checked) == 1 and not self._grows:  # Of the one, as of the whole.
            parts, claimed = {**parts, **claimed}, {}
        if state is not None:
            alone = list(parts.values())
            parts, state = self._divided(parts, state, before, checked)
            if any(state is each for each in alone):  # It goes on with what one has learned alone.
                kept = None
        steps: int | None = None
        self._take(checked, known)
        self._engine.forget_parameters()
        if state is not None:
            if kept is not None:
                state = {**state, "gradilocks": {**state["gradilocks"], "clip_state": None}}
            try:
                steps = self._engine.load(state, self._ranks, changed=self._grows)
            except BadState:
                if bound:
                    assert whole is not None
                    self._take(bound, names)
                    self._engine.load(whole, self._ranks, changed=self._grows)
                else:
                    self._optimizers = ()
                    self._names.use(names, ())  # type: ignore[arg-type]
                raise
            if kept is not None:
                self._engine.remember(kept)
        losses.adds_up = self._engine.losses.adds_up
        self._engine.losses = losses  # Gradients of theirs may be waiting.
        self._waiting_state, self._released = None, ()
        # Of one that is made anew in the place of another, what is known goes on.
        fresh = {k for k, each in enumerate(checked) if id(each) not in self._parts}
        self._part_states = {k: s for k, s in {**parts, **claimed}.items() if k in fresh}
        self._note_claims(claims, unclaimed, numbers)
        came = [k for k, each in enumerate(checked) if not any(each is one for one in before)]
        self._tell_of_strangers(came, unclaimed)
        alive = {id(optimizer) for optimizer in checked}
        self._parts = {each: part for each, part in self._parts.items() if each in alive}
        if self._bad_step_path is not None and not before:
            self._keep_bad_step(self._bad_step_path)
        counts, journal = self._steps_of_each(), journal_of(self._events)
        if self._loaded:  # Of one that is new, too, the checkpoint knows.
            self._loaded = [*self._loaded, *counts[len(self._loaded) :]]
        if journal is not None:
            journal.rebind(before, checked)
            journal.goes_on_from(checked, counts, self._loaded)
        if waited is not None and steps is not None:
            self._tell_loaded()

    def release(self) -> None:
        """Lets its optimizers and their model go, so that their memory can be freed.

        For frameworks that train one model after the other. Until `bind` gives it others it is as
        if it had been made without. The scale, what the policies have learned, the step count and
        the recorder go on, as if `bind` had put the next ones in the place of these; a loss whose
        gradients were waiting is forgotten. The latest Outcome has its culprits' names, which waits
        for the device; those before it name nobody any longer.
        """
        if not self._optimizers:
            return
        if self._judged:  # Else the scale would hear of these steps again after the next `bind`.
            self._move_on()
        state, released = self.state_dict(), tuple(object() for _ in self._optimizers)
        journal = journal_of(self._events)
        if journal is not None:
            journal.rebind(self._optimizers, released)
        part_states = self._states_of_parts()
        for each in (self, *self._parts.values()):  # Outcomes hold rosters and names.
            if each._outcome is not None:
                each._outcome.describe()
            each._engine.table.release()
            each._names.use(None, ())
        self._part_states, self._parts = part_states, {}
        self._waiting_state, self._released = state, released
        self._optimizers, self._numbers, self._claimed = (), {}, {}
        self._bound = self._seen = self._weights = None
        self._ranks_of, self._ranks = ([], b""), None
        self._data_parallel, self._replicas = _nobody, None
        self._engine.forget_parameters()
        self._engine.losses.forget()
        self._order.forget()

    def _of_those_met(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A checkpoint of which not all parameters may be here, as long as optimizers may come.

        A clip policy that learns of each parameter has a number for each there. Of all together it
        has learned nothing if each has stepped alone; what it knows of each is among the parts.
        """
        ours = state.get("gradilocks")
        if not self._grows or not isinstance(ours, Mapping) or ours.get("steps") != 0:
            return state
        if not self._engine.clip_policy.by_parameter or not parts_in(state):
            return state
        return {**state, "gradilocks": {**ours, "clip_state": None}}

    def _divided(
        self,
        parts: dict[int, Mapping[str, Any]],
        state: Mapping[str, Any],
        before: Sequence[Any],
        now: Sequence[Any],
    ) -> tuple[dict[int, Mapping[str, Any]], Mapping[str, Any]]:
        """What single optimizers and the whole go on from, where a whole of one becomes a part.

        Or the other way round: with one optimizer, what is known of it is known of the whole.

        Args:
            parts: by the number of an optimizer, what is known of it alone.
            state: of the whole.
            before, now: the optimizers.
        """

        def steps_of(saved: Mapping[str, Any]) -> int:
            return saved["gradilocks"]["steps"] if "gradilocks" in saved else 0

        if len(before) == 1 and not parts and steps_of(state) and (len(now) > 1 or self._grows):
            kept = [k for k, each in enumerate(now) if each is before[0]]
            rest = {**state, "gradilocks": {**state["gradilocks"], "steps": 0}}
            return {kept[0] if kept else 0: state}, rest  # Its steps are not counted twice.
        if len(now) == 1 and not self._grows and 0 in parts:
            return {}, max(state, parts[0], key=steps_of)
        return parts, state

    def _keep_bad_step(self, path: object) -> None:
        from gradilocks.lab.trace import BadStepKeeper, checked_place

        place, model = checked_place(path), self._names.model
        if model is None:
            raise ValueError(
                "keep_bad_step= writes what the model was called with, and there is none: "
                "GradientControl(optimizer, model=model, keep_bad_step=...)."
            )
        params = list(self._all_parameters())
        if self._ranks is not None or any(map(is_distributed, params)):
            raise ValueError(
                "keep_bad_step= needs the whole model on this rank, and it is spread over several. "
                "gradilocks.trace(model, control=control) names what was bad on each."
            )
        BadStepKeeper(
            self,
            model if isinstance(model, Mapping) else {"": model},  # type: ignore[dict-item]
            self._optimizers,
            place,
            rank=my_rank() if has_other_ranks() else 0,
            waits=self._on_nonfinite == "raise",
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy is over other parameters, so it asks again who holds them. What was said of the
        # ranks goes along; to another process as far as torch lets it.
        left: dict[str, Any] = {
            "_ranks": None,
            "_ranks_of": ([], b""),
            "_data_parallel": _nobody,
            "_replicas": None,
            "_compared": True,
            "_loads": None,
            "_weights": None,
            "_exchange": None,
            "_parts": {},
            "_part_states": self._states_of_parts(),
            "_seen": None,
            "_outcome": None,
            "_bound": None,
        }
        return {**self.__dict__, **left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Of a copied DistributedDataParallel, the ranks compare settings at its first step again.
        self._find_data_parallel()

    def _find_data_parallel(self) -> None:
        """Finds the DistributedDataParallel that trains the model, if there is one.

        Where only what it wraps was handed over too: its ranks decide alike all the same.
        """
        found = None
        if has_other_ranks():
            params = every_parameter(self._optimizers)
            first = next(iter(params))
            plain = self._rank_options == NOTHING_SAID and not is_distributed(first)
            found = data_parallel_around(self._names.model, first, search=plain)
        # A weak reference: torch aborts if it outlives its process group.
        self._data_parallel = _nobody if found is None else weakref.ref(found)
        self._replicas = replicas_of(found)
        self._compared = not has_other_ranks()
        # mesh= names all ranks that train the model, but for those that are behind a DDP of theirs.
        mesh = self._rank_options.mesh
        averaged = () if self._replicas is None else ranks_in(self._replicas)
        self._engine.copies_elsewhere = mesh is None or not set(averaged) <= set(ranks_on(mesh))

    def __repr__(self) -> str:
        kinds = ", ".join(type(each).__name__ for each in self._optimizers) or "no optimizer yet"
        engine = self._engine
        return (
            f"GradientControl({kinds}, scale={engine.scale_policy!r}, clip={engine.clip_policy!r})"
        )

    @property
    def recorder(self) -> Recorder | None:
        """What records this control's steps; one that it has made goes when the control goes."""
        journal = journal_of(self._events)
        return None if journal is None else journal.recorder

    def attach(
        self,
        record: object,
        config: Mapping[str, Any] | None = None,
        *,
        exists: str = "refuse",
    ) -> Recorder:
        """Records this control's steps from here on, as `record=` does from the first.

        At any time, also between `backward` and `step`: that step's loss is not known then. Steps
        are numbered as `outcome.step` has them, but where `step()` and `step(only=)` are mixed: a
        file counts both, for each optimizer. After `load_state_dict`, before or after this, they
        are numbered by the checkpoint: in a file that is gone on in, those after it are superseded.
        Attached after the first step, what needs an agreement of several ranks is left out: tensors
        one by one where they hold the model together, losses of other ranks where each holds it.

        Args:
            record: a path for a run file, a folder in which it gets a name, or a Recorder.
            config: with a path, what its header is to tell of how the run was made.
            exists: with a path, what to do if the file is there: "refuse", "append" or "replace".

        Returns:
            The Recorder; the one that was given, or one that goes when the control goes.

        Raises:
            ValueError: something records this control's steps already.

        Example:
            >>> control.load_state_dict(checkpoint["control"])  # doctest: +SKIP
            >>> control.attach("runs/a.jsonl", exists="append")  # doctest: +SKIP
        """
        before = self.recorder
        if before is not None and before.recording:
            raise ValueError(
                f"this control records its steps to {before.path} already, and has one recorder at "
                "a time. Call control.detach() first, or close that one: control.recorder.close()."
            )
        recorder = recorder_for(
            record,
            config=checked_config(config),
            exists=exists,
            scale=self._engine.scale_policy,
            clip=self._engine.clip_policy,
        )
        self.detach()
        journal = Journal(recorder)
        if self._optimizers and self._ranks is None:  # Else others' are told at the first step.
            journal.introduce(self._optimizers, self._names)
        journal.goes_on_from(self._optimizers, self._steps_of_each(), self._loaded)
        self._events.add(journal)
        return recorder

    def detach(self) -> Recorder | None:
        """Records no further steps; the file stays open as long as somebody holds its Recorder.

        Returns:
            The Recorder, to be closed or attached again; None if there was none.
        """
        journal = journal_of(self._events)
        if journal is None:
            return None
        if journal.has_recorded:  # What it has written is of the run as it goes on.
            self._loaded = ()
        self._events.discard(journal)
        return journal.recorder

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by. Reading it waits for the device."""
        with self._ahead():
            return fetch(self._engine.state.scale)[0]

    @eager
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for callers who run `backward` themselves."""
        first = self._begins_anew()
        scaled = self._scaled(loss)
        for listener in self._events.listeners:
            listener.loss_counted(self, loss, first=first)
        self._order.handed_out = True
        return scaled

    def loss_fn(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A loss function whose gradients carry the scale, for code that runs backward itself.

        Such as a pipeline's schedule: `ScheduleGPipe(stage, n, loss_fn=control.loss_fn(loss_fn))`.
        It returns the loss as it is; only what flows back from it is multiplied by the scale. Of
        the losses of one step the mean is recorded: schedules divide by the number of them.

        Args:
            function: takes whatever it is called with and returns a loss.
        """

        if has_other_ranks() and self._ranks is None and self._replicas is None:
            warnings.warn(_ONE_STAGE, RuntimeWarning, stacklevel=2)

        @functools.wraps(function)
        def scaled(*args: Any, **kwargs: Any) -> Tensor:
            loss = function(*args, **kwargs)
            if not loss.requires_grad or infers_metadata():
                return loss
            return self._with_scaled_gradient(loss)

        return scaled

    @eager
    def _with_scaled_gradient(self, loss: Tensor) -> Tensor:
        self._begins_anew()
        told = self._scaled(loss, as_it_is=True)
        self._order.handed_out = True
        value = loss.detach().clone()

        # Only what runs backward is a loss: a schedule may call its function to learn of shapes.
        def ran_backward(_: Tensor) -> None:
            losses = self._engine.losses
            first = not losses.any_noted
            losses.note(value, self._engine.state.scale.device, averaged=True)
            for listener in self._events.listeners:
                listener.loss_counted(self, value, first=first, averaged=losses.averaged)

        told.register_hook(ran_backward)  # type: ignore[no-untyped-call]
        return told

    @eager
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Adds the gradients of the scaled loss. Call it as often as gradients are accumulated.

        Args:
            loss: a scalar that requires grad.
            kwargs: handed to `Tensor.backward` (`retain_graph`, `create_graph`, `inputs`).
        """
        check_scalar_loss(loss)
        orders = [each._order for each in (self, *self._parts.values())]
        before = [order.scaled for order in orders]
        first = self._begins_anew()
        losses = copy.copy(self._engine.losses)
        try:
            self._scaled(loss).backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            for order, scaled in zip(orders, before, strict=True):
                order.scaled = scaled
            self._engine.losses = losses
            raise
        for listener in self._events.listeners:
            listener.loss_counted(self, loss, first=first)

    @eager
    def unscale_(self, only: Any = None) -> None:
        """Makes the gradients true in place, for code that reads or changes them before `step`.

        Costs a pass over the gradients; `step` then measures and decides on what it finds.

        Args:
            only: one of the optimizers: its gradients alone.
        """
        self._unscale(only, decides=False)

    def _unscale_for_scaler(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """For its scaler: makes the gradients of one optimizer true, if they carry a scale.

        Returns:
            For each device a flag, above 0 if they hold NaN or Inf.
        """
        if self._engine.scales:
            self._unscale(optimizer, decides=True)
        whole = self._whole(optimizer)
        whole._order.by_scaler = True
        return {} if whole._seen is None else dict(whole._seen.flags)

    def _unscale(self, only: Any, *, decides: bool) -> None:
        """Makes the gradients true in place.

        Args:
            only: one of the optimizers, or None for all.
            decides: whether NaN or Inf in them now skip the step, whatever is made of them until
                then, as with torch's scaler.
        """
        whole = self._whole(only)
        if whole._parts and any(part._order.unscaled for part in whole._parts.values()):
            # Those that are not yet; gradients of others are true.
            for optimizer in whole._optimizers:
                if not whole._parts[id(optimizer)]._order.unscaled:
                    whole._unscale(optimizer, decides=decides)
            whole._order.note_unscaled()
            return
        # Of a pipeline's stages only the last has a loss, and the others unscale too.
        whole._order.check_unscale(elsewhere=whole._ranks is not None)
        gradients, _ = whole._find(inside=False, steps=False)
        with torch.no_grad():
            factor = torch.reciprocal(whole._engine.state.scale)
            if decides:
                whole._seen, whole._is_seen_told = look(gradients, factor), False
            else:
                multiply_(gradients, factor)
        gradients.release()
        whole.assume_unscaled()

    @property
    def unscaled(self) -> bool:
        """Whether the gradients that wait for `step` have lost the scale already."""
        return self._order.unscaled

    def is_unscaled(self, only: Any) -> bool:
        """As `unscaled`, of one of the optimizers."""
        return self._whole(only)._order.unscaled

    def assume_unscaled(self, only: Any = None) -> None:
        """Somebody else has divided the gradients by the scale: `step` is not to do it again.

        Args:
            only: one of the optimizers: its gradients alone.
        """
        whole = self._whole(only)
        for each in (whole, *whole._parts.values()):
            each._order.note_unscaled(peek_parameters(each._optimizers))

    @eager
    def norm(self, only: Any = None) -> Tensor:
        """The norm of the true gradients, before the step or after it, without a wait.

        Before `step` the gradients are read once more for it. After it, and until there are new
        gradients, it is the norm of that step.

        Args:
            only: one of the optimizers: the norm of its gradients alone.

        Returns:
            0-d, float32, on the device of the scale; NaN or Inf if the gradients are not finite. Of
            all ranks, if several hold the model: call it on each of them.
        """
        whole = self._whole(only)
        if whole._outcome is not None and whole._is_stepped():
            return whole._outcome.tensors["norm"].float()
        unscaled = {part._order.unscaled for part in whole._parts.values()}
        if len(unscaled) > 1:  # Some carry the scale, and some do not.
            norms = [
                whole.norm(only=each).double()
                for each in whole._optimizers
                if any(param.grad is not None for param in every_parameter([each]))
            ]
            return whole._engine.joined_norm(norms)
        if not whole._asked_ahead:
            whole._engine.step_begun = False
            if whole._loads is not None:
                whole._loads.begin_step()
        gradients, model_ranks = whole._find(inside=True)
        whole._asked_ahead = True
        try:
            return whole._engine.norm(
                gradients, unscaled=whole._order.unscaled, model_ranks=model_ranks
            )
        finally:
            gradients.release()

    @property
    def outcome(self) -> Outcome | None:
        """What became of the latest step, or None before the first."""
        return self._outcome

    def set_clip(self, clip: object) -> None:
        """Clips by another policy, or not at all, from the next step on.

        What the policy before has learned is gone, unless it is the same one.

        Args:
            clip: None, a number (the largest norm) or a clip policy.
        """
        policy = resolve_clip(clip)
        if policy == self._engine.clip_policy:
            return
        if self._grows:
            refuse_patterns(policy, self._names.model)
        elif self._optimizers and not self._engine.elsewhere:
            refuse_misfits(policy, self._names)
        self._given_clip = policy
        for each in (self, *self._parts.values()):
            each._engine.set_clip(policy)
        scale = self._engine.scale_policy
        for states in (self._part_states, self._unclaimed):
            states.update({k: fitted(state, scale, policy) for k, state in states.items()})
        if self._waiting_state is not None:
            self._waiting_state = fitted(self._waiting_state, scale, policy)

    @eager
    def step(self, closure: Callable[[], Tensor] | None = None, *, only: Any = None) -> Outcome:
        """Decides on the gradients as they stand and steps every optimizer, or none.

        Args:
            only: one of the optimizers, to be stepped alone, with a norm, a limit and a decision of
                its own, as for the two of a GAN. The scale is one for all: it moves on with the
                next loss, by all such steps since the last.
            closure: for an optimizer that evaluates the loss itself (LBFGS, SAM): clears the
                gradients, calls `control.backward(loss)` and returns the loss. It may be called
                several times; one non-finite evaluation undoes the whole step, which costs a copy
                of the parameters and of the optimizer's state.

        Returns:
            The Outcome. Reading it is what waits for the device.
        """
        if only is not None and (whole := self._whole(only)) is not self:
            return self._step_apart(whole, closure)
        if self._parts:
            self._refuse_stepped_parts()
        if self._bound is not None and closure is None and not self._events.listeners:
            outcome = self._step_again()
            if outcome is not None:
                return outcome
        return self._step_by(self, closure)

    def _step_by(self, driver: Any, closure: Callable[[], Tensor] | None) -> Outcome:
        if self._events.listeners:
            return self._step_told(driver, closure)
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._step(closure)
        with self._engine.table.keeping:
            return self._step(closure)

    @eager
    def zero_grad(self, set_to_none: bool = True, *, only: Any = None) -> None:
        """Clears the gradients of every optimizer.

        Args:
            set_to_none: whether they are taken away, or filled with zeros.
            only: one of the optimizers: its gradients alone.
        """
        whole = self._whole(only)
        for param in whole._all_parameters():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach()
                param.grad.zero_()
        for each in (whole, *whole._parts.values()):
            each._order.note_cleared()
        if not self._order.scaled:
            self._engine.losses.forget()

    @eager
    def log(
        self,
        values: Mapping[str, object] | None = None,
        /,
        *,
        step: int | None = None,
        **more: object,
    ) -> None:
        """Records numbers of your own beside the steps; does nothing if nobody records.

        With `record=` they go to its run file, in a script under `gradilocks run` to that one's.

        Args:
            values: names and numbers, for names that are no Python names, as "val/loss".
            step: the step that they belong to; the last one, if None.
            more: names and numbers: Python's, NumPy's, or tensors of one element, which stay on
                their device until the recorder's next batch.

        Raises:
            TypeError: a name is no text, or a value is no number.
            ValueError: a tensor of several elements, a name that cannot be shown, or given twice.

        Example:
            >>> control.log(val_loss=0.31, accuracy=0.92)
        """
        numbers = checked_numbers(values, more, step=step)
        for listener in self._events.listeners:
            listener.numbers_logged(numbers, step=step)

    def scheduler(self, lr_scheduler: Any, *, every_call: bool = False) -> Scheduler:
        """`lr_scheduler`, stepped only for steps that were taken, without a wait.

        Args:
            lr_scheduler: one of torch's, over an optimizer of this control.
            every_call: whether a call without any step since the last one counts too, as with the
                scheduler itself; for frameworks, which say by themselves when it is to be stepped.

        Returns:
            What to call `step()` on, after `control.step()`.
        """
        made = Scheduler(lr_scheduler, self, self._all_parameters(), every_call=every_call)
        self._schedules.add(made)
        return made

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs; plain numbers and strings.

        With a DynamicScale it also carries the keys of torch's `GradScaler.state_dict()`, so
        torch's scaler loads it as it is.
        """
        if not self._optimizers and self._waiting_state is not None:
            return dict(self._waiting_state)
        with self._ahead():
            saved = self._engine.saved()
            # One value to torch.distributed.checkpoint, which a fresh control must have as well.
            saved["gradilocks"]["parts"] = tuple(self._saved_parts().items()) or None
        return saved

    def as_scaler(self, *, policies: str = "checkpoint") -> ControlScaler:
        """A torch.amp.GradScaler in front of this control, for code that asks for one.

        Its `scale`, `unscale_`, `step` and `update` are this control's, in the order in which
        frameworks call them; `step(optimizer)` clips, records and skips as `control.step` does.
        Without an optimizer as yet, the control is bound to those that are handed to `unscale_` and
        `step`.

        Args:
            policies: as in `load_state_dict`, for what its `load_state_dict` takes from a state.

        Example:
            >>> scaler = control.as_scaler()
            >>> scaler.scale(loss).backward()
            >>> scaler.step(optimizer)
            >>> scaler.update()
        """
        check_policies_from(policies)
        return ControlScaler(self, policies)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, policies: str = "checkpoint"
    ) -> None:
        """Goes on from a checkpoint of this class or of torch's `GradScaler`.

        A checkpoint that does not fit raises BadState and changes nothing. A scale outside bounds
        that are not the checkpoint's own is taken to the nearest of them, and the log tells.

        Args:
            state_dict: from `state_dict()`.
            policies: "checkpoint" takes the policies' settings from there, as torch's scaler does,
                and tells the log of those that differ from this control's; "control" keeps those
                that this control was made with, and takes from there what fits them: the scale, the
                step count, and what a policy of the same class has learned.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(given).__name__}.")
        check_policies_from(policies)
        saved = state_dict
        if policies == "control" and state_dict:
            steps = self._engine.count_of_steps()
            state_dict = fitted(state_dict, self._given_scale, self._given_clip, steps=steps)
        before = None if not self._optimizers else self.state_dict()
        had = self._engine.scale_policy, self._engine.clip_policy
        try:
            self._load(state_dict)
        except BadState:
            if before is not None:
                self._load(before, in_order=True)
            raise
        if has_other_ranks() and my_rank() != 0:
            return
        has = self._engine.scale_policy, self._engine.clip_policy
        if policies == "checkpoint":
            tell_replaced(had, has, "GradientControl", "control")
        else:
            clips = not isinstance(has[1], NoClip)
            tell_dropped(saved, has[1] if clips else None, "GradientControl")
        self._tell_bounded(scale_in(saved, had[0]))

    def _tell_bounded(self, saved: float | None) -> None:
        """Tells the log if the policy's bounds have moved the scale of a checkpoint."""
        policy = self._engine.scale_policy
        if self._engine.scales:
            whose = f"{policy.policy_name} of this GradientControl"
            tell_bounded(saved, self.scale, policy.bounds(), whose=whose)

    def _load(self, state_dict: Mapping[str, Any], *, in_order: bool = False) -> None:
        """Goes on from a checkpoint.

        Args:
            state_dict: of this class or of another scaler.
            in_order: whether it has single optimizers in the order in which they are here.
        """
        saved = parts_in(state_dict)
        if not self._optimizers:  # The scale counts from here on, the rest when it is bound.
            self._engine.load_scale(state_dict)
            self._waiting_state = state_dict
            self._released, self._part_states, self._unclaimed = (), {}, {}
            return
        before = self._engine.next_step
        if len(self._optimizers) == 1 and len(saved) == 1 and not self._grows:
            # Saved where others might have come: what is known of the one is known of the whole.
            _, state_dict = self._divided(saved, state_dict, (), self._optimizers)
        met = state_dict if in_order else self._of_those_met(state_dict)
        steps = self._engine.load(met, self._ranks, changed=self._grows)
        self._judged.clear()
        self._load_parts(state_dict, in_order=in_order)
        if self._loads is not None:
            self._loads.note(kept_step=self._engine.next_step == before)
        for each in (self, *self._parts.values()):
            each._order.note_step(each._all_parameters())  # What is there carries another scale.
        if self._exchange is not None:
            self._exchange.forget()
        if steps is not None:
            self._tell_loaded()

    def _tell_loaded(self) -> None:
        """A checkpoint that counts steps was loaded: the run goes on from there."""
        self._loaded = self._steps_of_each()
        for listener in self._events.listeners:
            listener.state_loaded(self, self._loaded)

    def _steps_of_each(self) -> list[int]:
        """By optimizer, how many steps it was judged for: with all, and alone."""
        parts = [self._parts.get(id(optimizer)) for optimizer in self._optimizers]
        alone = [0 if part is None else part._engine.steps_so_far() for part in parts]
        for number, state in self._part_states.items():
            if number < len(alone):
                alone[number] += operator.index(state["gradilocks"]["steps"])
        return [self._engine.steps_so_far() + each for each in alone]

    def _begins_anew(self) -> bool:
        """Whether nothing is left of losses from before this one."""
        if not self._order.scaled:
            return True
        if not self._stepped_apart and not self._order.dropped(self._all_parameters()):
            return False
        self._engine.losses.forget()
        return True

    def _scaled(self, loss: Tensor, *, as_it_is: bool = False) -> Tensor:
        check_loss(loss)
        parts = self._parts.values()
        if self._judged:
            self._move_on()
        params = peek_parameters(self._optimizers)
        if parts:
            for part in parts:
                part._order.note_loss(peek_parameters(part._optimizers))
        elif self._engine.scales:
            self._order.check_backward(params)
        if not params and self._optimizers:
            check_parameters((), self._names)
            raise AssertionError("an optimizer without parameters was not refused")
        device = params[0].device if params else loss.device
        scaled = self._engine.scaled(loss, device, as_it_is=as_it_is)
        self._order.scaled, self._stepped_apart = True, False
        for part in parts:
            part._order.scaled = True
        for listener in self._events.listeners:
            listener.loss_scaled(self, loss, scaled, self._engine.state.scale)
        return scaled

    def _all_parameters(self) -> Iterator[Tensor]:
        return every_parameter(self._optimizers)

    def _whole(self, only: Any) -> GradientControl:
        """What steps `only`, and all that it steps: itself, or the part that has that optimizer.

        Args:
            only: one of the optimizers, or what wraps it, or what it wraps; None for all.
        """
        if only is None:
            return self
        mine = self._mine(only)
        if mine is None:
            kinds = ", ".join(type(each).__name__ for each in self._optimizers) or "none"
            raise ValueError(
                f"only= must be one of the optimizers of this control ({kinds}), got another "
                f"{type(only).__name__}. GradientControl(optimizer, other) and control.bind() say "
                "which ones it steps."
            )
        if len(self._optimizers) == 1 and not self._grows:
            return self
        group = 0
        # All at once: those that wait move with the scale.
        for place, optimizer in enumerate(self._optimizers):
            if id(optimizer) not in self._parts:
                self._parts[id(optimizer)] = self._part_of(optimizer)
            missing = self._groups_unclaimed(before=self._numbers.get(place))
            self._parts[id(optimizer)]._names.first_group = group + missing
            group += len(optimizer.param_groups)
        part = self._parts[id(mine)]
        part._engine.follow(self._engine.state)
        part._engine.losses = copy.copy(self._engine.losses)
        part._order.look_again(peek_parameters(part._optimizers))
        return part

    def _mine(self, optimizer: Any) -> Any:
        """The one of its optimizers that this is, that it wraps, or that is wrapped in it."""
        for each in self._optimizers:
            if each is optimizer:
                return each
        for each in self._optimizers:
            pairs = ((each, optimizer), (optimizer, each))
            if any(inner is one for outer, one in pairs for inner in inner_optimizers(outer)):
                return each
        return None

    def _meet(self, optimizer: Any) -> None:
        """For its scaler: has `optimizer` among its own from here on.

        In the place of those that have parameters of it. Then others may come, in the same
        iteration too, and the scale waits for `update`.
        """
        if self._mine(optimizer) is not None:
            return
        grew, self._grows = self._grows, True
        try:
            self.bind(*self._with(optimizer))
        except BaseException:
            self._grows = grew
            raise

    def _with(self, optimizer: Any) -> list[Any]:
        """Its optimizers and `optimizer`, in the order of the checkpoint, if there is one."""
        theirs = {id(param) for param in every_parameter([optimizer])}
        now: list[Any] = []
        for each in self._optimizers:
            replaced = any(id(param) in theirs for param in every_parameter([each]))
            if not replaced:
                now.append(each)
            elif not any(one is optimizer for one in now):
                now.append(optimizer)
        if any(one is optimizer for one in now):
            return now
        now.append(optimizer)
        claims = self._claims([optimizer], self._all_unclaimed(), self._names.model)
        numbers = {id(self._optimizers[place]): k for place, k in self._numbers.items()}
        numbers |= {id(optimizer): k for k in claims.values()}
        return sorted(now, key=lambda one: numbers.get(id(one), sys.maxsize))

    @property
    def _is_inside_step(self) -> bool:
        """Whether it is calling the step of an optimizer at this moment."""
        return self._is_stepping or any(part._is_stepping for part in self._parts.values())

    def _update_scale(self, new_scale: float | Tensor | None) -> None:
        """For its scaler: moves the scale on, or sets it.

        What was found while unscaling counts, as with torch's scaler, also for an optimizer that
        has not stepped on it.
        """
        if not self._engine.scale_policy.needs_largest:
            for each in (self, *self._parts.values()):
                if each._seen is not None and not each._is_seen_told:
                    each._is_seen_told = True
                    flag = each._seen.flag(self._engine.state.scale.device)
                    self._judged.append(Evidence(flag, None))
        self._move_on()
        if self._grows and not self._has_warned_of_misfits:
            self._has_warned_of_misfits = True
            warn_of_misfits(self._engine.clip_policy, [self._names])
        if new_scale is not None and self._engine.scales:
            lowest, highest = self._engine.scale_policy.bounds()
            scale = self._engine.state.scale
            set_scale(scale, new_scale, device=scale.device.type, lowest=lowest, highest=highest)

    def _load_scalers(self, state_dict: Mapping[str, Any], policies: str) -> None:
        """For its scaler: goes on from a state of its own or of torch's scaler."""
        if policies == "control":
            self.load_state_dict(state_dict, policies=policies)
            return
        policy = self._engine.scale_policy
        from_ours = "gradilocks" in state_dict or SCALERS in state_dict
        if not from_ours and not isinstance(policy, DynamicScale):
            if not self._engine.scales or "scale" not in state_dict:
                return
            self._update_scale(check_scale(state_dict["scale"]))
            self._tell_bounded(check_scale(state_dict["scale"]))
            return
        self.load_state_dict(state_dict)

    def _part_of(self, optimizer: Any) -> GradientControl:
        """What steps `optimizer` alone, under the scale of this control."""
        engine, options = self._engine, self._rank_options
        check = self._replica_check
        part = GradientControl(
            scale=engine.scale_policy,
            clip=engine.clip_policy,
            on_nonfinite=self._on_nonfinite,
            give_up_after=engine.streak.limit,
            check_replicas_every=None if check is None else check.every,
        )
        part._rank_options = options
        part._take((optimizer,), self._names.model, part=True)
        part._is_part, part._judged = True, self._judged
        # As in steps of all: by other names, a run file would take it for another optimizer.
        part._told_names = self._names
        part._schedules, part._events = self._schedules, self._events
        part._order.begin_like(self._order)
        state = self._part_states.pop(self._optimizers.index(optimizer), None)
        if state is None and len(self._optimizers) == 1:  # Others may still come.
            state = self._engine.saved()
            self._engine.forget_steps()  # Else they would count twice.
        if state is not None:
            part._engine.load(state, part._ranks, changed=True)
        return part

    def _step_apart(self, part: GradientControl, closure: Callable[[], Tensor] | None) -> Outcome:
        """A step of one optimizer alone."""
        part._order.check_leftovers(peek_parameters(part._optimizers))
        try:
            return part._step_by(self, closure)
        finally:
            self._stepped_apart, self._outcome = True, part._outcome

    def _refuse_stepped_parts(self) -> None:
        """Before a step of all: raises if some have been stepped by themselves on what is there."""
        self._move_on()
        waiting = [
            part
            for part in self._parts.values()
            if any(param.grad is not None for param in part._all_parameters())
        ]
        all_unscaled = len(waiting) > 0 and all(part._order.unscaled for part in waiting)
        if all_unscaled:
            self._order.note_unscaled()
        for part in self._parts.values():
            kind = type(part._optimizers[0]).__name__
            if part._is_stepped() and any(p.grad is not None for p in part._all_parameters()):
                raise ScaleMisuse(
                    f"step() steps all optimizers, and {kind} has stepped on its gradients already "
                    "by step(only=...). Clear them with control.zero_grad(only=...), or step the "
                    "others by only= too."
                )
            if part._order.unscaled and not self._order.unscaled and not all_unscaled:
                raise ScaleMisuse(
                    f"step() steps all optimizers, and of these the gradients of {kind} alone are "
                    "unscaled. Step it by step(only=...), or call unscale_() without only=."
                )

    def _is_stepped(self) -> bool:
        """Whether the gradients that are there are those of the latest step, if there are any."""
        return self._order.is_stepped(peek_parameters(self._optimizers))

    def _move_on(self) -> None:
        """Moves the scale on by the steps of single optimizers since it last moved.

        Gradients that wait for a step carry the scale, and are multiplied by as much.
        """
        if not self._judged or self._is_part:
            return
        judged = list(self._judged)
        self._judged.clear()
        engine = self._engine
        if not engine.scales:
            return
        before = engine.state.scale.clone()
        engine.advance_scale(judged)
        for part in self._parts.values():
            part._order.look_again(peek_parameters(part._optimizers))
            if part._order.waits(peek_parameters(part._optimizers)):
                gradients, _ = part._find(inside=True, steps=False)
                with torch.no_grad():
                    multiply_(gradients, engine.state.scale / before)
                gradients.release()

    @contextlib.contextmanager
    def _ahead(self) -> Iterator[None]:
        """Inside, the scale is where the steps of single optimizers will have moved it.

        Looked at on a copy: who reads it does not move it for optimizers that are still to step.
        """
        state, engine = self._engine.state, self._engine
        if self._judged and engine.scales and not self._is_part:
            engine.state = copy.deepcopy(state)
            engine.advance_scale(self._judged)
        for part in self._parts.values():
            part._engine.follow(engine.state)
        try:
            yield
        finally:
            engine.state = state
            for part in self._parts.values():
                part._engine.follow(state)

    def _states_of_parts(self) -> dict[int, Mapping[str, Any]]:
        """Of optimizers that have been stepped alone, by their number: all that is to go on."""
        states = dict(self._part_states)
        for number, optimizer in enumerate(self._optimizers):
            part = self._parts.get(id(optimizer))
            if part is not None:
                states[number] = part._engine.saved()
                whose = signature_of(optimizer, part._names)
                states[number]["gradilocks"]["optimizer"] = whose
        return states

    def _saved_parts(self) -> dict[int, Mapping[str, Any]]:
        """What a checkpoint has of single optimizers, by number: of those not met yet, too."""
        known, parts = self._states_of_parts(), dict(self._unclaimed)
        for place, state in known.items():
            number = self._numbers.get(place, place)
            while number in parts:  # Given in another order, or new beside those of a checkpoint.
                number += 1
            parts[number] = state
        return dict(sorted(parts.items()))

    def _load_parts(self, state_dict: Mapping[str, Any], *, in_order: bool) -> None:
        """Goes on with what is known of single optimizers, now or when they are stepped alone."""
        unclaimed = parts_in(state_dict)
        model = self._names.model
        claims = self._claims(self._optimizers, unclaimed, model, in_order=in_order)
        self._part_states = {place: unclaimed[number] for place, number in claims.items()}
        self._note_claims(claims, unclaimed, {})
        self._tell_of_strangers(range(len(self._optimizers)), unclaimed)
        for number, optimizer in enumerate(self._optimizers):
            part = self._parts.get(id(optimizer))
            if part is not None and number in self._part_states:
                part._engine.follow(self._engine.state)
                part._engine.load(self._part_states.pop(number), part._ranks)

    def _all_unclaimed(self) -> Mapping[int, Mapping[str, Any]]:
        """Of a checkpoint, what is known of single optimizers that have not been met."""
        waited = self._waiting_state
        return self._unclaimed if waited is None else parts_in(waited)

    def _claims(
        self,
        optimizers: Sequence[Any],
        unclaimed: Mapping[int, Mapping[str, Any]],
        model: Any,
        *,
        had: Sequence[Any] = (),
        in_order: bool = False,
    ) -> dict[int, int]:
        """By the place of an optimizer, the number of the state in `unclaimed` that is of it.

        By the names and shapes of its parameters. Several that are alike come in the order in which
        they were given, unless they are handed over one by one: then nobody has said an order.

        Args:
            optimizers: all.
            unclaimed: of a checkpoint, what is known of single optimizers, by the number there.
            model: names their parameters.
            had: those of `optimizers` that are known already.
            in_order: whether `unclaimed` has them in the order of `optimizers`.

        Raises:
            BadState: which is of an optimizer cannot be told.
        """
        waiting = dict(sorted(unclaimed.items()))
        unordered = self._grows and not in_order
        claims: dict[int, int] = {}
        for place, optimizer in enumerate(optimizers):
            if not waiting or any(each is optimizer for each in had):
                continue
            numbers = list(waiting)
            signatures = [waiting[number]["gradilocks"].get("optimizer") for number in numbers]
            if None in signatures:  # From before they were saved.
                found = [place] if place in waiting else []
            else:
                mine = signature_of(optimizer, Names(model, (optimizer,)))
                found = [numbers[at] for at in places_of(mine, signatures)]
            if len(found) > 1 and unordered and self._must_tell([waiting[k] for k in found]):
                policy = self._engine.clip_policy.policy_name
                raise BadState(_UNTOLD.format(policy=policy, count=len(found)))
            if found:
                claims[place] = found[0]
                del waiting[found[0]]
        if unordered:
            given = {id(optimizers[place]): unclaimed[number] for place, number in claims.items()}
            for place, number in self._numbers.items() if had else ():
                given[id(had[place])] = self._claimed[number]
            self._refuse_guesses(optimizers, given, model)
        return claims

    def _refuse_guesses(
        self, optimizers: Sequence[Any], given: Mapping[int, Mapping[str, Any]], model: Any
    ) -> None:
        """Raises if one optimizer was given what may as well be of another that got nothing.

        Args:
            optimizers: all.
            given: by the id of an optimizer, what is known of it from a checkpoint.
            model: names their parameters.
        """
        signatures = {id(each): signature_of(each, Names(model, (each,))) for each in optimizers}
        for number, state in given.items():
            saved, holder = state["gradilocks"].get("optimizer"), signatures.get(number)
            nothing = {"gradilocks": {"clip_state": None}}
            if saved is None or holder is None or not self._must_tell([state, nothing]):
                continue
            others = [mine for each, mine in signatures.items() if each not in given]
            if any(may_be_as_well(mine, saved, holder) for mine in others):
                policy = self._engine.clip_policy.policy_name
                raise BadState(_GUESSED.format(policy=policy))

    def _must_tell(self, alike: Sequence[Mapping[str, Any]]) -> bool:
        """Whether it matters to the clip policy which of these states an optimizer gets."""
        memories = [state["gradilocks"].get("clip_state") for state in alike]
        keys = self._engine.clip_policy.misfits((), ())
        return any(isinstance(key, int) for key in keys) or memories != memories[:1] * len(alike)

    def _note_claims(
        self,
        claims: Mapping[int, int],
        unclaimed: Mapping[int, Mapping[str, Any]],
        numbers: Mapping[int, int],
    ) -> None:
        """Keeps what `_claims` has left, and, of who comes one by one, the numbers."""
        taken = set(claims.values())
        self._unclaimed = {k: state for k, state in unclaimed.items() if k not in taken}
        self._numbers = {**numbers, **claims} if self._grows else {}
        known = {**self._claimed, **unclaimed}
        self._claimed = {number: known[number] for number in self._numbers.values()}

    def _tell_of_strangers(
        self, came: Sequence[int], unclaimed: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Tells the log of those who `came` of whom the checkpoint knows others and not them."""
        policy = self._engine.clip_policy
        if not unclaimed or not policy.learns or (len(self._optimizers) == 1 and not self._grows):
            return
        for place in came:
            if place not in self._part_states:
                mine = signature_of(self._optimizers[place], self._names)
                tell_of_a_stranger(mine, policy.policy_name, "GradientControl")

    def _groups_unclaimed(self, *, before: int | None) -> int:
        """How many groups those have that a checkpoint has before this number, or at all, and that
        have not been met."""
        missing = [s for k, s in self._unclaimed.items() if before is None or k < before]
        known = [state["gradilocks"].get("optimizer") or {} for state in missing]
        return sum(signature.get("groups", 0) for signature in known) if self._grows else 0

    def _step_told(self, driver: Any, closure: Callable[[], Tensor] | None) -> Outcome:
        """A step of which listeners are told: recorder, tracer, audit."""
        engine = self._engine
        told = Step(
            driver,
            self._optimizers,
            is_of_control=True,
            apart=self._is_part,
            scale=engine.state.scale,
            unscaled=self._order.unscaled,
            names=self._told_names,
            order=float(engine.clip_policy.order),
            scales=engine.scales,
            ranks=() if self._ranks is None else self._ranks.rank_group.ranks,
        )
        self._told = self._events.begin_step(told)
        engine.detail, engine.plans = told.detail, told.plans
        try:
            with engine.table.keeping:
                return self._step(closure)
        except BaseException:
            self._events.fail_step(told)
            raise
        finally:
            engine.detail, engine.plans, self._told = False, (), None

    def _step(self, closure: Callable[[], Tensor] | None) -> Outcome:
        if not self._asked_ahead:
            self._engine.step_begun = False
            if self._loads is not None:
                self._loads.begin_step()
        self._asked_ahead, self._weights = False, None
        if not self._optimizers:
            raise ValueError(_UNBOUND)
        if closure is not None:
            check_closure(closure, len(self._optimizers))
            return self._step_with_closure(closure)
        if self._bound is not None:
            outcome = self._step_again()
            if outcome is not None:
                return outcome
        engine = self._engine
        gradients, model_ranks = self._find()
        self._is_stepping = True
        try:
            rating, direct, overflow = None, False, None
            seen = self._seen if self._order.unscaled else None
            if seen is not None:
                overflow = seen.flag(engine.state.scale.device)
            settles = model_ranks is None and engine.begin(gradients)
            if settles:
                own: Any = self._optimizers[0]
                direct = own is gradients.found_by and own.is_direct()
                # Work out an optimizer's rates where the step is settled: one launch less.
                rating = own.ready(gradients) if direct else None
            verdict = engine.decide(
                gradients,
                unscaled=self._order.unscaled,
                overflow=overflow,
                model_ranks=model_ranks,
                rating=rating,
                on_device=settles,
                moves=not self._is_part,
            )
            if self._told is not None:
                _tell_of(gradients, self._told)
            if seen is not None and len(seen.places) == len(gradients.params):
                # Who it was, before somebody has perhaps written over it.
                verdict.outcome.count_by(functools.partial(seen.counts, engine.state.scale.device))
            if verdict.together is not None:
                self._keep_weights(verdict)
            try:
                if self._replica_check is not None:
                    self._check_replicas(self._replica_check, gradients)
                if direct and verdict.settled:
                    skip, divisor = verdict.decision.skip, verdict.decision.divisor
                    self._optimizers[0].take(skip, divisor, rated=rating is not None)
                else:
                    self._update(verdict, gradients)
            except BaseException:
                self._after_a_failed_update(verdict)
                raise
            if rating is not None and verdict.settled and overflow is None:
                self._bind_step(verdict, gradients, rating)
        finally:
            self._is_stepping = False
            gradients.release()
        return self._conclude(verdict, gradients.params)

    def _bind_step(self, verdict: Verdict, gradients: Gradients, rating: Any) -> None:
        """Has the step that has just been taken be taken again, as long as all is as it was."""
        try:
            alone = rank_guards()
            self._asks_for_ranks = alone is None
            self._bound = self._engine.bound(
                self._optimizers[0],
                gradients,
                guards=[*self._order.guards(), *(alone or ())],
                unscaled=self._order.unscaled,
                moves=not self._is_part,
                rating=rating,
            )
        except BaseException:  # As Ctrl-C: the step has been taken, and is not to be undone.
            self._conclude(verdict, gradients.params)
            raise

    def _step_again(self) -> Outcome | None:
        """Takes the step that was taken last once more; None if it has to go the whole way."""
        # Kept only if it is taken: else it is out of date, and so are the tables that it holds.
        bound, self._bound = self._bound, None
        assert bound is not None
        unused = self._loads, self._replica_check, self._seen
        if unused != (None, None, None) or not self._compared:
            return None
        if self._asks_for_ranks and has_other_ranks():
            return None
        self._engine.step_begun = self._asked_ahead = False
        self._is_stepping = True
        try:
            verdict = self._engine.again(bound)
        finally:
            self._is_stepping = False
        if verdict is None:
            return None
        self._bound = bound
        told = self._told
        if told is not None:
            told.measured = len(bound.params)
            told.elements = bound.at.sizes if told.detail else None
        return self._conclude(verdict, bound.params)

    def _update(self, verdict: Verdict, gradients: Gradients) -> None:
        """Steps each optimizer on its gradients, or none."""
        begin = 0
        found = gradients if isinstance(gradients, TableGradients) else None
        for number, optimizer in enumerate(self._optimizers):
            ours = None if found is None else ours_inside(optimizer)
            if ours is not None:
                ours.hold(found if len(self._optimizers) == 1 else None)
            end = gradients.ends[number]
            update(
                optimizer,
                verdict.decision,
                gradients.tensors[begin:end],
                device=gradients.device,
                begin=begin,
                dtypes=gradients.dtypes,
                inside=takes_decision(optimizer),
                multiplied=self._order.note_unscaled,
            )
            begin = end

    def _find(
        self, *, inside: bool | None = None, steps: bool = True
    ) -> tuple[Gradients, ModelRanks | None]:
        """The gradients, and the ranks that hold the model together with this one, if any.

        Args:
            inside: whether each optimizer's own step unscales; else its gradients are unscaled in
                place, which float16 would not survive. None if each is to be asked.
            steps: whether a step goes on: at the first the ranks compare settings and recorders.
        """
        model_ranks = None
        if has_other_ranks():
            kernels.agree_with_ranks()
            model_ranks = self._model_ranks()
        if steps and self._loads is not None and self._loads.is_new:
            self._compare_again(self._loads)
        if steps and not self._compared:
            self._compare_replicas(model_ranks)
        try:
            gradients = self._engine.find(self._optimizers)
            if self._engine.scales:
                # Of a pipeline's stages only the last has a loss: the ranks ask each other.
                # Where nobody has said that ranks hold different parts, all have a loss.
                own = model_ranks is None or self._engine.scaled_here
                if not self._order.scaled and (
                    own or (gradients.params and not self._engine.elsewhere)
                ):
                    self._order.check_scaled("step()")
                if torch.float16 in gradients.dtypes:
                    self._refuse_float16(gradients, inside)
            if not gradients.params and model_ranks is None:  # Else another rank may have some.
                raise no_gradients(self._names)
        except Exception:
            if model_ranks is not None:  # Else the other ranks would wait for this one.
                self._engine.refuse(model_ranks)
            raise
        if not self._engine.scales:  # No loss was scaled, which would have brought the state there.
            first = first_parameter(self._optimizers)
            if first is not None:
                self._engine.move_to(first.device)
        return gradients, model_ranks

    def _compare_replicas(self, model_ranks: ModelRanks | None) -> None:
        """At the first step, ranks that hold copies of the model compare their settings."""
        if self._replicas is None:
            self._find_data_parallel()  # It may have been made after the control.
        if self._replicas is None:
            self._compared = True
            if model_ranks is None and my_rank() == 0:
                _warn_of_ranks(world_size())
            return
        if is_joining(self._data_parallel()):
            return
        plans, self._loads = self._engine.compare_settings(self._replicas)
        self._compared = True
        if model_ranks is None:  # Else the losses travel at every step.
            self._exchange = exchange_for(plans, self._replicas, self._data_parallel)
            self._engine.losses.adds_up = self._exchange is not None

    def _compare_again(self, loads: LoadCount) -> None:
        """Compares what data-parallel ranks have loaded since they met; raises if not all have.

        Not inside a CUDA graph, which cannot wait, nor where ranks may have stopped.
        """
        if not is_joining(self._data_parallel()) and not capturing():
            fetch(self._engine.state.scale)  # After the gradients, for which all ranks are needed.
            check, step = self._replica_check, self._engine.next_step
            if loads.all_have():
                self._engine.compare_settings(self._replicas)
                loads.note_compared()
            elif not (check is not None and loads.kept_step and step and check.is_due(step)):
                raise loads.alone()  # Else all ranks compare their scales below, and raise alike.

    def _check_replicas(self, check: ReplicaCheck, gradients: Gradients) -> None:
        """Raises if it is time to compare ranks that hold the same and they do not.

        After the ranks have decided: at the first step that is where their settings are compared.
        """
        if not has_other_ranks() or is_joining(self._data_parallel()):
            return
        step = self._engine.next_step
        if step is None:
            raise ValueError(
                "check_replicas_every= waits for the device, which a CUDA graph cannot. Leave it "
                "out of the control whose steps are captured."
            )
        if not check.is_due(step):
            return
        # Of one that lies otherwise than its parameter, no two ranks may have the same elements.
        measured = {
            id(param): tensor
            for param, tensor in zip(gradients.params, gradients.tensors, strict=True)
            if lie_alike(param, param.grad)
        }
        numbers = {"the scale": self.scale, "the number of steps": step}
        if self._ranks is not None:
            ranks = self._ranks
            holdings = Holdings(ranks.rank_group, ranks.params, ranks.elements(), measured, numbers)
        else:
            params = list(self._all_parameters())
            rank_group = whole_group(self._replicas, params[0].device)
            elements = list(enumerate(self._names.of(params)))
            holdings = Holdings(rank_group, params, elements, measured, numbers, whole=True)
        check.check(holdings, step)

    def _refuse_float16(self, gradients: Gradients, inside: bool | None) -> None:
        for number, optimizer in enumerate(self._optimizers):
            if not (takes_decision(optimizer) if inside is None else inside):
                params, tensors = gradients.of_optimizer(number)
                refuse_unscaling_float16(optimizer, params, tensors, self._names)

    def _after_a_failed_update(self, verdict: Verdict) -> None:
        """As if nothing had been decided; several optimizers are not to be stepped twice."""
        self._engine.undo(verdict)
        if len(self._optimizers) > 1:
            self._order.note_step(self._all_parameters())

    def _conclude(self, verdict: Verdict, params: Sequence[Tensor]) -> Outcome:
        """Moves the scale on, takes note of the step, and raises if the caller wants to know."""
        outcome = self._outcome = verdict.outcome
        self._seen = None
        loss = None if self._exchange is None else self._engine.losses.total()
        hopeless = self._engine.conclude(verdict, moves=not self._is_part)
        if self._is_part:
            seen = self._engine.evidence(verdict)
            # A device that settles steps writes over its flag at the next.
            self._judged.append(seen._replace(skip=seen.skip.clone()))
        for scheduler in self._schedules if self._schedules else ():
            if not self._is_part or scheduler.is_of(self._optimizers):
                scheduler.note(verdict.record.row)
        self._order.note_step(params)
        for part in self._parts.values():
            part._order.note_step(part._all_parameters())
        told = self._told
        if told is not None:
            told.record, told.next_scale = verdict.record, self._engine.state.scale
            told.together = verdict.together
        if verdict.together is not None or self._exchange is not None:
            self._share(verdict, loss)
        if told is not None:
            self._events.end_step(told)
        if hopeless:
            # Under join() some ranks have no step left, and would not answer.
            replicas = None if is_joining(self._data_parallel()) else self._replicas
            raise self._engine.never_finite(outcome, replicas)
        if self._on_nonfinite == "raise" and outcome.skipped and not outcome.rejected:
            raise nonfinite(outcome)
        return outcome

    def _keep_weights(self, verdict: Verdict) -> None:
        """Before the first update of a step that the ranks share tensor by tensor."""
        shares = verdict.together is not None and verdict.together.local is not None
        if shares and self._weights is None and self._ranks is not None:
            # Tensors of a kind that nobody has thought of: the others wait all the same.
            with contextlib.suppress(Exception):
                self._weights = Weights(self._ranks.params)

    def _share(self, verdict: Verdict, loss: Tensor | None) -> None:
        """Tells the other ranks what their recorders need of a step that is over, and hears it.

        The step has been taken, so nothing is raised if another rank is gone: the next collective
        of the training does, before anything has moved.
        """
        together, told = verdict.together, self._told
        try:
            if together is not None and together.local is not None:
                shared = self._share_detail(together)
                if told is not None:
                    told.shared = shared
            if self._exchange is not None:
                step, home = verdict.outcome.step, verdict.record.row.device
                losses = self._exchange.take(loss, step, home)
                if told is not None:
                    told.rank_losses = losses
        except Exception as error:
            self._exchange = None
            warnings.warn(
                f"what the ranks record of step {verdict.outcome.step} could not be brought "
                f"together: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=users_line(),
            )

    def _share_detail(self, together: Together) -> SharedDetail:
        """What all ranks found of each parameter of the step that is over."""
        weights, self._weights = self._weights, None
        assert together.local is not None
        assert self._ranks is not None
        home = together.local.found.norms.device
        moved_by = None if weights is None else weights.norms(home)
        return self._engine.share_detail(together, self._ranks, moved_by)

    def _step_with_closure(self, closure: Callable[[], Tensor]) -> Outcome:
        (optimizer,) = self._optimizers
        last: Verdict | None = None

        def make_true() -> bool:
            nonlocal last
            gradients, model_ranks = self._find(inside=False)
            unscaled = self._order.unscaled
            last = self._engine.decide(
                gradients, unscaled=unscaled, model_ranks=model_ranks, on_device=False
            )
            if self._told is not None:
                _tell_of(gradients, self._told)
            if self._replica_check is not None:
                self._check_replicas(self._replica_check, gradients)
            self._keep_weights(last)
            if last.outcome.skipped:
                return False
            apply_in_place(last.decision, gradients.tensors)
            self._order.note_step(self._all_parameters())
            return True

        step_with_closure(
            optimizer,
            closure,
            make_true=make_true,
            gradients_are_waiting=self._gradients_are_waiting(),
        )
        if last is None:
            raise NoGradients("the optimizer did not call the closure, so nothing was measured.")
        return self._conclude(last, list(self._all_parameters()))

    def _gradients_are_waiting(self) -> bool:
        """Whether a closure's optimizer begins with gradients that are there: alike on all ranks.

        Of a pipeline's stages only the last has scaled a loss, so the ranks ask each other.
        """
        waiting = self._order.scaled and any(p.grad is not None for p in self._all_parameters())
        if not has_other_ranks():
            return waiting
        # As they were: a change of parameters is told of with the step's own row.
        ranks = self._model_ranks() if self._ranks is None else self._ranks
        if ranks is None:
            return waiting
        home = ranks.rank_group.device
        mine = torch.full((1,), waiting, dtype=torch.float32, device=home)
        (most,) = fetch(largest_of_all(mine, [ranks.rank_group]))
        return most > 0

    def _model_ranks(self) -> ModelRanks | None:
        """The ranks that hold the model together; raises if they are not known."""
        params = parameter_list(self._optimizers)
        trained = requiring(params)
        known, were = self._ranks_of
        if len(params) != len(known) or any(map(operator.is_not, params, known)):
            self._ranks = self._ranks_of_changed(params)
        elif trained != were:  # On this rank perhaps alone: the others are not to be asked.
            with self._refusing_for_all(self._ranks):
                refuse_thawed(params, self._rank_options, name=self._names)
        # Nothing is kept where nothing is spread: a parameter that is replaced must go.
        self._ranks_of = ([], b"") if self._ranks is None else (params, trained)
        return self._ranks

    def _ranks_of_changed(self, params: list[Tensor]) -> ModelRanks | None:
        """The ranks that hold `params` together, which are others than before.

        On this rank perhaps alone: nobody is asked before all ranks have said that theirs are
        others too. Raises on all ranks if some would have to be asked and have not changed.
        """
        before, options = self._ranks, self._rank_options
        asks = before is not None and asks_others(before.params, options)
        # A policy that bounds tensors apart needs the table of all, which is told anew.
        needs_all = asks or self._engine.clip_policy.apart
        if before is not None and needs_all and not self._engine.all_have_changed(before):
            raise ValueError(_CHANGED_ALONE)
        # Where the ranks ask each other, they refuse together.
        with self._refusing_for_all(None if asks else before):
            if before is not None and not asks and asks_others(params, options):
                raise ValueError(_CHANGED_ALONE)
            return model_ranks_of(params, name=self._names, options=options)

    @contextlib.contextmanager
    def _refusing_for_all(self, ranks: ModelRanks | None) -> Iterator[None]:
        """Inside, an error on this rank refuses the step on all `ranks`, which wait for its row."""
        try:
            yield
        except Exception:
            if ranks is not None:
                self._engine.all_have_changed(ranks)
            raise


_UNTOLD = (
    "what clip={policy}(...) knows, from a state_dict, is of {count} optimizers whose parameters "
    "have the same names and shapes, and which of them comes first cannot be told. Name the "
    "parameters, in the run that saves and in the one that loads: "
    'GradientControl(model={{"one": model, "other": other}}); or say the order before the first '
    "step: control.bind(optimizer, another)."
)

_GUESSED = (
    "what clip={policy}(...) knows, from a state_dict, is of one of two optimizers whose "
    "parameters have the same names and shapes, and of which cannot be told. Name the parameters, "
    "in the run that saves and in the one that loads: "
    'GradientControl(model={{"one": model, "other": other}}).'
)

_UNBOUND = (
    "this control has no optimizer yet: GradientControl(optimizer, ...) or control.bind(optimizer)."
)

_CHANGED_ALONE = (
    "parameters were added, removed or replaced on this rank and not on all ranks that train the "
    "model, and who holds what can only be told by all of them together. Nothing has moved. Change "
    "the parameters of the optimizers on all ranks before the same step, or make a new "
    "GradientControl on all of them."
)

_ONE_STAGE = (
    "control.loss_fn() is for the schedule of a pipeline, and this control knows of this rank's "
    "parameters only: each stage would have a norm, a clip and skips of its own. Say that the "
    'ranks hold different parts: GradientControl(..., mesh=world_mesh, distinct="pp").'
)

_NO_REPLICAS_KNOWN = (
    "check_replicas_every= compares ranks that hold the same parameters, and which do is not "
    "known: the parameters are plain tensors. Give the model as DistributedDataParallel made it, "
    "GradientControl(..., model=ddp), or the mesh of all ranks that hold copies, "
    "GradientControl(..., mesh=world_mesh)."
)

_NOBODY_SAID = (
    "this process is one of %d ranks, and nothing says how they hold the model: its tensors are "
    "plain and in no DistributedDataParallel. So each rank takes the norm of its own gradients and "
    "decides alone. If ranks hold parts of the model (tensor parallel by hand, a pipeline, "
    "experts), say so: process_group=, mesh= with distinct=, or copies=. If all hold copies whose "
    "gradients are averaged by hand, copies= with the number of ranks has them compared."
)
