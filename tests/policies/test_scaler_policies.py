"""GradScaler(policy=..., clip=...): the policies in a loop that nobody has to rewrite."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    GradientControl,
    GradScaler,
    HeadroomScale,
    NoScale,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
)
from gradilocks.errors import BadState

CLIPS = {
    "a number": 0.5,
    "ClipPerTensor": ClipPerTensor(0.3),
    "AdaptiveClip": AdaptiveClip(0.01),
    "QuantileClip": QuantileClip(0.5),
    "ZScoreClip": ZScoreClip(warmup=2, threshold=0.5),
    "AdaGC": AdaGC(warmup=2),
    "chain": chain(SkipSpikes(at_least=2, window=4, sigmas=2.0), ClipByNorm(0.5)),
}
SCALES = {
    "dynamic": DynamicScale(init_scale=64.0, growth_interval=3),
    "megatron": DynamicScale.megatron(init_scale=1024.0, growth_interval=3),
    "deepspeed": DynamicScale.deepspeed(growth_interval=3),
    "headroom": HeadroomScale(),
}
MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ours": lambda params: gradilocks.optim.AdamW(params, lr=0.1),
}
BAD = {3: math.inf, 6: math.nan}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def losses(net, first, last):
    for number in range(first, last):
        inputs = torch.full((3, 4), 0.1 * (number + 1))
        factor = 60.0 if number == 8 else 1.0
        loss = net(inputs).square().sum() * factor
        if number in BAD:  # In a gradient, not in the loss: that would be told apart.
            loss = loss + BAD[number] * (net[0].weight - net[0].weight.detach()).sum()
        yield loss


def by_scaler(net, optimizer, scaler, first=0, last=12):
    scales = []
    for loss in losses(net, first, last):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def by_control(net, control, first=0, last=12):
    scales = []
    for loss in losses(net, first, last):
        control.zero_grad()
        control.backward(loss)
        control.step()
        scales.append(control.scale)
    return scales


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("scale", SCALES)
def test_the_loop_goes_as_under_a_control(scale, clip, make):
    mine, theirs = model(), model()
    optimizer = MAKERS[make](mine.parameters())
    scaler = GradScaler("cpu", policy=SCALES[scale], clip=CLIPS[clip], model=mine)
    control = GradientControl(
        MAKERS[make](theirs.parameters()), model=theirs, scale=SCALES[scale], clip=CLIPS[clip]
    )
    assert by_scaler(mine, optimizer, scaler) == by_control(theirs, control)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("clip", ["ZScoreClip", "AdaGC", "chain"])
@pytest.mark.parametrize("scale", SCALES)
def test_a_run_goes_on_from_a_checkpoint_or_a_copy(scale, clip, copied):
    def fresh():
        net = model()
        optimizer = MAKERS["fused AdamW"](net.parameters())
        return net, optimizer, GradScaler("cpu", policy=SCALES[scale], clip=CLIPS[clip])

    net, optimizer, scaler = fresh()
    by_scaler(net, optimizer, scaler, last=7)
    again = copy.deepcopy((net, optimizer))
    by_copy = copy.deepcopy((net, optimizer))
    for _, copied_optimizer in (again, by_copy):
        # torch's copy of a fused optimizer forgets that it unscales by itself; it would be stepped
        # on gradients that were multiplied in place, which rounds otherwise.
        copied_optimizer._step_supports_amp_scaling = True
    loaded = fresh()[2]
    loaded.load_state_dict(scaler.state_dict())
    copy_of_it = copied(scaler)
    scales = by_scaler(net, optimizer, scaler, first=7)
    for (other, stepped), resumed in ((again, loaded), (by_copy, copy_of_it)):
        assert by_scaler(other, stepped, resumed, first=7) == scales
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
        assert resumed.state_dict() == scaler.state_dict()


def test_a_rejected_step_does_not_move_the_scale():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0, clip=SkipSpikes(at_least=2, window=4))
    for gradient in (1.0, 1.0, 100.0):
        optimizer.zero_grad()
        scaler.scale((param * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert param.item() == -2.0
    assert scaler.get_scale() == 8.0
    assert scaler.outcome.skipped
    assert scaler.outcome.rejected
    assert scaler.outcome.culprits == ()
    assert scaler.outcome.describe() == "finite gradients, rejected: norm 100 over 1"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_rejection_in_a_chain_tells_the_bound_that_rejected(enabled):
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    clip = chain(SkipSpikes(at_least=2, window=4), ClipByNorm(0.5))
    scaler = GradScaler("cpu", enabled=enabled, clip=clip)
    for gradient in (1.0, 1.0, 100.0):
        optimizer.zero_grad()
        scaler.scale((param * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.outcome.rejected
    assert scaler.outcome.limit == 1.0
    assert scaler.outcome.describe() == "finite gradients, rejected: norm 100 over 1"


def test_unscaling_first_changes_nothing():
    mine, theirs = model(), model()
    for net, first in ((mine, True), (theirs, False)):
        optimizer = MAKERS["fused AdamW"](net.parameters())
        scaler = GradScaler("cpu", clip=0.5)
        for loss in losses(net, 0, 5):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_each_optimizer_is_clipped_on_its_own():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in params]
    scaler = GradScaler("cpu", clip=1.0)
    scaler.scale(sum((p * g).sum() for p, g in zip(params, (3.0, 0.5), strict=True))).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [p.item() for p in params] == pytest.approx([-1.0, -0.5], rel=1e-5)


def test_torchs_scaler_and_ours_read_each_other():
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0)
    mine = GradScaler("cpu", policy=DynamicScale(), clip=ZScoreClip())
    mine.load_state_dict(theirs.state_dict())
    assert mine.get_scale() == 512.0
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(mine.state_dict())
    assert back.get_scale() == 512.0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s["gradilocks_scaler"].pop("clip"), "must be what state_dict"),
        (
            lambda s: s["gradilocks_scaler"]["clip"].update(states=3),
            "learned.* does not fit: 3",
        ),
        (lambda s: s["gradilocks_scaler"]["clip"].pop("states"), "clip in the state_dict"),
        (
            lambda s: s["gradilocks_scaler"]["clip"].update(states=[{"names": []}]),
            "has learned.* does not fit",
        ),
        (
            lambda s: s["gradilocks_scaler"]["clip"].update(
                states=[{"names": [], "sizes": [], "memory": {"mean": 1.0}}]
            ),
            "must have 'count', 'mean', 'var'",
        ),
        (
            lambda s: s["gradilocks_scaler"]["scale"]["state"].update(ceiling=0.0),
            "ceiling in the state_dict must lie in",
        ),
        (
            lambda s: s["gradilocks_scaler"]["scale"]["state"].update(seen=0.5),
            "seen in the state_dict must be a whole number",
        ),
        (lambda s: s["gradilocks_scaler"]["scale"]["policy"].update(name="X"), "scale policy X"),
        (lambda s: s["gradilocks_scaler"]["scale"].update(state={}), "must have"),
        (lambda s: s["gradilocks_scaler"]["clip"]["policy"].update(name="X"), "clip policy X"),
        (lambda s: s.update(scale=math.nan), "scale"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(spoil, words):
    scaler = GradScaler("cpu", policy=HeadroomScale(), clip=ZScoreClip())
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    saved = copy.deepcopy(before)
    spoil(saved)
    with pytest.raises(BadState, match=words):
        scaler.load_state_dict(saved)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"policy": NoScale()}, TypeError, "got NoScale"),
        ({"policy": "static"}, TypeError, "policy must be 'dynamic'"),
        ({"clip": -1.0}, ValueError, "clip must not be negative"),
        ({"clip": "x"}, TypeError, "clip"),
        (
            {"policy": HeadroomScale(), "init_scale": 8.0},
            ValueError,
            "init_scale=8.0 stands",
        ),
        ({"policy": DynamicScale(), "growth_interval": 3}, ValueError, "growth_interval=3 stands"),
        (
            {"clip": ClipPerGroup({"hed.*": 1.0}), "model": model()},
            ValueError,
            r"limits\['hed.\*'\] fits no parameter",
        ),
        (
            {"policy": DynamicScale(), "max_scale": 2.0**20},
            ValueError,
            "max_scale=1048576.0",
        ),
        (
            {"clip": AdaptiveClip(exclude=("wieght",)), "model": model()},
            ValueError,
            "exclude: 'wieght' fits no parameter",
        ),
        (
            {"clip": AdaptiveClip(exclude=("head.*",)), "model": model()},
            ValueError,
            r"exclude: 'head.\*' fits no parameter",
        ),
    ],
)
def test_what_is_no_policy_is_refused(settings, error, words):
    with pytest.raises(error, match=words):
        GradScaler("cpu", **settings)


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_the_numbers_of_a_policy_cannot_be_set_one_by_one(name):
    scaler = GradScaler("cpu", policy=DynamicScale())
    with pytest.raises(RuntimeError, match=rf"ruled by policy=DynamicScale.*set its {name}"):
        getattr(scaler, f"set_{name}")(3)
    free = GradScaler("cpu", clip=1.0)
    getattr(free, f"set_{name}")(3)
    assert getattr(free, f"get_{name}")() == 3


def test_a_new_scale_may_be_set_under_a_policy():
    scaler = GradScaler("cpu", policy=DynamicScale())
    scaler.scale(torch.ones(()))
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    assert scaler.state_dict()["scale"] == 8.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_disabled_scaler_still_clips_and_rejects(fused):
    param = nn.Parameter(torch.zeros(1))
    policy = chain(SkipSpikes(at_least=2, window=4), 1.0)
    scaler = GradScaler("cpu", enabled=False, policy=HeadroomScale(), clip=policy)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    moves = []
    for gradient in (5.0, 0.5, 0.5, 1e4, 0.5):
        before = param.item()
        optimizer.zero_grad()
        scaler.scale((param * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moves.append(before - param.item())
    assert moves == pytest.approx([1.0, 0.5, 0.5, 0.0, 0.5], abs=1e-5)
    state = dict(scaler.state_dict()["gradilocks_scaler"]["clip"]["states"][0])
    assert dict(state["memory"])["0.count"] == 4
    assert GradScaler("cpu", enabled=False, policy=HeadroomScale()).state_dict() == {}


def test_before_its_first_step_it_tells_and_saves_what_the_policy_says():
    scaler = GradScaler("cpu", policy=DynamicScale.deepspeed(init_scale=64.0, growth_interval=7))
    assert scaler.get_scale() == 64.0
    saved = scaler.state_dict()
    assert (saved["scale"], saved["_growth_tracker"], saved["growth_interval"]) == (64.0, -1, 7)
    assert GradScaler("cpu", policy=HeadroomScale()).get_scale() == 256.0


def test_a_step_that_failed_teaches_nothing():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", clip=QuantileClip(0.5, window=4))
    scaler.scale((param * 3.0).sum()).backward()
    real, optimizer.step = optimizer.step, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    optimizer.step = real
    scaler.step(optimizer)
    (learned,) = map(dict, scaler.state_dict()["gradilocks_scaler"]["clip"]["states"])
    assert dict(learned["memory"])["count"] == 1


def test_a_copy_goes_its_own_way():
    scaler = GradScaler("cpu", policy=DynamicScale(init_scale=8.0))
    scaler.scale(torch.ones(()))
    other = copy.copy(scaler)
    other.scale(torch.ones(()))
    other.update(2.0)
    assert (scaler.get_scale(), other.get_scale()) == (8.0, 2.0)


def test_ranks_of_a_process_group_are_refused():
    with pytest.raises(ValueError, match=r"do not know process_group=.*GradientControl"):
        GradScaler("cpu", clip=1.0, process_group=object())
