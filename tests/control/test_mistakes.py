"""Mistakes that would silently ruin a run raise an error and change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradilocks
from control.given_gradients import assert_same, contents, loss_giving, parameter, take_step
from gradilocks import AdaGC, GradientControl
from gradilocks.errors import NoGradients, ScaleMisuse, SharedParameter


def sgd(*params, **options):
    return torch.optim.SGD(list(params), lr=0.1, **options)


def two_optimizers(device="cpu"):
    p, q = parameter(1.0, device=device), parameter(2.0, device=device)
    first, second = sgd(p), sgd(q, fused=True)
    return p, q, first, second, GradientControl(first, second)


WAYS_TO_CLEAR = {
    "control": lambda control, optimizer: control.zero_grad(),
    "control, in place": lambda control, optimizer: control.zero_grad(set_to_none=False),
    "control, only": lambda control, optimizer: control.zero_grad(only=optimizer),
    "optimizer": lambda control, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda control, optimizer: optimizer.zero_grad(set_to_none=False),
    "data.zero_": lambda control, optimizer: [p.grad.data.zero_() for p in optimizer.param_groups[0]["params"]],
    "grad.zero_": lambda control, optimizer: [p.grad.zero_() for p in optimizer.param_groups[0]["params"]],
    "None": lambda control, optimizer: [setattr(p, "grad", None) for p in optimizer.param_groups[0]["params"]],
}


# --- step without a scaled loss ---------------------------------------------------------------------------------------


def test_a_step_without_a_scaled_loss_raises(device):
    p = parameter(1.0, device=device)
    optimizer = sgd(p)
    control = GradientControl(optimizer)
    loss_giving((p, 1.0)).backward()
    with pytest.raises(ScaleMisuse, match=r"without a scaled loss.*control\.backward\(loss\)"):
        control.step()
    assert p.item() == 1.0
    control.zero_grad()
    take_step(control, (p, 1.0))
    optimizer.zero_grad()
    loss_giving((p, 1.0)).backward()
    with pytest.raises(ScaleMisuse, match="without a scaled loss"):
        control.step()


def test_a_second_step_on_the_same_gradients_raises(device):
    p = parameter(1.0, device=device)
    control = GradientControl(sgd(p))
    take_step(control, (p, 1.0))
    before = p.detach().clone()
    with pytest.raises(ScaleMisuse, match="without a scaled loss since the previous step"):
        control.step()
    assert torch.equal(p, before)


def test_a_step_after_an_optimizer_raised_is_not_divided_by_the_scale_again():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    p = parameter(1.0)
    control = GradientControl(Failing([p], lr=0.1))
    control.backward(loss_giving((p, 1.0)))
    with pytest.raises(RuntimeError, match="out of memory"):
        control.step()
    assert p.grad.item() == 1.0  # Already unscaled.
    with pytest.raises(ScaleMisuse, match="without a scaled loss"):
        control.step()


def test_the_norm_of_gradients_that_are_not_scaled_raises():
    p = parameter(1.0)
    control = GradientControl(sgd(p))
    loss_giving((p, 1.0)).backward()
    with pytest.raises(ScaleMisuse, match="without a scaled loss"):
        control.norm()


def test_without_a_scale_plain_backward_is_fine(device):
    p = parameter(1.0, device=device)
    control = GradientControl(sgd(p), scale=None)
    for _ in range(2):
        loss_giving((p, 1.0)).backward()
        assert control.norm().item() > 0
        assert not control.step().skipped
    control.unscale_()
    assert p.grad.item() == 2.0


# --- backward onto unscaled gradients, and unscale_ twice -------------------------------------------------------------


def test_backward_onto_unscaled_gradients_raises(device):
    p = parameter(1.0, device=device)
    control = GradientControl(sgd(p))
    control.backward(loss_giving((p, 2.0)))
    control.unscale_()
    p.grad.mul_(0.5)  # A clip.
    for action in (control.backward, control.scale_loss):
        with pytest.raises(ScaleMisuse, match="already unscaled"):
            action(loss_giving((p, 1.0)))
    assert p.grad.item() == 1.0
    control.step()
    assert p.item() == pytest.approx(0.9)


def test_backward_onto_the_unscaled_gradients_of_one_of_two_optimizers_raises(device):
    p, q, first, _, control = two_optimizers(device)
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.unscale_(only=first)
    control.backward(loss_giving((q, 1.0)))  # Does not reach the unscaled gradients.
    with pytest.raises(ScaleMisuse, match="already unscaled"):
        control.backward(loss_giving((p, 1.0)))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_backward_that_builds_a_graph_onto_unscaled_gradients_raises():
    p, q, first, _, control = two_optimizers()
    control.backward((p * q).sum())
    control.unscale_(only=first)
    with pytest.raises(ScaleMisuse, match="already unscaled"):
        control.backward((p * q).sum(), create_graph=True)
    p.grad = q.grad = None  # Otherwise they keep the graph alive.


@pytest.mark.parametrize("clear", WAYS_TO_CLEAR)
@pytest.mark.parametrize("fused", [False, True])
def test_unscaled_gradients_that_were_discarded_may_be_followed_by_a_backward(clear, fused):
    p = parameter(1.0)
    optimizer = sgd(p, fused=fused)
    control = GradientControl(optimizer)
    control.backward(loss_giving((p, 2.0)))
    control.unscale_()
    WAYS_TO_CLEAR[clear](control, optimizer)
    control.backward(loss_giving((p, 3.0)))
    assert control.step().norm == 3.0
    assert p.item() == pytest.approx(0.7)


def test_unscale_twice_raises_before_anything_is_divided(device):
    p, q, first, second, control = two_optimizers(device)
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.unscale_(only=second)
    for only in (second, None):
        with pytest.raises(ScaleMisuse, match="already called"):
            control.unscale_(only=only)
    assert (p.grad.item(), q.grad.item()) == (65536.0, 1.0)
    control.unscale_(only=first)
    assert not control.step().skipped


@pytest.mark.parametrize("before", ["nothing", "step", "zero_grad"])
def test_unscale_without_a_scaled_loss_raises(before):
    p = parameter(1.0)
    control = GradientControl(sgd(p))
    if before != "nothing":
        control.backward(loss_giving((p, 1.0)))
        getattr(control, before)()
    with pytest.raises(ScaleMisuse, match=r"unscale_\(\) without a scaled loss"):
        control.unscale_()


def test_a_step_of_all_when_only_some_are_unscaled_raises():
    p, q, first, _, control = two_optimizers()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.unscale_(only=first)
    with pytest.raises(ScaleMisuse, match="Unscale all of them"):
        control.step()
    control.step(only=first)


# --- leftover gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_gradients_of_a_finished_step_that_were_not_cleared_raise(fused, micro_batches, call, device):
    p = parameter(1.0, device=device)
    optimizer = sgd(p, fused=fused)
    control = GradientControl(optimizer)
    take_step(control, (p, 1.0))
    before = contents(optimizer)
    for _ in range(micro_batches):
        control.backward(loss_giving((p, 1.0)))
    with pytest.raises(ScaleMisuse, match=r"before the last step.*zero_grad\(\)"):
        getattr(control, call)()
    assert_same(contents(optimizer), before)
    assert not take_step(control, (p, 1.0)).skipped


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_leftovers_to_which_a_backward_that_builds_a_graph_has_added_raise():
    p = parameter(1.0)
    control = GradientControl(sgd(p))
    take_step(control, (p, 1.0))
    control.backward((p * p).sum(), create_graph=True)
    with pytest.raises(ScaleMisuse, match="before the last step"):
        control.step()
    p.grad = None  # Otherwise it keeps the graph alive.


def test_leftovers_at_either_end_of_the_parameters_raise():
    for cleared in (slice(1, None), slice(None, -1)):
        params = [parameter(1.0) for _ in range(4)]
        control = GradientControl(sgd(*params))
        take_step(control, *((p, 1.0) for p in params))
        for p in params[cleared]:
            p.grad = None
        control.backward(loss_giving(*((p, 1.0) for p in params)))
        with pytest.raises(ScaleMisuse, match="before the last step"):
            control.step()


@pytest.mark.parametrize("clear", WAYS_TO_CLEAR)
@pytest.mark.parametrize("fused", [False, True])
def test_every_way_to_clear_gradients_is_recognized(clear, fused, device):
    p = parameter(1.0, device=device)
    optimizer = sgd(p, fused=fused)
    control = GradientControl(optimizer, scale=4.0)
    for _ in range(3):
        control.backward(loss_giving((p, 1.0)))
        control.backward(loss_giving((p, 1.0)))
        assert control.step().norm == 2.0
        WAYS_TO_CLEAR[clear](control, optimizer)
    assert p.item() == pytest.approx(1.0 - 3 * 0.2)


def test_gradients_may_be_cleared_between_scaling_the_loss_and_backward(device):
    p = parameter(1.0, device=device)
    optimizer = sgd(p)
    scaler = GradientControl(optimizer).as_scaler()
    for _ in range(3):
        loss = scaler.scale(loss_giving((p, 1.0)))
        optimizer.zero_grad()
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == pytest.approx(1.0 - 3 * 0.1)


def test_gradients_that_wait_while_the_scale_moves_raise():
    p, q, first, second, control = two_optimizers()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.step(only=first)
    control.update()
    with pytest.raises(ScaleMisuse, match="without a scaled loss"):
        control.step(only=second)
    first.zero_grad()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.step(only=first)
    with pytest.raises(ScaleMisuse, match="before the last step"):
        control.step(only=second)


def test_gradients_that_are_there_when_a_state_is_loaded_raise():
    p = parameter(1.0)
    control = GradientControl(sgd(p))
    control.backward(loss_giving((p, 1.0)))
    control.load_state_dict({"scale": 2.0})
    with pytest.raises(ScaleMisuse, match="without a scaled loss"):
        control.step()
    control.backward(loss_giving((p, 1.0)))
    with pytest.raises(ScaleMisuse, match="before the last step"):
        control.step()


# --- optimizer.step() while the gradients are scaled -----------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_stepping_the_optimizer_directly_on_scaled_gradients_raises(fused, device):
    p = parameter(1.0, device=device)
    optimizer = sgd(p, fused=fused)
    control = GradientControl(optimizer)
    control.backward(loss_giving((p, 1.0)))
    with pytest.raises(ScaleMisuse, match=r"scaled by a GradientControl.*control\.step\(\)"):
        optimizer.step()
    assert p.item() == 1.0
    control.step()


@pytest.mark.parametrize("fused", [False, True])
def test_stepping_the_optimizer_again_after_the_control_raises(fused, device):
    p = parameter(1.0, device=device)
    optimizer = sgd(p, fused=fused)
    control = GradientControl(optimizer)
    take_step(control, (p, 1.0))
    before = p.detach().clone()
    with pytest.raises(ScaleMisuse, match=r"Remove optimizer\.step\(\)"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("clear", WAYS_TO_CLEAR)
def test_an_optimizer_may_be_stepped_directly_on_gradients_of_its_own(clear):
    p = parameter(1.0)
    optimizer = sgd(p)
    control = GradientControl(optimizer)
    take_step(control, (p, 1.0))
    WAYS_TO_CLEAR[clear](control, optimizer)
    optimizer.step()
    loss_giving((p, 1.0)).backward()
    optimizer.step()
    assert p.item() == pytest.approx(0.8)


def test_an_optimizer_may_be_stepped_directly_after_unscale():
    p = parameter(1.0)
    optimizer = sgd(p)
    control = GradientControl(optimizer)
    control.backward(loss_giving((p, 1.0)))
    control.unscale_()
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


# --- parameters that are shared, have no gradient, or are float16 -----------------------------------------------------


def test_a_parameter_in_two_optimizers_or_groups_raises():
    model = nn.Linear(2, 2)
    with pytest.raises(SharedParameter, match="weight is listed twice"):
        GradientControl(sgd(*model.parameters()), sgd(model.weight), model=model)
    optimizer = sgd(model.weight, model.bias)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.bias]})
    with pytest.raises(SharedParameter, match=r"param_groups\[1\]\['params'\]\[0\] is listed twice"):
        GradientControl(optimizer)


@pytest.mark.parametrize("direct", [False, True])
def test_parameters_that_are_added_later_raise_instead_of_stepping_scaled(direct, device):
    p, q = parameter(1.0, device=device), parameter(1.0, device=device)
    optimizer = gradilocks.optim.SGD([p], lr=0.1) if direct else sgd(p)
    control = GradientControl(optimizer, clip=AdaGC())
    take_step(control, (p, 1.0))
    optimizer.add_param_group({"params": [q]})
    state = control.state_dict()
    control.zero_grad()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    with pytest.raises(ValueError, match=r"parameters changed: 2 now, 1.*new GradientControl"):
        control.step()
    control = GradientControl(optimizer, clip=AdaGC())
    control.load_state_dict(state)
    assert take_step(control, (p, 1.0), (q, 1.0)).step == 2


def test_no_gradients_at_all_raise(device):
    p, q = parameter(1.0, device=device), parameter(1.0, device=device)
    first, second = sgd(p), sgd(q)
    control = GradientControl(first, second)
    take_step(control, (p, 1.0), (q, 1.0))
    control.zero_grad()
    control.scale_loss(p.sum())
    with pytest.raises(NoGradients, match="none of the 2 parameters has a gradient"):
        control.step()
    control.backward(loss_giving((p, 1.0)))
    with pytest.raises(NoGradients, match="none of the 1 parameters"):
        control.step(only=second)
    control.step(only=first)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_float16_gradients_that_would_be_unscaled_in_float16_raise(make, device):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(device)
    model[1].half()
    optimizer = make(model.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=model)
    before = contents(optimizer)
    control.backward(loss_giving(*((p, 1.0) for p in model.parameters())))
    for action in (control.unscale_, control.step):
        with pytest.raises(ValueError, match=r"unscale FP16 gradients\. 1\.weight is float16.*fused=True"):
            action()
    assert_same(contents(optimizer), before)


def test_float16_gradients_raise_where_only_unscaling_in_place_would_lose_them():
    p = parameter(1.0, dtype=torch.float16)
    control = GradientControl(sgd(p, fused=True), scale=8.0)
    control.backward(loss_giving((p, 1.0)))
    with pytest.raises(ValueError, match="FP16"):
        control.unscale_()
    assert not control.step().skipped
    assert p.item() == pytest.approx(0.9, rel=1e-3)

    def closure():
        control.zero_grad()
        loss = loss_giving((p, 1.0))
        control.backward(loss)
        return loss

    with pytest.raises(ValueError, match="FP16"):
        control.step(closure)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_float16_gradients_step_where_nothing_is_lost(scale, device):
    p = parameter(1.0, 2.0, dtype=torch.float16, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=1.0, fused=scale is not None), scale=scale)
    take_step(control, (p, 0.5))
    assert p.tolist() == [0.5, 1.5]
