"""The recorded step on a GPU: CUDA graphs, ours and the user's, and no host synchronization."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradilocks import optim
from gradilocks.optim.fused_step import FusedStep
from gradilocks.ranks.layout import Layout
from gradilocks.step.decide import ROW, StepInputs
from optim import twins

pytestmark = pytest.mark.gpu

SHAPES = [(), (0,), (1,), (513, 70), (4097,), (300, 300)]
CUDA = "cuda"


def number(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=CUDA)


def make(*, dtype=torch.float32, layout=None, name="AdamW", shapes=SHAPES, **options):
    """Parameters with gradients, an optimizer and a recorded step over it, at a scale of 4."""
    from gradilocks.kernels.recorded_step import RecordedStep
    from gradilocks.kernels.triton_kernels import StepTensors

    params = twins.parameters(shapes, dtype=dtype, device=CUDA)
    twins.fill_gradients(params, 0)
    optimizer = getattr(optim, name)(params, lr=0.01, **options)
    fused = FusedStep.make([optimizer])
    step = StepTensors(
        rules=number([0.1, 3e38, 2.0, 0.5, 2000.0, 2.0**-10, 2.0**20, 1.0], torch.float64),
        scale=number(4.0),
        growth_tracker=number(0, torch.int32),
        hysteresis=number(1, torch.int32),
        streak=number(0, torch.int32),
        steps=number(0, torch.int64),
        skip=number(0.0),
        divisor=number(1.0),
        multiplier=number(1.0, torch.float64),
    )
    recorded = RecordedStep(params, step, order=2.0, fused=fused, layout=layout)
    return SimpleNamespace(params=params, optimizer=optimizer, fused=fused, step=step, recorded=recorded)


def run(twin, *, updates_scale=True, is_unscaled=False, overflow=None, loss=None):
    assert twin.fused.is_current()
    addresses = twin.recorded._reader.read_gradients([param.grad for param in twin.params])
    return twin.recorded.launch(addresses, StepInputs(is_unscaled, updates_scale, overflow, loss))


def everything(twin):
    return [*twins.snapshot(twin.optimizer), [tensor.clone() for tensor in twin.step]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "master_weights": True},
        {"dtype": torch.float16, "master_weights": True},
        {"name": "SGD", "momentum": 0.9, "nesterov": True},
    ],
    ids=str,
)
def test_replayed_steps_equal_launched_steps_bit_for_bit(options):
    replayed, launched = make(**options), make(**options)
    launched.recorded._is_recordable = False
    for step in range(8):
        for twin in (replayed, launched):
            if step % 2:
                twins.fill_gradients(twin.params, step)
            if step == 5:
                twin.params[3].grad[5, 5] = math.nan
            twin.optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            run(twin, overflow=number(float(step == 6)) if step > 3 else None)
    assert None not in replayed.recorded._graphs.values()
    assert set(launched.recorded._graphs.values()) == {None}
    assert twins.have_same_bits(everything(replayed), everything(launched))
    skipped = [replayed.recorded.row(slot)[ROW.index("skipped")].item() for slot in range(8)]
    assert skipped == [0, 0, 0, 0, 0, 1, 1, 0]


def test_the_trajectory_is_that_of_torchs_scaler_and_clipping():
    twin = make()
    params = twins.parameters(SHAPES, device=CUDA)
    expected = torch.optim.AdamW(params, lr=0.01, fused=True)
    for step in range(4):
        twins.fill_gradients(twin.params, step, factor=4.0)
        slot = run(twin)
        twins.fill_gradients(params, step)
        norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
        expected.step()
        torch.testing.assert_close(twin.recorded.row(slot)[ROW.index("norm")].float(), norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(twin.params, params, rtol=2e-6, atol=2e-7)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_device():
    """First step, capture, replay, new gradients, new settings, and a gradient that appears later."""
    twin = make()
    twin.params[3].grad = None
    loss, overflow = number(1.0), number(0.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6):
            if step == 3:
                for param in twin.params[:3]:
                    param.grad = torch.ones_like(param)
                twin.optimizer.param_groups[0]["lr"] = 0.5
            run(twin, overflow=overflow if step % 2 else None, loss=loss)
        twin.params[3].grad = torch.ones_like(twin.params[3])
        assert not twin.fused.is_current() or twin.optimizer.state[twin.params[3]]
        twin.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_memory_is_allocated_by_steps():
    twin = make()
    for _ in range(3):
        run(twin)
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        run(twin)
    assert torch.cuda.memory_allocated() == before


def test_if_cuda_refuses_a_capture_the_kernels_are_launched(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no capture today")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    twin = make()
    slots = [run(twin) for _ in range(4)]
    assert [twin.recorded.row(slot)[ROW.index("step")].item() for slot in slots] == [1, 2, 3, 4]
    assert not twin.recorded._is_recordable


@pytest.mark.parametrize("way", ["recorded step", "optimizer"])
def test_a_graph_of_the_user_contains_the_step(way):
    """Replays read the captured gradients, and eager steps in between read theirs."""
    captured, eager = make(), make()

    def take(twin, step):
        """One step on the same memory with new values."""
        for param, value in zip(twin.params, twins.values(SHAPES, seed=100 + step), strict=True):
            param.grad.copy_(value.to(CUDA))
        if twin is captured and step in (2, 3, 5):
            graph.replay()
        elif way == "optimizer":
            twin.optimizer.step()
        else:
            run(twin)

    for twin in (captured, eager):
        for step in range(2):
            take(twin, step)
    original = [param.grad for param in captured.params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slot = captured.optimizer.step() if way == "optimizer" else run(captured)
    for step in range(2, 7):
        is_replayed = step in (2, 3, 5)
        for param, grad in zip(captured.params, original, strict=True):
            param.grad = grad if is_replayed else torch.empty_like(grad)
        for twin in (captured, eager):
            take(twin, step)
        if way == "recorded step" and is_replayed:
            assert captured.recorded.row(slot)[ROW.index("step")].item() == step + 1
            assert torch.equal(captured.recorded.last_row(), captured.recorded.row(slot))
            torch.testing.assert_close(captured.recorded.statistics(slot), eager.recorded.statistics(step))
    assert twins.have_same_bits(everything(captured), everything(eager))


def test_steps_on_another_stream():
    twin, other = make(), make()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            run(twin)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(4):
        run(other)
    assert twins.have_same_bits(everything(twin), everything(other))


def test_through_a_collective_the_result_is_the_same():
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device(CUDA, 0))
    try:
        group = dist.group.WORLD
        device = torch.device(CUDA, 0)
        layout = Layout((0,), (group,), (group,), (), 0, (1.0,) * len(SHAPES), device)
        shared, alone = make(layout=layout), make()
        for step in range(5):
            for twin in (shared, alone):
                twins.fill_gradients(twin.params, step)
                run(twin, loss=number(3.0))
        assert twins.have_same_bits(everything(shared), everything(alone))
        assert shared.recorded.rows[0, 3:5].tolist() == [3.0, 1.0]
        assert None not in shared.recorded._graphs.values()
    finally:
        dist.destroy_process_group()


def test_a_learning_rate_on_the_gpu_takes_torchs_step():
    params = twins.parameters(SHAPES, device=CUDA)
    optimizer = optim.AdamW(params, lr=number(0.01))
    twins.run(optimizer, 2)
    assert not twins.uses_kernels(optimizer)
