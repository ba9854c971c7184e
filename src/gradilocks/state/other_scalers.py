"""What other systems save of their scaler, in the words of torch's.

A dict of Megatron-LM, DeepSpeed, fairseq or apex in; scale, trackers and settings out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gradilocks.errors import BadState
from gradilocks.step.outcome import fetch

__all__ = ["OtherScaler", "recognize"]


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
    if {"cur_scale", "cur_iter", "last_overflow_iter"} <= keys:
        return _deepspeed(saved, policy)
    inner = saved.get("loss_scaler0")
    if isinstance(inner, Mapping) and {"loss_scale", "unskipped"} <= set(inner):
        return OtherScaler("apex", _number(inner["loss_scale"]), _whole(inner, "unskipped"))
    if "loss_scale" in saved and "scale" not in saved:
        return OtherScaler("fairseq", _number(saved["loss_scale"]), 0)
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
        factor = _number(saved["scale_factor"])
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 1:
            raise BadState(f"scale_factor in the state_dict must be above 1, got {factor!r}.")
        settings.update(growth_factor=float(factor), backoff_factor=1.0 / factor)
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


def _whole(saved: Mapping[str, Any], name: str, *, lowest: int = 0) -> int:
    value = _number(saved[name])
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31:
        raise BadState(f"{name} in the state_dict must be a whole number, got {value!r}.")
    return value
