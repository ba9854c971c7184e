"""What ``gradilocks demo`` shows: Settings, Steps and a Summary enter, text leaves.

On a terminal the steps are a progress bar; in a pipe or a file they are plain lines without control
codes. The words are ASCII, so that no encoding can fail on them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gradilocks.cli.program import program
from gradilocks.demo.values import Settings, Step, Summary, summarize

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
            "backward pass and its gradients are multiplied by it afterwards, so only what fp16 "
            "loses in between depends on that number."
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
            progress.update(task, completed=step.number, description=_describe(step, skipped))

        yield show


def conclude(console: Console, summary: Summary) -> None:
    """Prints the table of the run and what to do next."""
    table = Table(box=box.SIMPLE_HEAVY, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(summary):
        table.add_row(name, escape(value))
    console.print(table)
    _suggest(console, summary.settings)


def rows(summary: Summary) -> list[tuple[str, str]]:
    """Returns the rows of the table: a name and what to say about it."""
    settings = summary.settings
    entries = [
        ("steps", f"{summary.steps} in {summary.seconds:.1f} s"),
        ("skipped", str(summary.skipped)),
        ("clipped", str(summary.clipped)),
        (
            "scale",
            f"{format_scale(summary.scale_first)} at the first step, "
            f"{format_scale(summary.scale_last)} at the last",
        ),
        (
            "loss",
            f"{summary.loss_first:.3f} at the first step, {summary.loss_last:.3f} "
            f"{_window(summary)}",
        ),
    ]
    if summary.skipped:
        entries.insert(2, ("culprits", _name_culprits(summary)))
    if summary.underflow is not None:
        lost = f"{summary.underflow.unscaled:.1%} without a scale"
        if settings.scale is not None:
            lost += f", {summary.underflow.scaled:.1%} with {format_scale(summary.scale_first)}"
        entries.append(
            (
                "rounded to 0",
                f"{lost}, of the gradients entering the last layer at the first step",
            )
        )
    return entries


def describe_so_far(settings: Settings, steps: Sequence[Step]) -> str:
    """Says in one line what an interrupted run did."""
    if not steps:
        return "before the first step."
    summary = summarize(settings, steps)
    return (
        f"after {summary.steps} of {settings.steps} steps: {summary.skipped} skipped, "
        f"{summary.clipped} clipped, scale {format_scale(summary.scale_last)}, loss "
        f"{summary.loss_first:.3f} at the first step, {summary.loss_last:.3f} {_window(summary)}."
    )


def format_scale(scale: float) -> str:
    """Writes a power of two as one: ``2^16``; another number in a few digits.

    Example:
        >>> format_scale(65536.0), format_scale(1000.0)
        ('2^16', '1000')
    """
    fraction, exponent = math.frexp(scale)
    if fraction == 0.5 and exponent != 1:
        return f"2^{exponent - 1}"
    return f"{scale:.6g}"


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
            console.print(f"{place}  {_describe(step, skipped)}")

    return show


def _describe(step: Step, skipped: int) -> str:
    return f"loss {step.loss:.3f}  scale {format_scale(step.scale)}  skipped {skipped}"


def _window(summary: Summary) -> str:
    if summary.loss_window == 1:
        return "at the last"
    return f"over the last {summary.loss_window}"


def _name_culprits(summary: Summary) -> str:
    most = sorted(summary.culprits.items(), key=lambda entry: -entry[1])
    named = ", ".join(f"{name} ({count} x)" for name, count in most[:3])
    return named if len(most) <= 3 else f"{named} and {len(most) - 3} more"


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
