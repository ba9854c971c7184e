"""``gradilocks watch``: a run file enters, a view of it that moves with the run is shown."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradilocks.cli.options import checked, flag, latest_runs, run_file
from gradilocks.cli.terminal import Interrupted, forgive_encoding, held_interrupts, printable, say
from gradilocks.report import clean
from gradilocks.runfile import Step, describe_damage, open_run_file, read_run

if TYPE_CHECKING:
    from rich.console import Console

    from gradilocks.cli.watch_view import Watched


def watch(
    path: Annotated[
        Path | None,
        run_file(
            "[RUN.jsonl]", help="The run file; it may not exist yet. Default: the latest in runs/."
        ),
    ] = None,
    once: Annotated[bool, flag("--once", "Show the run as it is now, and leave.")] = False,
    no_wait: Annotated[
        bool, flag("--no-wait", "If there is no such file, fail instead of waiting.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(
            parser=checked(float, lambda s: 0.05 <= s <= 3600, "seconds from 0.05 to 3600"),
            metavar="SECONDS",
            help="How often to look for something new.",
        ),
    ] = 1.0,
) -> None:
    """Watch a run while it goes on: loss, norm, scale, skips.

    On a terminal the view is redrawn until the run ends or Ctrl-C is pressed, which leaves the run
    alone. In a pipe it is plain lines: one for every skip, one for what the script has logged, and
    one whenever there are new steps.

    \b
    Examples:
      gradilocks watch
      gradilocks watch runs/a.jsonl --once
      gradilocks watch runs/a.jsonl | grep skipped:
    """
    forgive_encoding()
    if path is None:
        (path,) = latest_runs()
    with held_interrupts():
        from rich.console import Console

        from gradilocks.cli.watch_view import Watched, picture
    if once or no_wait:
        with open_run_file(path):
            pass  # says what is wrong with it
    watched = Watched(path)
    console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
    live = console.is_terminal and not console.is_dumb_terminal
    try:
        first = _wait_for_header(watched, once=once, every=every)
        if not live:
            _in_lines(watched, first, once=once, every=every)
        elif once:
            while watched.poll():
                pass
            console.print(picture(console, watched))
        else:
            _in_place(console, watched, every=every)
    except KeyboardInterrupt as interrupt:
        if watched.reader.header is None:
            raise Interrupted(f"while waiting for {path}.") from interrupt
        if live:  # leaving is what Ctrl-C is for, here
            console.print("No longer watching; the run was left alone.", style="dim")


def _wait_for_header(watched: Watched, *, once: bool, every: float) -> list[Step]:
    told = False
    path = watched.follower.path
    while True:
        steps = watched.poll()
        if watched.reader.header is not None:
            return steps
        if once:
            read_run(path)  # says what is missing
        if not told:
            what = "to begin" if os.path.exists(path) else "to be there"
            print(f"Waiting for {clean(path)} {what}. Ctrl-C stops waiting.", file=sys.stderr)
            told = True
        time.sleep(every)


def _in_place(console: Console, watched: Watched, *, every: float) -> None:
    from rich.live import Live

    from gradilocks.cli.watch_view import picture

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(picture(console, watched), refresh=True)
            ended = watched.reader.end is not None or watched.is_killed
            if ended and not watched.unread:
                return
            if not watched.unread:
                time.sleep(every)
            if not watched.poll() and watched.unread:
                time.sleep(every)  # half a line, and a very long one


def _in_lines(watched: Watched, steps: list[Step], *, once: bool, every: float) -> None:
    from gradilocks.cli.watch_view import (
        plain_end,
        plain_logs,
        plain_skips,
        plain_start,
        plain_status,
    )

    print(plain_start(watched), flush=True)
    if watched.reader.damaged:
        say(printable(describe_damage(watched.reader.damaged)))
    stepped: set[int] = set()
    while True:
        for line in (*plain_skips(watched), *plain_logs(watched)):
            print(line)
        stepped |= {step.optimizer for step in steps}
        if not steps or not (watched.unread or once):
            for line in plain_status(watched, stepped):
                print(line, flush=True)
            stepped.clear()
            if once or watched.reader.end is not None or watched.is_killed:
                if last := plain_end(watched):
                    print(last, flush=True)
                return
            time.sleep(every)
        steps = watched.poll()
