"""Policies of the user's own: as subclasses, or as any object with the documented methods."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import pytest
import torch

from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    GradientControl,
    GradScaler,
    HeadroomScale,
    NoClip,
    NoScale,
    QuantileClip,
    SkipSpikes,
    StaticScale,
    ZScoreClip,
    chain,
)
from gradilocks.clip import ClipPolicy, ClipRules, resolve_clip
from gradilocks.errors import BadState
from gradilocks.scale import ScalePolicy, ScaleRules, resolve_scale
from gradilocks.values import ClipLimit, ScaleState


@dataclasses.dataclass(frozen=True)
class Halving:
    """A clip policy with no base and just the documented attributes."""

    factor: float = 0.5
    order = 2.0
    needs_largest = False

    def limit(self, measurement, scale):
        norm = measurement.norm
        part = torch.full_like(norm, self.factor)
        return ClipLimit(part, norm / scale * part, torch.ones_like(measurement.nonfinite))


@dataclasses.dataclass(frozen=True)
class NotAboveTheLast:
    """One with no base that learns: bounds the norm by that of the step before."""

    slack: float = 1.0
    order = 2.0
    needs_largest = False

    def start(self, device, count):
        return {"last": torch.full((), math.inf, dtype=torch.float64, device=device)}

    def limit(self, measurement, scale, state):
        norm = measurement.norm / scale
        bound = self.slack * state["last"]
        coefficient = torch.clamp(bound / norm, max=1.0)
        return ClipLimit(coefficient, bound, (coefficient < 1).to(torch.float32))

    def advance(self, state, measurement, scale, limit, skip):
        norm = torch.minimum(measurement.norm / scale, limit.limit)
        state["last"].copy_(torch.where(skip > 0, state["last"], norm))


@dataclasses.dataclass(frozen=True)
class Thirds:
    """A scale policy with no base: a third after a skip, else three times as much."""

    begin: float = 9.0

    def start(self, device):
        whole = torch.zeros((), dtype=torch.int32, device=device)
        scale = torch.full((), self.begin, dtype=torch.float32, device=device)
        return ScaleState(scale, whole, whole.clone())

    def advance(self, state, skip):
        state.scale.mul_(torch.where(skip > 0, 1 / 3, 3.0))

    def bounds(self):
        return 1e-3, 1e6


@dataclasses.dataclass(frozen=True)
class ToThePeak(Thirds):
    """The same, but it wants to see the largest gradient."""

    needs_largest = True

    def advance(self, state, skip, *, largest=None, loss_nonfinite=None):
        assert largest is not None
        assert loss_nonfinite is not None
        state.scale.copy_(8.0 * state.scale / largest)


class Inherits(ClipPolicy):
    """A subclass that defines no more than it must."""

    def limit(self, measurement, scale):
        return NoClip().limit(measurement, scale)


def trained(control, param, rows):
    seen = []
    for row in rows:
        control.zero_grad()
        control.scale_loss(torch.zeros((), requires_grad=True) * 1.0)
        param.grad = torch.tensor(row) * control.scale
        outcome = control.step()
        seen.append((outcome.norm, outcome.limit, outcome.clipped, control.scale))
    return seen


def made(**options):
    param = torch.nn.Parameter(torch.zeros(2))
    return param, GradientControl(torch.optim.SGD([param], lr=1.0), **options)


ROWS = [[3.0, 4.0], [6.0, 8.0], [math.inf, 0.0], [0.3, 0.4], [3.0, 4.0]]
LEARNED = [(5.0, math.inf, False), (10.0, 5.0, True), None, (0.5, 5.0, False), (5.0, 0.5, True)]


def test_a_policy_without_a_base_clips():
    param, control = made(scale=8.0, clip=Halving())
    trained(control, param, [[3.0, 4.0]])
    assert param.tolist() == [-1.5, -2.0]


@pytest.mark.parametrize("clip", [NotAboveTheLast(), chain(NotAboveTheLast(), ClipByNorm(1e9))])
def test_a_policy_without_a_base_learns(clip):
    param, control = made(scale=8.0, clip=clip)
    for found, expected in zip(trained(control, param, ROWS), LEARNED, strict=True):
        if expected is not None:
            norm, limit, clipped = expected
            assert (found[0], found[2]) == (pytest.approx(norm, rel=1e-6), clipped)
            assert found[1] == pytest.approx(
                min(limit, 1e9 if clip != NotAboveTheLast() else limit)
            )


@pytest.mark.parametrize("policy", [Thirds(), ToThePeak()])
def test_a_scale_policy_without_a_base_moves_the_scale(policy):
    param, control = made(scale=policy)
    seen = [scale for *_, scale in trained(control, param, [[1.0, 0.25], [1.0, 0.0]])]
    assert seen == ([27.0, 81.0] if type(policy) is Thirds else [8.0, 8.0])


def test_a_scaler_takes_policies_without_a_base():
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", policy=Thirds(), clip=NotAboveTheLast())
    for row in ([3.0, 4.0], [6.0, 8.0]):
        scaler.scale(torch.zeros((), requires_grad=True) * 1.0)
        param.grad = torch.tensor(row) * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == pytest.approx([-6.0, -8.0], rel=1e-6)
    assert scaler.get_scale() == 81.0
    other = GradScaler("cpu", policy=Thirds(1.0), clip=NotAboveTheLast(2.0))
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert other.state_dict() == scaler.state_dict()


def test_own_policies_go_through_a_checkpoint_under_their_own_names():
    param, control = made(scale=Thirds(), clip=NotAboveTheLast(1.5))
    trained(control, param, ROWS[:2])
    saved = json.loads(json.dumps(control.state_dict()))
    ours = saved["gradilocks"]
    assert ours["scale_policy"] == {"name": "Thirds", "config": {"begin": 9.0}}
    assert ours["clip_policy"] == {"name": "NotAboveTheLast", "config": {"slack": 1.5}}
    other_param, other = made(scale=Thirds(1.0), clip=NotAboveTheLast())
    other.load_state_dict(saved)
    assert other.state_dict() == control.state_dict()
    rest = trained(other, other_param, ROWS[3:])
    assert rest == trained(control, param, ROWS[3:])
    with pytest.raises(BadState, match=r"clip policy NotAboveTheLast, this control has Halving"):
        made(scale=Thirds(), clip=Halving())[1].load_state_dict(saved)


@pytest.mark.parametrize("resolve", [resolve_clip, resolve_scale])
def test_a_policy_without_a_base_is_shown_compared_and_copied_as_it_is(resolve):
    given = Halving(0.25) if resolve is resolve_clip else Thirds(3.0)
    policy = resolve(given)
    assert repr(policy) == repr(given)
    assert policy == given
    assert policy == resolve(dataclasses.replace(given))
    assert policy != resolve(type(given)(0.125))
    assert hash(policy) == hash(given)
    assert (policy.as_given, policy.policy_name) == (given, type(given).__name__)
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert copied == policy
        assert copied.as_given is not given
    assert resolve(policy) is policy
    assert policy.rules() is None


def test_a_control_with_own_policies_can_be_pickled():
    param, control = made(scale=Thirds(), clip=NotAboveTheLast())
    trained(control, param, ROWS[:2])
    again = pickle.loads(pickle.dumps(control))
    assert again.state_dict() == control.state_dict()


def test_a_subclass_needs_no_more_than_what_it_does_differently():
    param, control = made(scale=8.0, clip=Inherits())
    assert trained(control, param, [[3.0, 4.0]])[0][:3] == (5.0, math.inf, False)
    with pytest.raises(NotImplementedError, match=r"ClipPolicy has no limit\(measurement, scale\)"):
        ClipPolicy().limit(None, None)
    with pytest.raises(NotImplementedError, match=r"ScalePolicy has no start\(device\)"):
        ScalePolicy().start(None)
    assert ScalePolicy().bounds() == (2.0**-126, torch.finfo(torch.float32).max)


# What a policy says of itself, for a device that follows it without asking.

FOLLOWED = {
    NoScale(): ScaleRules(moves=False),
    StaticScale(8.0): ScaleRules(moves=False),
    DynamicScale(8.0, 3.0, 0.25, 7, 0.5, 64.0, 2): ScaleRules(True, 3.0, 0.25, 7, 0.5, 64.0, 2),
    NoClip(): ClipRules(2.0, None),
    ClipByNorm(0.5): ClipRules(2.0, 0.5),
    ClipByNorm(0.5, order=math.inf): ClipRules(math.inf, 0.5),
}
ASKED = [
    DynamicScale.deepspeed(),
    DynamicScale.fairseq(tolerance=0.5),
    HeadroomScale(),
    ClipByValue(0.5),
    ClipPerTensor(1.0),
    ClipPerGroup({0: 1.0}),
    AdaGC(),
    AdaptiveClip(),
    QuantileClip(),
    SkipSpikes(),
    ZScoreClip(),
    chain(1.0, 2.0),
]


@pytest.mark.parametrize(("policy", "rules"), FOLLOWED.items(), ids=str)
def test_a_plain_policy_says_its_rule_in_numbers(policy, rules):
    assert policy.rules() == rules
    anyones = type(type(policy).__name__, (type(policy),), {})  # Which may do anything.
    derived = anyones(*(getattr(policy, field.name) for field in dataclasses.fields(policy)))
    assert derived.rules() is None


@pytest.mark.parametrize("policy", ASKED, ids=str)
def test_any_other_policy_is_asked_in_python(policy):
    assert policy.rules() is None


def test_only_policies_that_look_at_norms_alone_do_without_the_scene():
    class Looking(ClipByNorm):
        pass

    assert not any(p.needs_scene for p in (NoClip(), ClipByNorm(1.0), ClipByValue(1.0)))
    assert not chain(ClipByNorm(1.0), ClipByValue(1.0)).needs_scene
    assert chain(ClipByNorm(1.0), ClipPerTensor(1.0)).needs_scene
    assert all(p.needs_scene for p in (Looking(1.0), AdaptiveClip(), resolve_clip(Halving())))
