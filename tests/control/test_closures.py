"""step(closure): LBFGS, SAM and others that evaluate the loss themselves."""

import pytest
import torch
from torch import nn

from gradilocks import ClipByNorm, ClipByValue, DynamicScale, GradientControl, StaticScale
from gradilocks.errors import NeverFinite, NoGradients, NonFiniteGradient, ScaleMisuse
from tests.control.gradient_scripts import INF, NAN, assert_same, contents, loss_making, parameter


def rosenbrock(p):
    return (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2


def lbfgs(p, search=None, max_iter=20):
    lr = 0.5 if search is None else 1.0
    return torch.optim.LBFGS([p], lr=lr, max_iter=max_iter, line_search_fn=search)


def closure_for(control, p, loss_of=rosenbrock, planted=None):
    """A closure as the documentation asks for; `planted` spoils the gradient of one evaluation."""
    calls = []

    def closure():
        control.zero_grad()
        loss = loss_of(p)
        control.backward(loss)
        calls.append(loss.item())
        if planted is not None and len(calls) == planted[0]:
            p.grad[0] = planted[1]
        return loss

    return closure, calls


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("scale", [None, 1.0, 65536.0, "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lbfgs_under_control_is_bit_for_bit_lbfgs(search, scale, dtype):
    p, q = (parameter(-1.0, 1.5, dtype=dtype) for _ in range(2))
    optimizer, plain = lbfgs(p, search), lbfgs(q, search)
    control = GradientControl(optimizer, scale=scale)
    closure, calls = closure_for(control, p)

    def plain_closure():
        plain.zero_grad()
        loss = rosenbrock(q)
        loss.backward()
        return loss

    for step in range(1, 9):
        outcome = control.step(closure)
        plain.step(plain_closure)
        assert (outcome.step, outcome.skipped) == (step, False)
    assert len(calls) > 10
    assert_same(contents(optimizer), contents(plain))
    if search:
        assert rosenbrock(p).item() < 1e-6


def test_lbfgs_converges_under_a_scale_that_is_no_power_of_two():
    p = parameter(-1.0, 1.5, dtype=torch.float64)
    control = GradientControl(lbfgs(p, "strong_wolfe"), scale=1000.0)
    closure, _ = closure_for(control, p)
    for _ in range(10):
        control.step(closure)
    assert p.tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_one_nonfinite_evaluation_undoes_the_whole_step(bad, at, search):
    p, q = parameter(-1.0, 1.5), parameter(-1.0, 1.5)
    optimizer, other = lbfgs(p, search, max_iter=5), lbfgs(q, search, max_iter=5)
    control, untouched = GradientControl(optimizer), GradientControl(other)
    for _ in range(2):
        control.step(closure_for(control, p)[0])
        untouched.step(closure_for(untouched, q)[0])
    before = contents(optimizer)
    closure, calls = closure_for(control, p, planted=(at, bad))
    outcome = control.step(closure)
    assert outcome.skipped
    assert len(calls) == at
    assert outcome.culprits == ("param_groups[0]['params'][0]",)
    assert_same(contents(optimizer), before)
    assert control.scale == 32768.0
    for _ in range(2):
        control.step(closure_for(control, p)[0])
        untouched.step(closure_for(untouched, q)[0])
    assert_same(contents(optimizer), contents(other))


@pytest.mark.parametrize("at", [1, 3])
def test_a_first_step_undone_is_as_if_it_had_not_been(at):
    p, q = parameter(-1.0, 1.5), parameter(-1.0, 1.5)
    optimizer, other = lbfgs(p), lbfgs(q)
    control, untouched = GradientControl(optimizer), GradientControl(other)
    before = contents(optimizer)
    assert control.step(closure_for(control, p, planted=(at, NAN))[0]).skipped
    assert_same(contents(optimizer), before)
    for _ in range(3):
        control.step(closure_for(control, p)[0])
        untouched.step(closure_for(untouched, q)[0])
    assert_same(contents(optimizer), contents(other))


def test_an_undone_step_counts_towards_giving_up():
    p = parameter(-1.0, 1.5)
    control = GradientControl(lbfgs(p), give_up_after=2)
    assert control.step(closure_for(control, p, planted=(1, NAN))[0]).skipped
    with pytest.raises(NeverFinite, match="2 steps in a row"):
        control.step(closure_for(control, p, planted=(2, NAN))[0])
    assert p.tolist() == [-1.0, 1.5]


def test_an_undone_step_raises_for_those_who_asked_to_be_told():
    p = parameter(-1.0, 1.5)
    control = GradientControl(lbfgs(p), on_nonfinite="raise")
    with pytest.raises(NonFiniteGradient, match="NaN in"):
        control.step(closure_for(control, p, planted=(3, NAN))[0])
    assert p.tolist() == [-1.0, 1.5]


def test_an_overflow_that_scaling_caused_is_cured_step_by_step():
    p = parameter(-1.0, 1.5)
    control = GradientControl(lbfgs(p), scale=DynamicScale(init_scale=2.0**127, max_scale=2.0**127))
    skipped = [control.step(closure_for(control, p)[0]).skipped for _ in range(14)]
    assert skipped[0]
    assert not skipped[-1]


@pytest.mark.parametrize(
    ("clip", "expected"),
    [(ClipByNorm(1.0), [0.6, 0.8]), (ClipByValue(2.0), [2.0, 2.0]), (None, [3.0, 4.0])],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_sees_clipped_true_gradients(clip, expected, fused):
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0, fused=fused), clip=clip)

    def closure():
        control.zero_grad()
        loss = loss_making((p, torch.tensor([3.0, 4.0])))
        control.backward(loss)
        return loss

    outcome = control.step(closure)
    assert outcome.norm == pytest.approx(5.0, rel=1e-6)
    assert outcome.clipped == (clip is not None)
    assert (-p).tolist() == pytest.approx(expected, rel=1e-6)


class SharpnessAware(torch.optim.Optimizer):
    """SAM: climbs to the worst point nearby, takes the gradient there, steps from where it was."""

    def __init__(self, params, base, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["climb"] = p.grad * (0.05 / (norm + 1e-12))
            p.add_(self.state[p]["climb"])
        with torch.enable_grad():
            closure()
        for p in params:
            p.sub_(self.state[p].pop("climb"))
        self.base.step()


def sam_setting():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = SharpnessAware(
        model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    )
    return model, optimizer


def sam_batches():
    torch.manual_seed(6)
    return [(torch.randn(8, 5), torch.randn(8, 1)) for _ in range(15)]


def test_sam_under_control_is_bit_for_bit_sam():
    (model, optimizer), (theirs, plain) = sam_setting(), sam_setting()
    control = GradientControl(optimizer, model=model)
    for x, y in sam_batches():
        control.zero_grad()
        control.backward(nn.functional.mse_loss(model(x), y))

        def again(x=x, y=y):
            control.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            control.backward(loss)
            return loss

        assert not control.step(again).skipped
        plain.zero_grad()
        nn.functional.mse_loss(theirs(x), y).backward()

        def plainly(x=x, y=y):
            plain.zero_grad()
            loss = nn.functional.mse_loss(theirs(x), y)
            loss.backward()
            return loss

        plain.step(plainly)
    assert_same(contents(optimizer.base), contents(plain.base))


@pytest.mark.parametrize("where", ["first", "second"])
def test_a_nonfinite_gradient_in_either_pass_of_sam_changes_nothing(where):
    model, optimizer = sam_setting()
    control = GradientControl(optimizer, model=model)
    x, y = sam_batches()[0]

    def once(spoil):
        control.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        control.backward(loss)
        if spoil:
            model[0].weight.grad[0, 0] = NAN
        return loss

    once(False)
    control.step(lambda: once(False))
    before = contents(optimizer), contents(optimizer.base)
    once(where == "first")
    outcome = control.step(lambda: once(where == "second"))
    assert outcome.skipped
    assert outcome.culprits == ("0.weight",)
    assert_same((contents(optimizer), contents(optimizer.base)), before)


def test_several_optimizers_and_a_closure_are_refused_with_the_way_out():
    p, q = parameter(1.0), parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1))
    before = control.state_dict()
    calls = []
    with pytest.raises(ValueError, match=r"one optimizer.*has 2.*of its own"):
        control.step(lambda: calls.append(1))
    assert calls == []
    assert control.state_dict() == before


def test_a_closure_that_never_runs_backward_is_refused():
    p = parameter(1.0, 2.0)
    control = GradientControl(lbfgs(p))
    with pytest.raises(ScaleMisuse, match="backward"):
        control.step(lambda: rosenbrock(p))
    assert p.tolist() == [1.0, 2.0]


def test_a_closure_that_uses_plain_backward_is_refused():
    p = parameter(1.0, 2.0)
    control = GradientControl(lbfgs(p))

    def closure():
        control.zero_grad()
        loss = rosenbrock(p)
        loss.backward()
        return loss

    with pytest.raises(ScaleMisuse, match=r"control\.backward\(loss\)"):
        control.step(closure)
    assert p.tolist() == [1.0, 2.0]


def test_an_optimizer_that_ignores_its_closure_is_told_about():
    class Ignores(torch.optim.SGD):
        def step(self, closure=None):
            return None

    p = parameter(1.0)
    control = GradientControl(Ignores([p], lr=0.1))
    with pytest.raises(NoGradients, match="did not call the closure"):
        control.step(lambda: p.sum())
    assert control.scale == 65536.0


def test_an_error_in_the_closure_reaches_the_caller_and_the_next_step_works():
    p = parameter(-1.0, 1.5)
    control = GradientControl(lbfgs(p))

    def closure():
        raise KeyError("no such batch")

    with pytest.raises(KeyError, match="no such batch"):
        control.step(closure)
    assert p.tolist() == [-1.0, 1.5]
    assert not control.step(closure_for(control, p)[0]).skipped


def test_unscaled_gradients_may_precede_a_closure():
    model, optimizer = sam_setting()
    control = GradientControl(optimizer, model=model, scale=StaticScale(256.0))
    x, y = sam_batches()[0]
    control.backward(nn.functional.mse_loss(model(x), y))
    control.unscale_()

    def again():
        control.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        control.backward(loss)
        return loss

    assert control.step(again).norm < 100.0


@pytest.mark.parametrize("fused", [False, True])
def test_float16_gradients_of_a_closure_are_refused_where_unscaling_would_lose_them(fused):
    p = parameter(0.0, 0.0, dtype=torch.float16)
    control = GradientControl(torch.optim.SGD([p], lr=2.0**20, fused=fused))

    def closure():
        control.zero_grad()
        loss = (p.float() * 2e-8).sum()
        control.backward(loss)
        return loss

    with pytest.raises(ValueError, match="FP16"):
        control.step(closure)
    assert p.tolist() == [0.0, 0.0]


def test_gradients_after_a_finite_closure_step_are_true():
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))

    def closure():
        control.zero_grad()
        loss = loss_making((p, torch.tensor([3.0, 4.0])))
        control.backward(loss)
        return loss

    control.step(closure)
    assert p.grad.tolist() == [3.0, 4.0]
