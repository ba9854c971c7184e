"""How a run ended, and where its values first turned non-finite, if that was traced."""

from __future__ import annotations

from collections.abc import Iterator

from gradilocks.report.values import Finding
from gradilocks.report.words import clean, count, duration
from gradilocks.runfile import Run, Trace

MOST_TRACES = 3  # More of them tell less and less.


def ending(run: Run) -> Iterator[Finding]:
    """Says so if a run did not end by itself and well."""
    end = run.end
    if end is None:
        torn = f" {count(run.torn, 'torn line')} left out." if run.torn else ""
        yield Finding(
            "no-end",
            "note",
            "The run file has no end",
            f"The run was killed, or it is still going: this report shows what was written.{torn}",
        )
    elif end.status == "error":
        what = clean(end.error) if end.error else "an error without a message"
        yield Finding(
            "ended-in-error",
            "problem",
            "The run ended in an error",
            f"After {duration(end.time)}: {what}",
            {"exit": end.exit},
        )
    elif end.status == "interrupted":
        yield Finding(
            "interrupted",
            "note",
            "The run was interrupted",
            f"Somebody stopped it after {duration(end.time)}.",
        )
    elif end.status != "finished":
        yield Finding(
            "exit-status",
            "warning",
            f"The run exited with status {end.exit}",
            f"It ended itself after {duration(end.time)} and said that something was wrong.",
            {"exit": end.exit},
        )
    if run.resumed:
        yield Finding(
            "resumed",
            "note",
            f"The file holds {count(len(run.resumed) + 1, 'session')}",
            "The run was resumed into the same file; the plots show one session after another.",
            {"sessions": len(run.resumed) + 1},
        )


def traced(run: Run) -> Iterator[Finding]:
    """Repeats what `gradilocks.trace` found, what was found again only once."""
    alike: dict[tuple[str, str, str], list[Trace]] = {}
    for trace in run.traces:
        alike.setdefault((trace.phase, trace.module, trace.what), []).append(trace)
    for traces in list(alike.values())[:MOST_TRACES]:
        first = traces[0]
        where = clean(first.module) or "the model"
        place = "after" if " in the loss" in first.text else "in"
        again = f" Found {count(len(traces), 'time')}, up to step {traces[-1].step:,}."
        yield Finding(
            "traced",
            "warning",
            f"{clean(first.what)} first appeared {place} {where}",
            clean(first.text).rstrip(".") + "." + (again if traces[1:] else ""),
            {"phase": clean(first.phase), "class": clean(first.kind), "times": len(traces)},
            step=first.step,
            culprit=first.module,
        )
