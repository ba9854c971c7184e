"""``gradilocks audit``: a script enters; what each format would lose of its gradients is shown.

What is found goes to standard output, after whatever the script prints there; with ``--json -`` the
script prints to standard error instead. Everything else that is said goes to standard error.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradilocks.cli.options import Module, Output, Quiet, Script, program_of, whole_number
from gradilocks.cli.terminal import forgive_encoding, program, say
from gradilocks.errors import BadScript, GradilocksError

if TYPE_CHECKING:
    from rich.table import Table

    from gradilocks.lab.audit import Audit, ScriptAudit

FORMATS = ("fp16", "bf16", "fp8 e5m2", "fp8 e4m3")


def audit(
    script: Script = None,
    module: Module = None,
    steps: Annotated[
        int,
        whole_number(
            "-n", "--steps", help="Stop the script when an optimizer has stepped N times."
        ),
    ] = 10,
    format: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"A format to judge; may be given several times. Default: {', '.join(FORMATS)}.",
        ),
    ] = None,
    output: Output = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="PATH",
            help="Write what was found as JSON to a new file; - for standard output, and then "
            "nothing else goes there.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="PAGE", help="Write the histograms as an HTML page."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Say what fp16, bf16 and fp8 would lose of a script's gradients.

    Runs the script unchanged, in its own precision, and stops it after a few optimizer steps. Then
    recommends a format, an initial loss scale and the modules to keep in float32. Options of
    gradilocks come before the script's name; what follows is the script's.

    Examples:

      gradilocks audit train.py --lr 3e-4

      gradilocks audit -n 20 --html audit.html train.py

      gradilocks audit --json - -m package.train > audit.json
    """
    what = program_of(script, module, command="audit")
    from gradilocks.lab.audit import AuditOptions, audit_script, refuse_blocks
    from gradilocks.lab.formats import format_named

    try:
        chosen = {each.name: each for each in map(format_named, format or FORMATS)}
        refuse_blocks(chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--format'") from error
    target = None if json_path in (None, "-") else Path(str(json_path))
    if target is not None:
        _check_new(target)
    if html is not None:
        from gradilocks.report import check_audit_page

        check_audit_page(html, title=what.name)
    options = AuditOptions(
        steps=steps,
        formats=tuple(chosen.values()),
        output=output,
        command=("gradilocks", *sys.argv[1:]),
        log=not quiet,
    )
    caller = program()
    here = Path.cwd()  # The script may go elsewhere.
    show = (lambda done, total: None) if quiet else _progress()
    forgive_encoding()
    with ExitStack() as redirected:
        if json_path == "-" and sys.stdout is not None:
            redirected.enter_context(_stdout_to_stderr())

        def tell(audited: ScriptAudit) -> None:
            show(0, 0)
            redirected.close()
            if audited.audit is None:
                return
            with suppress(OSError):  # Paths mean what they meant when they were typed.
                os.chdir(here)
            found = audited.audit
            if json_path == "-":
                print(json.dumps(found.to_plain(), indent=1, allow_nan=False), flush=True)
            elif not quiet:
                _show(found, what.name)
            if not quiet:
                say(f"recorded in {audited.path}")
                say(f"to see it: {caller} report {shlex.quote(str(audited.path))}")
            # Files last: whatever the script has done to their places, the rest has been said.
            if target is not None:
                _check_new(target)
                found.to_json(target)
            if html is not None:
                found.save_picture(html, title=what.name)
                if not quiet:
                    say(f"the histograms are in {html}")

        try:
            audited = audit_script(what, options, tell=tell, warn=say, progress=show)
        except BadScript as error:
            raise typer.BadParameter(str(error)) from error
    _raise_unless_audited(audited, what.name)


def _raise_unless_audited(audited: ScriptAudit, name: str) -> None:
    """Raises unless all went well: with a line of its own, or as the script has ended."""
    if not audited.main:
        return
    if audited.audit is None:
        why = "did not import torch"
        if audited.steps:
            why = "stepped an optimizer, but no gradient reached it"
        elif audited.torch:
            why = "stepped no optimizer"
        elif audited.ending.status == "interrupted":
            why = "was interrupted before it had imported torch"
        why += ", so there is nothing to audit."
        if audited.failed:
            why = "could not be audited, for the reason given above."
        if audited.recorded:
            say(f"recorded in {audited.path}")
        if not audited.ending.exit:
            raise GradilocksError(f"{name} {why}")
        say(f"{name} {why}")
    if audited.ending.exit:
        raise SystemExit(audited.ending.exit)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Inside, whatever writes to standard output writes to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        if sys.__stdout__ is not None:  # The script may have put something in its place.
            sys.stdout = sys.__stdout__
            sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _progress() -> Callable[[int, int], None]:
    """What is told how many steps are done, of how many; (0, 0) clears the line."""
    stream = sys.__stderr__
    if stream is None or not stream.isatty():
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        # The cursor stays at the start: what the script prints next takes the line's place.
        text = f"gradilocks: step {done} of {total}" if total else ""
        with suppress(Exception):
            stream.write(f"\r\033[K{text}\r")
            stream.flush()

    return show


def _check_new(path: Path) -> None:
    """Creates the file and removes it again: better to fail now than after the script."""
    try:
        path.open("x").close()
        path.unlink()
    except FileExistsError as error:
        kind = "is a folder" if path.is_dir() else "is already there"
        raise GradilocksError(f"--json {path} {kind}; give the path of a new file.") from error
    except OSError as error:
        raise GradilocksError(f"--json {path} cannot be written: {error.strerror}.") from error


def _show(audit: Audit, name: str) -> None:
    """Prints an audit's words and its two tables to standard output."""
    from rich.console import Console
    from rich.text import Text

    from gradilocks.lab.audit import footnotes, heading, tables

    console = Console(file=sys.__stdout__, highlight=False)
    wrap = not console.is_terminal
    console.print(Text(f"{name}: {heading(audit)}"), style="dim", soft_wrap=wrap)
    console.print()
    for number, sentence in enumerate(audit.recommendation.words):
        style = "bold" if number == 0 else ""
        console.print(Text(sentence, style=style), soft_wrap=wrap)
    console.print()
    formats, *modules = map(_table, tables(audit))
    console.print(formats)
    for table in modules:
        console.print("", table, "", sep="\n")
    for line in footnotes(audit):
        console.print(Text(line), style="dim", soft_wrap=wrap)


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for place, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    return table
