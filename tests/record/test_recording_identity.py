"""Training is bit for bit the same with a recorder and without: weights, state, scale, dice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    GradientControl,
    HeadroomScale,
    QuantileClip,
    Recorder,
    SkipSpikes,
    StaticScale,
    ZScoreClip,
    chain,
    optim,
    read_run,
)
from tests.control.gradient_scripts import OPTIMIZERS, assert_same, contents
from tests.engine.backends import DEVICES, serve
from tests.record.recorded import INF, NAN

BAD = {3: INF, 6: NAN, 7: INF}

SCALES = {
    "none": None,
    "static": StaticScale(512.0),
    "dynamic": DynamicScale(growth_interval=3),
    "patient": DynamicScale(growth_interval=3, hysteresis=2),
    "headroom": HeadroomScale(),
}
CLIPS = {
    "none": None,
    "norm": ClipByNorm(0.1),
    "one-norm": ClipByNorm(0.1, order=1.0),
    "value": ClipByValue(0.01),
    "per tensor": ClipPerTensor(0.05),
    "per group": ClipPerGroup({0: 0.05}),
    "adaptive": AdaptiveClip(),
    "quantile": QuantileClip(window=6),
    "z-score": ZScoreClip(warmup=3),
    "AdaGC": AdaGC(warmup=3),
    "skip spikes": SkipSpikes(window=4, at_least=2, sigmas=1.0),
    "chain": chain(SkipSpikes(window=4, at_least=2), ClipByNorm(0.1)),
}
OURS = {
    "our AdamW": lambda params: optim.AdamW(params, lr=0.01),
    "our SGD": lambda params: optim.SGD(params, lr=0.01, momentum=0.9),
}


def everything_after(record, make, *, device="cpu", scale="dynamic", clip=0.1, micro=1, two=False):
    """All that a run leaves: parameters, state, what the control saved, and the dice."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh(), nn.Linear(7, 2)).to(device)
    optimizers = [make(model.parameters())]
    if two:
        optimizers = [make(model[0].parameters()), make(model[3].parameters())]
    control = GradientControl(
        *optimizers, model=model, scale=copy.deepcopy(scale), clip=clip, record=record
    )
    outcomes = []
    for number in range(1, 11):
        for _ in range(micro):
            loss = model(torch.randn(4, 5).to(device)).square().mean() * BAD.get(number, 1.0)
            control.backward(loss / micro)
        outcome = control.step()
        outcomes.append((outcome.skipped, outcome.clipped, outcome.norm))
        control.zero_grad(set_to_none=number % 2 == 0)
    if control.recorder is not None:
        control.recorder.close()
    return {
        "optimizers": [contents(optimizer) for optimizer in optimizers],
        "saved": control.state_dict(),
        "outcomes": repr(outcomes),
        "dice": torch.get_rng_state(),
    }


def compare(tmp_path, make, **settings):
    plain = everything_after(None, make, **settings)
    path = tmp_path / "a.jsonl"
    seen = everything_after(Recorder(path, flush_every=3, detail_every=2), make, **settings)
    assert_same(plain, seen)
    run = read_run(path)
    assert [step.step for step in run.steps if step.optimizer == 0] == list(range(1, 11))
    return run


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("scale", SCALES)
def test_recording_changes_nothing_under_any_policy(tmp_path, scale, clip):
    run = compare(tmp_path, OPTIMIZERS["AdamW fused"], scale=SCALES[scale], clip=CLIPS[clip])
    assert sum(step.skipped for step in run.steps) >= 3


@pytest.mark.parametrize("make", [*OPTIMIZERS, *OURS])
@pytest.mark.parametrize("two", [False, True], ids=["one optimizer", "two"])
def test_recording_changes_nothing_for_any_optimizer(tmp_path, make, two):
    compare(tmp_path, (OPTIMIZERS | OURS)[make], two=two, micro=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", ["AdamW fused", "SGD", *OURS])
@pytest.mark.parametrize("two", [False, True], ids=["one optimizer", "two"])
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_recording_changes_nothing_by_the_short_way(tmp_path, monkeypatch, device, make, two):
    pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
    device = serve(device, monkeypatch)
    run = compare(tmp_path, (OPTIMIZERS | OURS)[make], device=device, two=two, micro=2)
    assert run.steps[0].detail.zeros[0] is not None
    assert [step.skipped for step in run.steps if step.optimizer == 0][2:7] == [
        True, False, False, True, True,
    ]  # fmt: skip
