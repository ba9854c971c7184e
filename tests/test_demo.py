"""The demo: its text, its fp16 layer, its loop and its summary."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from gradilocks.demo.half import HalfLinear, round_to_half, underflow_share
from torch import nn

from gradilocks.demo.text import Batches, encode, python_documentation
from gradilocks.demo.train import build_model, measure_underflow, train
from gradilocks.demo.values import Settings, Step, Summary, Underflow, summarize

SMALL = Settings(steps=3, rows=4, length=16, width=16, layers=1, heads=2)


def ignore(step: Step) -> None:
    """Watches nothing."""


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


def test_rounding_is_that_of_half_and_keeps_float32() -> None:
    edges = torch.tensor([2.0**-25, 2.0**-25 * 1.001, 6e-8, 2.0**-14, 65504.0, 65520.0, -1e9, 0.1])
    values = torch.cat([edges, torch.randn(1000) * 10.0 ** torch.randint(-9, 6, (1000,))])
    rounded = round_to_half(values)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, values.half().float())
    assert rounded[:7].tolist() == [0.0, 2**-24, 2**-24, 2**-14, 65504.0, math.inf, -math.inf]


def test_underflow_share_counts_nonzero_values_that_become_zero() -> None:
    assert underflow_share(torch.tensor([0.0, 1e-9, 1.0, 1e-8, 2.0])) == 0.5
    assert underflow_share(torch.zeros(3)) == 0.0


def test_the_half_layer_rounds_what_enters_and_what_leaves_in_both_directions() -> None:
    torch.manual_seed(0)
    layer = HalfLinear(5, 3)
    inputs = torch.randn(2, 4, 5, requires_grad=True)
    outputs = layer(inputs)
    x, w, b = (value.detach().half().float() for value in (inputs, layer.weight, layer.bias))
    assert torch.equal(outputs, (x @ w.T + b).half().float())
    incoming = torch.randn(2, 4, 3) * 1e-4
    outputs.backward(incoming)
    g = incoming.half().float()
    assert inputs.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert torch.equal(inputs.grad, (g @ w).half().float())
    weight_gradient = g.reshape(8, 3).T @ x.reshape(8, 5)
    assert torch.equal(layer.weight.grad, weight_gradient.half().float())
    assert torch.equal(layer.bias.grad, g.reshape(8, 3).sum(0).half().float())


def test_the_half_layer_overflows_to_inf_forward_and_backward() -> None:
    layer = HalfLinear(1, 1)
    nn.init.constant_(layer.weight, 300.0)
    nn.init.zeros_(layer.bias)
    inputs = torch.tensor([[300.0]], requires_grad=True)
    outputs = layer(inputs)
    assert outputs.item() == math.inf
    outputs.backward(torch.tensor([[300.0]]))
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == math.inf


def test_without_a_scale_a_large_global_batch_loses_what_a_scale_of_65536_keeps() -> None:
    settings = replace(SMALL, rows=32, length=64, accumulation=1024)
    text = python_documentation()
    lost = measure_underflow(settings, build_model(settings, text), text, scale=2.0**16)
    assert lost.unscaled > 0.9
    assert lost.scaled < 0.01


def test_measuring_the_underflow_leaves_no_gradient_behind() -> None:
    text = python_documentation()
    model = build_model(SMALL, text)
    measure_underflow(SMALL, model, text, scale=2.0**16)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_lowers_the_loss_and_reports_every_step() -> None:
    seen: list[Step] = []
    settings = replace(SMALL, steps=24, rows=8, length=32, width=32, learning_rate=1e-2)
    summary = train(settings, seen.append)
    assert [step.number for step in seen] == list(range(1, 25))
    assert summary.steps == 24
    assert summary.loss_window == 4
    assert summary.loss_first == seen[0].loss
    assert summary.loss_last < summary.loss_first - 0.5
    assert summary.parameters > 0
    assert all(math.isfinite(step.norm) for step in seen)


def test_training_is_a_function_of_its_settings_and_leaves_torch_as_it_was() -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = train(SMALL, ignore)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    assert replace(train(SMALL, ignore), seconds=0.0) == replace(first, seconds=0.0)
    assert train(replace(SMALL, seed=1), ignore).loss_first != first.loss_first


def test_the_accumulation_count_changes_nothing_but_what_fp16_loses() -> None:
    settings = replace(SMALL, steps=5, clip=None, scale=2.0**10)
    once: list[Step] = []
    often: list[Step] = []
    train(replace(settings, accumulation=1), once.append)
    train(replace(settings, accumulation=1024, scale=2.0**20), often.append)
    assert [step.loss for step in once] == [step.loss for step in often]
    assert [step.norm for step in often] == pytest.approx([step.norm for step in once], rel=1e-5)


def test_a_scale_too_large_for_fp16_skips_and_names_the_culprits() -> None:
    seen: list[Step] = []
    settings = replace(SMALL, accumulation=1, scale=2.0**40, steps=2, rows=1)
    summary = train(settings, seen.append)
    assert summary.skipped == 2
    assert summary.culprits["head.weight"] == 2
    assert all("head.weight" in step.culprits for step in seen)


def test_the_dynamic_scale_starts_grows_and_backs_off_as_the_settings_say() -> None:
    seen: list[Step] = []
    settings = replace(SMALL, steps=5, growth_interval=2, initial_scale=2.0**10)
    train(settings, seen.append)
    assert [step.scale for step in seen] == [2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**12]
    seen.clear()
    train(replace(settings, steps=2, accumulation=1, initial_scale=2.0**32), seen.append)
    assert [step.skipped for step in seen] == [True, True]
    assert [step.scale for step in seen] == [2.0**32, 2.0**31]


def test_the_summary_round_trips_through_json_with_no_field_at_its_default() -> None:
    summary = Summary(
        settings=Settings(
            steps=7,
            seed=3,
            accumulation=5,
            scale=512.0,
            initial_scale=4.0,
            growth_interval=9,
            clip=None,
            rows=2,
            length=8,
            width=12,
            layers=3,
            heads=3,
            learning_rate=0.1,
        ),
        steps=6,
        skipped=2,
        clipped=1,
        scale_first=512.0,
        scale_last=256.0,
        loss_first=4.5,
        loss_last=3.25,
        loss_window=1,
        culprits={"head.weight": 2},
        underflow=Underflow(unscaled=0.75, scaled=0.25),
        parameters=99,
        seconds=1.5,
    )
    plain = json.loads(json.dumps(summary.to_plain(), allow_nan=False))
    assert Summary.from_plain(plain) == summary


def test_a_loss_that_is_not_finite_is_null_in_json_and_nan_afterwards() -> None:
    step = Step(number=1, loss=math.inf, scale=1.0, norm=math.nan, clipped=False, skipped=True)
    plain = json.loads(json.dumps(summarize(SMALL, [step]).to_plain(), allow_nan=False))
    assert plain["loss_first"] is None
    assert math.isnan(Summary.from_plain(plain).loss_last)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, r"steps must be at least 1, got 0\."),
        ("seed", -1, r"seed must be 0 or more, got -1\."),
        ("accumulation", 0, r"accumulation must be at least 1, got 0\."),
        ("scale", math.inf, r"scale must be between .* got inf\."),
        ("clip", 0.0, r"clip must be between .* got 0\.0\."),
        ("heads", 3, r"heads must divide width 64, got 3\."),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(
    name: str, value: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**{name: value})  # type: ignore[arg-type]
