"""Two real processes under DistributedDataParallel: equal weights, one run file, one culprit."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, read_run
from gradilocks.integrations.timm import NativeScaler
from tests.integrations import task
from tests.ranks.rank_programs import run_all


def wrapped() -> tuple[nn.Module, nn.Module]:
    from torch.nn.parallel import DistributedDataParallel

    model = task.Network()
    return model, DistributedDataParallel(model)


def batches(rank: int) -> list[torch.Tensor]:
    """Two batches a step, one for each rank; the bad one is that of rank 1."""
    return task.batches(accumulate=2)[rank::2]


def by_timm(rank: int, *, record: str) -> Any:
    model, parallel = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = NativeScaler("cpu", model=parallel, record=record)
    for batch in batches(rank):
        outcome = scaler(
            parallel(batch).mean(), optimizer, clip_grad=0.05, parameters=parallel.parameters()
        )
        optimizer.zero_grad()
    return ended(model, scaler.control, outcome)


def by_ignite(rank: int, *, record: str) -> Any:
    from ignite.engine import create_supervised_trainer

    model, parallel = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    control = GradientControl(optimizer, model=parallel, clip=0.05, record=record)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # There is no CUDA for its autocast.
        create_supervised_trainer(
            parallel,
            optimizer,
            lambda losses, _: losses.mean(),
            amp_mode="amp",
            scaler=control.as_scaler(),
        ).run([(batch, batch[:, 0]) for batch in batches(rank)])
    return ended(model, control, control.outcome)


def by_fastai(rank: int, *, record: str) -> Any:
    from gradilocks.integrations.fastai import GradientControlCallback
    from tests.frameworks import planted_fastai

    model, parallel = wrapped()
    callback = GradientControlCallback(scale="dynamic", clip=0.05, record=record)
    case = {"optimizer": "wrapped sgd", "accumulate": 2, "bad": task.BAD, "lr": 0.05}
    learn = planted_fastai.learner(case, opt_func=planted_fastai.make(case), cbs=callback)
    learn.model = parallel
    mine = [(row, torch.zeros(())) for batch in batches(rank) for row in batch]
    data = learn.dls.train.new(mine)
    learn.dls = type(learn.dls)(data, data)
    with learn.no_logging(), learn.no_mbar(), contextlib.redirect_stdout(io.StringIO()):
        learn.fit(1)
    return ended(model, callback.control, callback.outcome)


def ended(model: nn.Module, control: GradientControl, outcome: Any) -> Any:
    if control.recorder is not None:
        control.recorder.close()
    return task.weights(model), outcome.norm, control.scale


PROGRAMS = (by_timm, by_ignite, by_fastai)


class Recorded:
    """A program that records to a file of its name."""

    def __init__(self, program: Any, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.__name__ = program.__name__

    def __call__(self, rank: int) -> Any:
        return self.program(rank, record=str(self.folder / f"{self.__name__}.jsonl"))


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_all([Recorded(each, folder) for each in PROGRAMS], folder)


def plain() -> tuple[list[torch.Tensor], list[float]]:
    """The same in one process, on both batches together."""
    model = task.Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    norms = []
    for one, other in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        (model(one).mean() / 2).backward()
        (model(other).mean() / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        if math.isfinite(norms[-1]):
            optimizer.step()
    return task.weights(model), norms


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_ranks_have_equal_weights_and_one_file(program, returned):
    folder, results = returned
    (weights, norm, scale), other = results[program.__name__]
    expected, norms = plain()
    assert task.same(weights, other[0])
    assert (norm, scale) == other[1:]
    assert scale == 32768.0
    for mine, truth in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
    assert len(list(folder.glob(f"{program.__name__}*"))) == 1
    run = read_run(folder / f"{program.__name__}.jsonl")
    assert [step.skipped for step in run.steps] == [not math.isfinite(each) for each in norms]
    assert [step.norm for step in run.steps if not step.skipped] == pytest.approx(
        [each for each in norms if math.isfinite(each)], rel=1e-5
    )
    assert [each.name for each in run.steps[task.BAD].culprits] == [task.CULPRIT]
