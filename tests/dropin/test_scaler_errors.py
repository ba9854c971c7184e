"""Every error of torch's GradScaler: ours has the same type and a text that starts with torch's."""

from __future__ import annotations

import contextlib
import pickle
import re

import pytest
import torch

from dropin.loops import SCALERS, sgd, two_weights
from gradilocks import GradScaler

NO_SCALE = (
    "Attempted {} but _scale is None.  This may indicate your script did not use scaler.scale(loss or outputs) earlier "
    "in the iteration."
)
NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
)
PICKLED = (
    "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler.update()."
)
EMPTY = "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
CLOSURE = "Closure use is not currently supported if GradScaler is enabled."
FP16 = "Attempting to unscale FP16 gradients."


@pytest.fixture(params=sorted(SCALERS))
def scaler_class(request):
    return SCALERS[request.param]


@pytest.fixture
def param():
    return two_weights()


@contextlib.contextmanager
def raises(kind, text):
    with pytest.raises(kind, match="^" + re.escape(text)):
        yield


def after_backward(scaler_class, param):
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale((param * param).sum()).backward()
    return scaler


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_growth_factor_of_one_or_less_is_rejected(scaler_class, factor):
    with raises(AssertionError, "The growth factor must be > 1.0."):
        scaler_class("cpu", growth_factor=factor)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_backoff_factor_of_one_or_more_is_rejected(scaler_class, factor):
    with raises(AssertionError, "The backoff factor must be < 1.0."):
        scaler_class("cpu", backoff_factor=factor)
    assert not scaler_class("cpu", backoff_factor=factor, enabled=False).is_enabled()


@pytest.mark.parametrize("name", ["step", "unscale_", "update", "_check_inf_per_device"])
def test_a_call_before_the_first_scale_is_rejected(scaler_class, param, name):
    with raises(AssertionError, NO_SCALE.format(name)):
        getattr(scaler_class("cpu"), name)(2.0 if name == "update" else sgd(param))


def test_a_step_without_gradients_has_no_inf_checks(scaler_class, param):
    scaler = after_backward(scaler_class, param)
    param.grad = None
    with raises(AssertionError, "No inf checks were recorded for this optimizer."):
        scaler.step(sgd(param))
    assert scaler.step(sgd(param, fused=True)) is None
    with raises(AssertionError, "No inf checks were recorded prior to update."):
        scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_pickling_before_update_is_rejected(scaler_class, param, call, fused):
    scaler = after_backward(scaler_class, param)
    getattr(scaler, call)(sgd(param, fused=fused))
    with raises(AssertionError, PICKLED):
        pickle.dumps(scaler)


@pytest.mark.parametrize("fused", [False, True])
def test_unscaling_or_stepping_twice_is_rejected(scaler_class, param, fused):
    scaler, optimizer = after_backward(scaler_class, param), sgd(param, fused=fused)
    scaler.unscale_(optimizer)
    with raises(RuntimeError, "unscale_() has already been called on this optimizer since the last update()."):
        scaler.unscale_(optimizer)
    assert param.grad.tolist() == [2.0, 4.0]
    scaler.step(optimizer)
    before = param.detach().clone()
    with raises(RuntimeError, "unscale_() is being called after step()."):
        scaler.unscale_(optimizer)
    with raises(RuntimeError, "step() has already been called since the last update()."):
        scaler.step(optimizer)
    assert torch.equal(param, before)


@pytest.mark.parametrize("closure", [None, lambda: 1.0])
@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_by_keyword_is_rejected_and_a_positional_one_runs(scaler_class, param, fused, closure):
    scaler, optimizer = after_backward(scaler_class, param), sgd(param, fused=fused)
    with raises(RuntimeError, CLOSURE):
        scaler.step(optimizer, closure=closure)
    with raises(RuntimeError, CLOSURE):
        scaler_class("cpu").step(optimizer, closure=closure)
    calls = []
    assert scaler.step(optimizer, lambda: calls.append(1) or 2.5) == 2.5
    assert calls == [1]


@pytest.mark.parametrize("key", [None, *torch.amp.GradScaler("cpu").state_dict()])
def test_a_state_dict_that_is_empty_or_lacks_a_key_is_rejected(scaler_class, key):
    state = torch.amp.GradScaler("cpu").state_dict() if key else {}
    state.pop(key, None)
    with raises(KeyError if key else RuntimeError, repr(key) if key else EMPTY):
        scaler_class("cpu").load_state_dict(state)


@pytest.mark.parametrize("path", ["torch", "kernels"])
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_fp16_gradients_are_not_unscaled(scaler_class, call, path, request):
    if path == "kernels":
        request.getfixturevalue("_kernels_on_cpu")
    half, single = torch.nn.Parameter(torch.ones(2, dtype=torch.float16)), two_weights()
    scaler, optimizer = scaler_class("cpu", init_scale=4.0), sgd(single, half)
    scaler.scale((single * 3).sum() + half.float().sum()).backward()
    with raises(ValueError, FP16):
        getattr(scaler, call)(optimizer)
    assert (half.grad.tolist(), single.grad.tolist()) == ([4.0, 4.0], [12.0, 12.0])
    half.grad = None
    scaler.unscale_(optimizer)  # A rejected call can be repeated.
    assert single.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("path", ["torch", "kernels"])
def test_a_fused_step_takes_fp16_gradients_and_unscale_does_not(scaler_class, path, request):
    if path == "kernels":
        request.getfixturevalue("_kernels_on_cpu")
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler, optimizer = after_backward(scaler_class, param), sgd(param, lr=0.1, fused=True)
    with raises(ValueError, FP16):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.tolist() == pytest.approx([0.8, 0.8], abs=1e-3)


@pytest.mark.parametrize("outputs", [1.0, None, [torch.ones(()), 1.0]])
def test_outputs_that_are_not_tensors_are_rejected(scaler_class, outputs):
    with raises(ValueError, "outputs must be a Tensor or an iterable of Tensors"):
        scaler_class("cpu").scale(outputs)


@pytest.mark.parametrize(
    "new_scale", [torch.ones(2), torch.ones(()).requires_grad_(), torch.ones((), device="meta")], ids=repr
)
def test_a_new_scale_that_is_not_one_plain_number_is_rejected(scaler_class, param, new_scale):
    scaler, optimizer = after_backward(scaler_class, param), sgd(param)
    scaler.step(optimizer)
    with raises(AssertionError, NEW_SCALE):
        scaler.update(new_scale)
    assert scaler.get_scale() == 4.0
    with raises(RuntimeError, "step() has already been called since the last update()."):
        scaler.step(optimizer)  # A rejected update does not begin the next iteration.


# --- errors of our own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["torch", "kernels"])
def test_the_fp16_error_names_the_parameter_and_the_fix(path, request):
    if path == "kernels":
        request.getfixturevalue("_kernels_on_cpu")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).half())
    scaler = GradScaler("cpu", model=model)
    scaler.scale(model[1](model[0](torch.ones(1, 2)).half()).sum()).backward()
    with pytest.raises(ValueError, match=r"1\.weight is float16.*fused=True"):
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), None, "8"])
def test_a_state_dict_with_an_impossible_scale_is_rejected_and_changes_nothing(scale):
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises((ValueError, TypeError), match="scale in the state_dict must be"):
        scaler.load_state_dict({**before, "scale": scale, "growth_interval": 5})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf"), 1e-40])
def test_an_impossible_initial_scale_is_rejected(value):
    with pytest.raises(ValueError, match="init_scale must be at least"):
        GradScaler("cpu", init_scale=value)


@pytest.mark.parametrize("options", [{"min_scale": 8.0}, {"max_scale": 2.0}, {"min_scale": 0.0}, {"max_scale": 1e39}])
def test_bounds_that_do_not_enclose_the_initial_scale_are_rejected(options):
    with pytest.raises(ValueError, match=r"(min|max|init)_scale must be at least .* got"):
        GradScaler("cpu", init_scale=4.0, **options)


def test_a_scale_that_is_not_a_number_and_a_model_that_is_not_a_module_are_rejected():
    with pytest.raises(TypeError, match="min_scale must be a number, got str"):
        GradScaler("cpu", min_scale="x")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module.*got list"):
        GradScaler("cpu", model=[torch.nn.Linear(1, 1)])
