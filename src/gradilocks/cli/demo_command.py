"""``gradilocks demo``: options enter; the Goldilocks experiment is run, shown and written down."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from gradilocks.cli.options import check_environment, flag, one_of, whole_number
from gradilocks.cli.terminal import Interrupted, open_in_browser
from gradilocks.demo import ARMS, Experiment, Setup

FULL = 3
"""So many seeds under ``--full``."""
LARGEST_SEED = 2**63 - FULL
NAMES = tuple(arm.name for arm in ARMS)
# So that two processes end at about the same time.
LONGEST_FIRST = ("too-small", "just-right", "clipped", "fp32", "too-large")


def demo(
    full: Annotated[
        bool, flag("--full", f"Run {FULL} seeds instead of one: N, N + 1 and N + 2.")
    ] = False,
    seed: Annotated[
        int,
        whole_number(
            smallest=0, largest=LARGEST_SEED, help="Seed of the parameters and of the batches."
        ),
    ] = 0,
    steps: Annotated[int, whole_number(help="How many steps each arm takes.")] = Setup.steps,
    arm: Annotated[
        list[str] | None,
        one_of(
            NAMES, help=f"Run this arm and no other; may be given again. One of {', '.join(NAMES)}."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where everything is written.")
    ] = Path("runs/demo"),
    force: Annotated[
        bool, flag("--force", "Replace run files of the same names that are no demo's.")
    ] = False,
    open_page: Annotated[bool, flag("--open", "Open the page in the browser at the end.")] = False,
    quiet: Annotated[bool, flag("--quiet", "Print nothing but errors.")] = False,
) -> None:
    """Run the Goldilocks experiment: too small, too large, just right.

    A small GPT learns Python's own documentation on the CPU, in fp32 and in emulated fp16: with and
    without a loss scale at a global batch of 2 M tokens, with and without a clip at a high learning
    rate. About a minute on two cores. What came of it is printed, drawn on a page, and written as
    JSON; every arm leaves its run file. An earlier demo in the folder is replaced.

    \b
    Examples:
      gradilocks demo
      gradilocks demo --full --open
      gradilocks demo --arm fp32 --arm just-right --steps 100 -o runs/short
    """
    # Here and not above: --help must not wait for rich.
    from gradilocks.cli.demo_view import Progress, conclude, introduce, open_console
    from gradilocks.demo import PAGE, prepare, work, write_all

    check_environment()
    given = sys.argv[1:]
    experiment = Experiment(
        arms=[each for each in ARMS if not arm or each.name in arm],
        seeds=range(seed, seed + (FULL if full else 1)),
        setup=Setup(steps=steps),
        folder=output,
        # What was typed, without the way to the program.
        command=("gradilocks", *(given if given[:1] == ["demo"] else ["demo"])),
    )
    prepare(experiment, force=force)
    jobs, started = experiment.jobs, time.time()
    progress = Progress(jobs)
    console = open_console(quiet=quiet)
    try:
        introduce(console, experiment.setup)
        order = sorted(jobs, key=lambda job: LONGEST_FIRST.index(job.arm.name))
        with progress.shown(console) as tell, closing(work(order)) as news:
            for each in news:
                tell(each)
        summary = write_all(experiment, progress.results, started=started, seconds=progress.seconds)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(progress.so_far(output)) from interrupt
    conclude(console, summary, output)
    if open_page:
        open_in_browser(output / PAGE)
