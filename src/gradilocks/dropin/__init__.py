"""torch's `GradScaler` and clip functions under their own names, without torch's defects."""

from __future__ import annotations

from gradilocks.dropin.clip_functions import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from gradilocks.dropin.grad_scaler import GradScaler, ScalerOutcome

__all__ = [
    "GradScaler",
    "ScalerOutcome",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]
