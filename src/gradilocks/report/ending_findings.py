"""Findings about how a run ended, and in which module NaN or Inf arose, if it was traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradilocks.report.formatting import clean, count, duration, sentence_case
from gradilocks.report.health import Finding
from gradilocks.report.tracks import came_late
from gradilocks.runfile import Run, Trace, describe_damage, has_bad_gradients, is_bad

MOST_TRACES = 3  # More of them tell less and less.


def ending(run: Run) -> Iterator[Finding]:
    """Says so if a run did not end by itself and well."""
    end = run.end
    if end is None:
        torn = f" {count(run.torn, 'torn line')} left out." if run.torn else ""
        told = "The run was killed, or it is still going: this report shows what was written."
        yield Finding("no-end", "note", "The run file has no end", f"{told}{torn}")
    elif end.status == "error":
        what = clean(end.error) if end.error else "an error without a message"
        told, title = f"After {duration(end.time)}: {what}", "The run ended in an error"
        yield Finding("ended-in-error", "problem", title, told, {"exit": end.exit})
    elif end.status == "interrupted":
        told = f"Somebody stopped it after {duration(end.time)}."
        yield Finding("interrupted", "note", "The run was interrupted", told)
    elif end.status != "finished":
        title = f"The run exited with status {end.exit}"
        told = f"It ended itself after {duration(end.time)} and said that something was wrong."
        yield Finding("exit-status", "warning", title, told, {"exit": end.exit})
    if run.damaged:
        told = (
            f"{sentence_case(clean(describe_damage(run.damaged)))}. What stood there is missing "
            "here; the rest is as it was written."
        )
        title = f"The run file is damaged: {count(len(run.damaged), 'line')} left out"
        yield Finding("damaged-lines", "note", title, told, {"lines": len(run.damaged)})
    if any(step.of_rank for step in run.steps):
        rank, ranks = run.header.rank, run.header.ranks
        which = "The" if all(step.of_rank for step in run.steps) else "Some"
        title = f"{which} numbers are those of rank {rank}, not of the whole model"
        told = (
            f"{count(ranks, 'rank')} trained, and what this one holds is, or may be, a part of the "
            "model: norms, culprits and tensors are of that part. A GradientControl with record= "
            "tells of the whole at every step."
        )
        yield Finding("of-one-rank", "note", title, told, {"rank": rank, "ranks": ranks})
    if run.resumed:
        sessions = len(run.resumed) + 1
        title = f"The file holds {count(sessions, 'session')}"
        told = "The run was resumed into the same file; the plots show one session after another."
        yield Finding("resumed", "note", title, told, {"sessions": sessions})


# What a trace has found, by its `where`: a title without the step.
TITLES = {
    "module": "{what} first appeared in {who}",
    "input": "{what} was in the input data",
    "before": "{what} first appeared between modules, before {who}",
    "outside": "{what} came into {who} from outside",
    "after": "{what} first appeared in the loss, or after {who}",
    "gradients": "{what} came back in gradients, but in no module",
}


def traced(run: Run) -> Iterator[Finding]:
    """Repeats what `gradilocks.trace` found, what was found again only once.

    A trace that began after NaN or Inf had gone into the weights names no origin: it saw what was
    left of one. It is noted, without a module.
    """
    alike: dict[tuple[str, str, str, str], list[Trace]] = {}
    late: list[Trace] = []
    buffers: list[Trace] = []
    for trace in run.traces:
        if trace.where == "buffers":
            buffers.append(trace)
        elif came_late(run, trace):
            late.append(trace)
        else:
            key = (trace.phase, trace.module, trace.what, trace.where)
            alike.setdefault(key, []).append(trace)
    for traces in list(alike.values())[:MOST_TRACES]:
        first = traces[0]
        title = TITLES.get(first.where, "{what} appeared").format(
            what=clean(first.what), who=clean(first.module) or "the model"
        )
        yield Finding(
            "traced",
            "warning",
            f"At step {first.step:,} {title}",
            f"{_told(traces)}{_what_came_before(run, first)}",
            {"phase": clean(first.phase), "class": clean(first.kind), "times": len(traces)},
            step=first.step,
            culprit=(first.module or None) if first.where == "module" else None,
        )
    if buffers:
        yield _buffers(buffers)
    if late:
        yield _too_late(run, late)


def _told(traces: Sequence[Trace]) -> str:
    """What the first of alike traces found, and how often it was found again."""
    again = f" Found {count(len(traces), 'time')}, up to step {traces[-1].step:,}."
    return f"{clean(traces[0].text).rstrip('.')}.{again if traces[1:] else ''}"


def _buffers(found: Sequence[Trace]) -> Finding:
    first = found[0]
    who = clean(first.module) or "the model"
    title = f"Buffers of {who} held {clean(first.what)} before step {first.step:,} used them"
    told = (
        f"{_told(found)} A skip keeps what is bad out of the weights, and not out of what forward "
        "itself writes, such as the running statistics of a BatchNorm. Write them anew "
        "(`reset_running_stats()`), or load them from a checkpoint."
    )
    return Finding(
        "buffers-not-finite",
        "problem",
        title,
        told,
        {"class": clean(first.kind), "times": len(found)},
        step=first.step,
    )


def _too_late(run: Run, late: Sequence[Trace]) -> Finding:
    first = late[0]
    seen = f"At step {first.step:,} they were so already: what it saw there is no origin."
    seen = _told(late[:1]) if first.damaged else seen
    evidence = {"times": len(late)}
    if any(has_bad_gradients(s) and not s.skipped and s.time <= first.time for s in run.steps):
        title = "The trace began after the weights were spoilt"
        told = (
            f"{seen} A trace follows the step after a bad one, so that one must have been skipped: "
            "train under a scaler or a GradientControl, or arm a trace by hand before the first "
            "bad step (docs/finding-the-culprit.md)."
        )
        return Finding("traced-too-late", "note", title, told, evidence, step=first.step)
    title = "Weights were NaN or Inf, and no bad step had put it there"
    told = (
        f"{seen} No step with NaN or Inf in its gradients was taken before: the script wrote it, "
        "it was loaded, or a step with finite gradients overflowed. Go on from finite weights."
    )
    return Finding("weights-not-finite", "problem", title, told, evidence, step=first.step)


def _what_came_before(run: Run, trace: Trace) -> str:
    """Tells of bad steps that the trace did not see: it begins after the first."""
    earlier = [step for step in run.steps if step.time < trace.time]
    bad = [place for place, step in enumerate(earlier) if is_bad(step)]
    if not bad:
        return ""
    first = earlier[bad[0]]
    # A loss that was not finite and one that was do not have one cause.
    alike = (first.loss is None) == (trace.phase == "forward")
    if alike and len(bad) == len(earlier) - bad[0]:
        return f" Step {first.step:,} was bad before it, likely for the same reason."
    return (
        f" The first bad step was {first.step:,}: it came before the trace began, and where its "
        "NaN or Inf arose was not seen."
    )
