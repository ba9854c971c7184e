"""The demo's arms: their text, their batches, and what a few steps of each of them do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gradilocks
from gradilocks.demo.arms import ARMS, Arm, Job, Result, Setup, Step, arm_named
from gradilocks.demo.small_gpt import Batches, encode, python_documentation
from gradilocks.demo.training import build_model, lost_share, train

SMALL = Setup(steps=3, rows=4, length=16, width=16, layers=1, heads=2)


def trained(
    folder: Path, arm: str | Arm, setup: Setup = SMALL, *, seed: int = 0
) -> tuple[Result, list[Step]]:
    seen: list[Step] = []
    chosen = arm_named(arm) if isinstance(arm, str) else arm
    path = folder / f"{chosen.name}-{seed}.jsonl"
    return train(Job(chosen, seed, setup, str(path)), seen.append), seen


def test_the_text_is_the_same_each_time_and_decodes_to_the_documentation() -> None:
    first, second = python_documentation(), python_documentation()
    assert first.vocabulary == second.vocabulary
    assert torch.equal(first.codes, second.codes)
    assert len(first.codes) > 100_000
    opening = "".join(first.vocabulary[code] for code in first.codes[:22])
    assert opening == 'The "assert" statement'


def test_batches_depend_on_the_seed_alone_and_targets_are_one_character_later() -> None:
    text = encode("the quick brown fox jumps over the lazy dog")
    torch.manual_seed(1)
    inputs, targets = Batches(text, rows=3, length=8, seed=5).draw()
    torch.manual_seed(2)
    again, _ = Batches(text, rows=3, length=8, seed=5).draw()
    other, _ = Batches(text, rows=3, length=8, seed=6).draw()
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_batches_reach_the_first_and_the_last_character() -> None:
    batches = Batches(encode("abcd"), rows=64, length=3, seed=0)
    inputs, targets = batches.draw()
    assert inputs.min() == 0
    assert targets.max() == 3


def test_a_window_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length must be less than the 4 characters .* got 4\."):
        Batches(encode("abcd"), rows=1, length=4, seed=0)


def test_what_is_lost_is_the_share_of_nonzero_values_that_become_zero() -> None:
    assert lost_share(torch.tensor([0.0, 1e-9, 1.0, 1e-8, 2.0])) == 0.5
    assert lost_share(torch.zeros(3)) == 0.0


@pytest.mark.parametrize("name", [arm.name for arm in ARMS])
def test_an_arm_takes_its_steps_and_leaves_a_run_file_that_tells_the_same(
    tmp_path: Path, name: str
) -> None:
    result, seen = trained(tmp_path, name)
    run = gradilocks.read_run(result.path)
    assert [step.number for step in seen] == [1, 2, 3]
    assert [step.loss for step in run.steps] == pytest.approx([step.loss for step in seen])
    assert [step.norm for step in run.steps] == pytest.approx([step.norm for step in seen])
    assert (result.arm, result.steps, result.stopped) == (name, 3, None)
    assert result.first_loss == seen[0].loss
    assert (result.rate_first, result.rate_least, result.rate_largest) == (
        arm_named(name).rate,
    ) * 3
    assert run.header.settings["made_by"] == "gradilocks demo"
    assert run.end is not None
    assert run.end.status == "finished"


def test_arms_of_a_comparison_differ_in_what_they_are_named_for_and_nothing_else() -> None:
    fp32, small, right, large, clipped = ARMS
    assert replace(right, name="", title="", scaled=False) == replace(small, name="", title="")
    assert replace(right, name="", title="", scaled=False, format="fp32") == replace(
        fp32, name="", title=""
    )
    assert replace(clipped, name="", title="", clip=None) == replace(large, name="", title="")


def test_the_rate_of_a_step_is_the_one_that_the_optimizer_had(tmp_path: Path) -> None:
    _, seen = trained(tmp_path, replace(arm_named("clipped"), rate=0.125))
    assert [step.rate for step in seen] == [0.125] * 3


def test_training_is_a_function_of_arm_seed_and_setup_and_leaves_torch_as_it_was(
    tmp_path: Path,
) -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first, _ = trained(tmp_path, "just-right")
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    again, _ = trained(tmp_path, "just-right")
    assert replace(again, seconds=0.0) == replace(first, seconds=0.0)
    assert trained(tmp_path, "just-right", seed=1)[0].first_loss != first.first_loss


def test_all_arms_begin_with_the_same_parameters() -> None:
    text = python_documentation()
    one, other = (build_model(SMALL, text, seed=3) for _ in range(2))
    for mine, yours in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, yours)


def test_the_accumulation_count_changes_nothing_but_what_fp16_loses(tmp_path: Path) -> None:
    setup = replace(SMALL, steps=5)
    in_full = replace(arm_named("fp32"), clip=None)
    once = trained(tmp_path, in_full, replace(setup, accumulation=1))[1]
    often = trained(tmp_path, in_full, replace(setup, accumulation=1024))[1]
    assert [step.loss for step in once] == [step.loss for step in often]
    assert [step.norm for step in often] == [step.norm for step in once]


def test_dividing_the_gradient_of_the_loss_is_dividing_the_loss() -> None:
    text = python_documentation()
    gradients = []
    for divided_loss in (True, False):
        model = build_model(SMALL, text, seed=0)
        inputs, targets = Batches(text, rows=4, length=16, seed=0).draw()
        with gradilocks.emulate(torch.float16):
            logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if divided_loss:
            (loss / 1024 * 2.0**16).backward()
        else:
            loss.register_hook(lambda gradient: gradient / 1024)
            (loss * 2.0**16).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for mine, yours in zip(*gradients, strict=True):
        assert torch.equal(mine, yours)


def test_without_a_scale_a_large_global_batch_loses_what_a_scale_keeps(tmp_path: Path) -> None:
    setup = replace(SMALL, steps=1, rows=32, length=64)
    assert setup.global_batch == 2_097_152
    small, right = (trained(tmp_path, name, setup)[0] for name in ("too-small", "just-right"))
    assert small.lost is not None
    assert small.lost > 0.9
    assert right.lost is not None
    assert right.lost < 0.01
    assert trained(tmp_path, "fp32", setup)[0].lost is None


def test_fp16_scaled_and_clipped_follows_fp32(tmp_path: Path) -> None:
    setup = Setup(steps=25)
    fp32, right = (trained(tmp_path, name, setup)[0] for name in ("fp32", "just-right"))
    assert right.final_loss == pytest.approx(fp32.final_loss, rel=0.005)
    assert right.final_loss < right.first_loss - 1.0


def test_without_a_clip_the_high_rate_diverges_and_with_one_it_learns(tmp_path: Path) -> None:
    setup = Setup(steps=20)
    large, clipped = (trained(tmp_path, name, setup)[0] for name in ("too-large", "clipped"))
    assert large.diverged
    assert large.norm_largest > 20 * large.norm_first
    assert not clipped.diverged
    assert clipped.final_loss < clipped.first_loss - 0.5


def test_an_arm_that_never_gets_finite_again_is_stopped_and_says_why(tmp_path: Path) -> None:
    setup = replace(SMALL, steps=130)
    wild = replace(arm_named("too-large"), rate=1e4)
    result, seen = trained(tmp_path, wild, setup)
    assert result.stopped is not None
    assert result.stopped.startswith("100 steps in a row had non-finite gradients")
    assert result.steps == len(seen) < 130
    assert (math.isnan(result.final_loss), result.diverged) == (True, True)
    run = gradilocks.read_run(result.path)
    assert len(run.steps) == result.steps
    assert run.end is not None
    assert run.end.error is not None
    assert "NeverFinite" in run.end.error


def test_a_run_file_of_the_demo_tells_the_loss_of_the_global_batch(tmp_path: Path) -> None:
    result, _ = trained(tmp_path, "just-right")
    assert gradilocks.read_run(result.path).steps[0].loss == pytest.approx(math.log(103), abs=0.7)


def test_what_is_computed_is_said_in_numbers() -> None:
    said = Setup().computed
    for number in ("32 x 64 = 2,048", "1,024 equal ones", "2,097,152"):
        assert number in said


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, r"steps must be at least 1, got 0\."),
        ("accumulation", 0, r"accumulation must be at least 1, got 0\."),
        ("heads", 3, r"heads must divide width 64, got 3\."),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(
    name: str, value: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Setup(**{name: value})


def test_an_arm_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"one of fp32, too-small, .*, got 'tiny'\."):
        arm_named("tiny")


@pytest.mark.long
def test_without_a_scale_the_loss_ends_near_its_start_at_the_default_settings(
    tmp_path: Path,
) -> None:
    from gradilocks.demo.verdicts import judge

    results = [trained(tmp_path, name, Setup())[0] for name in ("fp32", "too-small")]
    verdict = judge(results)[0]
    assert verdict.holds, verdict.sentence
