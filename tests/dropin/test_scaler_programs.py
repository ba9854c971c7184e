"""Random programs end on our scaler as they end on torch's."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from dropin import programs


def run_programs(strategy, examples):
    counts: Counter[str] = Counter()

    @settings(programs.STABLE, max_examples=examples)
    @given(strategy)
    def check(program):
        programs.run(*program, counts)

    check()
    return counts


@pytest.mark.parametrize("examples", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_a_careful_program_is_bit_identical_to_torch(examples):
    counts = run_programs(programs.careful_programs(), examples)
    for event in ("backward", "plant", "unscale_", "step", "update", "clip_value", "zero_grad"):
        assert counts[event] > 100, counts
    for event in ("pickle", "save", "load saved", "state loaded crosswise", "state loaded its own"):
        assert counts[event] > 20, counts


@pytest.mark.usefixtures("_kernels_on_cpu")
def test_a_careful_program_is_bit_identical_to_torch_with_our_kernels():
    counts = run_programs(programs.careful_programs(), 100)
    assert counts["unscale_"] > 100, counts


@pytest.mark.parametrize("examples", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_a_careless_program_raises_as_in_torch_and_leaves_the_same_state(examples):
    counts = run_programs(programs.careless_programs(), examples)
    for message in (
        "Attempted step but _scale is None.  This",
        "Attempted unscale_ but _scale is None.  ",
        "Attempted update but _scale is None.  Th",
        "No inf checks were recorded for this opt",
        "No inf checks were recorded prior to upd",
        "unscale_() has already been called on th",
        "unscale_() is being called after step().",
        "step() has already been called since the",
        "Closure use is not currently supported i",
        "The source state dict is empty, possibly",
        "Attempting to unscale FP16 gradients.",
        "A GradScaler instance may only be pickle",
        "new_scale should be a float or a 1-eleme",
    ):
        assert counts[message] > 0, (message, counts)
    assert counts["found_inf"] > 20, counts
