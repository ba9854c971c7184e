"""What is said of NaN that a trace has seen, in runs that were really trained under `run`.

The last line, the report and `watch` must not deny what the trace has said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradilocks import read_run
from gradilocks.cli.app import app
from gradilocks.report.run_report import main_numbers, report_on
from tests.observe.sessions import forked, write

SCRIPT = """
import sys
import torch
from torch import nn

fault, at, scale = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


class Root(nn.Module):
    def forward(self, x):
        sharp = x * 0 if root else x.abs() + 1
        return x + sharp.sqrt() * 0  # The root's slope at 0 is infinite: 0 * Inf is NaN.


root = False
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Root(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
for number in range(1, 81):
    x = torch.randn(16, 8)
    y = x[:, :4].argmax(1)
    root = fault == "root" and number == at
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if number == at and fault == "overflow":
        model[0].weight.grad[0, 0] = torch.inf
    if number == at - 1 and fault == "rate":
        optimizer.param_groups[0]["lr"] = float("nan")
    if number == at - 1 and fault == "momentum":
        optimizer.state[model[2].weight]["momentum_buffer"][0, 0] = torch.nan
    scaler.step(optimizer)
    scaler.update()
    if number == at - 1 and fault == "weight":
        model[2].weight.data[0, 0] = torch.nan
"""


@dataclass
class Told:
    """What a user reads of one run when it has ended."""

    log: str
    last: str
    watch: str
    findings: list[dict[str, Any]]
    rate: str

    @property
    def everything(self) -> str:
        told = [f"{each['title']} {each['sentence']}" for each in self.findings]
        own = [line for line in self.log.splitlines() if line.startswith("gradilocks: ")]
        return "\n".join([*own, *self.watch.splitlines()[-1:], *told])


def told_of(folder: Path, fault: str, *options: str, at: int = 41, scale: float = 1) -> Told:
    write(folder, "train.py", SCRIPT)
    path = folder / "a.jsonl"
    done = forked(*options, "-o", "a.jsonl", "train.py", fault, str(at), str(scale), cwd=folder)
    assert done.status == 0, done.err
    shown = [CliRunner().invoke(app, [*words, str(path)]).stdout for words in (
        ["report", "--json"], ["watch", "--once"]
    )]  # fmt: skip
    reported = report_on(read_run(path), "run")
    rate = dict(main_numbers(reported, reported.tracks[0]))["learning rate"]
    (found,) = json.loads(shown[0])["runs"]
    return Told(done.err, done.told[-1], shown[1], found["findings"], rate)


# --- NaN in the weights that no bad step has put there -------------------------------------------

WEIGHTS = [
    ("weight", "2.weight", "scaler"),
    ("weight", "2.weight", "guard"),
    ("momentum", "2.weight", "taken"),
    ("rate", "4 parameters", "guard"),
]


@pytest.mark.parametrize(("fault", "where", "how"), WEIGHTS)
def test_nan_in_the_weights_is_one_finding_that_nothing_denies(fault, where, how, tmp_path):
    options = ["--guard", "skip"] if how == "guard" else []
    told = told_of(tmp_path, fault, *options, scale=1024 if how == "scaler" else 1)
    (finding,) = told.findings
    assert (finding["rule"], finding["severity"]) == ("weights-not-finite", "problem")
    assert (finding["step"], finding["culprit"]) == (41, None)
    held = f"he weights held NaN before step 41, in {where}"
    assert finding["title"] == f"T{held}, and no bad step had put it there"
    ended = f"the loss is NaN or Inf since step 41 of 80; t{held} (certain)"
    assert f"It ended in NaN or Inf: {ended}. 1 problem" in told.last
    assert ended in told.watch
    for wrong in (
        *("changed no weight", "module unknown", "as if there had been none", "has not seen"),
        *("The trace began", "would have skipped it"),
    ):
        assert wrong not in told.everything
    assert ("40 steps were skipped since" in finding["sentence"]) is (how != "taken")


def test_a_learning_rate_that_is_nan_is_what_spoilt_the_weights(tmp_path):
    told = told_of(tmp_path, "rate")
    (finding,) = told.findings
    assert "The learning rate was NaN or Inf at step 40" in finding["sentence"]
    assert "the script wrote it" not in finding["sentence"]
    assert told.rate == "0.05 → NaN or Inf"


def test_without_a_trace_a_learning_rate_that_is_nan_is_named_too(tmp_path):
    told = told_of(tmp_path, "rate", "--no-trace")
    (finding,) = told.findings
    assert finding["rule"] == "taken-though-nonfinite"
    assert "The learning rate was NaN or Inf at step 40" in finding["sentence"]
    assert "would have skipped it" not in finding["sentence"]


def test_a_finite_learning_rate_is_not_blamed(tmp_path):
    told = told_of(tmp_path, "weight")
    assert "The learning rate was NaN" not in told.everything
    assert told.rate == "0.05"


# --- NaN that no scale has made ------------------------------------------------------------------


def test_a_root_of_zero_under_a_scaler_is_no_price_of_a_scale(tmp_path):
    told = told_of(tmp_path, "root", scale=1024)
    (finding,) = told.findings
    assert (finding["rule"], finding["severity"]) == ("nan", "warning")
    assert (finding["step"], finding["culprit"]) == (41, "1")
    assert finding["title"] == "NaN in the gradients of 1 step, from 1"
    assert "where the scale was 1024: it is not what made them" in finding["sentence"]
    assert "usual price" not in told.everything
    assert "needs a look" in told.last


def test_an_overflow_under_a_scaler_stays_the_price_of_a_scale(tmp_path):
    told = told_of(tmp_path, "overflow", scale=1024)
    (finding,) = [each for each in told.findings if each["severity"] != "warning"]
    assert (finding["rule"], finding["severity"]) == ("skipped", "note")
    assert "nan" not in {each["rule"] for each in told.findings}
