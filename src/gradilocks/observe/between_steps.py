"""What a script did since its last step enters; the loss and the clip of its next step leave.

Every loss on which backward was called between two steps counts, so that micro-batches add up, also
those that are run backward inside the step, by its closure. Not those whose gradients were cleared.
Two optimizers that step after one backward share it; a backward after a step begins anew.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Clips", "Losses"]


class Losses:
    """What was run backward since the last step, unscaled, on its device."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._is_taken = False
        self._unscaled: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note_scaled(self, before: Any, after: Any) -> None:
        """A loss was multiplied by the scale: `after` will be run backward in place of `before`."""
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            if before is not after and before.numel() == 1:
                value = before.detach().clone()
                if len(self._unscaled) > 64:
                    self._unscaled = {k: v for k, v in self._unscaled.items() if v[0]() is not None}
                self._unscaled[id(after)] = weakref.ref(after), value
        elif isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
            for one, other in zip(before, after, strict=False):
                self.note_scaled(one, other)

    def note_backward(self, tensors: Any, gradients: Any) -> None:
        """`torch.autograd.backward(tensors, gradients)` is about to run."""
        if isinstance(tensors, Tensor):
            tensors = (tensors,)
        if not isinstance(tensors, (list, tuple)) or _any_given(gradients):
            return
        if self._is_taken:
            self._sum, self._is_taken = None, False
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1 and not tensor.is_meta:
                known = self._unscaled.pop(id(tensor), None)
                if known is not None and known[0]() is tensor:
                    self._add(known[1])
                else:
                    self._add(tensor.detach().clone())

    def _add(self, loss: Tensor) -> None:
        """Adds up at once: a script may run backward for ever and never step."""
        loss = loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
        if self._sum is not None:
            loss = self._sum + loss.to(self._sum.device, non_blocking=True)
        self._sum = loss

    @property
    def waiting(self) -> bool:
        """Whether there are losses that no step has taken yet."""
        return self._sum is not None and not self._is_taken

    def start(self) -> None:
        """Forgets what came before: its gradients are gone, or somebody else tells of them."""
        self._sum, self._is_taken = None, False

    def end(self) -> None:
        """A step is over: what was run backward in it is no part of the next one."""
        self._is_taken = True

    def take(self) -> Tensor | None:
        """The loss of a step that is about to be taken; None if nobody knows."""
        self._is_taken = True
        total = self._sum
        if total is None:
            return None
        return total.real if total.is_complex() else total


def _any_given(gradients: Any) -> bool:
    if isinstance(gradients, (list, tuple)):
        return any(gradient is not None for gradient in gradients)
    return gradients is not None


@dataclass(frozen=True)
class _Clip:
    limit: Tensor | float | None
    """What the 2-norm was to be at most; None if something else was bounded."""
    clipped: Tensor | bool


class Clips:
    """The clip of each parameter since its last step."""

    def __init__(self) -> None:
        self._by_param: dict[int, _Clip] = {}

    def by_norm(
        self,
        params: Iterable[Tensor],
        *,
        norm: object,
        limit: Any,
        order: float,
        changed: Tensor | bool,
    ) -> None:
        """The gradients of `params` together had `norm` and were bounded to `limit`.

        Args:
            params, norm, limit, order: as the clip had them.
            changed: whether it changed a gradient, for a norm that cannot be read.
        """
        value = norm if isinstance(norm, Tensor) else torch.as_tensor(norm, device="cpu")
        value = value.detach()
        if type(value) not in (
            Tensor,
            torch.nn.Parameter,
        ):  # A DTensor: reading it is a collective.
            clipped: Tensor | bool = changed
        else:
            clipped = (value > limit).to(torch.float32)
        if not isinstance(limit, Tensor):  # A tensor is left where it is: reading it would wait.
            limit = float(limit) if math.isfinite(limit) else None
        shown = limit if order == 2.0 else None
        self._note(params, _Clip(shown, clipped))

    def by_value(self, params: Iterable[Tensor], *, clipped: Tensor | bool) -> None:
        """Each element of the gradients was bounded."""
        self._note(params, _Clip(None, clipped))

    def taken(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """`limit` and `clipped` of a step, which ends their time."""
        found = {id(clip): clip for p in params if (clip := self._by_param.pop(id(p), None))}
        clips = list(found.values())
        if not clips:
            return {}
        if len(clips) == 1:
            return {"limit": clips[0].limit, "clipped": clips[0].clipped}
        flags = [torch.as_tensor(clip.clipped, dtype=torch.float32) for clip in clips]
        home = flags[0].device
        together = torch.stack([flag.reshape(()).to(home, non_blocking=True) for flag in flags])
        return {"clipped": together.amax()}

    def _note(self, params: Iterable[Tensor], clip: _Clip) -> None:
        for param in params:
            self._by_param[id(param)] = clip
