"""Four real processes whose control is told who holds what: `mesh=`, `distinct=`, `copies=`."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradilocks
from gradilocks.ranks.layout import local_of
from tests.ranks.rank_programs import run_all

Returned = dict[str, list[Any]]
ORDERS = (1.0, 2.0, 3.0, math.inf)


def _programs() -> list[Callable[[int], Any]]:
    return [
        copies_of_plain_tensors,
        copies_of_biases_that_begin_alike,
        copies_that_cannot_be,
        copies_that_count_wrongly,
        summands,
        a_summand_that_is_missing,
        what_the_clip_functions_return,
        settings_that_make_no_sense,
        pipeline_of_tensor_parallel_stages,
        a_mesh_that_is_a_part_of_the_world,
        schedules_of_a_pipeline,
        nobody_scales_a_loss,
        gradients_that_wait_for_a_closure,
        different_settings,
        nothing_said,
        marks_of_other_systems,
        tied_tensors_bounded_apart,
        experts_of_one_name,
        one_rank_changes_alone,
        one_rank_changes_what_all_must_tell,
        all_ranks_add_a_parameter,
        groups_in_unequal_numbers,
        copies_that_were_called_parts,
        copied_controls,
        copies_of_a_nan,
        copies_along_a_distinct_dimension,
        stages_that_mesh_calls_copies,
        nothing_said_of_some,
        copies_called_parts_that_show_it_later,
        parts_called_copies_that_show_it_later,
        parts_that_are_alike_by_themselves,
        copies_of_unlike_partners,
        what_a_refusal_says,
    ]


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    """What each of four ranks returned from every program below."""
    return run_all(_programs(), tmp_path_factory.mktemp("told"), ranks=4)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class _Model(nn.Module):
    """Plain parameters by name, each with a value to begin with and a gradient."""

    def __init__(self, **given: tuple[float, float]) -> None:
        super().__init__()
        for name, (value, gradient) in given.items():
            param = nn.Parameter(torch.full((2,), value))
            param.grad = torch.full((2,), gradient)
            setattr(self, name, param)


def _norms(model: nn.Module, **told: Any) -> list[float]:
    return [
        gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model=model,
            scale=None,
            clip=gradilocks.ClipByNorm(1e9, order=order),
            **told,
        )
        .step()
        .norm
        for order in ORDERS
    ]


def _expected(values: list[float]) -> list[float]:
    whole = torch.tensor([value for value in values for _ in range(2)], dtype=torch.float64)
    return [torch.linalg.vector_norm(whole, order).item() for order in ORDERS]


def _refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def copies_of_plain_tensors(rank: int) -> list[list[float]]:
    """A router on all ranks, an expert on two each, one that is every rank's own."""
    pair = rank % 2
    model = _Model(router=(1.0, 12.0), expert=(2.0 + pair, 3.0 + pair), own=(5.0, 1.0 + rank))
    numbers = {"router": 4, "expert": 2, "own": 1}
    return [
        _norms(model, copies=lambda name, param: numbers[name]),
        _norms(model, copies=lambda name, param: numbers[name], process_group=dist.group.WORLD),
        _norms(_Model(a=(1.0, 3.0), b=(1.0, 4.0)), copies=4),
    ]


def test_of_copies_one_rank_counts(returned: Returned) -> None:
    expected = _expected([12.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0])
    for world, group, whole in returned["copies_of_plain_tensors"]:
        assert world == pytest.approx(expected, rel=1e-7)
        assert group == world
        assert whole == pytest.approx(_expected([3.0, 4.0]), rel=1e-7)


def copies_of_biases_that_begin_alike(rank: int) -> list[float]:
    """All biases begin as zeros; the weights beside them tell who holds the same."""
    half = rank // 2
    model = _Model(bias=(0.0, 1.0 + half), weight=(1.0 + half, 5.0 + half))
    return _norms(model, copies=2)


def test_copies_are_told_apart_by_all_parameters_together(returned: Returned) -> None:
    for found in returned["copies_of_biases_that_begin_alike"]:
        assert found == pytest.approx(_expected([1.0, 5.0, 2.0, 6.0]), rel=1e-7)


def copies_that_cannot_be(rank: int) -> dict[str, str]:
    model = _Model(weight=(1.0 + rank, 1.0))
    alike = _Model(weight=(1.0, 1.0))
    return {
        "unlike": _refusal(lambda: _norms(model, copies=2)),
        "alike": _refusal(lambda: _norms(alike, copies=2)),
        "too many": _refusal(lambda: _norms(model, copies=lambda name, param: 4 + rank // 3)),
        "negative": _refusal(lambda: _norms(model, copies=-1)),
        "a flag": _refusal(lambda: _norms(model, copies=True)),
        "on some": _refusal(lambda: _norms(model, copies=lambda name, param: 1 + (rank < 2))),
        "one too few": _refusal(lambda: _norms(alike, copies=lambda name, param: 4 - (rank > 2))),
        "all, and unlike": _refusal(lambda: _norms(model, copies=4)),
        "a rule that raises": _refusal(lambda: _norms(model, copies=_fails_on(2, rank))),
        "a rule that raises beside meshes": _refusal(
            lambda: _norms(_beside_a_mesh(), copies=_fails_on(2, rank), process_group=_stages())
        ),
    }


def _fails_on(where: int, rank: int) -> Callable[[str, torch.Tensor], int]:
    def rule(name: str, param: torch.Tensor) -> int:
        return 1 if rank != where else {}[name]

    return rule


def _stages() -> Any:
    return _mesh((2, 2), ("pp", "dp"))["pp"].get_group()


def _beside_a_mesh() -> nn.Module:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = _Model(norm=(1.0, 1.0))
    mesh = _mesh((2, 2), ("pp", "dp"))["dp"]
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    return model


def test_copies_that_cannot_be_are_refused_on_every_rank(returned: Returned) -> None:
    for rank, found in enumerate(returned["copies_that_cannot_be"]):
        assert "copies= says that 2 ranks hold the same elements of weight" in found["unlike"]
        assert f"ranks [{rank}] hold the same values" in found["unlike"]
        assert "ranks [0, 1, 2, 3] hold the same values" in found["alike"]
        assert "copies= says 5 for weight" in found["too many"]
        assert ("rank 3 refuses" in found["too many"]) == (rank != 3)
        for name in ("negative", "a flag"):
            assert found[name].startswith("TypeError: copies= is how many ranks hold the same")
        assert "says that 2 ranks hold the same elements of weight" in found["on some"]
        assert ("rank 0 refuses" in found["on some"]) == (rank > 1)
        assert "says that 3 ranks hold the same elements" in found["one too few"] or rank < 3
        assert "says that 4 ranks hold the same elements" in found["one too few"] or rank > 2
        assert f"ranks [{rank}] hold the same values" in found["all, and unlike"]
        assert "copies= raised KeyError for weight: 'weight'" in found["a rule that raises"]
        assert "copies= raised KeyError for norm" in found["a rule that raises beside meshes"]
        for name in ("a rule that raises", "a rule that raises beside meshes"):
            assert ("rank 2 refuses" in found[name]) == (rank != 2)


def copies_that_count_wrongly(rank: int) -> dict[str, Any]:
    """Tensors that nobody counts, and copies of which each rank was to count its own."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def drawn(seed: int, *, sharded: bool = False) -> nn.Module:
        torch.manual_seed(seed)
        layer = nn.Linear(4, 4)
        torch.manual_seed(seed)
        for name, param in list(layer.named_parameters()):
            grad = torch.randn_like(param)
            if sharded:
                value = distribute_tensor(param.detach(), mesh, [Shard(0)])
                setattr(layer, name, nn.Parameter(value))
                grad = distribute_tensor(grad, mesh, [Shard(0)])
            getattr(layer, name).grad = grad
        return layer

    def renamed(layer: nn.Module) -> nn.Module:
        return nn.ModuleDict({"head" if rank == 3 else "embedding": layer})

    def told(model: nn.Module, copies: Any, *, first: float = 1.0, **more: Any) -> Any:
        made: list[float] = []

        def act() -> None:
            control = gradilocks.GradientControl(
                torch.optim.SGD(model.parameters(), lr=0.0),
                model=model,
                scale=None,
                copies=copies,
                **more,
            )
            if first != 1.0:
                grads = [param.grad for param in model.parameters()]
                for param in model.parameters():
                    param.grad = None if rank else param.grad * first
                assert control.step().skipped
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param.grad = grad
            made.append(control.step().norm)

        return _refusal(act) or made[0]

    mesh = _mesh((4,), ("dp",))
    uneven = drawn(0)
    if rank == 1:
        uneven.weight.grad = uneven.weight.grad.flip(0)
    return {
        "0 everywhere": told(drawn(0), 0),
        "0 everywhere, by a rule": told(drawn(0), lambda name, param: 0),
        "0 for all shards": told(drawn(0, sharded=True), lambda name, param: 0, mesh=mesh),
        "0 for other values": told(drawn(rank), lambda name, param: int(rank < 3)),
        "0 for a copy": told(drawn(0), lambda name, param: int(rank == 1)),
        "0, not averaged": told(uneven, lambda name, param: int(rank == 0)),
        "0, not averaged, after an overflow": told(
            uneven, lambda name, param: int(rank == 0), first=math.inf
        ),
        "0 for a tied one": told(
            renamed(drawn(rank % 3)), lambda name, param: 0 if "head" in name else 1
        ),
        "1 for a copy": told(drawn(0), 1),
        "1 for a copy, after an overflow": told(drawn(0), 1, first=math.inf),
        "1 for others": told(drawn(rank), 1),
        "4, not averaged": told(uneven, 4),
        "4, not averaged, after an overflow": told(uneven, 4, first=math.inf),
        "4": told(drawn(0), 4),
    }


def test_what_copies_says_is_compared_with_what_the_ranks_hold(returned: Returned) -> None:
    def norm(*seeds: int) -> float:
        drawn = []
        for seed in seeds:
            torch.manual_seed(seed)
            drawn += [torch.randn(4, 4).flatten(), torch.randn(4)]
        return torch.cat(drawn).double().norm().float().item()

    first = returned["copies_that_count_wrongly"][0]
    for found in returned["copies_that_count_wrongly"]:
        assert found == first
        for name in ("0 everywhere", "0 everywhere, by a rule", "0 for all shards"):
            assert "copies= says 0 for weight on rank 0: another rank counts" in found[name], name
        assert "copies= says 0 for weight on rank 3" in found["0 for other values"]
        for name in ("0, not averaged", "0, not averaged, after an overflow"):
            assert "copies= says 0 for weight on rank 1: another rank counts" in found[name], name
            assert "none that counts has the same gradient" in found[name], name
        for name in ("1 for a copy", "1 for a copy, after an overflow"):
            assert (
                "weight has the same values and the same gradient on ranks 0 and 1" in found[name]
            )
        for name in ("4, not averaged", "4, not averaged, after an overflow"):
            assert (
                "weight is the same on ranks 0 and 1 by what mesh= or copies= says" in found[name]
            )
        assert found["0 for a copy"] == found["4"] == norm(0)
        assert found["0 for a tied one"] == norm(0, 1, 2)
        assert found["1 for others"] == norm(0, 1, 2, 3)


@pytest.mark.parametrize("copies", [1, lambda name, param: 1, lambda name, param: None])
def test_of_a_process_alone_copies_may_say_that_it_holds_all(copies: Any) -> None:
    model = _Model(weight=(1.0, 3.0), bias=(1.0, 4.0))
    assert _norms(model, copies=copies) == pytest.approx(_expected([3.0, 4.0]), rel=1e-7)


@pytest.mark.parametrize("copies", [0, 2, lambda name, param: 2 * (name == "bias")])
def test_of_a_process_alone_copies_cannot_speak_of_other_ranks(copies: Any) -> None:
    model = _Model(weight=(1.0, 3.0), bias=(1.0, 4.0))
    with pytest.raises(ValueError, match=r"No other rank runs: call torch.distributed.init_proc"):
        _norms(model, copies=copies)


def summands(rank: int) -> dict[str, Any]:
    """As SequenceParallel leaves the gradient of a norm's weight: every rank has a part of it."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = _mesh((4,), ("tp",))
    found: dict[str, Any] = {}
    acts: dict[str, Callable[[nn.Parameter], Any]] = {
        "clip": lambda param: gradilocks.clip_grad_norm_([param], 1.0).item(),
        "total": lambda param: gradilocks.get_total_norm([param.grad]).item(),
        "control": lambda param: (
            gradilocks.GradientControl(torch.optim.SGD([param], lr=1.0), scale=None, clip=1.0)
            .step()
            .norm
        ),
        "scaler": lambda param: _stepped_by_a_scaler(param),
    }
    for name, act in acts.items():
        for placement in (Replicate(), Shard(0)):
            param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [placement]))
            summand = torch.tensor([2.0, 0.0, 0.0, 0.0]) if rank < 2 else torch.zeros(4)
            param.grad = DTensor.from_local(summand + 0.0, mesh, [Partial()])
            result = act(param)
            grad: Any = param.grad
            found[f"{name}, {placement}"] = (
                result,
                grad.full_tensor().tolist(),
                [str(each) for each in grad.placements],
                param.full_tensor().tolist(),  # type: ignore[operator]
            )
    return found


def _stepped_by_a_scaler(param: nn.Parameter) -> float:
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = gradilocks.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return scaler.get_scale()


def test_summands_are_added_up_and_written_back(returned: Returned) -> None:
    for found in returned["summands"]:
        for name, (result, grad, placements, param) in found.items():
            how, placement = name.split(", ")
            assert result == (2.0 if how == "scaler" else 4.0), name
            whole = {"clip": 1.0, "scaler": 2.0}.get(how, 4.0)
            if how == "total":
                assert placements[0].startswith("P"), name
                continue
            assert grad == pytest.approx([whole if how != "control" else grad[0], 0.0, 0.0, 0.0])
            assert placements == [placement.strip()], name
            moved = {"clip": 0.0, "scaler": -2.0, "control": -1.0}[how]
            assert param == pytest.approx([moved, 0.0, 0.0, 0.0], rel=1e-5), name


def a_summand_that_is_missing(rank: int) -> dict[str, Any]:
    """Rank 2 has nothing of a gradient whose summands the others hold; then nobody has; then all
    have again. Beside it lies a parameter that always has one."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = _mesh((4,), ("tp",))
    found: dict[str, Any] = {}
    for name in ("control", "own optimizer", "scaler"):
        for placement in (Replicate(), Shard(0)):
            params = [
                nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement])) for _ in range(2)
            ]
            kind = gradilocks.optim.AdamW if name == "own optimizer" else torch.optim.SGD
            optimizer = kind(params, lr=0.25, weight_decay=1.0)
            scaler = gradilocks.GradScaler("cpu", init_scale=1.0, clip=1e9)
            control = gradilocks.GradientControl(optimizer, scale=None)
            seen: list[Any] = []
            for have in ({0, 1, 2, 3}, {0, 1, 3}, set(), {0, 1, 2, 3}):
                params[0].grad = None
                params[1].grad = distribute_tensor(torch.full((4,), 3.0), mesh, [placement])
                if rank in have:
                    params[0].grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
                if name == "scaler":
                    scaler.scale(torch.ones(()))
                    scaler.step(optimizer)
                    scaler.update()
                    assert scaler.outcome is not None
                    norm = scaler.outcome.norm
                else:
                    norm = control.step().norm
                has_one = params[0].grad is not None
                seen.append((norm, has_one, params[0].full_tensor().tolist()))  # type: ignore[operator]
            found[f"{name}, {placement}"] = seen
    return found


def test_a_rank_without_a_summand_takes_part(returned: Returned) -> None:
    for found in returned["a_summand_that_is_missing"]:
        for name, seen in found.items():
            norms, has, values = zip(*seen, strict=True)
            assert has == (True, True, False, True), name
            whole = [math.sqrt(4 * (n**2 + 9.0)) for n in (4, 3, 0, 4)]
            assert norms == pytest.approx(whole, rel=1e-6), name
            # Without a gradient nothing decays.
            assert values[1] == values[2] != values[3], name
            if "own" not in name:
                one = 1.0 - 0.25 * (4.0 + 1.0)
                two = one - 0.25 * (3.0 + one)
                assert [values[0][0], values[1][0]] == pytest.approx([one, two]), name


def what_the_clip_functions_return(rank: int) -> dict[str, Any]:
    """A DTensor where torch returns one, so that `.full_tensor()` of other people's loops works."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = _mesh((2, 2), ("dp", "tp"))
    params = []
    for values, placements in (
        (torch.arange(8.0), [Shard(0), Shard(0)]),
        (torch.arange(3.0), [Replicate(), Shard(0)]),
    ):
        param = nn.Parameter(distribute_tensor(torch.zeros_like(values), mesh, placements))
        param.grad = distribute_tensor(values, mesh, placements)
        params.append(param)
    grads = [param.grad for param in params]
    other = nn.Parameter(distribute_tensor(torch.zeros(2), mesh["tp"], [Shard(0)]))
    other.grad = distribute_tensor(torch.ones(2), mesh["tp"], [Shard(0)])
    plain = nn.Parameter(torch.zeros(1))
    plain.grad = torch.ones(1)
    found: dict[str, Any] = {}
    for order in ORDERS:
        theirs: Any = torch.nn.utils.get_total_norm(grads, order)  # type: ignore[arg-type]
        ours: Any = gradilocks.get_total_norm(grads, order)  # type: ignore[arg-type]
        clipped: Any = gradilocks.clip_grad_norm_(params, math.inf, order)
        assert isinstance(theirs, DTensor)
        assert isinstance(ours, DTensor)
        assert isinstance(clipped, DTensor)
        found[str(order)] = (
            theirs.full_tensor().item(),
            ours.full_tensor().item(),
            clipped.full_tensor().item(),
            [str(each) for each in ours.placements],
        )
    found["mixed"] = [
        type(gradilocks.clip_grad_norm_([*params, each], math.inf)).__name__
        for each in (other, plain)
    ]
    theirs = torch.nn.utils.get_total_norm(grads)  # type: ignore[arg-type]
    gradilocks.clip_grads_with_norm_(params, 1.0, theirs)
    found["given"] = gradilocks.get_total_norm(grads).item()  # type: ignore[arg-type]
    return found


def test_the_norm_is_a_dtensor_where_torchs_is(returned: Returned) -> None:
    for found in returned["what_the_clip_functions_return"]:
        for order in ORDERS:
            theirs, ours, clipped, placements = found[str(order)]
            assert ours == clipped == pytest.approx(theirs, rel=1e-6)
            assert placements == ["R", "R"] or placements == ["Replicate()", "Replicate()"]
        assert found["mixed"] == ["Tensor", "Tensor"]
        assert found["given"] == pytest.approx(1.0, rel=1e-5)


def settings_that_make_no_sense(rank: int) -> dict[str, str]:
    mesh, model = _mesh((2, 2), ("dp", "tp")), _Model(weight=(1.0, 1.0))

    def told(**given: Any) -> str:
        return _refusal(lambda: _norms(model, **given))

    return {
        "both": told(mesh=mesh, process_group=dist.group.WORLD),
        "no mesh": told(distinct=("pp",)),
        "no such dimension": told(mesh=mesh, distinct=("pp", "tp")),
        "no mesh at all": told(mesh=(2, 2)),
    }


def test_settings_that_make_no_sense_are_refused_with_the_way_out(returned: Returned) -> None:
    for found in returned["settings_that_make_no_sense"]:
        assert "leave process_group= out" in found["both"]
        assert "mesh=world_mesh, distinct=('pp',)" in found["no mesh"]
        assert "distinct= names pp, and the mesh has dp, tp" in found["no such dimension"]
        assert "as init_device_mesh makes it. Got tuple." in found["no mesh at all"]


def pipeline_of_tensor_parallel_stages(rank: int) -> list[float]:
    """Each stage has a weight over tp, a norm that tp copies, and names that the other has too."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh((2, 2), ("pp", "tp"))
    stage = rank // 2
    model = _Model(norm=(1.0, 6.0 + stage))
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]][stage]).repeat_interleave(2)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh["tp"], [Shard(0)]))
    model.weight.grad = distribute_tensor(values, mesh["tp"], [Shard(0)])
    return _norms(model, mesh=mesh, distinct=("pp",))


def test_stages_of_a_pipeline_are_distinct_and_copies_inside_them_count_once(
    returned: Returned,
) -> None:
    for found in returned["pipeline_of_tensor_parallel_stages"]:
        assert found == pytest.approx(_expected([6.0, 7.0, 1.0, 2.0, 3.0, 4.0]), rel=1e-7)


def a_mesh_that_is_a_part_of_the_world(rank: int) -> list[float] | None:
    """Two dimensions over three of four ranks: a group is made for them, and one stays away."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [[0, 1, 2]], mesh_dim_names=("dp", "pp"))
    if rank == 3:
        return None
    return _norms(_Model(weight=(1.0, 1.0 + rank)), mesh=mesh, distinct="pp")


def test_ranks_outside_the_mesh_are_not_waited_for(returned: Returned) -> None:
    for found in returned["a_mesh_that_is_a_part_of_the_world"][:3]:
        assert found == pytest.approx(_expected([1.0, 2.0, 3.0]), rel=1e-7)


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator))
        for _ in range(6)
    ]
    made[3][0][5, 2] = math.inf  # One step is skipped, on all stages.
    return made


def _mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def schedules_of_a_pipeline(rank: int) -> dict[str, Any]:
    """Two stages, twice; only the last has a loss, and torch's schedule runs backward."""
    from torch.distributed import pipelining

    mesh = _mesh((2, 2), ("dp", "pp"))
    stage_of_rank, found = rank % 2, {}
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
        layers = _layers()
        interleaved = "Interleaved" in name
        mine = [[0, 2], [1, 3]][stage_of_rank] if interleaved else [stage_of_rank]
        parts = (
            [nn.Sequential(layers[at]) for at in mine]
            if interleaved
            else [nn.Sequential(*layers[2 * stage_of_rank : 2 * stage_of_rank + 2])]
        )
        stages = [
            pipelining.PipelineStage(
                part, at, 4 if interleaved else 2, torch.device("cpu"), group=mesh["pp"].get_group()
            )
            for part, at in zip(parts, mine, strict=True)
        ]
        model = nn.ModuleList(parts)
        control = gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model=model,
            scale=gradilocks.DynamicScale(init_scale=64.0, growth_interval=2),
            clip=0.5,
            mesh=mesh,
            distinct="pp",
        )
        schedule = getattr(pipelining, name)(
            stages if interleaved else stages[0], 4, loss_fn=control.loss_fn(_mean_square)
        )
        seen, losses = [], []
        for inputs, targets in _batches():
            told: list[torch.Tensor] = []
            last = stage_of_rank == 1
            schedule.step(
                *([inputs] if stage_of_rank == 0 else []),
                **({"target": targets, "losses": told} if last else {}),
            )
            outcome = control.step()
            losses.append([float(each) for each in told])
            seen.append((outcome.skipped, outcome.norm, control.scale, outcome.culprits))
            control.zero_grad()
        values = [param.detach().tolist() for param in model.parameters()]
        found[name] = seen, losses, values
    return found


def _one_process() -> tuple[list[Any], list[list[float]], list[list[Any]]]:
    model = nn.Sequential(*_layers())
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1),
        scale=gradilocks.DynamicScale(init_scale=64.0, growth_interval=2),
        clip=0.5,
    )
    seen, losses = [], []
    for inputs, targets in _batches():
        each = []
        for part, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            loss = _mean_square(model(part), target)
            control.backward(loss / 4)
            each.append(loss.item())
        outcome = control.step()
        seen.append((outcome.skipped, outcome.norm, control.scale))
        losses.append(each)
        control.zero_grad()
    values = [[p.detach().tolist() for p in layer.parameters()] for layer in model]
    return seen, losses, values


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_pipeline_trains_as_one_process(returned: Returned, name: str) -> None:
    expected, expected_losses, layers = _one_process()
    for rank, every in enumerate(returned["schedules_of_a_pipeline"]):
        seen, losses, values = every[name]
        assert [each[0] for each in seen] == [False, False, False, True, False, False]
        for mine, (skipped, norm, scale) in zip(seen, expected, strict=True):
            assert (mine[0], mine[2]) == (skipped, scale)
            assert mine[1] == pytest.approx(norm, rel=1e-5, nan_ok=True)
        first = returned["schedules_of_a_pipeline"][0][name][0]
        assert repr(seen) == repr(first)  # Bit for bit on every rank, culprits too.
        assert "on rank" in seen[3][3][0]
        interleaved = "Interleaved" in name
        mine = ([0, 2], [1, 3])[rank % 2] if interleaved else ([0, 1], [2, 3])[rank % 2]
        wanted = [value for at in mine for value in layers[at]]
        for a, b in zip(values, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-7)
        if rank % 2:  # The losses are told as they are, without the scale.
            flat = [each for step in losses for each in step]
            assert flat == pytest.approx(
                [each for step in expected_losses for each in step], rel=1e-5, nan_ok=True
            )


def nobody_scales_a_loss(rank: int) -> str:
    model = _Model(weight=(1.0, 1.0))
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=1.0), process_group=dist.group.WORLD
    )
    try:
        control.step()
    except gradilocks.errors.ScaleMisuse as error:
        return f"{error} {model.weight.tolist()}"
    return ""


def test_gradients_without_a_scale_are_refused_on_every_rank(returned: Returned) -> None:
    for told in returned["nobody_scales_a_loss"]:
        assert "no rank has scaled a loss since the last step" in told
        assert "control.loss_fn(loss_fn)" in told
        assert told.endswith("[1.0, 1.0]")


def gradients_that_wait_for_a_closure(rank: int) -> list[Any]:
    """Only the last stage scales a loss; the optimizer begins with the gradients that are there."""
    param = nn.Parameter(torch.zeros(1))
    control = gradilocks.GradientControl(
        torch.optim.SGD([param], lr=1.0),
        scale=4.0,
        mesh=_mesh((4,), ("pp",)),
        distinct="pp",
    )

    def back(value: float) -> torch.Tensor:
        param.grad = torch.full((1,), 4.0 * value)
        loss = torch.ones((), requires_grad=True)
        return control.scale_loss(loss) if rank == 3 else loss

    norms = []
    for waits in (True, False):
        if waits:
            back(math.inf if rank == 0 else 1.0)
            skipped = control.step(lambda: back(2.0))
            norms.append((skipped.skipped, skipped.culprits))
            control.zero_grad()
            back(1.0)
        norms.append(control.step(lambda: back(2.0)).norm)
        control.zero_grad()
    back(3.0)
    norms.append(control.step().norm)
    return [*norms, param.item()]


def test_whether_a_closure_begins_with_gradients_is_decided_alike(returned: Returned) -> None:
    # What waits is judged too: an Inf in it on one rank skips the step on all.
    for found in returned["gradients_that_wait_for_a_closure"]:
        (skipped, culprits), *norms, value = found
        assert skipped
        assert culprits == ("param_groups[0]['params'][0] on rank 0",)
        assert norms == [4.0, 4.0, 6.0]
        assert value == -7.0


def different_settings(rank: int) -> dict[str, str]:
    """One rank has another scale, or another clip: no rank steps, and all say the same."""
    from torch.nn.parallel import DistributedDataParallel

    odd = rank == 3
    given: dict[str, dict[str, Any]] = {
        "scale": {"scale": 64.0 if odd else 32.0},
        "clip": {"scale": 2.0, "clip": 2.0 if odd else 1.0},
        "resumed": {"scale": gradilocks.DynamicScale(init_scale=8.0)},
    }
    found = {}
    for name, settings in given.items():
        for kind in ("parts", "replicas", "what they wrap", "no model", "replicas made later"):
            torch.manual_seed(rank)  # Parts are no copies, which would be refused for that.
            inner = nn.Linear(2, 1)
            model: Any = inner
            if kind not in ("parts", "replicas made later"):
                model = DistributedDataParallel(inner)
            told: dict[str, Any] = {"model": model if kind == "replicas" else inner}
            if kind in ("parts", "no model"):
                told = {"process_group": dist.group.WORLD} if kind == "parts" else {}
            control = gradilocks.GradientControl(
                torch.optim.SGD(model.parameters(), lr=1.0), **told, **settings
            )
            if kind == "replicas made later":
                model = DistributedDataParallel(inner)
            if name == "resumed" and odd:
                state = control.state_dict()
                state["scale"] = 16.0
                control.load_state_dict(state)
            before = [param.detach().clone() for param in model.parameters()]
            control.backward(model(torch.ones(1, 2)).sum())
            said = _refusal(control.step)
            same = all(map(torch.equal, before, model.parameters()))
            found[f"{name}, {kind}"] = said if same else f"moved: {said}"
    return found


def test_ranks_with_different_settings_refuse_together(returned: Returned) -> None:
    expected = {
        "scale": "scale= is StaticScale(scale=32.0) on rank 0 and StaticScale(scale=64.0) on rank",
        "clip": "on rank 0 and ClipByNorm(max_norm=2.0",
        "resumed": "the current scale is 8.0 on rank 0 and 16.0 on rank 3",
    }
    first = returned["different_settings"][0]
    for found in returned["different_settings"]:
        assert found == first
    for name, said in first.items():
        assert said.startswith("ValueError: the ranks train one model and decide alike"), name
        assert expected[name.split(",")[0]] in said, name


def nothing_said(rank: int) -> list[str]:
    """Plain tensors without DistributedDataParallel: each rank is on its own, which is told."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradilocks")
    logger.addHandler(handler)
    try:
        model = nn.Linear(2, 1)
        control = gradilocks.GradientControl(torch.optim.SGD(model.parameters(), lr=1.0), clip=1.0)
        for _ in range(2):
            control.backward(model(torch.ones(1, 2)).sum())
            control.step()
            control.zero_grad()
    finally:
        logger.removeHandler(handler)
    return said


def test_ranks_of_which_nothing_is_said_are_told_so_once(returned: Returned) -> None:
    first, *others = returned["nothing_said"]
    (said,) = first
    assert said.startswith("this process is one of 4 ranks, and nothing says how they hold")
    assert others == [[]] * 3


def marks_of_other_systems(rank: int) -> dict[str, list[float]]:
    """Two stages of two tensor-parallel ranks, marked as Megatron and DeepSpeed mark them."""
    mesh = _mesh((2, 2), ("pp", "tp"))
    stage, place = divmod(rank, 2)
    tp, pp = mesh["tp"].get_group(), mesh["pp"].get_group()

    def model(**marks: dict[str, Any]) -> nn.Module:
        """A norm on every stage that tp copies, a weight that tp has cut, tied embeddings."""
        made = _Model(norm=(1.0, 2.0 + stage), weight=(1.0, 4.0 + rank), tied=(1.0, 9.0 + place))
        for name, given in marks.items():
            for mark, value in given.items():
                setattr(getattr(made, name), mark, value)
        return made

    cut = {"tensor_model_parallel": True}
    megatron = model(weight=cut, tied={**cut, "shared": stage == 1})
    deepspeed = model(
        weight={"model_parallel": True},
        tied={"model_parallel": True, "ds_pipe_replicated": True},
    )
    # Experts along what was the pipeline: all else is the same on both.
    experts = model(weight={**cut, "allreduce": False}, tied=cut)
    experts.norm.grad.fill_(2.0)
    world = dist.group.WORLD
    return {
        "megatron": _norms(
            megatron, process_group=world, copies=gradilocks.megatron_copies(tensor_group=tp)
        ),
        "deepspeed": _norms(
            deepspeed,
            process_group=world,
            copies=gradilocks.deepspeed_copies(pipe_group=pp, tensor_group=tp),
        ),
        "experts": _norms(
            experts,
            process_group=world,
            copies=gradilocks.megatron_copies(tensor_group=tp, expert_group=pp),
        ),
    }


def test_marks_of_megatron_and_deepspeed_say_who_counts(returned: Returned) -> None:
    for found in returned["marks_of_other_systems"]:
        weights, tied = [4.0, 5.0, 6.0, 7.0], [9.0, 10.0]
        for name in ("megatron", "deepspeed"):
            assert found[name] == pytest.approx(_expected([2.0, 3.0, *weights, *tied]), rel=1e-7)
        assert found["experts"] == pytest.approx(_expected([2.0, *weights, *tied]), rel=1e-7)


def tied_tensors_bounded_apart(rank: int) -> dict[str, Any]:
    """The first and the last stage hold one tensor of norm 5; it is bounded alike on both."""
    from torch.distributed.tensor import Shard, distribute_tensor

    found: dict[str, Any] = {}
    line, grid = _mesh((4,), ("pp",)), _mesh((2, 2), ("pp", "dp"))
    for name, mesh, last in (("plain", line, rank == 3), ("sharded", grid, rank > 1)):
        model = nn.Module()
        for each, values in (("tied", [3.0, 4.0]), ("own", [float(rank // 2), 0.0])):
            value, grad = torch.zeros(2), torch.tensor(values)
            if name == "sharded":
                value, grad = (distribute_tensor(t, mesh["dp"], [Shard(0)]) for t in (value, grad))
            setattr(model, each, nn.Parameter(value))
            getattr(model, each).grad = grad
        control = gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model=model,
            scale=None,
            clip=gradilocks.ClipPerTensor(1.0),
            mesh=mesh,
            distinct="pp",
            copies=lambda each, param, last=last: 0 if last and each == "tied" else None,
        )
        norm = control.step().norm
        tied: Any = model.tied
        whole = tied.full_tensor() if name == "sharded" else tied
        found[name] = norm, whole.tolist()
    return found


def test_tied_tensors_count_once_and_are_bounded_alike_on_both_stages(returned: Returned) -> None:
    for found in returned["tied_tensors_bounded_apart"]:
        # Plain: stages 0, 1 and 2 count a tied tensor each, and all four their own.
        assert found["plain"][0] == pytest.approx(math.sqrt(3 * 25.0 + 2.0), rel=1e-6)
        assert found["sharded"][0] == pytest.approx(math.sqrt(25.0 + 1.0), rel=1e-6)
        for _, values in found.values():
            assert values == pytest.approx([-0.6, -0.8], rel=1e-5)


def experts_of_one_name(rank: int) -> dict[str, Any]:
    """Each rank's expert is called `expert`: parts of one tensor, or four tensors?"""
    found: dict[str, Any] = {}
    for name, told in {
        "copies": {"copies": 1},
        "mesh": {"mesh": _mesh((4,), ("ep",)), "distinct": "ep"},
        "mesh and copies": {
            "mesh": _mesh((4,), ("ep",)),
            "distinct": "ep",
            "copies": lambda each, param: 4 if each == "router" else None,
        },
    }.items():
        model = _Model(expert=(1.0 + rank, 3.0 + rank), router=(0.0, 2.0))
        control = gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model=model,
            scale=None,
            clip=gradilocks.ClipPerTensor(math.sqrt(2.0)),
            **told,
        )
        refused = _refusal(control.step)
        found[name] = refused, (1.0 + rank - model.expert).tolist(), (-model.router).tolist()
    return found


def test_experts_that_share_a_name_are_not_taken_for_parts_of_one(returned: Returned) -> None:
    for found in returned["experts_of_one_name"]:
        refused, expert, router = found["copies"]
        assert (
            "whether these are different tensors, such as experts, or parts of one is not known"
            in refused
        )
        assert (expert, router) == ([0.0, 0.0], [0.0, 0.0])
        for name in ("mesh", "mesh and copies"):
            refused, expert, router = found[name]
            assert refused == "", name
            assert [*expert, *router] == pytest.approx([1.0] * 4, rel=1e-5), name


def one_rank_changes_alone(rank: int) -> dict[str, Any]:
    """Rank 0 thaws a bias after the first step and is given a parameter after the second."""
    found = {}
    for name, told in {
        "mesh": {"mesh": _mesh((4,), ("pp",)), "distinct": "pp"},
        "group": {"process_group": dist.group.WORLD},
        "copies": {"copies": 1},
    }.items():
        model = _Model(weight=(1.0 + rank, 0.0), bias=(0.0, 0.0))
        late = nn.Parameter(torch.zeros(2))
        model.bias.requires_grad_(False)
        control = gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=0.0), model=model, scale=None, **told
        )
        seen: list[Any] = []
        for step in range(4):
            model.weight.grad = torch.full((2,), 1.0 + rank)
            model.bias.grad = late.grad = None
            if rank == 0 and step > 0:
                model.bias.requires_grad_(True)
                model.bias.grad = torch.full((2,), 5.0)
            if rank == 0 and step == 2 and name != "copies":
                control._optimizers[0].add_param_group({"params": [late]})
            if rank == 0 and step > 1 and name != "copies":
                late.grad = torch.full((2,), 6.0 if step == 2 else math.inf)
            outcome = control.step()
            seen.append((outcome.norm, outcome.skipped, outcome.culprits))
        found[name] = seen
    return found


def test_what_one_rank_thaws_or_adds_alone_counts_and_nobody_waits(returned: Returned) -> None:
    def norm(*more: float) -> float:
        return math.sqrt(2 * sum(value**2 for value in (1.0, 2.0, 3.0, 4.0, *more)))

    first = returned["one_rank_changes_alone"][0]
    assert all(repr(found) == repr(first) for found in returned["one_rank_changes_alone"])
    for name, seen in first.items():
        added = [] if name == "copies" else [6.0]
        expected = [norm(), norm(5.0), norm(5.0, *added)]
        assert [each[0] for each in seen[:3]] == pytest.approx(expected, rel=1e-6), name
        if added:
            assert seen[3][1:] == (True, ("a parameter added since on rank 0",))


def one_rank_changes_what_all_must_tell(rank: int) -> dict[str, Any]:
    """Rank 3, or its stage, is given a parameter, where the ranks must ask each other who holds it;
    then the others are given one too."""
    grid, line = _mesh((2, 2), ("pp", "dp")), _mesh((4,), ("pp",))
    policy = gradilocks.ClipPerTensor(1e6)
    scaled = {"mesh": line, "distinct": "pp", "scale": 8.0, "clip": policy}
    stages = {"scale": None, "process_group": grid["pp"].get_group()}
    return {
        "copies": _changed_alone(rank == 3, rank, copies=1, scale=None),
        "group beside meshes": _changed_alone(rank > 1, rank // 2, sharded=grid["dp"], **stages),
        "a bound on each tensor": _changed_alone(rank == 3, rank, **scaled),
        "the same, unscaled": _changed_alone(rank == 3, rank, unscales=True, **scaled),
        "a scaler": _changed_alone(rank == 3, rank // 2, sharded=grid["dp"], scaler=policy),
    }


def _changed_alone(
    early: bool,
    seed: int,
    *,
    sharded: Any = None,
    scaler: Any = None,
    unscales: bool = False,
    **told: Any,
) -> tuple[list[str], list[float]]:
    """What was said in four steps, and the norms of those that were taken; a second parameter comes
    before the second of them, or before the last."""
    from torch.distributed.tensor import Shard, distribute_tensor

    values = [torch.full((4,), 1.0 + seed) for _ in range(2)]
    if sharded is not None:
        values = [distribute_tensor(value, sharded, [Shard(0)]) for value in values]
    params = [nn.Parameter(value) for value in values]
    optimizer = torch.optim.SGD(params[:1], lr=1.0)
    made: Any = (
        gradilocks.GradScaler("cpu", init_scale=1.0, clip=scaler)
        if scaler is not None
        else gradilocks.GradientControl(optimizer, **told)
    )
    scale = told.get("scale") or 1.0
    said: list[str] = []
    norms: list[float] = []

    def act() -> None:
        if scaler is not None:
            made.scale(torch.ones(()))
            made.step(optimizer)
            made.update()
            return
        made.scale_loss(torch.ones((), requires_grad=True))
        if unscales:
            made.unscale_()
        norms.append(made.step().norm)

    for step in range(4):
        if step == (1 if early else 3):
            optimizer.add_param_group({"params": params[1:]})
        before = _elements(params)
        for param in params:
            param.grad = torch.full_like(param, scale)
        said.append(_refusal(act))
        assert (before == _elements(params)) == bool(said[-1]), said
        if scaler is None:
            made.zero_grad()
    return said, norms


def _elements(params: list[nn.Parameter]) -> list[list[float]]:
    return [local_of(each).detach().tolist() for each in params]


def test_a_change_on_one_rank_that_all_must_tell_of_is_refused_by_all(returned: Returned) -> None:
    for rank, found in enumerate(returned["one_rank_changes_what_all_must_tell"]):
        for name, (said, norms) in found.items():
            assert said[0] == said[3] == "", (rank, name, said)
            for words in said[1:3]:
                if name == "a scaler" and rank < 2:  # On another mesh.
                    assert words == ""
                    continue
                if name == "group beside meshes":
                    here, others = rank // 2, "ranks [2, 3] refused the step"
                else:
                    here, others = rank == 3, "rank 3 refused the step"
                if here or name == "a scaler":
                    assert "were added, removed or replaced on" in words, (rank, name)
                    assert "on all ranks before the same step" in words
                else:
                    assert others in words, (rank, name)
            if name != "a scaler":
                per_rank = 2 if name == "group beside meshes" else 4
                expected = [math.sqrt(4 * per_rank), math.sqrt(2 * 4 * per_rank)]
                assert norms == pytest.approx(expected, rel=1e-6), name


def all_ranks_add_a_parameter(rank: int) -> list[Any]:
    """The ranks tell each other anew, also for a bound on each tensor."""
    model = _Model(weight=(1.0 + rank, 1.0), late=(0.0, 1.0))
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    control = gradilocks.GradientControl(
        optimizer,
        model=model,
        scale=None,
        clip=gradilocks.ClipPerTensor(1.0),
        mesh=_mesh((4,), ("pp",)),
        distinct="pp",
    )
    seen = [control.step().norm]
    optimizer.add_param_group({"params": [model.late]})
    model.weight.grad = torch.ones(2)  # The bound was written into it.
    seen.append(control.step().norm)
    model.late.grad = torch.full((2,), math.inf)
    return [seen, (-model.late).tolist(), control.step().culprits]


def test_parameters_that_all_ranks_add_are_told_of(returned: Returned) -> None:
    for seen, late, culprits in returned["all_ranks_add_a_parameter"]:
        assert seen == pytest.approx([math.sqrt(8.0), math.sqrt(16.0)], rel=1e-6)
        assert late == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-5)
        assert culprits == ("late on all 4 ranks",)


def groups_in_unequal_numbers(rank: int) -> list[float] | None:
    """Rank 1 is in groups of its own, as the ends of a pipeline are; one is made all the same."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [[1, 2, 3]], mesh_dim_names=("dp", "pp"))
    for _ in range(3 if rank == 1 else 0):
        dist.new_group([1], use_local_synchronization=True)
    if rank == 0:
        return None
    return _norms(_Model(weight=(1.0, 1.0 + rank)), mesh=mesh, distinct="pp")


def test_ranks_in_unequal_numbers_of_groups_make_one_together(returned: Returned) -> None:
    for found in returned["groups_in_unequal_numbers"][1:]:
        assert found == pytest.approx(_expected([2.0, 3.0, 4.0]), rel=1e-7)


def copies_that_were_called_parts(rank: int) -> dict[str, str]:
    """process_group= for what is a copy on every rank, or on every second one."""

    def told(value: int, gradient: int, *, first: float = 1.0) -> str:
        torch.manual_seed(value)
        model = nn.Linear(3, 3)
        torch.manual_seed(gradient)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        before = [param.detach().clone() for param in model.parameters()]
        control = gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model=model,
            scale=None,
            process_group=dist.group.WORLD,
        )
        grads = [param.grad for param in model.parameters()]
        if first != 1.0:  # A first scale of 65536 overflows; a layer may begin without gradients.
            for param in model.parameters():
                param.grad = param.grad * 0.0 + first
            lr, control._optimizers[0].param_groups[0]["lr"] = 1.0, 0.0
            control.step()
            control._optimizers[0].param_groups[0]["lr"] = lr
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
        said = _refusal(control.step)
        same = all(map(torch.equal, before, model.parameters()))
        return said if same == bool(said) else f"moved: {said}"

    return {
        "copies": told(0, 0),
        "copies in pairs": told(rank % 2, rank % 2),
        "copies after an overflow": told(0, 0, first=math.inf),
        "copies after zeros": told(0, 0, first=0.0),
        "one seed": told(0, rank),
        "one gradient": told(rank, 0),
    }


def test_a_group_that_is_given_for_copies_is_refused(returned: Returned) -> None:
    for found in returned["copies_that_were_called_parts"]:
        assert "the gradients on ranks [0, 1, 2, 3] are the same bit for bit" in found["copies"]
        assert "weight among them: they are copies" in found["copies"]
        assert found["copies after an overflow"] == found["copies"]
        assert found["copies after zeros"] == found["copies"]
        assert "the gradients on ranks [0, 2] are the same" in found["copies in pairs"]
        assert found["one seed"] == found["one gradient"] == ""


def copies_of_a_nan(rank: int) -> list[Any]:
    """One NaN that all ranks hold is one NaN; a copy that alone has some is told of."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh, found = _mesh((4,), ("tp",)), []
    for alone in (False, True):
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
        model.weight.grad = distribute_tensor(torch.ones(3), mesh, [Replicate()])
        if not alone or rank == 2:
            model.weight.grad.to_local()[1] = math.nan
        control = gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=1.0), model=model, scale=None
        )
        outcome = control.step()
        found.append((dict(outcome.counts), outcome._numbers["nan"]))
    return found


def test_elements_of_copies_count_once_among_nan_too(returned: Returned) -> None:
    for everywhere, alone in returned["copies_of_a_nan"]:
        assert everywhere == ({"weight on all 4 ranks": (1, 0)}, 1.0)
        assert alone == ({"weight on rank 2": (1, 0)}, 1.0)


def copies_along_a_distinct_dimension(rank: int) -> dict[str, Any]:
    """Experts differ along ep, and the router beside them does not: who counts it was not said."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = _mesh((2, 2), ("dp", "ep"))

    def norm(**told: Any) -> Any:
        model = nn.Module()
        for name, seed in (("router", 0), ("expert", 1 + rank % 2)):
            torch.manual_seed(seed)
            setattr(model, name, nn.Parameter(torch.randn(4)))
            getattr(model, name).grad = torch.randn(4)
        if told.pop("on a mesh", False):
            value, grad = model.router.detach(), model.router.grad
            model.router = nn.Parameter(distribute_tensor(value, mesh["dp"], [Replicate()]))
            model.router.grad = distribute_tensor(grad, mesh["dp"], [Replicate()])
        overflows = told.pop("after an overflow", False)
        made: list[float] = []

        def act() -> None:
            control = gradilocks.GradientControl(
                torch.optim.SGD(model.parameters(), lr=0.0),
                model=model,
                scale=None,
                mesh=mesh,
                distinct="ep",
                **told,
            )
            if overflows:
                grad = model.expert.grad
                model.expert.grad = grad * math.inf if rank == 3 else grad
                assert control.step().skipped
                model.expert.grad = grad
            made.append(control.step().norm)

        return _refusal(act) or made[0]

    def all_hold(name: str, param: torch.Tensor) -> int | None:
        return 4 if name == "router" else None

    def first_counts(name: str, param: torch.Tensor) -> int | None:
        return 0 if name == "router" and rank % 2 else None

    return {
        "plain": norm(),
        "on a mesh": norm(**{"on a mesh": True}),
        "plain, after an overflow": norm(**{"after an overflow": True}),
        "on a mesh, after an overflow": norm(**{"on a mesh": True, "after an overflow": True}),
        "plain, told": norm(copies=all_hold),
        "on a mesh, told": norm(**{"on a mesh": True}, copies=first_counts),
    }


def test_a_copy_along_a_distinct_dimension_is_not_counted_twice(returned: Returned) -> None:
    drawn = []
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        torch.randn(4)
        drawn.append(torch.randn(4))
    expected = torch.cat(drawn).double().norm().float().item()
    for found in returned["copies_along_a_distinct_dimension"]:
        for name in ("plain", "on a mesh"):
            assert (
                "router has the same values and the same gradient on ranks 0 and 1" in found[name]
            )
            assert "4 for a plain tensor that all 4 ranks hold" in found[name]
            assert found[f"{name}, after an overflow"] == found[name]
            assert found[f"{name}, told"] == expected


def stages_that_mesh_calls_copies(rank: int) -> dict[str, Any]:
    """Two stages with the same names, and `distinct=` was forgotten."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh((2, 2), ("pp", "dp"))

    def told(*, sharded: bool, first: float = 1.0, **more: Any) -> list[Any]:
        torch.manual_seed(rank // 2)
        layer = nn.Linear(4, 4)
        for name, param in list(layer.named_parameters()):
            grad = torch.randn_like(param)
            if sharded:
                value = distribute_tensor(param.detach(), mesh["dp"], [Shard(0)])
                setattr(layer, name, nn.Parameter(value))
                grad = distribute_tensor(grad, mesh["dp"], [Shard(0)])
            getattr(layer, name).grad = grad
        control = gradilocks.GradientControl(
            torch.optim.SGD(layer.parameters(), lr=0.0),
            model=layer,
            scale=None,
            mesh=mesh,
            **more,
        )
        grads = [param.grad for param in layer.parameters()]
        if first != 1.0:
            layer.bias.grad = layer.bias.grad * first
            control.step()
            layer.bias.grad = grads[1]
        made: list[float] = []
        # More than once: who goes on after an error is not to get a wrong answer.
        refused = [_refusal(lambda: made.append(control.step().norm)) for _ in range(2)]
        return [refused, made]

    return {
        "plain": told(sharded=False),
        "sharded": told(sharded=True),
        "plain, after an overflow": told(sharded=False, first=math.inf),
        "sharded, after an overflow": told(sharded=True, first=math.inf),
        "distinct, plain": told(sharded=False, distinct="pp"),
        "distinct, sharded": told(sharded=True, distinct="pp"),
        "copies": told(sharded=False, distinct="pp", copies=lambda name, param: None),
    }


def test_stages_of_one_name_are_not_taken_for_copies_when_distinct_was_forgotten(
    returned: Returned,
) -> None:
    drawn = []
    for stage in range(2):
        torch.manual_seed(stage)
        drawn += [torch.randn_like(param) for param in nn.Linear(4, 4).parameters()]
    expected = torch.cat([each.flatten() for each in drawn]).double().norm().float().item()
    for found in returned["stages_that_mesh_calls_copies"]:
        for name, (refused, norms) in found.items():
            if name.startswith(("distinct", "copies")):
                assert refused == ["", ""], name
                assert norms == [expected] * 2, name
                continue
            assert norms == [], name
            for said in refused:
                assert "weight is the same on ranks 0 and 2 by what mesh= or copies= says" in said
                assert 'distinct=("pp",)' in said


def nothing_said_of_some(rank: int) -> dict[str, Any]:
    """A rule that speaks of experts alone: the router is what it is without it, and looked at."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def rule(name: str, param: torch.Tensor) -> int | None:
        return 1 if name == "expert" else None

    found: dict[str, Any] = {}
    for name, told in {"world": {}, "group": {"process_group": dist.group.WORLD}}.items():
        for alike in (True, False):
            model = _Model(expert=(1.0 + rank, 1.0 + rank), router=(1.0, 12.0 + rank * (not alike)))
            mesh = _mesh((4,), ("dp",))
            model.dense = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
            model.dense.grad = distribute_tensor(torch.full((4,), 3.0), mesh, [Shard(0)])
            made: list[Any] = []
            refused = _refusal(
                lambda model=model, told=told, made=made: made.append(
                    _norms(model, copies=rule, **told)
                )
            )
            found[f"{name}, {alike}"] = refused or made[0]
    grid = _mesh((2, 2), ("pp", "dp"))
    model = _Model(expert=(1.0 + rank, 1.0 + rank), router=(1.0, 12.0))
    model.dense = nn.Parameter(distribute_tensor(torch.zeros(4), grid["dp"], [Shard(0)]))
    found["stages"] = _refusal(
        lambda: _norms(model, copies=rule, process_group=grid["pp"].get_group())
    )
    plain = _Model(expert=(1.0 + rank, 1.0 + rank), router=(1.0, 12.0))
    found["no mesh at all"] = _norms(plain, copies=rule)
    return found


def test_what_copies_says_nothing_of_is_taken_as_without_it(returned: Returned) -> None:
    experts = [1.0, 2.0, 3.0, 4.0]
    for found in returned["nothing_said_of_some"]:
        for name in ("world", "group"):
            whole = _expected([*experts, 12.0, 3.0, 3.0])
            assert found[f"{name}, True"] == pytest.approx(whole, rel=1e-7), name
            assert "their gradients are not the same" in found[f"{name}, False"], name
        assert "router is a plain tensor beside DTensors" in found["stages"]
        assert found["no mesh at all"] == pytest.approx(_expected([*experts, 12.0]), rel=1e-7)


def _drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _steps(
    values: dict[str, torch.Tensor], grads: list[dict[str, torch.Tensor]], **told: Any
) -> list[str | float]:
    """What each step said, or its norm: a step for each of `grads`, by the names of parameters.

    A parameter without a gradient is frozen until it has its first.
    """
    model = nn.Module()
    for name, value in values.items():
        setattr(model, name, nn.Parameter(value.clone(), requires_grad=False))
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.0), model=model, scale=None, **told
    )
    seen: list[str | float] = []
    for theirs in grads:
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad or name in theirs)
            param.grad = theirs[name].clone() if name in theirs else None
        made: list[float] = []
        seen.append(_refusal(lambda made=made: made.append(control.step().norm)) or made[0])
    return seen


def _norm(*grads: torch.Tensor) -> float:
    whole = torch.cat([grad.to_dense().double().flatten() for grad in grads])
    return whole.norm().float().item()


def _late(rank: int, name: str, grad: torch.Tensor, *, after: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's own expert has a gradient at every step, and `name` from one of them on."""
    return [
        {"expert": _drawn(100 * rank + step, 3, 3), **({name: grad} if step >= after else {})}
        for step in range(4)
    ]


def copies_called_parts_that_show_it_later(rank: int) -> dict[str, Any]:
    line = {"mesh": _mesh((4,), ("ep",)), "distinct": "ep"}
    group, one = {"process_group": dist.group.WORLD}, {"copies": 1}
    rest = {
        "process_group": dist.group.WORLD,
        "copies": lambda name, param: 4 if name == "x" else None,
    }
    rows = torch.zeros(50, 6)
    rows[[3, 17]] = _drawn(1, 2, 6)
    values = {"expert": _drawn(10 + rank, 3, 3), "shared": _drawn(0, 6)}
    ones = {**values, "shared": torch.ones(6)}
    table = {**values, "shared": _drawn(0, 50, 6)}
    scalar = {**values, "shared": torch.full((), 2.5)}
    found: dict[str, Any] = {}
    for name, told in {"mesh": line, "group": group, "copies": one, "rest": rest}.items():
        found[f"{name}, ones"] = _steps(ones, _late(rank, "shared", _drawn(1, 6), after=0), **told)
        found[f"{name}, late"] = _steps(
            values, _late(rank, "shared", _drawn(1, 6), after=2), **told
        )
        found[f"{name}, sparse"] = _steps(
            table, _late(rank, "shared", rows.to_sparse(1), after=1), **told
        )
    # Thawed on one rank after the other.
    found["mesh, on one rank"] = _steps(
        values, _late(rank, "shared", _drawn(1, 6), after=rank), **line
    )
    grads = [
        {"expert": _drawn(100 * rank + step, 3, 3), "shared": _drawn(step, 1)[0]}
        for step in range(7)
    ]
    found["mesh, scalar"] = _steps(scalar, grads, **line)
    for at in (1, 3, 5):  # It is not used at each step.
        del grads[at]["shared"]
    found["mesh, scalar with gaps"] = _steps(scalar, grads, **line)
    return found


def test_a_copy_that_was_called_a_part_is_refused_when_it_has_a_gradient(
    returned: Returned,
) -> None:
    def expected(step: int, *more: torch.Tensor) -> float:
        return _norm(*(_drawn(100 * rank + step, 3, 3) for rank in range(4)), *more)

    first = returned["copies_called_parts_that_show_it_later"][0]
    for found in returned["copies_called_parts_that_show_it_later"]:
        assert found == first
    refusals = {name: [str(said) for said in seen] for name, seen in first.items()}
    for name, seen in first.items():
        after = {"ones": 0, "late": 2, "sparse": 1, "on one rank": 1, "scalar": 3}
        after["scalar with gaps"] = 6  # At the fourth number that is the same.
        begins = after[name.split(", ")[1]]
        if "scalar" not in name and "one rank" not in name:
            right = [expected(step) for step in range(begins)]
            assert seen[:begins] == pytest.approx(right, rel=1e-6), name
        for said in refusals[name][begins:]:
            words = "shared has the same values and the same gradient on ranks 0 and 1, bit for bit"
            assert words in said, name
            assert "4 for a plain tensor that all 4 ranks hold" in said, name


def parts_called_copies_that_show_it_later(rank: int) -> dict[str, Any]:
    line = {"mesh": _mesh((4,), ("dp",))}
    shared = _drawn(0, 6)
    rows = torch.zeros(50, 6)
    rows[3 : 5 + rank] = 1.0
    found: dict[str, Any] = {}
    for name, told in {"mesh": line, "copies": {"copies": 4}}.items():
        for kind, value, grad in (
            ("dense", shared, _drawn(1 + rank, 6)),
            ("sparse", _drawn(0, 50, 6), rows.to_sparse(1)),
            ("on one rank", shared, _drawn(1, 6) * (rank == 2)),
        ):
            found[f"{name}, {kind}"] = _steps(
                {"first": shared, "late": value},
                [{"first": _drawn(step, 6), **({"late": grad} if step else {})} for step in (0, 1)],
                **told,
            )
        found[f"{name}, alike"] = _steps(
            {"first": shared, "late": shared},
            [{"first": _drawn(2, 6), "late": _drawn(3, 6)}],
            **told,
        )
    return found


def test_a_part_that_was_called_a_copy_is_refused_when_it_has_a_gradient(
    returned: Returned,
) -> None:
    for found in returned["parts_called_copies_that_show_it_later"]:
        for name, seen in found.items():
            if "alike" in name:
                assert seen == pytest.approx([_norm(_drawn(2, 6), _drawn(3, 6))], rel=1e-6)
                continue
            assert seen[0] == pytest.approx(_norm(_drawn(0, 6)), rel=1e-6), name
            where = 2 if "one rank" in name else 1
            words = f"late is the same on ranks 0 and {where} by what mesh= or copies= says"
            assert words in str(seen[1]), name


def parts_that_are_alike_by_themselves(rank: int) -> dict[str, list[Any]]:
    """Zeros that get the same gradient by themselves, as under a loss that is a sum."""
    line = {"mesh": _mesh((4,), ("ep",)), "distinct": "ep"}
    found = {}
    for name, value, grads in (
        ("a bias", torch.zeros(4), [torch.full((4,), 3.0)] * 8),
        ("rows", torch.zeros(4, 5), [_drawn(7, 1, 5).expand(4, 5)] * 8),
        ("other values", torch.full((5,), float(rank)), [_drawn(7, 5)] * 8),
        ("drawn, a bias", _drawn(5, 4), [torch.full((4,), 3.0)] * 8),
        ("zeros", torch.ones(5), [torch.zeros(5)] * 8),
    ):
        for told in (line, {"process_group": dist.group.WORLD}):
            expert = _drawn(rank, 3)
            steps = [{"expert": expert, "part": grad} for grad in grads]
            seen = _steps({"expert": expert, "part": value}, steps, **told)
            found[f"{name}, {min(told)}"] = [
                seen,
                _norm(*[grads[0]] * 4, *map(_drawn, range(4), [3] * 4)),
            ]
    renamed = {f"part{rank}": torch.zeros(6)}
    found["other names"] = [
        _steps(renamed, [{f"part{rank}": _drawn(1, 6)}] * 2, **line),
        _norm(*[_drawn(1, 6)] * 4),
    ]
    return found


def test_parts_that_are_alike_by_themselves_are_not_taken_for_copies(returned: Returned) -> None:
    for found in returned["parts_that_are_alike_by_themselves"]:
        for name, (seen, expected) in found.items():
            assert seen == pytest.approx([expected] * len(seen), rel=1e-6), name


def copies_of_unlike_partners(rank: int) -> dict[str, Any]:
    """Tensor parallel inside data parallel: pairs of ranks share one, other pairs the other."""
    rows, columns = rank // 2, rank % 2

    def layer(bias: torch.Tensor, at: int) -> nn.Module:
        made = nn.Module()
        made.bias, made.weight = nn.Parameter(bias), nn.Parameter(_drawn(at, 3))
        made.weight.grad, made.bias.grad = _drawn(20 + at, 3), _drawn(40 + at, 3)
        return made

    def norm(model: nn.Module) -> Any:
        made: list[float] = []

        def act() -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            control = gradilocks.GradientControl(optimizer, model=model, scale=None, copies=2)
            made.append(control.step().norm)

        return _refusal(act) or made[0]

    zero = torch.zeros(3)
    unknown = nn.ModuleDict({"a": layer(zero, rows), "b": layer(zero, 10 + columns)})
    unknown.c = nn.Parameter(torch.zeros(3))
    unknown.c.grad = _drawn(1, 3)
    wrong = nn.ModuleDict({"a": layer(zero, rows), "b": layer(zero, 10 + columns)})
    wrong["a"].bias.grad = _drawn(70 + columns, 3)  # It is shared as the layer beside it is.
    return {
        "drawn": norm(
            nn.ModuleDict(
                {
                    "a": layer(_drawn(60 + rows, 3), rows),
                    "b": layer(_drawn(columns, 3), 10 + columns),
                }
            )
        ),
        "zeros": norm(nn.ModuleDict({"a": layer(zero, rows), "b": layer(zero, 10 + columns)})),
        "unknown": norm(unknown),
        "wrong": norm(wrong),
    }


def test_each_parameter_may_have_copies_on_other_ranks(returned: Returned) -> None:
    expected = _norm(*(_drawn(seed + at, 3) for seed in (20, 40) for at in (0, 1, 10, 11)))
    for found in returned["copies_of_unlike_partners"]:
        assert found["drawn"] == found["zeros"] == pytest.approx(expected, rel=1e-6)
        assert "2 ranks hold the same elements of c" in found["unknown"]
        assert "ranks [0, 1, 2, 3] hold the same values" in found["unknown"]
        assert "a.bias is the same on ranks 0 and 1 by what" in found["wrong"]


def what_a_refusal_says(rank: int) -> list[str]:
    """The norms of gradients without the scale; of FSDP1 the argument that is for it."""
    line, said = _mesh((4,), ("dp",)), []
    for flattened in (False, True):
        model = _Model(weight=(1.0, 0.0))
        model.weight.grad = torch.full((2,), 1024.0 * (3.0 + rank))
        if flattened:
            model.weight._fsdp_flattened = True
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        control = gradilocks.GradientControl(optimizer, model=model, scale=1024.0, mesh=line)
        control.scale_loss(torch.ones((), requires_grad=True))
        said.append(_refusal(control.step))
    return said


def test_a_refusal_names_what_the_user_knows(returned: Returned) -> None:
    for said, flattened in returned["what_a_refusal_says"]:
        for each in (said, flattened):
            assert "their norms are 4.24264 and 5.65685. Only the first would count" in each
        assert 'distinct=("pp",)' in said
        assert "distinct=" not in flattened
        assert "process_group=model.process_group" in flattened


def copied_controls(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    mesh = _mesh((4,), ("pp",))
    found: dict[str, Any] = {}
    for name, told in {
        "group": {"process_group": dist.group.WORLD},
        "mesh": {"mesh": mesh, "distinct": "pp", "clip": gradilocks.AdaGC(warmup=1)},
    }.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        control = gradilocks.GradientControl(optimizer, model=model, **told)
        _step(model, control, 0)
        twin, copied = copy.deepcopy((model, control))
        same = control.state_dict() == copied.state_dict()
        found[name] = same, _step(model, control, 1), _step(twin, copied, 1)
        try:
            pickle.dumps(control._rank_options)
            found[f"{name}, pickled"] = "pickled"
        except TypeError as error:
            found[f"{name}, pickled"] = str(error)
    replica = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.0)
    control = gradilocks.GradientControl(optimizer, model=replica, check_replicas_every=1)
    _step(replica, control, 0)
    twin, copied = copy.deepcopy((replica, control))
    found["DDP"] = True, _step(replica, control, 1), _step(twin, copied, 1)
    found["DDP, replicas"] = copied._replicas is not None
    return found


def _step(model: nn.Module, control: Any, seed: int) -> float:
    inputs = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
    control.backward(model(inputs).square().mean())
    outcome = control.step()
    control.zero_grad()
    return float(outcome.norm)


def test_a_copied_control_is_among_the_same_ranks(returned: Returned) -> None:
    every = returned["copied_controls"]
    for found in every:
        for name in ("group", "mesh", "DDP"):
            same, norm, again = found[name]
            assert same
            assert norm == again == every[0][name][1]
        assert "Save control.state_dict()" in found["group, pickled"]
        assert found["DDP, replicas"]
