"""Rules of the source tree: what may import what, where private torch names are used, docstring examples."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import inspect
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import gradilocks

SOURCE = Path(__file__).resolve().parent.parent / "src" / "gradilocks"
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {place: ast.parse(path.read_text(encoding="utf-8")) for place, path in FILES.items()}
TOOLS = {"__main__", "audit", "cli", "demo", "emulate", "explain", "formats", "integrations", "run", "trace", "view"}
"""Top-level modules that are not part of a training step."""
TRAINING = [place for place in FILES if place.split("/")[0].removesuffix(".py") not in TOOLS]
PRIVATE = "torch_private.py"


def module_of(place: str) -> str:
    """The module name of a file."""
    return "gradilocks." + place.removesuffix(".py").removesuffix("__init__").replace("/", ".").rstrip(".")


MODULES = {module_of(place).rstrip("."): place for place in FILES}


def imports(tree: ast.AST, *, at_import: bool = False) -> list[tuple[str, str]]:
    """All imports of a file as (module, name); name is "" for `import module`.

    Args:
        tree: of the file.
        at_import: only those that run when the file is imported.
    """
    found: list[tuple[str, str]] = []
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            found += [(str(node.module), alias.name) for alias in node.names]
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (at_import and (is_for_types or isinstance(node, ast.FunctionDef))):
            nodes += ast.iter_child_nodes(node)
    return found


def own_modules(place: str, *, at_import: bool = False) -> set[str]:
    """The files of this package that a file imports."""
    found = set()
    for module, name in imports(TREES[place], at_import=at_import):
        for candidate in (f"{module}.{name}", module):
            if candidate in MODULES:
                found.add(MODULES[candidate])
                break
    return found - {place}


def test_the_training_path_imports_only_torch_triton_and_the_standard_library():
    allowed = {"gradilocks", "torch", "triton", *sys.stdlib_module_names}
    for place in TRAINING:
        others = {module for module, _ in imports(TREES[place]) if module.split(".")[0] not in allowed}
        assert not others, f"{place} imports {sorted(others)}"


def test_triton_is_imported_only_by_kernels():
    users = {place for place in FILES if any(module.split(".")[0] == "triton" for module, _ in imports(TREES[place]))}
    assert users
    assert all(place.startswith("kernels/") for place in users), users


def test_the_training_path_imports_no_tool():
    for place in sorted({*TRAINING} - {"__init__.py"}):  # It imports them for type checkers only.
        tools = {name for name in own_modules(place) if name.split("/")[0].removesuffix(".py") in TOOLS}
        assert not tools, f"{place} imports {sorted(tools)}"


def test_the_viewer_imports_neither_torch_nor_the_rest_of_the_package():
    viewer = [place for place in FILES if place.startswith("view/")]
    assert viewer
    for place in viewer:
        roots = {module for module, _ in imports(TREES[place]) if module.split(".")[0] in ("torch", "gradilocks")}
        others = {module for module in roots if not module.startswith("gradilocks.view")}
        assert not others, f"{place} imports {sorted(others)}"


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {place: own_modules(place, at_import=True) for place in FILES}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(FILES)


def test_no_file_name_is_used_twice_in_the_training_path():
    names = Counter(Path(place).name for place in TRAINING)
    names.pop("__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_the_training_path_neither_prints_nor_exits():
    forbidden = {"print", "input", "exit", "quit", "sys.exit", "os._exit", "os.abort"}
    for place in TRAINING:
        for node in ast.walk(TREES[place]):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in forbidden, f"{place}:{node.lineno}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(place: str) -> set[str]:
    """Private names that a file imports from torch or triton, reads from an object, or names in a string."""
    found = set()
    for module, name in imports(TREES[place]):
        if module.split(".")[0] in ("torch", "triton"):
            found |= {part for part in [*module.split("."), name] if is_private(part)}
    for node in ast.walk(TREES[place]):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in sys.stdlib_module_names:
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                found.add(str(name.value))
    return found


def own_names() -> set[str]:
    """Names that this package defines: functions, classes, variables, attributes of its own objects."""
    found = set()
    for place, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and place != PRIVATE:
                if ast.unparse(node.value) in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found


def test_private_names_of_torch_are_used_in_one_module_only():
    """Except that the drop-in scaler, a subclass of torch's, uses what it inherits."""
    own = own_names()
    inherited = set(dir(torch.amp.GradScaler)) | set(vars(torch.amp.GradScaler("cpu")))
    for place in FILES:
        if place == PRIVATE:
            continue
        foreign = private_uses(place) - own
        if place == "dropin/grad_scaler.py":
            foreign -= inherited
        assert not foreign, f"{place} uses {sorted(foreign)}; move them to {PRIVATE}"


def test_there_are_at_most_fifteen_private_names_of_torch():
    used = private_uses(PRIVATE)
    assert 0 < len(used) <= 15, sorted(used)


@pytest.mark.parametrize("name", sorted(gradilocks.__all__))
def test_every_public_name_has_a_docstring_that_starts_with_a_sentence(name):
    text = inspect.getdoc(getattr(gradilocks, name))
    assert text
    assert text.partition("\n\n")[0].rstrip().endswith("."), text.partition("\n\n")[0]


WITH_EXAMPLES = [place for place, path in FILES.items() if ">>> " in path.read_text(encoding="utf-8")]


@pytest.fixture
def names():
    """What examples take for granted."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer, controlled = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    control = gradilocks.GradientControl(controlled, model=model, clip=1e-3)
    loss = model(torch.ones(8, 4)).square().mean()
    control.backward(model(torch.ones(8, 4)).square().mean())
    public = {name: getattr(gradilocks, name) for name in gradilocks.__all__}
    return {**public, **locals(), "gradilocks": gradilocks, "torch": torch}


@pytest.mark.parametrize("place", WITH_EXAMPLES)
def test_the_examples_in_docstrings_run(place, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Some write files.
    result = doctest.testmod(importlib.import_module(module_of(place)), extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
