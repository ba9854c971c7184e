"""Values counted by their exponent, against a slow reference that looks at each of them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.lab.audit import Histogram, counting
from gradilocks.lab.audit.counting import Tally, read

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


def counted(*tensors: torch.Tensor, scale: torch.Tensor | float = 1.0) -> Histogram:
    tally = Tally()
    for tensor in tensors:
        tally.add(tensor, scale=scale)
    return read([tally])[0]


def slowly(values: list[float]) -> Histogram:
    finite = [abs(value) for value in values if math.isfinite(value) and value != 0.0]
    return Histogram.of(
        Counter(math.frexp(value)[1] - 1 for value in finite),
        zeros=sum(value == 0.0 for value in values),
        nonfinite=sum(not math.isfinite(value) for value in values),
        largest=max(finite, default=None),
        smallest=min(finite, default=None),
        powers=Counter(math.frexp(v)[1] - 1 for v in finite if math.frexp(v)[0] == 0.5),
    )


@given(st.lists(FLOATS, max_size=40))
def test_counts_equal_a_look_at_every_value(values):
    assert counted(torch.tensor(values, dtype=torch.float32)) == slowly(values)


@given(st.lists(FLOATS, max_size=40))
def test_the_way_of_other_devices_counts_the_same(values):
    # What a GPU does, op for op; here on the CPU.
    bits = torch.tensor(values, dtype=torch.float32).view(torch.int32) & 0x7FFFFFFF
    small = counting._cells_of_small(bits)
    cells = torch.where(bits < counting._NORMAL, small, (bits >> 23) + 23)
    powers = counting._are_powers(bits)
    cells = torch.where(powers, cells + counting._CELLS, cells)
    sums = counting._spread_sum(cells)
    assert sums.tolist() == torch.bincount(cells, minlength=len(sums)).tolist()
    every, exact = counting._counted(bits.view(torch.float32), bits).view(2, -1)
    assert exact.tolist() == sums.view(2, -1)[1].tolist()
    assert every.tolist() == sums.view(2, -1).sum(0).tolist()


def test_every_subnormal_exponent_of_float32_has_a_bin_of_its_own():
    values = [2.0**exponent for exponent in range(-149, 128)]
    found = counted(torch.tensor(values))
    assert (found.first, found.counts) == (-149, (1,) * 277)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_first(dtype):
    torch.manual_seed(0)
    values = (torch.randn(1000) * 2.0 ** torch.randint(-24, 4, (1000,))).to(dtype)
    assert counted(values) == slowly(values.double().tolist())


def test_float64_is_counted_exactly_within_the_exponents_of_float32():
    values = [0.9999999999999999, -1.0, 1e-30, 0.0, math.inf, math.nan, 3e37]
    found = counted(torch.tensor(values, dtype=torch.float64))
    expected = slowly(values)
    assert (found.first, found.counts) == (expected.first, expected.counts)
    assert (found.zeros, found.nonfinite) == (1, 2)


def test_float64_beyond_float32_is_counted_at_the_ends():
    found = counted(torch.tensor([1e-300, 1e300], dtype=torch.float64))
    assert (found.first, len(found.counts), found.values) == (-149, 277, 2)


def test_a_scale_is_divided_out_whether_it_is_a_number_or_a_tensor():
    values = torch.tensor([1.0, 6.0, 1e-3])
    for scale in (1024.0, torch.tensor(1024.0)):
        assert counted(values * 1024, scale=scale) == counted(values)


def test_a_tensor_of_many_pieces_and_any_layout_is_counted_whole():
    torch.manual_seed(0)
    values = torch.randn(300, 700).t()[::2]
    found = counted(values, values.expand(2, *values.shape))
    assert found == slowly(values.flatten().tolist() * 3)


def test_complex_values_count_by_their_two_parts():
    found = counted(torch.tensor([3.0 + 0.25j, 0.0 + 1.0j]))
    assert found == slowly([3.0, 0.25, 0.0, 1.0])


def test_sparse_values_that_meet_at_one_index_are_added_first():
    sparse = torch.sparse_coo_tensor(
        [[1, 1, 2]], torch.tensor([1.0, 3.0, 0.5]), (5,), check_invariants=True
    )
    assert counted(sparse) == slowly([4.0, 0.5])


def test_many_tallies_are_read_at_once_and_in_order():
    tallies = [Tally() for _ in range(3)]
    tallies[0].add(torch.tensor([1.0]))
    tallies[2].add(torch.tensor([8.0, 8.0]))
    first, second, third = read(tallies)
    assert (first.first, second, third.counts) == (0, Histogram(), (2,))


def test_histograms_add_up():
    one, other = slowly([1.0, 0.0, 3.0]), slowly([1e-6, math.inf])
    assert one + other == slowly([1.0, 0.0, 3.0, 1e-6, math.inf])
    assert Histogram.total([]) == Histogram()
