"""The truth beside a framework's script: a plain loop of torch's own parts over the same batches.

The loss of a step is what was run backward for it: the mean of its micro-batches, where each of
them is divided by their number. Its norm is that of the unscaled gradients before the clip.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from gradilocks.runfile import Run
from tests.integrations import task

HALF = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": None}
NAMES = [name for name, _ in task.Network().named_parameters()]


def plain_loop(
    case: Mapping[str, Any],
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    network: Callable[[], torch.nn.Module] = task.Network,
) -> list[dict[str, Any]]:
    """What happens at each step of `case`, by torch alone.

    Args:
        case: "precision", "optimizer", "accumulate", "clip", "bad" as `task` counts it;
            "scaled": whether there is a scaler, if not in fp16 alone;
            "rounds inputs": whether they are in half precision too;
            "skips first": whether a skipped step is not clipped at all;
            "clips scaled": whether the clip comes before the gradients are unscaled;
            "schedule": whether LinearLR is stepped "always" (the default), only when a step was
            "taken", or "never".
        make: makes the optimizer, in place of what "optimizer" says.
        network: makes the model.
    """
    model = network()
    optimizer = (make or task.OPTIMIZERS[case["optimizer"]])(model.parameters())
    schedule = case.get("schedule", "always")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    if schedule == "never":
        optimizer.param_groups[0]["lr"] = scheduler.base_lrs[0]
    half = HALF[case["precision"]]
    scaled = case.get("scaled", half is torch.float16)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    batches = task.batches(accumulate=case["accumulate"], bad=case["bad"])
    steps, loss = [], 0.0
    for number, batch in enumerate(batches):
        if half is not None and case.get("rounds inputs"):
            batch = batch.to(half)
        with contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
            part = model(batch).mean() / case["accumulate"]
        loss += part.item()
        scaler.scale(part).backward()
        if (number + 1) % case["accumulate"]:
            continue
        scale, lr = scaler.get_scale(), optimizer.param_groups[0]["lr"]
        found = {name: p.grad / scale for name, p in model.named_parameters()}
        norm = math.sqrt(sum(each.double().square().sum().item() for each in found.values()))
        limit = case["clip"]
        if limit is not None and case.get("clips scaled"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            limit /= scale
        scaler.unscale_(optimizer)
        if limit is not None and not case.get("clips scaled"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.is_enabled() and scaler.get_scale() < scale
        if skipped and case.get("skips first"):
            limit = None
        optimizer.zero_grad()
        if schedule == "always" or (schedule == "taken" and not skipped):
            scheduler.step()
        steps.append(
            {
                "step": len(steps) + 1,
                "loss": pytest.approx(loss, rel=1e-6),
                "scale": scale,
                "norm": pytest.approx(norm, rel=1e-6) if math.isfinite(norm) else None,
                "skipped": skipped,
                "limit": None if limit is None else pytest.approx(limit, rel=1e-6),
                "clipped": bool(limit is not None and norm > limit and not skipped),
                "lr": pytest.approx(lr),
                "culprits": [name for name, each in found.items() if not each.isfinite().all()],
            }
        )
        loss = 0.0
    return steps


def recorded(run: Run, index: int, prefix: str = "") -> list[dict[str, Any]]:
    """The same from a run file, of its optimizer `index`, whose names begin with `prefix`."""
    assert run.optimizers[index].names == tuple(prefix + name for name in NAMES)
    keys = ("step", "loss", "scale", "norm", "skipped", "limit", "clipped", "lr")
    return [
        {key: getattr(step, key) for key in keys}
        | {"culprits": [each.name.removeprefix(prefix) for each in step.culprits]}
        for step in run.steps
        if step.optimizer == index
    ]
