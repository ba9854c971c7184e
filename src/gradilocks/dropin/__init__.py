"""torch's names and contracts on Gradilocks' engine.

Each name here takes the arguments, gives the results and raises the errors of the torch name it
stands in for, wherever torch's results are sound; docs/numerics.md lists where they are not.
"""

from __future__ import annotations

from gradilocks.dropin.clip_functions import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from gradilocks.dropin.grad_scaler import GradScaler

__all__ = [
    "GradScaler",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]
