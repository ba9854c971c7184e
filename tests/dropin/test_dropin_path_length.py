"""The length of one drop-in iteration: calls of our functions, and the files they are in. Counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import gradilocks
from gradilocks import GradScaler, clip_grad_norm_, kernels

SOURCE = str(Path(gradilocks.__file__).parent)


def calls_of(action):
    """(file, function) -> number of calls while `action()` runs. Comprehensions and lambdas do not count."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            calls[str(Path(code.co_filename).relative_to(SOURCE)), code.co_name] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("unscale_with_kernels", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["extension", "plain torch"])
def test_an_iteration_takes_45_calls_in_6_files(backend, fused, unscale_with_kernels, monkeypatch, request):
    if backend == "plain torch":
        monkeypatch.setitem(kernels.BACKENDS, "cpu", None)
    if unscale_with_kernels:
        request.getfixturevalue("_kernels_on_cpu")
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
    report = "\n".join(f"{count:3d}  {file:32s} {name}" for (file, name), count in calls.items())
    print(f"{calls.total()} calls in {len({file for file, _ in calls})} files\n{report}")
    assert calls.total() <= 45
    assert len({file for file, _ in calls}) <= 6
