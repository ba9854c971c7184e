"""A wrapped optimizer is stepped as the one inside it would be: by whoever really steps, or not.

The bare optimizer is the truth. With a scale that is a power of two and without a clip the numbers
are the same bit for bit, in the optimizer's own pass or in place; with a clip the one divides by a
rounded 1 / multiplier and the other multiplies, which differs in the last bits.
"""

from __future__ import annotations

import functools

import pytest
import torch

from gradilocks import (
    AdaptiveClip,
    ClipByValue,
    GradientControl,
    HeadroomScale,
    QuantileClip,
    StaticScale,
)
from gradilocks.step.own_step import inner_optimizers
from gradilocks.step.update import takes_decision, takes_scaler
from tests.control.gradient_scripts import INF, NAN, assert_same, control_step, loss_making
from tests.control.optimizer_wrappers import (
    MAKERS,
    WRAPPERS,
    Forwards,
    Imitates,
    SharesGroups,
    SlowWeights,
    TrueGradients,
    state_of,
)

each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
FUSED = [name for name in MAKERS if name != "Adam foreach"]


def two_parameters():
    return [torch.nn.Parameter(torch.tensor([1.0, -2.0])), torch.nn.Parameter(torch.tensor([0.5]))]


def gradients_at(step, bad=None):
    one = torch.tensor([0.3 * (step + 1), -0.7])
    other = torch.tensor([1.1 - step])
    if bad is not None:
        one[1] = bad
    return one, other


STEPS = [NAN, None, None, INF, None]


def trained(make, wrap, **settings):
    """The parameters after each step, with what the optimizer inside remembers."""
    params = two_parameters()
    inner = make(params)
    control = GradientControl(wrap(inner), **settings)
    told = []
    for step, bad in enumerate(STEPS):
        before = [p.detach().clone() for p in params], state_of(inner)
        outcome = control_step(control, *zip(params, gradients_at(step, bad), strict=True))
        after = [p.detach().clone() for p in params], state_of(inner)
        assert outcome.skipped == (bad is not None)
        if outcome.skipped:
            assert_same(after[0], before[0])
            if step:  # A first step that is skipped may make state that is empty.
                assert_same(after[1], before[1])
        told.append(after[0])
    return told


def itself(optimizer):
    return optimizer


@functools.cache
def trained_bare(make, **settings):
    """What every wrapper is held against, trained once."""
    return trained(make, itself, **settings)


@each_maker
@each_wrapper
def test_a_wrapped_optimizer_steps_and_skips_as_the_one_inside(make, wrap):
    assert_same(trained(make, wrap), trained_bare(make))


@each_maker
@each_wrapper
def test_a_wrapped_optimizers_gradients_are_clipped(make, wrap):
    for settings in ({"clip": 0.1}, {"scale": None, "clip": 0.1}):
        got, expected = trained(make, wrap, **settings), trained_bare(make, **settings)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


@each_wrapper
@pytest.mark.parametrize("make", [MAKERS["SGD fused"], MAKERS["our SGD"]], ids=["torch's", "ours"])
@pytest.mark.parametrize(
    "settings",
    [
        {"scale": StaticScale(1000.0)},
        {"scale": HeadroomScale()},
        {"scale": None, "clip": ClipByValue(0.1)},
        {"clip": AdaptiveClip(0.01)},
        {"clip": QuantileClip(0.5)},
        {"scale": None},
    ],
    ids=["static", "headroom", "by value", "adaptive", "quantile", "nothing"],
)
def test_other_policies_reach_a_wrapped_optimizer(make, wrap, settings):
    for one, other in zip(
        trained(make, wrap, **settings), trained_bare(make, **settings), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


def test_a_wrapped_sgd_moves_by_the_gradient_and_not_by_the_scale():
    """By numbers written down: 65.5 in place of 0.001 is what it once was."""
    p = torch.nn.Parameter(torch.zeros(1))
    control = GradientControl(Forwards(torch.optim.SGD([p], lr=0.001, fused=True)))
    assert control.scale == 65536.0
    assert not control_step(control, (p, 1.0)).skipped
    assert p.item() == pytest.approx(-0.001, rel=1e-6)
    assert control_step(control, (p, NAN)).skipped
    assert p.item() == pytest.approx(-0.001, rel=1e-6)


@each_wrapper
@pytest.mark.parametrize("name", FUSED)
def test_no_wrapper_is_taken_for_the_optimizer_inside(wrap, name):
    wrapper = wrap(MAKERS[name](two_parameters()))
    assert not takes_decision(wrapper)
    assert not takes_scaler(wrapper)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("schedules", [0, 1, 2])
def test_a_bare_optimizer_takes_the_decision_with_schedules_and_hooks_too(name, schedules):
    optimizer = MAKERS[name](two_parameters())
    for _ in range(schedules):
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert takes_decision(optimizer)
    optimizer.step = optimizer.step  # As accelerate puts it back.
    assert takes_decision(optimizer)


def test_a_subclass_that_changes_no_step_takes_the_decision():
    class Named(torch.optim.AdamW):
        pass

    assert takes_decision(Named(two_parameters(), fused=True))


class ReadsInAMethod(torch.optim.Optimizer):
    """An optimizer of somebody's own that keeps torch's contract, one call further down."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.update_group(group)

    def update_group(self, group):
        if not self.found_inf:
            for param in group["params"]:
                param -= group["lr"] * param.grad / self.grad_scale


class ReadsNothing(ReadsInAMethod):
    """A class below, whose method takes the place of the one that reads both."""

    def update_group(self, group):
        for param in group["params"]:
            param -= group["lr"] * param.grad


class NamesBoth(torch.optim.SGD):
    """Somebody's fused SGD that looks at both and goes on with torch's step."""

    def step(self, closure=None):
        self.seen = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return super().step(closure)


def test_a_class_below_whose_method_reads_nothing_gets_true_gradients():
    params = two_parameters()
    control = GradientControl(ReadsNothing(params), scale=8.0)
    control_step(control, *zip(params, gradients_at(0), strict=True))
    torch.testing.assert_close(params[0].detach(), torch.tensor([0.97, -1.93]))
    assert control_step(control, *zip(params, gradients_at(0, NAN), strict=True)).skipped
    torch.testing.assert_close(params[0].detach(), torch.tensor([0.97, -1.93]))


def test_a_subclass_that_was_loaded_unfused_is_stepped_the_hosts_way():
    params = two_parameters()
    optimizer = NamesBoth(params, lr=0.1, fused=True)
    optimizer.param_groups[0]["fused"] = None  # As the checkpoint of an unfused one has it.
    control = GradientControl(optimizer, scale=8.0)
    control_step(control, *zip(params, gradients_at(0), strict=True))
    torch.testing.assert_close(params[0].detach(), torch.tensor([0.97, -1.93]))


def test_an_optimizer_that_reads_the_decision_in_a_method_gets_it():
    params = two_parameters()
    optimizer = ReadsInAMethod(params)
    control = GradientControl(optimizer, scale=8.0)
    control_step(control, *zip(params, gradients_at(0), strict=True))
    torch.testing.assert_close(params[0].detach(), torch.tensor([0.97, -1.93]))
    assert control_step(control, *zip(params, gradients_at(0, NAN), strict=True)).skipped
    assert takes_decision(optimizer)


@each_wrapper
def test_a_wrapper_of_an_optimizer_with_a_contract_of_its_own_is_no_such_optimizer(wrap):
    assert not takes_decision(wrap(ReadsInAMethod(two_parameters())))


@each_wrapper
@each_maker
def test_a_closure_through_a_wrapper_is_undone_as_a_whole(make, wrap):
    ends = []
    for around in (wrap, itself):
        params = two_parameters()
        inner = make(params)
        control = GradientControl(around(inner), scale=4.0)

        def closure(step, bad, params=params, control=control):
            control.zero_grad()
            loss = loss_making(*zip(params, gradients_at(step, bad), strict=True))
            control.backward(loss)
            return loss

        for step, bad in enumerate(STEPS):
            held = [p.detach().clone() for p in params], state_of(inner)
            evaluate = lambda step=step, bad=bad, closure=closure: closure(step, bad)  # noqa: E731
            assert control.step(evaluate).skipped == (bad is not None)
            if bad is not None:
                assert_same(([p.detach().clone() for p in params], state_of(inner)), held)
        ends.append([p.detach().clone() for p in params])
    assert_same(*ends)


def test_what_the_optimizer_inside_remembers_is_undone_too():
    """LBFGS evaluates often, and has moved on by the time that an evaluation is not finite."""
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    inner = torch.optim.LBFGS([p], lr=0.1, max_iter=4)
    control = GradientControl(SharesGroups(inner), scale=4.0)
    calls = []

    def closure():
        control.zero_grad()
        calls.append(1)
        loss = (p**4).sum() * (NAN if len(calls) == 7 else 1.0)
        control.backward(loss)
        return loss

    assert not control.step(closure).skipped
    held = p.detach().clone(), state_of_lbfgs(inner)
    assert control.step(closure).skipped
    assert len(calls) == 7
    assert_same((p.detach().clone(), state_of_lbfgs(inner)), held)


def state_of_lbfgs(inner):
    (state,) = inner.state.values()
    return {
        name: [t.clone() for t in value] if isinstance(value, list) else value
        for name, value in state.items()
        if name in ("func_evals", "n_iter", "old_dirs", "old_stps", "ro")
    }


@pytest.mark.parametrize("name", FUSED)
def test_a_wrapper_that_looks_at_gradients_sees_true_ones(name):
    ends = []
    for scale in (65536.0, None):
        params = two_parameters()
        control = GradientControl(TrueGradients(MAKERS[name](params)), scale=scale)
        for step in range(3):
            control_step(control, *zip(params, gradients_at(step), strict=True))
        ends.append([p.detach().clone() for p in params])
    assert_same(*ends)


@pytest.mark.parametrize("name", FUSED)
def test_a_wrapper_that_writes_weights_leaves_them_when_skipped(name):
    params = two_parameters()
    control = GradientControl(SlowWeights(MAKERS[name](params)))
    control_step(control, *zip(params, gradients_at(0), strict=True))
    held = [p.detach().clone() for p in params]
    assert control_step(control, *zip(params, gradients_at(1, NAN), strict=True)).skipped
    assert_same([p.detach().clone() for p in params], held)


class Counted(Forwards):
    calls = 0
    fails = 0

    def step(self, closure=None):
        if self.fails:
            self.fails -= 1
            raise RuntimeError("out of memory")
        self.calls += 1
        return self.inner.step(closure)


@pytest.mark.parametrize("name", FUSED)
def test_the_wrappers_own_step_is_called_once_for_each_step_that_is_taken(name):
    params = two_parameters()
    wrapper = Counted(MAKERS[name](params))
    ran = []
    wrapper.inner.register_step_post_hook(lambda *_: ran.append(1))
    control = GradientControl(wrapper)
    for step, bad in enumerate(STEPS):
        control_step(control, *zip(params, gradients_at(step, bad), strict=True))
    assert wrapper.calls == len(ran) == 3


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("settings", [{}, {"scale": None, "clip": 0.1}], ids=["scaled", "clipped"])
def test_a_wrapped_step_that_raises_may_be_tried_again(name, settings):
    ends = []
    for fails in (2, 0):
        params = two_parameters()
        wrapper = Counted(MAKERS[name](params))
        control = GradientControl(wrapper, **settings)
        control.backward(loss_making(*zip(params, gradients_at(0), strict=True)))
        wrapper.fails = fails
        for _ in range(fails):
            with pytest.raises(RuntimeError, match="out of memory"):
                control.step()
        assert not control.step().skipped
        ends.append([p.detach().clone() for p in params])
    torch.testing.assert_close(*ends, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("wrapped", ["first", "second", "both"])
def test_wrapped_and_bare_optimizers_share_one_control(name, wrapped):
    ends = []
    for wrap in (Imitates, itself):
        params = two_parameters()
        pair = [MAKERS[name]([param]) for param in params]
        if wrapped in ("first", "both"):
            pair[0] = wrap(pair[0])
        if wrapped in ("second", "both"):
            pair[1] = wrap(pair[1])
        control = GradientControl(*pair)
        for step, bad in enumerate(STEPS):
            held = [p.detach().clone() for p in params]
            outcome = control_step(control, *zip(params, gradients_at(step, bad), strict=True))
            if outcome.skipped:
                assert_same([p.detach().clone() for p in params], held)
        ends.append([p.detach().clone() for p in params])
    assert_same(*ends)


@pytest.mark.parametrize("name", FUSED)
def test_gradients_are_accumulated_and_unscaled_by_hand_for_a_wrapped_optimizer(name):
    ends = []
    for wrap in (Imitates, itself):
        params = two_parameters()
        control = GradientControl(wrap(MAKERS[name](params)))
        for step in range(3):
            control.zero_grad()
            for part in range(2):
                pairs = zip(params, gradients_at(step + part), strict=True)
                control.backward(loss_making(*pairs))
            if step:
                control.unscale_()
            control.step()
        ends.append([p.detach().clone() for p in params])
    assert_same(*ends)


def test_schedules_on_the_inside_and_on_the_outside_go_on():
    rates = []
    for over in ("wrapper", "inner"):
        params = two_parameters()
        inner = MAKERS["AdamW fused"](params)
        wrapper = Imitates(inner)
        control = GradientControl(wrapper)
        chosen = wrapper if over == "wrapper" else inner
        schedule = torch.optim.lr_scheduler.StepLR(chosen, 1, gamma=0.5)
        mine = control.scheduler(schedule)
        for step, bad in enumerate([None, NAN, None]):
            control_step(control, *zip(params, gradients_at(step, bad), strict=True))
            mine.step()
        rates.append(inner.param_groups[0]["lr"])
    assert rates == [0.025, 0.025]


@each_wrapper
def test_float16_gradients_of_a_wrapped_optimizer_are_refused_with_a_way_out(wrap):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    inner = torch.optim.SGD([p], lr=0.1, fused=True)
    control = GradientControl(wrap(inner))
    control.backward((p.float() * 3).sum())
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
        control.step()
    said = str(caught.value)
    ways_out = ("use the SGD inside it", "use the class's own step")
    assert any(way in said for way in ways_out)
    assert p.tolist() == [0.0, 0.0]


def test_inner_optimizers_are_found_in_attributes_slots_and_lists():
    inner = MAKERS["SGD fused"](two_parameters())
    assert inner_optimizers(inner) == []
    for name in ("forwards", "forwards writes", "only slots", "imitates", "has properties"):
        assert inner_optimizers(WRAPPERS[name](inner))[-1] is inner
    assert [type(each).__name__ for each in inner_optimizers(WRAPPERS["several"](inner))] == [
        "Forwards",
        "ImitatedSGD",
        "SGD",
    ]
