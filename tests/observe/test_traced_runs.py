"""`gradilocks run --trace` finds the module, in a script that knows nothing of it."""

from __future__ import annotations

import pytest

from gradilocks import read_run
from tests.observe.sessions import forked, process, write

SCRIPT = """
import torch
from torch import nn

class Hot(nn.Module):
    by = 1.0
    def forward(self, x):
        return x * self.by

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Hot(), nn.Linear(4, 1))
optimizer = torch.optim.{optimizer}
scaler = torch.amp.GradScaler("cpu")
for number in range(12):
    optimizer.zero_grad()
    model[1].by = float("inf") if number in (4, 5, 9) else 1.0
    loss = model(torch.randn(2, 4)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print([p.tolist() for p in model.parameters()], torch.rand(1).item())
print(any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
"""


@pytest.mark.parametrize(
    "optimizer", ["SGD(model.parameters(), 0.1)", "Adam(model.parameters(), fused=True)"]
)
def test_the_step_after_a_skip_is_traced_and_no_number_changes(optimizer, tmp_path):
    write(tmp_path, "train.py", SCRIPT.format(optimizer=optimizer))
    shown = forked("--trace", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert shown.out == process("train.py", cwd=tmp_path).out
    assert shown.out.splitlines()[-1] == "False"
    run = read_run(tmp_path / "a.jsonl")
    assert [s.step for s in run.steps if s.skipped] == [5, 6, 10]
    (found,) = run.traces  # Step 6; what follows 10 is well.
    assert (found.step, found.phase, found.module, found.kind) == (6, "forward", "1", "Hot")
    assert run.header.settings["trace"] is True
    assert any("traced: Inf first in the output of 1 (Hot)" in line for line in shown.told)
