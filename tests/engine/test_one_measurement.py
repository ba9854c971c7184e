"""A GradScaler with a policy and a clip reads the gradients once, and trains as a control does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradilocks import DynamicScale, GradientControl, GradScaler, HeadroomScale, kernels, optim
from gradilocks.kernels import reference
from tests.control.gradient_scripts import assert_same, contents
from tests.engine.backends import DEVICES, INF
from tests.launches import counted_launches, kernels_of

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "our AdamW": lambda params: optim.AdamW(params, lr=0.01),
}


class Counted:
    """The calls of some functions of a module, in order."""

    def __init__(self, monkeypatch, module, *names):
        self.calls = []
        for name in names:
            monkeypatch.setattr(module, name, self._counting(name, getattr(module, name)))

    def _counting(self, name, function):
        def counting(*args, **options):
            self.calls.append(name)
            return function(*args, **options)

        return counting

    def taken(self):
        calls, self.calls[:] = list(self.calls), []
        return calls


def net(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)


def iteration(model, optimizer, scaler, factor=1.0, *, unscale=False):
    optimizer.zero_grad()
    device = model[0].weight.device
    scaler.scale((model(torch.ones(3, 4, device=device)) * factor).square().sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("policy", [HeadroomScale(), DynamicScale()], ids=["headroom", "dynamic"])
@pytest.mark.parametrize("name", MAKERS)
def test_plain_torch_measures_once_and_multiplies_at_most_once(monkeypatch, name, policy):
    functions = ("measure", "multiply_", "multiply_each_", "multiply_and_check_", "clamp_")
    monkeypatch.setitem(kernels.BACKENDS, "cpu", reference)
    counted = Counted(monkeypatch, reference, *functions)
    model = net()
    optimizer = MAKERS[name](model.parameters())
    scaler = GradScaler("cpu", policy=policy, clip=1.0)
    once = ["measure", "multiply_"] if name == "SGD" else ["measure"]
    for _ in range(3):
        iteration(model, optimizer, scaler)
        assert counted.taken() == once
    iteration(model, optimizer, scaler, INF)
    assert counted.taken() == ["measure"]
    # A script that unscales by itself may change the gradients after it.
    iteration(model, optimizer, scaler, unscale=True)
    calls = counted.taken()
    assert calls.count("multiply_and_check_") == 1
    assert calls[-1 if name != "SGD" else -2] == "measure"


@pytest.mark.parametrize("device", DEVICES[:2], indirect=True)
@pytest.mark.parametrize("name", MAKERS)
def test_the_kernels_measure_in_one_launch_and_add_up_or_settle_in_another(
    device, monkeypatch, name
):
    pytest.importorskip("gradilocks.kernels.triton_launch")
    launches = counted_launches(monkeypatch)
    for policy, second in ((HeadroomScale(), "gather_kernel"), (DynamicScale(), "settle_kernel")):
        model = net(device)
        optimizer = MAKERS[name](model.parameters())
        scaler = GradScaler(device, policy=policy, clip=1.0)
        for _ in range(2):
            launches.clear()
            iteration(model, optimizer, scaler)
            launched = kernels_of(launches)
            assert launched[:2] == ["measure_kernel", second]
            reading = {"measure_kernel", "gather_kernel", "settle_kernel"}
            assert not reading & set(launched[2:])
            assert launched.count("change_kernel") == (name == "SGD")


class CountedChunks:
    """Calls the C++ kernels, and notes which."""

    def __init__(self, chunks, called):
        self._chunks, self._called = chunks, called

    def __getattr__(self, name):
        self._called.append(name)
        return getattr(self._chunks, name)


@pytest.mark.parametrize("device", DEVICES[2:], indirect=True)
@pytest.mark.parametrize("name", MAKERS)
def test_cpp_measures_and_settles_in_one_call(device, monkeypatch, name):
    backend = kernels.BACKENDS["cpu"]
    called, cut = [], backend._cut
    monkeypatch.setattr(backend, "_cut", lambda *args: CountedChunks(cut(*args), called))
    monkeypatch.setattr("gradilocks.kernels.chunks._chunkings", {})
    for policy, first in ((HeadroomScale(), "measure"), (DynamicScale(), "settle")):
        model = net(device)
        optimizer = MAKERS[name](model.parameters())
        scaler = GradScaler(device, policy=policy, clip=1.0)
        for _ in range(2):
            del called[:]
            iteration(model, optimizer, scaler)
            then = {"SGD": ["multiply"], "our AdamW": ["step"]}.get(name, [])
            assert called == [first, *then]


def check_trajectory(device, name, policy):
    mine = net(device)
    theirs = copy.deepcopy(mine)
    optimizer, other = (MAKERS[name](model.parameters()) for model in (mine, theirs))
    scaler = GradScaler(device, model=mine, policy=policy, clip=1.0)
    control = GradientControl(other, model=theirs, scale=policy, clip=1.0)
    for factor in (1.0, 0.01, INF, 3.0, 0.5):
        iteration(mine, optimizer, scaler, factor)
        control.zero_grad()
        output = theirs(torch.ones(3, 4, device=device))
        control.backward((output * factor).square().sum())
        outcome = control.step()
        assert_same(contents(optimizer), contents(other))
        assert scaler.get_scale() == control.scale
        told = scaler.outcome
        assert (told.skipped, told.clipped, told.culprits, told.scale, told.limit, told.step) == (
            outcome.skipped,
            outcome.clipped,
            outcome.culprits,
            outcome.scale,
            outcome.limit,
            outcome.step,
        )
        assert told.norm == outcome.norm or told.skipped


@pytest.mark.parametrize("policy", [HeadroomScale(), DynamicScale()], ids=["headroom", "dynamic"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_trajectory_is_a_controls_bit_for_bit(name, policy):
    check_trajectory("cpu", name, policy)


@pytest.mark.parametrize("policy", [HeadroomScale(), DynamicScale()], ids=["headroom", "dynamic"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_trajectory_by_the_kernels_is_a_controls_bit_for_bit(device, name, policy):
    check_trajectory(device, name, policy)
