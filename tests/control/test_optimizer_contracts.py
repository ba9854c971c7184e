"""How the decision reaches optimizers: torch's fused contract, older ones, and plain objects."""

import copy

import pytest
import torch

from gradilocks import ClipByValue, GradientControl, StaticScale
from gradilocks.errors import ScaleMisuse
from tests.control.gradient_scripts import (
    INF,
    NAN,
    OPTIMIZERS,
    assert_same,
    contents,
    control_step,
    gradients,
    loss_making,
    parameter,
)


class TakesDecision(torch.optim.Optimizer):
    """Reads grad_scale and found_inf off itself, as torch's fused optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})
        self._step_supports_amp_scaling = True
        self.seen = []
        self.fail = None

    @torch.no_grad()
    def step(self, closure=None):
        scale, skip = self.grad_scale, self.found_inf
        self.seen.append((scale.item(), skip.item()))
        if self.fail is not None:
            raise self.fail
        if not skip:
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad / scale


class TakesScaler(torch.optim.Optimizer):
    """The older contract of apex and Transformer Engine: `step` takes the scaler itself."""

    def __init__(self, params, supports=True):
        super().__init__(params, {"lr": 1.0})
        self._step_supports_amp_scaling = supports
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        self.seen.append(grad_scaler)
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def test_the_decision_is_one_divisor_and_one_flag():
    p = parameter(0.0, 0.0)
    optimizer = TakesDecision([p])
    control = GradientControl(optimizer, scale=8.0, clip=1.0)
    control_step(control, (p, torch.tensor([3.0, 4.0])))
    control_step(control, (p, torch.tensor([0.3, 0.4])))
    control_step(control, (p, torch.tensor([NAN, 4.0])))
    (clipped, go), (plain, go_on), (_, stop) = optimizer.seen
    assert clipped == pytest.approx(8.0 * 5.0, rel=1e-6)
    assert plain == 8.0
    assert (go, go_on, stop) == (0.0, 0.0, 1.0)
    torch.testing.assert_close(-p.detach(), torch.tensor([0.9, 1.2]), rtol=1e-6, atol=0)


def test_several_nonfinite_tensors_make_a_flag_of_exactly_one():
    params = [parameter(0.0) for _ in range(5)]
    optimizers = [TakesDecision(params[:3]), TakesDecision(params[3:])]
    control = GradientControl(*optimizers)
    control_step(control, *((p, bad) for p, bad in zip(params, [NAN, INF] * 3, strict=False)))
    assert [o.seen[0][1] for o in optimizers] == [1.0, 1.0]
    assert all(p.item() == 0.0 for p in params)


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_nothing_stays_behind_on_an_optimizer_whose_step_raises(error):
    p = parameter(0.0)
    optimizer = TakesDecision([p])
    control = GradientControl(optimizer, scale=4.0)
    optimizer.fail = error
    control.backward(loss_making((p, 1.0)))
    with pytest.raises(type(error)):
        control.step()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    optimizer.fail = None
    control.step()
    assert p.item() == -1.0
    assert optimizer.seen == [(4.0, 0.0), (4.0, 0.0)]


def test_nothing_stays_behind_after_a_good_step():
    p = parameter(0.0)
    optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
    before = set(vars(optimizer))
    control = GradientControl(optimizer)
    control_step(control, (p, 1.0))
    control_step(control, (p, NAN))
    assert set(vars(optimizer)) == before


@pytest.mark.parametrize("raises", [False, True])
def test_a_preset_grad_scale_is_multiplied_in_and_kept(raises):
    p = parameter(0.0)
    optimizer = TakesDecision([p])
    optimizer.grad_scale = preset = torch.tensor(2.0)
    optimizer.found_inf = flag = torch.tensor(0.0)
    control = GradientControl(optimizer, scale=4.0)
    if raises:
        optimizer.fail = RuntimeError("boom")
        control.backward(loss_making((p, 1.0)))
        with pytest.raises(RuntimeError, match="boom"):
            control.step()
    else:
        control_step(control, (p, 1.0))
        assert p.item() == -0.5
    assert optimizer.seen == [(8.0, 0.0)]
    assert optimizer.grad_scale is preset
    assert optimizer.found_inf is flag


def test_a_preset_of_none_means_no_preset():
    p = parameter(0.0)
    optimizer = TakesDecision([p])
    optimizer.grad_scale = None
    control = GradientControl(optimizer, scale=4.0)
    control_step(control, (p, 1.0))
    assert optimizer.seen == [(4.0, 0.0)]
    assert optimizer.grad_scale is None


@pytest.mark.parametrize("supports", [True, False])
@pytest.mark.parametrize("bad", [False, True])
def test_an_optimizer_that_would_take_a_scaler_gets_true_gradients_instead(supports, bad):
    p = parameter(0.0, 0.0)
    optimizer = TakesScaler([p], supports)
    control = GradientControl(optimizer, clip=1.0)
    control_step(control, (p, torch.tensor([3.0, INF if bad else 4.0])))
    assert optimizer.seen == ([] if bad else [None])
    assert (-p).tolist() == pytest.approx([0.0, 0.0] if bad else [0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD momentum", "Adagrad"])
def test_a_fused_optimizer_that_loaded_an_unfused_checkpoint_goes_on(name):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    unfused = OPTIMIZERS[name]([q])
    plain = GradientControl(unfused)
    control_step(plain, (q, 1.0))
    fused = OPTIMIZERS[f"{name} fused"]([p])
    with torch.no_grad():
        p.copy_(q)
    # Brings fused=None or False into the groups. Copied, as torch keeps the tensors it is given.
    fused.load_state_dict(copy.deepcopy(unfused.state_dict()))
    control = GradientControl(fused)
    control_step(control, (p, NAN))
    control_step(control, (p, 2.0))
    control_step(plain, (q, 2.0))
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD momentum"])
def test_an_unfused_optimizer_that_loaded_a_fused_checkpoint_goes_on(name):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    fused = OPTIMIZERS[f"{name} fused"]([q])
    other = GradientControl(fused)
    control_step(other, (q, 1.0))
    unfused = OPTIMIZERS[name]([p])
    with torch.no_grad():
        p.copy_(q)
    unfused.load_state_dict(copy.deepcopy(fused.state_dict()))
    control = GradientControl(unfused)
    before = contents(unfused)
    assert control_step(control, (p, NAN)).skipped
    assert_same(contents(unfused), before)
    control_step(control, (p, 2.0))
    control_step(other, (q, 2.0))
    torch.testing.assert_close(p, q)


def test_groups_that_differ_in_being_fused_are_stepped_alike():
    p, q = parameter(1.0), parameter(1.0)
    groups = [{"params": [p], "fused": True}, {"params": [q], "fused": False}]
    control = GradientControl(torch.optim.Adam(groups, lr=0.1, fused=True))
    control_step(control, (p, 2.0), (q, 2.0))
    assert p.item() == pytest.approx(q.item(), rel=1e-6)
    assert p.item() < 1.0
    held = p.item(), q.item()
    assert control_step(control, (p, 2.0), (q, INF)).skipped
    assert (p.item(), q.item()) == held


def test_step_is_looked_up_when_it_is_called():
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    control = GradientControl(optimizer)
    calls, real = [], optimizer.step
    optimizer.step = lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs)
    control_step(control, (p, 1.0))
    assert control_step(control, (p, NAN)).skipped
    assert calls == [()]
    assert p.item() == -1.0


@pytest.mark.parametrize("fused", [False, True])
def test_step_hooks_of_a_finite_step_run_once(fused):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.5, fused=fused)
    ran = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    control = GradientControl(optimizer)
    control_step(control, (p, 1.0))
    control_step(control, (p, 1.0))
    assert ran == ["pre", "post"] * 2


def test_a_nan_written_after_backward_is_caught():
    p = parameter(1.0, 2.0)
    for fused in (False, True):
        control = GradientControl(torch.optim.Adam([p], lr=0.1, fused=fused))
        control.backward(loss_making((p, 1.0)))
        p.grad[1] = NAN
        outcome = control.step()
        assert outcome.skipped
        assert outcome.culprits == ("param_groups[0]['params'][0]",)
        assert p.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_written_after_unscale_is_caught(fused):
    p = parameter(1.0, 2.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=fused), clip=1.0)
    control.backward(loss_making((p, 1.0)))
    control.unscale_()
    p.grad[0] = INF
    assert control.step().skipped
    assert p.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 2.0, ClipByValue(1.0)])
def test_edits_between_unscale_and_step_are_what_is_stepped_and_measured(fused, clip):
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0, fused=fused), clip=clip)
    control.backward(loss_making((p, torch.tensor([30.0, 40.0]))))
    control.unscale_()
    assert p.grad.tolist() == [30.0, 40.0]
    p.grad /= 10
    outcome = control.step()
    assert outcome.norm == pytest.approx(5.0, rel=1e-6)
    expected = {None: [3.0, 4.0], 2.0: [1.2, 1.6]}.get(clip, [1.0, 1.0])
    assert (-p).tolist() == pytest.approx(expected, rel=1e-6)


def test_unscaling_several_optimizers_makes_all_gradients_true():
    p, q = parameter(0.0), parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=1.0), torch.optim.Adam([q], lr=1.0, fused=True)
    )
    control.backward(loss_making((p, 2.0), (q, 3.0)))
    control.unscale_()
    assert (p.grad.item(), q.grad.item()) == (2.0, 3.0)
    control.step()
    assert p.item() == -2.0


def test_unscaling_an_infinite_gradient_leaves_it_infinite():
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))
    control.backward(loss_making((p, torch.tensor([INF, 2.0]))))
    control.unscale_()
    assert p.grad.tolist() == [INF, 2.0]
    assert control.step().skipped
    assert control.scale == 32768.0


@pytest.mark.parametrize("name", ["SGD", "SGD momentum fused", "AdamW fused", "Adam"])
def test_unscaling_first_and_stepping_then_is_bit_for_bit_a_plain_step(name):
    p, q = parameter(0.3, -0.7), parameter(0.3, -0.7)
    one, two = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([q])
    control, other = GradientControl(one), GradientControl(two)
    for step in range(1, 8):
        gradient = torch.tensor([1.0 / step, -3.0 * step])
        control_step(control, (p, gradient))
        other.zero_grad()
        other.backward(loss_making((q, gradient)))
        other.unscale_()
        other.step()
    assert_same(contents(one), contents(two))


def test_unscaling_twice_is_refused_and_changes_nothing():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0), scale=StaticScale(4.0))
    control.backward(loss_making((p, 2.0)))
    control.unscale_()
    with pytest.raises(ScaleMisuse, match="already been called"):
        control.unscale_()
    assert p.grad.item() == 2.0
    control.step()
    assert p.item() == -2.0


def test_backward_after_unscale_is_refused_until_the_step_or_the_clearing():
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    control = GradientControl(optimizer)
    control.backward(loss_making((p, 2.0)))
    control.unscale_()
    made = gradients(optimizer)
    for attempt in (control.backward, control.scale_loss):
        with pytest.raises(ScaleMisuse, match=r"after unscale_\(\).*zero_grad"):
            attempt(loss_making((p, 2.0)))
    assert_same(gradients(optimizer), made)
    control.step()
    assert p.item() == -2.0
    control.zero_grad()
    control.backward(loss_making((p, 2.0)))
    control.unscale_()
    control.zero_grad(set_to_none=False)
    control.backward(loss_making((p, 1.0)))
    control.step()
    assert p.item() == -3.0


def test_clearing_through_the_optimizer_also_starts_over_after_unscale():
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    control = GradientControl(optimizer)
    control.backward(loss_making((p, 2.0)))
    control.unscale_()
    optimizer.zero_grad()
    control.backward(loss_making((p, 1.0)))
    control.step()
    assert p.item() == -1.0


def test_unscaling_without_a_backward_is_refused():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))
    p.grad = torch.ones(1)
    with pytest.raises(ScaleMisuse, match=r"unscale_\(\) without a backward\(\)"):
        control.unscale_()
    assert p.grad.item() == 1.0


def test_a_step_without_a_backward_is_refused_and_the_way_out_named():
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    control = GradientControl(optimizer)
    p.grad = torch.ones(1)
    before = control.state_dict()
    with pytest.raises(ScaleMisuse, match=r"without a backward\(\).*control\.backward\(loss\)"):
        control.step()
    assert control.state_dict() == before
    assert p.item() == 0.0


def test_a_second_step_on_the_same_gradients_is_refused():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))
    control_step(control, (p, 1.0))
    with pytest.raises(ScaleMisuse, match="without a backward"):
        control.step()
    assert p.item() == -1.0


@pytest.mark.parametrize("gradient", [1.0, NAN])
@pytest.mark.parametrize("fused", [False, True])
def test_adding_to_the_gradients_of_the_last_step_is_refused(gradient, fused):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    control = GradientControl(optimizer)
    control.backward(loss_making((p, gradient)))
    control.step()
    made, state = gradients(optimizer), control.state_dict()
    for attempt in (control.backward, control.scale_loss):
        with pytest.raises(ScaleMisuse, match=r"still there.*zero_grad"):
            attempt(loss_making((p, 1.0)))
    assert_same(gradients(optimizer), made)
    assert control.state_dict() == state


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("through_the_optimizer", [True, False])
def test_clearing_after_a_step_lets_the_next_one_begin(set_to_none, through_the_optimizer):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    control = GradientControl(optimizer)
    clear = optimizer.zero_grad if through_the_optimizer else control.zero_grad
    for _ in range(3):
        control.backward(loss_making((p, 1.0)))
        control.step()
        clear(set_to_none=set_to_none)
    assert p.item() == -3.0


def test_without_a_scale_gradients_may_be_added_to_those_of_the_last_step():
    p, q = parameter(0.0), parameter(0.0)
    control, plain = (
        GradientControl(torch.optim.SGD([p], lr=1.0), scale=None),
        torch.optim.SGD([q], lr=1.0),
    )
    for _ in range(3):
        control.backward((p * 2.0).sum())
        control.step()
        (q * 2.0).sum().backward()
        plain.step()
    assert p.item() == q.item() == -12.0


def test_a_loss_may_be_scaled_before_the_gradients_are_cleared():
    # forward, scale, clear, backward, step: the order of many a loop.
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))
    scaled = control.scale_loss(loss_making((p, 1.0)))
    control.zero_grad()
    scaled.backward()
    assert not control.step().skipped
    assert p.item() == -1.0


def test_a_backward_that_fails_leaves_no_step_to_be_taken():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0), scale=StaticScale(4.0))
    control_step(control, (p, 1.0))
    loss = (p * p).sum()
    loss.backward()
    p.grad = torch.ones(1)  # left over: it does not carry the scale
    with pytest.raises(RuntimeError, match="second time"):
        control.backward(loss)
    with pytest.raises(ScaleMisuse):
        control.step()
    assert p.item() == -1.0


def test_backward_hands_its_keywords_to_torch():
    p, q = parameter(2.0), parameter(3.0)
    control = GradientControl(torch.optim.SGD([p, q], lr=1.0), scale=StaticScale(4.0))
    loss = (p * q).sum()
    control.backward(loss, retain_graph=True, inputs=[p])
    assert q.grad is None
    control.backward(loss, inputs=[p])
    assert p.grad.item() == 2 * 3.0 * 4.0
    control.step()
    assert (p.item(), q.item()) == (-4.0, 3.0)


def test_a_scaled_loss_is_differentiable_under_create_graph():
    p = parameter(3.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0), scale=StaticScale(4.0))
    scaled = control.scale_loss((p**3).sum())
    (gradient,) = torch.autograd.grad(scaled, p, create_graph=True)
    assert gradient.item() == 4.0 * 27.0
    (gradient / control.scale).sum().backward()
    assert p.grad.item() == 18.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_any_float_dtype_and_one_element_is_scaled_without_overflow(dtype, shape):
    p = parameter(3.0)
    # At 65536 the gradient that enters a float16 loss is itself Inf; the loss must not be.
    scale = 65536.0 if dtype is not torch.float16 else 32768.0
    control = GradientControl(torch.optim.SGD([p], lr=1.0), scale=scale)
    scaled = control.scale_loss((p * 2.0).sum().to(dtype).reshape(shape))
    assert scaled.item() == 6.0 * scale
    scaled.sum().backward()
    control.step()
    assert p.item() == 1.0


def test_a_float16_loss_under_the_first_default_scale_recovers_by_itself():
    p = parameter(3.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))
    outcomes = []
    for _ in range(2):
        control.zero_grad()
        control.backward((p * 2.0).sum().half())
        outcomes.append(control.step())
    assert [o.skipped for o in outcomes] == [True, False]
    assert p.item() == 1.0


def test_scale_loss_takes_unreduced_losses():
    p = parameter(1.0, 2.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))
    control.scale_loss(p * 2).sum().backward()
    assert not control.step().skipped
    assert p.tolist() == [-1.0, 0.0]
