"""On a GPU: the script's numbers stay its own, skips have names, and watching waits for nothing."""

from __future__ import annotations

import pytest

from gradilocks import read_run
from tests.observe.sessions import both, watched, write

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys, warnings
import torch
from torch import nn

warnings.simplefilter("ignore")
kind = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=kind == "fused")
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
inputs = torch.randn(32, 64, device="cuda")
targets = torch.randint(10, (32,), device="cuda")
bad = torch.tensor(float("inf"), device="cuda")
losses = []
for number in range(60):
    if number == 20 and kind == "fused":
        torch.cuda.set_sync_debug_mode("error")
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    loss = loss * bad if number == 30 else loss
    scaler.scale(loss).backward()
    if kind == "clip":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach())
torch.cuda.set_sync_debug_mode("default")
print([float(loss).hex() for loss in losses[-3:]], scaler.get_scale())
print([float(param.detach().double().sum()).hex() for param in model.parameters()])
"""


@pytest.mark.parametrize("kind", ["plain", "clip", "fused"])
def test_a_watched_script_prints_the_same_and_its_skip_has_a_name(kind, tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    plain, seen = both("train.py", kind, cwd=tmp_path)
    assert (plain.status, seen.status) == (0, 0)
    assert plain.out == seen.out
    (path,) = (tmp_path / "runs").glob("*.jsonl")
    run = read_run(path)
    assert len(run.steps) == 60
    (skip,) = [step for step in run.steps if step.skipped]
    assert (skip.step, skip.reason, skip.scale) == (31, "nonfinite", 1024.0)
    assert skip.culprits[0].name == "2.bias"
    assert run.steps[-1].limit == (0.5 if kind == "clip" else None)


def test_a_traced_script_on_a_gpu_names_what_follows_the_model(tmp_path):
    write(tmp_path, "train.py", SCRIPT.replace("number == 30", "number in (30, 31, 32)"))
    shown = watched("--trace", "-o", "a.jsonl", "train.py", "plain", cwd=tmp_path)
    assert shown.status == 0
    assert read_run(tmp_path / "a.jsonl").traces
