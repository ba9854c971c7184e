"""What ``gradilocks selftest`` shows: a row a check as it is done, what is wrong, a verdict.

A terminal also gets a line on what is running. That is drawn when somebody asks and by no thread,
because the process that shows it is forked. The words are ASCII, so that no encoding can fail on
them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from gradilocks.selftest import CheckResult

STYLES = {"ok": "green", "not tried": "dim"}
TITLES = {
    "kernels": "Kernels, beside plain arithmetic",
    "one process": "Each rank by itself, beside torch",
    "ranks": "All ranks together, beside one process",
}


class SelftestView:
    """Speaks on standard output; where it is quiet, of the verdict alone."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
        self._quiet = quiet
        self._group = ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,
            disable=quiet or not self._console.is_terminal or self._console.is_dumb_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While checks run."""
        with self._progress:
            yield

    def wait_for(self, what: str, done: int, of: int) -> None:
        """Says what is running now."""
        if not self._progress.task_ids:
            self._progress.add_task(what)
        self._progress.update(
            self._progress.task_ids[0], description=what, completed=done, total=of
        )
        self.refresh()

    def refresh(self) -> None:
        """Draws the line again."""
        if not self._progress.disable:
            self._progress.refresh()

    def introduce(self, about: Mapping[str, Any]) -> None:
        """Says what is tested, and on what."""
        count, versions, hardware = about["ranks"], about["versions"], about["hardware"]
        ranks = f"{count} rank{'s' if count > 1 else ''}"
        self._say(Text(f"Gradilocks {versions['gradilocks']}: {ranks} over {about['backend']}"))
        on = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['cores']} cores"
        used = [f"{name} {number}" for name, number in versions.items() if name != "gradilocks"]
        self._say(Text(f"{on}; {', '.join(used)}", style="dim"))
        for what in ("kernels", "host_waits"):
            self._say(Text(f"{what.replace('_', ' ')}: {about[what]}", style="dim"))

    def show(self, result: CheckResult) -> None:
        """A row for a check that is done."""
        if result.group != self._group:
            self._group = result.group
            self._say(Text(f"\n{TITLES[result.group]}", style="bold"))
        style = STYLES.get(result.state, "bold red")
        state = result.state if result.state in STYLES else result.state.upper()
        row = Text.assemble(("  " + state.ljust(10), style), result.name.ljust(30))
        if result.state == "not tried":
            row.append(result.why, style="dim")
        else:
            row.append(f"{result.seconds:6.1f} s")
            if "collectives" in result.numbers:
                row.append(f"   {_collectives(result.numbers)}", style="dim")
        self._say(row)

    def conclude(
        self,
        results: Sequence[CheckResult],
        sentence: str,
        *,
        seconds: float,
        written: str,
        well: bool,
    ) -> None:
        """What is wrong, check by check; the verdict; where the file is."""
        for result in results:
            if result.problems:
                self._say(Text(f"\n{result.name}: {result.state}", style="bold red"))
            for problem in result.problems:
                self._say(Text(f"  {problem}"))
        self._say("")
        ended = Text(f"{sentence} {seconds:.0f} s.", style="bold green" if well else "bold red")
        self._console.print(ended, soft_wrap=True)
        if written:
            self._say(
                Text(
                    f"{written} has all of it, for a bug report: versions and hardware, no paths "
                    "or host names."
                )
            )

    def _say(self, what: Any) -> None:
        if not self._quiet:
            self._console.print(what, soft_wrap=True)


def _collectives(numbers: Mapping[str, Any]) -> str:
    count = numbers["collectives"]
    if not count:
        return "no collective a step"
    return f"{count} collective{'s' if count > 1 else ''} a step, {numbers['bytes']:,} bytes a rank"
