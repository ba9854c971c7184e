"""float32 master copies of half-precision parameters."""

from __future__ import annotations

import copy

import pytest
import torch

from gradilocks import kernels, optim
from optim import twins

each_case = pytest.mark.parametrize(("name", "options"), twins.FEW_CASES, ids=twins.ids(twins.FEW_CASES))


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request, device):
    if request.param is torch.bfloat16 and device == "cpu" and kernels.has_recorded_step("cpu"):
        pytest.skip("Triton's interpreter truncates bfloat16 instead of rounding; `-m gpu` tests it")
    return request.param


def mastered(device, dtype, name="AdamW", **options):
    return getattr(optim, name)(twins.parameters(dtype=dtype, device=device), master_weights=True, **options)


def masters_of(optimizer):
    return [state["master"] for state in twins.state_of(optimizer)]


def assert_rounded(optimizer):
    for param, master in zip(twins.params_of(optimizer), masters_of(optimizer), strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(param, master.to(param.dtype))


@each_case
def test_masters_follow_float32_training_on_the_same_gradients(name, options, dtype, device):
    optimizer = mastered(device, dtype, name, **options)
    params = [torch.nn.Parameter(param.detach().float()) for param in twins.params_of(optimizer)]
    exact = getattr(torch.optim, name)(params, **options, foreach=False)
    for step in range(4):
        twins.fill_gradients(twins.params_of(optimizer), step)
        for param, half in zip(params, twins.params_of(optimizer), strict=True):
            param.grad = half.grad.float()
        optimizer.step()
        exact.step()
    torch.testing.assert_close(masters_of(optimizer), [param.detach() for param in params], rtol=2e-6, atol=2e-7)
    assert_rounded(optimizer)
    assert all(v.dtype is torch.float32 for state in twins.state_of(optimizer) for v in state.values())


def test_float32_parameters_have_no_master(device):
    optimizer = optim.AdamW(twins.parameters(device=device), master_weights=True)
    twins.run(optimizer, 1)
    assert all("master" not in state for state in twins.state_of(optimizer))


def test_a_state_dict_keeps_masters_in_float32(dtype, device):
    first = mastered(device, dtype)
    twins.run(first, 3)
    second = optim.AdamW(
        [torch.nn.Parameter(param.detach().clone()) for param in twins.params_of(first)], master_weights=True
    )
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer in (first, second):
        twins.run(optimizer, 2, first=3)
    assert twins.have_same_bits(twins.snapshot(first), twins.snapshot(second))
    assert_rounded(second)


def test_masters_start_from_torchs_checkpoint(dtype, device):
    params = twins.parameters(dtype=dtype, device=device)
    other = torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False)
    twins.run(other, 2)
    buffer = other.state[params[4]]["momentum_buffer"].clone()
    optimizer = optim.SGD(params, lr=0.05, momentum=0.9, master_weights=True)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    twins.run(optimizer, 1, first=2)
    expected = 0.9 * buffer.float() + params[4].grad.float()
    torch.testing.assert_close(optimizer.state[params[4]]["momentum_buffer"], expected)
    assert_rounded(optimizer)


def test_values_written_in_place_reach_the_master(dtype, device):
    """As loading a model does. Elements that were written with their own value keep the master's precision."""
    optimizer = mastered(device, dtype, lr=1e-3)
    twins.run(optimizer, 3)
    param = twins.params_of(optimizer)[4]
    with torch.no_grad():
        param[:100] = 7.0
        param[100:] = param[100:].clone()
    before = masters_of(optimizer)[4].clone()
    optimizer.param_groups[0]["lr"] = 0.0
    twins.run(optimizer, 1, first=3)
    after = masters_of(optimizer)[4]
    assert after[:100].eq(7.0).all()
    assert torch.equal(after[100:], before[100:])


def test_moved_parameters_with_new_values_reach_the_master(dtype, device):
    optimizer = mastered(device, dtype)
    twins.run(optimizer, 2)
    param = twins.params_of(optimizer)[4]
    param.data = torch.full_like(param, 1000.0)
    optimizer.param_groups[0]["lr"] = 0.0
    twins.run(optimizer, 1, first=2)
    assert masters_of(optimizer)[4].eq(1000.0).all()


def test_a_skipped_step_changes_no_bit_of_masters(dtype, device):
    optimizer = mastered(device, dtype)
    twins.run(optimizer, 1)
    before = twins.snapshot(optimizer)
    optimizer.found_inf = torch.ones((), device=device)
    twins.run(optimizer, 1)
    assert twins.have_same_bits(before, twins.snapshot(optimizer))


@pytest.mark.parametrize("reason", ["no kernels", "amsgrad", "gradient strides"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_masters_without_kernels_follow_torchs_step_on_float32(name, reason, monkeypatch):
    options = {"amsgrad": True} if reason == "amsgrad" and name == "AdamW" else {}
    if reason == "no kernels":
        monkeypatch.setitem(kernels.BACKENDS, "cpu", None)
    half = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 24).view(4, 6).half())
    exact = torch.nn.Parameter(half.detach().float())
    optimizer = getattr(optim, name)([half], lr=0.01, master_weights=True, **options)
    expected = getattr(torch.optim, name)([exact], lr=0.01, fused=name == "AdamW", **options)
    for step in range(3):
        half.grad = torch.full((6, 4), 0.5 + step).half().t() if reason == "gradient strides" else half.detach() + step
        exact.grad = half.grad.float()
        for each in (optimizer, expected):
            each.step()
        optimizer.found_inf = torch.ones(())
        before = twins.snapshot(optimizer)
        optimizer.step()
        assert twins.have_same_bits(before, twins.snapshot(optimizer))
        del optimizer.found_inf
    assert torch.equal(optimizer.state[half]["master"], exact.detach())
    assert_rounded(optimizer)
    assert half.grad.dtype is torch.float16
    assert optimizer.param_groups[0]["params"] == [half]
