"""torch's GradScaler, ours and GradientControl all drive the optimizers, with torch's results."""

from __future__ import annotations

import importlib

import pytest
import torch

import gradilocks
from gradilocks import GradientControl, kernels
from tests.optim.twins import (
    SETTINGS,
    both_kinds,
    close,
    copies,
    each_optimizer,
    ours,
    parameters,
    run,
    same,
    torchs,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BATCHES = [1.0, float("inf"), 0.5, 2.0, float("nan"), 1.5]


def model(device):
    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return layers.to(device)


def loss_of(network, factor, device):
    x = torch.linspace(-1, 1, 27, device=device).view(3, 9)
    return (network(x) * factor).square().mean()


def by_scaler(make, scaler, device, *, clip=None, unscale=False):
    network = model(device)
    optimizer = make(network)
    for factor in BATCHES:
        optimizer.zero_grad()
        scaler.scale(loss_of(network, factor, device)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    return list(network.parameters())


SCALERS = [torch.amp.GradScaler, gradilocks.GradScaler]


@each_optimizer
@pytest.mark.parametrize("unscale", [False, True], ids=["fused", "unscaled first"])
@pytest.mark.parametrize("scaler", SCALERS, ids=["torch's", "ours"])
def test_a_scaler_drives_ours_as_it_drives_torchs(kind, scaler, unscale, device):
    settings = {"clip": 0.1, "unscale": unscale}
    mine = by_scaler(
        lambda net: ours(kind, net.parameters()),
        scaler(device, init_scale=512.0),
        device,
        **settings,
    )
    theirs = by_scaler(
        lambda net: torchs(kind, net.parameters(), fused=False),
        torch.amp.GradScaler(device, init_scale=512.0),
        device,
        **settings,
    )
    close(mine, theirs)


@each_optimizer
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_control_drives_ours_as_it_drives_torchs(kind, clip, device):
    ends = []
    for make in (ours, torchs):
        network = model(device)
        optimizer = make(kind, network.parameters(), **({} if make is ours else {"fused": False}))
        control = GradientControl(optimizer, model=network, clip=clip)
        skipped = []
        for factor in BATCHES:
            control.backward(loss_of(network, factor, device))
            skipped.append(control.step().skipped)
            control.zero_grad()
        assert skipped == [False, True, False, False, True, False]
        ends.append(list(network.parameters()))
    close(*ends)


@each_optimizer
def test_a_schedule_and_a_control_go_together(kind, device):
    """Warnings are errors here, and torch's scheduler warns if it sees no step before its own."""
    ends = []
    for make in (ours, torchs):
        network = model(device)
        optimizer = make(kind, network.parameters(), **({} if make is ours else {"fused": False}))
        control = GradientControl(optimizer, model=network, scale=64.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for factor in (1.0, 0.5, 2.0):
            control.backward(loss_of(network, factor, device))
            control.step()
            schedule.step()
            control.zero_grad()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(SETTINGS[kind]["lr"] * 0.7**3)
        ends.append(list(network.parameters()))
    close(*ends)


@each_optimizer
def test_two_optimizers_share_one_control(kind, device):
    ends = []
    for make in (ours, torchs):
        network = model(device)
        pair = [make(kind, [network[0].weight, network[2].bias]), make("SGD", [network[2].weight])]
        control = GradientControl(*pair, model=network, clip=0.1)
        for factor in BATCHES:
            control.backward(loss_of(network, factor, device))
            control.step()
            control.zero_grad()
        ends.append([network[0].weight, network[2].bias, network[2].weight])
    close(*ends)


@each_optimizer
def test_steps_by_hand_and_by_a_control_may_alternate(kind, device):
    """Also right after a step that the control skipped, whose gradients are gone."""
    ends = []
    for make in (ours, torchs):
        network = model(device)
        optimizer = make(kind, network.parameters())
        control = GradientControl(optimizer, scale=None)
        for place, factor in enumerate([float("inf"), 1.0, 2.0, float("nan"), 1.0]):
            loss = loss_of(network, factor, device)
            if place % 3 == 0:
                control.backward(loss)
                assert control.step().skipped
            else:
                loss.backward()
                optimizer.step()
            for param in network.parameters():
                param.grad = None
        ends.append(list(network.parameters()))
    close(*ends)


def halve(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.grad * 0.5


@each_optimizer
@pytest.mark.parametrize("how", ["hook", "global hook", "subclass", "patched"])
def test_gradients_replaced_on_the_way_into_the_step_are_honoured(kind, how, device):
    ends = []
    for make in (ours, torchs):
        network = model(device)
        optimizer = make(kind, network.parameters(), lr=0.1)
        handle = None
        if how == "hook":
            optimizer.register_step_pre_hook(halve)
        elif how == "global hook":
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            handle = register_optimizer_step_pre_hook(halve)
        elif how == "subclass":
            optimizer = _halving(type(optimizer), optimizer)
        else:
            original = optimizer.step

            def patched(closure=None, *, optimizer=optimizer, original=original):
                halve(optimizer, (), {})
                return original(closure)

            optimizer.step = patched
        control = GradientControl(optimizer, scale=8.0)
        for factor in (1.0, 2.0):
            control.backward(loss_of(network, factor, device))
            control.step()
            control.zero_grad()
        if handle is not None:
            handle.remove()
        ends.append(list(network.parameters()))
    close(*ends)


def _halving(kind, optimizer):
    class Halving(kind):
        def step(self, closure=None):
            halve(self, (), {})
            return super().step(closure)

    made = Halving(optimizer.param_groups[0]["params"], lr=0.1)
    made.load_state_dict(optimizer.state_dict())
    return made


@each_optimizer
def test_a_closure_under_a_control_is_undone_as_a_whole(kind, device):
    network = model(device)
    optimizer = ours(kind, network.parameters())
    control = GradientControl(optimizer, scale=4.0)
    before = copies(network.parameters())

    def closure(factor):
        control.zero_grad()
        loss = loss_of(network, factor, device)
        control.backward(loss)
        return loss

    assert control.step(lambda: closure(float("inf"))).skipped
    assert same(copies(network.parameters()), before)
    assert not control.step(lambda: closure(1.0)).skipped
    assert not same(copies(network.parameters()), before)


def test_the_flags_of_a_user_are_put_back(device):
    network = model(device)
    optimizer = ours("AdamW", network.parameters())
    mine = torch.full((), 2.0, device=device)
    optimizer.grad_scale = mine
    control = GradientControl(optimizer, scale=None)
    control.backward(loss_of(network, 1.0, device))
    control.step()
    assert optimizer.grad_scale is mine
    assert not hasattr(optimizer, "found_inf")


def test_a_parameter_on_the_kernels_is_stepped_by_them(kernel_device):
    """That the tests above have tested the kernels, where they say so."""
    network = model(kernel_device)
    optimizer = ours("AdamW", network.parameters())
    loss_of(network, 1.0, kernel_device).backward()
    optimizer.step()
    assert kernels.BACKENDS[kernel_device].BY_ADDRESS
    assert optimizer._plan is not None


@each_optimizer
def test_a_torch_that_does_not_tell_who_listens_is_stepped_to_the_same_bits(
    kind, kernel_device, monkeypatch
):
    """Without torch's private lists of hooks every step goes the way on which hooks are called."""

    def trained():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(70, device=kernel_device))]
        control = GradientControl(ours(kind, params), clip=0.5)
        for _ in range(3):
            control.backward(params[0].square().sum())
            control.step()
            control.zero_grad()
        return copies(params)

    expected = trained()
    shared = importlib.import_module(gradilocks.optim.AdamW.is_direct.__module__)
    for name in ("is_profiling", "has_step_hooks", "has_step_pre_hooks"):
        monkeypatch.setattr(shared, name, lambda *_: True)
    assert same(trained(), expected)


@both_kinds
def test_a_torch_without_tensor_guards_is_stepped_to_the_same_bits(
    kind, kernel_device, monkeypatch
):
    """Then shapes, dtypes and strides of gradients are compared by the package itself."""

    def trained():
        params = parameters([(5,), (70,)], device=kernel_device)
        run(ours(kind, params), 3)
        return copies(params)

    expected = trained()
    finder = importlib.import_module(type(ours(kind, parameters([(1,)]))._table).__module__)
    monkeypatch.setattr(finder, "tensor_guards", lambda tensors: None)
    assert same(trained(), expected)
