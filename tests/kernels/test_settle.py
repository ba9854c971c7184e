"""One launch settles a step as the policies in Python do: same decision, row, and state after it.

The policies are asked by a real Engine: `decide` measures, clips, decides and builds the row, and
`conclude` moves everything on.
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
pytest.importorskip("hypothesis", reason="the cases are drawn by hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from gradilocks import ClipByNorm, DynamicScale, NoClip, StaticScale, kernels
from gradilocks.kernels import chunks, triton_backend, triton_measure, triton_settle
from gradilocks.kernels.triton_settle import Settler
from gradilocks.names import Names
from gradilocks.scale import NoScale
from gradilocks.step.engine import Engine
from gradilocks.step.table import GradientTable
from gradilocks.step.update import _as_divisor
from gradilocks.values import ScaleState

# The interpreter computes with NumPy, which warns where arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = math.inf, math.nan
MOST = 2**31 - 1
COMPILED = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(COMPILED, reason="with a GPU the kernels are compiled, not read"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)

ELEMENTS = [0.0, -1.0, 1e-6, 3.0, 1e-40, 65504.0, 3e38, INF, -INF, NAN]
WIDE = [*ELEMENTS, 5e-324, 1e39, 1e200, 1.7e308]
FINITE = [0.0, -1.0, 1e-6, 3.0, 1e-40, 65504.0, 3e38]


class Standing:
    """What moves, in copies that one settling may change."""

    def __init__(self, device, scale=1.0, tracker=0, hysteresis=1, streak=0, steps=0):
        def number(value, dtype):
            return torch.full((), value, dtype=dtype, device=device)

        self.state = ScaleState(
            number(scale, torch.float32),
            number(tracker, torch.int32),
            number(hysteresis, torch.int32),
        )
        self.streak, self.steps = number(streak, torch.int32), number(steps, torch.int64)

    def numbers(self):
        state = self.state
        moving = (state.scale, state.growth_tracker, state.hysteresis, self.streak, self.steps)
        return [tensor.item() for tensor in moving]


def by_the_policies(tensors, policy, clip, loss, unscaled, standing):
    engine = Engine(policy, clip, names=Names(None, ()))
    engine.state, engine.steps = standing.state, standing.steps
    engine.streak.count = standing.streak
    if loss is not None:
        engine.losses.note(loss, torch.device(loss.device))
    verdict = engine.decide(gradients_of(tensors), unscaled=unscaled, on_device=False)
    assert not verdict.settled
    engine.conclude(verdict)
    return verdict.decision, verdict.record


def by_the_kernel(tensors, policy, clip, loss, unscaled, standing, settler):
    found = gradients_of(tensors)
    rules = clip.rules(), policy.rules()
    settler.begin(found.addressed, *rules, largest_finite=found.largest_finite)
    return settler.settle(
        found.addressed,
        *rules,
        standing.state,
        streak=standing.streak,
        steps=standing.steps,
        loss=loss,
        unscaled=unscaled,
        moves=True,
    )


def gradients_of(tensors):
    params = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for param, tensor in zip(params, tensors, strict=True):
        param.grad = tensor
    found = GradientTable().find_addressed([[params]], name=str)
    assert found is not None
    return found


def check(device, tensors, policy, clip, *, loss=None, unscaled=False, **standing):
    """Settles one step both ways; hands over what the kernel said."""
    one, two = Standing(device, **standing), Standing(device, **standing)
    before = one.numbers()
    settler = Settler(torch.device(device))
    with served(device):  # Both measure with the same kernels: only the settling differs.
        decision, record = by_the_policies(tensors, policy, clip, loss, unscaled, one)
        settled, told = by_the_kernel(tensors, policy, clip, loss, unscaled, two, settler)
    assert settled.skip.item() == decision.skip.item()
    assert settled.skip.item() in (0.0, 1.0)
    assert settled.multiplier.item() == pytest.approx(decision.multiplier.item(), rel=1e-12)
    assert settled.divisor.dtype is torch.float32
    assert settled.divisor.item() == _as_divisor(settled.multiplier).item()
    row, expected = told.row.tolist(), record.row.tolist()
    assert row[:9] == pytest.approx(expected, rel=1e-12, abs=0.0, nan_ok=True)
    for place in (0, 1, 3, 4, 5, 6, 7, 8):
        assert row[place] == expected[place]
    assert row[9:] == before[1:4]
    for name in ("norms", "largest", "zeros", "nan", "inf"):
        numbers = getattr(told.statistics, name), getattr(record.statistics, name)
        torch.testing.assert_close(*numbers, rtol=0, atol=0, equal_nan=True)
    assert two.numbers() == one.numbers()
    settler.undo(told, two.state, two.streak, two.steps)
    assert two.numbers() == before
    return settled, row


@contextmanager
def served(device):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels.BACKENDS, device, triton_backend)
        if device == "cpu":
            patch.setattr(chunks, "CHUNK", 16)
        yield


def tensor_lists(elements, dtype):
    one = st.lists(st.sampled_from(elements), min_size=0, max_size=3)
    return st.lists(one, min_size=1, max_size=3).map(
        lambda lists: [torch.tensor(values, dtype=dtype) for values in lists]
    )


gradients = st.one_of(
    tensor_lists(ELEMENTS, torch.float32),
    tensor_lists(FINITE, torch.float32),
    tensor_lists(WIDE, torch.float64),
    st.tuples(tensor_lists(FINITE, torch.float32), tensor_lists(WIDE, torch.float64)).map(
        lambda both: both[0] + both[1]
    ),
)
clips = st.one_of(
    st.just(NoClip()),
    st.builds(
        ClipByNorm,
        st.sampled_from([0.0, 1e-30, 0.5, 7, 1e30, INF]),
        order=st.sampled_from([1, 1.0, 2.0, INF]),
    ),
)
scale_numbers = st.sampled_from([2.0**-126, 2.0**-24, 0.3, 1.0, 65536.0, 2.0**32, 3.4e38])


@st.composite
def scales(draw):
    kind = draw(st.sampled_from(["none", "static", "dynamic", "dynamic"]))
    if kind == "none":
        return NoScale()
    start = draw(scale_numbers)
    if kind == "static":
        return StaticScale(start)
    return DynamicScale(
        init_scale=start,
        growth_factor=draw(st.sampled_from([2.0, 1.001, 1e30])),
        backoff_factor=draw(st.sampled_from([0.5, 0.999, 1e-30])),
        growth_interval=draw(st.sampled_from([1, 2, 2000, MOST, MOST + 1, 2**40])),
        min_scale=start if draw(st.booleans()) else 2.0**-126,
        max_scale=start if draw(st.booleans()) else 3.4e38,
        hysteresis=draw(st.sampled_from([1, 2, MOST])),
    )


losses = st.one_of(
    st.none(),
    st.builds(
        lambda value, dtype: torch.tensor(value, dtype=dtype),
        st.sampled_from([0.0, 2.5, -3.4e38, INF, -INF, NAN]),
        st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    ),
)


@on_each_device
@settings(max_examples=60)
@given(
    tensors=gradients,
    scale=scales(),
    clip=clips,
    loss=losses,
    unscaled=st.booleans(),
    tracker=st.sampled_from([0, 1, 5, MOST - 1, MOST]),
    hysteresis=st.sampled_from([-(2**31), -1, 0, 1, 2, 9]),
    streak=st.sampled_from([0, 1, 99, MOST - 1]),
    steps=st.sampled_from([0, 41, 2**33]),
)
def test_the_kernel_settles_as_the_policies_do(
    device, tensors, scale, clip, loss, unscaled, tracker, hysteresis, streak, steps
):
    check(
        device,
        [tensor.to(device) for tensor in tensors],
        scale,
        clip,
        loss=None if loss is None else loss.to(device),
        unscaled=unscaled,
        scale=scale.start(torch.device("cpu")).scale.item(),
        tracker=tracker,
        hysteresis=hysteresis,
        streak=streak,
        steps=steps,
    )


@on_each_device
@settings(max_examples=30)
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4),
    scale=st.floats(2.0**-126, 2.0**127, width=32),
    max_norm=st.floats(0.0, INF),
    order=st.sampled_from([1.0, 2.0, INF]),
)
def test_any_finite_numbers_are_settled_alike(device, values, scale, max_norm, order):
    tensors = [torch.tensor([value], dtype=torch.float64, device=device) for value in values]
    check(device, tensors, StaticScale(scale), ClipByNorm(max_norm, order=order), scale=scale)


@on_each_device
@pytest.mark.parametrize("bad", [{}, {3: NAN, 16: INF}], ids=str)
def test_more_tensors_than_one_block_are_all_counted(device, bad, monkeypatch):
    count = 1030
    if device == "cpu":  # The interpreter is slow: smaller blocks, fewer tensors.
        count, real = 21, triton_settle.launch_for

        def in_small_blocks(*args, **constants):
            return real(*args, **constants | ({"BLOCK": 8} if "BLOCK" in constants else {}))

        for module in (triton_backend, triton_measure, triton_settle):
            monkeypatch.setattr(module, "launch_for", in_small_blocks)
    tensors = [torch.ones(0, device=device) for _ in range(count)]
    for place, value in {3: 3.0, 16: 4.0, -1: 12.0, **bad}.items():
        tensors[place] = torch.full((1,), value, device=device)
    _, row = check(device, tensors, NoScale(), ClipByNorm(1.0))
    assert row[7:9] == [float(bool(bad))] * 2
    assert math.isnan(row[2]) if bad else row[2] == pytest.approx(13.0, rel=1e-12)


@on_each_device
def test_a_float64_norm_beyond_float64_is_clipped_and_not_skipped(device):
    tensors = [torch.full((3,), 1.7e308, dtype=torch.float64, device=device) for _ in "ab"]
    decision, row = check(device, tensors, NoScale(), ClipByNorm(1.0))
    assert (decision.skip.item(), row[2], row[4]) == (0.0, INF, 1.0)


@on_each_device
def test_finite_gradients_that_overflow_when_unscaled_are_skipped(device):
    tiny = StaticScale(2.0**-100)
    small, large = ([torch.tensor([x], device=device)] for x in (1e8, 1e9))
    for tensors, skip in ((small, 0.0), (large, 1.0), ([t.double() for t in large], 0.0)):
        decision, _ = check(device, tensors, tiny, NoClip(), scale=2.0**-100)
        assert decision.skip.item() == skip


@on_each_device
@settings(max_examples=20)
@given(
    bad=st.lists(st.booleans(), min_size=1, max_size=12),
    interval=st.sampled_from([1, 2, 3]),
    hysteresis=st.sampled_from([1, 2, 3]),
)
def test_a_run_of_steps_moves_the_scale_as_its_policy_does(device, bad, interval, hysteresis):
    policy = DynamicScale(
        init_scale=8.0, growth_interval=interval, hysteresis=hysteresis, min_scale=1.5, max_scale=40
    )
    one, two = Standing(device, 8.0, 0, hysteresis), policy.start("cpu")
    settler = Settler(torch.device(device))
    streak = 0
    for broken in bad:
        tensors = [torch.tensor([NAN if broken else 1.0], device=device)]
        with served(device):
            by_the_kernel(tensors, policy, NoClip(), None, False, one, settler)
        policy.advance(two, torch.tensor(float(broken)))
        streak = streak + 1 if broken else 0
        expected = [two.scale.item(), two.growth_tracker.item(), two.hysteresis.item(), streak]
        assert one.numbers()[:4] == expected
    assert one.steps.item() == len(bad)
