"""The demo while it runs: News enters; a bar an arm on a terminal, else now and then a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradilocks.cli.demo_text import clock, describe_step, loss_words
from gradilocks.demo.crew import News
from gradilocks.demo.values import Job, Result, Step
from gradilocks.report import power

__all__ = ["State", "show"]

SECONDS_BETWEEN_LINES = 10.0
BAR = 12


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
    def label(self) -> str:
        """The arm, as a table names it."""
        return self.job.arm.title

    def left(self, now: float) -> float | None:
        """Seconds until it is done, by its own pace; None before the first steps."""
        if self.result is not None or self.began is None or self.step is None:
            return None
        return (now - self.began) / self.step.number * (self.job.setup.steps - self.step.number)


class State:
    """All jobs, and how far they are."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.rows = [Row(job) for job in jobs]
        self.began = time.monotonic()

    @property
    def results(self) -> list[Result]:
        """Of the jobs that are done."""
        return [row.result for row in self.rows if row.result is not None]

    def take(self, news: News) -> Row:
        """Brings a row up to date; returns it."""
        row = next(row for row in self.rows if row.job == news.job)
        if row.began is None:
            row.began = time.monotonic()
        if news.step is not None:
            row.step = news.step
            row.skipped += news.step.skipped
            row.clipped += news.step.clipped and not news.step.skipped
        if news.result is not None:
            row.result = news.result
        return row

    def so_far(self, folder: Path) -> str:
        """Says in one line what an interrupted demo has done."""
        several = len({row.job.seed for row in self.rows}) > 1
        parts = []
        for row in self.rows:
            name = f"{row.job.arm.name}-{row.job.seed}" if several else row.job.arm.name
            if row.result is not None:
                parts.append(f"{name} done, loss {loss_words(row.result.final_loss)}")
            elif row.step is not None:
                parts.append(f"{name} at step {row.step.number} of {row.job.setup.steps}")
        if not parts:
            return "before the first step."
        after = clock(time.monotonic() - self.began)
        return (
            f"after {after}: {'; '.join(parts)}. The run files are in {folder}; no page and no "
            "summary was written."
        )


@contextmanager
def show(console: Console, state: State) -> Iterator[Callable[[News], None]]:
    """Yields the function that is called after each piece of news."""
    if not console.is_terminal or console.is_dumb_terminal or console.quiet:
        yield _line_writer(console, state)
        return
    with Live(
        console=console,
        get_renderable=lambda: _picture(state),
        refresh_per_second=5,
        transient=True,
    ):
        yield lambda news: None


def _picture(state: State) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    several = len({row.job.seed for row in state.rows}) > 1
    table.add_column("arm and seed" if several else "arm", no_wrap=True)
    table.add_column("", width=BAR)
    for name in ("step", "loss", "scale", "clipped", "skipped", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    now = time.monotonic()
    for row in state.rows:
        label = f"{row.label} {row.job.seed}" if several else row.label
        table.add_row(Text(label), *_cells(row, now), style="" if row.began else "dim")
    done = len(state.results)
    words = f"{done} of {len(state.rows)} done, {clock(now - state.began)}"
    return Group(table, Text(words, style="dim"))


def _cells(row: Row, now: float) -> list[RenderableType]:
    step, steps = row.step, row.job.setup.steps
    if step is None:
        waits = "starts" if row.began else "waits"
        return [ProgressBar(total=steps, completed=0, width=BAR), Text(waits)]
    done = row.result is not None
    left = row.left(now)
    lost = step.loss != step.loss
    return [
        ProgressBar(total=step.number if done else steps, completed=step.number, width=BAR),
        Text(f"{step.number}"),
        Text(loss_words(step.loss), style="red" if lost else ""),
        Text(power(step.scale)),
        Text(f"{row.clipped}"),
        Text(f"{row.skipped}", style="red" if row.skipped else ""),
        Text("done", style="green") if done else Text("" if left is None else clock(left)),
    ]


def _line_writer(console: Console, state: State) -> Callable[[News], None]:
    """Writes the first step, each tenth of an arm, its end, and the step after a long silence."""
    written = time.monotonic()
    width = max(len(_name(row.job)) for row in state.rows)

    def write(news: News) -> None:
        nonlocal written
        row = next(row for row in state.rows if row.job == news.job)
        steps, name = news.job.setup.steps, f"{_name(news.job):<{width}}"
        now = time.monotonic()
        if news.result is not None:
            why = f"; stopped: {news.result.stopped}" if news.result.stopped else ""
            console.print(
                f"{name}  done in {news.result.seconds:.1f} s, final loss "
                f"{loss_words(news.result.final_loss)}{why}",
                soft_wrap=True,
                markup=False,
            )
        elif news.step is not None and (
            news.step.number == 1
            or news.step.number % max(1, steps // 10) == 0
            or now - written > SECONDS_BETWEEN_LINES
        ):
            place = f"step {news.step.number:>{len(str(steps))}}/{steps}"
            said = describe_step(news.step, clipped=row.clipped, skipped=row.skipped)
            console.print(f"{name}  {place}  {said}", soft_wrap=True, markup=False)
        else:
            return
        written = now

    return write


def _name(job: Job) -> str:
    return f"{job.arm.name}-{job.seed}"
