"""`grad_scale` and `found_inf`, as torch's scaler sets them."""

from __future__ import annotations

import pytest
import torch

from gradilocks import optim
from optim import twins

CASES = twins.FEW_CASES + twins.TORCH_CASES
each_case = pytest.mark.parametrize(("name", "options"), CASES, ids=twins.ids(CASES))


def set_amp(optimizer, device, *, grad_scale=None, found_inf=None):
    for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        setattr(optimizer, name, None if value is None else torch.tensor(value, device=device))


@each_case
def test_a_skipped_step_changes_no_bit(name, options, device):
    optimizer = getattr(optim, name)(twins.parameters(device=device), **options)
    twins.run(optimizer, 2)
    before = twins.snapshot(optimizer)
    set_amp(optimizer, device, grad_scale=4.0, found_inf=1.0)
    twins.fill_gradients(twins.params_of(optimizer), 2, factor=float("nan"))
    optimizer.step()
    assert twins.have_same_bits(before, twins.snapshot(optimizer))


@each_case
def test_after_a_skipped_first_step_the_next_is_a_first_step(name, options, device):
    """torch's fused SGD would leave uninitialized momentum buffers behind."""
    skipped, other = (getattr(optim, name)(twins.parameters(device=device), **options) for _ in "ab")
    set_amp(skipped, device, found_inf=1.0)
    twins.fill_gradients(twins.params_of(skipped), 0, factor=float("inf"))
    skipped.step()
    set_amp(skipped, device)
    for optimizer in (skipped, other):
        twins.run(optimizer, 2)
    assert twins.have_same_bits(twins.snapshot(skipped), twins.snapshot(other))


@pytest.mark.parametrize("found_inf", [2.0, float("nan"), float("inf")])
def test_any_number_but_zero_skips(found_inf, device):
    """torch's scaler adds up one flag per device, so the sum can be 2."""
    optimizer = optim.AdamW(twins.parameters(device=device))
    twins.run(optimizer, 1)
    before = twins.snapshot(optimizer)
    set_amp(optimizer, device, found_inf=found_inf)
    optimizer.step()
    assert twins.have_same_bits(before, twins.snapshot(optimizer))


@each_case
def test_gradients_are_divided_by_grad_scale_and_stay_unchanged(name, options, device):
    scaled, plain = (getattr(optim, name)(twins.parameters(device=device), **options) for _ in "ab")
    set_amp(scaled, device, grad_scale=1024.0, found_inf=0.0)
    for step in range(3):
        twins.fill_gradients(twins.params_of(scaled), step, factor=1024.0)
        grads = [param.grad.clone() for param in twins.params_of(scaled)]
        scaled.step()
        twins.run(plain, 1, first=step)
        if twins.uses_kernels(scaled):  # torch's fused steps unscale the gradients in place.
            assert twins.have_same_bits(grads, [param.grad for param in twins.params_of(scaled)])
    twins.assert_close(scaled, plain, rtol=2e-6, atol=2e-7)
    if twins.uses_kernels(scaled):
        assert twins.have_same_bits(twins.snapshot(scaled), twins.snapshot(plain))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_torchs_scaler_skips_and_unscales_without_touching_gradients(name, device):
    options = {"lr": 0.05, **({"momentum": 0.9} if name == "SGD" else {})}
    own, other = twins.pair(name, options, device, foreach=False)
    for optimizer in (own, other):
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        params = twins.params_of(optimizer)
        for step in range(5):
            scaler.scale(torch.zeros((), device=device))
            twins.fill_gradients(params, step, factor=scaler.get_scale())
            if step in (0, 3):
                params[4].grad[7] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1024.0 / 2
    # A rounding of lr / (1 - beta1) differs between the fused and the unfused formula.
    twins.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_the_scale_must_not_be_preset_to_be_reset(extension):
    """Attributes that the caller has set are still there after torch's own step."""
    optimizer = optim.AdamW(twins.parameters(), amsgrad=True)
    set_amp(optimizer, "cpu", grad_scale=2.0, found_inf=0.0)
    twins.run(optimizer, 1)
    assert (optimizer.grad_scale, optimizer.found_inf) == (2.0, 0.0)
    del optimizer.grad_scale, optimizer.found_inf
    twins.run(optimizer, 1)
    assert not hasattr(optimizer, "grad_scale")
