"""``gradilocks audit``: a script enters; what each format would lose of its gradients is shown.

What is found goes to standard output, after whatever the script prints there; with ``--json -`` the
script prints to standard error instead. Everything else that is said goes to standard error.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradilocks.cli.options import whole_number
from gradilocks.cli.output import forgive_encoding
from gradilocks.cli.program import program
from gradilocks.errors import BadScript, GradilocksError

if TYPE_CHECKING:
    from gradilocks.lab.audit.script import ScriptAudit

FORMATS = ("fp16", "bf16", "fp8 e5m2", "fp8 e4m3")


def audit(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script and its own arguments."),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--module",
            metavar="MODULE",
            help="Run a module instead of a script, as python -m does.",
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "-n",
            "--steps",
            parser=whole_number(smallest=1),
            metavar="N",
            help="Stop the script when an optimizer has stepped N times.",
        ),
    ] = "10",  # type: ignore[assignment]
    format: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"A format to judge; may be given several times. Default: {', '.join(FORMATS)}.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The run file. Default: a fresh name under runs/.",
        ),
    ] = None,
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
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing; errors are still said.")
    ] = False,
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
    given = list(script or ())
    if module is None and not given:
        raise typer.BadParameter("expected a script, as in 'gradilocks audit train.py'.")
    from gradilocks.lab.audit import refuse_blocks
    from gradilocks.lab.audit.script import AuditOptions, audit_script
    from gradilocks.lab.formats import format_named
    from gradilocks.observe import Program

    try:
        chosen = {each.name: each for each in map(format_named, format or FORMATS)}
        refuse_blocks(chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--format'") from error
    target = None if json_path in (None, "-") else Path(str(json_path))
    if target is not None:
        _check_new(target)
    what = Program(module or given[0], tuple(given[module is None :]), module=module is not None)
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
    show = _nothing if quiet else _progress()
    forgive_encoding()
    with _apart(json_path == "-") as restore:

        def tell(heard: ScriptAudit) -> None:
            show(0, 0)
            restore()
            if heard.audit is None:
                return
            with _at(here):
                _hand_out(heard, target, html, json_path == "-", quiet, what.name, caller)

        try:
            heard = audit_script(what, options, tell=tell, warn=_say, progress=show)
        except BadScript as error:
            raise typer.BadParameter(str(error)) from error
    _leave(heard, what.name)


def _hand_out(
    heard: ScriptAudit,
    target: Path | None,
    html: Path | None,
    to_stdout: bool,
    quiet: bool,
    name: str,
    caller: str,
) -> None:
    found = heard.audit
    assert found is not None
    if to_stdout:
        print(json.dumps(found.to_plain(), indent=1, allow_nan=False), flush=True)
    elif not quiet:
        from gradilocks.cli.audit_view import show

        show(found, name)
    if not quiet:
        _say(f"recorded in {heard.path}")
        _say(f"to see it: {caller} report {shlex.quote(str(heard.path))}")
    # Files last: whatever the script has done to their places meanwhile, the rest has been said.
    if target is not None:
        _check_new(target)
        found.to_json(target)
    if html is not None:
        found.save_picture(html, title=name)
        if not quiet:
            _say(f"the histograms are in {html}")


def _leave(heard: ScriptAudit, name: str) -> None:
    """Raises unless all went well: with a line of its own, or as the script has ended."""
    if not heard.main:
        return
    if heard.audit is None:
        if heard.failed:
            why = "could not be audited, for the reason given above."
        elif heard.steps:
            why = "stepped an optimizer, but no gradient reached it, so there is nothing to audit."
        elif heard.torch:
            why = "stepped no optimizer, so there is nothing to audit."
        elif heard.ending.status == "interrupted":
            why = "was interrupted before it had imported torch, so there is nothing to audit."
        else:
            why = "did not import torch, so there is nothing to audit."
        if heard.recorded:
            _say(f"recorded in {heard.path}")
        if heard.ending.exit:
            _say(f"{name} {why}")
            raise SystemExit(heard.ending.exit)
        raise GradilocksError(f"{name} {why}")
    if heard.ending.exit:
        raise SystemExit(heard.ending.exit)


@contextmanager
def _apart(wanted: bool) -> Iterator[Any]:
    """Inside, whatever writes to standard output writes to standard error, until `restore`."""
    if not wanted or sys.stdout is None:
        yield lambda: None
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    done = False

    def restore() -> None:
        nonlocal done
        if not done:
            done = True
            with suppress(Exception):
                sys.stdout.flush()
            if sys.__stdout__ is not None:  # The script may have put something in its place.
                sys.stdout = sys.__stdout__
                sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)

    try:
        yield restore
    finally:
        restore()


@contextmanager
def _at(folder: Path) -> Iterator[None]:
    """Paths mean what they meant when they were typed."""
    with suppress(OSError):
        os.chdir(folder)
    yield


def _progress() -> Any:
    stream = sys.__stderr__
    if stream is None or not stream.isatty():
        return _nothing

    def show(done: int, total: int) -> None:
        # The cursor stays at the start: what the script prints next takes the line's place.
        text = f"gradilocks: step {done} of {total}" if total else ""
        with suppress(Exception):
            stream.write(f"\r\033[K{text}\r")
            stream.flush()

    return show


def _nothing(done: int, total: int) -> None:
    """What --quiet, or a pipe, makes of progress."""


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


def _say(message: str) -> None:
    # Of the process: the script may have put something else in sys.stderr's place, or closed it.
    with suppress(Exception):
        print(f"gradilocks: {message}", file=sys.__stderr__, flush=True)
