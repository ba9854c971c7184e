"""Whatever becomes of the file, training goes on, and it is said once."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gradilocks import GradientControl, Recorder, read_run
from gradilocks.errors import BadRunFile
from gradilocks.record import Sample, recorder
from tests.forks import fork
from tests.record.recorded import recorded, small_model, train


@contextmanager
def largest_file(size):
    """No file may grow beyond `size` bytes: a real write that fails half way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_warning_and_the_file_stays_whole(tmp_path):
    path = tmp_path / "a"
    made = Recorder(path, flush_every=2, flush_seconds=3600)
    control, model = recorded(made, steps=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with largest_file(path.stat().st_size + 300):
            train(control, model, steps=8)
    assert len(said) == 1
    assert said[0].category is RuntimeWarning
    assert f"{path} could not be written: File too large. Training goes on" in str(said[0].message)
    assert said[0].filename.endswith("recorded.py")
    assert [s.step for s in read_run(path).steps] == [1, 2, 3, 4]
    train(control, model, steps=2)  # There is room again.
    made.close()
    run = read_run(path)
    assert [s.step for s in run.steps] == [1, 2, 3, 4, 13, 14]
    assert made.steps == 6
    assert run.torn == 0
    assert run.end is not None


def test_an_optimizer_that_joins_while_the_disk_is_full_is_written_when_there_is_room(tmp_path):
    path = tmp_path / "a"
    made = Recorder(path, flush_every=1)
    with largest_file(path.stat().st_size), pytest.warns(RuntimeWarning, match="File too large"):
        control, model = recorded(made, steps=1)
    train(control, model, steps=1)
    made.close()
    run = read_run(path)
    assert [s.step for s in run.steps] == [2]
    assert len(run.optimizers) == 1


def test_a_device_that_is_always_full_is_a_warning_and_training_goes_on():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    words = "/dev/full cannot be written: No space left on device.*Training goes on"
    with pytest.warns(RuntimeWarning, match=words):
        made = Recorder("/dev/full", exists="replace")
    recorded(made, steps=3)
    made.close()
    assert not made.recording
    assert Path("/dev/full").exists()


def test_a_header_that_does_not_fit_leaves_no_file_behind(tmp_path):
    with largest_file(10), pytest.warns(RuntimeWarning, match="File too large"):
        recorded(Recorder(tmp_path / "a"), steps=2)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_goes_away_is_one_warning(tmp_path):
    folder = tmp_path / "runs"
    control, model = recorded(Recorder(folder / "a", flush_every=1), steps=2)
    shutil.rmtree(folder)
    with pytest.warns(RuntimeWarning, match="could not be written: it was deleted") as said:
        train(control, model, steps=3)
    control.recorder.close()
    assert len(said) == 1


def test_a_descriptor_that_somebody_closed_is_one_warning_and_nobody_elses_file_is_touched(
    tmp_path,
):
    made = Recorder(tmp_path / "a", flush_every=1)
    control, model = recorded(made, steps=2)
    number = made._file._fd
    os.close(number)
    with pytest.warns(RuntimeWarning, match="could not be written: Bad file descriptor"):
        train(control, model, steps=1)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number
    train(control, model, steps=2)
    made.close()
    assert os.fstat(other).st_size == 0  # Still open, and still empty.
    os.close(other)
    assert len(read_run(tmp_path / "a").steps) == 2


@pytest.fixture
def open_folder():
    """A folder that every user of the machine may enter, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_read_only_folder_is_a_warning_and_training_goes_on(open_folder):
    locked = open_folder / "locked"
    locked.mkdir(mode=0o555)
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            if os.geteuid() == 0:  # Root may write anywhere.
                os.setuid(65534)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                control, _ = recorded(Recorder(locked / "a.jsonl"), steps=3)
            told = [f"{w.category.__name__}: {w.message}" for w in caught]
            os.write(writing, "\n".join([*told, str(control.scale)]).encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    told = os.read(reading, 10_000).decode()
    os.close(reading)
    assert told == (
        f"RuntimeWarning: {locked / 'a.jsonl'} cannot be written: Permission denied. Record to a "
        "folder that can be written and has room. Training goes on, and nothing is recorded.\n"
        "65536.0"
    )


@pytest.mark.parametrize("name", ["file/", "file/a.jsonl"])
def test_a_path_that_cannot_be_is_an_error_when_recording_begins(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(BadRunFile, match="cannot be written"):
        Recorder(f"{tmp_path}/{name}")
    with pytest.raises(ValueError, match=r"is empty. Expected one such as 'runs/a.jsonl'"):
        Recorder("")


class Broken:
    def __init__(self, when):
        self.when, self.heard = when, []

    def open(self, header):
        self._hear("open")

    def optimizer(self, info):
        self._hear("optimizer")

    def step(self, step):
        self._hear("step")

    def close(self, end):
        self._hear("close")

    def _hear(self, what):
        self.heard.append(what)
        if what == self.when:
            raise OSError("no connection")


def test_a_sink_hears_everything(tmp_path):
    sink = Broken(None)
    with Recorder(tmp_path / "a", sinks=[sink], flush_every=2) as made:
        recorded(made, steps=3)
    assert sink.heard == ["open", "optimizer", "step", "step", "step", "close"]


@pytest.mark.parametrize("when", ["open", "optimizer", "step", "close"])
def test_a_sink_that_raises_is_dropped_with_one_warning(tmp_path, when):
    broken, fine = Broken(when), Broken(None)
    with (
        pytest.warns(RuntimeWarning, match="the sink Broken raised OSError: no conn") as said,
        Recorder(tmp_path / "a", sinks=[broken, fine]) as made,
    ):
        recorded(made, steps=3)
    assert len(said) == 1
    assert broken.heard[-1] == when
    assert fine.heard == ["open", "optimizer", "step", "step", "step", "close"]
    assert len(read_run(tmp_path / "a").steps) == 3


def test_what_cannot_be_recorded_stops_the_record_and_not_the_training(tmp_path):
    with Recorder(tmp_path / "a") as made:
        index = made.add_optimizer(torch.optim.SGD(small_model().parameters(), lr=0.1))
        with pytest.warns(RuntimeWarning, match=r"recording to .* has stopped: .*Training goes on"):
            made.step(index, Sample(loss=torch.ones(3)))
        made.step(index, Sample(loss=1.0))
    assert read_run(tmp_path / "a").steps == []


def test_a_forked_process_writes_nothing(tmp_path):
    control, model = recorded(tmp_path / "a", steps=2)
    child = fork()
    if child == 0:
        train(control, model, steps=60)
        control.recorder.flush()
        control.recorder.close()
        recorder._close_all()
        del control
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    control.recorder.close()
    run = read_run(tmp_path / "a")
    assert len(run.steps) == 2


def test_workers_of_a_data_loader_leave_the_file_alone(tmp_path):
    model = small_model()
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), record=Recorder(tmp_path / "a", flush_every=1)
    )
    data = torch.utils.data.TensorDataset(torch.ones(6, 6))
    loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork")
    for (inputs,) in loader:
        control.backward(model(inputs).square().mean())
        control.step()
        control.zero_grad()
    control.recorder.close()
    run = read_run(tmp_path / "a")
    assert [s.step for s in run.steps] == [1, 2, 3, 4, 5, 6]
    assert run.end is not None


def test_threads_that_record_at_once_lose_nothing(tmp_path):
    made = Recorder(tmp_path / "a", flush_every=3)
    models = [small_model() for _ in range(4)]
    indices = [made.add_optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]

    def work(index):
        for _ in range(50):
            made.step(index, Sample(loss=1.0))

    threads = [threading.Thread(target=work, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    steps = read_run(tmp_path / "a").steps
    for index in indices:
        assert [s.step for s in steps if s.optimizer == index] == list(range(1, 51))


def test_a_signal_that_closes_the_recorder_in_the_midst_of_a_write_waits_for_it(tmp_path):
    class Closing(Broken):
        def step(self, step):
            os.kill(os.getpid(), signal.SIGUSR1)

    made = Recorder(tmp_path / "a", flush_every=1, sinks=[Closing(None)])
    index = made.add_optimizer(torch.optim.SGD(small_model().parameters(), lr=0.1))
    before = signal.signal(signal.SIGUSR1, lambda *_: made.close(status="interrupted", exit=10))
    try:
        made.step(index, Sample(loss=1.0))
    finally:
        signal.signal(signal.SIGUSR1, before)
    run = read_run(tmp_path / "a")
    assert (len(run.steps), run.end.status, run.end.exit) == (1, "interrupted", 10)


ENDINGS = {
    "": ("finished", 0, None),
    "raise ValueError('no')": ("error", 1, "ValueError: no"),
    "raise KeyboardInterrupt": ("interrupted", 130, "KeyboardInterrupt"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_the_process_closes_the_file(tmp_path, ending):
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.record.recorded import recorded
control, model = recorded({str(tmp_path / "a")!r}, steps=3)
{ending}
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    run = read_run(tmp_path / "a")
    assert len(run.steps) == 3
    assert (run.end.status, run.end.exit, run.end.error) == ENDINGS[ending]
    assert run.header.command[1] == "-c"
