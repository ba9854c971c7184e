"""A control goes when nobody holds it, pickles whenever asked, and keeps no model alive."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from gradilocks import AdaGC, GradientControl, optim
from tests.engine.backends import DEVICES, serve

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(params=[pytest.param(None, id="plain torch"), *DEVICES])
def device(request, monkeypatch):
    return "cpu" if request.param is None else serve(request.param, monkeypatch)


def trained(device, *, steps=2, cleared=True):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    control = GradientControl(optim.AdamW(model.parameters(), lr=0.1), clip=1.0)
    for _ in range(steps):
        control.zero_grad()
        control.backward(model(torch.ones(2, 4, device=device)).sum())
        control.step()
    if cleared:
        control.zero_grad()
    return model, control


def test_a_control_that_nobody_holds_is_gone_at_once(device):
    model, control = trained(device)
    there = weakref.ref(control)
    gc.disable()
    try:
        del control
        assert there() is None
    finally:
        gc.enable()
    del model


def test_a_control_whose_clip_learns_can_be_pickled_too():
    model = nn.Linear(2, 1)
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), clip=AdaGC(warmup=1))
    control.backward(model(torch.ones(1, 2)).sum())
    control.step()
    again = pickle.loads(pickle.dumps(control))
    assert again.state_dict() == control.state_dict()


def test_a_control_keeps_no_replaced_parameter(device):
    model, control = trained(device)
    old = weakref.ref(model.weight)
    new = nn.Parameter(torch.ones(3, 4, device=device))
    group = control._optimizers[0].param_groups[0]
    group["params"][0] = model.weight = new
    control._optimizers[0].state.clear()
    for _ in range(2):
        control.backward(model(torch.ones(2, 4, device=device)).sum())
        control.step()
        control.zero_grad()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_control_that_has_stepped_can_be_copied_and_goes_on_alike(device, copied):
    model, control = trained(device, cleared=False)
    other_model, other = copied((model, control))
    control.zero_grad()
    other.zero_grad()
    for net, each in ((model, control), (other_model, other)):
        each.backward(net(torch.ones(2, 4, device=device)).sum())
        assert each.step().step == 3
    for one, two in zip(model.parameters(), other_model.parameters(), strict=True):
        assert one is not two
        assert torch.equal(one, two)
    assert control.state_dict() == other.state_dict()
