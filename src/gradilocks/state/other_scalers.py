"""What other systems save of their scaler, in the words of torch's.

A dict of Megatron-LM, DeepSpeed, fairseq or apex in; scale, trackers and settings out. ZeRO of
DeepSpeed saves no numbers but its scaler itself, an object, under "loss_scaler".
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradilocks.errors import BadState
from gradilocks.step.outcome import fetch

__all__ = ["OtherScaler", "recognize"]

_logger = logging.getLogger("gradilocks")
_DEEPSPEEDS = {"cur_scale", "cur_iter", "last_overflow_iter"}
_APEXS = {"loss_scale", "unskipped"}


class OtherScaler(NamedTuple):
    """The state of another system's scaler."""

    system: str
    """Its name."""
    scale: Any
    growth_tracker: int
    hysteresis: int | None = None
    settings: Mapping[str, Any] = {}
    """What it saves of its rule, in the words of DynamicScale."""

    def as_torch_saves(self) -> dict[str, Any]:
        """Scale, tracker and settings under the keys of torch's `GradScaler.state_dict()`."""
        return {"scale": self.scale, "_growth_tracker": self.growth_tracker, **self.settings}


def recognize(saved: Mapping[str, Any], policy: Any) -> OtherScaler | None:
    """The state that `saved` holds, or None if it is of none of these systems.

    Args:
        saved: a dict.
        policy: what is to go on with it; of one with a growth interval, DeepSpeed's count is
            turned into a tracker.
    """
    keys = set(saved)
    if {"scale", "growth_tracker", "hysteresis_tracker"} <= keys:
        return OtherScaler(
            "Megatron-LM",
            _number(saved["scale"]),
            _whole(saved, "growth_tracker"),
            _whole(saved, "hysteresis_tracker", lowest=-(2**31)),
        )
    if keys >= _DEEPSPEEDS:
        return _deepspeed(saved, policy)
    if "loss_scaler" in keys and (zero := _zeros(saved["loss_scaler"])) is not None:
        return _deepspeed(zero, policy)
    losses = [value for key, value in saved.items() if re.fullmatch(r"loss_scaler\d+", str(key))]
    if losses and all(isinstance(each, Mapping) and set(each) >= _APEXS for each in losses):
        return _apex(losses)
    if "loss_scale" in saved and "scale" not in saved:
        return OtherScaler("fairseq", _number(saved["loss_scale"]), 0)
    return None


def _apex(losses: Sequence[Mapping[str, Any]]) -> OtherScaler:
    """apex has a scaler for each loss; one scale for all of them is one that overflowed in none."""
    scales = [_positive(each, "loss_scale") for each in losses]
    trackers = [_whole(each, "unskipped") for each in losses]
    if len(set(scales)) > 1:
        _logger.warning(
            "the state_dict of apex has %d losses with a scale each (%s); here one scale serves "
            "all of them, and it goes on from the smallest.",
            len(losses),
            ", ".join(f"{scale:g}" for scale in scales),
        )
    return OtherScaler("apex", min(scales), min(trackers))


def _zeros(scaler: Any) -> Mapping[str, Any] | None:
    """The attributes of a scaler that ZeRO has saved; None if it is something else."""
    known = scaler if isinstance(scaler, Mapping) else getattr(scaler, "__dict__", {})
    if set(known) >= _DEEPSPEEDS:
        return known
    if "cur_scale" in known:
        raise BadState(
            f"the state_dict of DeepSpeed has a scale that never moves, {known['cur_scale']!r}. "
            f"Say so without the state_dict: GradientControl(scale={known['cur_scale']!r}), "
            f"GradScaler(policy=StaticScale({known['cur_scale']!r}))."
        )
    return None


def _deepspeed(saved: Mapping[str, Any], policy: Any) -> OtherScaler:
    finite = _whole(saved, "cur_iter") - 1 - _whole(saved, "last_overflow_iter", lowest=-1)
    if finite < 0:
        raise BadState(
            f"cur_iter must be after last_overflow_iter in the state_dict of DeepSpeed, got "
            f"{saved['cur_iter']} and {saved['last_overflow_iter']}."
        )
    settings: dict[str, Any] = {}  # The rule, where its optimizer has saved it beside the state.
    if "scale_window" in saved:
        settings["growth_interval"] = _whole(saved, "scale_window", lowest=1)
    if "scale_factor" in saved:
        factor = _positive(saved, "scale_factor")
        if not factor > 1:
            raise BadState(f"scale_factor in the state_dict must be above 1, got {factor!r}.")
        settings.update(growth_factor=factor, backoff_factor=1.0 / factor)
    if "delayed_shift" in saved:
        settings["hysteresis"] = _whole(saved, "delayed_shift", lowest=1)
    if "consecutive_hysteresis" in saved:
        settings["consecutive_hysteresis"] = saved["consecutive_hysteresis"]
    if "min_scale" in saved:
        lowest = _positive(saved, "min_scale")
        start = getattr(policy, "init_scale", lowest)  # It must not lie below the floor.
        settings.update(min_scale=lowest, init_scale=max(start, lowest))
    # It grows on the step after `growth_interval` finite ones: `delay` counts that step.
    tracker = finite - policy.delay
    if tracker > 0:
        tracker %= settings.get("growth_interval", getattr(policy, "growth_interval", 1))
    hysteresis = None
    if "cur_hysteresis" in saved:
        hysteresis = _whole(saved, "cur_hysteresis", lowest=-(2**31))
    return OtherScaler("DeepSpeed", _number(saved["cur_scale"]), tracker, hysteresis, settings)


def _number(value: Any) -> Any:
    """A tensor of one element as a number, anything else as it is."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        return value
    number = fetch(value.detach().reshape(()))[0]
    return number if value.is_floating_point() else int(number)


def _positive(saved: Mapping[str, Any], name: str) -> float:
    value = _number(saved[name])
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not 0.0 < value < math.inf:
        raise BadState(f"{name} in the state_dict must be positive and finite, got {value!r}.")
    return float(value)


def _whole(saved: Mapping[str, Any], name: str, *, lowest: int = 0) -> int:
    value = _number(saved[name])
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31:
        raise BadState(f"{name} in the state_dict must be a whole number, got {value!r}.")
    return value
