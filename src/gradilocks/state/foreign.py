"""What other systems save of their scaler, as what torch's would have saved.

A dict of Megatron-LM, DeepSpeed, fairseq or apex in; scale and trackers out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gradilocks.errors import BadState
from gradilocks.step.outcome import fetch

__all__ = ["Foreign", "recognized"]


class Foreign(NamedTuple):
    """The state of somebody else's scaler."""

    system: str
    scale: Any
    growth_tracker: int
    hysteresis: int | None = None
    settings: Mapping[str, Any] = {}
    """What it saves of its rule, in the words of DynamicScale."""


def recognized(saved: Mapping[str, Any], policy: Any) -> Foreign | None:
    """The state that `saved` holds, or None if it is of none of these systems.

    Args:
        saved: a dict.
        policy: the one that is to go on with it.
    """
    if {"scale", "growth_tracker", "hysteresis_tracker"} <= set(saved):
        return Foreign(
            "Megatron-LM",
            _number(saved["scale"]),
            _whole("growth_tracker", saved["growth_tracker"]),
            _whole("hysteresis_tracker", saved["hysteresis_tracker"], lowest=-(2**31)),
        )
    if {"cur_scale", "cur_iter", "last_overflow_iter"} <= set(saved):
        finite = _whole("cur_iter", saved["cur_iter"]) - 1
        finite -= _whole("last_overflow_iter", saved["last_overflow_iter"], lowest=-1)
        if finite < 0:
            raise BadState(
                f"cur_iter must be after last_overflow_iter in the state_dict of DeepSpeed, got "
                f"{saved['cur_iter']} and {saved['last_overflow_iter']}."
            )
        settings = _deepspeed(saved)
        delay = getattr(policy, "delay", 0)
        interval = settings.get("growth_interval", getattr(policy, "growth_interval", 1))
        # It grows on the step after `growth_interval` finite ones: `delay` counts that step.
        tracker = finite - delay
        if finite > delay:
            tracker %= interval
        left = None
        if "cur_hysteresis" in saved:
            left = _whole("cur_hysteresis", saved["cur_hysteresis"], lowest=-(2**31))
        scale = _number(saved["cur_scale"])
        return Foreign("DeepSpeed", scale, tracker, hysteresis=left, settings=settings)
    if "loss_scaler0" in saved and isinstance(saved["loss_scaler0"], Mapping):
        inner = saved["loss_scaler0"]
        if {"loss_scale", "unskipped"} <= set(inner):
            return Foreign(
                "apex", _number(inner["loss_scale"]), _whole("unskipped", inner["unskipped"])
            )
    if "loss_scale" in saved and "scale" not in saved:
        return Foreign("fairseq", _number(saved["loss_scale"]), 0)
    return None


def _deepspeed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The rule, where its optimizer has saved it beside the state."""
    settings: dict[str, Any] = {}
    if "scale_window" in saved:
        settings["growth_interval"] = _whole("scale_window", saved["scale_window"], lowest=1)
    if "scale_factor" in saved:
        factor = _number(saved["scale_factor"])
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 1:
            raise BadState(f"scale_factor in the state_dict must be above 1, got {factor!r}.")
        settings.update(growth_factor=float(factor), backoff_factor=1.0 / factor)
    return settings


def _number(value: Any) -> Any:
    """A tensor of one element as a number, anything else as it is."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        return value
    number = fetch(value.detach().reshape(()))[0]
    return number if value.is_floating_point() else int(number)


def _whole(name: str, value: Any, *, lowest: int = 0) -> int:
    value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31:
        raise BadState(f"{name} in the state_dict must be a whole number, got {value!r}.")
    return value
