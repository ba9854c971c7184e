"""The kernels that write: multiply_, multiply_and_check_, clamp_."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradilocks.kernels import reference

INF, NAN = math.inf, math.nan
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [0, 1, 3, 1025, 16_384, 16_385, 131_073, 300_001]
FACTORS = [1.0 / 65536, 1.0 / 3, 0.7, 2e-8, 1.0, 3.0, 2.0**20, 0.0]


def made(size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + size)
    return torch.randn(size, generator=generator).to(dtype)


def product(tensor, factor):
    """One rounding: the factor in float32 (float64 for float64), the product in the dtype."""
    if tensor.dtype is torch.float64:
        return tensor * factor
    return (tensor.float() * torch.tensor(factor, dtype=torch.float32)).to(tensor.dtype)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def same(one, other):
    return torch.equal(one, other) or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiplying_rounds_once_in_every_dtype(dtype, factor):
    tensors = [made(size, dtype) for size in SIZES]
    expected = [product(tensor, factor) for tensor in tensors]
    reference.multiply_(tensors, scalar(factor))
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, wanted), tensor.numel()


def counted_in(checked):
    """How many are NaN and Inf in each, of which the flag says whether there are any."""
    flag, count = checked
    found = count()
    assert (flag.dtype, flag.shape) == (torch.float32, ())
    assert flag.item() == float(bool(sum(found.nan.tolist()) + sum(found.inf.tolist())))
    return found


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiplying_and_checking_writes_the_bits_that_multiplying_writes(dtype, factor):
    one = [made(size, dtype) for size in SIZES]
    other = [tensor.clone() for tensor in one]
    found = counted_in(reference.multiply_and_check_(one, scalar(factor)))
    reference.multiply_(other, scalar(factor))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b), a.numel()
    counted = reference.measure(other)
    assert found.nan.tolist() == counted.nan.tolist()
    assert found.inf.tolist() == counted.inf.tolist()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("factor", [None, 1.0, 0.5, 8.0])
@pytest.mark.parametrize("size", [1, 100, 20_000, 200_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checking_finds_what_is_not_finite(bad, factor, size, dtype):
    tensors = [made(size, dtype), made(size, dtype), torch.ones(3)]
    tensors[1][size // 2] = bad
    kept = [t.clone() for t in tensors]
    found = counted_in(
        reference.multiply_and_check_(tensors, None if factor is None else scalar(factor))
    )
    assert found.nan.tolist() == [0, int(math.isnan(bad)), 0]
    assert found.inf.tolist() == [0, int(math.isinf(bad)), 0]
    for tensor, before in zip(tensors, kept, strict=True):
        assert same(tensor, product(before, 1.0 if factor is None else factor))


@pytest.mark.parametrize("size", [3, 20_000, 200_000])
def test_a_product_that_overflows_is_found_not_the_factor_before_it(size):
    tensor = torch.full((size,), 3e38)
    found = counted_in(reference.multiply_and_check_([tensor], scalar(2.0)))
    assert found.inf.tolist() == [size]
    tensor = torch.full((size,), INF)
    found = counted_in(reference.multiply_and_check_([tensor], scalar(0.5)))
    assert found.inf.tolist() == [size]


@pytest.mark.parametrize("size", [3, 20_000, 200_000])
def test_checking_without_a_multiplier_writes_nothing(size):
    tensors = [made(size, dtype) for dtype in DTYPES]
    kept = [t.clone() for t in tensors]
    reference.multiply_and_check_(tensors, None)
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_multiplying_by_one_touches_nothing():
    tensors = [made(size, torch.float32) for size in SIZES]
    versions = [t._version for t in tensors]
    reference.multiply_(tensors, scalar(1.0))
    assert [t._version for t in tensors] == versions


def strided():
    base = torch.randn(64, 40, 10, generator=torch.Generator().manual_seed(0))
    large = torch.randn(700, 600, generator=torch.Generator().manual_seed(0))
    return {
        "transposed": base.transpose(0, 2),
        "rows": base[::3],
        "columns": base[..., 1::2],
        "inside": base[3:9, 4:, 2:7],
        "channels last": base.view(8, 8, 40, 10).contiguous(memory_format=torch.channels_last),
        "0-d": torch.tensor(1.5),
        "large transposed": large.t(),
        "large columns": large[:, ::2],
    }


@pytest.mark.parametrize("write", [reference.multiply_, reference.multiply_and_check_])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", strided())
def test_only_the_elements_of_a_strided_tensor_are_multiplied(name, dtype, write):
    tensor = strided()[name]
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(room).set_(tensor.untyped_storage()).to(dtype)
    view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    untouched = torch.ones(room, dtype=torch.bool)
    untouched.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    before, expected = whole.clone(), product(view, 0.3)
    write([view], scalar(0.3))
    assert torch.equal(view, expected)
    assert torch.equal(whole[untouched], before[untouched])


def test_tensors_of_all_kinds_go_through_one_call():
    kinds = [
        torch.ones(3), torch.ones(20_000), torch.ones(5, dtype=torch.float16),
        torch.ones(7, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64), torch.zeros(0),
        torch.tensor(2.0), torch.ones(3, 4).t(), torch.ones(2, dtype=torch.complex64),
    ]  # fmt: skip
    for write in (reference.multiply_, reference.multiply_and_check_):
        tensors = [t.clone() for t in kinds]
        write(tensors, scalar(0.25))
        for tensor, before in zip(tensors, kinds, strict=True):
            assert torch.equal(tensor, before * 0.25)


@settings(max_examples=80)
@given(
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=12),
    factor=st.floats(2.0**-60, 2.0**20, width=32),
    dtype=st.sampled_from(DTYPES),
)
def test_any_numbers_are_multiplied_with_one_rounding(numbers, factor, dtype):
    tensor = torch.tensor(numbers).to(dtype)
    expected = product(tensor, factor)
    other = tensor.clone()
    reference.multiply_([tensor], scalar(factor))
    found = counted_in(reference.multiply_and_check_([other], scalar(factor)))
    # Whether a subnormal product is kept or flushed is the kernel's affair, so both pass as equal.
    close = torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(tensor, expected, rtol=0, atol=close, equal_nan=True)
    torch.testing.assert_close(other, expected, rtol=0, atol=close, equal_nan=True)
    assert (found.nan + found.inf).item() == (~torch.isfinite(other)).sum().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [0.0, 0.1, 1.0, 1e3])
def test_clamping_is_torchs_clamp_and_nan_stays(dtype, bound):
    tensors = [made(size, dtype) * 3 for size in (0, 1, 33, 20_001)]
    tensors.append(torch.tensor([NAN, INF, -INF, 0.0, -0.0, 5.0]).to(dtype))
    expected = [torch.clamp(t, -bound, bound) for t in tensors]
    reference.clamp_(tensors, scalar(bound))
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert same(tensor, wanted)
    assert math.isnan(tensors[-1][0].item())


def test_an_infinite_bound_touches_nothing():
    tensor = torch.tensor([INF, NAN, 1e38])
    version = tensor._version
    reference.clamp_([tensor], scalar(INF))
    assert tensor._version == version


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bound_beyond_the_dtype_bounds_nothing_but_infinities(dtype):
    bound = min(torch.finfo(dtype).max * 4.0, 1e300) if dtype is not torch.float64 else 1e300
    tensor = torch.tensor([1.0, -2.0, torch.finfo(dtype).max / 1e10], dtype=dtype)
    kept = tensor.clone()
    reference.clamp_([tensor], scalar(bound))
    assert torch.equal(tensor, kept)


def test_float64_is_multiplied_in_float64_where_the_host_does_not_look():
    tensors = [torch.full((2,), 1e50, dtype=torch.float64), torch.ones(2)]
    reference._multiply_on_device_(tensors, torch.tensor(1e-50, dtype=torch.float64))
    assert tensors[0].tolist() == pytest.approx([1.0, 1.0], rel=1e-15)
