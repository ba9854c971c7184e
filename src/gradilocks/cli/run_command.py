"""``gradilocks run``: a script, run as Python would run it, and what its optimizers did on file.

The script's own options follow its name and are not looked at here. What is said goes to standard
error, and last: standard output is the script's.
"""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from gradilocks.cli.options import (
    Module,
    Output,
    Quiet,
    Script,
    amount,
    flag,
    named_amount,
    one_of,
    program_of,
    whole_number,
)
from gradilocks.cli.terminal import program, say
from gradilocks.errors import BadScript
from gradilocks.observe import Options, Summary, run_script

OPTIMIZERS = ("AdamW", "Adam", "SGD")


def run(
    script: Script = None,
    module: Module = None,
    output: Output = None,
    force: Annotated[bool, flag("--force", "Overwrite FILE if it is a run file.")] = False,
    append: Annotated[
        bool, flag("--append", "Go on in FILE, after a run that was interrupted.")
    ] = False,
    detail_every: Annotated[int, whole_number(help="Record each tensor every N steps.")] = 10,
    flush_every: Annotated[
        int, whole_number(help="Write to the file every N steps, and every 5 seconds.")
    ] = 50,
    trace: Annotated[
        bool,
        flag(
            "--trace",
            "After a skipped step with NaN or Inf, find the module in which the next is born.",
        ),
    ] = False,
    per_step: Annotated[
        list[str] | None,
        amount(
            "--per-step",
            help="How many tokens, samples or the like a step works on, as in tokens=65536: the "
            "report then shows how many a second. May be given several times.",
        ),
    ] = None,
    swap: Annotated[
        bool,
        flag(
            "--swap",
            "Give the script Gradilocks' GradScaler and clip functions in place of torch's.",
        ),
    ] = False,
    swap_optimizer: Annotated[
        list[str] | None,
        one_of(
            OPTIMIZERS,
            help="Likewise an optimizer: AdamW, Adam or SGD. May be given several times.",
        ),
    ] = None,
    all_ranks: Annotated[
        bool, flag("--all-ranks", "Under torchrun, record every rank, not only 0.")
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
        per_step=dict(map(named_amount, per_step or ())),
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
    if summary.partly:
        lines.append(
            f"norms, culprits and tensors of some steps are of what rank {summary.rank} holds: not "
            "all ranks have told of them, or they do not say what each holds of the model"
        )
    lines += [f"it ended in NaN or Inf: {words}" for words in summary.bad_endings]
    return lines
