"""Where models run in another order than they are defined in, or the loss is not known.

The gradients do not tell then where NaN or Inf arose: nobody is named, by `run`, the log, `report`,
`watch` or `compare`. And the last line tells steps that were skipped from steps that were taken.
"""

from __future__ import annotations

import pytest

from tests.observe.sessions import write
from tests.observe.test_planted_faults import Told

SCRIPT = """
import sys
import torch
from torch import nn
import gradilocks

mode = sys.argv[1]
torch.manual_seed(0)

def layers(*sizes):
    pairs = zip(sizes, sizes[1:])
    return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.Tanh())))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = layers(8, 8, 4)
        self.encoder = layers(4, 8, 8)
        self.classifier = nn.Linear(8, 2)
    def forward(self, x, bad):
        z = self.encoder(x)
        h = self.decoder[0](z)
        if bad and mode == "decoder":
            h.register_hook(lambda g: g * float("inf"))
        if bad and mode in ("two", "last"):
            z.register_hook(lambda g: g * float("inf"))
        return self.decoder[3](self.decoder[2](self.decoder[1](h))), self.classifier(z)

net = Net()
optimizers = [torch.optim.Adam(net.parameters(), 1e-3)]
if mode == "two":
    parts = (net.encoder, nn.ModuleList([net.decoder, net.classifier]))
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in parts]
control = gradilocks.GradientControl(*optimizers, scale=None)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=mode != "loss")
for number in range(1, 31):
    x = torch.randn(16, 4)
    made, told = net(x, number in (20, 21) or (number >= 20 and mode == "last"))
    loss = (made - x).square().mean() + nn.functional.cross_entropy(told, torch.arange(16) % 2)
    if number >= 20 and mode == "loss":
        loss = loss + float("inf")  # Its gradients stay as they are.
    if number in (20, 21) and mode == "unknown":
        loss = loss + (made * float("inf")).sum()
    for optimizer in optimizers:
        optimizer.zero_grad()
    if mode == "unknown":
        loss.backward()
        control.step()
        continue
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
"""


def told_of(folder, mode: str) -> Told:
    write(folder, "train.py", SCRIPT)
    return Told(folder, "train.py", mode)


@pytest.mark.parametrize("mode", ["decoder", "two"])
def test_a_model_that_runs_in_another_order_than_it_is_defined_in_names_nobody(mode, tmp_path):
    told = told_of(tmp_path, mode)
    assert told.names() == set()
    assert told.culprits() == set()
    assert "The gradients do not tell where it arose" in told.report
    assert "Likely" not in told.report
    assert "first that backward makes" not in told.log
    assert sum(step.skipped for step in told.run.steps if not step.optimizer) == 2


def test_a_loss_that_did_not_come_by_the_control_is_seen_and_names_nobody(tmp_path):
    told = told_of(tmp_path, "unknown")
    assert [s.loss_nonfinite for s in told.run.steps if s.skipped] == [True, True]
    assert all(s.loss is not None for s in told.run.steps if not s.skipped)
    assert told.names() == set()
    assert "forward or loss, module unknown" in told.log


def test_steps_that_were_taken_are_not_said_to_have_been_skipped(tmp_path):
    told = told_of(tmp_path, "loss")
    ended = "the loss is NaN or Inf since step 20 of 30; the gradients stayed finite"
    assert f"It ended in NaN or Inf: {ended}" in told.last
    assert ended in told.sentence
    assert told.watch.splitlines()[-1].endswith(f"{ended}; forward or loss, module unknown")
    assert "skipped and changed no weight" not in told.everything


def test_a_run_whose_last_steps_were_all_skipped_says_so_at_its_end(tmp_path):
    told = told_of(tmp_path, "last")
    ended = (
        "the gradients are NaN or Inf since step 20 of 30; the steps since then were skipped and "
        "changed no weight"
    )
    assert f"It ended in NaN or Inf: {ended}" in told.last
    assert ended in told.watch
    assert told.culprits() == set()
