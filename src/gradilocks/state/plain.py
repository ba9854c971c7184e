"""Policies and what they remember as plain numbers, strings and lists, and back, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradilocks.clip import Chain, ClipPerGroup, resolve_clip
from gradilocks.errors import BadState, MissingKey
from gradilocks.scale import LARGEST, SMALLEST, resolve_scale
from gradilocks.step.outcome import fetch
from gradilocks.values import ScaleState, moved

__all__ = [
    "check_count",
    "check_number",
    "check_scale",
    "describe",
    "load_scale",
    "plain",
    "plain_number",
    "read_memory",
    "read_more",
    "rebuild",
    "refill",
    "require",
    "save_scale",
    "with_settings",
]


def describe(policy: Any) -> dict[str, Any]:
    """A policy as its name and its settings."""
    if isinstance(policy, Chain):
        return {"name": "Chain", "config": {"policies": [describe(p) for p in policy.policies]}}
    given = policy.as_given
    config = dataclasses.asdict(given)
    if isinstance(given, ClipPerGroup):
        config["limits"] = [[key, bound] for key, bound in given.limits.items()]
    return {"name": type(given).__name__, "config": config}


def plain_number(tensor: Tensor) -> Any:
    """A tensor as a number or a list of them; None for infinity, which JSON does not have."""
    numbers: list[Any] = fetch(tensor)
    if not tensor.is_floating_point():
        numbers = [int(number) for number in numbers]
    numbers = [None if number == math.inf else number for number in numbers]
    return numbers if tensor.dim() else numbers[0]


def read_more(policy: Any, saved: Any) -> dict[str, float]:
    """What a scale policy keeps besides, or BadState."""
    expected = policy.start(torch.device("cpu")).more
    if not isinstance(saved, Mapping) or set(saved) != set(expected):
        raise BadState(
            f"the state of the scale policy {policy.policy_name} in the state_dict must have "
            f"{sorted(expected)}, got {saved!r:.100}."
        )
    lowest, highest = policy.bounds()
    for name, tensor in expected.items():
        value = saved[name]
        if not tensor.is_floating_point():
            check_count(name, value)
        elif not lowest <= check_number(name, value) <= highest:  # What is kept there is a scale.
            raise BadState(
                f"{name} in the state_dict must lie in [{lowest:g}, {highest:g}], as the policy "
                f"says, got {value!r}."
            )
    return {name: float(value) for name, value in saved.items()}


def plain(memory: Mapping[str, Tensor] | None) -> dict[str, Any] | None:
    """What a clip policy remembers, as plain numbers and lists."""
    return None if memory is None else {name: plain_number(t) for name, t in memory.items()}


def save_scale(policy: Any, state: ScaleState) -> dict[str, Any]:
    """A scale policy and what it keeps, for a scaler that saves the scale itself."""
    more = {name: plain_number(tensor) for name, tensor in state.more.items()}
    return {"policy": describe(policy), "hysteresis": plain_number(state.hysteresis), "state": more}


def load_scale(policy: Any, fresh: ScaleState, saved: Mapping[str, Any], more: Any) -> None:
    """Fills the state of a new scale from a scaler's checkpoint, or raises BadState.

    Args:
        policy: the present one.
        fresh: as the policy starts.
        saved: with torch's keys.
        more: from `save_scale`; None if torch's scaler has saved it.
    """
    require(saved, ("scale", "_growth_tracker"), where="state_dict")
    scale = check_scale(saved["scale"])
    tracker = check_count("_growth_tracker", saved["_growth_tracker"], lowest=-policy.delay)
    if more is not None:
        if not isinstance(more, Mapping) or set(more) != {"policy", "hysteresis", "state"}:
            raise BadState(f"the scale policy in the state_dict does not fit: {more!r:.80}.")
        numbers = read_more(policy, more["state"])
        hysteresis = check_count("hysteresis", more["hysteresis"], lowest=-(2**31))
        fresh.hysteresis.fill_(hysteresis)
        for name, value in numbers.items():
            fresh.more[name].fill_(value)
    low, high = policy.bounds()
    fresh.scale.fill_(min(max(scale, low), high))
    fresh.growth_tracker.fill_(tracker)


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


def read_memory(policy: Any, saved: Any, count: int) -> dict[str, Tensor] | None:
    """What the clip policy remembers, as a new one would lay it out, or BadState."""
    memory: dict[str, Tensor] | None = policy.start(torch.device("cpu"), count)
    if memory is None or saved is None:  # It remembers nothing, or was saved before its first step.
        return None
    if not isinstance(saved, Mapping) or set(saved) != set(memory):
        raise BadState(
            f"the state of the clip policy {policy.policy_name} in the state_dict must have "
            f"{', '.join(map(repr, memory))}, got {saved!r:.100}."
        )
    for name, tensor in memory.items():
        numbers = saved[name] if isinstance(saved[name], list) else [saved[name]]
        if len(numbers) != tensor.numel() or isinstance(saved[name], list) != bool(tensor.dim()):
            raise BadState(
                f"{name} of the clip policy {policy.policy_name} in the state_dict has "
                f"{len(numbers)} numbers, expected {tensor.numel()}. It was saved with another "
                "model or another window."
            )
        if tensor.is_floating_point():
            numbers = [math.inf if number is None else number for number in numbers]
        checked = [check_number(name, number) for number in numbers]
        whole = tensor.is_floating_point() or all(isinstance(number, int) for number in numbers)
        if min(checked) < 0.0 or not whole:
            what = "numbers" if tensor.is_floating_point() else "whole numbers"
            raise BadState(
                f"{name} of the clip policy {policy.policy_name} in the state_dict must hold "
                f"{what} of at least 0, got {saved[name]!r:.80}."
            )
        tensor.copy_(torch.tensor(checked, dtype=torch.float64).reshape(tensor.shape))
    return memory


def rebuild(policy: Any, described: Any, kind: str, *, owner: str = "control") -> Any:
    """The policy that was saved, of the class of the present one, or BadState."""
    present = policy.policy_name
    name = described.get("name") if isinstance(described, Mapping) else None
    if name != present:
        argument = "policy" if (owner, kind) == ("scaler", "scale") else kind
        maker = "chain" if name == "Chain" else name
        raise BadState(
            f"the state_dict was saved with the {kind} policy {name}, this {owner} has {present}. "
            f"Make the {owner} with {argument}={maker}(...), or start without the state_dict."
        )
    try:
        if isinstance(policy, Chain):
            parts = described["config"]["policies"]
            pairs = zip(policy.policies, parts, strict=True)
            return Chain(tuple(rebuild(each, part, kind, owner=owner) for each, part in pairs))
        made = type(policy.as_given)(**described["config"])
        return resolve_clip(made) if kind == "clip" else resolve_scale(made)
    except (KeyError, TypeError, ValueError) as error:
        raise BadState(f"the {kind} policy in the state_dict does not fit: {error}") from error


def with_settings(policy: Any, settings: Mapping[str, Any]) -> Any:
    """`policy` with the settings of a checkpoint, or BadState."""
    try:
        return dataclasses.replace(policy, **settings)
    except (TypeError, ValueError) as error:
        raise BadState(f"the state_dict does not fit: {error}") from error


def require(saved: Mapping[str, Any], keys: tuple[str, ...], *, where: str) -> None:
    missing = [key for key in keys if key not in saved]
    if missing:
        raise MissingKey(
            f"{where} has no {', '.join(repr(key) for key in missing)}; it has "
            f"{', '.join(repr(key) for key in saved)}. Expected what state_dict() of a "
            "GradientControl or of torch's GradScaler returns."
        )


def check_scale(value: Any) -> float:
    scale = check_number("scale", value)
    if not SMALLEST <= scale <= LARGEST:
        raise BadState(f"the scale in the state_dict must be positive and finite, got {value}.")
    return scale


def check_number(name: str, value: Any) -> float:
    """`value` as a float, or BadState."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise BadState(f"{name} in the state_dict must be a number, got {value!r}.")
    return float(value)


def check_count(name: str, value: Any, *, lowest: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31:
        raise BadState(f"{name} in the state_dict must be a whole number, got {value!r}.")
    return value
