"""The `gradilocks` command.

Exit status: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C; `gradilocks run` returns the exit status of the
script. Each command imports its modules when it runs: a script may set environment variables before it imports torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradilocks.errors import GradilocksError
from gradilocks.view.text import clean

if TYPE_CHECKING:
    from rich.console import Console

    from gradilocks.run import RunResult
    from gradilocks.view.report import Report

__all__ = ["app", "main"]

_UsageError: Any = typer.BadParameter.__base__  # typer has no public name for it.
EXTRAS = {"jinja2": "report", "numpy": "cli", "plotly": "report", "rich": "cli"}
"""Optional packages, with the extra of this package that installs them."""

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
_RECORD, _VIEW, _ANALYZE = "Record", "View", "Analyze"

RunFiles = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Run files.", show_default=False)]


@app.callback(invoke_without_command=True)
def gradilocks(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Gradient magnitude control for PyTorch: record a run, find the origin of a NaN, choose a number format."""
    if version:
        from gradilocks import __version__

        print(f"gradilocks {__version__}")
        raise typer.Exit


# --- record -----------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=_RECORD, context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="The script with its arguments.", show_default=False),
    ],
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Run file; by default runs/SCRIPT-DATE-TIME.jsonl."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Append to FILE, for a resumed run.")] = False,
    guard: Annotated[
        Literal["skip", "stop"] | None,
        typer.Option(help="On NaN or Inf gradients, skip the step or stop the script."),
    ] = None,
    no_trace: Annotated[
        bool,
        typer.Option("--no-trace", help="Do not search for the origin of NaN and Inf; keep no module inputs."),
    ] = False,
    detail_every: Annotated[
        int, typer.Option(metavar="N", min=0, help="Record per-tensor statistics every N steps; 0 for never.")
    ] = 10,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print no summary; culprits are still named.")] = False,
) -> None:
    """Run an unmodified training script and record its optimizer steps.

    Options of gradilocks come before SCRIPT; all arguments after it are passed to the script.
    """
    from gradilocks.run import Options, run_script

    if overwrite and append:
        raise typer.BadParameter("--overwrite and --append cannot be combined.")
    options = Options(
        output=output,
        overwrite=overwrite,
        append=append,
        guard=guard,
        has_trace=not no_trace,
        detail_every=detail_every,
    )
    folder = Path.cwd()  # The script may change the working directory.
    result = run_script(["-m", *script] if is_module else script, options)
    if int(os.environ.get("RANK", 0)) == 0:
        # Errors in the summary must not change the exit code: the script may have closed its streams.
        try:
            _finish(result, script[0], folder, quiet=quiet)
        except Exception as error:
            with suppress(OSError, ValueError):
                _print_line(f"no verdict: {type(error).__name__}: {error}")
    raise typer.Exit(result.exit_code)


def _finish(result: RunResult, script: str, folder: Path, *, quiet: bool) -> None:
    """Appends the verdict to the run file and prints the summary of `gradilocks run`."""
    if result.path is None:
        lines = [f"{script} took no optimizer step; nothing was recorded"]
    else:
        report = _add_verdict(result.path)
        lines = [report.verdict.text, *_last_lines(report), f"next: {_command('report', result.path, folder=folder)}"]
        if report.run.end is None:
            lines.insert(0, f"{result.path} could not be written to the end; the numbers are those of its steps")
    for line in lines if not quiet else []:
        _print_line(line)


def _last_lines(report: Report) -> list[str]:
    """The main numbers of each optimizer, then the first culprit if the verdict names none."""
    names = ("steps", "loss", "lowest loss", "typical norm", "skipped", "clipped", "scale", "steps/s")
    lines = []
    for steps in report.optimizers:
        facts = report.facts(steps)
        prefix = f"{steps.label}: " if len(report.optimizers) > 1 else ""
        shown = [f"{name} {facts[name]}" for name in names if not facts.get(name, "no ").startswith("no ")]
        lines.append(prefix + "; ".join(shown))
    records = sorted(report.run.culprits.items())
    culprits = [(step, clean(record.get("text", ""))) for (step, _, _), record in records if record.get("known")]
    is_named = any(text in report.verdict.text for _, text in culprits)
    return [*lines, *(f"step {step:,}: {text}" for step, text in culprits[:1] if not is_named)]


def _add_verdict(path: Path) -> Report:
    """Appends the end line again, with the verdict, so that `gradilocks ls` need not read the whole file."""
    from gradilocks.view.report import Report
    from gradilocks.view.runfile import read

    run = read(path)
    report = Report(run, run.name)
    if run.end is not None:
        run.end |= {"verdict": report.verdict.text, "severity": report.verdict.severity}
        line = json.dumps(run.end, separators=(",", ":")) + "\n"
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    return report


# --- view -------------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=_VIEW)
def report(
    files: RunFiles,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PAGE", help="Also write an HTML page with plots.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the verdict, the findings and the main numbers of one run, or compare several."""
    from gradilocks.view import report as view

    if output is not None and output.suffix not in (".html", ".htm"):
        raise typer.BadParameter(f"{output} does not end with .html.")
    if as_json:
        _console().out(view.to_json(files), highlight=False)
    else:
        _console().print(view.to_text(files))
    if output is not None:
        _print_line(f"wrote {view.write_page(files, output)}")
    elif not as_json:
        _print_line(f"with plots: {_command('report', *files)} -o page.html")


@app.command(rich_help_panel=_VIEW)
def watch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file; it may not exist yet.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    """Follow a run while it is recorded."""
    from gradilocks.view.watch import watch as view

    view(file, once, console=_console())


@app.command(rich_help_panel=_VIEW)
def ls(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with run files.")] = Path("runs")) -> None:
    """List the runs and audits in a folder with their verdicts."""
    from gradilocks.view.ls import list_runs, to_text

    _console().print(to_text(list_runs(folder)))


# --- analyze ----------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=_ANALYZE)
def audit(
    function: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="Function to call; see above.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write the audit to a new file, as JSON.")
    ] = None,
    batches: Annotated[int, typer.Option(metavar="N", min=1, help="Largest number of batches.")] = 10,
) -> None:
    """Show which number formats can hold a model's gradients, and with which loss scale.

    FUNCTION takes no arguments and returns a tuple (model, loss_fn, batches); loss_fn(model, batch) returns the loss.
    Nothing is trained.
    """
    arguments = _call(function)
    from gradilocks.audit import audit as audit_model

    result = audit_model(*arguments, steps=batches, label=function)
    _console().out(result.to_text(), highlight=False)
    if output is not None:
        result.write(output)
        _print_line(f"wrote {output}")


def _call(function: str) -> tuple[Any, Any, Any]:
    """Imports a Python file and calls one of its functions."""
    file, _, name = function.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise typer.BadParameter(f"{function!r} does not name a function in a Python file. Write FILE.py:FUNCTION.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).resolve().parent))  # As for a script, which may import modules beside it
    sys.argv[:] = [file]  # and read its arguments.
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise GradilocksError(f"{file} has no function {name!r}.")
    result = getattr(module, name)()
    if not isinstance(result, tuple) or len(result) != 3:
        raise GradilocksError(f"{function} must return (model, loss_fn, batches), got {type(result).__name__}.")
    return result


@app.command(rich_help_panel=_ANALYZE, context_settings={"ignore_unknown_options": True})
def explain(
    value: Annotated[float, typer.Argument(metavar="NUMBER", help="A number such as 6e-8.", show_default=False)],
    scale: Annotated[float | None, typer.Option(help="Loss scale; the number is also shown multiplied by it.")] = None,
) -> None:
    """Show how a number is stored in fp32, bf16, fp16 and fp8."""
    from gradilocks.explain import explain as rows
    from gradilocks.explain import to_text

    try:
        table = rows(value, scale=scale)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _console().out(to_text(table), highlight=False)


@app.command(rich_help_panel=_ANALYZE)
def demo(
    folder: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the run files and the page.")
    ] = Path("gradilocks-demo"),
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Optimizer steps per run.")] = 200,
) -> None:
    """Train a small GPT in fp16 three times: no loss scale, a scale that is too large, a dynamic scale.

    Takes about half a minute on a CPU. Files of an earlier demo in FOLDER are replaced.
    """
    from gradilocks.demo import TRAININGS, train
    from gradilocks.view.report import STYLES, write_page

    console, paths = _console(), []
    folder.mkdir(parents=True, exist_ok=True)
    for training in TRAININGS:
        console.print(training.label, style="bold", highlight=False)
        paths.append(train(training, folder, steps=steps))
        report = _add_verdict(paths[-1])
        console.print(f"  {report.verdict.text}", style=STYLES[report.verdict.severity], highlight=False, markup=False)
        loss = report.facts(report.optimizers[0])["loss"]
        if loss not in report.verdict.text:
            console.print(f"  loss {loss}", highlight=False)
    page = write_page(paths, folder / "demo.html")
    console.print(f"page: {page}", highlight=False, markup=False, soft_wrap=True)


# --- printing and exiting ---------------------------------------------------------------------------------------------


def _console() -> Console:
    """A console for standard output. Characters that the encoding does not have are escaped."""
    from rich.console import Console

    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return Console()


def _print_line(line: object) -> None:
    """Prints one line to standard error; standard output is for the script or the result."""
    print(f"gradilocks: {clean(line)}", file=sys.stderr, flush=True)


def _command(name: str, *files: Path, folder: Path | None = None) -> str:
    """A command line for a shell in `folder`, by default the working directory."""
    start = folder or Path.cwd()
    paths = [path.relative_to(start) if path.is_relative_to(start) else path for path in files]
    return shlex.join(["gradilocks", name, *map(str, paths)])


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        arguments: command-line arguments; those of the process if None.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        status = typer.main.get_command(app).main(arguments, prog_name="gradilocks", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        _print_line(message)
        return 2 if isinstance(error, _UsageError) else 1
    return status if isinstance(status, int) else 0


def _message(error: Exception) -> str | None:
    """The line to print for an error; None for an unexpected one, which keeps its traceback."""
    if isinstance(error, _UsageError):
        command = "gradilocks" if error.ctx is None else error.ctx.command_path
        return f"{error.format_message().rstrip('.')}. See {command} --help.".replace("?.", "?")
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{error.name} is not installed: pip install 'gradilocks[{EXTRAS[error.name]}]'"
    # BadRunFile is view's only error; importing it would import numpy before a script can set OMP_NUM_THREADS.
    is_own = isinstance(error, GradilocksError) or type(error).__module__.startswith("gradilocks.view")
    return str(error) if is_own else None
