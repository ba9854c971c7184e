"""Several real processes: every element counts once, and no two ranks decide differently."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradilocks
from tests.policies.learned import learned
from tests.ranks.rank_programs import run_all

Returned = dict[str, list[Any]]


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    """What every rank returned from every program below."""
    programs = [
        shards_and_a_replica,
        distributed_beside_plain,
        one_rank_overflows,
        distributed_overflow,
        control_over_shards,
        experts,
        one_rank_without_gradients,
        parts_bounded_apart,
        a_part_is_missing,
        parts_that_cannot_be_told_apart,
        headroom_of_shards,
        headroom_of_copies,
    ]
    return run_all(programs, tmp_path_factory.mktemp("ranks"))


def _dtensor(values: list[float], placement: Any) -> nn.Parameter:
    """A distributed parameter whose gradient is `values`, placed over both ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(len(values)), mesh, [placement]))
    param.grad = distribute_tensor(torch.tensor(values), mesh, [placement])
    return param


def shards_and_a_replica(rank: int) -> tuple[float, list[float]]:
    """Tensor parallel: [3] here, [4] there, [12] on both: the norm is 13."""
    from torch.distributed.tensor import Replicate, Shard

    sharded, replicated = _dtensor([3.0, 4.0], Shard(0)), _dtensor([12.0], Replicate())
    norm = gradilocks.clip_grad_norm_([sharded, replicated], 1.0)
    local = sharded.grad.to_local()  # type: ignore[union-attr]
    return norm.item(), local.tolist()


def test_sharded_elements_count_once_and_replicated_ones_too(returned: Returned) -> None:
    results = returned["shards_and_a_replica"]
    assert [norm for norm, _ in results] == [13.0, 13.0]
    assert results[0][1] == pytest.approx([3 / 13], rel=1e-6)
    assert results[1][1] == pytest.approx([4 / 13], rel=1e-6)


def distributed_beside_plain(rank: int) -> float:
    """torch raises when they are mixed; here the plain one is taken to be on every rank."""
    from torch.distributed.tensor import Shard

    plain = nn.Parameter(torch.zeros(1))
    plain.grad = torch.tensor([12.0])
    return gradilocks.clip_grad_norm_([_dtensor([3.0, 4.0], Shard(0)), plain], 100.0).item()


def test_a_plain_gradient_beside_distributed_ones_counts_once(returned: Returned) -> None:
    assert returned["distributed_beside_plain"] == [13.0, 13.0]


def one_rank_overflows(rank: int) -> dict[str, Any]:
    """Fused AdamW on plain shards: an Inf on rank 1 must stop rank 0 as well."""
    params = [nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    scaler = gradilocks.GradScaler("cpu", process_group=dist.group.WORLD)
    for step in range(3):
        scaler.scale((params[0] * (1.0 + rank)).sum()).backward()
        if step == 1 and rank == 1:
            params[0].grad[2] = math.inf  # type: ignore[index]
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {
        "steps": optimizer.state[params[0]]["step"].item(),
        "scale": scaler.get_scale(),
        "finite": bool(torch.isfinite(params[0]).all()),
    }


def test_ranks_skip_together_when_one_of_them_overflows(returned: Returned) -> None:
    expected = {"steps": 2.0, "scale": 2.0**15, "finite": True}
    assert returned["one_rank_overflows"] == [expected, expected]


def distributed_overflow(rank: int) -> list[Any]:
    """The Inf is in the second gradient, whose placement is not the first one's."""
    from torch.distributed.tensor import Replicate, Shard

    first, second = _dtensor([1.0], Replicate()), _dtensor([1.0, 2.0], Shard(0))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    scaler = gradilocks.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if rank == 1:
        second.grad.to_local()[0] = math.nan  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), second.to_local().tolist()]


def test_a_nan_in_any_distributed_gradient_stops_every_rank(returned: Returned) -> None:
    assert returned["distributed_overflow"] == [[2.0, [0.0]], [2.0, [0.0]]]


def control_over_shards(rank: int) -> list[Any]:
    """Each rank holds its own shard; rank 1 has no gradient in the first step at all."""
    param = nn.Parameter(torch.zeros(1))
    unused = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param, unused], lr=1.0)
    control = gradilocks.GradientControl(
        optimizer, clip=1.0, scale=1024.0, process_group=dist.group.WORLD
    )
    seen = []
    for step in range(3):
        grown = [3.0, 4.0][rank]
        if step == 0 and rank == 1:
            control.scale_loss(unused.sum())
        else:
            control.backward(param.sum() * grown)
        if step == 2 and rank == 0:
            param.grad.fill_(math.nan)  # type: ignore[union-attr]
        outcome = control.step()
        seen.append((outcome.skipped, outcome.norm, outcome.culprits))
        control.zero_grad()
    return [seen, param.item()]


def test_a_control_decides_the_same_on_every_rank_also_without_gradients(
    returned: Returned,
) -> None:
    (first, value_0), (second, value_1) = returned["control_over_shards"]
    for seen in (first, second):
        assert [s[:2] for s in seen[:2]] == [(False, 3.0), (False, 5.0)]
        assert seen[2][0] is True
    assert first[2][2] == second[2][2] == ("param_groups[0]['params'][0] on rank 0",)
    # Step 1 clips 3 to 1 on rank 0; step 2 clips (3, 4) to (0.6, 0.8); step 3 is skipped.
    assert value_0 == pytest.approx(-1.6, rel=1e-5)
    assert value_1 == pytest.approx(-0.8, rel=1e-5)


def experts(rank: int) -> list[float]:
    """Norms of the two ranks' own experts: sqrt(20) and sqrt(100); together sqrt(120)."""
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    found = []
    for order in (2.0, 1.0, 3.0, math.inf):
        control = gradilocks.GradientControl(
            optimizer,
            clip=gradilocks.ClipByNorm(1e9, order=order),
            scale=None,
            process_group=dist.group.WORLD,
        )
        control.backward(param.sum() * [math.sqrt(20), math.sqrt(100)][rank])
        found.append(control.step().norm)
        control.zero_grad()
    return found


def test_norms_of_every_order_add_up_over_ranks(returned: Returned) -> None:
    a, b = math.sqrt(20), math.sqrt(100)
    expected = [10.954451, a + b, (a**3 + b**3) ** (1 / 3), b]
    for found in returned["experts"]:
        assert found == pytest.approx(expected, rel=1e-6)


def one_rank_without_gradients(rank: int) -> list[Any]:
    """Distributed parameters, of which rank 1 has no gradient: it takes part all the same."""
    from torch.distributed.tensor import Shard

    param = _dtensor([3.0, 4.0], Shard(0))
    if rank == 1:
        param.grad = None
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = gradilocks.GradientControl(optimizer, scale=None, clip=1.0)
    outcome = control.step()
    return [outcome.skipped, outcome.norm, param.to_local().tolist()]


def test_a_rank_without_gradients_takes_part(returned: Returned) -> None:
    first, second = returned["one_rank_without_gradients"]
    assert first[:2] == second[:2] == [False, 3.0]
    assert first[2] == pytest.approx([-1.0], rel=1e-6)
    assert second[2] == [0.0]


def parts_bounded_apart(rank: int) -> dict[str, Any]:
    """[3] here and [4] there is a gradient of norm 5, [12] on both is one of norm 12."""
    from torch.distributed.tensor import Replicate, Shard

    found = {}
    for name, policy in (
        ("each", gradilocks.ClipPerTensor(1.0)),
        ("groups", gradilocks.ClipPerGroup({0: 6.5})),
        ("usual", gradilocks.AdaGC(warmup=1, warmup_norm=math.inf)),
    ):
        sharded, replicated = _dtensor([3.0, 4.0], Shard(0)), _dtensor([12.0], Replicate())
        optimizer = torch.optim.SGD([sharded, replicated], lr=1.0)
        control = gradilocks.GradientControl(optimizer, scale=None, clip=policy)
        outcome = control.step()
        found[name] = {
            "norm": outcome.norm,
            "moved": [-p.to_local().item() for p in (sharded, replicated)],  # type: ignore[operator]
            "memory": learned(control),
        }
    return found


def test_parts_of_a_gradient_are_bounded_by_the_norm_of_the_whole(returned: Returned) -> None:
    for mine, found in zip((3.0, 4.0), returned["parts_bounded_apart"], strict=True):
        assert [each["norm"] for each in found.values()] == pytest.approx([13.0] * 3)
        assert found["each"]["moved"] == pytest.approx([mine / 5.0, 1.0], rel=1e-5)
        assert found["groups"]["moved"] == pytest.approx([mine / 2.0, 6.0], rel=1e-5)
        assert found["usual"]["memory"]["usual"] == pytest.approx([5.0, 12.0], rel=1e-6)


def a_part_is_missing(rank: int) -> list[list[float]]:
    """Rank 1 has no gradient of the second tensor."""
    from torch.distributed.tensor import Replicate, Shard

    moved = []
    for policy in (gradilocks.ClipPerTensor(1.0), gradilocks.AdaGC(warmup=1, warmup_norm=13.0)):
        params = [_dtensor([12.0], Replicate()), _dtensor([6.0, 8.0], Shard(0))]
        params.append(_dtensor([3.0, 4.0], Shard(0)))
        if rank:
            params[1].grad = None
        optimizer = torch.optim.SGD(params, lr=1.0)
        gradilocks.GradientControl(optimizer, scale=None, clip=policy).step()
        moved.append([-p.to_local().item() for p in params])  # type: ignore[operator]
    return moved


def test_a_rank_may_lack_a_gradient_that_others_have(returned: Returned) -> None:
    first, second = returned["a_part_is_missing"]
    assert first[0] == pytest.approx([1.0, 1.0, 0.6], rel=1e-5)
    assert second[0] == pytest.approx([1.0, 0.0, 0.8], rel=1e-5)
    assert first[1][0] == second[1][0]


def parts_that_cannot_be_told_apart(rank: int) -> list[str]:
    """Plain shards, and rows that may be cut in any way: refused before anything is written."""
    told = []
    for policy, options in (
        (gradilocks.ClipPerTensor(1.0), {"process_group": dist.group.WORLD}),
        (gradilocks.AdaptiveClip(), {"copies": 1}),
        (gradilocks.AdaptiveClip(exclude=("row*",)), {"copies": 1}),
    ):
        param = nn.Parameter(torch.zeros(2, 3))
        param.grad = torch.ones(2, 3)
        options["model"] = nn.ParameterDict({"rows": param})
        control = gradilocks.GradientControl(
            torch.optim.SGD([param], lr=1.0), scale=None, clip=policy, **options
        )
        try:
            control.step()
            told.append("")
        except ValueError as error:
            told.append(str(error))
            assert not param.any()
    return told


def test_where_parts_cannot_be_told_apart_the_policy_is_refused(returned: Returned) -> None:
    for told in returned["parts_that_cannot_be_told_apart"]:
        each, units, left_alone = told
        assert each.startswith("ClipPerTensor bounds gradients apart")
        assert "Use ClipByNorm" in each
        assert units.startswith("rows is bounded unit by unit, and ranks [0, 1] hold parts of it")
        assert left_alone == ""


def headroom_of_shards(rank: int) -> list[float]:
    """Rank 1 holds the large gradient, and rank 0 must scale by it too."""
    param = nn.Parameter(torch.zeros(1))
    control = gradilocks.GradientControl(
        torch.optim.SGD([param], lr=0.0),
        scale=gradilocks.HeadroomScale(),
        process_group=dist.group.WORLD,
    )
    scales = []
    for _ in range(3):
        control.zero_grad()
        control.backward((param * (1.0 if rank else 2.0**-10)).sum())
        control.step()
        scales.append(control.scale)
    return scales


def test_ranks_that_hold_parts_find_one_headroom(returned: Returned) -> None:
    assert returned["headroom_of_shards"] == [[2.0**11] * 3] * 2


def headroom_of_copies(rank: int) -> list[float]:
    """A NaN in rank 0's loss alone; after the average both have it in their gradients."""
    param = nn.Parameter(torch.zeros(1))
    control = gradilocks.GradientControl(
        torch.optim.SGD([param], lr=0.0), scale=gradilocks.HeadroomScale()
    )
    scales = []
    for step in range(4):
        control.zero_grad()
        control.backward((param * 1.0).sum() * (math.nan if step == 1 and rank == 0 else 1.0))
        dist.all_reduce(param.grad)
        control.step()
        scales.append(control.scale)
    return scales


def test_a_nan_in_one_ranks_loss_does_not_part_their_scales(returned: Returned) -> None:
    first, second = returned["headroom_of_copies"]
    assert first == second
