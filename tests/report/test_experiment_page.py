"""The page of the experiment, in a real browser: three bears, four pictures, every number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import browser, visit
from made_runs import SKIPPED, made_run

from gradilocks.report.experiment import experiment_page
from gradilocks.report.experiment_figures import Drawn, clipping_figures, scaling_figures
from gradilocks.report.tracks import tracks

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
        "scale_last": 65536.0, "norm_largest": 1.5, "seconds": 2.0, "parameters": 117_479,
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
            "computed": "one micro-batch",
        },
        "arms": [
            {
                "name": arm, "title": ARMS[arm], "format": "fp32" if arm == "fp32" else "fp16",
                "scaled": arm not in ("fp32", "too-small"), "optimizer": "AdamW", "rate": 0.002,
                "clip": None if arm == "too-large" else 0.25,
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
            found += [Drawn(arm, ARMS[arm], seed, track) for track in tracks(run)]
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
        assert seen.page.locator(".canvas .main-svg").count() >= 3
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
        assert seen.page.locator(".canvas").count() == 1
        assert "Not judged" in seen.page.locator(".bear").first.inner_text()
        assert seen.complaints == []


def test_words_from_outside_are_escaped(tmp_path: Path) -> None:
    assert EVIL not in written(tmp_path).read_text(encoding="utf-8")


def test_a_loss_that_turned_nan_ends_in_a_cross_at_its_last_finite_step() -> None:
    loss, norm = clipping_figures(drawn())
    (cross,) = [trace for trace in loss.plot["traces"] if trace["meta"]["role"] == "skip"]
    assert cross["x"] == [5]
    assert [trace["meta"]["role"] for trace in norm.plot["traces"]][-1] == "limit"


def test_each_arm_has_one_colour_and_one_line_in_the_legend_whatever_the_seeds() -> None:
    (figure,) = scaling_figures(drawn((0, 1, 2)))
    traces = figure.plot["traces"]
    assert len(traces) == 9
    assert sorted({(trace["name"], trace["meta"]["run"]) for trace in traces}) == [
        ("fp32", 0), ("just right", 2), ("too small", 1),
    ]  # fmt: skip
    assert sum(trace["showlegend"] for trace in traces) == 3
