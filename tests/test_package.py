"""The package as a user meets it: version, names, what importing it costs, what is shipped."""

import ast
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gradilocks
from tests import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))

NEVER_ON_THE_TRAINING_PATH = {"matplotlib", "pandas", "plotly", "rich", "triton", "typer"}


def run_fresh(program: str, cwd: Path) -> str:
    """Run a program in a new Python process and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(program: str, cwd: Path) -> set[str]:
    """The top-level modules that a new Python process has loaded once it has run a program."""
    printed = run_fresh(f"{program}\nimport sys\nprint(*sys.modules, sep='\\n')", cwd)
    return {name.partition(".")[0] for name in printed.split()}


def test_the_version_is_the_newest_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headed = re.findall(r"^## \[?(\d+\.\d+\.\d+)\b", changelog, flags=re.MULTILINE)
    assert headed, "CHANGELOG.md has no heading of the form `## 1.2.3`"
    newest_first = sorted(headed, key=lambda v: [int(part) for part in v.split(".")], reverse=True)
    assert headed == newest_first
    assert gradilocks.__version__ == headed[0]


def test_the_public_names_are_sorted_and_listed_once():
    assert list(gradilocks.__all__) == sorted(set(gradilocks.__all__))


@pytest.mark.parametrize("name", gradilocks.__all__)
def test_a_public_name_can_be_imported(name):
    assert getattr(gradilocks, name) is not None
    assert name in dir(gradilocks)


def test_a_name_that_does_not_exist_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gradilocks.no_such_name


def test_importing_the_package_imports_no_torch_and_nothing_optional(tmp_path):
    loaded = modules_after("import gradilocks", tmp_path)
    assert "gradilocks" in loaded
    assert not loaded & {"torch", "numpy", *NEVER_ON_THE_TRAINING_PATH}


def test_using_every_public_name_imports_only_torch_and_leaves_cuda_alone(tmp_path):
    # What torch brings by itself is not ours to answer for.
    by_torch = modules_after("import torch", tmp_path)
    loaded = modules_after(
        "import gradilocks, torch\n"
        "for name in gradilocks.__all__: getattr(gradilocks, name)\n"
        "assert not torch.cuda.is_initialized()",
        tmp_path,
    )
    assert not (loaded - by_torch) & NEVER_ON_THE_TRAINING_PATH


def test_importing_the_package_touches_no_file_but_its_own_modules(tmp_path):
    # The hook hears of every file that Python opens and of every change to the file system. Reading
    # modules is what an import is; all else is reported.
    printed = run_fresh(
        """
import json, os, sys

watched = ("os.", "shutil.", "socket.", "subprocess.", "tempfile.")
harmless = {"os.listdir", "os.scandir", "os.fwalk", "os.walk"}
seen = []
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def hear(event, args):
    if event == "open":
        path, mode, flags = args
        module = str(path).endswith((".py", ".pyc", ".so", ".pyd"))
        if (mode and set(mode) & set("wax+")) or flags & writing or not module:
            seen.append(f"open {path} {mode} {flags}")
    elif event.startswith(watched) and event not in harmless:
        seen.append(f"{event} {args}")

sys.addaudithook(hear)
import gradilocks
print(json.dumps(list(seen)))
""",
        tmp_path,
    )
    assert json.loads(printed) == []
    assert list(tmp_path.iterdir()) == []


def test_the_installed_package_says_that_it_is_typed():
    assert (importlib.resources.files("gradilocks") / "py.typed").is_file()


def test_the_wheel_holds_every_module_the_type_marker_and_the_licence(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    # Without isolation and index: a test must not reach for the network.
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(tmp_path), str(tree)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("gradilocks-*.whl")
    assert wheel.name == f"gradilocks-{gradilocks.__version__}-py3-none-any.whl"
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path.relative_to(ROOT / "src").as_posix() for path in SOURCES}
    shown = [
        path.relative_to(ROOT / "src").as_posix()
        for folder in ("assets", "templates")
        for path in (ROOT / "src" / "gradilocks" / "report" / folder).iterdir()
    ]
    assert len(shown) >= 5
    sources = (ROOT / "src" / "gradilocks" / "kernels" / "cpp").iterdir()
    compiled = [
        path.relative_to(ROOT / "src").as_posix()
        for path in sources
        if path.suffix in (".cpp", ".h")
    ]
    assert {name[-4:] for name in compiled} >= {".cpp", "ve.h"}
    wanted |= {*shown, *compiled}
    assert wanted | {"gradilocks/py.typed"} <= held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


def test_every_module_is_written_in_the_grammar_of_python_3_10():
    assert SOURCES
    for path in SOURCES:
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 10))


def test_the_first_screen_of_the_readme_names_the_two_commands():
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:30])
    assert "make demo" in first_screen
    assert "make test" in first_screen
