"""What is refused, and what is raised, is the same in the same words whoever decides the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradilocks import GradientControl
from gradilocks.errors import NeverFinite, NoGradients, NonFiniteGradient, SharedParameter
from tests.control.gradient_scripts import assert_same, contents
from tests.engine.backends import (
    INF,
    NAN,
    gradient_for,
    loss_giving,
    parameter,
    read_at_once,
    step,
)

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def with_either(settling, check):
    for on_device in (True, False):
        settling.allowed = on_device
        check()
    settling.allowed = True


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_float16_gradients_that_would_be_unscaled_in_place_are_refused_by_name(
    device, settling, make
):
    def check():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(device)
        model[1].half()
        control = GradientControl(make(model.parameters(), lr=0.1), model=model)
        before = control.state_dict()
        held = [p.detach().clone() for p in model.parameters()]
        control.backward(loss_giving(*((p, 1.0) for p in model.parameters())))
        with pytest.raises(ValueError, match=r"unscale FP16 gradients\. 1\.weight is float16"):
            control.step()
        assert_same([p.detach() for p in model.parameters()], held)
        assert control.state_dict()["gradilocks"]["steps"] == before["gradilocks"]["steps"] == 0

    with_either(settling, check)
    assert settling.count == 0


def test_float16_gradients_are_refused_in_the_second_of_two_optimizers(device, settling):
    def check():
        p, q = parameter(3, device=device), parameter(3, device=device, dtype=torch.float16)
        control = GradientControl(
            torch.optim.SGD([p], lr=0.1, fused=True), torch.optim.SGD([q], lr=0.1)
        )
        control.backward(loss_giving((p, 1.0), (q, 1.0)))
        with pytest.raises(ValueError, match=r"optimizers\[1\]\.param_groups\[0\].*is float16"):
            control.step()

    with_either(settling, check)


@pytest.mark.parametrize("scale", [None, 8.0], ids=str)
def test_float16_gradients_are_stepped_where_nothing_is_unscaled_in_place(device, settling, scale):
    p = parameter(3, device=device, dtype=torch.float16)
    before = p.detach().clone()
    optimizer = torch.optim.SGD([p], lr=1.0, fused=scale is not None)
    step(GradientControl(optimizer, scale=scale), (p, 1.0))
    torch.testing.assert_close(p.detach(), before - 1.0)
    assert settling.count == 1


def test_no_gradients_at_all_are_an_error_with_either(device, settling):
    p = parameter(3, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    step(control, (p, 1.0))

    def check():
        control.zero_grad()
        control.scale_loss(p.sum())
        with pytest.raises(NoGradients, match="no parameter of the optimizer has a gradient"):
            control.step()

    with_either(settling, check)


def test_a_parameter_that_becomes_listed_twice_is_refused_by_name(device, settling):
    def check():
        p, q = parameter(3, device=device), parameter(4, device=device)
        optimizer = torch.optim.SGD([p, q], lr=0.1)
        control = GradientControl(optimizer)
        step(control, (p, 1.0), (q, 1.0))
        optimizer.param_groups[0]["params"].append(p)
        held = p.detach().clone()
        for _ in range(2):
            control.zero_grad()
            control.backward(loss_giving((p, 1.0), (q, 1.0)))
            with pytest.raises(SharedParameter, match=r"\['params'\]\[2\].* is listed twice"):
                control.step()
        assert torch.equal(p, held)

    with_either(settling, check)


def test_raising_on_nonfinite_says_the_same_with_either(device, settling):
    said = []

    def check():
        p, q = parameter(3, device=device), parameter(4, device=device)
        control = GradientControl(torch.optim.SGD([p, q], lr=0.1), on_nonfinite="raise")
        step(control, (p, 1.0), (q, 1.0))
        with pytest.raises(NonFiniteGradient) as caught:
            step(control, (p, 1.0), (q, gradient_for(q, 1, INF)))
        said.append((str(caught.value), caught.value.culprits, control.state_dict()))
        assert not isinstance(caught.value, NeverFinite)
        assert not step(control, (p, 1.0), (q, 1.0)).skipped

    with_either(settling, check)
    assert said[0] == said[1]


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("value", [0.0, INF], ids=["finite loss", "infinite loss"])
@pytest.mark.parametrize("change", [False, True], ids=["one back end", "changing back ends"])
def test_giving_up_says_the_same_with_either(device, settling, bad, value, change, monkeypatch):
    read_at_once(monkeypatch)
    said = []
    for on_device in (True, False):
        p, q = parameter(3, device=device), parameter(4, device=device)
        optimizer = torch.optim.AdamW([p, q], lr=0.1, fused=True)
        control = GradientControl(optimizer, give_up_after=4)
        step(control, (p, 1.0), (q, 1.0))
        before = contents(optimizer)
        for number in range(1, 20):
            settling.allowed = (on_device and number % 2 == 0) if change else on_device
            try:
                step(control, (p, bad), (q, 1.0), value=value)
            except NeverFinite as error:
                said.append((number, str(error), error.culprits, error.scales, error.curable))
                break
        assert_same(contents(optimizer), before)
    assert said[0] == said[1]
    assert said[0][0] == 4
