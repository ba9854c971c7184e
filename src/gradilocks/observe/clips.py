"""Calls of clip functions enter; what they mean for the step that follows leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Clips"]


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
