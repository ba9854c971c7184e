"""Policies and what they have learned as plain numbers, strings, lists and dicts, and back.

Policies and their state go in and a checkpoint leaves, that of a GradientControl or the part of a
GradScaler's that torch's does not have. A checkpoint is checked whole before anything changes. A
control with a DynamicScale writes the five keys of torch's GradScaler beside its own, so either
loads what the other saved.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.clip import Chain, ClipPerGroup, ClipPolicy, resolve_clip
from gradilocks.errors import BadState, MissingKey
from gradilocks.names import OwnedParameters, Placed
from gradilocks.scale import (
    LARGEST,
    SMALLEST,
    DynamicScale,
    ScalePolicy,
    bounds_in_float32,
    in_float32,
    resolve_scale,
)
from gradilocks.state.optimizer_match import fits_signature
from gradilocks.state.other_scalers import recognize
from gradilocks.step.diagnose import Symptom
from gradilocks.step.outcome import fetch
from gradilocks.values import ScaleState, moved

__all__ = [
    "SCALERS",
    "VERSION",
    "Loaded",
    "check_scale",
    "describe",
    "fitted",
    "fitted_memory",
    "fitted_scale",
    "load",
    "load_memory",
    "load_scale",
    "parts_in",
    "rebuild",
    "refill",
    "save",
    "save_memory",
    "save_scale",
    "scale_in",
    "tell_bounded",
    "tell_dropped",
    "tell_replaced",
    "tell_unclipped",
    "with_settings",
]

_logger = logging.getLogger("gradilocks")
VERSION = 1
SCALERS = "gradilocks_scaler"
"""Where the state_dict of a GradScaler has what torch's does not; torch's passes it over."""
_TORCH_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_OUR_KEYS = ("version", "scale_policy", "clip_policy", "hysteresis", "steps", "streak")
_HOST = torch.device("cpu")
_FLOAT = "float"
"""In a checkpoint, says that the text after it is a number."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint that has been checked whole; its tensors lie on the host."""

    scale_policy: ScalePolicy
    clip_policy: ClipPolicy
    state: ScaleState
    memory: dict[str, Tensor] | None = None
    """What the clip policy remembers; None if nothing was saved of it."""
    of_all: tuple[list[Placed], dict[str, Tensor]] | None = None
    """What it remembers of each parameter of all ranks, and which they are; None if nothing was
    saved of it, or not whose it is."""
    known: Sequence[int] | None = None
    """The places of those of this rank's parameters that `memory` is about; None: all of them."""
    steps: int | None = None
    """How many steps had been judged; None if another scaler has saved it."""
    streak: int = 0
    symptoms: Sequence[Symptom] = ()
    """The last steps of the streak, oldest first, as far as they were saved."""


def save(
    scale_policy: ScalePolicy,
    clip_policy: ClipPolicy,
    state: ScaleState,
    *,
    memory: Mapping[str, Tensor] | None,
    parameters: Sequence[Placed] | None,
    steps: int,
    streak: int,
    symptoms: Sequence[Symptom] = (),
) -> dict[str, Any]:
    """The checkpoint of a GradientControl.

    Args:
        scale_policy, clip_policy, state: of the control.
        memory: what the clip policy remembers.
        parameters: those of which it remembers a number each, in order; None if that is not known.
        steps, streak: how many steps it has judged, and how many in a row were non-finite.
        symptoms: the last of the streak, oldest first.
    """
    named: dict[str, Any] = {}
    if clip_policy.by_parameter and parameters is not None:
        # Lists, no dicts: torch.distributed.checkpoint takes each for one value, whatever is in it.
        named = {"clip_parameters": [[name, place] for name, place in parameters]}
    settings = _TORCH_SETTINGS if isinstance(scale_policy, DynamicScale) else ()
    scale = save_scale(scale_policy, state)
    return {
        "scale": _plain(state.scale),
        "_growth_tracker": _plain(state.growth_tracker),
        **{name: getattr(scale_policy, name) for name in settings},
        "gradilocks": {
            "version": VERSION,
            "scale_policy": scale["policy"],
            "clip_policy": describe(clip_policy),
            "clip_state": save_memory(memory),
            **named,
            "hysteresis": scale["hysteresis"],
            "scale_state": scale["state"],
            "steps": steps,
            "streak": streak,
            "streak_steps": [[s.scale, s.nan, s.inf, s.loss_nonfinite] for s in symptoms],
        },
    }


def load(
    saved: Mapping[str, Any],
    scale_policy: ScalePolicy,
    clip_policy: ClipPolicy,
    *,
    owned: OwnedParameters,
    changed: bool = False,
) -> Loaded:
    """Checks `saved` against the present policies and says what to go on with.

    Args:
        saved: from `save`, from `GradScaler.state_dict()`, torch's or ours, or from the scalers of
            Megatron-LM, DeepSpeed, fairseq and apex.
        scale_policy: the policy in force; a checkpoint of another class does not fit.
        clip_policy: likewise.
        owned: the parameters of this rank.
        changed: whether parameters may have been added or taken away since: then what is known of
            the others is taken, else a checkpoint of other parameters does not fit.

    Returns:
        What was loaded. Raises BadState if anything does not fit.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(saved).__name__}.")
    if not saved:
        raise BadState(
            "the state_dict is empty, possibly because it was saved from a disabled GradScaler. "
            "Start without it."
        )
    if SCALERS in saved:
        return _load_from_scaler(saved, scale_policy, clip_policy)
    if "gradilocks" not in saved:
        policy, state = _load_from_others(saved, scale_policy)
        return Loaded(policy, clip_policy, state)
    ours = saved["gradilocks"]
    if not isinstance(ours, Mapping):
        raise BadState(f"state_dict['gradilocks'] must be a dict, got {type(ours).__name__}.")
    version = ours.get("version")
    if version != VERSION:
        raise BadState(
            f"the state_dict has version {version!r}; this Gradilocks reads version {VERSION}. "
            "Load it with the Gradilocks that saved it."
        )
    _require(ours, _OUR_KEYS, where="state_dict['gradilocks']")
    _require(saved, ("scale", "_growth_tracker"), where="state_dict")
    rebuilt = rebuild(scale_policy, ours["scale_policy"], "scale")
    clip = rebuild(clip_policy, ours["clip_policy"], "clip")
    memory, of_all, known = _load_named_memory(clip, ours, owned, changed=changed)
    kept = {"hysteresis": ours["hysteresis"], "state": ours.get("scale_state") or {}}
    return Loaded(
        scale_policy=rebuilt,
        clip_policy=clip,
        state=load_scale(rebuilt, saved, {"policy": ours["scale_policy"], **kept}),
        memory=memory,
        of_all=of_all,
        known=known,
        steps=_check_count("steps", ours["steps"]),
        streak=_check_count("streak", ours["streak"]),
        symptoms=_load_symptoms(ours.get("streak_steps", []), ours["streak"]),
    )


def _load_symptoms(saved: Any, streak: int) -> list[Symptom]:
    """The last steps of a streak of non-finite ones, or BadState; none were saved before 0.2."""
    if not isinstance(saved, (list, tuple)) or len(saved) > streak:
        raise BadState(
            f"streak_steps in the state_dict must be a list of at most {streak} steps, as many as "
            f"streak says, got {saved!r:.80}."
        )
    symptoms = []
    for each in saved:
        row = list(each) if isinstance(each, (list, tuple)) else []
        if len(row) != 4 or not (row[3] is None or isinstance(row[3], bool)):
            raise BadState(
                "a step of streak_steps in the state_dict must have a scale, how many NaN and Inf "
                f"there were, and whether the loss was one of them, got {each!r:.80}."
            )
        if not all(type(number) is int and number >= 0 for number in row[1:3]):
            raise BadState(f"streak_steps in the state_dict must count NaN and Inf, got {row!r}.")
        symptoms.append(Symptom(check_scale(row[0]), *row[1:]))
    return symptoms


def fitted(
    saved: Mapping[str, Any],
    scale_policy: ScalePolicy,
    clip_policy: ClipPolicy,
    *,
    steps: int = 0,
) -> dict[str, Any]:
    """A checkpoint that was saved with other policies or settings, made to fit these.

    The scale is taken as far as its bounds allow, and what a policy has learned if it is of the
    same class and fits its settings. Of another scaler's checkpoint the scale is left, and of a
    control that does not scale, nothing.

    Args:
        saved: from `save`, or from a `state_dict` of torch's GradScaler or another system's.
        scale_policy, clip_policy: to go on with.
        steps: how many there have been, if `saved` does not know.
    """
    fresh = scale_policy.start(_HOST)
    lowest, highest = scale_policy.bounds()
    saved = {key: value for key, value in saved.items() if key != SCALERS}
    ours = saved.get("gradilocks")
    if not isinstance(ours, Mapping):
        other = recognize(saved, scale_policy)
        if other is None:
            _require(saved, ("scale",), where="state_dict")
        saved = saved if other is None else other.as_torch_saves()
        nothing: dict[str, Any] = {"memory": None, "parameters": None, "streak": 0}
        made = save(scale_policy, clip_policy, fresh, steps=steps, **nothing)
        ours, saved = made["gradilocks"], {**made, **saved}
    scale = min(max(check_scale(saved["scale"]), lowest), highest) if "scale" in saved else None
    ours = dict(ours)
    memory = fitted_memory(clip_policy, ours.get("clip_policy"), ours.get("clip_state"))
    if memory is None:
        ours.pop("clip_parameters", None)
    ours["clip_state"], ours["clip_policy"] = memory, describe(clip_policy)
    before = ours.get("scale_policy")
    kept = {"hysteresis": ours.get("hysteresis"), "state": ours.get("scale_state") or {}}
    tracker, kept = fitted_scale(
        scale_policy, before, tracker=saved.get("_growth_tracker", 0), kept=kept
    )
    if _kind_of(before) == "NoScale" != scale_policy.policy_name:
        scale = None
    ours |= {"hysteresis": kept["hysteresis"], "scale_state": kept["state"]}
    ours["scale_policy"] = kept["policy"]
    parts = parts_in({"gradilocks": ours}).items()
    ours["parts"] = tuple((k, fitted(each, scale_policy, clip_policy)) for k, each in parts) or None
    return {
        **saved,
        "scale": _plain(fresh.scale) if scale is None else scale,
        "_growth_tracker": tracker,
        "gradilocks": ours,
    }


def parts_in(saved: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """What a control's checkpoint has of optimizers that were stepped alone, by their number."""
    ours = saved.get("gradilocks")
    pairs = (ours.get("parts") or ()) if isinstance(ours, Mapping) else ()
    try:
        parts = {operator.index(number): state for number, state in pairs}
    except (TypeError, ValueError) as error:
        raise BadState(f"parts in the state_dict do not fit: {pairs!r:.80}.") from error
    for state in parts.values():
        if not isinstance(state, Mapping) or not isinstance(state.get("gradilocks"), Mapping):
            raise BadState(f"parts in the state_dict do not fit: {pairs!r:.80}.")
        whose = state["gradilocks"].get("optimizer")
        if whose is not None and not (isinstance(whose, Mapping) and fits_signature(whose)):
            raise BadState(f"an optimizer in the state_dict does not fit: {whose!r:.80}.")
        _check_count("steps", state["gradilocks"].get("steps"))
    return parts


def fitted_scale(
    policy: ScalePolicy, before: Any, *, tracker: Any, kept: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The growth tracker, and what `save_scale` returns, with which `policy` goes on.

    Args:
        policy: to go on with.
        before: the policy that was saved, from `describe`.
        tracker: the growth tracker that was saved.
        kept: from `save_scale`.
    """
    fresh = policy.start(_HOST)
    mine, state = save_scale(policy, fresh), kept.get("state")
    if _kind_of(before) != policy.policy_name:
        return _plain(fresh.growth_tracker), mine
    if isinstance(tracker, int):
        tracker = max(tracker, -policy.delay)
    most, hysteresis = getattr(policy.as_given, "hysteresis", None), kept.get("hysteresis")
    if isinstance(most, int) and isinstance(hysteresis, int):
        hysteresis = min(most, hysteresis)
    state = state if isinstance(state, Mapping) else {}
    state = {name: state.get(name, start) for name, start in mine["state"].items()}
    lowest, highest = policy.bounds()
    started = _started_with(policy, before) if policy.kept_scales else {}
    for name in set(policy.kept_scales) & set(state):
        value = _check_number(name, state[name])
        # Where the policy of the checkpoint starts it, it is no lesson but a setting of that one:
        # a ceiling of HeadroomScale that was never hit is its max_scale.
        start = mine["state"][name] if value == started.get(name) else value
        state[name] = min(max(start, lowest), highest)
    return tracker, {**mine, "hysteresis": hysteresis, "state": state}


def _started_with(policy: ScalePolicy, before: Any) -> dict[str, Any]:
    """What a policy of the class of `policy`, with the settings of a checkpoint, starts from.

    Nothing if it cannot be made of them: then they are not needed either.
    """
    try:
        saved: ScalePolicy = rebuild(policy, before, "scale")
        state: ScaleState = _started(saved)
    except BadState:
        return {}
    return {name: _plain(tensor) for name, tensor in state.more.items()}


def fitted_memory(policy: ClipPolicy, before: Any, memory: Any) -> Any:
    """What of a clip policy's memory `policy` can go on with; None for nothing.

    Args:
        policy: to go on with.
        before: the policy that was saved, from `describe`.
        memory: what it had learned, from `save_memory`.
    """
    if memory is None or _kind_of(before) != _kind_of(describe(policy)):
        return None
    fresh = policy.start(_HOST, 0) or {}
    for name, tensor in fresh.items():
        learned = memory.get(name) if isinstance(memory, Mapping) else None
        other = isinstance(learned, list) and len(learned) != tensor.numel()
        if other and name not in policy.by_parameter:
            _logger.warning(
                "%s starts afresh: what it has learned, in the state_dict, is of other settings "
                "(%s has %d numbers there, and %d with those of now).",
                policy.policy_name,
                name,
                len(learned or ()),
                tensor.numel(),
            )
            return None
    return memory


def _kind_of(described: Any) -> Any:
    """The class of a policy from `describe`; of a chain, those of its parts in order."""
    if not isinstance(described, Mapping):
        return None
    name, config = described.get("name"), described.get("config")
    if name == "Chain" and isinstance(config, Mapping):
        parts = config.get("policies")
        return (name, *map(_kind_of, parts if isinstance(parts, (list, tuple)) else ()))
    return name


def tell_replaced(
    before: Sequence[Any],
    after: Sequence[Any],
    owner: str,
    word: str,
    lost: Mapping[str, Any] | None = None,
) -> None:
    """Says, in the log, which settings of the policies a checkpoint has replaced.

    Args:
        before: the policies that the owner had.
        after: those that it has now, of the same classes.
        owner: the class of what has loaded the checkpoint.
        word: what it calls itself where one says whose settings count.
        lost: settings of the checkpoint that it has no place for without a DynamicScale.
    """
    pairs = zip(before, after, strict=True)
    settings = [text for one, other in pairs for text in _replaced(one, other)]
    told: list[str] = []
    if settings:
        told += [
            f"load_state_dict() has replaced settings of this {owner} by those of the checkpoint: "
            f'{", ".join(settings)}. policies="{word}" keeps its own.'
        ]
    if lost:
        values = ", ".join(f"{name}={value!r}" for name, value in lost.items())
        told += [
            f"The rule of the checkpoint has {values} too, which this {owner} does not keep; "
            f"one with policy=DynamicScale() does."
        ]
    if told:
        _logger.warning("%s", " ".join(told))


def scale_in(saved: Mapping[str, Any], rule: Any) -> float | None:
    """The scale that a checkpoint was saved with; None if it was saved without one.

    Args:
        saved: of a control, a scaler or another system, after it has been loaded.
        rule: as `recognize` asks for it.
    """
    ours = saved.get("gradilocks")
    if isinstance(ours, Mapping) and _kind_of(ours.get("scale_policy")) == "NoScale":
        return None
    other = recognize(saved, rule)
    scale = saved.get("scale") if other is None else other.scale
    return None if scale is None else check_scale(scale)


def tell_bounded(
    saved: float | None, scale: float, bounds: tuple[float, float], *, whose: str
) -> None:
    """Says, in the log, that bounds of the present have moved the scale of a checkpoint.

    Args:
        saved: the scale in the checkpoint, from `scale_in`.
        scale: with which it goes on.
        bounds: of the present.
        whose: they are.
    """
    if saved is not None and in_float32(saved) != in_float32(scale):
        lowest, highest = bounds
        _logger.warning(
            "load_state_dict() has taken the scale of the checkpoint, %g, to %g: %s",
            saved,
            scale,
            f"{whose} keeps it at that."
            if lowest == highest
            else f"{whose} keeps it between {lowest:g} and {highest:g}.",
        )


def tell_dropped(saved: Mapping[str, Any], policy: ClipPolicy | None, owner: str) -> None:
    """Says, in the log, what clip policies of a checkpoint have learned and nobody goes on with.

    Args:
        saved: a checkpoint that has been loaded into an object which keeps its own settings.
        policy: by which that object clips; None if it does not.
        owner: its class, "GradientControl" or "GradScaler".
    """
    ours, scalers = _mapping(saved.get("gradilocks")), _mapping(saved.get(SCALERS))
    parts = [ours, *(each["gradilocks"] for each in parts_in(saved).values())] if ours else []
    parts = [each for each in parts if each.get("steps")]  # Else nothing was learned yet.
    clip = _mapping(scalers.get("clip"))
    learned = {
        "GradientControl": (ours.get("clip_policy"), [each.get("clip_state") for each in parts]),
        "GradScaler": (clip.get("policy"), [each.get("memory") for each in clip.get("states", ())]),
    }
    for by, (before, memories) in learned.items():
        goes_on = by == owner and policy and _kind_of(before) == _kind_of(describe(policy))
        if goes_on or not any(memories):
            continue
        own = "does not clip" if policy is None else f"clips by {_called(describe(policy))}"
        own += ", which starts afresh" if policy is not None and policy.learns else ""
        _logger.warning(
            "load_state_dict() has dropped what %s of the checkpoint's %s has learned: this %s %s.",
            _called(before),
            by,
            owner,
            own,
        )


def tell_unclipped(saved: Mapping[str, Any]) -> None:
    """Says, in the log, that a GradScaler without a clip goes on from a control that had one."""
    policy = _mapping(saved.get("gradilocks")).get("clip_policy")
    if policy is not None and _kind_of(policy) != "NoClip":
        _logger.warning(
            "the checkpoint is of a GradientControl that clips by %s, and this GradScaler does "
            "not clip by itself. Make it with clip=, or clip after unscale_().",
            _called(policy),
        )


def _called(described: Any) -> str:
    """A clip policy from `describe`, as one calls it in a sentence."""
    kind = _kind_of(described)
    if not isinstance(kind, tuple):
        return str(kind)
    return f"chain({', '.join(str(part) for part in kind[1:])})"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _replaced(before: Any, after: Any) -> list[str]:
    """In which settings a policy differs from the one before, of the same class: old, then new."""
    if before == after:
        return []
    if isinstance(before, Chain) and isinstance(after, Chain):
        pairs = zip(before.policies, after.policies, strict=True)
        return [text for each, other in pairs for text in _replaced(each, other)]
    one, two = (dataclasses.asdict(policy.as_given) for policy in (before, after))
    return [
        f"{name} of {before.policy_name} from {one[name]!r} to {two[name]!r}"
        for name in one
        if one[name] != two[name] and name != "init_scale"  # Which has had its time.
    ]


def _load_from_scaler(
    saved: Mapping[str, Any], scale_policy: ScalePolicy, clip_policy: ClipPolicy
) -> Loaded:
    """What to go on with from a GradScaler with `policy=` or `clip=`; BadState if that loses some.

    Such a one has learned of each optimizer apart, and a control of all of them together.
    """
    ours = saved[SCALERS]
    scale, clip = (_mapping(ours).get(part) for part in ("scale", "clip"))
    policy, states = _mapping(clip).get("policy"), _mapping(clip).get("states", ())
    whole = isinstance(ours, Mapping) and set(ours) == {"scale", "clip"}
    whole = whole and (clip is None or set(_mapping(clip)) == {"policy", "states"})
    whole = whole and isinstance(states, (list, tuple))
    if not whole or not all(isinstance(state, Mapping) for state in states):
        raise BadState(
            f"{SCALERS} in the state_dict must be what state_dict() made, got {ours!r:.80}."
        )
    if any(state.get("memory") for state in states):
        raise BadState(
            f"the state_dict is one of a GradScaler whose clip policy {_called(policy)} has "
            "learned something of each optimizer apart; a GradientControl, which has one norm for "
            "all of them, would lose it. To go on without it, and with this control's own "
            "settings: load_state_dict(..., policies='control')."
        )
    if clip is not None:  # Else, as of torch's scaler, this one's own.
        clip_policy = rebuild(clip_policy, policy, "clip")
    if scale is None:
        plain = {key: value for key, value in saved.items() if key != SCALERS}
        dynamic, state = _load_from_others(plain, scale_policy)
        return Loaded(dynamic, clip_policy, state)
    rebuilt = rebuild(scale_policy, _mapping(scale).get("policy"), "scale")
    return Loaded(rebuilt, clip_policy, load_scale(rebuilt, saved, scale))


def _load_from_others(
    saved: Mapping[str, Any], policy: ScalePolicy
) -> tuple[DynamicScale, ScaleState]:
    """What to go on with from the state of torch's scaler or of another system's.

    Settings that are not in what they save stay the present policy's.
    """
    other = recognize(saved, policy)
    if other is None:
        _require(saved, ("scale", *_TORCH_SETTINGS, "_growth_tracker"), where="state_dict")
    if not isinstance(policy, DynamicScale):
        whose = "torch's GradScaler" if other is None else f"{other.system}'s scaler"
        needed = "scale='dynamic'" if other is None else "a DynamicScale"
        raise BadState(
            f"the state_dict is one of {whose} and needs {needed}, this control has "
            f"{policy.policy_name}."
        )
    if other is None:
        policy = with_settings(policy, {name: saved[name] for name in _TORCH_SETTINGS})
        return policy, load_scale(policy, saved, None)
    policy = with_settings(policy, other.settings)
    state = load_scale(policy, other.as_torch_saves(), None)
    if other.hysteresis is not None:
        state.hysteresis.fill_(other.hysteresis)
    return policy, state


def save_scale(policy: ScalePolicy, state: ScaleState) -> dict[str, Any]:
    """A scale policy and what it keeps, but for the scale and its tracker."""
    more = {name: _plain(tensor) for name, tensor in state.more.items()}
    return {"policy": describe(policy), "hysteresis": _plain(state.hysteresis), "state": more}


def load_scale(policy: ScalePolicy, saved: Mapping[str, Any], kept: Any) -> ScaleState:
    """A state of `policy` on the host, filled from a checkpoint, or BadState.

    Args:
        policy: with the checkpoint's settings.
        saved: with the scale and the tracker under torch's keys. A scale outside the bounds of
            `policy` is moved to them, of which `tell_bounded` tells, if these are not the
            checkpoint's own bounds.
        kept: from `save_scale`; None if it was not we who saved it, so that the bounds are those
            of whoever loads it.
    """
    _require(saved, ("scale", "_growth_tracker"), where="state_dict")
    state: ScaleState = _started(policy)
    lowest, highest = policy.bounds()
    scale = check_scale(saved["scale"])
    least, most = bounds_in_float32(lowest, highest)
    if kept is not None and not least <= scale <= most:
        raise BadState(
            f"the scale in the state_dict must lie in [{least:g}, {most:g}], as its own policy "
            f"{policy.policy_name} says, got {scale:g}."
        )
    state.scale.fill_(min(max(scale, lowest), highest))
    tracker = _check_count("_growth_tracker", saved["_growth_tracker"], lowest=-policy.delay)
    state.growth_tracker.fill_(tracker)
    if kept is None:
        return state
    if not isinstance(kept, Mapping) or set(kept) != {"policy", "hysteresis", "state"}:
        raise BadState(f"the scale policy in the state_dict does not fit: {kept!r:.80}.")
    state.hysteresis.fill_(_check_count("hysteresis", kept["hysteresis"], lowest=-(2**31)))
    more = kept["state"]
    if not isinstance(more, Mapping) or set(more) != set(state.more):
        raise BadState(
            f"the state of the scale policy {policy.policy_name} in the state_dict must have "
            f"{sorted(state.more)}, got {more!r:.100}."
        )
    lowest, highest = bounds_in_float32(lowest, highest)
    for name, tensor in state.more.items():
        value = more[name]
        if not tensor.is_floating_point():
            _check_count(name, value)
        elif name not in policy.kept_scales:
            value = math.inf if value is None else _check_number(name, value)
        elif not lowest <= _check_number(name, value) <= highest:
            raise BadState(
                f"{name} in the state_dict must lie in [{lowest:g}, {highest:g}], as the policy "
                f"says, got {value!r}."
            )
        tensor.fill_(value)
    return state


def refill(state: ScaleState, fresh: ScaleState) -> None:
    """Makes `state` what `fresh` is, in place: a captured graph, and torch's scaler, hold it."""
    for name in ("scale", "growth_tracker", "hysteresis"):
        getattr(state, name).copy_(getattr(fresh, name))
    for name in set(state.more) - set(fresh.more):
        del state.more[name]
    for name, tensor in fresh.more.items():
        if name in state.more:
            state.more[name].copy_(tensor)
        else:
            state.more[name] = moved(tensor, state.scale.device)


def save_memory(memory: Mapping[str, Tensor] | None) -> dict[str, Any] | None:
    """What a clip policy remembers, as plain numbers and lists."""
    return None if memory is None else {name: _plain(t) for name, t in memory.items()}


def _load_named_memory(
    policy: ClipPolicy, ours: Mapping[str, Any], owned: OwnedParameters, *, changed: bool
) -> tuple[
    dict[str, Tensor] | None,
    tuple[list[Placed], dict[str, Tensor]] | None,
    Sequence[int] | None,
]:
    """What the clip policy remembers, of this rank's parameters and of all; or BadState.

    And of which of this rank's parameters that is, if not of all of them.
    """
    count, saved = len(owned.parameters), ours.get("clip_state")
    if not policy.by_parameter or saved is None:
        return load_memory(policy, saved, count), None, None
    placed = ours.get("clip_parameters")
    if placed is None:  # From before names were saved.
        if owned.apart:
            raise BadState(
                f"the state_dict has what {policy.policy_name} has learned of {count} parameters "
                "or so, but not of which, and the ranks hold different ones here. Start without "
                "the state_dict; one that is saved now has the names."
            )
        return load_memory(policy, saved, count), None, None
    if not isinstance(placed, list) or not all(map(_is_placed, placed)):
        raise BadState(
            "clip_parameters in the state_dict must be pairs of a name and a place, got "
            f"{placed!r:.80}."
        )
    placed = [(name, place) for name, place in placed]
    known = owned.known_among(placed) if changed else {}
    if known and (len(known) < count or (owned.alone and count < len(placed))):
        of_some = load_memory(policy, saved, len(placed)) or {}
        chosen = {name: of_some[name][list(known.values())] for name in policy.by_parameter}
        return {**of_some, **chosen}, None, list(known)
    of_all = load_memory(policy, saved, count if owned.alone and placed else len(placed))
    if of_all is None or not placed:  # Saved before the first step: nothing was learned.
        return None, None, None
    try:
        places = owned.places_among(placed)
    except KeyError as error:
        raise BadState(
            f"the state_dict has not what {policy.policy_name} has learned of {error.args[0]}. It "
            f"knows {len(placed)} parameters: {', '.join(name for name, _ in placed[:3])}, ... It "
            "was saved with another model, or by ranks that called different parameters alike, "
            "which must hold the same ones again. If only names have changed, take "
            "'clip_parameters' out of state_dict['gradilocks'] to go by the order; else start "
            "without the state_dict."
        ) from None
    each = {name: of_all[name] for name in policy.by_parameter}
    mine = {name: tensor[places] for name, tensor in each.items()}
    return {**of_all, **mine}, (placed, each), None


def load_memory(policy: ClipPolicy, saved: Any, count: int) -> dict[str, Tensor] | None:
    """What the clip policy remembers, on the host, from `save_memory`; or BadState.

    Args:
        policy: with the checkpoint's settings.
        saved: None if it had nothing to remember, or was saved before its first step.
        count: how many parameters there are.
    """
    memory: dict[str, Tensor] | None = _started(policy, count)
    if memory is None or saved is None:
        return None
    policy_name = policy.policy_name
    if not isinstance(saved, Mapping) or set(saved) != set(memory):
        raise BadState(
            f"the state of the clip policy {policy_name} in the state_dict must have "
            f"{', '.join(map(repr, memory))}, got {saved!r:.100}."
        )
    for name, tensor in memory.items():
        numbers = saved[name] if isinstance(saved[name], list) else [saved[name]]
        if len(numbers) != tensor.numel() or isinstance(saved[name], list) != bool(tensor.dim()):
            raise BadState(
                f"{name} of the clip policy {policy_name} in the state_dict has "
                f"{len(numbers)} numbers, expected {tensor.numel()}. It was saved with another "
                "model or another window. Load it over the parameters that it was saved with, and "
                "add or take away others after that; or start without the state_dict."
            )
        if tensor.is_floating_point():
            numbers = [math.inf if number is None else number for number in numbers]
        checked = [_check_number(name, number) for number in numbers]
        whole = tensor.is_floating_point() or all(isinstance(number, int) for number in numbers)
        if min(checked, default=0.0) < 0.0 or not whole:
            what = "numbers" if tensor.is_floating_point() else "whole numbers"
            raise BadState(
                f"{name} of the clip policy {policy_name} in the state_dict must hold "
                f"{what} of at least 0, got {saved[name]!r:.80}."
            )
        tensor.copy_(torch.tensor(checked, dtype=torch.float64).reshape(tensor.shape))
    return memory


def _started(policy: Any, *count: int) -> Any:
    """A state of a policy with the settings of a checkpoint, on the host; or BadState."""
    try:
        return policy.start(_HOST, *count)
    except (OverflowError, RuntimeError, TypeError) as error:  # As of a window of 10^30 norms.
        raise BadState(
            f"{policy.policy_name} cannot start with its settings in the state_dict: {error}"
        ) from error


def describe(policy: Any) -> dict[str, Any]:
    """A policy as its name and its settings."""
    given = policy.as_given
    if isinstance(given, Chain):
        config: Any = {"policies": [describe(each) for each in given.policies]}
    else:
        config = dataclasses.asdict(given)
    if isinstance(given, ClipPerGroup):
        config["limits"] = [[key, bound] for key, bound in given.limits.items()]
    return {"name": policy.policy_name, "config": _as_json_has(config)}


def _as_json_has(setting: Any) -> Any:
    """A setting with ["float", "inf"] in the place of infinity, which strict JSON does not have.

    A list, because torch.distributed.checkpoint takes one of plain values for one value.
    """
    if isinstance(setting, dict):
        return {key: _as_json_has(value) for key, value in setting.items()}
    if type(setting) in (list, tuple):
        return type(setting)(map(_as_json_has, setting))
    if isinstance(setting, float) and not math.isfinite(setting):
        return [_FLOAT, str(float(setting))]
    return setting


def _from_json(saved: Any) -> Any:
    """What `_as_json_has` was given."""
    if isinstance(saved, Mapping):
        return {key: _from_json(value) for key, value in saved.items()}
    if type(saved) not in (list, tuple):
        return saved
    if len(saved) == 2 and saved[0] == _FLOAT and saved[1] in ("inf", "-inf", "nan"):
        return float(saved[1])
    return type(saved)(map(_from_json, saved))


def rebuild(policy: Any, described: Any, kind: str, *, owner: str = "control") -> Any:
    """The policy that was saved, of the class of the present one, or BadState.

    Args:
        policy: the present one.
        described: from `describe`.
        kind: "scale" or "clip".
        owner: "control" or "scaler", for the message.
    """
    present = policy.policy_name
    name = described.get("name") if isinstance(described, Mapping) else None
    if name != present:
        argument = "policy" if (owner, kind) == ("scaler", "scale") else kind
        maker = "chain" if name == "Chain" else name
        raise BadState(
            f"the state_dict was saved with the {kind} policy {name}, this {owner} has {present}. "
            f"Make the {owner} with {argument}={maker}(...), or start without the state_dict, or "
            f"go on with its scale alone: load_state_dict(..., policies={owner!r})."
        )
    try:
        if isinstance(policy, Chain):
            parts = described["config"]["policies"]
            pairs = zip(policy.policies, parts, strict=True)
            return Chain(tuple(rebuild(each, part, kind, owner=owner) for each, part in pairs))
        made = type(policy.as_given)(**_from_json(described["config"]))
        return resolve_clip(made) if kind == "clip" else resolve_scale(made)
    except (KeyError, TypeError, ValueError) as error:
        raise BadState(f"the {kind} policy in the state_dict does not fit: {error}") from error


def with_settings(policy: DynamicScale, settings: Mapping[str, Any]) -> DynamicScale:
    """`policy` with the settings of a checkpoint, or BadState."""
    try:
        return dataclasses.replace(policy, **settings)
    except (TypeError, ValueError) as error:
        raise BadState(f"the state_dict does not fit: {error}") from error


def _plain(tensor: Tensor) -> Any:
    """A tensor as a number or a list of them; None for infinity, which JSON does not have."""
    numbers: list[Any] = fetch(tensor)
    if not tensor.is_floating_point():
        numbers = [int(number) for number in numbers]
    numbers = [None if number == math.inf else number for number in numbers]
    return numbers if tensor.dim() else numbers[0]


def check_scale(value: Any) -> float:
    """The scale of a checkpoint, or BadState."""
    scale = _check_number("scale", value)
    if not SMALLEST <= scale <= LARGEST:
        raise BadState(f"the scale in the state_dict must be positive and finite, got {value}.")
    return scale


def _require(saved: Mapping[str, Any], keys: tuple[str, ...], *, where: str) -> None:
    missing = [key for key in keys if key not in saved]
    if missing:
        raise MissingKey(
            f"{where} has no {', '.join(repr(key) for key in missing)}; it has "
            f"{', '.join(repr(key) for key in saved)}. Expected what state_dict() of a "
            "GradientControl or of torch's GradScaler returns."
        )


def _is_placed(pair: Any) -> bool:
    """Whether this is a parameter's name and place."""
    pair = list(pair) if isinstance(pair, (list, tuple)) else []
    return len(pair) == 2 and all(isinstance(each, str) for each in pair)


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise BadState(f"{name} in the state_dict must be a number, got {value!r}.")
    return float(value)


def _check_count(name: str, value: Any, *, lowest: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31:
        raise BadState(f"{name} in the state_dict must be a whole number, got {value!r}.")
    return value
