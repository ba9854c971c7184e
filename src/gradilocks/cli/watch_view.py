"""What ``gradilocks watch`` shows of a run that goes on.

Steps enter as they come, and are kept in room that does not grow; a picture for a terminal leaves,
or plain lines for a pipe.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gradilocks.cli.terminal import printable
from gradilocks.report import BARS, PLAIN_BARS, Trail, mean, sparkline
from gradilocks.runfile import (
    BadSteps,
    Follower,
    Reader,
    SpoiltWeights,
    Step,
    describe_skip,
    format_scale,
)

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
SILENT = 15.0
"""Seconds without a new line after which the view says so."""


class Course:
    """The course of one optimizer.

    Attributes:
        last: its last step; None before the first.
        steps: how many, skipped ones included.
        least: the least loss and its step; None where no loss is known.
        bad: which steps had NaN or Inf, and whether that stayed.
    """

    def __init__(self) -> None:
        self.last: Step | None = None
        self.steps = self.skipped = self.clipped = 0
        self.bad = BadSteps()
        self.reasons: Counter[str] = Counter()
        self.least: tuple[float, int] | None = None
        self.scales: tuple[float, float] | None = None
        self.loss, self.lr = Trail(mean), Trail(mean)
        self.norm, self.scale = Trail(max), Trail(max)
        self._last_finite: dict[str, float] = {}
        self._nonfinite: dict[str, tuple[int, int]] = {}  # since which step, and how many by now
        self._times: deque[float] = deque(maxlen=RECENT)

    def take(self, step: Step) -> None:
        """The next step."""
        self.last = step
        self.bad.take(step)
        self.steps += 1
        self.clipped += step.clipped and not step.skipped
        if step.skipped:
            self.skipped += 1
            self.reasons[step.reason or "unknown"] += 1
        self.loss.add(step.loss)
        self.norm.add(step.norm)
        self.scale.add(step.scale)
        self.lr.add(step.lr)
        for name in ("loss", "norm", "scale", "lr"):
            value = getattr(step, name)
            if value is not None:
                self._last_finite[name] = value
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

    def last_finite(self, name: str) -> float | None:
        """The last finite 'loss', 'norm', 'scale' or 'lr'."""
        return self._last_finite.get(name)

    def lost_since(self, name: str) -> int | None:
        """The step since which 'loss' or 'norm' has been NaN or Inf; None if it is known.

        A step or two are a skip, which is shown as one.
        """
        if name == "loss":
            return self.bad.lost_since
        since, many = self._nonfinite.get(name, (0, 0))
        for_good = many >= FOR_GOOD or many == self.steps or self.bad.ending is not None
        return since if many and for_good else None

    @property
    def steps_per_second(self) -> float | None:
        """Over the last steps, by the run's own clock."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])

    @property
    def clip_rate(self) -> float | None:
        """Clipped steps among those taken, 0 to 1."""
        taken = self.steps - self.skipped
        return self.clipped / taken if taken else None


class State:
    """Everything that is shown of a run: a `Course` an optimizer, and the last skips of all."""

    def __init__(self) -> None:
        self.courses: dict[int, Course] = {}
        self.skips: deque[tuple[Step, str]] = deque(maxlen=LAST_SKIPS)
        """With what had spoilt weights before it, as `SpoiltWeights.describe` has it."""
        self.spoilt = SpoiltWeights()
        self.seconds = 0.0

    def take(self, steps: Iterable[Step]) -> list[tuple[Step, str]]:
        """The next steps; returns those that were skipped, as in `skips`."""
        skips = []
        for step in steps:
            self.courses.setdefault(step.optimizer, Course()).take(step)
            self.seconds = step.time
            if step.skipped:
                skips.append((step, self.spoilt.describe(step.optimizer)))
            self.spoilt.take(step)
        self.skips.extend(skips)
        return skips


class Watched:
    """A run file that is followed, and what is shown of it."""

    def __init__(self, path: Path) -> None:
        self.follower = Follower(path)
        self.state = State()
        self.new_skips: list[tuple[Step, str]] = []
        """Of the steps that `poll` returned last, those that were skipped, as in `State.skips`."""

    @property
    def reader(self) -> Reader:
        """The header, the optimizers and the end, as far as they are there."""
        return self.follower.reader

    @property
    def unread(self) -> float:
        """Share of the file that is still to be read, 0 to 1; 0 for the little at its end."""
        behind = self.follower.behind
        return behind / (self.follower.size or behind) if behind > AT_A_TIME else 0.0

    @property
    def silent(self) -> float | None:
        """Seconds since the file last changed."""
        changed = self.follower.changed
        return None if changed is None else max(0.0, time.time() - changed)

    def poll(self) -> list[Step]:
        """Reads on, and says which steps came; a file that was begun again is shown anew."""
        before = self.follower.restarts
        steps = self.follower.poll(most=AT_A_TIME)
        if self.follower.restarts != before:
            self.state = State()
        self.new_skips = self.state.take(steps)
        return steps


def picture(console: Console, watched: Watched) -> RenderableType:
    """The view, as wide as the terminal."""
    reader, state = watched.reader, watched.state
    unicode = console.encoding.lower().startswith("utf")
    bars = BARS if unicode else PLAIN_BARS
    lines = [_title(reader), *_status(watched, _room(console)), Text()]
    for index, course in sorted(state.courses.items()):
        if len(state.courses) > 1:
            lines += [Text()] if index else []
            lines.append(Text(f"optimizer {index}: {_kind(reader, index)}", style="bold"))
        lines += _rows(course, width=console.width, bars=bars)
    lines += _skips(state, console.height)
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis" if unicode else "crop"
    return Group(*lines)


def _room(console: Console) -> int:
    """Columns for the line on how the run stands; a low terminal has no second line for it."""
    return console.width if console.height > LOWEST else 1 << 16


def plain_start(reader: Reader) -> str:
    """The first line in a pipe: which file, and what ran."""
    return f"{printable(reader.path)}: {_command(reader)}"


def plain_skips(watched: Watched) -> Iterator[str]:
    """A line for every skip among the steps that came last."""
    for step, spoilt in watched.new_skips:
        of = f" of optimizer {step.optimizer}" if len(watched.state.courses) > 1 else ""
        yield f"step {step.step}{of} skipped: {printable(describe_skip(step, spoilt=spoilt))}"


def plain_status(state: State, optimizers: Iterable[int]) -> Iterator[str]:
    """A line for each of these optimizers, which have stepped."""
    several = len(state.courses) > 1
    for index in sorted(optimizers):
        course = state.courses[index]
        assert course.last is not None
        words = [f"step {course.last.step}" + (f" of optimizer {index}" if several else "")]
        words += [f"{name} {_last(course, name)}" for name in ("loss", "norm")]
        if course.last.limit is not None:
            words[-1] += f" of {_number(course.last.limit)}"
        words.append(f"scale {format_scale(course.last_finite('scale'))}")
        if course.steps_per_second is not None:
            words.append(f"{course.steps_per_second:.3g} steps/s")
        words.append(f"skipped {course.skipped}")
        words.append(f"clipped {_share(course.clip_rate)}")
        if course.bad.taken:
            words.append(f"taken with NaN or Inf {course.bad.taken:,}")
        yield "  ".join(words)


def plain_end(watched: Watched) -> str:
    """The last line in a pipe: how the run has ended, or that it is silent; '' if it goes on."""
    reader = watched.reader
    if reader.end is None:
        return _silence(watched)
    ended = f"{_ended(reader)} after {_duration(reader.end.time)}"
    words = "; ".join(_bad_endings(watched.state))
    return f"{ended}, in NaN or Inf: {words}" if words else ended


def _silence(watched: Watched) -> str:
    """That nothing has been written for long; '' if something was."""
    if watched.silent is None or watched.silent <= SILENT:
        return ""
    return f"nothing new for {_duration(watched.silent)}: slow, waiting or killed"


def _bad_endings(state: State) -> list[str]:
    """How each optimizer ended in NaN or Inf that did."""
    return [
        f"optimizer {index}: {course.bad.ending}" if len(state.courses) > 1 else course.bad.ending
        for index, course in sorted(state.courses.items())
        if course.bad.ending is not None
    ]


def _title(reader: Reader) -> Text:
    title = Text(printable(reader.path), style="bold")
    return title.append(f"  {_command(reader)}", style="not bold dim")


def _command(reader: Reader) -> str:
    assert reader.header is not None
    command = " ".join(reader.header.command) or "(no command)"
    return printable(command)


def _status(watched: Watched, width: int) -> list[Text]:
    reader, state = watched.reader, watched.state
    parts = [f"step {_reached(state):,}"]
    seconds = state.seconds if reader.end is None else reader.end.time
    parts.append(_duration(seconds))
    speeds = [course.steps_per_second for course in state.courses.values()]
    measured = [speed for speed in speeds if speed is not None]
    if measured:
        parts.append(f"{max(measured):.3g} steps/s")
    numbers, line = Text("  ".join(parts)), Text()
    if watched.unread:
        line.append(f"reading, {watched.unread:.0%} to go", style="cyan")
    elif reader.end is not None:
        bad = bool(_bad_endings(state))
        good = reader.end.status == "finished" and not bad
        line.append(_ended(reader), style="green" if good else "red")
        line.append(", in NaN or Inf" if bad else "", style="red")
    elif silence := _silence(watched):
        line.append(silence, style="yellow")
    else:
        line.append("running", style="cyan")
    whole = Text.assemble(numbers, "  ", line)
    lines = [whole] if len(whole) <= width else [numbers, line]
    if reader.torn:
        lines.append(Text(f"{reader.torn} torn line left out: a session was killed", style="dim"))
    return lines


def _reached(state: State) -> int:
    return max((course.last.step for course in state.courses.values() if course.last), default=0)


def _ended(reader: Reader) -> str:
    assert reader.end is not None
    end = reader.end
    if end.status == "error":
        return f"ended with {end.error or 'an error'}"
    if end.status == "exit":
        return f"ended with exit status {end.exit}"
    return end.status


def _kind(reader: Reader, index: int) -> str:
    info = reader.optimizers[index]
    many = len(info.names) != 1
    return f"{info.kind}, {len(info.names):,} parameter{'s' if many else ''}"


def _rows(course: Course, *, width: int, bars: str) -> list[Text]:
    assert course.last is not None
    least, scales, limit = course.least, course.scales, course.last.limit
    remarks = {
        "loss": "" if least is None else f"least {_number(least[0])} at step {least[1]:,}",
        "norm": "" if limit is None else f"limit {_number(limit)}, ",
        "scale": "",
        "lr": "",
    }
    remarks["norm"] += f"clipped {_share(course.clip_rate)}"
    if scales is not None and scales[0] != scales[1]:
        remarks["scale"] = f"{format_scale(scales[0])} to {format_scale(scales[1])}"
    rows = []
    remark_width = REMARK if width >= LABEL + VALUE + LEAST_SPARKLINE + REMARK else 0
    spark_width = max(LEAST_SPARKLINE, width - LABEL - VALUE - remark_width - 2)
    for name in ("loss", "norm", "scale", "lr"):
        lost = course.lost_since(name)
        value = course.last_finite(name)
        if (value is None and lost is None) or (name == "scale" and scales == (1.0, 1.0)):
            continue
        shown = format_scale(value) if name == "scale" else _last(course, name)
        trail = getattr(course, name).values
        if name in ("norm", "scale"):  # they move by factors
            trail = [round(math.log(v), 6) if v is not None and v > 0 else None for v in trail]
        row = Text(f"{name:<{LABEL}}", style="bold")
        row.append(f"{shown:<{VALUE}}", style="not bold" if lost is None else "bold red")
        room = spark_width - max(0, len(shown) + 1 - VALUE)
        if room >= LEAST_SPARKLINE or lost is None:
            row.append(" " * max(0, len(shown) + 1 - VALUE) if lost is not None else "")
            row.append(sparkline(trail, width=room, bars=bars), style="not bold cyan")
        if remark_width and remarks[name]:
            row.append(" " * (LABEL + VALUE + spark_width + 2 - len(row)))
            row.append(remarks[name], style="not bold dim")
        rows.append(row)
    share = course.skipped / course.steps
    row = Text(f"{'skipped':<{LABEL}}", style="bold")
    row.append(f"{course.skipped:<{VALUE},}", style="not bold")
    if course.skipped:
        why = ", ".join(f"{reason} {count:,}" for reason, count in course.reasons.most_common())
        row.append(f"{_share(share)} of the steps: {why}", style="not bold dim")
    rows.append(row)
    if course.bad.taken:
        row = Text(f"{'spoilt':<{LABEL}}", style="bold red")
        row.append(f"{course.bad.taken:<{VALUE},}")
        since = course.bad.taken_since
        rows.append(row.append(f"taken with NaN or Inf, first at step {since:,}"))
    return rows


def _last(course: Course, name: str) -> str:
    """The last 'loss', 'norm', 'scale' or 'lr', or since when it is none."""
    lost = course.lost_since(name)
    if lost is None or course.last is None:
        return _number(course.last_finite(name))
    return f"{'NaN' if course.last.nan else 'Inf'} since step {lost:,}"


def _skips(state: State, height: int) -> list[Text]:
    if not state.skips:
        return []
    shown = list(state.skips)[-max(1, min(SKIPS_SHOWN, height - 12)) :]
    lines = [Text(), Text("last skips" if len(state.skips) > 1 else "last skip", style="bold")]
    for step, spoilt in reversed(shown):
        why = printable(describe_skip(step, spoilt=spoilt))
        of = f" of optimizer {step.optimizer}" if len(state.courses) > 1 else ""
        lines.append(Text(f"  step {step.step:,}{of}  ").append(why, style="yellow"))
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.0%}" if share in (0.0, 1.0) or 0.1 <= share <= 0.99 else f"{share:.2%}"


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
