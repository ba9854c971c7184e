"""The three sentences of ARCHITECTURE.md, read off the source itself, as strictly as they read.

1. Stages never import stages; they meet in the engine, and speak in `values.py`.
2. Running and showing are apart: nothing on the training path prints, exits, or imports what does;
   `cli`, `demo`, `report` and `integrations` use what other rooms offer at their doors.
3. The host waits for the device in named places.

And what else keeps the house readable: no import circle, no file name twice, the training path
imports torch alone.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gradilocks"
FILES = sorted(SOURCE.rglob("*.py"))
SHOWING = {"cli", "demo", "report", "integrations"}
# Run a script, a model or a file on somebody's behalf; not part of a training step.
TOOLS = {"lab", "observe", "runfile", "selftest"}


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    parts = ("gradilocks", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imported_from(path: Path) -> list[tuple[str, str | None]]:
    """Every import of a file, also lazy ones and those for types: a module, and a name from it."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            name = node.args[0]
            if isinstance(name, ast.Constant):
                found.append((str(name.value), None))
    return found


def room_of(module: str) -> str:
    return module.partition(".")[2].split(".")[0]


def modules_imported(path: Path) -> set[str]:
    """The modules of this package that a file imports."""
    found = set()
    for module, name in imported_from(path):
        inner = f"{module}.{name}"
        if inner in MODULES:  # `from gradilocks import kernels` names a module by what it imports.
            found.add(inner)
        elif module in MODULES:
            found.add(module)
    return found - {module_of(path)}


TRAINING = [path for path in FILES if room(path) not in SHOWING | TOOLS | {"__main__"}]

# --- 1. stages ------------------------------------------------------------------------------------

STAGES = {
    "scale": "gradilocks.scale",
    "measure": "gradilocks.step.measure",
    "combine": "gradilocks.ranks.collective",
    "clip": "gradilocks.clip",
    "update": "gradilocks.step.update",
    "outcome": "gradilocks.step.outcome",
}
# The engine (which decides), who drives it, and who reads policies into a checkpoint.
MEETING_PLACES = ("step/engine.py", "control.py", "dropin/", "state/checkpoint.py", "__init__.py")


def stage_of(module: str) -> str | None:
    for stage, home in STAGES.items():
        if module == home or module.startswith(f"{home}."):
            return stage
    return None


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage(stage: str) -> None:
    files = [path for module, path in MODULES.items() if stage_of(module) == stage]
    assert files
    for path in files:
        others = {stage_of(module) for module in modules_imported(path)} - {stage, None}
        assert not others, f"{place(path)} imports {others}; stages meet in the engine"


def test_stages_meet_in_the_engine_and_in_who_drives_it() -> None:
    for path in TRAINING:
        met = {stage_of(module) for module in modules_imported(path)} - {None}
        if len(met) > 1:
            assert place(path).startswith(MEETING_PLACES), f"{place(path)} brings together {met}"


def test_data_and_kernels_know_nothing_of_what_is_above_them() -> None:
    below = {"values", "errors", "kernels", "_torch", "policy"}
    aside = {"eager", "native_mode"}  # What torch.compile leaves alone; an environment variable.
    for path in TRAINING:
        if room(path) in below:
            above = {m for m in modules_imported(path) if room_of(m) not in {*below, *aside}}
            assert not above, f"{place(path)} imports {above}"


# --- 2. running and showing -----------------------------------------------------------------------


def test_only_the_command_line_prints_and_exits() -> None:
    calls = {"print", "input", "exit", "quit", "sys.exit", "os._exit", "os.abort"}
    # A script that is run must end as it would without us, whatever ends it.
    allowed = {"observe/process_end.py", "observe/interpreter.py", "demo/processes.py"}
    allowed |= {"observe/stopping.py"}  # Stops a script that was audited, or guarded.
    for path in FILES:
        if room(path) in {"cli", "__main__"} or place(path) in allowed:
            continue
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in calls, f"{place(path)}:{node.lineno}"
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert "SystemExit" not in ast.unparse(node.exc), f"{place(path)}:{node.lineno}"


def test_nothing_on_the_training_path_imports_what_shows() -> None:
    for path in TRAINING:
        shown = {m for m in modules_imported(path) if room_of(m) in SHOWING}
        assert not shown, f"{place(path)} imports {shown}"


def test_the_training_path_needs_torch_alone() -> None:
    known = {"gradilocks", "torch", "__future__"}
    for path in TRAINING:
        for module, _ in imported_from(path):
            root = module.split(".")[0]
            if root == "triton":
                assert place(path).startswith("kernels/triton_"), f"{place(path)} imports Triton"
            elif root not in known:
                found = importlib.util.find_spec(root)
                origin = "" if found is None else str(found.origin)
                assert "site-packages" not in origin, f"{place(path)} imports {root}"


@pytest.mark.parametrize("who", sorted(SHOWING))
def test_who_shows_enters_other_rooms_by_their_doors(who: str) -> None:
    for path in FILES:
        if room(path) != who:
            continue
        for module, name in imported_from(path):
            root, *parts = module.split(".")
            if root != "gradilocks" or parts[:1] in ([], [who], ["errors"]):
                continue
            # `gradilocks.lab.audit` is a room in a room.
            door = importlib.import_module(module)
            is_a_door = Path(str(door.__file__)).name == "__init__.py" or module.startswith(DOORS)
            assert is_a_door, f"{place(path)} imports {module}, which is behind a door"
            if name is not None:
                assert name in door.__all__, f"{place(path)}: {module} does not offer {name}"


# Files that are their own doors: users import them so.
DOORS = ("gradilocks.lab.formats", "gradilocks.integrations.", "gradilocks._version")
# And what commands and kernels ask of the environment alike, which imports nothing.
DOORS += ("gradilocks.native_mode",)


def test_what_reports_needs_no_torch() -> None:
    for path in FILES:
        free = room(path) in {"report", "runfile"} or place(path) in {
            "lab/__init__.py",
            "lab/audit_record.py",
            "lab/formats.py",
        }
        if free:
            assert not {m for m, _ in imported_from(path) if m.split(".")[0] == "torch"}, place(
                path
            )


# --- 3. waiting -----------------------------------------------------------------------------------

# The two named places: an Outcome, a counter or a recorder's batch is read (all by host_copy), and
# an optimizer that cannot skip on the device is about to be stepped.
WAITS = {
    "step/host_copy.py": "reads what a step measured, once it has arrived or when somebody asks",
    "step/outcome.py": "the Outcome: read when somebody asks; its counters where nothing waits",
    "step/update.py": "an optimizer that cannot skip on the device; elsewhere the CPU alone",
    "optim/sgd.py": "which momentum buffers are filled, for a checkpoint or torch's own step",
    "kernels/reference.py": "on the CPU alone, where nothing waits",
    "kernels/native_backend.py": "on the CPU alone, where nothing waits",
}
# What reads a tensor: a method, or a conversion of something that is no Python number.
METHODS = {
    *("item", "tolist", "cpu", "numpy", "synchronize", "wait", "is_nonzero", "nonzero", "argwhere"),
    *("unique", "unique_consecutive", "masked_select", "equal", "allclose"),
}
CONVERSIONS = {"bool", "float", "int"}
# Conversions of tensors that lie on the CPU whatever the device, or that torch's contract asks for.
READ_ELSEWHERE = {
    "control.py": {"float(engine.clip_policy.order)"},
    "dropin/clip_functions.py": {"bool(torch.isfinite(norm))"},  # error_if_nonfinite, as in torch.
    "dropin/grad_scaler.py": {
        "float(start.scale)",  # A policy's start, on the CPU.
        "int(start.growth_tracker)",
        "float(scale)",  # After `scale.is_cpu`.
        "bool(tensor.abs().max().double() > most)",
    },
    # Tables and addresses, made on the CPU.
    "kernels/chunks.py": {
        *("numbers.tolist()", "torch.equal(addresses, sent)"),
        "torch.equal(numbers, self.numbers)",
    },
    "kernels/triton_launch.py": {"torch.equal(cells, expected)"},  # A launcher is tried out, once.
    # How often parameters were written to, counted on the CPU.
    "optim/fused_optimizer.py": {
        *("now.tolist()", "self._versions.tolist()", "torch.equal(now, self._versions)"),
    },
    # At a step at which ranks compare what has shown its first gradient.
    "ranks/agreement.py": {
        "bool((grad == grad.narrow(dim, 0, 1)).all())",
        "bool((norm > 0) & torch.isfinite(norm))",
        "bool((tensor != tensor.reshape(-1)[0]).any())",
        "sample[sample != 0].tolist()",
        "torch.cat([heads, total]).tolist()",
    },
    "ranks/layout.py": {
        "mesh.mesh.flatten().tolist()",  # A mesh's ranks lie on the CPU.
        "flags.tolist()",  # Where a rank lacks a summand (Partial) that others may have.
    },
    "ranks/model_ranks.py": {
        "mesh.mesh.flatten().tolist()",
        "int((piece * index).sum())",  # When a control with copies= is made, before any step.
    },
    "record/batch.py": {"float(value.detach())", "copy.wait()"},  # On the CPU; a batch is read.
    "step/rank_drift.py": {"self._coming.wait()"},  # As many steps later on every rank.
    # At a step for which check_replicas_every= asks.
    "step/replica_check.py": {
        "bool((highest != -lowest).any())",
        "bool(both[-1])",
        "bits.tolist()",
    },
    "step/call_order.py": {"bool(grad.count_nonzero())"},  # On the CPU alone.
    "step/half_sgd.py": {"flag.item()", "bool((param != 0.5).any())"},  # On the CPU alone.
    "step/lr_schedule.py": {"self._copy.wait()"},  # A schedule's state is saved.
    "optim/adam.py": {"float(step)"},  # A checkpoint's count, on the CPU.
}
# Conversions of what is a number, a flag or a setting of Python's: by file and text, so that a new
# one has to be looked at.
NUMBERS = {
    "_torch.py": {
        "bool(getattr(getattr(model, '_join_config', None), 'enable', False))",
        "bool(getattr(param, '_fsdp_flattened', False))",
        "bool(own or _every_pre_hook)",
    },
    "clip/chained.py": {
        "float(policy.order)",
    },
    "clip/clip_policy.py": {
        "float(self.value)",
    },
    "dropin/clip_functions.py": {
        "float(norm_type)",
        "float(value)",
    },
    "dropin/grad_scaler.py": {
        "float(max_scale)",
        "float(min_scale)",
        "float(state_dict['scale'])",
    },
    "dropin/optimizer_engines.py": {
        "int(self._ref() is not None)",
    },
    "dropin/scaler_state.py": {
        "float(new_scale)",
        "int(tracker)",
    },
    "kernels/triton_launch.py": {
        "bool(told)",
    },
    "optim/adam.py": {
        "bool(decoupled)",
        "bool(group['amsgrad'])",
        "bool(group['maximize'])",
    },
    "optim/fused_optimizer.py": {
        "bool(master_weights)",
        "float(number)",
    },
    "optim/optimizer_state.py": {
        "bool(group['master_weights'])",
    },
    "policy.py": {
        "bool(self._given == (other._given if isinstance(other, Adapted) else other))",
        "float(value)",
    },
    "ranks/agreement.py": {
        "float(number)",
    },
    "ranks/collective.py": {
        "float(double)",
    },
    "ranks/layout.py": {
        "int(dist.get_world_size())",
        "int(pair[0].ndim)",
    },
    "record/batch.py": {
        "bool(known('clipped'))",
        "bool(known('rejected'))",
        "float(value)",
        "int(elements[place])",
        "int(inf)",
        "int(nan)",
        "int(self.scalars.get('losses', 0))",
    },
    "record/own_numbers.py": {"float(value)"},  # Tensors only where they are on the CPU.
    "record/environment.py": {
        "int(memory.split()[0])",
        "int(os.environ.get('WORLD_SIZE', '1'))",
        "int(os.environ['RANK'])",
    },
    "record/memory.py": {"int(line.split()[1])"},
    "record/recorder.py": {
        "int(error.code is not None)",
        "int(step)",
    },
    "scale/dynamic.py": {
        "float(given)",
    },
    "scale/scale_policy.py": {
        "float(interval)",
        "float(self.backoff_factor)",
        "float(self.growth_factor)",
        "float(self.hysteresis)",
        "float(self.max_scale)",
        "float(self.min_scale)",
        "float(torch.finfo(torch.float32).max)",
    },
    "state/checkpoint.py": {
        "bool(tensor.dim())",
        "float(saved[1])",
        "float(setting)",
        "float(value)",
        "int(number)",
    },
    "state/other_scalers.py": {
        "float(value)",
        "int(number)",
    },
    "step/engine.py": {
        "float(policy.order)",
        "float(self.clip_policy.order)",
        "float(value is not None)",
        "int(fetch(self.steps)[0])",
        "int(fetch(self.streak.count)[0])",
    },
    "step/rank_losses.py": {
        "float(loss is not None)",
    },
    "step/together.py": {"int(told['place'])", "int(nan)", "int(inf)"},  # Numbers on the host.
    "step/lr_schedule.py": {
        "bool(flags)",
        "bool(skipped)",
        "float(bool(skipped))",
        "float(since == 'skipped')",
    },
    "step/own_step.py": {
        "bool(flag)",
        "bool(inner_optimizers(optimizer))",
    },
}


def waits_in(tree: ast.AST) -> Iterator[tuple[ast.Call, bool]]:
    """The calls that read a tensor to the host, and whether each is a conversion.

    A condition on a tensor cannot be told from one on a number here: on a GPU the tests run under
    `set_sync_debug_mode("error")`, which finds it.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function, given = node.func, [*node.args, *(each.value for each in node.keywords)]
        if isinstance(function, ast.Attribute):
            to_host = function.attr == "to" and any(
                ast.unparse(each) in ("'cpu'", "torch.device('cpu')") for each in given
            )
            if function.attr in METHODS or to_host:
                yield node, False
        elif isinstance(function, ast.Name) and function.id in CONVERSIONS:
            converts = bool(node.args) and not isinstance(node.args[0], ast.Constant)
            yield from [(node, True)] if converts else ()


def test_the_host_waits_for_the_device_only_in_named_places() -> None:
    lists = (READ_ELSEWHERE, NUMBERS)
    unused = {(file, text) for each in lists for file, texts in each.items() for text in texts}
    for path in TRAINING:
        if place(path) in WAITS:
            continue
        for node, converts in waits_in(TREES[path]):
            text = ast.unparse(node)
            known = text in READ_ELSEWHERE.get(place(path), ())
            known = known or (converts and text in NUMBERS.get(place(path), ()))
            assert known, f"{place(path)}:{node.lineno}: {text} may wait for the device"
            unused.discard((place(path), text))
    assert not unused, f"named here, and not there any more: {unused}"


@pytest.mark.parametrize(
    "line",
    [
        "x.item()", "x.tolist()", "x.cpu()", "x.to('cpu')", "x.to(device='cpu')", "bool(x)",
        "x.to(torch.device('cpu'))", "float(x + 1)", "int(x[0])", "x.is_nonzero()", "x.nonzero()",
        "torch.equal(x, y)", "torch.unique(x)", "torch.cuda.synchronize()", "event.wait()",
        "torch.masked_select(x, y)", "torch.allclose(x, y)", "x.numpy()",
    ],
)  # fmt: skip
def test_the_search_for_waits_finds(line: str) -> None:
    assert list(waits_in(ast.parse(line)))


def test_the_places_that_may_wait_are_there() -> None:
    assert set(WAITS) <= {place(path) for path in FILES}


# --- the house ------------------------------------------------------------------------------------


def test_no_import_circle_also_not_among_lazy_and_typing_imports() -> None:
    graph = {module: modules_imported(path) for module, path in MODULES.items()}
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        state[module] = 1
        for other in sorted(graph[module]):
            if state.get(other) == 1:
                circle = (*trail[trail.index(other) :], other) if other in trail else (other,)
                raise AssertionError(" -> ".join(circle))
            if other not in state:
                visit(other, (*trail, other))
        state[module] = 2

    for module in sorted(graph):
        if module not in state:
            visit(module, (module,))


def test_no_file_name_is_used_twice() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_every_module_opens_with_what_it_is_for() -> None:
    for path in FILES:
        assert ast.get_docstring(TREES[path]), f"{place(path)} has no docstring"
