"""docs/finding-the-culprit.md shows what benchmarks/results has of this zoo and of the costs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.culprits.zoo import ZOO

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(ROOT / "benchmarks/bench_culprits.py"))


def results(name):
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


@pytest.fixture(scope="module")
def found():
    return results("culprits_cpu.json")


def shown_after(mark, end):
    text = (ROOT / "docs/finding-the-culprit.md").read_text()
    return text.split(f"{mark}\n")[1].split(f"\n{end}")[0]


def test_the_document_has_the_table_of_the_results(bench, found):
    shown = shown_after(bench["BEGIN"].format(""), bench["END"])
    assert shown == f"{bench['summary'](found)}\n\n{bench['table'](found)}"


def test_the_document_has_the_costs_of_the_results(bench, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = runpy.run_path(str(ROOT / "benchmarks/culprit_cost.py"))["table"]
    shown = shown_after(bench["BEGIN"].format(" --cost"), bench["END"])
    assert shown == table(results("culprits_cost_cpu.json"))


def test_the_results_are_of_this_zoo(found):
    assert [row["planted"] for row in found["rows"]] == [case._asdict() for case in ZOO]


def test_nobody_was_named_wrongly_and_almost_all_were_named(found):
    said = [row["gradilocks"] for row in found["rows"]]
    assert not [
        each for each in said if each["verdict"] == "wrong" and each["certainty"] != "unknown"
    ]
    sure = [each for each in said if each["certainty"] in ("certain", "likely")]
    right = sum(each["verdict"] == "right" for each in sure)
    assert right >= len(said) * 22 / 24
