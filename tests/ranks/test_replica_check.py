"""Four real processes whose control compares replicas every so many steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradilocks
from gradilocks.errors import ReplicasDiffer
from tests.ranks.rank_programs import run_all

Returned = dict[str, list[Any]]


def _programs() -> list[Callable[[int], Any]]:
    return [
        data_parallel,
        a_parameter_that_parts,
        a_parameter_in_another_order,
        a_gradient_that_was_not_averaged,
        a_gradient_that_is_missing,
        a_scale_that_one_rank_loads,
        one_shard_of_hybrid_sharding,
        outside_the_tensor_parallel_plan,
        told_by_copies,
        nothing_to_compare,
        one_rank_adds_alone,
        what_is_refused,
    ]


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    """What each of four ranks returned from every program below."""
    return run_all(_programs(), tmp_path_factory.mktemp("replicas"), ranks=4)


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, generator=generator)


def _train(
    model: nn.Module,
    steps: int,
    *,
    before_step: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Any:
    """The step number, tensors and ranks of the error, or the number of steps that were taken."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options.setdefault("model", model)
    control = gradilocks.GradientControl(optimizer, clip=1.0, **options)
    for step in range(1, steps + 1):
        control.zero_grad()
        control.backward(model(_inputs(dist.get_rank(), step)).square().sum())
        before_step(step)
        before = [param.detach().clone() for param in model.parameters()]
        try:
            control.step()
        except ReplicasDiffer as error:
            kept = all(map(torch.equal, before, model.parameters()))
            return error.step, error.tensors, error.ranks, kept, str(error)
    return steps


def data_parallel(rank: int) -> Any:
    calls: list[str] = []
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(f"{tensor.dtype} {tensor.numel()}")
        return real(tensor, *args, **kwargs)

    model = DistributedDataParallel(_model())
    dist.all_reduce = counted
    try:
        return _train(model, 7, check_replicas_every=3), calls
    finally:
        dist.all_reduce = real


def a_parameter_that_parts(rank: int) -> Any:
    model = DistributedDataParallel(_model())

    def part(step: int) -> None:
        if step == 4 and rank in (1, 3):
            with torch.no_grad():
                weight = model.module[2].weight
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))

    return _train(model, 9, before_step=part, check_replicas_every=3)


def a_parameter_in_another_order(rank: int) -> Any:
    """With the same norm to the last bit."""
    model = DistributedDataParallel(_model())
    with torch.no_grad():
        model.module[2].bias.copy_(torch.arange(model.module[2].bias.numel()))

    def part(step: int) -> None:
        if step == 3 and rank == 2:
            with torch.no_grad():
                model.module[2].bias.copy_(model.module[2].bias.flip(0))

    return _train(model, 4, before_step=part, check_replicas_every=1)


def a_gradient_that_was_not_averaged(rank: int) -> Any:
    """At the second step: at the first all gradients are compared without being asked to."""
    model = _model()

    def average(step: int) -> None:
        for param in model.parameters() if step == 1 else ():
            dist.all_reduce(param.grad)

    return _train(
        model,
        3,
        before_step=average,
        mesh=_mesh((4,), ("dp",)),
        check_replicas_every=1,
    )


def a_gradient_that_is_missing(rank: int) -> Any:
    model = DistributedDataParallel(_model())

    def lose(step: int) -> None:
        if rank == 2:
            model.module[0].bias.grad = None

    return _train(model, 3, before_step=lose, check_replicas_every=5)


def a_scale_that_one_rank_loads(rank: int) -> Any:
    model = DistributedDataParallel(_model())
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.01), model=model, check_replicas_every=1
    )
    for step in range(3):
        if step == 1 and rank == 3:
            control.load_state_dict({**control.state_dict(), "scale": 4.0})
        control.zero_grad()
        control.backward(model(_inputs(rank, step)).square().sum())
        try:
            control.step()
        except ReplicasDiffer as error:
            return error.step, error.tensors, error.ranks, str(error)
    return None


def one_shard_of_hybrid_sharding(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_model(), mesh=_mesh((2, 2), ("replicate", "shard")))

    def part(step: int) -> None:
        if step == 2 and rank == 3:
            with torch.no_grad():
                model[0].weight.to_local()[0, 0] += 1

    return _train(model, 4, before_step=part, check_replicas_every=1)


def outside_the_tensor_parallel_plan(rank: int) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = _mesh((2, 2), ("dp", "tp"))
    model = parallelize_module(_model(), mesh["tp"], {"0": ColwiseParallel(use_local_output=True)})
    # The second layer sees half of the features on each rank.
    model[2] = nn.Linear(4, 4)
    with torch.no_grad():
        model[2].weight.fill_(0.5)
        model[2].bias.fill_(0.0)

    def average(step: int) -> None:
        for param in model[2].parameters():
            dist.all_reduce(param.grad)
        for param in model[0].parameters():
            dist.all_reduce(param.grad.to_local(), group=mesh["dp"].get_group())
        if step == 2 and rank == 2:
            model[0].weight.grad.to_local()[0, 0] += 1.0

    return _train(model, 3, before_step=average, mesh=mesh, check_replicas_every=1)


def told_by_copies(rank: int) -> Any:
    """The first layer is another on every rank, the second lies on ranks 0 and 1, and 2 and 3."""
    model = _model()
    with torch.no_grad():
        model[0].weight += rank
        model[2].weight += rank // 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def average(step: int) -> None:
        for param in model[2].parameters():
            dist.all_reduce(param.grad, group=pairs[rank // 2])
        if step == 3 and rank == 0:
            model[2].bias.grad[1] += 1.0

    return _train(
        model,
        4,
        before_step=average,
        process_group=dist.group.WORLD,
        copies=lambda name, param: 1 if name.startswith("0.") else 2,
        check_replicas_every=1,
    )


def nothing_to_compare(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        taken = _train(fully_shard(_model()), 3, check_replicas_every=1)
    about = [each for each in said if "replicas" in str(each.message)]
    return taken, [(str(each.message), each.filename) for each in about]


def what_is_refused(rank: int) -> Any:
    found = {}
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for given in (0, -1, 2.0, True, "10", 10):
        with pytest.raises(ValueError, match="check_replicas_every=") as raised:
            gradilocks.GradientControl(optimizer, model=model, check_replicas_every=given)
        found[repr(given)] = str(raised.value)
    with pytest.raises(ValueError, match="same settings") as raised:
        _train(DistributedDataParallel(_model()), 1, check_replicas_every=None if rank else 5)
    found["different"] = str(raised.value)
    on_nonfinite = "skip" if rank else "raise"
    with pytest.raises(ValueError, match="same settings") as raised:
        _train(DistributedDataParallel(_model()), 1, on_nonfinite=on_nonfinite)
    found["on_nonfinite"] = str(raised.value)
    return found


def test_replicas_that_stay_equal_cost_one_collective_every_so_many_steps(
    returned: Returned,
) -> None:
    # Four tensors and two numbers, parameter and gradient, norm and bits, largest and smallest, and
    # whether a rank has others than it has told of: at steps 1, 4 and 7.
    for taken, calls in returned["data_parallel"]:
        assert taken == 7
        assert calls == ["torch.int64 49"] * 3


def test_the_last_bit_of_a_parameter_is_noticed(returned: Returned) -> None:
    for step, tensors, ranks, kept, said in returned["a_parameter_that_parts"]:
        assert (step, tensors[0], ranks, kept) == (4, "2.weight", ((0, 2), (1, 3)), True)
        assert "step 4" in said
        assert "on ranks [0, 2]" in said
        assert "on ranks [1, 3]" in said


def test_the_same_norm_with_other_elements_is_noticed(returned: Returned) -> None:
    for step, tensors, ranks, kept, said in returned["a_parameter_in_another_order"]:
        assert (step, tensors, ranks, kept) == (3, ("2.bias",), ((0, 1, 3), (2,)), True)
        assert "where elements differ and norms do not" in said


def test_gradients_that_were_not_averaged_are_noticed(returned: Returned) -> None:
    for step, tensors, ranks, kept, _ in returned["a_gradient_that_was_not_averaged"]:
        assert step == 2
        assert kept
        assert tensors == tuple(f"the gradient of {n}.{k}" for n in (0, 2) for k in _KINDS)
        assert ranks == ((0,), (1,), (2,), (3,))


_KINDS = ("weight", "bias")


def test_a_gradient_that_only_some_replicas_have_is_noticed(returned: Returned) -> None:
    for step, tensors, ranks, kept, said in returned["a_gradient_that_is_missing"]:
        assert (step, tensors, kept) == (1, ("the gradient of 0.bias",), True)
        assert ranks == ((0, 1, 3), (2,))
        assert "none on ranks [2]" in said


def test_a_scale_that_one_rank_alone_has_loaded_is_noticed(returned: Returned) -> None:
    for step, tensors, ranks, said in returned["a_scale_that_one_rank_loads"]:
        assert (step, tensors[0], ranks) == (2, "the scale", ((0, 1, 2), (3,)))
        assert "the scale is 65536.0 on ranks [0, 1, 2], 4.0 on ranks [3]" in said


def test_shards_are_compared_with_their_own_replicas(returned: Returned) -> None:
    for step, tensors, ranks, kept, _ in returned["one_shard_of_hybrid_sharding"]:
        assert (step, tensors[0], ranks, kept) == (2, "0.weight", ((1,), (3,)), True)


def test_copies_along_the_dimensions_that_are_equal_are_compared(returned: Returned) -> None:
    for step, tensors, ranks, kept, _ in returned["outside_the_tensor_parallel_plan"]:
        assert (step, tensors) == (2, ("the gradient of 0.weight",))
        assert (ranks, kept) == (((0,), (2,)), True)


def test_copies_that_the_user_has_told_are_compared(returned: Returned) -> None:
    for step, tensors, ranks, kept, _ in returned["told_by_copies"]:
        assert (step, tensors) == (3, ("the gradient of 2.bias",))
        assert (ranks, kept) == (((0,), (1,)), True)


def one_rank_adds_alone(rank: int) -> Any:
    """Rank 2 is given a parameter that its replicas have not; stages of a pipeline may do that."""
    model, late = DistributedDataParallel(_model()), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    control = gradilocks.GradientControl(optimizer, model=model, check_replicas_every=1)
    stage, later = nn.Linear(4, 4), nn.Parameter(torch.ones(2))
    of_stage = torch.optim.SGD(stage.parameters(), lr=0.01)
    mesh = _mesh((2, 2), ("pp", "dp"))
    told = {"mesh": mesh, "distinct": "pp", "check_replicas_every": 1}
    staged = gradilocks.GradientControl(of_stage, model={"": stage}, scale=None, **told)
    taken, said = [], []
    for step in range(3):
        control.zero_grad()
        control.backward(model(_inputs(rank, step)).square().sum())
        for param in stage.parameters():
            torch.manual_seed(step + 10 * (rank // 2))
            param.grad = torch.randn(param.shape)
        if step == 1 and rank == 2:
            optimizer.add_param_group({"params": [late]})
        if step == 1 and rank // 2:
            of_stage.add_param_group({"params": [later]})
        if step == 2 and rank == 3:
            with torch.no_grad():
                later += 1
        for each in (control, staged):
            try:
                each.step()
            except ReplicasDiffer as error:
                said.append((step, error.ranks, error.tensors, str(error)))
        taken.append(control.state_dict()["gradilocks"]["steps"])
    return taken, said


def test_a_parameter_that_one_rank_adds_is_told_to_all(returned: Returned) -> None:
    for rank, (taken, said) in enumerate(returned["one_rank_adds_alone"]):
        assert taken == [1, 1, 1]
        lacking, again, parted = said
        for step, (number, ranks, _, words) in zip((1, 2), (lacking, again), strict=True):
            assert (number, ranks) == (step, ((2,), (0, 1, 3)))
            assert "and not on ranks [0, 1, 3]" in words
        # What the second stage was given is compared from then on.
        assert (parted[0], parted[1]) == (2, ((2,), (3,))), rank


def test_where_nobody_holds_the_same_a_warning_says_so(returned: Returned) -> None:
    for rank, (taken, said) in enumerate(returned["nothing_to_compare"]):
        assert taken == 3
        assert len(said) == (rank == 0)
        for message, file in said:
            assert "nothing to compare" in message
            assert file == __file__  # The line of whoever called step().


def test_what_cannot_be_checked_is_refused(returned: Returned) -> None:
    for found in returned["what_is_refused"]:
        for given in ("0", "-1", "2.0", "True", "'10'"):
            assert f"Got {given}." in found[given]
        assert "model=ddp" in found["10"]
        assert "mesh=world_mesh" in found["10"]
        assert "check_replicas_every= is 5 on rank 0 and None on rank 1" in found["different"]
        assert "on_nonfinite= is raise on rank 0 and skip on rank 1" in found["on_nonfinite"]


def test_alone_there_is_nothing_to_check() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    control = gradilocks.GradientControl(optimizer, model=model, check_replicas_every=1)
    control.backward(model(torch.ones(2, 4)).sum())
    assert not control.step().skipped
