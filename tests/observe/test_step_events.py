"""What happens around a step is told once, alike, whoever drives it, and costs nothing unheard."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.errors import GradilocksError
from gradilocks.observe.torch_hooks import TorchHooks
from gradilocks.step.events import EVENTS, Clip, PerDriver, Step, StepEvents, StepListener


class Told(StepListener):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.steps: list[Step] = []

    def loss_scaled(self, driver: Any, loss: Any, scaled: Any, scale: Any) -> None:
        self.events.append(f"loss times {float(scale):g}")

    def loss_counted(self, control: Any, loss: Any, *, first: bool) -> None:
        self.events.append("first loss" if first else "loss")

    def backward_begins(self, tensors: Any, gradients: Any) -> None:
        self.events.append("backward")

    def gradients_clear(self, owner: Any) -> None:
        self.events.append("clear")

    def clip_begins(self, clip: Clip) -> None:
        self.events.append("clip")

    def clip_ended(self, clip: Clip) -> None:
        self.events.append(f"clipped to {clip.limit:g}")

    def step_begins(self, step: Step) -> None:
        self.events.append(f"step of {type(step.driver).__name__}")
        self.steps.append(step)

    def update_begins(self, step: Step) -> None:
        self.events.append("update")

    def step_ended(self, step: Step) -> None:
        self.events.append("over")

    def step_failed(self, step: Step) -> None:
        self.events.append("failed")


@pytest.fixture
def told() -> Iterator[Told]:
    listener, hooks = Told(), TorchHooks()
    EVENTS.add(listener)
    hooks.install()
    yield listener
    hooks.remove()
    EVENTS.discard(listener)
    assert not EVENTS.listeners


def training() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 2)


def test_torchs_own_loop(told):
    model, optimizer, x = training()
    optimizer.zero_grad()
    model(x).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    expected = ["clear", "backward", "clip", "clipped to 0.5", "step of SGD", "over"]
    assert told.events == expected


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, gradilocks.GradScaler])
def test_a_scaler_tells_once_of_a_step_whoever_wrote_it(told, kind):
    model, optimizer, x = training()
    scaler = kind("cpu", init_scale=8.0)
    scaler.scale(model(x).mean()).backward()
    scaler.unscale_(optimizer)
    gradilocks.clip_grad_value_(model.parameters(), 0.25)
    scaler.step(optimizer)
    scaler.update()
    assert told.events == [
        "loss times 8",
        "backward",
        "clip",
        "clipped to 0.25",
        "step of GradScaler",
        "update",
        "over",
    ]
    assert told.steps[0].unscaled
    assert float(told.steps[0].skip) == 0.0


def test_a_control_tells_of_its_losses_and_steps(told):
    model, optimizer, x = training()
    control = gradilocks.GradientControl(optimizer, model=model, scale=4.0)
    control.backward(model(x).mean())
    control.scale_loss(model(x).mean()).backward()
    control.step()
    assert told.events == [
        "loss times 4",
        "backward",
        "first loss",
        "loss times 4",
        "loss",
        "backward",
        "step of GradientControl",
        "update",
        "over",
    ]
    (step,) = told.steps
    assert step.record is not None
    assert float(step.record.row[0]) == 0.0


def test_a_step_that_raises_is_none_and_the_next_one_is_told_of(told):
    model, optimizer, x = training()
    control = gradilocks.GradientControl(optimizer, model=model)
    with pytest.raises(GradilocksError):
        control.step()  # Without a gradient.
    assert told.events == ["step of GradientControl", "failed"]
    told.events.clear()
    model(x).mean().backward()
    optimizer.step()
    assert told.events == ["backward", "step of SGD", "over"]


def test_an_optimizer_whose_step_raised_is_told_of_again(told):
    class Raises(torch.optim.SGD):
        broken = True

        def step(self, closure=None):
            if self.broken:
                raise ValueError("no")
            return super().step(closure)

    model, _, x = training()
    optimizer = Raises(model.parameters(), lr=0.1)
    model(x).mean().backward()
    with pytest.raises(ValueError, match="no"):
        optimizer.step()
    optimizer.broken = False
    optimizer.step()
    assert told.events[1:] == [
        "step of Raises",
        "failed",
        "step of Raises",
        "over",
    ]


def test_who_listens_to_one_control_hears_of_no_other():
    model, optimizer, x = training()
    control, other = (gradilocks.GradientControl(optimizer, model=model) for _ in range(2))
    listener = Told()
    control._events.add(listener)
    other.backward(model(x).mean())
    other.step()
    assert not listener.events
    control.backward(model(x).mean())
    assert listener.events == ["loss times 65536", "first loss"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_of_a_control_tells_nobody_but_who_hears_everything(copied, told, tmp_path):
    model, optimizer, _ = training()
    with gradilocks.Recorder(tmp_path / "a.jsonl") as recorder:
        control = gradilocks.GradientControl(optimizer, model=model, record=recorder)
        twin = copied(control)
        assert twin.recorder is None
        assert twin._events.listeners == (told,)
        assert control.recorder is recorder
        assert len(control._events.listeners) == 2


def test_without_a_listener_nothing_is_made_to_tell_of(monkeypatch):
    def refuse(*args: Any) -> None:
        raise AssertionError("nobody listens")

    for name in ("begin_step", "end_step", "fail_step", "step_around"):
        monkeypatch.setattr(StepEvents, name, refuse)
    model, optimizer, x = training()
    control = gradilocks.GradientControl(optimizer, model=model)
    control.backward(model(x).mean())
    control.step()
    scaler = gradilocks.GradScaler("cpu")
    scaler.scale(model(x).mean()).backward()
    gradilocks.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)


def test_what_is_kept_for_an_optimizer_goes_to_no_other_that_has_its_id(monkeypatch):
    monkeypatch.setattr("gradilocks.step.events.id", lambda thing: 1, raising=False)
    kept: PerDriver[list[int]] = PerDriver(list)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    step = Step(optimizer, (optimizer,))
    kept.of(step).append(1)
    assert kept.of(step) == [1]
    del optimizer, step
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert kept.of(Step(other, (other,))) == []
