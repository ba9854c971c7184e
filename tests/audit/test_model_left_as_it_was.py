"""After an audit the model, its gradients, hooks and random numbers are what they were."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.errors import GradilocksError


def model_with_everything() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 2)
    )
    model[1].eval()
    return model


def loss(model, batch):
    return model(batch).square().mean()


def test_parameters_gradients_buffers_and_modes_are_as_before():
    model = model_with_everything()
    model.train()
    model[3].eval()
    loss(model, torch.randn(4, 6)).backward()
    model[4].weight.grad = None
    state = copy.deepcopy(model.state_dict())
    gradients = [param.grad for param in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    modes = [module.training for module in model.modules()]
    buffers = list(model.buffers())

    gradilocks.audit(model, loss, [torch.randn(4, 6) for _ in range(3)])

    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    for param, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert param.grad is gradient
        assert value is None or torch.equal(gradient, value)
    assert modes == [module.training for module in model.modules()]
    assert all(now is was for now, was in zip(model.buffers(), buffers, strict=True))


def test_a_loss_that_changes_the_mode_does_not_leave_it_changed():
    model = model_with_everything().eval()
    gradilocks.audit(model, lambda model, x: loss(model.train(), x), [torch.randn(4, 6)])
    assert not any(module.training for module in model.modules())


def test_random_numbers_go_on_as_if_nothing_had_been():
    model = model_with_everything().train()
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    expected = torch.rand(3), random.random(), numpy.random.random()
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    gradilocks.audit(
        model,
        lambda model, x: loss(model, x) * random.random() * numpy.random.random() * torch.rand(()),
        [torch.randn(4, 6, generator=torch.Generator().manual_seed(0))],
    )
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert numpy.random.random() == expected[2]


def test_no_hook_is_left_on_modules_or_parameters():
    model = model_with_everything()
    model[0].register_forward_hook(lambda *_: None)
    before = [dict(module._forward_hooks) for module in model.modules()]
    gradilocks.audit(model, loss, [torch.randn(4, 6)])
    assert [dict(module._forward_hooks) for module in model.modules()] == before
    assert all(not param._backward_hooks for param in model.parameters())


def test_hooks_are_gone_and_gradients_back_after_a_loss_that_raises():
    model = model_with_everything()
    loss(model, torch.randn(4, 6)).backward()
    gradients = [param.grad for param in model.parameters()]

    def broken(model, batch):
        loss(model, batch)
        raise KeyError("batch")

    with pytest.raises(KeyError):
        gradilocks.audit(model, broken, [torch.randn(4, 6)])
    assert all(not module._forward_hooks for module in model.modules())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_an_optimizer_that_steps_inside_backward_does_not_step():
    model = nn.Linear(6, 2)
    calls = []
    handle = model.weight.register_post_accumulate_grad_hook(calls.append)
    gradilocks.audit(model, loss, [torch.randn(4, 6)])
    assert calls == []
    loss(model, torch.randn(4, 6)).backward()
    assert len(calls) == 1
    handle.remove()
    loss(model, torch.randn(4, 6)).backward()
    assert len(calls) == 1


def test_a_loss_function_that_trains_is_an_error():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains(model, batch):
        loss(model, batch).backward()
        optimizer.step()
        return loss(model, batch)

    with pytest.raises(GradilocksError, match="weight was changed while the model was audited"):
        gradilocks.audit(model, trains, [torch.randn(4, 6)])


def test_an_audit_inside_no_grad_works():
    with torch.no_grad():
        found = gradilocks.audit(nn.Linear(6, 2), loss, [torch.randn(4, 6)])
        assert not torch.is_grad_enabled()
    assert found.parameters.values


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_part_is_left_alone_and_no_hook_stays_behind():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1)))
    found = gradilocks.audit(model, lambda m, x: m(x).mean(), [torch.randn(2, 4)])
    assert [module.name for module in found.modules] == ["0", "1"]
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    assert not model[0].weight._backward_hooks


def test_no_hook_stays_behind_if_one_cannot_be_put_on():
    class Closed(nn.Linear):
        def register_forward_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks here")

    model = nn.Sequential(nn.Linear(4, 4), Closed(4, 1))
    with pytest.raises(RuntimeError, match="no hooks here"):
        gradilocks.audit(model, lambda m, x: m(x).mean(), [torch.randn(2, 4)])
    assert not model[0]._forward_hooks
    assert not model[1]._forward_pre_hooks
    assert not model[0].weight._backward_hooks
