"""Transformers: a Trainer that steps with a GradientControl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import Trainer

from gradilocks.control import GradientControl
from gradilocks.integrations.accelerate import ControlledOptimizer, control_for
from gradilocks.outcome import Outcome

__all__ = ["GradientControlMixin", "GradientControlTrainer"]

_DEFAULT_MAX_GRAD_NORM = 1.0
if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


class GradientControlMixin(_Trainer):  # type: ignore[misc]
    """Mixin that gives a Trainer class a GradientControl: `class MyTrainer(GradientControlMixin, SFTTrainer)`.

    `max_grad_norm` is the clip. The log has the norm over all ranks as `grad_norm`, the number of skipped steps since
    the previous log as `skipped_steps`, and with fp16 the scale as `loss_scale`.

    Args:
        args, kwargs: arguments of the Trainer.
        control_options: arguments of GradientControl, such as `record`. A `clip` replaces `max_grad_norm`.
    """

    def __init__(self, *args: Any, control_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._options = dict(control_options or {})
        self._last_outcome: Outcome | None = None
        self._skipped_steps = 0
        self._has_logged = False
        super().__init__(*args, **kwargs)
        max_norm = self.args.max_grad_norm
        if "clip" in self._options and max_norm not in (0, _DEFAULT_MAX_GRAD_NORM):
            raise ValueError(f"max_grad_norm={max_norm:g} and control_options['clip'] are both given. Remove one.")
        self._options.setdefault("clip", max_norm if max_norm > 0 else None)

    @property
    def gradient_control(self) -> GradientControl:
        """The control; it exists once `train()` has prepared the optimizer."""
        if not isinstance(self.optimizer, ControlledOptimizer):
            raise RuntimeError(
                "this Trainer has no control yet. It is created by train(), in create_scheduler(); an override of that "
                "method must call super().create_scheduler(...)."
            )
        return self.optimizer.control

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the scheduler, and the control if the optimizer is prepared."""
        # train() calls this after preparing the optimizer and before loading a checkpoint.
        scheduler = super().create_scheduler(*args, **kwargs)
        is_prepared = isinstance(self.optimizer, AcceleratedOptimizer)
        if is_prepared and not isinstance(self.optimizer, ControlledOptimizer):
            control_for(self.accelerator, self.model, self.optimizer, **self._options)
        return scheduler

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Does nothing: the control clips within the step."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Unscales the gradients, so that callbacks can read them. The step measures the norm."""
        assert self.gradient_control is not None
        self.accelerator.unscale_gradients()

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        outcome = self.gradient_control.outcome
        if outcome is not None and outcome is not self._last_outcome:
            self._last_outcome = outcome
            self._skipped_steps += outcome.skipped
            grad_norm = outcome.norm
        self._has_logged = False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        if self._has_logged:
            tr_loss.zero_()  # The Trainer subtracts the logged loss from itself, and NaN - NaN is NaN.

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds `skipped_steps` and `loss_scale` to the log."""
        if "loss" in logs and "grad_norm" in logs:
            logs["skipped_steps"] = self._skipped_steps
            if self._last_outcome is not None and self.gradient_control._state.policy is not None:
                logs["loss_scale"] = self._last_outcome.scale
            self._skipped_steps, self._has_logged = 0, True
        super().log(logs, *args, **kwargs)


class GradientControlTrainer(GradientControlMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that steps with a GradientControl; see GradientControlMixin.

    Examples:
        trainer = GradientControlTrainer(model, args, train_dataset=rows, control_options={"record": "run.jsonl"})
        trainer.train()
        trainer.gradient_control.outcome.norm
    """
