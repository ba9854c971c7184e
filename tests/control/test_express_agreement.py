"""The short way of a step and the stages leave the same behind, number for number."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from gradilocks import ClipByNorm, DynamicScale, GradientControl, StaticScale, optim
from tests.control.gradient_scripts import assert_same, contents
from tests.control.short_way import (
    DEVICES,
    INF,
    NAN,
    Ways,
    facts,
    gradient_for,
    loss_giving,
    parameter,
    serve,
)

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCRIPT = (None, INF, None, None, NAN, -INF)
"""What goes wrong at each step, in which parameter is the step's number."""
MOVING = DynamicScale(init_scale=1024.0, growth_interval=2, hysteresis=2)


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    return serve(request.param, monkeypatch)


@pytest.fixture
def ways(device, monkeypatch):
    return Ways(monkeypatch)


def adamw(params):
    return [torch.optim.AdamW(params, lr=0.01, fused=True)]


def parameters(device):
    return [parameter(*shape, device=device) for shape in [(5,), (2, 3), ()]]


class Run:
    """One training run by a script; `by` says which way each step takes."""

    def __init__(self, device, ways, by, make, script=SCRIPT, iteration=None, **options):
        self.params = parameters(device)
        self.optimizers = make(self.params)
        self.control = GradientControl(*self.optimizers, **{"scale": MOVING, **options})
        self.told, self.norms, self.scales, self.states = [], [], [], []
        before = ways.short
        for number, bad in enumerate(script):
            ways.open = by(number)
            outcome = (iteration or plain)(self.control, self.params, number, bad)
            self.told.append(facts(outcome))
            self.norms.append(outcome.norm)
            self.scales.append(self.control.scale)
            self.states.append(self.control.state_dict())
        ways.open = True
        self.short = ways.short - before

    def contents(self):
        return [contents(optimizer) for optimizer in self.optimizers]


def plain(control, params, number, bad):
    control.backward(loss_giving(*_pairs(params, number, bad)))
    outcome = control.step()
    control.zero_grad()
    return outcome


def _pairs(params, number, bad):
    at = number % len(params)
    return [
        (param, gradient_for(param, 10 * number + place, bad if place == at else None))
        for place, param in enumerate(params)
    ]


def always(_):
    return True


def never(_):
    return False


def check_agreement(device, ways, make=adamw, *, exact=True, by=always, **options):
    """Runs the script both ways and compares all that can be seen of the two."""
    short = Run(device, ways, by, make, **options)
    stages = Run(device, ways, never, make, **options)
    assert stages.short == 0
    assert short.short == sum(by(number) for number in range(len(short.told)))
    assert_same(short.told, stages.told)
    assert short.norms == pytest.approx(stages.norms, rel=1e-12, nan_ok=True)
    assert short.scales == stages.scales
    assert short.states == stages.states
    if exact:
        assert_same(short.contents(), stages.contents())
    else:
        torch.testing.assert_close(short.params, stages.params, rtol=1e-6, atol=1e-7)
    return short


OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD momentum fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "our AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "our SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_stepped_alike(device, ways, name):
    run = check_agreement(device, ways, lambda params: [OPTIMIZERS[name](params)], clip=2.0)
    assert [told["skipped"] for told in run.told] == [bad is not None for bad in SCRIPT]
    assert any(told["clipped"] for told in run.told)
    assert run.scales == [1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 1024.0]


@pytest.mark.parametrize(
    "names",
    [
        ("AdamW fused", "SGD fused"),
        ("AdamW", "SGD momentum"),
        ("AdamW fused", "SGD momentum"),
        ("RMSprop", "our AdamW"),
    ],
    ids=" and ".join,
)
def test_two_optimizers_are_stepped_alike(device, ways, names):
    def make(params):
        return [OPTIMIZERS[name](params[k::2]) for k, name in enumerate(names)]

    check_agreement(device, ways, make, clip=2.0)


@pytest.mark.parametrize("order", [1, 1.0, 2, math.inf], ids=str)
def test_every_order_that_the_kernels_know_is_clipped_alike(device, ways, order):
    run = check_agreement(device, ways, clip=ClipByNorm(1.5, order=order))
    assert all(told["clipped"] != told["skipped"] for told in run.told)


@pytest.mark.parametrize("clip", [None, 0.0, INF, 1e-30], ids=str)
def test_limits_at_the_edges_are_kept_alike(device, ways, clip):
    check_agreement(device, ways, clip=clip)


@pytest.mark.parametrize("scale", [None, 8.0, StaticScale(2.0**-20), "dynamic"], ids=str)
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_scales_that_do_not_move_are_treated_alike(device, ways, scale, name):
    check_agreement(device, ways, lambda params: [OPTIMIZERS[name](params)], scale=scale, clip=2.0)


def test_a_scale_that_reaches_its_ends_moves_alike(device, ways):
    narrow = DynamicScale(
        init_scale=4.0, min_scale=3.0, max_scale=9.0, growth_interval=1, growth_factor=1.9
    )
    run = check_agreement(device, ways, scale=narrow)
    assert run.scales[:3] == pytest.approx([7.6, 3.8, 7.22])
    assert run.scales[3:] == pytest.approx([7.22, 3.61, 3.0])


def accumulated(control, params, number, bad):
    """Three micro-batches; the middle one may be broken, its loss too."""
    for k in range(3):
        broken = bad if k == 1 else None
        value = NAN if k == 1 and number == 4 else 1.0
        control.backward(loss_giving(*_pairs(params, 3 * number + k, broken), value=value))
    outcome = control.step()
    control.zero_grad()
    return outcome


def unscaled_first(control, params, number, bad):
    control.backward(loss_giving(*_pairs(params, number, bad)))
    control.unscale_()
    params[0].grad.mul_(0.5)
    outcome = control.step()
    control.zero_grad()
    return outcome


def kept_and_zeroed(control, params, number, bad):
    control.zero_grad(set_to_none=False)
    control.backward(loss_giving(*_pairs(params, number, bad)))
    return control.step()


def handed_out(control, params, number, bad):
    loss = control.scale_loss(loss_giving(*_pairs(params, number, bad)))
    for param in params:
        param.grad = None
    loss.backward()
    outcome = control.step()
    control.zero_grad()
    return outcome


def with_a_closure_now_and_then(control, params, number, bad):
    if number % 2 == 0:
        return plain(control, params, number, bad)

    def closure():
        control.zero_grad()
        loss = loss_giving(*_pairs(params, number, bad))
        control.backward(loss)
        return loss

    outcome = control.step(closure)
    control.zero_grad()
    return outcome


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
@pytest.mark.parametrize(
    "iteration",
    [accumulated, unscaled_first, kept_and_zeroed, handed_out],
    ids=lambda f: f.__name__,
)
def test_every_kind_of_loop_ends_alike(device, ways, iteration, name):
    def make(params):
        return [OPTIMIZERS[name](params)]

    check_agreement(device, ways, make, iteration=iteration, clip=2.0)


def test_a_run_may_change_its_way_at_every_step(device, ways):
    check_agreement(device, ways, by=lambda number: number % 2 == 0, clip=2.0)


def test_steps_with_a_closure_may_come_between(device, ways):
    check_agreement(
        device,
        ways,
        lambda params: [OPTIMIZERS["SGD momentum"](params)],
        by=lambda number: number % 2 == 0,
        iteration=with_a_closure_now_and_then,
        clip=2.0,
    )


def test_parameters_of_several_dtypes_are_stepped_alike(device, ways):
    def make(params):
        with torch.no_grad():
            params[0].data = params[0].data.double()
            params[1].data = params[1].data.half()
        return [torch.optim.AdamW([param], lr=0.01, fused=True) for param in params]

    check_agreement(device, ways, make, clip=2.0)


def test_float64_gradients_beyond_float32_are_clipped_alike(device, ways):
    def huge(control, params, number, bad):
        params[0].grad = torch.full_like(params[0], 1e200 if number % 2 else 1e-200)
        outcome = control.step()
        control.zero_grad()
        return outcome

    def make(params):
        params[0].data = params[0].data.double()
        return [torch.optim.SGD(params[:1], lr=0.1)]

    run = check_agreement(device, ways, make, exact=False, iteration=huge, scale=None, clip=1.0)
    assert [told["clipped"] for told in run.told] == [False, True] * 3


@pytest.mark.parametrize("first", [True, False], ids=["short then stages", "stages then short"])
def test_a_checkpoint_of_one_way_is_continued_by_the_other(device, ways, first):
    whole = Run(device, ways, never, adamw, script=SCRIPT, clip=2.0)
    half = Run(device, ways, lambda _: first, adamw, script=SCRIPT[:2], clip=2.0)
    resumed = GradientControl(*half.optimizers, scale=MOVING, clip=9.0)
    resumed.load_state_dict(copy.deepcopy(half.control.state_dict()))
    told = []
    for number in range(2, len(SCRIPT)):
        # Back again after two steps.
        ways.open = first == (number >= 4)
        told.append(facts(plain(resumed, half.params, number, SCRIPT[number])))
        if number == 3:
            saved = resumed.state_dict()
            resumed = GradientControl(*half.optimizers, scale=MOVING, clip=2.0)
            resumed.load_state_dict(saved)
    assert_same(told, whole.told[2:])
    assert resumed.state_dict() == whole.control.state_dict()
    assert_same(half.contents(), whole.contents())


def test_a_checkpoint_loaded_in_mid_run_changes_the_rules_of_the_short_way(device, ways):
    run = Run(device, ways, always, adamw, script=SCRIPT[:2], clip=2.0)
    other = GradientControl(
        *adamw(parameters(device)), scale=DynamicScale(init_scale=2.0, growth_interval=1), clip=0.5
    )
    run.control.load_state_dict(other.state_dict())
    outcome = plain(run.control, run.params, 2, None)
    assert (outcome.scale, outcome.limit, outcome.step) == (2.0, 0.5, 1)
    assert run.control.scale == 4.0
    assert ways.short == 3
