"""Findings about how a run ended, and what its file holds."""

from __future__ import annotations

from collections.abc import Iterator

from gradilocks.report.formatting import clean, count, duration, sentence_case
from gradilocks.report.health import Finding
from gradilocks.runfile import Run, describe_damage, describe_trace, state_without_end

# Of a run without an end, how it stands: a title and a sentence.
NO_END = {
    "running": ("The run is still going", "Its process runs."),
    "killed": ("The run was killed", "Its process is gone, and it has written no end."),
    "no end": ("The run file has no end", "The run was killed, or it is still going."),
}


def ending(run: Run) -> Iterator[Finding]:
    """Says so if a run did not end by itself and well."""
    end = run.end
    if end is None:
        torn = f" {count(run.torn, 'torn line')} left out." if run.torn else ""
        title, told = NO_END[state_without_end(run.process)]
        yield Finding("no-end", "note", title, f"{told} This report shows what was written.{torn}")
    elif end.status == "error":
        what = clean(end.error) if end.error else "an error without a message"
        told, title = f"After {duration(end.time)}: {what}", "The run ended in an error"
        yield Finding("ended-in-error", "problem", title, told, {"exit": end.exit})
    elif end.status == "interrupted":
        told = f"Somebody stopped it after {duration(end.time)}."
        yield Finding("interrupted", "note", "The run was interrupted", told)
    elif end.status == "exit" and run.header.settings.get("guard") == "stop" and end.exit == 70:
        last = run.steps[-1].step if run.steps else 0
        title = f"The run was stopped at step {last:,}, which had NaN or Inf"
        traces = [trace for trace in run.traces if trace.step == last]
        for trace in traces[:1]:
            where = describe_trace(trace, what="it")
            title += f": {clean(where)} ({trace.certainty})" if where else ""
        told = (
            f"`--guard stop` ended it after {duration(end.time)}. That step was not taken: "
            "parameters and optimizer state were those before it"
        )
        spoilt = any(trace.where == "parameters" for trace in traces)
        told += "." if spoilt else ", and a checkpoint of before it is good."
        yield Finding("stopped-by-guard", "problem", title, told, {"exit": end.exit})
    elif end.status != "finished":
        title = f"The run exited with status {end.exit}"
        said = f": {clean(end.error)}" if end.error else " and said that something was wrong."
        told = f"It ended itself after {duration(end.time)}{said}"
        yield Finding("exit-status", "warning", title, told, {"exit": end.exit})
    if end is not None and end.unwatched:
        last = max((step.step for step in run.steps), default=0)
        title = f"Nothing is known of the steps after {last:,}"
        told = (
            "The script went on when it could not be watched any more, by a failure of "
            "Gradilocks'; its terminal says which. What this report says is of the steps before."
        )
        yield Finding("unwatched", "warning", title, told, step=last)
    if end is not None and end.left_out:
        many, after = end.left_out, end.left_out_after or 0
        title = f"A loss of NaN or Inf was left out by the script {count(many, 'time')}"
        told = (
            f"The loss was NaN or Inf, the first time after step {after:,}, and no step took its "
            "gradients: the script has left them out by itself. They changed no weight; what makes "
            "them is there all the same, in the data or in the model."
        )
        evidence = {"passes": many}
        yield Finding("losses-left-out", "note", title, told, evidence, step=after)
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
    if run.superseded:
        many, back = len(run.superseded), sorted({each.step for each in run.resumes})
        title = f"{count(many, 'step')} of the file {'is' if many == 1 else 'are'} superseded"
        steps = ", ".join(f"{step:,}" for step in back[:5]) + (" and others" if back[5:] else "")
        told = (
            f"The run went on from an earlier step (after step {steps}), as from a checkpoint. "
            "What had come after it stays in the file, and is left out of plots, counts and "
            "findings: `gradilocks export --superseded` shows it."
        )
        yield Finding("superseded", "note", title, told, {"steps": many})
    if run.resumed:
        sessions = len(run.resumed) + 1
        title = f"The file holds {count(sessions, 'session')}"
        told = "The run was resumed into the same file; the plots show one session after another."
        yield Finding("resumed", "note", title, told, {"sessions": sessions})
