"""The numbers that every view shows have one definition each."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.view import runfile, text
from gradilocks.view.columns import DEFINITIONS, columns, duration_of, facts, summarize
from gradilocks.view.figures import thin
from view import made_runs as made


def summary_of(run: runfile.Run, number: int = 0):
    return summarize(run, columns(run)[number])


def test_first_final_and_lowest_loss_are_exact() -> None:
    plant = {1: {"loss": "nan"}, 2: {"loss": 4.81}, 150: {"loss": -8952.0}, 299: {"loss": 4.6}, 300: {"loss": "inf"}}
    summary = summary_of(made.made_run(plant=plant))
    assert (summary.first_loss, summary.final_loss) == (4.81, 4.6)
    assert (summary.lowest_loss, summary.lowest_step) == (-8952.0, 150)
    assert not summary.last_loss_is_finite


def test_the_final_loss_is_never_below_the_lowest() -> None:
    summary = summary_of(made.made_run(80, plant={80: {"loss": 0.1228}}))
    assert (summary.final_loss, summary.lowest_loss, summary.lowest_step) == (0.1228, 0.1228, 80)


def test_the_typical_norm_is_the_median_of_the_finite_norms() -> None:
    norms = {1: 1.0, 2: "inf", 3: 3.0, 4: "nan", 5: 100.0}
    assert (
        summary_of(made.made_run(5, plant={step: {"norm": norm} for step, norm in norms.items()})).typical_norm == 3.0
    )


def test_steps_per_second_are_those_of_the_last_session() -> None:
    assert summary_of(made.made_run(11)).steps_per_second == pytest.approx(10.0)
    resumed = made.run_of(
        *made.steps(5), made.header(time=9000.0), *made.steps(6, first=6, always=lambda s: {"time": 9000.0 + s})
    )
    assert summary_of(resumed).steps_per_second == pytest.approx(1.0)
    assert math.isnan(summary_of(made.made_run(1)).steps_per_second)


def test_the_duration_ends_with_the_run_or_its_last_line() -> None:
    run = made.made_run(10)
    assert duration_of(run) == 100.0
    run.end = None
    run.last_time = 1042.0
    assert duration_of(run) == 42.0


def test_no_limit_and_no_scale_are_said_the_same_way_everywhere() -> None:
    run = made.made_run(10)
    shown = facts(run, summary_of(run))
    assert (shown["clipped"], shown["scale"]) == ("no limit", "no scaling")
    run = made.made_run(
        10, always=lambda step: {"limit": 1.0, "clipped": step <= 5, "scale": 2.0**16 if step < 9 else 2.0**15}
    )
    shown = facts(run, summary_of(run))
    assert (shown["clipped"], shown["scale"]) == ("50%", "2^16 → 2^15")


def test_clipped_steps_are_counted_among_the_applied_ones() -> None:
    run = made.made_run(
        10, always=lambda step: {"limit": 1.0, "clipped": True}, plant=dict.fromkeys((1, 2), made.SKIPPED)
    )
    assert summary_of(run).clipped_share == 1.0
    assert summary_of(run).skipped == 2


def test_a_rejected_step_is_a_skipped_one() -> None:
    run = made.made_run(10, plant={3: {"rejected": True}})
    assert (summary_of(run).skipped, summary_of(run).rejected) == (1, 1)


def test_every_number_on_the_page_has_a_definition() -> None:
    run = made.made_run(10, always=lambda step: {"limit": 1.0, "scale": 2.0})
    assert set(facts(run, summary_of(run))) <= set(DEFINITIONS)


def test_optimizers_have_columns_of_their_own() -> None:
    run = made.run_of(*made.steps(5), made.optimizer(1, "SGD"), *made.steps(3, number=1))
    assert [(steps.label, len(steps)) for steps in columns(run)] == [
        ("optimizer 0 (AdamW)", 5),
        ("optimizer 1 (SGD)", 3),
    ]


def test_details_of_different_lengths_fill_a_table() -> None:
    plant = {
        1: {"norms": [1.0, 2.0]},
        3: {"norms": [1.0, "nan", 3.0], "zeros": [0.5]},
        4: {"updates": [None, 1e-3, 1e-3]},
    }
    (steps,) = columns(made.made_run(5, plant=plant))
    assert steps.detail.tolist() == [0, 2, 3]
    assert steps.norms.shape == steps.zeros.shape == steps.updates.shape == (3, 3)
    assert steps.names == ["a.weight", "b.weight", "tensor 2"]
    assert np.isnan(steps.norms[1, 1])


def test_a_tensor_without_a_gradient_is_told_from_one_whose_gradient_is_zero() -> None:
    (steps,) = columns(made.made_run(2, always=lambda step: {"norms": [0.0, 0.0, 1.0], "zeros": [0.0, 1.0, 0.0]}))
    assert np.isnan(steps.norms[0]).tolist() == [True, False, False]


# --- text -------------------------------------------------------------------------------------------------------------


@given(st.floats(-1e300, 1e300))
def test_a_number_reads_back_as_itself_to_four_digits(value: float) -> None:
    shown = text.number(value)
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=5.01e-4, abs=0)
    assert len(shown) <= 11


@given(st.floats(0, 1))
def test_a_percentage_is_zero_or_full_only_if_the_share_is(share: float) -> None:
    shown = text.percent(share)
    assert (shown == "0%") == (share == 0)
    assert (shown == "100%") == (share == 1)


@given(st.text())
def test_clean_text_is_printable(hostile: str) -> None:
    assert text.clean(hostile).isprintable()


@given(st.text(min_size=1), st.integers(3, 30))
def test_a_short_name_keeps_both_ends(name: str, length: int) -> None:
    short = text.shorten(name, length)
    assert len(short) <= max(length, len(name) if len(name) <= length else 0)
    assert short[0] == name[0]
    assert short[-1] == name[-1] or length < 4


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(3.21, "3.2 s"), (75, "1 min 15 s"), (7322, "2 h 2 min"), (200000, "2 d 7 h"), (59.99, "60.0 s")],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_a_thinned_curve_keeps_every_extreme() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=100_000)
    y[31_415], y[92_653] = 1e6, -1e6
    x, kept = thin(np.arange(len(y)), y)
    assert len(x) <= 2002
    assert (kept.max(), kept.min(), x[0], x[-1]) == (1e6, -1e6, 0, 99_999)
    assert (np.diff(x) > 0).all()
