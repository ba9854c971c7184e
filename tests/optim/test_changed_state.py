"""State that somebody changes between two steps is what the next step finds."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict

import pytest
import torch

from tests.optim.twins import both_kinds, close, copies, give, ours, parameters, run, same, torchs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4), ()]


def moments(optimizer):
    """Every state tensor that is no count of steps, with where it is."""
    for entry in list(optimizer.state.values()):
        for name, value in list(entry.items()):
            if name != "step":
                yield entry, name, value


def offloaded_and_back(optimizer):
    for entry, name, value in moments(optimizer):
        entry[name] = value.cpu().clone()
        entry[name] = entry[name].to(value.device)


def offloaded_and_left(optimizer):
    for entry in optimizer.state.values():
        for name, value in list(entry.items()):
            entry[name] = value.cpu().clone()


def moved_through_data(optimizer):
    """As `optimizer_to(optimizer, device)`, which everybody has copied from a forum."""
    for entry in optimizer.state.values():
        for value in entry.values():
            value.data = value.data.clone()


def reset(optimizer):
    for entry, name, value in moments(optimizer):
        entry[name] = torch.zeros_like(value)


def reset_in_place(optimizer):
    for _, _, value in moments(optimizer):
        value.zero_()


def cleared(optimizer):
    optimizer.state.clear()


def replaced_as_a_whole(optimizer):
    optimizer.state = defaultdict(dict)


def emptied_one_by_one(optimizer):
    for entry in optimizer.state.values():
        entry.clear()


def popped(optimizer):
    for param in list(optimizer.state):
        optimizer.state.pop(param)


def given_anew(optimizer):
    for param in list(optimizer.state):
        optimizer.state[param] = {k: v.clone() for k, v in optimizer.state[param].items()}


def updated(optimizer):
    for entry in list(optimizer.state.values()):
        entry.update({name: value * 0.5 for name, value in entry.items()})


def merged(optimizer):
    for entry in list(optimizer.state.values()):
        entry |= {name: value * 2.0 for name, value in entry.items()}


def made_strided(optimizer):
    for entry, name, value in moments(optimizer):
        entry[name] = torch.stack([value, value], dim=-1)[..., 0]


CHANGES = [
    offloaded_and_back,
    offloaded_and_left,
    moved_through_data,
    reset,
    reset_in_place,
    cleared,
    replaced_as_a_whole,
    emptied_one_by_one,
    popped,
    given_anew,
    updated,
    merged,
    made_strided,
]


@both_kinds
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_somebody_changes_is_what_the_next_step_finds(kind, change, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first, second = ours(kind, mine), torchs(kind, theirs, fused=False, foreach=False)
    for step in range(3):
        run(first, 2, first=2 * step)
        run(second, 2, first=2 * step)
        change(first)
        # torch's does not bring back what was left elsewhere.
        (offloaded_and_back if change is offloaded_and_left else change)(second)
    close(mine, theirs)


@both_kinds
def test_moments_of_another_dtype_are_read_as_what_they_are(kind, device):
    mine, theirs = (parameters([(70,)], dtype=torch.float16, device=device) for _ in range(2))
    first, second = ours(kind, mine), ours(kind, theirs)
    run(first, 2)
    run(second, 2)
    *_, (entry, name, value) = moments(first)
    entry[name] = value.double()  # Only the last of them.
    run(first, 2, first=2)
    run(second, 2, first=2)
    close(mine, theirs, tolerance=1e-2)


@both_kinds
def test_a_buffer_that_somebody_loads_after_skipped_steps_counts_as_filled(kind, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    donor = torchs(kind, theirs)
    run(donor, 2)
    with torch.no_grad():
        for param, other in zip(mine, theirs, strict=True):
            param.copy_(other)
    optimizer = ours(kind, mine)
    give(mine, 0)
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    optimizer.found_inf = None
    for param, other in zip(mine, theirs, strict=True):
        for name, value in donor.state[other].items():
            optimizer.state[param][name] = value.clone()
    run(optimizer, 2, first=2)
    run(donor, 2, first=2)
    close(mine, theirs)


@both_kinds
def test_offloading_frees_the_memory_at_once(kind, kernel_device):
    params = parameters(SHAPES, device=kernel_device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    kept = [weakref.ref(value) for _, _, value in moments(optimizer)]
    for entry, name, value in moments(optimizer):
        entry[name] = value.cpu().clone()
    del entry, value
    gc.collect()
    assert kept
    assert [ref() for ref in kept] == [None] * len(kept)


@both_kinds
def test_an_optimizer_that_is_deleted_frees_its_state_at_once(kind, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    kept = [weakref.ref(value) for _, _, value in moments(optimizer)]
    gc.disable()
    try:
        del optimizer
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()


@both_kinds
def test_a_copy_of_the_state_is_nobodys_business(kind, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    run(optimizer, 1)
    for clone in (copy.copy(optimizer.state), optimizer.state.copy()):
        clone.clear()
        clone[params[0]]["more"] = 1
    entry = optimizer.state[params[0]].copy()
    entry.clear()
    assert len(optimizer.state) == len(params)
    before = copies(params)
    run(optimizer, 1, first=1)
    assert not same(copies(params), before)


@both_kinds
def test_an_optimizer_may_take_over_the_state_of_another(kind, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first, other = ours(kind, mine), torchs(kind, theirs)
    run(first, 2)
    second = ours(kind, mine)
    second.state = first.state
    run(second, 2, first=2)
    for entry, name, value in moments(second):
        entry[name] = value * 0.5  # The new owner notices.
    run(second, 2, first=4)
    run(other, 4)
    for entry, name, value in moments(other):
        entry[name] = value * 0.5
    run(other, 2, first=4)
    close(mine, theirs)
