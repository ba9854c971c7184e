"""The drop-ins with the C extension and with the Triton kernels: interpreted on the CPU, compiled with `-m gpu`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradilocks
from control.given_gradients import PATHS
from gradilocks import GradScaler, clip_grad_norm_, clip_grad_value_, kernels

HALF = torch.float16
MIXES = {
    "float32": [(5, torch.float32), (700, torch.float32), (0, torch.float32)],
    "mixed": [(5, HALF), (700, torch.float32), (9, torch.float64), (33, HALF)],
    "one": [(1, torch.float64)],
}


@pytest.fixture(params=PATHS[1:])
def device(request, use_kernels):
    return use_kernels(request.param)


def parameters(mix, device, planted=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = []
    for index, (size, dtype) in enumerate(MIXES[mix]):
        values = torch.randn(size, generator=generator)
        if planted is not None and index == len(MIXES[mix]) // 2:
            values[size // 2] = planted
        params.append(nn.Parameter(torch.zeros(size, dtype=dtype, device=device)))
        params[-1].grad = values.to(device, dtype)
    return params


@pytest.mark.parametrize("planted", [None, math.nan, math.inf, -math.inf, 1e30], ids=str)
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("mix", MIXES)
def test_clipping_with_kernels_agrees_with_plain_torch(device, monkeypatch, mix, order, planted):
    for bound in (0.5, 0.0) if planted else (0.5, 0.0, 1e9, math.inf):
        ours, theirs = (parameters(mix, device, planted) for _ in range(2))
        norm = clip_grad_norm_(ours, bound, order)
        with monkeypatch.context() as patch:
            patch.setitem(kernels.BACKENDS, device, None)
            expected = clip_grad_norm_(theirs, bound, order)
        assert (norm.dtype, norm.device) == (expected.dtype, expected.device)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0, equal_nan=True)
        for got, reference in zip(ours, theirs, strict=True):
            rtol = 1e-3 if got.dtype is HALF else 1e-6
            torch.testing.assert_close(got.grad, reference.grad, rtol=rtol, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("layout", ["channels last", "every other"])
def test_gradients_of_other_layouts_are_clipped(device, layout):
    values = torch.randn(2, 3, 4, 5).to(device)
    grad = values.to(memory_format=torch.channels_last) if layout == "channels last" else values.flatten()[::2]
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    exact = grad.double().norm().item()
    assert clip_grad_norm_([param], 1.0).item() == pytest.approx(exact, rel=1e-6)
    assert grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def _replace(param):
    param.grad = param.grad * 0.5


def _swap_the_storage(param):
    param.grad.data = param.grad.data * 0.5


def test_every_clip_measures_the_gradients_as_they_are(device):
    params = parameters("float32", device)
    for write in (lambda param: param.grad.mul_(0.5), _replace, _swap_the_storage):
        write(params[1])
        exact = torch.cat([param.grad.double() for param in params]).norm().item()
        assert clip_grad_norm_(params, math.inf).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_run_with_kernels_agrees_with_torch(device, fused):
    results = []
    for scaler_class, clip in ((torch.amp.GradScaler, torch.nn.utils), (GradScaler, gradilocks)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = scaler_class(device, init_scale=2.0**10, growth_interval=2)
        for number in range(6):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 6, device=device)).square().mean()).backward()
            if number == 3:
                model[0].weight.grad[0, 0] = math.inf
            else:
                scaler.unscale_(optimizer)
                clip.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append(([p.detach().cpu() for p in model.parameters()], scaler.state_dict()))
    (expected, expected_state), (weights, state) = results
    assert state == expected_state
    for got, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_fused_iteration_does_not_synchronize():
    params = parameters("mixed", "cuda")[:2]
    params[0].data, params[0].grad = params[0].data.float(), params[0].grad.float()
    scaler, optimizer = GradScaler("cuda"), torch.optim.AdamW(params, fused=True)

    def iteration():
        scaler.scale(torch.ones((), device="cuda"))
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, 1.0)
        clip_grad_value_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    iteration()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not scaler.outcome.skipped


@pytest.mark.gpu
def test_bfloat16_gradients_are_unscaled_on_cuda():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device="cuda"))
    scaler, optimizer = GradScaler("cuda", init_scale=8.0), torch.optim.SGD([param], lr=0.5)
    scaler.scale((param * param).sum()).backward()
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [2.0] * 3
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0] * 3


@pytest.mark.gpu
def test_two_streams_clip_at_once():
    sets = [parameters("float32", "cuda", seed=seed) for seed in (1, 2)]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    norms = []
    for _ in range(20):
        for params, stream in zip(sets, streams, strict=True):
            with torch.cuda.stream(stream):
                norms.append(clip_grad_norm_(params, math.inf))
    torch.cuda.synchronize()
    for index, params in enumerate(sets):
        exact = torch.cat([p.grad.double() for p in params]).norm().item()
        assert [norm.item() for norm in norms[index::2]] == pytest.approx([exact] * 20, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_one_optimizer_may_have_parameters_on_cpu_and_cuda(fused):
    params = [nn.Parameter(torch.full((3,), 2.0, device=device)) for device in ("cuda", "cpu")]
    scaler, optimizer = GradScaler("cuda", init_scale=8.0), torch.optim.SGD(params, lr=0.5, fused=fused)
    for value, expected in ((math.inf, 2.0), (None, 0.0)):
        for param in params:
            param.grad = torch.full_like(param, 4.0 * scaler.get_scale())
        if value is not None:
            params[1].grad[0] = value
        scaler.scale(torch.ones((), device="cuda"))
        scaler.unscale_(optimizer)
        assert len(scaler._found_inf_per_device(optimizer)) == 1
        norm = clip_grad_norm_(params, 1e9)
        assert norm.device.type == "cuda"
        assert norm.item() == pytest.approx(math.inf if value else 4.0 * math.sqrt(6.0))
        scaler.step(optimizer)
        scaler.update()
        assert [p.tolist() for p in params] == [[expected] * 3] * 2
