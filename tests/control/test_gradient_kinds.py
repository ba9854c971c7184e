"""Every kind of gradient: which are stepped, how they are counted, which are refused by name."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from gradilocks import ClipByNorm, ClipByValue, DynamicScale, GradientControl, StaticScale
from gradilocks.errors import NoGradients, SharedParameter
from tests.control.gradient_scripts import (
    INF,
    NAN,
    OPTIMIZERS,
    assert_same,
    contents,
    control_step,
    gradients,
    loss_making,
    parameter,
    same_bits,
)


def sgd(*params, lr=1.0, **kwargs):
    return torch.optim.SGD(list(params), lr=lr, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_without_a_gradient_is_left_alone(fused):
    p, q = parameter(1.0), parameter(2.0)
    control = GradientControl(sgd(p, q, fused=fused), clip=10.0)
    outcome = control_step(control, (p, 3.0))
    assert (p.item(), q.item(), outcome.norm) == (-2.0, 2.0, 3.0)


@pytest.mark.parametrize("fused", [False, True])
def test_empty_and_zero_dimensional_parameters_are_stepped_like_others(fused):
    empty, scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(2.0))
    p = parameter(1.0)
    control = GradientControl(sgd(empty, scalar, p, fused=fused), clip=ClipByNorm(1.0))
    outcome = control_step(control, (empty, torch.zeros(0, 3)), (scalar, 3.0), (p, 4.0))
    assert outcome.norm == pytest.approx(5.0)
    assert scalar.item() == pytest.approx(1.4)
    assert p.item() == pytest.approx(0.2)


@pytest.mark.parametrize("clip", [None, 1.0, ClipByValue(1.0), ClipByNorm(1.0, order=math.inf)])
def test_nothing_but_empty_gradients_is_a_step_of_norm_zero(clip):
    empty = nn.Parameter(torch.zeros(0))
    control = GradientControl(sgd(empty), clip=clip)
    outcome = control_step(control, (empty, torch.zeros(0)))
    assert (outcome.skipped, outcome.norm, outcome.clipped) == (False, 0.0, False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0, ClipByValue(0.5)])
def test_transposed_parameters_train_as_contiguous_ones(fused, clip):
    torch.manual_seed(0)
    values, gradient = torch.randn(5, 7), torch.randn(5, 7)
    plain = nn.Parameter(values.clone())
    turned = nn.Parameter(values.t().contiguous().t())
    assert not turned.is_contiguous()
    for p in (plain, turned):
        control = GradientControl(sgd(p, fused=fused), clip=clip)
        for _ in range(3):
            control.zero_grad()
            laid_out = gradient if p is plain else gradient.t().contiguous().t()
            control.backward(loss_making((p, laid_out)))
            control.step()
    torch.testing.assert_close(turned, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused", "Adam"])
def test_a_channels_last_model_trains_as_one_with_the_usual_layout(name):
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    last = copy.deepcopy(usual).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    for model in (usual, last):
        control = GradientControl(OPTIMIZERS[name](model.parameters()), clip=0.5)
        for _ in range(5):
            control.zero_grad()
            control.backward(model(x).pow(2).mean())
            assert control.step().norm > 0
    for p, q in zip(usual.parameters(), last.parameters(), strict=True):
        # The convolutions themselves add in another order.
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_strided_gradient_is_measured_and_multiplied_in_its_own_elements_only():
    p = nn.Parameter(torch.zeros(3, 4))
    control = GradientControl(sgd(p), clip=1.0)
    control.backward(loss_making((p, 0.0)))
    storage = torch.full((3, 8), 7.0)
    p.grad = storage[:, ::2]
    norm = 7.0 * math.sqrt(12)
    outcome = control.step()
    assert outcome.norm == pytest.approx(norm / 65536.0, rel=1e-6)
    assert storage[:, 1::2].eq(7.0).all()
    torch.testing.assert_close(-p.detach(), torch.full((3, 4), 7.0 / 65536.0))


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
@pytest.mark.parametrize("clip", [None, 0.5, ClipByNorm(0.5, order=1.0)])
def test_sparse_gradients_train_as_torchs_on_unscaled_ones(kind, clip):
    def make():
        torch.manual_seed(2)
        table = nn.Embedding(9, 4, sparse=True)
        return table, getattr(torch.optim, kind)(table.parameters(), lr=0.1)

    (mine, optimizer), (theirs, plain) = make(), make()
    control = GradientControl(optimizer, model=mine, clip=clip)
    for step in range(8):
        rows = torch.tensor([0, 3, 3, 5, step])
        control.zero_grad()
        plain.zero_grad()
        control.backward((mine(rows) ** 2).sum())
        (theirs(rows) ** 2).sum().backward()
        assert not theirs.weight.grad.is_coalesced()
        dense = theirs.weight.grad.to_dense()
        order = 2.0 if clip != ClipByNorm(0.5, order=1.0) else 1.0
        norm = torch.linalg.vector_norm(dense, order).item()
        outcome = control.step()
        assert outcome.norm == pytest.approx(norm, rel=1e-6)
        if clip is not None:
            theirs.weight.grad = theirs.weight.grad.coalesce() * min(1.0, 0.5 / (norm + 1e-6))
        plain.step()
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-5, atol=1e-6)


def test_a_coalesced_sparse_gradient_keeps_its_identity():
    table = nn.Embedding(5, 2, sparse=True)
    control = GradientControl(sgd(table.weight))
    control.backward(table(torch.tensor([1, 2])).sum())
    table.weight.grad = table.weight.grad.coalesce()
    before, given = table.weight.detach().clone(), table.weight.grad
    control.step()
    assert table.weight.grad is given
    torch.testing.assert_close(before[1:3] - 1.0, table.weight.detach()[1:3])
    assert torch.equal(before[0], table.weight.detach()[0])


def test_a_sparse_gradient_without_entries_has_norm_zero():
    table = nn.Embedding(5, 2, sparse=True)
    control = GradientControl(sgd(table.weight), clip=1.0)
    control.backward(table(torch.zeros(0, dtype=torch.long)).sum())
    outcome = control.step()
    assert (outcome.skipped, outcome.norm) == (False, 0.0)


def test_sparse_values_are_clipped_by_value_after_duplicates_are_added():
    table = nn.Embedding(4, 1, sparse=True)
    with torch.no_grad():
        table.weight.zero_()
    control = GradientControl(sgd(table.weight), clip=ClipByValue(1.5))
    control.backward(table(torch.tensor([0, 1, 1, 1])).sum())
    assert control.step().clipped
    assert table.weight.view(-1).tolist() == [-1.0, -1.5, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_a_nan_in_a_sparse_gradient_skips_and_is_named(kind):
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = getattr(torch.optim, kind)(table.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=nn.ModuleDict({"words": table}))
    control.backward(table(torch.tensor([0, 1])).sum())
    table.weight.grad._values()[0, 0] = NAN
    before = contents(optimizer)
    outcome = control.step()
    assert outcome.skipped
    assert {k: tuple(v) for k, v in outcome.counts.items()} == {"words.weight": (1, 0)}
    assert_same(contents(optimizer), before)


def test_sparse_and_dense_gradients_share_one_norm():
    table, p = nn.Embedding(4, 1, sparse=True), parameter(0.0)
    control = GradientControl(sgd(table.weight, p))
    control.backward(table(torch.tensor([2])).sum() * 3.0 + (p * 4.0).sum())
    assert control.step().norm == pytest.approx(5.0)


def test_a_compressed_sparse_gradient_is_refused_by_name_with_the_way_out():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout a beta feature.
        compressed = torch.eye(3).to_sparse_csr()
    model, p = nn.Module(), parameter(0.0)
    model.register_parameter("graph", nn.Parameter(compressed))
    control = GradientControl(sgd(model.graph, p), model=model)
    control.backward(loss_making((p, 1.0)))
    model.graph.grad = compressed.clone()
    with pytest.raises(ValueError, match=r"graph has layout torch.sparse_csr.*to_sparse\(\)"):
        control.step()
    assert p.item() == 0.0


@pytest.mark.parametrize("name", ["Adam", "Adam fused", "SGD momentum", "SGD nesterov fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_train_as_torchs_scaler(name, dtype):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    theirs = copy.deepcopy(model)
    optimizer, plain = (OPTIMIZERS[name](m.parameters()) for m in (model, theirs))
    control, scaler = GradientControl(optimizer), torch.amp.GradScaler("cpu")
    x = torch.randn(6, 4, dtype=dtype)
    for _ in range(20):
        control.zero_grad()
        plain.zero_grad()
        control.backward(model(x).pow(2).mean())
        control.step()
        scaler.scale(theirs(x).pow(2).mean()).backward()
        scaler.step(plain)
        scaler.update()
    assert_same(contents(optimizer), contents(plain))


# Fused SGD of torch up to 2.13 leaves every full vector of half-precision parameters on the CPU as
# it was (pytorch #191763), so it is tested on fewer elements than a vector holds.
FUSED_SIZES = {
    "Adam fused": 64,
    "AdamW fused": 64,
    "Adagrad fused": 64,
    "SGD fused": 3,
    "SGD momentum fused": 3,
}


@pytest.mark.parametrize("name", FUSED_SIZES)
def test_float16_parameters_train_with_a_fused_optimizer_as_under_torchs_scaler(name):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(FUSED_SIZES[name]).half())
    q = nn.Parameter(p.detach().clone())
    optimizer, plain = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([q])
    control, scaler = GradientControl(optimizer), torch.amp.GradScaler("cpu")
    for _ in range(5):
        g = torch.randn(len(p)) * 1e-6  # Below float16 once unscaled, so it must happen in float32.
        control.zero_grad()
        plain.zero_grad()
        control.backward((p.float() * g).sum())
        control.step()
        scaler.scale((q.float() * g).sum()).backward()
        scaler.step(plain)
        scaler.update()
    assert_same(contents(optimizer), contents(plain))


@pytest.mark.parametrize("size", [0.3, 3.0, 300.0])
def test_clipped_bfloat16_gradients_are_rounded_once(size):
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    control = GradientControl(sgd(p), clip=0.7)
    control.backward((p.float() * size).sum())
    made = p.grad.double() / 65536.0
    norm = made.norm().item()
    assert control.step().norm == pytest.approx(norm, rel=1e-6)
    expected = (made * (0.7 / (norm + 1e-6))).to(torch.bfloat16)
    assert torch.equal(-p.detach(), expected)


def test_the_first_momentum_step_of_float16_gradients_does_not_round_them_to_zero():
    p = parameter(0.0, 0.0, dtype=torch.float16)
    control = GradientControl(sgd(p, lr=2.0**20, momentum=0.9, fused=True))
    control.backward((p.float() * 2e-8).sum())
    control.step()
    assert p[0].item() == pytest.approx(-(2.0**20) * 2e-8, rel=1e-2)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_float16_gradients_are_refused_by_name_where_unscaling_would_lose_them(name):
    model = nn.Linear(2, 1).half()
    optimizer = OPTIMIZERS[name](model.parameters())
    control = GradientControl(optimizer, model=model)
    control.backward(model(torch.ones(1, 2).half()).float().sum())
    before, made, state = contents(optimizer), gradients(optimizer), control.state_dict()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
        control.step()
    for word in ("weight", "autocast", "fused=True", "scale=None"):
        assert word in str(caught.value)
    assert_same(contents(optimizer), before)
    assert_same(gradients(optimizer), made)
    assert control.state_dict() == state


@pytest.mark.parametrize("fused", [False, True])
def test_float16_gradients_are_not_unscaled_in_place(fused):
    p = parameter(0.0, 0.0, dtype=torch.float16)
    control = GradientControl(sgd(p, fused=fused))
    control.backward((p.float() * 2e-8).sum())
    made = p.grad.clone()
    with pytest.raises(ValueError, match="FP16") as caught:
        control.unscale_()
    assert torch.equal(p.grad, made)
    assert ("fused=True" in str(caught.value)) != fused
    assert ("leave out unscale_()" in str(caught.value)) == fused


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5, ClipByValue(0.25)])
def test_float16_gradients_without_a_scale_are_stepped(fused, clip):
    p = parameter(0.0, 0.0, dtype=torch.float16)
    control = GradientControl(sgd(p, fused=fused), scale=None, clip=clip)
    outcome = control_step(control, (p, torch.tensor([0.3, 0.4]).half()))
    expected = {None: [0.3, 0.4], 0.5: [0.3, 0.4]}.get(clip, [0.25, 0.25])
    assert not outcome.skipped
    assert (-p).tolist() == pytest.approx(expected, rel=1e-3)


def test_float16_gradients_are_clipped_by_their_true_norm():
    p = nn.Parameter(torch.zeros(70_000, dtype=torch.float16))
    control = GradientControl(sgd(p), scale=None, clip=1.0)
    outcome = control_step(control, (p, 300.0))
    norm = 300.0 * math.sqrt(70_000)
    assert outcome.norm == pytest.approx(norm, rel=1e-6)
    # One rounding to float16; the coefficient of 1.26e-5 itself must not be rounded to it.
    assert -p[0].item() == pytest.approx(300.0 / norm, rel=2.0**-11)


def test_a_coefficient_below_float16_does_not_zero_float16_gradients():
    p = nn.Parameter(torch.zeros(5, dtype=torch.float16))
    control = GradientControl(sgd(p), scale=None, clip=1e-3)
    outcome = control_step(control, (p, 60000.0))
    assert outcome.clipped
    assert -p[0].item() == pytest.approx(1e-3 / math.sqrt(5), rel=2.0**-10)


@pytest.mark.parametrize("value", [1.0, 2.0, 1e5])
@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_a_bound_beyond_float16_clips_nothing_in_float16(value, scale):
    p = parameter(0.0, 0.0, dtype=torch.float16)
    control = GradientControl(sgd(p, fused=True), scale=scale, clip=ClipByValue(value))
    outcome = control_step(control, (p, torch.tensor([0.5, -0.25]).half()))
    assert (outcome.skipped, outcome.clipped) == (False, False)
    assert p.tolist() == [-0.5, 0.25]


def test_a_bound_beyond_float32_once_scaled_clips_nothing():
    p = parameter(0.0)
    control = GradientControl(sgd(p), clip=ClipByValue(1e36))
    assert not control_step(control, (p, 2.0)).clipped
    assert p.item() == -2.0


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "AdamW"])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_mixed_dtypes_in_one_optimizer_share_one_norm(name, clip):
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    params = [nn.Parameter(torch.ones(3, dtype=d)) for d in dtypes]
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, theirs = OPTIMIZERS[name](params), OPTIMIZERS[name](plain)
    control = GradientControl(optimizer, clip=clip)
    for step in range(1, 5):
        gradient = [torch.full((3,), k * 0.5 / step, dtype=d) for k, d in enumerate(dtypes, 1)]
        outcome = control_step(control, *zip(params, gradient, strict=True))
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradient))
        assert outcome.norm == pytest.approx(norm, rel=1e-6)
        for p, g in zip(plain, gradient, strict=True):
            p.grad = g * (1.0 if clip is None else min(1.0, clip / (norm + 1e-6)))
        theirs.step()
    for p, q in zip(params, plain, strict=True):
        # bfloat16 keeps 8 bits, and unscaling and clipping round once here, twice there.
        close = 1e-2 if p.dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(p, q, rtol=close, atol=close)


@pytest.mark.parametrize("name", ["AdamW fused", "SGD fused"])
def test_mixed_dtypes_in_one_fused_optimizer_include_float16(name):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    params = [nn.Parameter(torch.ones(3, dtype=d)) for d in dtypes]
    control = GradientControl(OPTIMIZERS[name](params), clip=100.0, scale=256.0)
    outcome = control_step(control, *((p, 2.0) for p in params))
    assert outcome.norm == pytest.approx(6.0)
    assert all((p < 1).all() for p in params)


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "RMSprop"])
def test_complex_parameters_train_as_torchs(name):
    start = torch.tensor([1 + 1j, 3 - 1j, 0.5j])
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, plain = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([q])
    control = GradientControl(optimizer)
    for _ in range(5):
        control.zero_grad()
        plain.zero_grad()
        control.backward((p.abs() ** 2).sum())
        (q.abs() ** 2).sum().backward()
        norm = torch.linalg.vector_norm(q.grad).item()
        assert control.step().norm == pytest.approx(norm, rel=1e-6)
        plain.step()
    assert_same(contents(optimizer), contents(plain))


def test_a_nan_in_the_imaginary_part_skips():
    p = nn.Parameter(torch.tensor([1 + 1j, 2 + 2j]))
    control = GradientControl(sgd(p))
    control.backward((p.abs() ** 2).sum())
    p.grad[1] = complex(1.0, NAN)
    outcome = control.step()
    assert outcome.skipped
    assert outcome.counts[outcome.culprits[0]].nan == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [1e20, 1e30, 3e38])
def test_finite_gradients_are_clipped_however_large_and_never_zeroed(fused, size):
    p = nn.Parameter(torch.zeros(4))
    control = GradientControl(sgd(p, fused=fused), scale=None, clip=1.0)
    outcome = control_step(control, (p, torch.full((4,), size)))
    assert (outcome.skipped, outcome.clipped) == (False, True)
    assert outcome.norm == pytest.approx(2 * size, rel=1e-6)
    # The coefficient itself is subnormal in float32 for the largest of them.
    torch.testing.assert_close(-p.detach(), torch.full((4,), 0.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_huge_float64_gradients_are_clipped_and_never_zeroed(fused):
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    control = GradientControl(sgd(p, fused=fused), clip=1.0)
    outcome = control_step(control, (p, torch.full((4,), 1e60, dtype=torch.float64)))
    assert outcome.clipped
    assert outcome.norm == pytest.approx(2e60, rel=1e-12)
    torch.testing.assert_close(-p.detach(), torch.full_like(p, 0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_tiny_limit_on_large_scaled_gradients_zeroes_nothing(fused):
    p = nn.Parameter(torch.zeros(4))
    control = GradientControl(sgd(p, fused=fused), clip=1e-8)
    outcome = control_step(control, (p, torch.full((4,), 1e31)))
    assert outcome.clipped
    assert p.abs().min().item() > 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_limit_of_zero_steps_on_zero_gradients(fused):
    p = parameter(1.0, 2.0)
    control = GradientControl(sgd(p, fused=fused), clip=0.0)
    outcome = control_step(control, (p, 5.0))
    assert (outcome.skipped, outcome.clipped) == (False, True)
    assert p.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
def test_zero_gradients_stay_zero_and_are_no_reason_to_skip(fused):
    p = parameter(1.0, 2.0)
    control = GradientControl(sgd(p, fused=fused), clip=1.0)
    outcome = control_step(control, (p, 0.0))
    assert (outcome.skipped, outcome.norm, outcome.clipped) == (False, 0.0, False)
    assert p.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["SGD", "AdamW fused"])
def test_5120_bfloat16_ones_have_their_true_norm(name):
    p = nn.Parameter(torch.zeros(5120, dtype=torch.bfloat16))
    control = GradientControl(OPTIMIZERS[name]([p]))
    assert control_step(control, (p, 1.0)).norm == pytest.approx(71.554175, rel=1e-7)


def test_parameters_on_the_meta_device_are_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"1\.weight is on the meta device.*to_empty"):
        GradientControl(sgd(*model.parameters()), model=model)


def test_a_parameter_that_became_meta_in_mid_run_is_refused_by_name():
    model = nn.Linear(2, 2)
    optimizer = sgd(*model.parameters())
    control = GradientControl(optimizer, model=model)
    control.backward(model(torch.ones(1, 2)).sum())
    control.step()
    control.zero_grad()
    model.weight = nn.Parameter(torch.zeros(2, 2, device="meta"))
    optimizer.param_groups[0]["params"][0] = model.weight
    control.backward(loss_making((model.bias, 1.0)))
    model.weight.grad = torch.zeros(2, 2, device="meta")
    with pytest.raises(ValueError, match="weight is on the meta device"):
        control.step()


@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "SGD momentum fused", "Adam fused"])
def test_a_frozen_parameter_stays_and_moves_again_when_unfrozen(name):
    p, q = parameter(1.0), parameter(1.0)
    control = GradientControl(OPTIMIZERS[name]([p, q]))
    control_step(control, (p, 1.0), (q, 1.0))
    q.requires_grad_(False)
    held = q.item()
    for _ in range(3):
        control_step(control, (p, 1.0))
    assert q.item() == held
    q.requires_grad_(True)
    control_step(control, (p, 1.0), (q, 1.0))
    assert q.item() < held


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dampening": 0.5},
        {"nesterov": True},
        {"weight_decay": 0.25},
        {"maximize": True},
        {"dampening": 0.5, "weight_decay": 0.25},
        {"dampening": 0.5, "maximize": True},
        {"dampening": 0.5, "weight_decay": 0.25, "maximize": True},
    ],
    ids=lambda settings: ", ".join(settings) or "plain",
)
@pytest.mark.parametrize("first_is_skipped", [False, True])
def test_a_parameter_unfrozen_after_the_first_step_gets_momentum_of_its_own(
    fused, settings, first_is_skipped
):
    # torch's own fused SGD raises a TypeError here, its unfused one is the measure.
    p, q = parameter(1.0), parameter(1.0)
    r, s = parameter(1.0), parameter(1.0)
    control = GradientControl(sgd(p, q, lr=0.5, momentum=0.5, fused=fused, **settings))
    plain = sgd(r, s, lr=0.5, momentum=0.5, **settings)
    for step in range(5):
        if step == 2 and first_is_skipped:
            assert control_step(control, (p, 1.0), (q, INF)).skipped
        pairs = [(p, 1.0)] if step < 2 else [(p, 1.0), (q, 2.0)]
        control_step(control, *pairs)
        r.grad = torch.tensor([1.0])
        s.grad = torch.tensor([2.0]) if step >= 2 else None
        plain.step()
    # Quarters and halves, so that fused and unfused kernels round nothing.
    assert (p.item(), q.item()) == (r.item(), s.item())


@pytest.mark.parametrize("name", ["SGD momentum", "SGD momentum fused", "Adam", "Adam fused"])
def test_a_parameter_replaced_in_mid_run_is_stepped_and_named(name):
    model = nn.Linear(2, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    control = GradientControl(optimizer, model=model, clip=100.0)
    control.backward(model(torch.ones(1, 2)).sum())
    control.step()
    control.zero_grad()
    new = nn.Parameter(torch.ones(2, 2))
    model.weight = new
    optimizer.param_groups[0]["params"][0] = new
    control.backward(model(torch.ones(1, 2)).sum())
    assert not control.step().skipped
    assert (new < 1).all()
    control.zero_grad()
    control.backward(model(torch.ones(1, 2)).sum())
    new.grad[0, 0] = NAN
    assert control.step().culprits == ("weight",)


def test_a_replaced_first_parameter_of_fused_momentum_never_gets_garbage():
    p, q = parameter(*[1.0] * 64), parameter(*[1.0] * 64)
    optimizer = sgd(p, q, lr=0.5, momentum=0.5, fused=True)
    control = GradientControl(optimizer)
    control_step(control, (p, 1.0), (q, 1.0))
    new = parameter(*[1.0] * 64)
    optimizer.param_groups[0]["params"][1] = new
    assert control_step(control, (p, 1.0), (new, INF)).skipped
    control_step(control, (p, 1.0), (new, 1.0))
    assert p.tolist() == [-0.25] * 64  # 1 - 0.5·1 - 0.5·1.5
    assert new.tolist() == [0.5] * 64


def test_a_group_added_in_mid_run_joins_the_norm():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
    control = GradientControl(optimizer)
    assert control_step(control, (p, 3.0)).norm == pytest.approx(3.0)
    optimizer.add_param_group({"params": [q]})
    assert control_step(control, (p, 3.0), (q, 4.0)).norm == pytest.approx(5.0)
    assert q.item() != 0.0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_zero_grad_clears_with_and_without_set_to_none(set_to_none, fused):
    p, q = parameter(0.0), parameter(0.0)
    control = GradientControl(sgd(p, fused=fused), sgd(q))
    for _ in range(3):
        control.backward(loss_making((p, 1.0), (q, 2.0)))
        control.step()
        control.zero_grad(set_to_none=set_to_none)
        for r in (p, q):
            assert r.grad is None if set_to_none else r.grad.item() == 0.0
    assert (p.item(), q.item()) == (-3.0, -6.0)


def test_a_frozen_parameter_with_a_gradient_left_over_is_treated_as_torch_does():
    # torch's optimizers step whatever has a gradient, and so it is measured too.
    p, q = parameter(1.0), parameter(1.0)
    control = GradientControl(sgd(p, q, fused=True), scale=StaticScale(4.0))
    control.backward(loss_making((p, 1.0), (q, 2.0)))
    q.requires_grad_(False)
    outcome = control.step()
    assert outcome.norm == pytest.approx(math.sqrt(5.0))
    assert (p.item(), q.item()) == (0.0, -1.0)


def test_a_nan_left_over_in_a_frozen_parameter_skips_and_is_named():
    p, q = parameter(1.0), parameter(1.0)
    control = GradientControl(sgd(p, q))
    control.backward(loss_making((p, 1.0), (q, NAN)))
    q.requires_grad_(False)
    outcome = control.step()
    assert outcome.skipped
    assert outcome.culprits == ("param_groups[0]['params'][1]",)


class Bare:
    """An object with groups and a step, as other libraries make them."""

    def __init__(self, *groups):
        self.param_groups = [{"params": list(group)} for group in groups]
        self.state = {}

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= p.grad


def test_a_parameter_in_two_groups_is_refused_by_name():
    model = nn.Linear(2, 2)
    with pytest.raises(SharedParameter, match="weight is listed twice"):
        GradientControl(Bare([model.weight], [model.bias, model.weight]), model=model)


def test_a_parameter_twice_in_one_group_is_refused_by_name():
    model = nn.Linear(2, 2)
    with pytest.raises(SharedParameter, match="bias is listed twice"):
        GradientControl(Bare([model.bias, model.weight, model.bias]), model=model)


def test_a_parameter_in_two_optimizers_is_refused_by_name():
    model = nn.Linear(2, 2)
    with pytest.raises(SharedParameter, match="bias is listed twice"):
        GradientControl(sgd(*model.parameters()), sgd(model.bias), model=model)


def test_the_same_optimizer_twice_is_refused():
    p = parameter(1.0)
    optimizer = sgd(p)
    with pytest.raises(SharedParameter):
        GradientControl(optimizer, optimizer)


def test_a_parameter_that_comes_to_be_shared_in_mid_run_is_refused_before_any_step():
    p, q = parameter(1.0), parameter(1.0)
    one, two = sgd(p), sgd(q)
    control = GradientControl(one, two)
    control_step(control, (p, 1.0), (q, 1.0))
    two.add_param_group({"params": [p]})
    control.zero_grad()
    control.backward(loss_making((p, 1.0), (q, 1.0)))
    with pytest.raises(SharedParameter, match="listed twice"):
        control.step()
    assert (p.item(), q.item()) == (0.0, 0.0)


def test_an_object_with_groups_and_a_step_is_an_optimizer():
    p = parameter(1.0, 2.0)
    control = GradientControl(Bare([p]), clip=1.0)
    control.backward(loss_making((p, torch.tensor([3.0, 4.0]))))
    assert control.step().clipped
    assert p.tolist() == pytest.approx([0.4, 1.2], rel=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_needs_nothing_of_the_optimizer_but_its_groups(set_to_none):
    p = parameter(1.0)
    control = GradientControl(Bare([p]))
    control.backward(loss_making((p, 1.0)))
    control.zero_grad(set_to_none=set_to_none)
    assert p.grad is None if set_to_none else p.grad.item() == 0.0


def test_no_gradient_at_all_is_told_and_the_way_out_with_it():
    p, q = parameter(1.0), parameter(1.0)
    control = GradientControl(sgd(p))
    control.backward((q * q).sum())
    before = control.state_dict()
    with pytest.raises(NoGradients, match="no parameter of the optimizer has a gradient"):
        control.step()
    assert control.state_dict() == before


def test_a_gradient_expanded_from_one_element_is_measured_right():
    p = nn.Parameter(torch.zeros(2, 3))
    control = GradientControl(sgd(p), scale=None)
    control.backward(loss_making((p, 0.0)))
    p.grad = torch.tensor([0.5]).expand(2, 3)
    assert control.step().norm == pytest.approx(0.5 * math.sqrt(6))
    assert p.unique().tolist() == [-0.5]


def test_gradients_of_a_growing_scale_keep_their_bits():
    p, q = parameter(0.3), parameter(0.3)
    growing = GradientControl(
        torch.optim.Adam([p], lr=0.1, fused=True),
        scale=DynamicScale(init_scale=1.0, growth_interval=1),
    )
    steady = GradientControl(torch.optim.Adam([q], lr=0.1, fused=True), scale=None)
    for step in range(1, 30):
        control_step(growing, (p, 1.0 / step))
        control_step(steady, (q, 1.0 / step))
    assert growing.scale == 2.0**29
    assert same_bits(p, q)
