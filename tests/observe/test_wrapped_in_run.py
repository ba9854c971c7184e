"""A wrapped optimizer's step is recorded once, with the numbers of the one inside it."""

from __future__ import annotations

import pytest

from gradilocks import read_run
from tests.observe.sessions import forked, write

SCRIPT = """
import sys
import torch
import gradilocks


class Wrapper:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return [group for each in self.optimizers for group in each.param_groups]

    def __getattr__(self, name):
        return getattr(self.optimizers[0], name)

    def step(self, closure=None):
        for each in self.optimizers:
            each.step(closure)


driver, wrapped = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
fused = driver != "torch's scaler"
if wrapped == "several":
    optimizer = Wrapper(*(torch.optim.SGD(m.parameters(), lr=0.1, fused=fused) for m in model[::2]))
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    if wrapped == "one":
        optimizer = Wrapper(optimizer)
scaler = torch.amp.GradScaler("cpu") if not fused else gradilocks.GradScaler("cpu")
control = gradilocks.GradientControl(optimizer, model=model) if driver == "control" else None
for number in range(4):
    for param in model.parameters():
        param.grad = None
    loss = model(torch.linspace(-1, 1, 6).view(2, 3)).square().mean()
    if number == 2:
        loss = loss * float("inf")
    if control is None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        control.backward(loss)
        control.step()
"""


@pytest.mark.parametrize("driver", ["control", "our scaler", "torch's scaler"])
@pytest.mark.parametrize("wrapped", ["one", "several"])
def test_a_wrapped_optimizer_is_recorded_once_as_the_bare_one(driver, wrapped, tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    told = {}
    for how in ("not", wrapped):
        words = ("-o", f"{how}.jsonl", "--detail-every", "1", "train.py", driver, how)
        shown = forked(*words, cwd=tmp_path)
        assert shown.status == 0, shown.err
        told[how] = read_run(tmp_path / f"{how}.jsonl")
    expected, got = told["not"], told[wrapped]
    assert len(got.optimizers) == 1
    assert len(got.steps) == len(expected.steps) == 4
    for one, other in zip(got.steps, expected.steps, strict=True):
        for name in ("step", "skipped", "loss", "scale", "norm", "culprits"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.detail.update == other.detail.update
        assert any(one.detail.update) != one.skipped
