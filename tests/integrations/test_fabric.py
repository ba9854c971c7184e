"""Fabric's own loop with `control_for`, compared with a native loop."""

from __future__ import annotations

import lightning.fabric as lf
import lightning.pytorch as pl
import pytest
import torch

from gradilocks import ClipByValue, GradientControl, HeadroomScale, ZScoreClip
from gradilocks.integrations import control_for
from integrations import lightning_ranks
from integrations import lightning_task as task
from integrations.lightning_task import assert_same, native, weights
from ranks.rank_world import world

CLIP = 0.02


def fabric_of(precision="32-true", **scaler):
    if precision != "16-mixed":
        return lf.Fabric(accelerator="cpu", devices=1, precision=precision)
    plugin = lf.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler))
    return lf.Fabric(accelerator="cpu", devices=1, plugins=[plugin])


def train(fabric, module, optimizer, *, clip=None, accumulate=1, batches=None):
    """A loop as users of Fabric write it."""
    batches = task.rows(accumulate=accumulate) if batches is None else batches
    for parts in task.steps_of(batches, accumulate):
        optimizer.zero_grad()
        for part in parts:
            fabric.backward(module(part).mean() / accumulate)
        if clip is not None:
            fabric.clip_gradients(module, optimizer, **clip)
        optimizer.step()


def set_up(optimizer="fused adamw", fabric=None, **options):
    fabric = fabric_of() if fabric is None else fabric
    net = task.Network()
    module, wrapped = fabric.setup(net, task.OPTIMIZERS[optimizer](net.parameters()))
    return fabric, module, wrapped, control_for(fabric, module, wrapped, **options)


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_parameters_and_skips_are_those_of_a_native_loop(precision, optimizer, clip, scale):
    fabric, module, wrapped, control = set_up(optimizer, fabric_of(precision), clip=clip, scale=scale)
    skips = []
    control.subscribe(lambda record: skips.append((record.outcome.skipped, record.outcome.culprits)))
    train(fabric, module, wrapped)
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    expected, _, plain, _ = native(optimizer, precision=precision, scale=scale, clip=clip, dtype=dtype)
    assert_same(weights(module), expected, clip=clip)
    assert [skipped for skipped, _ in skips] == [step == task.BAD for step in range(task.STEPS)]
    assert skips[task.BAD][1] == ("middle.weight",)
    assert control.state_dict() == plain.state_dict()


def test_float16_starts_with_the_settings_of_the_plugins_scaler():
    fabric, module, wrapped, control = set_up(fabric=fabric_of("16-mixed", init_scale=256.0, growth_interval=2))
    train(fabric, module, wrapped)
    assert control.scale == 512.0 == fabric.strategy.precision.scaler.get_scale()


@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_accumulation(scale):
    fabric, module, wrapped, _ = set_up(scale=scale)
    train(fabric, module, wrapped, accumulate=2)
    assert_same(weights(module), native("fused adamw", accumulate=2, scale=scale)[0], clip=None)


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
@pytest.mark.parametrize("clip", [{"max_norm": CLIP}, {"clip_val": CLIP}])
def test_clip_gradients_clips_and_leaves_the_overflow_to_the_control(clip, optimizer, scale):
    fabric, module, wrapped, control = set_up(optimizer, scale=scale)
    skips = []
    control.subscribe(lambda record: skips.append(record.outcome.culprits))
    train(fabric, module, wrapped, clip=clip)
    policy = CLIP if "max_norm" in clip else ClipByValue(CLIP)
    assert_same(weights(module), native(optimizer, scale=scale, clip=policy)[0], clip=CLIP)
    assert skips == [("middle.weight",) if step == task.BAD else () for step in range(task.STEPS)]


def test_two_clips_are_rejected():
    fabric, module, wrapped, _ = set_up(clip=1.0)
    with pytest.raises(ValueError, match="both clip the gradients"):
        train(fabric, module, wrapped, clip={"max_norm": 1.0})


@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_two_optimizers(scale):
    fabric, nets = fabric_of(), [task.Network(seed) for seed in range(2)]
    pairs = [fabric.setup(net, task.OPTIMIZERS["sgd"](net.parameters())) for net in nets]
    modules, optimizers = zip(*pairs, strict=True)
    control = control_for(fabric, {"a": modules[0], "b": modules[1]}, list(optimizers), scale=scale)
    for (rows,) in task.steps_of(task.rows()):
        for module, optimizer in pairs:
            optimizer.zero_grad()
            fabric.backward(module(rows).mean())
            optimizer.step()
    assert control.state_dict()["gradilocks"]["steps"] == 2 * task.STEPS
    for seed, module in enumerate(modules):
        assert_same(weights(module), native("sgd", scale=scale, seed=seed)[0], clip=None)


def test_save_and_load_continue_bit_for_bit(tmp_path):
    policies = {"scale": HeadroomScale(), "clip": ZScoreClip(0.5, warmup=2)}
    batches = task.rows()
    fabric, module, wrapped, control = set_up(**policies)
    train(fabric, module, wrapped, batches=batches)
    first = set_up(**policies)
    train(*first[:3], batches=batches[: 3 * task.BATCH])
    first[0].save(tmp_path / "three", {"model": first[1], "optimizer": first[2], "control": first[3]})
    again = set_up(**policies)
    again[0].load(tmp_path / "three", {"model": again[1], "optimizer": again[2], "control": again[3]})
    train(*again[:3], batches=batches[3 * task.BATCH :])
    assert_same(weights(again[1]), weights(module), clip=None)
    assert str(again[3].state_dict()) == str(control.state_dict())


def test_a_second_control_is_rejected():
    fabric, module, wrapped, _ = set_up()
    with pytest.raises(ValueError, match="this Fabric has a GradientControl"):
        control_for(fabric, module, wrapped)
    other = GradientControl(wrapped.optimizer, scale=None)
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        other.backward(module(task.rows()).mean())


def test_an_optimizer_without_the_control_is_rejected():
    fabric, *_ = set_up()
    other_net = task.Network()
    other, optimizer = fabric.setup(other_net, torch.optim.SGD(other_net.parameters(), lr=0.1))
    fabric.backward(other(task.rows()).mean())
    with pytest.raises(ValueError, match="does not belong to the GradientControl"):
        optimizer.step()


@pytest.mark.parametrize("framework", [object, pl.Trainer])
def test_other_frameworks_are_rejected(framework):
    with pytest.raises(TypeError, match="takes a lightning Fabric or an accelerate Accelerator, got"):
        control_for(framework(**(task.QUIET if framework is pl.Trainer else {})), None, None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("program", [lightning_ranks.trainer, lightning_ranks.fabric])
def test_two_ranks_train_like_one_and_resume_bit_for_bit(program, strategy, tmp_path):
    expected, *_ = native("fused adamw", scale="dynamic", clip=CLIP)
    name = "net.middle.weight" if program is lightning_ranks.trainer else "middle.weight"
    for (trained, state, outcomes), whole, resumed in world(2).run(program, strategy, tmp_path):
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
        assert state["scale"] == 2.0**15
        assert outcomes == [(step == task.BAD, (name,) if step == task.BAD else ()) for step in range(task.STEPS)]
        assert_same(resumed[0], whole[0], clip=None)
        assert str(resumed[1]) == str(whole[1])
