"""What each rank found enters; one result a check, a verdict and a file for a bug report leave.

The file is to be published: whatever text is in it has no paths, host names or addresses.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

__all__ = [
    "FORMAT",
    "CheckResult",
    "Found",
    "as_json",
    "combined",
    "published",
    "verdict_of",
]

FORMAT = "gradilocks selftest"
"""By which a file is known."""
STATES = ("ok", "wrong", "raised", "hung", "died", "not tried")
_MOST_PROBLEMS = 8


@dataclass
class Found:
    """What one rank found in one check."""

    problems: list[str] = field(default_factory=list)
    """What is wrong, in words."""
    alike: dict[str, Any] = field(default_factory=dict)
    """By the name of a team: what all of its ranks must have found alike."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What was counted: collectives, bytes; the largest of all ranks is shown."""
    state: str = "ok"
    seconds: float = 0.0

    def problem(self, text: str) -> None:
        """Takes note of something wrong."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)
        self.state = "wrong"


@dataclass(frozen=True)
class CheckResult:
    """One check on all ranks."""

    name: str
    group: str
    state: str
    """One of STATES."""
    seconds: float
    problems: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    """Of a check that was not tried."""


def combined(name: str, group: str, found: Sequence[Found]) -> CheckResult:
    """One result from what every rank found, in the order of the ranks."""
    by_text: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        for text in each.problems:
            by_text.setdefault(text, []).append(rank)
    problems = [f"{_ranks(ranks, len(found))}{text}" for text, ranks in by_text.items()]
    states = {each.state for each in found}
    if states == {"ok"}:
        problems += _unlike(found)
        if problems:
            states.add("wrong")
    numbers: dict[str, Any] = {}
    for each in found:
        for key, value in each.numbers.items():
            numbers[key] = max(value, numbers.get(key, value))
    return CheckResult(
        name,
        group,
        max(states, key=STATES.index),
        max(each.seconds for each in found),
        tuple(problems[:_MOST_PROBLEMS]),
        numbers,
    )


def _unlike(found: Sequence[Found]) -> list[str]:
    """Where ranks of one team differ in what they should have found alike."""
    first: dict[str, tuple[int, Any]] = {}
    told = []
    for rank, each in enumerate(found):
        for team, facts in each.alike.items():
            one, theirs = first.setdefault(team, (rank, facts))
            if facts != theirs:
                rows = " and ".join(map(str, _first_difference(theirs, facts)))
                told.append(f"ranks {one} and {rank} differ: {rows}")
    return told


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """The first rows of numbers in which two tables of them differ."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            if mine != theirs and isinstance(mine, list):
                return _first_difference(mine, theirs)
    return one, other


def _ranks(ranks: Sequence[int], of: int) -> str:
    if of == 1:
        return ""
    if len(ranks) == of:
        return f"all {of} ranks: "
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}: "


def verdict_of(results: Sequence[CheckResult]) -> tuple[bool, str]:
    """Whether all is well, and the verdict in a sentence."""
    tried = [each for each in results if each.state != "not tried"]
    bad = [each for each in tried if each.state != "ok"]
    left = len(results) - len(tried)
    beside = f" {left} {'was' if left == 1 else 'were'} not tried." if left else ""
    if not tried:
        return False, "Nothing was checked."
    if not bad:
        return True, f"All {len(tried)} checks passed.{beside}"
    named = ", ".join(each.name for each in bad[:4]) + (", ..." if len(bad) > 4 else "")
    return False, f"{len(bad)} of {len(tried)} checks FAILED: {named}.{beside}"


def as_json(results: Sequence[CheckResult], about: Mapping[str, Any]) -> str:
    """The file to attach to a bug report.

    Args:
        results: of all checks.
        about: what ran, and on what.
    """
    well, sentence = verdict_of(results)
    content = {
        "format": FORMAT,
        "version": 1,
        "passed": well,
        "verdict": sentence,
        **about,
        "checks": [asdict(each) for each in results],
    }
    return json.dumps(_clean(content), indent=1, ensure_ascii=True) + "\n"


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return published(value)
    if isinstance(value, Mapping):
        return {str(key): _clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(each) for each in value]
    return value


_POSIX_PATH = re.compile(r"(?<![\w.:/>])(?:/[\w.+@%~#=,-]+){2,}/?")
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\[^\s'\":]+")
_ADDRESS = re.compile(
    r"\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\](?::\d+)?|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"
)
_HOST_VARIABLES = ("MASTER_ADDR", "HOSTNAME")
_PACKAGES = ("gradilocks", "torch", "triton")


def published(text: str) -> str:
    """The text without what a user may not want to publish: paths, host names, addresses.

    Of a path in this package, torch or Triton the part inside it stays, of others the file's name.

    Example:
        >>> published("File /home/ann/env/lib/torch/optim/sgd.py and /home/ann/x.py on 10.0.0.7")
        'File torch/optim/sgd.py and x.py on <address>'
    """
    text = _WINDOWS_PATH.sub(lambda found: _inside(PureWindowsPath(found[0]).parts), text)
    text = _POSIX_PATH.sub(lambda found: _inside(PurePosixPath(found[0]).parts), text)
    text = _ADDRESS.sub("<address>", text)
    hosts = {
        socket.gethostname(),
        os.environ.get("MASTER_ADDR", ""),
        os.environ.get("HOSTNAME", ""),
    }
    hosts |= {host.partition(".")[0] for host in hosts}
    for host in sorted(hosts - {"", "localhost"}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "<host>", text)
    return text


def _inside(parts: Sequence[str]) -> str:
    at = [place for place, part in enumerate(parts) if part in _PACKAGES]
    return "/".join(parts[at[-1] :]) if at else parts[-1]
