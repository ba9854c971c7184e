"""Which gradients a scaler has unscaled: known in C++, and in Python where that is not built."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from torch import nn

from gradilocks import GradScaler, clip_grad_norm_, clip_grad_value_
from gradilocks.errors import SharedParameter
from gradilocks.kernels import native
from gradilocks.step import call_order
from gradilocks.step.call_order import UnscaledGuard

NATIVE = native.library()
without_a_compiler = pytest.mark.skipif(NATIVE is None, reason="the native library is not built")


@pytest.fixture(params=[pytest.param("native", marks=without_a_compiler), "python"])
def kept_in(request, monkeypatch):
    """Who keeps the marks of every scaler that the test makes."""
    if request.param == "python":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def parameters(count=3):
    made = [nn.Parameter(torch.ones(k + 1)) for k in range(count)]
    for param in made:
        param.grad = torch.full_like(param, 8.0)
    return made


def scaled(params, losses=1):
    """A scaler whose losses have been run backward, and an optimizer of the parameters."""
    scaler = GradScaler("cpu", init_scale=8.0)
    for param in params:
        param.grad = None
    for _ in range(losses):
        scaler.scale(sum(param.sum() for param in params)).backward()
    return scaler, torch.optim.SGD(params, lr=0.0)


class Own(torch.Tensor):
    """Has its gradient elsewhere."""

    @property
    def grad(self):
        return self.elsewhere


@without_a_compiler
def test_both_kinds_of_marks_give_the_same_answers():
    for seed in range(60):
        draw = random.Random(seed)
        params = parameters(6)
        params.append(torch.ones(2).as_subclass(Own))
        params[-1].elsewhere = torch.ones(2)
        params.append(nn.Parameter(torch.ones(2, 3)))
        params[-1].grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 3), check_invariants=True)
        kinds = [NATIVE.GradientMarks(), call_order._AttributeMarks()]
        for marks in kinds:
            marks.clear()
        for _ in range(40):
            chosen = draw.sample(params, draw.randint(0, len(params)))
            param = draw.choice(params[:6])
            action = draw.choice(["mark", "own", "write", "new", "same", "drop", "clear", "ask"])
            if action == "mark":
                for marks in kinds:
                    marks.mark(chosen)
            elif action == "own":
                kept = [marks.unwritten(chosen) for marks in kinds]
                for each in chosen:
                    if each.grad is not None:
                        each.grad.mul_(0.5)
                for marks, noted in zip(kinds, kept, strict=True):
                    marks.renew(noted)
            elif action == "write" and param.grad is not None:
                param.grad.add_(1.0)
            elif action == "new":
                param.grad = torch.ones_like(param)
            elif action == "same" and param.grad is not None:
                param.grad.data = torch.zeros_like(param)
            elif action == "drop":
                param.grad = None
            elif action == "clear" and draw.random() < 0.2:
                for marks in kinds:
                    marks.clear()
            gradients = [each.grad for each in chosen if each.grad is not None]
            answers = [
                (
                    [marks.first_marked([each], True) for each in params],
                    marks.first_marked(chosen, False),
                    marks.first_marked(tuple(chosen), True),
                    marks.knows_one_of(gradients),
                )
                for marks in kinds
            ]
            assert answers[0] == answers[1], (seed, action)


def test_a_marked_gradient_goes_when_its_user_lets_it_go(kept_in):
    params = parameters()
    guard = UnscaledGuard()
    guard.mark(params)
    storages = [weakref.ref(param.grad.untyped_storage()) for param in params]
    gone = [weakref.ref(param.grad) for param in params]
    for param in params:
        param.grad = None
    gc.collect()
    assert [ref() for ref in (*gone, *storages)] == [None] * 6


def test_a_new_gradient_where_a_marked_one_was_is_not_marked(kept_in):
    (param,) = parameters(1)
    guard = UnscaledGuard()
    guard.note_scaled(param)
    for _ in range(200):  # Allocators give the same address again and again.
        param.grad = torch.ones(1)
        guard.refuse_twice([param], name=str)
        guard.mark([param])
        param.grad = None


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_our_own_clip_makes_no_new_gradients_and_a_write_does_if_there_were_two_losses(
    kept_in, losses, clip
):
    params = parameters()
    scaler, optimizer = scaled(params, losses)
    twin = torch.optim.SGD(params, lr=0.0)
    scaler.unscale_(optimizer)
    clip(list(reversed(params)), 1e-3)
    with pytest.raises(SharedParameter, match=r"\['params'\]\[0\] has been unscaled already"):
        scaler.unscale_(twin)
    for param in params:
        param.grad.mul_(2.0)
    third = torch.optim.SGD(params, lr=0.0)
    if losses == 1:
        with pytest.raises(SharedParameter):
            scaler.unscale_(third)
    else:
        scaler.unscale_(third)
    scaler.update()
    scaler.unscale_(optimizer)  # A new iteration knows nothing of the last one.


def test_gradients_are_marked_for_one_scaler_and_not_for_another(kept_in):
    params = parameters()
    scaler, optimizer = scaled(params)
    other, _ = scaled(params)
    scaler.unscale_(optimizer)
    other.unscale_(optimizer)
    with pytest.raises(SharedParameter):
        other.unscale_(torch.optim.SGD(params[1:], lr=0.0))


def test_a_marked_gradient_can_be_swapped(kept_in):
    model = nn.Linear(2, 2)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert model.weight.grad.dtype is torch.float64


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_marks_do_not_travel_with_a_copy_of_the_scaler(kept_in, again):
    params = parameters()
    scaler, optimizer = scaled(params)
    scaler._now.guard.mark(params)
    made = again(scaler)
    with pytest.raises(SharedParameter):
        scaler.unscale_(torch.optim.SGD(params, lr=0.0))
    made = pickle.loads(made) if isinstance(made, bytes) else made
    made.scale(torch.ones(()))
    made.unscale_(optimizer)


@without_a_compiler
def test_a_library_that_is_built_in_mid_run_serves_from_the_next_iteration_on(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    params = parameters()
    scaler, optimizer = scaled(params)
    scaler.unscale_(optimizer)
    monkeypatch.setattr(native, "library", lambda: NATIVE)
    with pytest.raises(SharedParameter):
        scaler.unscale_(torch.optim.SGD(params, lr=0.0))
    scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)
    assert isinstance(scaler._now.guard._marks, NATIVE.GradientMarks)
    with pytest.raises(SharedParameter):
        scaler.unscale_(torch.optim.SGD(params, lr=0.0))


@without_a_compiler
def test_what_is_no_list_of_tensors_is_refused():
    marks = NATIVE.GradientMarks()
    for call in (marks.mark, marks.unwritten, marks.knows_one_of, marks.renew):
        with pytest.raises(TypeError):
            call(3)
    with pytest.raises(TypeError):
        marks.first_marked([])
    with pytest.raises(AttributeError, match="grad"):
        marks.mark([object()])
    marks.renew(b"\xff" * 24)  # Places that there are not.

    class Raises(torch.Tensor):
        @property
        def grad(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        marks.mark([torch.ones(1).as_subclass(Raises)])


@without_a_compiler
def test_a_list_that_shrinks_while_it_is_walked_ends_the_walk():
    marks, params = NATIVE.GradientMarks(), parameters()

    class Shrinks(torch.Tensor):
        @property
        def grad(self):
            del params[1:]
            return None

    params.insert(1, torch.ones(1).as_subclass(Shrinks))
    marks.mark(params)
    assert marks.first_marked(params, True) == 0
