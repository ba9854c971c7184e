"""No sentence contradicts its numbers: random runs, every sentence checked against the records.

The numbers are computed here a second time, in plain Python from the records.
"""

from __future__ import annotations

import html
import io
import math
import random
import re
import statistics
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gradilocks import cli
from gradilocks.view import figures, report, runfile, text, watch
from gradilocks.view.columns import columns, facts, summarize
from gradilocks.view.findings import Finding, find, verdict
from view import made_runs as made

NUMBER = re.compile(r"(?<![\w.^])-?(?:2\^-?\d+|\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?)")
CONSTANTS = {"0.001"}
"""Numbers in the templates themselves."""

TRENDS = ("falling", "rising", "blown up", "flat", "negative", "crossing zero", "zero", "noisy", "missing", "huge")


def random_steps(seed: int, count: int, trend: str, number: int = 0) -> list[dict[str, Any]]:
    """Steps with a given course of the loss, random settings and random events."""
    rng = random.Random(seed)
    share = {name: rng.choice([0.0, 0.0, 0.0, 0.02, 0.3]) for name in ("nan", "nan_loss", "skipped", "rejected")}
    clipped, spikes, is_guarded = rng.choice([0.0, 0.3, 1.0]), rng.choice([0.0, 0.02]), rng.random() < 0.8
    limit, scale = rng.choice([None, 0.1, 1e-4, 1e3]), rng.choice([None, 1.0, 2.0**16])
    rates, update = (
        rng.choice([[None], [0.0], [1e-3], [1e-3, 0.1], [0.0, 0.1]]),
        rng.choice([0.0, 1e-8, 1e-3, 0.5, 2.0]),
    )
    every, noise, first_bad = rng.choice([0, 1, 5]), rng.choice([0.0, 0.01, 0.5]), rng.choice([0, count // 2])
    zeros, is_sum = rng.choice([0.0, 0.95, 1.0]), rng.random() < 0.1
    made_steps = []
    for step in range(1, count + 1):
        x, is_late = step / count, step >= first_bad
        level = {
            "falling": 4 - 3 * x,
            "rising": 1 + 3 * x,
            "blown up": 3.0 ** min(60, max(0, step - count // 2)),
            "flat": 2.3,
            "negative": -10 * x - 1e-3,
            "crossing zero": 1 - 2 * x,
            "zero": 0.0,
            "noisy": rng.gauss(0, 1),
            "missing": 0.0,
            "huge": 1e30 * (1.5 - x),
        }[trend]
        loss: Any = level * (1 + noise * rng.gauss(0, 1))
        norm: Any = 0.0 if trend == "zero" else abs(level) * rng.uniform(0.5, 1.5) + 1e-3
        norm = 0.5 * step if is_sum else norm * (50 if rng.random() < spikes else 1)
        fields: dict[str, Any] = {"nan": 0, "inf": 0}
        if is_late and rng.random() < share["nan_loss"]:
            loss, norm, fields["nan"] = rng.choice(["nan", "inf"]), "nan", 3
        if is_late and rng.random() < share["nan"]:
            norm, fields["inf"] = "inf", 1
        fields["rejected"] = is_late and rng.random() < share["rejected"]
        is_bad = bool(fields["nan"] or fields["inf"])
        fields["skipped"] = (is_bad and is_guarded) or (is_late and rng.random() < share["skipped"])
        given = {"limit": limit, "scale": scale, "lr": rng.choice(rates), "loss": None if trend == "missing" else loss}
        fields |= {name: value for name, value in given.items() if value is not None}
        fields["clipped"] = limit is not None and rng.random() < clipped
        if every and step % every == 0:
            fields["norms"] = [1.0, rng.choice([0.0, 1.0]), 1.0, None]
            fields["updates"] = [update * rng.uniform(0.5, 1.5) for _ in range(4)]
            fields["zeros"] = [zeros, 0.0, zeros, None]
        made_steps.append(
            {"kind": "step", "step": step, "optimizer": number, "time": 1.0 * step, "norm": norm, **fields}
        )
    return made_steps


@st.composite
def random_runs(draw: st.DrawFn) -> runfile.Run:
    count = draw(st.integers(1, 160))
    records: list[dict[str, Any]] = []
    for number in range(draw(st.sampled_from([1, 1, 1, 2]))):
        names = ["in.weight", "in.bias", "out.weight", "out.bias"]
        records.append(made.optimizer(number, draw(st.sampled_from(["SGD", "AdamW"])), names))
        records += random_steps(draw(st.integers(0, 10**6)), count, draw(st.sampled_from(TRENDS)), number)
    return made.run_of(*records)


def number_of(value: Any) -> float:
    return math.nan if value is None else float(value)


def longest_streak(flags: list[bool]) -> int:
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


def true_numbers(records: list[dict[str, Any]], finding: Finding) -> dict[str, float]:
    """What the names in `Finding.numbers` stand for, from the records; not every name is here."""
    losses = [(r["step"], number_of(r.get("loss"))) for r in records if math.isfinite(number_of(r.get("loss")))]
    norms = [number_of(r.get("norm")) for r in records if math.isfinite(number_of(r.get("norm")))]
    skipped = [bool(r.get("skipped") or r.get("rejected")) for r in records]
    lost = ["loss" in r and not math.isfinite(number_of(r["loss"])) for r in records]
    rejected = [bool(r.get("rejected")) for r in records]
    overflow = [s and not j and not lo for s, j, lo in zip(skipped, rejected, lost, strict=True)]
    bad = [bool(r["nan"] or r["inf"]) and not s for r, s in zip(records, skipped, strict=True)]
    numbers: dict[str, float] = {"steps": len(records)}
    if losses:
        numbers |= {"first_loss": losses[0][1], "final_loss": losses[-1][1], "highest_loss": max(v for _, v in losses)}
    if norms:
        numbers["typical_norm"] = statistics.median(norms)
    if finding.rule == "skipped_steps":
        numbers |= {"skipped": sum(overflow), "skipped_share": sum(overflow) / len(records)}
        numbers |= {"longest": longest_streak(overflow), "step": overflow.index(True) + 1}
    if finding.rule == "rejected_steps":
        numbers |= {"rejected": sum(rejected), "rejected_share": sum(rejected) / len(records)}
    if finding.rule == "corrupt_weights":
        numbers |= {"applied": sum(bad), "step": bad.index(True) + 1}
    if finding.rule == "nonfinite_loss" and "nonfinite_losses" in finding.numbers:
        numbers |= {"nonfinite_losses": sum(lost), "step": lost.index(True) + 1}
    return numbers


def check_words(finding: Finding, records: list[dict[str, Any]]) -> None:
    """What the words claim holds for the records."""
    numbers, words = finding.numbers, f"{finding.title} {finding.text}"
    losses = [number_of(r.get("loss")) for r in records if r.get("loss") is not None]
    if "diverged" in finding.title or "did not recover" in finding.title:
        factor = 10 if finding.severity == "problem" else 3
        assert numbers["highest_loss"] >= factor * abs(numbers["first_loss"])
        assert number_of(records[int(numbers["step"]) - 1]["loss"]) > numbers["first_loss"]
    if "did not recover" in finding.title:
        assert numbers["final_loss"] > numbers["first_loss"]
    if "then NaN or Inf" in words:
        assert not math.isfinite(losses[-1])
    if finding.title.endswith("in every step"):
        assert not any(map(math.isfinite, losses))
    if "The loss has been NaN or Inf since" in finding.title:
        later = [number_of(r["loss"]) for r in records if r["step"] >= numbers["step"] and "loss" in r]
        assert later
        assert not any(map(math.isfinite, later))
    if "Weights contain" in finding.title:
        later = [r for r in records if r["step"] > numbers["step"]]
        assert not any(r["nan"] + r["inf"] == 0 and math.isfinite(number_of(r.get("loss", 0))) for r in later)
    if "did not reach the weights" in words:
        assert not any(r["nan"] + r["inf"] and not (r.get("skipped") or r.get("rejected")) for r in records)
    if "mean of the second half" in finding.title:
        finite = [loss for loss in losses if math.isfinite(loss)]
        assert math.isclose(numbers["late_mean"], statistics.fmean(finite[len(finite) // 2 :]), rel_tol=1e-9)
    if "but the loss is not" in finding.title:
        assert any(loss != 0 for loss in losses)
    if "risen from" in words:
        assert numbers["new_lr"] >= 2 * numbers["old_lr"]
    if "In one step" in words or "in one step" in words:
        assert numbers["loss_at_rise"] >= 100 * numbers["loss_before"]
    if "too small" in words and "learning rate" in words and "update" in numbers:
        assert numbers["update"] < 1e-5
    if "is too high" in words and "update" in numbers:
        assert numbers["update"] > 0.1
    if "did not change beyond its noise" in finding.title:
        assert abs(numbers["first_tenth"] - numbers["last_tenth"]) <= 0.2 * abs(numbers["first_tenth"])
    if "before they are unscaled" in finding.title:
        assert numbers["norm"] < numbers["max_norm"]
    if "learning rate is 0" in finding.title:
        assert {r["lr"] for r in records} == {0.0}
    if "No step changes the weights" in finding.title:
        assert not any(
            any(r["updates"]) for r in records if "updates" in r and not r["skipped"] and number_of(r["norm"]) > 0
        )


def shown_forms(value: float) -> set[str]:
    """All ways in which a sentence may show a number."""
    if not math.isfinite(value):
        return set()
    forms = {text.number(value), text.percent(abs(value)), text.scale_text(value)}
    return forms | ({f"{int(value):,}"} if value == int(value) else set())


@settings(max_examples=250)
@given(random_runs())
@example(made.made_run(1))
def test_every_sentence_agrees_with_the_records(run: runfile.Run) -> None:
    findings = find(run)
    for finding in findings:
        records = list(run.steps.get(finding.optimizer or 0, {}).values())
        true = true_numbers(records, finding)
        for name, value in finding.numbers.items():
            if name in true:
                assert math.isclose(value, true[name], rel_tol=1e-12), (name, finding)
        check_words(finding, records)
        sentence = re.sub(r"(float|bfloat)\d+|tensor \d|optimizer \d+", "", f"{finding.title} {finding.text}")
        allowed = CONSTANTS.union(*(shown_forms(value) for value in finding.numbers.values()))
        assert [token for token in NUMBER.findall(sentence) if token.rstrip(",") not in allowed] == [], finding
        assert "{" not in finding.title + finding.text
    result = verdict(run, findings)
    worst = findings[0].severity if findings else "note"
    assert result.severity == ("ok" if worst == "note" else worst)
    assert result.text.endswith(".")


@settings(max_examples=100)
@given(random_runs())
def test_every_view_shows_the_same_numbers(run: runfile.Run) -> None:
    for steps in columns(run):
        summary = summarize(run, steps)
        shown = facts(run, summary)
        losses = steps.loss[steps.finite_loss]
        if len(losses):
            assert summary.lowest_loss <= min(summary.first_loss, summary.final_loss)
            assert shown["loss"].startswith(f"{text.number(losses[0])} → {text.number(losses[-1])}")
            assert shown["loss"].endswith("then NaN or Inf") is not summary.last_loss_is_finite
        result = verdict(run)
        if result.text.startswith("Healthy: ") and "optimizers" not in result.text:
            assert summary.final_loss < summary.first_loss
            assert f"loss {text.number(summary.first_loss)} → {text.number(summary.final_loss)}" in result.text
    shown_as_json = report.Report(run, "run").to_json()
    assert shown_as_json["verdict"] == verdict(run).text
    assert [entry["steps"] for entry in shown_as_json["optimizers"]] == [len(steps) for steps in columns(run)]


def printed(renderable: Any) -> list[str]:
    """The lines of a terminal, with single spaces."""
    console = Console(file=io.StringIO(), width=1000)
    console.print(renderable)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@settings(max_examples=40)
@given(run=random_runs())
def test_terminal_and_page_show_the_numbers_of_the_records(
    run: runfile.Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "sentences"  # One for all runs: the pages share plotly.
    folder.mkdir(exist_ok=True)
    path = made.write(folder / "run.jsonl", lines_of(run))
    in_report, in_watch = printed(report.to_text([path])), printed(watch.view(runfile.read(path)))
    last_lines = cli._last_lines(report.Report(run, "run"))
    with pytest.MonkeyPatch.context() as patch:
        if len(run.steps[0]) % 4:  # Drawing takes most of the time, and the plots are not compared.
            patch.setattr(figures, "figure", lambda *_: None)
        page = html.unescape(report.write_page([path], folder / "page.html").read_text(encoding="utf-8"))
    result = verdict(run)
    assert in_report[1] == in_watch[1] == result.text
    assert result.text in page
    for finding in find(run):
        assert f"{finding.severity}: {finding.title}" in in_report
        assert finding.title in page
    for number, records in run.steps.items():
        rows = list(records.values())
        losses = [value for value in (number_of(r.get("loss")) for r in rows) if math.isfinite(value)]
        norms = [value for value in (number_of(r.get("norm")) for r in rows) if math.isfinite(value)]
        skipped = sum(bool(r["skipped"] or r["rejected"]) for r in rows)
        true = {"steps": f"{len(rows):,}"}
        if losses:
            true["lowest loss"] = f"{text.number(min(losses))} in step"
            true["loss"] = f"{text.number(losses[0])} → {text.number(losses[-1])}"
        if norms:
            true["typical norm"] = text.number(statistics.median(norms))
        true["skipped"] = f"{skipped:,} ({text.percent(skipped / len(rows))})" if skipped else "0"
        line = next(line for line in last_lines if len(run.steps) == 1 or line.startswith(f"optimizer {number} "))
        for name, value in true.items():
            assert any(shown.startswith(f"{name} {value}") for shown in in_report), (name, value)
            assert name in ("steps", "loss") or any(shown.startswith(f"{name} {value}") for shown in in_watch)
            assert f"<dt>{name}</dt><dd>{value}" in page
            assert f"{name} {value}" in line


def lines_of(run: runfile.Run) -> list[dict[str, Any]]:
    """The records of a run as lines of a file."""
    steps = [record for records in run.steps.values() for record in records.values()]
    return [
        run.header,
        *run.optimizers.values(),
        *({name: list(v) if name in runfile.TENSOR_FIELDS else v for name, v in step.items()} for step in steps),
        *([] if run.end is None else [run.end]),
    ]
