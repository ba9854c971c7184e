"""A step by torch's own fused kernels, where ours do not serve: on a CPU, or without Triton.

They take it for granted that a parameter, its gradient and its state lie in memory in one order and
have one dtype. On a CPU nothing checks it (torch 2.13), and the gradient goes to the wrong
elements. So what they cannot take has a stand-in for one step: a dense copy, or the float32 master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels.chunks import DTYPES
from gradilocks.names import Names
from gradilocks.optim.optimizer_state import (
    arrange,
    check_gradients,
    check_step,
    mark,
    needs_master,
    place_state,
    same_order,
)
from gradilocks.ranks.layout import is_distributed, laid_out_like, local_of
from gradilocks.step.table import every_parameter

__all__ = ["step_by_torch"]


def step_by_torch(optimizer: Any, step: Callable[[], None]) -> None:
    """Runs torch's `step` on those parameters that have a gradient, or on their stand-ins.

    Gradients of DTensors lie as these do.
    """
    with _a_gradient_each(optimizer):
        _step(optimizer, step)


def _step(optimizer: Any, step: Callable[[], None]) -> None:
    steady = _steady(optimizer)
    if steady is not None:
        with _as_torch_takes_them(optimizer):
            step()
        torch.autograd.graph.increment_version(steady)  # torch's fused kernels do not count.
        return
    name = Names(None, (optimizer,))
    check_gradients(every_parameter([optimizer]), name)
    having = [
        (param, group)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]
    params, groups = [param for param, _ in having], [group for _, group in having]
    check_step(optimizer, params, groups, name)
    place_state(optimizer, params, name)
    if not params or optimizer.skips_on_host(params, groups):
        return
    mastered = [needs_master(param, group) for param, group in having]
    optimizer.fill_for_torch(params, groups, mastered)
    starting = {id(param) for param, group in having if optimizer.is_starting(param, group)}
    # torch's fused SGD starts all buffers of a group or none.
    rounds = [starting, {id(param) for param in params} - starting]
    before = [group["params"] for group in optimizer.param_groups]
    bodies: dict[int, Tensor] = {}
    try:
        for param, wide in zip(params, mastered, strict=True):
            bodies[id(param)] = _body(optimizer, param, wide)
        with _as_torch_takes_them(optimizer):
            for members in filter(None, rounds):
                for group, every in zip(optimizer.param_groups, before, strict=True):
                    group["params"] = [bodies[id(p)] for p in every if id(p) in members]
                step()
    finally:
        for group, every in zip(optimizer.param_groups, before, strict=True):
            group["params"] = every
        torch.autograd.graph.increment_version(params)
        for param, wide in zip(params, mastered, strict=True):
            if bodies.get(id(param), param) is not param:
                _put_back(optimizer, param, bodies[id(param)], wide)


@contextmanager
def _a_gradient_each(optimizer: Any) -> Iterator[None]:
    """Inside, no two parameters share a gradient: torch divides each in place by `grad_scale`."""
    shared: list[tuple[Tensor, Tensor]] = []
    if getattr(optimizer, "grad_scale", None) is not None:
        seen: set[int] = set()
        for param in every_parameter([optimizer]):
            grad = param.grad
            if type(grad) is Tensor and grad.layout is torch.strided and grad.numel():
                if grad.data_ptr() in seen:
                    shared.append((param, grad))
                    param.grad = grad.clone()
                seen.add(grad.data_ptr())
    try:
        yield
    finally:
        for param, grad in shared:
            param.grad = grad


def _steady(optimizer: Any) -> list[Tensor] | None:
    """The parameters with a gradient if torch can take every one as it is, as most steps can."""
    params: list[Tensor] = []
    nothing: dict[str, Any] = {}
    for group in optimizer.param_groups:
        needed = optimizer.needed_by_torch(group)
        if needed is None:
            return None
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if is_distributed(param):
                return None
            dtype, size, device = param.dtype, param.numel(), param.get_device()
            if dtype not in DTYPES or optimizer.dtype_for_torch(param) is not dtype:
                return None
            state = optimizer.state.get(param, nothing)
            step = state.get("step")
            if step is not None and getattr(step, "dtype", None) is not torch.float32:
                return None
            for tensor in (param, grad, *[state.get(name) for name in needed]):
                if (
                    tensor is None
                    or tensor.dtype is not dtype
                    or tensor.numel() != size
                    or tensor.get_device() != device
                    or tensor.layout is not torch.strided
                    or not tensor.is_contiguous()
                ):
                    return None
            params.append(param)
    return params


@contextmanager
def _as_torch_takes_them(optimizer: Any) -> Iterator[None]:
    """`grad_scale` and `found_inf` as 0-d float32; torch skips for exactly 1 and nothing else."""
    skip, divisor = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    try:
        if skip is not None:
            optimizer.found_inf = skip.reshape(()).ne(0).to(torch.float32)
        if divisor is not None:
            optimizer.grad_scale = divisor.reshape(()).to(torch.float32)
        yield
    finally:
        if skip is not None:
            optimizer.found_inf = skip
        if divisor is not None:
            optimizer.grad_scale = divisor


def _body(optimizer: Any, param: Tensor, wide: bool) -> Tensor:
    """What torch is to step: the parameter itself if it can, else something in its place."""
    state = optimizer.state.get(param, {})
    body: Tensor = state["master"] if wide else param
    grad = param.grad
    assert grad is not None
    if is_distributed(param):  # torch's fused SGD knows no DTensors, and each costs it 100 µs.
        body, grad = local_of(body), local_of(grad)
        state = {key: local_of(value) for key, value in state.items()}
    if not same_order(body, grad):
        body = body.detach().clone(memory_format=torch.contiguous_format)
        grad = grad.contiguous()
    dtype = optimizer.dtype_for_torch(body)
    if body.dtype != dtype:
        body = body.detach().to(dtype)
    elif body is param and grad.dtype != dtype:
        body = param.detach()
    state = {key: value for key, value in state.items() if key != "master"} if wide else state
    arrange(body, state, optimizer.columns, dtype=dtype)
    if body is not param:
        optimizer.state.pop(param, None)
        body.grad = grad.to(dtype)
        if state:
            optimizer.state[body] = state
    return body


def _put_back(optimizer: Any, param: Tensor, body: Tensor, wide: bool) -> None:
    state = optimizer.state.pop(body, {})
    body.grad = None
    home = local_of(param)
    if wide:
        state["master"] = body
    elif body.dtype != param.dtype:
        arrange(home, state, optimizer.columns, dtype=param.dtype)
    if is_distributed(param):
        for key in ("master", *optimizer.columns):
            if isinstance(state.get(key), Tensor):
                state[key] = laid_out_like(param, state[key])
    if state:
        optimizer.state[param] = state
    if body.dtype != home.dtype or body.data_ptr() != home.data_ptr():
        home.copy_(body)
    if wide:
        optimizer.marks[param] = mark(param)
