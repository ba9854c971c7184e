"""Tensors are rounded as `precision.Format.round`, exact by construction, rounds numbers."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.lab.emulate.rounding import BLOCK, _to_fp4, rounding_to
from gradilocks.lab.formats import FORMATS

ELEMENTWISE = ["tf32", "bf16", "fp16", "fp8 e5m2", "fp8 e4m3"]
BITS = st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("f", struct.pack("I", bits))[0])


def rounded(name: str, values: list[float]) -> list[float]:
    rounding = _to_fp4 if name == "fp4 e2m1" else rounding_to(FORMATS[name])
    return rounding(torch.tensor(values)).tolist()


def same(found: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    return found == expected and math.copysign(1.0, found) == math.copysign(1.0, expected)


@pytest.mark.parametrize("name", [*ELEMENTWISE, "fp4 e2m1"])
@given(values=st.lists(BITS, min_size=1, max_size=40))
def test_any_float32_becomes_what_the_format_holds(name, values):
    for value, found in zip(values, rounded(name, values), strict=True):
        assert same(found, FORMATS[name].round(value)), value


@pytest.mark.parametrize("name", [*ELEMENTWISE, "fp4 e2m1"])
def test_at_every_border_of_the_format(name):
    """Each value of the format's first and last binades, the midpoints, and their neighbours."""
    each = FORMATS[name]
    sizes = [each.smallest_subnormal * step / 2 for step in range(40)]
    sizes += [each.smallest_normal * (1 + each.epsilon * step / 2) for step in range(-9, 9)]
    sizes += [each.largest * (1 + each.epsilon * step / 8) for step in range(-9, 9)]
    tensor = torch.tensor([*sizes, math.inf, math.nan])
    infinity = torch.tensor(math.inf)
    tensor = torch.cat((tensor, tensor.nextafter(infinity), tensor.nextafter(-infinity)))
    values = torch.cat((tensor, -tensor)).tolist()
    for value, found in zip(values, rounded(name, values), strict=True):
        assert same(found, each.round(value)), value


def test_fp32_changes_nothing_and_says_so():
    assert rounding_to(FORMATS["fp32"]) is None


@pytest.mark.parametrize("name", [*ELEMENTWISE, "fp4 e2m1"])
def test_rounding_twice_is_rounding_once(name):
    values = torch.randn(10_000) * torch.randn(10_000).mul(8).exp()
    once = rounding_to(FORMATS[name])(values)
    assert torch.equal(rounding_to(FORMATS[name])(once), once)


@pytest.mark.parametrize("shape", [(), (1,), (BLOCK,), (3, 33), (2, 3, 64), (4, 0)])
def test_fp4_has_a_power_of_two_for_each_block_along_the_last_dimension(shape):
    values = torch.randn(shape) * 1e-5
    found = rounding_to(FORMATS["fp4 e2m1"])(values)
    assert found.shape == values.shape
    rows = zip(
        values.reshape(-1, shape[-1] if shape else 1).tolist() if values.numel() else [],
        found.reshape(-1, shape[-1] if shape else 1).tolist() if values.numel() else [],
        strict=True,
    )
    for row, got in rows:
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK]
            unit = 2.0 ** (math.frexp(max(map(abs, block)))[1] - 3)
            expected = [FORMATS["fp4 e2m1"].round(value / unit) * unit for value in block]
            assert got[start : start + BLOCK] == expected


def test_a_block_of_zeros_stays_zero_and_one_with_inf_is_nan():
    rounding = rounding_to(FORMATS["fp4 e2m1"])
    values = torch.zeros(2, BLOCK)
    values[1, 3] = math.inf
    found = rounding(values)
    assert found[0].eq(0).all()
    assert found[1].isnan().all()


@pytest.mark.parametrize("name", [*ELEMENTWISE, "fp4 e2m1"])
def test_a_tensor_that_is_not_contiguous_is_rounded_in_its_order(name):
    values = torch.randn(6, 64)
    rounding = rounding_to(FORMATS[name])
    assert torch.equal(rounding(values.T), rounding(values.T.contiguous()))
    assert torch.equal(rounding(values[:, ::2]), rounding(values[:, ::2].clone()))
