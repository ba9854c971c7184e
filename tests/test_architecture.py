"""The three sentences that hold the house up, read off the source itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gradilocks"
FILES = sorted(SOURCE.rglob("*.py"))
STAGES = {
    "scale",
    "step.measure",
    "ranks.collective",
    "clip",
    "step.decide",
    "step.update",
    "step.outcome",
}
# Who brings the stages together, and who reads their state into a checkpoint.
MEETING_PLACES = {
    "control",
    "step.judge",
    "step.stepping",
    "step.express",
    "dropin",
    "state.checkpoint",
    "state.plain",
    "__init__",
}
# Reading a number off a tensor waits for its device. These may: the two named places, and the
# reference kernels, whose CPU paths have nothing to wait for.
MAY_READ = {"step/outcome.py", "step/update.py", "kernels/reference.py"}
MAY_READ |= {"ranks/layout.py"}  # The ranks of a device mesh lie on the CPU.
MAY_READ |= {"lab/audit/counting.py", "lab/audit/flowing.py"}  # Once, when an audit is over.
MAY_READ |= {"optim/sgd.py"}  # Asks, for a checkpoint, which buffers have been filled.
MAY_READ |= {"lab/emulate/recurrent.py"}  # The sizes of a packed sequence lie on the CPU anyway.
# Nothing else imports Triton, and nothing imports these before a GPU is there.
TRITON = {
    f"kernels/{name}.py"
    for name in ("fused", "settling", "triton_launch", "triton_measure", "triton_optimizers")
}
READS = {"item", "tolist", "cpu", "numpy"}


ROOMS_OF_FILES = {"step", "ranks", "state", "lab"}


def _imports(path: Path) -> set[str]:
    """The rooms of gradilocks that a file imports: `gradilocks.kernels.pieces` is `kernels`."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from gradilocks import kernels` names a room by what it imports.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            root, *parts = name.split(".")
            if root != "gradilocks" or not parts:
                continue
            rooms.add(".".join(parts[:2]) if parts[0] in ROOMS_OF_FILES else parts[0])
    return rooms


def _place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _room(path: Path) -> str:
    first, *more = path.relative_to(SOURCE).with_suffix("").parts
    return f"{first}.{more[0]}" if first in ROOMS_OF_FILES else first


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_stage_imports_no_other_stage(stage: str) -> None:
    files = [path for path in FILES if _room(path) == stage]
    assert files
    imported = {room for path in files for room in _imports(path)} & (STAGES - {stage})
    assert not imported, f"{stage}.py imports {imported}; stages meet in control.py and dropin"


def test_stages_meet_only_in_control_and_dropin() -> None:
    for path in FILES:
        met = _imports(path) & STAGES
        if len(met) > 1:
            assert _room(path) in MEETING_PLACES, f"{_place(path)} brings together {met}"


def test_data_and_kernels_know_nothing_of_stages() -> None:
    below = [SOURCE / "values.py", SOURCE / "errors.py", SOURCE / "step" / "gradients.py"]
    for path in [*below, *(SOURCE / "kernels").glob("*.py")]:
        assert not _imports(path) & (STAGES | {"control", "dropin"}), _place(path)


def test_demo_and_command_line_use_only_public_names() -> None:
    public = {"errors", "cli", "demo"}
    for room in ("cli", "demo"):
        for path in (SOURCE / room).glob("*.py"):
            inner = _imports(path) & {p.stem for p in SOURCE.glob("*.py")} - public - {"__init__"}
            assert not inner, f"{_place(path)} reaches into {inner}"


def test_the_training_path_needs_torch_alone() -> None:
    for path in FILES:
        if _room(path) in {"cli", "demo"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            allowed = {"triton"} if _place(path) in TRITON else set()
            allowed |= {"plotly"} if _place(path) == "report/document.py" else set()
            forbidden = {"numpy", "rich", "typer", "plotly", "triton"} - allowed
            assert not roots & forbidden, _place(path)


def test_running_and_reporting_share_only_the_run_file() -> None:
    allowed = {
        "runfile": {"runfile", "errors"},
        "report": {"report", "runfile", "errors", "__version__"},
    }
    for room, rooms in allowed.items():
        for path in (SOURCE / room).rglob("*.py"):
            assert _imports(path) <= rooms, f"{_place(path)} imports {_imports(path) - rooms}"
            assert "import torch" not in path.read_text(), _place(path)


def test_the_host_reads_device_numbers_only_in_named_places() -> None:
    for path in FILES:
        if _room(path) in {"cli", "demo"} or _place(path) in MAY_READ:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in READS, f"{_place(path)}:{node.lineno} reads a tensor"


def test_only_the_command_line_prints_and_exits() -> None:
    for path in FILES:
        if _room(path) in {"cli", "__main__"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"print", "exit", "quit"}, _place(path)


def test_every_module_opens_with_what_it_is_for() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{_place(path)} has no docstring"
