"""No false alarm: of runs that learn what they should, a report has notes to say at most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradilocks.report.run_report import examine
from tests.report.healthy_runs import HEALTHY
from tests.report.watched import hooks_kept, watched


@pytest.fixture(autouse=True, scope="module")
def _hooks() -> Iterator[None]:
    with hooks_kept():
        yield


def test_there_are_twenty_of_them() -> None:
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name: str, tmp_path: Path) -> None:
    health = examine(watched(HEALTHY[name], tmp_path / "run.jsonl"))
    assert [each for each in health.findings if each.severity != "note"] == []
    assert health.verdict == "healthy"
