"""Run files that controls write."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, record
from gradilocks.errors import GradilocksError
from gradilocks.record import Recorder, WeightSample, log


@pytest.fixture
def batches_of(monkeypatch):
    """Sets the number of steps in a batch of lines; time does not end a batch."""

    def change(steps: int) -> None:
        monkeypatch.setattr(record, "_STEPS", steps)
        monkeypatch.setattr(record, "_SECONDS", 1000.0)

    return change


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(path: Path, kind: str) -> list[dict]:
    return [line for line in lines_of(path) if line["kind"] == kind]


def train(control: GradientControl, model: nn.Module, steps: int, *, bad: int = -1, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for step in range(1, steps + 1):
        loss = model(torch.randn(8, 4)).square().mean()
        control.backward(loss * math.inf if step == bad else loss)
        control.step()
        control.zero_grad()


def make(record=None, *, scale="dynamic", clip=0.1, seed=0, lr=0.1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, GradientControl(optimizer, model=model, scale=scale, clip=clip, record=record)


def test_a_run_file_has_the_kinds_of_the_format_in_order(tmp_path):
    path = tmp_path / "folder" / "run.jsonl"
    recorder = Recorder(path, config={"batch": 8, "name": "test"})
    model, control = make(recorder)
    train(control, model, 12)
    recorder.close()
    lines = lines_of(path)
    assert [line["kind"] for line in lines] == ["header", "optimizer", "start", *["step"] * 12, "end"]
    header, optimizer, start = lines[:3]
    assert (header["format"], header["rank"], header["world_size"]) == (3, 0, 1)
    assert header["config"] == {"batch": 8, "name": "test"}
    assert header["versions"]["torch"] == torch.__version__
    assert optimizer["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (optimizer["class"], optimizer["tensors"], optimizer["parameters"]) == ("SGD", 4, 58)
    assert optimizer["settings"]["momentum"] == 0.9
    assert "DynamicScale" in optimizer["scale"]
    assert "max_norm=0.1" in optimizer["clip"]
    assert start["step"] == 0
    assert (lines[-1]["steps"], lines[-1]["status"]) == (12, "finished")


def test_a_step_has_the_numbers_of_its_outcome(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, detail_every=1)
    model, control = make(recorder)
    norms, losses = [], []
    torch.manual_seed(0)
    for _ in range(5):
        loss = model(torch.randn(8, 4)).square().mean()
        control.backward(loss)
        gradients = [param.grad / control.scale for param in model.parameters()]
        outcome = control.step()
        norms.append([gradient.norm().item() for gradient in gradients])
        losses.append((loss.item(), outcome.norm, outcome.clipped))
        control.zero_grad()
    recorder.close()
    for line, (loss, norm, clipped), parts in zip(of_kind(path, "step"), losses, norms, strict=True):
        assert (line["loss"], line["norm"], line["clipped"]) == pytest.approx((loss, norm, clipped))
        assert line["norms"] == pytest.approx(parts, rel=1e-5)
        assert (line["scale"], line["limit"], line["lr"]) == (65536.0, 0.1, 0.1)
        assert (line["skipped"], line["rejected"], line["nan"], line["inf"]) == (False, False, 0, 0)


def test_gradients_that_were_unscaled_before_the_step_are_not_divided_again(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, detail_every=1)
    model, control = make(recorder)
    control.backward(model(torch.ones(8, 4)).square().mean())
    control.unscale_()
    expected = [param.grad.norm().item() for param in model.parameters()]
    largest = max(param.grad.abs().max().item() for param in model.parameters())
    control.step()
    recorder.close()
    (line,) = of_kind(path, "step")
    assert line["norms"] == pytest.approx(expected, rel=1e-6)
    assert line["largest"] == pytest.approx(largest, rel=1e-6)


def test_updates_are_the_relative_change_of_the_weights(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, detail_every=2)
    model, control = make(recorder, clip=None)
    train(control, model, 2)
    before = [param.detach().clone() for param in model.parameters()]
    train(control, model, 1, seed=1)
    expected = [
        ((param - old).norm() / old.norm()).item() for param, old in zip(model.parameters(), before, strict=True)
    ]
    recorder.close()
    first, second, third = of_kind(path, "step")
    assert "norms" in first
    assert "updates" not in first, "the weights before the first step are not known"
    assert "norms" not in second
    assert third["updates"] == pytest.approx(expected, rel=1e-5)


def test_a_sparse_gradient_has_no_update():
    """A step changes few rows of a large table, mostly none of the 128 sampled elements."""
    table = torch.nn.Embedding(100_000, 4, sparse=True)
    table(torch.tensor([7])).sum().backward()
    sample = WeightSample([table.weight])
    sample.take()
    assert sample.updates().isnan().all()


def test_a_sample_of_large_weights_estimates_their_change():
    weight = torch.randn(64, 128)
    sample = WeightSample([weight, torch.ones(3), torch.empty(0)])
    sample.take()
    weight *= 1.01
    assert sample.updates()[:2].tolist() == pytest.approx([0.01, 0.0], rel=1e-3)


def test_without_scaling_and_limit_their_fields_are_missing(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)
    model, control = make(recorder, scale=None, clip=None)
    train(control, model, 3)
    recorder.close()
    for line in of_kind(path, "step"):
        assert "scale" not in line
        assert "limit" not in line
        assert line["clipped"] is False


def test_non_finite_numbers_are_strings(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)
    model, control = make(recorder)
    train(control, model, 6, bad=4)
    recorder.close()
    line = of_kind(path, "step")[3]
    assert (line["skipped"], line["loss"]) == (True, "inf")
    assert line["norm"] in ("nan", "inf")
    assert line["nan"] + line["inf"] > 0
    end = of_kind(path, "end")[0]
    assert end["final_loss"] == of_kind(path, "step")[-1]["loss"]


@pytest.mark.parametrize("has_extension", [True, False])
def test_recording_changes_no_bit(tmp_path, monkeypatch, batches_of, has_extension):
    if not has_extension:
        monkeypatch.setitem(gradilocks.kernels.BACKENDS, "cpu", None)
    batches_of(3)
    results = []
    for recorder in (None, Recorder(tmp_path / "run.jsonl", detail_every=2)):
        model, control = make(recorder)
        train(control, model, 20, bad=7)
        state = control.optimizers[0].state_dict()["state"]
        results.append(
            [*model.state_dict().values(), *(entry["momentum_buffer"] for entry in state.values()), torch.rand(1)]
        )
    assert all(torch.equal(plain, recorded) for plain, recorded in zip(*results, strict=True))


def test_steps_are_written_in_batches(tmp_path, batches_of):
    path = tmp_path / "run.jsonl"
    batches_of(10)
    recorder = Recorder(path)
    model, control = make(recorder)
    counts = []
    for _ in range(25):
        train(control, model, 1)
        counts.append(len(of_kind(path, "step")))
    recorder.close()
    assert counts == [1] * 10 + [11] * 10 + [21] * 5
    assert len(of_kind(path, "step")) == 25


def test_steps_are_written_when_the_time_is_over(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)
    model, control = make(recorder)
    counts = []
    for _ in range(14):
        now[0] += 0.9
        train(control, model, 1)
        counts.append(len(of_kind(path, "step")))
    assert counts == [1, 1, 1, 1, 1, 1, 7, 7, 7, 7, 7, 7, 13, 13]
    now[0] += 1.5
    train(control, model, 1)
    assert len(of_kind(path, "step")) == 15, "a slow step is written at once"
    recorder.close()


def test_logged_numbers_belong_to_the_latest_step(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)
    model, control = make(recorder)
    train(control, model, 3)
    control.log(accuracy=0.5)
    gradilocks.log(epoch=torch.tensor(2), rate=1)
    train(control, model, 1)
    recorder.close()
    entries = of_kind(path, "log")
    assert [(entry["step"], entry["values"]) for entry in entries] == [
        (3, {"accuracy": 0.5}),
        (3, {"epoch": 2.0, "rate": 1.0}),
    ]


@pytest.mark.parametrize("value", ["high", None, [1.0], torch.ones(2)])
def test_only_numbers_can_be_logged_with_or_without_a_recorder(value):
    with pytest.raises(TypeError, match=r"log\(name=\) takes a number"):
        log(name=value)


def test_a_resumed_training_appends_and_discards_what_it_repeats(tmp_path):
    path = tmp_path / "run.jsonl"
    model, control = make(path)
    train(control, model, 5)
    saved = control.state_dict()
    train(control, model, 3)
    control.load_state_dict(saved)
    train(control, model, 1)
    recorder = next(iter(control._callbacks))
    recorder.close()
    assert [line["step"] for line in of_kind(path, "start")] == [0, 5]

    model, control = make(path)
    control.load_state_dict(saved)
    train(control, model, 2)
    recorder = next(iter(control._callbacks))
    recorder.close()
    assert [line["step"] for line in of_kind(path, "start")] == [0, 5, 5]
    assert [line["step"] for line in of_kind(path, "step")][-2:] == [6, 7]
    assert len(of_kind(path, "header")) == 2


def test_a_culprit_of_the_first_step_is_kept(tmp_path):
    """It was written before the start line, which discarded it."""
    recorder = Recorder(tmp_path / "run.jsonl")
    model, control = make(recorder)
    train(control, model, 3)
    recorder.write({"kind": "culprit", "step": 4, "optimizer": 0, "rank": 0, "text": "first NaN"})
    train(control, model, 1)
    for step in (1, 1):  # Twice from the beginning: each time the numbers restart.
        recorder.write({"kind": "culprit", "step": step, "optimizer": 0, "rank": 0, "text": "first NaN"})
    recorder.close()
    kinds = [(line["kind"], line.get("step")) for line in lines_of(tmp_path / "run.jsonl")]
    assert kinds[2:] == [
        ("start", 0),
        *[("step", step) for step in (1, 2, 3)],
        ("culprit", 4),
        ("step", 4),
        ("start", 0),
        ("culprit", 1),
        ("culprit", 1),
        ("end", None),
    ]


def test_overwrite_deletes_an_existing_file(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("something else\n")
    Recorder(path, overwrite=True).close()
    assert [line["kind"] for line in lines_of(path)] == ["header", "end"]


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GradilocksError, match="cannot be written"):
        Recorder(tmp_path / "file" / "run.jsonl")


def test_a_closed_recorder_refuses_steps(tmp_path):
    recorder = Recorder(tmp_path / "run.jsonl")
    recorder.close()
    recorder.close()
    with pytest.raises(GradilocksError, match="is closed"):
        recorder.log(accuracy=1.0)


def test_optimizers_that_step_one_by_one_have_their_own_steps(tmp_path):
    path = tmp_path / "run.jsonl"
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1 * (i + 1)) for i, layer in enumerate(layers)]
    recorder = Recorder(path)
    control = GradientControl(*optimizers, model=nn.ModuleList(layers), record=recorder)
    for _ in range(3):
        control.backward(layers[1](layers[0](torch.randn(2, 4))).square().mean())
        for optimizer in optimizers:
            control.step(only=optimizer)
        control.update()
        control.zero_grad()
    recorder.close()
    assert [line["names"] for line in of_kind(path, "optimizer")] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert [line["lr"] for line in of_kind(path, "step")] == [0.1, 0.2] * 3


def test_a_rank_above_zero_writes_its_own_file_with_bad_steps_only(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    recorder = Recorder(tmp_path / "run.jsonl")
    assert recorder.path == tmp_path / "run.rank3.jsonl"
    model, control = make(recorder)
    train(control, model, 6, bad=4)
    recorder.close()
    assert [line["step"] for line in of_kind(recorder.path, "step")] == [4]
    header = of_kind(recorder.path, "header")[0]
    assert (header["rank"], header["world_size"]) == (3, 8)
    assert not (tmp_path / "run.jsonl").exists()


SCRIPT = """
import os, sys, time, torch
from torch import nn
from gradilocks import GradientControl, record
from gradilocks.record import Recorder

record._SECONDS = 0.2
model = nn.Linear(4, 2)
control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), record=Recorder(sys.argv[1]))

def train(steps):
    for _ in range(steps):
        control.backward(model(torch.randn(2, 4)).square().mean())
        control.step()
        control.zero_grad()

"""


def run_script(text: str, path: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", SCRIPT + text, str(path)], capture_output=True, text=True, timeout=120)


def test_a_killed_process_leaves_whole_lines_and_all_but_the_last_seconds(tmp_path):
    path = tmp_path / "run.jsonl"
    text = "train(30)\ntime.sleep(0.3)\ntrain(1)\ntrain(20)\nos.kill(os.getpid(), 9)"
    assert run_script(text, path).returncode == -signal.SIGKILL
    assert path.read_text().endswith("\n")
    assert len(of_kind(path, "step")) >= 31
    assert not of_kind(path, "end")


def test_a_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    text = "train(5)\nif os.fork() == 0:\n    train(7)\n    sys.exit()\nos.wait()\ntrain(2)"
    done = run_script(text, path)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in of_kind(path, "step")] == list(range(1, 8))
    assert len(of_kind(path, "end")) == 1


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("train(3)", "finished"),
        ("train(3)\nraise KeyError('x')", "KeyError: 'x'"),
        ("train(3)\nsys.exit(2)", "finished"),
    ],
)
def test_the_end_of_the_process_closes_the_file(text, status, tmp_path):
    path = tmp_path / "run.jsonl"
    run_script(text, path)
    (end,) = of_kind(path, "end")
    assert (end["steps"], end["status"]) == (3, status)


def test_a_recorder_does_not_keep_a_control_alive(tmp_path):
    import gc
    import weakref

    model, control = make(Recorder(tmp_path / "run.jsonl"))
    train(control, model, 2)
    dead = weakref.ref(control)
    del control
    gc.collect()
    assert dead() is None


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path, monkeypatch, batches_of):
    batches_of(2)
    recorder = Recorder(tmp_path / "run.jsonl")
    model, control = make(recorder)
    train(control, model, 4)
    recorder.flush()
    monkeypatch.setattr(os, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match=r"run\.jsonl cannot be written, so recording stops: .*No space left"):
        train(control, model, 4)
    monkeypatch.undo()
    train(control, model, 4)
    recorder.close()
    assert [line["step"] for line in of_kind(tmp_path / "run.jsonl", "step")] == [1, 2, 3, 4]


def test_every_line_is_written_by_one_call(tmp_path, monkeypatch, batches_of):
    written = []
    original = os.write

    def write(file, data):
        written.append(bytes(data))
        return original(file, data)

    batches_of(4)
    recorder = Recorder(tmp_path / "run.jsonl")
    model, control = make(recorder)
    monkeypatch.setattr(os, "write", write)
    train(control, model, 9)
    recorder.close()
    assert all(data.endswith(b"\n") for data in written)
