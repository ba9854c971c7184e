"""A slow run, or one that stands still, is in its file within seconds, whoever kills it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch

import gradilocks
from gradilocks import GradientControl, Recorder, read_run
from gradilocks.record import Sample
from gradilocks.record.batch import Batch, PendingStep, StepQueue
from tests.forks import fork
from tests.record.recorded import INF, recorded, small_model, train

SOURCE = Path(gradilocks.__file__).parent.parent
PATIENCE = 120.0  # How long a test waits for what must come, on a machine however slow.


def held(number=1, **sample):
    return PendingStep(Sample(loss=1.0, **sample), index=0, step=number, time=0.0, detail=False)


def wait_for(what):
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "what must come has not come"
        time.sleep(0.02)


def steps_in(path):
    return [step.step for step in read_run(path).steps] if path.exists() else []


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def sent(queue):
    batch = queue.next()
    return [] if batch is None else [row.step for row in batch.steps]


def test_steps_are_due_by_their_number_or_by_the_time_whichever_comes_first():
    clock = Clock()
    queue = StepQueue(3, 5.0, clock=clock)
    for number in range(1, 4):
        assert sent(queue) == []
        queue.hold(held(number))
        queue.send_if_due()
    assert sent(queue) == [1, 2, 3]
    for number, now in ((4, 101.9), (5, 103.0)):  # Another 1.1 s are less than 5 s in all.
        clock.now = now
        queue.hold(held(number))
        queue.send_if_due()
        assert sent(queue) == []
    clock.now = 104.0  # At this pace the next one comes at 105.0, and might as well not come.
    queue.hold(held(6))
    queue.send_if_due()
    assert sent(queue) == [4, 5, 6]
    clock.now = 106.4
    queue.hold(held(7))
    queue.send_if_due()
    assert sent(queue) == []
    clock.now = 400.0  # A step that lasted minutes.
    queue.hold(held(8))
    queue.send_if_due()
    assert sent(queue) == [7, 8]


def test_a_step_that_lasted_is_in_the_file_when_it_ends(tmp_path):
    clock = Clock()
    recorder = Recorder(tmp_path / "a", flush_every=1000, flush_seconds=3600)
    recorder._queue = StepQueue(1000, 3600, clock=clock)
    control, model = recorded(recorder, steps=0)
    seen = []
    for number in range(1, 7):
        clock.now += 1800.0  # Two steps an hour.
        train(control, model, steps=1, start=number)
        seen.append(steps_in(tmp_path / "a"))
    assert seen == [list(range(1, number + 1)) for number in range(1, 7)]
    clock.now += 4000.0
    train(control, model, steps=1, start=7)
    assert steps_in(tmp_path / "a") == [1, 2, 3, 4, 5, 6, 7]
    recorder.close()


def test_optimizers_of_one_decision_reach_the_file_together(tmp_path):
    clock = Clock()
    recorder = Recorder(tmp_path / "a", flush_every=1000, flush_seconds=3600)
    recorder._queue = StepQueue(1000, 3600, clock=clock)
    models = [small_model(), small_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    control = GradientControl(*optimizers, record=recorder)
    clock.now += 3600.0
    control.backward(sum(model(torch.ones(2, 6)).square().mean() for model in models))
    control.step()
    assert [(s.step, s.optimizer) for s in read_run(tmp_path / "a").steps] == [(1, 0), (1, 1)]
    recorder.close()


def test_what_waits_is_written_while_training_stands_still(tmp_path):
    path = tmp_path / "a"
    recorder = Recorder(path, flush_every=1000, flush_seconds=0.05)
    control, model = recorded(recorder, steps=3)
    wait_for(lambda: steps_in(path) == [1, 2, 3])
    train(control, model, steps=2, start=4)
    wait_for(lambda: steps_in(path) == [1, 2, 3, 4, 5])
    recorder.close()
    run = read_run(path)
    assert [s.step for s in run.steps] == [1, 2, 3, 4, 5]
    assert (recorder.steps, run.end.status) == (5, "finished")


class Sink:
    def __init__(self):
        self.threads, self.steps = set(), []

    def open(self, header):
        self.threads.add(threading.get_ident())

    def optimizer(self, info):
        self.threads.add(threading.get_ident())

    def step(self, step):
        self.threads.add(threading.get_ident())
        self.steps.append(step.step)

    def close(self, end):
        self.threads.add(threading.get_ident())


def test_sinks_and_the_log_hear_of_it_in_the_thread_that_trains(tmp_path, caplog):
    sink = Sink()
    recorder = Recorder(tmp_path / "a", flush_every=1000, flush_seconds=0.05, sinks=[sink])
    control, model = recorded(recorder, steps=3, bad={2: INF})
    wait_for(lambda: len(steps_in(tmp_path / "a")) == 3)
    train(control, model, steps=2, start=4)
    recorder.close()
    assert sink.steps == [1, 2, 3, 4, 5]
    assert sink.threads == {threading.get_ident()}
    (told,) = (record for record in caplog.records if "skipped" in record.getMessage())
    assert told.thread == threading.get_ident()


def test_a_late_write_that_fails_is_left_to_the_thread_that_trains(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "a", flush_every=1000, flush_seconds=0.05)
    failed = threading.Event()
    write = recorder._file.write

    def full(lines):
        if threading.get_ident() != threading.main_thread().ident:
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(lines)

    monkeypatch.setattr(recorder._file, "write", full)
    # However slow the machine is: nothing is due for the thread that trains.
    monkeypatch.setattr(recorder._queue, "_clock", lambda: 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded(recorder, steps=3)
        assert failed.wait(PATIENCE)
        recorder.close()
    assert steps_in(tmp_path / "a") == [1, 2, 3]


def test_the_thread_is_not_the_scripts_and_ends_with_its_recorder(tmp_path):
    def timers():
        frames = sys._current_frames().values()
        ours = [f.f_locals for f in frames if f.f_code.co_name == "_run_timer"]
        # Not by its number, which Python gives to the next thread when one has ended.
        return [each for each in ours if each["stop"] is recorder._timer._stop]

    before = threading.enumerate()
    recorder = Recorder(tmp_path / "a", flush_seconds=3600)
    recorded(recorder, steps=2)
    wait_for(lambda: len(timers()) == 1)
    assert threading.enumerate() == before
    recorder.close()
    wait_for(lambda: not timers())


def test_a_recorder_that_nobody_holds_is_closed_although_it_has_a_thread(tmp_path):
    recorder = Recorder(tmp_path / "a", flush_seconds=3600)
    control, _ = recorded(recorder, steps=2)
    del recorder, control
    wait_for(lambda: read_run(tmp_path / "a").end is not None)
    assert steps_in(tmp_path / "a") == [1, 2]


def test_a_fork_in_the_midst_of_late_writes_harms_neither(tmp_path):
    recorder = Recorder(tmp_path / "a", flush_every=1000, flush_seconds=0.0005)
    control, model = recorded(recorder, steps=1)
    for number in range(2, 42):
        train(control, model, steps=1, start=number)
        child = fork()
        if child == 0:
            train(control, model, steps=3)
            control.recorder.flush()
            control.recorder.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    recorder.close()
    assert steps_in(tmp_path / "a") == list(range(1, 42))


def test_what_is_on_its_way_from_a_device_is_not_touched():
    queue = StepQueue(1000, 3600.0)
    waiting = held(1)
    waiting.on_device = [("norms", torch.ones(2, dtype=torch.float64))]
    waiting.on_host = False
    queue.hold(waiting)
    assert queue.first_here() is None
    on_host = StepQueue(1000, 3600.0)
    on_host.hold(held(1))
    assert on_host.first_here(also_held=False) is None
    assert [row.step for row in on_host.first_here().steps] == [1]
    queue.hold(held(2))
    assert queue.first_here() is None  # Nor what came after it.
    queue.send()
    assert [row.step for row in queue.first_here().steps] == [1, 2]
    other = StepQueue(1000, 3600.0)
    other.hold(held(1, more=True))  # Another optimizer of the same decision follows.
    assert other.first_here() is None


def test_a_batch_is_read_twice_alike():
    row = held(1)
    row.on_device = [(("lr",), torch.tensor([3.0])), ("norms", torch.tensor([1, 2]))]
    batch = Batch([row])
    assert batch.is_here()
    for read in (batch.read, batch.read, batch.unpack):
        (found,) = read()
        assert (found.scalars["lr"], found.column("norms")) == (3.0, [1.0, 2.0])


SCRIPT = """
import sys, time
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(7):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
print("stands still", flush=True)
time.sleep(600)
"""


def test_a_watched_script_that_stands_still_and_is_killed_has_all_its_steps(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    path = tmp_path / "a.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "gradilocks", "run", "-o", path.name, "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout.readline() == b"stands still\n"
        wait_for(lambda: steps_in(path) == list(range(1, 8)))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    run = read_run(path)
    assert (len(run.steps), run.end) == (7, None)


def test_a_slow_run_that_is_killed_has_the_steps_of_all_but_its_last_seconds(tmp_path):
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            recorder = Recorder(tmp_path / "a", flush_seconds=0.5, log=False)
            recorder._timer._started = True  # By the steps alone, without the thread.
            control, model = recorded(recorder, steps=0)
            for number in range(1, 1000):
                time.sleep(0.2)
                train(control, model, steps=1, start=number)
                os.write(writing, b".")
        finally:
            os._exit(1)
    os.close(writing)
    done = 0
    while done < 9:
        done += len(os.read(reading, 1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    # Those of half a second are sent before a third step would be late.
    assert len(steps_in(tmp_path / "a")) >= done - 2
