"""A step that the device settles and one for which the policies are asked leave the same behind."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from gradilocks import ClipByNorm, DynamicScale, GradientControl, StaticScale, optim
from tests.control.gradient_scripts import assert_same, contents
from tests.control.optimizer_wrappers import MAKERS, WRAPPERS, state_of
from tests.engine.backends import (
    INF,
    NAN,
    facts,
    gradient_for,
    loss_giving,
    parameter,
    step,
)

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCRIPT = (None, INF, None, None, NAN, -INF)
"""What goes wrong at each step, in which parameter is the step's number."""
MOVING = DynamicScale(init_scale=1024.0, growth_interval=2, hysteresis=2)


def adamw(params):
    return [torch.optim.AdamW(params, lr=0.01, fused=True)]


def parameters(device):
    return [parameter(*shape, device=device) for shape in [(5,), (2, 3), ()]]


class Run:
    """One training run by a script; `by` says which steps the device may settle."""

    def __init__(self, device, settling, by, make, script=SCRIPT, iteration=None, **options):
        self.params = parameters(device)
        self.optimizers = make(self.params)
        self.control = GradientControl(*self.optimizers, **{"scale": MOVING, **options})
        self.told, self.norms, self.scales, self.states = [], [], [], []
        before = settling.count
        for number, bad in enumerate(script):
            settling.allowed = by(number)
            outcome = (iteration or plain)(self.control, self.params, number, bad)
            self.told.append(facts(outcome))
            self.norms.append(outcome.norm)
            self.scales.append(self.control.scale)
            self.states.append(self.control.state_dict())
        settling.allowed = True
        self.settled = settling.count - before

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


def check_agreement(device, settling, make=adamw, *, exact=True, by=always, **options):
    """Runs the script with either and compares all that can be seen of the two."""
    settled = Run(device, settling, by, make, **options)
    asked = Run(device, settling, never, make, **options)
    assert asked.settled == 0
    assert settled.settled == sum(by(number) for number in range(len(settled.told)))
    assert_same(settled.told, asked.told)
    assert settled.norms == pytest.approx(asked.norms, rel=1e-12, nan_ok=True)
    assert settled.scales == asked.scales
    assert settled.states == asked.states
    if exact:
        assert_same(settled.contents(), asked.contents())
    else:
        torch.testing.assert_close(settled.params, asked.params, rtol=1e-6, atol=1e-7)
    return settled


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
def test_every_optimizer_is_stepped_alike(device, settling, name):
    run = check_agreement(device, settling, lambda params: [OPTIMIZERS[name](params)], clip=2.0)
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
def test_two_optimizers_are_stepped_alike(device, settling, names):
    def make(params):
        return [OPTIMIZERS[name](params[k::2]) for k, name in enumerate(names)]

    check_agreement(device, settling, make, clip=2.0)


@pytest.mark.parametrize("order", [1, 1.0, 2, math.inf], ids=str)
def test_every_order_that_the_kernels_know_is_clipped_alike(device, settling, order):
    run = check_agreement(device, settling, clip=ClipByNorm(1.5, order=order))
    assert all(told["clipped"] != told["skipped"] for told in run.told)


@pytest.mark.parametrize("clip", [None, 0.0, INF, 1e-30], ids=str)
def test_limits_at_the_edges_are_kept_alike(device, settling, clip):
    check_agreement(device, settling, clip=clip)


@pytest.mark.parametrize("scale", [None, 8.0, StaticScale(2.0**-20), "dynamic"], ids=str)
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_scales_that_do_not_move_are_treated_alike(device, settling, scale, name):
    check_agreement(
        device, settling, lambda params: [OPTIMIZERS[name](params)], scale=scale, clip=2.0
    )


def test_a_scale_that_reaches_its_ends_moves_alike(device, settling):
    narrow = DynamicScale(
        init_scale=4.0, min_scale=3.0, max_scale=9.0, growth_interval=1, growth_factor=1.9
    )
    run = check_agreement(device, settling, scale=narrow)
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
def test_every_kind_of_loop_ends_alike(device, settling, iteration, name):
    def make(params):
        return [OPTIMIZERS[name](params)]

    check_agreement(device, settling, make, iteration=iteration, clip=2.0)


def test_a_run_may_change_who_decides_at_every_step(device, settling):
    check_agreement(device, settling, by=lambda number: number % 2 == 0, clip=2.0)


def test_steps_with_a_closure_may_come_between(device, settling):
    check_agreement(
        device,
        settling,
        lambda params: [OPTIMIZERS["SGD momentum"](params)],
        by=lambda number: number % 2 == 0,
        iteration=with_a_closure_now_and_then,
        clip=2.0,
    )


def test_parameters_of_several_dtypes_are_stepped_alike(device, settling):
    def make(params):
        with torch.no_grad():
            params[0].data = params[0].data.double()
            params[1].data = params[1].data.half()
        return [torch.optim.AdamW([param], lr=0.01, fused=True) for param in params]

    check_agreement(device, settling, make, clip=2.0)


def test_float64_gradients_beyond_float32_are_clipped_alike(device, settling):
    def huge(control, params, number, bad):
        params[0].grad = torch.full_like(params[0], 1e200 if number % 2 else 1e-200)
        outcome = control.step()
        control.zero_grad()
        return outcome

    def make(params):
        params[0].data = params[0].data.double()
        return [torch.optim.SGD(params[:1], lr=0.1)]

    run = check_agreement(device, settling, make, exact=False, iteration=huge, scale=None, clip=1.0)
    assert [told["clipped"] for told in run.told] == [False, True] * 3


@pytest.mark.parametrize("first", [True, False], ids=["settled then asked", "asked then settled"])
def test_a_checkpoint_of_one_back_end_is_continued_by_the_other(device, settling, first):
    whole = Run(device, settling, never, adamw, script=SCRIPT, clip=2.0)
    half = Run(device, settling, lambda _: first, adamw, script=SCRIPT[:2], clip=2.0)
    resumed = GradientControl(*half.optimizers, scale=MOVING, clip=9.0)
    resumed.load_state_dict(copy.deepcopy(half.control.state_dict()))
    told = []
    for number in range(2, len(SCRIPT)):
        # Back again after two steps.
        settling.allowed = first == (number >= 4)
        told.append(facts(plain(resumed, half.params, number, SCRIPT[number])))
        if number == 3:
            saved = resumed.state_dict()
            resumed = GradientControl(*half.optimizers, scale=MOVING, clip=2.0)
            resumed.load_state_dict(saved)
    assert_same(told, whole.told[2:])
    assert resumed.state_dict() == whole.control.state_dict()
    assert_same(half.contents(), whole.contents())


def test_a_checkpoint_loaded_in_mid_run_changes_the_rules_that_the_device_follows(device, settling):
    run = Run(device, settling, always, adamw, script=SCRIPT[:2], clip=2.0)
    other = GradientControl(
        *adamw(parameters(device)), scale=DynamicScale(init_scale=2.0, growth_interval=1), clip=0.5
    )
    run.control.load_state_dict(other.state_dict())
    outcome = plain(run.control, run.params, 2, None)
    assert (outcome.scale, outcome.limit, outcome.step) == (2.0, 0.5, 1)
    assert run.control.scale == 4.0
    assert settling.count == 3


WRAPPINGS = ["forwards step too", "imitates", "derived in disguise"]


def trained_in(make, wrap, settling, device, **settings):
    params = [parameter(5, device=device), parameter(2, 3, device=device)]
    inner = make(params)
    control = GradientControl(wrap(inner), **settings)
    for number, bad in enumerate([NAN, None, NAN, None]):
        held = [p.detach().clone() for p in params], state_of(inner)
        pairs = [
            (param, gradient_for(param, 10 * number + place, bad))
            for place, param in enumerate(params)
        ]
        assert step(control, *pairs).skipped == (bad is not None)
        if bad is not None:
            assert_same([p.detach().clone() for p in params], held[0])
            if number:
                assert_same(state_of(inner), held[1])
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", WRAPPINGS)
@pytest.mark.parametrize("name", ["SGD momentum fused", "AdamW fused", "our AdamW", "our SGD"])
def test_a_wrapped_optimizer_is_stepped_on_a_settled_step_as_the_bare_one(
    device, settling, name, kind, clip
):
    expected = trained_in(MAKERS[name], lambda inner: inner, settling, device, clip=clip)
    assert settling.count == 4
    got = trained_in(MAKERS[name], WRAPPERS[kind], settling, device, clip=clip)
    assert settling.count == 8
    # The kernels of ours unscale in float32 as they step, in place it is rounded once before.
    torch.testing.assert_close(got, expected, rtol=5e-6, atol=1e-6)
