"""Giving up after too many non-finite steps in a row, when the host learns of them late."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradilocks import GradientControl
from gradilocks.errors import NeverFinite
from gradilocks.step.host_copy import LAG
from gradilocks.step.outcome import StepRecord, Streak
from tests.engine.backends import INF, NAN, parameter, step

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


def giving_up(take_a_step, at_most=100):
    """How many steps it takes until NeverFinite, and what that says."""
    for number in range(1, at_most + 1):
        try:
            take_a_step()
        except NeverFinite as error:
            return number, str(error)
    raise AssertionError("the control never gave up")


def late(streak, behind):
    """As on a GPU: the counter is sent for, and arrives `behind` steps later."""
    coming = []

    def counted():
        if not coming:
            coming.extend([streak.count.item()] + [None] * behind)
        return coming.pop()

    return counted


@pytest.mark.parametrize("behind", [0, 1, 2, 5])
def test_a_count_that_arrives_late_is_still_noticed(device, settling, monkeypatch, behind):
    p = parameter(2, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True), give_up_after=4)
    streak = control._engine.streak
    monkeypatch.setattr(streak, "_counted", late(streak, behind))
    for _ in range(3):
        step(control, (p, 1.0))
    number, said = giving_up(lambda: step(control, (p, NAN)))
    assert f"{number} steps in a row" in said
    assert 4 <= number <= 4 + 2 * behind + 1


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_count_that_arrives_after_a_finite_step_does_not_give_up(
    device, settling, monkeypatch, behind
):
    p = parameter(2, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True), give_up_after=3)
    streak = control._engine.streak
    monkeypatch.setattr(streak, "_counted", late(streak, behind))
    for _ in range(3):
        assert step(control, (p, NAN)).skipped
    for _ in range(6):
        assert not step(control, (p, 1.0)).skipped


def test_the_count_on_the_cpu_is_exact():
    streak = Streak(3)
    skips = [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1]
    found = []
    for skip in skips:
        row = torch.zeros(12, dtype=torch.float64)
        flag = torch.tensor(float(skip))
        found.append(streak.note(StepRecord(row, flag, lambda: None)))
    assert [n for n, hopeless in enumerate(found) if hopeless] == [5, 6, 10]


@pytest.mark.parametrize("behind", [0, 1, 3, 100])
def test_beside_other_ranks_the_count_is_read_at_the_same_step_whenever_it_arrives(
    monkeypatch, behind
):
    class Late:
        """A copy that arrives after so many steps, or when it is waited for."""

        def __init__(self, count):
            self.count, self.asked, self.here = float(count), 0, False

        def arrived(self):
            self.asked += 1
            return self.here or self.asked > behind

        def wait(self):
            self.here = True

        def read(self):
            assert self.here or self.asked > behind
            return [self.count]

    monkeypatch.setattr("gradilocks.step.outcome.HostCopy", Late)
    streak = Streak(3, together=True)
    monkeypatch.setattr(streak, "_counted", streak._sent)
    found = []
    for _ in range(12):
        row = torch.zeros(12, dtype=torch.float64)
        found.append(streak.note(StepRecord(row, torch.ones(()), lambda: None)))
    assert [n for n, hopeless in enumerate(found, 1) if hopeless] == [3 + LAG, 3 + LAG + 1 + LAG]


def gpu_control(give_up_after):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(8, 16, device="cuda")
    control = GradientControl(optimizer, model=model, clip=1.0, give_up_after=give_up_after)
    good, bad = torch.ones((), device="cuda"), torch.full((), INF, device="cuda")

    def one(broken):
        control.backward(model(inputs).square().mean() * (bad if broken else good))
        control.step()
        control.zero_grad()

    for _ in range(5):  # Compiles kernels and makes tables and state.
        one(False)
    torch.cuda.synchronize()
    return control, one


@pytest.mark.gpu
@pytest.mark.parametrize("period", [None, 2, 10], ids=["healthy", "every other", "every tenth"])
def test_on_a_gpu_250_steps_neither_wait_nor_give_up(period):
    control, one = gpu_control(give_up_after=20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(250):
            one(period is not None and number % period == 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert control.state_dict()["gradilocks"]["steps"] == 255


@pytest.mark.gpu
@pytest.mark.parametrize("healthy", [0, 7, 20, 33])
def test_on_a_gpu_giving_up_comes_soon_after_the_limit(healthy):
    _, one = gpu_control(give_up_after=20)
    for _ in range(healthy):
        one(False)
        torch.cuda.synchronize()

    def bad_step():
        torch.cuda.synchronize()
        one(True)

    number, said = giving_up(bad_step)
    assert f"{number} steps in a row" in said
    assert 20 <= number <= 22


@pytest.mark.gpu
def test_on_a_gpu_giving_up_needs_no_wait_to_be_noticed():
    _, one = gpu_control(give_up_after=20)
    number, _ = giving_up(lambda: one(True), at_most=2000)
    assert number >= 20
