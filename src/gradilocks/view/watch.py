"""Live view of a run file in the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradilocks.view.columns import Columns, Floats, columns, facts, summarize
from gradilocks.view.findings import verdict
from gradilocks.view.report import STYLES
from gradilocks.view.runfile import Run, check_format, follow, merge, rank_files
from gradilocks.view.text import clean, duration, number, scale_text

__all__ = ["Follower", "view", "watch"]

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Characters of a sparkline."""
QUIET = 15.0
"""Seconds without a new line after which the view shows the time since the last one."""
MAX_OPTIMIZERS = 3


class Follower:
    """Reads the files of a run incrementally."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[Path, tuple[Run, int]] = {}

    def poll(self) -> Run:
        """Reads the new lines of all ranks and returns the run.

        Raises:
            BadRunFile: the file cannot be read or is not a run file.
        """
        for path in [self.path, *rank_files(self.path)]:
            run, offset = self._runs.get(path, (Run(path), 0))
            records, end = follow(path, offset)
            if end < offset:  # The file was replaced.
                run, (records, end) = Run(path), follow(path, 0)
            run.add(records)
            self._runs[path] = run, end
        runs = [run for run, _ in self._runs.values()]
        if self._runs[self.path][1]:
            check_format(runs[0])
        return merge(runs)


def watch(path: Path | str, once: bool = False, *, console: Console | None = None, interval: float = 1.0) -> None:
    """Shows a run until it ends or Ctrl-C is pressed. Waits for a file that does not exist yet.

    Args:
        path: a run file.
        once: print the current state and return.
        console: the console to print to.
        interval: shortest time between updates, in seconds.

    Raises:
        BadRunFile: the file is not a run file, or with `once` cannot be read.
    """
    console = console or Console()
    follower = Follower(Path(path))
    if once:
        console.print(view(follower.poll()))
        return
    try:
        with Live(Text(f"waiting for {clean(path)}"), console=console, auto_refresh=False) as live:
            while True:
                begin = time.monotonic()
                if follower.path.exists():
                    run = follower.poll()
                    live.update(view(run), refresh=True)
                    if run.end is not None:
                        return
                # Summarizing a long run takes time: use at most a fifth of a core.
                time.sleep(max(interval, 4 * (time.monotonic() - begin)))
    except KeyboardInterrupt:
        return


def view(run: Run) -> RenderableType:
    """The current state of a run."""
    return Group(*_lines(run))


def _lines(run: Run) -> Iterator[RenderableType]:
    yield Text(clean(run.name), "bold")
    all_steps, shown = columns(run), ""
    if all_steps:
        result = verdict(run)
        shown = result.text
        yield Text(shown, STYLES[result.severity])
    else:
        yield Text("no steps yet" if run.end is None else "no step was recorded")
    for steps in sorted(all_steps, key=lambda steps: -len(steps))[:MAX_OPTIMIZERS]:
        yield Text("")
        if len(all_steps) > 1:
            yield Text(steps.label, "bold")
        yield _table(run, steps)
    if run.logs:
        latest = {name: value for log in run.logs for name, value in log["values"].items()}
        yield Text("   ".join(f"{clean(name)} {number(value)}" for name, value in latest.items()), "dim")
    for (step, _, _), culprit in sorted(run.culprits.items())[-3:]:
        text = clean(culprit.get("text", ""))
        if text not in shown:
            yield Text(f"step {step:,}: {text}")
    quiet = time.time() - run.last_time
    if run.end is not None:
        yield Text(f"status: {clean(run.end.get('status', 'finished'))}", "dim")
    elif run.last_time and quiet > QUIET:
        yield Text(f"no update for {duration(quiet)}", "yellow")


def _table(run: Run, steps: Columns) -> Table:
    """The last values with sparklines, then the main numbers."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(Text("step", "dim"), f"{steps.step[-1]:,}", "")
    # The norm is NaN if it was not recorded, or if the gradients contain NaN. Only the latter is shown.
    for name, values, text_of in (
        ("loss", steps.loss[steps.has_loss], number),
        ("norm", steps.norm[~np.isnan(steps.norm) | steps.nonfinite], number),
        ("scale", steps.scale[~np.isnan(steps.scale)], scale_text),
        ("learning rate", steps.lr[~np.isnan(steps.lr)], number),
    ):
        if len(values):
            table.add_row(Text(name, "dim"), text_of(values[-1]), sparkline(values))
    shown = facts(run, summarize(run, steps))
    for name in ("lowest loss", "typical norm", "skipped", "clipped", "steps/s", "duration"):
        if name in shown:
            table.add_row(Text(name, "dim"), shown[name], "")
    return table


def sparkline(values: Floats, width: int = WIDTH) -> str:
    """Bars for the medians of `width` windows; a space where a window has no finite value."""
    medians = [
        float(np.median(part[np.isfinite(part)])) if np.isfinite(part).any() else np.nan
        for part in np.array_split(values, max(1, min(width, len(values))))
    ]
    low, high = np.nanmin([*medians, np.inf]), np.nanmax([*medians, -np.inf])
    if not low < high:
        return ""
    return "".join(" " if np.isnan(m) else BARS[round((m - low) / (high - low) * (len(BARS) - 1))] for m in medians)
