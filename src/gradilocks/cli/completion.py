"""Shell completion: its script, shown or installed, and which run files a half-typed path may mean.

The scripts are typer's, and so are the two options in the help. They are answered here because
typer takes no shell's name, and says nothing useful where it finds no shell, as in a container.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from gradilocks.errors import GradilocksError

FLAGS = ("--show-completion", "--install-completion")
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def asked_for(arguments: list[str]) -> bool:
    """Whether a command line asks for completion and nothing else."""
    return bool(arguments) and arguments[0] in FLAGS and not {"--help", "-h"} & set(arguments)


def answer(arguments: list[str]) -> str:
    """Makes the script of the shell that is named, or of the one around this process.

    Returns:
        The script, or where it was installed.

    Raises:
        typer.BadParameter: no shell was found, or one that there is no script for.
    """
    scripts: Any = importlib.import_module("typer.completion")
    flag, *named = arguments
    shell = named[0] if named else _detected()
    if len(named) > 1 or shell not in SHELLS:
        got = " ".join(named) if named else shell
        came = f"got {got!r}" if got else "and found no shell around this process"
        raise typer.BadParameter(
            f"expected {', '.join(SHELLS[:-1])} or {SHELLS[-1]}, {came}. "
            f"Name the shell: gradilocks {flag} bash",
            param_hint=f"'{flag}'",
        )
    names = {"prog_name": "gradilocks", "complete_var": "_GRADILOCKS_COMPLETE", "shell": shell}
    try:
        if flag == "--show-completion":
            return str(scripts.get_completion_script(**names))
        _, place = scripts.install(**names)
    except OSError as error:
        raise GradilocksError(f"completion cannot be installed: {error}.") from error
    return f"Completion for {shell} is installed in {place}. It works in the next shell."


def run_files(incomplete: str) -> list[str]:
    """The run files, and the folders on the way to them, that begin so.

    A folder that is the only one is entered at once: shells put a space after a sole answer.
    """
    found = sorted(_beginning(incomplete))
    while len(found) == 1 and found[0].endswith(os.sep):
        inside = sorted(_beginning(found[0]))
        if not inside:
            break
        found = inside
    return found


def _beginning(incomplete: str) -> Iterator[str]:
    folder, start = os.path.split(incomplete)
    try:
        entries = list(Path(folder or ".").expanduser().iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
            name = os.path.join(folder, entry.name)
            if entry.is_dir():
                yield name + os.sep
            elif entry.suffix == ".jsonl":
                yield name


def _detected() -> str:
    import shellingham

    try:
        name: str = shellingham.detect_shell()[0]
    except (shellingham.ShellDetectionFailure, OSError, RuntimeError):
        return ""
    return name
