"""What a step costs: two launches, next to no memory, and no gradient kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gradilocks import GradientControl
from tests.launches import counted_launches
from tests.optim.twins import SETTINGS, both_kinds, give, ours, parameters, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def launches(monkeypatch):
    """The kernels that were launched, in order."""
    return counted_launches(monkeypatch)


@both_kinds
@pytest.mark.parametrize("tensors", [1, 40])
def test_a_step_is_two_launches_however_many_tensors_and_groups(
    kind, tensors, triton_device, launches
):
    params = parameters([(k + 1,) for k in range(tensors)], device=triton_device)
    groups = [{"params": [p], "lr": 0.1 / (k + 1)} for k, p in enumerate(params)]
    optimizer = ours(kind, groups)
    for step in range(3):
        give(params, step)
        launches.clear()
        optimizer.step()
        assert len(launches) == 2


@both_kinds
def test_a_scaled_step_that_may_be_skipped_is_two_launches(kind, triton_device, launches):
    params = parameters([(5,), (70,), ()], device=triton_device)
    optimizer = ours(kind, params)
    optimizer.grad_scale = torch.full((), 8.0, device=triton_device)
    for skip in (1.0, 0.0):
        optimizer.found_inf = torch.full((), skip, device=triton_device)
        give(params, 0)
        launches.clear()
        optimizer.step()
        assert len(launches) == 2


@both_kinds
def test_each_dtype_and_each_flag_is_a_launch_of_its_own(kind, triton_device, launches):
    singles, doubles = (
        parameters([(5,), (9,)], dtype=dtype, device=triton_device)
        for dtype in (torch.float32, torch.float64)
    )
    groups = [{"params": singles + doubles[:1]}, {"params": doubles[1:], "maximize": True}]
    optimizer = ours(kind, groups)
    for params in (singles, doubles):
        give(params, 0)
    optimizer.step()
    assert len(launches) == 1 + 3


@both_kinds
def test_under_a_control_a_step_is_three_launches(kind, triton_device, launches):
    params = parameters([(5,), (70,), ()], device=triton_device)
    optimizer = ours(kind, params)
    control = GradientControl(optimizer, clip=1.0)
    for number in range(3):
        control.backward(sum(param.square().sum() for param in params))
        launches.clear()
        control.step()
        control.zero_grad()
        # Measure, settle, step; the first step's rates have a launch of their own.
        assert len(launches) == (4 if number == 0 else 3)


def drop_by_zero_grad(optimizer):
    optimizer.zero_grad()


def drop_by_hand(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


@both_kinds
@pytest.mark.parametrize("drop", [drop_by_zero_grad, drop_by_hand])
@pytest.mark.parametrize("driver", ["alone", "control"])
def test_no_gradient_outlives_its_step(kind, drop, driver, device):
    params = parameters([(5,), (70,), ()], device=device)
    params.append(torch.nn.Parameter(torch.zeros(4, 6, device=device)[:, ::2]))
    optimizer = ours(kind, params)
    control = GradientControl(optimizer, scale=None)
    for step in range(3):
        if driver == "alone":
            give(params, step)
            optimizer.step()
        else:
            control.backward(sum(param.square().sum() for param in params))
            control.step()
        kept = [weakref.ref(param.grad) for param in params]
        gc.disable()
        try:
            drop(optimizer)
            assert [ref() for ref in kept] == [None] * len(kept)
        finally:
            gc.enable()


@both_kinds
def test_no_gradient_outlives_a_step_that_is_refused(kind, device):
    params = parameters([(5,)], device=device)
    optimizer = ours(kind, params)
    run(optimizer, 1)
    optimizer.param_groups[0]["lr"] = torch.tensor(1)
    give(params, 1)
    kept = weakref.ref(params[0].grad)
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert kept() is None


@both_kinds
def test_a_replaced_parameter_is_not_kept_by_us(kind, device):
    params = parameters([(5,), (70,)], device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    old = weakref.ref(params[0])
    del optimizer.state[params[0]]
    optimizer.param_groups[0]["params"][0] = parameters([(5,)], device=device)[0]
    params.clear()
    run(optimizer, 1)
    gc.collect()
    assert old() is None


@pytest.mark.gpu
@both_kinds
@pytest.mark.parametrize("wide", [False, True], ids=["plain", "masters"])
def test_a_step_needs_no_memory_to_speak_of(kind, wide, cuda):
    dtype = torch.bfloat16 if wide else torch.float32
    params = parameters([(512, 1024)] * 16 + [(37,)] * 200, dtype=dtype, device=cuda)
    optimizer = ours(kind, params, master_weights=wide)
    control = GradientControl(optimizer, clip=1.0)
    for step in range(3):
        loss = sum(param.float().sum() for param in params)
        control.backward(loss)
        del loss
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (control if step == 2 else optimizer).step()
        needed = torch.cuda.max_memory_allocated() - before
        control.zero_grad()
        if step > 0:  # The first makes the state.
            assert needed < (1 << 20) + 64 * len(params)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@both_kinds
def test_no_step_waits_for_the_gpu(kind, cuda):
    params = parameters([(70,), (3, 4), ()], device=cuda)
    lr = torch.full((), SETTINGS[kind]["lr"], device=cuda)
    optimizer = ours(kind, [{"params": params[:1], "lr": lr}, {"params": params[1:]}])
    give(params, 0)
    optimizer.grad_scale = torch.full((), 4.0, device=cuda)
    optimizer.found_inf = torch.ones((), device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step()
            optimizer.found_inf.zero_()
            optimizer.param_groups[1]["lr"] *= 0.5
    finally:
        torch.cuda.set_sync_debug_mode("default")
