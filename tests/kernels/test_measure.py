"""`measure` of every backend against exact sums: dtypes, odd sizes, extreme values, layouts, orders."""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks.kernels import STATISTICS, reference, total_norm
from kernels.cases import DTYPES, INF, KINDS, NAN, OVERLAPPING, exact_norm, layouts, same_bits, values

# Triton's interpreter computes with NumPy, which warns where arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

ORDERS = [1.0, 2.0, INF]
INTERPRETED_BFLOAT16 = [kind for kind in KINDS if kind not in ("subnormal", "mixed")]
"""Triton's interpreter reads subnormal bfloat16 numbers as zeros; the compiled kernels do not."""


def check(found, tensors, order, accuracy):
    """Compares a table of statistics with what float64 and Python's exact sum give."""
    assert (found.dtype, found.shape) == (torch.float64, (len(STATISTICS), len(tensors)))
    for tensor, column in zip(tensors, found.cpu().T.tolist(), strict=True):
        statistics = dict(zip(STATISTICS, column, strict=True))
        numbers = tensor.double()
        finite_or_inf = numbers[~numbers.isnan()].abs()
        assert statistics["norm"] == pytest.approx(exact_norm(tensor, order), rel=accuracy, abs=0.0, nan_ok=True)
        assert statistics["largest"] == (finite_or_inf.max().item() if finite_or_inf.numel() else 0.0)
        assert statistics["zeros"] == (numbers == 0).sum().item()
        assert statistics["nan"] == numbers.isnan().sum().item()
        assert statistics["inf"] == numbers.isinf().sum().item()
        assert not math.copysign(1.0, statistics["norm"]) < 0.0


@pytest.mark.parametrize("order", ORDERS)
def test_every_value_and_size_has_the_statistics_that_float64_gives(backend, dtype, order):
    kinds = KINDS if (backend.name, dtype) != ("Triton", torch.bfloat16) else INTERPRETED_BFLOAT16
    tensors = [values(kind, size, dtype) for size in backend.sizes for kind in kinds]
    check(backend.module.measure(backend.copies(tensors), order=order), tensors, order, backend.accuracy_of(dtype))


def test_every_layout_has_the_statistics_of_its_elements(backend, dtype):
    tensors = [*layouts(dtype).values(), *(tensor.to(dtype) for tensor in OVERLAPPING.values())]
    check(backend.module.measure(backend.copies(tensors)), tensors, 2.0, backend.accuracy_of(dtype))


@pytest.mark.parametrize("order", [0.5, 3.0, 4.0, 10.0])
def test_any_positive_order_is_supported(backend, order):
    tensors = [values(kind, size, torch.float32) for size in (0, 1, 17, 129) for kind in KINDS]
    tensors += [torch.full((5,), size) for size in (1e-38, 1e-30, 1e30, 3e38)]
    check(backend.module.measure(backend.copies(tensors), order=order), tensors, order, 1e-12)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-150, 1e150, 1e200, 1e307])
def test_float64_powers_that_leave_the_range_do_not_spoil_the_norm(backend, order, size):
    # Subnormal numbers have few digits, and so has a quotient of two.
    accuracy = 1e-2 if size < 1e-300 else 1e-12
    tensors = [torch.full((count,), size, dtype=torch.float64) for count in (1, 3, 8)]
    check(backend.module.measure(backend.copies(tensors), order=order), tensors, order, accuracy)


@pytest.mark.parametrize("order", ORDERS)
def test_one_bad_element_anywhere_is_counted(backend, order):
    size = backend.sizes[-1]
    tensors = []
    for place in (0, 1, size // 2, size - 2, size - 1):
        for bad in (NAN, INF, -INF):
            tensors += [torch.ones(5), torch.ones(size)]
            tensors[-1][place] = bad
    check(backend.module.measure(backend.copies(tensors), order=order), tensors, order, backend.accuracy)


def test_tensors_of_all_dtypes_go_through_one_call_in_order(backend):
    tensors = [values("normal", 30 + k, dtype) for k, dtype in enumerate(DTYPES * 3)]
    tensors[4][5] = NAN
    check(backend.module.measure(backend.copies(tensors)), tensors, 2.0, backend.accuracy)


def test_without_detail_norms_and_counts_are_the_same(backend):
    tensors = backend.copies([values(kind, 100, torch.float32) for kind in KINDS])
    whole, brief = (backend.module.measure(tensors, detail=detail).cpu() for detail in (True, False))
    for row, name in enumerate(STATISTICS):
        if name in ("norm", "nan", "inf"):
            assert torch.equal(whole[row].nan_to_num(-1.0), brief[row].nan_to_num(-1.0)), name


def test_measuring_changes_no_bit_and_no_version(backend):
    tensors = [*layouts().values(), *(values("all three", 129, dtype) for dtype in DTYPES)]
    tensors = backend.copies(tensors)
    copies, versions = [tensor.clone() for tensor in tensors], [tensor._version for tensor in tensors]
    for order in (2.0, 3.0):
        backend.module.measure(tensors, order=order)
    assert all(map(same_bits, tensors, copies))
    assert [tensor._version for tensor in tensors] == versions


def test_the_same_gradients_at_other_addresses_give_the_same_bits(backend):
    tensors = [values("normal", size, torch.float32) for size in backend.sizes]
    first, second = (backend.module.measure(backend.copies(tensors)) for _ in range(2))
    assert torch.equal(first, second)


def test_a_large_value_among_tiny_ones_and_a_tiny_one_among_zeros_count_fully(backend):
    mixed = torch.full((1029,), 1e-25)
    mixed[777] = 2.0
    lonely = torch.zeros(1029)
    lonely[-1] = 3e-20
    tensors = [mixed, lonely, torch.tensor([1e38, 1e-38])]
    check(backend.module.measure(backend.copies(tensors)), tensors, 2.0, backend.accuracy)


def test_gradients_that_require_grad_and_parameters_can_be_measured(backend):
    tensors = [torch.ones(4, device=backend.device, requires_grad=True), torch.nn.Parameter(torch.ones(9))]
    found = backend.module.measure([tensors[0], tensors[1].to(backend.device)])
    assert found[0].tolist() == [2.0, 3.0]
    assert not found.requires_grad


def _pattern(ones, small, row):
    """1.0 at the places `ones` of every row, `small` everywhere else."""

    def make(n):
        tensor = torch.full((n,), small)
        for place in ones:
            tensor[place::row] = 1.0
        return tensor

    return make


# Sums of squares that float32 rounding spoils most, in whatever order a CPU adds.
HARD = {
    "1.1": lambda n: torch.full((n,), 1.1),
    "3e-5": lambda n: torch.full((n,), 3e-5),
    "just below a power of two": lambda n: torch.full((n,), 1.4142134),
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(0)),
    "one in 1,024, the rest lost beside it": _pattern([0], 2.43e-4, 1024),
    "one in 128, the rest lost beside it": _pattern([0], 2.43e-4, 128),
    "one in 128, the rest rounded up beside it": _pattern([0], 2.45e-4, 128),
    "the last of 128": _pattern([127], 2.43e-4, 128),
    "sixteen in 128": _pattern(range(16), 2.43e-4, 128),
    "one large in millions of small": _pattern([0], 1e-4, 1 << 30),
    "decades": lambda n: torch.logspace(-18, 2, n),
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in HARD for size in ((1 << 20) + 77, (1 << 16) + 1)),
        ("normal", 10_000_000),
        ("one large in millions of small", 10_000_000),  # torch's norm is off by more.
    ],
)
def test_plain_torch_is_within_one_millionth_for_large_float32_tensors(name, size):
    tensor = HARD[name](size)
    expected = tensor.double().square().sum().sqrt().item()
    assert reference.measure([tensor])[0].item() == pytest.approx(expected, rel=6e-7)


@pytest.mark.parametrize("name", HARD)
def test_small_tensors_are_summed_in_float64_throughout(backend, name):
    tensors = [HARD[name](size) for size in (1, 129, 1029)]
    found = backend.module.measure(backend.copies(tensors))[0].cpu()
    expected = torch.stack([tensor.double().square().sum().sqrt() for tensor in tensors])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_millions_of_half_precision_elements_do_not_overflow(dtype):
    tensor = torch.full((3_000_001,), 300.0, dtype=dtype)
    expected = tensor[0].item() * math.sqrt(tensor.numel())
    assert reference.measure([tensor])[0].item() == pytest.approx(expected, rel=6e-7)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
def test_on_devices_without_kernels_the_statistics_are_those_of_float64(dtype, order):
    """The operations for other devices, run on a CPU."""
    for kind in KINDS:
        if dtype is torch.float64 and kind in ("subnormal", "mixed"):
            continue  # A quotient of subnormal numbers has too few digits to compare.
        tensors = [values(kind, size, dtype) for size in (0, 1, 3, 1025)]
        found = torch.stack([reference._statistics(tensor, order) for tensor in tensors], dim=1)
        check(found, tensors, order, 1e-12)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("size", [0.0, 1e-300, 1.0, 1e300])
def test_the_total_norm_is_the_norm_of_all_elements_together(order, size):
    tensor = torch.rand(60_000, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * size
    parts = torch.stack([reference.measure([part], order=order)[0, 0] for part in tensor.tensor_split(7)])
    found = total_norm(parts, order)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(exact_norm(tensor, order), rel=1e-13, abs=0.0)


def test_the_total_norm_is_nan_or_inf_if_a_norm_is_and_zero_without_norms():
    assert math.isnan(total_norm(torch.tensor([1.0, NAN, INF]).double(), 2.0).item())
    assert total_norm(torch.tensor([1.0, INF]).double(), 2.0).item() == INF
    assert total_norm(torch.zeros(0).double(), 2.0).item() == 0.0


@pytest.mark.parametrize("order", [*ORDERS, 3.0])
def test_the_norm_of_all_tensors_is_that_of_their_elements(backend, order):
    tensors = [*layouts().values(), *(values("normal", 1029, dtype) for dtype in DTYPES)]
    tensors += [torch.full((3,), 1e38), torch.full((3,), 1e-38)]
    expected = exact_norm(torch.cat([tensor.double().flatten() for tensor in tensors]), order)
    found = backend.module.norm(backend.copies(tensors), order)
    assert isinstance(found, float) if backend.device == "cpu" and backend.name != "Triton" else found.shape == ()
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [*ORDERS, 3.0])
@pytest.mark.parametrize(("bad", "expected"), [([INF], INF), ([NAN], NAN), ([INF, NAN], NAN), ([-INF, 1e38], INF)])
def test_the_norm_of_all_tensors_is_nan_or_inf_if_an_element_is(backend, order, bad, expected):
    tensors = [torch.ones(3), torch.tensor(bad), torch.ones(600).half()]
    found = float(backend.module.norm(backend.copies(tensors), order))
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1e307])
def test_the_norm_of_all_float64_tensors_does_not_overflow_or_vanish(backend, size):
    tensors = [torch.full((3,), size, dtype=torch.float64), torch.full((13,), size, dtype=torch.float64)]
    accuracy = 1e-2 if size < 1e-300 else 1e-12
    assert float(backend.module.norm(backend.copies(tensors), 2.0)) == pytest.approx(4.0 * size, rel=accuracy, abs=0.0)
