"""Warnings of the frameworks about themselves."""

from __future__ import annotations

import pytest

from integrations import lightning_task

_FILTERS = {
    "test_lightning.py": lightning_task.WARNINGS,
    "test_fabric.py": lightning_task.WARNINGS,
}


def pytest_collection_modifyitems(items):
    for item in items:
        for text in _FILTERS.get(item.path.name, ()):
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))
