"""`--guard`: steps with NaN or Inf gradients change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradilocks.run.guard import Guard
from run.scripts import run_recorded

OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.items(), ids=OPTIMIZERS)
def test_a_guarded_step_leaves_parameters_state_and_gradients(name, options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    params = list(model.parameters())
    before = copy.deepcopy((params, optimizer.state_dict()))
    for param in params:
        param.grad.fill_(float("nan"))
    guard = Guard("skip")
    guard.apply(params, 2, "NaN")
    optimizer.step()
    assert guard.restore()
    assert not guard.restore()
    assert all(torch.equal(old, new) for old, new in zip(before[0], params, strict=True))
    assert all(param.grad.isnan().all() for param in params)
    for old, new in zip(before[1]["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(old[key] == new[key] if not torch.is_tensor(old[key]) else old[key].equal(new[key]) for key in old)


SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean() * (float("nan") if number == 3 else 1)
    loss.backward()
    return loss

for number in range(1, 7):
    x = torch.randn(8, 4)
    before = [param.detach().clone() for param in model.parameters()]
    if "closure" in sys.argv:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    print(number, all(map(torch.equal, before, model.parameters())), flush=True)
"""


@pytest.mark.parametrize("arguments", [(), ("closure",)])
def test_skip_leaves_out_the_bad_step_only(arguments, tmp_path):
    finished = run_recorded(SCRIPT, *arguments, cwd=tmp_path, guard="skip")
    assert finished.exit_code == 0, finished.err
    assert finished.out == "1 False\n2 False\n3 True\n4 False\n5 False\n6 False\n"
    assert [line["skipped"] for line in finished.steps] == [False, False, True, False, False, False]


def test_stop_ends_the_script_before_the_bad_step(tmp_path):
    finished = run_recorded(SCRIPT, cwd=tmp_path, guard="stop")
    assert (finished.exit_code, finished.out) == (1, "1 False\n2 False\n")
    assert "Stopped by --guard stop; parameters are unchanged." in finished.err
    assert finished.of_kind("end")[0]["status"].startswith("NonFiniteGradient: step 3: first NaN")


def test_without_a_guard_the_bad_step_is_applied_and_recorded_as_such(tmp_path):
    finished = run_recorded(SCRIPT, cwd=tmp_path)
    assert [line["nan"] > 0 for line in finished.steps] == [False, False, True, True, True, True]
    assert not any(line["skipped"] for line in finished.steps)
