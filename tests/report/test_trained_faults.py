"""Each rule on runs that were really trained, on both sides of its threshold.

Plain torch, recorded as `gradilocks run` records it; what a fault leaves in a run file is not what
one would write by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradilocks import GradientControl, Recorder, emulate, read_run
from gradilocks.report.health import Finding
from gradilocks.report.run_report import Reported, main_numbers, report_on
from tests.report.healthy_runs import TiedGPT, classes, mlp, next_token, sentences
from tests.report.watched import hooks_kept, watched

Poke = Callable[[int, Tensor], Tensor]


@pytest.fixture(autouse=True, scope="module")
def _hooks() -> Iterator[None]:
    with hooks_kept():
        yield


def train(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    steps: int = 120,
    batch: int = 32,
    clears: bool = True,
    poke: Poke = lambda number, loss: loss,
    scaler: torch.amp.GradScaler | None = None,
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
) -> None:
    """A classifier, with whatever is wrong with it."""
    model = model or mlp(16, 64, 4)
    optimizer = make(model)
    for number in range(1, steps + 1):
        x, y = classes(batch, noise=2.0)
        if clears:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        loss = poke(number, loss)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


def adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate)


class Judged:
    """What a report says of a training."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.reported: Reported = report_on(run, "run")
        self.health = self.reported.health
        self.findings: dict[str, Finding] = {each.rule: each for each in self.health.findings}
        told = [f"{each.title} {each.sentence}" for each in self.health.findings]
        self.everything = "\n".join([self.health.sentence, *told])

    def grave(self) -> set[str]:
        return {each.rule for each in self.health.findings if each.severity != "note"}


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Judged]:
    def judge(*args: Any, **kwargs: Any) -> Judged:
        return Judged(watched(partial(train, *args, **kwargs), tmp_path / "run.jsonl"))

    return judge


def nan_at(*numbers: int) -> Poke:
    return lambda number, loss: loss * math.nan if number in numbers else loss


# --- NaN, and what became of the weights ---------------------------------------------------------


def test_a_nan_that_was_taken_is_one_finding_that_sends_back_to_a_checkpoint(judge) -> None:
    told = judge(adam(1e-3), steps=80, poke=nan_at(*range(61, 81)))
    (finding,) = told.health.findings
    assert (finding.rule, finding.step) == ("taken-though-nonfinite", 61)
    assert finding.title == "The weights are spoilt since step 61 at the latest"
    assert "The loss is NaN or Inf from step 61 on; it was 0." in finding.sentence
    assert "Go back to a checkpoint before step 61" in finding.sentence
    assert "gradilocks run --guard skip" in finding.sentence
    assert "scale" not in told.everything
    assert "forward or loss, module unknown" in told.health.sentence


def test_ten_nan_steps_that_a_scaler_skipped_leave_the_weights_as_they_were(judge) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    told = judge(adam(1e-3), steps=80, poke=nan_at(*range(41, 51)), scaler=scaler)
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity) == ("loss-nonfinite-steps", "warning")
    assert finding.title == "The loss itself was NaN or Inf at 10 steps"
    assert "They were skipped and changed no weight" in finding.sentence
    assert "checkpoint" not in told.everything
    assert told.health.verdict == "needs a look"


def test_a_nan_in_one_gradient_that_was_taken_names_it_as_likely(tmp_path: Path) -> None:
    def run() -> None:
        model = mlp(16, 64, 64, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 41):
            x, y = classes(16)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if number == 30:
                model[2].weight.grad[0, 0] = math.nan
            optimizer.step()

    told = Judged(watched(run, tmp_path / "run.jsonl"))
    (finding,) = told.health.findings
    assert (finding.step, finding.culprit) == (30, "2.weight")
    assert "likely it arose in backward at 2.weight" in told.health.sentence
    assert "the weights are spoilt since step 30;" in told.health.sentence


# --- the loss: diverged, stands still ------------------------------------------------------------


def test_a_loss_that_rose_by_orders_before_it_was_nan_diverged(judge) -> None:
    told = judge(sgd(50.0), steps=60)
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity, finding.step) == ("loss-diverged", "problem", 2)
    assert finding.title.startswith("The loss diverged: 1.87 → ")
    assert finding.title.endswith(", then NaN")
    advice = finding.sentence.index("Lower the learning rate (50 at step 2) first")
    assert advice < finding.sentence.index("warm-up") < finding.sentence.index("limit on the norm")
    assert told.health.sentence.startswith(finding.title)
    assert "It ended in NaN or Inf" in told.health.sentence
    (track,) = told.reported.tracks
    assert dict(main_numbers(told.reported, track))["loss"] == "1.87 → NaN"


@pytest.mark.parametrize("make", [sgd(8.0), adam(3.0)])
def test_a_loss_that_blows_up_and_stays_finite_diverged_too(make, judge) -> None:
    told = judge(make, steps=60)
    assert told.findings["loss-diverged"].severity == "problem"
    assert "Lower the learning rate" in told.findings["loss-diverged"].sentence
    assert told.health.verdict == "in trouble"


@pytest.mark.parametrize("rate", [0.3, 0.03])
def test_a_large_learning_rate_that_works_is_no_divergence(rate: float, judge) -> None:
    assert judge(sgd(rate)).grave() == set()


@pytest.mark.parametrize(
    ("make", "words"),
    [(adam(1e-8), "the learning rate (1e-8) is too small"), (sgd(1e-7), "is too small")],
)
def test_a_loss_that_does_not_move_stands_still(make, words: str, judge) -> None:
    told = judge(make, steps=200)
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity) == ("loss-stands-still", "warning")
    assert finding.title.startswith("The loss stands still: 1.87 → 1.")
    assert words in finding.sentence
    assert told.health.verdict == "needs a look"


@pytest.mark.parametrize("rate", [1e-5, 1e-4])
def test_a_loss_that_falls_slowly_does_not_stand_still(rate: float, judge) -> None:
    assert "loss-stands-still" not in judge(adam(rate), steps=200).findings


def test_a_run_that_has_converged_early_does_not_stand_still(judge) -> None:
    told = judge(sgd(0.05), steps=300, batch=64)
    assert told.grave() == set()


def test_too_few_steps_or_too_much_noise_prove_no_standstill(judge) -> None:
    assert judge(adam(1e-6), steps=80).grave() == set()


def test_a_single_noisy_sample_a_batch_proves_no_standstill(judge) -> None:
    assert "loss-stands-still" not in judge(adam(1e-6), steps=120, batch=1).findings


# --- gradients that nobody clears, or that nobody has --------------------------------------------


@pytest.mark.parametrize("make", [sgd(0.01), sgd(0.001), adam(1e-3), adam(1e-4)])
@pytest.mark.parametrize("batch", [4, 32])
def test_a_forgotten_zero_grad_is_noticed(make, batch: int, judge) -> None:
    told = judge(make, batch=batch, clears=False)
    assert told.findings["gradients-add-up"].severity == "warning"
    assert "zero_grad" in told.health.sentence


def test_a_forgotten_zero_grad_of_a_gpt_is_noticed(tmp_path: Path) -> None:
    def run() -> None:
        model = TiedGPT(layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(50):
            next_token(model, sentences(4)).backward()
            optimizer.step()

    assert "gradients-add-up" in Judged(watched(run, tmp_path / "run.jsonl")).findings


def test_norms_that_grow_with_the_weights_are_not_gradients_that_add_up(tmp_path: Path) -> None:
    def run() -> None:  # The whole data in each batch: a smooth norm, that rises before it falls.
        layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
        model = nn.Sequential(*layers)
        for layer in layers:
            nn.init.eye_(layer.weight)
            layer.weight.data *= 0.3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(64, 8)
        for _ in range(150):
            optimizer.zero_grad()
            F.mse_loss(model(x), 3 * x).backward()
            optimizer.step()

    told = Judged(watched(run, tmp_path / "run.jsonl"))
    norms = [step.norm for step in told.run.steps]
    assert max(norms) > 3 * norms[0]
    assert told.grave() == set()


def test_an_optimizer_over_none_of_the_models_parameters_is_noticed(judge) -> None:
    told = judge(lambda model: torch.optim.SGD(mlp(16, 64, 4).parameters(), lr=0.1))
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity) == ("never-a-gradient", "problem")
    assert "none of its 4 parameters ever had a gradient" in finding.sentence


def test_an_optimizer_over_one_layer_alone_is_no_matter(judge) -> None:
    told = judge(lambda model: torch.optim.SGD(model[2].parameters(), lr=0.05))
    assert told.grave() == set()


def test_a_learning_rate_of_zero_is_named(judge) -> None:
    told = judge(adam(0.0))
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity) == ("nothing-moves", "problem")
    assert finding.title == "No step changes a weight: the learning rate is 0"


def test_weights_in_bfloat16_that_round_every_change_away_are_named(tmp_path: Path) -> None:
    def run() -> None:
        model = mlp(16, 64, 4).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
        for _ in range(60):
            x, y = classes(16)
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(torch.bfloat16)), y).backward()
            optimizer.step()

    finding = Judged(watched(run, tmp_path / "run.jsonl")).findings["nothing-moves"]
    assert "held in bfloat16, which rounds such small changes away" in finding.sentence


# --- the precision of the run --------------------------------------------------------------------


def dead(model: nn.Module) -> torch.optim.Optimizer:
    nn.init.constant_(model[0].bias, -100.0)
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [(None, ("float32",)), (torch.bfloat16, ("bfloat16", "float32"))],
)
def test_without_a_scaler_no_word_of_a_scale_in_fp32_and_bf16(dtype, formats, judge) -> None:
    told = judge(dead, dtype=dtype)
    assert told.run.computed_in == formats
    assert "vanishing-zeros" in told.findings
    assert "scale" not in told.everything


def test_in_fp16_zeros_may_be_underflow_and_a_scale_cures_it(judge) -> None:
    told = judge(dead, dtype=torch.float16, steps=60)
    assert told.run.computed_in == ("float16", "float32")
    assert "which a loss scale cures" in told.findings["vanishing-zeros"].sentence


def test_gradients_of_zero_in_fp32_are_no_matter_of_a_scale(judge) -> None:
    told = judge(adam(1e-3), poke=lambda number, loss: loss * 0)
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity) == ("no-gradient", "problem")
    assert "scale" not in told.everything


def test_an_emulated_format_counts_as_one_that_rounds_to_zero(tmp_path: Path) -> None:
    def run() -> None:
        model = mlp(16, 32, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            x, y = classes(8)
            optimizer.zero_grad()
            with emulate(torch.float16):
                loss = F.cross_entropy(model(x), y) * 1e-7
            loss.backward()
            optimizer.step()

    told = Judged(watched(run, tmp_path / "run.jsonl"))
    assert told.run.computed_in == ("float16", "float32")
    assert "use a loss scale" in told.findings["no-gradient"].sentence


def test_a_control_records_the_precision_too(tmp_path: Path) -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "run.jsonl", log=False) as recorder:
        control = GradientControl(optimizer, model=model, scale=None, record=recorder)
        for _ in range(3):
            x, y = classes(8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            control.backward(loss)
            control.step()
            control.zero_grad()
    assert read_run(tmp_path / "run.jsonl").computed_in == ("bfloat16", "float32")


# --- tensors -------------------------------------------------------------------------------------


class Lopsided(nn.Module):
    """One layer's inputs are a thousand times those of the others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(16, 16, bias=False))
        self.rest = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(getattr(self, self.name)(100 * x) / 100)
        for layer in self.rest:
            hidden = hidden + torch.tanh(layer(hidden)) / 100
        return self.head(hidden)


@pytest.mark.parametrize(
    ("name", "limit", "severity"),
    [("stem", 0.01, "warning"), ("stem", None, "note"), ("wte", 0.01, None)],
)
def test_a_tensor_that_dominates_matters_where_steps_are_clipped(
    name: str, limit: float | None, severity: str | None, tmp_path: Path
) -> None:
    def run() -> None:
        model = Lopsided(name)
        for param in model.head.parameters():
            param.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(60):
            x, y = classes(16)
            optimizer.zero_grad()
            F.cross_entropy(10 * model(x), y).backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()

    found = Judged(watched(run, tmp_path / "run.jsonl")).findings.get("dominating")
    assert (found and found.severity) == severity
    assert found is None or found.culprit == f"{name}.weight"
