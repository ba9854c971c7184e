"""``gradilocks compare``: run files enter, a table of what differs between them is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradilocks.cli.options import flag, latest_runs, run_file
from gradilocks.cli.terminal import forgive_encoding, held_interrupts, printable, read_with_bar
from gradilocks.report import short_name
from gradilocks.runfile import format_scale

if TYPE_CHECKING:
    from gradilocks.report import Comparison, Loss, OwnNumber, Parting, Summary

NAMES_SHOWN = 5
# Characters of a name in a cell of the table.
LONGEST_NAME = 44


def compare(
    paths: Annotated[
        list[Path] | None,
        run_file("[RUN.jsonl]...", help="Two run files or more. Default: the two latest in runs/."),
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print every number as JSON instead of a table.")
    ] = False,
) -> None:
    """Compare runs: how they ran, and what came of it.

    The first file is the one that the losses of the others are compared with, step by step.

    \b
    Examples:
      gradilocks compare
      gradilocks compare runs/a.jsonl runs/b.jsonl
      gradilocks compare runs/*.jsonl --json > all.json
    """
    paths = paths or latest_runs(2)
    if len(paths) < 2:
        raise typer.BadParameter(
            f"expected two run files or more, got one: {paths[0]}.", param_hint="'RUN.jsonl'"
        )
    from gradilocks.report import compare as compare_runs

    forgive_encoding()
    comparison = compare_runs([read_with_bar(path) for path in paths])
    if as_json:
        print(json.dumps(comparison.to_plain(), indent=2, allow_nan=False))
    else:
        show(comparison)


def show(comparison: Comparison) -> None:
    """Prints the table, then where the losses part and which parameters only some runs have."""
    with held_interrupts():
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

    terminal = sys.stdout.isatty()
    # A pipe has no width: let every cell stand in full.
    width = None if terminal else 40 + 60 * len(comparison.summaries)
    console = Console(force_terminal=terminal, highlight=False, width=width)
    names = short_names([summary.path for summary in comparison.summaries])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in names:
        table.add_column(escape(name), overflow="fold")
    for title, values in rows(comparison):
        differs = any(value != values[0] for value in values)
        table.add_row(escape(title), *map(escape, values), style=None if differs else "dim")
    console.print(table)
    for sentence in sentences(comparison, names):
        console.print(printable(sentence), markup=False, soft_wrap=not terminal)


def rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The rows of the table: a title, and one cell a run; a number that no run has is left out."""
    found = [
        (name, ["-" if value is None else printable(value) for value in values])
        for name, values in comparison.what_ran.items()
    ]
    for title, cell in _NUMBERS.items():
        cells = [cell(summary) for summary in comparison.summaries]
        if any(cells):
            found.append((title, [each or "-" for each in cells]))
        if title == "clipped":
            found += _loss_rows(comparison.summaries)
            found += _own_rows(comparison.summaries)
    return found


def sentences(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Where the losses part, and what only some of the models have."""
    found = [
        f"{name}: {_parted(parting, names[0])}"
        for name, parting in zip(names[1:], comparison.partings, strict=True)
    ]
    for name, missing in zip(names, comparison.missing, strict=True):
        if missing:
            more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
            named = ", ".join(missing[:NAMES_SHOWN])
            found.append(f"{name} lacks {len(missing)} of the parameters: {named}{more}")
    return found


def short_names(paths: Sequence[str]) -> list[str]:
    """The names of files, or their whole paths where two have the same name."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(set(paths)) else list(paths)


def _parted(parting: Parting, first: str) -> str:
    if not parting.shared:
        return f"no step whose loss both it and {first} know"
    if parting.step is None:
        return f"the losses equal those of {first} at all {parting.shared:,} shared steps"
    return (
        f"the losses differ from step {parting.step:,} on: "
        f"{_apart(parting.other, parting.first)}, against {_apart(parting.first, parting.other)} "
        f"in {first}"
    )


def _apart(loss: float | None, other: float | None) -> str:
    """A loss with as many digits as it takes to tell it from the other."""
    if loss is None:
        return "NaN or Inf"
    if other is None:
        return f"{loss:.5g}"
    digits = next(n for n in range(5, 18) if n == 17 or f"{loss:.{n}g}" != f"{other:.{n}g}")
    return f"{loss:.{digits}g}"


def _loss_rows(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    """Of each optimizer: its last loss and its least, and how often it was not finite."""
    indices = sorted({index for summary in summaries for index in summary.losses})
    for index in indices:
        of = f" of optimizer {index}" if len(indices) > 1 else ""
        losses = [summary.losses.get(index) for summary in summaries]
        for title, cell in _LOSSES.items():
            if title != "NaN or Inf" or any(loss and loss.nonfinite for loss in losses):
                yield f"loss{of}, {title}", [cell(loss) if loss else "-" for loss in losses]


def _own_rows(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    """Of each of the user's own numbers: the last, and between what it has been."""
    for name in dict.fromkeys(name for summary in summaries for name in summary.logged):
        own = [summary.logged.get(name) for summary in summaries]
        yield f"{printable(name)}, last", [_last_own(each) if each else "-" for each in own]
        if any(each and each.values > 1 for each in own):
            yield "  least, largest", [_ends(each) if each else "-" for each in own]


def _last_own(own: OwnNumber) -> str:
    value = "NaN or Inf" if own.last is None else f"{own.last:.5g}"
    return f"{value} at step {own.last_at:,}"


def _ends(own: OwnNumber) -> str:
    if own.least is None or own.most is None:
        return "-"
    return f"{own.least:.5g} at {own.least_at:,}, {own.most:.5g} at {own.most_at:,}"


def _last_loss(loss: Loss) -> str:
    if loss.nonfinite_since is not None:
        return f"NaN since step {loss.nonfinite_since:,}"
    return "-" if loss.last is None else f"{loss.last:.5g}"


_LOSSES: dict[str, Callable[[Loss], str]] = {
    "first": lambda loss: "-" if loss.first is None else f"{loss.first:.5g}",
    "last": _last_loss,
    "least": lambda loss: (
        "-" if loss.least is None else f"{loss.least:.5g} at step {loss.least_at:,}"
    ),
    "NaN or Inf": lambda loss: f"{loss.nonfinite:,} step{'s' if loss.nonfinite != 1 else ''}",
}


def _ended(summary: Summary) -> str:
    ended = summary.status if summary.error is None else printable(summary.error)
    return f"{ended}, in NaN or Inf" if summary.bad_endings else ended


def _likely(summary: Summary) -> str:
    for name, count in summary.likely.items():
        return f"{short_name(printable(name), LONGEST_NAME)} ({count:,} x)"
    return "not known" if summary.culprits else ""


def _scales(summary: Summary) -> str:
    scale = summary.scale
    ends = (scale.least, scale.most) if scale else ()
    return " to ".join(dict.fromkeys(map(format_scale, ends)))


# What stands in the table for each run; '' where it does not know.
_NUMBERS: dict[str, Callable[[Summary], str]] = {
    "ended": _ended,
    "steps": lambda s: f"{s.steps:,}",
    "skipped": lambda s: f"{s.skipped:,} ({s.skipped / s.steps:.2%})" if s.skipped else "0",
    "  why": lambda s: ", ".join(f"{why} {n:,}" for why, n in s.reasons.items()),
    "  likely from": _likely,
    "taken with NaN": lambda s: f"{s.taken_nonfinite:,}" if s.taken_nonfinite else "",
    "clipped": lambda s: "" if s.clip_rate is None else f"{s.clip_rate:.2%}",
    "norm, median": lambda s: f"{s.norm.median:.4g}" if s.norm else "",
    "norm, 99 %": lambda s: f"{s.norm.p99:.4g}" if s.norm else "",
    "norm, largest": lambda s: f"{s.norm.most:.4g}" if s.norm else "",
    "scale": _scales,
    "steps/s": lambda s: "" if s.steps_per_second is None else f"{s.steps_per_second:.4g}",
    "parameters": lambda s: f"{s.parameters:,} in {s.tensors:,} tensors",
}
