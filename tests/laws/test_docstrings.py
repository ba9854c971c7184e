"""Every policy's docstring is its rule as a formula, its source, and when to use it."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from gradilocks import clip, scale

POLICIES = [
    policy
    for room in (clip, scale)
    for name in room.__all__
    if dataclasses.is_dataclass(policy := getattr(room, name))
    and issubclass(policy, (clip.ClipPolicy, scale.ScalePolicy))
]
PRESETS = ["torch", "megatron", "deepspeed", "fairseq"]


def test_all_policies_are_here():
    assert len(POLICIES) >= 15


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_says_its_rule_its_source_and_when_to_use_it(policy):
    text = inspect.getdoc(policy)
    rule = [line for line in text.splitlines() if line.startswith("    ") and " = " in line]
    assert rule, "no formula"
    text = " ".join(text.split())
    assert "Reference: " in text
    assert "Use it " in text
    assert "Example:" in text
    if policy.__name__ != "Chain":
        for field in dataclasses.fields(policy):
            assert f"{field.name}:" in text or f"{field.name}, " in text, field.name


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_its_source_and_when_to_use_it(preset):
    text = " ".join(inspect.getdoc(getattr(scale.DynamicScale, preset)).split())
    assert "Reference: " in text
    assert "Use it " in text
