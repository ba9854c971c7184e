"""reference.measure against float64: dtypes, odd sizes, extreme values, layouts, orders."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradilocks.kernels import pieces, reference
from gradilocks.step.measure import measure

INF, NAN = math.inf, math.nan
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ORDERS = [1.0, 2.0, 3.0, INF]
SIZES = [1, 2, 3, 31, 1023, 1024, 1025, 16_385, 131_073]

# What docs/numerics.md promises, whatever the elements are.
CLOSE = {torch.float16: 1e-6, torch.bfloat16: 1e-6, torch.float32: 1e-6, torch.float64: 1e-12}


def truth(tensor, order):
    """The norm in float64, divided by the largest magnitude so that no power leaves the range."""
    magnitudes = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    if torch.isnan(magnitudes).any():
        return NAN
    peak = magnitudes.max().item() if magnitudes.numel() else 0.0
    if peak in (0.0, INF) or order == INF:
        return peak
    return peak * (magnitudes / peak).pow(order).sum().pow(1.0 / order).item()


def check(tensors, order, *, close=None, by=reference.measure):
    found = by(tensors, order=order, detail=True)
    for k, tensor in enumerate(tensors):
        norm = found.norms[k].item()
        rel = close or CLOSE.get(tensor.dtype, 1e-6)
        assert norm == pytest.approx(truth(tensor, order), rel=rel, abs=0.0, nan_ok=True)
        assert found.nan[k].item() == torch.isnan(tensor).sum().item()
        assert found.inf[k].item() == torch.isinf(tensor).sum().item()
        assert found.zeros[k].item() == (tensor == 0).sum().item()
        rest = tensor[~torch.isnan(tensor)].to(
            torch.complex128 if tensor.is_complex() else torch.float64
        )
        largest = rest.abs().max().item() if rest.numel() else 0.0
        assert found.largest[k].item() == pytest.approx(largest, rel=rel, abs=0.0)
    assert found.norms.dtype == torch.float64
    assert found.nan.dtype == found.inf.dtype == found.zeros.dtype == torch.int64


def values(kind, size, dtype):
    """What a gradient of that kind holds, or None where the dtype has no such number."""
    torch.manual_seed(size)
    plain = torch.randn(size, dtype=torch.float64)
    limits = torch.finfo(dtype)
    planted = {"inf": [INF], "-inf": [-INF], "nan": [NAN], "all three": [INF, NAN, -INF]}
    if kind in planted:
        made = plain.to(dtype)
        for k, bad in enumerate(planted[kind]):
            made[(k * 7 + size // 2) % size] = bad
        return made
    if kind == "zero":
        return torch.zeros(size, dtype=dtype)
    factor = {
        "plain": 1.0,
        "subnormal": limits.smallest_normal / 8,
        "tiny": 1e-30,
        "small": 1e-18,
        "large": 1e20,
        "huge": 3e37,
        "largest": limits.max / 16,
    }[kind]
    made = (plain * factor).to(dtype)
    return None if torch.isinf(made).any() else made


KINDS = [
    "plain", "inf", "-inf", "nan", "all three", "zero", "subnormal", "tiny", "small", "large",
    "huge", "largest",
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value_is_measured_as_float64_would(kind, dtype, order):
    made = [values(kind, size, dtype) for size in SIZES]
    tensors = [tensor for tensor in made if tensor is not None]
    if not tensors:
        tensors = [values("plain", size, dtype) for size in (1, 3)]
    check(tensors, order)
    for tensor in tensors[:4]:
        check([tensor], order)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_one_bad_element_at_either_end_of_a_piece_is_found(dtype, order):
    for place in (0, pieces.READ - 1, pieces.READ, pieces.READ + 4):
        tensor = torch.ones(pieces.READ + 5, dtype=dtype)
        tensor[place] = NAN
        found = reference.measure([tensor], order=order)
        assert (found.nan.item(), found.inf.item()) == (1, 0)
        assert math.isnan(found.norms.item())


def layouts():
    torch.manual_seed(1)
    base = torch.randn(12, 10, 6, 8)
    return {
        "contiguous": base,
        "transposed": base.transpose(0, 3),
        "permuted": base.permute(2, 0, 3, 1),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "every second row": base[::2],
        "every third column": base[..., ::3],
        "a slice inside": base[1:-1, 2:5, 1:, 3:7],
        "a view with an offset": base.view(-1)[7:5001],
        "expanded": base[:1, :, :1, :].expand(12, 10, 6, 8),
        "expanded from one element": torch.tensor(2.5).expand(40, 30),
        "overlapping windows": base.view(-1)[:100].unfold(0, 5, 1),
        "of size one": base[:1, :1, :1, :1],
        "with dimensions of size one": base.view(-1, 1, 40).transpose(0, 1),
        "0-d": torch.tensor(-3.25),
        "empty": torch.zeros(0),
        "empty in the middle": torch.zeros(4, 0, 3),
        "empty and strided": torch.zeros(6, 4)[::2, :0],
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", layouts())
def test_every_layout_is_measured_element_by_element(name, order):
    tensor = layouts()[name]
    check([tensor], order)
    check([tensor.half(), tensor.double(), tensor], order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_strided_tensor_larger_than_a_piece_is_measured_without_one_big_copy(order):
    base = torch.randn(1500, 1600)
    check([base[:, ::2], base.t()[::2]], order)
    check([base[:1].expand(1200, 1600)], order)  # One row 1,200 times.


@pytest.mark.parametrize("name", layouts())
def test_measuring_changes_nothing(name):
    tensor = layouts()[name].clone(memory_format=torch.preserve_format)
    kept, version = tensor.clone(), tensor._version
    for order in ORDERS:
        reference.measure([tensor], order=order, detail=True)
    assert torch.equal(tensor, kept)
    assert tensor._version == version


@pytest.mark.parametrize("order", ORDERS)
def test_complex_tensors_are_measured_by_their_magnitudes(order):
    torch.manual_seed(0)
    for size in (1, 7, 1025):
        check([torch.randn(size, dtype=torch.complex64)], order)
        check([torch.randn(size, dtype=torch.complex128)], order, close=1e-12)
    found = reference.measure([torch.tensor([1 + 1j, complex(1, NAN), complex(INF, 0)])])
    assert (found.nan.item(), found.inf.item()) == (1, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_complex_elements_whose_magnitude_is_beyond_float32_have_a_finite_norm(order):
    tensor = torch.full((3,), 3e38 + 3e38j)
    check([tensor], order)


@pytest.mark.parametrize("order", [4.0, 10.0, 100.0])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_powers_beyond_float64_on_the_way_do_not_spoil_the_norm(order, size):
    check([torch.full((5,), size), torch.tensor([size, size / 2])], order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [5e-324, 1e-320, 1e-200, 1e-150, 1e150, 1e200, 1e308])
def test_float64_at_both_ends_of_its_range_is_measured(order, size):
    tensor = torch.full((2,), size, dtype=torch.float64)
    # Subnormal numbers have fewer digits the smaller they are, and so has a product with them.
    close = 1e-12 if size > 1e-300 else (1e-2 if size > 1e-322 else 1.0)
    if not math.isinf(truth(tensor, order)):
        check([tensor], order, close=close)


def test_a_large_value_among_tiny_ones_and_a_tiny_one_among_zeros_count_fully():
    mixed = torch.full((5000,), 1e-25)
    mixed[777] = 2.0
    lonely = torch.zeros(1 << 21)
    lonely[-1] = 3e-20
    check([mixed, lonely, torch.tensor([1e38, 1e-38])], 2.0)


def test_order_two_is_the_default_and_detail_is_only_found_when_asked_for():
    found = reference.measure([torch.tensor([3.0, 4.0])])
    assert found.norms.tolist() == [5.0]
    assert found.largest is None
    assert found.zeros is None


def test_the_entries_come_in_the_order_of_the_tensors():
    tensors = [torch.full((size,), 2.0) for size in (2000, 1, 1025, 4, 1024, 9)]
    found = reference.measure(tensors)
    assert found.norms.tolist() == pytest.approx([2 * math.sqrt(t.numel()) for t in tensors])


def beside(ones, small, row):
    """In every row of so many, 1.0 at the places `ones`, and `small` everywhere else."""

    def make(n):
        tensor = torch.full((n,), small)
        for place in ones:
            tensor[place::row] = 1.0
        return tensor

    return make


# Sums of squares that rounding in float32 spoils most, whatever order a CPU adds in.
HARD = {
    "ones": lambda n: torch.full((n,), 1.0),
    "1.1": lambda n: torch.full((n,), 1.1),
    "0.1": lambda n: torch.full((n,), 0.1),
    "3e-5": lambda n: torch.full((n,), 3e-5),
    "just below a power of two": lambda n: torch.full((n,), 1.4142134),
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(0)),
    "uniform": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(0)) + 1.0,
    "one in 1,024, the rest lost beside it": beside([0], 2.43e-4, 1024),
    "one in 128, the rest lost beside it": beside([0], 2.43e-4, 128),
    "one in 128, the rest rounded up beside it": beside([0], 2.45e-4, 128),
    "the last of 128": beside([127], 2.43e-4, 128),
    "eight in 128, a lane each": beside(range(8), 2.43e-4, 128),
    "sixteen in 128, a lane each": beside(range(16), 2.43e-4, 128),
    "one large for ten million small": beside([0], 1e-4, 1 << 30),
    "decades": lambda n: torch.logspace(-18, 2, n),
}


@pytest.mark.parametrize("make", HARD.values(), ids=HARD)
@pytest.mark.parametrize("size", [10_000_000, (1 << 20) + 77, (1 << 16) + 1])
def test_large_float32_tensors_are_within_one_millionth_whatever_they_hold(make, size):
    tensor = make(size)
    expected = tensor.double().square().sum().sqrt().item()
    assert reference.measure([tensor]).norms.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", HARD.values(), ids=HARD)
@pytest.mark.parametrize("size", [1 << 16, 5000, 129, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_small_tensors_are_added_in_float64_throughout(make, size, dtype):
    tensor = make(size).to(dtype)
    expected = tensor.double().square().sum().sqrt().item()
    assert reference.measure([tensor]).norms.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("make", HARD.values(), ids=HARD)
def test_a_small_tensor_and_its_parts_have_the_same_float32_norm(make):
    tensor = make(60_000)
    home = torch.device("cpu")
    whole = measure([tensor], home=home).norm.item()
    for parts in (2, 3, 4, 7, 8):
        assert measure(list(tensor.tensor_split(parts)), home=home).norm.item() == whole, parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_millions_of_half_precision_elements_are_within_one_millionth(dtype):
    tensor = torch.full((3_000_001,), 0.7, dtype=dtype)
    expected = abs(tensor[0].item()) * math.sqrt(tensor.numel())
    assert reference.measure([tensor]).norms.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1000, 1024, 5000, 100_000, 1_000_000])
def test_constant_float32_tensors_of_every_size_are_within_one_millionth(size):
    for value in (1.1, 0.3, 7e-4):
        tensor = torch.full((size,), value)
        expected = tensor[0].item() * math.sqrt(size)
        assert reference.measure([tensor]).norms.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("value", [1e151, 1.3e154, 1e-151, 1e-160])
def test_float64_pieces_whose_squares_add_up_beyond_float64_have_a_norm(dtype, value):
    tensor = torch.full(((1 << 21) + 1,), value, dtype=dtype)
    expected = value * math.sqrt(tensor.numel())
    assert reference.measure([tensor]).norms.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [200, 200_000])
def test_the_norm_does_not_ask_the_blas_library(monkeypatch, size):
    # Its order of summation is its own, and differs from one CPU to another.
    def refuse(*_args, **_kwargs):
        raise AssertionError("a sum of squares was left to BLAS")

    for name in ("dot", "vdot", "inner", "matmul", "mm", "mv"):
        monkeypatch.setattr(torch, name, refuse)
    tensors = [torch.full((size,), 2.0, dtype=dtype) for dtype in DTYPES]
    norms = reference.measure(tensors).norms.tolist()
    assert norms == pytest.approx([2.0 * math.sqrt(size)] * len(tensors), rel=1e-6)


floats = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-45, 1e-30, 1e20, 3.4e38, INF, -INF, NAN]),
)


@settings(max_examples=150)
@given(
    rows=st.lists(st.lists(floats, max_size=20), min_size=1, max_size=4),
    order=st.sampled_from(ORDERS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_numbers_are_measured_as_float64_would(rows, order, dtype):
    check([torch.tensor(row, dtype=torch.float32).to(dtype) for row in rows], order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_other_devices_compute_agrees_with_float64(kind, order):
    """The path of devices without a table entry, run on the CPU."""

    def measure(tensors, *, order, detail):
        return reference._measure_on_device(tensors, order=order, detail=detail)

    for dtype in DTYPES:
        tensors = [values(kind, size, dtype) for size in (1, 3, 1025)]
        tensors = [t for t in tensors if t is not None] or [torch.zeros(0, dtype=dtype)]
        if kind == "subnormal" and dtype is torch.float64:
            continue  # Dividing subnormal numbers leaves no digits to compare.
        check([*tensors, torch.zeros(0, dtype=dtype)], order, by=measure)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_the_norm_of_zeros_has_no_sign(zero, order):
    found = reference.measure([torch.full((5,), zero)], order=order, detail=True)
    assert math.copysign(1.0, found.norms.item()) == 1.0
    assert math.copysign(1.0, found.largest.item()) == 1.0


NEGATIVE = [-0.5, -1.0, -2.0, -11.0, -100.0, -INF]


def smallest_first(tensor, order):
    """The norm of a negative order in float64, divided by the smallest magnitude."""
    magnitudes = tensor.double().abs()
    if torch.isnan(magnitudes).any():
        return NAN
    least = magnitudes.min().item()
    if least in (0.0, INF) or order == -INF:
        return least
    return least * (magnitudes / least).pow(order).sum().pow(1.0 / order).item()


def on_device(tensors, *, order):
    return reference._measure_on_device(tensors, order=order, detail=True)


@pytest.mark.parametrize("by", [reference.measure, on_device])
@pytest.mark.parametrize("order", NEGATIVE)
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_powers_of_a_negative_order_do_not_spoil_the_norm(order, size, by):
    ends = torch.tensor([1e-200, 1e200, 1e150], dtype=torch.float64)
    tensors = [torch.full((5,), size), torch.tensor([size, size / 2]), ends, 1e150 * ends[1:2]]
    found = by(tensors, order=order)
    for norm, tensor in zip(found.norms.tolist(), tensors, strict=True):
        assert math.isfinite(norm) or torch.isinf(tensor).any()
        assert norm == pytest.approx(smallest_first(tensor, order), rel=1e-12, abs=0.0)


@pytest.mark.parametrize("by", [reference.measure, on_device])
@pytest.mark.parametrize("order", NEGATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_negative_order_is_torchs_where_torchs_is_sound(order, dtype, by):
    torch.manual_seed(0)
    tensors = [torch.rand(size).add(0.5).to(dtype) for size in (1, 7, 1025)]
    tensors.append(torch.tensor([1.0, 0.0], dtype=dtype))
    tensors.append(torch.tensor([1.0, INF, -2.0], dtype=dtype))
    tensors.append(torch.tensor([1.0, NAN, -2.0], dtype=dtype))
    found = by(tensors, order=order)
    for norm, tensor in zip(found.norms.tolist(), tensors, strict=True):
        expected = torch.linalg.vector_norm(tensor, order, dtype=torch.float64).item()
        assert norm == pytest.approx(expected, rel=1e-9, abs=0.0, nan_ok=True)


@pytest.mark.parametrize("order", NEGATIVE)
def test_pieces_of_a_negative_order_count_together(order):
    tensor = torch.full((pieces.WRITE + 5,), 3e30)
    tensor[7] = 2e30
    norm = reference.measure([tensor], order=order).norms.item()
    assert norm == pytest.approx(smallest_first(tensor, order), rel=1e-9, abs=0.0)
    both = measure([tensor[:100], tensor[100:]], home=torch.device("cpu"), order=order).norm.item()
    assert both == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("order", [0.01, 0.5])
def test_an_order_below_one_is_infinite_only_where_float64_ends(order):
    found = reference.measure([torch.ones(1_000), torch.ones(pieces.READ + 1)], order=order)
    expected = [1_000 ** (1.0 / order), INF if order < 0.02 else (pieces.READ + 1) ** 2.0]
    assert found.norms.tolist() == pytest.approx(expected, rel=1e-9)
    assert found.inf.tolist() == [0, 0]


@pytest.mark.parametrize("by", [reference.measure, on_device])
def test_order_zero_counts_what_is_not_zero(by):
    tensors = [torch.tensor([0.0, 5e-324, 1e300], dtype=torch.float64), torch.zeros(3)]
    assert by(tensors, order=0.0).norms.tolist() == [2.0, 0.0]
