"""A state_dict or a new scale that a GradScaler is given, checked before anything changes.

A state_dict has torch's five keys and, with a policy or a clip, what they keep besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradilocks.clip import ClipPolicy
from gradilocks.errors import BadState, MissingKey
from gradilocks.policy import Policy
from gradilocks.scale import LARGEST, SMALLEST, DynamicScale, ScalePolicy
from gradilocks.state.checkpoint import SCALERS as KEY
from gradilocks.state.checkpoint import (
    check_scale,
    describe,
    fitted_memory,
    fitted_scale,
    load_scale,
    parts_in,
    rebuild,
    save_scale,
    with_settings,
)
from gradilocks.state.other_scalers import OtherScaler
from gradilocks.values import ScaleState

__all__ = [
    "TORCHS",
    "TorchsRule",
    "check_state",
    "checked_policies",
    "fitted_clip",
    "fitted_state",
    "from_controls",
    "has_torchs_numbers",
    "policy_from",
    "set_scale",
    "state_from",
]

TORCHS = ("growth_factor", "backoff_factor", "growth_interval")
"""The settings of torch's rule."""
_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class TorchsRule(Policy):
    """torch's rule with a GradScaler's own numbers, as a policy that can be compared."""

    growth_factor: Any
    backoff_factor: Any
    growth_interval: Any

    @property
    def policy_name(self) -> str:
        return "GradScaler"


def check_state(state: Mapping[str, Any], *, delay: int = 0) -> None:
    """Raises if `state` lacks a key or holds a scale that cannot be trained with.

    Args:
        state: a scaler's state_dict.
        delay: how far below 0 the growth tracker may start.
    """
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise MissingKey(
            f"the state_dict has no {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, state))}. Expected what GradScaler.state_dict() returns."
        )
    for key in _KEYS:
        if isinstance(state[key], bool) or not isinstance(state[key], (int, float)):
            raise BadState(f"{key} in the state_dict must be a number, got {state[key]!r}.")
        at_least = -1 - delay if key == "_growth_tracker" else 0
        if key != "scale" and not at_least < state[key] < math.inf:
            raise BadState(
                f"{key} in the state_dict must be positive and finite, got {state[key]}."
            )
    tracker = state["_growth_tracker"]
    if tracker != int(tracker) or tracker < -delay:
        raise BadState(
            "_growth_tracker in the state_dict must be a whole number, got "
            f"{state['_growth_tracker']}."
        )
    scale = state["scale"]
    if not SMALLEST <= scale <= LARGEST:
        collapsed = (
            " A scale of 0 is what torch's scaler leaves behind after it has collapsed: start from "
            "a new one."
        )
        raise BadState(
            f"the scale in the state_dict must lie in [{SMALLEST:g}, {LARGEST:g}], got {scale}."
            + (collapsed if scale == 0 else "")
        )


def set_scale(
    scale: Tensor, new_scale: object, *, device: str, lowest: float, highest: float
) -> None:
    """Fills `scale` with what the user gave, kept within its bounds."""
    if isinstance(new_scale, (int, float)):
        if not 0.0 < new_scale < math.inf:
            raise ValueError(f"new_scale must be positive and finite, got {new_scale}.")
        scale.fill_(min(max(float(new_scale), lowest), highest))
        return
    if not isinstance(new_scale, Tensor):
        raise TypeError(f"new_scale must be a float or a tensor, got {type(new_scale).__name__}.")
    if new_scale.device.type != device or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False. "
            f"Got {new_scale.numel()} element(s) on {new_scale.device.type}, "
            f"requires_grad={new_scale.requires_grad}."
        )
    given = new_scale.reshape(()).to(scale.dtype)
    scale.copy_(torch.where(torch.isnan(given), scale, given.clamp(lowest, highest)))


def has_torchs_numbers(state_dict: Mapping[str, Any]) -> bool:
    """Whether torch's settings are there; `check_state` says what is missing."""
    return all(name in state_dict for name in TORCHS)


def checked_policies(
    state_dict: Mapping[str, Any], *, scale: bool, clip: bool
) -> Mapping[str, Any]:
    """What policies have saved, after checking that the scaler has such policies.

    Args:
        state_dict: given to a scaler.
        scale, clip: whether that scaler has a `policy` and a `clip`.
    """
    ours = state_dict.get(KEY, {"scale": None, "clip": None})
    if not isinstance(ours, Mapping) or set(ours) != {"scale", "clip"}:
        raise BadState(f"{KEY} in the state_dict must be what state_dict() made, got {ours!r:.80}.")
    here = {"scale": ("policy", scale), "clip": ("clip", clip)}
    for name, part in ours.items():
        word, is_here = here[name]
        if part is not None and not is_here:
            what = part.get("policy") if isinstance(part, Mapping) else None
            kind = what.get("name") if isinstance(what, Mapping) else "?"
            raise BadState(
                f"the state_dict was saved with {word}={kind}(...), this scaler has "
                f"none. Make it with {word}={kind}(...), or go on without what it has learned: "
                "load_state_dict(..., policies='scaler')."
            )
    return ours


def from_controls(
    state_dict: Mapping[str, Any], *, numbers: Mapping[str, Any], scale: bool, clip: bool
) -> Mapping[str, Any]:
    """The state of a GradientControl as a scaler saves it; BadState if something would be lost.

    Args:
        state_dict: given to a scaler; one that is not of a control stays as it is.
        numbers: torch's settings, as the scaler has them.
        scale, clip: whether that scaler has a `policy` and a `clip`. Without them, the scale goes
            on as after a load of torch's, and what the control clips by is left there.
    """
    theirs = state_dict.get("gradilocks")
    if not isinstance(theirs, Mapping):
        return state_dict
    policy, clip_policy = (_mapping(theirs.get(f"{part}_policy")) for part in ("scale", "clip"))
    name = policy.get("name")
    if not scale and name != "DynamicScale":
        made_with = "" if name == "NoScale" else f"Make it with policy={name}(...), or go on "
        raise BadState(
            f"the state_dict is one of a GradientControl with the scale policy {name}; a "
            "GradScaler without policy= takes one with a DynamicScale. "
            f"{made_with or 'Go on '}with this scaler's own settings, and the scale if there is "
            "one: load_state_dict(..., policies='scaler')."
        )
    whole = [theirs, *(each["gradilocks"] for each in parts_in(state_dict).values())]
    if any(each.get("steps") and each.get("clip_state") for each in whole):
        raise BadState(
            f"the state_dict is one of a GradientControl whose clip policy "
            f"{clip_policy.get('name')} has learned something of all its optimizers together; a "
            "GradScaler, which clips each by its own norm, would lose it. To go on without it, "
            "and with this scaler's own settings: load_state_dict(..., policies='scaler')."
        )
    settings = _mapping(policy.get("config"))
    made = {name: settings.get(name, number) for name, number in numbers.items()}
    made |= {key: value for key, value in state_dict.items() if key != "gradilocks"}
    kept = {"hysteresis": theirs.get("hysteresis"), "state": theirs.get("scale_state") or {}}
    clips = clip and clip_policy.get("name") != "NoClip"
    parts = {
        "scale": {"policy": theirs.get("scale_policy"), **kept} if scale else None,
        "clip": {"policy": theirs.get("clip_policy"), "states": ()} if clips else None,
    }
    return {**made, KEY: parts}


def policy_from(
    state_dict: Mapping[str, Any], policy: ScalePolicy, saved: Any, foreign: OtherScaler | None
) -> ScalePolicy:
    """The scaler's policy with the settings of a checkpoint; BadState if it is another's.

    Args:
        state_dict: with torch's keys.
        policy: of the scaler.
        saved: the policy as it was saved, or None if another scaler has saved the state_dict.
        foreign: what another system's scaler had besides, if it was one.
    """
    if saved is not None:
        if not isinstance(saved, Mapping) or set(saved) != {"policy", "hysteresis", "state"}:
            raise BadState(f"the scale policy in the state_dict does not fit: {saved!r:.80}.")
        rebuilt: ScalePolicy = rebuild(policy, saved["policy"], "scale", owner="scaler")
        return rebuilt
    if not isinstance(policy, DynamicScale):
        system = "torch's GradScaler" if foreign is None else f"{foreign.system}'s scaler"
        raise BadState(
            f"the state_dict is one of {system} and needs a DynamicScale, this scaler has "
            f"policy={policy.policy_name}(...). Start without the state_dict."
        )
    settings = {name: state_dict[name] for name in TORCHS}
    made: ScalePolicy = with_settings(policy, settings if foreign is None else foreign.settings)
    return made


def state_from(
    state_dict: Mapping[str, Any], policy: ScalePolicy, saved: Any, foreign: OtherScaler | None
) -> ScaleState:
    """The state of `policy_from`'s policy, on the CPU; raises BadState."""
    fresh = load_scale(policy, state_dict, saved)
    if foreign is not None and foreign.hysteresis is not None:
        fresh.hysteresis.fill_(foreign.hysteresis)
    return fresh


def fitted_state(
    state_dict: Mapping[str, Any],
    policy: ScalePolicy | None,
    clip: ClipPolicy | None,
    *,
    numbers: Mapping[str, Any],
    bounds: tuple[float, float],
    start: float,
) -> dict[str, Any]:
    """A state_dict that was saved with other policies or settings, made to fit a scaler's.

    Args:
        state_dict: with torch's keys; also one of a GradientControl.
        policy, clip: of the scaler; None for torch's rule, and for no clip.
        numbers: torch's settings, as the scaler has them.
        bounds: of the scale.
        start: the scale to start from if `state_dict` was saved without one.
    """
    ours, theirs = (_mapping(state_dict.get(key)) for key in (KEY, "gradilocks"))
    kept = _mapping(ours.get("scale"))
    before = kept.get("policy")
    if theirs:
        before = theirs.get("scale_policy")
        kept = {"hysteresis": theirs.get("hysteresis"), "state": theirs.get("scale_state") or {}}
    by_torch = not kept
    scale, tracker = state_dict.get("scale"), state_dict.get("_growth_tracker", 0)
    if _mapping(before).get("name") == "NoScale":
        scale = start
    elif scale is not None:
        scale = min(max(check_scale(scale), bounds[0]), bounds[1])
    made: dict[str, Any] = {**numbers, "scale": scale, "_growth_tracker": tracker}
    parts: dict[str, Any] = {"scale": None, "clip": None}
    if policy is not None:
        if by_torch:
            plain = DynamicScale()
            before, kept = describe(plain), save_scale(plain, plain.start(torch.device("cpu")))
        made["_growth_tracker"], parts["scale"] = fitted_scale(
            policy, before, tracker=tracker, kept=kept
        )
    elif isinstance(tracker, int):
        moves_alike = by_torch or _mapping(before).get("name") == "DynamicScale"
        made["_growth_tracker"] = max(tracker, 0) if moves_alike else 0
    if clip is not None:
        parts["clip"] = fitted_clip(ours.get("clip"), clip)
    if policy is not None or clip is not None:
        made[KEY] = parts
    return {key: value for key, value in made.items() if value is not None}


def fitted_clip(saved: Any, clip: ClipPolicy) -> dict[str, Any]:
    """What a scaler has saved of its clip policy, made to fit another."""
    before, states = _mapping(saved).get("policy"), _mapping(saved).get("states", ())
    if isinstance(states, (list, tuple)):
        states = tuple(
            {**state, "memory": fitted_memory(clip, before, state.get("memory"))}
            if isinstance(state, Mapping)
            else state
            for state in states
        )
    return {"policy": describe(clip), "states": states}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
