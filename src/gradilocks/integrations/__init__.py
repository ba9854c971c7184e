"""Adapters for training frameworks. Each module imports its framework, so import the one that you use."""

from __future__ import annotations

import importlib
from typing import Any

from gradilocks.control import GradientControl

__all__ = ["control_for"]

_MODULES = {
    "lightning.Fabric": "lightning",
    "lightning_fabric.Fabric": "lightning",
    "accelerate.Accelerator": "accelerate",
}
"""Module of this package by top-level package and class of the framework's object."""


def control_for(framework: Any, model: Any, optimizer: Any, **options: Any) -> GradientControl:
    """Creates a GradientControl that steps the optimizers of a framework's training loop.

    Args:
        framework: a Lightning Fabric or an Accelerate Accelerator.
        model: the model that the framework returned, or a mapping from prefixes to models.
        optimizer: the optimizer that the framework returned; a list if there are several.
        options: arguments of GradientControl, such as `clip` and `record`.
    """
    for kind in type(framework).__mro__:
        name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        if name in _MODULES:
            module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
            return module.control_for(framework, model, optimizer, **options)  # type: ignore[no-any-return]
    raise TypeError(
        f"control_for() takes a lightning Fabric or an accelerate Accelerator, got {type(framework).__name__}. For a "
        "lightning Trainer use gradilocks.integrations.lightning.GradientControlCallback."
    )
