"""Defects of torch's GradScaler that ours does not have.

Where torch's behaviour is deterministic, a test shows it: if a later torch repairs it, that test fails and can go.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.amp.grad_scaler import OptState

from control.given_gradients import nan_in_new_memory
from dropin.loops import backward, iterate, overflow, sgd, two_weights
from gradilocks import GradScaler, kernels
from gradilocks.dropin import grad_scaler

TINY = 2.0**-126


# --- B1: the flags of all devices are added up, and fused kernels skip only if the sum is 1 ---------------------------


def test_torch_lets_nan_in_if_two_devices_raise_the_flag(param):
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(param, fused=True)
    backward(scaler, param)
    param.grad.fill_(math.nan)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]["another device"] = torch.ones(())
    scaler.step(optimizer)
    assert param.isnan().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("path", ["torch", "kernels"])
def test_the_flag_of_several_devices_is_one(param, path, fused, monkeypatch):
    flags = {
        torch.device("cpu"): torch.ones(()),
        torch.device("cpu", 0): torch.ones(()),
        torch.device("meta"): torch.zeros(()),
    }
    if path == "torch":
        monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", lambda *_: dict(flags))
    else:
        monkeypatch.setattr(grad_scaler, "_TORCH_DTYPES", {"cpu": set(), "cuda": set()})
        groups = [(torch.device("cpu"), [torch.ones(1)]), (torch.device("cpu", 0), [torch.ones(1)])]
        monkeypatch.setattr(grad_scaler, "by_device", lambda _: groups)
        monkeypatch.setattr(kernels, "unscale_", lambda *_: torch.ones(()))
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param, fused=fused)
    backward(scaler, param)
    param.grad.fill_(math.nan)
    scaler.step(optimizer)
    (flag,) = scaler._found_inf_per_device(optimizer).values()
    assert flag.item() == 1.0
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 4.0


# --- B4: the scale falls to 0 -----------------------------------------------------------------------------------------


def test_torch_reaches_a_scale_of_zero_and_then_steps_on_nan(param):
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(param)
    for _ in range(166):
        overflow(scaler, optimizer, param)
    assert scaler.get_scale() == 0.0
    iterate(scaler, optimizer, param)
    assert param.isnan().all()
    with pytest.raises(ValueError, match="scale in the state_dict must be above 0"):
        GradScaler("cpu").load_state_dict({**scaler.state_dict(), "scale": 0.0})


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_stops_at_the_smallest_one_whose_reciprocal_is_finite(param, fused):
    scaler, optimizer = GradScaler("cpu"), sgd(param, fused=fused)
    for _ in range(200):
        overflow(scaler, optimizer, param)
    assert scaler.get_scale() == TINY
    assert param.tolist() == [1.0, 2.0]
    optimizer = sgd(param, lr=0.25, fused=fused)
    iterate(scaler, optimizer, param)
    assert param.tolist() == [0.5, 1.0]  # Training still works there.


def test_the_bounds_hold_for_every_way_to_move_the_scale(param):
    scaler, optimizer = GradScaler("cpu", 16.0, growth_interval=1, min_scale=1.0, max_scale=32.0), sgd(param, lr=0.0)
    for _ in range(3):
        iterate(scaler, optimizer, param)
    assert scaler.get_scale() == 32.0
    for _ in range(10):
        overflow(scaler, optimizer, param)
    assert scaler.get_scale() == 1.0
    for given, expected in ((0.5, 1.0), (torch.tensor(0.0), 1.0), (100.0, 32.0)):
        scaler.update(given)
        assert scaler.get_scale() == expected
    scaler.set_growth_factor(0.25)
    for _ in range(4):
        iterate(scaler, optimizer, param)
    assert scaler.get_scale() == 1.0
    for fresh in (scaler, GradScaler("cpu", 16.0, min_scale=1.0, max_scale=32.0)):
        fresh.load_state_dict({**scaler.state_dict(), "scale": 0.25})
        assert fresh.get_scale() == 1.0


@pytest.mark.usefixtures("_kernels_on_cpu")
def test_a_gradient_that_overflows_when_it_is_unscaled_is_skipped_by_our_kernels(param):
    scaler, optimizer = GradScaler("cpu", init_scale=2.0**-20), sgd(param)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), 1e35)  # Finite, but not after the division by 2**-20.
    scaler.step(optimizer)
    assert param.tolist() == [1.0, 2.0]


# --- B5: a fused step that raises leaves grad_scale behind ------------------------------------------------------------


def fail_once(scaler_class, param, *, fused=True, preset=None):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=fused)
    failures = [RuntimeError("out of memory")]

    def raise_once(*_):
        if failures:
            raise failures.pop()

    optimizer.register_step_pre_hook(raise_once)
    backward(scaler, param)
    if preset is not None:
        optimizer.grad_scale = preset
    with pytest.raises(RuntimeError, match="out of memory"):
        scaler.step(optimizer)
    return scaler, optimizer


def test_torch_divides_by_the_scale_twice_when_a_failed_step_is_repeated(param):
    scaler, optimizer = fail_once(torch.amp.GradScaler, param)
    scaler.step(optimizer)
    assert param.tolist() == [1.0 - 1.0 / 8.0, 2.0 - 2.0 / 8.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_failed_step_leaves_nothing_behind_and_can_be_repeated(param, fused):
    scaler, optimizer = fail_once(GradScaler, param, fused=fused)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is (OptState.READY if fused else OptState.UNSCALED)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 0.0]


def test_a_failed_step_restores_the_grad_scale_of_the_user(param):
    preset = torch.tensor(2.0)
    scaler, optimizer = fail_once(GradScaler, param, preset=preset)
    assert optimizer.grad_scale is preset
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 1.0]


# --- B6: a growth interval below the tracker --------------------------------------------------------------------------


def scales_with_lowered_interval(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0, growth_interval=100), sgd(param)
    scales = []
    for number in range(8):
        if number == 5:
            scaler.set_growth_interval(3)
        param.data.fill_(1.0)
        iterate(scaler, optimizer, param)
        scales.append(scaler.get_scale())
    return scales


def test_torch_never_grows_again_and_ours_at_the_next_update(param):
    assert scales_with_lowered_interval(torch.amp.GradScaler, param) == [8.0] * 8
    assert scales_with_lowered_interval(GradScaler, param) == [8.0] * 5 + [16.0] * 3


@pytest.mark.parametrize("is_used", [False, True])
def test_the_scale_grows_after_a_state_with_such_an_interval_was_loaded(param, is_used):
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param)
    if is_used:
        iterate(scaler, optimizer, param)
    scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 3, "_growth_tracker": 7})
    iterate(scaler, optimizer, param)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16.0, 0)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_that_is_not_positive_never_grows(scaler_class, param, interval):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    scaler.set_growth_interval(interval)
    for _ in range(3):
        iterate(scaler, optimizer, param)
    assert scaler.get_scale() == 8.0


# --- B7, B12: kept as in torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize(("fused", "expected"), [(False, 4.0), (True, 32.0)])
def test_a_skipped_step_leaves_gradients_unscaled_or_scaled_and_fires_hooks_as_in_torch(
    scaler_class, param, fused, expected
):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=fused)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    overflow(scaler, optimizer, param)
    assert param.grad.tolist() == [math.inf, expected]
    assert len(calls) == fused
    assert param.tolist() == [1.0, 2.0]


# --- B10: a float16 loss that is not 0-d ------------------------------------------------------------------------------


def test_a_float16_loss_is_scaled_in_float32():
    half = torch.full((2,), 3.0, dtype=torch.float16)
    assert torch.amp.GradScaler("cpu").scale(half).isinf().all()
    scaler = GradScaler("cpu")
    first, (second,) = scaler.scale([half, (half,)])
    for scaled in (scaler.scale(half), first, second, *scaler.scale(t for t in [half])):
        assert scaled.dtype is torch.float32
        assert scaled.tolist() == [3.0 * 65536.0] * 2


def test_the_gradient_of_a_float16_loss_is_that_of_a_float32_one():
    param = torch.nn.Parameter(torch.full((4,), 100.0))
    scaler = GradScaler("cpu", init_scale=2.0**15)
    scaler.scale((param * 5.0).half()).mean().backward()  # 500 * 2**15 is inf in float16.
    scaler.unscale_(sgd(param))
    assert param.grad.tolist() == [1.25] * 4


# --- B14: fused SGD whose first step is skipped -----------------------------------------------------------------------


SETTINGS = {
    "plain": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
}


def train_after_skips(scaler_class, settings, *, fused, skips, unscale=False):
    """Three finite steps after `skips` overflows: the parameter after each, and the momentum buffer."""
    param = two_weights()
    optimizer, scaler, path = sgd(param, lr=0.1, fused=fused, **settings), scaler_class("cpu", init_scale=2.0**10), []
    with nan_in_new_memory():
        for number in range(skips + 3):
            optimizer.zero_grad()
            backward(scaler, param)
            if number < skips:
                param.grad[1] = math.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            path.append(param.detach().clone())
    return torch.stack(path), optimizer.state[param]["momentum_buffer"]


def test_torch_writes_uninitialised_memory_into_the_weights():
    path, _ = train_after_skips(torch.amp.GradScaler, SETTINGS["plain"], fused=True, skips=1)
    assert path[1].isnan().all()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("skips", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_first_step_after_a_skip_equals_a_first_step(settings, skips, unscale):
    expected, momentum = train_after_skips(GradScaler, settings, fused=True, skips=0)
    got, buffer = train_after_skips(GradScaler, settings, fused=True, skips=skips, unscale=unscale)
    assert (got[:skips] == torch.tensor([1.0, 2.0])).all()
    assert torch.equal(got[skips:], expected)
    assert torch.equal(buffer, momentum)
    unfused, _ = train_after_skips(torch.amp.GradScaler, settings, fused=False, skips=skips)
    torch.testing.assert_close(got, unfused, rtol=1e-6, atol=1e-6)


def test_a_skipped_first_step_leaves_no_state_and_an_existing_buffer_is_kept(param):
    late = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([{"params": [param]}, {"params": [late]}], lr=0.5, momentum=0.9, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    overflow(scaler, optimizer, param)
    assert optimizer.state_dict()["state"] == {}
    iterate(scaler, optimizer, param)
    buffer = optimizer.state[param]["momentum_buffer"].clone()
    overflow(scaler, optimizer, param, late)  # `late` has no buffer yet.
    assert torch.equal(optimizer.state[param]["momentum_buffer"], buffer)
    assert late not in optimizer.state


# --- B15: bfloat16 gradients ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_kernels_on_cpu")
@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_gradients_are_unscaled_stepped_and_skipped_by_our_kernels(fused):
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param, fused=fused)
    backward(scaler, param)
    scaler.unscale_(optimizer)
    assert param.grad.dtype is torch.bfloat16
    assert param.grad.tolist() == [2.0, 4.0]
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 0.0]
    overflow(scaler, optimizer, param)
    assert param.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 4.0
