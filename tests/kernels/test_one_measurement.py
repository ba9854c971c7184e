"""A step reads the gradients once and writes them at most once, whoever drives it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, HeadroomScale, kernels

MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "our AdamW": lambda params: gradilocks.optim.AdamW(params, lr=0.01),
}
every_optimizer = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture
def calls(monkeypatch, cpu):
    """The calls of kernels so far, by name; emptied by `clear()`."""
    called: list[str] = []

    def counted(name, function):
        def call(*args, **options):
            called.append(name)
            return function(*args, **options)

        return call

    for name in ("norm", "multiply_", "clamp_", "unscale_", "adam", "sgd"):
        monkeypatch.setattr(cpu, name, counted(name, getattr(cpu, name)))
    table = cpu.AddressTable  # Every measurement by the extension ends here.
    monkeypatch.setattr(table, "measure", counted("measure", table.measure))
    monkeypatch.setitem(kernels.BACKENDS, "cpu", cpu)
    return called


def loss_of(model, factor=1.0):
    return (model(torch.ones(3, 4)) * factor).square().sum()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@every_optimizer
@pytest.mark.parametrize("scale", ["dynamic", HeadroomScale()], ids=["DynamicScale", "HeadroomScale"])
def test_a_control_measures_once_and_writes_gradients_only_for_optimizers_that_need_it(model, calls, name, scale):
    control = GradientControl(MAKERS[name](model.parameters()), scale=scale, clip=1e-3)
    expected = {"SGD": ["measure", "multiply_"], "AdamW fused": ["measure"], "our AdamW": ["measure", "adam"]}[name]
    for factor in (1.0, float("inf"), 1.0):
        control.backward(loss_of(model, factor))
        calls.clear()
        outcome = control.step()
        assert outcome.skipped == (factor != 1.0)
        assert calls == (["measure"] if outcome.skipped else expected)
        control.zero_grad()


def test_clip_grad_norm_reads_and_writes_gradients_once(model, calls):
    loss_of(model).backward()
    gradilocks.clip_grad_norm_(model.parameters(), 1e-3)
    assert calls == ["norm", "measure", "multiply_"]
