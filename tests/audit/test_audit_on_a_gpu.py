"""On a GPU: the counts of the CPU, no wait before they are read, and scripts with scalers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.lab.audit.counting import Tally, read

pytestmark = pytest.mark.gpu


def values() -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    numbers = torch.randn(300_000, generator=source)
    numbers *= torch.randn(300_000, generator=source).mul(20).exp()
    numbers[::1000] = 0.0
    numbers[1::5000] = float("nan")
    numbers[2::5000] = float("inf")
    numbers[3::5000] = 2.0**-149
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_counts_are_those_of_the_cpu(dtype, scale):
    found = []
    for device in ("cpu", "cuda"):
        tally = Tally()
        tally.add(values().to(dtype).to(device), scale=scale)
        tally.add(values()[:77].to(dtype).to(device), scale=scale)
        found += read([tally])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_counting_waits_for_nothing_until_it_is_read():
    tally, gradient = Tally(), values().cuda()
    scale = torch.tensor(1024.0, device="cuda")
    tally.add(gradient)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tally.add(gradient, scale=scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(read([tally])[0].counts) > 0


def test_a_model_on_a_gpu_is_audited_as_on_a_cpu():
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
        batches = [torch.randn(8, 16).to(device) for _ in range(3)]
        found.append(
            gradilocks.audit(model, lambda model, x: model(x).square().mean() / 4096, batches)
        )
    cpu, gpu = found
    assert gpu.recommendation.format == cpu.recommendation.format
    assert gpu.recommendation.scale == cpu.recommendation.scale
    assert gpu.shares("fp16", 1.0).lost == pytest.approx(cpu.shares("fp16", 1.0).lost, abs=0.01)


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cuda", init_scale=4096.0)
inputs = torch.randn(32, 64, device="cuda")
targets = torch.randint(10, (32,), device="cuda")
for number in range(1000):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_script_with_autocast_and_a_scaler_is_audited_without_its_scale(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gradilocks", "audit", "-n", "5", "--json", "-", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    assert plain["steps"] == 5
    assert plain["loss_scale"] == 4096.0
    assert "float16" in plain["precision"]
    # The gradients of a mean over 32 rows of softmax are below 1/32: the scale is divided out.
    assert 1e-4 < plain["total"]["activations"]["largest"] <= 1 / 32
