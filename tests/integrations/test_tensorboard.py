"""The TensorBoard callback: what it writes, read with TensorBoard's own reader."""

from __future__ import annotations

import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from gradilocks import ClipByNorm, GradientControl
from gradilocks.integrations.tensorboard import TensorBoardCallback
from gradilocks.step import host_copy


def steps(control, model, factors=(1.0, math.inf, 2.0)):
    for factor in factors:
        control.zero_grad()
        control.backward(model(torch.ones(2, 4)).square().mean() * factor)
        control.step()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


@pytest.fixture
def write(tmp_path):
    """Subscribes the callback to a control, runs a function, and returns the scalars: {tag: [(step, value)]}."""

    def run(control, function, **options):
        writer = SummaryWriter(tmp_path)
        callback = TensorBoardCallback(writer, **options)
        control.subscribe(callback)
        function()
        callback.flush()
        writer.close()
        events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
        return {
            tag.removeprefix("gradilocks/"): [(event.step, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }

    return run


def test_every_number_of_a_step_is_a_scalar_at_its_step(model, write):
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.25), model=model, clip=ClipByNorm(0.5))
    found = write(control, lambda: steps(control, model))
    assert set(found) == {"loss", "lr", "scale", "norm", "limit", "clipped", "skipped", "nan", "inf"}
    assert found["skipped"] == [(1, 0.0), (2, 1.0), (3, 0.0)]
    assert found["clipped"] == [(1, 1.0), (2, 0.0), (3, 1.0)]
    assert found["scale"] == [(1, 65536.0), (2, 65536.0), (3, 32768.0)]
    assert found["norm"][2] == (3, pytest.approx(control.outcome.norm))
    assert found["loss"][1] == (2, math.inf)
    assert found["lr"] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert found["limit"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert found["nan"][1][1] + found["inf"][1][1] == 5.0


def test_a_step_without_a_limit_or_a_loss_has_no_such_scalar_and_a_learning_rate_may_be_a_tensor(model, write):
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125), capturable=False, foreach=False)
    control = GradientControl(optimizer, model=model, scale=None)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        control.step()

    found = write(control, step)
    assert set(found) == {"lr", "scale", "norm", "clipped", "skipped", "nan", "inf"}
    assert found["lr"] == [(1, 0.125)]


def test_steps_of_single_optimizers_have_their_own_names(model, write):
    control = GradientControl(*(torch.optim.SGD([param], lr=0.1) for param in model.parameters()), model=model)
    control.backward(model(torch.ones(2, 4)).square().mean())
    found = write(control, lambda: [control.step(only=opt) for opt in control.optimizers], prefix="critic/")
    assert len(found["critic/optimizer0/norm"]) == len(found["critic/optimizer1/norm"]) == 1


def test_numbers_that_have_not_arrived_are_written_later(model, write, monkeypatch):
    """As on a GPU: no step waits for its numbers, and `flush` writes the rest."""
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    monkeypatch.setattr(host_copy.HostCopy, "has_arrived", lambda copy: False)
    written = []
    monkeypatch.setattr(TensorBoardCallback, "write", lambda self, step, time, values: written.append(step))
    found = write(control, lambda: (steps(control, model), written.append("all steps taken")))
    assert written == ["all steps taken", 1, 2, 3]
    assert found == {}


def test_something_else_than_a_writer_is_rejected(tmp_path):
    with pytest.raises(TypeError, match="takes a SummaryWriter, got PosixPath"):
        TensorBoardCallback(tmp_path)
