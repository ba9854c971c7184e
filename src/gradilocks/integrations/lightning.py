"""Lightning's Trainer: a callback that puts a GradientControl in front of the precision plugin.

`Trainer(callbacks=[GradientControlCallback(...)])` enters. When `fit` begins, the precision plugin
that was chosen (by `precision=` or `plugins=`) is replaced by one like it, whose loss carries the
control's scale and whose step is the control's. Schedules wait for skipped steps, and checkpoints
carry the control's state. Works with `lightning` and with `pytorch_lightning`, whichever is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradilocks import ClipByNorm, ClipByValue, GradientControl, Outcome, Recorder, chain, optim
from gradilocks.errors import MissingPackage
from gradilocks.integrations.lightning_precision import (
    ControlledPrecision,
    in_front_of,
    needs_closure,
    rank_options,
    scale_for,
)

__all__ = ["GradientControlCallback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LOGGED = ("norm", "scale", "skipped")
_LOGGABLE = ("norm", "scale", "limit", "clipped", "skipped")
_STATE = "gradilocks"
"""Where a checkpoint of Lightning's has the control's state."""
_TORCHS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""What the state of torch's scaler has, which Lightning's own plugin loads."""


def _packages() -> list[Any]:
    """The packages of Lightning's that the process has imported; all that it could, if none.

    Whose Trainer will be used is not known yet, and each takes only callbacks of its own.
    """
    found = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    if not found:
        there = [n for n in _PACKAGES if importlib.util.find_spec(n.partition(".")[0]) is not None]
        found = [importlib.import_module(name) for name in there]
    if not found:
        raise MissingPackage("Lightning is not installed: pip install lightning")
    return found


class GradientControlCallback(*(package.Callback for package in _packages())):  # type: ignore[misc]
    """Scales, checks, clips and steps the training of a Lightning Trainer by a GradientControl.

    Args:
        scale: "auto" scales dynamically where the Trainer itself would ("16-mixed"), beginning with
            its scaler's settings, and not at all elsewhere; else as GradientControl takes it.
        clip: None, a number (the largest norm) or a clip policy. `Trainer(gradient_clip_val=...)`
            and `self.clip_gradients(...)` are taken as well, also with fused optimizers; where both
            are given they must say the same.
        record: a path for a run file, a folder ("runs/") in which it gets a name of its own, a
            Recorder, or None. With a file, a run that is resumed by `ckpt_path`, or
            fitted again, continues the file. `fast_dev_run` records nothing.
        config: with a path as `record`, what its header is to tell of how the run was made.
        log: which numbers of each step go to `self.log`, as "gradilocks/norm": any of "norm",
            "scale", "limit", "clipped", "skipped", or a mapping from these to names of your own;
            None for none. "skipped" is how many steps were, since they were last logged. Of several
            optimizers each has its number behind the name.
        adopt: whether torch's Adam, AdamW and SGD become those of `gradilocks.optim` when `fit`
            begins; another optimizer raises TypeError then.
        options: the further options of GradientControl: on_nonfinite, give_up_after, keep_bad_step,
            process_group, mesh, distinct, copies, check_replicas_every.

    Raises:
        ValueError, TypeError: an option that GradientControl does not take.

    Example:
        >>> callback = GradientControlCallback(clip=1.0, record="runs/a.jsonl")
        >>> trainer = Trainer(precision="16-mixed", callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        scale: object = "auto",
        clip: object = None,
        record: str | os.PathLike[str] | Recorder | None = None,
        config: Mapping[str, Any] | None = None,
        log: Sequence[str] | Mapping[str, str] | None = _LOGGED,
        adopt: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        # What is wrong is said here, and not when a machine has been waited for.
        known = {name: options[name] for name in options if name != "keep_bad_step"}
        GradientControl(scale=None if scale == "auto" else scale, clip=clip, **known)
        if config is not None and (record is None or isinstance(record, Recorder)):
            raise ValueError(
                "config= goes into the header of a run file that the callback makes: give its path "
                "as record=, or give config= to the Recorder."
            )
        if record is not None and not isinstance(record, (str, os.PathLike, Recorder)):
            raise TypeError(
                "record must be a path such as 'runs/a.jsonl', a gradilocks.Recorder or None, got "
                f"{type(record).__name__}."
            )
        self._scale, self._clip, self._options = scale, clip, options
        self._record, self._config = record, config
        self._log, self._adopts = _checked_names(log), adopt
        self._plugin: _TrainerPrecision | None = None

    @property
    def control(self) -> GradientControl | None:
        """What controls the training that began last with this callback; None before one has."""
        return None if self._plugin is None else self._plugin.control

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plugin": None}  # A copy serves another Trainer.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Puts itself in front of the precision plugin, before the strategy asks for it."""
        if stage != "fit":
            return
        if sum(isinstance(each, GradientControlCallback) for each in trainer.callbacks) > 1:
            raise ValueError(
                "the Trainer has more than one GradientControlCallback, and a step has one "
                "decision. Give it one callback with the options of both."
            )
        plugin = trainer.strategy.precision_plugin
        if not isinstance(plugin, _TrainerPrecision) or plugin.callback is not self:
            native = plugin.native if isinstance(plugin, _TrainerPrecision) else plugin
            plugin = in_front_of(native, _TrainerPrecision, used_by="GradientControlCallback")
            plugin.callback, plugin.trainer = self, trainer
        self.clip_for(trainer)  # Raises if there are two.
        trainer.strategy.precision_plugin = self._plugin = plugin

    def clip_for(self, trainer: Any) -> object:
        """What bounds the steps of a Trainer whose module asks for nothing else."""
        value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        return self.agreed_clip(_clip_of(value, algorithm))

    def agreed_clip(self, asked: object) -> object:
        """What bounds a step: the callback's clip or the Trainer's; raises if they differ."""
        mine = ClipByNorm(self._clip) if isinstance(self._clip, (int, float)) else self._clip
        if mine is not None and asked is not None and mine != asked:
            raise ValueError(
                f"two clips: GradientControlCallback(clip={self._clip!r}) and {asked!r}, which "
                "Trainer(gradient_clip_val=...) or self.clip_gradients(...) has asked for. Give "
                "one of them."
            )
        return asked if mine is None else mine

    def adopted(self, optimizers: Sequence[Any]) -> Sequence[Any]:
        """The same optimizers, of `gradilocks.optim` if that was asked for.

        As they came from the module: Lightning makes its wrappers around them anew.
        """
        return [optim.adopt(each) for each in optimizers] if self._adopts else optimizers

    def control_by(self, plugin: _TrainerPrecision, optimizers: Sequence[Any], model: Any) -> None:
        """Makes the control over what the Trainer has made, and hands it to the plugin."""
        trainer, scale = plugin.trainer, scale_for(self._scale, plugin.native)
        control = GradientControl(
            *optimizers,
            model=model,
            scale=scale,
            clip=self.clip_for(trainer),
            **{**self._options, **rank_options(self._options, trainer.strategy, [model])},
        )
        plugin.follow(control, scales=scale is not None)
        plugin.clip = self.clip_for(trainer)

    def record_by(self, control: GradientControl, trainer: Any, *, again: bool) -> None:
        """Has a `fit` that begins recorded; one that goes on continues its file."""
        if self._record is None or trainer.fast_dev_run or control.recorder is self._record:
            return
        if isinstance(self._record, Recorder):
            control.attach(self._record)
        else:
            exists = "append" if again or trainer.ckpt_path else "refuse"
            control.attach(self._record, self._config, exists=exists)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the numbers of the latest step, if somebody will read them, and does not wait.

        Lightning takes 0.4 ms of the host for a number that is logged (30 % of a small model's
        step for three), so it is told of them at every `log_every_n_steps`-th step, as loggers are.
        """
        plugin = self._plugin
        if plugin is None or not plugin.has_stepped:
            return
        plugin.has_stepped = False
        if trainer.barebones or not (plugin.is_monitored or _is_read(trainer)):
            return
        for number, outcome in plugin.outcomes.items():
            values = {**outcome.tensors, **plugin.skipped[number]}
            named = {name: values[which].float() for which, name in self.logged(number).items()}
            pl_module.log_dict(named, on_step=True, on_epoch=False, batch_size=1)
        plugin.outcomes, plugin.skipped = {}, {}

    def logged(self, number: int | None) -> dict[str, str]:
        """What is logged of an optimizer → under which name; None for one that is alone."""
        behind = "" if number is None else f"-{number}"
        return {which: name + behind for which, name in self._log.items()}

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Closes the run file with what has ended the run."""
        recorder = None if self.control is None else self.control.recorder
        if recorder is not None and trainer.state.fn == "fit":
            recorder.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Closes the run file, if this callback has made it."""
        recorder = None if self.control is None else self.control.recorder
        if stage == "fit" and recorder is not None and recorder is not self._record:
            recorder.close()


class _TrainerPrecision(ControlledPrecision):
    """What the Trainer asks of a precision plugin."""

    callback: GradientControlCallback
    trainer: Any
    outcomes: dict[int | None, Outcome]
    """By the number of the optimizer, None if it is alone: its latest step, until it is logged."""
    skipped: dict[int | None, dict[str, Tensor]]
    """By the same: how many of its steps were skipped since, if that is logged."""
    has_stepped = False
    """Whether this batch has led to a step."""
    is_monitored = False
    """Whether a callback or a schedule goes by a number that is logged: then at every step."""
    asked: dict[int | None, object]
    """By the same: the clip that was asked for since its last step."""
    clip: object
    looked_at: bool
    """Whether somebody looks at gradients before the step, and is to see them without the scale."""
    _after_closure: Callable[[Any, Any], None]
    """Lightning's own: calls the hooks between backward and step, and asks for the clip."""
    is_loaded = False
    """Whether the checkpoint that is being loaded has told the control's own state."""

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        inner: Any = super()
        model, optimizers, lr_schedulers = inner.connect(model, optimizers, lr_schedulers)
        params = [p for each in optimizers for p in inner.main_params(each)]
        # Without `configure_optimizers` there is an optimizer that has nothing to train.
        if self.trainer.state.fn == "fit" and any(param.requires_grad for param in params):
            control = self._begin(model, optimizers)
            monitors = [each.monitor for each in lr_schedulers]
            monitors += [getattr(each, "monitor", None) for each in self.trainer.callbacks]
            numbers = map(self._number, optimizers)
            names = {name for n in numbers for name in self.callback.logged(n).values()}
            self.is_monitored = not names.isdisjoint(monitors)
            for config in lr_schedulers:
                if callable(getattr(config.scheduler, "step", None)):  # Else it is stepped by hand.
                    config.scheduler = control.scheduler(config.scheduler, every_call=True)
        return model, optimizers, lr_schedulers

    def _begin(self, model: Any, optimizers: list[Any]) -> GradientControl:
        """The control of the `fit` that begins, over the optimizers that have been made for it."""
        again = self.control is not None
        self.outcomes, self.skipped, self.asked = {}, {}, {}
        self.callback.adopted(optimizers)
        if self.control is None:
            self.callback.control_by(self, optimizers, model)
            assert self.control is not None
        else:
            self.control.bind(*optimizers, model=model)
        self.callback.record_by(self.control, self.trainer, again=again)
        self.looked_at = _somebody_looks(self.trainer)
        return self.control

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        inner: Any = super()
        return inner.pre_backward(self.scaled(tensor), module)  # type: ignore[no-any-return]

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        inner: Any = super()
        if self.control is None:
            return inner.optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if kwargs:
            raise TypeError(
                f"a GradientControl steps {type(optimizer).__name__}, and takes a closure alone; "
                f"got {', '.join(kwargs)}."
            )
        self._take_if_new(optimizer)
        before, result = self.control.outcome, None
        if needs_closure(optimizer):

            def evaluate() -> Any:
                loss = closure()
                self._before_step(optimizer, model)
                return loss

            self.step_by_control(optimizer, evaluate)
        else:
            result = closure()
            if result is None and model.automatic_optimization and self.scaler is not None:
                self._after_closure(model, optimizer)  # There was no loss: as Lightning's own.
                return None
            self._before_step(optimizer, model)
            self.step_by_control(optimizer)
        outcome = self.control.outcome
        if outcome is not None and outcome is not before:
            self._note(self._number(optimizer), outcome)
        return result

    def _note(self, number: int | None, outcome: Outcome) -> None:
        """Keeps what is to be logged of a step."""
        logged = self.callback.logged(number)
        if not logged:
            return
        self.outcomes[number], self.has_stepped = outcome, True
        before = self.skipped.setdefault(number, {})
        if "skipped" in logged:
            skipped = outcome.tensors["skipped"].float()
            before["skipped"] = before["skipped"] + skipped if before else skipped

    def _before_step(self, optimizer: Any, model: Any) -> None:
        """Between backward and step: the hooks of callbacks and module, and what they ask for."""
        assert self.control is not None
        if self.looked_at:
            self.unscale_for(optimizer)
        self._after_closure(model, optimizer)
        clip = self.callback.agreed_clip(self.asked.pop(self._number(optimizer), None))
        if clip != self.clip:
            self.control.set_clip(clip)
            self.clip = clip

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        inner: Any = super()
        if self.control is None:
            inner.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        asked = _clip_of(clip_val, gradient_clip_algorithm)
        if asked is not None:
            number = self._number(optimizer)
            before = self.asked.get(number)  # Called twice for one step: one after the other.
            self.asked[number] = self.callback.agreed_clip(
                asked if before in (None, asked) else chain(before, asked)
            )

    def _take_if_new(self, optimizer: Any) -> None:
        """Another optimizer that a user has put into the Trainer is stepped from here on."""
        assert self.control is not None
        mine, theirs = self.control.optimizers, self.trainer.optimizers
        if not any(each is optimizer for each in mine) and any(o is optimizer for o in theirs):
            self.control.bind(*self.callback.adopted(theirs))

    def _number(self, optimizer: Any) -> int | None:
        """Which of several it is; None if it is alone. By hand it comes in Lightning's wrapper."""
        assert self.control is not None
        if len(self.control.optimizers) == 1:
            return None
        wrapped = any(kind.__name__ == "LightningOptimizer" for kind in type(optimizer).__mro__)
        bare = optimizer.optimizer if wrapped else optimizer
        return next(n for n, each in enumerate(self.control.optimizers) if each is bare)

    def state_dict(self) -> dict[str, Any]:
        """What Lightning's own plugin would save and can load: the scaler's."""
        inner: Any = super()
        saved: dict[str, Any] = inner.state_dict()
        return saved if self.control is None else {k: saved[k] for k in _TORCHS if k in saved}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        inner: Any = super()
        inner.on_save_checkpoint(checkpoint)
        if self.control is not None:
            checkpoint[_STATE] = self.control.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        inner: Any = super()
        inner.on_load_checkpoint(checkpoint)
        self.is_loaded = _STATE in checkpoint
        if self._is_resuming and self.is_loaded:
            self._load(checkpoint[_STATE])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # That of Lightning's own plugin: of use if the checkpoint was saved without us.
        if self._is_resuming and not self.is_loaded and self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    @property
    def _is_resuming(self) -> bool:
        """Whether a checkpoint is loaded to train on, and not to evaluate."""
        return self.control is not None and self.trainer.state.fn == "fit"

    def _load(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; if it was saved with other policies, with all that fits."""
        assert self.control is not None
        mine = self.control.state_dict()[_STATE]
        misfits = [
            f"{kind[:-7]} was {saved[_STATE][kind]['name']} and is {mine[kind]['name']}"
            for kind in ("scale_policy", "clip_policy")
            if saved[_STATE][kind]["name"] != mine[kind]["name"]
        ]
        self.control.load_state_dict(saved, policies="control")
        if misfits:
            warnings.warn(
                "the checkpoint was saved with other options of GradientControlCallback: "
                f"{' and '.join(misfits)}. What does not fit begins anew.",
                RuntimeWarning,
                stacklevel=2,
            )


def _clip_of(value: float | None, algorithm: Any) -> object:
    """The clip policy that Lightning's two options ask for; None for none."""
    if not value or value < 0:
        return None
    by_value = str(getattr(algorithm, "value", algorithm)) == "value"
    return ClipByValue(value) if by_value else ClipByNorm(value)


def _is_read(trainer: Any) -> bool:
    """Whether what is logged now is read: by a logger, or when an epoch or the training ends."""
    if trainer.is_last_batch or trainer.fast_dev_run or trainer.should_stop:
        return True
    if 0 < trainer.max_steps <= trainer.global_step:
        return True
    # Loggers count batches that led to a step; several optimizers make several steps of one.
    by_hand = not trainer.lightning_module.automatic_optimization
    batches = trainer.fit_loop.total_batch_idx + 1 if by_hand else trainer.global_step
    every = trainer.log_every_n_steps
    return bool(every > 0 and batches % every == 0)


def _somebody_looks(trainer: Any) -> bool:
    """Whether a callback or the module has a hook between backward and step."""
    package = next(p for p in _packages() if isinstance(trainer, p.Trainer))
    helpers = importlib.import_module(f"{package.__name__}.utilities.model_helpers")
    hook, module = "on_before_optimizer_step", trainer.lightning_module
    others = [each for each in trainer.callbacks if not isinstance(each, GradientControlCallback)]
    return (
        helpers.is_overridden("configure_gradient_clipping", module, package.LightningModule)
        or helpers.is_overridden(hook, module, package.LightningModule)
        or any(helpers.is_overridden(hook, each, package.Callback) for each in others)
    )


def _checked_names(log: object) -> dict[str, str]:
    """What is logged → under which name."""
    if log is None or log is False:
        return {}
    if isinstance(log, str) or not isinstance(log, (Sequence, Mapping)):
        raise TypeError(
            "log must be a list of what to log, as ['norm', 'scale'], a mapping from these to "
            f"names, or None, got {log!r}."
        )
    if not isinstance(log, Mapping):
        log = {which: f"gradilocks/{which}" for which in log}
    named = dict(log)
    unknown = [which for which in named if which not in _LOGGABLE]
    if unknown:
        raise ValueError(f"log can have {', '.join(_LOGGABLE)}; got {unknown[0]!r}.")
    return named
