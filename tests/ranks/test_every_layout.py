"""Every parallelism of torch trains as one process does: norms, decisions, parameters, culprits.

The default suite runs the layouts on 4 ranks with one order of the norm each; `make ranks` runs all of them on 2, 4 and
8 ranks with every order and with a policy for single tensors.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from against_one_process import STEPS, CollectiveCounter, train
from parallel_models import ANY_SIZE, CASES, sharded
from rank_world import world

import gradilocks

ORDERS = (2.0, 1.0, 3.0, math.inf)
VARIANTS = (
    *("DDP around wrappers", "FSDP2 along columns", "FSDP2, compiled", "FSDP1 with share=", "HSDP over TP"),
    *("interleaved pipeline", "pipeline of TP"),
)
"""Layouts that the default suite leaves to `make ranks`."""
DEFAULT_ORDER = {name: ORDERS[i % len(ORDERS)] for i, name in enumerate(name for name in CASES if name not in VARIANTS)}
WITHOUT_LAYOUT = ("DDP with no_sync", "DDP around wrappers", "ZeroRedundancyOptimizer")
ROW = ("allgather_base", 64)
"""Operation and bytes of the one collective of a step."""
NO_TENSOR_NORMS = ("a rank without expert", "plain experts", "tied embeddings")
"""Layouts in which norms of single tensors are not known: `share=` beside different parameter lists."""


def train_case(rank: int, name: str, clip: Any) -> dict[str, Any] | None:
    case = CASES[name](rank)
    return None if case is None else train(case, clip)


def expected_collectives(name: str, ranks: int, per_tensor: bool) -> list[str]:
    """One row, and with norms of single tensors one reduction among the ranks with the same parameters."""
    dims = 2 if name == "two models" and ranks == 8 else 1  # One for each dimension of a mesh that is not the world.
    partial_sums = 2 if name == "SequenceParallel" else 0  # Of the norm's weight and bias.
    has_replicas = name not in ("pipeline", "interleaved pipeline")
    reductions = dims if per_tensor and has_replicas else 0
    return ["all_reduce"] * partial_sums + [ROW[0]] * dims + ["allreduce"] * reductions


def check(name: str, results: list[Any], *, per_tensor: bool = False) -> None:
    """All ranks train as one process, name the same culprit, and send one row per step."""
    present = [result for result in results if result is not None]
    assert present
    for result in present:
        assert result["differences"] == []
        assert len(result["culprits"]) >= 1
        if name in WITHOUT_LAYOUT:
            continue
        assert len(result["culprits"]) == 1
        expected = expected_collectives(name, len(results), per_tensor)
        for calls in result["collectives"][1:]:
            assert [kind for kind, _ in calls] == expected
            assert ROW in calls
    if name not in ("two models", *WITHOUT_LAYOUT):
        assert len({result["culprits"] for result in present}) == 1
    if name in WITHOUT_LAYOUT[:2]:
        later = [calls for result in present for calls in result["collectives"][1:]]
        assert later == [[]] * ((STEPS - 1) * len(present))


@pytest.mark.parametrize("name", DEFAULT_ORDER)
def test_a_layout_trains_as_one_process(name: str) -> None:
    clip = gradilocks.ClipByNorm(1.0, order=DEFAULT_ORDER[name])
    check(name, world(4).run(train_case, name, clip))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "order"), [*((2, order) for order in ORDERS), *((4, order) for order in ORDERS), (8, 2.0)]
)
def test_all_layouts_train_as_one_process(ranks: int, order: float) -> None:
    for name in ANY_SIZE if ranks == 2 else CASES:
        check(name, world(ranks).run(train_case, name, gradilocks.ClipByNorm(1.0, order=order)))


def train_per_tensor(rank: int, name: str) -> Any:
    case = CASES[name](rank)
    # With these numbers some steps are clipped and others are not.
    return None if case is None else train(case, gradilocks.AdaGC(ratio=0.5, warmup=1, warmup_norm=0.1))


@pytest.mark.parametrize("name", ["FSDP2", "TP", "FSDP2 over TP", "pipeline of FSDP2"])
def test_a_policy_for_single_tensors_trains_as_one_process(name: str) -> None:
    check(name, world(4).run(train_per_tensor, name), per_tensor=True)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_policy_for_single_tensors_trains_as_one_process_in_all_layouts(ranks: int) -> None:
    parts = ("hand-made parts", "FSDP1 with share=", "TP inside DDP")  # The tests' one process has each part apart.
    for name in ANY_SIZE if ranks == 2 else CASES:
        if name not in (*NO_TENSOR_NORMS, *parts):
            check(name, world(ranks).run(train_per_tensor, name), per_tensor=True)


POLICIES: dict[str, dict[str, Any]] = {
    "none": {"scale": None},
    "headroom": {"scale": gradilocks.HeadroomScale(), "clip": 1.0},
    "z-score": {"clip": gradilocks.ZScoreClip(2.0, warmup=2)},
    "quantile": {"clip": gradilocks.QuantileClip(0.5, window=4)},
    "value": {"clip": gradilocks.ClipByValue(0.5)},
    "spikes": {"clip": gradilocks.chain(gradilocks.SkipSpikes(2.0, window=4), gradilocks.ClipByNorm(1.0))},
    "per group": {"clip": gradilocks.ClipPerGroup({0: 1.0})},
    "per tensor": {"clip": gradilocks.AdaGC(warmup=2)},
    "per tensor, then norm": {"clip": gradilocks.chain(gradilocks.AdaGC(warmup=2), gradilocks.ClipByNorm(1.0))},
}


def collectives_of_policies(rank: int) -> dict[str, list[Any]]:
    found = {}
    for name, options in POLICIES.items():
        model = sharded(rank)
        control = gradilocks.GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
        for _ in range(2):
            control.zero_grad()
            control.backward(model(torch.ones(2, 8)).square().mean())
            with CollectiveCounter() as counter:
                control.step()
        found[name] = [ROW[0] if call == ROW else call[0] for call in counter.calls]
    return found


def test_a_step_sends_one_row_whatever_the_policies() -> None:
    """Norms of groups and tensors take one all-reduce more, and the norm that they leave to a next policy another."""
    for found in world(2).run(collectives_of_policies):
        extra = {"per group": 1, "per tensor": 1, "per tensor, then norm": 2}
        for name, calls in found.items():
            assert calls == [ROW[0]] + ["allreduce"] * extra.get(name, 0), name
