"""`torch.utils.swap_tensors` on a model in training, which refuses tensors with weak references."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradilocks import AdaGC, GradientControl, GradScaler, HeadroomScale, optim
from tests.engine.backends import DEVICES, INF, plain_and_served, serve

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "our AdamW": lambda params: optim.AdamW(params, lr=0.1),
}


@pytest.fixture(params=[pytest.param(None, id="plain torch"), *DEVICES])
def device(request, monkeypatch):
    return "cpu" if request.param is None else serve(request.param, monkeypatch)


@pytest.fixture
def swap_on_conversion():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


class ByControl:
    """Training under a GradientControl."""

    def __init__(self, model, optimizer, **options):
        self.model, self.optimizer = model, optimizer
        self.control = GradientControl(optimizer, model=model, **options)
        self.outcomes = []

    def backward(self, factor=1.0):
        x = torch.ones(2, 4, device=self.model.weight.device, dtype=self.model.weight.dtype)
        self.control.backward((self.model(x) * factor).square().sum())

    def step(self, factor=1.0):
        self.backward(factor)
        self.outcomes.append(self.control.step())

    def clear(self):
        self.control.zero_grad()

    def state(self):
        return self.control.state_dict()


class ByScaler:
    """Training under a GradScaler."""

    def __init__(self, model, optimizer, **options):
        self.model, self.optimizer = model, optimizer
        if "scale" in options:
            options["policy"] = options.pop("scale")
        self.scaler = GradScaler(model.weight.device.type, model=model, **options)
        self.outcomes = []

    def backward(self, factor=1.0):
        x = torch.ones(2, 4, device=self.model.weight.device, dtype=self.model.weight.dtype)
        self.scaler.scale((self.model(x) * factor).square().sum()).backward()

    def step(self, factor=1.0):
        self.backward(factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.outcomes.append(self.scaler.outcome)

    def clear(self):
        self.optimizer.zero_grad()

    def state(self):
        return self.scaler.state_dict()


DRIVERS = {
    "control": (ByControl, {"clip": 1.0}),
    "control that learns": (ByControl, {"clip": AdaGC(warmup=1), "scale": HeadroomScale()}),
    "scaler": (ByScaler, {}),
    "scaler with clip": (ByScaler, {"clip": 1.0}),
    "scaler with policy": (ByScaler, {"scale": HeadroomScale(), "clip": AdaGC(warmup=1)}),
}


def twin_runs(device, driver, maker):
    kind, options = DRIVERS[driver]
    torch.manual_seed(0)
    first = nn.Linear(4, 3, device=device)
    second = copy.deepcopy(first)
    return [kind(model, MAKERS[maker](model.parameters()), **options) for model in (first, second)]


def swap_parameter(run):
    """As a user replaces the contents of a parameter that others hold on to."""
    param = run.model.weight
    other = nn.Parameter(param.detach().clone())
    if param.grad is not None:
        other.grad = param.grad.clone()
    torch.utils.swap_tensors(param, other)


def swap_gradient(run):
    """Torch swaps no gradient that a parameter still has, so it is taken away first."""
    gradient = run.last_gradient
    run.clear()
    torch.utils.swap_tensors(gradient, gradient.clone())
    torch.utils.swap_tensors(run.model.weight, nn.Parameter(run.model.weight.detach().clone()))


@pytest.mark.parametrize("cleared", [True, False], ids=["after zero_grad", "after the step"])
@pytest.mark.parametrize("swap", [swap_parameter, swap_gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("device", "driver", "maker"),
    plain_and_served(
        [(driver, maker) for driver in DRIVERS for maker in MAKERS],
        served=[
            ("control", "AdamW fused"),
            ("control", "our AdamW"),
            ("scaler", "our AdamW"),
            ("scaler with policy", "SGD"),
        ],
    ),
    indirect=["device"],
)
def test_a_swap_between_two_steps_changes_nothing(device, driver, maker, swap, cleared):
    plain, swapped = twin_runs(device, driver, maker)
    for run in (plain, swapped):
        for factor in (1.0, INF, 1.0):  # Outcomes of finite and of skipped steps are kept.
            run.clear()
            run.step(factor)
        run.last_gradient = run.model.weight.grad
        if cleared:
            run.clear()
    swap(swapped)
    for run in (plain, swapped):
        run.clear()
        for _ in range(2):
            run.step()
            run.clear()
    for one, two in zip(plain.model.parameters(), swapped.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert plain.state() == swapped.state()
    names = ("bias", "weight")
    assert swapped.outcomes[1].skipped
    assert set(swapped.outcomes[1].culprits) == set(names)
    assert [each.skipped for each in swapped.outcomes] == [False, True, False, False, False]


@pytest.mark.parametrize("cleared", [True, False], ids=["after zero_grad", "after the step"])
@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.usefixtures("swap_on_conversion")
def test_a_model_is_converted_in_place_and_trained_on(device, driver, convert, cleared):
    run, _ = twin_runs(device, driver, "SGD")
    run.step()
    run.clear()
    run.step(INF)
    if cleared:
        run.clear()
    before = [id(param) for param in run.model.parameters()]
    convert(run.model)
    run.optimizer.state.clear()
    assert [id(param) for param in run.model.parameters()] == before
    held = [param.detach().clone() for param in run.model.parameters()]
    for _ in range(2):
        run.clear()
        run.step()
    assert not run.outcomes[-1].skipped
    for param, old in zip(run.model.parameters(), held, strict=True):
        assert param.dtype is old.dtype
        assert torch.isfinite(param).all()
        assert not torch.equal(param, old)
    assert set(run.outcomes[1].culprits) == {"weight", "bias"}
