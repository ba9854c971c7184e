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
        "lightning.pytorch.plugins.precision.precision.Precision._after_closure": _PRECISION,
        "lightning.pytorch.plugins.precision.precision.Precision._clip_gradients": _PRECISION,
        "lightning.pytorch.plugins.precision.amp.MixedPrecision.optimizer_step": _PRECISION,
        "lightning.pytorch.plugins.precision.fsdp.FSDPPrecision.optimizer_step": _PRECISION,
        "lightning.pytorch.core.hooks.ModelHooks.on_before_optimizer_step": (
            "whether the module looks at gradients inside the wrapper's step"
        ),
        "lightning.pytorch.callbacks.callback.Callback.on_before_optimizer_step": (
            "whether a callback looks at gradients inside the wrapper's step"
        ),
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
        "accelerate.optimizer.AcceleratedOptimizer()._optimizer_original_step_method": (
            "the step that it puts back, made anew when the optimizer inside is adopted"
        ),
        "accelerate.optimizer.AcceleratedOptimizer()._optimizer_patched_step_method": (
            "the step by which it sees that one was taken, made anew likewise"
        ),
    },
    "fastai": {
        "fastai.learner.Learner._step": (
            "what steps the optimizer between before_step and after_step, where the control does it"
        ),
    },
}
"""By framework: dotted name to what it is read for."""
