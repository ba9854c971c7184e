"""`clip_grad_norm_` where the kernels serve: few launches, and what the reference does.

Interpreted on the CPU; compiled on CUDA with `-m gpu`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradilocks import clip_grad_norm_, kernels

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks.kernels import (
    chunks,
    host_numbers,
    triton_backend,
    triton_measure,
    triton_settle,
)
from gradilocks.step.table import gradients_of
from tests.launches import counted_launches, kernels_of

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

COMPILED = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(COMPILED, reason="with a GPU the kernels are compiled, not read"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
HALF = torch.float16
MIXES = {
    "float32": [(5, torch.float32), (700, torch.float32), (0, torch.float32)],
    "mixed": [(5, HALF), (700, torch.float32), (9, torch.float64), (33, HALF)],
    "one": [(1, torch.float64)],
}
PLANTED = [None, math.nan, math.inf, -math.inf, 0.0, 1e-30]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, request.param, triton_backend)
    if request.param == "cpu":
        monkeypatch.setattr(chunks, "CHUNK", 256)
        monkeypatch.setattr(triton_measure, "TILE", 128)
        monkeypatch.setattr(triton_backend, "CHANGE_CHUNK", 64)
        monkeypatch.setattr(triton_measure, "CHANGE_TILE", 32)
    triton_settle._spares.clear()
    yield request.param
    chunks._chunkings.clear()
    triton_settle._spares.clear()


def parameters(mix, device, planted=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for place, (size, dtype) in enumerate(MIXES[mix]):
        values = torch.randn(size, generator=generator)
        if planted is not None and place == len(MIXES[mix]) // 2:
            values[:] = planted if planted in (0.0, 1e-30) else values
            values[size // 2] = planted
        param = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        param.grad = values.to(device, dtype)
        made.append(param)
    return made


def reference_clip(monkeypatch, params, *args):
    with monkeypatch.context() as patch:
        kind = params[0].device.type
        patch.setitem(kernels.BACKENDS, kind, kernels.reference)
        return clip_grad_norm_(params, *args)


@pytest.mark.parametrize("planted", PLANTED, ids=str)
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("mix", MIXES)
def test_the_kernels_agree_with_the_reference(device, monkeypatch, mix, order, planted):
    for bound in (0.5, 1e9, 0.0, math.inf):
        mine, theirs = (parameters(mix, device, planted) for _ in range(2))
        norm = clip_grad_norm_(mine, bound, order)
        expected = reference_clip(monkeypatch, theirs, bound, order)
        assert norm.dtype is expected.dtype
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0, equal_nan=True)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(
                one.grad, other.grad, rtol=1e-3 if one.dtype is HALF else 1e-6, atol=0.0,
                equal_nan=True,
            )  # fmt: skip


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside other ranks"])
def test_three_launches_clip_whatever_the_number_of_tensors(device, monkeypatch, company):
    """Also of data-parallel ranks, each of which clips plain tensors by itself."""
    monkeypatch.setattr("gradilocks.dropin.clip_functions.has_other_ranks", lambda: company)
    launched = counted_launches(monkeypatch)
    params = parameters("float32", device) + parameters("float32", device, seed=1)
    clip_grad_norm_(params, 1.0)
    assert kernels_of(launched) == ["measure_kernel", "settle_kernel", "change_kernel"]


def test_calls_in_a_row_do_not_disturb_each_other(device):
    first, second = parameters("float32", device), parameters("mixed", device, seed=3)
    norms = [clip_grad_norm_(params, bound) for params, bound in ((first, 1.0), (second, 2.0))]
    again = [clip_grad_norm_(params, math.inf) for params in (first, second)]
    assert norms[0].item() > 1.0
    assert norms[1].item() > 2.0
    assert [norm.item() for norm in again] == pytest.approx([1.0, 2.0], rel=1e-5)


def test_a_clip_of_another_thread_in_between_changes_nothing(device):
    """Threads share the default stream, and one may run between the two halves of another's."""
    mine, theirs = (parameters("float32", device, seed=seed) for seed in (1, 2))
    first = gradients_of(mine, name=str)
    second = gradients_of(theirs, name=str)
    norm, coefficient = triton_backend.limit(first.addressed, 1.0, 2.0)
    other_norm, other = triton_backend.limit(second.addressed, 1e-3, 2.0)
    triton_backend.multiply_(first.addressed, coefficient)
    triton_backend.multiply_(second.addressed, other)
    for params, bound in ((mine, 1.0), (theirs, 1e-3)):
        length = torch.cat([p.grad.double() for p in params]).norm().item()
        assert length == pytest.approx(bound, rel=1e-5)
    assert norm.item() > 1.0
    assert other_norm.item() > 1e-3


def test_gradients_in_channels_last_are_reached_by_their_addresses_too(device, monkeypatch):
    param = nn.Parameter(torch.zeros(2, 3, 4, 5, device=device))
    param.grad = torch.randn(2, 3, 4, 5).to(device).to(memory_format=torch.channels_last)
    exact = param.grad.double().norm().item()
    monkeypatch.setattr(triton_backend, "measure", None)  # Tensor by tensor it would be needed.
    assert clip_grad_norm_([param], 1.0).item() == pytest.approx(exact, rel=1e-6)
    assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_another_order_is_measured_tensor_by_tensor(device, monkeypatch):
    mine, theirs = (parameters("float32", device) for _ in range(2))
    norm = clip_grad_norm_(mine, 0.5, 3.0)
    assert norm.item() == pytest.approx(reference_clip(monkeypatch, theirs, 0.5, 3.0).item())


def test_a_strided_gradient_is_measured_tensor_by_tensor(device, monkeypatch):
    def strided():
        param = nn.Parameter(torch.zeros(40, device=device))
        param.grad = torch.arange(80.0, device=device)[::2]
        return [param]

    mine, theirs = strided(), strided()
    norm = clip_grad_norm_(mine, 1.0)
    assert norm.item() == pytest.approx(reference_clip(monkeypatch, theirs, 1.0).item())
    torch.testing.assert_close(mine[0].grad, theirs[0].grad)


def test_many_bounds_are_not_kept_for_ever(device):
    params = parameters("one", device)
    for place in range(host_numbers._MOST_KEPT + 3):
        clip_grad_norm_(params, 1000.0 + place)
    assert len(triton_settle._spares) == 1
    assert 0 < len(host_numbers._kept) <= host_numbers._MOST_KEPT


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits():
    params = parameters("mixed", "cuda")
    clip_grad_norm_(params, 1.0)
    for param in params:
        param.grad = param.grad.clone()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        clip_grad_norm_(params, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_what_is_sent_does_not_wait_for_the_queue_and_arrives_whole():
    torch.cuda.synchronize()
    sent = []
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # A second or so.
    busy.record()
    for size in (1, 64, 2000, host_numbers.STAGED // 8, 100_000):
        numbers = torch.arange(size, dtype=torch.int64)
        sent.append(host_numbers.send(numbers, torch.device("cuda", 0)))
        numbers.zero_()  # Taken over, or pinned: the sender may forget them.
    assert not busy.query()
    for tensor in sent:
        assert torch.equal(tensor.cpu(), torch.arange(tensor.numel()))


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
    for place, params in enumerate(sets):
        exact = torch.cat([p.grad.double() for p in params]).norm().item()
        assert [n.item() for n in norms[place::2]] == pytest.approx([exact] * 20, rel=1e-6)


def test_a_rank_whose_distributed_parameters_have_no_gradient_takes_part(device, monkeypatch):
    """The plain gradients that it has could be measured alone, and others would wait for it."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    met, plain = [], parameters("float32", device)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        shards = nn.Parameter(distribute_tensor(torch.ones(6, device=device), mesh, [Shard(0)]))
        expected = clip_grad_norm_(plain, math.inf)
        gather = dist.all_gather
        monkeypatch.setattr(dist, "all_gather", lambda *a, **k: met.append(a) or gather(*a, **k))
        # As if other ranks trained along.
        monkeypatch.setattr("gradilocks.dropin.clip_functions.has_other_ranks", lambda: True)
        found = clip_grad_norm_([*plain, shards], math.inf)
    finally:
        dist.destroy_process_group()
    assert len(met) == 1
    assert torch.equal(found, expected)
