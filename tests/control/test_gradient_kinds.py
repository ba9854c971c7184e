"""Gradients of every kind: sparse, complex, float64, bfloat16, strided, empty, missing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import gradilocks
from control.given_gradients import NAN, OPTIMIZERS, assert_same, contents, loss_giving, parameter, take_step
from gradilocks import AdaptiveClip, ClipByNorm, ClipByValue, GradientControl


def sgd(*params, lr=1.0, **options):
    return torch.optim.SGD(list(params), lr=lr, **options)


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_without_a_gradient_is_left_alone(fused, device):
    p, q = parameter(1.0, device=device), parameter(2.0, device=device)
    control = GradientControl(sgd(p, q, fused=fused), clip=10.0)
    outcome = take_step(control, (p, 3.0))
    assert (p.item(), q.item(), outcome.norm) == (-2.0, 2.0, 3.0)


@pytest.mark.parametrize("make", [sgd, gradilocks.optim.SGD])
def test_gradients_that_come_and_go_are_stepped_when_they_are_there(make, device):
    p, q, r = (parameter(0.0, device=device) for _ in range(3))
    control = GradientControl(make([p, q, r], lr=1.0) if make is not sgd else sgd(p, q, r), scale=2.0)
    for present in ([p, q, r], [q], [p, r], [r]):
        outcome = take_step(control, *((param, 1.0) for param in present))
        assert outcome.norm == pytest.approx(math.sqrt(len(present)))
    assert [param.item() for param in (p, q, r)] == [-2.0, -2.0, -3.0]


@pytest.mark.parametrize("fused", [False, True])
def test_empty_and_zero_dimensional_parameters_are_stepped_like_others(fused, device):
    empty, scalar = nn.Parameter(torch.zeros(0, 3, device=device)), nn.Parameter(torch.tensor(2.0, device=device))
    p = parameter(1.0, device=device)
    control = GradientControl(sgd(empty, scalar, p, fused=fused), clip=1.0)
    outcome = take_step(control, (empty, 0.0), (scalar, 3.0), (p, 4.0))
    assert outcome.norm == pytest.approx(5.0)
    assert (scalar.item(), p.item()) == pytest.approx((1.4, 0.2))


@pytest.mark.parametrize("clip", [None, 1.0, ClipByValue(1.0), ClipByNorm(1.0, order=math.inf), AdaptiveClip()])
def test_empty_gradients_have_norm_zero(clip, device):
    empty = nn.Parameter(torch.zeros(0, device=device))
    outcome = take_step(GradientControl(sgd(empty), clip=clip), (empty, 0.0))
    assert (outcome.skipped, outcome.norm, outcome.clipped) == (False, 0.0, False)


@pytest.mark.parametrize("clip", [None, 0.5, ClipByValue(0.5), ClipByNorm(0.5, order=1.0)])
@pytest.mark.parametrize("make", [torch.optim.SGD, gradilocks.optim.SGD])
def test_strided_gradients_step_as_contiguous_ones(make, clip, device):
    torch.manual_seed(0)
    values, gradient = torch.randn(5, 7), torch.randn(5, 7)
    results = []
    for layout in ("contiguous", "transposed", "with gaps"):
        p = nn.Parameter(values.clone().to(device))
        control = GradientControl(make([p], lr=1.0), clip=clip)
        for _ in range(2):
            control.zero_grad()
            control.backward(loss_giving((p, 0.0)))
            scaled = (gradient * 65536.0).to(device)
            if layout == "transposed":
                scaled = scaled.t().contiguous().t()
            elif layout == "with gaps":
                storage = torch.full((5, 14), 7.0, device=device)
                storage[:, ::2] = scaled
                scaled = storage[:, ::2]
            p.grad = scaled
            control.step()
            if layout == "with gaps":
                assert storage[:, 1::2].eq(7.0).all()
        results.append(p.detach().cpu())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused", "own AdamW"])
def test_a_channels_last_model_trains_as_one_with_the_usual_layout(name):
    torch.manual_seed(0)
    make = OPTIMIZERS.get(name, lambda ps: gradilocks.optim.AdamW(ps, lr=0.01))
    usual = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    last = copy.deepcopy(usual).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    for model in (usual, last):
        control = GradientControl(make(model.parameters()), clip=0.5)
        for _ in range(4):
            control.zero_grad()
            control.backward(model(x).pow(2).mean())
            assert control.step().norm > 0
    for p, q in zip(usual.parameters(), last.parameters(), strict=True):
        # The convolutions themselves add in another order.
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
@pytest.mark.parametrize("clip", [None, 0.5, ClipByNorm(0.5, order=1.0)])
def test_sparse_gradients_train_as_torchs(kind, clip):
    def make():
        torch.manual_seed(2)
        table = nn.Embedding(9, 4, sparse=True)
        return table, getattr(torch.optim, kind)(table.parameters(), lr=0.1)

    (mine, optimizer), (theirs, plain) = make(), make()
    control = GradientControl(optimizer, model=mine, clip=clip)
    order = getattr(clip, "order", 2.0)
    for step in range(6):
        rows = torch.tensor([0, 3, 3, 5, step])
        control.zero_grad()
        plain.zero_grad()
        control.backward((mine(rows) ** 2).sum())
        (theirs(rows) ** 2).sum().backward()
        norm = torch.linalg.vector_norm(theirs.weight.grad.to_dense(), order).item()
        assert control.step().norm == pytest.approx(norm, rel=1e-6)
        if clip is not None:
            theirs.weight.grad = theirs.weight.grad.coalesce() * min(1.0, 0.5 / (norm + 1e-6))
        plain.step()
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-5, atol=1e-6)


def test_sparse_values_are_clipped_after_duplicates_are_added(device):
    table = nn.Embedding(4, 1, sparse=True).to(device)
    with torch.no_grad():
        table.weight.zero_()
    control = GradientControl(sgd(table.weight), clip=ClipByValue(1.5))
    control.backward(table(torch.tensor([0, 1, 1, 1], device=device)).sum())
    assert control.step().clipped
    assert table.weight.view(-1).tolist() == [-1.0, -1.5, 0.0, 0.0]


def test_a_nan_in_a_sparse_gradient_skips_and_is_named(device):
    table = nn.Embedding(4, 2, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=nn.ModuleDict({"words": table}))
    control.backward(table(torch.tensor([0, 1], device=device)).sum())
    table.weight.grad._values()[0, 0] = NAN
    before = contents(optimizer)
    outcome = control.step()
    assert outcome.skipped
    assert {name: tuple(count) for name, count in outcome.counts.items()} == {"words.weight": (1, 0)}
    assert_same(contents(optimizer), before)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_compressed_sparse_gradient_raises():
    compressed = torch.eye(3).to_sparse_csr()
    p, q = parameter(0.0), nn.Parameter(compressed)
    control = GradientControl(sgd(p, q))
    control.backward(loss_giving((p, 1.0)))
    q.grad = compressed.clone()
    with pytest.raises(TypeError, match=r"layout torch\.sparse_csr are not supported"):
        control.step()
    assert p.item() == 0.0


@pytest.mark.parametrize("name", ["Adam", "Adam fused", "SGD momentum", "SGD nesterov fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_train_as_with_torchs_scaler(name, dtype, device):
    torch.manual_seed(0)
    # torch's fused SGD on a CPU leaves full vectors of bfloat16 unchanged (pytorch issue 191763).
    model = nn.Linear(4, 3).to(device, dtype)
    theirs = copy.deepcopy(model)
    optimizer, plain = (OPTIMIZERS[name](m.parameters()) for m in (model, theirs))
    control, scaler = GradientControl(optimizer), torch.amp.GradScaler(device)
    x = torch.randn(6, 4).to(device, dtype)
    for _ in range(6):
        control.zero_grad()
        plain.zero_grad()
        control.backward(model(x).pow(2).mean())
        control.step()
        scaler.scale(theirs(x).pow(2).mean()).backward()
        if dtype is torch.bfloat16 and device == "cuda" and "fused" not in name:
            for p in theirs.parameters():  # torch cannot unscale bfloat16 on CUDA.
                p.grad.div_(65536.0)
            plain.step()
        else:
            scaler.step(plain)
            scaler.update()
    assert_same(contents(optimizer), contents(plain))


def test_float64_norms_are_not_rounded_to_float32(device):
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64, device=device))
    control = GradientControl(sgd(p), scale=4.0)
    outcome = take_step(control, (p, torch.tensor([1.0 + 1e-12, 0.0], dtype=torch.float64)))
    assert outcome.norm == 1.0 + 1e-12


def test_gradients_of_several_dtypes_share_one_norm(device):
    params = [
        nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
    ]
    control = GradientControl(torch.optim.SGD(params, lr=1.0), scale=2.0, clip=4.0)
    outcome = take_step(control, *((p, 4.0) for p in params))
    assert outcome.norm == pytest.approx(8.0)
    for p in params:
        # Triton's interpreter truncates to bfloat16; the compiled kernels round.
        assert p.item() == pytest.approx(-2.0, rel=1e-2 if p.dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("size", [0.3, 3.0, 300.0])
def test_clipped_bfloat16_gradients_are_rounded_once(size, device):
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16, device=device))
    control = GradientControl(sgd(p), clip=0.7)
    control.backward((p.float() * size).sum())
    made = p.grad.double() / 65536.0
    norm = made.norm().item()
    assert control.step().norm == pytest.approx(norm, rel=1e-6)
    assert torch.equal(-p.detach(), (made * (0.7 / (norm + 1e-6))).to(torch.bfloat16))


def test_fused_float16_gradients_are_unscaled_in_float32():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64).half())
    q = nn.Parameter(p.detach().clone())
    optimizer, plain = OPTIMIZERS["AdamW fused"]([p]), OPTIMIZERS["AdamW fused"]([q])
    control, scaler = GradientControl(optimizer), torch.amp.GradScaler("cpu")
    for _ in range(5):
        g = torch.randn(64) * 1e-6  # Zero in float16 once unscaled.
        control.zero_grad()
        plain.zero_grad()
        control.backward((p.float() * g).sum())
        control.step()
        scaler.scale((q.float() * g).sum()).backward()
        scaler.step(plain)
        scaler.update()
    assert_same(contents(optimizer), contents(plain))


def test_the_first_step_of_fused_sgd_unscales_in_float32():
    p = parameter(0.0, 0.0, dtype=torch.float16)
    control = GradientControl(sgd(p, lr=1e5, momentum=0.9, fused=True), scale=65536.0)
    control.backward((p.float() * 1e-8).sum())
    control.step()
    assert p.tolist() == pytest.approx([-1e-3] * 2, rel=1e-2)


@pytest.mark.parametrize("clip", [None, 0.5, AdaptiveClip(0.05)])
def test_complex_gradients_train_as_their_real_and_imaginary_parts(clip):
    torch.manual_seed(0)
    values, gradient = torch.randn(3, 2, dtype=torch.complex64), torch.randn(3, 2, dtype=torch.complex64)
    p = nn.Parameter(values.clone())
    q = nn.Parameter(torch.view_as_real(values).clone())
    for param, given in ((p, gradient), (q, torch.view_as_real(gradient))):
        control = GradientControl(sgd(param, lr=0.1), clip=clip, scale=8.0)
        for _ in range(3):
            control.zero_grad()
            control.backward(loss_giving((q, 0.0)) if param is q else (param.real * 0.0).sum())
            param.grad = given.clone() * 8.0
            control.step()
    torch.testing.assert_close(torch.view_as_real(p.detach()), q.detach())


def test_a_complex_vector_is_one_row_of_adaptive_clip():
    p = nn.Parameter(torch.tensor([3.0 + 4.0j, 0.0 + 12.0j]))
    control = GradientControl(sgd(p, lr=1.0), clip=AdaptiveClip(0.1), scale=2.0)
    control.backward((p.real * 0.0).sum())
    p.grad = torch.tensor([13.0 + 0.0j, 0.0 + 0.0j]) * 2.0  # The weights have norm 13, so the bound is 1.3.
    assert control.step().clipped
    torch.testing.assert_close(p.detach(), torch.tensor([1.7 + 4.0j, 0.0 + 12.0j]))


def test_a_conjugated_gradient_is_unscaled_in_its_own_memory():
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    control = GradientControl(sgd(p), scale=2.0)
    control.backward((p.real * 0.0).sum())
    p.grad = (torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]) * 2.0).conj()
    assert control.step().norm == pytest.approx(math.sqrt(15.0))
    torch.testing.assert_close(p.detach(), torch.tensor([-1.0 + 2.0j, -3.0 - 1.0j]))


@pytest.mark.parametrize(("order", "size"), [(2.0, 1e20), (2.0, 1e30), (2.0, 1.5e38), (3.0, 1e30), (8.0, 1e30)])
def test_norms_beyond_float32_do_not_overflow(order, size, device):
    p, q = nn.Parameter(torch.zeros(3, device=device)), nn.Parameter(torch.zeros(2, device=device))
    control = GradientControl(sgd(p, q), scale=None, clip=ClipByNorm(1.0, order=order))
    outcome = take_step(control, (p, size), (q, 2.0 * size))
    norm = torch.linalg.vector_norm(torch.tensor([1.0] * 3 + [2.0] * 2, dtype=torch.float64), order).item()
    assert not outcome.skipped
    assert outcome.norm == pytest.approx(norm * size, rel=1e-6)
    torch.testing.assert_close(p.detach().cpu(), torch.full((3,), -1.0 / norm))


def test_an_expanded_gradient_is_not_multiplied_three_times(device):
    p = nn.Parameter(torch.zeros(3, device=device))
    control = GradientControl(sgd(p), scale=2.0)
    control.backward(loss_giving((p, 0.0)))
    p.grad = torch.tensor([2.0], device=device).expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        control.step()
    assert p.tolist() == [0.0, 0.0, 0.0]
