"""Four real processes: torchtitan's clip, by ours, beside the same gradients in one process and
beside torchtitan's own.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradilocks.integrations.torchtitan import clip_grad_norm_
from tests.ranks.rank_programs import run_all

RANKS = 4
ORDERS = (1.0, 2.0, 3.0, math.inf)
BOUND = 0.75


def whole_gradients(stages: int = 2) -> list[dict[str, Tensor]]:
    """By stage: a dense weight, a bias and four experts, not cut."""
    draw = torch.Generator().manual_seed(7)
    return [
        {
            "dense": torch.randn(8, 4, generator=draw),
            "bias": torch.randn(8, generator=draw),
            "experts": torch.randn(4, 3, 2, generator=draw),
        }
        for _ in range(stages)
    ]


def total(tensors: list[Tensor], order: float) -> float:
    """The norm of all of them in float64."""
    return torch.cat([each.double().flatten() for each in tensors]).norm(order).item()


def meshes(**sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def on(mesh: Any, whole: Tensor, *placements: Any) -> nn.Parameter:
    """A parameter whose gradient is `whole`, laid out."""
    from torch.distributed.tensor import distribute_tensor

    param = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placements))
    param.grad = distribute_tensor(whole.clone(), mesh, placements)
    return param


def measured(make: Any, wholes: list[Tensor], all_stages: list[Tensor], **options: Any) -> Any:
    """By order: the norms by ours and by torchtitan's, and the largest error of a clipped element.

    Args:
        make: makes the parameters of this rank, whose whole gradients are `wholes`.
        all_stages: the whole gradients of all stages.
        options: of the clip.
    """
    from torchtitan.distributed import utils as dist_utils

    found = {}
    for order in ORDERS:
        params, others = make(), make()
        norm = clip_grad_norm_(params, BOUND, order, foreach=True, **options)
        theirs = dist_utils.clip_grad_norm_(others, BOUND, order, foreach=True, **options)
        truth = total(all_stages, order)
        factor = min(1.0, BOUND / (truth + 1e-6))
        errors = []
        for param, whole, other in zip(params, wholes, others, strict=True):
            mine, native = (
                p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                for p in (param, other)
            )
            errors.append((mine - whole * factor).abs().max().item())
            errors.append((mine - native).abs().max().item())
        found[order] = type(norm), norm.item(), theirs.item(), truth, max(errors)
    return found


def fully_sharded(rank: int) -> Any:
    from torch.distributed.tensor import Shard

    (stage,) = whole_gradients(1)
    mesh = meshes(fsdp=RANKS)
    wholes = [stage["dense"], stage["bias"]]
    return measured(lambda: [on(mesh, each, Shard(0)) for each in wholes], wholes, wholes)


def pipeline_of_plain_tensors(rank: int) -> Any:
    mesh = meshes(pp=RANKS)
    stages = [list(stage.values()) for stage in whole_gradients(RANKS)]

    def make() -> list[nn.Parameter]:
        params = [nn.Parameter(torch.zeros_like(each)) for each in stages[rank]]
        for param, whole in zip(params, stages[rank], strict=True):
            param.grad = whole.clone()
        return params

    return measured(make, stages[rank], [each for stage in stages for each in stage], pp_mesh=mesh)


def pipeline_over_fully_sharded(rank: int) -> Any:
    from torch.distributed.tensor import Shard

    mesh = meshes(pp=2, fsdp=2)
    stages = [[stage["dense"], stage["bias"]] for stage in whole_gradients()]
    mine = stages[mesh.get_local_rank("pp")]
    return measured(
        lambda: [on(mesh["fsdp"], each, Shard(0)) for each in mine],
        mine,
        [each for stage in stages for each in stage],
        pp_mesh=mesh["pp"],
    )


def experts_on_a_mesh_of_their_own(rank: int) -> Any:
    from torch.distributed.tensor import Shard

    (stage,) = whole_gradients(1)
    dense, sparse = meshes(fsdp=RANKS), meshes(efsdp=2, ep=2)
    wholes = list(stage.values())

    def make() -> list[nn.Parameter]:
        return [
            on(dense, stage["dense"], Shard(0)),
            on(dense, stage["bias"], Shard(0)),
            on(sparse, stage["experts"], Shard(1), Shard(0)),
        ]

    return measured(make, wholes, wholes, ep_enabled=True)


def experts_in_a_pipeline(rank: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    dense, sparse = meshes(pp=2, fsdp=2), meshes(pp=2, ep=2)
    stages = whole_gradients()
    place = dense.get_local_rank("pp")
    stage = stages[place]
    # The second stage has no dense layer at all.
    names = ["dense", "bias", "experts"] if place == 0 else ["experts"]

    def make() -> list[nn.Parameter]:
        laid = {
            "dense": lambda: on(dense["fsdp"], stage["dense"], Shard(0)),
            "bias": lambda: on(dense["fsdp"], stage["bias"], Replicate()),
            "experts": lambda: on(sparse["ep"], stage["experts"], Shard(0)),
        }
        return [laid[name]() for name in names]

    every = [*stages[0].values(), stages[1]["experts"]]
    return measured(
        make, [stage[name] for name in names], every, pp_mesh=dense["pp"], ep_enabled=True
    )


def an_empty_shard(rank: int) -> Any:
    """Two rows over four ranks; torchtitan's own cannot take the largest element there."""
    from torch.distributed.tensor import Shard

    whole = torch.tensor([[3.0, -4.0], [0.0, 12.0]])
    mesh = meshes(fsdp=RANKS)
    return [clip_grad_norm_([on(mesh, whole, Shard(0))], 1.0, p).item() for p in ORDERS]


def a_stage_without_gradients(rank: int) -> Any:
    """The first of two stages is frozen."""
    from torch.distributed.tensor import Shard

    mesh = meshes(pp=2, fsdp=2)
    whole = whole_gradients(1)[0]["dense"]
    params = [on(mesh["fsdp"], whole, Shard(0))]
    if mesh.get_local_rank("pp") == 0:
        params[0].grad = None
    norm = clip_grad_norm_(params, math.inf, pp_mesh=mesh["pp"])
    return norm.item(), total([whole], 2.0)


def not_finite(rank: int) -> Any:
    """One NaN in the second stage: every rank has a NaN for a norm, and its gradients as before."""
    mesh = meshes(pp=RANKS)
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), math.nan if rank == 1 else 3.0)
    before = param.grad.clone()
    norm = clip_grad_norm_([param], BOUND, pp_mesh=mesh)
    same = torch.equal(param.grad.nan_to_num(), before.nan_to_num())
    try:
        clip_grad_norm_([param], BOUND, error_if_nonfinite=True, pp_mesh=mesh)
    except RuntimeError as error:
        return norm.item(), same, str(error)
    return norm.item(), same, ""


def refused(rank: int) -> Any:
    said = []
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    for options in ({"ep_enabled": True}, {"pp_mesh": meshes(pp=2, fsdp=2)}):
        try:
            clip_grad_norm_(plain, 1.0, **options)
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


MEASURED = [
    fully_sharded,
    pipeline_of_plain_tensors,
    pipeline_over_fully_sharded,
    experts_on_a_mesh_of_their_own,
    experts_in_a_pipeline,
]


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    programs = [*MEASURED, an_empty_shard, a_stage_without_gradients, not_finite, refused]
    return run_all(programs, tmp_path_factory.mktemp("ranks"), ranks=RANKS)


def test_the_signature_is_torchtitans():
    from torchtitan.distributed import utils as dist_utils

    theirs = inspect.signature(inspect.unwrap(dist_utils.clip_grad_norm_)).parameters
    ours = inspect.signature(inspect.unwrap(clip_grad_norm_)).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


@pytest.mark.parametrize("program", MEASURED, ids=lambda program: program.__name__)
def test_norms_and_clipped_gradients_are_those_of_one_process(program, returned):
    for found in returned[program.__name__]:
        assert list(found) == list(ORDERS)
        for order, (kind, norm, theirs, truth, error) in found.items():
            assert kind is Tensor
            assert norm == pytest.approx(truth, rel=1e-6), order
            assert theirs == pytest.approx(truth, rel=1e-5), order
            assert error < 1e-6, order
        assert found == {
            order: returned[program.__name__][0][order][:4] + found[order][4:] for order in ORDERS
        }


def test_a_rank_without_elements_takes_part(returned):
    for norms in returned["an_empty_shard"]:
        assert norms == pytest.approx([19.0, 13.0, 12.207057, 12.0], rel=1e-6)


def test_a_stage_without_gradients_takes_part(returned):
    for norm, truth in returned["a_stage_without_gradients"]:
        assert norm == pytest.approx(truth, rel=1e-6)


def test_a_nan_in_one_stage_is_known_to_all_and_spreads_to_none(returned):
    for norm, same, said in returned["not_finite"]:
        assert math.isnan(norm)
        assert same
        assert "non-finite" in said


def test_what_nothing_says_is_refused(returned):
    for plain, mesh in returned["refused"]:
        assert plain.startswith("TypeError: with ep_enabled=True every parameter must be a DTensor")
        assert "parameters[0] of shape (3,) is a Parameter" in plain
        assert mesh.startswith("ValueError: pp_mesh must be the mesh of the pipeline's stages")


def test_in_one_process_it_is_the_plain_clip():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(param, 1.0).item() == 5.0
    assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_(param, -1.0)
