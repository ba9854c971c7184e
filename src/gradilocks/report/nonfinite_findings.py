"""Findings about NaN and Inf: where it arose, whether it reached the weights, what to do then.

They reason from the first bad step. One event is one finding: what a trace saw of a step, what its
gradients show and what became of the loss stand in the finding about that step. A trace counts more
than gradients, which are "likely" at most, and only at steps before which nothing bad had gone into
the weights; where nothing tells, the sentence says that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gradilocks.report.formatting import clean, count, listed, number, sentence_case
from gradilocks.report.health import Finding
from gradilocks.report.tracks import ANOTHERS, Track, came_late
from gradilocks.runfile import (
    FORWARD_OR_LOSS,
    Origin,
    Run,
    Spoilt,
    Trace,
    describe_trace,
    describe_weights,
    is_bad,
    on_ranks,
)

# Of a checkpoint, where a step before the first that is known to be bad may have spoilt it.
SOUND = " whose weights are finite"
NAMED = ("parameter", "ranks")  # Origins that name a parameter.
MOST_TRACES = 3  # More of them tell less and less.
# Three, and one step in a hundred, lost to NaN are no single event any more.
COUNTABLE = 3
FEW_NAN = 0.01
# The largest number of the formats that overflow soon; of the others, at least.
LARGEST = {"float16": 65504.0, "float8_e5m2": 57344.0, "float8_e4m3fn": 448.0}
FLOAT32 = 3e38
# Sums and products inside a module make numbers larger, seldom by more.
FAR_BELOW = 1000.0
GUARDED = "`gradilocks run --guard skip`, or a GradientControl, would have skipped it"


def taken_though_nonfinite(track: Track) -> Iterator[Finding]:
    """Says so if NaN or Inf reached the weights, and what the first such step itself showed."""
    places = track.taken
    if not places or spoilt_by_another(track):
        return
    first = places[0]
    step = track.steps[first].step
    bad = {*track.nonfinite, *track.lost}
    again = next((i for i in range(first + 1, len(track.steps)) if i not in bad), None)
    more = f" So {'was' if len(places) == 2 else 'were'} {len(places) - 1:,} after it."
    if again is None:
        spoilt = Spoilt(step, track.steps[first].loss is not None)
        ranks = _ranks_at(track, [first])
        title = f"The weights are spoilt {spoilt}{f', by a loss{ranks}' if ranks else ''}"
        then = "What follows comes from that and tells nothing new. " if places[1:] else ""
        cure = f"Go back to a checkpoint before step {step:,}{'' if spoilt.surely else SOUND}. "
    else:
        title = f"{count(len(places), 'step')} taken with NaN or Inf in the gradients"
        then = (
            f"At step {track.steps[again].step:,} all gradients were finite again: the script "
            "mended them, weights were loaded anew, or those that are spoilt were not used there. "
        )
        cure = f"Look at the weights before you trust any that were saved after step {step:,}. "
    yield Finding(
        "taken-though-nonfinite",
        "problem",
        named(title, track, [first]),
        f"Step {step:,} was taken with NaN or Inf in the gradients.{more if places[1:] else ''} "
        f"{where_it_arose(track, [first])}{_rate_before(track, first)}{_lost_with_it(track)}{then}"
        f"{cure}{_guarded(track, first)}{by_trace(track, [first])}".rstrip(),
        {"steps": len(places)},
        step=step,
        culprit=likely_culprit(track, [first]),
    )


def weights_not_finite(track: Track) -> Iterator[Finding]:
    """Says so if a trace found NaN or Inf in the weights that no bad step had put there.

    All that is bad from there on comes of it: the losses, and the steps that were skipped.
    """
    trace = track.damaged
    if trace is None:
        return
    bad = [i for i in sorted({*track.nonfinite, *track.lost}) if track.time[i] >= trace.time]
    first = bad[0] if bad else len(track.steps)
    seen = f"At step {trace.step:,} they were so already: what a trace saw there is no origin."
    lost = track.bad.lost_from
    skipped = sum(track.steps[i].skipped for i in bad)
    told = f"{_sentence(trace) if trace.damaged else seen} "
    told += _rate_before(track, first) or (
        "No step with NaN or Inf in its gradients was taken before: the script wrote it, it was "
        "loaded, or a step with finite gradients put it there, by its learning rate, by the "
        "optimizer's state, by a clip or a weight decay that was not finite, or by an overflow. "
    )
    if lost is not None and lost > 0:
        told += (
            f"The loss is NaN or Inf from step {track.steps[lost].step:,} on; it was "
            f"{_before(track, lost)} before. "
        )
    if skipped:
        told += (
            f"{count(skipped, 'step')} {'was' if skipped == 1 else 'were'} skipped since: that "
            "does not mend weights, and a guard, which looks at gradients, could not keep it out. "
        )
    told += "Go on from a checkpoint whose weights are finite."
    words = describe_weights(trace)
    title = f"{sentence_case(clean(words))}, and no bad step had put it there"
    step = track.steps[first].step if bad else trace.step
    yield Finding("weights-not-finite", "problem", title, told, {"bad steps": len(bad)}, step=step)


def spoilt_by_another(track: Track) -> bool:
    """Whether NaN or Inf reached these weights from another optimizer's: no event of its own."""
    return bool(track.taken) and track.spoilt[track.taken[0]] == ANOTHERS


def _guarded(track: Track, first: int) -> str:
    """What a guard would have done, which looks at gradients; '' if that had come too late."""
    traces = _traces_at(track, [first])
    if any(trace.where == "grown" for trace in traces) or _rate_before(track, first):
        return ""
    seen = any(trace.certainty != "unknown" for trace in traces)
    surely = seen or track.steps[first].loss is not None
    return f"{GUARDED}{'' if surely else ': that helps if the weights were finite before it'}. "


def _rate_before(track: Track, first: int) -> str:
    """Says so if a step before a bad one was taken with a learning rate that was not finite."""
    taken = [i for i in track.without_rate if i < first and not track.steps[i].skipped]
    if not taken:
        return ""
    step = track.steps[taken[0]].step
    return (
        f"The learning rate was NaN or Inf at step {step:,}: a step with it makes NaN or Inf of "
        "whatever weight it changes. Look at the schedule. "
    )


def _lost_with_it(track: Track) -> str:
    """What became of the loss, if NaN or Inf in the weights took it along."""
    since = track.bad.lost_from
    if since is None or track.spoilt_at(since) is None:
        return ""
    step = track.steps[since].step
    if since == 0:
        return "No step had a finite loss. "
    ranks, before = _ranks_at(track, range(since, len(track.steps))), _before(track, since)
    return f"The loss is NaN or Inf{ranks} from step {step:,} on; it was {before} before. "


def _before(track: Track, place: int) -> str:
    """The last finite loss before a step."""
    known = [loss for loss in track.loss[:place] if loss == loss]
    return number(known[-1]) if known else "not known"


def nan_culprits(track: Track) -> Iterator[Finding]:
    """Tells of skipped steps with NaN at a scale that cannot be the cause."""
    places = nan_places(track)
    if not places:
        return
    step = track.steps[places[0]].step
    # Under a scale that went on, single ones cost their steps and no more.
    many = len(places) >= COUNTABLE and len(places) > FEW_NAN * len(track.steps)
    bearable = not many and all(track.scale[i] > 1 for i in places)
    scale = (
        f", where the scale was {track.scale[places[0]]:g}: it is not what made them"
        if track.scaled
        else ""
    )
    yield Finding(
        "nan",
        "warning" if bearable else "problem",
        named(f"NaN in the gradients of {count(len(places), 'step')}", track, places),
        f"First at step {step:,}{scale}. {_skipped(places)}{where_it_arose(track, places)}Look for "
        "a division by zero, the logarithm or root of 0, bad inputs, or a learning rate that blew "
        f"up the weights. {by_trace(track, places)}".rstrip(),
        {"steps": len(places)},
        step=step,
        culprit=likely_culprit(track, places),
    )


def nan_places(track: Track) -> list[int]:
    """Skipped steps with NaN in the gradients that no smaller scale would have cured."""
    traced = _traced_nan(track)
    # A scaled overflow often turns into NaN on its way back (Inf - Inf in a softmax). At a scale
    # of 1 or less there is no such excuse.
    lost = set(track.lost)  # A loss that was NaN itself explains them.
    places = [
        i
        for i in track.nonfinite
        if track.steps[i].nan > 0
        and track.steps[i].skipped  # `taken_though_nonfinite` tells of the others.
        and not track.scale[i] > 1  # Nor is a scale that is not known, which is NaN.
        and i not in lost
    ]
    after = range(places[-1] + 1, len(track.steps)) if places else ()
    if any(track.scale[i] < 1 and not track.steps[i].skipped for i in after):
        return traced  # A scale smaller still has cured it.
    return sorted({*places, *traced})


def _traced_nan(track: Track) -> list[int]:
    """Skipped steps at which a trace saw a module make NaN of finite values, under a scale that
    cannot be the cause.

    Where a scale is too large, Inf comes first. Inside a module that may be hidden: so a scale at
    which a step was taken before, or values far below the largest of their format.
    """
    lost, found, borne = set(track.lost), [], 0.0
    for place, step in enumerate(track.steps):
        if not step.skipped:
            borne = max(borne, track.scale[place])
        trace = track.traces.get(place)
        if not step.skipped or place in lost or trace is None or track.spoilt[place]:
            continue
        whole = trace.certainty == "certain" and _names_a_module(trace) and trace.what == "NaN"
        if whole and step.nan and (track.scale[place] <= borne or _far_from_overflow(trace)):
            found.append(place)
    return found


def _far_from_overflow(trace: Trace) -> bool:
    """Whether all that went in was finite and far below the largest number of its format."""
    sizes = [
        (each.get("largest"), LARGEST.get(str(each.get("dtype")), FLOAT32)) for each in trace.inputs
    ]
    return bool(sizes) and all(
        isinstance(size, (int, float)) and size <= most / FAR_BELOW for size, most in sizes
    )


def loss_not_finite(track: Track) -> Iterator[Finding]:
    """Says where the loss itself was NaN or Inf: for good, or at single steps.

    Where it went into the weights, `taken_though_nonfinite` tells of it.
    """
    since = track.bad.lost_from
    if since is not None and track.spoilt_at(since) is None:
        yield _never_finite_again(track, since)
    lost = [place for place in track.lost if since is None or place < since]
    # Gradients that were finite all the same have spoilt nothing.
    harmless = {i for i in lost if not track.steps[i].skipped}.difference(track.taken)
    if harmless and since is None:
        first = track.steps[min(harmless)].step
        at = count(len(harmless), "step")
        title = f"The loss was NaN or Inf{_ranks_at(track, harmless)} at {at}"
        told = (
            f"The first was step {first:,}. The gradients were finite all the same, so the weights "
            "are not spoilt by it."
        )
        evidence = {"steps": len(harmless)}
        yield Finding("loss-not-finite", "problem", title, told, evidence, step=first)
    skipped = [place for place in lost if track.steps[place].skipped]
    if skipped:
        first = track.steps[skipped[0]].step
        where = _ranks_at(track, skipped)
        title = f"The loss itself was NaN or Inf{where} at {count(len(skipped), 'step')}"
        told = (
            f"First at step {first:,}. {_skipped(skipped)}{where_it_arose(track, skipped)}"
            f"{_no_scale(track)}ook at the batches there, and at what the loss divides by or "
            f"takes the logarithm of. {by_trace(track, skipped)}"
        )
        rates: dict[str, float] = {"steps": len(skipped), "share": len(skipped) / len(track.steps)}
        culprit = likely_culprit(track, skipped)
        yield Finding(
            "loss-nonfinite-steps",
            "warning",
            named(title, track, skipped),
            told,
            rates,
            step=first,
            culprit=culprit,
        )


def _never_finite_again(track: Track, since: int) -> Finding:
    """The loss ended as NaN or Inf, and the weights are not spoilt."""
    step, here = track.steps[since].step, range(since, len(track.steps))
    gone = count(len(here), "step")
    evidence: dict[str, float] = {"steps": len(here)}
    culprit = None
    if since:
        evidence["last loss"] = track.loss[since - 1]
        title = f"The loss is not finite{_ranks_at(track, here)} from step {step:,} on"
        told = f"It was {_before(track, since)} just before and has been NaN or Inf for {gone}. "
    else:
        title = "The loss was never finite"
        told = f"None of {gone} has a finite loss: look at the inputs and at the weights that "
        told += "training began with. "
    if all(track.steps[i].skipped for i in here):
        told += (
            "All of these steps were skipped and changed no weight. "
            f"{where_it_arose(track, here)}{_no_scale(track)}ook at the batches, at what "
            "the loss divides by or takes the logarithm of, and at whether a weight is itself NaN "
            f"or Inf. {by_trace(track, here)}"
        )
        culprit, title = likely_culprit(track, here), named(title, track, here)
    elif not any(place >= since for place in track.nonfinite):
        told += "The gradients stayed finite, so the weights are not spoilt by it" + (
            "." if track.steps[since].loss_nonfinite else "; or the loss is only missing."
        )
    return Finding(
        "loss-not-finite", "problem", title, told.rstrip(), evidence, step=step, culprit=culprit
    )


def _skipped(places: Sequence[int]) -> str:
    many = len(places) > 1
    return f"{'They were' if many else 'It was'} skipped and changed no weight. "


def _no_scale(track: Track) -> str:
    """How advice on a loss that is not finite begins; a scale is a matter only if there is one."""
    return "No scale can cure that: l" if track.scaled else "L"


def _ranks_at(track: Track, places: Iterable[int]) -> str:
    """On which ranks the losses of these steps were bad, in words."""
    return on_ranks(*(track.steps[place] for place in places))


# --- where it arose ------------------------------------------------------------------------------


def named(title: str, track: Track, places: Sequence[int]) -> str:
    """A title, with the module that a trace names as the origin, if one does."""
    culprit = likely_culprit(track, places) if _traces_at(track, places) else None
    return title if culprit is None else f"{title}, from {clean(culprit)}"


def likely_culprit(track: Track, places: Sequence[int]) -> str | None:
    """The module that a trace names, or the parameter at which it likely arose, if the steps agree
    on one more often than not."""
    traces = _traces_at(track, places)
    if traces:
        modules = {each.module for each in traces if _names_a_module(each)}
        known = len(modules) == 1 and _seen_from_the_first(track, places)
        return modules.pop() if known else None
    found = track.origins(places)
    names = Counter(origin.name for origin in found if origin.where in NAMED)
    name, times = names.most_common(1)[0] if names else ("", 0)
    return name if 2 * times > len(found) else None


def where_it_arose(track: Track, places: Sequence[int]) -> str:
    """One or two sentences, each with a space behind it; '' for no steps."""
    if not places:
        return ""
    traces = _traces_at(track, places)
    if any(trace.certainty != "unknown" for trace in traces):
        return _by_traces(track, places, traces)
    lost_to_trace = "".join(f"{_sentence(trace)} " for trace in traces[:1])
    return lost_to_trace + _by_gradients(track, places)


def _traces_at(track: Track, places: Sequence[int]) -> list[Trace]:
    return [
        track.traces[place]
        for place in places
        if place in track.traces
        and not track.spoilt[place]
        and (describe_trace(track.traces[place]) or track.traces[place].certainty == "unknown")
    ]


def _names_a_module(trace: Trace) -> bool:
    named = trace.where == "module" and bool(trace.module)
    return named and trace.certainty != "unknown"


def _by_traces(track: Track, places: Sequence[int], traces: Sequence[Trace]) -> str:
    """What traces saw, what they saw again only once, and the first step if they did not see it."""
    alike: dict[tuple[str, str, str, str], list[Trace]] = {}
    for trace in traces:
        alike.setdefault(_key(trace), []).append(trace)
    told = ""
    for found in list(alike.values())[:MOST_TRACES]:
        first = found[0]
        again = f" Found {count(len(found), 'time')}, up to step {found[-1].step:,}."
        told += (
            f"At step {first.step:,} {_title(first)} ({first.certainty}). {_sentence(first)}"
            f"{again if found[1:] else ''} "
        )
    step = track.steps[min(places)].step
    if not _seen_from_the_first(track, places):
        told += f"The first bad step was {step:,}: where its NaN or Inf arose was not seen. "
    elif min(places) not in track.traces:
        told += f"Step {step:,} was bad before it, likely for the same reason. "
    return told


def _seen_from_the_first(track: Track, places: Sequence[int]) -> bool:
    """Whether a trace saw the first of these steps, or one that followed it and was bad alike."""
    first = min(places)
    seen = min(track.traces.keys() & {*places})
    bad = {*track.nonfinite, *track.lost}
    # A loss that was not finite and one that was do not have one cause.
    alike = (track.steps[first].loss is None) == (track.steps[seen].loss is None)
    return seen == first or (alike and all(i in bad for i in range(first, seen)))


def _title(trace: Trace) -> str:
    return clean(describe_trace(trace) or f"{trace.what} appeared")


def _sentence(trace: Trace) -> str:
    return f"{clean(trace.text).rstrip('.')}."


def _by_gradients(track: Track, places: Sequence[int]) -> str:
    found = track.origins(places)
    if not found:
        whose = "another optimizer's" if track.spoilt[places[0]] == ANOTHERS else "the"
        return (
            f"NaN or Inf had gone into {whose} weights before, so whether this is a new fault is "
            "not known. "
        )
    kinds = Counter(origin.where for origin in found)
    if kinds["forward"] == len(found):
        return (
            f"The loss itself was NaN or Inf{_ranks_at(track, places)}, so the gradients do not "
            f"tell where that arose: {FORWARD_OR_LOSS}. "
        )
    each = " each time" if len(found) > 1 else ""
    if kinds["backward"] == len(found):
        return (
            f"The loss was finite and none of the gradients was{each}: likely it arose before "
            "backward reached these parameters, in the loss or in a layer behind them. "
        )
    if kinds.keys().isdisjoint(NAMED):
        return "The gradients do not tell where it arose. "
    return _by_name(found)


def _by_name(found: Sequence[Origin]) -> str:
    named = [origin for origin in found if origin.where in NAMED]
    names = Counter(origin.name for origin in named).most_common()
    first, times = names[0]
    rest = len(found) - len(named)
    unclear = f" {count(rest, 'other step')} did not tell." if rest else ""
    if len(names) == 1 and len(named) == 1 and named[0].after:
        return (
            f"Likely it arose in backward at {clean(first)}, or between it and "
            f"{clean(named[0].after)}, the next whose gradient is finite, if layers run in the "
            f"order in which they are defined.{unclear} "
        )
    if len(names) == 1 and named[0].where == "ranks":
        return (
            f"First in backward order came {clean(first)}: likely it arose there or in what lies "
            f"behind it, if layers run in the order in which they are defined.{unclear} "
        )
    if len(names) == 1:
        each = " each time" if len(named) > 1 and not rest else ""
        return f"Likely it arose in backward at {clean(first)} or just after it{each}.{unclear} "
    others = listed([name for name, _ in names[1:]])
    return (
        f"Likely it arose in backward at {clean(first)} or just after it ({count(times, 'time')}), "
        f"else at {others}.{unclear} "
    )


def by_trace(track: Track, places: Sequence[int]) -> str:
    """What would tell the module, in a sentence; '' if it is told, or if a trace did not see it."""
    if _traces_at(track, places):
        return ""
    if track.traced_late and track.taken:
        return "The trace began after the weights were spoilt: what it saw is no origin."
    if track.traced:
        return "A trace was on and has not seen where (docs/finding-the-culprit.md)."
    return "`gradilocks run` names the module; on a GPU it may need --trace."


# --- traces that no bad step stands for ----------------------------------------------------------


def traced(run: Run, tracks: Sequence[Track]) -> Iterator[Finding]:
    """Repeats what traces found, unless a finding about its step does so.

    A trace that began after NaN or Inf had gone into the weights names no origin: it saw what was
    left of one. `weights_not_finite`, or the finding about the step that put it there, tells of it.
    """
    told = {
        id(track.traces[place])
        for track in tracks
        for place in {*track.nonfinite, *track.lost} & track.traces.keys()
        if not track.spoilt[place] and describe_trace(track.traces[place])
    }
    known = {_key(trace) for trace in run.traces if id(trace) in told}
    alike: dict[tuple[str, str, str, str], list[Trace]] = {}
    buffers: list[Trace] = []
    for trace in run.traces:
        if trace.certainty == "unknown":
            continue  # It stands in the finding about its step.
        if trace.where == "buffers":
            buffers.append(trace)
        elif id(trace) not in told and _key(trace) not in known and not came_late(run, trace):
            alike.setdefault(_key(trace), []).append(trace)
    for traces in list(alike.values())[:MOST_TRACES]:
        first = traces[0]
        yield Finding(
            "traced",
            "warning",
            f"At step {first.step:,} {_title(first)} ({first.certainty})",
            f"{_again(traces)}{_what_came_before(run, first)}",
            {"phase": clean(first.phase), "class": clean(first.kind), "times": len(traces)},
            step=first.step,
            culprit=first.module if _names_a_module(first) else None,
        )
    if buffers:
        yield _buffers(buffers)


def _key(trace: Trace) -> tuple[str, str, str, str]:
    return trace.phase, trace.module, trace.what, trace.where


def _again(traces: Sequence[Trace]) -> str:
    """What the first of alike traces found, and how often it was found again."""
    again = f" Found {count(len(traces), 'time')}, up to step {traces[-1].step:,}."
    return f"{_sentence(traces[0])}{again if traces[1:] else ''}"


def _buffers(found: Sequence[Trace]) -> Finding:
    first = found[0]
    who = clean(first.module) or "the model"
    title = f"Buffers of {who} held {clean(first.what)} before step {first.step:,} used them"
    told = (
        f"{_again(found)} A skip keeps what is bad out of the weights, and not out of what forward "
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


def _what_came_before(run: Run, trace: Trace) -> str:
    """Tells of bad steps that the trace did not see."""
    earlier = [step for step in run.steps if step.time < trace.time]
    bad = [place for place, step in enumerate(earlier) if is_bad(step)]
    if not bad:
        return ""
    first = earlier[bad[0]]
    # A loss that was not finite and one that was do not have one cause.
    alike = (first.loss is None) == (trace.phase == "forward")
    if alike and len(bad) == len(earlier) - bad[0]:
        return f" Step {first.step:,} was bad before it, likely for the same reason."
    return f" The first bad step was {first.step:,}: where its NaN or Inf arose was not seen."
