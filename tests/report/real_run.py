"""A real training run, and its run file: the demo's GPT in emulated fp16 under GradientControl.

What the tests of the report call a healthy run, and what the picture in the README shows, is made
here, not written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from gradilocks import ClipByNorm, DynamicScale, GradientControl, Recorder, emulate
from gradilocks.demo.small_gpt import GPT, Batches, python_documentation

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
    command: Sequence[str] | None = None,
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
        command: what the run file says was run; this process's command line by default.
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
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    batches = Batches(text, rows=ROWS, length=LENGTH, seed=seed)
    with Recorder(path, detail_every=detail_every, command=command, log=False) as recorder:
        control = GradientControl(
            optimizer,
            model=model,
            scale=DynamicScale(init_scale=init_scale, growth_interval=growth_interval),
            clip=ClipByNorm(limit),
            give_up_after=None,
            record=recorder,
        )
        for number in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, number / max(1, steps // 20))
            inputs, targets = batches.draw()
            with emulate(torch.float16):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            control.backward(loss * (bad_batches or {}).get(number, 1.0))
            control.step()
            control.zero_grad()
