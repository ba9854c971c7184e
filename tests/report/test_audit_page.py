"""An audit's page as data and text: windows where formats end, numbers as they were found."""

from __future__ import annotations

import copy
import math
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from gradilocks.errors import GradilocksError
from gradilocks.lab import AuditRecord
from gradilocks.report import audit_page as pages
from gradilocks.report.audit_figures import module_figure, window_figure
from gradilocks.report.audit_page import recommendation_as_line, write_audit_page
from gradilocks.report.formatting import percent
from tests.report.made_audits import FORMATS, gradients, made_audit, spread

read = AuditRecord.from_plain
EVIL = "</script><script>alert(1)</script><!--\u2028<img src=x onerror=alert(2)>&amp;%{y}"


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return made_audit()


@pytest.fixture(scope="module")
def audit(plain: dict[str, Any]) -> AuditRecord:
    return read(plain)


def audit_page(plain: dict[str, Any], *, title: str) -> str:
    return pages.audit_page(read(plain), title=title)


# --- the window ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_edges_are_where_torch_rounds_to_zero_to_subnormal_and_too_large(
    audit: AuditRecord, name: str
) -> None:
    dtype, largest, smallest_normal, smallest_subnormal = FORMATS[name]
    form = next(each for each in audit.formats if each.name == name)
    lost, normal, over = (2.0**edge for edge in form.format.edges)

    def stored(value: float) -> float:
        return float(torch.tensor(value, dtype=torch.float64).to(dtype).double())

    assert stored(lost) == 0.0
    assert stored(lost * 1.01) == smallest_subnormal
    assert stored(normal) == smallest_normal == normal
    assert stored(normal * (1 - 2.0**-2)) < smallest_normal
    assert over == pytest.approx(largest)
    assert stored(largest) == largest
    # Infinity, NaN or the largest number, as the format has it.
    assert stored(largest * 1.2) == largest or not math.isfinite(stored(largest * 1.2))


@pytest.mark.parametrize("name", ["fp16", "fp8 e5m2", "fp8 e4m3"])
def test_the_curves_left_of_the_window_hold_the_share_that_is_lost(
    audit: AuditRecord, name: str
) -> None:
    form = next(each for each in audit.formats if each.name == name)
    view = window_figure("w", audit).plot["views"][name]
    assert view["rows"] == ["At scale 1", f"At scale 2<sup>{math.log2(form.scale):.0f}</sup>"]
    totals = {
        "parameters": audit.parameters.values,
        "activations": audit.activations.values,
    }
    for row, shares in enumerate((form.fate.unscaled, form.fate.scaled)):
        bands = {band["fate"]: band for band in view["bands"] if band["row"] == row}
        drawn = dict.fromkeys(bands, 0.0)
        for trace in view["traces"]:
            if trace["yaxis"] == ("y2" if row else "y"):
                for middle, share in zip(trace["x"], trace["y"], strict=True):
                    start = middle - 0.5
                    # The largest number of a format lies within its last bin.
                    fate = next(
                        fate
                        for fate, band in bands.items()
                        if band["x0"] <= start < math.ceil(band["x1"])
                    )
                    drawn[fate] += share * totals[trace["meta"]["role"]]
        everything = sum(totals.values())
        for fate, band in bands.items():
            share = getattr(shares, fate)
            assert drawn[fate] / everything == pytest.approx(share, abs=1e-4)
            assert band["share"] == percent(share)


def test_the_modules_are_drawn_as_they_are_and_the_window_moves_by_the_scale(
    audit: AuditRecord,
) -> None:
    figure = module_figure("m", audit)
    assert figure is not None
    for form in audit.formats:
        view = figure.plot["views"][form.name]
        lost, normal, over = form.format.edges
        shift = math.log2(form.scale)
        edges = [band["x1"] for band in view["bands"][:3]]
        assert edges == pytest.approx([lost - shift, normal - shift, over - shift], abs=1e-3)
        assert view["before"] == pytest.approx([lost, normal, over] if shift else [], rel=1e-5)
    (trace,) = figure.plot["views"]["of activations"]["traces"]
    assert trace["y"] == [module.name for module in audit.modules]
    for module, row in zip(audit.modules, trace["z"], strict=True):
        made = module.activations
        assert made is not None
        share = dict(zip(trace["x"], row, strict=False))
        for i, each in enumerate(made.counts):
            if each and made.first + i in share:
                assert share[made.first + i] == pytest.approx(each / made.values, rel=1e-2)


def test_a_format_without_a_scale_has_one_row_and_says_how_far_it_reaches(
    audit: AuditRecord,
) -> None:
    view = window_figure("w", audit).plot["views"]["bf16"]
    assert view["rows"] == ["At scale 1"]
    (normal,) = (band for band in view["bands"] if band["fate"] == "normal")
    assert normal["ends"] == "down to 2<sup>-126</sup>, up to 2<sup>128</sup>"
    left, right = view["range"]
    assert right - left < 90  # The gradients fill the picture, not the 260 doublings of bf16.


def test_zeros_and_nonfinite_values_are_counted_and_not_drawn() -> None:
    values = torch.cat([spread(-10, 1, 97, 1), torch.tensor([0.0, math.inf, math.nan])])
    figure = window_figure("w", read(made_audit({"a": (values, values)})))
    assert figure.remark == (
        "1 % of the values are exactly zero and 4 values are NaN or Inf; they are not drawn."
    )


def test_many_modules_share_rows_and_the_page_says_so() -> None:
    audit = read(made_audit(gradients(450, 40)))
    figure = module_figure("m", audit)
    assert figure is not None
    (trace,) = figure.plot["views"]["of all"]["traces"]
    assert len(trace["z"]) <= 400
    assert len(set(trace["y"])) == len(trace["y"])
    assert "several of the 450 modules" in figure.remark


# --- the text ------------------------------------------------------------------------------------


def rows_of(page: str, table: str) -> list[list[str]]:
    found = re.search(rf'<table class="{table}">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert found is not None
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found[1].split("</tr>")[:-1]]
    return [[re.sub(r"<[^>]+>", " ", cell).strip() for cell in row] for row in cells]


def test_the_tables_hold_the_numbers_of_the_audit(plain: dict[str, Any]) -> None:
    page = audit_page(plain, title="train.py")
    columns = ("lost", "subnormal", "overflow")

    def numbers(fate: dict[str, Any]) -> list[str]:
        made = []
        for scale in ("unscaled", "scaled"):
            made += [percent(fate[scale][column]) for column in columns]
            made.append(f"{fate[scale]['headroom']:.1f}".replace("-", "−"))
        return [escape(cell) for cell in made]

    for module, row in zip(plain["modules"], rows_of(page, "modules"), strict=True):
        assert row[0].startswith(f"{module['name']}  {module['type']}")
        assert ("keep in higher precision" in row[0]) == (
            module["name"] in plain["formats"][0]["keep"]
        )
        assert row[1:] == numbers(module["fates"]["fp16"])
    for form, row in zip(plain["formats"], rows_of(page, "formats"), strict=True):
        assert row[0].split()[: len(form["name"].split())] == form["name"].split()
        assert row[2:10] == numbers(form)
        assert row[10] == ("yes" if form["holds"] else "no")
    assert "keep in higher precision" in page.split("<script>")[0]


def test_the_recommendation_comes_first_in_words(plain: dict[str, Any]) -> None:
    page = audit_page(plain, title="train.py")
    said = page.index("Train in fp16 and start the loss scale at")
    assert page.index("<h1>train.py</h1>") < said < page.index('<table class="formats">')


def test_powers_of_two_in_words_are_raised(plain: dict[str, Any]) -> None:
    said = {**plain["recommendation"], "words": ["Start at 2^16.", "Below 2^-24 it is `0`."]}
    page = audit_page({**plain, "recommendation": said}, title="a")
    assert "<strong>Start at 2<sup>16</sup>.</strong> Below 2<sup>-24</sup> it is" in page


def test_a_format_that_does_not_hold_is_no_good_news(plain: dict[str, Any]) -> None:
    changed = copy.deepcopy(plain)
    changed["formats"][0]["holds"] = False
    assert '<p class="verdict good">' in audit_page(plain, title="a")
    assert '<p class="verdict warning">' in audit_page(changed, title="a")
    broken = copy.deepcopy(plain)
    broken["total"]["activations"]["nonfinite"] = 3
    assert '<p class="verdict warning">' in audit_page(broken, title="a")


def test_staying_in_fp32_is_a_recommendation_too(plain: dict[str, Any]) -> None:
    words = ["No format holds these gradients: stay in fp32."]
    fp32 = {"format": "fp32", "scale": 1.0, "keep": [], "words": words}
    page = audit_page({**plain, "recommendation": fp32}, title="a")
    assert f"<strong>{words[0]}</strong>" in page
    assert '<p class="verdict warning">' in page
    silent = audit_page({**plain, "recommendation": {**fp32, "words": []}}, title="a")
    assert "<strong>fp32 without a loss scale.</strong>" in silent
    assert (
        recommendation_as_line({**plain, "recommendation": fp32})
        == "Audit: fp32 without a loss scale."
    )


def test_modules_without_any_value_are_listed_with_dashes() -> None:
    nothing = torch.zeros(10)
    plain = made_audit({"dead": (nothing, None), "alive": (spread(-9, 1, 50, 3), None)})
    row, _ = rows_of(audit_page(plain, title="a"), "modules")
    assert row[1:] == ["–"] * 8
    only_dead = made_audit({"dead": (nothing, nothing)})
    assert rows_of(audit_page(only_dead, title="a"), "modules")[0][1:] == ["–"] * 8


def test_names_and_words_cannot_leave_the_place_they_are_put_in(plain: dict[str, Any]) -> None:
    changed = copy.deepcopy(plain)
    changed["modules"][0]["name"] = changed["modules"][1]["type"] = EVIL
    changed["precision"] = EVIL
    changed["recommendation"] |= {"keep": [EVIL], "words": [EVIL]}
    changed["formats"][0] |= {"keep": [EVIL], "words": EVIL}
    page = audit_page(changed, title=EVIL)
    before_plotly = page.split("<script>")[0]
    assert "alert(1)" in before_plotly
    for dangerous in ("<script>alert", "<img", "<!--", "\u2028"):
        assert dangerous not in before_plotly
    assert page.count("<script") == page.count("</script>") == 5


def test_the_page_holds_plotly_once_and_little_else() -> None:
    small, large = (audit_page(made_audit(gradients(n, 200)), title="a") for n in (5, 300))
    assert small.count("plotly.js v") == large.count("plotly.js v") == 1
    assert len(large.encode()) - len(small.encode()) < 600_000


# --- writing -------------------------------------------------------------------------------------


def test_a_page_is_replaced_by_a_newer_one_of_the_same_and_by_no_other(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "audit.html"
    write_audit_page(path, read(plain), title="train.py")
    write_audit_page(path, read({**plain, "steps": 3}), title="train.py")
    assert "3 steps" in path.read_text(encoding="utf-8")
    with pytest.raises(GradilocksError) as refused:
        write_audit_page(path, read(plain), title="other.py")
    assert str(refused.value) == (
        f"{path} is already there and is no audit of other.py; choose another name, or remove it "
        "first."
    )
    write_audit_page(path, read(plain), title="other.py", force=True)
    assert "<h1>other.py</h1>" in path.read_text(encoding="utf-8")


def test_what_is_no_audit_is_refused_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.html"
    with pytest.raises(
        GradilocksError, match=r"^an audit that is .*: it is of version 2, "
    ) as said:
        write_audit_page(path, read(made_audit(version=2)), title="train.py")
    assert "\n" not in str(said.value)
    assert not path.exists()
