"""Habits that people bring from GradScaler, met with an error that says what to type instead."""

import copy

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, GradScaler
from gradilocks.errors import ScaleMisuse


def made(**settings):
    model = nn.Linear(3, 2)
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)
    control.backward(model(torch.ones(4, 3)).square().mean())
    return model, control


@pytest.mark.parametrize(
    "clip",
    [
        lambda params: gradilocks.clip_grad_norm_(params, 1.0),
        lambda params: gradilocks.clip_grad_value_(params, 1.0),
        lambda params: gradilocks.clip_grads_with_norm_(params, 1.0, torch.tensor(5.0)),
    ],
)
def test_gradients_that_carry_the_scale_are_not_clipped_as_if_they_were_true(clip):
    model, control = made()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ScaleMisuse, match=r"clip=1\.0"):
        clip(list(model.parameters()))
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    control.unscale_()
    clip(list(model.parameters()))
    assert not control.step().skipped
    clip(list(model.parameters()))  # After the step they are true gradients too.


def test_with_other_parameters_clipping_is_nobodys_business():
    _, held = made()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.tensor([3.0, 4.0])
    assert gradilocks.clip_grad_norm_([other], 1.0) == 5.0
    assert held.scale == 2.0**16


def test_step_does_not_take_an_optimizer_or_a_loss():
    model, control = made()
    with pytest.raises(TypeError, match=r"got SGD.*call control.step\(\)"):
        control.step(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="got Tensor"):
        control.step(torch.ones(()))
    assert not control.step().skipped


def test_a_closure_that_returns_nothing_is_told_to_return_the_loss():
    model = nn.Linear(3, 2)
    control = GradientControl(torch.optim.LBFGS(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        control.zero_grad()
        control.backward(model(torch.ones(4, 3)).square().mean())

    with pytest.raises(TypeError, match="must return the loss"):
        control.step(closure)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_negative_clip_is_named_as_it_was_written():
    with pytest.raises(ValueError, match=r"clip must not be negative or NaN, got -1\. Use None"):
        made(clip=-1)


def test_a_disabled_scaler_tells_that_nothing_was_skipped():
    param = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu", enabled=False)
    scaler.scale(param.sum()).backward()
    scaler.step(torch.optim.SGD([param], lr=0.1))
    scaler.update()
    assert (scaler.outcome.skipped, scaler.outcome.culprits) == (False, ())
    assert scaler.outcome.scale == 1.0


def failing_once(optimizer):
    """A step pre-hook that raises the first time."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of memory, say")

    optimizer.register_step_pre_hook(hook)


@pytest.mark.parametrize("fused", [False, True])
def test_a_retry_after_a_step_that_raised_does_not_divide_by_the_scale_again(fused):
    moved = []
    for fails in (False, True):
        param = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([param], lr=0.1, fused=fused)
        control = GradientControl(optimizer)
        control.backward((param * 2.0).sum())
        if fails:
            failing_once(optimizer)
            with pytest.raises(RuntimeError, match="out of memory"):
                control.step()
        control.step()
        moved.append(param.detach().clone())
    assert torch.equal(moved[0], moved[1])


def test_after_one_of_several_optimizers_raised_a_retry_is_refused():
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([one], lr=0.1), torch.optim.SGD([two], lr=0.1)
    control = GradientControl(first, second)
    control.backward((one + two).sum())
    failing_once(second)
    with pytest.raises(RuntimeError, match="out of memory"):
        control.step()
    with pytest.raises(ScaleMisuse):
        control.step()
    assert one.item() == pytest.approx(0.9)


def test_a_closure_that_forgets_to_clear_is_refused_and_undone():
    param = nn.Parameter(torch.ones(3))
    control = GradientControl(torch.optim.LBFGS([param], max_iter=4))

    def closure():
        loss = (param * param).sum()
        control.backward(loss)
        return loss

    with pytest.raises(ScaleMisuse, match="still there"):
        control.step(closure)
    assert param.tolist() == [1.0, 1.0, 1.0]


def test_gradients_that_are_there_when_a_checkpoint_is_loaded_are_not_added_to():
    param = nn.Parameter(torch.ones(3))
    control = GradientControl(torch.optim.SGD([param], lr=0.1))
    saved = control.state_dict()
    saved["scale"] = 1024.0
    control.backward(param.sum())
    control.load_state_dict(saved)
    with pytest.raises(ScaleMisuse, match="still there"):
        control.backward(param.sum())
    control.zero_grad()
    control.backward(param.sum())
    assert control.step().norm == pytest.approx(3**0.5)


def test_without_a_scale_the_backward_may_be_torchs_own():
    param = nn.Parameter(torch.ones(3))
    control = GradientControl(torch.optim.SGD([param], lr=0.1), scale=None, clip=1.0)
    param.sum().backward()
    assert control.step().clipped


def test_sparse_gradients_that_were_not_cleared_are_refused_too():
    table = nn.Embedding(4, 2, sparse=True)
    control = GradientControl(torch.optim.SGD(table.parameters(), lr=0.1))
    control.backward(table(torch.tensor([1])).sum())
    control.step()
    with pytest.raises(ScaleMisuse, match="still there"):
        control.backward(table(torch.tensor([1])).sum())


def test_it_shows_what_it_was_made_with():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    control = GradientControl(optimizer, scale=8.0, clip=1.0)
    shown = "GradientControl(SGD, scale=StaticScale(scale=8.0), clip=ClipByNorm(max_norm=1.0"
    assert repr(control).startswith(shown)


def _clear(*places):
    def forget(params):
        for place in places:
            params[place].grad = None

    return forget


def _swap_the_first(params):
    torch.utils.swap_tensors(params[0], nn.Parameter(params[0].detach().clone()))


@pytest.mark.parametrize(
    "some",
    [_clear(0), _clear(-1), _clear(0, 1, 2), _clear(1, 2, -1), _swap_the_first],
    ids=["first", "last", "the first three", "the last three", "first, by a swap"],
)
def test_gradients_of_which_only_some_were_cleared_are_refused(some):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), scale=64.0)
    control.backward(model(torch.ones(2, 3)).sum())
    control.step()
    some(list(model.parameters()))
    with pytest.raises(ScaleMisuse, match="still there"):
        control.backward(model(torch.ones(2, 3)).sum())
    control.zero_grad()
    control.backward(model(torch.ones(2, 3)).sum())
    assert not control.step().skipped


def test_one_of_many_gradients_that_was_not_cleared_is_seen_at_either_end():
    params = [nn.Parameter(torch.ones(2)) for _ in range(50)]
    control = GradientControl(torch.optim.SGD(params, lr=0.1), scale=64.0)
    for kept in (params[0], params[-1]):
        control.backward(sum(param.sum() for param in params))
        control.step()
        for param in params:
            if param is not kept:
                param.grad = None
        with pytest.raises(ScaleMisuse, match="still there"):
            control.backward(sum(param.sum() for param in params))
        control.zero_grad()


def test_a_copied_fused_optimizer_with_fp16_parameters_says_what_torch_forgot():
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    control = GradientControl(optimizer, scale=8.0)
    control.backward(param.sum())
    assert not control.step().skipped
    control.zero_grad()
    twin, other = copy.deepcopy((param, control))
    other.backward(twin.sum())
    with pytest.raises(ValueError, match="fused, but it was copied or unpickled, and torch's copy"):
        other.step()
