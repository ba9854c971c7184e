"""SGD: torch's, in two launches a step, and clean after a first step that was skipped."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradilocks.kernels.table import send
from gradilocks.optim.plan import Plan
from gradilocks.optim.stepper import Stepper, make_master

__all__ = ["SGD"]


class SGD(Stepper, torch.optim.SGD):
    """torch.optim.SGD, with the same arguments, the same state and the same results.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        foreach, fused: taken for compatibility; every step is fused.
        differentiable: refused if True, as torch's fused optimizers do.
        master_weights: keep a float32 master of each float16 or bfloat16 parameter in the state,
            with a float32 momentum buffer; the parameter is the master rounded.

    Example:
        >>> optimizer = gradilocks.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    columns: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            differentiable=differentiable,
            fused=True,
        )
        self._prepare(master_weights)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; a buffer that no step has filled yet is not in it. Waits for the device."""
        packed = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for place in self._unfilled(params):
            packed["state"][place] = _without_buffer(packed["state"][place])
        return packed

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()
        params = list(self.state)
        unfilled = {params[place] for place in self._unfilled(params)}
        if unfilled:
            for param in unfilled:
                kept["state"][param] = _without_buffer(kept["state"][param])
        return kept

    def _prepare(self, master_weights: bool | None = None) -> None:
        super()._prepare(master_weights)
        self._fresh: dict[Tensor, Tensor] = {}

    def _unfilled(self, params: list[Tensor]) -> list[int]:
        """The places of those parameters whose buffer no step has filled yet."""
        asked = [place for place, param in enumerate(params) if param in self._fresh]
        if not asked:
            return []
        flags = torch.stack([self._fresh[params[place]] for place in asked]).tolist()
        return [place for place, flag in zip(asked, flags, strict=True) if flag]

    def flags(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (
            ("MOMENTUM", group["momentum"] != 0),
            ("NESTEROV", bool(group["nesterov"])),
            ("MAXIMIZE", bool(group["maximize"])),
        )

    def settings(self, group: dict[str, Any]) -> list[Any]:
        return [group["lr"], group["weight_decay"], group["momentum"], group["dampening"]]

    def fill_state(
        self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]], mastered: Sequence[bool]
    ) -> None:
        new = [
            param
            for param, group in zip(params, groups, strict=True)
            if group["momentum"] != 0 and self.state[param].get("momentum_buffer") is None
        ]
        if new:
            flags = torch.ones(len(new), dtype=torch.int32, device=new[0].device)
            self._fresh.update(zip(new, flags.unbind(), strict=True))
        for param, group, wide in zip(params, groups, mastered, strict=True):
            state = self.state[param]
            buffer = state.get("momentum_buffer")
            if group["momentum"] != 0:
                if buffer is None:
                    dtype = torch.float32 if wide else param.dtype
                    state["momentum_buffer"] = torch.zeros_like(param, dtype=dtype)
                elif wide and buffer.dtype is not torch.float32:
                    state["momentum_buffer"] = buffer.float()
            if wide:
                make_master(param, state)

    def plan_more(self, plan: Plan) -> Tensor:
        flags = [self._fresh.get(param) for param in plan.called.params]
        addresses = [0 if flag is None else flag.data_ptr() for flag in flags]
        return send(array("q", addresses), plan.device)

    def launch(
        self,
        plan: Plan,
        places: Tensor,
        gradients: Tensor,
        skip: Tensor | None,
        divisor: Tensor | None,
    ) -> None:
        launches = importlib.import_module("gradilocks.kernels.launches")
        launches.sgd_rates(plan.own, plan.groups, plan.settings, skip, plan.rates)
        launches.step("sgd", plan.layout, places, gradients, plan.rates, skip, divisor)


def _without_buffer(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "momentum_buffer"}
