"""Numbers of the user's own: what `log` takes, where it writes, and what it refuses."""

from __future__ import annotations

import json
import math
import warnings

import numpy
import pytest
import torch

import gradilocks
from gradilocks import GradientControl, Recorder, read_run
from gradilocks.runfile import Reader
from gradilocks.step.events import EVENTS, StepListener
from tests.record.recorded import recorded, small_model, train


def test_numbers_of_any_kind_are_read_back_by_name_at_the_last_step(tmp_path):
    with Recorder(tmp_path / "a") as recorder:
        recorder.log(accuracy=0)
        recorded(recorder, steps=3)
        recorder.log(accuracy=0.25, val_loss=torch.tensor(2.5), half=numpy.float16(0.5))
        recorder.log({"val/loss": numpy.array(1.5), "hits": numpy.int64(7)}, good=True)
        recorder.log(val_loss=torch.tensor([1.25], requires_grad=True), step=10)
    run = read_run(tmp_path / "a")
    assert run.logged == {
        "accuracy": [(0, 0.0), (3, 0.25)],
        "val_loss": [(3, 2.5), (10, 1.25)],
        "half": [(3, 0.5)],
        "val/loss": [(3, 1.5)],
        "hits": [(3, 7.0)],
        "good": [(3, 1.0)],
    }
    assert all(type(value) is float for pairs in run.logged.values() for _, value in pairs)
    assert [each.step for each in run.logs] == [0, 3, 3, 10]
    assert run.logs[-1].time >= run.steps[-1].time
    assert run.notes == ()


def test_the_lines_stand_between_the_steps_they_came_between(tmp_path):
    recorder = Recorder(tmp_path / "a")
    control, model = recorded(recorder, steps=2)
    control.log(seen=1.0)
    train(control, model, steps=1, start=3)
    recorder.close()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "a").read_text().splitlines()]
    assert kinds == ["header", "optimizer", "precision", "step", "step", "log", "step", "end"]


def test_numbers_that_are_not_finite_are_nan_when_they_are_read(tmp_path):
    with Recorder(tmp_path / "a") as recorder:
        recorder.log(bad=math.nan, worse=torch.tensor(math.inf))
    run = read_run(tmp_path / "a")
    assert run.logs[0].values == {"bad": None, "worse": None}
    assert [math.isnan(run.logged[name][0][1]) for name in ("bad", "worse")] == [True, True]


def test_a_tensor_is_copied_when_it_is_handed_over(tmp_path):
    value = torch.tensor(1.0)
    with Recorder(tmp_path / "a") as recorder:
        recorder.log(value=value)
        value.fill_(9.0)
    assert read_run(tmp_path / "a").logged == {"value": [(0, 1.0)]}


def test_an_older_reader_keeps_the_line_as_a_note(tmp_path, monkeypatch):
    with Recorder(tmp_path / "a") as recorder:
        recorder.log(value=1.0)
    text = (tmp_path / "a").read_bytes().replace(b'"kind":"log"', b'"kind":"of the future"')
    reader = Reader(tmp_path / "a")
    reader.feed_many(text.splitlines(keepends=True))
    run = reader.finish()
    assert (run.logged, run.notes[0]["values"]) == ({}, {"value": 1.0})


def test_a_session_that_goes_on_counts_on(tmp_path):
    for number in (1, 2):
        with Recorder(tmp_path / "a", exists="append") as recorder:
            recorder.log(begun=number)
            recorded(recorder, steps=3)
            recorder.log(done=number)
    logged = read_run(tmp_path / "a").logged
    assert logged == {"begun": [(0, 1.0), (3, 2.0)], "done": [(3, 1.0), (6, 2.0)]}


def test_a_control_without_a_record_takes_numbers_and_keeps_none():
    model = small_model()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1))
    assert control.log(value=1.0) is None
    assert gradilocks.log(value=torch.tensor(1.0)) is None
    with pytest.raises(TypeError, match="value must be a number"):
        control.log(value="high")


def test_after_the_end_and_on_other_ranks_nothing_is_written(tmp_path):
    recorder = Recorder(tmp_path / "a")
    recorder.close()
    recorder.log(late=1.0)
    assert read_run(tmp_path / "a").logged == {}


class Listener(StepListener):
    def __init__(self):
        self.heard = []

    def numbers_logged(self, numbers, *, step):
        self.heard.append((dict(numbers), step))


def test_who_watches_the_process_hears_of_every_log(tmp_path):
    listener = Listener()
    EVENTS.add(listener)
    try:
        control, _ = recorded(tmp_path / "a", steps=1)
        gradilocks.log(a=1, step=5)
        control.log(b=2)
        control.recorder.log(c=3)  # Of this recorder alone.
        control.recorder.close()
    finally:
        EVENTS.discard(listener)
    assert listener.heard == [({"a": 1.0}, 5), ({"b": 2.0}, None)]
    logged = read_run(tmp_path / "a").logged
    assert logged == {"a": [(5, 1.0)], "b": [(1, 2.0)], "c": [(1, 3.0)]}


@pytest.mark.parametrize("log", ["package", "recorder"])
@pytest.mark.parametrize(
    ("arguments", "more", "error", "said"),
    [
        ((), {}, TypeError, "log needs at least one number, as in log"),
        ((0.5,), {}, TypeError, "log takes a mapping from names .* got float"),
        ((), {"loss": "0.5"}, TypeError, "loss must be a number, a NumPy .* got str"),
        ((), {"loss": None}, TypeError, "got NoneType"),
        ((), {"loss": [0.5]}, TypeError, "got list"),
        ((), {"loss": 1j}, TypeError, "got complex"),
        ((), {"loss": numpy.str_("3")}, TypeError, "got str"),
        ((), {"loss": 10**400}, ValueError, "loss is too large for a float64"),
        ((), {"loss": numpy.zeros(3)}, ValueError, r"loss must be one number, got shape \(3,\)"),
        ((), {"loss": torch.zeros(2, 3)}, ValueError, r"a tensor of shape \(2, 3\). Reduce it"),
        ((), {"loss": torch.zeros(0)}, ValueError, "Reduce it"),
        ((), {"loss": torch.tensor(1j)}, TypeError, "a complex tensor"),
        ((), {"loss": torch.zeros((), device="meta")}, TypeError, "on the meta device"),
        (({3: 0.5},), {}, TypeError, "the names of logged numbers must be text, got 3"),
        (({"": 0.5},), {}, ValueError, "1 to 200 printable characters"),
        (({"a\x1b[31m": 0.5},), {}, ValueError, r"printable characters .*got 'a\\x1b"),
        (({"x" * 201: 0.5},), {}, ValueError, r"got 'x{60}'\.\.\."),
        (({"loss": 0.5},), {"loss": 1.0}, ValueError, "given 'loss' twice"),
        ((), {"loss": 0.5, "step": -1}, ValueError, "step must be a whole number .* got -1"),
        ((), {"loss": 0.5, "step": 1.5}, TypeError, "step must be a whole number .* got 1.5"),
        ((), {"loss": 0.5, "step": True}, TypeError, "step must be a whole number .* got True"),
        ((), {"loss": 0.5, "step": torch.tensor(3)}, TypeError, "got 'Tensor'"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_also_where_nobody_records(
    tmp_path, log, arguments, more, error, said
):
    with Recorder(tmp_path / "a") as recorder:
        function = gradilocks.log if log == "package" else recorder.log
        with pytest.raises(error, match=said):
            function(*arguments, **more)
    assert read_run(tmp_path / "a").logged == {}


def test_sinks_hear_of_numbers_if_they_want_to(tmp_path):
    class Quiet:
        def __init__(self):
            self.steps, self.heard = 0, []

        def open(self, header): ...

        def optimizer(self, info): ...

        def step(self, step):
            self.steps += 1

        def close(self, end): ...

    class Hearing(Quiet):
        def log(self, logged):
            self.heard.append((self.steps, logged.step, dict(logged.values)))

    quiet, hearing = Quiet(), Hearing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder = Recorder(tmp_path / "a", sinks=[quiet, hearing])
        recorded(recorder, steps=2)
        recorder.log(value=1.5)
        recorder.close()
    assert (quiet.steps, hearing.steps) == (2, 2)
    assert hearing.heard == [(2, 2, {"value": 1.5})]


def test_training_is_bit_for_bit_the_same_with_numbers_and_without(tmp_path):
    def weights(path, **numbers):
        control, model = recorded(path, steps=2)
        if numbers:
            control.log(numbers)
        train(control, model, steps=2, start=3)
        control.recorder.close()
        return [param.clone() for param in model.parameters()]

    plain = weights(tmp_path / "a")
    logged = weights(tmp_path / "b", loss=torch.tensor(1.0))
    assert all(map(torch.equal, plain, logged))


def test_compiled_code_may_log(tmp_path):
    with Recorder(tmp_path / "a") as recorder:

        @torch.compile(backend="eager")
        def evaluated(x):
            y = x * 2
            recorder.log(y=y.mean())
            return y + 1

        evaluated(torch.ones(3))
    assert read_run(tmp_path / "a").logged == {"y": [(0, 2.0)]}


def test_gradilocks_log_reaches_the_run_file_of_every_control_and_scaler_once(tmp_path):
    """A script that records by itself, or by a callback, and logs where it has no control."""
    shared = Recorder(tmp_path / "shared")
    first, _ = recorded(shared, steps=2)
    second, model = recorded(shared, steps=1)
    third, _ = recorded(tmp_path / "late", steps=3)
    scaler = gradilocks.GradScaler("cpu", model=model, record=tmp_path / "scaler")
    alone = Recorder(tmp_path / "alone")  # Of no control: it has a `log` of its own.
    gradilocks.log(val_loss=torch.tensor(0.5))
    gradilocks.log({"val/loss": 0.25}, step=9)
    third.recorder.close()
    gradilocks.log(late=1)
    del first
    shared.close()
    scaler.recorder.close()
    alone.close()
    at = {"shared": 1, "late": 3, "scaler": 0}
    for name, step in at.items():
        logged = read_run(tmp_path / name).logged
        late = {} if name == "late" else {"late": [(step, 1.0)]}
        assert logged == {"val_loss": [(step, 0.5)], "val/loss": [(9, 0.25)], **late}, name
    assert read_run(tmp_path / "alone").logged == {}
    assert second.recorder is shared


def test_gradilocks_log_follows_a_recorder_that_is_attached_and_detached(tmp_path):
    model = small_model()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    gradilocks.log(early=1)
    recorder = control.attach(tmp_path / "a")
    train(control, model, steps=2)
    gradilocks.log(seen=1)
    control.detach()
    gradilocks.log(afterwards=1)
    recorder.close()
    assert read_run(tmp_path / "a").logged == {"seen": [(2, 1.0)]}
