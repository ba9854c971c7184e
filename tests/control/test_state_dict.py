"""`state_dict` resumes bit for bit, and is interchangeable with that of torch.amp.GradScaler."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from control.given_gradients import (
    INF,
    NAN,
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    assert_same,
    batches,
    contents,
    loss_of,
    parameter,
    small_model,
    take_step,
)
from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    DynamicScale,
    GradientControl,
    HeadroomScale,
    QuantileClip,
    SkipSpikes,
    StaticScale,
    ZScoreClip,
    chain,
)
from gradilocks.errors import BadState
from policies.own_policies import ClipPerTensor, NotAboveTheLast, Thirds

SCALES = {
    "dynamic": DynamicScale(init_scale=2.0**20, growth_interval=2, hysteresis=2),
    "headroom": HeadroomScale(growth_interval=2),
    "static": StaticScale(8.0),
    "own": Thirds(),
    "none": None,
}
CLIPS = {
    "none": None,
    "norm": ClipByNorm(0.5),
    "value": ClipByValue(0.1),
    "group": ClipPerGroup({"0.*": 0.2}, otherwise=0.3),
    "rows": AdaptiveClip(0.05),
    "AdaGC": AdaGC(warmup=2),
    "quantile": QuantileClip(0.5, window=4),
    "z-score": ZScoreClip(warmup=2, threshold=0.5),
    "spikes": SkipSpikes(window=4, sigmas=0.5),
    "chain": chain(SkipSpikes(max_norm=100.0), AdaGC(warmup=1), 1.0),
    "own": NotAboveTheLast(1.1),
    "own per tensor": ClipPerTensor(0.2),
}


def save_and_load(state):
    """As a checkpoint file that is loaded with the safe unpickler."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def run(make, scale, clip, resume_at=None, steps=7):
    model = small_model()
    optimizer = make(model.parameters())
    options = {"model": model, "scale": scale, "clip": clip}
    control = GradientControl(optimizer, **options)
    numbers = []
    for step, batch in enumerate(batches(steps, {3})):
        if step == resume_at:
            state, values = save_and_load((control.state_dict(), [p.detach() for p in model.parameters()]))
            optimizer_state = copy.deepcopy(optimizer.state_dict())
            model = small_model(seed=99)
            with torch.no_grad():
                for p, value in zip(model.parameters(), values, strict=True):
                    p.copy_(value)
            optimizer = make(model.parameters())
            optimizer.load_state_dict(optimizer_state)
            options["model"] = model
            control = GradientControl(optimizer, **options)
            control.load_state_dict(state)
        control.zero_grad()
        control.backward(loss_of(model, *batch))
        outcome = control.step()
        numbers.append((outcome.step, outcome.skipped, outcome.norm, outcome.limit, outcome.clipped, outcome.scale))
    return numbers, contents(optimizer), control.state_dict()


RESUMED = [
    *(("AdamW fused", scale, clip) for scale in SCALES for clip in CLIPS),
    *((name, "dynamic", "AdaGC") for name in ("SGD momentum", "SGD momentum fused", "Adam", *OWN_OPTIMIZERS)),
]


@pytest.mark.parametrize(("name", "scale", "clip"), RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name, scale, clip):
    arguments = (OPTIMIZERS | OWN_OPTIMIZERS)[name], SCALES[scale], CLIPS[clip]
    whole = run(*arguments)
    for at in (0, 2, 4) if name == "AdamW fused" else (4,):
        assert_same(run(*arguments, resume_at=at), whole)


def test_the_state_is_plain_data_and_does_not_follow_the_run(device):
    p = parameter(0.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=AdaGC())
    take_step(control, (p, 1.0))
    state = control.state_dict()
    before = copy.deepcopy(state)
    take_step(control, (p, INF))
    assert_same(state, before)
    assert set(state) == {*torch.amp.GradScaler("cpu").state_dict(), "gradilocks"}
    assert_same(save_and_load(state), state)


def test_a_fresh_control_loads_what_another_saved_before_its_first_step(device):
    p, q = parameter(0.0, device=device), parameter(0.0, device=device)
    control, other = (GradientControl(torch.optim.SGD([x], lr=0.1), clip=AdaGC()) for x in (p, q))
    other.load_state_dict(control.state_dict())
    assert_same(other.state_dict(), control.state_dict())
    take_step(other, (q, 1.0))
    control.load_state_dict(other.state_dict())
    assert take_step(control, (p, 1.0)).step == 2


# --- torch's scaler ---------------------------------------------------------------------------------------------------


def torch_scaler(**options):
    scaler = torch.amp.GradScaler("cpu", **options)
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("has_run", [False, True])
def test_a_state_of_torchs_scaler_continues_in_a_control(has_run):
    p, q = parameter(0.0), parameter(0.0)
    theirs, mine = torch.optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1)
    scaler = torch_scaler(init_scale=256.0, growth_interval=4)
    for gradient in (1.0, INF, 1.0, 1.0) if has_run else ():
        p.grad = torch.full_like(p, gradient * scaler.get_scale())
        scaler.step(theirs)
        scaler.update()
    control = GradientControl(mine, scale=DynamicScale(init_scale=2.0, growth_interval=4))
    control.load_state_dict(scaler.state_dict())
    for gradient in (1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0):
        assert control.scale == scaler.get_scale()
        p.grad = torch.full_like(p, gradient * scaler.get_scale())
        scaler.step(theirs)
        scaler.update()
        take_step(control, (q, gradient))


@pytest.mark.parametrize("scale", SCALES)
def test_a_state_of_a_control_loads_into_torchs_scaler(scale):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=SCALES[scale])
    for gradient in (1.0, 1.0, INF, 1.0):
        take_step(control, (p, gradient))
    scaler = torch_scaler()
    scaler.load_state_dict(control.state_dict())
    assert scaler.get_scale() == control.scale
    assert scaler.get_growth_interval() == getattr(SCALES[scale], "growth_interval", 2000)
    if scale == "dynamic":
        assert scaler._get_growth_tracker() == 1
    assert scaler.state_dict()["scale"] == control.scale


def test_a_scale_alone_may_be_loaded_and_is_moved_into_the_bounds():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=DynamicScale(min_scale=2.0, max_scale=2.0**20))
    for given_scale, expected in ((1024.0, 1024.0), (1.0, 2.0), (2.0**30, 2.0**20), (torch.tensor(64.0), 64.0)):
        control.load_state_dict({"scale": given_scale})
        assert control.scale == expected
        assert not take_step(control, (p, 1.0)).skipped
    for scale, expected in ((8.0, 8.0), (None, 1.0)):
        control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale)
        control.load_state_dict({"scale": 1024.0})
        assert control.scale == expected
        assert take_step(control, (p, 2.0)).norm == pytest.approx(2.0)


def test_settings_of_the_constructor_win_over_those_of_the_checkpoint():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=4.0, growth_interval=1))
    control.load_state_dict(torch_scaler(growth_interval=500, growth_factor=3.0).state_dict())
    take_step(control, (p, 1.0))
    assert control.scale == 2.0**17


def test_the_state_of_another_scale_policy_loads_what_both_have():
    p = parameter(0.0)
    headroom = GradientControl(torch.optim.SGD([p], lr=0.1), scale=HeadroomScale(init_scale=64.0))
    take_step(headroom, (p, INF))
    dynamic = GradientControl(torch.optim.SGD([p], lr=0.1), scale=DynamicScale(hysteresis=3))
    dynamic.load_state_dict(headroom.state_dict())
    assert dynamic.scale == 32.0
    assert dynamic.state_dict()["gradilocks"]["scale_state"] == {"hysteresis": 3}
    headroom.load_state_dict(dynamic.state_dict())
    assert headroom.scale == 32.0


def test_clip_state_follows_the_names_of_parameters():
    clip = AdaGC(warmup=1, warmup_norm=100.0)

    def setting(names):
        model = torch.nn.ParameterDict({name: torch.zeros(1) for name in names})
        return model, GradientControl(torch.optim.SGD(model.values(), lr=0.1), model=model, clip=clip, scale=1.0)

    model, control = setting(["a", "b"])
    take_step(control, (model["a"], 1.0), (model["b"], 2.0))
    other, reordered = setting(["b", "new", "a"])
    reordered.load_state_dict(control.state_dict())
    outcome = take_step(reordered, (other["a"], 10.0), (other["b"], 10.0), (other["new"], 10.0))
    assert outcome.clipped
    moved = {name: -param.item() for name, param in other.items()}
    assert moved == pytest.approx({"b": 0.21, "new": 1.0, "a": 0.105})


def test_loading_fills_the_tensors_that_a_captured_graph_reads(device):
    p = parameter(0.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    take_step(control, (p, 1.0))
    scale = control._state.scale
    control.load_state_dict({**control.state_dict(), "scale": 4.0})
    assert control._state.scale is scale
    assert take_step(control, (p, 3.0)).scale == 4.0
    assert control.outcome.norm == 3.0


# --- states that do not fit -------------------------------------------------------------------------------------------


def change(path, value):
    def apply(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        if value is KeyError:
            del state[last]
        else:
            state[last] = value

    return apply


OWN = ("gradilocks",)
BAD = {
    "no scale": change(("scale",), KeyError),
    "scale 0": change(("scale",), 0.0),
    "scale inf": change(("scale",), INF),
    "scale nan": change(("scale",), NAN),
    "scale negative": change(("scale",), -1.0),
    "scale text": change(("scale",), "1024"),
    "scale bool": change(("scale",), True),
    "scale vector": change(("scale",), torch.ones(2)),
    "tracker text": change(("_growth_tracker",), "3"),
    "tracker negative": change(("_growth_tracker",), -1),
    "tracker huge": change(("_growth_tracker",), 2**40),
    "tracker fraction": change(("_growth_tracker",), 0.5),
    "own is a list": change(OWN, []),
    "own is another version": change((*OWN, "version"), 99),
    "steps negative": change((*OWN, "steps"), -1),
    "steps inf": change((*OWN, "steps"), INF),
    "streak text": change((*OWN, "streak"), "many"),
    "hysteresis huge": change((*OWN, "scale_state", "hysteresis"), 2**40),
    "hysteresis text": change((*OWN, "scale_state"), {"hysteresis": "two"}),
    "scale_state is a number": change((*OWN, "scale_state"), 3),
    "clip is a list": change((*OWN, "clip"), []),
    "clip of more optimizers": change((*OWN, "clip", "0,1"), {}),
    "clip of a negative optimizer": change((*OWN, "clip", "-1"), {}),
    "clip key is text": change((*OWN, "clip", "first"), {}),
    "clip key is a number": change((*OWN, "clip", 0), {}),
    "clip of other policies": change((*OWN, "clip", "0", "0", "policy"), "ZScoreClip"),
    "clip of fewer policies": change((*OWN, "clip", "0", "1"), KeyError),
    "clip policy is text": change((*OWN, "clip", "0", "0"), "AdaGC"),
    "clip policy key is text": change((*OWN, "clip", "0", "first"), {}),
    "clip tensor missing": change((*OWN, "clip", "0", "0", "count"), KeyError),
    "clip tensor is a number": change((*OWN, "clip", "0", "1", "norms"), 1.0),
    "clip tensor has another shape": change((*OWN, "clip", "0", "1", "norms"), torch.ones(3)),
    "clip entry is text": change((*OWN, "clip", "0", "0", "average", "0.weight"), "big"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_does_not_fit_raises_and_changes_nothing(case):
    model = small_model()
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=chain(AdaGC(), QuantileClip(window=4))
    )
    for batch in batches(3):
        control.zero_grad()
        control.backward(loss_of(model, *batch))
        control.step()
    before = control.state_dict()
    state = {**copy.deepcopy(before), "scale": 2.0, "_growth_tracker": 1}
    BAD[case](state)
    with pytest.raises(BadState) as caught:
        control.load_state_dict(state)
    assert len(str(caught.value)) > 20
    assert_same(control.state_dict(), before)


@pytest.mark.parametrize("state", [None, 3, [], "scale", torch.amp.GradScaler("cpu", enabled=False).state_dict()])
def test_a_state_that_is_no_dict_or_empty_as_that_of_a_disabled_scaler_raises(state):
    control = GradientControl(torch.optim.SGD([parameter(0.0)], lr=0.1))
    with pytest.raises(BadState, match="no 'scale'" if isinstance(state, dict) else "must be a dict"):
        control.load_state_dict(state)
    assert control.scale == 65536.0
