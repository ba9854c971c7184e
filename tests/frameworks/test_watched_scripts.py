"""Scripts of fastai, timm, Ignite and torchtitan under `gradilocks run`: every number is true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradilocks import read_run
from tests.frameworks import STAND_INS
from tests.observe.plain_loop import plain_loop, recorded
from tests.observe.sessions import SOURCE, process, watched

FOLDER = Path(__file__).parent
PATHS = f"{SOURCE}:{STAND_INS}"
MADE = {
    "fastai's sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "wrapped sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "wrapped adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
}


@pytest.mark.parametrize("framework", ["fastai", "timm", "ignite", "torchtitan"])
def test_every_number_of_a_frameworks_script_is_that_of_a_plain_loop(framework, tmp_path):
    script = str(FOLDER / f"planted_{framework}.py")
    shown = watched("-o", "a.jsonl", script, cwd=tmp_path, PYTHONPATH=PATHS)
    assert shown.status == 0, shown.err
    cases = [json.loads(line) for line in shown.out.splitlines()]
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.optimizers) == len(cases) >= 2
    for index, case in enumerate(cases):
        expected = plain_loop(case, make=MADE.get(case["optimizer"]))
        assert recorded(run, index) == expected, case


HELD = """
import sys, torch
sys.path.append(sys.argv[1])
from tests.frameworks import planted_fastai
case = planted_fastai.case("32-true", "fastai's sgd", 1, None)
case["bad"] = 2
learn = planted_fastai.learner(case, opt_func=planted_fastai.make(case))
with learn.no_logging(), learn.no_mbar():
    learn.fit(1)
print("whole" if all(p.isfinite().all() for p in learn.model.parameters()) else "spoilt")
"""


def test_a_bad_step_of_fastais_own_optimizer_is_held_back_by_a_guard(tmp_path):
    (tmp_path / "train.py").write_text(HELD)
    words = ("train.py", str(FOLDER.parents[1]))
    assert process(*words, cwd=tmp_path).out.split()[-1] == "spoilt"
    shown = watched("-o", "a.jsonl", "--guard", "skip", *words, cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert shown.out.split()[-1] == "whole", shown.err
    run = read_run(tmp_path / "a.jsonl")
    assert [step.skipped for step in run.steps] == [False, False, True, False, False, False]


FAILING = """
import sys
sys.path.append(sys.argv[1])
from gradilocks.integrations.fastai import GradientControlCallback
from tests.frameworks import planted_fastai


def loss_that_fails(losses, _):
    if learn.train_iter == 4:
        raise KeyError("a bug of the user's")
    return losses.mean()


callback = GradientControlCallback(amp="fp16", clip=0.05, record="own.jsonl")
case = planted_fastai.case("16-mixed", "fastai's sgd", 1, None)
learn = planted_fastai.learner(case, opt_func=planted_fastai.make(case), cbs=callback)
learn.loss_func = loss_that_fails
with learn.no_logging(), learn.no_mbar():
    learn.fit(1)
"""


def test_an_exception_ends_our_callbacks_run_file_and_run_sees_the_same_steps(tmp_path):
    (tmp_path / "train.py").write_text(FAILING)
    shown = watched("-o", "a.jsonl", "train.py", str(FOLDER.parents[1]), cwd=tmp_path)
    assert shown.status == 1
    own, seen = read_run(tmp_path / "own.jsonl"), read_run(tmp_path / "a.jsonl")
    assert own.end.status == seen.end.status == "error"
    assert "a bug of the user's" in own.end.error
    numbers = [
        [(s.step, s.loss, s.norm, s.scale, s.limit, s.skipped, s.culprits) for s in run.steps]
        for run in (own, seen)
    ]
    assert numbers[0] == numbers[1]
    assert [row[5] for row in numbers[0]] == [False, False, True, False]
