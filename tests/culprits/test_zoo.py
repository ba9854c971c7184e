"""Of every faulty training the truth is said, by an untouched script, at its first bad step."""

from __future__ import annotations

import pytest

from gradilocks import read_run
from tests.culprits.zoo import SCRIPT, ZOO, Case, said_of, verdict
from tests.observe.sessions import forked


def takes_long(case: Case) -> bool:
    """Whether it is left to `make long`: at its first bad step a fault that lasts is as any."""
    return case.how_often == "lasting" and case.where != "grown"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.long] if takes_long(case) else [])
        for case in ZOO
    ],
)
def test_the_planted_fault_is_named(case: Case, tmp_path):
    shown = forked("-o", "a.jsonl", str(SCRIPT), *case.words, cwd=tmp_path)
    assert shown.status == 0, shown.err
    said = said_of(read_run(tmp_path / "a.jsonl"))
    assert verdict(case, said) == "right", said
    assert said.certainty == "certain", said.text


FROZEN = """
import torch
from torch import nn

class Sometimes(nn.Module):
    def forward(self, x):
        return x / (x - x) if number == 5 else x

torch.manual_seed(0)
backbone, head = nn.Sequential(nn.Linear(4, 8), Sometimes()), nn.Linear(8, 3)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for number in range(8):
    with torch.no_grad():
        features = backbone(torch.randn(5, 4))
    loss = nn.functional.cross_entropy(head(features), torch.randint(3, (5,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_a_frozen_model_made_is_not_called_the_input_data(tmp_path):
    (tmp_path / "train.py").write_text(FROZEN)
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    said = said_of(read_run(tmp_path / "a.jsonl"))
    assert (said.step, said.where) == (6, "outside")
    assert "came from another model" in said.text


PARTS = """
import sys
import torch
from torch import nn

class Divide(nn.Module):
    def forward(self, x):
        if x.abs().max() < 50:
            return x
        return x.exp() if fault == "inf" else (x - x) / (x - x)

class Mask(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.arange(8) > 5, float("-inf"))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.mask, self.bad, self.head = Mask(), Divide(), nn.Linear(8, 3)
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
        if fault == "inside":
            self.enc.append(self.bad)

torch.manual_seed(0)
fault = sys.argv[1]
net = Net()
optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1)
for number in range(8):
    x, now = torch.randn(5, 4), number == 5
    if fault == "teacher":
        with torch.no_grad():
            x = net.teacher(x / 0 if now else x)
    h = net.enc(x)
    if number > 3:
        h = net.mask(h).softmax(-1)  # Whose -inf are as they should be.
    if now and fault == "between":
        h = h / 0
    elif now and fault != "teacher":
        h = h + net.bad(h * 1000)
    loss = nn.functional.cross_entropy(net.head(h), torch.randint(3, (5,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def said_of_parts(fault, folder):
    (folder / "train.py").write_text(PARTS)
    shown = forked("-o", "a.jsonl", "train.py", fault, cwd=folder)
    assert shown.status == 0, shown.err
    return said_of(read_run(folder / "a.jsonl"))


@pytest.mark.parametrize(
    ("fault", "where", "module"),
    [
        ("nan", "module", "bad"),
        ("inf", "module", "bad"),
        ("between", "before", "head"),
        ("teacher", "outside", "enc"),
    ],
)
def test_a_part_that_a_loop_calls_for_the_first_time_is_told_from_what_is_between(
    fault, where, module, tmp_path
):
    said = said_of_parts(fault, tmp_path)
    assert (said.step, said.where, said.module) == (6, where, module), said.text
    assert said.certainty == "certain", said.text


def test_what_nobody_saw_called_by_itself_may_have_been_between(tmp_path):
    said = said_of_parts("inside", tmp_path)
    assert (said.step, said.where, said.module, said.certainty) == (6, "before", "head", "likely")
    assert said.text.endswith(
        "Likely, not certain: what runs inside of other modules is watched only there, and the "
        "script may have called enc.2 (Divide) by itself"
    )
