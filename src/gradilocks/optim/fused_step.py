"""Update of all parameters of one or more optimizers in one call of the kernels, through tables of addresses."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels import backend_for, reference
from gradilocks.kernels.addresses import AddressReader
from gradilocks.kernels.pointer_table import CHECKS_PER_STEP, OptimizerKind, is_capturing
from gradilocks.ranks.layout import local
from gradilocks.step.gradients import parameters
from gradilocks.torch_private import version_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE_NAMES = {"adam": _MOMENTS, "adamw": _MOMENTS, "momentum": ("momentum_buffer",), "sgd": ()}
_HALF = (torch.float16, torch.bfloat16)


def has_master(param: Tensor, group: dict[str, Any]) -> bool:
    """True if the optimizer keeps a float32 master copy of this parameter."""
    return bool(group["master_weights"]) and param.dtype in _HALF


class FusedStep:
    """Address tables for the one-pass update of the parameters of one or more `gradilocks.optim` optimizers.

    A StepPlan has one for all its optimizers. An optimizer whose `step` is called has one of its own.

    All parameters are on one device. The tables are valid for one set of parameters and state tensors; when
    `is_current` returns False, make a new FusedStep. As in torch, a parameter gets its state when it first has a
    gradient.

    Moved parameters, added groups and a loaded or cleared state are detected at the next step. A state tensor that was
    replaced by hand is detected later, because each step compares the states of only `CHECKS_PER_STEP` parameters;
    until then the kernels update the old tensor, whose memory is still referenced.

    Attributes:
        params: all parameters in order: optimizers, groups, parameters.
        device: of the parameters.
        reader: reads the addresses of the gradients.
        rows: addresses of each parameter, its step count, first and second moment (or momentum buffer) and master; 0
            where there is none.
        kinds: kind of each parameter; None for a parameter without gradient and state.
        groups: index of each parameter's group.
        rules: rule of each group: adam, adamw, momentum or sgd.
    """

    @classmethod
    def make(cls, optimizers: Sequence[torch.optim.Optimizer]) -> FusedStep | None:
        """Creates missing optimizer state and collects the addresses.

        Returns:
            None if the kernels do not cover these optimizers: several devices, complex or non-dense parameters,
            wrapper subclasses of Tensor, amsgrad, maximize, dampening, a learning rate on a GPU, no kernels for the
            device.
        """
        params = parameters(optimizers)
        dtypes = getattr(backend_for(params[0].device.type), "TYPES", ()) if params else ()
        if not dtypes or None in _rules(optimizers):
            return None
        tensors = [local(param) for param in params]
        if len({tensor.device for tensor in tensors}) > 1:
            return None
        if not all(tensor.dtype in dtypes and reference.is_dense(tensor) for tensor in tensors):
            return None
        if reference.without_address(tensors, list(map(Tensor.data_ptr, tensors))):
            return None
        return cls(optimizers)

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.params = parameters(optimizers)
        self.device = local(self.params[0]).device
        self.reader = AddressReader(self.params)
        self._param_addresses = array("q", self.reader.read(self.params) or ())
        self.rows: list[list[int]] = [[], [], [], [], []]
        self.kinds: list[OptimizerKind | None] = []
        self.groups: list[int] = []
        # An optimizer holds its FusedStep; a strong reference back would create a cycle.
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.rules = _rules(optimizers)
        self._stateless: list[Tensor] = []
        self._masters: list[tuple[Tensor, Tensor]] = []
        self._storages: list[Any] = []  # Strong references, so that the kernels never write to freed memory.
        groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        for number, (optimizer, group) in enumerate(groups):
            for param in group["params"]:
                self.groups.append(number)
                self._add(optimizer, group, param)
        self.group_count = len(groups)
        self._versions = [version_of(param) for param, _ in self._masters]
        self._states = [(optimizer.state, len(optimizer.state)) for optimizer in optimizers]
        self._checks: list[tuple[Any, Tensor, dict[str, Any], list[Any], list[int]]] = [
            (
                optimizer.state,
                param,
                entry,
                list(entry.values()),
                [value.data_ptr() if type(value) is Tensor else 0 for value in entry.values()],
            )
            for optimizer in optimizers
            for param, entry in optimizer.state.items()
        ]
        self._next_check = 0
        self._tables: Any = None

    def _add(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> None:
        """Appends one parameter to the tables, and creates its state if it has a gradient."""
        rule, is_mastered = _rule(group) or "", has_master(param, group)
        needs_state = rule != "sgd" or is_mastered
        tensors: list[Tensor | None] = [local(param), None, None, None, None]
        if needs_state and param.grad is None and not optimizer.state.get(param):
            self._stateless.append(param)
            self.kinds.append(None)
        else:
            entry = optimizer.state[param] if needs_state else {}
            dtype = torch.float32 if is_mastered else param.dtype
            if _STATE_NAMES[rule] is _MOMENTS:
                tensors[1] = entry["step"] = _step_count(entry.get("step"), self.device)
            for row, name in enumerate(_STATE_NAMES[rule], start=2):
                entry[name] = match_layout(entry.get(name), param, dtype)
                tensors[row] = local(entry[name])
            if is_mastered:
                entry["master"] = match_layout(entry.get("master"), param, torch.float32, initial=param)
                tensors[4] = local(entry["master"])
                refresh_master(param, entry["master"])
                self._masters.append((param, entry["master"]))
            state_dtype = dtype if tensors[2] is None else tensors[2].dtype
            self.kinds.append(OptimizerKind(rule, param.dtype, param.dtype, state_dtype, is_mastered))
        present = [tensor for tensor in tensors if tensor is not None]
        reference.without_address(present, list(map(Tensor.data_ptr, present)))  # Raises if memory was freed.
        for addresses, tensor in zip(self.rows, tensors, strict=True):
            addresses.append(0 if tensor is None else tensor.data_ptr())
        self._storages += [tensor.untyped_storage() for tensor in present[1:]]

    def is_current(self) -> bool:
        """True if the tables still describe the optimizers. Refreshes masters of parameters written by other code."""
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        if len(optimizers) < len(self._optimizers):
            return False
        for optimizer, (state, count) in zip(optimizers, self._states, strict=True):
            if optimizer.state is not state or len(state) != count:
                return False
        params = parameters(optimizers)
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        if _rules(optimizers) != self.rules:
            return False
        if self.reader.read(params) != self._param_addresses:
            return False
        if self._stateless and any(param.grad is not None for param in self._stateless):
            return False
        begin, end = self._next_check, self._next_check + CHECKS_PER_STEP
        self._next_check = end if end < len(self._checks) else 0
        for state, param, entry, values, addresses in self._checks[begin:end]:
            if state.get(param) is not entry or len(entry) != len(values):
                return False
            if not all(map(is_, entry.values(), values)):
                return False
            if [value.data_ptr() if type(value) is Tensor else 0 for value in values] != addresses:
                return False
        if self._masters:
            self._refresh_written_masters()
        return True

    def _refresh_written_masters(self) -> None:
        """Refreshes the masters of parameters that were written in place."""
        versions = [version_of(param) for param, _ in self._masters]
        if versions != self._versions:
            for (param, master), old, new in zip(self._masters, self._versions, versions, strict=True):
                if old != new:
                    refresh_master(param, master)
            self._versions = versions

    def settings(self) -> list[float]:
        """The `SETTINGS` numbers of each group."""
        numbers: list[float] = []
        for optimizer in self._optimizers:
            for group in optimizer().param_groups:  # type: ignore[union-attr]
                if "betas" in group:
                    beta1, beta2 = group["betas"]
                    rule_settings = [beta1, beta2, group["eps"], group["decoupled_weight_decay"]]
                else:
                    rule_settings = [group["momentum"], group["nesterov"], 0.0, 0.0]
                numbers += map(float, (group["lr"], group["weight_decay"], *rule_settings, 0.0, 0.0))
        return numbers

    def run(self, grads: list[Tensor | None], divisor: Tensor | None, skip: Tensor | None) -> None:
        """Steps all parameters, or none if `skip` is not 0. Call `is_current` first.

        Args:
            grads: gradients of `params`. If one does not have the layout of its parameter, torch's own step runs.
            divisor: 0-d, divides the gradients; None for 1.
            skip: 0-d; None for 0.
        """
        addresses = self.reader.read_gradients(grads)
        if addresses is None:
            for optimizer in self._optimizers:
                optimizer().step_with_torch(divisor, skip)  # type: ignore[union-attr]
            return
        self.run_at(addresses, divisor, skip)

    def run_at(self, addresses: array[int], divisor: Tensor | float | None, skip: Tensor | None = None) -> None:
        """`run` with the result of `reader.read_gradients`. A float as divisor needs parameters on a CPU."""
        tables = self._tables
        if is_capturing(self.device):
            tables = self._make_tables()  # Eager steps must not overwrite the tables that the user's graph reads.
        elif tables is None:
            tables = self._tables = self._make_tables()
        tables.run(addresses, self.settings(), divisor, skip)

    def _make_tables(self) -> Any:
        if hasattr(backend_for(self.device.type), "step"):  # The C extension.
            return _CpuTables(self)
        from gradilocks.kernels.recorded_step import UpdateTables

        return UpdateTables(self)


class _CpuTables:
    """The tables of a FusedStep in host memory, for the C kernels."""

    def __init__(self, fused: FusedStep) -> None:
        from gradilocks.kernels import cpu

        self._step, self._count = cpu.step, len(fused.params)
        self._addresses = array("q", bytes(8 * self._count))
        for row in fused.rows:
            self._addresses.extend(row)
        self._sizes, self._groups = array("q", fused.reader.sizes), array("i", fused.groups)

    def run(
        self, addresses: array[int], settings: list[float], divisor: Tensor | float | None, skip: Tensor | None
    ) -> None:
        """See `FusedStep.run`."""
        if skip is not None and bool(skip):
            return
        self._addresses[: self._count] = addresses
        number = 1.0 if divisor is None else float(divisor)
        self._step(self._addresses, self._sizes, self._groups, array("d", settings), number)


def _rules(optimizers: Sequence[torch.optim.Optimizer]) -> list[str | None]:
    return [_rule(group) for optimizer in optimizers for group in optimizer.param_groups]


def _rule(group: dict[str, Any]) -> str | None:
    """The update rule of a parameter group; None if neither the Triton nor the C kernels cover its options."""
    is_adam = "betas" in group
    if (
        group["maximize"]
        or group["differentiable"]
        or group["fused"] is False
        or (group["amsgrad"] if is_adam else group["dampening"])
    ):
        return None
    numbers = (group["lr"], group["weight_decay"], *(group["betas"] if is_adam else ()))
    if Tensor in map(type, numbers) and any(isinstance(n, Tensor) and n.device.type != "cpu" for n in numbers):
        return None
    if is_adam:
        return "adamw" if group["decoupled_weight_decay"] else "adam"
    return "momentum" if group["momentum"] else "sgd"


def _step_count(step: Any, device: torch.device) -> Tensor:
    """Adam's step count as the kernels need it: a float32 number on the device of the parameter."""
    if step is None:
        return torch.zeros((), dtype=torch.float32, device=device)
    count = step if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
    return count.to(device, torch.float32, non_blocking=True)


def match_layout(value: Tensor | None, param: Tensor, dtype: torch.dtype, *, initial: Tensor | None = None) -> Tensor:
    """A state tensor with the memory layout of its parameter: `value` itself if it fits, else a copy."""
    if value is not None and (value.device, value.dtype) == (param.device, dtype):
        local_value, local_param = local(value), local(param)
        if local_value.shape == local_param.shape and local_value.stride() == local_param.stride():
            return value
    new = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format).detach()
    source = initial if value is None else value
    return new if source is None else new.copy_(source.detach())


@torch.no_grad()
def refresh_master(param: Tensor, master: Tensor) -> None:
    """Overwrites master elements that do not round to the parameter's elements. No host synchronization."""
    copies, values = local(master), local(param)
    copies.copy_(torch.where(copies.to(values.dtype) == values, copies, values.to(copies.dtype)))
