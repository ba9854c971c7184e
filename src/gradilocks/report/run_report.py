"""A run → what a report says about it: the verdict with its findings, the main numbers, what ran.

Pure: a `Run` enters, a `Reported` leaves; numbers and facts are pairs of a name and what to say.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

import gradilocks.report.curve_findings as curve_findings
import gradilocks.report.ending_findings as ending_findings
import gradilocks.report.nonfinite_findings as nonfinite_findings
import gradilocks.report.skip_findings as skip_findings
import gradilocks.report.tensor_findings as tensor_findings
from gradilocks.report.comparison import own_numbers, seconds_of
from gradilocks.report.formatting import clean, count, duration, number, percent, power
from gradilocks.report.health import Finding, Health, Verdict
from gradilocks.report.resources import Resources, resources
from gradilocks.report.tracks import LAST, Track, nanmedian, tracks
from gradilocks.runfile import Run, state_without_end

Pairs = list[tuple[str, str]]

ENDS = (
    "at the first step; the median over the last tenth of the steps that were taken, at most "
    f"{LAST} of them"
)
# Rates over fewer steps than this mean little, and the verdict says so.
FEW_STEPS = 20
NO_END = {
    "running": "still going",
    "killed": "killed",
    "no end": "no end in the file: killed, or still going",
}
ORDER = {"problem": 0, "warning": 1, "note": 2}
STEP_RULES = (
    curve_findings.divergence,
    nonfinite_findings.weights_not_finite,
    nonfinite_findings.taken_though_nonfinite,
    nonfinite_findings.nan_culprits,
    nonfinite_findings.loss_not_finite,
    tensor_findings.gradientless,
    tensor_findings.moving,
    tensor_findings.resting,
    curve_findings.silence,
    curve_findings.gradients_add_up,
    curve_findings.clipped_while_scaled,
    curve_findings.standing_still,
    skip_findings.skipping,
    skip_findings.far_out,
    skip_findings.rejected,
    curve_findings.spikes,
    tensor_findings.vanishing,
    tensor_findings.dominating,
    curve_findings.clipping,
    skip_findings.scaling,
)
# What else a fault shows, from its step on: the finding about the fault says it, or it follows.
FOLLOWS = {
    "loss-diverged": {
        *("taken-though-nonfinite", "loss-not-finite", "nan", "skipped", "skipped-far-out"),
        *("loss-nonfinite-steps", "spikes", "update-large", "clipped-nearly-always"),
        *("dominating", "vanishing-zeros", "vanishing-norm", "no-gradient", "weights-not-finite"),
    },
    "weights-not-finite": {
        *("taken-though-nonfinite", "loss-not-finite", "nan", "skipped", "loss-nonfinite-steps"),
    },
    "never-a-gradient": {"loss-stands-still", "without-gradient"},
    "nothing-moves": {"loss-stands-still", "update-small"},
    "no-gradient": {"loss-stands-still", "vanishing-zeros"},
    "gradients-add-up": {
        *("loss-stands-still", "spikes", "update-large", "clipped-nearly-always"),
    },
    "clipped-while-scaled": {"loss-stands-still", "update-small", "clipped-nearly-always"},
    "rate-of-zero": {"loss-stands-still", "update-small"},
    "loss-stands-still": {"update-small", "update-large"},
}


@dataclass(frozen=True)
class Reported:
    """A run with everything that was worked out about it."""

    run: Run
    label: str
    tracks: Sequence[Track]
    health: Health

    @cached_property
    def resources(self) -> Resources | None:
        """What it took, time and memory, and what it logged; None if it has no steps."""
        return resources(self.run, self.tracks)


def report_on(run: Run, label: str) -> Reported:
    """Follows and judges a run.

    Raises:
        BadRunFile: a step holds something else than numbers.
    """
    followed = tracks(run)
    found = [*ending_findings.ending(run), *nonfinite_findings.traced(run, followed)]
    found += _each_once([(track, _of_track(track)) for track in followed])
    found.sort(key=lambda finding: ORDER[finding.severity])
    health = Health(*_verdict(run, found, followed), tuple(found))
    return Reported(run, clean(label), followed, health)


def _of_track(track: Track) -> list[Finding]:
    """What there is to say about one optimizer, less what only follows from something else."""
    found = [finding for rule in STEP_RULES for finding in rule(track)]
    return [
        each
        for each in found
        if not any(
            each.rule in FOLLOWS.get(cause.rule, ())
            and cause.severity != "note"
            and ORDER[cause.severity] <= ORDER[each.severity]
            and (each.step is None or cause.step is None or each.step >= cause.step)
            for cause in found
        )
    ]


def _each_once(found: Sequence[tuple[Track, Sequence[Finding]]]) -> Iterator[Finding]:
    """What several optimizers show of one event, at the same step and in the same words, once."""
    alike: dict[tuple[str, str, str], list[Track]] = {}
    firsts: dict[tuple[str, str, str], Finding] = {}
    for track, findings in found:
        for each in findings:
            key = each.rule, each.title, each.sentence
            alike.setdefault(key, []).append(track)
            firsts.setdefault(key, each)
    along = "".join(
        f" With them those of {track.label}, since step {track.steps[track.taken[0]].step:,}."
        for track, _ in found
        if nonfinite_findings.spoilt_by_another(track)
    )
    for key, each in firsts.items():
        labels = clean(" and ".join(track.label for track in alike[key]))
        title = each.title if len(found) == 1 else f"{labels}: {each.title}"
        if each.rule == "taken-though-nonfinite":
            each, along = replace(each, sentence=each.sentence + along), ""
        yield replace(each, title=title)


def examine(run: Run) -> Health:
    """Judges a run, as `gradilocks.read_run` returns it: the verdict and its findings.

    Raises:
        BadRunFile: a step holds something else than numbers.
    """
    return report_on(run, "").health


def what_ran(run: Run) -> Pairs:
    """Command, time, versions, hardware, settings: what a header knows, and how the run ended."""
    header = run.header
    lasted, until = _lasted(run), "end" if run.end else "last step"
    pairs = [
        ("command", clean(shlex.join(map(str, header.command))) or "not known"),
        ("started", _moment(header.started)),
        ("lasted", f"{lasted}, from the start of the recording to its {until}" if lasted else ""),
        ("ended", _ended(run)),
    ]
    for info in run.optimizers:
        held = f"{count(len(info.names), 'tensor')}, {count(sum(info.sizes), 'parameter')}"
        pairs.append(("optimizer", f"{clean(info.kind)}: {held}"))
    if run.computed_in:
        pairs.append(("computed in", clean(", ".join(run.computed_in))))
    if run.steps:
        pairs.append(("first and last loss", ENDS))
    pairs += [
        ("versions", _joined(header.versions.items())),
        ("hardware", _hardware(run)),
        ("settings", _joined(header.settings.items())),
        ("config", _joined((header.config or {}).items()) if not _is_argv(header.config) else ""),
        ("commit", _commit(header.git or {})),
    ]
    if header.ranks > 1:
        means = {step.loss_ranks for step in run.steps if step.loss is not None}
        whose = f"the loss is that of rank {header.rank}"
        if means and None not in means:
            whose = "the loss is the mean of the ranks'"
        elif len(means) > 1:
            whose = f"the loss is the mean of the ranks', at some steps rank {header.rank}'s own"
        pairs.append(("rank", f"{header.rank} of {header.ranks}; {whose}"))
    pairs.append(("run file", clean(run.path)))
    return [(name, value) for name, value in pairs if value]


def in_short(run: Run) -> str:
    """What ran, in half a line: how long, how it ended, on what."""
    gpus = run.header.hardware.get("gpus")
    first = next(iter(gpus), None) if isinstance(gpus, list) else None
    parts = [
        _moment(run.header.started),
        f"ran {_lasted(run)}" if _lasted(run) else "",
        f"ended {_ended(run)}" if run.end else _ended(run),
        f"torch {clean(run.header.versions['torch'])}" if "torch" in run.header.versions else "",
        clean(first or run.header.hardware.get("cpu") or ""),
    ]
    return " · ".join(part for part in parts if part)


def main_numbers(reported: Reported, track: Track | None) -> Pairs:
    """The few numbers by which runs are compared, of one optimizer of a run."""
    if track is None:
        return [("steps", "0")]
    steps, skipped, clipped = len(track.steps), len(track.skipped), sum(track.clipped)
    limited = clipped or not all(map(math.isnan, track.limit))
    seconds = track.time[-1] - track.time[0]
    norm, unknown = nanmedian(track.norm), "NaN" if track.nonfinite else "–"
    scale = next((value for value in reversed(track.scale) if not math.isnan(value)), None)
    return [
        ("steps", f"{steps:,}"),
        ("skipped", _share_of(skipped, steps)),
        ("clipped", _share_of(clipped, max(1, steps - skipped)) if limited else "no limit"),
        ("loss", _loss(track) + _whose_loss(reported.run, track)),
        ("median norm", unknown if math.isnan(norm) else number(norm) + _whose(reported.run)),
        ("learning rate", _rate(track)),
        ("last scale", "–" if scale is None else power(scale) if track.scaled else "none"),
        ("lasted", _lasted(reported.run) or "–"),
        ("steps/s", number((steps - 1) / seconds) if steps > 1 and seconds > 0 else "–"),
        ("verdict", reported.health.verdict),
    ]


def _whose(run: Run) -> str:
    """Of which rank alone the numbers are; "" if they are of the whole model."""
    return f" (rank {run.header.rank})" if any(step.of_rank for step in run.steps) else ""


def _verdict(run: Run, found: Sequence[Finding], followed: Sequence[Track]) -> tuple[Verdict, str]:
    if not run.steps:
        return "no steps", "The run file has a header but no steps: nothing was recorded yet."
    problems, warnings = (
        sum(finding.severity == severity for finding in found)
        for severity in ("problem", "warning")
    )
    seen = count(len(run.steps), "step")
    if problems:
        more = f" and {count(warnings, 'warning')}" if warnings else ""
        # Numbers that grew until they overflowed did not arise in one place.
        grown = found[0].rule == "loss-diverged"
        ended = "".join(
            f"It ended in NaN or Inf: {clean(track.prefix)}"
            f"{clean(track.bad.ending if grown else words)}. "
            for track in followed
            if (words := track.ending) is not None
        )
        worst = f"{found[0].title}. " if grown or not ended else ""
        return "in trouble", f"{worst}{ended}{count(problems, 'problem')}{more} in {seen}."
    if warnings:
        many = f"{count(warnings, 'warning')} in {seen}, no problem."
        return "needs a look", f"{found[0].title}. {many}"
    few = ", but so few prove little" if len(run.steps) < FEW_STEPS else ""
    return "healthy", f"Nothing wrong in {seen}{few}."


def _loss(track: Track) -> str:
    """Where it began and where it ended, even if that is NaN."""
    first, last, _ = track.loss_ends
    if math.isnan(first):
        return "NaN" if track.lost else "–"
    return f"{number(first)} → {'NaN' if math.isnan(last) else number(last)}"


def _whose_loss(run: Run, track: Track) -> str:
    """Of which rank alone the first and the last loss are; "" if of all, or if there is one."""
    if run.header.ranks < 2 or math.isnan(track.loss_ends.first):
        return ""
    first, *last = [track.steps[place].loss_ranks is None for place in track.loss_places]
    if not first and not any(last):
        return ""
    whose = f"rank {run.header.rank}"
    return f" ({whose})" if first and all(last) else f" (at some steps {whose}'s)"


def _rate(track: Track) -> str:
    """The learning rate: the only one, or where it began and where it ended."""
    known = [value for value in track.lr if not math.isnan(value)]
    if not known:
        return "–"
    ends = [number(known[0]), number(known[-1])]
    ends = ends[:1] if min(known) == max(known) else ends
    return " → ".join([*ends, "NaN or Inf"] if math.isnan(track.lr[-1]) else ends)


def _share_of(some: int, all_of_them: int) -> str:
    return f"{some:,} ({percent(some / all_of_them)})" if some else "0"


def _moment(seconds: float) -> str:
    try:
        moment = datetime.fromtimestamp(seconds, tz=timezone.utc)
    except (OverflowError, OSError, ValueError):
        return "not known"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _lasted(run: Run) -> str:
    """How long the run took, whichever optimizer a number is of; '' if that is not known."""
    seconds = seconds_of(run)
    return duration(seconds) if seconds > 0 else ""


def _ended(run: Run) -> str:
    if run.end is None:
        return NO_END[state_without_end(run.process)]
    words = {
        "finished": "by itself",
        "error": f"in an error: {clean(run.end.error)}",
        "interrupted": "interrupted",
        "exit": f"with exit status {run.end.exit}"
        + (f": {clean(run.end.error)}" if run.end.error else ""),
    }
    if run.end.status == "finished" and run.header.settings.get("audited"):
        return "by itself, or by the audit after its steps"
    return words.get(run.end.status, clean(run.end.status))


def _is_argv(config: Mapping[str, Any] | None) -> bool:
    """Whether there is nothing in it but the arguments, which the command has."""
    return config is not None and list(config) == ["argv"]


def _commit(git: Mapping[str, Any]) -> str:
    """Which code ran, as far as its repository knows."""
    if not git.get("commit"):
        return ""
    branch = f" on {clean(git['branch'])}" if git.get("branch") else ""
    dirty = git.get("dirty")
    state = ", with changes that were not committed" if dirty else ", without changes"
    return f"{clean(git['commit'])}{branch}{'' if dirty is None else state}"


def own_rows(run: Run) -> list[tuple[str, list[str]]]:
    """The user's own numbers as a table: the name, and a cell for each of `OWN_HEADS`."""

    def at(value: float | None, step: int | None) -> str:
        return "NaN" if value is None or step is None else f"{number(value)} (step {step:,})"

    return [
        (
            clean(name),
            [
                "NaN" if own.first is None else number(own.first),
                at(own.last, own.last_at),
                at(own.least, own.least_at),
                at(own.most, own.most_at),
                f"{own.values:,}",
            ],
        )
        for name, own in own_numbers(run).items()
    ]


OWN_HEADS = ["first", "last", "least", "largest", "times"]


def _hardware(run: Run) -> str:
    hardware = dict(run.header.hardware)
    gpus, memory = hardware.pop("gpus", None), hardware.pop("memory", None)
    parts = [_joined((key, value) for key, value in hardware.items() if value)]
    if isinstance(memory, (int, float)) and memory > 0:
        parts.append(f"memory {memory / 2**30:.0f} GiB")
    parts += [f"GPU {clean(gpu)}" for gpu in gpus] if isinstance(gpus, list) else []
    return ", ".join(part for part in parts if part)


def _joined(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{clean(key)} {clean(value)}" for key, value in items if value is not None)
