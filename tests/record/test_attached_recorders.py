"""A recorder attached later, and run files that go on from a checkpoint's step."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import gradilocks
from gradilocks import GradientControl, Recorder, read_run
from gradilocks.report import examine
from tests.record.recorded import INF, small_model, train


def made(record=None, **settings):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return GradientControl(optimizer, model=model, record=record, **settings), model


def numbers(path):
    """What of a run counts, and what does not."""
    run = read_run(path)
    return [step.step for step in run.steps], [step.step for step in run.superseded]


@pytest.fixture
def nine(tmp_path):
    """A run file of nine steps, and the control's state after six of them."""
    path = tmp_path / "a.jsonl"
    control, model = made(path)
    train(control, model, steps=6)
    control.log(val_loss=0.5)
    state = control.state_dict()
    train(control, model, steps=3, start=7, bad={8: INF})
    control.log(val_loss=0.25)
    control.recorder.close()
    return path, state


# --- attach ---------------------------------------------------------------------------------------


def test_a_recorder_attached_in_mid_run_goes_on_with_the_controls_own_numbers(tmp_path):
    control, model = made()
    train(control, model, steps=4)
    assert control.recorder is None
    recorder = control.attach(tmp_path / "a.jsonl", {"lr": 0.01})
    assert control.recorder is recorder
    train(control, model, steps=3)
    recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == [5, 6, 7]
    assert run.resumes == ()
    assert run.header.config == {"lr": 0.01}
    assert run.header.settings["clip"] == "NoClip()"
    assert run.optimizers[0].names == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_attached_from_the_start_it_writes_what_record_writes(tmp_path):
    first, model = made(tmp_path / "a.jsonl")
    train(first, model, steps=5, bad={3: INF})
    first.recorder.close()
    second, model = made()
    second.attach(tmp_path / "b.jsonl")
    train(second, model, steps=5, bad={3: INF})
    second.recorder.close()
    one, other = read_run(tmp_path / "a.jsonl"), read_run(tmp_path / "b.jsonl")
    plain = {"time": 0.0, "memory": None}
    assert [s._replace(**plain) for s in one.steps] == [s._replace(**plain) for s in other.steps]
    assert one.header.settings == other.header.settings


def test_attaching_changes_no_bit(tmp_path):
    plain, model = made(clip=0.1)
    train(plain, model, steps=8, bad={5: INF})
    watched, other = made(clip=0.1)
    train(watched, other, steps=3)
    watched.attach(tmp_path / "a.jsonl")
    train(watched, other, steps=3, start=4, bad={5: INF})
    watched.detach()
    train(watched, other, steps=2, start=7)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert plain.state_dict() == watched.state_dict()


def test_attached_between_backward_and_step_the_loss_is_not_known_rather_than_a_part(tmp_path):
    control, model = made()

    def loss():
        return model(torch.ones(4, 6)).square().mean()

    control.backward(loss() / 2)
    recorder = control.attach(tmp_path / "a.jsonl")
    control.backward(loss() / 2)
    norm = control.step().norm
    control.zero_grad()
    control.backward(loss())
    control.step()
    recorder.close()
    first, second = read_run(tmp_path / "a.jsonl").steps
    assert (first.loss, first.loss_nonfinite, first.norm) == (None, False, norm)
    assert second.loss is not None


def test_a_second_recorder_is_refused_until_the_first_is_gone(tmp_path):
    control, model = made(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"records its steps to .*a\.jsonl already.*detach"):
        control.attach(tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()
    train(control, model, steps=2)
    control.recorder.close()
    control.attach(tmp_path / "b.jsonl")
    train(control, model, steps=2)
    first = control.detach()
    assert control.recorder is None
    assert control.detach() is None
    train(control, model, steps=1)
    with Recorder(tmp_path / "c.jsonl") as recorder:
        assert control.attach(recorder) is recorder
        train(control, model, steps=1)
    first.close()
    assert [numbers(tmp_path / f"{name}.jsonl")[0] for name in "abc"] == [[1, 2], [3, 4], [6]]


def test_one_recorder_takes_several_controls_attached_at_different_times(tmp_path):
    with Recorder(tmp_path / "a.jsonl") as recorder:
        one, model = made(recorder)
        train(one, model, steps=2)
        other, second = made()
        train(other, second, steps=3)
        other.attach(recorder)
        train(other, second, steps=2)
        train(one, model, steps=1)
    run = read_run(tmp_path / "a.jsonl")
    found = [(step.optimizer, step.step) for step in run.steps]
    assert found == [(0, 1), (0, 2), (1, 4), (1, 5), (0, 3)]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3,), TypeError, "record must be a path"),
        ((None,), TypeError, "record must be a path"),
    ],
)
def test_what_cannot_be_attached_is_refused(arguments, error, words):
    control, _ = made()
    with pytest.raises(error, match=words):
        control.attach(*arguments)
    assert control.recorder is None


def test_options_of_a_path_are_refused_beside_a_recorder(tmp_path):
    control, _ = made()
    with Recorder(tmp_path / "a.jsonl") as recorder:
        with pytest.raises(ValueError, match=r"Recorder\(path, exists=\.\.\.\)"):
            control.attach(recorder, exists="append")
        with pytest.raises(ValueError, match=r"Recorder\(path, config=\.\.\.\)"):
            control.attach(recorder, {"lr": 1})
        recorder.log(seen=1)
    with pytest.raises(ValueError, match="exists must be one of"):
        control.attach(tmp_path / "b.jsonl", exists="maybe")
    with pytest.raises(gradilocks.errors.BadRunFile, match="exists already"):
        control.attach(tmp_path / "a.jsonl")


def test_a_control_without_optimizers_records_once_it_is_bound(tmp_path):
    control = GradientControl()
    recorder = control.attach(tmp_path / "a.jsonl")
    model = small_model()
    control.bind(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    train(control, model, steps=3)
    recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert run.optimizers[0].names[0] == "0.weight"


def test_an_optimizer_that_is_made_anew_goes_on_as_the_same_one(tmp_path):
    control, model = made(tmp_path / "a.jsonl")
    train(control, model, steps=2)
    control.bind(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    train(control, model, steps=2)
    control.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [(step.optimizer, step.step) for step in run.steps] == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert len(run.optimizers) == 1


# --- going on from a checkpoint -------------------------------------------------------------------


@pytest.mark.parametrize("order", ["load, attach", "attach, load", "record=, load", "bound last"])
def test_resumed_from_the_sixth_of_nine_steps_the_file_says_twelve(nine, order):
    path, state = nine
    if order == "load, attach":
        control, model = made()
        control.load_state_dict(state)
        control.attach(path, exists="append")
    elif order == "attach, load":
        control, model = made()
        control.attach(path, exists="append")
        control.load_state_dict(state)
    elif order == "record=, load":
        control, model = made(Recorder(path, exists="append"))
        control.load_state_dict(state)
    else:
        control, model = GradientControl(), small_model()
        control.attach(path, exists="append")
        control.load_state_dict(state)
        control.bind(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model=model)
    train(control, model, steps=6, start=7)
    control.log(val_loss=0.125)
    control.recorder.close()
    run = read_run(path)
    assert [step.step for step in run.steps] == list(range(1, 13))
    assert [step.step for step in run.superseded] == [7, 8, 9]
    assert [each.step for each in run.resumes] == [6]
    assert run.logged["val_loss"] == [(6, 0.5), (12, 0.125)]
    assert [each.values["val_loss"] for each in run.superseded_logs] == [0.25]
    assert sum(step.skipped for step in run.steps) == 0  # The skip was among the superseded.
    assert all(a.time < b.time for a, b in zip(run.steps, run.steps[1:], strict=False))
    assert len(run.optimizers) == 1
    assert run.steps[9].step == 10
    assert [s.step for s in run.steps if s.detail is not None] == [1, 11]


def test_without_a_loaded_state_numbering_goes_on_after_the_last_step(nine):
    path, _ = nine
    control, model = made(Recorder(path, exists="append"))
    train(control, model, steps=3)
    assert control.outcome.step == 3  # By the control's own count.
    control.recorder.close()
    assert numbers(path) == (list(range(1, 13)), [])


def test_a_state_without_a_step_number_goes_on_counting(nine):
    path, _ = nine
    control, model = made(Recorder(path, exists="append"))
    control.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    train(control, model, steps=2)
    control.recorder.close()
    assert numbers(path) == (list(range(1, 12)), [])


def test_a_loop_that_goes_back_to_a_checkpoint_supersedes_what_it_did_since(tmp_path):
    path = tmp_path / "a.jsonl"
    control, model = made(path)
    train(control, model, steps=3)
    state, weights = control.state_dict(), copy.deepcopy(model.state_dict())
    train(control, model, steps=4, start=4)
    control.load_state_dict(state)
    model.load_state_dict(weights)
    train(control, model, steps=2, start=4)
    control.load_state_dict(state)
    train(control, model, steps=5, start=4)
    control.recorder.close()
    assert numbers(path) == (list(range(1, 9)), [4, 5, 6, 7, 4, 5])
    assert read_run(path).resumed == ()


def test_loading_the_state_that_it_has_supersedes_nothing(tmp_path):
    control, model = made(tmp_path / "a.jsonl")
    train(control, model, steps=3)
    control.load_state_dict(control.state_dict())
    train(control, model, steps=1)
    control.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert run.resumes == ()


def test_steps_that_were_not_recorded_before_attaching_leave_a_gap(nine):
    path, state = nine
    control, model = made()
    control.load_state_dict(state)
    train(control, model, steps=2, start=7)
    control.attach(path, exists="append")
    train(control, model, steps=2, start=9)
    control.recorder.close()
    assert numbers(path) == ([1, 2, 3, 4, 5, 6, 9, 10], [7, 8, 9])


def test_steps_that_a_kill_has_lost_are_not_numbered_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    control, model = made(path)
    train(control, model, steps=5)
    control.detach().close()
    train(control, model, steps=3)  # As if they had not reached the file.
    state = control.state_dict()
    second, model = made(Recorder(path, exists="append"))
    second.load_state_dict(state)
    train(second, model, steps=2)
    second.recorder.close()
    assert numbers(path) == ([1, 2, 3, 4, 5, 9, 10], [])


def test_the_same_control_attached_again_to_its_file_supersedes_nothing(nine):
    path, state = nine
    control, model = made()
    control.load_state_dict(state)
    control.attach(path, exists="append")
    train(control, model, steps=2, start=7)
    control.detach().close()
    train(control, model, steps=1)
    control.attach(path, exists="append")
    train(control, model, steps=1)
    control.recorder.close()
    assert numbers(path) == ([1, 2, 3, 4, 5, 6, 7, 8, 10], [7, 8, 9])


def test_a_checkpoint_of_a_second_training_in_the_file_is_found_by_what_that_one_counted(nine):
    path, _ = nine
    second, model = made(Recorder(path, exists="append"))
    train(second, model, steps=2)
    state = second.state_dict()  # Its second step is the file's eleventh.
    train(second, model, steps=3)
    second.recorder.close()
    third, model = made(Recorder(path, exists="append"))
    third.load_state_dict(state)
    train(third, model, steps=1)
    third.recorder.close()
    assert numbers(path) == (list(range(1, 13)), [12, 13, 14])


def test_a_new_file_begins_at_the_checkpoints_step(nine, tmp_path):
    _, state = nine
    control, model = made(tmp_path / "b.jsonl")
    control.load_state_dict(state)
    train(control, model, steps=2)
    control.recorder.close()
    assert numbers(tmp_path / "b.jsonl") == ([7, 8], [])


def test_a_resume_with_no_step_after_it_is_gone_on_from(nine):
    path, state = nine
    control, _ = made(Recorder(path, exists="append"))
    control.load_state_dict(state)
    control.recorder.close()
    assert numbers(path) == (list(range(1, 7)), [7, 8, 9])
    again, model = made(Recorder(path, exists="append"))
    train(again, model, steps=1)
    again.recorder.close()
    assert numbers(path) == (list(range(1, 8)), [7, 8, 9])


def pair(record=None):
    """Two optimizers under one control."""
    model = small_model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    return GradientControl(*optimizers, model=model, record=record), model


def test_several_optimizers_go_on_together(tmp_path):
    path = tmp_path / "a.jsonl"
    control, model = pair(path)
    train(control, model, steps=2)
    state = control.state_dict()
    train(control, model, steps=2)
    control.recorder.close()
    second, model = pair(Recorder(path, exists="append"))
    second.load_state_dict(state)
    train(second, model, steps=1)
    second.recorder.close()
    run = read_run(path)
    found = [(step.optimizer, step.step) for step in run.steps]
    assert found == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
    assert len(run.superseded) == 4


def test_optimizers_that_step_at_different_times_each_go_on_from_their_own_step(tmp_path):
    path = tmp_path / "a.jsonl"

    def steps(control, model, whose):
        for number in whose:
            control.backward(model(torch.ones(4, 6)).square().mean())
            control.step(only=control.optimizers[number])
            control.zero_grad()

    control, model = pair(path)
    steps(control, model, [0, 0, 1])
    state = control.state_dict()
    steps(control, model, [0, 1, 1])
    control.recorder.close()
    second, model = pair(Recorder(path, exists="append"))
    second.load_state_dict(state)
    steps(second, model, [1, 0])
    second.recorder.close()
    run = read_run(path)
    found = [(step.optimizer, step.step) for step in run.steps]
    assert found == [(0, 1), (0, 2), (1, 1), (1, 2), (0, 3)]
    assert [(step.optimizer, step.step) for step in run.superseded] == [(0, 3), (1, 2), (1, 3)]


def test_optimizers_that_a_controls_scaler_meets_one_by_one_go_on_each_from_its_step(tmp_path):
    path = tmp_path / "a.jsonl"

    def begun(exists, state=None):
        model = small_model()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
        control = GradientControl(model=model)
        control.attach(path, exists=exists)
        scaler = control.as_scaler()
        if state is not None:
            scaler.load_state_dict(state)

        def steps(whose):
            for number in whose:
                scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
                scaler.step(optimizers[number])
                scaler.update()
                model.zero_grad()

        return control, scaler, steps

    control, scaler, steps = begun("refuse")
    steps([0, 0, 1])
    state = scaler.state_dict()
    steps([0, 1, 1])
    control.recorder.close()
    control, _, steps = begun("append", state)
    steps([0, 1, 0])
    control.recorder.close()
    run = read_run(path)
    found = [(step.optimizer, step.step) for step in run.steps]
    assert found == [(0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (0, 4)]
    assert [(step.optimizer, step.step) for step in run.superseded] == [(0, 3), (1, 2), (1, 3)]


def test_what_was_traced_in_superseded_steps_is_gone_and_what_follows_is_there(tmp_path):
    path = tmp_path / "a.jsonl"
    control, model = made(path)
    train(control, model, steps=2)
    state = control.state_dict()
    for _ in range(2):
        with gradilocks.trace(model, control=control):
            train(control, model, steps=1, bad={1: INF})
        control.recorder.flush()
        before = [trace.step for trace in read_run(path).traces]
        control.load_state_dict(state)
    control.recorder.close()
    assert before == [3]
    assert read_run(path).traces == ()


def test_a_run_that_goes_back_before_its_weights_were_spoilt_is_well_again(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    control, model = made(path, scale=None, on_nonfinite="skip")
    train(control, model, steps=2)
    state = control.state_dict()
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    train(control, model, steps=3)
    control.load_state_dict(state)
    model.load_state_dict(weights)
    train(control, model, steps=4)
    control.recorder.close()
    run = read_run(path)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert examine(run).verdict == "healthy"
    assert "spoilt" not in caplog.text


def test_a_sink_that_has_resume_hears_of_it(nine):
    path, state = nine
    heard = []

    class Sink:
        def open(self, header): ...

        def optimizer(self, info): ...

        def step(self, step):
            heard.append(step.step)

        def resume(self, resume):
            heard.append(resume)

        def close(self, end): ...

    control, model = made(Recorder(path, exists="append", sinks=[Sink()]))
    control.load_state_dict(state)
    train(control, model, steps=1)
    control.recorder.close()
    (resume, step) = heard
    assert (resume.optimizer, resume.step, resume.counted, step) == (0, 6, 6, 7)


@pytest.mark.parametrize("late", [True, False], ids=["a scaler that may meet others", "bound anew"])
def test_steps_of_the_only_optimizer_are_counted_once_when_others_may_come(late, tmp_path):
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))

    def train(control, steps, only=None):
        for _ in range(steps):
            control.zero_grad()
            control.backward(model(torch.ones(1, 2)).sum())
            control.step(only=only)

    control = GradientControl(first, record=tmp_path / "a.jsonl")
    train(control, 3)
    if late:
        control.recorder.close()
        state = control.state_dict()
        control = GradientControl()
        control.load_state_dict(state)
        control.attach(tmp_path / "a.jsonl", exists="append")
        scaler = control.as_scaler()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        first.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(first)
        scaler.update()
        assert control.outcome.step == 4
    else:
        control.bind(first, second)
        train(control, 1, only=first)
    control.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert not run.superseded


def test_a_file_counts_all_steps_of_an_optimizer_and_an_outcome_those_of_its_kind(tmp_path):
    """Together they have one number each time, and alone another: docs/recording.md says so."""
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in params]
    control = GradientControl(*optimizers, record=tmp_path / "run.jsonl")
    told = []
    for only in (None, None, 0, None, 1, 0):
        control.zero_grad()
        control.backward(sum(param.sum() for param in params))
        told.append(control.step(only=None if only is None else optimizers[only]).step)
    assert told == [1, 2, 1, 3, 1, 2]
    control.detach().close()
    steps = read_run(tmp_path / "run.jsonl").steps
    assert [step.step for step in steps if step.optimizer == 0] == [1, 2, 3, 4, 5]
    assert [step.step for step in steps if step.optimizer == 1] == [1, 2, 3, 4]
