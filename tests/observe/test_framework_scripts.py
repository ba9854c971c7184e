"""Scripts of frameworks, which nobody has touched, under `gradilocks run`: every number is true."""

from __future__ import annotations

import json

import pytest

from gradilocks import read_run
from tests.observe.plain_loop import plain_loop, recorded
from tests.observe.sessions import SCRIPTS, forked


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_every_number_of_a_frameworks_script_is_that_of_a_plain_loop(framework, tmp_path):
    shown = forked("-o", "a.jsonl", str(SCRIPTS / f"planted_{framework}.py"), cwd=tmp_path)
    assert shown.status == 0, shown.err
    cases = [json.loads(line) for line in shown.out.splitlines()]
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.optimizers) == len(cases) >= 6
    for index, case in enumerate(cases):
        if "precision" in case:
            assert recorded(run, index, case.get("prefix", "")) == plain_loop(case), case
        if "names" in case:
            assert sorted(run.optimizers[index].names) == case["names"]
        if "logged" in case:
            steps = [step for step in run.steps if step.optimizer == index]
            for step, (loss, norm) in zip(steps, case["logged"], strict=True):
                assert step.loss == pytest.approx(loss, rel=1e-5), (case, step.step)
                if not step.culprits:
                    assert step.norm == pytest.approx(norm, rel=1e-5), (case, step.step)
