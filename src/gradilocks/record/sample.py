"""What one step of one optimizer hands to a Recorder: numbers that may still be on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradilocks.values import Statistics

__all__ = ["Sample"]

Number = Tensor | float | None


@dataclass(frozen=True)
class Sample:
    """One step. Tensors stay on their device; nothing here is read until it has arrived.

    Tensors of one element are copied when they are handed over, so they may be overwritten by the
    next step. Those of `statistics`, `weight` and `update` are kept as they are until their batch
    is sent: hand over tensors that nobody writes to any more.
    """

    loss: Number = None
    """Unscaled."""
    scale: Number = None
    """What the loss was multiplied by; 1 without loss scaling."""
    norm: Number = None
    """Of all gradients, unscaled, before clipping."""
    limit: Number = None
    """The bound that was put on the norm; None or inf if there is none."""
    clipped: Tensor | bool | float = False
    """Whether clipping made the gradients smaller."""
    skip: Tensor | bool | float = False
    """Whether the parameters were left as they were; 2 says that a clip policy rejected them."""
    rejected: Tensor | bool | float = False
    """Whether they were left so by a clip policy, on finite gradients."""
    lr: Number = None
    """Of the first parameter group."""
    next_scale: Number = None
    """The scale after this step, for the log; None to find it in the next sample."""
    statistics: Statistics | None = None
    """Gradient by gradient, as measured."""
    carried: Number = None
    """The scale that the measured gradients carried: 1 if they were unscaled; None: `scale`."""
    places: Sequence[int] | None = None
    """Which parameters the statistics are of, as places in the optimizer's list; None: all."""
    elements: Sequence[int] | None = None
    """How many elements each measured gradient has; None: as many as its parameter."""
    weight: Tensor | None = None
    """1-d, along all parameters of the optimizer: their norms before the step."""
    update: Tensor | None = None
    """1-d, likewise: ‖change‖ / ‖parameter before‖."""
    more: bool = False
    """Whether the next sample is of the same decision: another optimizer of the same control."""
