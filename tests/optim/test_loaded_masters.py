"""Masters take over what is loaded: into the model, and from checkpoints, ours and torch's."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tests.optim.twins import (
    both_kinds,
    check_rounded,
    close,
    copies,
    give,
    loaded,
    mastered,
    masters_of,
    parameters,
    run,
    same,
    torchs,
    values,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4), ()]
each_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def swapped(params, values):
    for param, value in zip(params, values, strict=True):
        param.data = value.to(param.dtype).to(param.device)


@both_kinds
@pytest.mark.parametrize("how", [loaded, swapped])
@pytest.mark.parametrize("meanwhile", ["nothing", "a group", "a gradient", "the state", "all"])
def test_weights_that_are_loaded_after_the_first_step_are_taken_over(kind, how, meanwhile, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    fresh = values(SHAPES, seed=77, dtype=torch.float16)
    how(params, fresh)
    # Whatever else has changed at the same time must not hide it.
    if meanwhile in ("a group", "all"):
        optimizer.add_param_group({"params": parameters([(2,)], seed=3, device=device)})
    if meanwhile in ("the state", "all"):
        for param in params:
            optimizer.state[param].update(dict(optimizer.state[param]))
    give([p for group in optimizer.param_groups for p in group["params"]], 2)
    if meanwhile in ("a gradient", "all"):
        params[0].grad = None
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    give(params, 3)
    optimizer.step()
    check_rounded(optimizer, params)
    close(params, fresh, tolerance=2e-2)


def write_through_data(params):
    for param in params:
        param.data.fill_(0.5)


@pytest.mark.xfail(
    reason="a limit (see AdamW's master_weights): torch's version counter does not see the write",
    raises=AssertionError,
    strict=True,
)
def test_weights_written_through_data_are_taken_over(device):
    params, optimizer = mastered("AdamW", device)
    run(optimizer, 2)
    write_through_data(params)
    run(optimizer, 1, first=2)
    close(params, [torch.full_like(param, 0.5) for param in params], tolerance=5e-2)


def test_without_its_master_a_parameter_is_taken_as_it_stands(device):
    """The way out of the limit above."""
    params, optimizer = mastered("AdamW", device)
    run(optimizer, 2)
    write_through_data(params)
    for param in params:
        del optimizer.state[param]["master"]
    run(optimizer, 1, first=2)
    close(params, [torch.full_like(param, 0.5) for param in params], tolerance=5e-2)
    check_rounded(optimizer, params)


@both_kinds
def test_masters_stay_exact_where_the_loaded_weights_are_the_same(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    before = copies(masters_of(optimizer, params))
    loaded(params, copies(params))
    swapped(params, copies(params))
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, 1, first=2)
    assert same(copies(masters_of(optimizer, params)), before)


@both_kinds
def test_a_checkpoint_keeps_masters_in_float32(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 3)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), copies(params)], file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    twins, other = mastered(kind, device)
    loaded(twins, weights)
    other.load_state_dict(state)
    assert same(copies(masters_of(other, twins)), copies(masters_of(optimizer, params)))
    run(optimizer, 2, first=3)
    run(other, 2, first=3)
    assert same(copies(params), copies(twins))
    assert same(optimizer.state_dict()["state"], other.state_dict()["state"])


@both_kinds
def test_weights_loaded_beside_an_older_checkpoint_are_taken_over(kind, device):
    """Of every parameter, also of one whose gradient comes later."""
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    state, fresh = copy.deepcopy(optimizer.state_dict()), values(SHAPES, seed=8, dtype=torch.half)
    optimizer.load_state_dict(state)
    loaded(params, fresh)
    optimizer.param_groups[0]["lr"] = 1e-4
    for step in range(2):
        give(params, step)
        if step == 0:
            params[0].grad = None
        optimizer.step()
    close(params, fresh, tolerance=1e-2)


@both_kinds
def test_torch_loads_a_checkpoint_with_masters(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    theirs = parameters(SHAPES, dtype=torch.float16, device=device)
    loaded(theirs, params)
    other = torchs(kind, theirs, fused=False)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in other.param_groups:
        group["fused"] = False
    run(other, 2, first=2)
    run(optimizer, 2, first=2)
    close(params, theirs, tolerance=2e-2)


@both_kinds
def test_ours_loads_torchs_half_precision_checkpoint(kind, device):
    theirs = parameters(SHAPES, dtype=torch.float16, device=device)
    other = torchs(kind, theirs, fused=False)
    run(other, 2)
    params, optimizer = mastered(kind, device)
    loaded(params, theirs)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    run(optimizer, 2, first=2)
    run(other, 2, first=2)
    check_rounded(optimizer, params)
    close(params, theirs, tolerance=2e-2)
    for entry in optimizer.state.values():
        assert {tensor.dtype for tensor in entry.values()} == {torch.float32}


@both_kinds
def test_hooks_around_loading_have_the_last_word_about_masters(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())

    def doubled(opt, given):
        entries = {
            key: {**entry, "master": entry["master"] * 2.0} for key, entry in given["state"].items()
        }
        return {**given, "state": entries}

    seen = []
    before = optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(
        lambda opt: seen.extend(copies(masters_of(opt, params)))
    )
    optimizer.load_state_dict(state)
    wanted = [entry["master"] * 2.0 for entry in state["state"].values()]
    assert same(seen, wanted)
    assert same(copies(masters_of(optimizer, params)), wanted)
    before.remove()
    optimizer.register_load_state_dict_post_hook(
        lambda opt: [opt.state[param].pop("master") for param in params]
    )
    optimizer.load_state_dict(state)
    assert not any("master" in optimizer.state[param] for param in params)
    run(optimizer, 1)
    check_rounded(optimizer, params)
