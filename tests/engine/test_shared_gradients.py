"""Two parameters that have one tensor as their gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradilocks import (
    GradientControl,
    GradScaler,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    optim,
)
from gradilocks.errors import SharedParameter
from tests.control.gradient_scripts import assert_same, contents
from tests.engine.backends import DEVICES, plain_and_served, serve

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "our AdamW": lambda params: optim.AdamW(params, lr=0.1),
}
SAID = (
    r"first and second have one tensor as their gradient, which would be unscaled and clipped "
    r"twice\. Give each its own: param\.grad = param\.grad\.clone\(\)\."
)


@pytest.fixture(params=[pytest.param(None, id="plain torch"), *DEVICES])
def device(request, monkeypatch):
    return "cpu" if request.param is None else serve(request.param, monkeypatch)


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0], device=device))
        self.second = nn.Parameter(torch.tensor([3.0, 4.0], device=device))
        self.third = nn.Parameter(torch.tensor([5.0], device=device))

    def loss(self):
        return sum(param.square().sum() for param in self.parameters())

    def share(self, how=lambda grad: grad):
        self.second.grad = how(self.first.grad)


SHARING = {"the tensor": lambda grad: grad, "an alias": lambda grad: grad.detach()}
shared_in_both_ways = pytest.mark.parametrize("how", SHARING.values(), ids=SHARING)


def separated(model):
    model.second.grad = model.first.grad.clone()


@pytest.mark.parametrize("after", [0, 2], ids=["at the first step", "after two steps"])
@pytest.mark.parametrize("name", MAKERS)
@shared_in_both_ways
def test_a_control_refuses_them_by_name_before_anything_changes(device, how, name, after):
    model = Model(device)
    optimizer = MAKERS[name](model.parameters())
    control = GradientControl(optimizer, model=model, clip=1.0)
    for _ in range(after):
        control.backward(model.loss())
        control.step()
        control.zero_grad()
    control.backward(model.loss())
    model.share(how)
    kept, state = contents(optimizer), control.state_dict()
    gradient = model.first.grad.clone()
    with pytest.raises(SharedParameter, match=SAID):
        control.step()
    assert_same(contents(optimizer), kept)
    assert control.state_dict() == state
    assert torch.equal(model.first.grad, gradient)
    with pytest.raises(SharedParameter, match=SAID):
        control.unscale_()
    assert torch.equal(model.first.grad, gradient)
    separated(model)  # As the message says.
    assert not control.step().skipped


POLICIES = {"torch's rule": {}, "clip": {"clip": 1.0}, "policy": {"policy": "dynamic"}}


@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    ("device", "name"),
    plain_and_served(MAKERS, served=["SGD", "our AdamW"]),
    indirect=["device"],
)
@shared_in_both_ways
def test_a_scaler_refuses_them_by_name_before_anything_changes(device, how, name, options, call):
    model = Model(device)
    optimizer = MAKERS[name](model.parameters())
    scaler = GradScaler(device, model=model, **options)
    scaler.scale(model.loss()).backward()
    model.share(how)
    kept, gradient = contents(optimizer), model.first.grad.clone()
    with pytest.raises(SharedParameter, match=SAID):
        getattr(scaler, call)(optimizer)
    assert_same(contents(optimizer), kept)
    assert torch.equal(model.first.grad, gradient)
    separated(model)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.outcome.skipped
    assert scaler.get_scale() == 2.0**16


def shared(device, how):
    model = Model(device)
    model.first.grad = torch.tensor([3.0, 4.0], device=device)
    model.share(how)
    model.third.grad = torch.tensor([1.0], device=device)
    return model


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@shared_in_both_ways
def test_the_clip_functions_count_both_and_multiply_once(device, how, order):
    model = shared(device, how)
    both = torch.tensor([3.0, 4.0, 3.0, 4.0, 1.0], dtype=torch.float64)
    expected = torch.linalg.vector_norm(both, order).item()
    bound = expected / 2
    assert clip_grad_norm_(model.parameters(), bound, order).item() == pytest.approx(expected)
    # The shared tensor is half of what it was, not a quarter.
    assert model.first.grad.tolist() == pytest.approx([1.5, 2.0])
    assert model.second.grad.data_ptr() == model.first.grad.data_ptr()
    assert model.third.grad.tolist() == pytest.approx([0.5])


@shared_in_both_ways
def test_a_given_norm_multiplies_a_shared_gradient_once(device, how):
    model = shared(device, how)
    tensors = [param.grad for param in model.parameters()]
    norm = get_total_norm(tensors)
    assert norm.item() == pytest.approx(math.sqrt(51.0))
    clip_grads_with_norm_(model.parameters(), math.sqrt(51.0) / 2, norm)
    assert model.first.grad.tolist() == pytest.approx([1.5, 2.0])
    assert model.third.grad.tolist() == pytest.approx([0.5])


@shared_in_both_ways
def test_bounding_the_elements_of_a_shared_gradient(device, how):
    model = shared(device, how)
    clip_grad_value_(model.parameters(), 2.0)
    assert model.first.grad.tolist() == [2.0, 2.0]


def test_gradients_without_elements_share_nothing(device):
    params = [nn.Parameter(torch.zeros(size, device=device)) for size in (0, 2, 0)]
    control = GradientControl(torch.optim.SGD(params, lr=0.1), clip=1.0, scale=2.0)
    for _ in range(2):
        control.backward(sum((param + 1.0).square().sum() for param in params))
        assert not control.step().skipped
        control.zero_grad()
