"""With `--swap` a script gets Gradilocks' parts, by whatever name it imports torch's."""

from __future__ import annotations

import sys

import torch

from gradilocks import optim, read_run
from gradilocks.observe.patches import Patches, swap
from tests.observe.sessions import forked, write

ASKS = """
import warnings
import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.clip_grad import clip_grad_value_
from torch.amp import GradScaler
from torch.optim import AdamW
from torch.optim.sgd import SGD
import torch.cuda.amp

def home(thing):
    return thing.__module__.split(".")[0]

print(home(clip_grad_norm_), home(clip_grad_value_), home(GradScaler), home(AdamW), home(SGD))
print(home(torch.amp.GradScaler), home(torch.optim.Adam))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scaler = torch.cuda.amp.GradScaler(2.0, enabled=False)
print(type(scaler).__mro__[1].__module__.split(".")[0], isinstance(scaler, torch.amp.GradScaler))
"""


def test_the_script_gets_gradilocks_parts_wherever_it_imports_them_from(tmp_path):
    write(tmp_path, "asks.py", ASKS)
    shown = forked("--swap", "--swap-optimizer", "AdamW", "asks.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert shown.out.splitlines() == [
        "gradilocks gradilocks gradilocks gradilocks torch",
        "gradilocks torch",
        "gradilocks True",
    ]
    plain = forked("asks.py", cwd=tmp_path, command="python")
    assert plain.out.splitlines()[0] == "torch torch torch torch torch"
    assert forked("asks.py", cwd=tmp_path).out == plain.out


def test_a_swapped_run_is_recorded_once_a_step(tmp_path):
    text = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(6):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
"""
    write(tmp_path, "train.py", text)
    shown = forked("--swap", "--swap-optimizer", "SGD", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    run = read_run(tmp_path / "a.jsonl")
    assert [s.step for s in run.steps] == [1, 2, 3, 4, 5, 6]
    assert all(s.clipped and s.limit == 0.01 and s.norm > 0.01 for s in run.steps)
    assert all(s.loss is not None and s.scale == 65536.0 for s in run.steps)
    assert run.header.settings["swap"] is True


def test_everything_is_put_back():
    before = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.nn.utils.clip_grad_norm_)
    adamw = torch.optim.AdamW
    replaced = Patches()
    swap(replaced, parts=True, optimizers=["AdamW"])
    try:
        assert torch.optim.AdamW is optim.AdamW
        assert torch.nn.utils.clip_grad.clip_grad_norm_ is not before[2]
        model = torch.nn.Linear(2, 1)
        assert isinstance(torch.optim.AdamW(model.parameters()), adamw)
    finally:
        replaced.undo()
    now = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.nn.utils.clip_grad_norm_)
    assert now == before
    assert torch.optim.AdamW is sys.modules["torch.optim.adamw"].AdamW is adamw
    assert optim.AdamW is not adamw
