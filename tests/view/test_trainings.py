"""Findings on real trainings: none on healthy ones, the right one on each sick one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradilocks.view.findings import Finding, find, verdict
from view import sick_runs as sick
from view.healthy_runs import HEALTHY
from view.plain_recorder import record
from view.sick_runs import adam, classifier, nan_in, sgd


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = record(HEALTHY[name], monkeypatch, tmp_path / "run.jsonl")
    assert [finding.title for finding in find(run) if finding.severity != "note"] == []
    assert verdict(run).severity == "ok"


def test_there_are_many_healthy_runs() -> None:
    assert len(HEALTHY) >= 45


SICK = {
    "a learning rate of 50": (classifier(sgd(50.0), steps=60), "diverged", "problem", "learning rate (50)"),
    "a learning rate of 8": (classifier(sgd(8.0), steps=60), "diverged", "problem", "learning rate (8)"),
    "Adam with 3.0": (classifier(adam(3.0), steps=60), "diverged", "problem", "learning rate (3)"),
    "BatchNorm with 5.0": (
        lambda: classifier(sgd(5.0, 0.9), steps=80, model=sick.batch_norm_net())(),
        "diverged",
        "warning",
        "learning rate (5)",
    ),
    "GPT with 0.5": (sick.gpt(clears=True, limit=1.0, lr=0.5, steps=120), "diverged", "warning", "(0.5) to a tenth"),
    "one bad batch": (
        classifier(sgd(0.05, 0.9), steps=100, noise=4.0, change_input=sick.large_input_in(61, 1e6)),
        "diverged",
        "problem",
        "check the batch of that step first",
    ),
    "a rate that rises until it diverges": (
        classifier(sgd(0.01), steps=200, change_lr=lambda step: 0.01 * 1.06**step),
        "diverged",
        "problem",
        "The learning rate had just risen",
    ),
    "a rate that jumps": (
        classifier(sgd(0.01), steps=200, change_lr=lambda step: 0.01 if step < 100 else 30.0),
        "diverged",
        "problem",
        "risen from 0.01 to 30",
    ),
    "NaN losses that are applied": (
        classifier(adam(1e-3), steps=80, change_loss=nan_in(*range(61, 81))),
        "corrupt_weights",
        "problem",
        "Step 61 was applied",
    ),
    "one NaN loss that is applied": (
        classifier(adam(1e-3), steps=80, change_loss=nan_in(61)),
        "corrupt_weights",
        "problem",
        "checkpoint before step 61",
    ),
    "NaN losses that a scaler skips": (
        classifier(
            adam(1e-3),
            steps=80,
            change_loss=nan_in(*range(41, 51)),
            scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
        ),
        "nonfinite_loss",
        "warning",
        "did not reach the weights",
    ),
    "overflow at every scale": (sick.overflow_at_every_scale, "skipped_steps", "problem", "Values overflow even at"),
    "Adam with 1e-8": (classifier(adam(1e-8), steps=200), "not_learning", "warning", "(1e-08) is too small"),
    "SGD with 1e-7": (classifier(sgd(1e-7), steps=200), "not_learning", "warning", "is too small"),
    "Adam with 1e-9 and noisy batches": (
        classifier(adam(1e-9), steps=120, batch=2),
        "not_learning",
        "warning",
        "(1e-09) is too small",
    ),
    "clipped to 1e-6": (sick.clipped_to_almost_nothing, "not_learning", "warning", "or the clip limit is too small"),
    "20 sigmoids": (sick.vanishing_gradients, "not_learning", "warning", "Gradients vanish"),
    "no zero_grad, SGD": (classifier(sgd(0.01), clears=False), "missing_zero_grad", "warning", "zero_grad()"),
    "no zero_grad, small batches": (
        classifier(sgd(0.001), clears=False, batch=4),
        "missing_zero_grad",
        "warning",
        "zero_grad()",
    ),
    "no zero_grad, Adam": (classifier(adam(1e-4), clears=False), "missing_zero_grad", "warning", "zero_grad()"),
    "no zero_grad, GPT": (sick.gpt(clears=False), "missing_zero_grad", "warning", "zero_grad()"),
    "no zero_grad, clipped GPT": (
        sick.gpt(clears=False, limit=1.0, lr=1e-4),
        "missing_zero_grad",
        "warning",
        "zero_grad()",
    ),
    "underflow": (sick.gpt_in_float16_without_scaling, "zero_gradients", "warning", "use loss scaling"),
    "dead units": (lambda: classifier(adam(1e-3), model=sick.dead_net())(), "zero_gradients", "warning", "dead"),
    "clip before unscale": (
        sick.clipped_before_unscale(unscales=False),
        "clipped_before_unscale",
        "problem",
        "call `scaler.unscale_(optimizer)` before `clip_grad_norm_`",
    ),
    "clip before unscale, large norms": (
        sick.clipped_before_unscale(unscales=False, size=1.0),
        "not_learning",
        "warning",
        "clipped before unscaling",
    ),
    "a schedule that ends early": (
        sick.schedule_that_ends_early(60),
        "unchanged_weights",
        "warning",
        "First: step 61",
    ),
    "an optimizer for another model": (
        classifier(lambda model: torch.optim.SGD(sick.mlp(16, 64, 4).parameters(), lr=0.1)),
        "no_gradient",
        "problem",
        "another model",
    ),
    "no backward": (sick.backward_that_never_runs, "no_gradient", "problem", "backward() was not called"),
    "a loss times zero": (
        classifier(adam(1e-3), change_loss=lambda step, loss: 0 * loss),
        "no_gradient",
        "problem",
        "multiplied by zero",
    ),
    "bfloat16 weights that do not move": (
        sick.bfloat16_weights_that_do_not_move,
        "unchanged_weights",
        "problem",
        "rounded away",
    ),
    "a learning rate of zero": (classifier(adam(0.0)), "unchanged_weights", "problem", "optimizer and the schedule"),
}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_found_and_explained(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train, rule, severity, words = SICK[name]
    run = record(train, monkeypatch, tmp_path / "run.jsonl")
    worst: Finding = find(run)[0]
    assert (worst.rule, worst.severity) == (rule, severity)
    assert words in worst.text
    assert verdict(run).text.startswith(f"{severity.capitalize()}: {worst.title}")


@pytest.mark.parametrize(
    "train",
    [
        classifier(sgd(0.3)),
        classifier(adam(1e-5), steps=200),
        classifier(adam(1e-6), steps=120, batch=1),
        lambda: classifier(sgd(0.5, 0.9), steps=80, model=sick.batch_norm_net())(),
        sick.clipped_before_unscale(unscales=True),
        sick.schedule_that_ends_early(112),
        sick.gpt(clears=True, limit=0.5, lr=1e-4),
    ],
)
def test_the_other_side_of_the_threshold_is_no_alarm(train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = record(train, monkeypatch, tmp_path / "run.jsonl")
    assert [finding.title for finding in find(run) if finding.severity != "note"] == []
