"""The device paths that tests of the step run on."""

from __future__ import annotations

import pytest

from control.given_gradients import PATHS, use_path


@pytest.fixture(params=PATHS)
def device(request, monkeypatch) -> str:
    """The device of every path in turn."""
    return use_path(request.param, monkeypatch)
