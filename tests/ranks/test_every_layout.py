"""Every parallelism of torch trains as one process does: norms, decisions, parameters, culprits.

`parallel_models` has the cases, `against_one_process` steps each beside the whole model. A part of
them runs here in one set of four processes, with another order of the norm each; `make ranks` runs
all of them, on 2, 4 and 8 ranks, with every order and with a bound on each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradilocks
from tests.ranks import parallel_models
from tests.ranks.against_one_process import ORDERS, STEPS, Traffic, train
from tests.ranks.parallel_models import ANY_NUMBER, CASES
from tests.ranks.rank_programs import run_all

Found = dict[str, list[Any]]

_COSTLY = (
    *("DDP around other wrappers", "FSDP2 compiled", "FSDP2 offloaded", "HSDP over TP"),
    *("FSDP1 SHARD_GRAD_OP", "FSDP1 SHARD_GRAD_OP, flat", "FSDP1 NO_SHARD, flat"),
    *("pipeline", "looped pipeline", "pipeline of FSDP2"),
    *("FSDP1 HYBRID_SHARD, flat", "two optimizers on two meshes"),
)
EVERY_DAY = {
    name: ORDERS[number % len(ORDERS)]
    for number, name in enumerate(name for name in CASES if name not in _COSTLY)
}
"""What runs in `make test`, by the order of its norm."""

PARTS = [  # Of these it is not known which parts are one tensor: a bound on each is refused.
    name
    for name in CASES
    if (name.startswith("FSDP1") and "NO_SHARD" not in name)
    or name in ("pipeline by group", "plain experts", "a rank without experts")
]
DDP = ("DDP with no_sync", "DDP around other wrappers")
ROW = 216
"""The bytes that a rank gives to the one collective of a step."""


def _trained(rank: int, chosen: dict[str, list[Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, clips in chosen.items():
        for clip in clips:
            run = CASES[name](rank)
            key = f"{name}, {_called(clip)}"
            found[key] = None if run is None else train(run, clip)
    return found


def _called(clip: Any) -> str:
    per_tensor = isinstance(clip, gradilocks.ClipPerTensor)
    return "each tensor" if per_tensor else f"order {clip.order:g}"


def every_day(rank: int) -> dict[str, Any]:
    return _trained(
        rank,
        {name: [gradilocks.ClipByNorm(1.0, order=order)] for name, order in EVERY_DAY.items()},
    )


def whole_matrix(rank: int) -> dict[str, Any]:
    world = dist.get_world_size()
    chosen = CASES if world >= 4 else ANY_NUMBER
    # Eight processes take their time on two cores: there, the norm of order 2 and each tensor.
    begin, end = (1, 2) if world == 8 else (0, len(ORDERS))
    every = {name: _clips(name) for name in chosen}
    return _trained(
        rank, {name: [*clips[begin:end], *clips[len(ORDERS) :]] for name, clips in every.items()}
    )


def _clips(name: str) -> list[Any]:
    by_norm = [gradilocks.ClipByNorm(1.0, order=order) for order in ORDERS]
    return by_norm if name in PARTS else [*by_norm, gradilocks.ClipPerTensor(0.5)]


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Found:
    programs: list[Callable[[int], Any]] = [
        every_day,
        each_tensor_refused_where_parts_are_not_known,
        an_overflow_in_the_reduction,
        what_the_drop_ins_send,
        what_each_tensor_sends,
    ]
    return run_all(programs, tmp_path_factory.mktemp("layouts"), ranks=4)


@pytest.mark.parametrize("name", EVERY_DAY)
def test_a_layout_trains_as_one_process(returned: Found, name: str) -> None:
    key = f"{name}, order {EVERY_DAY[name]:g}"
    check(name, [found[key] for found in returned["every_day"]])


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_layouts_train_as_one_process(
    tmp_path_factory: pytest.TempPathFactory, ranks: int
) -> None:
    found = run_all([whole_matrix], tmp_path_factory.mktemp("matrix"), ranks=ranks)["whole_matrix"]
    assert len(found[0]) >= len(ANY_NUMBER)
    for key in found[0]:
        check(key.rpartition(",")[0], [each[key] for each in found], key)


def check(name: str, found: list[Any], key: str = "") -> None:
    """That every rank trained as one process, named the culprit, and met the others once a step."""
    of_ranks = [(rank, each) for rank, each in enumerate(found) if each is not None]
    assert of_ranks
    for rank, each in of_ranks:
        assert each["wrong"] == [], f"{name} {key} on rank {rank}"
    together = len(found)  # So many ranks in a row decide together.
    if name == "two models on two halves":
        together //= 2
    elif "HYBRID" in name:
        together = 2
    for rank, each in of_ranks:
        mates = [other for at, other in of_ranks if at // together == rank // together]
        assert each["culprits"] == mates[0]["culprits"], name
        assert each["culprits"], name
        for culprit in each["culprits"]:
            called, _, where = culprit.partition(" on rank ")
            assert not set(called.split(".")) & WRAPPERS, culprit
            if name not in (*DDP, "ZeroRedundancyOptimizer"):
                assert len(each["culprits"]) == 1
                assert where.isdigit(), culprit
        _check_traffic(name, each["sent"], apart="each tensor" in key)


WRAPPERS = {"_fsdp_wrapped_module", "module", "_orig_mod", "_checkpoint_wrapped_module"}


def _check_traffic(name: str, sent: list[list[tuple[str, int]]], *, apart: bool) -> None:
    first, *later = sent
    told = [("allgather", 8)]  # A rank's names and settings: their length, and what they are.
    if name in DDP:
        assert [kind for kind, _ in first] == ["allgather"] * 2
        assert later == [[]] * (STEPS - 1)
        return
    if name == "ZeroRedundancyOptimizer":  # torch sends the parameters that each rank has stepped.
        assert {kind for step in later for kind, _ in step} <= {"broadcast"}
        return
    sums = 2 if name == "SequenceParallel" else 0  # A Partial gradient each, at its own size.
    assert first[sums : sums + 2] == [("allgather", ROW), *told], name
    assert len(first) == sums + 3 + apart
    if sums:  # Which of them there are is told first, once it is known that there may be some.
        assert all(step[0] == ("allreduce", 4 * sums) for step in later), (name, later[0])
        later = [step[1:] for step in later]
    for step in later:
        assert all(kind.startswith("all_reduce") for kind, _ in step[:sums])
        assert step[sums] == ("allgather", ROW), name
        rest = step[sums + 1 :]
        assert len(rest) == apart, name
        assert all(kind == "allgather" and given <= 8 * 32 for kind, given in rest), name


def each_tensor_refused_where_parts_are_not_known(rank: int) -> dict[str, str]:
    found = {}
    for name in PARTS:
        if name.startswith("FSDP1 SHARD"):
            continue
        run = CASES[name](rank)
        assert run is not None
        try:
            train(run, gradilocks.ClipPerTensor(0.5))
        except ValueError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def test_a_bound_on_each_tensor_is_refused_where_parts_are_not_known(returned: Found) -> None:
    for found in returned["each_tensor_refused_where_parts_are_not_known"]:
        for name, told in found.items():
            assert "bounds gradients apart from each other" in told, name
            assert "not known" in told, name


def an_overflow_in_the_reduction(rank: int) -> list[Any]:
    """fp16: every rank's gradient is finite, and their sum is not."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    half = torch.float16
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half))
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=2.0**-10), model=model, scale=1024.0, clip=1e9
    )
    seen = []
    # The mean of 32, 32, 32, 32 times 1024 is finite in fp16; their sum on the way is not.
    for size in (1.0, 48.0, 1.0):
        inputs = torch.zeros(1, 4)
        inputs[0, 0] = size
        control.backward(model(inputs)[:, 5].float().sum())
        weight: Any = model[0].weight
        outcome = control.step()
        seen.append((outcome.skipped, outcome.norm, outcome.culprits, control.scale))
        control.zero_grad()
    return [seen, weight.full_tensor()[5, 0].item()]


def test_an_overflow_in_a_half_precision_reduction_is_skipped_by_all(returned: Found) -> None:
    for seen, weight in returned["an_overflow_in_the_reduction"]:
        assert [skipped for skipped, *_ in seen] == [False, True, False]
        assert [seen[0][1], seen[2][1]] == [1.0, 1.0]
        assert seen[1][2] == ("0.weight on rank 2",)  # Rows 4 and 5 of 8 are there.
        assert weight == 0.5 - 2 * 2.0**-10


def _drop_in_model(mesh: Any, placements: list[Any]) -> list[nn.Parameter]:
    from torch.distributed.tensor import distribute_tensor

    made = []
    for number in range(3):
        param = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, placements))
        param.grad = distribute_tensor(torch.full((6, 4), 1.0 + number), mesh, placements)
        made.append(param)
    return made


def what_the_drop_ins_send(rank: int) -> dict[str, Any]:
    """`unscale_` the flags, the clip the norm, `step` nothing; beside them torch's own."""
    from torch.distributed.tensor import Replicate, Shard

    grid, cube = parallel_models.grid("dp", "tp"), parallel_models.mesh_of((2, 1, 2), "abc")
    layouts: dict[str, tuple[Any, list[Any]]] = {
        "line": (parallel_models.line(), [Shard(0)]),
        "grid": (grid, [Replicate(), Shard(0)]),
        "part": (grid["tp"], [Shard(0)]),
        "part of two dimensions": (cube["b", "c"], [Replicate(), Shard(0)]),
    }
    found: dict[str, Any] = {}
    for name, (mesh, placements) in layouts.items():
        for whose in ("ours", "torch's"):
            ours = whose == "ours"
            params = _drop_in_model(mesh, placements)
            optimizer = torch.optim.SGD(params, lr=0.1)
            scaler: Any = (gradilocks if ours else torch.amp).GradScaler("cpu", init_scale=4.0)
            clip = (gradilocks if ours else torch.nn.utils).clip_grad_norm_
            scaler.scale(torch.ones(()))
            with Traffic() as unscaling:
                scaler.unscale_(optimizer)
            with Traffic() as clipping:
                norm: Any = clip(params, 1.0)
                norm = norm.full_tensor().item()
            with Traffic() as stepping:
                scaler.step(optimizer)
                scaler.update()
            sent = unscaling.seen, clipping.seen, stepping.seen
            found[f"{name}, {whose}"] = (*sent, norm)
    return found


def test_the_drop_ins_send_one_collective_each_a_group(returned: Found) -> None:
    for found in returned["what_the_drop_ins_send"]:
        for name in ("line", "grid", "part", "part of two dimensions"):
            unscaling, clipping, stepping, norm = found[f"{name}, ours"]
            dimensions = 2 if name == "part of two dimensions" else 1
            assert unscaling == [("allreduce", 8)] * dimensions, name
            assert clipping == [("allgather", 48)] * dimensions, name
            assert stepping == []
            assert norm == pytest.approx(found[f"{name}, torch's"][3], rel=1e-6)


def what_each_tensor_sends(rank: int) -> dict[str, Any]:
    """Whatever the policies are: one collective, and one more if tensors are bounded apart."""
    from torch.distributed.tensor import Shard

    policies: dict[str, dict[str, Any]] = {
        "plain": {"scale": None},
        "headroom": {"scale": gradilocks.HeadroomScale(), "clip": 1.0},
        "z-score": {"clip": gradilocks.ZScoreClip(2.0, warmup=2)},
        "quantile": {"clip": gradilocks.QuantileClip(0.5, window=4)},
        "value": {"clip": gradilocks.ClipByValue(0.5)},
        "spikes": {
            "clip": gradilocks.chain(
                gradilocks.SkipSpikes(2.0, window=4, at_least=2), gradilocks.ClipByNorm(1.0)
            )
        },
        "each tensor": {"clip": gradilocks.ClipPerTensor(1.0)},
        "AdaGC": {"clip": gradilocks.AdaGC(warmup=2)},
        "per group": {"clip": gradilocks.ClipPerGroup({0: 1.0})},
    }
    found = {}
    for name, given in policies.items():
        params = _drop_in_model(parallel_models.line(), [Shard(0)])
        control = gradilocks.GradientControl(torch.optim.SGD(params, lr=0.1), **given)
        sent = []
        for _ in range(3):
            gradients = [param.grad for param in params]
            control.zero_grad()
            control.scale_loss(torch.ones((), requires_grad=True))
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            with Traffic() as traffic:
                control.step()
            sent.append(traffic.seen)
        found[name] = sent
    return found


def test_one_collective_a_step_whatever_the_policies(returned: Found) -> None:
    for found in returned["what_each_tensor_sends"]:
        for name, (_, *later) in found.items():
            # Of each of three tensors the norm and the largest magnitude; AdaGC remembers one more.
            rows = {"each tensor": 2, "per group": 2, "AdaGC": 3}.get(name, 0)
            expected = [("allgather", ROW)] + [("allgather", 3 * 8 * rows)] * (rows > 0)
            assert later == [expected] * 2, name
