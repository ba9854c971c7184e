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

from gradilocks import GradientControl, GradScaler, Recorder, emulate, read_run
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


def outlier(factor: float, at: int) -> Callable[[int, Tensor], Tensor]:
    """Inputs of one batch that are too large; the model begins with them."""
    return lambda number, x: factor * x if number == at else x


def on_batches(change: Callable[[int, Tensor], Tensor], *, rate: float = 0.05) -> None:
    """A classifier whose inputs are changed on the way."""
    model = mlp(16, 64, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for number in range(1, 101):
        x, y = classes(32, noise=4.0)
        optimizer.zero_grad()
        F.cross_entropy(model(change(number, x)), y).backward()
        optimizer.step()


def test_one_bad_batch_is_named_before_the_learning_rate(tmp_path: Path) -> None:
    told = Judged(watched(partial(on_batches, outlier(1e6, 61)), tmp_path / "run.jsonl"))
    finding = told.findings["loss-diverged"]
    assert (finding.severity, finding.step) == ("problem", 61)
    batch = finding.sentence.index("look at the batch of that step first")
    assert batch < finding.sentence.index("learning rate (0.05 at step 61)")
    assert "Lower the learning rate" not in finding.sentence


def test_a_loss_that_rises_step_by_step_is_no_bad_batch(tmp_path: Path) -> None:
    def run() -> None:  # A rate that rises until nothing holds.
        model = mlp(16, 64, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 201):
            x, y = classes(32, noise=2.0)
            optimizer.param_groups[0]["lr"] = 0.01 * 1.06**number
            optimizer.zero_grad()
            F.mse_loss(model(x), F.one_hot(y, 4).float()).backward()
            optimizer.step()

    finding = Judged(watched(run, tmp_path / "run.jsonl")).findings["loss-diverged"]
    assert finding.severity == "problem"
    assert "Lower the learning rate" in finding.sentence
    assert "batch" not in finding.sentence


class Normalized(nn.Module):
    """BatchNorm holds the norm of the gradients, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def cosine(rate: float) -> Callable[[], None]:
    def run() -> None:
        model = Normalized()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
        for _ in range(80):
            x, y = classes(32, noise=2.0)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()

    return run


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_a_large_rate_that_batchnorm_bears_is_no_matter(rate: float, tmp_path: Path) -> None:
    assert Judged(watched(cosine(rate), tmp_path / "run.jsonl")).grave() == set()


@pytest.mark.parametrize(("rate", "graver"), [(5.0, "warning"), (3000.0, "problem")])
def test_a_rate_far_too_high_is_said_though_batchnorm_holds_the_norm(
    rate: float, graver: str, tmp_path: Path
) -> None:
    told = Judged(watched(cosine(rate), tmp_path / "run.jsonl"))
    found = told.findings["loss-diverged"]
    assert found.severity in (graver, "problem")  # Where it ends is a matter of chance.
    assert "Lower the learning rate" in found.sentence or "is too high" in found.sentence


@pytest.mark.parametrize("rate", [0.4, 0.7, 1.5])
def test_a_rate_that_kills_units_or_throws_the_loss_about_is_named(rate, tmp_path: Path) -> None:
    told = Judged(watched(partial(on_batches, outlier(1, 0), rate=rate), tmp_path / "run.jsonl"))
    named = f"earning rate ({rate}", f"earning rate (up to {rate})"
    graves = [each.sentence for each in told.health.findings if each.severity != "note"]
    assert any(name in sentence for sentence in graves for name in named)


def test_units_that_were_dead_from_the_start_are_no_matter_of_the_rate(judge) -> None:
    assert "learning rate" not in judge(dead).findings["vanishing-zeros"].sentence


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


def clipped_gpt(limit: float, *, clears: bool) -> Callable[[], None]:
    def run() -> None:
        model = TiedGPT(layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(60):
            if clears:
                optimizer.zero_grad()
            next_token(model, sentences(4)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()

    return run


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("limit", [1.0, 0.5])
def test_a_forgotten_zero_grad_under_a_clip_is_noticed_or_at_least_asked_for(
    limit: float, clears: bool, tmp_path: Path
) -> None:
    told = Judged(watched(clipped_gpt(limit, clears=clears), tmp_path / "run.jsonl"))
    first = told.run.steps[0].norm
    assert 0.5 < first < 1.0, "one limit is below it, one above"
    assert ("gradients-add-up" in told.grave()) is (limit > first and not clears)
    assert told.grave() <= {"gradients-add-up"}
    if limit < first and not clears:  # The sum is the limit from the first step on.
        sentence = told.findings["clipped-nearly-always"].sentence
        assert sentence.index("`zero_grad`") < sentence.index("Raise it")


def scaled_and_clipped(*, unscales: bool, size: float = 0.1) -> None:
    model, scaler = mlp(16, 64, 4), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(120):
        x, y = classes(32, noise=2.0)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(size * x), y)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def test_a_clip_of_gradients_that_are_still_scaled_is_named(tmp_path: Path) -> None:
    told = Judged(watched(partial(scaled_and_clipped, unscales=False), tmp_path / "run.jsonl"))
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity) == ("clipped-while-scaled", "problem")
    assert "Call `scaler.unscale_(optimizer)` before `clip_grad_norm_`" in finding.sentence
    assert "once the scale of 2^16 was taken out" in finding.sentence
    assert "too small" not in told.health.sentence


def test_norms_above_the_limit_do_not_tell_but_the_words_name_both_causes(tmp_path: Path) -> None:
    train = partial(scaled_and_clipped, unscales=False, size=1.0)
    sentence = Judged(watched(train, tmp_path / "run.jsonl")).findings["loss-stands-still"].sentence
    assert "is too small, or the gradients were clipped before they were unscaled" in sentence


def test_a_clip_of_gradients_that_were_unscaled_is_no_matter(tmp_path: Path) -> None:
    told = Judged(watched(partial(scaled_and_clipped, unscales=True), tmp_path / "run.jsonl"))
    assert told.grave() == set()
    assert any(step.limit == 1.0 for step in told.run.steps)


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
    assert finding.title == "No parameter of the optimizer ever had a gradient"
    assert "none of its 4 parameters had one" in finding.sentence
    assert "Backward ran, and did not reach them" in finding.sentence


def test_steps_without_a_backward_do_not_blame_the_optimizer(tmp_path: Path) -> None:
    def run() -> None:
        model = mlp(16, 64, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            x, y = classes(8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y)
            optimizer.step()

    (finding,) = Judged(watched(run, tmp_path / "run.jsonl")).health.findings
    assert finding.title.endswith("ever had a gradient, and no backward was seen")
    assert "call `loss.backward()` before each step" in finding.sentence
    assert "another model" not in finding.sentence


def test_an_optimizer_over_one_layer_alone_is_no_matter(judge) -> None:
    told = judge(lambda model: torch.optim.SGD(model[2].parameters(), lr=0.05))
    assert told.grave() == set()


def test_a_learning_rate_of_zero_is_named(judge) -> None:
    told = judge(adam(0.0))
    (finding,) = told.health.findings
    assert (finding.rule, finding.severity) == ("nothing-moves", "problem")
    assert finding.title == "No step changes a weight: the learning rate is 0"


@pytest.mark.parametrize(("over", "rests"), [(60, 60), (112, 0)])
def test_a_schedule_that_is_over_before_the_run_is_told(over, rests, tmp_path: Path) -> None:
    def run() -> None:
        model = mlp(16, 64, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, over, 0.0)
        for _ in range(120):
            x, y = classes(32, noise=4.0)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()

    told = Judged(watched(run, tmp_path / "run.jsonl"))
    assert told.grave() == ({"rate-of-zero"} if rests else set())
    if rests:
        finding = told.findings["rate-of-zero"]
        assert finding.title == "60 steps changed no weight: the learning rate was 0"
        assert (finding.step, finding.severity) == (61, "warning")


def test_a_second_group_that_trains_is_no_rest(tmp_path: Path) -> None:
    def run() -> None:
        model = mlp(16, 64, 4)
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05)
        for number in range(1, 121):
            x, y = classes(32, noise=4.0)
            optimizer.param_groups[0]["lr"] = 0.05 if number <= 60 else 0.0  # Frozen from there.
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    assert "rate-of-zero" not in Judged(watched(run, tmp_path / "run.jsonl")).findings


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


@pytest.mark.parametrize("by", ["itself", "torch's scaler", "ours", "a control"])
def test_a_fused_sgd_that_leaves_such_weights_on_a_cpu_as_they_are_is_told_of(
    by: str, tmp_path: Path
) -> None:
    """torch's own, and not where we step it another way (pytorch issue 191763)."""

    def run() -> None:
        model = mlp(16, 64, 4).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        kind = torch.amp.GradScaler if by == "torch's scaler" else GradScaler
        scaler = kind("cpu", init_scale=64.0)
        control = GradientControl(optimizer, model=model)
        for _ in range(60):
            x, y = classes(16)
            loss = F.cross_entropy(model(x.to(torch.bfloat16)), y)
            if by == "a control":
                control.zero_grad()
                control.backward(loss)
                control.step()
                continue
            optimizer.zero_grad()
            if by == "itself":
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    told: list[str] = []
    judged = Judged(watched(run, tmp_path / "run.jsonl", told=told))
    finding = judged.findings.get("nothing-moves")
    if by in ("itself", "torch's scaler"):
        assert len(told) == 1
        assert "pytorch issue 191763" in told[0]
        assert "--swap-optimizer SGD" in told[0]
        assert finding is not None
        assert "this SGD is fused, it is torch that leaves them as they are" in finding.sentence
    else:
        assert not told
        assert finding is None


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


def test_of_several_optimizers_each_is_called_by_the_model_that_it_trains(tmp_path: Path) -> None:
    def run() -> None:
        critic, actor = mlp(16, 8, 1), mlp(16, 8, 1)
        pair = nn.ModuleDict({"critic": critic, "actor": actor})
        optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (critic, actor)]
        for number in range(1, 41):
            x = torch.randn(8, 16)
            for optimizer, name in zip(optimizers, pair, strict=True):
                optimizer.zero_grad()
                loss = pair[name](x).square().mean()
                (loss * math.nan if number > 30 and name == "actor" else loss).backward()
                optimizer.step()

    told = Judged(watched(run, tmp_path / "run.jsonl"))
    assert [track.label for track in told.reported.tracks] == [
        "optimizer 0 (Adam, critic)",
        "optimizer 1 (Adam, actor)",
    ]
    assert "optimizer 1 (Adam, actor): the loss is NaN or Inf" in told.health.sentence


def test_a_single_tensor_that_moves_too_much_is_named_once(tmp_path: Path) -> None:
    def run() -> None:
        model = nn.Linear(16, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
        for _ in range(40):
            x, y = classes(16, noise=8.0)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.weight.data /= model.weight.data.norm()

    sentence = Judged(watched(run, tmp_path / "run.jsonl")).findings["update-large"].sentence
    assert sentence.startswith("weight usually changes by ")
