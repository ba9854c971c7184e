"""The length of one drop-in iteration: calls of our functions, and the files they are in. Counted, not timed."""

from __future__ import annotations

import pytest
import torch

from gradilocks import GradScaler, clip_grad_norm_
from step.test_path_length import calls_of, report


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("cpu_backend", "unscaled_by")
def test_an_iteration_takes_45_calls_in_6_files(fused):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = GradScaler("cpu", model=model)

    def iteration():
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        loss = model(torch.ones(2, 8)).square().mean()
        calls = calls_of(iteration)
        optimizer.zero_grad()
    assert calls.total() <= 45, report("an iteration", calls)
    assert len({file for file, _ in calls}) <= 6, report("an iteration", calls)
