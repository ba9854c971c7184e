"""One real run for all tests of the report."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def healthy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a small GPT that really learned, for 120 steps."""
    from tests.report.real_run import train

    path = tmp_path_factory.mktemp("real") / "healthy.jsonl"
    train(path, steps=120)
    return path
