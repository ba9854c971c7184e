"""Losses that ranks tell each other later, put in their places when the file is read."""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks import read_run
from gradilocks.report import examine
from gradilocks.runfile import (
    Header,
    OptimizerInfo,
    RankLosses,
    describe_bad,
    header_line,
    losses_line,
    named_numbers,
    on_ranks,
    optimizer_line,
    step_line,
)
from gradilocks.step.rank_losses import RankedLosses
from tests.runfile.run_files import plain_step

HEADER = header_line(Header(1, 0.0, (), {}, {}, {}, 0, 2))
INFO = optimizer_line(OptimizerInfo(0, "SGD", ("w",), (4,), ("float32",)))
TOLD = RankLosses(optimizer=0, first=2, ranks=2, losses=(0.5, None, None), bad={"3": [1]})


def written(tmp_path, *lines):
    path = tmp_path / "a.jsonl"
    path.write_text("".join((HEADER, INFO, *lines)))
    return path


def test_means_take_the_place_of_one_ranks_losses(tmp_path):
    steps = [step_line(plain_step(number, loss=float(number))) for number in range(1, 6)]
    run = read_run(written(tmp_path, *steps[:4], losses_line(TOLD), steps[4]))
    assert [step.loss for step in run.steps] == [1.0, 0.5, None, 4.0, 5.0]
    assert [step.loss_ranks for step in run.steps] == [None, 2, 2, None, None]
    assert [step.bad_loss_ranks for step in run.steps] == [(), (), (1,), (), ()]
    bad = run.steps[2]
    assert bad.loss_nonfinite
    assert "on rank 1" in describe_bad(bad)
    assert examine(run).verdict != "healthy"


def test_a_step_keeps_what_ranks_told_with_it(tmp_path):
    step = plain_step(1, loss=None, loss_nonfinite=True, loss_ranks=4, bad_loss_ranks=(0, 3))
    (read,) = read_run(written(tmp_path, step_line(step))).steps
    assert read == step
    assert on_ranks(read) == " on ranks 0, 3"
    assert "loss_ranks" not in step_line(plain_step(1))
    assert "norm" in named_numbers(plain_step(1), None)
    part = plain_step(1, of_rank=True)
    assert "norm" not in named_numbers(part, None)
    assert named_numbers(part, None)["norm of one rank"] == part.norm
    assert read_run(written(tmp_path, step_line(part))).steps == [part]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('"losses":[0.5,null,null]', '"losses":[0.5,"x",null]'),
        ('"bad":{"3":[1]}', '"bad":{"3":["1"]}'),
        ('"bad":{"3":[1]}', '"bad":{"3":1}'),
        ('"first":2', '"first":2.5'),
    ],
)
def test_a_line_that_is_not_as_it_must_be_is_left_out(tmp_path, good, bad):
    line = losses_line(TOLD)
    assert good in line
    with pytest.warns(RuntimeWarning, match="'losses'"):
        read_run(written(tmp_path, line.replace(good, bad)))


def test_ranks_of_a_step_must_be_numbers(tmp_path):
    line = step_line(plain_step(1, bad_loss_ranks=(1,)))
    with pytest.warns(RuntimeWarning, match="bad_loss_ranks"):
        read_run(written(tmp_path, line.replace("[1]", '["1"]')))


def test_means_are_of_the_ranks_that_have_a_loss():
    told = RankedLosses((0, 4), 3, torch.zeros(0))
    rows = [1.0, 1.0, 2.0, 1.0, 0.0, 0.0, 3.0, 1.0, math.nan, 1.0, 0.0, 0.0]
    assert told.by_step(rows) == [(2.0, ()), (None, (4,)), (None, ())]
    rows[7] = 0.0  # Rank 4 does not know its first loss.
    assert told.by_step(rows)[0] == (1.0, ())
