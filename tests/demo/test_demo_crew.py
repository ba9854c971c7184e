"""The processes of the demo: the same numbers however many there are, and a death is told."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gradilocks.demo.arms import Setup, arm_named
from gradilocks.demo.crew import News, work
from gradilocks.demo.values import Job, Result
from gradilocks.errors import GradilocksError

SMALL = Setup(steps=3, rows=4, length=16, width=16, layers=1, heads=2)


def jobs(folder: Path, setup: Setup = SMALL) -> list[Job]:
    names = ("fp32", "just-right", "clipped")
    return [Job(arm_named(name), 0, setup, str(folder / f"{name}-0.jsonl")) for name in names]


def results(news: list[News]) -> dict[str, Result]:
    done = [each.result for each in news if each.result is not None]
    return {result.arm: replace(result, seconds=0.0, path="") for result in done}


def test_one_process_or_two_the_numbers_are_the_same_and_every_step_is_told(
    tmp_path: Path,
) -> None:
    alone = list(work(jobs(tmp_path / "one"), workers=1))
    together = list(work(jobs(tmp_path / "two"), workers=2))
    assert results(alone) == results(together)
    assert len(results(alone)) == 3
    for news in (alone, together):
        for job in {each.job.arm.name: each.job for each in news}.values():
            mine = [each for each in news if each.job == job]
            assert [each.step.number for each in mine if each.step is not None] == [1, 2, 3]
            assert (mine[0].step, mine[0].result) == (None, None)
            assert mine[-1].result is not None


def test_a_process_that_dies_is_told_in_one_line(tmp_path: Path) -> None:
    endless = jobs(tmp_path, replace(SMALL, steps=10**6))[:1]
    with closing(work(endless)) as news:
        next(each for each in news if each.step is not None)
        (child,) = children()
        os.kill(child, signal.SIGKILL)
        with pytest.raises(
            GradilocksError, match=r"ended by itself, with status -9\. .*--arm fp32"
        ):
            list(news)


def test_leaving_early_ends_the_processes_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    endless = jobs(tmp_path, replace(SMALL, steps=10**6))[:2]
    with closing(work(endless, workers=2)) as news:
        for each in news:
            if each.step is not None and each.step.number > 30:
                break
        assert len(children()) == 2
    assert children() == []
    assert sum(1 for path in tmp_path.glob("*.jsonl")) == 2


def children() -> list[int]:
    """The processes that this one has started and that still run."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("there is no /proc here to look for processes in")
    found = []
    for task in tasks.iterdir():
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"gradilocks.demo.worker" in command:
                found.append(int(child))
    return found
