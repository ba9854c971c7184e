"""Helper modules beside these tests are imported by their plain names; one real run for all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def healthy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a small GPT that really learned, for 240 steps."""
    from real_run import train

    path = tmp_path_factory.mktemp("real") / "healthy.jsonl"
    train(path, steps=240)
    return path
