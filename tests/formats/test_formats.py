"""Formats and `explain`: limits and rounding are torch's, and subnormals are described right."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradilocks
from gradilocks.explain import to_text
from gradilocks.formats import FORMATS, find_format

NAMES = list(FORMATS)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_limits_are_torchs(name):
    format, info = FORMATS[name], torch.finfo(FORMATS[name].dtype)
    assert format.largest == info.max
    assert format.smallest_normal == info.smallest_normal
    assert format.smallest_subnormal == info.smallest_normal * info.eps
    assert 1 + format.exponent_bits + format.mantissa_bits == info.bits


def borders(name: str) -> list[float]:
    """Numbers around every limit of a format, with the ties between neighbours."""
    format = FORMATS[name]
    spacing = 2.0 ** (math.frexp(format.largest)[1] - 1 - format.mantissa_bits)
    half = [format.smallest_subnormal * k / 2 for k in range(8)]
    near_one = [1.0 + k * 2.0 ** -(format.mantissa_bits + 1) for k in range(5)]
    top = [format.largest, format.largest + spacing / 2, format.largest + spacing, math.inf]
    exact = [*half, *near_one, format.smallest_normal, *top]
    near = [math.nextafter(value, towards) for value in exact for towards in (0.0, math.inf) if value]
    return [value for value in exact + near if value == torch.tensor(value, dtype=torch.float32).item()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_numbers_at_the_borders_are_rounded_as_torch_rounds_tensors(name, sign):
    format = FORMATS[name]
    for value in borders(name):
        value *= sign
        tensor = format.round_tensor(torch.tensor([value], dtype=torch.float32))
        assert format.round(value) == tensor.item(), value
        assert math.copysign(1.0, format.round(value)) == sign


@pytest.mark.parametrize("name", NAMES)
@given(value=FLOATS)
def test_any_number_is_rounded_as_torch_rounds_tensors(name, value):
    format = FORMATS[name]
    assert format.round(value) == format.round_tensor(torch.tensor([value], dtype=torch.float32)).item()


@pytest.mark.parametrize("name", NAMES)
@given(value=FLOATS)
def test_rounding_twice_is_rounding_once(name, value):
    once = FORMATS[name].round(value)
    assert FORMATS[name].round(once) == once


@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_nan_and_the_input_is_not_changed(name):
    values = torch.tensor([math.nan, 1.1])
    rounded = FORMATS[name].round_tensor(values)
    assert rounded[0].isnan()
    assert rounded.dtype == torch.float32
    assert values[1] == torch.tensor(1.1)
    assert rounded.data_ptr() != values.data_ptr()
    assert math.isnan(FORMATS[name].round(math.nan))


def test_a_number_that_is_too_large_becomes_inf_or_the_largest():
    assert FORMATS["fp16"].round(65520.0) == math.inf
    assert FORMATS["fp16"].round(65519.0) == 65504.0
    assert FORMATS["fp8_e4m3"].round(-1e9) == -448.0
    assert FORMATS["fp8_e4m3"].overflows(465.0)
    assert not FORMATS["fp8_e4m3"].overflows(464.0)


def test_bits_are_those_in_memory():
    fp16 = FORMATS["fp16"]
    assert fp16.bits(1.0) == "0 01111 0000000000"
    assert fp16.bits(-2.0) == "1 10000 0000000000"
    assert fp16.bits(6e-8) == "0 00000 0000000001"
    assert fp16.bits(1e9) == "0 11111 0000000000"
    assert FORMATS["fp8_e4m3"].bits(448.0) == "0 1111 110"
    assert FORMATS["bf16"].bits(-0.0) == "1 00000000 0000000"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp16", "fp16"),
        ("float16", "fp16"),
        (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"),
        ("float8_e4m3fn", "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"),
    ],
)
def test_a_format_is_found_by_name_and_dtype(name, expected):
    assert find_format(name).name == expected


@pytest.mark.parametrize("name", ["fp4", "", torch.int8, None])
def test_an_unknown_format_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"unknown format .* Choose one of fp32, bf16, fp16, fp8_e5m2, fp8_e4m3"):
        find_format(name)


# --- explain ----------------------------------------------------------------------------------------------------------


def fp16_row(value: float, scale: float | None = None):
    return [row for row in gradilocks.explain(value, scale=scale) if row.format.name == "fp16"][-1]


@pytest.mark.parametrize(
    ("value", "result", "recovered", "bits"),
    [
        (1.0, "exact", 1.0, 11),
        (0.1, "rounded", 0.0999755859375, 11),
        (6e-8, "subnormal", 2.0**-24, 1),
        (3e-5, "subnormal", 503 * 2.0**-24, 9),
        (6e-5, "subnormal", 1007 * 2.0**-24, 10),
        (2.0**-14, "exact", 2.0**-14, 11),
        (2.0**-25, "underflow", 0.0, 0),
        (math.nextafter(2.0**-25, 1), "subnormal", 2.0**-24, 1),
        (-1e-8, "underflow", 0.0, 0),
        (0.0, "exact", 0.0, 0),
        (70000.0, "overflow", math.inf, 0),
    ],
)
def test_fp16_keeps_subnormals_and_loses_only_what_is_below_them(value, result, recovered, bits):
    row = fp16_row(value)
    assert (row.result, row.recovered, row.significant_bits) == (result, recovered, bits)


def test_a_scale_lifts_a_small_gradient_into_the_range():
    row = fp16_row(6e-8, scale=32768)
    assert row.stored == pytest.approx(1.966e-3, rel=1e-3)
    assert (row.result, row.significant_bits) == ("rounded", 11)
    assert row.relative_error < 2**-11
    assert fp16_row(6e-8).relative_error == pytest.approx(0.0066, rel=0.01)


def test_a_scale_can_be_too_large():
    row = fp16_row(10.0, scale=65536)
    assert (row.result, row.recovered, row.relative_error) == ("overflow", math.inf, math.inf)
    assert row.describe() == "overflow: the largest number is 65504"


def test_there_is_a_row_per_format_and_scale():
    assert [row.format.name for row in gradilocks.explain(1.0)] == NAMES
    assert [(row.scale, row.format.name) for row in gradilocks.explain(1.0, scale=4)] == [
        (scale, name) for scale in (1.0, 4.0) for name in NAMES
    ]


def test_the_text_has_one_table_per_scale():
    text = to_text(gradilocks.explain(6e-8, scale=32768))
    first, second = text.split("\n\n")
    assert first.splitlines()[0] == "6e-08"
    assert second.splitlines()[0] == "6e-08 × 32768 = 0.001966"
    (fp16,) = [line for line in first.splitlines() if "fp16" in line]
    assert "0 00000 0000000001" in fp16
    assert "subnormal: 1 of 11 significant bits, error 0.66%" in fp16
    (e5m2,) = [line for line in first.splitlines() if "fp8_e5m2" in line]
    assert "underflow: magnitudes up to 7.63e-06 become 0" in e5m2
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": math.nan}, ValueError, "value must be"),
        ({"value": math.inf}, ValueError, "value must be"),
        ({"value": -math.inf}, ValueError, "value must be finite"),
        ({"value": "1"}, TypeError, "value must be a number"),
        ({"value": 1.0, "scale": 0.0}, ValueError, "scale must be above 0"),
        ({"value": 1.0, "scale": math.inf}, ValueError, "scale must be"),
    ],
)
def test_a_bad_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        gradilocks.explain(**arguments)


# --- public names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["import gradilocks.{0}\n", "", "from gradilocks.{0} import __all__\n"])
def test_a_public_function_is_not_hidden_by_its_module_whichever_is_imported_first(order):
    """In a new process, because the first import of a module decides."""
    program = "".join(order.format(name) for name in ("audit", "emulate", "explain", "trace"))
    program += "import gradilocks, types\n"
    program += "for name in ('audit', 'emulate', 'explain', 'trace'):\n"
    program += "    assert not isinstance(getattr(gradilocks, name), types.ModuleType), name\n"
    program += "from gradilocks.audit import audit\nassert gradilocks.audit is audit\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
