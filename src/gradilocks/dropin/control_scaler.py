"""A GradientControl behind the interface of torch.amp.GradScaler, for frameworks that take a scaler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradilocks.torch_private import OptState, new_optimizer_state


class ControlScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that calls a GradientControl. Created by `control.as_scaler()`.

        scale(loss)          control.scale_loss(loss)
        unscale_(optimizer)  control.unscale_(only=optimizer)
        step(optimizer)      control.step(only=optimizer)
        update()             control.update()

    It is enabled even if the control does not scale: `step` still measures, clips and skips.

    Args:
        control: must have every optimizer that is passed to the scaler.
    """

    def __init__(self, control: Any) -> None:
        super().__init__("cpu", enabled=True)
        self.control = control
        """The GradientControl."""
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if hasattr(control._state.policy, name):  # Otherwise torch's default.
                setattr(self, f"_{name}", getattr(control._state.policy, name))

    def __repr__(self) -> str:
        return f"{self.control!r}.as_scaler()"

    # torch's constructor sets these two; frameworks read them.
    @property
    def _scale(self) -> Tensor | None:
        return self.control._state.scale if hasattr(self, "control") else None

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        pass

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self.control._state.tensors.get("growth_tracker") if hasattr(self, "control") else None

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        pass

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self.control._state.to(torch.device(dev))

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or every tensor of an iterable, by the scale."""
        if isinstance(outputs, Tensor):
            return self.control.scale_loss(outputs) if outputs.requires_grad else outputs * self.control._state.scale
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}.")

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of one optimizer by the scale in place."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self.control.unscale_(only=optimizer)
        state["stage"] = OptState.UNSCALED
        flag = self.control._phases[self.control._indices(optimizer)[0]].overflow
        if flag is not None:
            state["found_inf_per_device"] = {flag.device: flag}

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Steps one optimizer, or skips the step.

        Args:
            optimizer: one of the control's optimizers.
            args, kwargs: must be None. torch's interface has them for a closure, which is not supported.
        """
        if any(argument is not None for argument in (*args, *kwargs.values())):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled. Call control.step(closure) instead."
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self.control.step(only=optimizer)
        phase = self.control._phases[self.control._indices(optimizer)[0]]
        flag = phase.pending.overflow.to(torch.float32)
        state["stage"], state["found_inf_per_device"] = OptState.STEPPED, {flag.device: flag}

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale, or sets it to `new_scale`."""
        self.control.update(new_scale)
        self._per_optimizer_states = defaultdict(new_optimizer_state)

    def state_dict(self) -> dict[str, Any]:
        """The state of the control, which `torch.amp.GradScaler` loads too."""
        return self.control.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of a control or of a `torch.amp.GradScaler` into the control."""
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        self.control.load_state_dict(state_dict)

    def set_growth_factor(self, new_factor: float) -> None:
        """Raises RuntimeError: the factor belongs to the control's policy."""
        self._reject_setting("growth_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Raises RuntimeError: the factor belongs to the control's policy."""
        self._reject_setting("backoff_factor")

    def set_growth_interval(self, new_interval: int) -> None:
        """Raises RuntimeError: the interval belongs to the control's policy."""
        self._reject_setting("growth_interval")

    def _reject_setting(self, name: str) -> None:
        raise RuntimeError(
            f"{name} cannot be changed: the scale follows {self.control._state.policy!r}. Construct the control with "
            f"scale=DynamicScale({name}=...)."
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the scaler of a control cannot be pickled. Save control.state_dict() instead.")
