"""A skipped step leaves parameters, optimizer state, step counts and gradients bit for bit."""

import copy

import pytest
import torch
from torch import nn

from gradilocks import ClipByNorm, ClipByValue, DynamicScale, GradientControl, StaticScale
from tests.control.gradient_scripts import (
    EVERY_OPTIMIZER,
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

CLIPS = {"none": None, "norm": ClipByNorm(0.5), "value": ClipByValue(0.25)}
BAD = {"inf": INF, "-inf": -INF, "nan": NAN}

GOOD = [
    (torch.tensor([[0.5, -1.0, 2.0], [0.25, 3.0, -0.125]]), torch.tensor([1.5, -0.5])),
    (torch.tensor([[-1.5, 1.0, 0.0], [0.75, -2.0, 1.125]]), torch.tensor([0.5, 4.0])),
    (torch.tensor([[2.5, 0.5, 1.0], [-0.25, 1.0, 0.5]]), torch.tensor([-1.0, 0.25])),
]


def setting(make, clip=None):
    """A matrix and a vector, the second made to be the culprit."""
    p = nn.Parameter(torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]))
    q = nn.Parameter(torch.tensor([0.7, 0.8]))
    optimizer = make([p, q])
    return p, q, optimizer, GradientControl(optimizer, clip=clip)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_skip_in_mid_run_changes_nothing(name, bad):
    p, q, optimizer, control = setting(EVERY_OPTIMIZER[name])
    for g, h in GOOD:
        control_step(control, (p, g), (q, h))
    before = contents(optimizer)
    control.zero_grad()
    control.backward(loss_making((p, GOOD[0][0]), (q, torch.tensor([1.0, BAD[bad]]))))
    made = gradients(optimizer)
    assert control.step().skipped
    assert_same(contents(optimizer), before)
    assert_same(gradients(optimizer), made)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_the_run_goes_on_as_if_the_skipped_step_had_never_been(name, clip):
    p, q, optimizer, control = setting(EVERY_OPTIMIZER[name], CLIPS[clip])
    r, s, other, untouched = setting(EVERY_OPTIMIZER[name], CLIPS[clip])
    for g, h in GOOD:
        control_step(control, (p, g), (q, h))
        assert control_step(control, (p, NAN), (q, h)).skipped
        assert control_step(control, (p, g), (q, INF)).skipped
        control_step(untouched, (r, g), (s, h))
    assert_same(contents(optimizer), contents(other))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_first_step_that_is_skipped_leaves_a_first_step_to_be_taken(name, clip):
    p, q, optimizer, control = setting(EVERY_OPTIMIZER[name], CLIPS[clip])
    r, s, other, untouched = setting(EVERY_OPTIMIZER[name], CLIPS[clip])
    for _ in range(2):
        assert control_step(control, (p, INF), (q, 1.0)).skipped
    for g, h in GOOD:
        control_step(control, (p, g), (q, h))
        control_step(untouched, (r, g), (s, h))
    assert_same(contents(optimizer), contents(other))


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_state_made_by_a_skipped_first_step_is_that_of_no_step_at_all(name):
    p, q, optimizer, control = setting(EVERY_OPTIMIZER[name])
    params, state = copy.deepcopy(contents(optimizer))
    assert control_step(control, (p, NAN), (q, 1.0)).skipped
    after, made = contents(optimizer)
    assert_same(after, params)
    for place, entries in made.items():
        for key, value in entries.items():
            expected = state.get(place, {}).get(key, torch.zeros_like(value))
            assert_same(value, expected, f"{name}: {key} of parameter {place}")


HOST_SKIPS = [n for n in OPTIMIZERS if "fused" not in n or ("SGD" in n and n != "SGD fused")]
"""Optimizers that the host does not step at all when a first step is skipped."""


@pytest.mark.parametrize("name", HOST_SKIPS)
def test_an_optimizer_that_is_not_stepped_gets_no_new_state_entries(name):
    p, q, optimizer, control = setting(OPTIMIZERS[name])
    before = contents(optimizer)
    assert control_step(control, (p, NAN), (q, 1.0)).skipped
    assert_same(contents(optimizer), before)


@pytest.mark.parametrize(
    "settings", [{}, {"dampening": 0.5}, {"nesterov": True}, {"weight_decay": 0.1}]
)
def test_fused_momentum_never_sees_uninitialised_memory(settings):
    gradient = torch.linspace(-1, 1, 3000)
    for _ in range(20):
        p, r = (nn.Parameter(torch.zeros(3000)) for _ in range(2))
        control = GradientControl(
            torch.optim.SGD([p], lr=0.5, momentum=0.5, fused=True, **settings)
        )
        plain = torch.optim.SGD([r], lr=0.5, momentum=0.5, fused=True, **settings)
        garbage = [torch.full((3000,), v) for v in (1e30, NAN, INF, -7.0)]
        del garbage
        assert control_step(control, (p, INF)).skipped
        for _ in range(3):
            control_step(control, (p, gradient))
            r.grad = gradient.clone()
            plain.step()
        assert torch.equal(p, r)


def test_a_skip_with_a_growing_streak_keeps_fused_step_counts_at_zero():
    p = parameter(1.0)
    optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
    control = GradientControl(optimizer)
    for _ in range(30):
        assert control_step(control, (p, NAN)).skipped
    assert optimizer.state[p]["step"].item() == 0.0
    control_step(control, (p, 1.0))
    assert optimizer.state[p]["step"].item() == 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_unscale_made_true_stay_true_through_a_skip(fused):
    p = parameter(1.0, 2.0)
    optimizer = torch.optim.Adam([p], lr=0.1, fused=fused)
    control = GradientControl(optimizer, clip=ClipByValue(0.5))
    control.backward(loss_making((p, torch.tensor([3.0, 4.0]))))
    control.unscale_()
    p.grad[1] = NAN
    made = gradients(optimizer)
    assert control.step().skipped
    assert_same(gradients(optimizer), made)


@pytest.mark.parametrize("fused", [False, True])
def test_infinities_too_many_to_sum_are_skipped_as_well(fused):
    p = nn.Parameter(torch.zeros(4096))
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=fused))
    mixed = torch.ones(4096)
    mixed[::2], mixed[1::2] = INF, -INF
    outcome = control_step(control, (p, mixed))
    assert outcome.skipped
    assert p.abs().max().item() == 0.0
    assert outcome.counts[outcome.culprits[0]].inf == 4096


@pytest.mark.parametrize("policy", [StaticScale(2.0), DynamicScale(init_scale=2.0), None])
def test_a_skip_is_exact_under_every_scale_policy(policy):
    p = parameter(1.0, 2.0)
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    control = GradientControl(optimizer, scale=policy, clip=1.0)
    control_step(control, (p, 1.0))
    before = contents(optimizer)
    assert control_step(control, (p, NAN)).skipped
    assert_same(contents(optimizer), before)
