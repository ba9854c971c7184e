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
