"""The decision of a step: `decide` in torch operations and `decide_on_host` in Python numbers agree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradilocks import ClipByNorm, SkipSpikes, StaticScale
from gradilocks.scale import DynamicScale
from gradilocks.step.clip_stage import ClipStage
from gradilocks.step.decide import ROW, Decision, StepInputs, decide
from gradilocks.step.host_step import HostStep, Totals, decide_on_host
from gradilocks.step.state import StepState

INF, NAN = math.inf, math.nan
FLOAT32_MAX, FLOAT16_MAX = torch.finfo(torch.float32).max, 65504.0

magnitudes = st.one_of(
    st.floats(0.0, 1e4),
    st.floats(0.0, FLOAT32_MAX, width=32),
    st.sampled_from([0.0, 1e-45, 1e-38, 1.0, 65504.0, 1e38, FLOAT32_MAX]),
)
columns = st.tuples(magnitudes, st.integers(0, 3), st.integers(0, 3))
limits = st.one_of(st.floats(0.0, 100.0), st.sampled_from([0.0, 1e-30, 1.0, 1e30, INF]))
scales = st.one_of(st.integers(-126, 127).map(lambda k: 2.0**k), st.floats(2.0**-60, 2.0**60, width=32))


def statistics_of(rows):
    """Statistics as `kernels.measure` returns them, for (norm, NaN, Inf) of each gradient."""
    table = torch.zeros(5, len(rows), dtype=torch.float64)
    for i, (norm, nan, inf) in enumerate(rows):
        table[0, i] = NAN if nan else INF if inf else norm
        table[1, i] = INF if inf else norm
        table[3, i], table[4, i] = nan, inf
    return table


def both(
    statistics, *, order=2.0, max_norm=INF, scale=8.0, is_unscaled=False, max_gradient=FLOAT32_MAX, overflow=None
) -> tuple[Decision, Decision]:
    state = StepState(StaticScale(scale))
    tensors = [torch.zeros(1) for _ in range(statistics.shape[1])]
    policy = ClipByNorm(max_norm, order=order)
    stage = ClipStage([policy], tensors, [str(i) for i in range(len(tensors))], [(0, None)] * len(tensors))
    flag = None if overflow is None else torch.tensor(overflow)
    inputs = StepInputs(is_unscaled, overflow=flag)
    norms, largest, _, nan, inf = statistics.unbind()
    norm = torch.linalg.vector_norm(norms, order).item()
    totals = Totals(norm, largest.max().item(), nan.sum().item(), inf.sum().item())
    on_host = decide_on_host(
        totals, policy, inputs, scale=scale, step=1, max_gradient=max_gradient, statistics=lambda: statistics
    )
    return decide(statistics, tensors, stage, state, inputs, max_gradient=max_gradient), on_host


def close(one, other):
    return math.isclose(one, other, rel_tol=3e-7) or (one != one and other != other)


@settings(max_examples=400)
@given(
    rows=st.lists(columns, min_size=1, max_size=4),
    order=st.sampled_from([1.0, 2.0, 3.0, 8.0, INF]),
    max_norm=limits,
    scale=scales,
    is_unscaled=st.booleans(),
    max_gradient=st.sampled_from([FLOAT16_MAX, FLOAT32_MAX]),
    overflow=st.sampled_from([None, 0.0, 1.0]),
)
def test_both_rules_agree(rows, order, max_norm, scale, is_unscaled, max_gradient, overflow):
    on_device, on_host = both(
        statistics_of(rows),
        order=order,
        max_norm=max_norm,
        scale=scale,
        is_unscaled=is_unscaled,
        max_gradient=max_gradient,
        overflow=overflow,
    )
    one, other = (dict(zip(ROW, decision.row().tolist(), strict=True)) for decision in (on_device, on_host))
    assert on_host.is_skipped == bool(on_host.skip) == bool(on_device.skip) == one["skipped"] == other["skipped"]
    for name in ("rejected", "scale", "limit", "step", "nan", "inf"):
        assert one[name] == other[name]
    assert close(one["norm"], other["norm"])
    # A norm that float32 rounding moves across its limit is clipped by a factor next to 1.
    assert one["clipped"] == other["clipped"] or close(one["norm"], max_norm)
    assert close(float(on_device.multiplier), float(on_host.multiplier))
    assert close(float(on_device.divisor), float(on_host.divisor))
    assert bool(on_device.overflow) == bool(on_host.overflow)
    for decision in (on_device, on_host):
        assert decision.skip.item() in (0.0, 1.0)
        assert not math.isnan(float(decision.divisor))
    assert on_device.skip.dtype == on_device.divisor.dtype == torch.float32
    assert on_device.multiplier.dtype == torch.float64


def numbers(decision):
    return dict(zip(ROW, decision.row().tolist(), strict=True))


@pytest.mark.parametrize("index", [0, 1])
def test_gradients_that_unscaling_would_overflow_are_skipped(index):
    rows = statistics_of([(1000.0, 0, 0)])
    assert both(rows, scale=2.0**-10, max_gradient=FLOAT16_MAX)[index].skip.item() == 1.0
    assert both(rows, scale=2.0**-10, max_gradient=FLOAT32_MAX)[index].skip.item() == 0.0
    # Clipping brings them back into range.
    assert both(rows, scale=2.0**-10, max_gradient=FLOAT16_MAX, max_norm=1.0)[index].skip.item() == 0.0


@settings(max_examples=60)
@given(flags=st.lists(st.booleans(), max_size=12), interval=st.integers(1, 4), hysteresis=st.integers(1, 3))
def test_the_scale_moves_alike_on_host_and_device(flags, interval, hysteresis):
    policy = DynamicScale(init_scale=64.0, growth_interval=interval, hysteresis=hysteresis)
    on_host, on_device = StepState(policy), StepState(policy)
    param = torch.nn.Parameter(torch.zeros(3))
    step = HostStep([param], on_host, ClipByNorm(1.0), max_gradient=FLOAT32_MAX, fused=None)
    for overflow in flags:
        param.grad = torch.full((3,), NAN if overflow else 1.0)
        step.run([param.grad], StepInputs())
        on_device.update_scale(torch.tensor(overflow), torch.tensor(1.0))
        assert {k: v.item() for k, v in on_host.tensors.items()} == {k: v.item() for k, v in on_device.tensors.items()}
    assert on_host.steps.item() == len(flags)


def test_no_host_read_in_the_decision_on_a_device():
    from policies.drive import no_host_reads

    statistics = statistics_of([(3.0, 0, 0), (4.0, 0, 0)])
    tensors = [torch.ones(2), torch.ones(3)]
    for policies in ([], [ClipByNorm(1.0)], [SkipSpikes(window=4), ClipByNorm(1.0)]):
        stage = ClipStage(policies, tensors, ["a", "b"], [(0, None)] * 2)
        state = StepState(DynamicScale())
        with no_host_reads("cpu"):
            decision = decide(statistics, tensors, stage, state, StepInputs(), max_gradient=FLOAT32_MAX)
            if decision.clipping is not None:
                stage.update(decision.clipping, decision.skip == 0)
            state.update_scale(decision.overflow, decision.largest)
