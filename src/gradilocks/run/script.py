"""Runs a script as `python script.py` would, with hooks installed as soon as it imports torch.

This module does not import torch: the script may set environment variables first.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradilocks.errors import GradilocksError

if TYPE_CHECKING:
    from gradilocks.record import Recorder
    from gradilocks.run.hooks import Hooks

__all__ = ["Options", "RunResult", "run_script"]

_PACKAGE = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Options:
    """Options of `gradilocks run`.

    Args:
        output: path of the run file; by default runs/SCRIPT-DATE-TIME.jsonl.
        overwrite: replace an existing file.
        append: continue an existing file, for a resumed run.
        guard: on NaN or Inf gradients "skip" the step or "stop" the script; None to do nothing.
        has_trace: find the operation that produced NaN or Inf by replaying the step.
        detail_every: number of steps between records of per-tensor statistics; 0 for never.
    """

    output: str | os.PathLike[str] | None = None
    overwrite: bool = False
    append: bool = False
    guard: str | None = None
    has_trace: bool = True
    detail_every: int = 10

    def __post_init__(self) -> None:
        if self.guard not in (None, "skip", "stop"):
            raise ValueError(f"guard must be 'skip', 'stop' or None, got {self.guard!r}.")


@dataclass(frozen=True)
class RunResult:
    """The end of a script that `run_script` ran."""

    exit_code: int
    path: Path | None
    """The run file; None if the script took no step."""
    steps: int


def run_script(argv: Sequence[str], options: Options | None = None) -> RunResult:
    """Runs a script and records its optimizer steps.

    Output, results and exit code are the script's own. gradilocks prints to standard error.

    Args:
        argv: path of the script and its arguments; or "-m", a module's name and its arguments.
        options: default options if None.

    Raises:
        GradilocksError: the script does not exist, or the run file exists or cannot be written. Raised before the
            script starts.
    """
    options = options or Options()
    is_module = argv[:1] == ["-m"]
    command = list(argv[1:] if is_module else argv)
    if not command or not (is_module or Path(command[0]).is_file()):
        raise GradilocksError(
            f"script {command[0] if command else ''!r} does not exist. Pass a Python file, or -m MODULE."
        )
    session = _Session(_output_path(command[0], options), command, options)
    when_imported("torch", session.begin)
    when_imported("gradilocks.control", session.begin_control)
    previous = _handle_sigterm(session)
    status, exit_code = "finished", 0
    try:
        _execute(command, is_module=is_module)
    except SystemExit as stop:
        exit_code = _exit_code(stop)
        status = "finished" if exit_code == 0 else f"SystemExit: {stop.code}"
    except BaseException as error:
        exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
        status = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _show(error)
    if previous is not None:
        signal.signal(signal.SIGTERM, previous)
    return session.end(status, exit_code)


class _Session:
    """Recorder and hooks of one run, created when the script imports torch."""

    def __init__(self, path: Path, command: list[str], options: Options) -> None:
        self._path, self._command, self._options = path, command, options
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._hooks: Hooks | None = None

    def begin(self) -> None:
        """Installs the hooks."""
        from gradilocks.record import Recorder
        from gradilocks.run.hooks import Hooks
        from gradilocks.run.step_observer import StepObserver

        options = self._options
        self._recorder = Recorder(
            self._path,
            detail_every=options.detail_every,
            overwrite=options.overwrite,
            source="run",
            command=self._command,
        )
        observer = StepObserver(self._recorder, has_trace=options.has_trace, guard=options.guard)
        if options.append and self._path.exists():
            from gradilocks.view.runfile import Run, follow

            run = Run(self._path)
            run.add(follow(self._path, 0)[0])
            observer.last_steps = {index: max(steps) for index, steps in run.steps.items() if steps}
        self._hooks = Hooks(observer)
        self._hooks.install()

    def begin_control(self) -> None:
        """Installs the hook on controls."""
        if self._hooks is not None:
            self._hooks.install_control()

    def end(self, status: str, exit_code: int) -> RunResult:
        """Closes the run file."""
        if self._recorder is None or self._hooks is None or os.getpid() != self._process:
            return RunResult(exit_code, None, 0)
        self._hooks.remove()
        if self._hooks.error is not None and status == "finished":
            status = f"recording stopped: {type(self._hooks.error).__name__}: {self._hooks.error}"
        self._recorder.close(status, exit_code=exit_code)
        steps, path = self._recorder.steps, self._recorder.path
        if not steps and not self._options.append:
            path.unlink(missing_ok=True)
        return RunResult(exit_code, path if steps else None, steps)


def _output_path(script: str, options: Options) -> Path:
    """The path of the run file. Creates the file, so that an unwritable path fails before the script starts."""
    rank = int(os.environ.get("RANK", 0))
    if options.output is None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise GradilocksError("-o FILE is required with several ranks: all must use the same name.")
        stem = Path(script).stem if script.endswith(".py") else script.rpartition(".")[2]
        path = Path("runs", f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl").absolute()
        path = next(p for i in range(1, 1000) if not (p := path.with_stem(path.stem + f"-{i}" * (i > 1))).exists())
    else:
        path = Path(options.output).absolute()
    own = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path
    if own.exists() and not (options.overwrite or options.append):
        raise GradilocksError(f"{own} exists. Pass --overwrite, --append or another -o FILE.")
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        with own.open("ab"):
            pass
    except OSError as error:
        raise GradilocksError(f"{own} cannot be written: {error.strerror}.") from error
    return path


def _execute(command: list[str], *, is_module: bool) -> None:
    """Runs the program in a fresh `__main__`."""
    sys.argv[:] = command
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    path = os.path.realpath(command[0])
    sys.path[0] = os.path.dirname(path)
    main = ModuleType("__main__")
    file = os.path.abspath(command[0])
    vars(main).update(__builtins__=builtins, __file__=file, __annotations__={})
    sys.modules["__main__"] = main
    code = compile(Path(path).read_bytes(), file, "exec", dont_inherit=True)
    exec(code, vars(main))


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Shows an exception as Python does, without the outermost frames, which belong to this package."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen runpy")):
        traceback = traceback.tb_next
    error = error.with_traceback(traceback)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    sys.excepthook(type(error), error, traceback)


def _handle_sigterm(session: _Session) -> Any:
    """Installs a SIGTERM handler that closes the run file and then ends the process; returns the former handler."""

    def close(number: int, frame: object) -> None:
        session.end("SIGTERM", 128 + number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    try:
        return signal.signal(signal.SIGTERM, close)
    except ValueError:  # Not in the main thread.
        return None


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Calls `action` right after the first import of a module, or now if it is already imported."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _ImportWatcher(name, action))


class _ImportWatcher(MetaPathFinder):
    """Wraps the loader of one module, which the other finders locate, to call `action` after the import."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            original = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                original(module)
                self._action()

            loader.exec_module = exec_module
        return spec
