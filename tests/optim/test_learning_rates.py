"""A learning rate may be a number or a tensor, here or on the device, and change at any time."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from gradilocks import GradientControl
from tests.optim.twins import both_kinds, close, give, ours, parameters, run, torchs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4)]


def rate(where, value, device):
    if where == "number":
        return value
    if where == "one element":
        return torch.full((1,), value, device=device)
    return torch.tensor(value, device="cpu" if where == "on the host" else device)


def test_a_rate_that_is_itself_learned_is_read_as_a_number(device):
    for driven in (False, True):
        params = parameters(SHAPES, device=device)
        lr = torch.tensor(0.1, requires_grad=True, device=device)
        optimizer = ours("SGD", params, lr=lr)
        before = [param.detach().clone() for param in params]
        give(params, 0)
        if driven:
            GradientControl(optimizer, scale=None).step()
        else:
            optimizer.step()
        assert not any(map(torch.equal, params, before))
        assert all(param.is_leaf for param in params)


WHERE = ["number", "on the host", "on the device", "one element"]


@both_kinds
@pytest.mark.parametrize("where", WHERE)
def test_a_learning_rate_may_be_a_tensor(kind, where, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    run(ours(kind, mine, lr=rate(where, 0.03, device)), 3)
    run(torchs(kind, theirs, lr=0.03), 3)
    close(mine, theirs)


@both_kinds
@pytest.mark.parametrize("where", WHERE[1:])
def test_a_tensor_that_is_changed_in_place_is_honoured(kind, where, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    lr = rate(where, 0.03, device)
    first, second = ours(kind, mine, lr=lr), torchs(kind, theirs, lr=0.03)
    for step, value in enumerate([0.03, 0.3, 0.0, 0.1]):
        lr.fill_(value)
        second.param_groups[0]["lr"] = value
        run(first, 1, first=step)
        run(second, 1, first=step)
    close(mine, theirs)


@both_kinds
def test_tensors_and_numbers_may_take_turns(kind, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first, second = ours(kind, mine), torchs(kind, theirs)
    turns = [
        ("on the device", 0.3),
        ("number", 0.0),
        ("on the device", 0.1),
        ("on the host", 0.0),
        ("one element", 0.2),
        ("number", 0.1),
    ]
    for step, (where, value) in enumerate(turns):
        first.param_groups[0]["lr"] = rate(where, value, device)
        second.param_groups[0]["lr"] = value
        run(first, 1, first=step)
        run(second, 1, first=step)
    close(mine, theirs)


def test_each_group_may_have_its_own_tensor(device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    lrs = [rate("on the device", 0.3, device), rate("on the host", 0.1, device)]
    first = ours("AdamW", [{"params": [p], "lr": lr} for p, lr in zip(mine, lrs, strict=True)])
    second = torchs(
        "AdamW", [{"params": [theirs[0]], "lr": 0.3}, {"params": [theirs[1]], "lr": 0.1}]
    )
    run(first, 2)
    run(second, 2)
    close(mine, theirs)


@pytest.mark.parametrize("where", WHERE[:3])
def test_the_weight_decay_of_sgd_may_be_a_tensor(where, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    decay = rate(where, 0.2, device)
    optimizer = ours("SGD", mine, weight_decay=decay)
    run(optimizer, 2)
    run(torchs("SGD", theirs, weight_decay=0.2), 2)
    close(mine, theirs)


def test_betas_may_be_tensors(device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    try:
        optimizer = ours("AdamW", mine, betas=(torch.tensor(0.8), torch.tensor(0.9)))
    except (TypeError, ValueError):
        pytest.skip("this version of torch takes no betas that are tensors")
    run(optimizer, 3)
    run(torchs("AdamW", theirs, betas=(0.8, 0.9)), 3)
    close(mine, theirs, tolerance=1e-4)


SCHEDULES = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 1, gamma=0.5),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "warm-up, then decay": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)],
        milestones=[2],
    ),
    "by hand": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step)),
    "averaging": lambda opt: torch.optim.swa_utils.SWALR(opt, swa_lr=0.2, anneal_epochs=2),
}


@both_kinds
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", ["number", "on the device"])
def test_schedulers_of_torch_set_it(kind, schedule, where, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        lr = rate(where if make is ours else "number", 0.05, device)
        optimizer = make(kind, params, lr=lr)
        scheduler = SCHEDULES[schedule](optimizer)
        for step in range(5):
            run(optimizer, 1, first=step)
            scheduler.step()
        ends.append(params)
    close(*ends)


@both_kinds
def test_a_scheduler_sees_that_a_step_was_taken(kind, device):
    """torch warns, and here that is an error, when a scheduler steps before its optimizer."""
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    run(optimizer, 1)
    scheduler.step()


@both_kinds
def test_reducing_on_a_plateau_takes_effect(kind, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params, weight_decay=0.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.0, patience=0, eps=0.0)
    run(optimizer, 1)
    for _ in range(3):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.0
    before = [param.detach().clone() for param in params]
    run(optimizer, 1, first=1)
    assert all(map(torch.equal, params, before))
