"""Transformers' Trainer, with the whole step of a GradientControl in it.

Settings enter as a GradientControlCallback, which makes of its Trainer one that has the methods of
GradientControlMixin; what Accelerate needs, `gradilocks.integrations.accelerate` does. The loss is
scaled, the gradients measured, clipped and stepped by the control; the Trainer's log has its norm,
its scale and the steps that it skipped; the Trainer's checkpoints have its state.

Needs the `transformers` package, and `accelerate`, which its Trainer needs too.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradilocks import GradientControl, Outcome, Recorder
from gradilocks.errors import MissingPackage
from gradilocks.integrations.accelerate import take_control

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise MissingPackage("Transformers is not installed: pip install transformers") from error

__all__ = ["GradientControlCallback", "GradientControlMixin", "GradientControlTrainer"]

STATE_NAME = "gradient_control.pt"
"""The file in a checkpoint, where the Trainer by itself would have no scaler to save."""
_KEPT = 1000
"""So many steps since the last log are kept for it whole."""
_USUAL_CLIP = 1.0
"""`TrainingArguments.max_grad_norm`, if nobody has said anything."""


class GradientControlCallback(TrainerCallback):  # type: ignore[misc]
    """Has a GradientControl take every step of the Trainer that it is given to.

    Args:
        clip: a number (the largest norm), a clip policy, or None; by default the `max_grad_norm` of
            the TrainingArguments, of which 0 is none. A `max_grad_norm` that is neither the same
            nor its usual 1.0 is refused beside it.
        scale: "auto" scales with `fp16=True` and not otherwise; or "dynamic", None, a number or a
            scale policy.
        record: a path for a run file, a Recorder, or None. A path is gone on with when training is
            resumed from a checkpoint, and when `train` is called again; a Trainer with `model_init`
            trains another model then, whose file has a number in its name.
        config: with a path, what the header of the run file is to tell of how the run was made; by
            default the TrainingArguments.
        adopt: whether torch's Adam, AdamW and SGD, as the `optim="adamw_torch_fused"` that is the
            Trainer's default, become those of `gradilocks.optim`.
        settings: whatever else `GradientControl` takes, as `on_nonfinite="raise"`.

    Example:
        >>> control = GradientControlCallback(clip=1.0, record="runs/a.jsonl")
        >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[control])
        >>> trainer.train()
    """

    def __init__(
        self,
        *,
        clip: object = "max_grad_norm",
        scale: object = "auto",
        record: str | os.PathLike[str] | Recorder | None = None,
        config: Mapping[str, Any] | None = None,
        adopt: bool = False,
        **settings: Any,
    ) -> None:
        self.control: GradientControl | None = None
        """The control, as soon as there is a Trainer."""
        self.has_stepped = False
        """For the Trainer: whether it has stepped and not asked for the learning rate since."""
        self._clip, self._scale, self._adopt, self._settings = clip, scale, adopt, settings
        self._record, self._config = record, config
        self._trainer: Any = None
        self._start: dict[str, Any] = {}
        self._scales = False
        self._recorded = 0
        # Of steps that the Trainer has not logged yet; and of still older ones, how many were
        # skipped and clipped.
        self._outcomes: deque[Outcome] = deque()
        self._older: Tensor | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the control of the Trainer that is being made."""
        trainer = _trainer_of(self)
        if trainer is None:
            return
        kind = type(trainer)
        if not isinstance(trainer, GradientControlMixin):
            home = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            trainer.__class__ = type(kind.__name__, (GradientControlMixin, kind), home)
        self.take(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises if nobody has been taken control of: the optimizer would step without it."""
        if self.control is None:
            raise ValueError(
                "this GradientControlCallback came to its Trainer after that was made, when its "
                "optimizer cannot be taken over any more. Hand it over in Trainer(callbacks=...), "
                "or use GradientControlTrainer."
            )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps what became of the step for the next log."""
        self.has_stepped = True
        if self.control is not None and self.control.outcome is not None:
            self._outcomes.append(self.control.outcome)
        if len(self._outcomes) > _KEPT:
            counts = _counted(self._outcomes.popleft())
            self._older = counts if self._older is None else self._older + counts

    def take(self, trainer: Any) -> None:
        """For the Trainer: makes the control, once."""
        if self._trainer is not None:
            if self._trainer is not trainer:
                raise ValueError(
                    "a GradientControlCallback belongs to one Trainer, whose scale and statistics "
                    "it keeps. Make another one for the other Trainer."
                )
            return
        callbacks = trainer.callback_handler.callbacks
        count = sum(isinstance(each, GradientControlCallback) for each in callbacks)
        if count > 1:
            raise ValueError(
                f"a Trainer has one GradientControlCallback, and this one was given {count}."
            )
        self.control = take_control(
            trainer.accelerator,
            clip=self._resolved_clip(trainer.args),
            scale=self._scale,
            adopt=self._adopt,
            **self._settings,
        )
        self._trainer = trainer
        by_itself = trainer.accelerator.had_scaler
        self._scales = by_itself if self._scale == "auto" else self._scale is not None
        self._start = self.control.state_dict()

    def _resolved_clip(self, args: Any) -> object:
        told = args.max_grad_norm
        if self._clip == "max_grad_norm":
            return told if told > 0 else None
        if told not in (0, _USUAL_CLIP, getattr(self._clip, "max_norm", self._clip)):
            raise ValueError(
                f"TrainingArguments(max_grad_norm={told}) stands beside GradientControlCallback("
                f"clip={self._clip!r}). Leave out one of them."
            )
        return self._clip

    @contextmanager
    def training(self, trainer: Any, *, resumes: bool) -> Iterator[None]:
        """For the Trainer: around its training. Records it, and hides no NaN in its losses.

        Args:
            trainer: whose training.
            resumes: whether it goes on from a checkpoint.
        """
        assert self.control is not None
        self._forget()
        if trainer.model_init is not None:  # It trains another model each time.
            self.control.load_state_dict(self._start)
        made = self._begin_record(trainer, resumes=resumes)
        recorder = self.control.recorder
        args, hides = trainer.args, trainer.args.logging_nan_inf_filter
        args.logging_nan_inf_filter = False
        try:
            yield
        except BaseException as error:
            if recorder is not None:
                recorder.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            args.logging_nan_inf_filter = hides
        if made is not None:
            made.close()
        elif recorder is not None:  # Somebody else's, who closes it.
            recorder.flush()

    def _begin_record(self, trainer: Any, *, resumes: bool) -> Recorder | None:
        """Attaches a recorder, if there is to be one and none is; one that it makes is returned."""
        assert self.control is not None
        now = self.control.recorder
        if self._record is None or (now is not None and now.recording):
            return None
        if isinstance(self._record, Recorder):
            self.control.attach(self._record)
            return None
        self._recorded += 1
        path, again = Path(self._record), self._recorded > 1
        if again and trainer.model_init is not None:  # Another model, so another run.
            path, again = path.with_stem(f"{path.stem}-{self._recorded}"), False
        config = trainer.args.to_sanitized_dict() if self._config is None else self._config
        return self.control.attach(path, config, exists="append" if resumes or again else "refuse")

    def numbers(self) -> tuple[dict[str, float], list[str]]:
        """For the Trainer's log: of the steps since the last one. Waits for the device.

        Returns:
            `grad_norm` of the last step; `loss_scale` if there is one; how many were skipped and
            clipped. And why each skipped one was.
        """
        outcomes, older = list(self._outcomes), self._older
        self._forget()
        if not outcomes:
            return {}, []
        counted = torch.stack(list(map(_counted, outcomes)))
        total = counted.sum(dim=0) if older is None else counted.sum(dim=0) + older
        numbers: dict[str, float] = {"grad_norm": outcomes[-1].norm}
        if self._scales:
            numbers["loss_scale"] = outcomes[-1].scale
        numbers["skipped_steps"], numbers["clipped_steps"] = total.tolist()
        flags = counted[:, 0].tolist()
        return numbers, [o.describe() for o, skip in zip(outcomes, flags, strict=True) if skip]

    def _forget(self) -> None:
        self._outcomes.clear()
        self._older = None


def _counted(outcome: Outcome) -> Tensor:
    """Whether it was skipped and whether it was clipped, on the device."""
    told = outcome.tensors
    return torch.stack([told["skipped"], told["clipped"]]).to(torch.int64)


if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class GradientControlMixin(_Base):  # type: ignore[misc]
    """Put before a Trainer class of your own: `class Mine(GradientControlMixin, SFTTrainer)`.

    Its settings are those of the GradientControlCallback among the Trainer's callbacks; without
    one, the defaults.
    """

    lr_scheduler: Any
    _gate: Any = None
    _logs_itself = False
    _has_logged = False

    @property
    def gradient_control(self) -> GradientControl:
        """The control that takes this Trainer's steps."""
        control = self._control_callback().control
        assert control is not None
        return control

    def _control_callback(self) -> GradientControlCallback:
        for each in self.callback_handler.callbacks:
            if isinstance(each, GradientControlCallback):
                each.take(self)
                return each
        self.add_callback(GradientControlCallback())
        return self._control_callback()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a run file ends with it, as "error" if it raises."""
        resumes = resume_from_checkpoint not in (None, False)
        with self._control_callback().training(self, resumes=resumes):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    # --- a step ---------------------------------------------------------------------------------

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the schedule waits for skipped steps, without reading which were."""
        made = super().create_scheduler(*args, **kwargs)
        control = self.gradient_control
        if made is self.lr_scheduler and made is not self._gate and control.optimizers:
            self.lr_scheduler = self._gate = control.scheduler(made)
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return None  # The control clips inside the step.

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor | None:
        usual = TrainerCallback.on_pre_optimizer_step
        callbacks = self.callback_handler.callbacks
        if any(type(each).on_pre_optimizer_step is not usual for each in callbacks):
            self.accelerator.unscale_gradients()  # They look at the gradients next.
        return None  # The step measures it, and it is wanted for the log.

    def _get_learning_rate(self) -> float:
        # After a step the loop asks for it just before it asks whether to step the schedule.
        callback = self._control_callback()
        if callback.has_stepped and self.lr_scheduler is self._gate:
            self.accelerator.let_schedule_decide()
        callback.has_stepped = False
        return float(super()._get_learning_rate())

    # --- the log --------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        outcome = self.gradient_control.outcome
        if outcome is not None:
            grad_norm = outcome.tensors["norm"]
        self._logs_itself, self._has_logged = True, False
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        finally:
            self._logs_itself = False
        if self._has_logged:  # The Trainer subtracts what it has logged, and NaN - NaN is NaN.
            tr_loss.zero_()

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with what became of the steps since the last time."""
        reasons: list[str] = []
        if self._logs_itself and "loss" in logs:
            self._has_logged = True
            numbers, reasons = self._control_callback().numbers()
            logs.update(numbers)
        super().log(logs, *args, **kwargs)
        if reasons:  # Here alone: what reports to other places takes numbers.
            self.state.log_history[-1]["culprits"] = reasons

    # --- checkpoints ------------------------------------------------------------------------------

    def _save_scaler(self, output_dir: str) -> None:
        # The Trainer cannot load a scaler's file where it has no scaler itself.
        if self.accelerator.had_scaler:
            super()._save_scaler(output_dir)
        elif self.args.should_save:
            torch.save(self.accelerator.scaler.state_dict(), os.path.join(output_dir, STATE_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        ours = None if checkpoint is None else Path(checkpoint) / STATE_NAME
        if ours is not None and ours.is_file():
            saved = torch.load(ours, map_location="cpu", weights_only=True)
            self.accelerator.scaler.load_state_dict(saved)
        else:
            super()._load_scaler(checkpoint)


class GradientControlTrainer(GradientControlMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer, stepped by a GradientControl.

    Its settings are those of the GradientControlCallback among its callbacks.

    Example:
        >>> trainer = GradientControlTrainer(model, args, train_dataset=rows)
        >>> trainer.train()
        >>> trainer.gradient_control.outcome.norm
    """


def _trainer_of(callback: GradientControlCallback) -> Any:
    """The Trainer that calls this callback: callbacks are told everything but whose they are."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    return None
