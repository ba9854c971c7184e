"""Whole steps on a GPU: torch's numbers, no host synchronization, little memory, several devices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import AdaGC, AdaptiveClip, ClipByNorm, GradientControl, HeadroomScale, SkipSpikes, chain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
MAKERS = {
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "own AdamW": lambda ps: gradilocks.optim.AdamW(ps, lr=1e-3),
    "own SGD": lambda ps: gradilocks.optim.SGD(ps, lr=1e-3, momentum=0.9),
}
OPTIONS = {
    "norm": {"clip": 0.5},
    "norm p=3": {"clip": ClipByNorm(0.5, order=3.0)},
    "per tensor": {"clip": AdaGC(warmup=3)},
    "rows": {"clip": AdaptiveClip()},
    "spikes": {"clip": chain(SkipSpikes(), 1.0)},
    "headroom": {"scale": HeadroomScale()},
    "no scale": {"scale": None, "clip": 0.5},
}
BAD = (0, 7)


def model_and_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    return model, torch.randn(32, 64, device="cuda")


def train(make, *, steps=20, **options):
    """Trains under sync debug mode "error" after the first steps, which compile kernels and create tables."""
    model, inputs = model_and_inputs()
    optimizer = make(model.parameters())
    control = GradientControl(optimizer, model=model, give_up_after=10, **options)
    schedule = control.scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0))
    outcomes = []
    try:
        for number in range(steps):
            torch.cuda.set_sync_debug_mode("error" if number > 3 else "default")
            control.backward(model(inputs).square().mean() * (math.inf if number in BAD else 1.0))
            outcomes.append(control.step())
            schedule.step()
            control.zero_grad(set_to_none=number % 2 == 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return model, control, outcomes


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MAKERS)
def test_backward_and_step_do_not_wait_for_the_device(name, options):
    model, _, outcomes = train(MAKERS[name], **OPTIONS[options])
    assert [number for number, outcome in enumerate(outcomes) if outcome.skipped] == list(BAD)
    assert outcomes[7].culprits == ("2.bias", "2.weight", "0.bias", "0.weight")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", MAKERS)
def test_a_control_trains_as_torchs_scaler_does(name):
    mine, control, outcomes = train(MAKERS[name], clip=0.5)
    theirs, inputs = model_and_inputs()
    make = {"own AdamW": MAKERS["AdamW fused"]}.get(name, MAKERS[name])
    if name == "own SGD":
        make = lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9)  # noqa: E731
    optimizer, scaler = make(theirs.parameters()), torch.amp.GradScaler("cuda")
    for number in range(20):
        scaler.scale(theirs(inputs).square().mean() * (math.inf if number in BAD else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert control.scale == scaler.get_scale()
    assert outcomes[-1].scale == 2.0**14


def test_a_loss_on_the_cpu_is_scaled_by_the_current_scale():
    p = nn.Parameter(torch.ones(1000, device="cuda"))
    control = GradientControl(gradilocks.optim.SGD([p], lr=0.1), clip=1e9)
    for number in range(8):
        control.zero_grad()
        torch.cuda._sleep(20_000_000)
        control.backward((p.sum() * (math.inf if number in (1, 4) else 1.0)).cpu())
        outcome = control.step()
        assert outcome.skipped == (number in (1, 4))
        if not outcome.skipped:
            assert outcome.norm == pytest.approx(math.sqrt(1000.0), rel=1e-6)


@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_on_the_host_and_on_the_device_step_together(first, fused):
    other = "cuda" if first == "cpu" else "cpu"
    p, q = nn.Parameter(torch.zeros(2, device=first)), nn.Parameter(torch.zeros(3, device=other))
    control = GradientControl(torch.optim.SGD([p, q], lr=1.0, fused=fused), clip=1.0, scale=8.0)
    for bad in (False, True, False):
        control.zero_grad()
        loss = (p * 3.0).sum().cpu() + (q * (math.inf if bad else 4.0)).sum().cpu()
        control.backward(loss)
        outcome = control.step()
        assert outcome.skipped == bad
    norm = math.sqrt(18.0 + 48.0)
    torch.testing.assert_close(p.detach().cpu(), torch.full((2,), -2 * 3.0 / norm))
    torch.testing.assert_close(q.detach().cpu(), torch.full((3,), -2 * 4.0 / norm))


def test_steps_on_another_stream_are_ordered():
    p = nn.Parameter(torch.ones(1 << 20, device="cuda"))
    control = GradientControl(gradilocks.optim.SGD([p], lr=0.5), scale=4.0)
    stream = torch.cuda.Stream()
    for number in range(4):
        with torch.cuda.stream(stream if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(10_000_000)
            control.backward(p.sum())
            outcome = control.step()
            control.zero_grad()
        stream.synchronize()
        torch.cuda.synchronize()
    assert outcome.norm == 1024.0
    assert p[0].item() == -1.0


def test_a_step_allocates_little():
    params = [nn.Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(64)]
    params += [nn.Parameter(torch.zeros(10, device="cuda")) for _ in range(1000)]
    control = GradientControl(gradilocks.optim.AdamW(params, lr=1e-3), clip=1.0)
    for _ in range(4):
        control.backward(sum(param.sum() for param in params))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        outcome = control.step()
        used = torch.cuda.max_memory_allocated() - before
        control.zero_grad()
    assert not outcome.skipped
    assert used <= (1 << 20) + 64 * len(params)


def test_giving_up_is_noticed_within_a_few_steps():
    from gradilocks.errors import NeverFinite

    p = nn.Parameter(torch.ones(4, device="cuda"))
    control = GradientControl(gradilocks.optim.SGD([p], lr=0.1), give_up_after=5)

    def diverge():
        for _ in range(50):
            control.backward((p * math.nan).sum())
            control.step()
            control.zero_grad()
            torch.cuda.synchronize()

    with pytest.raises(NeverFinite, match=r"gave up after ([5-9]|10) non-finite"):
        diverge()


def test_a_schedule_makes_up_for_skips_that_it_learns_of_late():
    p = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = gradilocks.optim.SGD([p], lr=0.1)
    control = GradientControl(optimizer)
    schedule = control.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for number in range(20):
        control.backward(p.sum() * (math.inf if number in (2, 3, 9) else 1.0))
        control.step()
        control.zero_grad()
        schedule.step()
    schedule.state_dict()  # Waits for the last flags.
    assert schedule.last_epoch - schedule._calls_ahead == 17
