"""The scale and the counters of a control, as tensors on the device of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradilocks.ranks.layout import copy_to
from gradilocks.scale import LARGEST_SCALE, SMALLEST_SCALE, DynamicScale, ScalePolicy, StaticScale, initial_state

if TYPE_CHECKING:
    from gradilocks.step.decide import Decision


class StepState:
    """Scale, number of steps and length of the current run of non-finite steps.

    All tensors are 0-d and updated in place, so that captured CUDA graphs keep reading them.

    Args:
        policy: updates the scale; None for no scaling, a constant scale of 1.
    """

    def __init__(self, policy: ScalePolicy | None) -> None:
        self.policy = policy
        self.updates_scale = policy is not None and type(policy) is not StaticScale
        """False for a constant scale."""
        self.rules = policy if type(policy) is DynamicScale else None if self.updates_scale else DynamicScale()
        """The numbers by which kernels move the scale; None if only the policy's `update` can, as in a subclass."""
        self.tensors: dict[str, Tensor] = dict(initial_state(1.0) if policy is None else policy.init())
        """The policy's state, including "scale"."""
        self.steps = torch.zeros((), dtype=torch.int64)
        """Number of decisions so far, skipped steps included."""
        self.streak = torch.zeros((), dtype=torch.int32)
        """Current number of consecutive non-finite steps."""

    @property
    def scale(self) -> Tensor:
        """The scale: float32, 0-d."""
        return self.tensors["scale"]

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest scale that the policy allows."""
        return getattr(self.policy, "min_scale", SMALLEST_SCALE), getattr(self.policy, "max_scale", LARGEST_SCALE)

    @property
    def min_scale(self) -> float:
        """The smallest scale that the policy can reach; 0 for a constant scale."""
        low, high = self.bounds
        return 0.0 if self.policy is None or low == high else low

    def to(self, device: torch.device) -> None:
        """Moves all tensors to `device`; a copy to a GPU does not wait for it."""
        if self.steps.device != device:
            self.tensors = {name: copy_to(tensor, device) for name, tensor in self.tensors.items()}
            self.steps, self.streak = copy_to(self.steps, device), copy_to(self.streak, device)

    @torch.no_grad()
    def update_scale(self, overflow: Tensor, largest: Tensor, keep_scale: Tensor | None = None) -> None:
        """Updates the scale with the policy after a step.

        Args:
            overflow: 0-d bool, True if a gradient contained NaN or Inf.
            largest: 0-d, largest magnitude of the scaled gradients.
            keep_scale: 0-d bool, True to leave the policy's state unchanged because a clip policy rejected the step.
        """
        if self.policy is None or not self.updates_scale:
            return
        device = self.steps.device
        new = self.policy.update(dict(self.tensors), overflow.to(device), largest.to(device))
        new["scale"] = new["scale"].clamp(*self.bounds)  # A custom policy may ignore its bounds.
        for name, tensor in self.tensors.items():
            moved = new[name].to(tensor.dtype)
            tensor.copy_(moved if keep_scale is None else torch.where(keep_scale.to(device), tensor, moved))

    def update_scale_for(self, decisions: Sequence[Decision], flags: Sequence[Tensor]) -> None:
        """Updates the scale once for several optimizers that stepped one by one.

        Args:
            decisions: the decisions of the optimizers that stepped.
            flags: 0-d overflow flags, above 0 for an overflow, of optimizers that were unscaled but did not step.
        """
        device = self.steps.device
        overflows = [*(decision.overflow for decision in decisions), *flags]
        overflow = torch.stack([flag.to(device, torch.float32) for flag in overflows]).amax() > 0
        if not decisions:
            self.update_scale(overflow, torch.full_like(self.scale, math.nan))
            return
        largest = torch.stack([decision.largest.to(device) for decision in decisions]).amax()
        is_skipped = torch.stack([decision.skip.to(device) for decision in decisions]).amin() > 0
        self.update_scale(overflow, largest, keep_scale=is_skipped & ~overflow)
