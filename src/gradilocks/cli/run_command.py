"""``gradilocks run``: a script, run as Python would run it, and what its optimizers did on file.

The script's own options follow its name and are not looked at here. What is said goes to standard
error, and last: standard output is the script's.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from gradilocks.cli.terminal import USAGE_ERROR, one_of, program, say, whole_number
from gradilocks.errors import BadScript
from gradilocks.observe import Options, Program, Summary, run_script

OPTIMIZERS = ("AdamW", "Adam", "SGD")

# What follows the script's name belongs to the script, whatever it looks like.
SCRIPT: dict[str, Any] = {"allow_interspersed_args": False}

# What all commands that run a script take.
Script = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script and its own arguments."),
]
Module = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--module",
        metavar="MODULE",
        help="Run a module instead of a script, as python -m does.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="The run file. Default: a fresh name under runs/."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing; errors are still said.")]


def program_of(script: list[str] | None, module: str | None, *, command: str) -> Program:
    """The program that was named: a module, or a script, with its own arguments."""
    given = tuple(script or ())
    if module is not None:
        return Program(module, given, module=True)
    if not given:
        raise typer.BadParameter(f"expected a script, as in 'gradilocks {command} train.py'.")
    return Program(given[0], given[1:])


class ScriptCommand(TyperCommand):
    """A command that runs a script: also what follows the name of a module belongs to it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Ends the options of gradilocks after ``-m MODULE``."""
        try:
            return super().parse_args(ctx, _options_ended(args, self._with_value()))
        except USAGE_ERROR as error:
            name = getattr(error, "option_name", None)
            script = next((word for word in args if word.endswith(".py")), None)
            if name is None or script is None:
                raise
            raise typer.BadParameter(
                f"{name} is no option of gradilocks {ctx.info_name}. Options of the script come "
                f"after its name: gradilocks {ctx.info_name} {script} {name} ..."
            ) from error

    def _with_value(self) -> set[str]:
        options = [p for p in self.params if p.param_type_name == "option"]
        return {name for p in options if not getattr(p, "is_flag", False) for name in p.opts}


def _options_ended(words: list[str], with_value: set[str]) -> list[str]:
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        word = words[place]
        place += 2 if word in with_value else 1
        if word in ("-m", "--module") or word.startswith(("--module=", "-m")):
            return [*words[:place], "--", *words[place:]] if len(words) > place else words
    return words


def run(
    script: Script = None,
    module: Module = None,
    output: Output = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite FILE if it is a run file.")
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="Go on in FILE, after a run that was interrupted.")
    ] = False,
    detail_every: Annotated[
        int,
        typer.Option(
            parser=whole_number(smallest=1), metavar="N", help="Record each tensor every N steps."
        ),
    ] = "10",  # type: ignore[assignment]
    flush_every: Annotated[
        int,
        typer.Option(
            parser=whole_number(smallest=1),
            metavar="N",
            help="Write to the file every N steps, and every 5 seconds.",
        ),
    ] = "50",  # type: ignore[assignment]
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="After a skipped step with NaN or Inf, find the module in which the next is born.",
        ),
    ] = False,
    swap: Annotated[
        bool,
        typer.Option(
            "--swap",
            help="Give the script Gradilocks' GradScaler and clip functions in place of torch's.",
        ),
    ] = False,
    swap_optimizer: Annotated[
        list[str] | None,
        typer.Option(
            parser=one_of(OPTIMIZERS),
            metavar="NAME",
            help="Likewise an optimizer: AdamW, Adam or SGD. May be given several times.",
        ),
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Under torchrun, record every rank, not only 0.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a training script unchanged and record every optimizer step.

    Options of gradilocks come before the script's name; what follows is the script's. No line of it
    is changed, and no number either, unless --swap is given.

    Examples:

      gradilocks run train.py --lr 3e-4

      gradilocks run -o runs/a.jsonl --trace train.py

      gradilocks run -m package.train --epochs 3

      torchrun --nproc-per-node 2 -m gradilocks run train.py
    """
    chosen = program_of(script, module, command="run")
    if force and append:
        raise typer.BadParameter("--force and --append cannot be given together.")
    if (force or append) and output is None:
        raise typer.BadParameter("--force and --append need -o FILE.")
    if all_ranks and output is None:
        raise typer.BadParameter("--all-ranks needs -o FILE, so that all ranks use one name.")
    options = Options(
        output=output,
        exists="replace" if force else "append" if append else "refuse",
        detail_every=detail_every,
        flush_every=flush_every,
        trace=trace,
        all_ranks=all_ranks,
        log=not quiet,
        swap=swap,
        swap_optimizers=tuple(dict.fromkeys(swap_optimizer or ())),
        command=("gradilocks", *sys.argv[1:]),
    )
    caller = program()  # Now: the script may change the folder and the path.

    def tell(summary: Summary) -> None:
        if not quiet:
            for line in describe(summary, script=chosen.name, caller=caller):
                say(line)

    try:
        note = (lambda message: None) if quiet else say
        run_script(chosen, options, tell=tell, warn=say, note=note)
    except BadScript as error:
        raise typer.BadParameter(str(error)) from error


def describe(summary: Summary, *, script: str, caller: str) -> list[str]:
    """What is said when the script has ended."""
    if not summary.watched:
        return []
    if not summary.steps and (summary.seen or summary.failed):
        return [f"nothing could be recorded in {summary.path}, for the reason given above."]
    if not summary.steps:
        why = "stepped no optimizer" if summary.torch else "did not import torch"
        return [f"{script} {why}, so nothing was recorded."]
    skipped = f", {summary.skipped:,} of them skipped" if summary.skipped else ", none skipped"
    if summary.taken:
        skipped += f", {summary.taken:,} taken with NaN or Inf"
    count = f"{summary.steps:,} step" + ("s" if summary.steps != 1 else "")
    lines = [f"traced: {text}" for text in summary.findings]
    if summary.unseen:
        lines.append(
            "traced: nothing. A trace begins after the first step with NaN or Inf, and saw none "
            "while it looked: where that one arose was not seen"
        )
    lines.append(f"recorded {count}{skipped}, in {summary.path}")
    if summary.seen > summary.steps:
        lines[-1] += f"; {summary.seen - summary.steps:,} more could not be recorded"
    elif summary.failed:
        lines[-1] += "; the steps after that were not watched"
    lines.append(f"to see it: {caller} report {shlex.quote(str(summary.path))}")
    lines += [f"it ended in NaN or Inf: {words}" for words in summary.bad_endings]
    return lines
