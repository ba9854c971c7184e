"""Accelerators in tests: on a CPU, in float16 too, and none that remembers the test before."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState


def forget() -> None:
    """Drops what Accelerators share for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def use_float16(accelerator: Accelerator) -> None:
    """On a CPU Accelerate makes no scaler: gives it the one that it makes on a GPU, and autocast.

    With that it autocasts, scales, unscales and clips by its own code.
    """
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    given = accelerator.scaler_handler
    accelerator.scaler = torch.amp.GradScaler("cpu", **({} if given is None else given.to_kwargs()))
