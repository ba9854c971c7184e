"""Numbers that travel together arrive where they belong; samples of weights are fair."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from gradilocks import ClipByNorm, GradientControl, Recorder, kernels, optim, read_run
from gradilocks.kernels import native, reference
from gradilocks.kernels.kernel_results import KernelStatistics
from gradilocks.record import Sample, batch
from gradilocks.record.batch import Batch, PendingNumbers, PendingStep
from gradilocks.record.sample import LARGEST_WHOLE, Weights, update_ratios
from gradilocks.values import ROW, StepRecord
from tests.record.recorded import INF, NAN, recorded, small_model, train

TRITON = "gradilocks.kernels.triton_backend"


def moved_by_step(weights):
    """The norms before it, and ‖change‖ / ‖before‖."""
    weight, change = weights.norms(torch.device("cpu"))
    return weight, torch.tensor(update_ratios(weight.tolist(), change.tolist()))


def held(number):
    return PendingStep(Sample(), index=0, step=number, time=0.0, detail=True)


def test_what_was_gathered_by_dtype_comes_back_to_its_own_step():
    rows = [held(1), held(2), held(3)]
    for number, row in enumerate(rows):
        row.on_device = [
            (("loss", "scale"), torch.tensor([number, 2.0 * number], dtype=torch.float32)),
            ("counts", torch.tensor([number, 0, 7, 0])),
            (("norm",), torch.tensor([0.5 * number], dtype=torch.float64)),
            ("norms", torch.arange(number, dtype=torch.float64)),
        ]
    batch = Batch(rows)
    assert batch.is_here()
    for number, row in enumerate(batch.unpack()):
        assert (row.scalars["loss"], row.scalars["scale"]) == (number, 2.0 * number)
        assert row.scalars["norm"] == 0.5 * number
        assert row.counts() == ([number, 0], [7, 0])
        assert row.column("norms") == list(range(number))


def test_numbers_of_the_users_own_come_back_with_the_steps_they_travelled_with():
    row, own = held(1), PendingNumbers({"a": 1.0, "b": 2.0}, step=1, time=0.5)
    row.on_device = [(("loss",), torch.tensor([3.0]))]
    own.on_device = [(("b",), torch.tensor([4.0], dtype=torch.float64))]
    step, numbers = Batch([row, own]).unpack()
    assert step.scalars["loss"] == 3.0
    assert numbers.to_logged() == (1, 0.5, {"a": 1.0, "b": 4.0})


def test_the_last_step_of_a_batch_tells_the_peak_of_memory():
    rows = [held(1), held(2), held(3)]
    steps = Batch(rows).unpack()
    assert [row.memory is None for row in steps] == [True, True, False]
    here = bytearray(64 << 20)
    here[:: 1 << 12] = b"x" * (len(here) >> 12)  # Every page of it is really there.
    (later,) = Batch([held(4)]).unpack()
    del here
    (after,) = Batch([held(5)]).unpack()
    assert later.memory >= steps[-1].memory
    assert later.memory >= 64 << 20
    # The most so far, not what is held now; Linux adds up its counts of pages only now and then.
    assert after.memory > later.memory - (8 << 20)
    assert [row.gpu_memory for row in (*steps, later)] == [None] * 4


def test_scalars_are_copied_when_they_are_handed_over():
    flag, rate = torch.zeros(()), torch.full((1,), 0.5, requires_grad=True)
    sample = Sample(skip=flag, lr=rate, loss=torch.ones(1, requires_grad=True))
    row = PendingStep(sample, index=0, step=1, time=0.0, detail=False)
    flag.fill_(1.0)
    rate.detach().fill_(1.0)
    Batch([row]).unpack()
    assert [row.scalars[name] for name in ("skip", "lr", "loss")] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("shape", [(3,), (128, 256), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_small_tensor_is_looked_at_whole(shape, dtype):
    torch.manual_seed(0)
    param = torch.randn(shape, dtype=dtype)
    before, weights = param.clone(), Weights([param])
    param.mul_(1.5)
    weight, update = moved_by_step(weights)
    norm = before.to(torch.complex128 if dtype.is_complex else torch.float64).norm().item()
    assert weight.item() == pytest.approx(norm, rel=1e-3)
    assert update.item() == pytest.approx(0.5 if before.numel() else 0.0, rel=1e-2)


@pytest.mark.parametrize("layout", ["plain", "channels last", "transposed", "a slice"])
def test_a_large_tensor_is_estimated_from_a_fixed_sample(layout):
    torch.manual_seed(0)
    param = {
        "plain": torch.randn(700, 512),
        "channels last": torch.randn(64, 32, 9, 16).to(memory_format=torch.channels_last),
        "transposed": torch.randn(512, 700).t(),
        "a slice": torch.randn(700, 600)[:, 5:517],
    }[layout]
    before, weights = param.clone(), Weights([param])
    assert sum(each.elements.numel() for each in weights._before) <= LARGEST_WHOLE
    param.add_(torch.randn_like(param), alpha=0.01)
    weight, update = moved_by_step(weights)
    assert weight.item() == pytest.approx(before.norm().item(), rel=0.02)
    exact = ((param - before).norm() / before.norm()).item()
    assert update.item() == pytest.approx(exact, rel=0.02)


def test_the_sample_sees_every_column_of_a_matrix():
    param = torch.zeros(1536, 384)
    columns = torch.arange(384.0).expand(1536, 384)
    weights = Weights([param.copy_(columns)])
    assert weights._before[0].elements.unique().numel() == 384


def test_nothing_moved_is_exactly_zero_and_a_start_from_zero_has_no_ratio():
    still, started = torch.zeros(3), torch.zeros(3)
    weights = Weights([still, started])
    started.add_(1.0)
    weight, update = moved_by_step(weights)
    assert weight.tolist() == [0.0, 0.0]
    assert update[0] == 0.0
    assert math.isinf(update[1])


def two_optimizers(record, **settings):
    """A control of two, whose second optimizer has a parameter without a gradient."""
    model = small_model()
    unused = torch.nn.Parameter(torch.ones(3))
    parts = [model[0].parameters(), [*model[2].parameters(), unused]]
    made = [torch.optim.SGD(part, lr=0.01) for part in parts]
    train(GradientControl(*made, model=model, record=record, **settings), model, **TRAINING)


def one_optimizer(record, **settings):
    recorded(record, **TRAINING, **settings)


def own_optimizer(record, **settings):
    recorded(record, optimizer=lambda p: optim.AdamW(p, lr=0.01), **TRAINING, **settings)


TRAINING = {"steps": 11, "bad": {3: INF, 6: NAN, 11: INF}}


@pytest.mark.parametrize("settings", [{}, {"clip": ClipByNorm(0.1, order=INF)}, {"scale": None}])
@pytest.mark.parametrize("trained", [one_optimizer, two_optimizers, own_optimizer])
@pytest.mark.parametrize("by", ["by torch", "native", "interpreted"])
def test_what_travels_from_a_device_is_what_is_read_on_the_host(
    by, trained, settings, tmp_path, monkeypatch, caplog
):
    if by == "interpreted":
        if torch.cuda.is_available():
            pytest.skip("with a GPU the kernels are compiled, not read")
        monkeypatch.setitem(kernels.BACKENDS, "cpu", pytest.importorskip(TRITON))
    elif by == "by torch":
        monkeypatch.setitem(kernels.BACKENDS, "cpu", reference)
    elif native.library() is None:
        pytest.skip("the native library is not there")
    told = []
    for name, is_here in (("host", batch.is_here), ("device", lambda tensor: False)):
        monkeypatch.setattr(batch, "is_here", is_here)
        caplog.clear()
        with Recorder(tmp_path / name, flush_every=4, detail_every=5) as recorder:
            trained(recorder, **settings)
        steps = read_run(tmp_path / name).steps
        told.append([step._replace(time=0.0, memory=None) for step in steps])
        told.append(caplog.messages)
    assert told[0] == told[2]
    assert told[1] == told[3]
    skipped = [step for step in told[0] if step.skipped]
    assert {step.step for step in skipped} == {3, 6, 11}
    assert all(step.culprits for step in skipped)
    assert told[0][0].detail is not None
    assert any("skipped" in message for message in told[1])


def test_a_step_that_is_held_lets_go_of_its_gradients_statistics_with_its_batch():
    found = torch.zeros(5, 3, dtype=torch.float64)
    gone = weakref.ref(found)
    row = torch.zeros(len(ROW), dtype=torch.float64)
    record = StepRecord(row, row[0], lambda kept=found: KernelStatistics.of(kept))
    step = PendingStep(Sample(record=record), index=0, step=1, time=0.0, detail=False)
    del record, found
    Batch([step])
    gc.collect()
    assert gone() is None
