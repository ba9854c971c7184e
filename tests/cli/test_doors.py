"""What shows things uses what the other rooms offer at their door, and nothing behind it."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import gradilocks

SOURCE = Path(gradilocks.__file__).parent
# A file that is a door by itself; integrations offers its tools one by one, a file each.
FILES = ("gradilocks.errors", "gradilocks.lab.formats", "gradilocks.integrations.")


def imports(room: str) -> list[tuple[str, str, str]]:
    """Of every file of a room: its name, a module of another room, and what it takes from there."""
    found = []
    for path in sorted((SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            found += [
                (path.name, module, name)
                for module, name in names
                if module.split(".")[0] == "gradilocks"
                and not f"{module}.".startswith(f"gradilocks.{room}.")
            ]
    return found


@pytest.mark.parametrize("room", ["cli", "demo", "integrations"])
def test_a_room_that_shows_uses_what_others_offer_at_their_door(room: str) -> None:
    for file, module, name in imports(room):
        door = importlib.import_module(module)
        is_door = hasattr(door, "__path__") or module.startswith(FILES)
        assert is_door, f"{file} goes behind a door: {module}"
        offered = {"", "__version__", *door.__all__}
        assert name in offered, f"{file} takes {name}, which {module} does not offer"


@pytest.mark.parametrize("room", ["demo", "report", "lab.audit"])
def test_a_name_that_is_loaded_on_first_use_is_no_file_s_name(room: str) -> None:
    # Importing a file puts it in its room under its own name, in the place of what is meant.
    door = importlib.import_module(f"gradilocks.{room}")
    files = {module.name for module in pkgutil.iter_modules(door.__path__)}
    assert not files & set(door.__all__)
    for name in door.__all__:
        assert getattr(door, name) is not None
