"""The clip functions against torch's, over dtypes, shapes, layouts, orders and bounds.

torch adds the norm of half-precision gradients in their dtype, so there it is given float64 copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradilocks
from dropin.programs import STABLE

WIDE = [torch.float32, torch.float64, torch.complex64, torch.complex128]
HALF = [torch.float16, torch.bfloat16]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 3, 4, 5), (1, 6, 1), (1025,), (17_000,)]
LAYOUTS = ["contiguous", "transposed", "every other", "channels last", "part of a larger one"]
ORDERS = [0.5, 1.0, 2.0, 2.0, 2.0, 3.0, 4.5, math.inf]
BOUNDS = [0.0, 1e-3, 0.5, 1.0, 13.0, 1e6, math.inf]

# torch's float32 norm of order 0.5 of 17,000 elements is off by 1.3e-5, because it adds their powers in float32.
TOLERANCE = {torch.float32: 3e-5, torch.complex64: 3e-5, torch.float64: 1e-12, torch.complex128: 1e-12}


@pytest.fixture(autouse=True, params=["extension", "plain torch"], scope="module")
def _backend(request):
    gradilocks.kernels.backend_for("cpu")
    before = gradilocks.kernels.BACKENDS["cpu"]
    if request.param == "plain torch":
        gradilocks.kernels.BACKENDS["cpu"] = None
    yield
    gradilocks.kernels.BACKENDS["cpu"] = before


@dataclass(frozen=True)
class Recipe:
    """A gradient to be made, the same one every time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    size: float
    seed: int

    def make(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        real = torch.float64 if self.dtype in (torch.float64, torch.complex128) else torch.float32
        kind = torch.complex64 if self.dtype.is_complex else real
        values = (torch.randn(self.shape, generator=generator, dtype=kind) * self.size).to(self.dtype)
        if self.layout == "transposed" and values.dim() >= 2:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "every other" and values.dim() >= 1:
            return torch.zeros(*values.shape[:-1], values.shape[-1] * 2, dtype=values.dtype)[..., ::2].copy_(values)
        if self.layout == "channels last" and values.dim() == 4:
            return values.to(memory_format=torch.channels_last)
        if self.layout == "part of a larger one" and values.dim() >= 2:
            whole = torch.zeros([n + 3 for n in values.shape], dtype=values.dtype)
            return whole[tuple(slice(2, 2 + n) for n in values.shape)].copy_(values)
        return values


def gradients(dtypes, *, empty=True):
    return st.lists(
        st.builds(
            Recipe,
            shape=st.sampled_from(SHAPES if empty else [shape for shape in SHAPES if 0 not in shape]),
            dtype=st.sampled_from(dtypes),
            layout=st.sampled_from(LAYOUTS),
            size=st.sampled_from([1e-3, 1.0, 30.0]),
            seed=st.integers(0, 1000),
        ),
        min_size=1,
        max_size=5,
    )


def parameters(recipes):
    params = []
    for recipe in recipes:
        grad = recipe.make()
        params.append(torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype)))
        params[-1].grad = grad
    return params


def assert_close(got, expected, rtol):
    """Within `rtol` of the largest element."""
    assert got.stride() == expected.stride()
    atol = rtol * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=0.0, atol=atol + 1e-30)


FOREACH = st.sampled_from([None, True, False])


@settings(STABLE, max_examples=200)
@given(gradients(WIDE, empty=False), st.sampled_from(BOUNDS), st.sampled_from(ORDERS), FOREACH)
def test_clipping_agrees_with_torch(recipes, bound, order, foreach):
    theirs, ours = parameters(recipes), parameters(recipes)
    rtol = max(TOLERANCE[recipe.dtype] for recipe in recipes)
    expected = torch.nn.utils.clip_grad_norm_(theirs, bound, order, foreach=foreach)
    got = gradilocks.clip_grad_norm_(ours, bound, order, foreach=foreach)
    assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device)
    assert got.item() == pytest.approx(expected.item(), rel=rtol)
    for param, reference in zip(ours, theirs, strict=True):
        assert_close(param.grad, reference.grad, rtol)


@settings(STABLE, max_examples=80)
@given(gradients(HALF), st.sampled_from(BOUNDS), st.sampled_from([1.0, 2.0, 3.0]))
def test_clipping_half_precision_agrees_with_torch_in_float64(recipes, bound, order):
    ours, originals = parameters(recipes), [recipe.make().double() for recipe in recipes]
    expected = torch.nn.utils.get_total_norm(originals, order).item()
    got = gradilocks.clip_grad_norm_(ours, bound, order)
    assert got.dtype is torch.float32
    assert got.item() == pytest.approx(expected, rel=1e-6)
    coefficient = min(1.0, bound / (expected + 1e-6))
    for param, original in zip(ours, originals, strict=True):
        # Rounded once; near a tie in either direction, which is one unit in the last place.
        rounded = (original * coefficient).to(param.grad.dtype)
        unit = torch.nextafter(rounded.abs(), torch.tensor(math.inf, dtype=rounded.dtype)) - rounded.abs()
        assert bool(((param.grad.double() - rounded.double()).abs() <= unit.double()).all())
        assert coefficient < 1.0 or torch.equal(param.grad.double(), original)


@settings(STABLE, max_examples=80)
@given(gradients(WIDE + HALF, empty=False), st.sampled_from(ORDERS), FOREACH)
def test_the_total_norm_agrees_with_torch_in_float64(recipes, order, foreach):
    tensors = [recipe.make() for recipe in recipes]
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in tensors]
    expected = torch.nn.utils.get_total_norm(wide, order)
    got = gradilocks.get_total_norm(tensors, order, foreach=foreach)
    has_float64 = any(recipe.dtype in (torch.float64, torch.complex128) for recipe in recipes)
    assert got.dtype is (torch.float64 if has_float64 else torch.float32)
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)


@settings(STABLE, max_examples=100)
@given(
    gradients([torch.float32, torch.float64, *HALF]),
    st.sampled_from([0.0, 1e-3, 0.1, 1.0, 100.0, math.inf]),
    FOREACH,
)
def test_clamping_elements_is_bit_identical_to_torch(recipes, bound, foreach):
    theirs, ours = parameters(recipes), parameters(recipes)
    torch.nn.utils.clip_grad_value_(theirs, bound, foreach=foreach)
    gradilocks.clip_grad_value_(ours, bound, foreach=foreach)
    for param, reference in zip(ours, theirs, strict=True):
        assert param.grad.stride() == reference.grad.stride()
        assert torch.equal(param.grad, reference.grad)


@settings(STABLE, max_examples=100)
@given(
    gradients(WIDE),
    st.sampled_from(BOUNDS),
    st.sampled_from([0.25, 1.0, 12.0, 1e4]),
    st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
def test_clipping_with_a_given_norm_agrees_with_torch(recipes, bound, norm, dtype):
    theirs, ours = parameters(recipes), parameters(recipes)
    total = torch.tensor(norm, dtype=dtype)
    torch.nn.utils.clip_grads_with_norm_(theirs, bound, total.float() if dtype in HALF else total)
    gradilocks.clip_grads_with_norm_(ours, bound, total)
    for param, reference in zip(ours, theirs, strict=True):
        assert_close(param.grad, reference.grad, 2e-7)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@settings(STABLE, max_examples=30)
@given(
    recipes=gradients(WIDE + HALF, empty=False),
    order=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    index=st.integers(0, 4),
)
def test_a_nonfinite_gradient_changes_nothing(special, recipes, order, index):
    params = parameters(recipes)
    grad = params[index % len(params)].grad
    grad[(0,) * grad.dim()] = special
    before = [p.grad.clone() for p in params]
    norm = gradilocks.clip_grad_norm_(params, 1.0, order).item()
    assert math.isnan(norm) if math.isnan(special) else norm == math.inf
    for param, unchanged in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, unchanged, rtol=0.0, atol=0.0, equal_nan=True)
