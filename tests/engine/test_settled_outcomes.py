"""The Outcome of a step that the device has settled: its own, on the device until it is read."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from gradilocks import GradientControl
from gradilocks.errors import NeverFinite
from gradilocks.step import outcome as record
from gradilocks.step.outcome import NonFiniteCount
from tests.engine.backends import (
    INF,
    NAN,
    loss_giving,
    parameter,
    read_at_once,
    step,
)

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_an_outcome_that_is_kept_still_shows_its_own_step(device, settling):
    p, q = parameter(3, device=device), parameter(4, device=device)
    control = GradientControl(torch.optim.SGD([p, q], lr=0.1), scale="dynamic", clip=4.0)
    script = [(1.0, 2.0), (INF, 2.0), (3.0, 0.0), (NAN, INF), (0.25, 0.5)]
    kept = [step(control, (p, one), (q, two)) for one, two in script]
    assert settling.count == 5
    for number, (outcome, (one, two)) in enumerate(zip(kept, script, strict=True), start=1):
        skipped = not (math.isfinite(one) and math.isfinite(two))
        assert (outcome.step, outcome.skipped, outcome.limit) == (number, skipped, 4.0)
        if not skipped:
            norm = math.sqrt(3 * one * one + 4 * two * two)
            assert outcome.norm == pytest.approx(norm, rel=1e-6)
            assert outcome.clipped == (norm > 4.0)
    assert [outcome.scale for outcome in kept] == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14]
    assert math.isnan(kept[3].norm)
    assert kept[1].norm == INF
    names = [f"param_groups[0]['params'][{k}]" for k in (1, 0)]
    assert kept[3].counts == {names[0]: NonFiniteCount(0, 4), names[1]: NonFiniteCount(3, 0)}
    assert list(kept[3].counts) == names
    assert kept[1].culprits == (names[1],)
    assert kept[4].counts == {}


def test_the_statistics_are_those_of_each_gradient_as_it_stood(device, settling):
    p, q = parameter(4, device=device), parameter(2, 2, device=device)
    control = GradientControl(torch.optim.SGD([p, q], lr=0.1), scale=8.0)
    first = step(
        control,
        (p, torch.tensor([0.0, -3.0, 4.0, 0.0])),
        (q, torch.tensor([[NAN, INF], [-INF, 2.0]])),
    )
    step(control, (p, 1.0), (q, 1.0))
    found = first.statistics
    assert found.norms[0].item() == 8.0 * 5.0
    assert math.isnan(found.norms[1].item())
    assert found.largest.tolist() == [32.0, INF]
    assert found.zeros.tolist() == [2, 0]
    assert found.nan.tolist() == [0, 1]
    assert found.inf.tolist() == [0, 2]
    assert {name: getattr(found, name).dtype for name in ("norms", "largest")} == {
        "norms": torch.float64,
        "largest": torch.float64,
    }
    assert {getattr(found, name).dtype for name in ("zeros", "nan", "inf")} == {torch.int64}
    assert found.norms.device == p.device


def test_taking_the_statistics_reads_nothing(device, settling, monkeypatch):
    def refused(*_):
        raise AssertionError("the host has waited for the device")

    p = parameter(4, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True))
    with monkeypatch.context() as patch:
        patch.setattr(record, "fetch", refused)
        outcome = step(control, (p, 1.0))
        assert outcome.statistics.norms.shape == (1,)
        assert outcome.statistics is outcome.statistics
        with pytest.raises(AssertionError, match="has waited"):
            _ = outcome.skipped
    assert not outcome.skipped


def test_an_outcome_keeps_neither_gradients_nor_replaced_parameters(device, settling):
    p, q = parameter(4, device=device), parameter(3, device=device)
    optimizer = torch.optim.SGD([p, q], lr=0.1)
    control = GradientControl(optimizer)
    kept = step(control, (p, NAN), (q, NAN))
    assert settling.count == 1
    gone = weakref.ref(q)
    del optimizer.param_groups[0]["params"][1], q
    optimizer.state.clear()
    step(control, (p, 1.0))
    gc.collect()
    assert gone() is None
    assert kept.culprits == ("param_groups[0]['params'][0]",)


def test_a_broken_micro_batch_is_told_from_a_broken_gradient(device, settling, monkeypatch):
    read_at_once(monkeypatch)
    p = parameter(2, device=device)
    said = []
    for values in ([NAN, 1.0], [1.0, NAN], [1.0, 1.0], [1.0, -INF, 2.0]):
        control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True), give_up_after=1)
        control.zero_grad()
        for value in values:
            control.backward(loss_giving((p, INF), value=value))
        with pytest.raises(NeverFinite) as caught:
            control.step()
        said.append("loss itself" in str(caught.value))
    assert said == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_loss_of_any_dtype_and_shape_is_looked_at(device, settling, dtype, shape):
    p = parameter(2, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True), scale=8.0)
    for value, broken in ((1.0, 0.0), (NAN, 1.0)):
        control.zero_grad()
        loss = (p.sum() * 0.0 + value).to(dtype).reshape(shape)
        control.backward(loss)
        row = control.step()._record.row
        assert row[6].item() == broken
    assert settling.count == 2


def test_losses_that_are_not_reduced_are_looked_at(device, settling):
    p = parameter(2, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True), scale=8.0)
    for value, broken in ((1.0, 0.0), (NAN, 1.0)):
        control.zero_grad()
        factors = torch.tensor([1.0, value], device=device)
        control.scale_loss(p * factors).sum().backward()
        assert control.step()._record.row[6].item() == broken
    assert settling.count == 2


def test_a_loss_on_another_device_or_of_a_subclass_is_looked_at_all_the_same(device, settling):
    class Odd(torch.Tensor):
        pass

    p = parameter(2, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True), scale=8.0)
    for move in (lambda loss: loss.cpu(), lambda loss: loss.as_subclass(Odd)):
        for value, broken in ((1.0, 0.0), (INF, 1.0)):
            control.zero_grad()
            control.backward(move((p * value).sum()))
            assert control.step()._record.row[6].item() == broken
    assert settling.count == 4
