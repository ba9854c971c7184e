"""Every private name of a framework that Gradilocks reads, with what it is read for.

A framework promises nothing about a name with a leading underscore, or about one that its
documentation does not have. So all of them are here, and
`tests/integrations/test_framework_names.py` says which is gone, before a user's training does. A
name is a dotted path to what a module holds, or to what an object of a class has: then the class is
followed by `()`.
"""

from __future__ import annotations

__all__ = ["FRAMEWORK_NAMES"]

_PRECISION = "whether the precision plugin's step only runs hooks and hands the step on"
_WRAPPER = "whose step a wrapper runs (step.framework_wrappers)"
_FRONT = "the control in front of the precision plugin (integrations.lightning_precision)"

FRAMEWORK_NAMES: dict[str, dict[str, str]] = {
    "lightning": {
        "lightning.pytorch.core.optimizer.LightningOptimizer.step": _WRAPPER,
        "lightning.pytorch.core.optimizer.LightningOptimizer()._optimizer": _WRAPPER,
        "lightning.pytorch.core.optimizer.LightningOptimizer()._strategy": _WRAPPER,
        "lightning.pytorch.strategies.strategy.Strategy.optimizer_step": _WRAPPER,
        "lightning.pytorch.strategies.strategy.Strategy.precision_plugin": _WRAPPER,
        "lightning.pytorch.strategies.ddp.DDPStrategy.optimizer_step": _WRAPPER,
        "lightning.pytorch.strategies.ddp.DDPStrategy()._model_averager": (
            "whether weights are averaged after the step"
        ),
        "lightning.pytorch.plugins.precision.precision.Precision.optimizer_step": _PRECISION,
        "lightning.pytorch.plugins.precision.precision.Precision._wrap_closure": _PRECISION,
        "lightning.pytorch.plugins.precision.precision.Precision._after_closure": (
            f"{_PRECISION}; the hooks between backward and step (integrations.lightning)"
        ),
        "lightning.pytorch.plugins.precision.precision.Precision._clip_gradients": _PRECISION,
        "lightning.pytorch.plugins.precision.amp.MixedPrecision.optimizer_step": _PRECISION,
        "lightning.pytorch.plugins.precision.fsdp.FSDPPrecision.optimizer_step": _PRECISION,
        "lightning.pytorch.core.hooks.ModelHooks.on_before_optimizer_step": (
            "whether the module looks at gradients inside the wrapper's step"
        ),
        "lightning.pytorch.callbacks.callback.Callback.on_before_optimizer_step": (
            "whether a callback looks at gradients inside the wrapper's step"
        ),
        "lightning.pytorch.plugins.precision.precision.Precision.connect": _FRONT,
        "lightning.pytorch.strategies.model_parallel.ModelParallelStrategy.device_mesh": _FRONT,
        "lightning.pytorch.core.optimizer.LightningOptimizer.optimizer": (
            "which optimizer self.clip_gradients() was called with (integrations.lightning)"
        ),
        "lightning.pytorch.utilities.model_helpers.is_overridden": (
            "whether a hook looks at gradients before the step (integrations.lightning)"
        ),
        "lightning.fabric.strategies.model_parallel.ModelParallelStrategy.device_mesh": _FRONT,
        "lightning.fabric.wrappers._FabricOptimizer.optimizer": _FRONT,
        "lightning.fabric.wrappers._FabricOptimizer.step": _WRAPPER,
        "lightning.fabric.wrappers._FabricOptimizer()._optimizer": _WRAPPER,
        "lightning.fabric.wrappers._FabricOptimizer()._strategy": _WRAPPER,
        "lightning.fabric.strategies.strategy.Strategy.optimizer_step": _WRAPPER,
        "lightning.fabric.strategies.strategy.Strategy.precision": _WRAPPER,
        "lightning.fabric.plugins.precision.precision.Precision.optimizer_step": _PRECISION,
        "lightning.fabric.plugins.precision.amp.MixedPrecision.optimizer_step": _PRECISION,
        "lightning.fabric.plugins.precision.fsdp.FSDPPrecision.optimizer_step": _PRECISION,
    },
    "accelerate": {
        "accelerate.optimizer.AcceleratedOptimizer.step": _WRAPPER,
        "accelerate.optimizer.AcceleratedOptimizer.__setstate__": (
            "makes anew what it keeps of the step of an optimizer that was adopted"
        ),
        "accelerate.Accelerator()._optimizers": "which optimizers a control is bound to",
        "accelerate.Accelerator()._models": "whose parameters they are, for their names",
        "accelerate.Accelerator().scaler": "the place of the control's scaler; not documented",
        "accelerate.scheduler.AcceleratedScheduler().optimizers": (
            "whom it asks, and waits for, whether a step was skipped"
        ),
    },
    "fastai": {
        "fastai.learner.Learner._step": (
            "what steps the optimizer between before_step and after_step, where the control does it"
        ),
    },
    "transformers": {
        "transformers.trainer.Trainer._clip_grad_norm": "clips nothing: the control does",
        "transformers.trainer.Trainer._get_grad_norm": "unscales for callbacks",
        "transformers.trainer.Trainer._get_learning_rate": (
            "the last that is asked for before the schedule is stepped"
        ),
        "transformers.trainer.Trainer._maybe_log_save_evaluate": (
            "around the Trainer's own log, after which its sum of losses is zero"
        ),
        "transformers.trainer.Trainer().callback_handler": "which callbacks it has; not documented",
        "transformers.trainer.Trainer._save_scaler": "writes the control's state to a checkpoint",
        "transformers.trainer.Trainer._load_scaler": "reads the control's state from a checkpoint",
    },
}
"""By framework: dotted name to what it is read for."""
