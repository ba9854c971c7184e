"""A fault on one rank only: all ranks give up at the same step, for the same reason, in the same
words, and the schedule has counted the same steps on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradilocks
from gradilocks.errors import NeverFinite
from tests.ranks.rank_programs import run_all

FAULTY = 1
"""The rank that has the fault."""
FAULTS = ("Inf in a gradient", "NaN in a gradient", "Inf in the loss", "NaN in the loss")
HEALTHY, LIMIT = 2, 12
SCALE = gradilocks.DynamicScale(init_scale=2.0**16, growth_interval=1000)


def _given_up(control: Any, optimizer: Any, step: Callable[[str], None], fault: str) -> list[Any]:
    """Two healthy steps, then the fault at every step, until the control gives up."""
    plan = control.scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1 + k)))
    rates = []
    for number in range(HEALTHY + 2 * LIMIT):
        step(fault if number >= HEALTHY else "")
        try:
            control.step()
        except NeverFinite as error:
            saved = control.state_dict()
            said = str(error), error.curable, list(error.scales), list(error.culprits)
            return [number, *said, saved["scale"], saved["gradilocks"]["streak"], rates]
        plan.step()
        rates.append(optimizer.param_groups[0]["lr"])
        control.zero_grad()
    raise AssertionError("the control never gave up")


def _value(fault: str) -> float:
    return math.inf if fault.startswith("Inf") else math.nan


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def fsdp2(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = {}
    for fault in FAULTS:
        model: Any = _model()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        control = gradilocks.GradientControl(
            optimizer, model=model, scale=SCALE, give_up_after=LIMIT
        )

        def step(fault: str, model: Any = model, control: Any = control) -> None:
            here = rank == FAULTY
            factor = _value(fault) if here and "loss" in fault else 1.0
            control.backward(model(torch.ones(3, 4)).square().mean() * factor)
            if here and "gradient" in fault:
                model[2].weight.grad.to_local()[0, 0] = _value(fault)

        found[fault] = _given_up(control, optimizer, step, fault)
    return found


def pipeline(rank: int) -> dict[str, Any]:
    """Plain stages under process_group=; the last has the loss, and either may have the fault."""
    found = {}
    for fault in FAULTS:
        for faulty in (0, 1):
            if "loss" in fault and not faulty:
                continue
            model = _model()[2 * rank : 2 * rank + 1]  # type: ignore[index]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            control = gradilocks.GradientControl(
                optimizer,
                model={f"stage{rank}": model},
                scale=SCALE,
                give_up_after=LIMIT,
                process_group=dist.group.WORLD,
            )

            def step(
                fault: str, model: Any = model, control: Any = control, faulty: int = faulty
            ) -> None:
                in_loss = "loss" in fault
                if rank == 1:
                    loss = torch.ones((), requires_grad=True)
                    control.scale_loss(loss * _value(fault) if in_loss else loss)
                for param in model.parameters():
                    broken = in_loss or (rank == faulty and "gradient" in fault)
                    param.grad = torch.ones_like(param)
                    if broken:
                        param.grad[0] = _value(fault)

            found[f"{fault} of stage {faulty}"] = _given_up(control, optimizer, step, fault)
    return found


def ddp(rank: int) -> dict[str, Any]:
    """Gradients are averaged, so every rank has them; the loss is that of the faulty one alone."""
    found = {}
    for fault in FAULTS:
        model = nn.parallel.DistributedDataParallel(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        control = gradilocks.GradientControl(
            optimizer, model=model, scale=SCALE, give_up_after=LIMIT
        )

        def step(fault: str, model: Any = model, control: Any = control) -> None:
            here = rank == FAULTY
            outputs = model(torch.ones(3, 4))
            if here and "gradient" in fault:
                outputs.register_hook(lambda grad: grad * _value(fault))
            factor = _value(fault) if here and "loss" in fault else 1.0
            control.backward(outputs.square().mean() * factor)

        found[fault] = _given_up(control, optimizer, step, fault)
    return found


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    programs = [fsdp2, pipeline, ddp, a_short_streak, joined, resumed]
    return run_all(programs, tmp_path_factory.mktemp("giving_up"), ranks=2)


@pytest.mark.parametrize("layout", ["fsdp2", "pipeline", "ddp"])
def test_all_ranks_give_up_alike(returned: dict[str, list[Any]], layout: str) -> None:
    first, second = returned[layout]
    assert first == second
    for fault, (number, words, curable, scales, culprits, scale, streak, rates) in first.items():
        assert number == HEALTHY + LIMIT - 1, fault
        assert streak == LIMIT
        assert f"{LIMIT} steps in a row had non-finite gradients" in words
        assert scales == [2.0**16 / 2**k for k in range(LIMIT)]
        assert scale == 2.0**16 / 2**LIMIT
        assert ("The loss itself was NaN or Inf" in words) is ("loss" in fault), fault
        # An Inf that stays while the scale falls 2048-fold proves nothing; a broken loss does.
        assert curable is (False if "loss" in fault else None), fault
        assert culprits
        # The schedule counted the two steps that were taken, and stood still afterwards.
        assert rates == pytest.approx([0.05, 0.1 / 3] + [0.1 / 3] * (LIMIT - 1))


def test_culprits_are_named_with_their_rank_on_every_rank(returned: dict[str, list[Any]]) -> None:
    for found in returned["fsdp2"]:
        for fault in FAULTS[:2]:
            assert found[fault][4] == [f"2.weight on rank {FAULTY}"]
            assert f"{fault[:3]} in 2.weight on rank {FAULTY}" in found[fault][1]
    for found in returned["pipeline"]:
        for stage in (0, 1):
            culprits = found[f"Inf in a gradient of stage {stage}"][4]
            assert [name.rpartition(" on ")[2] for name in culprits] == [f"rank {stage}"]
            assert culprits[0].startswith(f"stage{stage}.")


def resumed(rank: int) -> dict[str, Any]:
    """Two steps before they give up, all go on from what rank 0 has saved, whose loss was fine."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = {}
    for layout in ("sharded", "copies"):
        for fault in FAULTS:
            model: Any = _model()
            if layout == "sharded":
                fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            else:
                model = nn.parallel.DistributedDataParallel(model)
            made = [
                gradilocks.GradientControl(
                    torch.optim.SGD(model.parameters(), lr=0.1),
                    model=model,
                    scale=SCALE,
                    give_up_after=LIMIT,
                )
                for _ in range(2)
            ]
            control = made[0]
            for number in range(LIMIT):
                if number == LIMIT - 2:
                    saved = [control.state_dict()]
                    dist.broadcast_object_list(saved)
                    control = made[1]
                    control.load_state_dict(saved[0])
                outputs = model(torch.ones(3, 4))
                if rank == FAULTY and "gradient" in fault:
                    outputs.register_hook(lambda grad, fault=fault: grad * _value(fault))
                factor = _value(fault) if rank == FAULTY and "loss" in fault else 1.0
                control.backward(outputs.square().mean() * factor)
                try:
                    control.step()
                except NeverFinite as error:
                    found[f"{fault}, {layout}"] = error.curable, list(error.scales), str(error)
                control.zero_grad()
    return found


def test_ranks_that_go_on_in_mid_streak_give_up_with_all_of_it(
    returned: dict[str, list[Any]],
) -> None:
    first, second = returned["resumed"]
    assert first == second
    assert len(first) == 2 * len(FAULTS)
    for case, (curable, scales, words) in first.items():
        assert scales == [2.0**16 / 2**k for k in range(LIMIT)]
        # Of ranks that hold copies, each knows its own loss alone, and rank 0 has saved.
        assert curable is (False if "loss, sharded" in case else None), case
        told = "at 2 of 2 steps of which that is known" in words
        assert told is ("loss, copies" in case)


def a_short_streak(rank: int) -> dict[str, Any]:
    """Too few steps to tell: whether a smaller scale may help is the same on both ranks."""
    found = {}
    for fault in FAULTS[:2]:
        param = nn.Parameter(torch.zeros(2))
        control = gradilocks.GradientControl(
            torch.optim.SGD([param], lr=0.1),
            scale=SCALE,
            give_up_after=3,
            process_group=dist.group.WORLD,
        )
        try:
            for _ in range(3):
                control.scale_loss(torch.ones((), requires_grad=True))
                param.grad = torch.full((2,), _value(fault) if rank == FAULTY else 1.0)
                control.step()
                control.zero_grad()
        except NeverFinite as error:
            found[fault] = error.curable, str(error)
    return found


def test_whether_a_smaller_scale_may_help_is_the_same_everywhere(
    returned: dict[str, list[Any]],
) -> None:
    first, second = returned["a_short_streak"]
    assert first == second
    assert all(curable is None for curable, _ in first.values())
    assert "a smaller scale may cure this" in first["Inf in a gradient"][1]


def joined(rank: int) -> dict[str, Any]:
    """Ranks with different numbers of batches, one of them with none, as torch's `join` allows."""
    found: dict[str, Any] = {}
    for first_has in (0, 2):
        model = nn.parallel.DistributedDataParallel(_model())
        control = gradilocks.GradientControl(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model=model,
            scale=SCALE,
            give_up_after=3,
            check_replicas_every=1,
        )
        steps, said = 0, ""
        with model.join():
            for number in range(6 if rank else first_has):
                factor = 1.0 if number < 2 else math.inf
                control.backward(model(torch.ones(3, 4)).square().mean() * factor)
                try:
                    control.step()
                except NeverFinite as error:
                    said = str(error)
                    break
                control.zero_grad()
                steps += 1
        found[str(first_has)] = steps, said
    return found


def test_a_rank_that_has_no_batch_left_is_not_waited_for(returned: dict[str, list[Any]]) -> None:
    first, second = returned["joined"]
    assert first == {"0": (0, ""), "2": (2, "")}
    for steps, said in second.values():
        assert steps == 4
        assert "3 steps in a row had non-finite gradients" in said
