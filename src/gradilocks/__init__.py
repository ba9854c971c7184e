"""Gradilocks keeps the gradients of a PyTorch training run in the Goldilocks zone.

Loss scaling pushes gradients up so that low precision does not round them to zero; clipping pulls
them down so that one step does not wreck the weights. Importing this package imports nothing else:
each public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gradilocks._version import __version__ as __version__

# Public name -> the module it lives in. Sorted; a test compares it with what can be imported.
_HOME = {
    "AdaGC": "clip",
    "AdaptiveClip": "clip",
    "BadStep": "lab.trace",
    "ClipByNorm": "clip",
    "ClipByValue": "clip",
    "ClipPerGroup": "clip",
    "ClipPerTensor": "clip",
    "DynamicScale": "scale",
    "GradScaler": "dropin",
    "GradientControl": "control",
    "HeadroomScale": "scale",
    "NoClip": "clip",
    "NoScale": "scale",
    "Outcome": "step.outcome",
    "QuantileClip": "clip",
    "Recorder": "record",
    "SkipSpikes": "clip",
    "StaticScale": "scale",
    "ZScoreClip": "clip",
    "audit": "lab.audit",
    "chain": "clip",
    "clip_grad_norm_": "dropin",
    "clip_grad_value_": "dropin",
    "clip_grads_with_norm_": "dropin",
    "deepspeed_copies": "ranks.copies",
    "emulate": "lab.emulate",
    "errors": "",
    "get_total_norm": "dropin",
    "kernels": "",
    "log": "record",
    "megatron_copies": "ranks.copies",
    "optim": "",
    "read_run": "runfile",
    "trace": "lab.trace",
}

__all__ = [
    "AdaGC",
    "AdaptiveClip",
    "BadStep",
    "ClipByNorm",
    "ClipByValue",
    "ClipPerGroup",
    "ClipPerTensor",
    "DynamicScale",
    "GradScaler",
    "GradientControl",
    "HeadroomScale",
    "NoClip",
    "NoScale",
    "Outcome",
    "QuantileClip",
    "Recorder",
    "SkipSpikes",
    "StaticScale",
    "ZScoreClip",
    "audit",
    "chain",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "deepspeed_copies",
    "emulate",
    "errors",
    "get_total_norm",
    "kernels",
    "log",
    "megatron_copies",
    "optim",
    "read_run",
    "trace",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradilocks' has no attribute {name!r}")
    home = _HOME[name]
    if not home:
        return importlib.import_module(f"gradilocks.{name}")
    value = getattr(importlib.import_module(f"gradilocks.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from gradilocks import errors, kernels, optim
    from gradilocks.clip import (
        AdaGC,
        AdaptiveClip,
        ClipByNorm,
        ClipByValue,
        ClipPerGroup,
        ClipPerTensor,
        NoClip,
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
    from gradilocks.lab.audit import audit
    from gradilocks.lab.emulate import emulate
    from gradilocks.lab.trace import BadStep, trace
    from gradilocks.ranks.copies import deepspeed_copies, megatron_copies
    from gradilocks.record import Recorder, log
    from gradilocks.runfile import read_run
    from gradilocks.scale import DynamicScale, HeadroomScale, NoScale, StaticScale
    from gradilocks.step.outcome import Outcome
