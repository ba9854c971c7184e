"""Gradient magnitude control for PyTorch: loss scaling, the NaN/Inf check and clipping as one step.

Importing this package imports nothing else; each public name is loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from gradilocks._version import __version__ as __version__

# Public name -> module that defines it; "" for a module itself.
_MODULES = {
    "AdaGC": "clip",
    "AdaptiveClip": "clip",
    "ClipByNorm": "clip",
    "ClipByValue": "clip",
    "ClipPerGroup": "clip",
    "DynamicScale": "scale",
    "GradScaler": "dropin",
    "GradientControl": "control",
    "HeadroomScale": "scale",
    "Outcome": "outcome",
    "QuantileClip": "clip",
    "SkipSpikes": "clip",
    "StaticScale": "scale",
    "ZScoreClip": "clip",
    "audit": "audit",
    "chain": "clip",
    "check_replicas": "ranks",
    "clip_grad_norm_": "dropin",
    "clip_grad_value_": "dropin",
    "clip_grads_with_norm_": "dropin",
    "emulate": "emulate",
    "errors": "",
    "explain": "explain",
    "get_total_norm": "dropin",
    "kernels": "",
    "log": "record",
    "measure": "step.measure",
    "optim": "",
    "trace": "trace",
}

__all__ = [
    "AdaGC",
    "AdaptiveClip",
    "ClipByNorm",
    "ClipByValue",
    "ClipPerGroup",
    "DynamicScale",
    "GradScaler",
    "GradientControl",
    "HeadroomScale",
    "Outcome",
    "QuantileClip",
    "SkipSpikes",
    "StaticScale",
    "ZScoreClip",
    "audit",
    "chain",
    "check_replicas",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "emulate",
    "errors",
    "explain",
    "get_total_norm",
    "kernels",
    "log",
    "measure",
    "optim",
    "trace",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'gradilocks' has no attribute {name!r}")
    module = _MODULES[name]
    if not module:
        return importlib.import_module(f"gradilocks.{name}")
    value = getattr(importlib.import_module(f"gradilocks.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The type of this package: `gradilocks.audit` stays the function when its module `gradilocks.audit` is imported.

    Python assigns every imported submodule to an attribute of its package.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and _MODULES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if TYPE_CHECKING:
    from gradilocks import errors, kernels, optim
    from gradilocks.audit import audit
    from gradilocks.clip import (
        AdaGC,
        AdaptiveClip,
        ClipByNorm,
        ClipByValue,
        ClipPerGroup,
        QuantileClip,
        SkipSpikes,
        ZScoreClip,
        chain,
    )
    from gradilocks.control import GradientControl
    from gradilocks.dropin import (
        GradScaler,
        clip_grad_norm_,
        clip_grad_value_,
        clip_grads_with_norm_,
        get_total_norm,
    )
    from gradilocks.emulate import emulate
    from gradilocks.explain import explain
    from gradilocks.outcome import Outcome
    from gradilocks.ranks import check_replicas
    from gradilocks.record import log
    from gradilocks.scale import DynamicScale, HeadroomScale, StaticScale
    from gradilocks.step.measure import measure
    from gradilocks.trace import trace
