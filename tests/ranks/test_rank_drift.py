"""Ranks that part after the first step: noticed by all at the same step, before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.errors import GradilocksError
from gradilocks.step import rank_drift
from gradilocks.step.host_copy import LAG
from tests.ranks.rank_programs import run_all

Returned = dict[str, list[Any]]


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    """What each of two ranks returned from every program below."""
    programs: list[Callable[[int], Any]] = [
        what_one_rank_does_alone,
        settings_that_were_refused_before,
        no_gradient_anywhere,
        a_parameter_without_a_gradient,
        states_of_data_parallel_ranks,
        a_bad_loss_under_data_parallel,
        made_before_sharding,
        a_late_gradient_where_nobody_reads,
    ]
    return run_all(programs, tmp_path_factory.mktemp("drift"))


def _sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))


def _steps(model: Any, control: Any, count: int, alone: Callable[[int], None]) -> list[Any]:
    """For each step its norm or what was raised, and whether parameters moved."""
    found: list[Any] = []
    for step in range(count):
        control.zero_grad()
        control.backward(model(torch.ones(3, 4) + step).square().sum())
        before = [param.to_local().clone() for param in model.parameters()]
        try:
            alone(step)
            told: Any = control.step().norm
        except (GradilocksError, RuntimeError) as error:
            told = str(error)
        moved = [param.to_local() for param in model.parameters()]
        found.append((told, not all(map(torch.equal, before, moved))))
    return found


def what_one_rank_does_alone(rank: int) -> dict[str, Any]:
    found = {}
    for name in ("unscale_", "load_state_dict", "an error"):
        model = _sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        control = gradilocks.GradientControl(optimizer, model=model, clip=1.0)

        def alone(step: int, name: str = name, model: Any = model, control: Any = control) -> None:
            if rank != 1 or step != 2:
                return
            if name == "unscale_":
                control.unscale_()
            elif name == "load_state_dict":
                control.load_state_dict({**control.state_dict(), "scale": 4.0})
                control._order.scaled = True  # As if the loss had been scaled by it.

        if name == "an error":

            def fail(optimizer: Any, args: Any, kwargs: Any, calls: list[int] = []) -> None:  # noqa: B006
                calls.append(1)
                if rank == 1 and len(calls) % 4 == 2:
                    raise RuntimeError("no more room")

            optimizer.register_step_pre_hook(fail)
        found[name] = _steps(model, control, 4, alone)
    return found


def settings_that_were_refused_before(rank: int) -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(2, 1))
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=1.0 + rank
    )
    said = []
    for _ in range(2):
        control.backward(model(torch.ones(1, 2)).sum())
        try:
            control.step()
            said.append("")
        except ValueError as error:
            said.append(str(error))
        control.zero_grad()
    return said


def no_gradient_anywhere(rank: int) -> str:
    control = gradilocks.GradientControl(
        torch.optim.SGD(_sharded().parameters(), lr=0.1), scale=None, clip=1.0
    )
    with pytest.raises(gradilocks.errors.NoGradients) as raised:
        control.step()
    return str(raised.value)


def a_parameter_without_a_gradient(rank: int) -> list[int]:
    """A plain parameter beside DTensors that is never used: how often the host reads."""
    from gradilocks.ranks.agreement import RankAgreement

    model = _sharded()
    unused = nn.Parameter(torch.zeros(3))
    control = gradilocks.GradientControl(
        torch.optim.SGD([*model.parameters(), unused], lr=0.01), scale=None, clip=1.0
    )
    reads = []
    real = RankAgreement.check

    def counted(*given: Any, **named: Any) -> None:
        reads[-1] += 1
        real(*given, **named)

    RankAgreement.check = counted  # type: ignore[method-assign]
    try:
        for _ in range(70):
            control.zero_grad()
            control.backward(model(torch.ones(3, 4)).square().sum())
            reads.append(0)
            control.step()
    finally:
        RankAgreement.check = real  # type: ignore[method-assign]
    return reads


def _data_parallel() -> tuple[Any, Any]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer


def states_of_data_parallel_ranks(rank: int) -> list[Any]:
    """Loaded by one rank alone, then by the other too, then by both with other scales."""
    model, optimizer = _data_parallel()
    control = gradilocks.GradientControl(optimizer, model=model, clip=1.0)
    told: list[Any] = []

    def step() -> None:
        control.zero_grad()
        control.backward(model(torch.ones(3, 4)).square().sum())
        before = model.module.weight.detach().clone()
        try:
            control.step()
            told.append("")
        except (GradilocksError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
        told.append(not torch.equal(before, model.module.weight))

    step()
    state = {**control.state_dict(), "scale": 4.0}
    if rank == 1:
        control.load_state_dict(state)
    step()
    # Everybody goes on from one state, and from one parameter: rank 0 has taken a step more.
    model.load_state_dict({name: torch.ones_like(v) for name, v in model.state_dict().items()})
    control.load_state_dict(state)
    step()
    step()
    control.load_state_dict({**state, "scale": 2.0**rank})
    step()
    control.load_state_dict(state)
    step()
    return told


def a_bad_loss_under_data_parallel(rank: int) -> dict[str, list[float]]:
    """In the loss of rank 1, and in gradients of both."""
    found: dict[str, list[float]] = {"control": [], "scaler": []}
    for how, scales in found.items():
        model, optimizer = _data_parallel()
        policy = gradilocks.HeadroomScale()
        control = gradilocks.GradientControl(optimizer, model=model, scale=policy)
        scaler = gradilocks.GradScaler("cpu", policy=policy)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().sum()
            loss = loss * (float("nan") if (rank, step) == (1, 2) else 1.0)
            if how == "control":
                control.backward(loss)
                control.step()
                scales.append(control.scale)
            else:
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
    return found


def made_before_sharding(rank: int) -> str:
    """The optimizer and the control hold parameters that the model has no more."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = gradilocks.GradientControl(optimizer, model=model, clip=1.0)
    fully_shard(model)
    control.backward(model(torch.ones(2, 4)).square().mean())
    with pytest.raises(gradilocks.errors.NoGradients) as raised:
        control.step()
    return str(raised.value)


def test_a_state_that_one_data_parallel_rank_loads_is_told_before_its_next_step(
    returned: Returned,
) -> None:
    first, second = returned["states_of_data_parallel_ranks"]
    assert first[:4] == ["", True, "", True]
    assert second[:2] == ["", True]
    assert second[2].startswith("ScaleMisuse: a state was loaded into this control on 1 of the 2")
    assert second[3] is False
    for told in (first, second):
        assert told[4:8] == ["", True] * 2
        assert "the current scale is 1.0 on rank 0 and 2.0 on rank 1" in told[8]
        assert told[9:] == [False, "", True]


def test_a_bad_loss_of_one_data_parallel_rank_is_an_overflow_to_all(returned: Returned) -> None:
    first, second = returned["a_bad_loss_under_data_parallel"]
    assert first == second
    for scales in first.values():
        assert scales[2] == scales[1] / 2


def test_a_control_made_before_fully_shard_says_what_became_of_its_parameters(
    returned: Returned,
) -> None:
    for said in returned["made_before_sharding"]:
        assert "fully_shard() (FSDP2) replaces a model's parameters" in said


def a_late_gradient_where_nobody_reads(rank: int) -> dict[str, Any]:
    """As on GPUs, where the host waits at the first steps alone: an expert beside shards that the
    other rank has not, first used at step 40; and a copy that both have."""
    found: dict[str, Any] = {}
    real = rank_drift.HostCopy
    for name in ("part", "copy", "added on one rank"):
        model, alone = _sharded(), "added" in name
        plain = nn.Parameter(torch.zeros(8))
        control = gradilocks.GradientControl(
            torch.optim.SGD([*model.parameters(), *[plain][alone:]], lr=0.0), scale=None, clip=1.0
        )
        engine, read = control._engine, []
        rank_drift.HostCopy = _Late  # type: ignore[misc, assignment]
        try:
            for step in range(1, 101):
                control.zero_grad()
                control.backward(model(torch.ones(3, 4)).square().sum())
                if step == 40 and alone and rank == 0:
                    control._optimizers[0].add_param_group({"params": [plain]})
                if step >= 40:
                    seed = 5 + rank * (name == "part")
                    plain.grad = torch.randn(8, generator=torch.Generator().manual_seed(seed))
                if step > 1 and engine._agreement.looks(step):
                    read.append(step)
                try:
                    control.step()
                except ValueError as error:
                    found[name] = step, str(error), read
                    break
                engine._met = engine._met._replace(at_once=False)
            else:
                found[name] = 0, "", read
        finally:
            rank_drift.HostCopy = real  # type: ignore[misc]
    return found


def test_what_one_rank_does_alone_is_noticed_by_both(returned: Returned) -> None:
    first, second = returned["what_one_rank_does_alone"]
    for name in ("unscale_", "load_state_dict"):
        assert [moved for _, moved in first[name]][:3] == [True, True, False], name
        assert first[name][2][0] == second[name][2][0]
        assert "the scale that the gradients carry is" in first[name][2][0]
        assert "on rank 0 and" in first[name][2][0]
    # The step that rank 1 could not take counts on rank 0 alone.
    assert second["an error"][1] == ("no more room", False)
    assert first["an error"][2] == second["an error"][2]
    assert "the number of steps is 2 on rank 0 and 1 on rank 1" in first["an error"][2][0]
    assert first["an error"][2][1] is False


def test_refused_settings_are_refused_again(returned: Returned) -> None:
    for said in returned["settings_that_were_refused_before"]:
        assert all("clip= is" in each for each in said)


def test_a_step_without_any_gradient_is_no_step(returned: Returned) -> None:
    for said in returned["no_gradient_anywhere"]:
        assert "no gradient on any rank" in said


def test_a_parameter_that_is_never_used_does_not_make_the_host_read_for_ever(
    returned: Returned,
) -> None:
    for reads in returned["a_parameter_without_a_gradient"]:
        assert all(reads[:32])
        assert not any(reads[32:])


def test_a_late_gradient_is_compared_a_few_steps_later_where_nobody_waits_for_it(
    returned: Returned,
) -> None:
    first, second = returned["a_late_gradient_where_nobody_reads"]
    for name in first:  # Which plain tensors there are on this rank is told besides.
        assert [first[name][0], first[name][2]] == [second[name][0], second[name][2]]
        assert "their gradients are not the same" in second[name][1] or name == "copy"
    step, said, read = first["part"]
    assert "their gradients are not the same" in said
    assert 40 + LAG < step <= 40 + 2 * LAG + 2
    assert read == [*range(2, 33), step]
    added = first["added on one rank"]
    assert "their gradients are not the same" in added[1]
    assert added[0] == step
    assert added[2] == [step]
    # Found to be a copy it is not looked at again, and nobody reads.
    assert first["copy"] == (0, "", read)


class _Late:
    """Numbers that arrive when they are waited for, as from a GPU."""

    at_once = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers, self.waited = tensor.tolist(), False

    def wait(self) -> None:
        self.waited = True

    def read(self) -> list[float]:
        assert self.waited
        return self._numbers


def test_a_device_skips_at_once_and_tells_after_as_many_steps_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_drift, "HostCopy", _Late)
    drift = rank_drift.RankDrift()
    alike = torch.tensor([[8.0, 0.0, 3.0, 0.0], [8.0, 0.0, 3.0, 0.0]], dtype=torch.float64)
    apart = torch.tensor([[8.0, 0.0, 3.0, 0.0], [4.0, 0.0, 3.0, 0.0]], dtype=torch.float64)
    for _ in range(3):
        assert drift.notice(alike, (0, 1)) == 0
    assert drift.notice(apart, (0, 1)) == 1
    # It is sent for every LAG + 1 steps: what came in between is told with the next.
    for _ in range(2 * LAG - 3):
        assert drift.notice(alike, (0, 1)) == 0
    with pytest.raises(gradilocks.errors.ScaleMisuse, match="is 8 on rank 0 and 4 on rank 1"):
        drift.notice(alike, (0, 1))
    for _ in range(2 * LAG + 2):  # Told once.
        assert drift.notice(alike, (0, 1)) == 0


def test_news_that_the_device_has_are_told_as_many_steps_later_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_drift, "HostCopy", _Late)
    drift = rank_drift.RankDrift()
    quiet = torch.tensor([[8.0, 0.0, 3.0, 0.0], [8.0, 0.0, 3.0, 0.0]], dtype=torch.float64)
    news = torch.tensor([[8.0, 0.0, 3.0, 0.0], [8.0, 0.0, 3.0, 1.0]], dtype=torch.float64)

    def told_at(rows: list[torch.Tensor], **given: Any) -> list[int]:
        seen = []
        for number, each in enumerate(rows):
            assert drift.notice(each, (0, 1), **given) == 0
            if drift.has_news:
                seen.append(number)
        return seen

    # Sent for every LAG + 1 steps: the first time at once, so that step 1 is told with the next.
    assert told_at([quiet, news, *[quiet] * (3 * LAG)]) == [2 * LAG + 1]
    assert told_at([*[quiet] * LAG, news, *[quiet] * (3 * LAG)]) != []
    # Of a step that the host has read nothing is left to be told.
    assert told_at([news] * (3 * LAG), heard=True) == []
