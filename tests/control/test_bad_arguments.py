"""Wrong arguments raise an error that states the fact, the value and the fix, and change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from control.given_gradients import assert_same, contents, parameter, take_step
from gradilocks import ClipPerGroup, GradientControl


def sgd(*params):
    return torch.optim.SGD(list(params), lr=0.1)


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
        (torch.optim.SGD, "type"),
        (nn.Linear(1, 1), "Linear"),
        ([sgd(parameter(1.0))], "GradientControl(*optimizers)"),
        (nn.Linear(1, 1).parameters(), "generator"),
    ],
)
def test_an_object_that_is_no_optimizer_raises(given, words):
    for optimizers in ([given], [sgd(parameter(1.0)), given]):
        with pytest.raises(TypeError, match=r"GradientControl takes optimizers .*Pass the model as model=") as caught:
            GradientControl(*optimizers)
        assert words in str(caught.value)


class Wrapper(torch.optim.Optimizer):
    """Without `super().__init__()`, as Accelerate's, whose `step` does nothing while gradients accumulate."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    def step(self, closure=None):
        self.optimizer.step()


def test_a_wrapper_without_step_hooks_raises():
    with pytest.raises(TypeError, match=r"Wrapper wraps an optimizer .* Pass the inner optimizer"):
        GradientControl(Wrapper(sgd(parameter(1.0))))


@pytest.mark.parametrize("groups", [[], [{"params": []}]])
def test_a_control_without_parameters_raises(groups):
    with pytest.raises(ValueError, match="no parameters"):
        GradientControl(NoParameters(groups))
    with pytest.raises(ValueError, match="no parameters"):
        GradientControl(sgd(parameter(1.0)), NoParameters(groups))
    with pytest.raises((TypeError, ValueError), match="optimizer"):
        GradientControl()


BAD_OPTIONS = [
    *(
        ("model", given, TypeError, r"model must be a torch\.nn\.Module")
        for given in ("resnet", 3, [nn.Linear(1, 1)], nn.Linear, {"encoder": 3}, {3: nn.Linear(1, 1)})
    ),
    *(("on_nonfinite", given, ValueError, "must be 'skip' or 'raise', got") for given in ("Skip", "", None, 1, True)),
    *(("give_up_after", given, TypeError, "give_up_after must be") for given in (1.5, True, "3")),
    ("give_up_after", 0, ValueError, "give_up_after must be"),
    ("clip", -1.0, ValueError, "clip must be at least 0"),
    ("clip", "1.0", TypeError, "clip must be None, a number"),
    ("clip", ClipPerGroup({"no": 1.0}), ValueError, "matches no parameter"),
    ("scale", 0.0, ValueError, "scale must be at least"),
    ("scale", "Dynamic", TypeError, "scale must be None, 'dynamic', a number or a scale policy"),
]


@pytest.mark.parametrize(("option", "given", "error", "words"), BAD_OPTIONS, ids=str)
def test_a_bad_option_raises_and_leaves_the_optimizer_as_it_was(option, given, error, words):
    p = parameter(1.0)
    optimizer = sgd(p)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(error, match=words):
        GradientControl(optimizer, **{option: given})
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert not take_step(GradientControl(optimizer, clip=1.0), (p, 1.0)).skipped


def test_options_are_keyword_only_and_unknown_ones_raise():
    with pytest.raises(TypeError):
        GradientControl(sgd(parameter(1.0)), nn.Linear(1, 1), 1.0)
    with pytest.raises(TypeError, match="max_norm"):
        GradientControl(sgd(parameter(1.0)), max_norm=1.0)


def test_a_pattern_that_matches_no_parameter_raises():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"limits\['head\.\*'\] matches no parameter. The parameters are weight, bias"):
        GradientControl(sgd(*model.parameters()), model=model, clip=ClipPerGroup({"head.*": 1.0}))


def bad_losses():
    p = parameter(1.0, 2.0)
    return {
        "a number": (1.0, TypeError, "loss must be a floating-point tensor, got float"),
        "None": (None, TypeError, "got NoneType"),
        "a list": ([p.sum()], TypeError, "got list"),
        "detached": (p.sum().detach(), ValueError, "loss does not require grad"),
        "an integer": (torch.tensor(3), TypeError, "floating-point tensor, got torch.int64"),
        "complex": ((p * 1j).sum(), TypeError, "floating-point tensor, got torch.complex64"),
    }


@pytest.mark.parametrize("case", bad_losses())
def test_a_bad_loss_raises_and_changes_nothing(case):
    loss, kind, words = bad_losses()[case]
    p = parameter(1.0, 2.0)
    optimizer = sgd(p)
    control = GradientControl(optimizer)
    take_step(control, (p, 1.0))
    before = control.state_dict(), contents(optimizer)
    control.zero_grad()
    for method in (control.backward, control.scale_loss):
        with pytest.raises(kind, match=words):
            method(loss)
    assert p.grad is None
    assert_same((control.state_dict(), contents(optimizer)), before)
    assert not take_step(control, (p, 1.0)).skipped


def test_step_does_not_take_an_optimizer_or_a_loss():
    p = parameter(1.0)
    optimizer = sgd(p)
    control = GradientControl(optimizer)
    control.backward(p.sum())
    for given in (optimizer, p.sum().detach()):
        with pytest.raises(TypeError, match=r"only=optimizer"):
            control.step(given)
    assert not control.step().skipped


def test_a_control_shows_what_it_was_made_with():
    control = GradientControl(sgd(parameter(1.0)), scale=8.0, clip=1.0)
    expected = "GradientControl(SGD, scale=StaticScale(scale=8.0), clip=[ClipByNorm(max_norm=1.0, order=2.0)])"
    assert repr(control) == expected
