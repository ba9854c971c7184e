"""Four real processes, DTensors on parts of them: the drop-in takes each tensor over its own mesh,
a control takes what is known to be one model, and what is not known is refused on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradilocks
from gradilocks.errors import GradilocksError
from tests.ranks.rank_programs import run_all

Returned = dict[str, list[Any]]

ORDERS = (1.0, 2.0, 3.0, math.inf)


def _programs() -> list[Callable[[int], Any]]:
    return [
        tensor_parallel_inside_data_parallel,
        a_norm_outside_the_plan,
        a_scaler_over_fsdp2,
        a_control_over_fsdp2,
        experts_on_a_mesh_of_their_own,
        half_of_the_ranks,
        a_mesh_seen_from_outside,
        two_models,
        two_models_under_controls,
        shards_of_pipeline_stages,
        stages_of_unequal_length,
        copies_beside_shards,
        experts_beside_a_router,
        experts_whose_gradients_come_late,
        experts_that_look_like_copies,
        one_expert_among_many_copies,
        copies_but_for_rounding,
        parts_that_show_themselves_later,
        copies_are_looked_at_until_all_are_known,
        experts_on_some_ranks_only,
        unlike_ranks,
        a_mesh_of_two_dimensions,
        a_mesh_without_a_group_of_its_own,
        uneven_and_empty_shards,
        a_nan_on_each_rank_in_turn,
        an_overflow_by_unscaling,
        a_group_beside_the_meshes,
        a_group_without_this_rank,
        headroom_of_distributed_gradients,
        headroom_beside_copies,
        headroom_of_two_models,
        headroom_of_a_rank_without_gradients,
        gradients_of_two_widths,
        one_rank_refuses,
        a_clip_policy_in_a_scaler,
        a_scaler_clips_each_tensor_over_its_own_mesh,
        the_same_parameters_in_another_order,
        fully_sharded_plain_tensors,
        each_tensor_on_part_of_the_ranks,
        how_often_ranks_meet,
        a_foreign_gradient,
        gradients_that_lie_otherwise,
        what_lies_otherwise_in_the_state,
        copies_whose_gradients_are_cut,
        orders_that_mean_nothing,
    ]


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    """What each of four ranks returned from every program below."""
    return run_all(_programs(), tmp_path_factory.mktemp("meshes"), ranks=4)


def _mesh(shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("all",)) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _on(mesh: Any, values: list[float], *placements: Any) -> nn.Parameter:
    """A parameter of zeros on `mesh` whose gradient is `values`, the first rank's to all."""
    from torch.distributed.tensor import distribute_tensor

    param = nn.Parameter(distribute_tensor(torch.zeros(len(values)), mesh, placements))
    param.grad = distribute_tensor(torch.tensor(values), mesh, placements)
    return param


def _plain(values: list[float]) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(len(values)))
    param.grad = torch.tensor(values)
    return param


def _norms(params: list[nn.Parameter]) -> list[list[float]]:
    """The norm of every order, by both functions of the drop-in."""
    grads = [param.grad for param in params]
    return [
        [
            gradilocks.clip_grad_norm_(params, math.inf, order).item(),
            gradilocks.get_total_norm(grads, order).item(),  # type: ignore[arg-type]
        ]
        for order in ORDERS
    ]


def _expected(values: list[float]) -> list[list[float]]:
    whole = torch.tensor(values, dtype=torch.float64)
    norms = [torch.linalg.vector_norm(whole, order).item() for order in ORDERS]
    return [[norm, norm] for norm in norms]


def _close(found: list[list[float]], values: list[float]) -> bool:
    together = zip(itertools.chain(*found), itertools.chain(*_expected(values)), strict=True)
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in together)


def _control_norm(params: list[nn.Parameter], **given: Any) -> float:
    control = gradilocks.GradientControl(
        torch.optim.SGD(params, lr=0.0), scale=None, clip=1e9, **given
    )
    return control.step().norm


def _refusal(act: Callable[[], object]) -> str:
    """What is said when it is refused; '' if it is not."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def _local(param: nn.Parameter) -> list[float]:
    tensor: Any = param
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.detach().tolist()  # type: ignore[no-any-return]


# Tensor parallel inside data parallel.


def tensor_parallel_inside_data_parallel(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    mesh = _mesh((2, 2), ("dp", "tp"))
    tp = mesh["tp"]
    param = _on(tp, [3.0, 4.0], Shard(0))
    found: dict[str, Any] = {"norms": _norms([param])}
    found["refused"] = _refusal(lambda: _control_norm([param]))
    found["told"] = [
        _control_norm([param], process_group=tp.get_group()),
        _control_norm([param], mesh=mesh),
        _control_norm([param], mesh=tp),
    ]
    gradilocks.clip_grad_norm_([param], 1.0)
    found["clipped"] = param.grad.to_local().tolist()  # type: ignore[union-attr]
    return found


def test_tensor_parallel_ranks_inside_data_parallel_ones_count_their_own_mesh(
    returned: Returned,
) -> None:
    for rank, found in enumerate(returned["tensor_parallel_inside_data_parallel"]):
        assert _close(found["norms"], [3.0, 4.0])
        assert found["clipped"] == pytest.approx([(0.6, 0.8)[rank % 2]], rel=1e-5)
        assert found["told"] == [5.0] * 3


def test_a_control_says_what_it_does_not_know_of_a_mesh_inside_the_world(
    returned: Returned,
) -> None:
    for rank, found in enumerate(returned["tensor_parallel_inside_data_parallel"]):
        ranks = [0, 1] if rank < 2 else [2, 3]
        assert (
            f"param_groups[0]['params'][0] is a DTensor on the mesh (tp) of ranks {ranks}"
            in (found["refused"])
        )
        assert "and 4 ranks run" in found["refused"]
        assert "GradientControl(..., mesh=world_mesh)" in found["refused"]
        assert 'distinct=("pp",)' in found["refused"]


# FSDP2 over tensor parallel, by torch's own functions.


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))  # type: ignore[no-any-return]


def _block() -> _Block:
    torch.manual_seed(3)
    return _Block()


def _loss(model: nn.Module) -> Tensor:
    data = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
    return model(data).square().sum() * 10.0  # type: ignore[no-any-return]


def a_norm_outside_the_plan(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    whole, parts = _block(), _block()
    mesh = _mesh((2, 2), ("dp", "tp"))
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(parts, mesh["tp"], plan)
    fully_shard(parts, mesh=mesh["dp"])
    _loss(whole).backward()
    _loss(parts).backward()
    return {
        "norms": _norms(list(parts.parameters())),
        "whole": [_torch_norm(list(whole.parameters()), order) for order in ORDERS],
        "refused": _refusal(  # When it is made: all ranks have a slice of the same mesh.
            lambda: gradilocks.GradientControl(
                torch.optim.SGD(parts.parameters(), lr=1.0), model=parts, scale=None, clip=1.0
            )
        ),
        "told": _control_norm(list(parts.parameters()), mesh=mesh),
    }


def _torch_norm(params: list[nn.Parameter], order: float) -> float:
    grads = torch.cat([param.grad.flatten() for param in params])  # type: ignore[union-attr]
    return torch.linalg.vector_norm(grads.double(), order).item()


def test_a_layer_norm_outside_the_tensor_parallel_plan_counts_once(returned: Returned) -> None:
    for found in returned["a_norm_outside_the_plan"]:
        for pair, expected in zip(found["norms"], found["whole"], strict=True):
            assert pair == pytest.approx([expected] * 2, rel=1e-4)


def test_a_control_refuses_parameters_on_different_ranks(returned: Returned) -> None:
    for rank, found in enumerate(returned["a_norm_outside_the_plan"]):
        assert "norm.weight is a DTensor on the mesh (dp) of ranks" in found["refused"]
        assert str([rank % 2, rank % 2 + 2]) in found["refused"]
        assert "[0, 1, 2, 3]" in found["refused"]
        assert "GradientControl(..., mesh=world_mesh)" in found["refused"]
        assert found["told"] == pytest.approx(found["whole"][ORDERS.index(2.0)], rel=1e-6)


def a_scaler_over_fsdp2(rank: int) -> list[list[float]]:
    """torch's recipe for FSDP2, with an overflow on one rank, beside the whole model."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for shards in (True, False):
        model = _block()
        if shards:
            fully_shard(model, mesh=_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = gradilocks.GradScaler("cpu", init_scale=1024.0)
        trail: list[float] = []
        for step in range(4):
            scaler.scale(_loss(model)).backward()
            if step == 1:
                bias: Any = model.down.bias.grad
                if not shards:
                    bias.fill_(math.inf)
                elif rank == 3:
                    bias.to_local().fill_(math.inf)
            if step != 3:
                scaler.unscale_(optimizer)
                trail.append(gradilocks.clip_grad_norm_(model.parameters(), 1.0).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trail.append(scaler.get_scale())
        trail.append(_loss(model).item())
        found.append(trail)
    return found


def test_a_scaler_over_fsdp2_trains_as_over_the_whole_model(returned: Returned) -> None:
    for shards, whole in returned["a_scaler_over_fsdp2"]:
        assert shards[2] == whole[2] == math.inf
        assert shards == pytest.approx(whole, rel=1e-3)


def a_control_over_fsdp2(rank: int) -> list[list[float]]:
    """Ten steps with an overflow on one rank, sharded, sharded with copies, and whole."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for mesh in (_mesh(), _mesh((2, 2), ("replicate", "shard")), None):
        model = _block()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        control = gradilocks.GradientControl(optimizer, model=model, clip=1.0)
        trail: list[float] = []
        for step in range(10):
            control.backward(_loss(model))
            if step == 4:
                bias: Any = model.down.bias.grad
                if mesh is None:
                    bias.fill_(math.inf)
                elif rank == 1:
                    bias.to_local().fill_(math.inf)
            outcome = control.step()
            trail += [outcome.norm, float(outcome.skipped), control.scale]
            control.zero_grad()
        trail.append(_loss(model).item())
        found.append(trail)
    return found


def test_a_control_over_fsdp2_trains_as_over_the_whole_model(returned: Returned) -> None:
    for *sharded, whole in returned["a_control_over_fsdp2"]:
        assert whole[12:15] == [math.inf, 1.0, 2.0**15]
        for found in sharded:
            assert found == pytest.approx(whole, rel=1e-3)


# Experts.


def experts_on_a_mesh_of_their_own(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard

    mesh = _mesh((2, 2), ("dp", "ep"))
    dense = _on(_mesh(), [12.0], Replicate())
    experts = _on(mesh["ep"], [3.0, 4.0], Shard(0))
    return {
        "norms": _norms([dense, experts]),
        "refused": _refusal(lambda: _control_norm([dense, experts])),
        "told": _control_norm([dense, experts], mesh=mesh),
    }


def test_experts_count_over_their_own_mesh_and_dense_tensors_over_theirs(
    returned: Returned,
) -> None:
    for found in returned["experts_on_a_mesh_of_their_own"]:
        assert _close(found["norms"], [12.0, 3.0, 4.0])
        assert "param_groups[0]['params'][1] is a DTensor on the mesh (ep)" in found["refused"]
        assert found["told"] == 13.0


def experts_on_some_ranks_only(rank: int) -> dict[str, Any]:
    """Ranks 2 and 3 have no experts and cannot see that others do."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    stripe = DeviceMesh("cpu", [0, 1])  # Made by all ranks, as torch demands.
    params = [_on(_mesh(), [12.0], Replicate())]
    if rank < 2:
        params.append(_on(stripe, [3.0, 4.0], Shard(0)))
    optimizer = torch.optim.SGD(params, lr=1.0)
    control = gradilocks.GradientControl(optimizer, scale=None, clip=1.0)
    return {
        "norms": _norms(params),
        "refused": _refusal(control.step),
        "again": _refusal(control.step),
        "params": [_local(param) for param in params],
    }


def test_ranks_without_experts_refuse_with_the_others(returned: Returned) -> None:
    for rank, found in enumerate(returned["experts_on_some_ranks_only"]):
        assert found["again"] == found["refused"]
        assert ("is a DTensor on the mesh of ranks [0, 1]" in found["refused"]) == (rank < 2)
        assert ("another rank has a DTensor on other ranks" in found["refused"]) == (rank > 1)
        assert all(not any(values) for values in found["params"])
        assert _close(found["norms"], [12.0, 3.0, 4.0] if rank < 2 else [12.0])


def experts_beside_a_router(rank: int) -> dict[str, Any]:
    """Plain experts, another one on every rank; nothing tells them from copies but the numbers."""
    from torch.distributed.tensor import Replicate

    router, expert = _on(_mesh(), [12.0], Replicate()), _plain([[0.0, 3.0, 4.0, 0.0][rank]])
    unscaled = gradilocks.GradientControl(
        torch.optim.AdamW([router, expert], lr=1.0), scale=None, clip=1.0
    )
    found: dict[str, Any] = {
        "refused": [_refusal(unscaled.step), _refusal(unscaled.step)],
        "params": [_local(router), _local(expert)],
    }
    expert.grad = torch.tensor([5.0])  # Now they are copies, and the control goes on.
    found["norm"] = unscaled.step().norm
    return found


def test_plain_experts_beside_a_replicated_router_are_refused_and_nothing_moves(
    returned: Returned,
) -> None:
    for found in returned["experts_beside_a_router"]:
        for refused in found["refused"]:
            assert "their norms are [0, 3, 4, 0] on ranks [0, 1, 2, 3]" in refused
            assert "Plain on this rank: param_groups[0]['params'][1]" in refused
        assert found["params"] == [[0.0], [0.0]]
        assert found["norm"] == 13.0


def experts_whose_gradients_come_late(rank: int) -> list[str]:
    """A step without a gradient, one with zeros, one with a NaN: none shows copies."""
    from torch.distributed.tensor import Replicate

    router, expert = _on(_mesh(), [12.0], Replicate()), _plain([0.0])
    expert.grad = None
    control = gradilocks.GradientControl(
        torch.optim.SGD([router, expert], lr=0.0), scale=None, clip=1.0
    )
    told = []
    for value in (None, 0.0, math.nan, float(rank)):
        expert.grad = None if value is None else torch.tensor([value])
        told.append(_refusal(control.step))
    return told


def test_plain_tensors_are_looked_at_until_they_have_shown_a_gradient(returned: Returned) -> None:
    for *before, told in returned["experts_whose_gradients_come_late"]:
        assert before == ["", "", ""]
        assert "their norms are [0, 1, 2, 3]" in told


def _beside_shards(plain: list[nn.Parameter], lr: float = 1.0) -> gradilocks.GradientControl:
    """A control over plain parameters and a distributed one whose gradient is zero."""
    from torch.distributed.tensor import Shard

    params = [_on(_mesh(), [0.0] * 4, Shard(0)), *plain]
    return gradilocks.GradientControl(torch.optim.SGD(params, lr=lr), scale=None, clip=1e9)


def _having(grad: Tensor | None, like: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(like))
    param.grad = grad
    return param


def _own(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def experts_that_look_like_copies(rank: int) -> dict[str, tuple[str, bool]]:
    """Gradients whose norms agree, or that are there on some ranks only."""
    first, own = torch.tensor([3.0, 4.0]), _own(rank, 300_000)
    unit = torch.nn.functional.one_hot(torch.tensor(rank), 8).float()
    zero = torch.zeros(2)
    plain: dict[str, list[nn.Parameter]] = {
        "turned round": [_having(first if rank % 2 else first.flip(0), zero)],
        "of the other sign": [_having(first if rank else -first, zero)],
        "of one law": [_having(own, own)],
        "in bfloat16": [_having(own.bfloat16(), own.bfloat16())],
        "in float64 beyond float32": [_having(own.double() * 1e200, own.double())],
        "of complex numbers": [_having(torch.view_as_complex(own.view(-1, 2)), own[::2] * 1j)],
        "of sparse rows": [_having(_rows(own), torch.zeros(10, 30_000))],
        "with one element each": [_having(unit, unit)],
        "of another size": [_having(torch.tensor([3.0 + rank]), torch.zeros(1))],
        "zero on three": [_having(first * (rank == 2), zero)],
        "none on three": [_having(first if rank == 2 else None, zero)],
        "in another order": [_having(first, zero), _having(-first, zero)][:: 1 if rank else -1],
    }
    found = {}
    for name, params in plain.items():
        refused = _refusal(_beside_shards(params).step)
        found[name] = refused, not any(bool(param.any()) for param in params)
    return found


def _rows(values: Tensor) -> Tensor:
    rows = torch.arange(10).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, values.view(10, -1), (10, 30_000), check_invariants=False)


def test_parts_are_told_from_copies_whatever_their_norms_are(returned: Returned) -> None:
    for found in returned["experts_that_look_like_copies"]:
        for name, (refused, unmoved) in found.items():
            assert "their gradients are not the same" in refused, name
            assert unmoved, name


def one_expert_among_many_copies(rank: int) -> list[str]:
    """200 tensors: the one that differs must not drown in what rounding is allowed."""
    told = []
    for odd in (0, 123):
        params = []
        for number in range(200):
            grad = _own(1000 * rank if number == odd else number, 64)
            params.append(_having(grad.bfloat16(), grad.bfloat16()))
        told.append(_refusal(_beside_shards(params).step))
    return told


def test_one_part_among_many_copies_is_found(returned: Returned) -> None:
    for told in returned["one_expert_among_many_copies"]:
        assert all("their gradients are not the same" in each for each in told)


def copies_but_for_rounding(rank: int) -> list[Any]:
    """200 bfloat16 and 3 float32 copies, a tenth of whose elements were rounded the other way."""
    params, exact = [], 0.0
    for number in range(203):
        dtype = torch.bfloat16 if number < 200 else torch.float32
        grad = _own(number, 500, dtype)
        exact += grad.double().square().sum().item()
        turned = _own(5000 + 300 * rank + number, 500) > 1.28
        other = torch.nextafter(grad, torch.full_like(grad, math.inf))
        params.append(_having(torch.where(turned, other, grad), grad))
    control = _beside_shards(params, lr=0.0)
    return [[control.step().norm for _ in range(2)], math.sqrt(exact)]


def test_copies_that_differ_by_rounding_count_once(returned: Returned) -> None:
    for norms, expected in returned["copies_but_for_rounding"]:
        assert norms == pytest.approx([expected] * 2, rel=1e-3)


def parts_that_show_themselves_later(rank: int) -> dict[str, list[str]]:
    """A router's copy is there from the start; the experts beside it show nothing at first."""
    found = {}
    mine = torch.tensor([[3.0, 400.0, 5.0, 6.0][rank]])
    for name in ("zero", "none", "frozen", "added", "none, after many steps"):
        router, expert = _plain([12.0]), _plain([0.0])
        if name != "zero":
            expert.grad = None
        expert.requires_grad_(name != "frozen")
        control = _beside_shards([router] if name == "added" else [router, expert])
        for _ in range(38 if "many" in name else 0):
            control.step()
        told = [_refusal(control.step), _refusal(control.step)]
        if name == "added":
            control._optimizers[0].add_param_group({"params": [expert]})
        expert.requires_grad_(True)
        before = router.item()
        expert.grad = mine
        told += [_refusal(control.step), _refusal(control.step)]
        assert (router.item(), expert.item()) == (before, 0.0)
        expert.grad = torch.tensor([5.0])
        told.append(f"{control.step().norm:g}")
        found[name] = told
    return found


def test_parts_that_show_a_gradient_later_are_refused_then(returned: Returned) -> None:
    for found in returned["parts_that_show_themselves_later"]:
        for name, (*before, first, again, norm) in found.items():
            assert before == ["", ""], name
            assert first == again, name
            assert "their gradients are not the same" in first, name
            assert norm == "13", name


def copies_are_looked_at_until_all_are_known(rank: int) -> list[bool]:
    """At which steps the host reads what the ranks say: until the last copy has a gradient."""
    from gradilocks.ranks.agreement import RankAgreement

    router, late = _plain([12.0]), _plain([0.0])
    control = _beside_shards([router, late], lr=0.0)
    looked: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        real = RankAgreement.check

        def noted(*given: Any, **named: Any) -> None:
            looked.append(True)
            real(*given, **named)

        patch.setattr(RankAgreement, "check", noted)
        seen = []
        for value in (0.0, math.nan, 5.0, 7.0, 0.0):
            late.grad = torch.tensor([value])
            control.step()
            seen.append(bool(looked))
            looked.clear()
    # Compared, and yet nothing weak refers to it: torch would refuse.
    torch.utils.swap_tensors(router, nn.Parameter(torch.zeros(1)))
    return seen


def test_the_host_waits_until_every_copy_has_shown_a_gradient_and_never_again(
    returned: Returned,
) -> None:
    for seen in returned["copies_are_looked_at_until_all_are_known"]:
        assert seen == [True, True, True, False, False]


def copies_beside_shards(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    params = [_on(_mesh(), [1.0, 2.0, 2.0, 4.0], Shard(0)), _plain([12.0])]
    return {
        "norms": _norms(params),
        "control": [
            gradilocks.GradientControl(
                torch.optim.SGD(params, lr=0.0),
                scale=None,
                clip=gradilocks.ClipByNorm(1e9, order=order),
            )
            .step()
            .norm
            for order in ORDERS
        ],
    }


def test_a_plain_tensor_that_every_rank_holds_counts_once(returned: Returned) -> None:
    values = [1.0, 2.0, 2.0, 4.0, 12.0]
    for found in returned["copies_beside_shards"]:
        assert _close(found["norms"], values)
        assert _close([[norm, norm] for norm in found["control"]], values)


# Some of the ranks.


def half_of_the_ranks(rank: int) -> dict[str, Any] | None:
    """Ranks 2 and 3 do nothing at all, and nobody waits for them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    mesh = DeviceMesh("cpu", [0, 1])
    if rank > 1:
        return None
    param = _on(mesh, [3.0, 4.0], Shard(0))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = gradilocks.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if rank == 1:
        param.grad.to_local().fill_(math.nan)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    param.grad = torch.ones_like(param) * 3.0 + (rank == 1)
    return {
        "scale": scaler.get_scale(),
        "param": _local(param),
        "norms": _norms([param]),
        "refused": _refusal(lambda: _control_norm([param])),
        "told": _control_norm([param], process_group=mesh.get_group()),
    }


def test_nobody_waits_for_ranks_that_hold_nothing(returned: Returned) -> None:
    first, second, *idle = returned["half_of_the_ranks"]
    assert idle == [None, None]
    for found in (first, second):
        assert (found["scale"], found["param"]) == (2.0, [0.0])
        assert _close(found["norms"], [3.0, 4.0])
        assert "ranks [0, 1], and 4 ranks run" in found["refused"]
        assert found["told"] == 5.0


def a_mesh_seen_from_outside(rank: int) -> dict[str, Any]:
    """All ranks run the same lines; two of them are not on the mesh and hold nothing."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", [0, 1])

    def made(value: float) -> Any:
        local = torch.full((1 if rank < 2 else 0,), value)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(2,), stride=(1,))

    param = nn.Parameter(made(0.0))
    param.grad = made([3.0, 4.0, 0.0, 0.0][rank])
    return {
        "norm": gradilocks.clip_grad_norm_([param, _plain([12.0])], 1e9).item(),
        "refused": _refusal(lambda: _control_norm([param])),
    }


def test_a_rank_outside_the_mesh_measures_what_it_holds(returned: Returned) -> None:
    found = returned["a_mesh_seen_from_outside"]
    assert [each["norm"] for each in found] == [13.0, 13.0, 12.0, 12.0]
    assert all("on the mesh of ranks [0, 1]" in each["refused"] for each in found)


def _halves() -> Any:
    """A mesh for ranks 0 and 1, and another for 2 and 3."""
    return _mesh((2, 2), ("model", "part"))["part"]


def two_models(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    param = _on(_halves(), [3.0, 4.0] if rank < 2 else [6.0, 8.0], Shard(0))
    return {"norms": _norms([param]), "refused": _refusal(lambda: _control_norm([param]))}


def test_two_models_on_two_halves_have_two_norms(returned: Returned) -> None:
    for rank, found in enumerate(returned["two_models"]):
        assert _close(found["norms"], [3.0, 4.0] if rank < 2 else [6.0, 8.0])
        assert "is not known" in found["refused"]


def two_models_under_controls(rank: int) -> list[Any]:
    """Told which ranks hold a model: one may step while the other skips."""
    from torch.distributed.tensor import Shard

    mesh = _halves()
    param = _on(mesh, [3.0, 4.0] if rank < 2 else [6.0, 8.0], Shard(0))
    control = gradilocks.GradientControl(
        torch.optim.SGD([param], lr=1.0), scale=None, clip=1.0, process_group=mesh.get_group()
    )
    norm = control.step().norm
    if rank == 3:
        param.grad.to_local().fill_(math.inf)  # type: ignore[union-attr]
    return [norm, control.step().skipped]


def test_two_controls_on_two_halves_decide_apart(returned: Returned) -> None:
    assert returned["two_models_under_controls"] == [
        [5.0, False],
        [5.0, False],
        [10.0, True],
        [10.0, True],
    ]


def shards_of_pipeline_stages(rank: int) -> dict[str, Any]:
    """Stages of 3 and of 4, each sharded over two ranks; the norm of the model is 5."""
    from torch.distributed.tensor import Shard

    mesh = _mesh((2, 2), ("pp", "dp"))
    param = _on(mesh["dp"], [3.0, 0.0] if rank < 2 else [4.0, 0.0], Shard(0))
    return {
        "refused": _refusal(lambda: _control_norm([param])),
        "told": [
            _control_norm([param], process_group=mesh["pp"].get_group()),
            _control_norm([param], process_group=dist.group.WORLD),
            _control_norm([param], mesh=mesh, distinct=("pp",)),
            _control_norm([param], mesh=mesh, distinct="pp"),
        ],
    }


def test_pipeline_stages_of_shards_count_over_both_dimensions(returned: Returned) -> None:
    for rank, found in enumerate(returned["shards_of_pipeline_stages"]):
        mine = "on the mesh (dp) of ranks " + ("[0, 1]" if rank < 2 else "[2, 3]")
        assert f"{mine}, and 4 ranks run" in found["refused"]
        assert 'mesh=world_mesh, distinct=("pp",)' in found["refused"]
        assert found["told"] == [5.0] * 4


def stages_of_unequal_length(rank: int) -> dict[str, Any]:
    """Two tensors in the first stage, one in the second, bounded apart from each other."""
    from torch.distributed.tensor import Shard

    mesh = _mesh((2, 2), ("pp", "dp"))
    count = 2 if rank < 2 else 1
    found: dict[str, Any] = {"refused": []}

    def sharded() -> list[nn.Parameter]:
        return [_on(mesh["dp"], [3.0, 4.0], Shard(0)) for _ in range(count)]

    for policy in (gradilocks.ClipPerTensor(1.0), gradilocks.AdaGC()):
        plain = [_plain([3.0]) for _ in range(count)]
        for mine, group in ((sharded(), None), (plain, dist.group.WORLD)):
            found["refused"].append(_refusal(lambda: _apart(mine, policy, process_group=group)))  # noqa: B023
    for how, told in {
        "group": {"process_group": mesh["pp"].get_group()},
        "mesh": {"mesh": mesh, "distinct": ("pp",)},
    }.items():
        params = sharded()
        _apart(params, gradilocks.ClipPerTensor(1.0), **told)
        found[how] = [_local(param) for param in params]
        params = [_plain([3.0 * (1 + rank // 2)]) for _ in range(count)]
        if how == "mesh":
            _apart(params, gradilocks.ClipPerTensor(1.0), **told)
            found["plain"] = [_local(param) for param in params]
    # Two plain tensors here and one there, beside a distributed one: they cannot be copies.
    beside = [_on(_mesh(), [1.0] * 4, Shard(0)), *(_plain([3.0]) for _ in range(count))]
    found["beside"] = _refusal(lambda: _apart(beside, gradilocks.ClipPerTensor(1.0)))
    return found


def _apart(params: list[nn.Parameter], policy: Any, **told: Any) -> None:
    gradilocks.GradientControl(
        torch.optim.SGD(params, lr=1.0), scale=None, clip=policy, **told
    ).step()


def test_stages_may_list_different_numbers_of_parameters_and_nothing_aborts(
    returned: Returned,
) -> None:
    for rank, found in enumerate(returned["stages_of_unequal_length"]):
        assert all("not known" in each for each in found["refused"])
        count = 2 if rank < 2 else 1
        for how in ("group", "mesh"):
            assert found[how] == [pytest.approx([(-0.6, -0.8)[rank % 2]], rel=1e-5)] * count
        assert found["plain"] == [pytest.approx([-1.0], rel=1e-5)] * count
        assert "plain tensors beside DTensors" in found["beside"]


def unlike_ranks(rank: int) -> str:
    """DTensors in one control and plain tensors in the other, under one group."""
    from torch.distributed.tensor import Shard

    param = _on(_mesh(), [1.0] * 4, Shard(0)) if rank < 2 else None
    if param is None:
        _on(_mesh(), [1.0] * 4, Shard(0))  # Distributing is a collective; it is not controlled.
        param = _plain([1.0])
    return _refusal(lambda: _control_norm([param], process_group=dist.group.WORLD))


def test_ranks_that_hold_parts_in_different_ways_refuse_together(returned: Returned) -> None:
    for told in returned["unlike_ranks"]:
        assert "some ranks of process_group= hold DTensors and others plain tensors" in told


# Meshes of several dimensions.


def a_mesh_of_two_dimensions(rank: int) -> dict[str, Any]:
    """Two dimensions that are a part of the world: the line in the refusal works as it stands."""
    from torch.distributed.tensor import Replicate, Shard

    world_mesh = _mesh((2, 1, 2), ("dp", "sp", "tp"))
    mesh = world_mesh["sp", "tp"]
    param = _on(mesh, [3.0, 4.0], Replicate(), Shard(0))
    refused = _refusal(lambda: _control_norm([param]))
    (optimizer,) = [torch.optim.SGD([param], lr=0.0)]
    line = refused.split("GradientControl(..., ")[1].split(")")[0]
    control = eval(  # The line that the message shows.
        f"gradilocks.GradientControl(optimizer, scale=None, {line})",
        {"gradilocks": gradilocks, "optimizer": optimizer, "world_mesh": world_mesh},
    )
    return {
        "norms": _norms([param]),
        "line": line,
        "told": [
            control.step().norm,
            _control_norm([param], process_group=mesh._flatten().get_group()),
        ],
    }


def test_the_line_that_the_refusal_shows_is_the_way_out(returned: Returned) -> None:
    for found in returned["a_mesh_of_two_dimensions"]:
        assert _close(found["norms"], [3.0, 4.0])
        assert found["line"] == "mesh=world_mesh"
        assert found["told"] == [5.0, 5.0]


def _grid(mesh: Any) -> tuple[list[nn.Parameter], list[float]]:
    """Placed in every way that two dimensions have, and all elements once."""
    from torch.distributed.tensor import Replicate, Shard

    placed = [
        _on(mesh, [1.0, 2.0, 3.0, 4.0], Shard(0), Shard(0)),
        _on(mesh, [5.0, 6.0], Shard(0), Replicate()),
        _on(mesh, [7.0, 8.0, 9.0], Replicate(), Shard(0)),
        _on(mesh, [10.0], Replicate(), Replicate()),
    ]
    return placed, [float(number) for number in range(1, 11)]


def a_mesh_without_a_group_of_its_own(rank: int) -> dict[str, Any]:
    """A group for all ranks of the mesh, and one for each dimension only."""
    from gradilocks.ranks import layout as ranks

    params, values = _grid(_mesh((2, 2), ("dp", "tp")))
    found: dict[str, Any] = {"values": values, "by one": _norms(params)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_kinds", lambda group: ["meta"] if group is None else [])
        (rank_group,) = ranks.rank_groups_of(params)
        found["groups"] = len(rank_group.groups)
        found["by two"] = _norms(params)
    found["control"] = _control_norm(params)
    return found


def test_a_mesh_is_measured_by_one_group_or_dimension_by_dimension(returned: Returned) -> None:
    for found in returned["a_mesh_without_a_group_of_its_own"]:
        assert found["groups"] == 2
        assert _close(found["by one"], found["values"])
        assert _close(found["by two"], found["values"])
        assert found["control"] == pytest.approx(math.sqrt(385.0), rel=1e-6)


def uneven_and_empty_shards(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    params = [_on(_mesh(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], Shard(0)), _on(_mesh(), [7.0], Shard(0))]
    found = {"norms": _norms(params), "control": _control_norm(params)}
    if rank:
        params[0].grad = params[1].grad = None
    found["one has gradients"] = gradilocks.clip_grad_norm_(params, 1e9).item()
    return found


def test_uneven_and_empty_shards_and_ranks_without_gradients_take_part(returned: Returned) -> None:
    for found in returned["uneven_and_empty_shards"]:
        assert _close(found["norms"], [float(number) for number in range(1, 8)])
        assert found["control"] == pytest.approx(math.sqrt(140.0), rel=1e-6)
        assert found["one has gradients"] == pytest.approx(math.sqrt(1.0 + 4.0 + 49.0), rel=1e-6)


# The skip flag and the scale.


def a_nan_on_each_rank_in_turn(rank: int) -> list[Any]:
    """Rows and columns of a grid, and no mesh that has all ranks: one NaN still stops them all."""
    from torch.distributed.tensor import Shard

    mesh = _mesh((2, 2), ("dp", "tp"))
    seen = []
    for where, unscale in itertools.product(range(4), (False, True)):
        rows, columns = _on(mesh["tp"], [1.0, 2.0], Shard(0)), _on(mesh["dp"], [1.0, 2.0], Shard(0))
        optimizer = torch.optim.SGD([rows, columns], lr=1.0)
        scaler = gradilocks.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        if where == rank:
            columns.grad.to_local().fill_(math.nan)  # type: ignore[union-attr]
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.get_scale(), _local(rows), _local(columns)])
    return seen


def test_a_nan_on_any_rank_of_a_grid_stops_every_rank(returned: Returned) -> None:
    for seen in returned["a_nan_on_each_rank_in_turn"]:
        assert seen == [[2.0, [0.0], [0.0]]] * 8


def an_overflow_by_unscaling(rank: int) -> list[Any]:
    """Finite on all ranks; on rank 3 it is not once a scale below 1 has been divided out."""
    from torch.distributed.tensor import Shard

    seen = []
    for group in (None, dist.group.WORLD):
        param = _on(_mesh(), [1.0] * 4, Shard(0)) if group is None else _plain([1.0])
        optimizer = torch.optim.AdamW([param], lr=1.0, weight_decay=0.0, fused=True)
        scaler = gradilocks.GradScaler("cpu", init_scale=0.25, process_group=group)
        scaler.scale(torch.ones(()))
        local: Any = param.grad if group is not None else param.grad.to_local()  # type: ignore[union-attr]
        if rank == 3:
            local.fill_(3e38)
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.get_scale(), _local(param)])
    return seen


def test_ranks_skip_together_what_overflows_on_one_of_them_when_unscaled(
    returned: Returned,
) -> None:
    assert returned["an_overflow_by_unscaling"] == [[[0.125, [0.0]]] * 2] * 4


def a_group_beside_the_meshes(rank: int) -> list[float]:
    """Pipeline stages that are sharded: an Inf in one stops the stage that the group names too."""
    from torch.distributed.tensor import Shard

    mesh = _mesh((2, 2), ("pp", "dp"))
    param = _on(mesh["dp"], [1.0, 2.0], Shard(0))
    scaler = gradilocks.GradScaler("cpu", init_scale=4.0, process_group=mesh["pp"].get_group())
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(()))
    if rank == 3:
        param.grad.to_local().fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), *_local(param)]


def test_flags_travel_over_the_meshes_and_over_the_group_that_was_named(returned: Returned) -> None:
    assert returned["a_group_beside_the_meshes"] == [[2.0, 0.0]] * 4


def a_group_without_this_rank(rank: int) -> str:
    group = dist.new_group([0, 1])
    param = _plain([3.0 + rank])
    return _refusal(lambda: _control_norm([param], process_group=group))


def test_a_group_that_a_rank_is_not_in_is_refused_there_alone(returned: Returned) -> None:
    first, second, *others = returned["a_group_without_this_rank"]
    assert first == second == ""
    assert all("process_group= names ranks of which this one is none" in told for told in others)


def headroom_of_distributed_gradients(rank: int) -> list[Any]:
    """The largest gradient is on rank 1, and a NaN in rank 2's loss is no overflow for anybody."""
    from torch.distributed.tensor import Shard

    param = _on(_mesh(), [1.0] * 4, Shard(0))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler = gradilocks.GradScaler("cpu", policy=gradilocks.HeadroomScale())
    scales = []
    for step in range(4):
        scaler.scale(torch.tensor(math.nan if (step, rank) == (2, 2) else 1.0))
        size = scaler.get_scale() * (1.0 if rank == 1 else 2.0**-10)
        local = torch.full((1,), math.nan if step == 2 else size)
        param.grad = type(param.grad).from_local(local, _mesh(), [Shard(0)])  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_a_scaler_over_distributed_gradients_keeps_one_scale_on_all_ranks(
    returned: Returned,
) -> None:
    scales = returned["headroom_of_distributed_gradients"]
    assert scales == [scales[0]] * 4
    assert scales[0] == [scales[0][0]] * 4  # The broken loss has moved nobody's.


def headroom_beside_copies(rank: int) -> dict[str, list[float]]:
    """A mesh inside the world: what another copy's loss was, this one does not know."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh((2, 2), ("dp", "tp"))["tp"]
    policy = gradilocks.HeadroomScale()
    param = _on(mesh, [1.0, 1.0], Shard(0))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler = gradilocks.GradScaler("cpu", policy=policy)
    control = gradilocks.GradientControl(optimizer, scale=policy, process_group=mesh.get_group())
    found: dict[str, list[float]] = {"scaler": [], "control": []}

    def gradient(step: int, scale: float) -> Tensor:
        size = math.nan if step == 1 else scale * (1.0 if rank % 2 else 2.0**-10)
        return DTensor.from_local(torch.full((1,), size), mesh, [Shard(0)])

    for step in range(3):
        loss = torch.tensor(math.nan if (step, rank) == (1, 2) else 1.0, requires_grad=True)
        param.grad = None
        scaler.scale(loss)
        param.grad = gradient(step, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        found["scaler"].append(scaler.get_scale())
        param.grad = None
        control.scale_loss(loss)
        param.grad = gradient(step, control.scale)
        control.step()
        found["control"].append(control.scale)
    return found


def test_copies_of_a_model_keep_one_scale_though_their_losses_differ(returned: Returned) -> None:
    found = returned["headroom_beside_copies"]
    assert found == [found[0]] * 4


def headroom_of_two_models(rank: int) -> list[float]:
    """Each on a half of the ranks, all of which `mesh=` names: they hear of each other's losses."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = _halves()
    param = _on(mesh, [1.0, 1.0], Shard(0))
    control = gradilocks.GradientControl(
        torch.optim.SGD([param], lr=0.0), scale=gradilocks.HeadroomScale(), mesh=mesh
    )
    scales = []
    for step in range(4):
        # NaN in the loss of rank 2; in the other model an overflow, with a loss that is finite.
        spoiled = step == 1
        control.zero_grad()
        loss = torch.tensor(math.nan if spoiled and rank == 2 else 1.0, requires_grad=True)
        control.scale_loss(loss)
        size = math.nan if spoiled else control.scale
        param.grad = DTensor.from_local(torch.full((1,), size), mesh, [Shard(0)])
        control.step()
        scales.append(control.scale)
    return scales


def test_a_nan_in_a_loss_moves_no_scale_where_all_who_train_the_model_hear_of_it(
    returned: Returned,
) -> None:
    overflow, _, loss, other = returned["headroom_of_two_models"]
    assert returned["headroom_of_two_models"] == [overflow, overflow, loss, other]
    assert loss == other
    assert loss[1] == loss[0]
    assert overflow[1] < overflow[0]


def headroom_of_a_rank_without_gradients(rank: int) -> list[Any]:
    """The rank has nothing to tell of, and says so in numbers as wide as the others'."""
    from torch.distributed.tensor import Shard

    found = []
    for group in (None, dist.group.WORLD):
        param = _plain([1.0]) if group is not None else _on(_mesh(), [1.0] * 4, Shard(0))
        gradient, param.grad = param.grad, None
        control = gradilocks.GradientControl(
            torch.optim.SGD([param], lr=0.0), scale=gradilocks.HeadroomScale(), process_group=group
        )
        scales = []
        for _ in range(2):
            control.scale_loss(torch.ones((), requires_grad=True))
            param.grad = None if rank == 2 else gradient
            control.step()
            control.zero_grad()
            scales.append(control.scale)
        found.append(scales)
    return found


def test_headroom_is_agreed_on_with_ranks_that_have_no_gradients(returned: Returned) -> None:
    scales = returned["headroom_of_a_rank_without_gradients"]
    assert scales == [scales[0]] * 4


def gradients_of_two_widths(rank: int) -> dict[str, Any]:
    """A scale below 1: what the unscaled gradients may reach depends on the narrowest of them."""
    found = {}
    for name in ("two widths", "float64, one rank without gradients"):
        narrow = name == "two widths" and rank == 1
        param = nn.Parameter(torch.zeros(1, dtype=torch.float32 if narrow else torch.float64))
        control = gradilocks.GradientControl(
            torch.optim.SGD([param], lr=1e-40),
            scale=2.0**-20,
            process_group=dist.group.WORLD,
        )
        control.backward((param * (1e30 if narrow else 1e39)).sum())
        if name != "two widths" and rank == 1:
            param.grad = None
        outcome = control.step()
        found[name] = outcome.skipped, outcome.norm, param.item() != 0.0
    return found


def test_ranks_with_gradients_of_two_widths_decide_alike(returned: Returned) -> None:
    for rank, found in enumerate(returned["gradients_of_two_widths"]):
        skipped, norm, has_moved = found["two widths"]
        assert (skipped, has_moved) == (True, False)
        assert norm == pytest.approx(math.sqrt(3.0) * 1e39, rel=1e-6)
        skipped, norm, has_moved = found["float64, one rank without gradients"]
        assert (skipped, has_moved) == (False, rank != 1)
        assert norm == pytest.approx(math.sqrt(3.0) * 1e39, rel=1e-6)


def one_rank_refuses(rank: int) -> dict[str, list[str]]:
    """What is wrong on rank 2 alone: it says so itself, and nobody waits for it in vain."""
    from torch.distributed.tensor import DTensor, Replicate

    world, elsewhere = dist.group.WORLD, _mesh((2, 2), ("dp", "tp"))["tp"]
    found: dict[str, list[str]] = {}

    def run(name: str, control: gradilocks.GradientControl, *args: Any) -> None:
        told = [_told(lambda: control.step(*args)), _told(lambda: control.step(*args))]
        values = [value for param in control._all_parameters() for value in _local(param)]  # type: ignore[arg-type]
        found[name] = [*told, "" if not any(values) else "moved"]

    param = _on(_mesh(), [1.0, 2.0], Replicate())
    if rank == 2:
        param.grad = DTensor.from_local(torch.ones(2), elsewhere, [Replicate()])
    for name, clip in (("foreign", 1.0), ("foreign, apart", gradilocks.ClipPerTensor(1.0))):
        optimizer = torch.optim.SGD([param], lr=1.0)
        run(name, gradilocks.GradientControl(optimizer, scale=None, clip=clip))
    for name, closes in (("float16", False), ("float16 and a closure", True)):
        param = nn.Parameter(torch.zeros(1, dtype=torch.float16 if rank == 2 else torch.float32))
        control = gradilocks.GradientControl(torch.optim.SGD([param], lr=1.0), process_group=world)

        def closure(control: Any = control, param: Tensor = param) -> Tensor:
            control.zero_grad()
            loss = param.sum().float()
            control.backward(loss)
            return loss

        if not closes:
            control.backward(param.sum().float())
        run(name, control, *([closure] if closes else []))
    # When rank 2 is well again the control goes on.
    param = _on(_mesh(), [3.0, 4.0], Replicate())
    gradient = param.grad
    if rank == 2:
        param.grad = DTensor.from_local(torch.ones(2), elsewhere, [Replicate()])
    control = gradilocks.GradientControl(torch.optim.SGD([param], lr=0.0), scale=None)
    told = _told(control.step)
    param.grad = gradient
    found["and goes on"] = [told, told, f"{control.step().norm:g}"]
    return found


def _told(act: Callable[[], object]) -> str:
    try:
        act()
    except (ValueError, GradilocksError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_one_rank_refuses_at_first_is_refused_by_all(returned: Returned) -> None:
    reasons = {
        "foreign": "on other ranks than the parameter",
        "foreign, apart": "on other ranks than the parameter",
        "float16": "Attempting to unscale FP16",
        "float16 and a closure": "Attempting to unscale FP16",
        "and goes on": "on other ranks than the parameter",
    }
    for rank, found in enumerate(returned["one_rank_refuses"]):
        assert set(found) == set(reasons)
        for name, (first, again, after) in found.items():
            expected = reasons[name] if rank == 2 else "rank 2 refused the step"
            assert expected in first, name
            assert expected in again, name
            assert after == ("5" if name == "and goes on" else ""), name


def a_clip_policy_in_a_scaler(rank: int) -> dict[str, Any]:
    """Each tensor over its own mesh, as torch does it; nobody asks the ranks outside."""
    from torch.distributed.tensor import Shard

    tp = _mesh((2, 2), ("dp", "tp"))["tp"]
    found: dict[str, Any] = {}
    for name, mesh in (("world", _mesh()), ("part", tp)):
        for clip in (gradilocks.ClipByNorm(1.0), gradilocks.ClipPerTensor(1.0)):
            param = _on(mesh, [2.0] * len(mesh.mesh), Shard(0))
            if rank == 1:
                param.grad = None
            optimizer = torch.optim.SGD([param], lr=1.0)
            scaler = gradilocks.GradScaler("cpu", init_scale=1.0, clip=clip)
            scaler.scale(torch.ones(()))
            refused = _refusal(lambda: scaler.step(optimizer))  # noqa: B023
            found[f"{type(clip).__name__}, {name}"] = refused, _local(param)
    return found


def test_a_clip_policy_of_a_scaler_goes_by_meshes(returned: Returned) -> None:
    for rank, found in enumerate(returned["a_clip_policy_in_a_scaler"]):
        for name, (refused, param) in found.items():
            # Rank 1 has no gradient, so the others hold three elements of 2, or one, or two.
            counted = 3 if "world" in name else (1 if rank < 2 else 2)
            moved = 0.0 if rank == 1 else -2.0 / math.sqrt(4.0 * counted)
            assert refused == "", name
            assert param == pytest.approx([moved], rel=1e-5), name


def a_scaler_clips_each_tensor_over_its_own_mesh(rank: int) -> list[Any]:
    """FSDP2 over tensor parallelism and a plain tensor: as `clip_grad_norm_`, enabled or not."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = _mesh((2, 2), ("dp", "tp"))
    found: list[Any] = []
    for how in ("function", "scaler", "disabled"):
        params = [
            _on(mesh, [1.0, 2.0, 3.0, 4.0], Shard(0), Shard(0)),
            _on(mesh["dp"], [5.0, 6.0], Shard(0)),
            _on(mesh["tp"], [7.0], Replicate()),
            _plain([8.0]),
        ]
        optimizer = torch.optim.SGD(params, lr=1.0)
        if how == "function":
            gradilocks.clip_grad_norm_(params, 1.0)
            optimizer.step()
        else:
            enabled = how == "scaler"
            scaler = gradilocks.GradScaler("cpu", init_scale=1.0, enabled=enabled, clip=1.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        found.append([_local(param) for param in params])
    return found


def test_a_clip_in_a_scaler_is_that_of_clip_grad_norm_(returned: Returned) -> None:
    norm = math.sqrt(sum(number**2 for number in range(1, 9)))
    for function, *scalers in returned["a_scaler_clips_each_tensor_over_its_own_mesh"]:
        assert function[-1] == pytest.approx([-8.0 / norm], rel=1e-5)
        for found in scalers:
            for one, other in zip(found, function, strict=True):
                assert one == pytest.approx(other, rel=1e-6)


def the_same_parameters_in_another_order(rank: int) -> dict[str, Any]:
    """Two of one shape, bounded apart; rank 3 lists them the other way round."""
    from torch.distributed.tensor import Shard

    found: dict[str, Any] = {}
    for name in ("model", "optimizer", "norm of all"):
        model = nn.ParameterDict(
            {"a": _on(_mesh(), [3.0] * 4, Shard(0)), "b": _on(_mesh(), [30.0] * 4, Shard(0))}
        )
        named = list(model.items())[:: -1 if rank == 3 else 1]
        given: Any = named if name == "optimizer" else [param for _, param in named]
        control = gradilocks.GradientControl(
            torch.optim.SGD(given, lr=0.0),
            model=None if name == "optimizer" else model,
            scale=None,
            clip=1e9 if name == "norm of all" else gradilocks.ClipPerTensor(1.0),
        )
        found[name] = [control.step().norm, *([*map(_gradient, model.values())])]
    return found


def _gradient(param: nn.Parameter) -> list[float]:
    return param.grad.to_local().tolist()  # type: ignore[union-attr]


def test_ranks_that_list_parameters_in_another_order_do_not_mix_them(returned: Returned) -> None:
    for found in returned["the_same_parameters_in_another_order"]:
        for name in ("model", "optimizer"):
            norm, a, b = found[name]
            assert norm == pytest.approx(math.sqrt(4 * 9.0 + 4 * 900.0), rel=1e-6)
            assert [*a, *b] == pytest.approx([0.5, 0.5], rel=1e-5)
        assert found["norm of all"] == [norm, [3.0], [30.0]]


def fully_sharded_plain_tensors(rank: int) -> list[dict[str, Any]]:
    """FSDP1, whose shards are plain tensors: nothing but a mark tells them from copies."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = []
    for original in (True, False):
        whole, parts = _block(), _block()
        model: Any = FullyShardedDataParallel(
            parts, device_id=torch.device("cpu"), use_orig_params=original
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = gradilocks.GradScaler("cpu", clip=1.0)
        told = {
            "control": _refusal(lambda: gradilocks.GradientControl(optimizer, clip=1.0)),  # noqa: B023
        }
        _loss(whole).backward()
        _loss(model).backward()
        scaler.scale(torch.ones(()))
        told["scaler"] = _refusal(lambda: scaler.step(optimizer))  # noqa: B023
        control = gradilocks.GradientControl(
            optimizer, scale=None, process_group=model.process_group
        )
        norm, expected = control.step().norm, _torch_norm(list(whole.parameters()), 2.0)
        ignoring: Any = _block()
        beside = FullyShardedDataParallel(
            ignoring,
            device_id=torch.device("cpu"),
            use_orig_params=original,
            ignored_modules=[ignoring.norm],
        )
        optimizer = torch.optim.SGD(beside.parameters(), lr=0.0)
        told["ignored"] = _refusal(
            lambda: gradilocks.GradientControl(optimizer, process_group=dist.group.WORLD)  # noqa: B023
        )
        ignoring.norm.requires_grad_(False)  # Frozen, it counts nowhere.
        gradilocks.GradientControl(optimizer, process_group=dist.group.WORLD)
        found.append({**told, "norm": norm / expected})
    return found


def test_fsdp1_without_a_group_is_refused_and_with_its_group_it_is_right(
    returned: Returned,
) -> None:
    for of_rank in returned["fully_sharded_plain_tensors"]:
        for found in of_rank:
            assert "belongs to FullyShardedDataParallel (FSDP1)" in found["control"]
            assert "process_group=model.process_group" in found["control"]
            assert "A GradScaler cannot clip it" in found["scaler"]
            assert "is a plain tensor beside shards of FullyShard" in found["ignored"]
            assert found["norm"] == pytest.approx(1.0, rel=1e-5)


def each_tensor_on_part_of_the_ranks(rank: int) -> list[list[float]]:
    """Bounded apart from each other, over the group that was named and not over the world."""
    from torch.distributed.tensor import Replicate, Shard

    tp = _mesh((2, 2), ("dp", "tp"))["tp"]
    params = [_on(tp, [3.0, 4.0], Shard(0)), _on(tp, [12.0], Replicate()), _plain([7.0])]
    control = gradilocks.GradientControl(
        torch.optim.SGD(params, lr=1.0),
        scale=None,
        clip=gradilocks.ClipPerTensor(1.0),
        process_group=tp.get_group(),
    )
    norm = control.step().norm
    return [[norm], *map(_local, params)]


def test_tensors_are_bounded_apart_over_the_ranks_that_hold_the_model(returned: Returned) -> None:
    for rank, (norm, sharded, copied, plain) in enumerate(
        returned["each_tensor_on_part_of_the_ranks"]
    ):
        assert norm == pytest.approx([math.sqrt(25.0 + 144.0 + 49.0)], rel=1e-6)
        assert sharded == pytest.approx([(-0.6, -0.8)[rank % 2]], rel=1e-5)
        assert copied == pytest.approx([-1.0], rel=1e-5)
        assert plain == pytest.approx([-1.0], rel=1e-5)


# What it costs, and what has no meaning.


def how_often_ranks_meet(rank: int) -> dict[str, list[str]]:
    from torch.distributed.tensor import Replicate, Shard

    counted: list[str] = []
    params = [
        _on(_mesh(), [1.0] * 4, Shard(0)),
        _on(_mesh(), [1.0], Replicate()),
        _plain([1.0]),
    ]
    optimizer = torch.optim.SGD(params, lr=0.0)
    control = gradilocks.GradientControl(optimizer, scale=None, clip=1.0)
    scaler = gradilocks.GradScaler("cpu", policy=gradilocks.HeadroomScale())
    other = _on(_mesh(), [1.0] * 4, Shard(0))
    headroom = gradilocks.GradientControl(
        torch.optim.SGD([other], lr=0.0), scale=gradilocks.HeadroomScale()
    )
    headroom.scale_loss(torch.ones((), requires_grad=True))
    acts = {
        "clip": lambda: gradilocks.clip_grad_norm_(params, 1.0),
        "unscale": lambda: (scaler.scale(torch.ones(())), scaler.unscale_(optimizer)),
        "first step": control.step,
        "second step": control.step,
        "with a scale policy that asks for peaks": headroom.step,
    }
    found = {}
    headroom.step()
    other.grad = other.grad.clone()  # type: ignore[union-attr]
    headroom.scale_loss(torch.ones((), requires_grad=True))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_object"):
            real = getattr(dist, name)

            def counting(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                counted.append(_name)
                return _real(*args, **kwargs)

            patch.setattr(dist, name, counting)
        for name, act in acts.items():
            act()
            found[name] = list(counted)
            counted.clear()
    return found


def test_one_collective_a_decision(returned: Returned) -> None:
    for found in returned["how_often_ranks_meet"]:
        assert found == {
            "clip": ["all_gather"],
            "unscale": ["all_reduce"],
            "first step": ["all_gather", "all_gather_object"],  # Once: who holds which names.
            "second step": ["all_gather"],
            "with a scale policy that asks for peaks": ["all_gather"],
        }


def a_foreign_gradient(rank: int) -> list[str]:
    """A gradient on other ranks than its parameter: who would measure it is not known."""
    from torch.distributed.tensor import Shard

    here, there = _on(_mesh(), [1.0] * 4, Shard(0)), _on(_halves(), [1.0] * 4, Shard(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(here), "grad", there.grad)
        return [
            _refusal(lambda: gradilocks.clip_grad_norm_([here], 1.0)),
            _refusal(lambda: _control_norm([here])),
        ]


def test_a_gradient_on_other_ranks_than_its_parameter_is_refused(returned: Returned) -> None:
    for told in returned["a_foreign_gradient"]:
        assert all("is a DTensor on other ranks than the parameter" in each for each in told)


def _placed(whole: Tensor, mesh: Any, placements: list[Any]) -> Any:
    """A whole tensor as a DTensor; Partial along a dimension of two ranks, each has half of it."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    elements = [Replicate() if each.is_partial() else each for each in placements]
    placed = distribute_tensor(whole, mesh, elements)
    halves = 0.5 ** sum(each.is_partial() for each in placements)
    return DTensor.from_local(
        placed.to_local() * halves, mesh, placements, shape=whole.shape, stride=whole.stride()
    )


def _ours(param: nn.Parameter, kind: str) -> torch.optim.Optimizer:
    if kind == "SGD":
        return gradilocks.optim.SGD([param], lr=0.125, momentum=0.5)
    return gradilocks.optim.AdamW([param], lr=0.125, master_weights=kind == "masters")


def _step_by(way: str, param: nn.Parameter, optimizer: Any, kept: dict[str, Any]) -> None:
    """One step on the gradient that is there, as people take it."""
    if way == "control":
        made = kept.setdefault("control", gradilocks.GradientControl(optimizer, scale=None, clip=1))
        made.step()
    elif way.endswith("scaler"):
        if "scaler" not in kept:
            torchs = way == "torch's scaler"
            kept["scaler"] = (
                torch.amp.GradScaler("cpu", init_scale=1.0)
                if torchs
                else gradilocks.GradScaler("cpu", init_scale=1.0, clip=1.0)
            )
        grad, param.grad = param.grad, None
        kept["scaler"].scale(torch.ones((), requires_grad=True))
        param.grad = grad
        kept["scaler"].step(optimizer)
        kept["scaler"].update()
    else:
        if way == "clip":
            gradilocks.clip_grad_norm_([param], 1.0)
        optimizer.step()


def gradients_that_lie_otherwise(rank: int) -> dict[str, Any]:
    """Our optimizers, by whatever steps them: summands, and other elements than the parameter's."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = _mesh((2, 2), ("a", "b"))
    lies: dict[str, tuple[list[Any], list[Any]]] = {
        "same size": ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
        "other size": ([Shard(1), Replicate()], [Shard(0), Shard(0)]),
        "summands": ([Replicate(), Replicate()], [Partial(), Replicate()]),
        "both": ([Shard(0), Replicate()], [Partial(), Shard(0)]),
        "alike": ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
    }
    torch.manual_seed(0)
    weights, grads = torch.randn(4, 4), torch.randn(2, 4, 4)
    found: dict[str, Any] = {}
    for kind in ("SGD", "AdamW", "masters"):
        dtype = torch.bfloat16 if kind == "masters" else torch.float32
        for way in ("alone", "clip", "torch's scaler", "scaler", "control"):
            for how, (home, elsewhere) in {"": ([], []), **lies}.items():
                values = weights.to(dtype)
                param = nn.Parameter(_placed(values, mesh, home) if how else values.clone())
                optimizer, kept = _ours(param, kind), dict[str, Any]()
                for grad in grads.to(dtype):
                    param.grad = _placed(grad, mesh, elsewhere) if how else grad.clone()
                    _step_by(way, param, optimizer, kept)
                whole: Any = param.detach()
                if not how:
                    expected = whole
                    continue
                left: Any = param.grad
                same = torch.equal(whole.full_tensor(), expected)
                kept_as_it_was = way != "alone" or left.placements == tuple(elsewhere)
                found[f"{kind}, {way}, {how}"] = same, kept_as_it_was
    return found


def test_our_optimizers_step_gradients_wherever_they_lie(returned: Returned) -> None:
    for found in returned["gradients_that_lie_otherwise"]:
        assert len(found) == 75
        assert {name: each for name, each in found.items() if each != (True, True)} == {}


def what_lies_otherwise_in_the_state(rank: int) -> dict[str, Any]:
    """State that was loaded under another placement is brought home; what nobody can place, is
    refused before anything moves."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, home, elsewhere = (
        _mesh((2, 2), ("a", "b")),
        [Shard(0), Replicate()],
        [Replicate(), Shard(0)],
    )
    torch.manual_seed(0)
    weights, grads = torch.randn(4, 4), torch.randn(3, 4, 4)
    found: dict[str, Any] = {}
    for kind in ("SGD", "AdamW", "masters"):
        dtype = torch.bfloat16 if kind == "masters" else torch.float32
        seen = []
        for spread in (False, True):
            values = weights.to(dtype)
            param = nn.Parameter(_placed(values, mesh, home) if spread else values.clone())
            optimizer = _ours(param, kind)
            for grad in grads.to(dtype):
                param.grad = _placed(grad, mesh, home) if spread else grad.clone()
                optimizer.step()
                for name, tensor in optimizer.state[param].items() if spread else ():
                    if tensor.dim():
                        optimizer.state[param][name] = tensor.redistribute(placements=elsewhere)
            whole: Any = param.detach()
            seen.append(whole.full_tensor() if spread else whole)
        found[kind] = torch.equal(*seen)
    param = nn.Parameter(_placed(weights, mesh, home))
    optimizer = _ours(param, "SGD")
    param.grad = _placed(weights, mesh, home)
    optimizer.step()
    before = param.detach().clone()
    optimizer.state[param]["momentum_buffer"] = weights.clone()
    found["a plain state"] = _refusal(optimizer.step)
    del optimizer.state[param]["momentum_buffer"]
    param.grad = _placed(weights, _mesh((4,)), [Shard(0)])
    found["another mesh"] = _refusal(optimizer.step)
    found["moved"] = not torch.equal(param.detach().to_local(), before.to_local())
    return found


def test_state_that_lies_otherwise_is_brought_to_its_parameter_or_refused(
    returned: Returned,
) -> None:
    for found in returned["what_lies_otherwise_in_the_state"]:
        assert all(found[kind] for kind in ("SGD", "AdamW", "masters"))
        assert "'momentum_buffer' in the state of" in found["a plain state"]
        assert "is a plain tensor and the parameter a DTensor" in found["a plain state"]
        assert "no tensor from one mesh to another" in found["another mesh"]
        assert not found["moved"]


def copies_whose_gradients_are_cut(rank: int) -> list[float]:
    """Ranks hold the same of a parameter, and each other elements of its gradient."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = _mesh((2, 2), ("dp", "tp"))
    param = nn.Parameter(_placed(torch.zeros(2, 2), mesh["tp"], [Replicate()]))
    control = gradilocks.GradientControl(
        torch.optim.SGD([param], lr=0.0), scale=None, mesh=mesh, check_replicas_every=1
    )
    norms = []
    for _ in range(2):
        param.grad = _placed(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), mesh["tp"], [Shard(0)])
        norms.append(control.step().norm)
    return norms


def test_copies_are_compared_by_elements_that_are_the_same(returned: Returned) -> None:
    assert returned["copies_whose_gradients_are_cut"] == [[5.0, 5.0]] * 4


def orders_that_mean_nothing(rank: int) -> list[str]:
    from torch.distributed.tensor import Shard

    param = _on(_mesh(), [1.0] * 4, Shard(0))
    return [
        _refusal(lambda: gradilocks.clip_grad_norm_([param], 1.0, order))  # noqa: B023
        for order in (0.0, -1.0, -math.inf)
    ]


def test_orders_without_a_meaning_over_ranks_are_refused(returned: Returned) -> None:
    for told in returned["orders_that_mean_nothing"]:
        assert all("norm_type must be positive" in each for each in told)
