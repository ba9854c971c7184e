"""The package as users install and import it: public names, import cost, wheel content, a missing compiler."""

from __future__ import annotations

import ast
import importlib.resources
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gradilocks

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "gradilocks").rglob("*.py"))


def run(program: str, **environment: str) -> str:
    """Runs a program in a new process and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(program: str) -> set[str]:
    """All modules that a new process has loaded after a program."""
    return set(run(f"{program}\nimport sys\nprint(*sys.modules)").split())


def test_the_tests_import_this_tree_and_so_do_the_processes_they_start():
    assert Path(gradilocks.__file__).is_relative_to(ROOT / "src")
    assert Path(run("import gradilocks; print(gradilocks.__file__)").strip()).is_relative_to(ROOT / "src")


def test_the_public_names_are_sorted_and_unique():
    assert list(gradilocks.__all__) == sorted(set(gradilocks.__all__))


@pytest.mark.parametrize("name", gradilocks.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(gradilocks, name) is not None
    assert name in dir(gradilocks)


def test_type_checkers_see_the_public_names():
    """The imports under TYPE_CHECKING are those that `__getattr__` makes at run time."""
    tree = ast.parse((ROOT / "src" / "gradilocks" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            found[alias.name] = str(node.module).removeprefix("gradilocks").removeprefix(".")
    assert found == gradilocks._MODULES
    assert set(found) == set(gradilocks.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'gradilocks' has no attribute 'no_such_name'"):
        _ = gradilocks.no_such_name


def test_importing_the_package_imports_nothing_but_itself():
    loaded = modules_after("import gradilocks") - modules_after("import importlib, typing")
    foreign = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"gradilocks", "gradilocks._version"}


def test_using_every_public_name_loads_torch_but_neither_triton_nor_dynamo_nor_a_tool():
    program = "import gradilocks, torch\nfor name in gradilocks.__all__: getattr(gradilocks, name)\n"
    program += "assert not torch.cuda.is_initialized()"
    loaded = modules_after(program) - modules_after("import torch")
    unwanted = {"triton", "numpy", "rich", "typer", "plotly", "jinja2", "pandas", "matplotlib"}
    assert not {name for name in loaded if name.split(".")[0] in unwanted}
    assert "torch._dynamo" not in loaded


def test_the_package_is_marked_as_typed():
    assert (importlib.resources.files("gradilocks") / "py.typed").is_file()


def test_every_module_is_written_in_the_grammar_of_python_3_10():
    for path in SOURCES:
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 10))


@pytest.fixture
def tree(tmp_path):
    """A copy of the source tree without build outputs."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "build")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    return copy


def build(tree: Path, folder: Path, *command: str, **environment: str) -> Path:
    """Builds a distribution without the network and returns the file."""
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("gradilocks-*")
    return built


def build_wheel(tree: Path, folder: Path, **environment: str) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--wheel-dir", str(folder)]
    return build(tree, folder, "-m", "pip", "wheel", *options, str(tree), **environment)


@pytest.mark.slow
def test_the_wheel_contains_every_module_and_template_the_extension_and_the_type_marker(tree, tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    wheel = build_wheel(tree, tmp_path / "wheels")
    # One wheel serves every Python from 3.10 on.
    assert wheel.name.startswith(f"gradilocks-{gradilocks.__version__}-cp310-abi3-")
    content = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gradilocks/")}
    (extension,) = {name for name in content if name.endswith(".so")}
    assert extension.startswith("gradilocks/kernels/_native")
    data = (ROOT / "src" / "gradilocks" / "view" / "templates").glob("*")
    files = {path.relative_to(ROOT / "src").as_posix() for path in (*SOURCES, *data)}
    assert content == {*files, extension, "gradilocks/py.typed"}


@pytest.mark.slow
def test_without_a_compiler_the_installation_succeeds_and_plain_torch_is_used(tree, tmp_path):
    wheel = build_wheel(tree, tmp_path / "wheels", CC="false", CXX="false")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    printed = run(
        "import torch\n"
        "from gradilocks import kernels\n"
        "print(kernels.measure([torch.tensor([3.0, 4.0])])[0].item())\n"
        "print(kernels.describe()['cpu'])\n",
        PYTHONPATH=str(tmp_path / "installed"),
    )
    norm, reason = printed.splitlines()
    assert norm == "5.0"
    assert reason.startswith("plain torch: ImportError: the C extension was not compiled")


@pytest.mark.slow
def test_the_source_distribution_contains_what_the_extension_is_compiled_from(tree, tmp_path):
    archive = build(tree, tmp_path / "dist", "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path / "dist"))
    with tarfile.open(archive) as file:
        content = {name.partition("/")[2] for name in file.getnames()}
    native = (ROOT / "src" / "gradilocks" / "kernels" / "native").iterdir()
    sources = {path.relative_to(ROOT).as_posix() for path in native}
    assert len(sources) >= 3
    assert {*sources, "setup.py", "src/gradilocks/py.typed"} <= content
