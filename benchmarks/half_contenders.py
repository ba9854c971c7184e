"""Who steps half-precision models: fp16 with fp32 masters, and bf16 throughout."""

from __future__ import annotations

from functools import partial

import torch
from contenders import LR, own_adamw
from harness import Contender, Ready
from workloads import Workload

import gradilocks


def masters_contenders(load: Workload, limit: float) -> list[Contender]:
    """fp16 parameters and gradients, fp32 masters: torch has none, so it is built from its ops."""
    return [
        Contender("torch ops, fused AdamW", partial(torch_masters, load, limit), baseline=True),
        Contender("GradientControl, gradilocks.optim", partial(own_masters, load, limit)),
    ]


def torch_masters(load: Workload, limit: float) -> Ready:
    """Casts, then the usual loop on the masters, then casts back; nothing waits for the device."""
    params = load.parameters()
    masters = [param.detach().float().requires_grad_() for param in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    master_grads = [master.grad for master in masters]
    optimizer = torch.optim.AdamW(masters, lr=LR, eps=load.eps, fused=True)
    scaler = torch.amp.GradScaler(load.device.type)

    @torch.no_grad()
    def run() -> None:
        scaler.scale(load.loss)
        torch._foreach_copy_(master_grads, [param.grad for param in params])
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, limit)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(params, masters)

    return Ready(run, partial(load.put_gradients, params), lambda: params)


def own_masters(load: Workload, limit: float) -> Ready:
    """The masters are in the optimizer's state; the casts are in its one pass."""
    params = load.parameters()
    optimizer = own_adamw(params, eps=load.eps, master_weights=True)
    control = gradilocks.GradientControl(optimizer, clip=limit)

    def run() -> None:
        control.scale_loss(load.loss)
        control.step()

    return Ready(run, partial(load.put_gradients, params), lambda: params)


def expert_contenders(load: Workload, limit: float) -> list[Contender]:
    """bf16 parameters, gradients and moments, no scale: torch's scaler takes no bf16 gradients.

    torch's side does less: it does not look for NaN and Inf and cannot skip.
    """
    ours = partial(own_unscaled, load, limit)
    return [
        Contender("torch, fused AdamW", partial(torch_unscaled, load, limit), baseline=True),
        Contender("GradientControl, torch fused AdamW", partial(ours, own=False)),
        Contender("GradientControl, gradilocks.optim", partial(ours, own=True)),
    ]


def torch_unscaled(load: Workload, limit: float) -> Ready:
    """clip_grad_norm_ and a fused step."""
    params = load.parameters()
    optimizer = torch.optim.AdamW(params, lr=LR, eps=load.eps, fused=True)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(params, limit)
        optimizer.step()

    return Ready(run, partial(load.put_gradients, params), lambda: params)


def own_unscaled(load: Workload, limit: float, *, own: bool) -> Ready:
    """GradientControl with scale=None."""
    params = load.parameters()
    if own:
        optimizer = own_adamw(params, eps=load.eps)
    else:
        optimizer = torch.optim.AdamW(params, lr=LR, eps=load.eps, fused=True)
    control = gradilocks.GradientControl(optimizer, scale=None, clip=limit)

    def run() -> None:
        control.scale_loss(load.loss)
        control.step()

    return Ready(run, partial(load.put_gradients, params), lambda: params)
