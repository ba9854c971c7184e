"""Errors of GradScaler: where torch raises one, ours has the same type and a text that starts with torch's.

Errors for calls in the wrong order are compared with torch's in test_scaler_programs.py.
"""

from __future__ import annotations

import pytest
import torch

from dropin.loops import backward, sgd, two_weights
from gradilocks import GradScaler

FP16 = "^Attempting to unscale FP16 gradients"


@pytest.mark.usefixtures("unscaled_by")
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_fp16_gradients_are_not_unscaled(scaler_class, call):
    half, single = torch.nn.Parameter(torch.ones(2, dtype=torch.float16)), two_weights()
    scaler, optimizer = scaler_class("cpu", init_scale=4.0), sgd(single, half)
    scaler.scale((single * 3).sum() + half.float().sum()).backward()
    with pytest.raises(ValueError, match=FP16):
        getattr(scaler, call)(optimizer)
    assert (half.grad.tolist(), single.grad.tolist()) == ([4.0, 4.0], [12.0, 12.0])
    half.grad = None
    scaler.unscale_(optimizer)  # A rejected call can be repeated.
    assert single.grad.tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("unscaled_by")
def test_a_fused_step_takes_fp16_gradients_and_unscale_does_not(scaler_class):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler, optimizer = scaler_class("cpu", init_scale=4.0), sgd(param, lr=0.1, fused=True)
    backward(scaler, param)
    with pytest.raises(ValueError, match=FP16):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.tolist() == pytest.approx([0.8, 0.8], abs=1e-3)


@pytest.mark.parametrize("outputs", [1.0, None, [torch.ones(()), 1.0]])
def test_outputs_that_are_not_tensors_are_rejected(scaler_class, outputs):
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler_class("cpu").scale(outputs)


# --- errors of our own ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unscaled_by")
def test_the_fp16_error_names_the_parameter_and_the_fix():
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
