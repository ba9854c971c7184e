"""A real training run, and its run file: the demo's GPT in emulated fp16 under GradientControl.

What the tests of the report call a healthy run, and what the picture in the README shows, is made
here, not written by hand.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import gradilocks
from gradilocks import ClipByNorm, DynamicScale, GradientControl
from gradilocks.demo.half import HalfLinear
from gradilocks.demo.model import GPT
from gradilocks.demo.text import Batches, python_documentation
from gradilocks.runfile import Culprit, Detail, End, Header, OptimizerInfo, Step
from gradilocks.runfile.writing import end_line, header_line, optimizer_line, step_line

ROWS, LENGTH, WIDTH, LAYERS, HEADS = 16, 48, 48, 3, 4


def train(
    path: Path,
    *,
    steps: int,
    detail_every: int = 5,
    rate: float = 2e-3,
    init_scale: float = 2.0**16,
    growth_interval: int = 200,
    limit: float = 1.0,
    bad_batches: dict[int, float] | None = None,
    seed: int = 0,
) -> None:
    """Trains, and writes the run file.

    Args:
        path: where.
        steps: how many.
        detail_every: how often every tensor is looked at.
        rate: the learning rate, after a warm-up of a twentieth of the steps.
        init_scale: where the scale starts.
        growth_interval: of the scale.
        limit: of the norm.
        bad_batches: what to multiply the loss with, at these steps.
        seed: of the parameters and the batches.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = python_documentation()
    model = GPT(
        vocabulary=len(text.vocabulary),
        length=LENGTH,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        linear=HalfLinear,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    scale = DynamicScale(init_scale=init_scale, growth_interval=growth_interval)
    clip = ClipByNorm(limit)
    control = GradientControl(optimizer, model=model, scale=scale, clip=clip, give_up_after=None)
    batches = Batches(text, rows=ROWS, length=LENGTH, seed=seed)
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    header = Header(
        version=1,
        started=time.time(),
        command=("python", *sys.argv),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gradilocks": gradilocks.__version__,
        },
        hardware={"machine": platform.machine(), "cores": os.cpu_count(), "gpus": []},
        settings={"scale": repr(scale), "clip": repr(clip), "detail_every": detail_every},
        rank=0,
        ranks=1,
    )
    info = OptimizerInfo(
        0,
        "AdamW",
        tuple(names),
        tuple(parameter.numel() for parameter in parameters),
        tuple(str(parameter.dtype).removeprefix("torch.") for parameter in parameters),
    )
    began = time.perf_counter()
    with path.open("w", encoding="utf-8") as file:
        file.write(header_line(header) + optimizer_line(info))
        for number in range(1, steps + 1):
            warm = min(1.0, number / max(1, steps // 20))
            optimizer.param_groups[0]["lr"] = rate * warm
            inputs, targets = batches.draw()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            control.backward(loss * (bad_batches or {}).get(number, 1.0))
            looked = number % detail_every == 0 or number in (bad_batches or {})
            used = control.scale
            gradients = [p.grad.detach().clone() / used for p in parameters if p.grad is not None]
            before = [parameter.detach().clone() for parameter in parameters] if looked else []
            outcome = control.step()
            detail = _detail(gradients, before, parameters) if looked else None
            control.zero_grad()
            file.write(
                step_line(
                    Step(
                        step=number,
                        time=time.perf_counter() - began,
                        optimizer=0,
                        loss=loss.item(),
                        scale=used,
                        norm=outcome.norm,
                        limit=limit,
                        clipped=outcome.clipped,
                        skipped=outcome.skipped,
                        reason="nonfinite" if outcome.skipped else None,
                        culprits=_culprits(names, gradients) if outcome.skipped else (),
                        lr=rate * warm,
                        nan=sum(int(g.isnan().sum()) for g in gradients),
                        inf=sum(int(g.isinf().sum()) for g in gradients),
                        detail=detail,
                    )
                )
            )
        file.write(end_line(End(time.perf_counter() - began, "finished", 0, None)))


def _culprits(names: list[str], gradients: list[torch.Tensor]) -> tuple[Culprit, ...]:
    return tuple(
        Culprit(name, int(g.isnan().sum()), int(g.isinf().sum()))
        for name, g in reversed(list(zip(names, gradients, strict=True)))
        if not g.isfinite().all()
    )


@torch.no_grad()
def _detail(
    gradients: list[torch.Tensor], before: list[torch.Tensor], after: list[torch.nn.Parameter]
) -> Detail:
    weights = [float(weight.norm()) for weight in before]
    moved = [float((new - old).norm()) for new, old in zip(after, before, strict=True)]
    return Detail(
        norm=[float(g.norm()) for g in gradients],
        largest=[float(g.abs().max()) for g in gradients],
        zeros=[float((g == 0).float().mean()) for g in gradients],
        nan=[int(g.isnan().sum()) for g in gradients],
        inf=[int(g.isinf().sum()) for g in gradients],
        weight=weights,
        update=[m / w if w > 0 else None for m, w in zip(moved, weights, strict=True)],
    )
