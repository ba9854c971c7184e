"""The page of the experiment, in a real browser: three bears, their pictures, every number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradilocks.report import Drawn, experiment_page, report_on
from gradilocks.report.experiment import comparisons
from gradilocks.report.figures import Figure
from tests.report.browser import browser, visit
from tests.report.made_runs import SKIPPED, made_run

ARMS = {
    "fp32": "fp32",
    "too-small": "too small",
    "just-right": "just right",
    "too-large": "too large",
    "clipped": "too large, clipped",
}
EVIL = "</script><script>alert(1)</script>"


def plain_run(arm: str, seed: int) -> dict[str, Any]:
    lost = {"too-small": 0.99, "fp32": None}.get(arm, 0.0)
    return {
        "arm": arm, "seed": seed, "steps": 60, "first_loss": 4.81, "window": 10, "skipped": 0,
        "final_loss": None if arm == "too-large" else 2.5 + seed, "clipped": 3, "lost": lost,
        "scale_first": 1024.0, "scale_last": 65536.0, "norm_largest": 1.5, "seconds": 2.0,
        "rate_first": 0.003, "rate_least": 0.003, "rate_largest": 0.003, "parameters": 117_479,
        "stopped": "7 steps in a row." if arm == "too-large" else None,
        "path": f"runs/demo/{arm}-{seed}.jsonl",
    }  # fmt: skip


def summary(
    *, seeds: tuple[int, ...] = (0,), arms: tuple[str, ...] = tuple(ARMS), holds: bool | None = True
) -> dict[str, Any]:
    return {
        "started": 1_790_000_000.0,
        "seconds": 61.0,
        "command": ["gradilocks", "demo", EVIL],
        "versions": {"gradilocks": "0.1", "torch": EVIL},
        "seeds": list(seeds),
        "setup": {
            "steps": 60, "layers": 2, "width": 64, "heads": 4, "length": 64,
            "computed": "one micro-batch", "text": "tales",
        },
        "arms": [
            {
                "name": arm, "title": ARMS[arm], "format": "fp32" if arm == "fp32" else "fp16",
                "scaled": arm not in ("fp32", "too-small"), "rate": 0.003,
                "optimizer": "SGD" if arm in ("too-large", "clipped") else "AdamW",
                "clip": None if arm == "too-large" else 0.7, "source": f"Source of {arm}.",
                "final_loss": {"mean": 2.5, "deviation": 0.1, "seeds": len(seeds), "finite": 1},
            }
            for arm in arms
        ],
        "runs": [plain_run(arm, seed) for arm in arms for seed in seeds],
        "verdicts": [
            {"name": name, "claim": f"{name} it is", "holds": holds, "sentence": f"This {name}."}
            for name in ("too small", "too large", "just right")
        ],
    }  # fmt: skip


def drawn(seeds: tuple[int, ...] = (0,), arms: tuple[str, ...] = tuple(ARMS)) -> list[Drawn]:
    found = []
    for arm in arms:
        for seed in seeds:
            lost = {step: {**SKIPPED, "loss": None} for step in range(6, 61)}
            plant = lost if arm == "too-large" else None
            run = made_run(60, plant=plant)
            found.append(Drawn(arm, seed, report_on(run, ARMS[arm])))
    return found


def written(folder: Path, **changes: Any) -> Path:
    seeds, arms = changes.get("seeds", (0,)), changes.get("arms", tuple(ARMS))
    path = folder / "page.html"
    pages = {arm: f"{arm}.html" for arm in arms}
    made = experiment_page(
        summary(**changes), drawn(seeds, arms), pages=pages, generator="gradilocks demo"
    )
    path.write_text(made, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (400, False)], ids=["wide", "dark", "narrow"]
)
def test_bears_pictures_and_tables_are_drawn_without_a_complaint(
    chromium: Any, tmp_path: Path, width: int, dark: bool
) -> None:
    with visit(chromium, written(tmp_path, seeds=(0, 1)), width=width, dark=dark) as seen:
        assert seen.page.locator(".bear.good").count() == 3
        assert seen.page.locator(".bear svg").count() == 3
        assert seen.page.locator(".canvas .main-svg").count() >= 8
        assert seen.page.locator("table").count() == 2
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.complaints == []


def test_the_page_says_the_verdicts_and_every_final_loss(chromium: Any, tmp_path: Path) -> None:
    with visit(chromium, written(tmp_path, seeds=(0, 1, 2))) as seen:
        words = seen.page.locator("body").inner_text()
        for part in ("This too small.", "✓ Claim holds: just right it is.", "one micro-batch"):
            assert part in words
        row = seen.page.locator("tbody tr").filter(has_text="just right").first.inner_text()
        for loss in ("2.5000", "3.5000", "4.5000"):
            assert loss in row
        assert seen.page.locator("td.lost").all_inner_texts() == ["NaN", "NaN", "NaN"]


def test_a_claim_that_does_not_hold_looks_like_one(chromium: Any, tmp_path: Path) -> None:
    with visit(chromium, written(tmp_path, holds=False)) as seen:
        assert seen.page.locator(".bear.problem").count() == 3
        assert "✕ Claim does not hold" in seen.page.locator(".bear").first.inner_text()
        assert seen.page.locator(".bear.good").count() == 0


def test_an_arm_links_to_its_own_report_beside_the_page(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "too-small.html").write_text("<title>its own</title>")
    with visit(chromium, written(tmp_path)) as seen:
        seen.page.get_by_role("link", name="too small", exact=True).click()
        assert seen.page.title() == "its own"


def test_without_javascript_verdicts_and_numbers_are_there(chromium: Any, tmp_path: Path) -> None:
    with visit(chromium, written(tmp_path), script=False) as seen:
        assert "switched off" in seen.page.locator(".noscript").inner_text()
        assert seen.page.locator("tbody tr").count() == 10


def test_some_arms_alone_are_a_page_too(chromium: Any, tmp_path: Path) -> None:
    with visit(chromium, written(tmp_path, arms=("fp32",), holds=None)) as seen:
        drawn = seen.page.eval_on_selector_all(".canvas", "found => found.map(each => each.id)")
        assert drawn == ["scaling-loss", "scaling-norm", "scaling-scale", "scaling-clipped"]
        assert "Not judged" in seen.page.locator(".bear").first.inner_text()
        assert seen.complaints == []


def words_of(made: dict[str, Any], arms: tuple[str, ...] = tuple(ARMS)) -> str:
    """The page without its markup, its styles and its scripts."""
    page = experiment_page(made, drawn((0,), arms), pages={}, generator="gradilocks demo")
    body = page[page.index("<body") :]
    return " ".join(re.sub(r"<script.*?</script>|<[^>]+>", " ", body, flags=re.DOTALL).split())


def test_settings_are_those_of_the_summary_and_no_others() -> None:
    words = words_of(summary())
    for part in (
        "dynamic, from 2 10", "0.7", "AdamW at 0.003 Source of just-right.",
        "SGD at 0.003 Source of clipped.", "documentation, tales, character",
        "ended early too large, seed 0 after step 60: 7 steps in a row.",
    ):  # fmt: skip
        assert part in words, part
    for part in ("2 16 none", "from 2 16", "SGD at 5", "0.25", "100 steps"):
        assert part not in words, part


def test_settings_of_arms_that_were_not_run_are_not_told() -> None:
    words = words_of(summary(arms=("fp32",), holds=None), ("fp32",))
    for part in (
        "SGD",
        "fp16",
        "dynamic",
        "DynamicScale",
        "ended early",
        "Clipping",
        "too large, clipped",
    ):
        assert part not in words, part
    assert "One arm, fp32: there is nothing to compare it with." in words


def test_seeds_that_ended_early_for_one_reason_are_told_together() -> None:
    words = words_of(summary(seeds=(0, 1)))
    assert words.count("ended early") == 1
    assert "too large, seed 0 after step 60, seed 1 after step 60: 7 steps in a row." in words


def test_a_warm_up_is_told_if_the_rate_had_one() -> None:
    made = summary(arms=("fp32", "just-right"))
    assert words_of(made).count(" 0.003 none") == 2
    made["runs"][1].update(rate_first=0.001, rate_least=0.001)
    words = words_of(made)
    assert words.count(" 0.003 none") == 1
    assert "AdamW 0.001 – 0.003 from 0.001" in words


@pytest.mark.parametrize("holds", [True, False, None])
def test_nothing_beside_the_verdicts_claims_an_outcome(holds: bool | None) -> None:
    told = words_of(summary(holds=holds)).partition("Scaling ")[2]
    assert told.startswith(
        "The same model, data, optimizer, learning rate and limit on the gradient norm. What "
        "differs is the format that products are stored in and loss scale."
    )
    assert (
        "Clipping The same model, data, format that products are stored in, loss scale, optimizer "
        "and learning rate. What differs is the limit on the gradient norm."
    ) in told
    for claim in ("too small to hold", "should", "makes the next", "it happens"):
        assert claim not in told


def test_what_differs_is_worked_out_from_the_arms_that_were_run() -> None:
    arms = ("too-small", "just-right")
    assert "What differs is the loss scale." in words_of(summary(arms=arms), arms)


def test_what_fp16_rounds_to_zero_at_the_first_step_is_told_of_each_arm_that_rounds() -> None:
    words = words_of(summary())
    assert "those that fp16 rounds to zero" in words
    assert " 99 % " in words
    assert "lost at first" not in words_of(summary(arms=("fp32",)), ("fp32",))


def test_the_findings_of_each_arm_and_its_files_are_on_the_page() -> None:
    words = words_of(summary(seeds=(0, 1)))
    assert "What was found with seed 0" in words
    for arm, title in ARMS.items():
        files = " ".join(f"runs/demo/{arm}-{seed}.jsonl" for seed in (0, 1))
        verdict = "✕ In trouble." if arm == "too-large" else "✓ Healthy."
        assert f"{title} {files} {verdict}" in words


def test_a_cross_is_explained_only_where_there_is_one() -> None:
    arms = ("clipped",)
    assert "A cross is" in words_of(summary())
    assert "A cross is" not in words_of(summary(arms=arms), arms)


def test_words_from_outside_are_escaped(tmp_path: Path) -> None:
    assert EVIL not in written(tmp_path).read_text(encoding="utf-8")


def figures(of: str, seeds: tuple[int, ...] = (0,)) -> dict[str, Figure]:
    (section,) = [s for s in comparisons(summary(seeds=seeds), drawn(seeds)) if s.title == of]
    return {figure.title: figure for figure in section.figures}


def test_a_loss_that_turned_nan_ends_in_a_cross_at_its_last_finite_step() -> None:
    found = figures("Clipping")
    loss, norm = found["Loss"], found["Gradient norm"]
    (cross,) = [trace for trace in loss.plot["traces"] if trace["meta"]["role"] == "skip"]
    assert cross["x"] == [5]
    assert [trace["meta"]["role"] for trace in norm.plot["traces"]][-1] == "limit"


def test_each_arm_has_one_colour_and_one_line_in_the_legend_whatever_the_seeds() -> None:
    traces = figures("Scaling", (0, 1, 2))["Loss"].plot["traces"]
    assert len(traces) == 9
    assert sorted({(trace["name"], trace["meta"]["run"]) for trace in traces}) == [
        ("fp32", 0), ("just right", 2), ("too small", 1),
    ]  # fmt: skip
    assert sum(trace["showlegend"] for trace in traces) == 3
