"""A script and its arguments enter; it runs as `python script arguments` would run it.

It sees its own `sys.argv`, `__main__`, `sys.path[0]` and working directory. An exception that it
does not catch is shown as Python shows it, without the frames of this package.

torch is not imported before the script imports it, though that would be simpler: `OMP_NUM_THREADS`
and other variables that a script sets before its first import of torch would come too late, and its
numbers would change. `when_imported` waits until then.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import re
import shlex
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from gradilocks.errors import BadScript
from gradilocks.observe.process_end import Ending

__all__ = ["Program", "check", "execute", "when_imported"]

_PYTHON = re.compile(r"(python|pypy|ipython)[\d.]*w?(\.exe)?")
_LAUNCHERS = {
    "torchrun": "torchrun ... -m gradilocks",
    "accelerate": "accelerate launch ... --module gradilocks",
    "deepspeed": "deepspeed ... --module gradilocks",
    "mpirun": "mpirun ... gradilocks",
    "srun": "srun ... gradilocks",
}
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Program:
    """What follows the options of `gradilocks run`."""

    name: str
    """A script's path, or a module's name, as it was typed."""
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def stem(self) -> str:
        """A short name for files."""
        return self.name.rpartition(".")[2] if self.module else Path(self.name).stem


def check(program: Program) -> None:
    """Raises BadScript for what cannot be a script, before anything is written."""
    if program.module:
        return
    path = Path(program.name)
    if (path.name in _LAUNCHERS or _PYTHON.fullmatch(path.name)) and path.suffix != ".py":
        raise BadScript(f"{program.name} is no script. {_instead_of(program)}")
    if path.is_dir():
        raise BadScript(f"{program.name} is a folder. Name a script in it, or use -m MODULE.")
    if not path.exists():
        raise BadScript(f"there is no script {program.name}. Expected the path of a Python file.")
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise BadScript(f"{program.name} cannot be read: {error.strerror}.") from error
    if b"\0" in start:
        raise BadScript(f"{program.name} is not Python: it holds binary data.")


def _instead_of(program: Program) -> str:
    """What to type in place of a program that would start Python itself."""
    launcher, words = Path(program.name).name, list(program.arguments)
    if launcher in _LAUNCHERS:
        started = _LAUNCHERS[launcher]
        return f"Let it start gradilocks, which then runs the script: {started} run train.py"
    while words[:1] and words[0].startswith("-") and words[0] != "-m":
        del words[0]  # Options of the interpreter.
    rest = shlex.join(words) or "train.py"
    return (
        "It is run by the Python that runs gradilocks: leave the interpreter out, as in "
        f"gradilocks run {rest}"
    )


def execute(program: Program, *, note: Callable[[Ending], None]) -> None:
    """Runs a program that was checked to its end.

    `note` is told how it ended, before this function is left by the exit that Python would take.

    Raises:
        SystemExit: whenever Python would end with another status than 0.
        BadScript: a module that cannot be found.
    """
    if not getattr(sys.flags, "safe_path", False) and sys.path:
        # The script's folder, where Python put that of this program.
        script = os.path.realpath(program.name)
        sys.path[0] = os.getcwd() if program.module else os.path.dirname(script)
    sys.argv[:] = [program.name, *program.arguments]
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    try:
        code = _module_code(program, main) if program.module else _script_code(program, main)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit as stop:
        note(Ending.of_exit(stop.code))
        raise
    except BadScript:
        raise
    except BaseException as error:
        note(Ending.of_error(error))
        _show(error)
        raise SystemExit(1) from None
    note(Ending("finished", 0))


def _script_code(program: Program, main: ModuleType) -> types.CodeType:
    path = os.path.abspath(program.name)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    vars(main).update(__spec__=None, __package__=None)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _module_code(program: Program, main: ModuleType) -> types.CodeType:
    spec = _found(program.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _found(f"{program.name}.__main__")
        if spec is None:
            raise BadScript(
                f"{program.name} is a package without a __main__ module, so it cannot be run."
            )
    if spec is None:
        raise BadScript(f"there is no module named {program.name}.")
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise BadScript(f"the module {program.name} has no Python code to run.")
    vars(main).update(__file__=spec.origin, __loader__=spec.loader, __cached__=spec.cached)
    vars(main).update(__spec__=spec, __package__=spec.parent)
    sys.argv[0] = spec.origin or program.name
    return code  # type: ignore[no-any-return]


def _found(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
    except ValueError:
        return None


def _show(error: BaseException) -> None:
    """Shows an exception as Python would, by whatever `sys.excepthook` the script has set."""
    strip(error)
    # Where what runs as Python leaves looks for how it ended: a script's own Recorder, a debugger.
    sys.last_type, sys.last_value = type(error), error
    sys.last_traceback = error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as second:
        sys.__excepthook__(type(second), second, second.__traceback__)
        sys.__excepthook__(type(error), error, error.__traceback__)


def strip(error: BaseException | None) -> None:
    """Takes the frames of this package out of a traceback and out of those that it follows."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        trace, theirs = one.__traceback__, []
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
                theirs.append(trace)
            trace = trace.tb_next
        for frame in reversed(theirs):
            frame.tb_next, trace = trace, frame
        one.__traceback__ = trace
        waiting += [one.__cause__, one.__context__]
        waiting += getattr(one, "exceptions", ())


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Calls `act` once module `name` is imported: now, or right after its import."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        """Lets the loader do its work, then acts; the loader is left as it was."""
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._act()

        loader.exec_module = exec_module
