"""update: a Decision in; an optimizer stepped, or left exactly as it was, comes out."""

import pytest
import torch
from torch import nn

from gradilocks.step.update import handing_over, takes_decision, takes_scaler, update
from gradilocks.values import Decision


def decision(multiplier, skip=0.0):
    return Decision(
        skip=torch.tensor(skip), multiplier=torch.tensor(multiplier, dtype=torch.float64)
    )


def parameter(value, gradient):
    p = nn.Parameter(torch.tensor(value))
    p.grad = torch.tensor(gradient)
    return p


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_an_optimizer_steps_on_multiplied_gradients_or_not_at_all(fused, skip):
    p = parameter([1.0, 2.0], [8.0, 16.0])
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    inside = takes_decision(optimizer)
    assert inside is fused
    update(optimizer, decision(1.0 if skip else 0.125, skip), [p.grad], inside=inside)
    assert p.tolist() == ([1.0, 2.0] if skip else [0.0, 0.0])
    if skip:
        assert p.grad.tolist() == [8.0, 16.0]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_torchs_adam_counts_a_step_on_the_host_only_if_it_is_taken(kind, skip):
    p, twin = (parameter([1.0, 2.0], [8.0, 16.0]) for _ in range(2))
    optimizer, right = kind([p], lr=0.5, fused=True), kind([twin], lr=0.5, fused=True)
    seen = []
    optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.found_inf))
    update(optimizer, decision(1.0), [p.grad], inside=True, device=p.device)
    right.step()
    update(optimizer, decision(1.0, skip), [p.grad], inside=True, device=p.device)
    if not skip:
        right.step()
    # It need not be told of a step that the host sees taken, and has to be of one that is not.
    assert seen == [None, None if not skip else torch.tensor(1.0)]
    assert p.tolist() == twin.tolist()
    state, wanted = optimizer.state[p], right.state[twin]
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert not hasattr(optimizer, "found_inf")


def test_an_optimizer_without_gradients_is_not_stepped():
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    optimizer.step = None
    update(optimizer, decision(1.0), [], inside=False)
    assert p.item() == 1.0


@pytest.mark.parametrize(
    ("make", "takes"),
    [
        (lambda p: torch.optim.Adam(p, fused=True), True),
        (lambda p: torch.optim.AdamW(p, fused=True), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), True),
        (lambda p: torch.optim.Adagrad(p, fused=True), True),
        (lambda p: torch.optim.Adam(p), False),
        (lambda p: torch.optim.Adam(p, foreach=True), False),
        (lambda p: torch.optim.RMSprop(p), False),
        (lambda p: torch.optim.LBFGS(p), False),
    ],
)
def test_torchs_fused_optimizers_take_the_decision_themselves(make, takes):
    optimizer = make([nn.Parameter(torch.ones(1))])
    assert takes_decision(optimizer) is takes
    assert not takes_scaler(optimizer)


@pytest.mark.parametrize("fused", [None, False])
def test_a_group_that_is_no_longer_fused_takes_no_decision(fused):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], fused=True)
    optimizer.param_groups[0]["fused"] = fused
    assert not takes_decision(optimizer)


def test_a_step_that_names_grad_scaler_takes_no_decision():
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            return None

    optimizer = Older([nn.Parameter(torch.ones(1))], lr=0.1)
    assert takes_scaler(optimizer)
    assert not takes_decision(optimizer)


def test_a_wrapped_step_is_still_recognised():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert takes_decision(optimizer)


class Attributes:
    """An optimizer without parameters, on which attributes can be set."""

    param_groups = ()


def test_what_was_handed_over_is_taken_back():
    optimizer = Attributes()
    with handing_over(optimizer, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)):
        assert optimizer.grad_scale.item() == 2.0
        assert optimizer.found_inf.item() == 0.0
    assert vars(optimizer) == {}


def test_what_was_there_before_is_multiplied_in_and_put_back():
    optimizer = Attributes()
    optimizer.grad_scale, optimizer.found_inf = before = torch.tensor(3.0), torch.tensor(1.0)
    with handing_over(optimizer, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)):
        assert optimizer.grad_scale.item() == 6.0
        assert optimizer.found_inf.item() == 0.0
    assert optimizer.grad_scale is before[0]
    assert optimizer.found_inf is before[1]


def test_an_error_takes_back_what_was_handed_over():
    optimizer = Attributes()

    def fail():
        with handing_over(optimizer, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert vars(optimizer) == {}
