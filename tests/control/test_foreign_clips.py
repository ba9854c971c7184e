"""A clip function that is called between a control's backward and its step is noticed, and said.

torch's functions stay what they are, also for those who imported them before anybody was watching;
gradients are not read for it.
"""

from __future__ import annotations

import inspect
import pickle
import warnings

# As a script would, before Gradilocks is there.
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

# isort: split
import gc
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import ClipByNorm, GradientControl
from gradilocks.errors import ScaleMisuse

CALLS = {
    "clip_grad_norm_": lambda params: clip_grad_norm_(params, 1.0),
    "clip_grad_norm_, not foreach": lambda params: clip_grad_norm_(params, 1.0, foreach=False),
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1.0, torch.tensor(3.0)),
    "clip_grad_value_": lambda params: clip_grad_value_(params, 1.0),
    "clip_grad_value_, not foreach": lambda params: clip_grad_value_(params, 1.0, foreach=False),
    "by its module": lambda params: torch.nn.utils.clip_grad_norm_(params, 1),
}
each_call = pytest.mark.parametrize("name", CALLS)


def called(name):
    return "torch.nn.utils." + (
        "clip_grad_norm_" if name == "by its module" else name.split(",")[0]
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def control_over(model, **settings):
    return GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)


def backward(control, model):
    control.zero_grad()
    control.backward(model(torch.ones(1, 3)).sum())


def warnings_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


@each_call
def test_a_clip_of_scaled_gradients_is_said_once(name, model):
    control = control_over(model)
    backward(control, model)
    (said,) = warnings_of(lambda: CALLS[name](model.parameters()))
    assert said.startswith(called(name) + " was called between backward() and step()")
    assert "still carry its scale" in said
    assert "clips by nothing else" in said
    assert "control.unscale_()" in said
    assert warnings_of(lambda: CALLS[name](model.parameters())) == []
    other = control_over(model)
    backward(other, model)
    assert len(warnings_of(lambda: CALLS[name](model.parameters()))) == 1


@each_call
def test_two_clips_that_stack_are_said_with_both_names(name, model):
    control = control_over(model, clip=ClipByNorm(0.5))
    backward(control, model)
    control.unscale_()
    (said,) = warnings_of(lambda: CALLS[name](model.parameters()))
    assert said.startswith(called(name) + " clips gradients that a GradientControl clips again")
    assert "ClipByNorm(max_norm=0.5" in said
    assert warnings_of(lambda: CALLS[name](model.parameters())) == []


def test_a_clip_of_scaled_gradients_names_the_controls_own(model):
    control = control_over(model, clip=0.25)
    backward(control, model)
    (said,) = warnings_of(lambda: clip_grad_norm_(model.parameters(), 1.0))
    assert "ClipByNorm(max_norm=0.25" in said


def test_the_warning_is_at_the_users_line(model):
    control = control_over(model)
    backward(control, model)
    with pytest.warns(RuntimeWarning) as caught:
        clip_grad_norm_(model.parameters(), 1.0)
    assert caught[0].filename == __file__


def test_a_control_that_does_not_scale_tells_of_two_clips_whoever_runs_backward(model):
    control = control_over(model, scale=None, clip=1.0)
    model(torch.ones(1, 3)).sum().backward()
    assert len(warnings_of(lambda: clip_grad_norm_(model.parameters(), 1.0))) == 1
    control.step()


def test_a_loss_that_was_handed_out_is_scaled_as_well(model):
    control = control_over(model)
    control.scale_loss(model(torch.ones(1, 3)).sum()).backward()
    assert len(warnings_of(lambda: clip_grad_norm_(model.parameters(), 1.0))) == 1


def test_one_parameter_among_strangers_is_enough(model):
    control, other = control_over(model), nn.Linear(3, 2)
    backward(control, model)
    other(torch.ones(1, 3)).sum().backward()
    assert warnings_of(lambda: clip_grad_norm_(other.parameters(), 1.0)) == []
    assert warnings_of(lambda: clip_grad_norm_(other.weight, 1.0)) == []
    assert len(warnings_of(lambda: clip_grad_norm_([other.weight, model.bias], 1.0))) == 1


@pytest.mark.filterwarnings("error")
def test_what_is_right_is_not_warned_of(model):
    # Unscaled, and the control does not clip.
    control = control_over(model)
    backward(control, model)
    control.unscale_()
    clip_grad_norm_(model.parameters(), 1.0)
    control.step()
    # Before the first backward and after a step.
    clip_grad_norm_(model.parameters(), 1.0)
    # To measure: a norm alone, or a bound that bounds nothing.
    backward(control, model)
    get_total_norm([param.grad for param in model.parameters()])
    clip_grad_norm_(model.parameters(), math.inf)
    control.zero_grad()
    # After the step: what is left of its gradients is nobody's.
    clipping = control_over(model, scale=None, clip=1.0)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        clipping.step()
        clip_grad_norm_(model.parameters(), 1.0)
    # Nobody controls them any more.
    backward(control, model)
    del control, clipping
    gc.collect()
    clip_grad_norm_(model.parameters(), 1.0)


def test_another_clip_from_the_next_step_on_is_known(model):
    control = control_over(model)
    backward(control, model)
    control.unscale_()
    assert warnings_of(lambda: clip_grad_norm_(model.parameters(), 1.0)) == []
    control.set_clip(0.5)
    assert len(warnings_of(lambda: clip_grad_norm_(model.parameters(), 1.0))) == 1


@pytest.mark.parametrize("clip", [clip_grad_norm_, gradilocks.clip_grad_norm_])
def test_a_clip_that_hides_the_norm_from_a_control_without_one_is_told_of(clip, model):
    control = control_over(model, scale=None)
    for number in range(2):
        backward(control, model)
        said = warnings_of(lambda: clip(model.parameters(), 1e-3))
        assert [("norm that the control reports" in each) for each in said] == [True] * (not number)
        assert control.step().norm == pytest.approx(1e-3, rel=1e-3)
        control.zero_grad()


def test_our_own_clip_looks_at_no_gradient_of_a_control_of_another_model(model, monkeypatch):
    other = nn.Linear(3, 2)
    control = control_over(other)
    backward(control, other)
    model(torch.ones(1, 3)).sum().backward()
    with monkeypatch.context() as patched:
        patched.setattr(type(control._order), "gradients", None)
        gradilocks.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ScaleMisuse):  # One of them is enough.
        gradilocks.clip_grad_norm_([*model.parameters(), other.bias], 1.0)


def test_our_own_clip_refuses_scaled_gradients_and_tells_of_two_clips(model):
    control = control_over(model, clip=1.0)
    backward(control, model)
    with pytest.raises(ScaleMisuse, match="still carry the scale"):
        gradilocks.clip_grad_norm_(model.parameters(), 1.0)
    control.unscale_()
    (said,) = warnings_of(lambda: gradilocks.clip_grad_norm_(model.parameters(), 1.0))
    assert said.startswith("gradilocks.clip_grad_norm_ clips gradients")
    assert warnings_of(lambda: gradilocks.clip_grad_norm_(model.parameters(), 1.0)) == []


def test_an_optimizer_that_is_unscaled_alone_may_be_clipped():
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    pair = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
    control = GradientControl(*pair)
    control.backward(one(torch.ones(1, 3)).sum() + other(torch.ones(1, 3)).sum())
    control.unscale_(only=pair[0])
    assert warnings_of(lambda: clip_grad_norm_(one.parameters(), 1.0)) == []
    gradilocks.clip_grad_norm_(one.parameters(), 1.0)
    assert len(warnings_of(lambda: clip_grad_norm_(other.parameters(), 1.0))) == 1
    with pytest.raises(ScaleMisuse):
        gradilocks.clip_grad_norm_(other.parameters(), 1.0)


def test_a_framework_that_unscales_and_clips_by_the_controls_scaler_is_not_warned_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradientControl(model=model).as_scaler()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        assert warnings_of(lambda: clip_grad_norm_(model.parameters(), 1.0)) == []
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("clip", [clip_grad_norm_, gradilocks.clip_grad_norm_])
def test_a_scaler_that_clips_by_itself_tells_of_two_clips(clip, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = gradilocks.GradScaler("cpu", clip=0.5)
    said = []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), math.inf)
        said += warnings_of(lambda: clip(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
    (only,) = said
    assert "clips gradients that a GradScaler clips again" in only
    assert "ClipByNorm(max_norm=0.5" in only
    plain = gradilocks.GradScaler("cpu")
    optimizer.zero_grad()
    plain.scale(model(torch.ones(1, 3)).sum()).backward()
    plain.unscale_(optimizer)
    assert warnings_of(lambda: clip(model.parameters(), 1.0)) == []


def test_torchs_functions_are_what_they_were(model):
    control_over(model)
    assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
    assert pickle.loads(pickle.dumps(clip_grad_norm_)) is clip_grad_norm_
    assert list(inspect.signature(torch.nn.utils.clip_grad_value_).parameters) == [
        "parameters",
        "clip_value",
        "foreach",
    ]


def test_gradients_are_clipped_as_before(model):
    """To the bit, whether somebody is warned or not."""
    ends = []
    for watched in (True, False):
        control = control_over(model) if watched else None
        scale = 1.0 if control is None else control.scale
        model.zero_grad()
        (model(torch.ones(1, 3)).sum() * (65536.0 if control is None else scale)).backward()
        if control is not None:
            backward(control, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            norm = clip_grad_norm_(model.parameters(), 1.0)
        ends.append([norm, *(param.grad.clone() for param in model.parameters())])
    assert all(map(torch.equal, *ends))


def test_compiled_code_that_clips_goes_on(model):
    control = control_over(model)
    backward(control, model)
    control.unscale_()
    norm = get_total_norm([param.grad for param in model.parameters()])

    @torch.compile(backend="eager", fullgraph=True)
    def clip():
        return clip_grad_norm_(model.parameters(), 1.0)

    torch.testing.assert_close(clip(), norm)
    clipped = get_total_norm([param.grad for param in model.parameters()])
    torch.testing.assert_close(clipped, torch.tensor(1.0))


FRESH = """
import torch, torch.nn.utils.clip_grad as clip
from torch.utils import _foreach_utils as real
import gradilocks
from gradilocks import GradientControl, GradScaler, clip_grad_norm_
name = "_group_tensors_by_device_and_dtype"
p = torch.nn.Parameter(torch.ones(2))
scaler = GradScaler("cpu")
scaler.scale(p.sum()).backward()
clip_grad_norm_([p], 1.0)
assert getattr(clip, name) is getattr(real, name)
one = GradientControl(torch.optim.SGD([p]))
put = getattr(clip, name)
assert put is not getattr(real, name)
two = GradientControl(torch.optim.SGD([p]))
assert getattr(clip, name) is put
"""


def test_nothing_of_torchs_is_touched_before_there_is_a_control():
    subprocess.run([sys.executable, "-c", FRESH], check=True)


def test_under_gradilocks_run_both_are_told(model, monkeypatch):
    """The hooks of `gradilocks run` stand around the functions, this inside them."""
    from gradilocks.observe.torch_hooks import TorchHooks
    from gradilocks.step.events import EVENTS

    control = control_over(model)
    told = []
    monkeypatch.setattr(EVENTS, "begin_clip", lambda *args, **kwargs: told.append(args))
    monkeypatch.setattr(EVENTS, "end_clip", lambda *args, **kwargs: None)
    hooks = TorchHooks()
    hooks.install()
    try:
        backward(control, model)
        said = warnings_of(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    finally:
        hooks.remove()
    assert len(told) == 1
    assert len(said) == 1
    assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
