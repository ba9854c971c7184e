"""torchtitan's Trainer.train_step with a control; its clip function on four ranks."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from recipes import assert_equal, network, recipe, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.distributed import utils as dist_utils

from gradilocks import SkipSpikes, chain
from gradilocks.integrations.torchtitan import clip_grad_norm_, control_for

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from rank_world import caught, world

NATIVE_CLIP = dist_utils.clip_grad_norm_
BOUND, STEPS, BAD = 0.75, 10, 5


@pytest.fixture(autouse=True)
def native_clip(monkeypatch):
    """The module attribute is torchtitan's own again after each test."""
    monkeypatch.setattr(dist_utils, "clip_grad_norm_", NATIVE_CLIP)


class TinyTrainer:
    """What torchtitan's Trainer.train_step uses, with its real optimizers and schedules, without data and GPU."""

    def __init__(self, *, implementation="fused", max_norm=1.0, bad=None, factor=math.inf, model=None, dims=None):
        self.model_parts = [network() if model is None else model]
        config = default_adamw(lr=1e-2)
        config.implementation = implementation
        self.optimizers = config.build(model_parts=self.model_parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=4)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
        training = SimpleNamespace(max_norm=max_norm, disable_cuda_graphs=True)
        self.config = SimpleNamespace(training=training)
        self.device, self.step, self.bad, self.factor = torch.device("cpu"), 0, bad, factor
        self.gradient_accumulation_steps = self.num_pipeline_parallel_microbatches = 1
        self.ntokens_seen = 0
        self.parallel_dims = dims or SimpleNamespace(pp=1, world_size=1, get_optional_mesh=lambda _: None)
        for name in ("dp", "pp", "ep", "dp_cp"):
            setattr(self.parallel_dims, f"{name}_enabled", False)
        self.norms, self.seen, self.rates = [], [], []
        self.metrics_processor = SimpleNamespace(
            should_log=lambda step: True, log=lambda *numbers, **_: self.norms.append(numbers[3])
        )
        states = {"optimizer": self.optimizers, "lr_scheduler": self.lr_schedulers}
        self.checkpointer = SimpleNamespace(enable=True, states=states, maybe_wait_for_staging=lambda: None)

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.step))
        loss = self.model_parts[0](inputs).square().mean()
        loss.backward()
        if self.step == self.bad:
            next(self.model_parts[0].parameters()).grad.mul_(self.factor)
        return loss.detach()

    def train(self, steps, train_step=None):
        if train_step is None:
            from torchtitan.trainer import Trainer

            train_step = Trainer.train_step
        for self.step in steps:
            train_step(self, iter([({}, torch.zeros(1))]))
            self.seen.append(weights(self.model_parts[0]))
            self.rates.append(self.optimizers.optimizers[0].param_groups[0]["lr"])
        return self


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("max_norm", [0.1, math.inf])
def test_the_weights_are_those_of_torchtitan_alone(implementation, max_norm):
    native = TinyTrainer(implementation=implementation, max_norm=max_norm).train(range(STEPS))
    ours = TinyTrainer(implementation=implementation, max_norm=max_norm)
    control = control_for(ours)
    ours.train(range(STEPS))
    assert control.outcome.step == STEPS
    is_exact = max_norm == math.inf
    assert_equal(weights(ours.model_parts[0]), weights(native.model_parts[0]), is_exact=is_exact)
    assert ours.norms == pytest.approx(native.norms, rel=1e-5)
    assert ours.rates == native.rates


@pytest.mark.parametrize("implementation", ["fused", "for-loop"])
@pytest.mark.parametrize(
    ("factor", "clip"), [(math.inf, None), (math.nan, 1.0), (1e6, chain(SkipSpikes(window=6), 1.0))]
)
def test_a_bad_step_is_skipped_and_the_schedule_waits(implementation, factor, clip):
    ours = TinyTrainer(implementation=implementation, bad=BAD, factor=factor)
    outcomes = []
    control_for(ours, clip=clip).subscribe(lambda record: outcomes.append(record.outcome))
    ours.train(range(STEPS))
    assert [outcome.skipped for outcome in outcomes] == [step == BAD for step in range(STEPS)]
    assert all(map(torch.equal, ours.seen[BAD], ours.seen[BAD - 1]))
    assert outcomes[BAD].rejected == math.isfinite(factor)
    assert outcomes[BAD].culprits == (() if math.isfinite(factor) else ("0.weight",))
    whole = TinyTrainer().train(range(STEPS))
    assert ours.rates == whole.rates[:BAD] + whole.rates[BAD - 1 : -1]
    assert ours.norms[BAD] == pytest.approx(outcomes[BAD].norm, nan_ok=True)


def test_the_host_reads_nothing_before_the_decision_is_applied():
    """A host read of a tensor would wait for a GPU."""

    class HostReads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "local_scalar" not in str(function)
            return function(*args, **(kwargs or {}))

    ours = TinyTrainer(bad=BAD)
    control = control_for(ours, clip=chain(SkipSpikes(window=6), 1.0))
    for ours.step in (BAD - 1, BAD):
        ours.optimizers.zero_grad()
        ours.forward_backward_step(input_dict={}, labels=None, global_valid_tokens=1)
        with HostReads():
            dist_utils.clip_grad_norm_(ours.model_parts[0].parameters(), 1.0)
            ours.optimizers.step()
    assert control.outcome.skipped


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_training_resumes_bit_for_bit_from_its_checkpoint(tmp_path):
    def trainer():
        made = TinyTrainer(bad=BAD, factor=1e6)
        control_for(made, clip=chain(SkipSpikes(window=6), 1.0))
        made.checkpointer.states["model"] = made.model_parts[0]
        return made

    whole, first, second = trainer().train(range(STEPS)), trainer().train(range(4)), trainer()
    dcp.save(dict(first.checkpointer.states), checkpoint_id=tmp_path, no_dist=True)
    dcp.load(dict(second.checkpointer.states), checkpoint_id=tmp_path, no_dist=True)
    second.train(range(4, STEPS))
    assert_equal(second.seen[-1], whole.seen[-1], is_exact=True)
    assert second.rates == whole.rates[4:]
    assert second.checkpointer.states["gradilocks"].outcome.step == STEPS
    assert torch.equal(second.seen[BAD - 4][0], second.seen[BAD - 5][0])


def test_the_schedule_saves_where_it_would_be_without_late_skips():
    ours = TinyTrainer()
    control = control_for(ours)
    ours.train(range(3))
    control._schedulers[0]._calls_ahead = 1  # As on a GPU, where the skip flag arrives late.
    assert ours.lr_schedulers.state_dict() == {"last_epoch": 2}


def test_step_hooks_of_the_container_run_and_a_second_control_is_rejected():
    ours, calls = TinyTrainer(), []
    control_for(ours)
    ours.optimizers.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.train(range(2))
    assert calls == ["before"] * 2
    with pytest.raises(ValueError, match="already has a control"):
        control_for(ours)


def test_parameters_of_others_are_clipped_by_torchtitan_and_plain_experts_are_rejected():
    control_for(TinyTrainer())
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    assert dist_utils.clip_grad_norm_([param], 1.0, foreach=True, pp_mesh=None, ep_enabled=False) == 2.0
    torch.testing.assert_close(param.grad, torch.full((4,), 0.5))
    with pytest.raises(TypeError, match=r"must be a DTensor; one of shape \(4,\) is plain"):
        clip_grad_norm_([param], 1.0, ep_enabled=True)


def test_the_signature_is_that_of_torchtitan():
    theirs, ours = (inspect.signature(inspect.unwrap(f)).parameters for f in (NATIVE_CLIP, clip_grad_norm_))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


def test_the_recipe_runs_as_the_page_has_it():
    recipe("torchtitan")
    assert dist_utils.clip_grad_norm_ is clip_grad_norm_


# --- four ranks -------------------------------------------------------------------------------------------------------


def mesh_of(**sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def on(mesh: Any, whole: Tensor, *placements: Any) -> nn.Parameter:
    """A parameter whose gradient is a DTensor with the values of `whole`."""
    from torch.distributed.tensor import distribute_tensor

    param = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placements))
    param.grad = distribute_tensor(whole.clone(), mesh, placements)
    return param


def clip_experts_in_a_pipeline(rank: int) -> dict[float, Any]:
    """By order: our norm, the true one, torchtitan's, the largest error of a clipped element."""
    from torch.distributed.tensor import Replicate, Shard

    draw = torch.Generator().manual_seed(7)
    stages = [[torch.randn(shape, generator=draw) for shape in ((8, 4), (8,), (4, 3, 2))] for _ in range(2)]
    stages[1] = stages[1][2:]  # The second stage has no dense layer.
    dense, sparse = mesh_of(pp=2, fsdp=2), mesh_of(pp=2, ep=2)
    own = stages[dense.get_local_rank("pp")]

    def make() -> list[nn.Parameter]:
        placed = [(dense["fsdp"], Shard(0)), (dense["fsdp"], Replicate()), (sparse["ep"], Shard(0))][-len(own) :]
        return [on(mesh, whole, placement) for whole, (mesh, placement) in zip(own, placed, strict=True)]

    found = {}
    for order in (1.0, 2.0, 3.0, math.inf):
        params = make()
        norm = clip_grad_norm_(params, BOUND, order, foreach=True, pp_mesh=dense["pp"], ep_enabled=True)
        theirs = NATIVE_CLIP(make(), BOUND, order, foreach=True, pp_mesh=dense["pp"], ep_enabled=True)
        truth = torch.cat([each.double().flatten() for each in stages[0] + stages[1]]).norm(order).item()
        clipped = [param.grad.full_tensor() for param in params]
        factor = min(1.0, BOUND / (truth + 1e-6))
        errors = [(ours - whole * factor).abs().max().item() for ours, whole in zip(clipped, own, strict=True)]
        found[order] = type(norm) is Tensor, norm.item(), truth, theirs.item(), max(errors)
    return found


def clip_nan(rank: int) -> tuple[float, list[float], str]:
    mesh, param = mesh_of(pp=4), nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([math.nan if rank == 1 else 3.0])
    norm = clip_grad_norm_([param], BOUND, pp_mesh=mesh)
    raised = caught(lambda: clip_grad_norm_([param], BOUND, error_if_nonfinite=True, pp_mesh=mesh))
    return norm.item(), param.grad.tolist(), raised[0]


def train_stages(rank: int) -> tuple[list[bool], list[float], list[float], bool]:
    """Two stages of two shards each; one stage has an Inf."""
    from torch.distributed.fsdp import fully_shard

    grid, model = mesh_of(pp=2, fsdp=2), network()
    fully_shard(model, mesh=grid["fsdp"])
    dims = SimpleNamespace(pp=2, world_size=4)
    ours = TinyTrainer(model=model, dims=dims, bad=BAD if grid.get_local_rank("pp") else None)
    outcomes: list[Any] = []
    control_for(ours).subscribe(lambda record: outcomes.append(record.outcome))

    def train_step(trainer: TinyTrainer, _: Any) -> None:  # The Trainer's, without its imports of half a minute.
        trainer.optimizers.zero_grad()
        trainer.forward_backward_step(input_dict={}, labels=None, global_valid_tokens=1)
        trainer.norms.append(dist_utils.clip_grad_norm_(model.parameters(), 1.0, pp_mesh=grid["pp"]).item())
        trainer.optimizers.step()
        trainer.lr_schedulers.step()

    ours.train(range(STEPS), train_step)
    assert ours.norms[:BAD] == [outcome.norm for outcome in outcomes[:BAD]]
    is_same = all(
        torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(*ours.seen[BAD - 1 : BAD + 1], strict=True)
    )
    return [outcome.skipped for outcome in outcomes], ours.rates, ours.norms[:BAD], is_same


def test_norms_and_clipped_gradients_on_four_ranks_are_those_of_one_process():
    results = world(4).run(clip_experts_in_a_pipeline)
    for found in results:
        for order, (is_plain, norm, truth, theirs, error) in found.items():
            assert is_plain
            assert norm == pytest.approx(truth, rel=1e-6), order
            assert theirs == pytest.approx(truth, rel=1e-5), order
            assert error < 1e-6, order
            assert norm == results[0][order][1], "ranks differ"


def test_a_nan_in_one_stage_is_seen_by_all_and_changes_no_gradient():
    for rank, (norm, grad, raised) in enumerate(world(4).run(clip_nan)):
        assert math.isnan(norm)
        assert grad == [3.0] or rank == 1
        assert raised == "RuntimeError"


def test_all_stages_of_a_pipeline_skip_the_same_step_and_agree_on_the_norm():
    results = world(4).run(train_stages)
    alone = TinyTrainer().train(range(STEPS))
    for skipped, rates, norms, is_same in results:
        assert skipped == [step == BAD for step in range(STEPS)]
        assert is_same
        assert rates == alone.rates[:BAD] + alone.rates[BAD - 1 : -1]
        assert norms == results[0][2]
    # Both stages have the same gradients in this test, so the norm of the first step is √2 that of one.
    assert results[0][2][0] == pytest.approx(alone.norms[0] * 2**0.5, rel=1e-5)
