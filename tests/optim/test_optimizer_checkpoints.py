"""State goes to torch's optimizers and back, through files, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from tests.optim.twins import both_kinds, close, copies, give, ours, parameters, run, same, torchs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4), ()]


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@both_kinds
def test_torch_goes_on_from_ours(kind, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first = ours(kind, mine)
    run(first, 3)
    with torch.no_grad():
        for param, other in zip(theirs, mine, strict=True):
            param.copy_(other)
    second = torchs(kind, theirs)
    second.load_state_dict(saved(first))
    run(first, 2, first=3)
    run(second, 2, first=3)
    close(mine, theirs)


@both_kinds
@pytest.mark.parametrize(
    "way", [{"fused": True}, {"fused": False}, {"fused": False, "foreach": True}], ids=str
)
def test_ours_goes_on_from_torch(kind, way, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first = torchs(kind, theirs, **way)
    run(first, 3)
    with torch.no_grad():
        for param, other in zip(mine, theirs, strict=True):
            param.copy_(other)
    second = ours(kind, mine)
    run(second, 1)  # Whatever was there is replaced.
    with torch.no_grad():
        for param, other in zip(mine, theirs, strict=True):
            param.copy_(other)
    second.load_state_dict(saved(first))
    run(first, 2, first=3)
    run(second, 2, first=3)
    close(mine, theirs)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)])
def test_however_steps_were_counted_they_are_counted_on(step, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first, second = ours("AdamW", mine), ours("AdamW", theirs)
    run(first, 3)
    run(second, 3)
    state = copy.deepcopy(second.state_dict())
    for entry in state["state"].values():
        entry["step"] = step
    state["param_groups"][0]["fused"] = None
    second.load_state_dict(state)
    run(first, 1, first=3)
    run(second, 1, first=3)
    assert same(copies(mine), copies(theirs))
    for param in theirs:
        assert second.state[param]["step"].item() == 4.0
        assert second.state[param]["step"].dtype is torch.float32


@both_kinds
def test_a_checkpoint_holds_what_torchs_does(kind, device):
    mine, theirs = (parameters(SHAPES, device=device) for _ in range(2))
    first, second = ours(kind, mine), torchs(kind, theirs)
    run(first, 2)
    run(second, 2)
    one, other = first.state_dict(), second.state_dict()
    assert type(one["state"]) is dict
    assert {type(entry) for entry in one["state"].values()} == {dict}
    assert {key: sorted(entry) for key, entry in one["state"].items()} == {
        key: sorted(entry) for key, entry in other["state"].items()
    }
    for entry, wanted in zip(one["state"].values(), other["state"].values(), strict=True):
        for name, tensor in entry.items():
            assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype)
        close(entry.values(), wanted.values())
    mine_only = set(one["param_groups"][0]) - set(other["param_groups"][0])
    assert mine_only == set()


def test_sgd_without_momentum_has_no_state_as_in_torch(device):
    params = parameters(SHAPES, device=device)
    optimizer = ours("SGD", params, momentum=0.0, dampening=0.0)
    run(optimizer, 2)
    assert optimizer.state_dict()["state"] == {}


def test_a_buffer_that_no_step_has_filled_is_not_saved(device):
    params = parameters(SHAPES, device=device)
    optimizer = ours("SGD", params)
    give(params, 0)
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    for kept in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert kept.state_dict()["state"] == {}
    optimizer.state.clear()
    assert optimizer.state_dict()["state"] == {}


@both_kinds
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_goes_its_own_way(kind, clone, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    other = clone(optimizer)
    theirs = other.param_groups[0]["params"]
    assert same(copies(params), copies(theirs))
    before = copies(params)
    run(other, 2, first=2)
    assert same(copies(params), before)
    run(optimizer, 2, first=2)
    assert same(copies(params), copies(theirs))
    assert type(other) is type(optimizer)


@both_kinds
def test_a_model_and_its_optimizer_are_copied_together(kind, device):
    model = torch.nn.Linear(9, 3).to(device)
    optimizer = ours(kind, model.parameters())
    model(torch.ones(2, 9, device=device)).sum().backward()
    optimizer.step()
    twin, other = copy.deepcopy((model, optimizer))
    twin(torch.ones(2, 9, device=device)).sum().backward()
    before = copies(model.parameters())
    other.step()
    assert same(copies(model.parameters()), before)
    assert not same(copies(twin.parameters()), before)


@both_kinds
def test_loading_in_mid_run_goes_back_to_what_was_saved(kind, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    weights, state = copies(params), copy.deepcopy(optimizer.state_dict())
    run(optimizer, 3, first=2)
    wanted = copies(params)
    with torch.no_grad():
        for param, value in zip(params, weights, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(state)
    run(optimizer, 3, first=2)
    assert same(copies(params), wanted)


@both_kinds
def test_a_checkpoint_that_does_not_fit_changes_nothing(kind, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    kept, before = copies(params), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(ours(kind, parameters(SHAPES[:2])).state_dict())
    assert same(copies(params), kept)
    assert same(optimizer.state_dict(), before)
    run(optimizer, 1)


@both_kinds
def test_hooks_around_saving_and_loading_are_honoured(kind, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "mine": 1})
    state = optimizer.state_dict()
    assert (state["mine"], calls) == (1, ["save"])

    def before(opt, given):
        assert given["mine"] == 1
        groups = copy.deepcopy(given["param_groups"])
        groups[0]["lr"] = 0.5
        return {"state": given["state"], "param_groups": groups}

    def after(opt):
        for entry in opt.state.values():
            for name in entry:
                if name != "step":
                    entry[name] = torch.zeros_like(entry[name])

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    for entry in optimizer.state.values():
        assert not any(tensor.any() for name, tensor in entry.items() if name != "step")
    run(optimizer, 1)


@both_kinds
def test_distributed_checkpoints_read_and_write_it(kind, device):
    dcp = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = torch.nn.Linear(5, 2).to(device)
    optimizer = ours(kind, model.parameters())
    before = copies(model.parameters())
    dcp.get_optimizer_state_dict(model, optimizer)  # Makes the state with a step of lr 0.
    assert same(copies(model.parameters()), before)
    run(optimizer, 2)
    state = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    twin = copy.deepcopy(model)
    other = ours(kind, twin.parameters())
    dcp.set_optimizer_state_dict(twin, other, state)
    run(optimizer, 2, first=2)
    run(other, 2, first=2)
    assert same(copies(model.parameters()), copies(twin.parameters()))
