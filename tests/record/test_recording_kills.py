"""kill -9 at any moment: the file can be read, and the run goes on in it."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from gradilocks import Recorder, read_run
from tests.forks import fork
from tests.record.recorded import recorded, train


def killed_at_random(path, *, flush_every, dice):
    """A child that records until it is killed; says how many steps it had handed over."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            recorder = Recorder(
                path, exists="append", flush_every=flush_every, detail_every=3, log=False
            )
            control, model = recorded(recorder, steps=0)
            while True:
                train(control, model, steps=1)
                os.write(writing, b".")
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 1)  # It has begun.
    time.sleep(dice.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    done = 1
    while chunk := os.read(reading, 65536):
        done += len(chunk)
    os.close(reading)
    return done


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.long)])
def test_kills_lose_no_more_than_their_batch_and_spoil_nothing(kills, tmp_path):
    recorded(tmp_path / "warm", steps=2)  # So that a child has nothing left to import.
    dice = random.Random(5)
    path, before = tmp_path / "a.jsonl", 0
    for number in range(kills):
        flush_every = dice.randint(1, 5)
        done = killed_at_random(path, flush_every=flush_every, dice=dice)
        run = read_run(path)
        there = len(run.steps)
        assert [step.step for step in run.steps] == list(range(1, there + 1))
        # The child may have been killed between a step and telling of it.
        assert done - flush_every < there - before <= done + 1
        assert len(run.resumed) == number
        before = there
    with Recorder(path, exists="append") as recorder:
        recorded(recorder, steps=2)
    run = read_run(path)
    assert len(run.steps) == before + 2
    assert run.end.status == "finished"


@pytest.mark.parametrize("at", [1, 17, 200, 333])
def test_a_file_that_ends_anywhere_is_read_and_gone_on_with(tmp_path, at):
    path = tmp_path / "a.jsonl"
    with Recorder(path, detail_every=1) as recorder:
        recorded(recorder, steps=4)
    whole = path.read_bytes()
    path.write_bytes(whole[:-at])
    kept = len(read_run(path).steps)
    with Recorder(path, exists="append") as recorder:
        recorded(recorder, steps=2)
    assert [step.step for step in read_run(path).steps] == list(range(1, kept + 3))
