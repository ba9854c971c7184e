"""What ``gradilocks demo`` shows: Settings, Steps and a Summary enter, text leaves.

On a terminal the steps are a progress bar; in a pipe or a file they are plain lines without control
codes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gradilocks.cli.demo_text import describe_step, format_scale, table_rows
from gradilocks.cli.program import program
from gradilocks.demo.values import Settings, Step, Summary

SECONDS_BETWEEN_LINES = 10.0


def open_console(*, quiet: bool) -> Console:
    """Opens standard output: with control codes only if it is a terminal, mute if ``quiet``."""
    return Console(quiet=quiet, force_terminal=sys.stdout.isatty(), highlight=False)


def introduce(console: Console, settings: Settings) -> None:
    """Says what is about to be trained, and with which scale."""
    batch = settings.rows * settings.length
    console.print(
        f"A {settings.layers}-layer GPT learns to continue Python's own documentation. Its Linear "
        "layers compute in fp32 and store in fp16, as a tensor core does."
    )
    if settings.accumulation > 1:
        console.print(
            f"Global batch: {settings.accumulation:,} equal micro-batches of {batch:,} characters. "
            f"One is computed; its loss is divided by {settings.accumulation:,} before the "
            "backward pass and its gradients are multiplied by that after it. What fp16 rounds to "
            "zero in between stays zero."
        )
    if settings.scale == "dynamic":
        console.print(
            f"Scale: dynamic, from {format_scale(settings.initial_scale)}; doubled after "
            f"{settings.growth_interval} clean steps in a row (by default 2,000: too slow to see "
            "here), halved after an overflow."
        )
    elif settings.scale is None:
        console.print("Scale: none.")
    else:
        console.print(f"Scale: {format_scale(settings.scale)} at every step.")
    console.print()


@contextmanager
def show_steps(console: Console, settings: Settings) -> Iterator[Callable[[Step], None]]:
    """Yields the function that shows a step: as a bar on a terminal, else now and then a line."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield _line_writer(console, settings)
        return
    with Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
        console=console,
    ) as progress:
        task = progress.add_task("", total=settings.steps)
        skipped = 0

        def show(step: Step) -> None:
            nonlocal skipped
            skipped += step.skipped
            progress.update(task, completed=step.number, description=describe_step(step, skipped))

        yield show


def conclude(console: Console, summary: Summary) -> None:
    """Prints the table of the run and what to do next."""
    table = Table(box=box.SIMPLE_HEAVY, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in table_rows(summary):
        table.add_row(name, escape(value))
    console.print(table)
    _suggest(console, summary.settings)


def _line_writer(console: Console, settings: Settings) -> Callable[[Step], None]:
    """Writes the first step, each tenth of the run, and the step after a long silence."""
    every = max(1, settings.steps // 10)
    skipped = 0
    written = time.monotonic()

    def show(step: Step) -> None:
        nonlocal skipped, written
        skipped += step.skipped
        now = time.monotonic()
        silent_for = now - written
        if step.number == 1 or step.number % every == 0 or silent_for > SECONDS_BETWEEN_LINES:
            written = now
            place = f"step {step.number:>{len(str(settings.steps))}}/{settings.steps}"
            console.print(f"{place}  {describe_step(step, skipped)}")

    return show


def _suggest(console: Console, settings: Settings) -> None:
    name = program()
    other = (
        ("with a scale", f"{name} demo")
        if settings.scale is None
        else ("without a scale", f"{name} demo --scale none")
    )
    console.print("Next:")
    for what, how in (
        other,
        ("every option", f"{name} demo --help"),
        ("in your own loop", "control = gradilocks.GradientControl(optimizer, clip=1.0)"),
        ("", "control.backward(loss); control.step(); control.zero_grad()"),
        ("", "as in docs/quickstart.md and examples/"),
    ):
        console.print(f"  {what:<16}  {how}", soft_wrap=True, markup=False)
