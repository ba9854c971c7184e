"""No address that a kernel is given is out of date, too far or not aligned as promised."""

from __future__ import annotations

import pytest
import torch

from gradilocks import GradientControl, kernels, optim
from gradilocks.optim import fused_optimizer
from tests.optim.twins import both_kinds, close, contents_of, give, ours, parameters, run, torchs

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@both_kinds
@pytest.mark.parametrize("place", [0, 1, 11])
def test_one_state_tensor_that_gets_other_storage_is_noticed(kind, place, kernel_device):
    mine, theirs = (parameters([(40,)] * 12, device=kernel_device) for _ in range(2))
    optimizers = ours(kind, mine), torchs(kind, theirs)
    for optimizer, params in zip(optimizers, (mine, theirs), strict=True):
        run(optimizer, 3)
        state = optimizer.state[params[place]]
        name = next(name for name in state if name != "step")
        state[name].data = torch.zeros(40, device=kernel_device)
        run(optimizer, 2, first=3)
    close(mine, theirs)


def test_of_many_state_tensors_some_are_looked_at_in_every_step_and_all_in_turns(
    kernel_device, monkeypatch
):
    monkeypatch.setattr(fused_optimizer, "WATCHED", 5)
    params = parameters([(3,)] * 12, device=kernel_device)
    optimizer = ours("SGD", params)
    run(optimizer, 1)
    made = optimizer._plan
    state = optimizer.state[params[7]]["momentum_buffer"]
    state.data = state.data.clone()
    run(optimizer, 6, first=1)
    assert optimizer._plan is not made


@both_kinds
def test_a_parameter_that_shrank_after_backward_is_refused_by_name(kind, kernel_device):
    store = torch.zeros(64, device=kernel_device)
    param = torch.nn.Parameter(store)
    optimizer = ours(kind, [("head.weight", param)])
    param.grad = torch.ones(64, device=kernel_device)
    param.data = store[:16]
    with pytest.raises(ValueError, match=r"head.weight has shape \(64,\), the parameter \(16,\)"):
        optimizer.step()
    assert not store.any()


def test_an_unaligned_gradient_of_a_parameter_in_another_order_is_copied_first(kernel_device):
    flat = torch.randn(1 + 2 * 3 * 4 * 4, device=kernel_device)
    shape = (2, 3, 4, 4)
    mine, theirs = (
        torch.nn.Parameter(
            torch.ones(shape, device=kernel_device).contiguous(memory_format=torch.channels_last)
        )
        for _ in range(2)
    )
    mine.grad = flat[1:].view(shape)
    theirs.grad = flat[1:].view(shape).contiguous(memory_format=torch.channels_last)
    assert mine.grad.data_ptr() % 16
    ours("AdamW", [mine]).step()
    torchs("AdamW", [theirs]).step()
    close([mine], [theirs])


@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
@pytest.mark.parametrize("controlled", [False, True])
def test_a_launch_that_fails_counts_nothing(make, controlled, kernel_device, monkeypatch):
    settings = {"momentum": 0.9, "dampening": 0.5} if make is optim.SGD else {}
    params = parameters([(5,), (2, 3)], device=kernel_device)
    optimizer = make(params, lr=0.1, **settings)
    control = GradientControl(optimizer, scale=None)
    step = control.step if controlled else optimizer.step
    launches = kernels.BACKENDS[kernel_device].optimizers
    real, bind = launches.launch_step, launches.bound_step

    def failing(*args):
        raise RuntimeError("out of memory")

    def bound(*args):
        """As launches that are bound are made: through whatever stands there."""
        made = bind(*args)
        return (
            None if made is None else lambda s: (launches.launch_step is real or failing(), made(s))
        )

    monkeypatch.setattr(launches, "bound_step", bound)
    for number in range(3):
        give(params, number)
        before = contents_of(optimizer) if number else None
        monkeypatch.setattr(launches, "launch_step", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            step()
        monkeypatch.setattr(launches, "launch_step", real)
        if number:
            assert contents_of(optimizer) == before
        step()
    twins = parameters([(5,), (2, 3)], device=kernel_device)
    run(make(twins, lr=0.1, **settings), 3)
    close(params, twins)
