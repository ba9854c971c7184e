"""Parameters and groups that somebody changes between two steps are seen by the next."""

from __future__ import annotations

import pytest
import torch

from tests.optim.twins import SETTINGS, both_kinds, close, give, ours, parameters, run, torchs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4), ()]


def moments(optimizer):
    """Every state tensor that is no count of steps, with where it is."""
    for entry in list(optimizer.state.values()):
        for name, value in list(entry.items()):
            if name != "step":
                yield entry, name, value


@both_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parameters_with_other_storage_are_stepped_there(kind, dtype, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first, second = ours(kind, mine), torchs(kind, theirs, fused=False)
    for step in range(3):
        run(first, 1, first=step)
        run(second, 1, first=step)
        for param in mine:
            param.data = param.data.clone() + 1.0
        for param in theirs:
            param.data = param.data + 1.0
    close(mine, theirs)
    if dtype is torch.float64:  # As model.double() does it.
        for optimizer, params in ((first, mine), (second, theirs)):
            for param in params:
                param.grad = None
                param.data = param.data.double()
            for entry, name, value in moments(optimizer):
                entry[name] = value.double()
            run(optimizer, 2, first=3)
        close(mine, theirs)


@both_kinds
def test_parameters_without_gradients_stay_as_they_are(kind, device):
    mine, theirs = (parameters([(70,), (3,), (5,), ()], device=device) for _ in range(2))
    first, second = ours(kind, mine), torchs(kind, theirs, fused=False)
    for step, absent in enumerate([[0], [], [1, 2], [0, 1, 2, 3], [3], [], []]):
        for optimizer, params in ((first, mine), (second, theirs)):
            give(params, step)
            for place in absent:
                params[place].grad = None
            optimizer.step()
        close(mine, theirs)
    assert first.state_dict()["state"].keys() == second.state_dict()["state"].keys()


@both_kinds
def test_a_parameter_that_is_replaced_starts_afresh(kind, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first, second = ours(kind, mine), torchs(kind, theirs, fused=False)
    for optimizer in (first, second):
        run(optimizer, 2)
        for place in (0, 2):  # A scalar that equals the old one, too.
            old = optimizer.param_groups[0]["params"][place]
            new = torch.nn.Parameter(old.detach().clone())
            optimizer.param_groups[0]["params"][place] = new
        run(optimizer, 2, first=2)
    close(first.param_groups[0]["params"], second.param_groups[0]["params"])
    close(mine[:1], theirs[:1])


@both_kinds
def test_a_parameter_may_move_to_another_group(kind, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
        optimizer = make(kind, groups)
        run(optimizer, 2)
        one, other = optimizer.param_groups
        other["params"].append(one["params"].pop(0))
        run(optimizer, 1, first=2)
        one["params"], other["params"] = other["params"], one["params"]
        run(optimizer, 1, first=3)
        optimizer.param_groups.reverse()
        run(optimizer, 1, first=4)
        ends.append(params)
    close(*ends)


@both_kinds
def test_a_group_that_comes_in_mid_run_is_stepped(kind, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        optimizer = make(kind, params[:1])
        run(optimizer, 2)
        optimizer.add_param_group({"params": params[1:2], "lr": 0.3})
        run(optimizer, 2, first=2)
        optimizer.add_param_group({"params": params[2]})
        optimizer.add_param_group({"params": []})
        run(optimizer, 2, first=4)
        ends.append(params)
    close(*ends)


FLIPS = [
    ("SGD", {"momentum": 0.0, "dampening": 0.0}, {"momentum": 0.9}),
    ("SGD", {"momentum": 0.0, "dampening": 0.0}, {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"momentum": 0.9}, {"momentum": 0.0}),
    ("SGD", {}, {"maximize": True}),
    ("SGD", {"dampening": 0.0}, {"nesterov": True}),
    ("SGD", {}, {"weight_decay": 0.0}),
    ("AdamW", {}, {"maximize": True}),
    ("AdamW", {}, {"betas": (0.5, 0.5)}),
    ("AdamW", {}, {"weight_decay": 0.5, "eps": 1e-3, "lr": 0.3}),
    ("Adam", {}, {"amsgrad": False}),
    ("Adam", {}, {"decoupled_weight_decay": True}),
]


@pytest.mark.parametrize(("kind", "before", "after"), FLIPS, ids=str)
def test_settings_may_change_in_mid_run(kind, before, after, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        optimizer = make(kind, params, **before)
        run(optimizer, 2)
        optimizer.param_groups[0].update(after)
        run(optimizer, 2, first=2)
        optimizer.param_groups[0].update({**SETTINGS[kind], **before})
        run(optimizer, 2, first=4)
        ends.append(params)
    close(*ends)


def test_amsgrad_may_be_turned_on_in_mid_run(device):
    params = parameters(SHAPES, device=device)
    optimizer = ours("AdamW", params)
    run(optimizer, 2)
    optimizer.param_groups[0]["amsgrad"] = True
    run(optimizer, 2, first=2)
    for param in params:
        entry = optimizer.state[param]
        assert (entry["max_exp_avg_sq"] >= entry["exp_avg_sq"]).all()


CHANGES = {
    "a rate": lambda group: group.update(lr=group["lr"] * 0.5),
    "decay": lambda group: group.update(weight_decay=0.3),
    "names that have changed places": lambda group: swap(group, "lr", "weight_decay"),
    "a rate that is a number again": lambda group: group.update(lr=float(group["lr"]) + 1e-3),
    "an entry of somebody's own": lambda group: group.update(mine=[1, 2]),
    "the other sign": lambda group: group.update(maximize=True),
}


def swap(group, one, other):
    """The same objects in the same order, under each other's names."""
    names = {one: other, other: one}
    entries = [(names.get(key, key), value) for key, value in group.items()]
    group.clear()
    group.update(entries)


@both_kinds
@pytest.mark.parametrize("what", CHANGES)
def test_a_setting_that_changes_between_two_steps_counts(kind, what, device):
    def trained(make):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(70, device=device))]
        optimizer = make(kind, params)
        for step in range(6):
            if step == 3:
                CHANGES[what](optimizer.param_groups[0])
            params[0].grad = params[0].detach() * (step + 1)
            optimizer.step()
        return params

    close(trained(ours), trained(torchs))
