"""A control whose model lies on two ranks, recorded: rank 0's file tells of the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradilocks
from gradilocks import Recorder, read_run
from gradilocks.report import examine
from gradilocks.runfile import Run
from tests.ranks.rank_programs import run_all

STEPS, BAD = 12, 5
INF, NAN = float("inf"), float("nan")


def _programs() -> list[Callable[[int], Any]]:
    return [
        sharded, sharded_by_policies, sharded_and_only_rank_0_records, gone_on_with, closed_early,
        rank_files, with_a_closure, two_optimizers, stages, stages_of_one_name, flat_shards,
        replicated, replicated_without_a_recorder, replicated_and_joined, several_losses,
        collectives_of_a_step, added_later, bad_in_backward, attached_later, sharded_and_gone_back,
        replicated_and_gone_back, scaler_over_shards,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both ranks returned from every program, and the folder with their files."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "files").mkdir()
    _folder.append(folder / "files")
    return run_all(_programs(), folder)


_folder: list[Path] = []


def _runs() -> Path:
    """The folder for run files: the ranks find it by the file of their group."""
    if _folder:
        return _folder[0]
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return Path(store.path).parent / "files"


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator)


def _loss(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def _train(
    control: Any,
    model: nn.Module,
    *,
    rank: int,
    steps: int = STEPS,
    bad: dict[Any, float],
    unscales: bool = False,
) -> None:
    for step in range(1, steps + 1):
        mine = _batch(step).chunk(2)[rank]
        control.backward(_loss(model, mine) * bad.get((step, rank), 1.0))
        if unscales:
            control.unscale_()
        control.step()
        control.zero_grad()


def _spoil_backward(layer: nn.Module) -> None:
    """What comes back through a layer at the bad step is NaN; its loss is finite."""
    calls = iter(range(1, STEPS + 1))

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if next(calls) == BAD:
            output.register_hook(lambda grad: grad * NAN)

    layer.register_forward_hook(hook)


def _sharded(
    record: Any,
    rank: int,
    bad: dict[Any, float] | None = None,
    *,
    spoils: bool = False,
    **how: Any,
) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"scale": 2.0**10, "clip": 0.5, **how}
    control = gradilocks.GradientControl(optimizer, model=model, record=record, **settings)
    if spoils:
        _spoil_backward(model[1])
    _train(control, model, rank=rank, bad=bad or {})
    return control


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training in one process, of which every number is known."""
    path = tmp_path_factory.mktemp("alone") / "a.jsonl"
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(path, detail_every=3) as recorder:
        control = gradilocks.GradientControl(
            optimizer, model=model, record=recorder, scale=2.0**10, clip=0.5
        )
        for step in range(1, STEPS + 1):
            halves = [_loss(model, half) for half in _batch(step).chunk(2)]
            control.backward(sum(halves) / 2 * (INF if step == BAD else 1.0))
            control.step()
            control.zero_grad()
    return read_run(path)


def sharded(rank: int) -> list[str]:
    with Recorder(_runs() / "sharded.jsonl", detail_every=3) as recorder:
        _sharded(recorder, rank, {(BAD, 1): INF})
    return sorted(path.name for path in _runs().glob("sharded*"))


def _numbers(found: list[Any]) -> list[float]:
    return [NAN if number is None else number for number in found]


def _same_details(found: Run, wanted: Run, *, but: tuple[str, ...] = ()) -> None:
    assert [step.step for step in found.steps if step.detail] == [1, 4, 7, 10]
    for here, there in zip(found.steps, wanted.steps, strict=True):
        assert here.skipped == there.skipped
        assert _numbers([here.norm]) == pytest.approx(_numbers([there.norm]), rel=1e-6, nan_ok=True)
        if here.detail is None:
            continue
        for name in set(here.detail._fields) - set(but):
            ours, theirs = (_numbers(getattr(d, name)) for d in (here.detail, there.detail))
            assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True), name


def test_rank_0_writes_what_one_process_would(returned: Any, alone: Run) -> None:
    assert returned["sharded"][0] == ["sharded.jsonl"]
    run = read_run(_runs() / "sharded.jsonl")
    assert run.optimizers == alone.optimizers
    _same_details(run, alone)
    assert [step.loss for step in run.steps if step.step != BAD] == pytest.approx(
        [step.loss for step in alone.steps if step.step != BAD], rel=1e-6
    )
    assert {step.loss_ranks for step in run.steps} == {2}
    assert run.end is not None
    assert run.end.status == "finished"


def test_the_rank_whose_loss_was_bad_is_named(returned: Any) -> None:
    run = read_run(_runs() / "sharded.jsonl")
    step = run.steps[BAD - 1]
    assert step.skipped
    assert step.loss is None
    assert step.loss_nonfinite
    assert step.bad_loss_ranks == (1,)
    assert all(" on " in culprit.name for culprit in step.culprits)
    assert step.nan + step.inf == 53  # Every element of the model, each once.
    health = examine(run)
    assert health.verdict != "healthy"
    assert any("on rank 1" in finding.title for finding in health.findings)


def bad_in_backward(rank: int) -> None:
    with Recorder(_runs() / "backward.jsonl") as recorder:
        _sharded(recorder, rank, spoils=rank == 1)


def test_a_culprit_with_its_ranks_is_likely_if_all_losses_were_finite(returned: Any) -> None:
    run = read_run(_runs() / "backward.jsonl")
    (culprit,) = run.steps[BAD - 1].culprits
    assert culprit.name.startswith("0.bias on ")
    found = [each for each in examine(run).findings if each.culprit == culprit.name]
    assert found, examine(run)
    assert f"First in backward order came {culprit.name}: likely it arose" in found[0].sentence


def sharded_by_policies(rank: int) -> None:
    """Norms of another order, and policies that bound tensors apart, change no number of it."""
    policies = {
        "inf": gradilocks.ClipByNorm(1e9, order=INF),
        "apart": gradilocks.ClipPerTensor(1e9),
    }
    for name, clip in policies.items():
        with Recorder(_runs() / f"policy_{name}.jsonl", detail_every=3) as recorder:
            _sharded(recorder, rank, clip=clip)


@pytest.mark.parametrize("name", ["inf", "apart"])
def test_norms_of_tensors_are_2_norms_of_the_whole(returned: Any, alone: Run, name: str) -> None:
    first, wanted = read_run(_runs() / f"policy_{name}.jsonl").steps[0].detail, alone.steps[0]
    assert first is not None
    assert wanted.detail is not None
    assert first.norm == pytest.approx(wanted.detail.norm, rel=1e-5)
    assert first.largest == pytest.approx(wanted.detail.largest, rel=1e-5)


def sharded_and_only_rank_0_records(rank: int) -> None:
    record = Recorder(_runs() / "only_0.jsonl", detail_every=3) if rank == 0 else None
    control = _sharded(record, rank, {(BAD, 1): INF})
    assert (control.recorder is None) == (rank == 1)
    if record is not None:
        record.close()


def test_a_recorder_on_rank_0_alone_tells_of_all(returned: Any, alone: Run) -> None:
    run = read_run(_runs() / "only_0.jsonl")
    _same_details(run, alone)
    assert {step.loss_ranks for step in run.steps} == {2}


def gone_on_with(rank: int) -> None:
    """A second session in the same file: steps, and those with detail, are counted on."""
    for exists in ("refuse", "append"):
        with Recorder(_runs() / "gone_on.jsonl", detail_every=5, exists=exists) as recorder:
            _sharded(recorder, rank)
        dist.barrier()


def test_a_file_that_is_gone_on_with_counts_on(returned: Any) -> None:
    run = read_run(_runs() / "gone_on.jsonl")
    assert [step.step for step in run.steps] == list(range(1, 2 * STEPS + 1))
    assert [step.step for step in run.steps if step.detail] == [1, 6, 11, 16, 21]


def closed_early(rank: int) -> float:
    """Rank 0's recorder is closed in the midst of it: the ranks go on as they have agreed."""
    recorder = Recorder(_runs() / "closed.jsonl", detail_every=2)
    control = _sharded(recorder, rank)
    recorder.close()
    model = _model()
    for step in range(4):
        for param in control._all_parameters():
            param.grad = torch.full_like(param, float(step))
        control._order.scaled = True
        control.step()
    del model
    return control.scale


def test_a_recorder_that_is_closed_early_hangs_nobody(returned: Any) -> None:
    assert returned["closed_early"] == [1024.0, 1024.0]
    assert len(read_run(_runs() / "closed.jsonl").steps) == STEPS


def rank_files(rank: int) -> list[str]:
    with Recorder(_runs() / "every.jsonl", all_ranks=True, detail_every=3) as recorder:
        _sharded(recorder, rank, {(BAD, 1): INF})
    dist.barrier()
    return sorted(path.name for path in _runs().glob("every*"))


def test_rank_files_are_there_if_asked_for(returned: Any, alone: Run) -> None:
    assert returned["rank_files"][0] == ["every.jsonl", "every.rank1.jsonl"]
    _same_details(read_run(_runs() / "every.jsonl"), alone)
    other = read_run(_runs() / "every.rank1.jsonl")
    assert len(other.steps) == STEPS
    assert {step.of_rank for step in other.steps} == {True}


def with_a_closure(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(_runs() / "closure.jsonl", detail_every=2) as recorder:
        control = gradilocks.GradientControl(
            optimizer, model=model, record=recorder if rank == 0 else None, scale=None
        )
        for step in range(1, 5):

            def evaluate(step: int = step) -> Tensor:
                control.zero_grad()
                loss = _loss(model, _batch(step).chunk(2)[rank])
                control.backward(loss)
                return loss

            control.step(evaluate)


def test_a_closure_is_recorded_over_ranks(returned: Any) -> None:
    run = read_run(_runs() / "closure.jsonl")
    assert [step.step for step in run.steps if step.detail] == [1, 3]
    detail = run.steps[2].detail
    assert detail is not None
    assert all(ratio is not None and ratio > 0 for ratio in detail.update)


def two_optimizers(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for part in (model[0], model[2]):
        fully_shard(part)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    with Recorder(_runs() / "two.jsonl", detail_every=3) as recorder:
        control = gradilocks.GradientControl(
            first, second, model=model, record=recorder, scale=2.0**10
        )
        for step in range(1, 4):
            control.backward(_loss(model, _batch(step).chunk(2)[rank]))
            if step == 2 and rank == 1:
                local = model[2].weight.grad.to_local()  # type: ignore[union-attr]
                local.view(-1)[0] = NAN
            control.step()
            control.zero_grad()


def test_culprits_stand_with_their_own_optimizer(returned: Any) -> None:
    run = read_run(_runs() / "two.jsonl")
    names = ["0.weight", "0.bias"], ["2.weight", "2.bias"]
    assert [list(info.names) for info in run.optimizers] == list(names)
    assert [info.kind for info in run.optimizers] == ["SGD", "AdamW"]
    bad = [step for step in run.steps if step.step == 2]
    assert [step.skipped for step in bad] == [True, True]
    assert [[c.name for c in step.culprits] for step in bad] == [[], ["2.weight on rank 1"]]
    assert [step.nan for step in bad] == [0, 1]
    assert all(step.detail is not None for step in run.steps if step.step == 1)


class _Stage(nn.Module):
    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.full((3,), value)))
        self.shared = nn.Parameter(torch.full((2,), value))


def _of_stage(name: str, path: str, rank: int) -> None:
    model = _Stage(name, 1.0 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(_runs() / path, detail_every=1) as recorder:
        control = gradilocks.GradientControl(
            optimizer,
            model=model,
            record=recorder,
            scale=4.0,
            process_group=dist.group.WORLD,
        )
        for step in range(1, 4):
            if rank == 1:
                loss = torch.tensor(float(step), requires_grad=True)
                control.backward(loss)
            for param in model.parameters():
                param.grad = torch.full_like(param, 4.0 * (1.0 + rank))
            if step == 2 and rank == 1:
                getattr(model, name).grad[1] = INF
            control.step()
            control.zero_grad()


def stages(rank: int) -> None:
    _of_stage(["embedding", "head"][rank], "stages.jsonl", rank)


def stages_of_one_name(rank: int) -> None:
    _of_stage("layer", "alike.jsonl", rank)


def test_parameters_of_another_stage_are_named_and_measured(returned: Any) -> None:
    run = read_run(_runs() / "stages.jsonl")
    assert run.optimizers[0].names == (
        "embedding", "shared on rank 0", "head", "shared on rank 1",
    )  # fmt: skip
    assert run.optimizers[0].sizes == (3, 2, 3, 2)
    first, bad, _ = run.steps
    assert first.norm == pytest.approx((5 * 1.0 + 5 * 4.0) ** 0.5)
    assert first.detail is not None
    assert first.detail.norm == pytest.approx([3**0.5, 2**0.5, 12**0.5, 8**0.5], rel=1e-5)
    assert first.detail.weight == pytest.approx([3**0.5, 2**0.5, 12**0.5, 8**0.5], rel=1e-5)
    assert first.detail.update == pytest.approx([0.5] * 4, rel=1e-5)
    assert [(c.name, c.inf) for c in bad.culprits] == [("head on rank 1", 1)]
    assert [step.loss for step in run.steps] == [1.0, 2.0, 3.0]  # Of the one rank that has one.
    assert {step.loss_ranks for step in run.steps} == {1}


def test_parameters_of_one_name_on_two_stages_are_two(returned: Any) -> None:
    names = read_run(_runs() / "alike.jsonl").optimizers[0].names
    assert names == (
        "layer on rank 0", "shared on rank 0", "layer on rank 1", "shared on rank 1",
    )  # fmt: skip


def flat_shards(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (True, False):
        model = FullyShardedDataParallel(
            _model(), use_orig_params=original, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(_runs() / f"flat_{original}.jsonl", detail_every=3) as recorder:
            control = gradilocks.GradientControl(
                optimizer,
                model=model,
                record=recorder,
                scale=2.0**10,
                clip=0.5,
                process_group=model.process_group,
            )
            _train(control, model, rank=rank, bad={(BAD, 0): INF})


def test_shards_of_fsdp1_are_put_together_by_their_names(returned: Any, alone: Run) -> None:
    run = read_run(_runs() / "flat_True.jsonl")
    assert run.optimizers == alone.optimizers
    _same_details(run, alone)
    flat = read_run(_runs() / "flat_False.jsonl")
    assert len(flat.optimizers[0].names) == 1
    assert flat.optimizers[0].sizes[0] >= 53
    detail = flat.steps[0].detail
    assert detail is not None
    assert detail.norm == pytest.approx([alone.steps[0].norm], rel=1e-5)


def _replicated(rank: int, record: Any, **how: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = gradilocks.GradientControl(
        optimizer, model=model, record=record, scale=2.0**10, clip=0.5
    )
    return control, model


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def replicated(rank: int) -> list[str]:
    heard = _Heard()
    logging.getLogger("gradilocks").addHandler(heard)
    record = Recorder(_runs() / "replicated.jsonl", flush_every=4) if rank == 0 else None
    control, model = _replicated(rank, record)
    _train(control, model, rank=rank, steps=10, bad={(BAD, 1): NAN, (10, 1): NAN}, unscales=True)
    if record is not None:
        record.close()
    logging.getLogger("gradilocks").removeHandler(heard)
    return heard.lines


def test_a_bad_loss_of_a_replica_is_told_on_all_with_the_next_batch(returned: Any) -> None:
    told = f"the loss of step {BAD} was NaN or Inf on rank 1"
    for lines in returned["replicated"]:
        assert lines.count(told) == 1
    run = read_run(_runs() / "replicated.jsonl")
    step = run.steps[BAD - 1]
    assert (step.skipped, step.loss, step.bad_loss_ranks) == (True, None, (1,))
    assert [s.loss_ranks for s in run.steps] == [2] * 8 + [None] * 2  # The rest was not told.
    halves = [_loss(_model(), half).item() for half in _batch(1).chunk(2)]
    assert run.steps[0].loss == pytest.approx(sum(halves) / 2)
    health = examine(run)
    assert health.verdict != "healthy"
    assert any("on rank 1" in finding.title for finding in health.findings)


def replicated_without_a_recorder(rank: int) -> int:
    """One exchange at the first step, and no other."""
    control, model = _replicated(rank, None)
    with _Counted() as counted:
        _train(control, model, rank=rank, steps=3, bad={})
    assert control._exchange is None
    return counted.calls["all_gather"]


def replicated_and_joined(rank: int) -> list[int]:
    """Ranks with different numbers of batches, as torch's `join` allows."""
    record = Recorder(_runs() / "joined.jsonl", flush_every=2) if rank == 0 else None
    control, model = _replicated(rank, record)
    taken = []
    with model.join():
        for step in range(1, 4 + 3 * (1 - rank)):
            control.backward(_loss(model, _batch(step).chunk(2)[rank]))
            control.step()
            control.zero_grad()
            taken.append(step)
    if record is not None:
        record.close()
    return taken


def test_ranks_that_stop_at_different_steps_wait_for_nobody(returned: Any) -> None:
    assert [len(each) for each in returned["replicated_and_joined"]] == [6, 3]
    assert len(read_run(_runs() / "joined.jsonl").steps) == 6


def several_losses(rank: int) -> None:
    """Micro-batches add up, before the ranks' mean is taken."""
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(_runs() / "several.jsonl") as recorder:
        control = gradilocks.GradientControl(optimizer, model=model, record=recorder)
        for part in _batch(1).chunk(2)[rank].chunk(2):
            control.backward(_loss(model, part) / 2)
        control.step()


def test_micro_batches_of_ranks_add_up(returned: Any, alone: Run) -> None:
    (step,) = read_run(_runs() / "several.jsonl").steps
    assert step.loss == pytest.approx(alone.steps[0].loss, rel=1e-6)


class _Counted:
    """Counts collectives by their names in torch.distributed."""

    def __enter__(self) -> _Counted:
        self.calls: dict[str, int] = {}
        self._kept = {n: getattr(dist, n) for n in ("all_gather", "all_reduce")}
        for name, function in self._kept.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def _counting(self, name: str, function: Any) -> Any:
        self.calls[name] = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, function in self._kept.items():
            setattr(dist, name, function)


def collectives_of_a_step(rank: int) -> list[dict[str, int]]:
    """Of steps 1 to 4, of which 1 and 4 are recorded tensor by tensor."""
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with Recorder(_runs() / "counted.jsonl", detail_every=3) as recorder:
        control = gradilocks.GradientControl(optimizer, model=model, record=recorder)
        for step in range(1, 5):
            control.backward(_loss(model, _batch(step).chunk(2)[rank]))
            with _Counted() as counted:
                control.step()
            control.zero_grad()
            found.append(counted.calls)
    return found


def test_detail_costs_two_collectives_and_other_steps_none(returned: Any) -> None:
    plain, detailed = {"all_gather": 1, "all_reduce": 0}, {"all_gather": 1, "all_reduce": 2}
    for first, *later in returned["collectives_of_a_step"]:
        assert first["all_reduce"] == 2
        assert later == [plain, plain, detailed]


def test_replicas_exchange_once_if_nobody_records(returned: Any) -> None:
    first, second = returned["replicated_without_a_recorder"]
    assert first == second
    assert first <= 2  # The settings, as one object: its length, and itself.


def added_later(rank: int) -> None:
    """Parameters that join an optimizer later are told anew, to all ranks."""
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for part in (model[0], model[2]):
        fully_shard(part)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with Recorder(_runs() / "later.jsonl", detail_every=2) as recorder:
        control = gradilocks.GradientControl(optimizer, model=model, record=recorder)
        for step in range(1, 5):
            control.backward(_loss(model, _batch(step).chunk(2)[rank]))
            control.step()
            control.zero_grad()
            model.zero_grad()
            if step == 2:
                optimizer.add_param_group({"params": list(model[2].parameters())})


def test_parameters_that_come_later_are_recorded_too(returned: Any) -> None:
    run = read_run(_runs() / "later.jsonl")
    assert [len(info.names) for info in run.optimizers] == [2, 4]
    assert [len(step.detail.norm) for step in run.steps if step.detail] == [2, 4]


def attached_later(rank: int) -> None:
    """After the first step, on rank 0 alone: nothing hangs, and rank 0 tells what it can."""
    control = _sharded(None, rank)
    if rank == 0:
        control.attach(_runs() / "attached.jsonl")
    _train(control, control._names.model, rank=rank, steps=3, bad={(2, 1): INF})
    if rank == 0:
        control.recorder.close()


def test_a_recorder_attached_later_tells_of_whole_steps(returned: Any) -> None:
    run = read_run(_runs() / "attached.jsonl")
    assert [step.step for step in run.steps] == [STEPS + 1, STEPS + 2, STEPS + 3]
    assert [step.skipped for step in run.steps] == [False, True, False]
    assert run.steps[1].bad_loss_ranks == (1,)
    assert {step.of_rank for step in run.steps} == {None}
    assert {step.detail for step in run.steps} == {None}
    assert run.optimizers[0].names == ("0.weight", "0.bias", "2.weight", "2.bias")


def sharded_and_gone_back(rank: int) -> None:
    """A session that is resumed from the third step, and a loop that goes back by itself."""
    path = _runs() / "back.jsonl"
    with Recorder(path, detail_every=2) as recorder:
        control = _sharded(recorder, rank)
        state = control.state_dict()
        _train(control, control._names.model, rank=rank, steps=2, bad={})
    dist.barrier()
    with Recorder(path, detail_every=2, exists="append") as recorder:
        control = _sharded(None, rank)
        control.load_state_dict(state)
        control.attach(recorder)
        _train(control, control._names.model, rank=rank, steps=3, bad={})
        control.load_state_dict(state)
        _train(control, control._names.model, rank=rank, steps=4, bad={})


def test_sharded_runs_go_on_from_a_checkpoint(returned: Any) -> None:
    run = read_run(_runs() / "back.jsonl")
    assert [step.step for step in run.steps] == list(range(1, STEPS + 5))
    assert [step.step - STEPS for step in run.superseded] == [1, 2, 1, 2, 3]
    assert len(run.optimizers) == 1


def replicated_and_gone_back(rank: int) -> None:
    """In the midst of an exchange of losses: those of superseded steps are nobody's."""
    with Recorder(_runs() / "replicas_back.jsonl", flush_every=4) as recorder:
        control, model = _replicated(rank, recorder)
        _train(control, model, rank=rank, steps=2, bad={})
        state = control.state_dict()
        _train(control, model, rank=rank, steps=1, bad={(1, 1): INF})
        control.load_state_dict(state)
        _train(control, model, rank=rank, steps=4, bad={})


def test_losses_of_replicas_stand_with_the_steps_that_they_are_of(returned: Any) -> None:
    run = read_run(_runs() / "replicas_back.jsonl")
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.step for step in run.superseded] == [3]
    assert [step.loss_ranks for step in run.steps] == [None, None, 2, 2, 2, 2]
    assert not any(step.bad_loss_ranks for step in run.steps)


def scaler_over_shards(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = gradilocks.GradScaler("cpu", model=model, record=_runs() / "scaler.jsonl")
    for step in (1, 2):
        bad = INF if (step, rank) == (2, 1) else 1.0
        scaler.scale(_loss(model, _batch(step).chunk(2)[rank]) * bad).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scaler.recorder.close()


def test_a_scalers_file_says_that_its_numbers_are_of_what_rank_0_holds(returned: Any) -> None:
    run = read_run(_runs() / "scaler.jsonl")
    assert [step.skipped for step in run.steps] == [False, True]
    assert {step.of_rank for step in run.steps} == {True}
    assert "of-one-rank" in {each.rule for each in examine(run).findings}
