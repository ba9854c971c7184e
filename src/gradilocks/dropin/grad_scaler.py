"""Drop-in for torch.amp.GradScaler: the same numbers, and a name for the overflow.

What differs from torch is what torch gets wrong: the skip flag is exactly 0 or 1, the scale has a
floor, a step that raises leaves nothing behind, a gradient is never unscaled twice, bfloat16
gradients work on every device, and a fused SGD whose first step is skipped starts clean.

With `policy=` or `clip=` a step goes through the engine, as that of a GradientControl does: the
gradients are read once, and one decision unscales, clips and steps. Without them each call does
what torch's does. With `record=` the gradients are measured besides, before they are unscaled, and
steps are written down as those of a GradientControl are.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gradilocks import kernels
from gradilocks._torch import OptState, new_scaler_state
from gradilocks.clip import NoClip, resolve_clip
from gradilocks.dropin.optimizer_engines import OptimizerEngines
from gradilocks.dropin.scaler_state import (
    TORCHS,
    TorchsRule,
    check_state,
    checked_policies,
    fitted_clip,
    fitted_state,
    from_controls,
    has_torchs_numbers,
    policy_from,
    set_scale,
    state_from,
)
from gradilocks.eager import eager, users_line
from gradilocks.names import Names
from gradilocks.ranks.collective import largest_of_all
from gradilocks.ranks.layout import (
    any_distributed,
    covers_world,
    flattened_among,
    has_other_ranks,
    my_rank,
    rank_groups_of,
    refuse_fsdp1_shards,
)
from gradilocks.record.environment import checked_config
from gradilocks.record.journal import Journal, journal_of, recorder_for
from gradilocks.scale import (
    LARGEST,
    SMALLEST,
    NoScale,
    ScalePolicy,
    ScaleRules,
    advance_dynamic,
    bounds_in_float32,
    resolve_scale,
)
from gradilocks.state.checkpoint import SCALERS as KEY
from gradilocks.state.checkpoint import (
    check_scale,
    refill,
    save_scale,
    scale_in,
    tell_bounded,
    tell_dropped,
    tell_replaced,
    tell_unclipped,
)
from gradilocks.state.other_scalers import OtherScaler, recognize
from gradilocks.step.call_order import UnscaledGuard, own_write_begins, own_write_ended
from gradilocks.step.engine import (
    Engine,
    Look,
    Verdict,
    held_if,
    joined_counts,
    look,
    measure_all,
    peak_of,
)
from gradilocks.step.events import EVENTS, Step, StepEvents
from gradilocks.step.framework_wrappers import KINDS, refuse_second_scaler
from gradilocks.step.half_sgd import HALF, moving
from gradilocks.step.measure import measure
from gradilocks.step.outcome import Outcome, ScalerOutcome, fetch
from gradilocks.step.own_step import own_step, why_not_inside
from gradilocks.step.table import Gradients, TableGradients, every_parameter, lists_of
from gradilocks.step.update import (
    apply_in_place,
    handing_over,
    must_skip_on_host,
    takes_decision,
    takes_scaler,
    update,
)
from gradilocks.values import (
    ROW,
    Measurement,
    NonFinite,
    RankGroup,
    ScaleState,
    StepRecord,
    moved,
    wide,
)

if TYPE_CHECKING:
    from gradilocks.record import Recorder

__all__ = ["GradScaler"]

_DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": SMALLEST,
    "max_scale": LARGEST,
}
_FLATTENED = (
    "A GradScaler cannot clip it: use GradientControl(..., process_group=model.process_group) with "
    "the FSDP model, or torch's ShardedGradScaler and model.clip_grad_norm_."
)

_NO_GRADIENTS = (
    "No inf checks were recorded for this optimizer. None of its parameters has a gradient: was "
    "backward() called, and does the loss depend on them?"
)


class _OptimizerStep(NamedTuple):
    """What is known of one optimizer since the last `update`."""

    optimizer: Any
    """Alive until `update`, so that its id means no other."""
    params: Sequence[Tensor] = ()
    """Its parameters with gradients."""
    dtypes: Collection[torch.dtype] | None = None
    """Those of the gradients, if they have been looked at."""
    device: torch.device | None = None
    """That of the gradients, if they have been looked at and lie on one."""
    engine: Engine | None = None
    seen: Look | None = None
    """What `unscale_` found in the gradients."""
    verdict: Verdict | None = None
    """What the engine decided, with `policy=` or `clip=`."""
    measured: Measurement | None = None
    """With `record=`: the gradients before they were unscaled."""


class _SinceUpdate:
    """What has happened since the last `update`."""

    def __init__(self, guard: UnscaledGuard) -> None:
        self.guard = guard
        self.steps: dict[int, _OptimizerStep] = {}
        """By the id of the optimizer."""
        self.peak: Tensor | None = None
        """The largest magnitude of the scaled gradients, if the scale policy asks for it."""
        self.loss_nonfinite: Tensor | None = None
        """Above 0 if a loss was NaN or Inf, if the scale policy asks for it."""
        self.loss_nonfinite_anywhere: Tensor | None = None
        """The same of all ranks, where they have told each other."""
        self.losses = self.ran_backward = 0
        """With `record=`: how many losses were scaled, and how many of them have run backward."""
        self.only_looking: Tensor | None = None
        """The 1 by which gradients are "unscaled" that are looked at and left as they are."""

    def note_backward(self) -> Callable[[object], None]:
        """What a loss is to call when it is run backward; it counts once."""
        first = [1]

        def ran(_: object) -> None:
            self.ran_backward += first.pop() if first else 0

        return ran


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, with the same arguments and the same results.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale: the floor under the scale; by default the smallest normal float32.
        max_scale: the ceiling; a growth that would pass it is not taken.
        model: the module that names the parameters in `outcome` and in error messages; of several,
            a mapping from a prefix to each. After a load it tells optimizers of equal shapes apart.
        process_group: the ranks that must skip together when gradients are sharded plain tensors,
            besides those that share a mesh of DTensors.
        policy: a scale policy in place of torch's rule and its numbers, such as HeadroomScale().
        clip: a number or a clip policy; `step` unscales and clips each optimizer's gradients, and
            with `enabled=False` it clips them as they are.
        record: a path for a run file, a folder ("runs/") in which it gets a name of its own, a
            Recorder, or None. It changes no number and waits for nothing; each step costs one more
            read of the gradients, and two after an `unscale_` of your own. Of several ranks rank 0
            writes what it holds itself.
        config: with a path as `record`, what its header is to tell of how the run was made.

    Example:
        >>> scaler = GradScaler("cpu", model=model)
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.outcome.culprits
        ('head.weight',)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = SMALLEST,
        max_scale: float = LARGEST,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        process_group: Any = None,
        policy: object = None,
        clip: object = None,
        record: object = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(device, nn.Module):
            raise TypeError(
                "device must be a str such as 'cuda' or 'cpu', got a module. Write "
                "GradScaler('cuda', model=model)."
            )
        for name, number in (("init_scale", init_scale), ("min_scale", min_scale)):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise TypeError(f"{name} must be a number, got {type(number).__name__}.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().__init__(
                device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
            )
        for warning in caught:  # Again, so that it points at the caller's line and not at ours.
            warnings.warn(warning.message, warning.category, stacklevel=2)
        if self._enabled and not SMALLEST <= min_scale <= init_scale <= max_scale <= LARGEST:
            raise ValueError(
                "init_scale must be positive and finite and lie between min_scale and max_scale, "
                f"got init_scale={init_scale}, min_scale={min_scale}, max_scale={max_scale}."
            )
        self._min_scale, self._max_scale = float(min_scale), float(max_scale)
        Names(model, ())  # Refuses what is no model, now rather than at the first overflow.
        self._model = model
        self._process_group = process_group
        if process_group is not None and not (policy is None and clip is None):
            raise ValueError(
                "policy= and clip= of a GradScaler do not know process_group=: a rank would clip "
                "and scale by its own part of the gradients. Use GradientControl(process_group=)."
            )
        self._policy = _scale_policy(policy)
        self._clips = clip is not None
        self._told_of_clips: set[str] = set()
        clip_policy = NoClip() if clip is None else resolve_clip(clip)
        self._engines = OptimizerEngines(self._policy, clip_policy, model)
        self._scale_state: ScaleState | None = None
        if self._policy is not None:
            given = locals()
            for name, default in _DEFAULTS.items():
                if given[name] != default:
                    raise ValueError(
                        f"{name}={given[name]} stands beside policy={self._policy!r}, which "
                        f"has numbers of its own. Say it there, or leave out policy=."
                    )
            if self._enabled:
                self._show_policys_numbers(self._policy)
        # As it was made: a checkpoint may bring other settings.
        self._given_policies = self._policy, clip_policy
        names = ("init_scale", *TORCHS) if self._enabled else ()
        self._given_numbers = {name: getattr(self, f"_{name}") for name in names}
        self._outcome: ScalerOutcome | partial[ScalerOutcome] | None = None
        self._now = _SinceUpdate(UnscaledGuard())
        self._events = StepEvents(EVENTS)
        config = checked_config(config)
        if record is not None:
            self._begin_record(record, config)

    # The rules of an earlier `update`, and the numbers that they were made of.
    _latest_rules: tuple[tuple[float, ...], ScaleRules | None] = (), None

    @property
    def model(self) -> nn.Module | Mapping[str, nn.Module] | None:
        """The module that names the parameters.

        It stays behind when the scaler is pickled, as for a process that was spawned, and may be
        set there again: then it must have the same parameters. Without it, parameters are named
        where their shape tells which ones they are; a clip that needs a name that cannot be told
        raises ValueError at the first step.
        """
        return self._model

    @model.setter
    def model(self, model: nn.Module | Mapping[str, nn.Module] | None) -> None:
        self._engines.take_model(model)
        self._model = model

    # The contract of torch.amp.GradScaler.

    @property
    def outcome(self) -> ScalerOutcome | None:
        """What became of the latest `step`, or None before the first. Reading it waits."""
        if isinstance(self._outcome, partial):
            self._outcome = self._outcome()
        return self._outcome

    @property
    def recorder(self) -> Recorder | None:
        """What records the steps, with `record=`; one that it has made goes when the scaler goes.

        A copy of a scaler records nothing.
        """
        journal = journal_of(self._events)
        return None if journal is None else journal.recorder

    @eager
    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or every tensor of an iterable, by the scale; fp16 in float32."""
        if self._events.own:
            self._count_losses(outputs)
        if not self._enabled:
            return outputs
        self._now.guard.note_scaled(outputs)
        scaled = super().scale(self._widened(outputs))
        for listener in self._events.listeners:
            assert self._scale is not None
            listener.loss_scaled(self, outputs, scaled, self._scale)
        return scaled

    @eager
    def unscale_(self, optimizer: Any) -> None:
        """Divides the optimizer's gradients by the scale, looking for NaN and Inf on the way."""
        if self._enabled and self._clips:
            self._now.guard.will_clip(self._engines.clip, self._told_of_clips)
        scale = self._scale if self._enabled else None
        if scale is None or self._overrides("_unscale_grads_"):
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            super().unscale_(optimizer)  # Raises.
        flags = self._looked_at(optimizer, _inverse(scale), scale.device, allow_fp16=False)
        state["found_inf_per_device"], state["stage"] = flags, OptState.UNSCALED

    @eager
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Unscales if that has not been done, then steps unless a gradient is NaN or Inf.

        Args:
            optimizer: any object with `param_groups` and `step`.
            args: handed to `optimizer.step`.
            kwargs: handed to `optimizer.step`; `closure` is refused, as in torch.

        Returns:
            What `optimizer.step` returns, or None when the host knows that it was skipped.
        """
        if not self._enabled:
            if self._events.own:
                return self._step_disabled_told(optimizer, args, kwargs)
            return self._step_disabled(optimizer, args, kwargs)
        if "closure" in kwargs:
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled. "
                "gradilocks.GradientControl.step(closure) is."
            )
        if KINDS.get(type(optimizer), optimizer) is not None:  # A wrapper, or not met before.
            refuse_second_scaler(optimizer, steps=True)
        if self._events.listeners:
            return self._step_told(optimizer, args, kwargs)
        return self._step_enabled(optimizer, args, kwargs)

    def _step_told(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> float | None:
        """A step of which listeners are told: recorder, tracer, audit."""
        if self._scale is None or self._events.step_around(optimizer) is not None:
            # Before the first loss, or inside a step that is told of already.
            return self._step_enabled(optimizer, args, kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        unscaled = state["stage"] is OptState.UNSCALED
        journal, clipped = journal_of(self._events), None
        told = Step(self, (optimizer,), scale=self._scale, unscaled=unscaled, apart=True)
        if journal is not None:
            self._tell_what_is_held(told)
        self._events.begin_step(told)
        try:
            if journal is not None:
                clipped = self._measure_now(told)
            returned = self._step_enabled(optimizer, args, kwargs)
        except BaseException:
            self._events.fail_step(told)
            raise
        verdict = self._now.steps[id(optimizer)].verdict
        if verdict is not None:
            decision, row = verdict.decision, verdict.record.row
            told.skip = told.held or decision.skip
            if decision.overflow is not None:
                told.rejected = decision.skip - decision.overflow
            if self._clips:
                told.limit, told.clipped = row[ROW.index("limit")], row[ROW.index("clipped")]
        elif state["found_inf_per_device"]:
            told.skip = told.held or _any_flag(list(state["found_inf_per_device"].values()))
        if journal is not None:
            self._note_record(told, journal, clipped)
        self._events.end_step(told)
        return returned

    def _step_enabled(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> float | None:
        if self._scale is None or self._growth_tracker is None:
            self._check_scale_growth_tracker("step")  # Raises; it words that at every call.
        if id(optimizer) not in self._now.steps:
            self._now.steps[id(optimizer)] = _OptimizerStep(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        unscaled = state["stage"] is OptState.UNSCALED
        # After `unscale_` nobody looks again, as in torch, unless a clip has to.
        if self._clips or (self._policy is not None and not unscaled):
            returned = self._step_by_engine(optimizer, state, args, kwargs)
        elif takes_scaler(optimizer):
            returned = self._step_with_scaler(optimizer, args, kwargs)
        elif takes_decision(optimizer):
            returned = self._step_fused(optimizer, state, args, kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not state["found_inf_per_device"]:
                raise AssertionError(_NO_GRADIENTS)
            flags = list(state["found_inf_per_device"].values())
            known_reader = not self._overrides("_maybe_opt_step")
            flag = self._skip_flag(optimizer, flags, known_reader=known_reader)
            self._tell(optimizer, flag)
            asked = {**state, "found_inf_per_device": {flag.device: flag}}
            known, maybe = self._now.steps[id(optimizer)], self._maybe_opt_step
            if known.dtypes is None or not HALF.isdisjoint(known.dtypes):
                maybe = moving(optimizer, maybe, known.device)
            returned = maybe(optimizer, asked, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return returned

    @eager
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale on, or sets it to `new_scale`; begins the next iteration."""
        if not self._enabled:
            self._start_iteration()
            return
        scale = self._scale
        if scale is None or self._growth_tracker is None:
            scale, _ = self._check_scale_growth_tracker("update")  # Raises.
        if new_scale is not None:
            bounds = self._min_scale, self._max_scale
            lowest, highest = bounds if self._policy is None else self._policy.bounds()
            set_scale(scale, new_scale, device=self._device, lowest=lowest, highest=highest)
        else:
            found = [
                flag if flag.device == scale.device else moved(flag, scale.device)
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            if not found:
                raise AssertionError(
                    "No inf checks were recorded prior to update. Call scaler.step(optimizer) on "
                    "an optimizer whose parameters have gradients first."
                )
            self._advance(found[0] if len(found) == 1 else _largest_flag(found))
        self._per_optimizer_states = defaultdict(new_scaler_state)
        self._start_iteration()

    def set_growth_factor(self, new_factor: float) -> None:
        """As torch's; a scaler with a `policy` refuses it."""
        self._refuse_setting("growth_factor")
        super().set_growth_factor(new_factor)
        self._given_numbers["growth_factor"] = new_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """As torch's; a scaler with a `policy` refuses it."""
        self._refuse_setting("backoff_factor")
        super().set_backoff_factor(new_factor)
        self._given_numbers["backoff_factor"] = new_factor

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's; a scaler with a `policy` refuses it."""
        self._refuse_setting("growth_interval")
        super().set_growth_interval(new_interval)
        self._given_numbers["growth_interval"] = new_interval

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with `policy` or `clip`, what they keep is there besides."""
        saved: dict[str, Any] = super().state_dict()
        scale = None
        if self._policy is not None and self._enabled:
            state = self._scale_state
            if state is None:
                state = self._policy.start(torch.device("cpu"))
            scale = save_scale(self._policy, state)
        clip = self._engines.saved_clip() if self._clips else None
        if scale is not None or clip is not None:
            saved[KEY] = {"scale": scale, "clip": clip}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], *, policies: str = "checkpoint") -> None:
        """Goes on from a `state_dict` of this class, of torch's, or of another system's scaler.

        One that does not fit raises BadState and changes nothing. A scale outside bounds that are
        not the checkpoint's own is taken to the nearest of them, and the log tells.

        Args:
            state_dict: also of the scalers of Megatron-LM, DeepSpeed, fairseq and apex.
            policies: "checkpoint" takes the settings of `policy` and `clip` from there too, as
                torch's scaler does with its own, and tells the log of those that differ from this
                scaler's; "scaler" keeps those that this scaler was made with, and takes from there
                what fits them: the scale, and what a policy of the same class has learned.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}.")
        if policies not in ("checkpoint", "scaler"):
            raise ValueError(f"policies must be 'checkpoint' or 'scaler', got {policies!r}.")
        given = state_dict
        if policies == "scaler" and state_dict:
            state_dict = self._fitted(state_dict)
        else:
            numbers = {name: self._torchs_number(name) for name in TORCHS}
            has_policy = self._policy is not None
            state_dict = dict(
                from_controls(state_dict, numbers=numbers, scale=has_policy, clip=self._clips)
            )
        had = self._settings()
        ours = checked_policies(state_dict, scale=self._policy is not None, clip=self._clips)
        clip = None
        if self._clips:
            clip = self._engines.clip, list[dict[str, Any]]()
            if ours["clip"] is not None:
                clip = self._engines.checked_clip(ours["clip"], self._model)
        policy, fresh, lost = None, None, dict[str, Any]()
        if self._enabled and len(state_dict):
            foreign = None if KEY in state_dict else recognize(state_dict, self._growth_rule())
            if foreign is not None:
                state_dict = self._as_torchs(foreign)
                lost = self._without_place(foreign)
            if self._policy is not None and has_torchs_numbers(state_dict):
                policy = policy_from(state_dict, self._policy, ours["scale"], foreign)
            delay = 0 if policy is None else policy.delay
            check_state(state_dict, delay=delay)
            lowest, highest = bounds_in_float32(self._min_scale, self._max_scale)
            scale = min(max(float(state_dict["scale"]), lowest), highest)
            state_dict = {**state_dict, "scale": scale}
            if policy is not None:
                fresh = state_from(state_dict, policy, ours["scale"], foreign)
                state_dict["scale"] = fetch(fresh.scale)[0]  # Within the policy's bounds.
        super().load_state_dict(state_dict)
        if policy is not None and fresh is not None:
            self._policy = self._engines.scale = policy
            if self._scale_state is None:
                self._scale_state = fresh
            else:
                refill(self._scale_state, fresh)
        if clip is not None:
            self._engines.go_on_with(*clip)
        if has_other_ranks() and my_rank() != 0:
            return
        if policies == "checkpoint":
            tell_replaced(had, self._settings(), "GradScaler", "scaler", lost)
            if not self._clips:
                tell_unclipped(given)
        else:
            tell_dropped(given, self._engines.clip if self._clips else None, "GradScaler")
        if self._enabled and state_dict:
            whose = "" if self._policy is None else f"{self._policy.policy_name} of "
            saved, bounds = scale_in(given, self._growth_rule()), self._bounds(self._policy)
            tell_bounded(saved, self.get_scale(), bounds, whose=f"{whose}this GradScaler")

    def _bounds(self, policy: ScalePolicy | None) -> tuple[float, float]:
        """The smallest and the largest scale under a policy, or under torch's rule."""
        return (self._min_scale, self._max_scale) if policy is None else policy.bounds()

    def _settings(self) -> tuple[Any, Any]:
        """The rule of the scale and the clip policy, to be compared."""
        return self._policy or TorchsRule(*map(self._torchs_number, TORCHS)), self._engines.clip

    def _torchs_number(self, name: str) -> Any:
        return getattr(self, f"_{name}", None)  # A disabled scaler has none of them.

    def _fitted(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state_dict that was saved with other settings, made to fit those of this scaler."""
        policy, clip = self._given_policies[0], self._given_policies[1] if self._clips else None
        if not self._enabled:
            ours = state_dict.get(KEY)
            saved = ours.get("clip") if isinstance(ours, Mapping) else None
            return {} if clip is None else {KEY: {"scale": None, "clip": fitted_clip(saved, clip)}}
        foreign = None if KEY in state_dict else recognize(state_dict, self._growth_rule())
        if foreign is not None:
            state_dict = self._as_torchs(foreign)
        numbers = dict(self._given_numbers)
        return fitted_state(
            state_dict,
            policy,
            clip,
            start=numbers.pop("init_scale"),
            numbers=numbers,
            bounds=self._bounds(policy),
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._process_group is not None:
            raise TypeError(
                "a GradScaler with a process_group cannot be pickled: the group belongs to this "
                "process, and without it the ranks would stop agreeing. Save state_dict() instead."
            )
        state: dict[str, Any] = super().__getstate__()
        state.update(_model=None, _outcome=None, _now=None, _events=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._now, self._events = _SinceUpdate(UnscaledGuard()), StepEvents(EVENTS)

    def __copy__(self) -> GradScaler:
        """Shares the model and the process group; steps of its own from here on."""
        made = type(self).__new__(type(self))
        made.__dict__.update(super().__getstate__())
        made._outcome, made._events = None, StepEvents(EVENTS)
        made._now = _SinceUpdate(UnscaledGuard())
        made._scale_state = copy.deepcopy(made._scale_state)
        made._engines = self._engines.copied(self._model, {})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        made = self.__copy__()
        made._model = _copied(self._model, memo)
        made._engines = self._engines.copied(made._model, memo)
        shared = {"_model", "_process_group", "_now", "_engines"}
        for name, value in made.__dict__.items():
            if name not in shared:
                made.__dict__[name] = copy.deepcopy(value, memo)
        return made

    # What torch's own methods call.

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._policy is None:
            super()._lazy_init_scale_growth_tracker(dev)
            return
        state = self._scale_state
        if state is None:
            state = self._policy.start(dev)
        else:  # From a checkpoint, or a pickle.
            state = ScaleState(
                scale=moved(state.scale, dev),
                growth_tracker=moved(state.growth_tracker, dev),
                hysteresis=moved(state.hysteresis, dev),
                more={name: moved(tensor, dev) for name, tensor in state.more.items()},
            )
        self._scale_state = state
        self._scale, self._growth_tracker = state.scale, state.growth_tracker

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiplies the gradients by `inv_scale` while looking at them; a flag a device."""
        only_looking = inv_scale is self._now.only_looking
        factor = None if only_looking else inv_scale
        return self._looked_at(optimizer, factor, found_inf.device, allow_fp16=allow_fp16)

    def _check_inf_per_device(self, optimizer: Any) -> dict[str, Any]:
        """Looks at the gradients and leaves them as they are; a flag a device."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        flags: Any
        if self._overrides("_unscale_grads_"):  # It is asked here too, as torch asks it.
            self._now.only_looking = torch.ones_like(scale)
            flags = self._unscale_grads_(
                optimizer, self._now.only_looking, torch.zeros_like(scale), True
            )
        else:
            flags = self._looked_at(optimizer, None, scale.device, allow_fp16=True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags  # type: ignore[no-any-return]

    # How gradients are looked at, unscaled and stepped on.

    def _start_iteration(self) -> None:
        if self._now.steps and self._clips:
            self._engines.warn_of_misfits()
        guard = self._now.guard
        guard.start_iteration()
        self._now = _SinceUpdate(guard)

    def _widened(self, outputs: Any) -> Any:
        """fp16 as float32; a policy that asks takes note of each loss as it comes by."""
        if isinstance(outputs, Tensor):
            if self._policy is not None and self._policy.needs_largest:
                broken = torch.logical_not(torch.isfinite(outputs.detach()).all())
                broken = broken.to(torch.float32)
                self._now.loss_nonfinite = _larger(self._now.loss_nonfinite, broken)
            return outputs.float() if outputs.dtype is torch.float16 else outputs
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self._widened(each) for each in outputs)
        if isinstance(outputs, Iterable):
            return (self._widened(each) for each in outputs)
        return outputs

    def _gradients(self, optimizer: Any, engine: Engine, *, allow_fp16: bool) -> Gradients:
        """The gradients of an optimizer's parameters; refuses what torch's scaler refuses."""
        lists = lists_of([optimizer])
        try:
            gradients = engine.table.find(lists, name=engine.names)
        except (AttributeError, TypeError):
            _refuse_foreign(lists)
            raise
        if not (isinstance(gradients, TableGradients) and gradients.walker is not None):
            _refuse_foreign(lists)  # Else they are those of a step before.
        if not allow_fp16 and torch.float16 in gradients.dtypes:
            for param, tensor in zip(gradients.params, gradients.tensors, strict=True):
                if tensor.dtype is torch.float16:
                    way_out = (
                        "use an optimizer with fused=True and let scaler.step() unscale inside it."
                        f"{why_not_inside(optimizer)}"
                    )
                    if takes_decision(optimizer):
                        way_out = (
                            "leave out scaler.unscale_(optimizer): scaler.step(optimizer) has this "
                            f"{type(optimizer).__name__} unscale in float32, and with "
                            "GradScaler(clip=...) clip, inside its own step."
                        )
                    raise ValueError(
                        f"Attempting to unscale FP16 gradients. {engine.names(param)} is float16: "
                        "keep the parameters in float32 and run the forward pass under "
                        f"torch.autocast, or {way_out}"
                    )
        return gradients

    def _looked_at(
        self, optimizer: Any, inv_scale: Tensor | None, home: torch.device, *, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients if `inv_scale` is given, and looks at them; a flag a device.

        Args:
            optimizer: whose gradients.
            inv_scale: what they are multiplied by; None to look and leave them as they are.
            home: the device of the scale.
            allow_fp16: whether float16 gradients are taken.
        """
        known = self._engines.known.get(id(optimizer))
        engine = self._engines.of(optimizer) if known is None else known[1]
        company = self._process_group is not None or has_other_ranks()
        if company:
            kernels.agree_with_ranks()
        with torch.no_grad():
            gradients = self._gradients(optimizer, engine, allow_fp16=allow_fp16)
            if inv_scale is not None:
                self._now.guard.refuse_twice(gradients.params, engine.names)
            rank_groups: Sequence[RankGroup] = ()
            if company:
                params = list(every_parameter([optimizer]))
                rank_groups = rank_groups_of(params, group=self._process_group)
            before = self._now.steps.get(id(optimizer))
            measured = None if before is None else before.measured
            if self._events.own and measured is None:
                measured = self._measured(optimizer, gradients, home)
            peak = None
            if self._policy is not None and self._policy.needs_largest:
                found = measure_all(gradients, home=home, order=2.0, detail=True).tensors
                assert found.largest is not None
                peak = found.largest.amax() if gradients.tensors else found.norms.new_zeros(())
            seen = look(gradients, inv_scale)
            flags = seen.flags
            if inv_scale is None and self._scale is not None:  # Before the ranks agree on it.
                _refuse_overflow(flags, gradients.tensors, self._scale)
            if rank_groups or peak is not None:
                self._agree(flags, home, peak, rank_groups)
            if inv_scale is not None:
                self._now.guard.mark(gradients.params)
            self._now.steps[id(optimizer)] = _OptimizerStep(
                optimizer,
                gradients.params,
                gradients.dtypes,
                gradients.device,
                engine=engine,
                seen=seen,
                measured=measured,
            )
            gradients.release()
        return flags

    def _agree(
        self,
        flags: dict[torch.device, Tensor],
        home: torch.device,
        peak: Tensor | None,
        rank_groups: Sequence[RankGroup],
    ) -> None:
        """Brings flags, and what the scale policy asks for, together where ranks hold parts.

        Args:
            flags: this rank's, a device; all are set if a rank of the rank_groups has one set.
            home: where a rank without gradients says that it has none set.
            peak: the largest magnitude, if the policy asks for it.
            rank_groups: the ranks that hold gradients together with this one.
        """
        if peak is not None:
            self._now.peak = _larger(self._now.peak, peak)
        if not rank_groups:
            return
        if not flags:
            flags[home] = torch.zeros((), dtype=torch.float32, device=home)
        mine = _any_flag(list(flags.values()))
        numbers = [mine]
        if peak is not None:
            nothing = torch.zeros_like(mine)
            broken = self._now.loss_nonfinite
            numbers += [nothing if self._now.peak is None else self._now.peak]
            numbers += [nothing if broken is None else broken]
        kind = wide(mine.device)
        stacked = torch.stack([moved(each, mine.device).to(kind) for each in numbers])
        told = largest_of_all(stacked, rank_groups)
        for device in flags:
            flags[device] = moved(told[0].float(), device)
        if peak is not None:
            self._now.peak = told[1]
            if any(map(covers_world, rank_groups)):  # A loss is a rank's own.
                self._now.loss_nonfinite_anywhere = told[2]

    def _step_by_engine(
        self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> float | None:
        """With `policy=` or `clip=`: one read, one decision, and the step or none."""
        engine = self._engines.of(optimizer)
        ranks = self._ranks_of(optimizer, engine)  # Refuses before anything is unscaled.
        takes_all = takes_scaler(optimizer)
        inside = takes_decision(optimizer) and not takes_all
        # Who has overridden how gradients are looked at is asked, as by torch's own step, which of
        # an optimizer that unscales by itself does not call `unscale_`.
        looks = ("_unscale_grads_", "_check_inf_per_device", *(() if inside else ("unscale_",)))
        if (takes_all or self._overrides(*looks)) and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        with torch.no_grad():
            gradients = self._gradients(optimizer, engine, allow_fp16=unscaled or inside)
        if not unscaled:
            self._now.guard.refuse_twice(gradients.params, engine.names)
        elif gradients.tensors and not state["found_inf_per_device"]:
            raise AssertionError(
                "No inf checks were recorded for this optimizer. Its gradients came after "
                "unscale_() and still carry the scale: call backward() before unscale_()."
            )
        if not gradients.tensors and not any_distributed(every_parameter([optimizer])):
            if not inside and not state["found_inf_per_device"]:
                raise AssertionError(_NO_GRADIENTS)
            returned: float | None = optimizer.step(*args, **kwargs)
            return returned
        verdict = self._decided(optimizer, engine, gradients, state, ranks, unscaled=unscaled)

        def multiplied() -> None:
            # A step that raises may be tried again: the gradients are true by now.
            state["stage"] = OptState.UNSCALED
            if not unscaled:
                self._now.guard.mark(gradients.params)

        def step() -> float | None:
            if takes_all:
                return self._step_with_scaler(optimizer, args, kwargs)
            if not inside and self._overrides("_maybe_opt_step"):
                skip = verdict.decision.skip
                told = {**state, "found_inf_per_device": {skip.device: skip}}
                return self._maybe_opt_step(optimizer, told, *args, **kwargs)
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]

        kept = own_write_begins(gradients.params)
        returned = update(
            optimizer,
            verdict.decision,
            gradients.tensors,
            device=gradients.device,
            inside=inside,
            dtypes=gradients.dtypes,
            multiplied=multiplied,
            step=step,
            consume=True,
        )
        own_write_ended(kept)
        if not unscaled:
            self._now.guard.mark(gradients.params)
        gradients.release()
        engine.conclude(verdict, moves=False)
        return returned

    def _decided(
        self,
        optimizer: Any,
        engine: Engine,
        gradients: Gradients,
        state: dict[str, Any],
        ranks: dict[str, Any],
        *,
        unscaled: bool,
    ) -> Verdict:
        """The engine's verdict on these gradients, taken down for `outcome` and `update`."""
        engine.follow(self._state())
        seen = self._now.steps[id(optimizer)].seen
        with torch.no_grad():
            flag = None
            if unscaled:  # What `unscale_` found, perhaps on another rank, counts as well.
                flag = _any_flag(list(state["found_inf_per_device"].values()))
            verdict = engine.decide(
                gradients, unscaled=unscaled, overflow=flag, moves=False, **ranks
            )
            decision = verdict.decision
            if unscaled and seen is not None and len(seen.places) == len(gradients.params):
                # Who it was, before somebody has perhaps written over it.
                verdict.outcome.count_by(lambda: seen.counts(decision.skip.device))
            elif not unscaled:
                overflow = decision.skip if decision.overflow is None else decision.overflow
                flags = {overflow.device: overflow}
                state["found_inf_per_device"] = flags
                if engine.scale_policy.needs_largest:
                    groups = ranks.get("rank_groups", ())
                    self._agree(flags, overflow.device, peak_of(verdict.record), groups)
        self._now.steps[id(optimizer)] = _OptimizerStep(optimizer, verdict=verdict)
        self._outcome = verdict.outcome
        return verdict

    def _ranks_of(self, optimizer: Any, engine: Engine) -> dict[str, Any]:
        """Over which ranks the engine is to measure: as `clip_grad_norm_`, each tensor over its own
        mesh, and no others; a plain one is this rank's. Refuses the plain shards of FSDP1."""
        if not has_other_ranks():
            return {}
        params = list(every_parameter([optimizer]))
        if self._clips:
            refuse_fsdp1_shards(params, name=engine.names, way_out=_FLATTENED)
        return {"rank_groups": rank_groups_of(params)}

    def _step_with_scaler(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> float | None:
        """For an optimizer with the older contract, whose step takes the scaler itself."""
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
            "directly.",
            FutureWarning,
            stacklevel=users_line(),
        )
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})  # type: ignore[no-any-return]

    def _step_fused(
        self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> float | None:
        """For an optimizer that unscales and skips inside its own pass."""
        scale, _ = self._check_scale_growth_tracker("step")
        unscaled = state["stage"] is OptState.UNSCALED
        if not unscaled:
            if self._now.guard.has_marked:
                params = [param for group in optimizer.param_groups for param in group["params"]]
                self._now.guard.refuse_twice(params, self._engines.of(optimizer).names)
            self._check_inf_per_device(optimizer)
        flags = list(state["found_inf_per_device"].values())
        if not flags and any(param.grad is not None for param in every_parameter([optimizer])):
            raise AssertionError(
                "No inf checks were recorded for this optimizer. Its gradients came after "
                "unscale_() and still carry the scale: call backward() before unscale_()."
            )
        if flags:
            own = own_step(optimizer)
            known_reader = own is not None and own.is_proven
            found_inf = self._skip_flag(optimizer, flags, known_reader=known_reader)
            found_inf = moved(found_inf, scale.device)
            self._tell(optimizer, found_inf)
        else:
            found_inf = torch.zeros_like(scale)
        if isinstance(optimizer, torch.optim.SGD) or KINDS.get(type(optimizer)) is not None:
            multiplier = torch.ones_like(scale) if unscaled else torch.reciprocal(scale)
            if must_skip_on_host(optimizer, found_inf, multiplier):
                return None
        known, step = self._now.steps[id(optimizer)], optimizer.step
        if known.dtypes is None or not HALF.isdisjoint(known.dtypes):
            step = moving(optimizer, step, known.device)
        with handing_over(
            optimizer,
            grad_scale=None if unscaled else scale,
            found_inf=found_inf,
            consume=True,
            on_host=any(device.type == "cpu" for device in state["found_inf_per_device"]),
        ):
            returned: float | None = step(*args, **kwargs)
        if not unscaled:
            self._now.guard.mark(self._now.steps[id(optimizer)].params)
        return returned

    def _skip_flag(self, optimizer: Any, flags: Sequence[Tensor], *, known_reader: bool) -> Tensor:
        """Exactly 1 if a flag is set, exactly 0 if none is.

        Args:
            optimizer: whose flags these are.
            flags: one for each device.
            known_reader: whether who gets it is known to write nothing to it: then a flag that we
                have found ourselves, which is 1 or 0 already, is handed over as it is, and `update`
                reads it again.
        """
        step = self._now.steps.get(id(optimizer))
        if known_reader and len(flags) == 1 and step is not None and step.seen is not None:
            (flag,) = flags
            if step.seen.flags.get(flag.device) is flag:
                return flag
        return _any_flag(flags)

    def _step_disabled(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> float | None:
        """Without scale and check, as torch has it; a clip policy is obeyed."""
        self._outcome = ScalerOutcome.of_nothing()
        if not self._clips:
            return moving(optimizer, optimizer.step)(*args, **kwargs)  # type: ignore[no-any-return]
        if args or "closure" in kwargs:
            raise RuntimeError(
                "clip= cannot reach gradients that a closure makes inside optimizer.step(). "
                "gradilocks.GradientControl(scale=None, clip=...).step(closure) can."
            )
        self._now.steps[id(optimizer)] = _OptimizerStep(optimizer)
        engine = self._engines.of(optimizer)
        ranks = self._ranks_of(optimizer, engine)
        gradients = self._gradients(optimizer, engine, allow_fp16=True)
        params = list(every_parameter([optimizer]))
        # A rank without gradients takes part where others hold parts of the same tensors.
        if not gradients.tensors and not any_distributed(params):
            return optimizer.step(**kwargs)  # type: ignore[no-any-return]
        engine.move_to((gradients.tensors or params)[0].device)
        kept = own_write_begins(gradients.params)
        with torch.no_grad():
            verdict = engine.decide(gradients, unscaled=True, moves=False, **ranks)
            decision = verdict.decision
            apply_in_place(decision, gradients.tensors)
        own_write_ended(kept)
        gradients.release()
        returned: float | None = None
        # NaN and Inf skip nothing here, unless the policy may reject gradients.
        row = verdict.record.row.clone()
        if decision.overflow is None:
            row[ROW.index("skip")] = 0.0
        record = StepRecord(row, decision.skip, verdict.record.found)
        self._outcome = Outcome(record, engine.namer(gradients.params), step=engine.next_step)
        told = verdict._replace(record=record, outcome=self._outcome)
        self._now.steps[id(optimizer)] = _OptimizerStep(optimizer, verdict=told)
        step, maybe = optimizer.step, self._maybe_opt_step
        if not HALF.isdisjoint(gradients.dtypes):
            step, maybe = moving(optimizer, step), moving(optimizer, maybe)
        if decision.overflow is None:
            returned = step(**kwargs)
        elif not takes_decision(optimizer):
            asked = {"found_inf_per_device": {decision.skip.device: decision.skip}}
            returned = maybe(optimizer, asked, **kwargs)
        elif not must_skip_on_host(optimizer, decision.skip, torch.ones_like(decision.skip)):
            host = gradients.device is None or gradients.device.type == "cpu"
            skip = decision.skip
            with handing_over(
                optimizer, grad_scale=None, found_inf=skip, consume=True, on_host=host
            ):
                returned = step(**kwargs)
        engine.conclude(verdict, moves=False)
        return returned

    # What is recorded.

    def _begin_record(self, record: object, config: Mapping[str, Any] | None) -> None:
        """Writes down what comes, as a GradientControl does; one journal for all optimizers."""
        told = ", ".join(f"{name}={getattr(self, f'_{name}', '')}" for name in _DEFAULTS)
        scale = self._policy or (f"GradScaler({told})" if self._enabled else NoScale())
        engines = self._engines
        recorder = recorder_for(record, config=config, scale=scale, clip=engines.clip)
        self._events.add(Journal(recorder, names_of=lambda each: engines.of(each).names))

    def _count_losses(self, outputs: Any) -> None:
        """Tells the journal of losses that are about to be run backward.

        They are those of the next step, together with those before them since the last, unless the
        gradients of these are gone: they have run backward, and no parameter has one.
        """
        journal, now = journal_of(self._events), self._now
        if journal is None:
            return
        dropped = 0 < now.losses <= now.ran_backward and self._has_no_gradients()
        first = now.losses == 0 or dropped
        for loss in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
            now.losses += 1
            if isinstance(loss, Tensor):
                journal.loss_counted(self, loss, first=first)
                if loss.grad_fn is not None:
                    loss.register_hook(now.note_backward())  # type: ignore[no-untyped-call]
            else:  # Something that can be gone through once, as a generator.
                journal.loss = None
            first = False

    def _has_no_gradients(self) -> bool:
        """Whether no optimizer that was met has a gradient; False if none was met."""
        met = [o for ref, _ in list(self._engines.known.values()) if (o := ref()) is not None]
        return len(met) > 0 and all(param.grad is None for param in every_parameter(met))

    def _tell_what_is_held(self, told: Step) -> None:
        """What a journal wants to know of a step before it begins."""
        params = list(told.parameters())
        told.order = self._engines.clip.order if self._clips else 2.0
        told.of_rank = has_other_ranks() and (
            self._process_group is not None
            or any_distributed(params)
            or len(flattened_among(params)) > 0
        )

    def _measured(self, optimizer: Any, gradients: Gradients, home: torch.device) -> Measurement:
        """The gradients as they stand, in as much detail as is to be recorded."""
        journal = journal_of(self._events)
        detail = journal is not None and journal.wants_detail(optimizer)
        return measure_all(gradients, home=home, order=2.0, detail=detail)

    @torch.no_grad()
    def _measure_now(self, told: Step) -> Tensor | None:
        """At the beginning of a step: measures what the step will not.

        Returns:
            Of gradients that were unscaled before: whether they have been made smaller since, as
            by a clip function; None if that is not known.
        """
        (optimizer,) = told.optimizers
        engine = self._engines.of(optimizer)
        engine.detail = told.detail
        known = self._now.steps.get(id(optimizer))
        before = None if known is None else known.measured
        # A clip policy measures by itself. So does a look at the gradients, which is to come, but
        # for those whose optimizer looks by itself, or which a disabled scaler never looks at.
        looks = self._enabled and not (told.unscaled or takes_scaler(optimizer))
        if self._clips or looks or (self._enabled and told.unscaled and before is None):
            return None
        assert isinstance(told.scale, Tensor)
        gradients = self._gradients(optimizer, engine, allow_fp16=True)
        now = self._measured(optimizer, gradients, told.scale.device)
        params = gradients.params
        gradients.release()
        if before is None:
            known = known or _OptimizerStep(optimizer)
            made = known._replace(params=params, engine=engine, measured=now)
            self._now.steps[id(optimizer)] = made
            return None
        # Rounding, too, makes a norm smaller: by less than this.
        return (now.norm < before.norm / told.scale * (1.0 - 1e-5)).to(torch.float32)

    @torch.no_grad()
    def _note_record(self, told: Step, journal: Journal, clipped: Tensor | None) -> None:
        """Makes of a step what a GradientControl makes of its own, for journal and `outcome`."""
        (optimizer,) = told.optimizers
        known = self._now.steps[id(optimizer)]
        engine = self._engines.of(optimizer)
        engine.detail = False
        if known.verdict is not None:
            told.record = known.verdict.record
            return
        assert isinstance(told.scale, Tensor)
        home = told.scale.device
        measured = known.measured
        if measured is None:  # Somebody who has overridden how gradients are looked at.
            unknown = measure((), home=home)
            measured = replace(unknown, norm=torch.full_like(unknown.norm, math.nan))
        found, loss, number = measured.tensors, journal.loss, journal.recorder.last_step(optimizer)
        loss_is_bad = False if loss is None else torch.logical_not(torch.isfinite(loss))
        carried = told.scale
        if told.unscaled:  # They were measured before that.
            largest = None if found.largest is None else found.largest / carried
            found = replace(found, norms=found.norms / carried, largest=largest)
        numbers = {
            "skip": told.skip,
            "scale": told.scale,
            "norm": measured.norm / carried,
            "limit": math.inf,
            "clipped": 0.0 if clipped is None else clipped,
            "step": number + 1,
            "loss_nonfinite": loss_is_bad,
            "nan": found.nan.sum(),
            "inf": found.inf.sum(),
        }
        row = torch.stack([_wide(numbers[name], home) for name in ROW])
        told.record = StepRecord(row, row[0].to(torch.float32), lambda: found)
        namer = engine.namer(known.params)
        self._outcome = Outcome(told.record, namer, step=number + 1)

    def _step_disabled_told(
        self, optimizer: Any, args: Any, kwargs: dict[str, Any]
    ) -> float | None:
        """A step without scale and check, of which the recorder is told and nobody else: whoever
        watches the process sees the optimizer's own."""
        journal = journal_of(self._events)
        first = next(every_parameter([optimizer]), None)
        if journal is None or first is None:
            return self._step_disabled(optimizer, args, kwargs)
        one = torch.ones((), dtype=torch.float32, device=first.device)
        told = Step(self, (optimizer,), scale=one, unscaled=True, apart=True)
        self._tell_what_is_held(told)
        self._now.steps.pop(id(optimizer), None)
        journal.step_begins(told)
        closure: Any = args[0] if args else kwargs.get("closure")

        def evaluated() -> Any:
            """What the last evaluation leaves is told, as a GradientControl has it."""
            loss = closure()
            self._now.steps.pop(id(optimizer), None)
            self._measure_now(told)
            return loss

        if callable(closure) and not self._clips:
            args = (evaluated, *args[1:]) if args else args
            kwargs = kwargs if args else {**kwargs, "closure": evaluated}
        else:
            self._measure_now(told)
        try:
            returned = self._step_disabled(optimizer, args, kwargs)
        except BaseException:
            journal.step_failed(told)
            raise
        self._now.steps.setdefault(id(optimizer), _OptimizerStep(optimizer))
        self._note_record(told, journal, None)
        journal.step_ended(told)
        return returned

    def _overrides(self, *names: str) -> bool:
        """Whether somebody has put something of his own in the place of one of these methods: in a
        subclass, on this object, as trainers of fp16 models do, or in our own class."""
        kind, own = type(self), self.__dict__
        for name in names:  # noqa: SIM110 (`any` over a generator takes three times as long)
            if getattr(kind, name) is not _OWN[name] or name in own:
                return True
        return False

    def _tell(self, optimizer: Any, skip: Tensor) -> None:
        """Keeps what this step found, for `outcome`; everything stays on the device."""
        known = self._now.steps.get(id(optimizer))
        scale = self._scale
        if known is not None and known.seen is not None and scale is not None:
            params = known.params
            if len(known.seen.counted) > 1:
                params = [params[place] for place in known.seen.places]
            assert known.engine is not None
            # Made when somebody reads it. A number on the host is a tenth of a copy of its tensor.
            self._outcome = partial(
                _outcome_of,
                skip,
                float(scale) if scale.is_cpu else scale.clone(),
                tuple(known.seen.counted),
                known.engine.namer(params),
            )

    # The scale and its rule.

    def _state(self) -> ScaleState:
        """The moving part of the scale; torch's own methods move and replace two of its tensors."""
        scale, tracker = self._scale, self._growth_tracker
        assert scale is not None
        assert tracker is not None
        state = self._scale_state
        if state is None or state.scale is not scale or state.growth_tracker is not tracker:
            hysteresis = torch.ones_like(tracker)  # Of 1: any skip backs off.
            more = {}
            if state is not None and self._policy is not None:
                hysteresis, more = state.hysteresis, state.more
            state = self._scale_state = ScaleState(scale, tracker, hysteresis, more)
        return state

    def _advance(self, flag: Tensor) -> None:
        """Moves the scale on, unless a clip has rejected a step: nothing overflowed."""
        decisions = [
            each.verdict.decision for each in self._now.steps.values() if each.verdict is not None
        ]
        flags = [each.skip - each.overflow for each in decisions if each.overflow is not None]
        rejected = None
        if flags:  # One that overflowed, beside it, does count.
            rejected = _largest_flag(flags)
            rejected = rejected * (1.0 - moved(flag, rejected.device))
        state = self._state()
        if self._policy is None and rejected is None:
            advance_dynamic(state, flag, self._torchs_rules())
            return
        with held_if(rejected, state):
            if self._policy is None:
                advance_dynamic(state, flag, self._torchs_rules())
            elif not self._policy.needs_largest:
                self._policy.advance(state, flag)
            else:
                # A loss is a rank's own, and the ranks' scales must not part.
                company = has_other_ranks()
                loss = self._now.loss_nonfinite_anywhere if company else self._now.loss_nonfinite
                home = state.scale.device
                self._policy.advance(
                    state,
                    flag,
                    largest=None if self._now.peak is None else moved(self._now.peak, home),
                    loss_nonfinite=None if loss is None else moved(loss, home),
                )

    def _torchs_rules(self) -> ScaleRules:
        """How torch's scaler moves; its setters change the numbers in mid-run."""
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        numbers = *factors, self._min_scale, self._max_scale
        known, rules = self._latest_rules
        if rules is None or numbers != known:
            rules = ScaleRules(True, *numbers)
            self._latest_rules = numbers, rules
        return rules

    def _show_policys_numbers(self, policy: ScalePolicy) -> None:
        """Torch's own numbers, as far as the policy has them: they are shown and saved."""
        start = policy.start(torch.device("cpu"))
        self._init_scale = float(start.scale)
        self._init_growth_tracker = int(start.growth_tracker)
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, f"_{name}", getattr(policy.as_given, name, getattr(self, f"_{name}")))

    def _refuse_setting(self, name: str) -> None:
        if self._policy is not None:
            raise RuntimeError(
                f"the scale is ruled by policy={self._policy!r}, which does not change. "
                f"Make a scaler with another policy, set its {name} there, and load the state_dict."
            )

    def _growth_rule(self) -> Any:
        """How the scale grows, as `recognize` asks for it."""
        if self._policy is not None:
            return self._policy.as_given
        return SimpleNamespace(growth_interval=self._growth_interval, delay=0)

    def _without_place(self, foreign: OtherScaler) -> dict[str, Any]:
        """Settings of another system's rule that matter and that torch's rule does not have."""
        if self._policy is not None:
            return {}
        plain = {"hysteresis": 1, "consecutive_hysteresis": False, "min_scale": self._min_scale}
        return {
            name: foreign.settings[name]
            for name, without in plain.items()
            if foreign.settings.get(name, without) != without
        }

    def _as_torchs(self, foreign: OtherScaler) -> dict[str, Any]:
        """What torch's scaler would have saved in the place of another system's."""
        return {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            **foreign.settings,
            "scale": check_scale(foreign.scale),
            "_growth_tracker": foreign.growth_tracker,
        }


_OWN = {
    name: getattr(GradScaler, name)
    for name in ("unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step")
}
"""The methods that others replace, as they are here."""


def _scale_policy(given: object) -> ScalePolicy | None:
    """The policy meant by `policy=`; None for torch's own rule."""
    policy = None if given is None else resolve_scale(given, name="policy")
    if isinstance(policy, NoScale):
        raise TypeError(
            "policy must be a scale policy such as HeadroomScale(), got NoScale(). A GradScaler "
            "scales; use enabled=False, or GradientControl(scale=None)."
        )
    return policy


def _outcome_of(
    skip: Tensor,
    scale: Tensor | float,
    counts: Sequence[Callable[[], NonFinite]],
    names: Callable[[], Sequence[tuple[int, str]]],
) -> ScalerOutcome:
    """What a step without an engine found; it keeps neither gradients nor parameters alive."""
    if not isinstance(scale, Tensor):
        scale = torch.scalar_tensor(scale, dtype=torch.float32, device="cpu")
    home = scale.device
    return ScalerOutcome(
        skip=moved(skip, home),
        scale=scale,
        counted=lambda: joined_counts(counts, home),
        names=names,
    )


def _inverse(scale: Tensor) -> Tensor:
    """What gradients are multiplied by, worked out in float64 as torch's scaler does.

    Of a scale on the CPU by Python, in the same IEEE division: 4 us, and 9 in three operations.
    """
    if scale.is_cpu and (number := float(scale)):
        return torch.scalar_tensor(1.0 / number, dtype=torch.float32, device=scale.device)
    return scale.to(wide(scale.device)).reciprocal().to(torch.float32)


def _refuse_foreign(lists: Sequence[Sequence[Sequence[object]]]) -> None:
    """Raises if a parameter is no tensor, as torch does."""
    for group in itertools.chain.from_iterable(lists):
        for kind in set(map(type, group)):
            if not issubclass(kind, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {kind.__name__}")


def _largest_flag(flags: Sequence[Tensor]) -> Tensor:
    """Above 0 if any flag is set; with one flag, that one itself."""
    together = flags[0]
    for flag in flags[1:]:
        together = torch.maximum(together, moved(flag, together.device))
    return together


def _any_flag(flags: Sequence[Tensor]) -> Tensor:
    """Exactly 1 if any flag is set, exactly 0 if none is; a sum of flags would be neither."""
    largest = flags[0] if len(flags) == 1 else _largest_flag(flags)
    return (largest > 0).to(torch.float32)


def _wide(number: Tensor | float, home: torch.device) -> Tensor:
    """A number as a row of ROW has it."""
    if isinstance(number, Tensor):
        return moved(number.reshape(()), home).to(wide(home))
    return torch.full((), number, dtype=wide(home), device=home)


def _larger(before: Tensor | None, now: Tensor) -> Tensor:
    return now if before is None else torch.maximum(before, moved(now, before.device))


def _refuse_overflow(
    flags: dict[torch.device, Tensor], tensors: Iterable[Tensor], scale: Tensor
) -> None:
    """Sets the flag where finite gradients, divided by a scale below 1, are finite no longer.

    A fused optimizer divides where nobody looks. Looked at on the CPU alone, where it costs
    nothing to find out that the scale is not below 1.
    """
    cpu = torch.device("cpu")
    if not scale.is_cpu or cpu not in flags or float(scale) >= 1.0:
        return
    most = torch.finfo(torch.float32).max * scale.double()
    for tensor in tensors:
        over = tensor.device == cpu and tensor.numel() > 0 and tensor.dtype is not torch.float64
        if over and bool(tensor.abs().max().double() > most):
            flags[cpu] = torch.ones_like(flags[cpu])


def _copied(model: Any, memo: dict[int, Any]) -> Any:
    """The copy of the model if it was copied along, else the model itself."""
    if isinstance(model, Mapping):
        return {prefix: memo.get(id(module), module) for prefix, module in model.items()}
    return memo.get(id(model), model)
