"""The processes of the demo: the same numbers however many there are, and a death is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import gradilocks
from gradilocks.demo.arms import Job, Result, Setup, arm_named
from gradilocks.demo.processes import News, work
from gradilocks.errors import GradilocksError
from tests.cli.cli_process import OnATerminal, environment, start, wait_until
from tests.ranks.rank_programs import IMPORTED_ONCE

SMALL = Setup(steps=3, rows=4, length=16, width=16, layers=1, heads=2)
LONG = replace(SMALL, steps=10**6)
# Some of these look for processes by name and parent, or send signals.
posix = pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc to look into")


def jobs(folder: Path, setup: Setup = SMALL) -> list[Job]:
    names = ("fp32", "just-right", "clipped")
    return [Job(arm_named(name), 0, setup, str(folder / f"{name}-0.jsonl")) for name in names]


def results(news: list[News]) -> dict[str, Result]:
    done = [each.result for each in news if each.result is not None]
    return {result.arm: replace(result, seconds=0.0, path="") for result in done}


def children(parent: int) -> list[int]:
    """The workers that a process has started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:  # It has just ended.
            continue
        if status[1] == str(parent) and b"spawn_main" in command:
            found.append(int(folder.name))
    return found


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # A zombie has ended; its new parent has not asked for it yet.


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are not spawned, but forked from the server that has torch: two seconds less each."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
        context = multiprocessing.get_context("forkserver")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def test_one_process_or_two_the_numbers_are_the_same_and_every_step_is_told(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    alone = list(work(jobs(tmp_path / "one"), workers=1))
    request.getfixturevalue("forked_workers")
    together = list(work(jobs(tmp_path / "two"), workers=2))
    assert results(alone) == results(together)
    assert len(results(alone)) == 3
    for news in (alone, together):
        for job in {each.job.arm.name: each.job for each in news}.values():
            mine = [each for each in news if each.job == job]
            assert [each.step.number for each in mine if each.step is not None] == [1, 2, 3]
            assert (mine[0].step, mine[0].result) == (None, None)
            assert mine[-1].result is not None


@posix
@pytest.mark.usefixtures("forked_workers")
def test_a_process_that_dies_is_told_in_one_line_and_takes_the_other_along(
    tmp_path: Path,
) -> None:
    with closing(work(jobs(tmp_path, LONG)[:2], workers=2)) as news:
        training = set()
        while len(training) < 2:
            each = next(news)
            training |= {each.job.arm.name} if each.step is not None else set()
        first, second = multiprocessing.active_children()
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(
            GradilocksError, match=r"ended by itself, with status -9\. .*--arm fp32"
        ):
            list(news)
    assert not first.is_alive()
    assert not second.is_alive()
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("forked_workers")
def test_a_job_that_cannot_be_done_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GradilocksError, match=r"file/below/fp32-0\.jsonl cannot be written"):
        list(work(jobs(tmp_path / "file" / "below")[:1]))
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("forked_workers")
def test_leaving_early_ends_the_processes_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    latest: dict[str, int] = {}
    with closing(work(jobs(tmp_path, LONG), workers=2)) as news:
        for each in news:
            if each.step is not None:
                latest[each.job.arm.name] = each.step.number
            if len(latest) == 2 and min(latest.values()) > 30:
                break
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    for path in tmp_path.glob("*.jsonl"):
        run = gradilocks.read_run(path)
        assert len(run.steps) >= 30
        assert run.end is not None
        assert run.end.status == "interrupted"


def test_leaving_before_a_process_has_begun_does_not_wait_for_it(tmp_path: Path) -> None:
    with closing(work(jobs(tmp_path, LONG), workers=2)) as news:
        assert next(news).step is None
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_calls_the_command_line_imports_no_torch_and_is_not_run_again_by_workers(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from gradilocks.cli import main\n"
        "print('once')\n"
        "status = main(['demo', '--quiet', '--steps', '1', '--arm', 'fp32', '-o', 'runs'])\n"
        "sys.exit(status or 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


@posix
def test_a_parent_that_was_killed_leaves_no_process_and_the_run_files_end(tmp_path: Path) -> None:
    words = ("--steps", "100000", "--arm", "fp32", "--arm", "clipped", "-o", tmp_path)
    with start("demo", *words) as process:
        assert process.stdout is not None
        seen = ""
        while not ("fp32-0 " in seen and "clipped-0 " in seen):
            seen += process.stdout.readline()
        workers = children(process.pid)
        assert len(workers) == 2
        process.kill()
        # The workers have its standard output too: it closes when the last of them has ended.
        process.communicate(timeout=120)
    wait_until(lambda: not any(map(alive, workers)), "the end of the workers")
    for name in ("fp32-0.jsonl", "clipped-0.jsonl"):
        end = gradilocks.read_run(tmp_path / name).end
        assert end is not None
        assert end.status == "interrupted"


@posix
@pytest.mark.parametrize("moment", ["at the start", "while they train"])
def test_ctrl_c_on_a_terminal_ends_every_process_at_once(tmp_path: Path, moment: str) -> None:
    # A terminal sends the signal to the whole group: to the workers as well.
    words = ("--steps", "100000", "--arm", "fp32", "--arm", "too-small", "-o", "runs")
    terminal = OnATerminal("demo", *words, cwd=tmp_path)
    wait_until(lambda: len(children(terminal.process.pid)) == 2, "two workers")
    if moment == "while they train":
        for arm in ("fp32", "too-small"):
            path = tmp_path / "runs" / f"{arm}-0.jsonl"
            wait_until(lambda p=path: p.exists() and p.stat().st_size > 0, "the run file's header")
            terminal.read()
    workers = children(terminal.process.pid)
    terminal.press_ctrl_c()
    assert terminal.close() == 130
    assert not any(map(alive, workers))
    assert "Traceback" not in terminal.seen
    assert terminal.seen.count("gradilocks: interrupted") == 1
    for path in (tmp_path / "runs").glob("*.jsonl"):
        end = gradilocks.read_run(path).end
        assert end is not None
        assert end.status == "interrupted"
