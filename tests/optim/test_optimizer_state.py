"""State of the optimizers: checkpoints, creation on demand, and changes from outside."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from gradilocks import optim
from gradilocks.kernels.pointer_table import CHECKS_PER_STEP
from optim import twins

each_case = pytest.mark.parametrize(("name", "options"), twins.FEW_CASES, ids=twins.ids(twins.FEW_CASES))


@each_case
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("from_torch", [True, False])
def test_state_dicts_are_exchanged_with_torch(name, options, fused, from_torch, device):
    own, other = twins.pair(name, options, device, fused=fused)
    source, target = (other, own) if from_torch else (own, other)
    twins.run(source, 2)
    with torch.no_grad():
        for param, value in zip(twins.params_of(target), twins.params_of(source), strict=True):
            param.copy_(value)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for optimizer in (own, other):
        twins.run(optimizer, 2, first=2)
    assert twins.uses_kernels(own)
    twins.assert_close(own, other, rtol=1e-5, atol=1e-6)


@each_case
def test_a_run_resumes_bit_for_bit(name, options, device):
    first = getattr(optim, name)(twins.parameters(device=device), **options)
    twins.run(first, 2)
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    second = getattr(optim, name)([torch.nn.Parameter(p.detach().clone()) for p in twins.params_of(first)], **options)
    second.load_state_dict(saved)
    for optimizer in (first, second):
        twins.run(optimizer, 2, first=2)
    assert twins.have_same_bits(twins.snapshot(first), twins.snapshot(second))


def test_amsgrad_continues_from_torchs_unfused_state(device):
    """The fallback is torch's fused step, which needs step counts on the device."""
    own, other = twins.pair("AdamW", {"amsgrad": True}, device, fused=False, foreach=False)
    twins.run(other, 2)
    own.load_state_dict(copy.deepcopy(other.state_dict()))
    assert own.param_groups[0]["fused"] is True
    twins.run(own, 1, first=2)
    assert all(state["step"].device.type == device and state["step"] == 3 for state in twins.state_of(own))


def test_state_is_created_with_the_first_gradient(device):
    params = twins.parameters([(3,), (4,), (5,)], device=device)
    optimizer = optim.AdamW(params)
    params[0].grad = torch.ones(3, device=device)
    optimizer.step()
    assert list(optimizer.state) == params[:1]
    params[1].grad = torch.ones(4, device=device)
    optimizer.step()
    assert list(optimizer.state) == params[:2]
    assert [optimizer.state[param]["step"].item() for param in params[:2]] == [2, 1]
    assert params[2].eq(twins.values([(3,), (4,), (5,)])[2].to(device)).all()


def test_sgd_without_momentum_has_no_state(device):
    optimizer = optim.SGD(twins.parameters(device=device), lr=0.1)
    twins.run(optimizer, 2)
    assert not optimizer.state


def test_a_step_without_gradients_does_nothing(device):
    optimizer = optim.AdamW(twins.parameters(device=device))
    before = twins.snapshot(optimizer)
    optimizer.step()
    assert twins.have_same_bits(before, twins.snapshot(optimizer))
    assert not optimizer.state


def move(params):
    for param in params:
        param.data = param.data.clone()


def swap_storage(tensor):
    tensor.data = torch.zeros_like(tensor)


def replace_state(optimizer, param):
    optimizer.state[param] = {key: value.clone() * 0.5 for key, value in optimizer.state[param].items()}


CHANGES = {
    "learning rate": lambda optimizer, params: optimizer.param_groups[0].update(lr=0.3),
    "learning rate as a tensor": lambda optimizer, params: optimizer.param_groups[0].update(lr=torch.tensor(0.3)),
    "added parameters": lambda optimizer, params: optimizer.add_param_group(
        {"params": twins.parameters([(7,)], device=params[0].device), "lr": 0.3}
    ),
    "moved parameters": lambda optimizer, params: move(params),
    "cleared state": lambda optimizer, params: optimizer.state.clear(),
    "cleared state of a parameter": lambda optimizer, params: optimizer.state[params[3]].clear(),
    "replaced state": lambda optimizer, params: replace_state(optimizer, params[3]),
    # In a model of more than 8 tensors it takes a few steps, as documented.
    "replaced moment": lambda optimizer, params: optimizer.state[params[3]].update(exp_avg=torch.zeros_like(params[3])),
    "moment with new storage": lambda optimizer, params: swap_storage(optimizer.state[params[3]]["exp_avg"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_steps_apply_at_once(change, device):
    optimizers = twins.pair("AdamW", {"lr": 0.01}, device, foreach=False)
    for optimizer in optimizers:
        twins.run(optimizer, 2)
        change(optimizer, twins.params_of(optimizer))
        twins.run(optimizer, 1, first=2)
    assert twins.uses_kernels(optimizers[0])
    twins.assert_close(*optimizers, rtol=2e-6, atol=2e-7)


def test_a_replaced_state_tensor_is_noticed_after_some_steps(extension):
    optimizer = optim.AdamW(twins.parameters([(2,)] * 30))
    twins.run(optimizer, 1)
    new = torch.zeros(2)
    optimizer.state[twins.params_of(optimizer)[29]]["exp_avg"] = new
    twins.run(optimizer, -(-30 // CHECKS_PER_STEP), first=1)
    assert new.ne(0).all()


def test_options_that_the_kernels_do_not_cover_apply_at_once(device):
    own, other = twins.pair("SGD", {"lr": 0.05, "momentum": 0.9}, device, foreach=False)
    for optimizer in (own, other):
        twins.run(optimizer, 1)
        optimizer.param_groups[0]["maximize"] = True
        twins.run(optimizer, 1, first=1)
        optimizer.param_groups[0].update(maximize=False, momentum=0.0)
        twins.run(optimizer, 1, first=2)
    twins.assert_close(own, other, rtol=2e-6, atol=2e-7)


def test_loading_a_state_dict_between_steps_applies_at_once(device):
    optimizer = optim.AdamW(twins.parameters(device=device))
    twins.run(optimizer, 2)
    saved, values = copy.deepcopy(optimizer.state_dict()), twins.snapshot(optimizer)[0]
    twins.run(optimizer, 3, first=2)
    expected = twins.snapshot(optimizer)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, value in zip(twins.params_of(optimizer), values, strict=True):
            param.copy_(value)
    twins.run(optimizer, 3, first=2)
    assert twins.have_same_bits(expected, twins.snapshot(optimizer))


def test_an_optimizer_is_freed_without_the_garbage_collector(device):
    optimizer = optim.AdamW(twins.parameters(device=device))
    twins.run(optimizer, 2)
    reference = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


def test_a_pickled_optimizer_supports_amp_scaling(extension):
    optimizer = optim.AdamW(twins.parameters([(3,)]))
    twins.run(optimizer, 1)
    restored = pickle.loads(pickle.dumps(optimizer))
    restored.found_inf = torch.ones(())
    before = twins.snapshot(restored)
    twins.run(restored, 1)
    assert twins.have_same_bits(before, twins.snapshot(restored))
    assert restored._step_supports_amp_scaling
