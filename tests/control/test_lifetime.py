"""A control keeps no gradients, graphs or old parameters alive, and leaves nothing behind when it goes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from control.given_gradients import INF, MAKERS, loss_giving, parameter, take_step
from gradilocks import AdaGC, AdaptiveClip, GradientControl

CLIPS = {"norm": 1.0, "tensor": AdaGC(), "rows": AdaptiveClip()}


@pytest.fixture(autouse=True)
def no_garbage_collection():
    """References must be gone at once, not when the collector finds a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_freed_when_they_are_cleared(name, clip, device):
    p, q = parameter(1.0, 2.0, device=device), parameter(3.0, device=device)
    control = GradientControl(MAKERS[name]([p, q]), clip=CLIPS[clip])
    outcomes = []
    for gradient in (1.0, INF, 2.0):
        control.zero_grad()
        control.backward(loss_giving((p, gradient), (q, 1.0)))
        references = [weakref.ref(p.grad), weakref.ref(q.grad)]
        outcomes.append(control.step())
        p.grad = q.grad = None
        assert [reference() for reference in references] == [None, None]


def test_the_graph_of_the_loss_is_freed_with_the_loss():
    model = nn.Linear(3, 1)
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1))
    activation = model(torch.ones(2, 3))
    loss = activation.square().mean()
    references = [weakref.ref(activation), weakref.ref(loss)]
    control.backward(loss, retain_graph=True)
    del loss, activation
    assert [reference() for reference in references] == [None, None]
    outcome = control.step()
    assert outcome.loss_is_finite


def test_a_large_output_that_is_scaled_is_not_kept():
    p = nn.Parameter(torch.ones(1000))
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    output = p * 2.0
    storage = weakref.ref(output.untyped_storage())
    scaled = control.scale_loss(output)
    scaled.sum().backward()
    del output, scaled
    assert storage() is None
    assert all(loss.numel() == 1 for loss in control._losses)


@pytest.mark.parametrize("name", MAKERS)
def test_a_deleted_control_leaves_no_hook_and_no_reference(name, device):
    p = parameter(1.0, device=device)
    optimizer = MAKERS[name]([p])
    control = GradientControl(optimizer, clip=1.0)
    hooks = optimizer._optimizer_step_pre_hooks
    outcome = take_step(control, (p, 1.0))
    scheduler = control.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    scaler = control.as_scaler()
    assert len(hooks) == 1
    control.zero_grad()
    control.backward(loss_giving((p, 1.0)))
    reference = weakref.ref(control)
    del control, scaler
    assert reference() is None
    assert len(hooks) == 0
    optimizer.step()  # No guard is left.
    assert not outcome.skipped
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_are_freed_with_optimizer_and_control(name, device):
    p = parameter(1.0, device=device)
    optimizer = MAKERS[name]([p])
    control = GradientControl(optimizer, clip=AdaGC())
    outcome = take_step(control, (p, 1.0))
    reference = weakref.ref(p)
    del p, optimizer, control, outcome
    gc.collect()  # torch's optimizers are in reference cycles of their own.
    assert reference() is None


def test_a_scaled_control_without_scale_registers_no_hook():
    optimizer = torch.optim.SGD([parameter(1.0)], lr=0.1)
    control = GradientControl(optimizer, scale=None)
    assert not optimizer._optimizer_step_pre_hooks
    assert control.scale == 1.0


def test_subscribers_do_not_keep_a_control_alive():
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    norms = []
    control.subscribe(lambda record: norms.append(record.outcome.norm))
    take_step(control, (p, 1.0))
    reference = weakref.ref(control)
    del control
    assert reference() is None
    assert norms == [1.0]


def test_a_control_holds_few_attributes():
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=1.0, model=nn.ParameterList([p]))
    take_step(control, (p, 1.0))
    assert len(vars(control)) <= 18
