"""What ``gradilocks watch`` shows of a run that goes on.

Steps enter as they come, and are kept in room that does not grow; a picture for a terminal leaves,
or plain lines for a pipe.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gradilocks.cli.sparklines import BARS, PLAIN_BARS, Trail, mean, sparkline
from gradilocks.cli.terminal import printable
from gradilocks.report import short_name
from gradilocks.runfile import (
    BadSteps,
    Follower,
    Logged,
    Reader,
    SpoiltWeights,
    Step,
    describe_damage,
    describe_ending,
    describe_skip,
    format_scale,
    is_running,
)

LONGEST_NAME = 44
"""Characters of a parameter's name, so that the line on a skip has room for the rest."""
DRAWN: dict[str, Callable[[float, float], float]] = {
    "loss": mean,
    "norm": max,
    "scale": max,
    "lr": mean,
}
"""What is drawn of a step, and what stands for neighbours where there are too many."""
RECENT = 200
"""Steps over which the speed is taken."""
LAST_SKIPS = 50
FOR_GOOD = 3
"""Steps in a row without a finite norm after which it is said to be lost."""
AT_A_TIME = 4 << 20
"""Bytes of a long file that are read before the view is drawn again."""
LABEL, VALUE, REMARK = 8, 11, 30
LEAST_SPARKLINE = 8
SKIPS_SHOWN = 5
LOWEST = 12
"""Lines of a terminal that the rows alone need."""
OWN_SHOWN, LONGEST_OWN = 8, 24
"""So many of the user's own numbers are shown, with so much of their names."""
SILENT = 15.0
"""Seconds without a new line after which the view says so."""


class Course:
    """The course of one optimizer.

    Attributes:
        last: its last step.
        steps: how many, skipped ones included.
        least: the least loss and its step; None where no loss is known.
        scales: the least and the largest scale.
        bad: which steps had NaN or Inf, and whether that stayed.
        trails: the course of each number that is drawn.
        last_finite: the last finite value of each of them.
    """

    def __init__(self) -> None:
        self.last: Step
        self.steps = self.clipped = 0
        self.bad = BadSteps()
        self.reasons: Counter[str] = Counter()
        self.least: tuple[float, int] | None = None
        self.scales: tuple[float, float] | None = None
        self.trails = {name: Trail(merge) for name, merge in DRAWN.items()}
        self.last_finite: dict[str, float] = {}
        self._nonfinite: dict[str, tuple[int, int]] = {}  # since which step, and how many by now
        self._times: deque[float] = deque(maxlen=RECENT)

    def take(self, step: Step) -> None:
        """The next step."""
        self.last = step
        self.bad.take(step)
        self.steps += 1
        self.clipped += step.clipped and not step.skipped
        if step.skipped:
            self.reasons[step.reason or "unknown"] += 1
        for name, trail in self.trails.items():
            value = getattr(step, name)
            trail.add(value)
            if value is not None:
                self.last_finite[name] = value
                self._nonfinite.pop(name, None)
            elif step.nan + step.inf:
                since, many = self._nonfinite.get(name, (step.step, 0))
                self._nonfinite[name] = since, many + 1
        if step.loss is not None and (self.least is None or step.loss < self.least[0]):
            self.least = (step.loss, step.step)
        if step.scale is not None:
            low, high = self.scales or (step.scale, step.scale)
            self.scales = (min(low, step.scale), max(high, step.scale))
        if self._times and step.time < self._times[-1]:  # another session counts from its start
            self._times.clear()
        self._times.append(step.time)

    def lost_since(self, name: str) -> int | None:
        """The step since which 'loss' or 'norm' has been NaN or Inf; None if it is known.

        A step or two are a skip, which is shown as one.
        """
        if name == "loss":
            return self.bad.lost_since
        since, many = self._nonfinite.get(name, (0, 0))
        for_good = many >= FOR_GOOD or many == self.steps or self.bad.ending is not None
        return since if many and for_good else None

    def last_words(self, name: str) -> str:
        """The last value of a number, or since when it is none."""
        value = self.last_finite.get(name)
        if name == "scale":
            return "none" if self.scales == (1.0, 1.0) else format_scale(value)
        lost = self.lost_since(name)
        if lost is None:
            return _number(value)
        return f"{'NaN' if self.last.nan else 'Inf'} since step {lost:,}"

    @property
    def skipped(self) -> int:
        """How many steps were."""
        return self.reasons.total()

    @property
    def steps_per_second(self) -> float | None:
        """Over the last steps, by the run's own clock."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])

    @property
    def clip_rate(self) -> str:
        """Clipped steps among those taken."""
        taken = self.steps - self.skipped
        return _share(self.clipped / taken) if taken else "-"


class OwnCourse:
    """The course of one of the user's own numbers."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.step = 0
        self.trail = Trail(mean)

    def take(self, step: int, value: float | None) -> None:
        """The next one; None if it was not finite."""
        self.last, self.step = value, step
        self.trail.add(value)

    @property
    def words(self) -> str:
        """The last one."""
        return "NaN or Inf" if self.last is None else f"{self.last:.4g}"


class Watched:
    """A run file that is followed, and what is shown of it: a `Course` an optimizer, and skips."""

    def __init__(self, path: Path) -> None:
        self.follower = Follower(path)
        self._begin()

    def _begin(self) -> None:
        self.courses: dict[int, Course] = {}
        self.skips: deque[tuple[Step, str]] = deque(maxlen=LAST_SKIPS)
        """The last steps that were skipped, and why."""
        self.new_skips: list[tuple[Step, str]] = []
        """Those among the steps that `poll` returned last."""
        self.own: dict[str, OwnCourse] = {}
        self.new_logs: list[Logged] = []
        """The user's own numbers that `poll` has read last."""
        self.went_back = False
        """Whether `poll` has just found steps superseded that it had told of."""
        self.is_killed = False
        """Whether the process that wrote the file is gone, and has written no end."""
        self.seconds = 0.0
        self._spoilt = SpoiltWeights()

    @property
    def reader(self) -> Reader:
        """The header, the optimizers and the end, as far as they are there."""
        return self.follower.reader

    @property
    def unread(self) -> float:
        """Share of the file that is still to be read, 0 to 1; 0 for the little at its end."""
        behind = self.follower.behind
        return behind / (self.follower.size or behind) if behind > AT_A_TIME else 0.0

    def poll(self) -> list[Step]:
        """Reads on, and says which steps came; a file that was begun again is shown anew."""
        self.new_skips, self.new_logs, self.is_killed = [], [], False
        self.went_back = False
        steps = self._read_on()
        if self.reader.end is None and not self.unread and self._writer_is_gone():
            steps += self._read_on()  # What it wrote before it went may have come since.
            self.is_killed = self.reader.end is None
        self.skips.extend(self.new_skips)
        return steps

    def _writer_is_gone(self) -> bool:
        headers = [self.reader.header, *self.reader.resumed]
        return headers[-1] is not None and is_running(headers[-1].process) is False

    def _read_on(self) -> list[Step]:
        before = self.follower.restarts
        steps = self.follower.poll(most=AT_A_TIME)
        told_before = 0.0
        if self.follower.restarts != before:
            self._begin()
            if self.reader.superseded:
                self.went_back, told_before = True, self.reader.resumes[-1].time
        logs, self.reader.logs = self.reader.logs, []
        self.new_logs += [each for each in logs if each.time >= told_before]
        for logged in logs:
            for name, value in logged.values.items():
                self.own.setdefault(name, OwnCourse()).take(logged.step, value)
        for step in steps:
            self.courses.setdefault(step.optimizer, Course()).take(step)
            self.seconds = step.time
            if step.skipped:
                spoilt = self._spoilt.describe(step.optimizer)
                why = printable(describe_skip(_with_short_names(step), spoilt=spoilt))
                if step.time >= told_before:
                    self.new_skips.append((step, why))
                else:
                    self.skips.append((step, why))
            self._spoilt.take(step)
        return steps

    def of(self, optimizer: int) -> str:
        """Which optimizer is meant, if there are several."""
        return f" of optimizer {optimizer}" if len(self.courses) > 1 else ""

    @property
    def silence(self) -> str:
        """That the run was killed, or has written nothing for long; '' if it goes on."""
        if self.is_killed:
            return "killed: its process is gone, and it has written no end"
        silent = time.time() - (self.follower.changed or math.inf)
        if silent <= SILENT:
            return ""
        return f"nothing new for {_duration(silent)}: slow, waiting or killed"

    @property
    def ended(self) -> str:
        """How the run has ended; '' if it has not."""
        end = self.reader.end
        if end is None:
            return ""
        if end.status == "error":
            return f"ended with {end.error or 'an error'}"
        return f"ended with exit status {end.exit}" if end.status == "exit" else end.status

    @property
    def bad_endings(self) -> list[str]:
        """How each optimizer ended in NaN or Inf that did."""
        several = len(self.courses) > 1
        traces, others = self.reader.traces, None if several else ()
        return [
            printable(f"optimizer {index}: {words}" if several else words)
            for index, course in sorted(self.courses.items())
            if (words := describe_ending(course.bad, traces, others=others)) is not None
        ]


# --- lines for a pipe ----------------------------------------------------------------------------


def plain_start(watched: Watched) -> str:
    """The first line: which file, and what ran."""
    return f"{printable(watched.reader.path)}: {_command(watched.reader)}"


def _with_short_names(step: Step) -> Step:
    """A step whose culprits' names leave room in a line, with the numbers of their blocks."""
    short = (each._replace(name=short_name(each.name, LONGEST_NAME)) for each in step.culprits)
    return step._replace(culprits=tuple(short))


def plain_skips(watched: Watched) -> Iterator[str]:
    """A line for every skip among the steps that came last, and one if the run has gone back."""
    if watched.went_back:
        yield superseded_words(watched.reader)
    for step, why in watched.new_skips:
        yield f"step {step.step}{watched.of(step.optimizer)} skipped: {why}"


def plain_logs(watched: Watched) -> Iterator[str]:
    """A line for each time that the user's own numbers came."""
    for logged in watched.new_logs:
        values = (
            f"{n} {'NaN or Inf' if v is None else f'{v:.6g}'}" for n, v in logged.values.items()
        )
        yield printable(f"step {logged.step} logged: {', '.join(values)}")


def plain_status(watched: Watched, optimizers: Iterable[int]) -> Iterator[str]:
    """A line for each of these optimizers, which have stepped."""
    for index in sorted(optimizers):
        course = watched.courses[index]
        speed = course.steps_per_second
        limit = "" if course.last.limit is None else f" of {_number(course.last.limit)}"
        words = [
            f"step {course.last.step}{watched.of(index)}",
            f"loss {course.last_words('loss')}",
            f"norm {course.last_words('norm')}{limit}{_whose(course)}",
            f"scale {course.last_words('scale')}",
            "" if speed is None else f"{speed:.3g} steps/s",
            f"skipped {course.skipped}",
            f"clipped {course.clip_rate}",
            f"taken with NaN or Inf {course.bad.taken:,}" if course.bad.taken else "",
        ]
        yield "  ".join(filter(None, words))


def _whose(course: Course) -> str:
    """That a norm is of what one rank holds of the model, if it is."""
    return " (of one rank)" if course.last.of_rank else ""


def plain_end(watched: Watched) -> str:
    """The last line: how the run has ended, or that it is silent; '' if it goes on."""
    end = watched.reader.end
    if end is None:
        words = "; ".join(watched.bad_endings) if watched.is_killed else ""
        return f"{watched.silence}; in NaN or Inf: {words}" if words else watched.silence
    ended = f"{watched.ended} after {_duration(end.time)}"
    words = "; ".join(watched.bad_endings)
    return f"{ended}, in NaN or Inf: {words}" if words else ended


# --- a picture for a terminal --------------------------------------------------------------------


def picture(console: Console, watched: Watched) -> RenderableType:
    """The view, as wide as the terminal."""
    unicode = console.encoding.lower().startswith("utf")
    title = Text(printable(watched.reader.path), style="bold")
    title.append(f"  {_command(watched.reader)}", style="not bold dim")
    # A low terminal has no second line for how the run stands.
    room = console.width if console.height > LOWEST else 1 << 16
    lines = [title, *_status(watched, room), Text()]
    for index, course in sorted(watched.courses.items()):
        if len(watched.courses) > 1:
            info = watched.reader.optimizers[index]
            many = f"{len(info.names):,} parameter{'s' if len(info.names) != 1 else ''}"
            lines += [Text()] if index else []
            lines.append(Text(f"optimizer {index}: {info.kind}, {many}", style="bold"))
        lines += _rows(course, width=console.width, bars=BARS if unicode else PLAIN_BARS)
    if watched.own:
        lines += [Text(), *_own_rows(watched, console.width, BARS if unicode else PLAIN_BARS)]
    if watched.skips:
        last = "last skips" if len(watched.skips) > 1 else "last skip"
        lines += [Text(), Text(last, style="bold")]
        shown = max(1, min(SKIPS_SHOWN, console.height - LOWEST))
        for step, why in reversed(list(watched.skips)[-shown:]):
            line = Text(f"  step {step.step:,}{watched.of(step.optimizer)}  ")
            lines.append(line.append(why, style="yellow"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis" if unicode else "crop"
    return Group(*lines)


def _command(reader: Reader) -> str:
    assert reader.header is not None
    return printable(" ".join(reader.header.command) or "(no command)")


def _status(watched: Watched, width: int) -> list[Text]:
    reader, courses = watched.reader, watched.courses.values()
    reached = max((course.last.step for course in courses), default=0)
    seconds = watched.seconds if reader.end is None else reader.end.time
    speeds = [course.steps_per_second or 0.0 for course in courses]
    speed = f"  {max(speeds):.3g} steps/s" if any(speeds) else ""
    numbers, line = Text(f"step {reached:,}  {_duration(seconds)}{speed}"), Text()
    if watched.unread:
        line.append(f"reading, {watched.unread:.0%} to go", style="cyan")
    elif reader.end is not None:
        bad = bool(watched.bad_endings)
        good = reader.end.status == "finished" and not bad
        line.append(watched.ended, style="green" if good else "red")
        line.append(", in NaN or Inf" if bad else "", style="red")
    elif silence := watched.silence:
        line.append(silence, style="red" if watched.is_killed else "yellow")
    else:
        line.append("running", style="cyan")
    whole = Text.assemble(numbers, "  ", line)
    lines = [whole] if len(whole) <= width else [numbers, line]
    if reader.torn:
        lines.append(Text(f"{reader.torn} torn line left out: a session was killed", style="dim"))
    if reader.superseded:
        lines.append(Text(superseded_words(reader), style="dim"))
    if reader.damaged:
        lines.append(Text(printable(describe_damage(reader.damaged)), style="yellow"))
    return lines


def superseded_words(reader: Reader) -> str:
    """How many steps of the file are left out, and why."""
    many = len(reader.superseded)
    steps = f"{many:,} step{'s' if many != 1 else ''}"
    return f"{steps} left out: the run went on after step {reader.resumes[-1].step:,}"


def _own_rows(watched: Watched, width: int, bars: str) -> Iterator[Text]:
    """The user's own numbers: the last of each, its course, and when it was."""
    shown = list(watched.own.items())[:OWN_SHOWN]
    label = max(LABEL, *(min(len(name), LONGEST_OWN) + 2 for name, _ in shown))
    room = max(LEAST_SPARKLINE, width - label - VALUE - REMARK - 2)
    for name, course in shown:
        short = name if len(name) <= LONGEST_OWN else f"{name[: LONGEST_OWN - 1]}…"
        row = Text(f"{printable(short):<{label}}", style="bold")
        row.append(f"{course.words:<{VALUE}}", style="not bold")
        row.append(
            f"{sparkline(course.trail.values, width=room, bars=bars):<{room}}", "not bold cyan"
        )
        yield row.append(f"  at step {course.step:,}", style="not bold dim")
    if len(watched.own) > len(shown):
        yield Text(f"and {len(watched.own) - len(shown)} more numbers of the script's", style="dim")


def _rows(course: Course, *, width: int, bars: str) -> list[Text]:
    least, scales, limit = course.least, course.scales, course.last.limit
    remarks = {
        "loss": "" if least is None else f"least {_number(least[0])} at step {least[1]:,}",
        "norm": ("" if limit is None else f"limit {_number(limit)}, ")
        + f"clipped {course.clip_rate}{_whose(course)}",
        "scale": ""
        if scales is None or scales[0] == scales[1]
        else f"{format_scale(scales[0])} to {format_scale(scales[1])}",
    }
    remark_width = REMARK if width >= LABEL + VALUE + LEAST_SPARKLINE + REMARK else 0
    spark_width = max(LEAST_SPARKLINE, width - LABEL - VALUE - remark_width - 2)
    rows = []
    for name, trail in course.trails.items():
        lost = course.lost_since(name)
        unknown = name not in course.last_finite and lost is None
        if unknown or (name == "scale" and scales == (1.0, 1.0)):
            continue
        shown, values = course.last_words(name), trail.values
        if name in ("norm", "scale"):  # they move by factors
            values = [round(math.log(v), 6) if v is not None and v > 0 else None for v in values]
        row = _row(name, shown, style="not bold" if lost is None else "bold red")
        room = spark_width - max(0, len(shown) + 1 - VALUE)
        if room >= LEAST_SPARKLINE or lost is None:
            row.append(" " * max(0, len(shown) + 1 - VALUE) if lost is not None else "")
            row.append(sparkline(values, width=room, bars=bars), style="not bold cyan")
        if remark_width and remarks.get(name):
            row.append(" " * (LABEL + VALUE + spark_width + 2 - len(row)))
            row.append(remarks[name], style="not bold dim")
        rows.append(row)
    rows.append(_row("skipped", f"{course.skipped:,}", style="not bold"))
    if course.skipped:
        why = ", ".join(f"{reason} {count:,}" for reason, count in course.reasons.most_common())
        share = _share(course.skipped / course.steps)
        rows[-1].append(f"{share} of the steps: {why}", style="not bold dim")
    if course.bad.taken:
        since = f"taken with NaN or Inf, first at step {course.bad.taken_since:,}"
        spoilt = f"{'spoilt':<{LABEL}}{course.bad.taken:<{VALUE},}{since}"
        rows.append(Text(spoilt, style="bold red"))
    return rows


def _row(name: str, value: str, *, style: str) -> Text:
    return Text(f"{name:<{LABEL}}", style="bold").append(f"{value:<{VALUE}}", style=style)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share in (0.0, 1.0) or 0.1 <= share <= 0.99 else f"{share:.2%}"


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
