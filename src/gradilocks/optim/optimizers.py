"""AdamW, Adam and SGD: torch's optimizers with a step that reads gradients, parameters and state once.

Arguments, results, `state_dict`, step hooks and the behavior under a GradScaler are those of torch's fused optimizers.
Where the kernels do not apply, torch's own step runs: amsgrad, maximize, dampening, complex, sparse, several devices,
half precision on a CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradilocks.names import Names
from gradilocks.optim.fused_step import FusedStep, has_master, match_layout, refresh_master
from gradilocks.step.gradients import check_float16
from gradilocks.torch_private import enable_amp_scaling, outside_compile

_IMPLEMENTATION = ("foreach", "fused", "master_weights")
_DEVICES_WITH_FUSED_STEPS = ("cpu", "cuda")


class SinglePassOptimizer(torch.optim.Optimizer):
    """Base class of the three optimizers, with the step that they share."""

    _torch_step: ClassVar[Any]
    """torch's own step without its wrappers, which would run the step hooks a second time."""
    _fused_step: FusedStep | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *args: Any,
        fused: bool | None = None,
        master_weights: bool = False,
        **options: Any,
    ) -> None:
        torch_optimizer: Any = super()
        torch_optimizer.__init__(params, lr, *args, fused=fused, **options)
        if fused is None and self._is_fusible():
            fused = True  # The fallback is torch's fused step where torch has one.
            enable_amp_scaling(self)
        self.defaults.update(fused=fused, master_weights=master_weights)
        for group in self.param_groups:
            group.update(fused=fused if group["fused"] is None else group["fused"])
            group.setdefault("master_weights", master_weights)

    def _is_fusible(self) -> bool:
        if self.defaults["foreach"] or self.defaults["differentiable"]:
            return False
        params = [param for group in self.param_groups for param in group["params"]]
        return all(param.is_floating_point() and param.device.type in _DEVICES_WITH_FUSED_STEPS for param in params)

    @outside_compile
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step. Skipped if `found_inf` is set and not 0; gradients are divided by `grad_scale` if set.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self._fused_step is None or not self._fused_step.is_current():
            self._fused_step = FusedStep.make([self])
        if self._fused_step is None:
            self.step_with_torch(grad_scale, found_inf)
        else:
            self._fused_step.run([param.grad for param in self._fused_step.params], grad_scale, found_inf)
        return loss

    def step_with_torch(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Runs torch's own step, without step hooks.

        Args:
            grad_scale: divides the gradients; None for 1.
            found_inf: skips the step if it is not 0. The host reads it if torch's unfused step runs, or if torch
                would create momentum buffers, which a skipped step leaves uninitialized.
        """
        with _masters_as_parameters(self):
            self._call_torch_step(grad_scale, found_inf)

    def _call_torch_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        params = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        for param, _ in params:
            if param.grad.is_neg():  # A lazy negation, which torch's fused steps refuse.
                param.grad = param.grad.resolve_neg()
        fused = [group["fused"] for group in self.param_groups]
        is_fused = all(fused) and _are_contiguous([param for param, _ in params], self.state)
        with_momentum = [param for param, group in params if group.get("momentum")]
        has_buffer = [self.state.get(param, {}).get("momentum_buffer") is not None for param in with_momentum]
        starts_momentum = not all(has_buffer)
        if starts_momentum and any(has_buffer):
            is_fused = False  # torch's fused step creates either all momentum buffers or none.
        if found_inf is not None and (starts_momentum or not is_fused) and bool(found_inf):
            return
        if grad_scale is not None and not is_fused:
            check_float16([param for param, _ in params], Names(None, ()))
            for param, _ in params:
                param.grad.div_(grad_scale)
        before = {name: value for name, value in vars(self).items() if name in ("grad_scale", "found_inf")}
        try:
            for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
                setattr(self, name, value if is_fused else None)
            for group in self.param_groups:
                group["fused"] = group["fused"] if is_fused else False
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                self._torch_step()
        finally:
            for name in ("grad_scale", "found_inf"):
                delattr(self, name)
            vars(self).update(before)
            for group, flag in zip(self.param_groups, fused, strict=True):
                group["fused"] = flag

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch does, but keeps master copies and their moments in float32."""
        # The implementation belongs to this optimizer, not to the checkpoint.
        implementation = [{name: group[name] for name in _IMPLEMENTATION} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, implementation, strict=True):
            group.update(own)
        # torch has cast all state to the dtypes of the parameters, so it is copied again.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for number, (param, group) in zip(numbers, params, strict=True):
            if has_master(param, group):
                for name, value in state_dict["state"].get(number, {}).items():
                    if name != "step":
                        self.state[param][name] = value.to(device=param.device, dtype=torch.float32)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.defaults["fused"]:
            enable_amp_scaling(self)
        for group in self.param_groups:
            for name in _IMPLEMENTATION:
                group.setdefault(name, self.defaults[name])
            for param in group["params"] if group["fused"] else ():
                entry = self.state.get(param, {})
                if "step" in entry:
                    entry["step"] = torch.as_tensor(entry["step"], dtype=torch.float32).to(param.device)


@contextmanager
def _masters_as_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replaces parameters that have a gradient and a master copy by that copy, and rounds it afterwards."""
    replaced = []
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"] if group["master_weights"] else ()):
            if param.grad is not None and has_master(param, group):
                entry = optimizer.state.pop(param, {})
                master = match_layout(entry.pop("master", None), param, torch.float32, initial=param)
                refresh_master(param, master)
                master.grad = param.grad.float()
                group["params"][i] = master
                optimizer.state[master] = entry
                replaced.append((group["params"], i, param, master))
    try:
        yield
    finally:
        for params, i, param, master in replaced:
            params[i], master.grad = param, None
            optimizer.state[param] = {**optimizer.state.pop(master), "master": master}
            param.detach().copy_(master)


def _are_contiguous(params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> bool:
    """True if parameters, gradients and state are plain and contiguous: 60 us for 148 of them.

    torch 2.13's fused steps assume equal strides; with others they update the wrong elements, without an error.
    """
    tensors: list[Any] = [tensor for param in params for tensor in (param, param.grad)]
    tensors += [value for entry in state.values() for value in entry.values()]
    return (
        set(map(type, tensors)) <= {Tensor, torch.nn.Parameter}
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and all(map(Tensor.is_contiguous, tensors))
    )


class AdamW(SinglePassOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` with a single-pass step.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable: as in torch.
        fused: False for torch's unfused step; otherwise the fallback is torch's fused step.
        master_weights: keep a float32 master copy of each float16 or bfloat16 parameter in `state[param]["master"]`,
            and float32 moments. The parameter is its master copy, rounded. In-place writes to a parameter also
            change its master copy, except writes through `param.data`.

    Examples:
        >>> optimizer = gradilocks.optim.AdamW(model.parameters(), lr=1e-4, master_weights=True)
    """

    _torch_step = inspect.unwrap(torch.optim.AdamW.step)


class Adam(SinglePassOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with a single-pass step.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay: as in torch, as are the other options.
        fused, master_weights: as for `AdamW`.
    """

    _torch_step = inspect.unwrap(torch.optim.Adam.step)


class SGD(SinglePassOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with a single-pass step.

    Momentum buffers start as zeros, so a skipped first step changes nothing.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as in torch, as are the other options.
        fused, master_weights: as for `AdamW`.
    """

    _torch_step = inspect.unwrap(torch.optim.SGD.step)

    def _is_fusible(self) -> bool:
        # torch's fused SGD on a CPU leaves most elements of half-precision parameters unchanged (pytorch issue 191763).
        return super()._is_fusible() and not any(
            param.device.type == "cpu" and param.dtype in (torch.float16, torch.bfloat16)
            for group in self.param_groups
            for param in group["params"]
        )
