"""Runs `gradilocks` commands for tests: here, or in a process that has imported torch already."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run.scripts import call_in_child

TRAINING = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(64, 4)
for step in range(1, 41):
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    if f"--nan-in-step={step}" in sys.argv:
        loss = loss * torch.log(torch.tensor(-1.0))
    loss.backward()
    optimizer.step()
"""
"""A script whose loss falls from 3.3 to 0.13; with --nan-in-step=N the loss of step N is NaN."""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str


def run_command(*words: object, cwd: Path, **environment: str) -> Finished:
    """`gradilocks words` in a process of its own, in a folder."""
    status = call_in_child(_command, (list(map(str, words)),), cwd, **environment)
    return Finished(status, (cwd / "out").read_text("utf-8"), (cwd / "err").read_text("utf-8"))


def _command(words: list[str]) -> None:
    from gradilocks.cli import main

    sys.exit(main(words))


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run file."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if line["kind"] == kind]
