"""Every private name of a framework that Gradilocks reads, with what it is read for.

A framework promises nothing about a name with a leading underscore, or about one that its
documentation does not have. So all of them are here, and
`tests/integrations/test_framework_names.py` says which is gone, before a user's training does. A
name is a dotted path to what a module holds, or to what an object of a class has: then the class is
followed by `()`.
"""

from __future__ import annotations

__all__ = ["FRAMEWORK_NAMES"]


_CALLBACK = "the control in front of the precision plugin (integrations.lightning)"
_FABRIC = "the control in front of the precision plugin (integrations.fabric)"

FRAMEWORK_NAMES: dict[str, dict[str, str]] = {
    "lightning": {
        "lightning.pytorch.plugins.precision.precision.Precision._after_closure": _CALLBACK,
        "lightning.pytorch.plugins.precision.precision.Precision.connect": _CALLBACK,
        "lightning.pytorch.plugins.precision.precision.Precision.optimizer_step": _CALLBACK,
        "lightning.pytorch.plugins.precision.amp.MixedPrecision.optimizer_step": _CALLBACK,
        "lightning.pytorch.plugins.precision.fsdp.FSDPPrecision.optimizer_step": _CALLBACK,
        "lightning.pytorch.strategies.strategy.Strategy.precision_plugin": _CALLBACK,
        "lightning.pytorch.strategies.model_parallel.ModelParallelStrategy.device_mesh": _CALLBACK,
        "lightning.pytorch.core.optimizer.LightningOptimizer.optimizer": (
            "which optimizer self.clip_gradients() was called with (integrations.lightning)"
        ),
        "lightning.pytorch.utilities.model_helpers.is_overridden": (
            "whether a hook looks at gradients before the step (integrations.lightning)"
        ),
        "lightning.fabric.plugins.precision.precision.Precision.optimizer_step": _FABRIC,
        "lightning.fabric.plugins.precision.amp.MixedPrecision.optimizer_step": _FABRIC,
        "lightning.fabric.strategies.strategy.Strategy.precision": _FABRIC,
        "lightning.fabric.strategies.model_parallel.ModelParallelStrategy.device_mesh": _FABRIC,
        "lightning.fabric.wrappers._FabricOptimizer.optimizer": _FABRIC,
    },
}
"""By framework: dotted name to what it is read for."""
