"""The shares that a histogram promises, against what rounding really does to the values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradilocks
from gradilocks.lab.audit import Histogram
from gradilocks.lab.audit.counting import Tally, read
from gradilocks.lab.audit.judging import lost_mass, shares_of
from gradilocks.lab.emulate.rounding import rounding_to
from gradilocks.lab.formats import FORMATS

NARROW = ["fp16", "fp8 e5m2", "fp8 e4m3"]
MAGNITUDES = st.lists(
    st.tuples(st.floats(1.0, 2.0, exclude_max=True, width=32), st.integers(-40, 30)),
    min_size=1,
    max_size=60,
)


def histogram(values: torch.Tensor) -> Histogram:
    tally = Tally()
    tally.add(values)
    return read([tally])[0]


@pytest.mark.parametrize("name", [*NARROW, "bf16", "tf32"])
@given(MAGNITUDES, st.integers(-20, 30))
def test_shares_at_a_power_of_two_equal_real_rounding(name, drawn, exponent):
    format, scale = FORMATS[name], 2.0**exponent
    values = torch.tensor([mantissa * 2.0**power for mantissa, power in drawn])
    scaled = values.double().mul(scale).float()
    stored = rounding_to(format)(scaled)
    shares, count = shares_of(histogram(values), format, scale), len(drawn)

    assert shares.lost * count == pytest.approx(int((stored == 0).sum()))

    # What rounds up to the smallest normal number counts by what it was.
    small = int(((scaled < format.smallest_normal) & (stored != 0)).sum())
    assert shares.subnormal * count == pytest.approx(small)

    # Only the bin of the largest number lies across the border: there it is an estimate.
    top = math.floor(math.log2(format.largest))
    beyond = int((scaled >= 2.0 ** (top + 1)).sum())
    across = int(((scaled >= 2.0**top) & (scaled < 2.0 ** (top + 1))).sum())
    assert beyond - 1e-6 <= shares.overflow * count <= beyond + across + 1e-6
    overflows = not stored.isfinite().all()
    if not format.infinite:
        step = format.epsilon * 2.0**top
        overflows = bool((scaled > format.largest + step / 2).any())
    assert (shares.overflow > 0) == overflows
    largest = float(values.max())
    assert shares.headroom == pytest.approx(math.log2(format.largest / largest) - exponent)


@pytest.mark.parametrize("name", NARROW)
def test_shares_at_other_scales_are_close_where_values_are_many(name):
    torch.manual_seed(0)
    format = FORMATS[name]
    values = torch.randn(200_000) * torch.exp(torch.randn(200_000) * 3 - 10)
    for scale in (3.0, 1000.0, 77_777.0):
        stored = rounding_to(format)(values * scale)
        shares = shares_of(histogram(values), format, scale)
        assert shares.lost == pytest.approx(float((stored == 0).float().mean()), abs=0.01)
        small = (stored != 0) & ((values * scale).abs() < format.smallest_normal)
        assert shares.subnormal == pytest.approx(float(small.float().mean()), abs=0.01)


def test_fp16_loses_what_is_no_more_than_half_its_smallest_number():
    shares = shares_of(histogram(torch.tensor([2.9e-8, 3.0e-8, 6e-8, 1.0])), FORMATS["fp16"], 1.0)
    assert (shares.lost, shares.subnormal, shares.overflow) == (0.25, 0.5, 0.0)


def test_the_largest_number_of_a_format_does_not_overflow_and_the_next_but_one_does():
    for name in NARROW:
        format = FORMATS[name]
        top = histogram(torch.tensor([format.largest]))
        assert shares_of(top, format, 1.0).overflow == 0.0
        assert shares_of(top, format, 1.0).headroom == 0.0
        assert shares_of(top, format, 2.0).overflow == 1.0


def test_without_values_there_are_no_shares():
    nothing = shares_of(histogram(torch.zeros(3)), FORMATS["fp16"], 1.0)
    assert (nothing.lost, nothing.subnormal, nothing.overflow) == (0.0, 0.0, 0.0)
    assert nothing.headroom is None


def test_a_tie_with_the_smallest_number_is_lost_with_all_that_it_weighs():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    found = gradilocks.audit(model, lambda m, x: m(x).mean() / 4096, [torch.randn(8192, 4)])
    seen = found.modules[0].activations
    assert (seen.largest, seen.smallest) == (2.0**-25, 2.0**-25)
    assert torch.tensor(seen.largest).half() == 0
    assert shares_of(seen, FORMATS["fp16"], 1.0).lost == 1.0
    assert lost_mass(seen, FORMATS["fp16"], 1.0) == 1.0
    assert shares_of(seen, FORMATS["fp16"], 2.0).lost == 0.0
    assert Histogram.from_plain(seen.to_plain()) == seen
    assert shares_of(seen + histogram(torch.ones(8192)), FORMATS["fp16"], 1.0).lost == 0.5


def test_a_histogram_written_before_powers_were_counted_is_still_read():
    plain = histogram(torch.tensor([1.0, 3.0])).to_plain()
    del plain["powers"]
    assert Histogram.from_plain(plain).counts == (1, 1)


def test_the_mass_below_a_bound_follows_the_values():
    torch.manual_seed(0)
    values = torch.exp(torch.randn(100_000) * 2)
    seen = histogram(values)
    for bound in (0.25, 1.0, 8.0):
        true = float(values[values < bound].sum() / values.sum())
        assert seen.mass(bound) / seen.mass() == pytest.approx(true, abs=0.02)
