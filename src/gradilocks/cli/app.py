"""The table of commands: one file a command, each listed here with the function that runs it."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from gradilocks.cli.audit_command import audit
from gradilocks.cli.build_command import build
from gradilocks.cli.compare_command import compare
from gradilocks.cli.demo_command import demo
from gradilocks.cli.explain_command import NUMBERS, explain
from gradilocks.cli.export_command import export
from gradilocks.cli.ls_command import ls
from gradilocks.cli.options import SCRIPT, Command, ScriptCommand, flag
from gradilocks.cli.page_command import page
from gradilocks.cli.report_command import report
from gradilocks.cli.run_command import run
from gradilocks.cli.selftest_command import selftest
from gradilocks.cli.watch_command import watch
from gradilocks.errors import GradilocksError

app = typer.Typer(
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,  # plain help reads the same in a terminal, a pipe and a page of docs
)

# In the order in which somebody meets them.
app.command(cls=ScriptCommand, context_settings=SCRIPT)(run)
app.command(cls=Command)(report)
app.command(cls=Command)(watch)
app.command(cls=Command)(ls)
app.command(cls=Command)(compare)
app.command(cls=Command)(page)
app.command(cls=Command)(export)
app.command(cls=ScriptCommand, context_settings=SCRIPT)(audit)
app.command(cls=Command, context_settings=NUMBERS)(explain)
app.command(cls=Command)(demo)
app.command(cls=Command)(selftest)
app.command(cls=Command)(build)


@app.callback()
def gradilocks(
    context: typer.Context,
    version: Annotated[bool, flag("--version", "Print the version and exit.")] = False,
) -> None:
    """Gradient magnitude control for PyTorch: loss scaling and clipping as one step."""
    if version:
        from gradilocks._version import __version__

        print(f"gradilocks {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def completion(arguments: list[str]) -> str | None:
    """Answers ``--show-completion [SHELL]`` and ``--install-completion [SHELL]``.

    Both are typer's options, and typer makes the scripts, puts them in place and completes. Its
    options take no shell's name, though (it would be ignored), and where no shell is detected, as
    in a container, they say no more than "Shell not supported". So the shell is chosen here.

    Returns:
        The script, or where it was installed; None if something else was asked for.

    Raises:
        typer.BadParameter: no shell was found, or one that there is no script for.
    """
    flag, *named = arguments or [""]
    if flag not in ("--show-completion", "--install-completion") or {"--help", "-h"} & {*named}:
        return None
    made: Any = importlib.import_module("typer.completion")
    shells = [each.value for each in made.Shells]
    shell = " ".join(named) or _shell_around()
    if shell not in shells:
        came = f"got {shell!r}" if shell else "and found no shell around this process"
        raise typer.BadParameter(
            f"expected {', '.join(shells[:-1])} or {shells[-1]}, {came}. "
            f"Name the shell: gradilocks {flag} bash",
            param_hint=f"'{flag}'",
        )
    names = {"prog_name": "gradilocks", "complete_var": "_GRADILOCKS_COMPLETE", "shell": shell}
    try:
        if flag == "--show-completion":
            return str(made.get_completion_script(**names))
        _, place = made.install(**names)
    except OSError as error:
        raise GradilocksError(f"completion cannot be installed: {error}.") from error
    return f"Completion for {shell} is installed in {place}. It works in the next shell."


def _shell_around() -> str:
    import shellingham

    try:
        name: str = shellingham.detect_shell()[0]
    except (shellingham.ShellDetectionFailure, OSError, RuntimeError):
        return ""
    return name
