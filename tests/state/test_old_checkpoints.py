"""Checkpoints that version 0.2.0 wrote load, and training goes on from them as it did there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.state.checkpoint_program import FACTORS, POLICIES, SAVED_AFTER, Training, kinds_of

DATA = Path(__file__).parent / "data"
CASES = [(name, kind) for name in POLICIES for kind in kinds_of(name)]


def test_there_is_a_checkpoint_of_every_policy():
    assert {path.stem for path in DATA.glob("*.json")} == set(POLICIES)


def without_later_settings(saved):
    """A checkpoint without the settings that came later, which are as if there were none."""
    if isinstance(saved, list):
        return list(map(without_later_settings, saved))
    if not isinstance(saved, dict):
        return saved
    assert not saved.get("consecutive_hysteresis")
    later = {"consecutive_hysteresis"}
    return {key: without_later_settings(value) for key, value in saved.items() if key not in later}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_checkpoint_of_before_loads_and_training_goes_on_as_it_did(name, kind):
    told = json.loads((DATA / f"{name}.json").read_text())[kind]
    first = Training(name, kind)
    for factor, expected in zip(FACTORS[:SAVED_AFTER], told["before"], strict=True):
        assert first.step(factor) == pytest.approx(expected, rel=1e-6)
    resumed = Training(name, kind)
    resumed.holder.load_state_dict(told["state_dict"])
    saved = json.loads(json.dumps(resumed.holder.state_dict()))
    if kind == "control":  # Of optimizers that were stepped alone, which was not possible then.
        assert saved["gradilocks"].pop("parts") is None
        assert not saved["gradilocks"].pop("streak_steps")  # Which scales a streak had, likewise.
        # These do not say whose numbers they have: those of the parameters, in their order.
        named = [[name, ""] for name, _ in resumed.model.named_parameters()]
        assert saved["gradilocks"].pop("clip_parameters", named) == named
    assert without_later_settings(saved) == told["state_dict"]
    # The checkpoint is that of the holder alone; model and optimizer bring theirs.
    resumed.model.load_state_dict(first.model.state_dict())
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    for factor, expected in zip(FACTORS[SAVED_AFTER:], told["after"], strict=True):
        assert resumed.step(factor) == pytest.approx(expected, rel=1e-6)
