"""What ``gradilocks demo`` shows: before, while it runs, and after.

A Setup, News and a summary enter. A terminal gets a bar an arm; a pipe or a file gets plain lines
without control codes, now and then one a step. The words are ASCII, so that no encoding can fail
on them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradilocks.cli.terminal import program
from gradilocks.demo import PAGE, SUMMARY, Job, News, Result, Setup, Step
from gradilocks.report import number, power

SECONDS_BETWEEN_LINES = 10.0
BAR = 12
VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "not judged"}
STYLES = {True: "bold green", False: "bold red", None: "bold yellow"}

Plain = Mapping[str, Any]


def open_console(*, quiet: bool) -> Console:
    """Opens standard output: with control codes only if it is a terminal, mute if ``quiet``."""
    return Console(quiet=quiet, force_terminal=sys.stdout.isatty(), highlight=False)


def introduce(console: Console, setup: Setup) -> None:
    """Says what is about to be compared."""
    console.print(Text("The Goldilocks experiment", style="bold"))
    console.print(
        f"A {setup.layers}-layer GPT learns Python's own documentation, on the CPU. fp16 is "
        "emulated: stored in fp16, computed in fp32, as a tensor core does. One micro-batch of "
        f"{setup.micro_batch:,} characters stands for {setup.accumulation:,} equal ones: a global "
        f"batch of {setup.global_batch:,} tokens."
    )
    console.print()


@dataclass
class Row:
    """How far one job is."""

    job: Job
    began: float | None = None
    step: Step | None = None
    skipped: int = 0
    clipped: int = 0
    result: Result | None = None

    @property
    def name(self) -> str:
        """As its run file has it."""
        return f"{self.job.arm.name}-{self.job.seed}"

    def take(self, news: News) -> None:
        """Counts what has happened."""
        self.began = self.began or time.monotonic()
        self.result = news.result
        if news.step is not None:
            self.step = news.step
            self.skipped += news.step.skipped
            self.clipped += news.step.clipped and not news.step.skipped

    def cells(self) -> list[RenderableType]:
        """A bar and the numbers of the last step, for a terminal."""
        step, steps = self.step, self.job.setup.steps
        if step is None or self.began is None:
            waits = "starts" if self.began else "waits"
            return [ProgressBar(total=steps, completed=0, width=BAR), Text(waits)]
        # By its own pace.
        left = (time.monotonic() - self.began) / step.number * (steps - step.number)
        done = self.result is not None
        return [
            ProgressBar(total=step.number if done else steps, completed=step.number, width=BAR),
            Text(f"{step.number}"),
            Text(loss_words(step.loss), style="red" if math.isnan(step.loss) else ""),
            Text(power(step.scale)),
            Text(f"{self.clipped}"),
            Text(f"{self.skipped}", style="red" if self.skipped else ""),
            Text("done", style="green") if done else Text(clock(left)),
        ]

    def line(self, news: News, *, silent: float) -> str:
        """What a pipe is told: the first step, each tenth of an arm, its end, one after silence."""
        if news.result is not None:
            why = f"; stopped: {news.result.stopped}" if news.result.stopped else ""
            loss = loss_words(news.result.final_loss)
            return f"done in {news.result.seconds:.1f} s, final loss {loss}{why}"
        step, steps = news.step, self.job.setup.steps
        if step is None:
            return ""
        tenth = step.number == 1 or step.number % max(1, steps // 10) == 0
        if not tenth and silent <= SECONDS_BETWEEN_LINES:
            return ""
        return (
            f"step {step.number:>{len(str(steps))}}/{steps}  loss {loss_words(step.loss)}  "
            f"scale {power(step.scale)}  clipped {self.clipped}  skipped {self.skipped}"
        )


class Progress:
    """All jobs, and how far they are."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.rows = [Row(job) for job in jobs]
        self.began = time.monotonic()

    @property
    def results(self) -> list[Result]:
        """Of the jobs that are done."""
        return [row.result for row in self.rows if row.result is not None]

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    @property
    def several(self) -> bool:
        """Whether there is more than one seed."""
        return len({row.job.seed for row in self.rows}) > 1

    def so_far(self, folder: Path) -> str:
        """Says in one line what an interrupted demo has done."""
        parts = []
        for row in self.rows:
            name = row.name if self.several else row.job.arm.name
            if row.result is not None:
                parts.append(f"{name} done, loss {loss_words(row.result.final_loss)}")
            elif row.step is not None:
                parts.append(f"{name} at step {row.step.number} of {row.job.setup.steps}")
        if not parts:
            return "before the first step."
        return (
            f"after {clock(self.seconds)}: {'; '.join(parts)}. The run files are in {folder}; no "
            "page and no summary was written."
        )

    @contextmanager
    def shown(self, console: Console) -> Iterator[Callable[[News], None]]:
        """Yields the function that is to be told each piece of news."""
        terminal = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        width = max(len(row.name) for row in self.rows)
        written = self.began

        def tell(news: News) -> None:
            nonlocal written
            row = next(row for row in self.rows if row.job == news.job)
            row.take(news)
            now = time.monotonic()
            line = "" if terminal else row.line(news, silent=now - written)
            if line:
                console.print(f"{row.name:<{width}}  {line}", soft_wrap=True, markup=False)
                written = now

        picture = Live(
            console=console, get_renderable=self._picture, refresh_per_second=5, transient=True
        )
        with picture if terminal else nullcontext():
            yield tell

    def _picture(self) -> RenderableType:
        table = _new_table()
        table.add_column("arm and seed" if self.several else "arm", no_wrap=True)
        table.add_column("", width=BAR)
        for name in ("step", "loss", "scale", "clipped", "skipped", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            seed = f" {row.job.seed}" if self.several else ""
            label = Text(row.job.arm.title + seed)
            table.add_row(label, *row.cells(), style="" if row.began else "dim")
        words = f"{len(self.results)} of {len(self.rows)} done, {clock(self.seconds)}"
        return Group(table, Text(words, style="dim"))


def conclude(console: Console, summary: Plain, folder: Path) -> None:
    """Prints the table, the three verdicts, and where to look next."""
    rows = table_rows(summary)
    table = _new_table()
    for place, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row.values()))
    console.print(table)
    console.print(
        Text(
            "norm: the largest, before clipping; lost: of the gradients entering the last layer, "
            "the share that fp16 rounds to zero at the first step",
            style="dim",
        )
    )
    console.print()
    for verdict in summary["verdicts"]:
        title = Text.assemble(
            (verdict["name"].capitalize(), "bold"),
            ": ",
            (VERDICTS[verdict["holds"]], STYLES[verdict["holds"]]),
        )
        console.print(title)
        console.print(Padding(Text(verdict["sentence"]), (0, 0, 0, 2)))
    console.print()
    for what, where in (
        ("the page", str(folder / PAGE)),
        ("the numbers", str(folder / SUMMARY)),
        ("each arm", ", ".join(sorted({f"{run['arm']}.html" for run in summary["runs"]}))),
        ("compare", f"{program()} compare {folder}/*.jsonl"),
    ):
        console.print(f"{what:<11}  {where}", soft_wrap=True, markup=False)


def _new_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def loss_words(loss: float | None, digits: int = 3) -> str:
    """A loss in a few digits.

    Example:
        >>> loss_words(2.31524), loss_words(3908.2), loss_words(None)
        ('2.315', '3908', 'NaN')
    """
    if loss is None or math.isnan(loss):
        return "NaN"
    return f"{loss:.{digits}f}" if abs(loss) < 1000 else f"{loss:.4g}"


def clock(seconds: float) -> str:
    """A time as a clock has it.

    Example:
        >>> clock(5.4), clock(75)
        ('0:05', '1:15')
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def table_rows(summary: Plain) -> list[dict[str, str]]:
    """Returns the rows of the closing table, an arm each: heads and cells."""
    rows = []
    for arm in summary["arms"]:
        runs = [run for run in summary["runs"] if run["arm"] == arm["name"]]
        if runs:
            row = {
                "arm": arm["title"],
                "start": _mean(runs, "first_loss", loss_words),
                "final loss": _final(arm["final_loss"], several=len(summary["seeds"]) > 1),
                "skipped": _range(runs, "skipped"),
                "clipped": _range(runs, "clipped"),
                "norm": _mean(runs, "norm_largest", number),
                "lost": _mean(runs, "lost", "{:.1%}".format, nothing="-"),
            }
            rows.append(row)
    return rows


def _final(spread: Plain, *, several: bool) -> str:
    if spread["mean"] is None:
        lost = spread["seeds"] - spread["finite"]
        return f"NaN ({lost} of {spread['seeds']})" if several else "NaN"
    if not several or spread["deviation"] is None:
        return loss_words(spread["mean"], 4)
    return f"{loss_words(spread['mean'], 4)} +- {spread['deviation']:.4f}"


def _mean(runs: Sequence[Plain], name: str, words: Any, nothing: str = "NaN") -> str:
    known = [run[name] for run in runs if run[name] is not None]
    return str(words(sum(known) / len(known))) if known else nothing


def _range(runs: Sequence[Plain], name: str) -> str:
    least, most = min(run[name] for run in runs), max(run[name] for run in runs)
    return f"{least}" if least == most else f"{least} to {most}"
