"""The table of commands: one file a command, each listed here with the function that runs it."""

from __future__ import annotations

from typing import Annotated

import typer

from gradilocks.cli.audit import audit
from gradilocks.cli.compare import compare
from gradilocks.cli.demo import demo
from gradilocks.cli.explain import NUMBERS, explain
from gradilocks.cli.export import export
from gradilocks.cli.report import report
from gradilocks.cli.run import SCRIPT, RunCommand, run
from gradilocks.cli.watch import watch

app = typer.Typer(
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,  # plain help reads the same in a terminal, a pipe and a page of docs
)

# In the order in which somebody meets them.
app.command(cls=RunCommand, context_settings=SCRIPT)(run)
app.command()(report)
app.command()(watch)
app.command()(compare)
app.command()(export)
app.command(cls=RunCommand, context_settings=SCRIPT)(audit)
app.command(context_settings=NUMBERS)(explain)
app.command()(demo)


@app.callback()
def gradilocks(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Gradient magnitude control for PyTorch: loss scaling and clipping as one step."""
    if version:
        from gradilocks import __version__

        print(f"gradilocks {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
