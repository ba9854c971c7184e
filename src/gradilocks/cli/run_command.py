"""``gradilocks run``: a script, run as Python would run it, and what its optimizers did on file.

The script's own options follow its name and are not looked at here. What is said goes to standard
error, and last: standard output is the script's.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradilocks.cli.options import (
    USAGE_ERROR,
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
from gradilocks.errors import BadScript, GradilocksError, MissingPackage
from gradilocks.observe import Options, Program, Summary, run_script
from gradilocks.runfile import Run, read_run, read_start

if TYPE_CHECKING:
    from gradilocks.record import Sink
    from gradilocks.report import Health

OPTIMIZERS = ("AdamW", "Adam", "SGD")
TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
SINKS = tuple(TITLES)
COLOURS = {"in trouble": "red", "needs a look": "yellow", "healthy": "green"}
UNKNOWN = "needs a look"
"""The verdict if nothing wrong was seen, but not all was."""
MOST_READ = 256 << 20
"""Bytes of a run file that are read again when the script has ended: about a million steps, some
seconds."""


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
            "Look at each step before it is taken, also on a GPU, which is waited for then.",
        ),
    ] = False,
    no_trace: Annotated[
        bool,
        flag("--no-trace", "Do not run a step with NaN or Inf once more to find where it arose."),
    ] = False,
    guard: Annotated[
        str | None,
        one_of(
            ("skip", "stop"),
            help="Do not take a step with NaN or Inf: skip it, or stop the script there.",
        ),
    ] = None,
    no_snapshot: Annotated[
        bool, flag("--no-snapshot", "With --guard, do not write the first such step to a file.")
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
    to: Annotated[
        list[str] | None,
        one_of(
            SINKS,
            help="Feed tensorboard or wandb while the script runs, beside the run file. May be "
            "given several times.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run a training script unchanged and record every optimizer step.

    Options of gradilocks come before the script's name; what follows is the script's. No line of it
    is changed, and no number either, unless --swap is given.

    Examples:

      gradilocks run train.py --lr 3e-4

      gradilocks run -o runs/a.jsonl --trace train.py

      gradilocks run -m package.train --epochs 3

      gradilocks run --to tensorboard train.py

      torchrun --nproc-per-node 2 -m gradilocks run train.py
    """
    chosen = program_of(script, module, command="run")
    if force and append:
        raise typer.BadParameter("--force and --append cannot be given together.")
    if trace and no_trace:
        raise typer.BadParameter("--trace and --no-trace cannot be given together.")
    if no_snapshot and guard is None:
        raise typer.BadParameter("--no-snapshot needs --guard, which alone writes one.")
    if (force or append) and output is None:
        raise typer.BadParameter("--force and --append need -o FILE.")
    if all_ranks and output is None:
        raise typer.BadParameter("--all-ranks needs -o FILE, so that all ranks use one name.")
    note = (lambda message: None) if quiet else say
    home, sinks = os.getcwd(), tuple(dict.fromkeys(to or ()))

    def shown(path: Path) -> str:
        relative = os.path.relpath(path, home)
        return str(path) if relative.startswith(os.pardir) else relative

    for name in sinks:
        require(name)
    options = Options(
        output=output,
        exists="replace" if force else "append" if append else "refuse",
        detail_every=detail_every,
        flush_every=flush_every,
        trace=None if no_trace else "always" if trace else "light",
        guard=guard,
        snapshot=not no_snapshot,
        all_ranks=all_ranks,
        per_step=dict(map(named_amount, per_step or ())),
        log=not quiet,
        swap=swap,
        swap_optimizers=tuple(dict.fromkeys(swap_optimizer or ())),
        command=("gradilocks", *sys.argv[1:]),
        check=lambda path: make_room(path, force=force, tensorboard="tensorboard" in sinks),
        sinks=(lambda path: [made(name, path, shown, note) for name in sinks]) if sinks else None,
    )
    caller = program()  # Now: the script may change the folder and the path.
    from gradilocks.report import examine

    def tell(summary: Summary) -> None:
        if not quiet:
            for line in describe(summary, chosen, caller=caller):
                say(line)
            verdict, words = judged(summary, examine)
            if verdict:
                say(f"{verdict}. {words}", colour=COLOURS.get(verdict, ""))

    try:
        run_script(chosen, options, tell=tell, warn=say, note=note)
    except BadScript as error:
        raise USAGE_ERROR(str(error)) from error


def require(sink: str) -> None:
    """Refuses a sink whose package is not there: before the script runs, and without an import.

    Raises:
        MissingPackage: it says how to install it.
    """
    if importlib.util.find_spec(sink) is None:
        raise MissingPackage(f"{TITLES[sink]} is not installed: pip install 'gradilocks[{sink}]'")


def make_room(path: Path, *, force: bool, tensorboard: bool) -> None:
    """Tries what stands beside a run file, before the script runs; with `force` it goes.

    That is the report on the run whose place is taken, and with `tensorboard` its files.

    Raises:
        GradilocksError: what is there is somebody else's.
    """
    if force and path.is_file():
        from gradilocks.report import identity_of_headers, is_page_about

        page = path.with_suffix(".html")
        # What cannot be read is refused by whoever writes there.
        with suppress(GradilocksError, OSError):
            if is_page_about(page, identity_of_headers([read_start(path)])):
                page.unlink()
    if tensorboard:
        from gradilocks.integrations.tensorboard import own_events

        for old in own_events(path.with_suffix(".tensorboard")):
            if force:
                old.unlink()


def made(sink: str, path: Path, shown: Callable[[Path], str], note: Callable[[str], None]) -> Sink:
    """What is fed beside the run file, made at the first step; `shown` is a path as it is typed."""
    if sink == "wandb":
        from gradilocks.integrations.wandb import WandbSink

        note("feeding Weights & Biases")
        return WandbSink(name=path.stem)
    from gradilocks.integrations.tensorboard import TensorBoardSink

    folder = path.with_suffix(".tensorboard")
    note(f"feeding TensorBoard: tensorboard --logdir {shlex.quote(shown(folder))}")
    return TensorBoardSink(folder)


def describe(summary: Summary, chosen: Program, *, caller: str) -> list[str]:
    """What is said when the script has ended."""
    from gradilocks.report import size

    script = chosen.name
    if not summary.watched:
        return []
    if not summary.steps and (summary.seen or summary.failed):
        return [f"nothing could be recorded in {summary.path}, for the reason given above."]
    if not summary.steps:
        why = "stepped no optimizer" if summary.torch else "did not import torch"
        if summary.logs:
            return [f"{script} {why}; what it logged is in {summary.path}"]
        return [f"{script} {why}, so nothing was recorded."]
    skipped = f", {summary.skipped:,} of them skipped" if summary.skipped else ", none skipped"
    if summary.taken:
        skipped += f", {summary.taken:,} taken with NaN or Inf"
    count = f"{summary.steps:,} step" + ("s" if summary.steps != 1 else "")
    lines = [f"traced: {text}" for text in summary.findings]
    if summary.unseen:
        lines.append(
            "where NaN or Inf arose was not looked for: that needs a look before each step is "
            f"taken, which waits for the GPU. To do so: {with_trace(chosen, caller)}"
        )
    lines.append(f"recorded {count}{skipped}, in {summary.path}")
    if summary.seen > summary.steps:
        lines[-1] += f"; {summary.seen - summary.steps:,} more could not be recorded"
    elif summary.failed:
        lines[-1] += "; the steps after that were not watched"
    if summary.left_out is not None:
        many, after = summary.left_out
        lines.append(
            f"{many:,} backward pass{'' if many == 1 else 'es'} on a loss that was NaN or Inf, the "
            f"first after step {after:,}, went into no step: the script has left them out by itself"
        )
    if summary.stopped:
        lines.append(
            "stopped by --guard stop: the last step had NaN or Inf and was not taken; parameters "
            "and optimizer state are as they were before it"
        )
    elif summary.held:
        held = f"{summary.held:,} step" + ("s" if summary.held != 1 else "")
        lines.append(
            f"--guard skip held back {held} with NaN or Inf: parameters and optimizer state were "
            "left as they were before"
        )
    if summary.snapshot is not None:
        path, written = summary.snapshot
        lines.append(f"the first bad step is in {path} ({size(written)})")
    lines.append(f"to see it: {caller} report {shlex.quote(str(summary.path))}")
    if summary.partly:
        whose = "all" if summary.partly >= summary.steps else f"{summary.partly:,} of {count}"
        why = (
            "not all ranks have told of them, or they hold different parts"
            if summary.untold
            else "nothing tells copies from parts of plain tensors outside of "
            "DistributedDataParallel"
        )
        lines.append(
            f"norms, culprits and tensors of {whose} are of what rank {summary.rank} holds: {why}"
        )
    return lines


def with_trace(chosen: Program, caller: str) -> str:
    """The command that runs the same with --trace, to be typed."""
    module = ["-m"] if chosen.module else []
    return f"{caller} run --trace {shlex.join([*module, chosen.name, *chosen.arguments])}"


def judged(summary: Summary, examine: Callable[[Run], Health]) -> tuple[str, str]:
    """The verdict of `gradilocks report` on what was recorded, and its sentence; ('', '') if
    nothing was.

    Of a file too large to be read here, what was counted on the way: whether it ended in NaN.
    """
    if not summary.watched or not summary.steps:
        return "", ""
    ended = "".join(f"It ended in NaN or Inf: {words}. " for words in summary.bad_endings)
    missed = ""
    if summary.failed or summary.seen > summary.steps:
        missed = f"Nothing is known of the steps after those {summary.steps:,}."
    counted = ("in trouble", f"{ended}{missed}".rstrip()) if ended else (UNKNOWN, missed)
    if not ended and not missed:
        counted = "", ""
    try:
        if summary.file.stat().st_size > MOST_READ:
            return counted
        health = examine(read_run(summary.file))
    except (GradilocksError, OSError, MemoryError):
        return counted
    if not missed or health.sentence.startswith("Nothing is known"):
        return health.verdict, health.sentence
    verdict = UNKNOWN if health.verdict == "healthy" else health.verdict
    return verdict, f"{health.sentence} {missed}"
