"""A training step under torch.compile: the control outside the compiled region, and inside it."""

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, optim

DEVICES = [
    pytest.param("cpu", "aot_eager", id="cpu"),
    pytest.param("cuda", "inductor", id="cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize(("device", "backend"), DEVICES)
# Dynamo's own code, and the graphs that end where a control begins.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BAD = (2, 5)
INFINITE = float("inf")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(device, make, compiled):
    """Trains ten steps, two of them not finite, and returns the weights and what was skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    inputs = torch.randn(16, 8, device=device)
    step = make(model)
    if compiled:
        step = compiled(step)
    skipped = [bool(step(inputs, INFINITE if n in BAD else 1.0)) for n in range(10)]
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()]), skipped


def with_control(optimizer_class, outside=None, **settings):
    def make(model):
        optimizer = optimizer_class(model.parameters(), lr=1e-2, **settings)
        control = GradientControl(optimizer, model=model, clip=0.1)
        forward = outside(model) if outside else model

        def step(inputs, factor):
            control.backward(forward(inputs).square().mean() * factor)
            outcome = control.step()
            control.zero_grad()
            return outcome.skipped

        return step

    return make


def with_scaler(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = gradilocks.GradScaler(next(model.parameters()).device.type)

    def step(inputs, factor):
        scaler.scale(model(inputs).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        gradilocks.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.outcome.skipped

    return step


OPTIMIZERS = {
    "torch fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "torch SGD": (torch.optim.SGD, {}),
    "gradilocks AdamW": (optim.AdamW, {}),
    "gradilocks SGD": (optim.SGD, {"momentum": 0.9}),
}


@on_each_device
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_compiled_step_trains_as_an_eager_one_does(device, backend, name, inside):
    optimizer_class, settings = OPTIMIZERS[name]

    def compiled(function):
        return torch.compile(function, backend=backend)

    plain = with_control(optimizer_class, **settings)
    if inside:
        made, skipped = trained(device, plain, compiled)
    else:
        around = with_control(optimizer_class, outside=compiled, **settings)
        made, skipped = trained(device, around, None)
    expected, _ = trained(device, plain, None)
    assert skipped == [n in BAD for n in range(10)]
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)


@on_each_device
def test_the_drop_in_inside_a_compiled_step_trains_as_outside(device, backend):
    made, skipped = trained(device, with_scaler, lambda f: torch.compile(f, backend=backend))
    expected, _ = trained(device, with_scaler, None)
    assert skipped == [n in BAD for n in range(10)]
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
