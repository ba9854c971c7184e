"""What each rank does by itself, beside torch: gradilocks.optim, a control's step, the drop-ins."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gradilocks
from gradilocks.selftest.check_result import Found
from gradilocks.selftest.training_twin import is_same, watching
from gradilocks.selftest.world import World

__all__ = ["OPTIMIZER_CHECKS"]

SHAPES: tuple[tuple[int, ...], ...] = ((), (5,), (33, 17), (2049,))
STEPS = 5
OVERFLOW_AT = 2
LIMIT = 1.0
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
}


def _params(world: World, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(each.to(world.device, dtype)) for each in made]


def _gradients(step: int, dtype: torch.dtype, world: World) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [each.to(dtype).to(world.device) for each in made]


def _give(params: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for param, grad in zip(params, gradients, strict=True):
        param.grad = grad.to(param.dtype).clone()


def _compare(
    ours: list[Any], theirs: list[Any], found: Found, what: str, *, exact: bool = False
) -> None:
    for shape, one, other in zip(SHAPES, ours, theirs, strict=True):
        one, other = one.detach(), other.detach()
        tolerance = 0.0 if exact else 1e-5 if one.dtype is torch.float32 else 1e-10
        if not torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance):
            off = (one.double() - other.double()).abs().max().item()
            found.problem(f"{what}: a parameter of {shape} is off by {off:.3g}")


def _optimizer(kind: str, world: World) -> Found:
    """Whole and half precision: the latter by masters, which must end where float32 does."""
    found = Found()
    for dtype in (torch.float32, torch.float64):
        ours, theirs = _params(world, dtype), _params(world, dtype)
        mine = getattr(gradilocks.optim, kind)(ours, **SETTINGS[kind])
        torchs = getattr(torch.optim, kind)(theirs, **SETTINGS[kind], foreach=False)
        for step in range(STEPS):
            for optimizer, params in ((mine, ours), (torchs, theirs)):
                _give(params, _gradients(step, dtype, world))
                optimizer.step()
        _compare(ours, theirs, found, str(dtype).removeprefix("torch."))
    for dtype in (torch.float16, torch.bfloat16):
        half = _params(world, dtype)
        whole = [nn.Parameter(param.detach().float()) for param in half]
        mine = getattr(gradilocks.optim, kind)(half, **SETTINGS[kind], master_weights=True)
        torchs = getattr(torch.optim, kind)(whole, **SETTINGS[kind], foreach=False)
        for step in range(STEPS):
            for optimizer, params in ((mine, half), (torchs, whole)):
                _give(params, _gradients(step, dtype, world))
                optimizer.step()
        what = f"masters of {str(dtype).removeprefix('torch.')}"
        masters = [mine.state[param]["master"] for param in half]
        _compare(masters, whole, found, what)
        rounded = [master.to(dtype) for master in masters]
        _compare(half, rounded, found, f"{what}, rounded", exact=True)
    return found


def _step(make: Callable[[World, Any], Any], world: World) -> Found:
    """A control beside torch's scaler, clip and fused optimizer, with an overflow in one step."""
    found = Found()
    ours, theirs = _params(world), _params(world)
    mine = make(world, ours)
    torchs = torch.optim.AdamW(theirs, lr=0.01, fused=world.device.type == "cuda")
    policy = gradilocks.DynamicScale(init_scale=1024.0, growth_interval=2)
    control = gradilocks.GradientControl(mine, scale=policy, clip=LIMIT)
    scaler = torch.amp.GradScaler(world.device.type, init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        where = f"step {step + 1}"
        gradients = [grad * control.scale for grad in _gradients(step, torch.float32, world)]
        if step == OVERFLOW_AT:
            gradients[1][3] = math.inf
        loss = torch.ones((), device=world.device, requires_grad=True)
        control.scale_loss(loss)
        _give(ours, gradients)
        # The first step begins by trying the kernels out.
        if step:
            with watching(world, where):
                outcome = control.step()
        else:
            outcome = control.step()
        scaler.scale(loss)
        _give(theirs, gradients)
        scaler.unscale_(torchs)
        norm = torch.nn.utils.clip_grad_norm_(theirs, LIMIT).item()
        scaler.step(torchs)
        scaler.update()
        if outcome.skipped != (step == OVERFLOW_AT):
            found.problem(f"{where}: skipped is {outcome.skipped}")
        elif not outcome.skipped and not math.isclose(outcome.norm, norm, rel_tol=1e-6):
            found.problem(f"{where}: the norm is {outcome.norm!r}, torch's {norm!r}")
        if control.scale != scaler.get_scale():
            found.problem(f"{where}: the scale is {control.scale:g}, not {scaler.get_scale():g}")
        control.zero_grad()
    _compare(ours, theirs, found, "at the end")
    return found


def _drop_ins(world: World) -> Found:
    """Our clip functions and scaler beside torch's, line by line."""
    found = Found()
    for order in (2.0, 1.0, math.inf):
        ours, theirs = _params(world), _params(world)
        for params in (ours, theirs):
            _give(params, _gradients(0, torch.float32, world))
        total = gradilocks.get_total_norm([each.grad for each in ours], order).item()  # type: ignore[misc]
        mine = gradilocks.clip_grad_norm_(ours, LIMIT, order).item()
        torchs = torch.nn.utils.clip_grad_norm_(theirs, LIMIT, order).item()
        if total != mine or not math.isclose(mine, torchs, rel_tol=1e-6):
            found.problem(f"p = {order:g}: the norm is {total!r} and {mine!r}, torch's {torchs!r}")
        for one, other in zip(ours, theirs, strict=True):
            if not is_same(one.grad, other.grad, exact=False):  # type: ignore[arg-type]
                found.problem(f"p = {order:g}: a gradient of {tuple(one.shape)} is clipped wrongly")
    ours, theirs = _params(world), _params(world)
    pairs = [
        (gradilocks.GradScaler(world.device.type, growth_interval=2), ours),
        (torch.amp.GradScaler(world.device.type, growth_interval=2), theirs),
    ]
    optimizers = [torch.optim.SGD(params, lr=0.1) for _, params in pairs]
    for step in range(STEPS):
        for (scaler, params), optimizer in zip(pairs, optimizers, strict=True):
            scaler.scale(torch.ones((), device=world.device, requires_grad=True))
            _give(params, _gradients(step, torch.float32, world))
            if step == OVERFLOW_AT:
                params[1].grad[3] = math.nan  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
        scales = [scaler.get_scale() for scaler, _ in pairs]
        if scales[0] != scales[1]:
            found.problem(f"step {step + 1}: the scale is {scales[0]:g}, torch's {scales[1]:g}")
    _compare(ours, theirs, found, "GradScaler")
    return found


OPTIMIZER_CHECKS: dict[str, Callable[[World], Found]] = {
    **{f"gradilocks.optim.{kind}": partial(_optimizer, kind) for kind in SETTINGS},
    "a control, torch's AdamW": partial(
        _step,
        lambda world, params: torch.optim.AdamW(params, lr=0.01, fused=world.device.type == "cuda"),
    ),
    "a control, gradilocks.optim": partial(
        _step, lambda world, params: gradilocks.optim.AdamW(params, lr=0.01)
    ),
    "the drop-ins": _drop_ins,
}
"""What runs it, by name."""
