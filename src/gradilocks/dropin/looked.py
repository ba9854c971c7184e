"""What was seen in one optimizer's gradients, told later without keeping them alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.step.gradients import Gradients, Names, collect
from gradilocks.step.outcome import Findings
from gradilocks.step.own_step import weakly, why_not_itself
from gradilocks.values import NonFinite, moved

__all__ = ["Looked", "gradients_of"]


class Looked:
    """NaN and Inf counts, part by part, beside weak references to whose they are."""

    def __init__(self) -> None:
        self._params: list[weakref.ref[Tensor]] = []
        self._parts: list[Callable[[], NonFinite]] = []

    @staticmethod
    def nothing(*, skip: Tensor | None = None) -> Findings:
        """What a disabled scaler tells: nothing was looked at, nothing skipped but by a clip."""
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        return Findings(
            skip=zero if skip is None else skip,
            scale=torch.ones_like(zero),
            counted=lambda: (none, none),
            names=list,
        )

    def add(self, params: Sequence[Tensor], counted: Callable[[], NonFinite]) -> None:
        """Takes in the numbers of one device's gradients, to be asked for only if they are read."""
        self._params += map(weakref.ref, params)
        self._parts.append(counted)

    def params(self) -> list[Tensor]:
        """The parameters that are still there."""
        return [param for ref in self._params if (param := ref()) is not None]

    def findings(self, optimizer: Any, *, skip: Tensor, scale: Tensor, model: Any) -> Findings:
        """What to tell of the step."""
        owner = weakly(optimizer)
        home = scale.device

        def names() -> list[tuple[int, str]]:
            there = owner()
            known = Names(model, () if there is None else (there,))
            return known.in_backward_order(self._params)

        parts = tuple(self._parts)

        def counted() -> tuple[Tensor, Tensor]:
            found = [part() for part in parts]
            return _joined([f.nan for f in found], home), _joined([f.inf for f in found], home)

        return Findings(skip=moved(skip, home), scale=scale.clone(), counted=counted, names=names)


def _joined(parts: Sequence[Tensor], home: torch.device) -> Tensor:
    if len(parts) == 1:
        return moved(parts[0], home)
    nothing = torch.zeros(0, dtype=torch.int64, device=home)
    return torch.cat([nothing, *(moved(part, home) for part in parts)])


def gradients_of(optimizer: Any, names: Names, *, allow_fp16: bool) -> Gradients:
    """The gradients of an optimizer's parameters; refuses what torch's scaler refuses."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if not isinstance(param, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {type(param).__name__}")
    found = collect(params, name=names)
    if not allow_fp16:
        for param, tensor in zip(found.params, found.tensors, strict=True):
            if tensor.dtype is torch.float16:
                raise ValueError(
                    f"Attempting to unscale FP16 gradients. {names(param)} is float16: keep the "
                    "parameters in float32 and run the forward pass under torch.autocast, or use "
                    "an optimizer with fused=True and let scaler.step() unscale inside it."
                    f"{why_not_itself(optimizer)}"
                )
    return found
