"""Conversion of the state of a GradientControl to and from a dict. Settings are not loaded.

scale, growth_factor, backoff_factor, growth_interval, _growth_tracker     torch.amp.GradScaler's keys
gradilocks:
    version         version of this format
    steps, streak   counters
    scale_policy    class name
    scale_state     state of the policy other than scale and growth tracker
    clip            for each set of optimizers that stepped together ("0", "0,1") and each policy: class name and
                    state; a state with one number per parameter is a dict by parameter name
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradilocks.errors import BadState
from gradilocks.scale import LARGEST_SCALE
from gradilocks.step.phase import Phase

if TYPE_CHECKING:
    from gradilocks.control import GradientControl
    from gradilocks.step.plan import StepPlan

_VERSION = 3
_TORCH_SETTINGS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_TORCH_TENSORS = ("scale", "growth_tracker")
_LARGEST = torch.iinfo(torch.int32).max


def save(control: GradientControl) -> dict[str, Any]:
    """Returns the state of a control. Waits for the device."""
    state = control._state
    numbers = {name: tensor.item() for name, tensor in state.tensors.items()}
    all_indices = tuple(range(len(control.optimizers)))
    for indices in (all_indices, *((i,) for i in all_indices)):
        control._plan(indices)  # torch.distributed.checkpoint loads only the keys that a fresh control already has.
    return {
        "scale": float(numbers["scale"]),
        **{name: getattr(state.policy, name, default) for name, default in _TORCH_SETTINGS.items()},
        "_growth_tracker": int(numbers.get("growth_tracker", 0)),
        "gradilocks": {
            "version": _VERSION,
            "steps": int(state.steps),
            "streak": int(state.streak),
            "scale_policy": type(state.policy).__name__,
            "scale_state": {name: number for name, number in numbers.items() if name not in _TORCH_TENSORS},
            "clip": {_key(indices): _save_clip(control._plans[indices]) for indices in sorted(control._plans)},
        },
    }


def _save_clip(plan: StepPlan) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for index, (policy, state) in enumerate(zip(plan.clip.policies, plan.clip.states, strict=True)):
        entry: dict[str, Any] = {"policy": type(policy).__name__}
        for name, tensor in state.items():
            host = tensor.detach().cpu().clone()
            per_parameter = getattr(policy, "per", "model") == "tensor" and host.dim() == 1
            entry[name] = dict(zip(plan.names, host.unbind(), strict=True)) if per_parameter else host
        saved[str(index)] = entry
    return saved


def load(control: GradientControl, state_dict: Mapping[str, Any]) -> None:
    """Loads a state into a control; changes nothing if it does not fit.

    Raises:
        BadState: a missing key, an impossible value, or the state of another policy.
    """
    if "scale" not in _mapping(state_dict, "state_dict"):
        raise BadState(
            f"the state has no 'scale'; its keys are {list(state_dict)}. Pass the result of state_dict() of a control "
            "or a scaler."
        )
    state = control._state
    entries = _mapping(state_dict.get("gradilocks", {}), "gradilocks")
    if entries and entries.get("version") != _VERSION:
        raise BadState(
            f"the state has format {entries.get('version')!r}; this version reads format {_VERSION}. To load only the "
            "scale, pass {'scale': state['scale']}."
        )
    scale = _number(state_dict["scale"], "scale")
    if not 0.0 < scale <= LARGEST_SCALE:
        raise BadState(f"scale must be above 0 and finite, got {scale}.")
    if entries.get("scale_policy") == "NoneType":
        scale = state.scale.item()  # Saved without scaling: the policy of this control starts from its own scale.
    low, high = state.bounds
    numbers = {
        "scale": 1.0 if state.policy is None else min(max(scale, low), high),
        "growth_tracker": _count(state_dict.get("_growth_tracker", 0), "_growth_tracker"),
    }
    if entries and entries.get("scale_policy") == type(state.policy).__name__:
        for name, number in _mapping(entries.get("scale_state", {}), "scale_state").items():
            if name in state.tensors:
                is_count = not state.tensors[name].is_floating_point()
                numbers[name] = _count(number, name, least=-_LARGEST) if is_count else _number(number, name)
    steps, streak = (_count(entries.get(name, 0), name) for name in ("steps", "streak"))
    count = len(control.optimizers)
    plans = {_key(indices): indices for indices in (tuple(range(count)), *((i,) for i in range(count)))}
    clip_tensors: list[tuple[Tensor, Tensor]] = []
    for key, saved in _mapping(entries.get("clip", {}), "clip").items():
        if key not in plans:
            raise BadState(
                f"the state has clip state for optimizers {key}, which a control with {count} optimizers does not have."
            )
        clip_tensors += _read_clip(control._plan(plans[key]), _mapping(saved, "clip"))

    for name, tensor in state.tensors.items():
        if name in numbers:
            tensor.fill_(numbers[name])
    state.steps.fill_(steps)
    state.streak.fill_(streak)
    for tensor, saved in clip_tensors:
        tensor.copy_(saved)
    for phase in control._phases:
        phase.pending = None
        if phase.phase is not Phase.CLEAR:
            phase.enter(Phase.USED)  # The gradients carry the previous scale.


def _read_clip(plan: StepPlan, saved: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Checks the saved clip state against the policies; returns each tensor of the state with its saved value."""
    # Policies without state, such as ClipByNorm, are settings and may differ.
    pairs = zip(plan.clip.policies, plan.clip.states, strict=True)
    policies = [(type(policy).__name__, state) for policy, state in pairs if state]
    names = [name for name, _ in policies]
    entries = [_mapping(saved.get(str(index)), "clip") for index in range(len(saved))]
    entries = [entry for entry in entries if len(entry) > 1]
    found = [str(entry.get("policy")) for entry in entries]
    if found != names:
        raise BadState(
            f"the state is for clip policies {', '.join(found) or 'None'}; the control has "
            f"{', '.join(names) or 'None'}. Construct it with the same policies, or load only the scale: "
            "{'scale': state['scale']}."
        )
    loaded = []
    for (policy, state), entry in zip(policies, entries, strict=True):
        for name, tensor in state.items():
            value = entry.get(name)
            if isinstance(value, Mapping):
                # A parameter that the checkpoint does not have keeps its state.
                olds = zip(plan.names, tensor.tolist(), strict=True)
                value = torch.tensor([_number(value.get(key, old), key) for key, old in olds], dtype=tensor.dtype)
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise BadState(f"{policy} has {name} of shape {tuple(tensor.shape)}; the state has {shape}.")
            loaded.append((tensor, value))
    return loaded


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadState(f"{name} must be a dict, got {type(value).__name__}.")
    return value


def _key(indices: tuple[int, ...]) -> str:
    """Returns the key for optimizers that step together, such as "0,1"."""
    return ",".join(map(str, indices))


def _count(value: Any, name: str, *, least: int = 0) -> int:
    number = _number(value, name)
    if number != int(max(min(number, _LARGEST), least)):
        raise BadState(f"{name} must be an integer from {least} to {_LARGEST}, got {value!r}.")
    return int(number)


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise BadState(f"{name} must be a number, got {value!r}.")
    return value
