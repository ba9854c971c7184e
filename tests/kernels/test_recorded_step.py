"""The recorded step, interpreted on CPU tensors, beside the decision in torch operations."""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks import optim
from gradilocks.clip import ClipByNorm
from gradilocks.errors import OutcomeExpired
from gradilocks.kernels import reference
from gradilocks.optim.fused_step import FusedStep
from gradilocks.ranks.collective import RANK_ROW
from gradilocks.ranks.layout import Layout
from gradilocks.scale import DynamicScale
from gradilocks.step.clip_stage import ClipStage
from gradilocks.step.decide import ROW, StepInputs, decide
from gradilocks.step.state import StepState
from optim import twins
from optim.conftest import use_interpreter

SHAPES = [(7,), (2, 345), (), (12,)]
FLOAT32_MAX = torch.finfo(torch.float32).max
RULES = {"init_scale": 1024.0, "growth_interval": 3, "min_scale": 64.0, "max_scale": 2048.0, "hysteresis": 2}


@pytest.fixture(autouse=True)
def device(monkeypatch):
    return use_interpreter(monkeypatch)


class Twin:
    """A recorded step and, beside it, the torch form of the decision on equal state."""

    def __init__(self, *, max_norm=1.0, order=2.0, layout=None, max_gradient=FLOAT32_MAX, fused=True, **rules):
        from gradilocks.kernels.recorded_step import RecordedStep
        from gradilocks.kernels.triton_kernels import StepTensors

        policy = DynamicScale(**{**RULES, **rules})
        self.state, self.expected_state = StepState(policy), StepState(policy)
        self.params = twins.parameters(SHAPES)
        self.optimizer = optim.AdamW(self.params, lr=0.01)
        twins.fill_gradients(self.params, 0)
        self.clip = ClipStage([ClipByNorm(max_norm, order)], self.params, ["p"] * 4, [(0, None)] * 4, layout)
        self.layout, self.max_gradient = layout, max_gradient
        numbers = self.state.rules
        self.recorded = RecordedStep(
            self.params,
            StepTensors(
                rules=torch.tensor(
                    [
                        max_norm, max_gradient, numbers.growth_factor, numbers.backoff_factor, numbers.growth_interval,
                        numbers.min_scale, numbers.max_scale, numbers.hysteresis,
                    ],
                    dtype=torch.float64,
                ),
                scale=self.state.tensors["scale"],
                growth_tracker=self.state.tensors["growth_tracker"],
                hysteresis=self.state.tensors["hysteresis"],
                streak=self.state.streak,
                steps=self.state.steps,
                skip=torch.zeros(()),
                divisor=torch.ones(()),
                multiplier=torch.ones((), dtype=torch.float64),
            ),
            order=order,
            fused=FusedStep.make([self.optimizer]) if fused else None,
            layout=layout,
        )  # fmt: skip

    @property
    def grads(self):
        return [param.grad for param in self.params]

    def decide(self, *, is_unscaled=False, updates_scale=True, overflow=None, loss=None):
        """Decides in both ways and compares all results; returns the slot."""
        # A missing gradient has no norm, no zeros and nothing else to report.
        present = [torch.zeros(0) if grad is None else grad for grad in self.grads]
        statistics = reference.measure(present, order=self.clip.order)
        inputs = StepInputs(is_unscaled, updates_scale, overflow, loss)
        options = {"layout": self.layout, "max_gradient": self.max_gradient}
        expected = decide(statistics, self.grads, self.clip, self.expected_state, inputs, **options)
        self.expected_state.steps += 1
        self.expected_state.streak.copy_(torch.where(expected.overflow, self.expected_state.streak + 1, 0))
        if updates_scale:
            self.expected_state.update_scale(expected.overflow, expected.largest)
        addresses = self.recorded._reader.read_gradients(self.grads)
        slot = self.recorded.launch(addresses, inputs)
        torch.testing.assert_close(self.recorded.statistics(slot), statistics, rtol=1e-14, atol=0.0, equal_nan=True)
        torch.testing.assert_close(self.recorded.row(slot), expected.row(), rtol=1e-14, atol=0.0, equal_nan=True)
        assert self.recorded.skip == expected.skip
        assert self.recorded.divisor == expected.divisor
        torch.testing.assert_close(self.recorded.multiplier, expected.multiplier, rtol=1e-14, atol=0.0)
        for name, tensor in self.state.tensors.items():
            assert torch.equal(tensor, self.expected_state.tensors[name]), name
        assert self.state.steps == self.expected_state.steps
        assert self.state.streak == self.expected_state.streak
        return slot

    def numbers(self, slot):
        return dict(zip(ROW, self.recorded.row(slot).tolist(), strict=True))


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 1e9, math.inf])
def test_the_kernel_decides_as_torch_operations_do(order, max_norm):
    twin = Twin(order=order, max_norm=max_norm)
    for step in range(2):
        twins.fill_gradients(twin.params, step, factor=1024.0)
        assert twin.numbers(twin.decide())["clipped"] == (max_norm < 1)


def test_the_scale_moves_as_the_policy_moves_it():
    """Growth, hysteresis, backoff, floor and ceiling over a script of finite and non-finite steps."""
    twin = Twin(fused=False)
    scales = []
    for step, is_bad in enumerate("...x.x...xxxxxx"):
        twins.fill_gradients(twin.params, step)
        if is_bad == "x":
            twin.params[step % 4].grad.view(-1)[0] = (math.inf, math.nan)[step % 2]
        twin.decide()
        scales.append(twin.state.scale.item())
    assert (min(scales), max(scales)) == (64.0, 2048.0)


def test_an_earlier_overflow_skips_the_step_and_is_forgotten():
    twin = Twin()
    assert twin.numbers(twin.decide(overflow=torch.ones(()), is_unscaled=True))["skipped"] == 1.0
    assert twin.numbers(twin.decide(overflow=torch.zeros(()), is_unscaled=True))["skipped"] == 0.0
    twin.decide(overflow=torch.ones(()))
    assert twin.numbers(twin.decide())["skipped"] == 0.0


@pytest.mark.parametrize(("is_unscaled", "updates_scale"), [(True, True), (False, False)])
def test_unscaled_gradients_and_a_scale_that_stays(is_unscaled, updates_scale):
    twin = Twin()
    for _ in range(4):
        twin.decide(is_unscaled=is_unscaled, updates_scale=updates_scale)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, in Triton's interpreter
@pytest.mark.parametrize("factor", [1e-30, 1e30, 3e37])
def test_extreme_gradients(factor):
    twin = Twin(fused=False)
    twins.fill_gradients(twin.params, 0, factor=factor)
    twin.decide()


def test_a_multiplier_that_would_overflow_the_gradients_skips_the_step():
    """A scale below 1 makes gradients larger when they are unscaled."""
    twin = Twin(init_scale=2.0**-10, min_scale=2.0**-20, max_norm=math.inf, max_gradient=65504.0)
    twins.fill_gradients(twin.params, 0, factor=1000.0)
    assert twin.numbers(twin.decide())["skipped"] == 1.0


def test_results_expire_after_the_ring_is_full(monkeypatch):
    from gradilocks.kernels import recorded_step

    monkeypatch.setattr(recorded_step, "SLOTS", 3)
    monkeypatch.setattr(recorded_step, "STATISTICS_SLOTS", 2)
    twin = Twin(fused=False)
    slots = []
    for step in range(4):
        twins.fill_gradients(twin.params, step)
        slots.append(twin.decide())
    assert [twin.numbers(slot)["step"] for slot in slots[1:]] == [2.0, 3.0, 4.0]
    assert twin.recorded.last_row()[ROW.index("step")] == 4.0
    with pytest.raises(OutcomeExpired, match="for 3 steps, and 3 steps followed"):
        twin.recorded.row(slots[0])
    with pytest.raises(OutcomeExpired, match="for 2 steps, and 2 steps followed"):
        twin.recorded.statistics(slots[1])


def two_ranks(monkeypatch, change=lambda row: row):
    """A layout of two ranks, of which the second sends `change` of what this one sends."""
    import gradilocks.kernels.recorded_step as recorded_step
    import gradilocks.step.decide as decision

    def gather(row, layout):
        return torch.stack([row, change(row.clone())])

    monkeypatch.setattr(recorded_step, "gather_rows", gather)
    monkeypatch.setattr(decision, "gather_rows", gather)
    shares = (0.5, 1.0, 0.25, 1.0)
    return Layout((0, 1), ("group",), ("group",), (), 0, shares, torch.device("cpu"))


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_several_ranks_decide_from_all_rows(order, monkeypatch):
    def change(row):
        row[RANK_ROW.index("power")] *= 3.0
        row[RANK_ROW.index("largest")] = 77.0
        return row

    twin = Twin(layout=two_ranks(monkeypatch, change), order=order)
    for step in range(3):
        twins.fill_gradients(twin.params, step)
        numbers = twin.numbers(twin.decide(loss=torch.tensor(2.5) if step else None))
        assert numbers["largest"] == 77.0
        assert twin.recorded.rows[:, RANK_ROW.index("has_loss")].tolist() == [float(step > 0)] * 2


@pytest.mark.parametrize("name", ["scale", "step", "nonfinite"])
def test_a_rank_that_differs_or_overflows_skips_the_step_everywhere(name, monkeypatch):
    def change(row):
        row[RANK_ROW.index(name)] += 1.0
        return row

    twin = Twin(layout=two_ranks(monkeypatch, change))
    before = twins.snapshot(twin.optimizer)
    numbers = twin.numbers(twin.decide())
    assert numbers["skipped"] == 1.0
    assert math.isinf(numbers["norm"]) == (name == "nonfinite")
    assert twins.have_same_bits(before, twins.snapshot(twin.optimizer))
