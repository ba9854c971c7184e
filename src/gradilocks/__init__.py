"""Gradient magnitude control for PyTorch: loss scaling, the NaN/Inf check and clipping as one step.

Importing this package imports nothing else; each public name is loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from gradilocks._version import __version__ as __version__

_NAMES = {
    "": "errors kernels optim",
    "audit": "audit",
    "clip": "AdaGC AdaptiveClip ClipByNorm ClipByValue ClipPerGroup QuantileClip SkipSpikes ZScoreClip chain",
    "control": "GradientControl",
    "dropin": "GradScaler clip_grad_norm_ clip_grad_value_ clip_grads_with_norm_ get_total_norm",
    "emulate": "emulate",
    "explain": "explain",
    "outcome": "Outcome",
    "ranks": "check_replicas",
    "record": "log",
    "scale": "DynamicScale HeadroomScale StaticScale",
    "step.measure": "measure",
    "trace": "trace",
}
"""Public names by the module that defines them; those of "" are modules themselves."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


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


if TYPE_CHECKING:  # "X as X" exports X to type checkers, which cannot read `__all__` above.
    from gradilocks import errors as errors
    from gradilocks import kernels as kernels
    from gradilocks import optim as optim
    from gradilocks.audit import audit as audit
    from gradilocks.clip import AdaGC as AdaGC
    from gradilocks.clip import AdaptiveClip as AdaptiveClip
    from gradilocks.clip import ClipByNorm as ClipByNorm
    from gradilocks.clip import ClipByValue as ClipByValue
    from gradilocks.clip import ClipPerGroup as ClipPerGroup
    from gradilocks.clip import QuantileClip as QuantileClip
    from gradilocks.clip import SkipSpikes as SkipSpikes
    from gradilocks.clip import ZScoreClip as ZScoreClip
    from gradilocks.clip import chain as chain
    from gradilocks.control import GradientControl as GradientControl
    from gradilocks.dropin import GradScaler as GradScaler
    from gradilocks.dropin import clip_grad_norm_ as clip_grad_norm_
    from gradilocks.dropin import clip_grad_value_ as clip_grad_value_
    from gradilocks.dropin import clip_grads_with_norm_ as clip_grads_with_norm_
    from gradilocks.dropin import get_total_norm as get_total_norm
    from gradilocks.emulate import emulate as emulate
    from gradilocks.explain import explain as explain
    from gradilocks.outcome import Outcome as Outcome
    from gradilocks.ranks import check_replicas as check_replicas
    from gradilocks.record import log as log
    from gradilocks.scale import DynamicScale as DynamicScale
    from gradilocks.scale import HeadroomScale as HeadroomScale
    from gradilocks.scale import StaticScale as StaticScale
    from gradilocks.step.measure import measure as measure
    from gradilocks.trace import trace as trace
