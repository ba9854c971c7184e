"""docs/finding-the-culprit.md shows what benchmarks/results/culprits_cpu.json has, of this zoo."""

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


@pytest.fixture(scope="module")
def found():
    return json.loads((ROOT / "benchmarks/results/culprits_cpu.json").read_text())


def test_the_document_has_the_table_of_the_results(bench, found):
    text = (ROOT / "docs/finding-the-culprit.md").read_text()
    shown = text.split(f"{bench['BEGIN']}\n")[1].split(f"\n{bench['END']}")[0]
    assert shown == f"{bench['summary'](found)}\n\n{bench['table'](found)}"


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
