"""A wrong argument: the message says what came and what to do, and nothing has changed."""

import math

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import ClipByNorm, ClipByValue, DynamicScale, GradientControl, StaticScale
from tests.control.gradient_scripts import assert_same, contents, control_step, parameter


def sgd(*params):
    return torch.optim.SGD(list(params), lr=0.1)


class NoStep:
    def __init__(self, *params):
        self.param_groups = [{"params": list(params)}]


class NoParameters:
    def __init__(self, groups):
        self.param_groups = groups

    def step(self):
        raise AssertionError("stepped an optimizer without parameters")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "NoneType"),
        ("adam", "str"),
        (torch.optim.SGD, "the class SGD"),
        (nn.Linear(1, 1), "Linear"),
        ([torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)], "list"),
        (NoStep(nn.Parameter(torch.ones(1))), "NoStep"),
        (torch.ones(1), "Tensor"),
        (nn.Linear(1, 1).parameters(), "generator"),
    ],
)
def test_what_is_no_optimizer_is_a_type_error_that_shows_how_to_write_it(given, words):
    with pytest.raises(TypeError, match=r"GradientControl\(optimizer") as caught:
        GradientControl(given)
    assert words in str(caught.value)
    with pytest.raises(TypeError):
        GradientControl(sgd(parameter(1.0)), given)


@pytest.mark.parametrize("groups", [[], [{"params": []}], [{"params": []}, {"params": []}]])
def test_an_optimizer_without_parameters_is_refused(groups):
    with pytest.raises(ValueError, match="no parameters"):
        GradientControl(NoParameters(groups))


@pytest.mark.parametrize("given", ["resnet", 3, [nn.Linear(1, 1)], nn.Linear])
def test_a_model_that_is_no_module_is_a_type_error(given):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module") as caught:
        GradientControl(sgd(parameter(1.0)), model=given)
    assert type(given).__name__ in str(caught.value)


@pytest.mark.parametrize(
    "given", [{"encoder": 3}, {"encoder": nn.Linear(1, 1), "decoder": None}, {3: nn.Linear(1, 1)}]
)
def test_a_mapping_that_holds_no_modules_is_refused_when_it_is_given(given):
    with pytest.raises(TypeError, match="model"):
        GradientControl(sgd(parameter(1.0)), model=given)


@pytest.mark.parametrize(
    "given", ["Dynamic", "static", True, [1.0], DynamicScale, StaticScale, torch.tensor(2.0), {}]
)
def test_a_scale_of_a_wrong_type_is_a_type_error_that_lists_what_fits(given):
    with pytest.raises(TypeError, match=r"scale must be 'dynamic', None, a number or a scale"):
        GradientControl(sgd(parameter(1.0)), scale=given)


@pytest.mark.parametrize("given", [0, 0.0, -1.0, math.inf, math.nan, 1e-45, 1e39])
def test_a_scale_that_cannot_be_divided_by_is_a_value_error(given):
    with pytest.raises(ValueError, match=r"scale must be a positive float32") as caught:
        GradientControl(sgd(parameter(1.0)), scale=given)
    assert str(float(given)) in str(caught.value)


@pytest.mark.parametrize(
    "given", ["1.0", True, [1.0], ClipByNorm, ClipByValue, torch.tensor(1.0), {}]
)
def test_a_clip_of_a_wrong_type_is_a_type_error_that_lists_what_fits(given):
    with pytest.raises(TypeError, match="clip must be None, a number"):
        GradientControl(sgd(parameter(1.0)), clip=given)


@pytest.mark.parametrize("given", [-1.0, -1, -math.inf, math.nan])
def test_a_negative_max_norm_is_a_value_error_that_names_the_way_out(given):
    with pytest.raises(ValueError, match=r"clip must not be negative or NaN, got .*None"):
        GradientControl(sgd(parameter(1.0)), clip=given)


@pytest.mark.parametrize("given", ["Skip", "ignore", "", None, 1, True])
def test_a_misspelt_on_nonfinite_is_refused(given):
    with pytest.raises(ValueError, match=r"on_nonfinite must be 'skip' or 'raise', got"):
        GradientControl(sgd(parameter(1.0)), on_nonfinite=given)


@pytest.mark.parametrize("given", [1.5, True, "100", math.inf])
def test_a_give_up_after_of_a_wrong_type_is_a_type_error(given):
    with pytest.raises(TypeError, match="give_up_after must be an int or None, got"):
        GradientControl(sgd(parameter(1.0)), give_up_after=given)


@pytest.mark.parametrize("given", [0, -1])
def test_a_give_up_after_below_one_is_a_value_error(given):
    with pytest.raises(ValueError, match=f"give_up_after must be at least 1.*got {given}"):
        GradientControl(sgd(parameter(1.0)), give_up_after=given)


def test_options_are_keyword_only():
    p = parameter(1.0)
    with pytest.raises(TypeError):
        GradientControl(sgd(p), nn.Linear(1, 1), 1.0)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="max_norm"):
        GradientControl(sgd(parameter(1.0)), max_norm=1.0)


def bad_losses():
    p = parameter(1.0, 2.0)
    return {
        "a number": (1.0, TypeError, "loss must be a tensor, got float"),
        "None": (None, TypeError, "loss must be a tensor, got NoneType"),
        "a list": ([p.sum()], TypeError, "loss must be a tensor, got list"),
        "detached": (p.sum().detach(), ValueError, "loss does not require grad"),
        "rebuilt": (torch.tensor(p.sum().item()), ValueError, r"\.item\(\)"),
        "an integer": (torch.tensor(3), TypeError, "floating-point tensor, got torch.int64"),
        "a truth value": (torch.tensor(True), TypeError, "floating-point tensor, got torch.bool"),
        "complex": (
            (p * 1j).sum(),
            TypeError,
            "real floating-point tensor, got torch.complex64",
        ),
        "a vector": (p * 2, ValueError, r"loss must be a scalar, got shape \(2,\).*mean"),
        "empty": (p[:0] * 2, ValueError, r"loss must be a scalar, got shape \(0,\)"),
    }


@pytest.mark.parametrize("case", bad_losses())
def test_a_bad_loss_is_refused_and_nothing_has_changed(case):
    loss, kind, words = bad_losses()[case]
    p = parameter(1.0, 2.0)
    optimizer = sgd(p)
    control = GradientControl(optimizer)
    control_step(control, (p, 1.0))
    before = control.state_dict(), contents(optimizer)
    control.zero_grad()
    with pytest.raises(kind, match=words):
        control.backward(loss)
    assert p.grad is None
    assert_same((control.state_dict(), contents(optimizer)), before)
    with pytest.raises(gradilocks.errors.ScaleMisuse):
        control.step()
    assert not control_step(control, (p, 1.0)).skipped


@pytest.mark.parametrize("case", ["a number", "None", "detached", "an integer", "complex"])
def test_scale_loss_refuses_what_backward_refuses(case):
    loss, kind, words = bad_losses()[case]
    control = GradientControl(sgd(parameter(1.0)))
    with pytest.raises(kind, match=words):
        control.scale_loss(loss)


def test_a_bad_micro_batch_does_not_spoil_the_good_one_before_it():
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0))
    control.backward((p * 2.0).sum())
    with pytest.raises(ValueError, match="does not require grad"):
        control.backward(torch.tensor(1.0))
    outcome = control.step()
    assert not outcome.skipped
    assert p.item() == -1.0


def test_a_bad_argument_leaves_the_optimizer_free_for_another_try():
    p = parameter(1.0)
    optimizer = sgd(p)
    attributes = set(vars(optimizer))
    with pytest.raises(ValueError, match="clip"):
        GradientControl(optimizer, clip=-1.0)
    assert set(vars(optimizer)) == attributes
    assert not control_step(GradientControl(optimizer, clip=1.0), (p, 1.0)).skipped


def test_a_model_that_owns_none_of_the_parameters_is_warned_of():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="model= has none of the parameters"):
        GradientControl(optimizer, model=nn.Linear(9, 9))
