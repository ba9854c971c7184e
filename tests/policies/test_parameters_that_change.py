"""What a clip policy has learned of a parameter stays with it, whatever happens to the others.

After a checkpoint was loaded, a control copied or bound, parameters are added, taken away, replaced
or listed in another order: each goes on with its own number, and a new one starts afresh.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    ClipByNorm,
    ClipPerGroup,
    ClipPerTensor,
    GradientControl,
    GradScaler,
    SkipSpikes,
    chain,
)
from gradilocks.errors import BadState

LEARNS = {
    "AdaGC": AdaGC(warmup=1, warmup_norm=1e9),
    "last of a chain": chain(SkipSpikes(), ClipPerTensor(1e6), AdaGC(warmup=1, warmup_norm=1e9)),
    "first of a chain": chain(
        AdaGC(warmup=1, warmup_norm=1e9),
        ClipPerGroup({0: 1e6}, otherwise=1e6),
        ClipByNorm(1e6),
    ),
}
every_policy = pytest.mark.parametrize("clip", LEARNS.values(), ids=LEARNS)


def through_json(saved):
    return json.loads(json.dumps(saved, allow_nan=False))


def through_pickle(whole):
    return pickle.loads(pickle.dumps(whole))


def parameters(count):
    return [nn.Parameter(torch.zeros(k + 1)) for k in range(count)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.0)


def listed(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def loss_of(sizes):
    """A loss whose gradients have these norms."""
    return sum((param * (size / math.sqrt(len(param)))).sum() for param, size in sizes)


def step(control, *sizes, only=None):
    """A step on gradients of these norms; returns what is usual for each parameter."""
    control.zero_grad(only=only)
    params = listed(control.optimizers[0] if only is None else only)
    if only is None:
        params = [param for optimizer in control.optimizers for param in listed(optimizer)]
    control.backward(loss_of(zip(params, sizes, strict=True)))
    control.step(only=only)
    return usual(control if only is None else control._parts[id(only)])


def usual(control):
    memory = control.state_dict()["gradilocks"]["clip_state"]
    (name,) = (name for name in memory if name.endswith("usual"))
    return [math.inf if number is None else number for number in memory[name]]


def taught(clip, count=3, **options):
    """A control to which a norm of 10^k is usual for the k-th parameter."""
    control = GradientControl(sgd(parameters(count)), clip=clip, **options)
    for _ in range(3):
        step(control, *(10.0**k for k in range(count)))
    return control


def loaded(control, count=3):
    again = GradientControl(sgd(parameters(count)), clip=control._engine.clip_policy)
    again.load_state_dict(through_json(control.state_dict()))
    return again


def bound(control):
    control.bind(sgd(listed(control.optimizers[0])))
    return control


def waiting(control):
    again = GradientControl(clip=control._engine.clip_policy)
    again.load_state_dict(through_json(control.state_dict()))
    again.bind(sgd(parameters(3)))
    return again


FROM_THERE = {
    "as it is": lambda control: control,
    "loaded": loaded,
    "copied": copy.deepcopy,
    "pickled": through_pickle,
    "bound": bound,
    "loaded, then bound": waiting,
    "loaded, then copied": lambda control: copy.deepcopy(loaded(control)),
    "copied, then saved and loaded": lambda control: loaded(copy.deepcopy(control)),
}


def an_added_one(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    return [1.0, 10.0, 100.0, 7.0]


def one_before_the_others(optimizer):
    optimizer.param_groups.insert(
        0, {**optimizer.param_groups[0], "params": [nn.Parameter(torch.zeros(5))]}
    )
    return [7.0, 1.0, 10.0, 100.0]


def one_taken_away(optimizer):
    del optimizer.param_groups[0]["params"][0]
    return [10.0, 100.0]


def one_replaced(optimizer):
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(5))
    return [7.0, 10.0, 100.0]


def another_order(optimizer):
    optimizer.param_groups[0]["params"].reverse()
    return [100.0, 10.0, 1.0]


CHANGES = [an_added_one, one_before_the_others, one_taken_away, one_replaced, another_order]


@every_policy
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("come_by", FROM_THERE)
def test_each_parameter_goes_on_with_its_own(clip, change, come_by):
    control = FROM_THERE[come_by](taught(clip))
    expected = change(control.optimizers[0])
    # A norm far above the usual is pulled down to 1.05 times it; a new one has none as yet.
    assert step(control, *(2.0 * size for size in expected)) == pytest.approx(
        [14.0 if size == 7.0 else 0.98 * size + 0.02 * 1.05 * size for size in expected]
    )


@every_policy
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("come_by", ["as it is", "loaded", "pickled"])
def test_what_is_saved_before_the_next_step_fits_what_is_there(clip, change, come_by):
    control = FROM_THERE[come_by](taught(clip))
    expected = change(control.optimizers[0])
    saved = through_json(control.state_dict())
    again = GradientControl(
        sgd([nn.Parameter(param.detach().clone()) for param in listed(control.optimizers[0])]),
        clip=clip,
    )
    again.load_state_dict(saved)
    assert usual(again) == usual(control)
    assert step(again, *expected) == step(control, *expected)


@every_policy
@pytest.mark.parametrize("change", CHANGES)
def test_a_control_is_bound_after_a_change_to_what_is_there_and_more(clip, change):
    control = taught(clip)
    expected = [*change(control.optimizers[0]), 7.0]
    control.bind(sgd([*listed(control.optimizers[0]), nn.Parameter(torch.zeros(5))]))
    assert step(control, *expected) == pytest.approx(expected)


@every_policy
def test_a_control_is_bound_to_more_parameters_in_any_order(clip):
    control = taught(clip)
    params = listed(control.optimizers[0])
    more = nn.Parameter(torch.zeros(5))
    control.bind(sgd([params[2], more]), sgd([params[0], params[1]]))
    assert step(control, 200.0, 7.0, 2.0, 20.0) == pytest.approx([100.1, 7.0, 1.001, 10.01])


def test_a_control_is_bound_to_more_before_its_first_step():
    first, second = sgd(parameters(2)), sgd(parameters(1))
    control = GradientControl(first, clip=LEARNS["AdaGC"])
    control.bind(first, second)
    assert step(control, 1.0, 2.0, 3.0) == pytest.approx([1.0, 2.0, 3.0])


def test_a_bound_control_that_would_forget_changes_nothing():
    control = taught(LEARNS["AdaGC"])
    optimizer = control.optimizers[0]
    with pytest.raises(BadState, match="AdaGC"):
        control.bind(sgd(listed(optimizer)[1:]))
    assert control.optimizers == (optimizer,)
    assert step(control, 1.0, 10.0, 100.0) == pytest.approx([1.0, 10.0, 100.0])


@every_policy
def test_a_scaler_in_front_of_a_control_meets_one_optimizer_after_the_other(clip):
    control = GradientControl(clip=clip)
    scaler = control.as_scaler()
    optimizers = sgd(parameters(2)), sgd(parameters(1))
    for _ in range(3):
        for size, optimizer in zip((1.0, 50.0), optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of((param, size) for param in listed(optimizer))).backward()
            scaler.step(optimizer)
        scaler.update()
    parts = [usual(control._parts[id(optimizer)]) for optimizer in optimizers]
    assert parts == [pytest.approx([1.0, 1.0]), pytest.approx([50.0])]


@every_policy
@pytest.mark.parametrize("come_by", ["loaded", "copied", "pickled"])
def test_a_part_goes_on_with_its_own_after_a_change(clip, come_by):
    def two():
        return GradientControl(sgd(parameters(2)), sgd(parameters(2)), clip=clip)

    control = two()
    for _ in range(3):
        step(control, 1.0, 10.0, only=control.optimizers[0])
        step(control, 100.0, 1000.0, only=control.optimizers[1])
    if come_by == "loaded":
        saved = through_json(control.state_dict())
        control = two()
        control.load_state_dict(saved)
    else:
        control = FROM_THERE[come_by](control)
    first, second = control.optimizers
    second.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    found = step(control, 100.0, 1000.0, 7.0, only=second)
    assert found == pytest.approx([100.0, 1000.0, 7.0])
    assert step(control, 1.0, 10.0, only=first) == pytest.approx([1.0, 10.0])


def test_a_part_that_lost_a_parameter_without_a_name_is_not_guessed_at():
    def two():
        return GradientControl(sgd(parameters(3)), sgd(parameters(1)), clip=LEARNS["AdaGC"])

    control = two()
    step(control, 1.0, 10.0, 100.0, only=control.optimizers[0])
    again = two()
    again.load_state_dict(control.state_dict())
    del again.optimizers[0].param_groups[0]["params"][0]
    with pytest.raises(BadState, match="3 numbers, expected 2"):
        step(again, 10.0, 100.0, only=again.optimizers[0])


def network():
    """Parameters of sizes that occur twice: only their names tell them apart."""
    return nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b", "c")})


def scaled(scaler, optimizer, **sizes):
    optimizer.zero_grad()
    grads = {name: scaler.model[name].weight for name in sizes}
    loss = sum((param * (sizes[name] / 2.0)).sum() for name, param in grads.items())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return learned_by(scaler)


def learned_by(scaler):
    (state,) = scaler.state_dict()["gradilocks_scaler"]["clip"]["states"]
    (name,) = (name for name in state["memory"] if name.endswith("usual"))
    return dict(zip(state["names"], state["memory"][name], strict=True))


def of(net, *names):
    return [net[name].weight for name in names]


SENT = {
    "loaded": lambda scaler, clip: _scaler_from(through_json(scaler.state_dict()), clip),
    "copied": lambda scaler, clip: copy.deepcopy(scaler),
    "pickled": lambda scaler, clip: through_pickle(scaler),
}


def _scaler_from(saved, clip):
    scaler = GradScaler("cpu", clip=clip, model=network())
    scaler.load_state_dict(saved)
    return scaler


@every_policy
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("met", [False, True], ids=["not met yet", "met already"])
def test_a_scaler_with_a_model_goes_on_after_an_addition(clip, sent, met):
    net = network()
    scaler = GradScaler("cpu", clip=clip, model=net)
    optimizer = sgd(of(net, "a", "b"))
    for _ in range(3):
        scaled(scaler, optimizer, a=1.0, b=10.0)
    again = SENT[sent](scaler, clip)
    net = again.model
    if net is None:
        net = again.model = network()
    optimizer = sgd(of(net, "a", "b"))
    if met:  # It looks at the gradients and does not step.
        again.scale(net["a"].weight.sum()).backward()
        again.unscale_(optimizer)
        again.update()
    optimizer.add_param_group({"params": of(net, "c")})
    assert scaled(again, optimizer, a=2.0, b=20.0, c=7.0) == pytest.approx(
        {"a.weight": 1.001, "b.weight": 10.01, "c.weight": 7.0}
    )


@every_policy
def test_what_a_scaler_saves_after_an_addition_loads_again(clip):
    net = network()
    scaler = GradScaler("cpu", clip=clip, model=net)
    optimizer = sgd(of(net, "a", "b"))
    for _ in range(3):
        scaled(scaler, optimizer, a=1.0, b=10.0)
    optimizer.add_param_group({"params": of(net, "c")})
    again = _scaler_from(through_json(scaler.state_dict()), clip)
    optimizer = sgd(of(again.model, "a", "b", "c"))
    assert scaled(again, optimizer, a=2.0, b=20.0, c=7.0) == pytest.approx(
        {"a.weight": 1.001, "b.weight": 10.01, "c.weight": 7.0}
    )


@every_policy
def test_a_scaler_with_a_model_knows_parameters_in_another_order(clip):
    net = network()
    scaler = GradScaler("cpu", clip=clip, model=net)
    optimizer = sgd(of(net, "a", "b"))
    for _ in range(3):
        scaled(scaler, optimizer, a=1.0, b=10.0)
    saved = through_json(scaler.state_dict())
    again = _scaler_from(saved, clip)
    optimizer = sgd(of(again.model, "c", "b", "a"))
    assert scaled(again, optimizer, a=2.0, b=20.0, c=7.0) == pytest.approx(
        {"a.weight": 1.001, "b.weight": 10.01, "c.weight": 7.0}
    )
    again = _scaler_from(saved, clip)
    optimizer = sgd(of(again.model, "b", "a"))
    assert scaled(again, optimizer, a=2.0, b=20.0) == pytest.approx(
        {"a.weight": 1.001, "b.weight": 10.01}
    )


def test_a_scaler_without_names_says_that_it_starts_afresh(caplog):
    def grown(scaler, params):
        optimizer = sgd(params)
        optimizer.zero_grad()
        scaler.scale(loss_of((param, 10.0) for param in params)).backward()
        scaler.step(optimizer)
        scaler.update()
        return optimizer

    scaler = GradScaler("cpu", clip=LEARNS["AdaGC"])
    kept = grown(scaler, parameters(2))
    again = GradScaler("cpu", clip=LEARNS["AdaGC"])
    again.load_state_dict(scaler.state_dict())
    with caplog.at_level(logging.WARNING, logger="gradilocks"):
        grown(again, parameters(3))
    assert "starts afresh for an optimizer of 3 parameters" in caplog.text
    assert "GradScaler(model=...)" in caplog.text
    assert listed(kept)
