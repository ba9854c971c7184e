"""What a room loads on first use: no name at its door is that of a file behind it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest


@pytest.mark.parametrize("room", ["demo", "report", "lab.audit"])
def test_a_name_that_is_loaded_on_first_use_is_no_file_s_name(room: str) -> None:
    # Importing a file puts it in its room under its own name, in the place of what is meant.
    door = importlib.import_module(f"gradilocks.{room}")
    files = {module.name for module in pkgutil.iter_modules(door.__path__)}
    assert not files & set(door.__all__)
    for name in door.__all__:
        assert getattr(door, name) is not None
