"""The Triton kernels agree with the reference: interpreted on the CPU, compiled with `-m gpu`."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks.kernels import BACKENDS, chunks, describe, reference, triton_backend, triton_measure

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
ORDERS = [2.0, 1.0, INF, 3.0]  # 3 is not in the kernels and goes to the reference.
KINDS = ["plain", "inf", "-inf", "nan", "zero", "subnormal", "huge"]
COMPILED = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(COMPILED, reason="with a GPU the kernels are compiled, not read"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def values(kind, size, dtype):
    made = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    limits = torch.finfo(dtype)
    if kind == "zero":
        made.zero_()
    elif kind == "subnormal":
        made *= limits.tiny * 0.01
    elif kind == "huge":
        made.fill_(limits.max / 2)
    elif kind != "plain":
        made[size // 2] = float(kind)
    return made.to(dtype)


def gradients(dtype, *, chunk):
    """Odd sizes around the chunk, every kind of value, and every layout."""
    sizes = [1, chunk - 1, chunk, 2 * chunk + 5]
    made = [values(kind, size, dtype) for size in sizes for kind in KINDS]
    plain = values("plain", 4096, dtype)
    made += [plain[:0], plain[0], plain.view(64, 64).t(), plain.view(64, 64)[:, ::2], plain[1:]]
    made.append(plain.view(4, 16, 8, 8).contiguous(memory_format=torch.channels_last))
    return made


def on(device, tensors):
    """Copies that keep strides, and for the last but one an odd address."""
    copies = []
    for tensor in tensors:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if tensor.dim() == 1 and tensor.numel() == 4095:
            copy = room[1 : 1 + tensor.numel()]
        copies.append(copy.copy_(tensor))
    return copies


def known_to_the_interpreter(dtype, device):
    """Triton's interpreter rounds to bfloat16 by cutting off, and has no subnormal ones."""
    if device == "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding; `-m gpu` tests it")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, request):
    """So that the interpreter, which is slow, sees tensors of several chunks."""
    if "cpu" in request.node.name:
        monkeypatch.setattr(chunks, "CHUNK", 512)
        monkeypatch.setattr(triton_measure, "TILE", 128)
        monkeypatch.setattr(triton_backend, "CHANGE_CHUNK", 256)
        monkeypatch.setattr(triton_measure, "CHANGE_TILE", 128)
    yield
    chunks._chunkings.clear()


@on_each_device
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measuring_agrees_with_the_reference(dtype, order, device):
    known_to_the_interpreter(dtype, device)
    tensors = gradients(dtype, chunk=chunks.CHUNK)
    found = triton_backend.measure(on(device, tensors), order=order, detail=True)
    wanted = reference.measure(tensors, order=order, detail=True)
    assert found.nan.tolist() == wanted.nan.tolist()
    assert found.inf.tolist() == wanted.inf.tolist()
    assert found.zeros.tolist() == wanted.zeros.tolist()
    torch.testing.assert_close(found.norms.cpu(), wanted.norms, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(found.largest.cpu(), wanted.largest, rtol=0, atol=0, equal_nan=True)


@on_each_device
@pytest.mark.parametrize("factor", [0.37, 1.0, 2.0**-16, 3.0, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiplying_writes_the_reference_s_bits(dtype, factor, device):
    known_to_the_interpreter(dtype, device)
    tensors = gradients(dtype, chunk=chunks.CHUNK)
    number = torch.full((), factor)
    ours, checked = on(device, tensors), on(device, tensors)
    triton_backend.multiply_(ours, number.to(device))
    flag, count = triton_backend.multiply_and_check_(checked, number.to(device))
    found = count()
    theirs = [tensor.clone() for tensor in tensors]
    reference.multiply_(theirs, number)
    for mine, also, wanted in zip(ours, checked, theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(also.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
    wanted = reference.measure(theirs)
    assert found.nan.tolist() == wanted.nan.tolist()
    assert found.inf.tolist() == wanted.inf.tolist()
    assert flag.item() == float(bool((wanted.nan + wanted.inf).sum()))


@on_each_device
@pytest.mark.parametrize("bound", [0.25, 0.0, INF])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamping_writes_the_reference_s_bits(dtype, bound, device):
    known_to_the_interpreter(dtype, device)
    tensors = gradients(dtype, chunk=chunks.CHUNK)
    ours, theirs = on(device, tensors), [tensor.clone() for tensor in tensors]
    triton_backend.clamp_(ours, torch.full((), bound, device=device))
    reference.clamp_(theirs, torch.full((), bound))
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@on_each_device
def test_dtypes_may_be_mixed_in_one_call(device):
    tensors = [values("plain", 700 + k, dtype) for k, dtype in enumerate(DTYPES[:2] * 3)]
    tensors[3][5] = NAN
    found = triton_backend.measure(on(device, tensors))
    wanted = reference.measure(tensors)
    torch.testing.assert_close(found.norms.cpu(), wanted.norms, rtol=1e-6, atol=0, equal_nan=True)
    assert found.nan.tolist() == [0, 0, 0, 1, 0, 0]


@on_each_device
def test_the_same_gradients_give_the_same_bits(device):
    tensors = on(device, [values("plain", size, torch.float32) for size in (5, 3000, 70_001)])
    first, second = (
        triton_backend.measure(tensors),
        triton_backend.measure([t.clone() for t in tensors]),
    )
    assert torch.equal(first.norms, second.norms)


@on_each_device
def test_pointers_are_sent_again_only_when_they_change(device):
    tensors = on(device, [values("plain", 900, torch.float32)])
    triton_backend.measure(tensors)
    (made,) = chunks._chunkings.values()
    _, sent = made._sent
    triton_backend.measure(tensors)
    assert made._sent[1] is sent
    other = [tensor.clone() for tensor in tensors]
    assert triton_backend.measure(other).norms.equal(triton_backend.measure(tensors).norms)
    assert made._sent[1] is not sent


@pytest.mark.gpu
def test_a_gpu_is_served_by_the_kernels_and_says_so():
    assert BACKENDS["cuda"] is triton_backend
    assert describe()["cuda"].startswith("fused")


@pytest.mark.gpu
def test_a_billion_elements_are_within_one_millionth_of_float64():
    tensor = torch.randn(1_000_000_000, device="cuda")
    exact = sum(part.double().square().sum() for part in tensor.split(1 << 26)).sqrt()
    assert triton_backend.measure([tensor]).norms[0].item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_are_measured():
    tensor = torch.ones(2**31 + 1000, dtype=torch.bfloat16, device="cuda")
    tensor[-1] = NAN
    tensor[-2] = 0.0
    found = triton_backend.measure([tensor])
    assert (found.nan.item(), found.zeros.item()) == (1, 1)
    tensor[-1] = 0.0
    exact = math.sqrt(2**31 + 998)
    assert triton_backend.measure([tensor]).norms.item() == pytest.approx(exact, rel=1e-9)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_are_multiplied_and_bounded():
    tensor = torch.ones(2**31 + 1000, dtype=torch.float16, device="cuda")
    tensor[-1] = 8.0
    triton_backend.multiply_([tensor], torch.full((), 0.5, device="cuda"))
    assert (tensor[:-1] == 0.5).all()
    assert tensor[-1].item() == 4.0
    triton_backend.clamp_([tensor], torch.full((), 0.25, device="cuda"))
    assert (tensor == 0.25).all()


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_are_stepped():
    from gradilocks import optim

    param = torch.nn.Parameter(torch.ones(2**31 + 1000, dtype=torch.float16, device="cuda"))
    for make in (optim.SGD, optim.AdamW):
        with torch.no_grad():
            param.fill_(1.0)
        param.grad = torch.ones_like(param)
        make([param], lr=0.25, weight_decay=0.0).step()
        ends = param.detach()[[0, 1, 2**30, 2**31 - 1, 2**31, -1]]
        assert (ends == 0.75).all(), make
        assert (param == 0.75).all(), make


@pytest.mark.parametrize("size", [3, 2 * (1 << 15) + 1, 1 << 20])
def test_there_are_no_more_chunks_than_the_scratch_has_room_for(size):
    layout = chunks.Chunking(
        [size] * 18_000, ["one"] * 18_000, 1 << 15, 36_000, torch.device("cpu")
    )
    assert 18_000 <= layout.chunks <= 36_000
    assert layout.chunk * int(layout.counts[0]) >= size
