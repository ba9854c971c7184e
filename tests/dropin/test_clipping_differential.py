"""The clip functions against torch's, over dtypes, shapes, layouts, orders and bounds.

Where torch's numbers are sound, ours are compared with torch's own. The norm of half-precision
gradients is not (torch adds it in their dtype), so there torch is asked about float64 copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradilocks
from tests.dropin.programs import STABLE

WIDE = [torch.float32, torch.float64, torch.complex64, torch.complex128]
HALF = [torch.float16, torch.bfloat16]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 3, 4, 5), (1, 6, 1), (1025,), (17_000,)]
LAYOUTS = ["as it is", "transposed", "every other", "channels last", "part of a larger one"]
ORDERS = [0.5, 1.0, 2.0, 2.0, 2.0, 3.0, 4.5, math.inf]
BOUNDS = [0.0, 1e-3, 0.5, 1.0, 13.0, 1e6, math.inf]

# Ours rounds the norm once. torch's own is as good as its dtype: a float32 norm of 17,000 elements
# of order 0.5 is off by 1.3e-5, because their powers are added in one running sum.
TOLERANCE = {
    torch.float32: 3e-5,
    torch.complex64: 3e-5,
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
}


@dataclass(frozen=True)
class Drawn:
    """A gradient, drawn; `make` gives the same one every time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    size: float
    seed: int

    def make(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        real = torch.float64 if self.dtype in (torch.float64, torch.complex128) else torch.float32
        kind = torch.complex64 if self.dtype.is_complex else real
        values = torch.randn(self.shape, generator=generator, dtype=kind) * self.size
        return self._laid_out(values.to(self.dtype))

    def _laid_out(self, values: torch.Tensor) -> torch.Tensor:
        if self.layout == "transposed" and values.dim() >= 2:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "every other" and values.dim() >= 1:
            wide = torch.zeros(*values.shape[:-1], values.shape[-1] * 2, dtype=values.dtype)
            view = wide[..., ::2]
            view.copy_(values)
            return view
        if self.layout == "channels last" and values.dim() == 4:
            return values.to(memory_format=torch.channels_last)
        if self.layout == "part of a larger one" and values.dim() >= 2:
            wide = torch.zeros([n + 3 for n in values.shape], dtype=values.dtype)
            view = wide[tuple(slice(2, 2 + n) for n in values.shape)]
            view.copy_(values)
            return view
        return values


def gradients(dtypes, *, empty=True):
    shapes = SHAPES if empty else [s for s in SHAPES if 0 not in s]
    return st.builds(
        Drawn,
        shape=st.sampled_from(shapes),
        dtype=st.sampled_from(dtypes),
        layout=st.sampled_from(LAYOUTS),
        size=st.sampled_from([1e-3, 1.0, 30.0]),
        seed=st.integers(0, 1000),
    )


def parameters(drawn):
    params = []
    for one in drawn:
        grad = one.make()
        param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
        param.grad = grad
        params.append(param)
    return params


def close(got, expected, rtol):
    """Within `rtol` of the tensor's largest element."""
    atol = rtol * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=0.0, atol=atol + 1e-30)


@settings(STABLE, max_examples=400)
@given(
    st.lists(gradients(WIDE, empty=False), min_size=1, max_size=5),
    st.sampled_from(BOUNDS),
    st.sampled_from(ORDERS),
    st.sampled_from([None, True, False]),
)
def test_clipping_agrees_with_torch(drawn, bound, order, foreach):
    theirs, ours = parameters(drawn), parameters(drawn)
    rtol = max(TOLERANCE[one.dtype] for one in drawn)
    expected = torch.nn.utils.clip_grad_norm_(theirs, bound, order, foreach=foreach)
    got = gradilocks.clip_grad_norm_(ours, bound, order, foreach=foreach)
    assert got.dtype is expected.dtype
    assert got.shape == expected.shape
    assert got.item() == pytest.approx(expected.item(), rel=rtol)
    for param, reference in zip(ours, theirs, strict=True):
        assert param.grad.stride() == reference.grad.stride()
        close(param.grad, reference.grad, rtol)


@settings(STABLE, max_examples=150)
@given(
    st.lists(gradients(HALF), min_size=1, max_size=5),
    st.sampled_from(BOUNDS),
    st.sampled_from([1.0, 2.0, 3.0]),
)
def test_clipping_half_precision_agrees_with_torch_in_float64(drawn, bound, order):
    ours, originals = parameters(drawn), [one.make().double() for one in drawn]
    expected = torch.nn.utils.get_total_norm(originals, order)
    got = gradilocks.clip_grad_norm_(ours, bound, order)
    assert got.dtype is torch.float32
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    coefficient = min(1.0, bound / (expected.item() + 1e-6))
    for param, original in zip(ours, originals, strict=True):
        # One rounding to the gradient's own dtype, and nothing else; near a tie it may go either
        # way, which is one unit in the last place.
        rounded = (original * coefficient).to(param.grad.dtype)
        step = torch.nextafter(rounded.abs(), torch.tensor(math.inf, dtype=rounded.dtype))
        allowed = (step - rounded.abs()).double()
        assert bool(((param.grad.double() - rounded.double()).abs() <= allowed).all())
        if coefficient == 1.0:
            assert torch.equal(param.grad.double(), original)


@settings(STABLE, max_examples=150)
@given(
    st.lists(gradients(WIDE + HALF, empty=False), min_size=1, max_size=5),
    st.sampled_from(ORDERS),
    st.sampled_from([None, True, False]),
)
def test_the_total_norm_agrees_with_torch(drawn, order, foreach):
    tensors = [one.make() for one in drawn]
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in tensors]
    expected = torch.nn.utils.get_total_norm(wide, order)
    got = gradilocks.get_total_norm(tensors, order, foreach=foreach)
    double = any(one.dtype in (torch.float64, torch.complex128) for one in drawn)
    assert got.dtype is (torch.float64 if double else torch.float32)
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)


@settings(STABLE, max_examples=200)
@given(
    st.lists(gradients([torch.float32, torch.float64, *HALF]), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-3, 0.1, 1.0, 100.0, math.inf]),
    st.sampled_from([None, True, False]),
)
def test_bounding_elements_is_bit_identical_to_torch(drawn, bound, foreach):
    theirs, ours = parameters(drawn), parameters(drawn)
    torch.nn.utils.clip_grad_value_(theirs, bound, foreach=foreach)
    gradilocks.clip_grad_value_(ours, bound, foreach=foreach)
    for param, reference in zip(ours, theirs, strict=True):
        assert param.grad.stride() == reference.grad.stride()
        assert torch.equal(param.grad, reference.grad)


@settings(STABLE, max_examples=200)
@given(
    st.lists(gradients(WIDE), min_size=1, max_size=5),
    st.sampled_from(BOUNDS),
    st.sampled_from([0.25, 1.0, 12.0, 1e4]),
    st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
def test_clipping_with_a_given_norm_agrees_with_torch(drawn, bound, norm, dtype):
    theirs, ours = parameters(drawn), parameters(drawn)
    total = torch.tensor(norm, dtype=dtype)
    torch.nn.utils.clip_grads_with_norm_(theirs, bound, total.float() if dtype in HALF else total)
    gradilocks.clip_grads_with_norm_(ours, bound, total)
    for param, reference in zip(ours, theirs, strict=True):
        close(param.grad, reference.grad, 2e-7)


@settings(STABLE, max_examples=100)
@given(
    st.lists(gradients([torch.float32, torch.float64]), min_size=1, max_size=4),
    st.sampled_from([0.0, -1.0, -2.0, 0.25, 10.0]),
)
def test_orders_that_are_no_norms_agree_with_torch(drawn, order):
    tensors = [one.make().double() for one in drawn if 0 not in one.shape]
    if tensors:
        expected = torch.nn.utils.get_total_norm(tensors, order)
        got = gradilocks.get_total_norm(tensors, order)
        assert got.item() == pytest.approx(expected.item(), rel=1e-9)
    assert gradilocks.get_total_norm([torch.tensor([3.0, 4.0])], 0.0).item() == 1.0


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@settings(STABLE, max_examples=60)
@given(
    drawn=st.lists(gradients(WIDE + HALF, empty=False), min_size=1, max_size=4),
    order=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    place=st.integers(0, 3),
)
def test_a_nonfinite_gradient_stays_where_it_is(special, drawn, order, place):
    params = parameters(drawn)
    grad = params[place % len(params)].grad
    grad[(0,) * grad.dim()] = special
    before = [p.grad.clone() for p in params]
    norm = gradilocks.clip_grad_norm_(params, 1.0, order).item()
    assert math.isnan(norm) if math.isnan(special) else norm == math.inf
    for param, kept in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, kept, rtol=0.0, atol=0.0, equal_nan=True)
