"""On a GPU: recording never waits, reads what each step was, and refuses to be captured."""

from __future__ import annotations

import time

import pytest
import torch

from gradilocks import AdaGC, GradientControl, GradScaler, Recorder, optim, read_run
from tests.record.recorded import INF, recorded, small_model, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

OPTIMIZERS = {
    "torch's": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: optim.AdamW(params, lr=0.01),
}


@pytest.fixture
def forbidden_to_wait():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("clip", [1.0, AdaGC(warmup=3)], ids=["short way", "stages"])
def test_recording_does_not_wait(tmp_path, forbidden_to_wait, make, clip):
    recorder = Recorder(tmp_path / "a", flush_every=7, detail_every=3)
    control, model = recorded(
        recorder, steps=9, device="cuda", optimizer=OPTIMIZERS[make], clip=clip
    )
    train(control, model, steps=9)  # Whatever is compiled or pinned first has been.
    torch.cuda.synchronize()
    inputs = [torch.full((4, 6), 0.1 * k, device="cuda") for k in range(40)]
    infinite = torch.tensor(INF, device="cuda")
    forbidden_to_wait()
    for number, each in enumerate(inputs):
        loss = model(each).square().mean()
        control.backward(loss * infinite if number == 20 else loss)
        control.step()
        control.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    recorder.close()
    run = read_run(tmp_path / "a")
    assert [s.step for s in run.steps] == list(range(1, 59))
    assert [s.step for s in run.steps if s.skipped] == [39]
    assert run.steps[38].culprits[0].name == "2.bias"
    assert all(s.detail.zeros[0] is not None for s in run.steps if s.detail)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("way", ["plain", "unscale_", "clip=", "disabled"])
def test_a_scaler_that_records_does_not_wait(tmp_path, forbidden_to_wait, make, way):
    recorder = Recorder(tmp_path / "a", flush_every=7, detail_every=3)
    model = small_model("cuda")
    optimizer = OPTIMIZERS[make](model.parameters())
    settings = {"clip=": {"clip": 1.0}, "disabled": {"enabled": False}}.get(way, {})
    scaler = GradScaler("cuda", model=model, record=recorder, **settings)
    inputs = [torch.full((4, 6), 0.1 * k, device="cuda") for k in range(40)]
    infinite = torch.tensor(INF, device="cuda")
    bad = None if way == "disabled" else 30
    for number, each in enumerate(inputs):
        if number == 20:  # Whatever is compiled or pinned first has been.
            torch.cuda.synchronize()
            forbidden_to_wait()
        loss = model(each).square().mean()
        scaler.scale(loss * infinite if number == bad else loss).backward()
        if way == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    assert scaler.outcome.tensors["norm"].is_cuda
    recorder.close()
    run = read_run(tmp_path / "a")
    assert [s.step for s in run.steps] == list(range(1, 41))
    assert [s.step for s in run.steps if s.skipped] == ([] if bad is None else [bad + 1])
    assert run.steps[-1].norm == scaler.outcome.norm
    assert all(s.detail.zeros[0] is not None for s in run.steps if s.detail)


def test_numbers_of_the_users_own_travel_with_the_batch_and_nobody_waits(
    tmp_path, forbidden_to_wait
):
    recorder = Recorder(tmp_path / "a", flush_every=7)
    control, model = recorded(recorder, steps=9, device="cuda")
    control.log(number=torch.zeros((), device="cuda"))
    train(control, model, steps=9)
    torch.cuda.synchronize()
    numbers = torch.arange(5, device="cuda").half()
    inputs = torch.ones(4, 6, device="cuda")
    forbidden_to_wait()
    for number in numbers.unbind():
        control.backward(model(inputs).square().mean())
        control.step()
        control.zero_grad()
        with torch.inference_mode():
            control.log(number=number + 1, whole=7, loss=model(inputs).mean())
    torch.cuda.set_sync_debug_mode("default")
    numbers.fill_(-1.0)  # They were copied.
    recorder.close()
    logged = read_run(tmp_path / "a").logged
    assert logged["number"] == [(9, 0.0), (19, 1.0), (20, 2.0), (21, 3.0), (22, 4.0), (23, 5.0)]
    assert logged["whole"] == [(step, 7.0) for step in range(19, 24)]
    assert all(value == value for _, value in logged["loss"])


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_each_step_is_recorded_as_it_was(tmp_path, make):
    model = small_model("cuda")
    control = GradientControl(
        OPTIMIZERS[make](model.parameters()), model=model, clip=0.05,
        record=Recorder(tmp_path / "a", flush_every=4, detail_every=1),
    )  # fmt: skip
    told, norms = [], []
    for number in range(11):
        loss = model(torch.full((4, 6), 0.3 * number + 0.1, device="cuda")).square().mean()
        control.backward(loss * (INF if number == 5 else 1.0))
        outcome = control.step()
        told.append((outcome.step, outcome.scale, outcome.skipped, outcome.clipped))
        norms.append(None if outcome.skipped else outcome.norm)
        control.zero_grad()
    control.recorder.close()
    steps = read_run(tmp_path / "a").steps
    assert [(s.step, s.scale, s.skipped, s.clipped) for s in steps] == told
    assert [s.norm for s in steps] == norms
    assert steps[5].detail.update == [0.0] * 4
    assert all(0 < ratio < 1 for ratio in steps[0].detail.update)


def test_a_learning_rate_and_a_loss_on_the_device_are_copied_in_time(tmp_path):
    model = small_model("cuda")
    rate = torch.tensor(0.5, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    control = GradientControl(optimizer, record=tmp_path / "a")
    losses = []
    for number in range(4):
        rate.fill_(0.5 / 2**number)
        loss = model(torch.ones(2, 6, device="cuda")).square().mean()
        losses.append(loss.item())
        control.backward(loss)
        loss.detach().zero_()  # Somebody uses it as a buffer.
        control.step()
        control.zero_grad()
    control.recorder.close()
    steps = read_run(tmp_path / "a").steps
    assert [s.lr for s in steps] == [0.5, 0.25, 0.125, 0.0625]
    assert [s.loss for s in steps] == losses


def test_steps_on_another_stream_are_recorded_as_they_were(tmp_path):
    recorder = Recorder(tmp_path / "a", flush_every=5)
    control, model = recorded(recorder, steps=3, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(control, model, steps=3, start=4)
    torch.cuda.current_stream().wait_stream(side)
    train(control, model, steps=3, start=7)
    recorder.close()
    alone, _ = recorded(tmp_path / "b", steps=9, device="cuda")
    alone.recorder.close()
    seen = [[s.norm for s in read_run(tmp_path / name).steps] for name in "ab"]
    assert seen[0] == seen[1]


def test_recording_inside_a_capture_is_refused(tmp_path):
    control, model = recorded(
        tmp_path / "a", steps=3, device="cuda", optimizer=OPTIMIZERS["ours"], clip=1.0
    )
    inputs = torch.ones(4, 6, device="cuda")
    control.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph):
            control.backward(model(inputs).square().mean())
            control.step()

    with pytest.raises(RuntimeError, match="cannot be recorded while a CUDA graph is captured"):
        capture()
    control.recorder.close()
    assert len(read_run(tmp_path / "a").steps) == 3


def test_what_was_sent_is_written_while_training_stands_still(tmp_path):
    path = tmp_path / "a"
    recorder = Recorder(path, flush_every=4, flush_seconds=0.05, detail_every=2)
    control, model = recorded(recorder, steps=0, device="cuda")
    recorder._queue._seconds = 3600.0  # By their number alone, so that all of them are sent.
    train(control, model, steps=4, bad={3: INF})
    end = time.monotonic() + 60.0
    while len(read_run(path).steps) < 4:
        assert time.monotonic() < end
        time.sleep(0.02)
    train(control, model, steps=2, start=5)  # Not sent: they stay until they are.
    time.sleep(0.5)
    assert len(read_run(path).steps) == 4
    recorder.close()
    alone, _ = recorded(tmp_path / "b", steps=6, bad={3: INF}, device="cuda")
    alone.recorder.close()
    seen = [
        [(s.step, s.loss, s.norm, s.skipped, s.culprits) for s in read_run(tmp_path / name).steps]
        for name in "ab"
    ]
    assert seen[0] == seen[1]


def test_late_writes_do_not_disturb_a_capture(tmp_path):
    recorder = Recorder(tmp_path / "a", flush_every=1, flush_seconds=0.001)
    recorded(recorder, steps=3, device="cuda")
    static = torch.zeros(1 << 20, device="cuda")
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for _ in range(50):
                static.add_(1.0)
                time.sleep(0.0005)
        graph.replay()
    assert static[0].item() == 1000.0
    recorder.close()
    assert len(read_run(tmp_path / "a").steps) == 3
