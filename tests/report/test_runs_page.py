"""The page over all runs in a real browser: it sorts, searches, links, fits a narrow window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradilocks.cli import main
from gradilocks.report.run_list import ListedRun
from gradilocks.report.runs_page import render_runs
from tests.report.browser import browser, visit
from tests.report.made_runs import header, made_run, write

RUNS = [
    ListedRun("c", "c", 3e9, "running", "healthy", "Nothing wrong.", 1200, 60.0, "3 → 0.5", 0.5,
              {"accuracy": 0.9}, "python train.py --lr 3e-4", "c0ffee" + "0" * 34, True),
    ListedRun("b", "deep/b", 2e9, "finished", "in trouble", "It ended in NaN.", 90, 9000.0,
              "3 → NaN", None, {"accuracy": 0.1}, "gradilocks run other.py"),
    ListedRun("a", "a" * 60, 1e9, "killed", "needs a look", "1 warning.", 1000, 5.0, "3 → 2", 2.0,
              {}, "x" * 200),
]  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "index.html"
    html = render_runs(RUNS, folder=Path("runs"), links={"b": "deep/b.html"})
    path.write_text(html, encoding="utf-8")
    return path


def names(seen: Any) -> list[str]:
    shown = seen.page.locator("tbody tr:visible th").all_inner_texts()
    return [each.strip()[-1] for each in shown]


def test_a_click_on_a_head_sorts_and_what_has_none_comes_last(chromium: Any, page: Path) -> None:
    with visit(chromium, page, width=1280) as seen:
        assert names(seen) == ["c", "b", "a"]
        for head, rising, falling in (
            ("steps", "bac", "cab"),
            ("loss", "cab", "acb"),
            ("accuracy", "bca", "cba"),
            ("started", "abc", "cba"),
            ("verdict", "cba", "abc"),
        ):
            button = seen.page.locator("thead th", has_text=head).get_by_role("button")
            button.click()
            assert "".join(names(seen)) == rising, head
            button.click()
            assert "".join(names(seen)) == falling, head
        assert seen.page.locator("[aria-sort]").count() == 1
        assert seen.complaints == []


def test_what_is_typed_finds_runs(chromium: Any, page: Path) -> None:
    with visit(chromium, page, width=1280) as seen:
        seen.page.get_by_label("Find").fill("TRAIN healthy")
        assert names(seen) == ["c"]
        assert seen.page.locator("#found").inner_text() == "1 of 3"
        seen.page.get_by_label("Find").fill("")
        assert names(seen) == ["c", "b", "a"]


def test_runs_link_to_their_reports_and_those_without_do_not(chromium: Any, page: Path) -> None:
    with visit(chromium, page, width=1280) as seen:
        links = seen.page.locator("tbody a")
        assert (links.count(), links.first.get_attribute("href")) == (1, "deep/b.html")


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_itself_never_scrolls_sideways(chromium: Any, page: Path, width: int) -> None:
    with visit(chromium, page, width=width) as seen:
        wide = seen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width
        assert seen.complaints == []


def test_without_scripts_the_table_is_whole(chromium: Any, page: Path) -> None:
    with visit(chromium, page, script=False) as seen:
        assert names(seen) == ["c", "b", "a"]
        assert not seen.page.locator("#find").is_visible()


def test_reports_of_a_page_share_one_copy_of_plotly_and_draw_by_it(
    chromium: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    places = [runs / "a.jsonl", runs / "deep er" / "b.jsonl"]
    for number, place in enumerate(places):
        place.parent.mkdir(parents=True, exist_ok=True)
        write(made_run(header=header(started=7.0 + number)), place)
    assert main(["page", str(runs)]) == 0
    capsys.readouterr()
    (shared,) = runs.rglob("plotly-*.js")
    assert shared.parent == runs
    for place in places:
        report = place.with_suffix(".html")
        assert report.stat().st_size < 500_000
        with visit(chromium, report) as seen:
            assert seen.page.locator(".canvas svg.main-svg").count() > 0
            assert seen.page.locator("#no-plots").is_hidden()
            assert seen.complaints == []
    shared.unlink()
    opened = chromium.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(places[0].with_suffix(".html").as_uri())
    assert opened.locator("#no-plots").is_visible()
    assert errors == []
    opened.close()
    assert main(["page", str(runs)]) == 0
    assert shared.is_file()
