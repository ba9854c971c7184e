"""Runs scripts for tests: by `run_script`, or plainly, in a process that has imported torch already."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "gradilocks.cli", "gradilocks.run.hooks", "gradilocks.control", "gradilocks.view.report"]
)


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    exit_code: int
    out: str
    err: str
    lines: list[dict[str, Any]]
    """Of the run file."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.of_kind("step")

    @property
    def culprits(self) -> list[dict[str, Any]]:
        return self.of_kind("culprit")


def run_recorded(script: Path | str, *arguments: str, cwd: Path, **options: Any) -> Finished:
    """`gradilocks run -o cwd/run.jsonl script arguments`."""
    return _run(script, arguments, cwd, options)


def run_plain(script: Path | str, *arguments: str, cwd: Path) -> Finished:
    """`python script arguments`."""
    return _run(script, arguments, cwd, None)


def _run(script: Path | str, arguments: tuple[str, ...], cwd: Path, options: dict[str, Any] | None) -> Finished:
    if not isinstance(script, Path):
        (cwd / "train.py").write_text(script)
        script = cwd / "train.py"
    exit_code = call_in_child(_script, ([str(script), *arguments], options), cwd)
    file = cwd / "run.jsonl"
    lines = (
        [json.loads(line) for line in file.read_text().splitlines()] if options is not None and file.exists() else []
    )
    return Finished(exit_code, (cwd / "out").read_text(), (cwd / "err").read_text(), lines)


def call_in_child(function: Callable[..., None], arguments: tuple[Any, ...], cwd: Path, **environment: str) -> int:
    """Calls a function in a new process whose output goes to the files `out` and `err` in `cwd`; its exit code."""
    process = _context.Process(target=_child, args=(function, arguments, str(cwd), environment))
    # The child would import the main module, which is pytest's.
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
        process.start()
    process.join(120)
    assert process.exitcode is not None, "the process did not end"
    return process.exitcode


def _child(function: Callable[..., None], arguments: tuple[Any, ...], cwd: str, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # Not the method of the test's own process.
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, encoding="utf-8") for number in (1, 2))  # noqa: SIM115
    function(*arguments)


def _script(command: list[str], options: dict[str, Any] | None) -> None:
    if options is None:
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")
        return
    from gradilocks.run import Options, run_script

    result = run_script(command, Options(**{"output": "run.jsonl", "overwrite": True, **options}))
    sys.exit(result.exit_code)
