"""A bad step is run once more: what that finds, how sure it is, and that nothing is left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.lab.trace import KeptCalls, Tracer


class Gate(nn.Module):
    """Divides by what it is told to, and counts its calls."""

    by, calls = 1.0, 0

    def forward(self, x):
        self.calls = self.calls + 1
        return x / self.by


class Net(nn.Module):
    """With all that a second run could leave behind."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.gate, self.last = nn.Dropout(0.2), Gate(), nn.Linear(8, 2)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x))) * (1 + random.random()) + np.random.rand()
        return self.last(self.gate(x))


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def train(*, fault=None, tracing=True, scaler=False, steps=8, change=None):
    """Trains for a few steps, with a fault at the fifth; what was left behind, and found."""
    seed()
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    if scaler:
        control = gradilocks.GradScaler("cpu", init_scale=256.0)
    else:
        control = gradilocks.GradientControl(optimizer, model=net)
    tracer = gradilocks.trace(net, control=control) if tracing else None
    losses = []
    for step in range(1, steps + 1):
        x = torch.randn(6, 4)
        net.gate.by = 0.0 if fault == "forward" and step == 5 else 1.0
        optimizer.zero_grad()
        loss = net(x).square().mean()
        if fault == "loss" and step == 5:
            loss = loss * float("nan")
        if scaler:
            control.scale(loss).backward()
        else:
            control.backward(loss)
        if change is not None and step == 5:
            change(net, x)
        if fault == "gradient" and step == 5:
            net.last.weight.grad[0, 0] = float("nan")
        if scaler:
            control.step(optimizer)
            control.update()
        else:
            control.step()
        losses.append(loss.detach())
    left = [*net.state_dict().values(), *losses, torch.rand(3), torch.tensor(net.gate.calls)]
    left += [torch.tensor([random.random(), np.random.rand()])]
    findings = [] if tracer is None else tracer.findings
    if tracer is not None:
        tracer.close()
    return left, findings


@pytest.mark.parametrize("scaler", [False, True], ids=["control", "drop-in"])
@pytest.mark.parametrize("fault", ["forward", "loss", "gradient"])
def test_a_fault_that_comes_once_is_found_and_training_stays_bit_for_bit(fault, scaler):
    left, (found,) = train(fault=fault, scaler=scaler)
    without, _ = train(fault=fault, scaler=scaler, tracing=False)
    for ours, theirs in zip(left, without, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert (found.step, found.certainty) == (5, "certain"), found.text
    where = {"forward": "module", "loss": "after", "gradient": "gradients"}[fault]
    assert found.where == where
    assert found.module == ("gate" if fault == "forward" else "")


def test_inputs_that_were_changed_since_make_it_likely():
    _, (found,) = train(fault="forward", change=lambda net, x: x.add_(1))
    assert (found.module, found.certainty) == ("gate", "likely")
    assert "what the model was given has been changed in place since" in found.text


def test_gradients_that_the_calls_do_not_make_up_are_likely():
    """Something else went into them, which nobody has kept."""

    def more(net, x):
        (net.last.weight.square().sum() * 3e6).backward()

    _, (found,) = train(fault="gradient", change=more)
    assert (found.where, found.certainty) == ("gradients", "likely")
    assert "what was run again does not make up these gradients" in found.text


def test_what_a_replay_raises_is_told_as_a_doubt():
    net = nn.Sequential(nn.Linear(2, 2), Gate())
    answers = iter([torch.ones(1), torch.ones(1)])
    net[1].register_forward_pre_hook(lambda *_: next(answers) and None)
    control = gradilocks.GradientControl(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
    tracer = gradilocks.trace(net, control=control)
    for bad in (1.0, float("nan")):
        control.backward(net(torch.ones(1, 2)).sum() * bad)
        control.step()
        control.zero_grad()
    assert tracer.armed, "the next step is followed as it trains"
    assert tracer.findings == []
    tracer.close()


def look(net, batches, *, kept=None, loss=torch.sum, gone=False, loss_is_bad=None):
    """Calls a model, runs it backward, and has the step looked at."""
    tracer = Tracer([net], kept=kept)
    tracer.kept.follow([net])
    for batch in batches:
        loss(net(batch)).backward()
    tracer.look(1, tracer.kept.take(), gone=gone, loss_is_bad=loss_is_bad)
    tracer.close()
    return tracer.findings


def test_of_several_calls_the_first_in_time_counts():
    net = nn.Sequential(nn.Linear(2, 2), Gate(), nn.Linear(2, 1))
    good, bad = torch.ones(3, 2), torch.full((3, 2), float("nan"))
    (found,) = look(net, [good, bad, bad * 2])
    assert (found.where, found.certainty) == ("input", "certain")
    assert "9 NaN" not in found.text


def test_what_was_too_large_to_be_kept_is_said_and_nobody_is_blamed():
    net = nn.Linear(64, 1)
    bad = torch.full((8, 64), float("inf"))
    (found,) = look(net, [bad], kept=KeptCalls(most_bytes=1024), gone=True)
    assert (found.where, found.certainty, found.module) == ("unknown", "unknown", "")
    assert "its inputs were more than the 0 MiB that are kept" in found.text


def test_a_mode_that_has_gone_since_is_a_doubt():
    net = nn.Sequential(nn.Linear(2, 2), Gate())
    tracer = Tracer([net])
    tracer.kept.follow([net])
    with gradilocks.emulate("fp16"):
        net(torch.full((1, 2), 3e4)).square().sum().backward()
    tracer.look(1, tracer.kept.take(), gone=True)
    (found,) = tracer.findings
    tracer.close()
    assert found.certainty != "certain"
    assert "under a mode that is not there any more" in found.text


def test_a_default_device_is_there_when_it_is_run_again():
    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight / torch.zeros(2)  # Where the default is.

    torch.set_default_device("cpu")
    try:
        (found,) = look(Fresh(), [torch.ones(2)])
    finally:
        torch.set_default_device(None)
    assert (found.where, found.certainty) == ("module", "certain")


def test_an_output_that_is_masked_away_is_at_fault_if_the_loss_is_bad():
    net = nn.Sequential(nn.Linear(2, 2), Gate())
    net[1].by = 0.0
    masked = lambda out: (out * 0.0).sum()  # noqa: E731 # NaN, and its gradients are 0 * Inf.
    (found,) = look(net, [torch.ones(1, 2)], loss=masked, loss_is_bad=True)
    assert (found.where, found.module) == ("module", "1")


def test_a_loss_that_is_bad_by_itself_is_told_as_that():
    net = nn.Linear(2, 1)
    shifted = lambda out: out.sum() + float("inf")  # noqa: E731 # Its gradients are finite.
    (found,) = look(net, [torch.ones(1, 2)], loss=shifted, loss_is_bad=True)
    assert (found.where, found.certainty) == ("after", "likely")
    assert found.text.startswith("NaN or Inf in the loss alone")


def test_a_scaler_of_torch_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"GradScaler: use gradilocks.GradScaler in its place"):
        gradilocks.trace(nn.Linear(1, 1), control=torch.amp.GradScaler("cpu"))


def test_a_scaler_that_is_gone_is_let_go_of():
    net = nn.Linear(1, 1)
    scaler = gradilocks.GradScaler("cpu")
    before = gradilocks.step.events.EVENTS.listeners
    tracer = gradilocks.trace(net, control=scaler)
    assert len(gradilocks.step.events.EVENTS.listeners) == len(before) + 1
    del scaler
    assert gradilocks.step.events.EVENTS.listeners == before
    tracer.close()
