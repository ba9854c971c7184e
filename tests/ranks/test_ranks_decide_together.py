"""All ranks take the same decision at the same step: skips, culprits, schedules, giving up, errors about settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from parallel_models import line, local_of, mesh_of, seeded
from rank_world import caught, world
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradilocks
from gradilocks import GradientControl
from gradilocks.clip import Limit


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def sharded() -> Any:
    return fully_shard(seeded(Model), mesh=line())


def control_of(model: Any, **options: Any) -> GradientControl:
    options.setdefault("scale", gradilocks.DynamicScale(init_scale=8.0, growth_interval=100))
    return GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)


def backward(control: Any, model: Any, rank: int) -> None:
    control.zero_grad()
    control.backward(model(torch.full((2, 4), 0.1 * (rank + 1))).square().mean())


def write(model: Any, names: dict[str, float]) -> None:
    for name, param in model.named_parameters():
        if name in names:
            local_of(param.grad).view(-1)[0] = names[name]


# --- non-finite gradients --------------------------------------------------------------------------------------------


def inf_on_one_rank(rank: int) -> list[Any]:
    """Inf in two parameters on rank 1 and NaN in one on rank 3."""
    model = sharded()
    control = control_of(model)
    before = [local_of(param).clone() for param in model.parameters()]
    backward(control, model, rank)
    write(model, {1: {"body.weight": math.inf, "head.weight": math.inf}, 3: {"body.bias": math.nan}}.get(rank, {}))
    outcome = control.step()
    unchanged = all(map(torch.equal, before, map(local_of, model.parameters())))
    return [
        outcome.skipped,
        unchanged,
        control.scale,
        math.isfinite(outcome.norm),
        outcome.culprits,
        outcome.describe(),
    ]


def test_one_rank_with_inf_skips_the_step_on_every_rank() -> None:
    results = world(4).run(inf_on_one_rank)
    for skipped, unchanged, scale, is_finite, culprits, _ in results:
        assert (skipped, unchanged, scale, is_finite) == (True, True, 4.0, False)
        assert {"head.weight", "body.bias"} <= set(culprits)
    # A rank names all of its own culprits, and of each other rank the first in backward order.
    assert results[0][4] == results[2][4] == ("head.weight", "body.bias")
    assert results[1][4] == ("head.weight", "body.weight", "body.bias")
    assert results[0][5] == "NaN or Inf in head.weight, NaN or Inf in body.bias"


def culprits_on_stages(rank: int) -> list[Any]:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage = rank // 2
    model = nn.ModuleDict({f"layer{i}": nn.Linear(2, 2) for i in range(stage, 2 * stage + 1)})
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, mesh=mesh, distinct="pp", scale=8.0
    )
    if rank == 2:
        control.scale_loss(torch.ones((), requires_grad=True))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if rank == 3:
        model["layer2"].weight.grad[0, 0] = math.inf
    first = control.step()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    control.unscale_()  # A stage without a loss may unscale, too.
    if rank == 0:
        model["layer0"].bias.grad[0] = math.nan
    return [first.culprits, control.step().culprits]


def test_a_culprit_on_another_pipeline_stage_has_the_name_it_has_there() -> None:
    for first, second in world(4).run(culprits_on_stages):
        assert first == ("layer2.weight",)
        assert second == ("layer0.bias",)


def unsharded_after_backward(rank: int) -> list[Any]:
    """The model lists whole parameters during the step, the optimizer shards."""
    model = sharded()
    model.set_reshard_after_backward(False)
    params = dict(model.named_parameters())
    clip = gradilocks.ClipPerGroup({"head.*": 1e-3}, otherwise=1e3)
    control = control_of(model, clip=clip)
    backward(control, model, rank)
    first = control.step()
    backward(control, model, rank)
    local_of(params["head.weight"].grad).view(-1)[0] = math.inf if rank == 1 else 0.0
    return [first.clipped, control.step().culprits]


def test_names_are_those_of_the_construction() -> None:
    assert world(4).run(unsharded_after_backward) == [[True, ("head.weight",)]] * 4


def overflow_of_one_rank(rank: int) -> dict[str, Any]:
    """Inf on rank 2; after unscale_ it is removed, but has been seen."""
    found = {}
    for call in ("step", "update", "raise"):
        model = sharded()
        control = control_of(model, on_nonfinite="raise" if call == "raise" else "skip")
        backward(control, model, rank)
        write(model, {"head.weight": math.inf} if rank == 2 else {})
        if call != "raise":
            control.unscale_()
            write(model, {"head.weight": 0.0})
        error, _ = caught(control.update if call == "update" else control.step)
        found[call] = error, control.outcome and control.outcome.skipped, control.scale
    return found


def test_an_overflow_of_one_rank_skips_lowers_the_scale_or_raises_everywhere() -> None:
    expected = {"step": ("", True, 4.0), "update": ("", None, 4.0), "raise": ("NonFiniteGradient", True, 4.0)}
    assert world(4).run(overflow_of_one_rank) == [expected] * 4


def unscaled_on_one_rank(rank: int) -> Any:
    model = sharded()
    control = control_of(model)
    backward(control, model, rank)
    if rank == 0:
        control.unscale_()
    return caught(control.step)


def test_gradients_that_only_some_ranks_unscaled_are_an_error_on_every_rank() -> None:
    for kind, message in world(4).run(unscaled_on_one_rank):
        assert kind == "RanksDiffer"
        assert message.startswith("scale differs: 8 after unscale_() on rank 0, 8 on ranks 1-3. The step was skipped")


def one_optimizer_at_a_time(rank: int) -> list[Any]:
    model = sharded()
    body, head = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.head))
    control = GradientControl(body, head, model=model, scale=gradilocks.DynamicScale(init_scale=8.0))
    backward(control, model, rank)
    write(model, {"head.bias": math.inf} if rank == 1 else {})
    outcomes = [control.step(only=body), control.step(only=head)]
    control.update()
    return [[(outcome.skipped, outcome.culprits) for outcome in outcomes], control.scale]


def test_optimizers_that_step_alone_decide_over_all_ranks() -> None:
    assert world(4).run(one_optimizer_at_a_time) == [[[(False, ()), (True, ("head.bias",))], 4.0]] * 4


def through_a_closure(rank: int) -> list[Any]:
    model = sharded()
    control = control_of(model)
    seen = []
    for bad in (False, True):

        def closure(bad: bool = bad) -> torch.Tensor:
            control.zero_grad()
            loss = model(torch.full((2, 4), 0.1 * (rank + 1))).square().mean()
            control.backward(loss)
            write(model, {"head.weight": math.inf} if bad and rank == 1 else {})
            return loss  # type: ignore[no-any-return]

        outcome = control.step(closure)
        seen.append((outcome.skipped, outcome.culprits, control.scale))
    return seen


def test_a_closure_decides_over_all_ranks() -> None:
    assert world(2).run(through_a_closure) == [[(False, (), 8.0), (True, ("head.weight",), 4.0)]] * 2


ZERO: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "our AdamW": (gradilocks.optim.AdamW, {}),
    "our SGD": (gradilocks.optim.SGD, {"momentum": 0.9}),
}


def train_from_nan(model: Any, optimizer: Any) -> list[Any]:
    """The first step is skipped, before optimizers have any state."""
    control = GradientControl(optimizer, model=model, clip=0.1)
    skipped = []
    for step, factor in enumerate([math.nan, 1.0, 0.5, math.inf, 2.0]):
        control.zero_grad()
        control.backward(model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean() * (1 + step) * factor)
        skipped.append(control.step().skipped)
    return [skipped, [param.detach().clone() for param in model.parameters()]]


def zero_redundancy(rank: int, name: str) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # It warns when it is imported.

    model = nn.parallel.DistributedDataParallel(seeded(Model))
    kind, options = ZERO[name]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=0.1, **options)
    return train_from_nan(model, optimizer)


@pytest.mark.parametrize("name", ZERO)
def test_zero_redundancy_optimizers_skip_and_step_as_one_process(name: str) -> None:
    model = seeded(Model)
    kind, options = ZERO[name]
    skipped, expected = train_from_nan(model, kind(model.parameters(), lr=0.1, **options))
    assert skipped == [True, False, False, True, False]
    for found, params in world(2).run(zero_redundancy, name):
        assert found == skipped
        torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)


def overflow_in_the_reduction(rank: int) -> list[Any]:
    """Every rank's float16 gradient is finite, and their sum is not."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    nn.init.constant_(model[0].weight, 0.5)
    half = torch.float16
    fully_shard(model, mesh=line(), mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half))
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=2.0**-10), model=model, scale=1024.0, clip=1e9)
    seen = []
    for size in (1.0, 48.0, 1.0):  # The sum of 4 · 48 · 1024 overflows on its way to the mean.
        inputs = torch.zeros(1, 4)
        inputs[0, 0] = size
        control.zero_grad()
        control.backward(model(inputs)[:, 5].float().sum())
        outcome = control.step()
        seen.append((outcome.skipped, outcome.culprits))
    return [seen, model[0].weight.full_tensor()[5, 0].item()]  # type: ignore[operator]


def test_an_overflow_in_a_float16_reduction_is_skipped_by_all() -> None:
    for seen, weight in world(4).run(overflow_in_the_reduction):
        assert seen == [(False, ()), (True, ("0.weight",)), (False, ())]
        assert weight == 0.5 - 2 * 2.0**-10


def small_gradients_in_float16(rank: int) -> dict[tuple[Any, Any], float]:
    found = {}
    for reduced in (torch.float16, torch.float32):
        for scale in (None, 2.0**16):
            layer = nn.Linear(8, 8, bias=False)
            nn.init.constant_(layer.weight, 0.5)
            policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=reduced)
            model: Any = fully_shard(layer, mesh=line(), mp_policy=policy)
            control = control_of(model, scale=scale)
            control.backward(model(torch.ones(1, 8)).float().sum() * 1e-9)
            found[str(reduced), scale] = control.step().norm
    return found


def test_float16_under_fsdp2_needs_a_scale_whatever_the_dtype_of_the_reduction() -> None:
    """All 64 gradients are 1e-9, and float16 rounds at 3e-8. With the scale 11 bits remain."""
    for found in world(2).run(small_gradients_in_float16):
        for (_, scale), norm in found.items():
            assert norm == (0.0 if scale is None else pytest.approx(8e-9, rel=1e-3))


# --- schedules and giving up -----------------------------------------------------------------------------------------


def schedule_and_give_up(rank: int) -> list[Any]:
    model = sharded()
    control = control_of(model, give_up_after=3)
    scheduler = control.scheduler(torch.optim.lr_scheduler.ExponentialLR(control.optimizers[0], 0.5))
    rates: list[float] = []
    for step in range(10):
        backward(control, model, rank)
        write(model, {"body.bias": math.inf} if rank == 1 and step in (1, 3, 4, 5) else {})
        kind, message = caught(control.step)
        if kind:
            return [rates, step, kind, message]
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return [rates]


def test_schedules_stand_still_and_runs_end_at_the_same_step_on_every_rank() -> None:
    for rates, step, kind, message in world(4).run(schedule_and_give_up):
        assert rates == [0.05, 0.05, 0.025, 0.025, 0.025]
        assert (step, kind) == (5, "NeverFinite")
        assert "the last at step 6" in message
        assert "Inf in body.bias" in message


def nan_in_one_loss(rank: int) -> list[Any]:
    model = sharded()
    control = control_of(model, give_up_after=1)
    factor = math.nan if rank == 1 else 1.0
    control.backward(model(torch.ones(2, 4)).square().mean() * factor)
    kind, message = caught(control.step)
    return [kind, "NaN or Inf before scaling" in message, control.outcome and control.outcome.loss_is_finite]


def test_a_nan_in_the_loss_of_one_rank_is_reported_on_every_rank() -> None:
    assert world(2).run(nan_in_one_loss) == [["NeverFinite", True, False]] * 2


def through_as_scaler(rank: int) -> list[Any]:
    model = sharded()
    control = control_of(model)
    scaler, optimizer = control.as_scaler(), control.optimizers[0]
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 4), 0.1 * (rank + 1))).square().mean()).backward()
        write(model, {"head.bias": math.inf} if rank == 3 and step == 1 else {})
        before = local_of(model.body.weight).clone()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((torch.equal(before, local_of(model.body.weight)), scaler.get_scale()))
    return seen


def test_a_framework_that_takes_a_scaler_skips_on_every_rank() -> None:
    assert world(4).run(through_as_scaler) == [[(False, 8.0), (True, 4.0), (False, 4.0)]] * 4


# --- ranks that differ -----------------------------------------------------------------------------------------------


def different_settings(rank: int) -> dict[str, Any]:
    found = {}
    settings: dict[str, dict[str, Any]] = {
        "clip": {"clip": 1.0 if rank < 3 else 0.5},
        "scale": {"scale": None if rank == 0 else 4.0},
        "give_up_after": {"give_up_after": 10 + rank % 2},
        "distinct": {"mesh": line("pp"), "distinct": "pp" if rank == 0 else ()},
        "share": {"share": (lambda name, param: 1.0) if rank == 1 else None},
    }
    for name, options in settings.items():
        model = sharded()
        control = control_of(model, **options)
        backward(control, model, rank)
        found[name] = caught(control.step)
    model = sharded()
    if rank == 2:
        model.head.bias.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    control = GradientControl(torch.optim.SGD(params, lr=0.1), model=model, scale=None)
    for param in params:
        param.grad = torch.ones_like(param)
    found["parameters"] = caught(control.step)
    return found


def test_different_settings_are_an_error_on_every_rank_at_the_first_step() -> None:
    for found in world(4).run(different_settings):
        assert {kind for kind, _ in found.values()} == {"RanksDiffer"}
        assert "1.0, order=2.0),) on ranks 0-2" in found["clip"][1]
        assert found["clip"][1].endswith("on rank 3. Construct the control identically on every rank.")
        assert found["scale"][1].startswith("scale= differs: None on rank 0, StaticScale")
        assert found["give_up_after"][1].startswith("give_up_after= differs: 10 on ranks 0, 2, 11 on ranks 1, 3")
        assert found["distinct"][1].startswith("distinct= differs: ('pp',) on rank 0, () on ranks 1-3. Construct")
        assert found["share"][1].startswith("share= differs: None on ranks 0, 2-3, a function on rank 1. Construct")
        assert found["parameters"][1].startswith(
            "ranks 0, 2 should hold the same parameters, but only rank 0 has head.bias."
        )


def different_scale_or_step(rank: int) -> dict[str, Any]:
    found = {}
    for name, state in {
        "scale": {"scale": 16.0 if rank == 1 else 8.0},
        "step": {"scale": 8.0, "gradilocks": {"version": 3, "steps": 5 * (rank == 3), "clip": {}}},
    }.items():
        model = sharded()
        control = control_of(model)
        control.load_state_dict(state)
        before = [local_of(param).clone() for param in model.parameters()]
        backward(control, model, rank)
        error = caught(control.step)
        found[name] = *error, all(map(torch.equal, before, map(local_of, model.parameters())))
    return found


def test_ranks_with_different_scales_or_steps_skip_and_raise_everywhere() -> None:
    for found in world(4).run(different_scale_or_step):
        for name, text in {"scale": "8 on ranks 0, 2-3, 16 on rank 1", "step": "1 on ranks 0-2, 6 on rank 3"}.items():
            kind, message, is_unchanged = found[name]
            assert (kind, is_unchanged) == ("RanksDiffer", True)
            assert message.startswith(f"{name} differs: {text}. The step was skipped on every rank.")


def different_replicas(rank: int) -> list[Any]:
    """DistributedDataParallel sends no rows, so settings and loaded states are compared before they are used."""
    model = nn.parallel.DistributedDataParallel(seeded(Model))
    before = [param.detach().clone() for param in model.parameters()]
    found: list[Any] = []
    mesh = {"mesh": torch.distributed.group.WORLD} if rank else {}
    for options, state in (({"clip": 1.0 + rank}, None), (mesh, None), ({}, {"scale": 4.0 + 4.0 * rank})):
        control = control_of(model, **options)
        if state is not None:
            control.load_state_dict(state)
        backward(control, model, rank)
        found.append(caught(control.step))
    control = control_of(model, scale=gradilocks.DynamicScale(init_scale=8.0))
    backward(control, model, 0)
    outcome = control.step()
    found.append([outcome.skipped, all(map(torch.equal, before, model.parameters()))])
    control.load_state_dict({"scale": 4.0 + 4.0 * rank})  # Later states are compared, too.
    backward(control, model, 0)
    return [*found, caught(control.step)]


def test_replicas_compare_settings_and_loaded_states() -> None:
    for settings, mesh, state, step, later in world(2).run(different_replicas):
        assert settings[0] == mesh[0] == state[0] == later[0] == "RanksDiffer"
        assert mesh[1].startswith("mesh= differs: None on rank 0, 2 ranks on rank 1. Construct")
        assert settings[1].startswith("clip= differs: (ClipByNorm(max_norm=1.0, order=2.0),) on rank 0, (ClipByNorm(")
        assert state[1].startswith("the loaded state differs: scale 4 at step 0 on rank 0, scale 8 at step 0 on rank 1")
        assert step == [False, False]
        assert later[1].startswith("the loaded state differs: scale 4 at step 0 on rank 0, scale 8")


def nothing_on_any_rank(rank: int) -> list[Any]:
    """A pipeline whose loss function does not scale; then a step without backward."""
    model = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
    layer, options = model[f"layer{rank}"], {"mesh": line("pp"), "distinct": "pp"}
    layer(torch.ones(1, 2)).sum().backward()
    before = layer.weight.detach().clone()
    unscaled = caught(control_of(model, **options).step)
    model.zero_grad()
    empty = caught(control_of(model, scale=None, **options).step)
    return [unscaled, empty, torch.equal(before, layer.weight)]


def test_a_loss_or_gradients_that_are_missing_on_every_rank_are_an_error() -> None:
    for unscaled, empty, is_unchanged in world(2).run(nothing_on_any_rank):
        assert unscaled[0] == "ScaleMisuse"
        assert "control.scale_loss(loss) from the loss function" in unscaled[1]
        assert empty == ("NoGradients", "no parameter has a gradient on any rank. Call backward() before step().")
        assert is_unchanged


def patterns(rank: int) -> list[Any]:
    """Stage 0 has no head, stage 1 no body."""
    mesh = mesh_of((2,), ("pp",))
    model = nn.ModuleDict({("body", "head")[rank]: nn.Linear(2, 1, bias=False)})
    found: list[Any] = []
    for limits in ({"body.*": 1.0, "head.*": 2.0}, {"body.*": 1.0, "neck.*": 1.0}):
        clip = gradilocks.ClipPerGroup(limits)
        control = GradientControl(
            torch.optim.SGD(model.parameters(), lr=1.0), model=model, clip=clip, scale=None, mesh=mesh, distinct="pp"
        )
        param = next(model.parameters())
        before = param.detach().clone()
        param.grad = torch.tensor([[30.0, 40.0]])
        found.append((*caught(control.step), torch.linalg.vector_norm(param - before).item()))
    return found


def test_a_pattern_that_matches_on_another_rank_is_no_error() -> None:
    for rank, (matched, unmatched) in enumerate(world(2).run(patterns)):
        assert matched[:2] == ("", "")
        assert matched[2] == pytest.approx((1.0, 2.0)[rank], rel=1e-5)
        assert unmatched[0] == "ValueError"
        assert "neck.*" in unmatched[1]
        assert "body" not in unmatched[1].split("matches")[0]


class HalfNorm:
    """A policy of a user, without a __repr__."""

    def init(self) -> dict[str, Any]:
        return {}

    def limit(self, norms: Any, total: Any, state: Any) -> Any:
        factor, bound = torch.full_like(total, 0.5), torch.full_like(total, math.inf)
        return Limit(factor, bound, torch.zeros_like(total, dtype=torch.bool))

    def update(self, norms: Any, total: Any, limit: Any, state: Any) -> dict[str, Any]:
        return dict(state)


def own_policy(rank: int) -> Any:
    unused = [HalfNorm() for _ in range(rank)]  # Policies at different addresses.
    model = sharded()
    control = control_of(model, clip=HalfNorm())
    backward(control, model, rank)
    return [control.step().clipped, len(unused)]


def test_a_policy_without_a_repr_is_the_same_on_every_rank() -> None:
    assert world(4).run(own_policy) == [[True, rank] for rank in range(4)]


def tensor_norms_that_are_not_known(rank: int) -> Any:
    mesh = mesh_of((2,), ("ep",))
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    control = GradientControl(
        torch.optim.SGD([param], lr=0.1),
        scale=None,
        clip=gradilocks.AdaGC(),
        mesh=mesh,
        distinct="ep",
        share=lambda name, param: 0.5,
    )
    return caught(control.step)


def test_a_policy_for_single_tensors_needs_their_norms() -> None:
    for kind, message in world(2).run(tensor_norms_that_are_not_known):
        assert kind == "ValueError"
        assert message.startswith("clip= needs the norm of each tensor, which is unknown")


def one_rank_without_gradients(rank: int) -> list[Any]:
    """Its experts got no token; with no gradient on any rank the step is taken on zeros."""
    mesh = mesh_of((2,), ("ep",))
    param = nn.Parameter(torch.zeros(2))
    control = GradientControl(torch.optim.SGD([param], lr=1.0), scale=None, clip=1.0, mesh=mesh, distinct="ep")
    if rank == 0:
        param.grad = torch.tensor([3.0, 4.0])
    outcome = control.step()
    return [outcome.norm, outcome.skipped, param.tolist()]


def test_a_rank_without_gradients_takes_part() -> None:
    first, second = world(2).run(one_rank_without_gradients)
    assert first[:2] == second[:2] == [5.0, False]
    assert first[2] == pytest.approx([-0.6, -0.8], rel=1e-6)
    assert second[2] == [0.0, 0.0]
