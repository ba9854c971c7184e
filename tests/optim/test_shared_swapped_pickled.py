"""What programs do to parameters and optimizers between steps: share, swap, pickle, drop them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

from gradilocks import GradScaler
from gradilocks.errors import SharedParameter
from tests.optim.twins import (
    both_kinds,
    close,
    copies,
    each_optimizer,
    give,
    mastered,
    masters_of,
    ours,
    parameters,
    run,
    same,
    values,
)


def share(params, step, *, factor=1.0):
    """One gradient for all parameters."""
    (grad,) = values([params[0].shape], seed=step)
    grad = (grad * factor).to(params[0].device)
    for param in params:
        param.grad = grad
    return grad


@each_optimizer
@pytest.mark.parametrize("scaled", [False, True])
def test_parameters_that_share_one_gradient_are_each_stepped_by_it_once(kind, scaled, device):
    params, own = (parameters([(70,), (70,), (70,)], device=device) for _ in range(2))
    optimizer, expected = ours(kind, params), ours(kind, own)
    for step in range(3):
        factor = 8.0 if scaled else 1.0
        grad = share(params, step, factor=factor)
        share(own, step)
        for param in own:
            param.grad = param.grad.clone()
        if scaled:
            optimizer.grad_scale = torch.full((), 8.0, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        expected.step()
        assert all(param.grad is grad for param in params)
    assert same(copies(params), copies(own))


@both_kinds
def test_shared_gradients_that_come_in_another_order_or_dtype_are_divided_once_too(kind, device):
    made = values([(6, 5), (6, 5)], device=device)
    params = [torch.nn.Parameter(made[0].t()), torch.nn.Parameter(made[1].t())]
    own = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer, expected = ours(kind, params), ours(kind, own)
    for step in range(2):
        share(params, step, factor=4.0)
        share(own, step)
        own[1].grad = own[1].grad.clone()
        optimizer.grad_scale = torch.full((), 4.0, device=device)
        optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        expected.step()
    close(params, own)


@each_optimizer
def test_a_scaler_refuses_shared_gradients_and_changes_nothing(kind, device):
    params = parameters([(9,), (9,)], device=device)
    scaler, optimizer = GradScaler(device, init_scale=4.0), ours(kind, params)
    before = copies(params)
    scaler.scale(torch.ones((), device=device))
    share(params, 0, factor=4.0)
    with pytest.raises(SharedParameter, match="have one tensor as their gradient"):
        scaler.step(optimizer)
    assert same(copies(params), before)
    for param in params:
        param.grad = param.grad.clone()
    scaler.step(optimizer)
    assert not same(copies(params), before)


@each_optimizer
@pytest.mark.parametrize("master_weights", [False, True])
def test_a_parameter_that_is_swapped_is_stepped_on_from_its_new_values(
    kind, master_weights, device
):
    if master_weights:
        params, optimizer = mastered(kind, device, shapes=[(70,), (5,)])
    else:
        params = parameters([(70,), (5,)], device=device)
        optimizer = ours(kind, params)
    run(optimizer, 2)
    optimizer.zero_grad()
    twin = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = ours(kind, twin, master_weights=master_weights)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (fresh,) = values([(70,)], seed=7, dtype=params[0].dtype, device=device)
    new = torch.nn.Parameter(fresh.clone())
    torch.utils.swap_tensors(params[0], new)
    with torch.no_grad():
        twin[0].copy_(fresh)
    assert torch.equal(params[0], fresh)
    run(optimizer, 2, first=2)
    run(other, 2, first=2)
    assert same(copies(params), copies(twin))
    assert not torch.equal(params[0], fresh)
    if master_weights:
        assert same(masters_of(optimizer, params), masters_of(other, twin))


@both_kinds
def test_a_parameter_swapped_for_one_of_another_shape_is_refused_by_its_place(kind, device):
    params = parameters([(70,), (5,)], device=device)
    optimizer = ours(kind, params)
    run(optimizer, 1)
    optimizer.zero_grad()
    torch.utils.swap_tensors(params[0], torch.nn.Parameter(torch.ones(3, device=device)))
    give(params, 1)
    before = copies(params)
    with pytest.raises(ValueError, match=r"has shape \(3,\) and its .* has shape \(70,\)"):
        optimizer.step()
    assert same(copies(params), before)


@each_optimizer
def test_a_model_moved_by_swapping_keeps_its_optimizer(kind, device):
    model = torch.nn.Linear(4, 3).to(device)
    optimizer = ours(kind, model.parameters())
    run(optimizer, 1)
    optimizer.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    before = copies(model.parameters())
    run(optimizer, 1, first=1)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.dtype is torch.float64
        assert not torch.equal(param, old)


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


def saved(optimizer):
    """By torch.save, which shares storages."""
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@each_optimizer
@pytest.mark.parametrize("through", [pickled, saved, copy.deepcopy])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_optimizer_goes_through_a_pickle_after_any_step(kind, through, steps, device):
    params = parameters([(70,), (3, 4), ()], device=device)
    optimizer = ours(kind, params)
    run(optimizer, steps)
    other = through(optimizer)
    run(optimizer, 3, first=steps)
    run(other, 3, first=steps)
    its = [param for group in other.param_groups for param in group["params"]]
    assert same(copies(its), copies(params))
    assert not any(mine is theirs for mine, theirs in zip(params, its, strict=True))
    assert same(other.state_dict(), optimizer.state_dict())


@both_kinds
def test_an_optimizer_with_masters_goes_through_a_pickle(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    other = pickled(optimizer)
    run(optimizer, 2, first=2)
    run(other, 2, first=2)
    its = [param for group in other.param_groups for param in group["params"]]
    assert same(copies(its), copies(params))
    assert same(masters_of(other, its), masters_of(optimizer, params))


@each_optimizer
def test_an_optimizer_in_a_cycle_is_freed_by_the_collector_with_its_state(kind, device):
    params = parameters([(70,), (3, 4)], device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    optimizer.trainer = {"optimizer": optimizer}
    alive = weakref.ref(optimizer)
    states = [
        weakref.ref(tensor)
        for state in optimizer.state.values()
        for tensor in state.values()
        if tensor.dim()
    ]
    assert states
    gc.disable()
    try:
        del optimizer
        assert alive() is not None  # The cycle holds it.
    finally:
        gc.enable()
    gc.collect()
    assert alive() is None
    assert not any(state() is not None for state in states)
    other = ours(kind, params)  # The parameters are as good as new.
    run(other, 1, first=2)


@each_optimizer
def test_an_optimizer_without_a_cycle_needs_no_collector(kind, device):
    optimizer = ours(kind, parameters([(70,)], device=device))
    run(optimizer, 2)
    alive = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()
