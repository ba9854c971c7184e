"""A GradientControl behind the face of torch.amp.GradScaler, for code that asks for a scaler.

A framework calls `scale`, `unscale_`, `step` and `update` of a scaler in its own order and for one
optimizer at a time; a control does the whole step. What comes in here is handed to the control's
own `scale_loss`, `unscale_(only=)` and `step(only=)`, so that a framework which knows only of
scalers clips, records and skips by the control. Made by `control.as_scaler()`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradilocks._torch import OptState, new_scaler_state

__all__ = ["ControlScaler"]

_TORCHS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class ControlScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, whose steps are those of a GradientControl.

    It is enabled whether the control scales or not: with `scale=None` a loss comes back as it is,
    and `step` still measures, clips and records. Where optimizers are handed to it that the control
    does not have, the control is bound to them.

    Args:
        control: whose steps.
        policies: whose settings count after `load_state_dict`, as `GradientControl.load_state_dict`
            has it.
    """

    steps_by_a_control: ClassVar[bool] = True
    """For a wrapper that steps through its scaler: inside a step of the control it hands on."""

    def __init__(self, control: Any, policies: str = "checkpoint") -> None:
        # torch's own attributes, which frameworks read: on "cpu", where it asks for no GPU.
        super().__init__("cpu", enabled=True)
        self.control = control
        """The GradientControl behind it."""
        self._has_stepped, self._policies = False, policies

    def __reduce__(self) -> Any:
        return ControlScaler, (self.control, self._policies)

    def __repr__(self) -> str:
        return f"{self.control!r}.as_scaler()"

    # --- what torch keeps as attributes, and frameworks read ------------------------------------

    @property
    def _scale(self) -> Tensor | None:
        return self.control._engine.state.scale  # type: ignore[no-any-return]

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        """torch's constructor sets it; the control's own is the one that counts."""

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self.control._engine.state.growth_tracker  # type: ignore[no-any-return]

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        """As that of `_scale`."""

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self.control._engine.move_to(dev)

    # --- the contract ---------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or every tensor of an iterable, by the scale of the control."""
        if isinstance(outputs, Tensor):
            if outputs.requires_grad:
                return self.control.scale_loss(outputs)
            # Of no use for training; torch multiplies it, and so is it done here.
            return outputs * self.control.scale if self.control._engine.scales else outputs
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}."
        )

    def unscale_(self, optimizer: Any) -> None:
        """Divides the optimizer's gradients by the scale, looking for NaN and Inf on the way.

        Nothing to do if the control has no scale.
        """
        self._meet(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        state["found_inf_per_device"] = self.control._unscale_for_scaler(optimizer)
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """`control.step(only=optimizer)`.

        Args:
            optimizer: of the control, or one that it is bound to from here on.
            args, kwargs: as None, for a closure that is not there; a closure is refused, as by
                torch's.
        """
        given = [*args, *kwargs.values()]
        if any(each is not None for each in given):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled, nor are other "
                "arguments of optimizer.step(). GradientControl.step(closure) takes one."
            )
        if self.control._is_inside_step:  # What it steps asks its scaler to be stepped.
            return optimizer.step()  # type: ignore[no-any-return]
        self._meet(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        outcome = self.control.step(only=optimizer)
        state["stage"], self._has_stepped = OptState.STEPPED, True
        skipped = outcome.tensors["skipped"]
        state["found_inf_per_device"] = {skipped.device: skipped}
        return None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale on by the steps since the last `update`, or sets it to `new_scale`."""
        self.control._update_scale(new_scale)
        self._has_stepped = False
        self._per_optimizer_states = defaultdict(new_scaler_state)

    def get_scale(self) -> float:
        """The scale; 1.0 if the control has none. Reading it waits for the device.

        Until `update` it is the one that the gradients of this iteration carry, as torch has it.
        """
        outcome = self.control.outcome
        if self._has_stepped and outcome is not None:
            return outcome.scale  # type: ignore[no-any-return]
        return self.control.scale  # type: ignore[no-any-return]

    def is_enabled(self) -> bool:
        """True: `step` is the control's, whether it scales or not."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """That of the control, with all keys of torch's, so that torch's scaler loads it too."""
        return {**self._settings(), **self.control.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of this class, of a control, or of torch's scaler.

        Of torch's, a policy other than DynamicScale takes the scale alone, and a control without a
        scale nothing. An empty one, as a disabled scaler saves it, changes nothing.
        """
        if state_dict:
            self.control._load_scalers(state_dict, self._policies)

    def _settings(self) -> dict[str, Any]:
        policy = self.control._engine.scale_policy.as_given
        return {name: getattr(policy, name, default) for name, default in _TORCHS.items()}

    def get_growth_factor(self) -> float:
        """Of the control's policy; torch's own if it has none."""
        return self._settings()["growth_factor"]  # type: ignore[no-any-return]

    def get_backoff_factor(self) -> float:
        """As `get_growth_factor`."""
        return self._settings()["backoff_factor"]  # type: ignore[no-any-return]

    def get_growth_interval(self) -> int:
        """As `get_growth_factor`."""
        return self._settings()["growth_interval"]  # type: ignore[no-any-return]

    def set_growth_factor(self, new_factor: float) -> None:
        """Refused: the scale is ruled by the control's policy."""
        self._refuse_setting("growth_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """As `set_growth_factor`."""
        self._refuse_setting("backoff_factor")

    def set_growth_interval(self, new_interval: int) -> None:
        """As `set_growth_factor`."""
        self._refuse_setting("growth_interval")

    def _refuse_setting(self, name: str) -> None:
        raise RuntimeError(
            f"the scale is ruled by {self.control._engine.scale_policy!r} of a GradientControl, "
            f"which does not change. Make a control with another {name}, such as "
            f"GradientControl(scale=DynamicScale({name}=...))."
        )

    def _meet(self, optimizer: Any) -> None:
        """Binds the control to an optimizer that it does not have."""
        self.control._meet(optimizer)
