"""Who does scale + check + clip + AdamW in float32: torch's ways, and ours.

Each function builds one contender with parameters of its own. All of them end a round with the same
parameters.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Contender, Ready
from torch import Tensor
from workloads import Workload

import gradilocks

LR = 1e-3


class Unavailable(Exception):
    """What a contender needs is not there."""


def own_adamw(params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    """gradilocks.optim.AdamW, looked up when it is needed."""
    try:
        optim = importlib.import_module("gradilocks.optim")
    except ImportError as error:
        raise Unavailable(f"gradilocks.optim cannot be imported: {error}") from error
    made: torch.optim.Optimizer = optim.AdamW(params, lr=LR, **options)
    return made


def step_contenders(
    load: Workload, limit: float, *, compiled: bool = False, graph: bool = False
) -> list[Contender]:
    """Everybody, torch's first.

    Args:
        load: the parameters and gradients.
        limit: the largest norm.
        compiled: torch.compile takes part.
        graph: so does a CUDA graph of gradilocks.optim.
    """
    torchs = partial(with_scaler, load, limit, torch.amp.GradScaler, clip=_torch_clip)
    ours = partial(with_scaler, load, limit, gradilocks.GradScaler, clip=gradilocks.clip_grad_norm_)
    made = [
        Contender("torch, fused AdamW", partial(torchs, fused=True), baseline=True),
        # None and not False: False asks for a loop over the parameters, not for the default.
        Contender("torch, default AdamW", partial(torchs, fused=None), baseline=True),
    ]
    if compiled:
        build = partial(torchs, fused=None, compiled=True)
        made.append(Contender("torch.compile, default AdamW", build, baseline=True, optional=True))
    controlled = partial(with_control, load, limit)
    made += [
        Contender("drop-in, torch fused AdamW", partial(ours, fused=True)),
        Contender("GradientControl, torch fused AdamW", controlled),
        Contender("GradientControl, gradilocks.optim", partial(controlled, own=True)),
    ]
    if graph:
        made.append(Contender("gradilocks.optim in a CUDA graph", partial(in_a_graph, load, limit)))
    return made


def with_scaler(
    load: Workload,
    limit: float,
    scaler_class: Callable[..., torch.amp.GradScaler],
    *,
    clip: Callable[..., Tensor] | None,
    fused: bool | None,
    compiled: bool = False,
) -> Ready:
    """The loop that people have: unscale_, clip_grad_norm_, step, update; the last two alone if
    there is no clip."""
    params = load.parameters()
    optimizer = torch.optim.AdamW(params, lr=LR, eps=load.eps, fused=fused)
    scaler = scaler_class(load.device.type)

    def after_backward() -> None:
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(params, limit)
        scaler.step(optimizer)

    if compiled:
        torch._dynamo.reset()  # What other sizes left behind counts against the recompilations.
        after_backward = torch.compile(after_backward)

    def run() -> None:
        scaler.scale(load.loss)
        after_backward()
        scaler.update()

    return Ready(run, partial(load.put_gradients, params), lambda: params)


def drop_in_contenders(load: Workload, limit: float) -> list[Contender]:
    """torch's scaler and ours around torch's default AdamW; without a limit nobody clips."""
    clips = limit < float("inf")
    torchs = partial(with_scaler, load, limit, torch.amp.GradScaler, fused=None)
    ours = partial(with_scaler, load, limit, gradilocks.GradScaler, fused=None)
    clip = gradilocks.clip_grad_norm_
    return [
        Contender("torch", partial(torchs, clip=_torch_clip if clips else None), baseline=True),
        Contender("drop-in", partial(ours, clip=clip if clips else None)),
    ]


def with_control(load: Workload, limit: float, *, own: bool = False) -> Ready:
    """GradientControl over torch's fused AdamW, or over our own."""
    params = load.parameters()
    run = _controlled(load, limit, params, own=own)
    return Ready(run, partial(load.put_gradients, params), lambda: params)


def in_a_graph(load: Workload, limit: float, *, warm_up: int = 3) -> Ready:
    """GradientControl over our own AdamW, captured once; the clock sees the replay."""
    params = load.parameters()
    step = _controlled(load, limit, params, own=True, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            load.put_gradients(params)
            step()
    torch.cuda.current_stream().wait_stream(side)
    load.put_gradients(params)  # New ones, or the control would refuse them as used up.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # The graph knows the optimizer's state only by its addresses: the step holds on to it.
    prepare = partial(load.put_gradients, params)
    return Ready(graph.replay, prepare, lambda: params, ahead=warm_up, keeps=step)


def with_telemetry(load: Workload, limit: float, *, keep: int = 64) -> Ready:
    """GradientControl over our own AdamW; every step's statistics, tensor by tensor, are kept.

    They stay on the device for some steps, and go to pinned memory at every step without waiting.
    """
    params = load.parameters()
    step = _controlled(load, limit, params, own=True)
    kept: deque[object] = deque(maxlen=keep)
    host: dict[str, Tensor] = {}

    def run() -> None:
        statistics = step().statistics
        kept.append(statistics)
        for name in ("norms", "largest", "zeros", "nan", "inf"):
            here = getattr(statistics, name)
            if here is None:
                if load.device.type == "cuda":
                    raise Unavailable(f"outcome.statistics has no {name}")
                continue  # On a CPU it would cost another read.
            if name not in host:
                host[name] = torch.empty(here.shape, dtype=here.dtype, pin_memory=here.is_cuda)
            host[name].copy_(here, non_blocking=True)

    return Ready(run, partial(load.put_gradients, params), lambda: params)


def _controlled(
    load: Workload, limit: float, params: list[Tensor], *, own: bool, **options: Any
) -> Callable[[], Any]:
    """One step of a GradientControl, as a function."""
    if own:
        optimizer = own_adamw(params, eps=load.eps, **options)
    else:
        optimizer = torch.optim.AdamW(params, lr=LR, eps=load.eps, fused=True, **options)
    control = gradilocks.GradientControl(optimizer, clip=limit)

    def step() -> Any:
        control.scale_loss(load.loss)
        return control.step()

    return step


_torch_clip = torch.nn.utils.clip_grad_norm_
