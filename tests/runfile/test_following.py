"""Following a file that grows: byte by byte, by another process, replaced, cut."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gradilocks
from gradilocks.errors import BadRunFile
from gradilocks.runfile import Follower, header_line, step_line
from tests.runfile.run_files import (
    END,
    FIRST,
    HEADER,
    LATER,
    SECOND,
    STEP,
    lines_of,
    plain_step,
    training,
    write_run,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_file_that_comes_byte_by_byte_yields_each_step_when_its_line_is_whole(path):
    follower = Follower(path)
    assert follower.poll() == []
    text = lines_of([plain_step(1), STEP], end=END)
    seen, whole = [], 0
    for at in range(0, len(text), 7):
        append(path, text[at : at + 7])
        seen += follower.poll()
        whole = path.read_text().count("\n")
        assert len(seen) == min(max(whole - 3, 0), 2)
    assert seen == [plain_step(1), STEP]
    assert (follower.reader.header, follower.reader.end) == (HEADER, END)
    assert (follower.reader.optimizers, follower.behind) == ([FIRST, SECOND], 0)
    assert (follower.restarts, follower.reader.torn) == (0, 0)


def test_a_long_file_can_be_taken_in_parts(path):
    steps = training(3000)
    write_run(path, steps)
    follower = Follower(path)
    parts = []
    while part := follower.poll(most=1):
        parts.append(part)
    assert len(parts) > 3
    assert [step for part in parts for step in part] == steps
    assert follower.behind == 0


def test_half_a_line_stays_until_another_session_begins(path):
    follower = Follower(path)
    half = step_line(STEP)[:50]
    append(path, lines_of([plain_step(1)]) + half)
    assert len(follower.poll()) == 1
    assert follower.poll() == []
    assert follower.behind == 50
    append(path, "\n" + lines_of([plain_step(2)], header=LATER))
    assert [step.step for step in follower.poll()] == [2]
    assert follower.reader.torn == 1


@pytest.mark.parametrize("steps", [[1], [1, 2, 3, 4, 5]])
def test_a_file_begun_again_is_read_again(path, steps):
    write_run(path, map(plain_step, (1, 2, 3)))
    follower = Follower(path)
    assert len(follower.poll()) == 3
    write_run(path, map(plain_step, steps), header=LATER)
    assert [step.step for step in follower.poll()] == steps
    assert (follower.reader.header, follower.restarts) == (LATER, 1)


def test_a_file_moved_over_it_is_read_from_its_start(path, tmp_path):
    write_run(path, [plain_step(1)])
    follower = Follower(path)
    follower.poll()
    other = write_run(tmp_path / "other", map(plain_step, (1, 2, 3, 4)))
    os.replace(other, path)
    assert len(follower.poll()) == 4
    assert follower.restarts == 1


def test_a_file_that_goes_away_is_waited_for(path):
    write_run(path, [plain_step(1)])
    follower = Follower(path)
    assert len(follower.poll()) == 1
    path.unlink()
    assert follower.poll() == []
    write_run(path, [plain_step(1), plain_step(2)], header=LATER)
    assert len(follower.poll()) == 2


def test_a_file_that_is_no_run_file_is_an_error_at_once(path):
    path.write_bytes(b"\x89PNG")
    with pytest.raises(BadRunFile, match="binary data"):
        Follower(path).poll()


def test_a_header_without_its_end_is_waited_for(path):
    follower = Follower(path)
    path.write_text(header_line(HEADER)[:20])
    assert follower.poll() == []
    assert follower.reader.header is None
    append(path, header_line(HEADER)[20:])
    follower.poll()
    assert follower.reader.header == HEADER


def test_what_another_process_writes_arrives_whole_and_once(path):
    # Unbuffered writes of odd sizes, so that the reader often meets half a line.
    script = (
        "import sys, os; text = sys.stdin.buffer.read();"
        "out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "import time\n"
        "for at in range(0, len(text), 997): os.write(out, text[at:at + 997]); time.sleep(1e-4)"
    )
    steps = training(2000)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        writer.stdin.write(lines_of(steps, end=END))
        writer.stdin.close()
        follower, seen = Follower(path), []
        deadline = time.monotonic() + 60
        while follower.reader.end is None and time.monotonic() < deadline:
            seen += follower.poll()
    assert seen == steps == gradilocks.read_run(path).steps
