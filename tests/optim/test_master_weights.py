"""Half-precision parameters with float32 masters: the small steps that they would lose are kept."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from twins import (
    SETTINGS,
    close,
    copies,
    each_optimizer,
    give,
    ours,
    parameters,
    run,
    same,
    skip_what_the_interpreter_rounds,
    torchs,
    values,
)

from gradilocks import GradientControl

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4), ()]
each_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def mastered(kind, device, dtype=torch.float16, *, shapes=SHAPES, **settings):
    skip_what_the_interpreter_rounds(dtype, device)
    params = parameters(shapes, dtype=dtype, device=device)
    return params, ours(kind, params, master_weights=True, **settings)


def masters_of(optimizer, params):
    return [optimizer.state[param]["master"] for param in params]


def check_rounded(optimizer, params):
    for param, master in zip(params, masters_of(optimizer, params), strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(param, master.to(param.dtype))


@each_optimizer
@each_half
def test_masters_go_the_way_of_float32_parameters(kind, dtype, device):
    params, optimizer = mastered(kind, device, dtype)
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    other = torchs(kind, wide)
    for step in range(4):
        give(params, step)
        for param, one in zip(params, wide, strict=True):
            one.grad = param.grad.float()
        optimizer.step()
        other.step()
        check_rounded(optimizer, params)
    close(masters_of(optimizer, params), wide)
    for entry in optimizer.state.values():
        assert {tensor.dtype for tensor in entry.values()} == {torch.float32}


@each_optimizer
@each_half
def test_steps_that_the_format_would_lose_add_up(kind, dtype, device):
    skip_what_the_interpreter_rounds(dtype, device)
    settings = {"lr": 1e-4, "weight_decay": 0.0}
    if kind == "SGD":
        settings |= {"momentum": 0.0, "dampening": 0.0}
    ends = []
    for wide in (True, False):
        param = torch.nn.Parameter(torch.ones(5, dtype=dtype, device=device))
        optimizer = ours(kind, [param], master_weights=wide, **settings)
        for _ in range(30):
            param.grad = torch.ones_like(param)
            optimizer.step()
        ends.append(param.detach().float().mean().item())
    assert ends[0] == pytest.approx(1.0 - 30e-4, abs=2e-3)
    assert ends[0] < ends[1] == 1.0


@each_optimizer
def test_a_skipped_step_changes_no_master(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    before, state = copies(params), copy.deepcopy(optimizer.state_dict()["state"])
    give(params, 2, factor=float("inf"))
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    assert same(copies(params), before)
    assert same(optimizer.state_dict()["state"], state)


def loaded(params, values):
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def swapped(params, values):
    for param, value in zip(params, values, strict=True):
        param.data = value.to(param.dtype).to(param.device)


@each_optimizer
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


@each_optimizer
def test_masters_stay_exact_where_the_loaded_weights_are_the_same(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    before = copies(masters_of(optimizer, params))
    loaded(params, copies(params))
    swapped(params, copies(params))
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, 1, first=2)
    assert same(copies(masters_of(optimizer, params)), before)


@each_optimizer
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


@each_optimizer
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


@each_optimizer
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


@each_optimizer
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


@each_optimizer
def test_float32_parameters_beside_them_need_no_master(kind, device):
    halves, wide = (
        parameters(SHAPES, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32)
    )
    optimizer = ours(kind, [*halves, *wide], master_weights=True)
    theirs = parameters(SHAPES, device=device)
    other = torchs(kind, theirs)
    for step in range(3):
        give(halves, step)
        for params in (wide, theirs):
            give(params, step)
        optimizer.step()
        other.step()
    close(wide, theirs)
    check_rounded(optimizer, halves)
    assert all("master" not in optimizer.state[param] for param in wide)


@each_optimizer
def test_each_group_says_whether_it_has_masters(kind, device):
    with_them, without = (parameters(SHAPES, dtype=torch.float16, device=device) for _ in range(2))
    groups = [{"params": with_them, "master_weights": True}, {"params": without}]
    optimizer = ours(kind, groups)
    run(optimizer, 2)
    check_rounded(optimizer, with_them)
    assert all("master" not in optimizer.state[param] for param in without)
    # A checkpoint of torch's does not say; a group keeps its own word.
    twins = [{"params": parameters(SHAPES, dtype=torch.float16)} for _ in range(2)]
    other = torchs(kind, twins, fused=False)
    run(other, 1)
    optimizer.load_state_dict(other.state_dict())
    assert [group["master_weights"] for group in optimizer.param_groups] == [True, False]


@each_optimizer
def test_masters_may_be_turned_on_and_off_in_mid_run(kind, device):
    params = parameters(SHAPES, dtype=torch.float16, device=device)
    optimizer = ours(kind, params)
    run(optimizer, 2)
    optimizer.param_groups[0]["master_weights"] = True
    run(optimizer, 2, first=2)
    check_rounded(optimizer, params)
    optimizer.param_groups[0]["master_weights"] = False
    run(optimizer, 2, first=4)
    now = copies(params)
    optimizer.param_groups[0] |= {"master_weights": True, "lr": 0.0}
    run(optimizer, 1, first=6)
    assert same(copies(params), now)  # The master that was left behind has caught up.


@each_optimizer
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_masters_of_odd_layouts(kind, layout, device):
    made = values([(6, 9)], dtype=torch.float16, device=device)[0]
    room = torch.zeros(6, 18, dtype=torch.float16, device=device)
    odd = made.t().contiguous().t() if layout == "transposed" else room[:, ::2]
    param = torch.nn.Parameter(odd)
    loaded([param], [made])
    optimizer = ours(kind, [param], master_weights=True)
    params, plain = mastered(kind, device, shapes=[(6, 9)])
    run(optimizer, 3)
    run(plain, 3)
    close([param], params, tolerance=1e-3)
    check_rounded(optimizer, [param])


@each_optimizer
def test_a_control_scales_and_clips_float16_with_masters(kind, device):
    params, optimizer = mastered(kind, device, **{**SETTINGS[kind], "lr": 0.05})
    control = GradientControl(optimizer, scale=128.0, clip=1.0)
    before = sum(param.detach().float().square().sum().item() for param in params)
    for _ in range(5):
        control.backward(sum(param.float().square().sum() for param in params))
        assert not control.step().skipped
        check_rounded(optimizer, params)
        control.zero_grad()
    after = sum(param.detach().float().square().sum().item() for param in params)
    assert after < before
