"""Runs `gradilocks` commands for tests: here, or in a process that has imported torch already."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "gradilocks.cli", "gradilocks.run.hooks", "gradilocks.control", "gradilocks.view.report"]
)

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
    process = _context.Process(target=_child, args=(list(map(str, words)), str(cwd), environment))
    # The child would import the main module, which is pytest's.
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
        process.start()
    process.join(120)
    assert process.exitcode is not None, "the command did not end"
    return Finished(process.exitcode, (cwd / "out").read_text("utf-8"), (cwd / "err").read_text("utf-8"))


def _child(words: list[str], cwd: str, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, encoding="utf-8") for number in (1, 2))  # noqa: SIM115
    from gradilocks.cli import main

    sys.exit(main(words))


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run file."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if line["kind"] == kind]
