"""Policies and their state as a plain dict, and back; nothing is changed unless all of it fits.

A control with a DynamicScale writes the five keys of torch's GradScaler beside its own, so either
loads what the other saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradilocks.errors import BadState
from gradilocks.scale import DynamicScale
from gradilocks.state.foreign import Foreign, recognized
from gradilocks.state.plain import (
    check_count,
    check_scale,
    describe,
    plain,
    plain_number,
    read_memory,
    read_more,
    rebuild,
    require,
    with_settings,
)
from gradilocks.step.outcome import fetch
from gradilocks.values import ScaleState

__all__ = [
    "SCALERS",
    "VERSION",
    "Loaded",
    "load",
    "save",
]

VERSION = 1
SCALERS = "gradilocks_scaler"
"""Where the state_dict of a GradScaler has what torch's does not; torch's passes it over."""
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OUR_KEYS = ("version", "scale_policy", "clip_policy", "hysteresis", "steps", "streak")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint that has been checked whole."""

    scale_policy: Any
    clip_policy: Any
    scale: float
    growth_tracker: int
    hysteresis: int
    steps: int | None
    streak: int
    memory: dict[str, Tensor] | None = None
    more: dict[str, float] = dataclasses.field(default_factory=dict)


def save(
    scale_policy: Any,
    clip_policy: Any,
    state: ScaleState,
    *,
    memory: Mapping[str, Tensor] | None,
    steps: int,
    streak: int,
) -> dict[str, Any]:
    """The checkpoint as a dict of plain numbers, strings, lists and dicts."""
    scale, tracker, hysteresis = fetch(state.scale, state.growth_tracker, state.hysteresis)
    saved: dict[str, Any] = {"scale": scale, "_growth_tracker": int(tracker)}
    if isinstance(scale_policy, DynamicScale):
        saved["growth_factor"] = scale_policy.growth_factor
        saved["backoff_factor"] = scale_policy.backoff_factor
        saved["growth_interval"] = scale_policy.growth_interval
    saved["gradilocks"] = {
        "version": VERSION,
        "scale_policy": describe(scale_policy),
        "clip_policy": describe(clip_policy),
        "clip_state": plain(memory),
        "hysteresis": int(hysteresis),
        "scale_state": {name: plain_number(tensor) for name, tensor in state.more.items()},
        "steps": steps,
        "streak": streak,
    }
    return saved


def load(saved: Mapping[str, Any], scale_policy: Any, clip_policy: Any, *, count: int) -> Loaded:
    """Checks `saved` against the present policies and says what to go on with.

    Args:
        saved: from `save`, from torch's `GradScaler.state_dict()`, or from the scalers of
            Megatron-LM, DeepSpeed, fairseq and apex.
        scale_policy: the policy in force; a checkpoint of another class does not fit.
        clip_policy: likewise.
        count: how many parameters there are.

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
        raise BadState(
            f"the state_dict is one of a GradScaler with policy= or clip=, and a GradientControl "
            f"would lose what they have learned. Take {SCALERS!r} out of it to go on with the "
            "scale alone."
        )
    if "gradilocks" not in saved:
        foreign = recognized(saved, scale_policy)
        if foreign is not None:
            return _load_from_others(foreign, scale_policy, clip_policy)
        return _load_from_torch(saved, scale_policy, clip_policy)
    ours = saved["gradilocks"]
    if not isinstance(ours, Mapping):
        raise BadState(f"state_dict['gradilocks'] must be a dict, got {type(ours).__name__}.")
    version = ours.get("version")
    if version != VERSION:
        raise BadState(
            f"the state_dict has version {version!r}; this Gradilocks reads version {VERSION}. "
            "Load it with the Gradilocks that saved it."
        )
    require(ours, _OUR_KEYS, where="state_dict['gradilocks']")
    require(saved, ("scale", "_growth_tracker"), where="state_dict")
    rebuilt = rebuild(scale_policy, ours["scale_policy"], "scale")
    clip = rebuild(clip_policy, ours["clip_policy"], "clip")
    _check_bounds(check_scale(saved["scale"]), *rebuilt.bounds())
    return Loaded(
        scale_policy=rebuilt,
        clip_policy=clip,
        scale=check_scale(saved["scale"]),
        growth_tracker=check_count(
            "_growth_tracker", saved["_growth_tracker"], lowest=-rebuilt.delay
        ),
        hysteresis=check_count("hysteresis", ours["hysteresis"], lowest=-(2**31)),
        more=read_more(rebuilt, ours.get("scale_state") or {}),
        steps=check_count("steps", ours["steps"]),
        streak=check_count("streak", ours["streak"]),
        memory=read_memory(clip, ours.get("clip_state"), count),
    )


def _load_from_others(foreign: Foreign, scale_policy: Any, clip_policy: Any) -> Loaded:
    """Settings that are not in what they save stay the present policy's."""
    if not isinstance(scale_policy, DynamicScale):
        raise BadState(
            f"the state_dict is one of {foreign.system}'s scaler and needs a DynamicScale, this "
            f"control has {type(scale_policy).__name__}."
        )
    scale_policy = with_settings(scale_policy, foreign.settings)
    hysteresis = scale_policy.hysteresis if foreign.hysteresis is None else foreign.hysteresis
    scale = min(max(check_scale(foreign.scale), scale_policy.min_scale), scale_policy.max_scale)
    return Loaded(
        scale_policy=scale_policy,
        clip_policy=clip_policy,
        scale=scale,
        growth_tracker=foreign.growth_tracker,
        hysteresis=hysteresis,
        steps=None,
        streak=0,
    )


def _load_from_torch(saved: Mapping[str, Any], scale_policy: Any, clip_policy: Any) -> Loaded:
    require(saved, _TORCH_KEYS, where="state_dict")
    if not isinstance(scale_policy, DynamicScale):
        raise BadState(
            "the state_dict is one of torch's GradScaler and needs scale='dynamic', this control "
            f"has {type(scale_policy).__name__}."
        )
    scale = check_scale(saved["scale"])
    names = ("growth_factor", "backoff_factor", "growth_interval")
    policy = with_settings(scale_policy, {name: saved[name] for name in names})
    return Loaded(
        scale_policy=policy,
        clip_policy=clip_policy,
        scale=min(max(scale, policy.min_scale), policy.max_scale),
        growth_tracker=check_count("_growth_tracker", saved["_growth_tracker"]),
        hysteresis=policy.hysteresis,
        steps=None,
        streak=0,
    )


def _check_bounds(scale: float, lowest: float, highest: float) -> None:
    # The scale is a float32, the policy's bounds are not.
    if not lowest * (1 - 1e-6) <= scale <= highest * (1 + 1e-6):
        raise BadState(
            f"the scale in the state_dict must lie in [{lowest:g}, {highest:g}], as its policy "
            f"says, got {scale:g}."
        )
