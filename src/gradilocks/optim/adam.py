"""Adam and AdamW: torch's, in two launches a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradilocks._torch import sub_
from gradilocks.kernels.host_numbers import send
from gradilocks.optim.fused_optimizer import FusedOptimizer, Plan
from gradilocks.optim.optimizer_state import ensure_master

__all__ = ["Adam", "AdamW"]

# By these names also while `gradilocks run --swap-optimizer` is on.
_Adam = torch.optim.Adam
_AdamW = torch.optim.AdamW


class _Adams(FusedOptimizer):
    kernel: ClassVar[str] = "adam"
    columns: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    reads: ClassVar[tuple[str, ...]] = (
        "lr", "weight_decay", "betas", "eps", "decoupled_weight_decay", "amsgrad", "maximize",
    )  # fmt: skip

    def flags(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (
            ("AMSGRAD", bool(group["amsgrad"])),
            ("MAXIMIZE", bool(group["maximize"])),
            ("DECOUPLED", self._is_decoupled(group)),
        )

    def settings(self, group: dict[str, Any]) -> list[Any]:
        decoupled = 1.0 if self._is_decoupled(group) else 0.0
        return [group["lr"], group["weight_decay"], *group["betas"], group["eps"], decoupled]

    def _is_decoupled(self, group: dict[str, Any]) -> bool:
        decoupled = group.get("decoupled_weight_decay")  # torch before 2.7 has no such setting.
        return isinstance(self, _AdamW) if decoupled is None else bool(decoupled)

    def fill_state(
        self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]], mastered: Sequence[bool]
    ) -> None:
        new = [param for param in params if "step" not in self.state[param]]
        if new:
            steps = torch.zeros(len(new), dtype=torch.float32, device=new[0].device).unbind()
            for param, step in zip(new, steps, strict=True):
                self.state[param]["step"] = step
        self._bring_steps(params)
        for param, group, wide in zip(params, groups, mastered, strict=True):
            state = self.state[param]
            dtype = torch.float32 if wide else param.dtype
            for name in self.columns[: 3 if group["amsgrad"] else 2]:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param, dtype=dtype)
            if wide:
                ensure_master(param, state, self.marks)

    def _bring_steps(self, params: Sequence[Tensor]) -> None:
        """Counts from an optimizer that counts on the host: sent all at once, without a wait."""
        there: list[Tensor] = []
        numbers: list[float] = []
        for param in params:
            step = self.state[param]["step"]
            if isinstance(step, Tensor) and step.device.type != "cpu":
                if step.device != param.device or step.dtype is not torch.float32:
                    self.state[param]["step"] = step.to(param.device, torch.float32)
            elif param.device.type != "cpu" or getattr(step, "dtype", None) is not torch.float32:
                there.append(param)
                numbers.append(float(step))
        if there:
            host = torch.tensor(numbers, dtype=torch.float32, device="cpu")
            for param, step in zip(there, send(host, there[0].device).unbind(), strict=True):
                self.state[param]["step"] = step

    def needed_by_torch(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        if group["master_weights"] or isinstance(group["lr"], Tensor):
            return None
        return self.columns[: 3 if group["amsgrad"] else 2]

    def own_table(self, plan: Plan) -> tuple[Tensor, list[Tensor | None]]:
        steps = [state["step"] for state in plan.states]
        return send(array("q", [step.data_ptr() for step in steps]), plan.device), steps

    def undo_rates(self, skip: Tensor | None) -> None:
        assert self._plan is not None
        steps = [state["step"] for state in self._plan.states]
        taken = torch.ones_like(steps[0]) if skip is None else 1.0 - skip
        sub_(steps, [taken] * len(steps))


class AdamW(_Adams, _AdamW):
    """torch.optim.AdamW, with the same arguments, the same state and the same results.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.
        foreach, capturable, fused: taken for compatibility; every step is fused and can be
            captured in a CUDA graph.
        differentiable: refused if True, as torch's fused optimizers do.
        master_weights: keep a float32 master of each float16 or bfloat16 parameter in the state,
            with float32 moments; the parameter is the master rounded. What is written to the
            parameter later is taken over, unless it is written through `param.data`, which nobody
            can see: then `del optimizer.state[param]["master"]`.

    Example:
        >>> optimizer = gradilocks.optim.AdamW(model.parameters(), lr=3e-4)
        >>> control = GradientControl(optimizer, model=model, clip=1.0)

    Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        _AdamW.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, capturable=capturable, differentiable=differentiable, fused=True,
        )  # fmt: skip
        self._prepare(master_weights)


class Adam(_Adams, _Adam):
    """torch.optim.Adam, with the same arguments, the same state and the same results.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in
            torch.
        foreach, capturable, fused: taken for compatibility; every step is fused and can be
            captured in a CUDA graph.
        differentiable: refused if True, as torch's fused optimizers do.
        master_weights: as in AdamW.

    Example:
        >>> optimizer = gradilocks.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)

    Reference: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: bool = False,
    ) -> None:
        # torch before 2.7 has no such argument, and needs none as long as it is not set.
        more = {"decoupled_weight_decay": True} if decoupled_weight_decay else {}
        _Adam.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize,
            capturable=capturable, differentiable=differentiable, fused=True, **more,
        )  # fmt: skip
        self._prepare(master_weights)
