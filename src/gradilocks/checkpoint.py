"""Policies and their state as a plain dict, and back; nothing is changed unless all of it fits.

A control with a DynamicScale writes the five keys of torch's GradScaler beside its own, so either
loads what the other saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradilocks.clip import Chain, ClipPerGroup
from gradilocks.errors import BadState, MissingKey
from gradilocks.foreign import Foreign, recognized
from gradilocks.record import fetch
from gradilocks.scale import LARGEST, SMALLEST, DynamicScale
from gradilocks.values import ScaleState

__all__ = [
    "VERSION",
    "Loaded",
    "check_number",
    "describe",
    "load",
    "load_scale",
    "plain",
    "read_memory",
    "rebuild",
    "save",
    "save_scale",
]

VERSION = 1
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
        "scale_state": {name: _plain(tensor) for name, tensor in state.more.items()},
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
    if "gradilocks" not in saved:
        interval, delay = (getattr(scale_policy, key, 1) for key in ("growth_interval", "delay"))
        foreign = recognized(saved, growth_interval=interval, delay=delay)
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
    _require(ours, _OUR_KEYS, where="state_dict['gradilocks']")
    _require(saved, ("scale", "_growth_tracker"), where="state_dict")
    rebuilt = rebuild(scale_policy, ours["scale_policy"], "scale")
    _check_bounds(_scale(saved["scale"]), *rebuilt.bounds())
    return Loaded(
        scale_policy=rebuilt,
        clip_policy=rebuild(clip_policy, ours["clip_policy"], "clip"),
        scale=_scale(saved["scale"]),
        growth_tracker=_count(
            "_growth_tracker", saved["_growth_tracker"], lowest=-getattr(rebuilt, "delay", 0)
        ),
        hysteresis=_count("hysteresis", ours["hysteresis"], lowest=-(2**31)),
        more=_more(rebuilt, ours.get("scale_state") or {}),
        steps=_count("steps", ours["steps"]),
        streak=_count("streak", ours["streak"]),
        memory=read_memory(clip_policy, ours.get("clip_state"), count),
    )


def _load_from_others(foreign: Foreign, scale_policy: Any, clip_policy: Any) -> Loaded:
    """Their settings are not in what they save, so the present policy's stay."""
    if not isinstance(scale_policy, DynamicScale):
        raise BadState(
            f"the state_dict is one of {foreign.system}'s scaler and needs a DynamicScale, this "
            f"control has {type(scale_policy).__name__}."
        )
    hysteresis = scale_policy.hysteresis if foreign.hysteresis is None else foreign.hysteresis
    scale = min(max(_scale(foreign.scale), scale_policy.min_scale), scale_policy.max_scale)
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
    _require(saved, _TORCH_KEYS, where="state_dict")
    if not isinstance(scale_policy, DynamicScale):
        raise BadState(
            "the state_dict is one of torch's GradScaler and needs scale='dynamic', this control "
            f"has {type(scale_policy).__name__}."
        )
    scale = _scale(saved["scale"])
    try:
        policy = dataclasses.replace(
            scale_policy,
            growth_factor=saved["growth_factor"],
            backoff_factor=saved["backoff_factor"],
            growth_interval=saved["growth_interval"],
        )
    except (TypeError, ValueError) as error:
        raise BadState(f"the state_dict does not fit: {error}") from error
    return Loaded(
        scale_policy=policy,
        clip_policy=clip_policy,
        scale=min(max(scale, policy.min_scale), policy.max_scale),
        growth_tracker=_count("_growth_tracker", saved["_growth_tracker"]),
        hysteresis=policy.hysteresis,
        steps=None,
        streak=0,
    )


def describe(policy: Any) -> dict[str, Any]:
    """A policy as its name and its settings."""
    if isinstance(policy, Chain):
        return {"name": "Chain", "config": {"policies": [describe(p) for p in policy.policies]}}
    config = dataclasses.asdict(policy)
    if isinstance(policy, ClipPerGroup):
        config["limits"] = [[key, bound] for key, bound in policy.limits.items()]
    return {"name": type(policy).__name__, "config": config}


def _plain(tensor: Tensor) -> float | list[float]:
    numbers = fetch(tensor)
    if not tensor.is_floating_point():
        numbers = [int(number) for number in numbers]
    return numbers if tensor.dim() else numbers[0]


def _more(policy: Any, saved: Any) -> dict[str, float]:
    """What a scale policy keeps besides, or BadState."""
    expected = getattr(policy.start(torch.device("cpu")), "more", {})
    if not isinstance(saved, Mapping) or set(saved) != set(expected):
        raise BadState(
            f"the state of the scale policy {type(policy).__name__} in the state_dict must have "
            f"{sorted(expected)}, got {saved!r:.100}."
        )
    return {name: check_number(name, value) for name, value in saved.items()}


def plain(memory: Mapping[str, Tensor] | None) -> dict[str, Any] | None:
    """What a clip policy remembers, as plain numbers and lists."""
    return None if memory is None else {name: _plain(t) for name, t in memory.items()}


def save_scale(policy: Any, state: ScaleState) -> dict[str, Any]:
    """A scale policy and what it keeps, for a scaler that saves the scale itself."""
    more = {name: _plain(tensor) for name, tensor in state.more.items()}
    return {"policy": describe(policy), "hysteresis": _plain(state.hysteresis), "state": more}


def load_scale(policy: Any, fresh: ScaleState, saved: Mapping[str, Any], more: Any) -> None:
    """Fills the state of a new scale from a scaler's checkpoint, or raises BadState.

    Args:
        policy: the present one.
        fresh: as the policy starts.
        saved: with torch's keys.
        more: from `save_scale`; None if torch's scaler has saved it.
    """
    _require(saved, ("scale", "_growth_tracker"), where="state_dict")
    scale = _scale(saved["scale"])
    lowest = -getattr(policy, "delay", 0)
    tracker = _count("_growth_tracker", saved["_growth_tracker"], lowest=lowest)
    if more is not None:
        if not isinstance(more, Mapping) or set(more) != {"policy", "hysteresis", "state"}:
            raise BadState(f"the scale policy in the state_dict does not fit: {more!r:.80}.")
        rebuild(policy, more["policy"], "scale")
        numbers = _more(policy, more["state"])
        hysteresis = _count("hysteresis", more["hysteresis"], lowest=-(2**31))
        fresh.hysteresis.fill_(hysteresis)
        for name, value in numbers.items():
            fresh.more[name].fill_(value)
    low, high = policy.bounds()
    fresh.scale.fill_(min(max(scale, low), high))
    fresh.growth_tracker.fill_(tracker)


def read_memory(policy: Any, saved: Any, count: int) -> dict[str, Tensor] | None:
    """What the clip policy remembers, as a new one would lay it out, or BadState."""
    if not hasattr(policy, "start"):
        return None
    memory: dict[str, Tensor] = policy.start(torch.device("cpu"), count)
    if saved is None:
        return None  # Saved before its first step.
    if not isinstance(saved, Mapping) or set(saved) != set(memory):
        raise BadState(
            f"the state of the clip policy {type(policy).__name__} in the state_dict must have "
            f"{', '.join(map(repr, memory))}, got {saved!r:.100}."
        )
    for name, tensor in memory.items():
        numbers = saved[name] if isinstance(saved[name], list) else [saved[name]]
        if len(numbers) != tensor.numel() or isinstance(saved[name], list) != bool(tensor.dim()):
            raise BadState(
                f"{name} of the clip policy {type(policy).__name__} in the state_dict has "
                f"{len(numbers)} numbers, expected {tensor.numel()}. It was saved with another "
                "model or another window."
            )
        checked = [check_number(name, number) for number in numbers]
        whole = tensor.is_floating_point() or all(isinstance(number, int) for number in numbers)
        if min(checked) < 0.0 or not whole:
            what = "numbers" if tensor.is_floating_point() else "whole numbers"
            raise BadState(
                f"{name} of the clip policy {type(policy).__name__} in the state_dict must hold "
                f"{what} of at least 0, got {saved[name]!r:.80}."
            )
        tensor.copy_(torch.tensor(checked, dtype=torch.float64).reshape(tensor.shape))
    return memory


def rebuild(policy: Any, described: Any, kind: str) -> Any:
    """The policy that was saved, of the class of the present one, or BadState."""
    present = type(policy).__name__
    name = described.get("name") if isinstance(described, Mapping) else None
    if name != present:
        raise BadState(
            f"the state_dict was saved with the {kind} policy {name}, this control has {present}. "
            f"Make the control with {kind}={name}(...), or start without the state_dict."
        )
    try:
        if isinstance(policy, Chain):
            parts = described["config"]["policies"]
            pairs = zip(policy.policies, parts, strict=True)
            return Chain(tuple(rebuild(each, part, kind) for each, part in pairs))
        return type(policy)(**described["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadState(f"the {kind} policy in the state_dict does not fit: {error}") from error


def _require(saved: Mapping[str, Any], keys: tuple[str, ...], *, where: str) -> None:
    missing = [key for key in keys if key not in saved]
    if missing:
        raise MissingKey(
            f"{where} has no {', '.join(repr(key) for key in missing)}; it has "
            f"{', '.join(repr(key) for key in saved)}. Expected what state_dict() of a "
            "GradientControl or of torch's GradScaler returns."
        )


def _scale(value: Any) -> float:
    scale = check_number("scale", value)
    if not SMALLEST <= scale <= LARGEST:
        raise BadState(f"the scale in the state_dict must be positive and finite, got {value}.")
    return scale


def _check_bounds(scale: float, lowest: float, highest: float) -> None:
    # The scale is a float32, the policy's bounds are not.
    if not lowest * (1 - 1e-6) <= scale <= highest * (1 + 1e-6):
        raise BadState(
            f"the scale in the state_dict must lie in [{lowest:g}, {highest:g}], as its policy "
            f"says, got {scale:g}."
        )


def check_number(name: str, value: Any) -> float:
    """`value` as a float, or BadState."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise BadState(f"{name} in the state_dict must be a number, got {value!r}.")
    return float(value)


def _count(name: str, value: Any, *, lowest: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31:
        raise BadState(f"{name} in the state_dict must be a whole number, got {value!r}.")
    return value
