"""SGD: torch's, in two launches a step, and clean after a first step that was skipped."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradilocks.kernels.host_numbers import send
from gradilocks.optim.fused_optimizer import FusedOptimizer, Plan
from gradilocks.optim.optimizer_state import HALF, ensure_master

__all__ = ["SGD"]


_Base = torch.optim.SGD  # By this name also while `gradilocks run --swap-optimizer` is on.


class SGD(FusedOptimizer, _Base):
    """torch.optim.SGD, with the same arguments, the same state and the same results.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        foreach, fused: taken for compatibility; every step is fused.
        differentiable: refused if True, as torch's fused optimizers do.
        master_weights: keep a float32 master of each float16 or bfloat16 parameter in the state,
            with a float32 momentum buffer; the parameter is the master rounded. As in AdamW.

    Example:
        >>> optimizer = gradilocks.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    kernel: ClassVar[str] = "sgd"
    reads: ClassVar[tuple[str, ...]] = (
        "lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize",
    )  # fmt: skip
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
        _Base.__init__(
            self, params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, differentiable=differentiable, fused=True,
        )  # fmt: skip
        self._prepare(master_weights)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; a buffer that no step has filled yet is not in it. Waits for the device."""
        packed = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for place in self._unfilled(params):
            _drop_buffer(packed["state"], place)
        return packed

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()
        params = list(self.state)
        for place in self._unfilled(params):
            _drop_buffer(kept["state"], params[place])
        return kept

    def _prepare(self, master_weights: bool | None = None) -> None:
        super()._prepare(master_weights)
        self._fresh: dict[Tensor, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._flags: list[Tensor | None] = []

    def forget_stateless(self) -> None:
        super().forget_stateless()
        self._fresh = {param: flag for param, flag in self._fresh.items() if param in self.state}

    def _flag_of(self, param: Tensor) -> Tensor | None:
        """int32, 0-d: whether no step has filled this parameter's buffer; None if one surely has.

        A buffer that somebody has put in place of ours counts as filled.
        """
        buffer, flag = self._fresh.get(param, (None, None))
        now = self.state.get(param, {}).get("momentum_buffer")
        return flag if buffer is not None and now is not None and buffer() is now else None

    def _unfilled(self, params: list[Tensor]) -> list[int]:
        """The places of those parameters whose buffer no step has filled yet."""
        flags = {place: self._flag_of(param) for place, param in enumerate(params)}
        asked = {place: flag for place, flag in flags.items() if flag is not None}
        if not asked:
            return []
        read = torch.stack(list(asked.values())).tolist()
        return [place for place, flag in zip(asked, read, strict=True) if flag]

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
        self._flags = [self._flag_of(param) for param in params]
        pairs = enumerate(zip(params, groups, strict=True))
        starting = [place for place, (p, group) in pairs if self.is_starting(p, group)]
        flags = torch.ones(len(starting), dtype=torch.int32, device=params[0].device).unbind()
        new = dict(zip(starting, flags, strict=True))
        for place, param in enumerate(params):
            if mastered[place]:
                ensure_master(param, self.state[param], self.marks)
            if place in new:
                dtype = torch.float32 if mastered[place] else param.dtype
                buffer = torch.zeros_like(param, dtype=dtype)
                # Both at once: the next one may be too large, and this one is not filled yet.
                self.state[param]["momentum_buffer"] = buffer
                self._fresh[param] = weakref.ref(buffer), new[place]
                self._flags[place] = new[place]

    def is_starting(self, param: Tensor, group: dict[str, Any]) -> bool:
        nothing: dict[str, Any] = {}  # `state` would make an entry for whom it is asked.
        buffer = self.state.get(param, nothing).get("momentum_buffer")
        return bool(group["momentum"] != 0 and buffer is None)

    def fill_for_torch(
        self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]], mastered: Sequence[bool]
    ) -> None:
        for param, wide in zip(params, mastered, strict=True):
            if wide:
                ensure_master(param, self.state[param], self.marks)

    def needed_by_torch(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        tensors = isinstance(group["lr"], Tensor) or isinstance(group["weight_decay"], Tensor)
        if group["master_weights"] or tensors or self._fresh:
            return None
        return self.columns if group["momentum"] != 0 else ()

    def dtype_for_torch(self, param: Tensor) -> torch.dtype:
        # On a CPU torch's fused SGD leaves most of a half-precision parameter as it was
        # (pytorch issue 191763, seen with 2.13).
        wide = param.dtype in HALF and param.device.type == "cpu"
        return torch.float32 if wide else param.dtype

    def skips_on_host(self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> bool:
        """torch makes buffers without filling them, and a skipped step leaves them so."""
        for place in self._unfilled(list(params)):
            del self.state[params[place]]["momentum_buffer"]
        flag = getattr(self, "found_inf", None)
        if flag is None or not any(map(self.is_starting, params, groups)):
            return False
        return bool(flag.item())

    def own_table(self, plan: Plan) -> tuple[Tensor, list[Tensor | None]]:
        flags, self._flags = self._flags, []
        for param, state, flag in zip(plan.found.params, plan.states, flags, strict=True):
            if flag is not None:  # The buffer may have been laid out anew since.
                self._fresh[param] = weakref.ref(state["momentum_buffer"]), flag
        addresses = [0 if flag is None else flag.data_ptr() for flag in flags]
        return send(array("q", addresses), plan.device), flags

    def undo_rates(self, skip: Tensor | None) -> None:
        plan = self._plan
        assert plan is not None
        # A buffer of which nothing was to be kept, though there is momentum, had not been filled.
        unfilled = (plan.rates[:, 2] != 0) & (plan.rates[:, 3] == 0)
        if skip is not None:
            unfilled = unfilled & (skip == 0)
        for param, was in zip(plan.found.params, unfilled.unbind(), strict=True):
            if param in self._fresh:
                _, flag = self._fresh[param]
                flag.copy_(torch.where(was, 1, flag))


def _drop_buffer(states: dict[Any, dict[str, Any]], key: Any) -> None:
    rest = {name: value for name, value in states.pop(key).items() if name != "momentum_buffer"}
    if rest:
        states[key] = rest
