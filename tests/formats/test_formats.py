"""The formats against torch's own casts, and the numbers that textbooks get wrong."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.lab.formats import FORMATS, describe, format_named

TORCHS = [each for each in FORMATS.values() if each.dtype]
ANY = st.floats(width=32, allow_nan=False)


@pytest.mark.parametrize("which", TORCHS, ids=lambda each: each.name)
def test_limits_are_torchs(which):
    limits = torch.finfo(getattr(torch, which.dtype))
    assert which.largest == limits.max
    assert which.smallest_normal == limits.smallest_normal
    assert which.epsilon == limits.eps
    assert which.bits(0.0).count("0") == limits.bits


@pytest.mark.parametrize("which", TORCHS, ids=lambda each: each.name)
@given(value=ANY)
def test_rounding_is_torchs(which, value):
    cast = torch.tensor(value, dtype=torch.float32).to(getattr(torch, which.dtype))
    expected, found = cast.double().item(), which.round(value)
    if math.isnan(expected):  # Older versions of torch do not saturate.
        assert which.name == "fp8 e4m3"
        assert found == math.copysign(448.0, value)
    else:
        assert found == expected


@pytest.mark.parametrize("which", TORCHS, ids=lambda each: each.name)
@given(value=ANY)
def test_bits_are_torchs(which, value):
    stored = which.round(value)
    if math.isnan(stored):
        return  # There are many of them.
    dtype = getattr(torch, which.dtype)
    size = dtype.itemsize
    view = torch.tensor(value, dtype=torch.float32).to(dtype)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    pattern = view.view(integers).item() & ((1 << 8 * size) - 1)
    assert which.bits(stored).replace(" ", "") == f"{pattern:0{8 * size}b}"


def test_fp4_has_eight_magnitudes_and_saturates():
    which = FORMATS["fp4 e2m1"]
    found = sorted({which.round(k / 100) for k in range(1000)})
    assert found == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert which.round(-1e9) == -6.0
    assert which.bits(-6.0) == "1 11 1"
    fates = [{s.format.name: s for s in describe(x)}["fp4 e2m1"].fate for x in (6.0, 7.0, 7.1)]
    assert fates == ["exact", "rounded", "overflow"]


def test_tf32_is_fp32_with_ten_bits():
    assert FORMATS["tf32"].round(1.0 + 2.0**-11) == 1.0  # A tie, to even.
    assert FORMATS["tf32"].round(1.0 + 3 * 2.0**-11) == 1.0 + 2.0**-9
    assert FORMATS["tf32"].largest < FORMATS["fp32"].largest


@pytest.mark.parametrize(
    ("value", "scale", "fate", "back", "precision"),
    [
        (6e-8, 1.0, "subnormal", 2.0**-24, 1),  # Not lost, whatever popular texts say.
        (2.0**-25, 1.0, "zero", 0.0, 0),  # A tie, to even.
        (math.nextafter(2.0**-25, 1.0), 1.0, "subnormal", 2.0**-24, 1),
        (6e-8, 32768.0, "rounded", None, 11),
        (2.0**-14, 1.0, "exact", 2.0**-14, 11),
        (65504.0, 1.0, "exact", 65504.0, 11),
        (65519.0, 1.0, "rounded", 65504.0, 11),
        (65520.0, 1.0, "overflow", math.inf, 0),
        (0.0, 8.0, "exact", 0.0, 0),
    ],
)
def test_what_fp16_makes_of_a_number(value, scale, fate, back, precision):
    found = {s.format.name: s for s in describe(value, scale)}["fp16"]
    assert (found.fate, found.precision) == (fate, precision)
    assert back is None or found.back == back
    if fate == "rounded" and scale > 1:
        assert found.error < 2.0**-11
        assert found.stored == pytest.approx(1.966e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("fp16", "fp16"), ("torch.float16", "fp16"), ("half", "fp16"), ("E4M3", "fp8 e4m3")],
)
def test_a_format_goes_by_several_names(name, meant):
    assert format_named(name) is FORMATS[meant]


def test_what_is_no_format_or_no_number_is_refused():
    with pytest.raises(ValueError, match=r"there is no format 'fp17'. Known are fp32, tf32"):
        format_named("fp17")
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="value must be a finite number"):
            describe(bad)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            describe(1.0, bad)
    with pytest.raises(ValueError, match="beyond every format"):
        describe(1e300, 1e300)


def test_a_value_times_a_scale_is_rounded_once():
    """More than halfway by a hair that float64 does not hold."""
    value, scale = 1.418226553292466, 0.7054502532950953
    assert Fraction(value) * Fraction(scale) > Fraction(1) + Fraction(1, 2048)
    assert value * scale == 1 + 1 / 2048
    stored = {each.format.name: each.stored for each in describe(value, scale)}
    assert stored["fp16"] == 1.0009765625


@pytest.mark.parametrize(("value", "scale"), [("1", 1.0), (1.0, "2"), (None, 1.0), (True, 1.0)])
def test_what_is_no_number_is_refused(value, scale):
    with pytest.raises(TypeError, match="must be a number, got"):
        describe(value, scale)


def test_an_integer_beyond_float64_is_refused():
    with pytest.raises(ValueError, match="float64"):
        describe(10**400)


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_e4m3_has_torchs_name_too(name):
    assert format_named(name).name == "fp8 e4m3"


def test_no_name_is_no_format():
    with pytest.raises(ValueError, match="there is no format ''"):
        format_named("")
