"""``gradilocks demo``: options enter; the Goldilocks experiment is run, shown and written down."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradilocks.cli import Interrupted
from gradilocks.cli.options import whole_number
from gradilocks.demo.arms import ARMS, Arm, Setup
from gradilocks.errors import GradilocksError

if TYPE_CHECKING:
    from gradilocks.demo.values import Job

FULL = 3
"""So many seeds under ``--full``."""
LARGEST_SEED = 2**63 - FULL
NAMES = tuple(arm.name for arm in ARMS)
# The longest first, so that two processes end at about the same time.
ORDER = ("too-small", "just-right", "clipped", "fp32", "too-large")


def demo(
    full: Annotated[
        bool, typer.Option("--full", help=f"Run {FULL} seeds instead of one: N, N + 1 and N + 2.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            parser=whole_number(smallest=0, largest=LARGEST_SEED),
            metavar="N",
            help="Seed of the parameters and of the batches.",
        ),
    ] = 0,
    steps: Annotated[
        int,
        typer.Option(
            parser=whole_number(smallest=1), metavar="N", help="How many steps each arm takes."
        ),
    ] = Setup.steps,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Run this arm and no other; may be given again. One of {', '.join(NAMES)}.",
            autocompletion=lambda: list(NAMES),
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where everything is written."),
    ] = Path("runs/demo"),
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace run files of the same names that are no demo's."),
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser at the end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
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
    _run(
        arms=_read_arms(arm),
        seeds=range(seed, seed + (FULL if full else 1)),
        setup=Setup(steps=steps),
        folder=output,
        force=force,
        open_page=open_page,
        quiet=quiet,
    )


def _run(
    *,
    arms: list[Arm],
    seeds: range,
    setup: Setup,
    folder: Path,
    force: bool,
    open_page: bool,
    quiet: bool,
) -> None:
    # Here and not above: --help must not wait for rich.
    from gradilocks.cli.demo_files import command_line, write_all
    from gradilocks.cli.demo_progress import State, show
    from gradilocks.cli.demo_view import conclude, introduce, open_console
    from gradilocks.demo.crew import work
    from gradilocks.demo.folder import prepare, run_of
    from gradilocks.demo.values import Job

    prepare(folder, arms=arms, seeds=seeds, force=force)
    command = command_line()
    began, started = time.monotonic(), time.time()
    jobs = [
        Job(arm, number, setup, str(run_of(folder, arm, number)), command)
        for number in seeds
        for arm in arms
    ]
    state = State(jobs)
    console = open_console(quiet=quiet)
    try:
        introduce(console, setup)
        with show(console, state) as refresh, closing(work(_longest_first(jobs))) as news:
            for each in news:
                state.take(each)
                refresh(each)
        summary = write_all(
            folder,
            arms=arms,
            setup=setup,
            seeds=seeds,
            state=state,
            command=command,
            started=started,
            seconds=time.monotonic() - began,
        )
    except KeyboardInterrupt as interrupt:
        raise Interrupted(state.so_far(folder)) from interrupt
    conclude(console, summary, folder)
    if open_page:
        _open(folder)


def _longest_first(jobs: list[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: ORDER.index(job.arm.name))


def _read_arms(names: list[str] | None) -> list[Arm]:
    for name in names or ():
        if name not in NAMES:
            raise typer.BadParameter(
                f"expected {', '.join(NAMES[:-1])} or {NAMES[-1]}, got {name!r}.",
                param_hint="'--arm'",
            )
    return [arm for arm in ARMS if not names or arm.name in names]


def _open(folder: Path) -> None:
    import webbrowser

    from gradilocks.demo.folder import PAGE

    page = folder / PAGE
    if not webbrowser.open(page.resolve().as_uri()):
        raise GradilocksError(f"no browser was found; open {page} yourself.")
