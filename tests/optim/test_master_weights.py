"""Half-precision parameters with float32 masters: the small steps that they would lose are kept."""

from __future__ import annotations

import copy

import pytest
import torch

from gradilocks import GradientControl
from tests.optim.twins import (
    SETTINGS,
    both_kinds,
    check_rounded,
    close,
    copies,
    give,
    loaded,
    mastered,
    masters_of,
    ours,
    parameters,
    run,
    same,
    skip_what_the_interpreter_rounds,
    torchs,
    values,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4), ()]
each_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@both_kinds
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


@both_kinds
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


@both_kinds
def test_a_skipped_step_changes_no_master(kind, device):
    params, optimizer = mastered(kind, device)
    run(optimizer, 2)
    before, state = copies(params), copy.deepcopy(optimizer.state_dict()["state"])
    give(params, 2, factor=float("inf"))
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    assert same(copies(params), before)
    assert same(optimizer.state_dict()["state"], state)


@both_kinds
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


@both_kinds
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


@both_kinds
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


@both_kinds
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


@both_kinds
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
