"""Fabric's own loop with `control_for`, beside the loop as it is."""

from __future__ import annotations

import pytest
import torch

from gradilocks import GradScaler, HeadroomScale, ZScoreClip, optim, read_run
from gradilocks.integrations.fabric import control_for
from tests.integrations import task
from tests.integrations.lightning_task import PRECISIONS

lf = pytest.importorskip("lightning.fabric", reason="lightning is not installed")

# Of Lightning's own making.
pytestmark = pytest.mark.filterwarnings("ignore")

CLIP = 0.02
each_optimizer = pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)
each_accumulation = pytest.mark.parametrize("accumulate", [1, 2])


def fabric_of(precision="16-mixed", package=lf, **scaler):
    if precision != "16-mixed":
        return package.Fabric(accelerator="cpu", devices=1, precision=precision)
    scaler = torch.amp.GradScaler("cpu", **scaler)
    plugin = package.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    return package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])


def batches_for(precision, accumulate=1):
    bad = task.BAD if precision == "16-mixed" else None
    made = task.batches(accumulate=accumulate, bad=bad)
    return [made[k : k + accumulate] for k in range(0, len(made), accumulate)]


def by_fabric(fabric, optimizer, batches, *, clip=None, control=None, driven=False):
    """A loop as Fabric's users write it; the weights and what was there."""
    model = task.Network()
    make = optimizer if callable(optimizer) else task.OPTIMIZERS[optimizer]
    module, made = fabric.setup(model, make(model.parameters()))
    if control is not None:
        control = control(fabric, module, made)
    for parts in batches:
        made.zero_grad()
        for part in parts:
            loss = module(part).mean() / len(parts)
            if driven:
                control.backward(loss)
            else:
                fabric.backward(loss)
        if clip is not None:
            fabric.clip_gradients(module, made, max_norm=clip, error_if_nonfinite=False)
        if driven:
            control.step()
        else:
            made.step()
    return task.weights(model), control


@each_optimizer
@each_precision
@each_accumulation
def test_without_a_clip_the_weights_are_fabrics_own(optimizer, precision, accumulate):
    batches = batches_for(precision, accumulate)
    native, _ = by_fabric(fabric_of(precision), optimizer, batches)
    for driven in (False, True):
        ours, control = by_fabric(
            fabric_of(precision), optimizer, batches, control=control_for, driven=driven
        )
        assert task.same(ours, native)
        assert not task.same(ours, task.weights(task.Network()))
        assert control.outcome.step == task.STEPS
        assert control.scale == (2.0**15 if precision == "16-mixed" else 1.0)


def clipping(fabric, module, optimizer):
    return control_for(fabric, module, optimizer, clip=CLIP)


@each_optimizer
@each_precision
@each_accumulation
def test_with_a_clip_the_weights_are_those_of_fabrics_clip(optimizer, precision, accumulate):
    batches = batches_for(precision, accumulate)
    ours, control = by_fabric(fabric_of(precision), optimizer, batches, control=clipping)
    if optimizer != "sgd" and precision == "16-mixed":
        with pytest.raises(NotImplementedError, match="optimizers handling the unscaling"):
            by_fabric(fabric_of(precision), optimizer, batches, clip=CLIP)

        def optimizer(params):
            return torch.optim.AdamW(params, lr=0.01, foreach=True)

    native, _ = by_fabric(fabric_of(precision), optimizer, batches, clip=CLIP)
    torch.testing.assert_close(ours, native, rtol=1e-6, atol=1e-7)
    assert control.outcome.limit == pytest.approx(CLIP)


@each_optimizer
def test_fabrics_own_clip_still_clips_and_no_longer_refuses(optimizer):
    batches = batches_for("16-mixed")
    ours, _ = by_fabric(fabric_of(), optimizer, batches, clip=CLIP, control=control_for)
    clipped, _ = by_fabric(fabric_of(), optimizer, batches, control=clipping)
    torch.testing.assert_close(ours, clipped, rtol=1e-6, atol=1e-7)


def test_the_run_file_has_the_steps_the_skip_and_the_culprit(tmp_path):
    losses = []

    def recording(fabric, module, optimizer):
        module.register_forward_hook(lambda *args: losses.append(args[-1].mean().item()))
        return control_for(fabric, module, optimizer, record=tmp_path / "run.jsonl")

    _, control = by_fabric(fabric_of(), "sgd", batches_for("16-mixed"), control=recording)
    control.recorder.close()
    run = read_run(tmp_path / "run.jsonl")
    assert [step.loss for step in run.steps] == pytest.approx(losses)
    assert [step.skipped for step in run.steps] == [k == task.BAD for k in range(task.STEPS)]
    assert [c.name for step in run.steps for c in step.culprits] == [task.CULPRIT]


@each_optimizer
def test_fabric_saves_and_loads_the_control(optimizer, tmp_path):
    policies = {"clip": ZScoreClip(threshold=0.5, warmup=2), "scale": HeadroomScale()}

    def made(path=None):
        fabric, model = fabric_of(), task.Network()
        module, given = fabric.setup(model, task.OPTIMIZERS[optimizer](model.parameters()))
        control = control_for(fabric, module, given, **policies)
        state = {"model": module, "optimizer": given, "control": control}
        if path is not None:
            fabric.load(path, state)
        return fabric, state

    def steps(fabric, state, batches):
        for (batch,) in batches:
            state["optimizer"].zero_grad()
            fabric.backward(state["model"](batch).mean())
            state["optimizer"].step()

    batches = batches_for("16-mixed")
    fabric, whole = made()
    steps(fabric, whole, batches)
    fabric, first = made()
    steps(fabric, first, batches[:3])
    fabric.save(tmp_path / "stopped.ckpt", first)
    torch.load(tmp_path / "stopped.ckpt", weights_only=True)  # No class of anybody's.
    fabric, second = made(tmp_path / "stopped.ckpt")
    steps(fabric, second, batches[3:])
    assert task.same(task.weights(second["model"]), task.weights(whole["model"]))
    assert second["control"].state_dict() == whole["control"].state_dict()


def test_a_state_of_fabrics_scaler_loads_into_the_control(tmp_path):
    fabric = fabric_of()
    _, _ = by_fabric(fabric, "sgd", batches_for("16-mixed"))
    fabric.save(tmp_path / "native.ckpt", {"scaler": fabric.strategy.precision.scaler})
    other = fabric_of()
    _, control = by_fabric(other, "sgd", [], control=control_for)
    other.load(tmp_path / "native.ckpt", {"scaler": control})
    assert control.scale == 2.0**15


def test_two_models_have_one_control_and_steps_of_their_own():
    def gan(controlled):
        fabric, nets = fabric_of(), [task.Network(1), task.Network(2)]
        both = [fabric.setup(net, task.OPTIMIZERS["fused adamw"](net.parameters())) for net in nets]
        control = None
        if controlled:
            modules = {"maker": both[0][0], "critic": both[1][0]}
            control = control_for(fabric, modules, both[0][1], both[1][1])
        for index, (batch,) in enumerate(batches_for("16-mixed")):
            for number, (module, optimizer) in enumerate(both):
                if number and index % 2:
                    continue
                optimizer.zero_grad()
                fabric.backward(module(batch).mean())
                optimizer.step()
        return [weight for net in nets for weight in task.weights(net)], control

    ours, control = gan(True)
    native, _ = gan(False)
    assert task.same(ours, native)
    assert control.scale == 2.0**14  # The bad batch was bad for both.


def test_a_second_control_is_refused():
    fabric = fabric_of()
    model = task.Network()
    module, optimizer = fabric.setup(model, task.OPTIMIZERS["sgd"](model.parameters()))
    control_for(fabric, module, optimizer)
    with pytest.raises(ValueError, match="has a control already"):
        control_for(fabric, module, optimizer)


def test_a_scaler_of_ours_in_fabric_is_refused():
    scaler = GradScaler("cpu", clip=1.0)
    plugin = lf.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    fabric = lf.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = task.Network()
    with pytest.raises(ValueError, match=r"has a gradilocks\.GradScaler already"):
        by_fabric(fabric, "sgd", [], control=control_for)
    with pytest.raises(TypeError, match=r"takes a Fabric.*got Network first"):
        control_for(model, fabric)
    with pytest.raises(TypeError, match="the optimizers that the control is to step"):
        control_for(fabric, model)


def test_settings_of_a_chosen_scaler_are_where_the_control_begins():
    chosen = {"init_scale": 2.0**9, "growth_interval": 2, "growth_factor": 4.0}
    native = fabric_of(**chosen)
    expected, _ = by_fabric(native, "sgd", batches_for("16-mixed"))
    ours, control = by_fabric(
        fabric_of(**chosen), "sgd", batches_for("16-mixed"), control=control_for
    )
    assert control.scale == native.strategy.precision.scaler.get_scale() != 2.0**9
    assert task.same(ours, expected)


def test_lbfgs_evaluates_its_closure_by_the_control():
    def trained(controlled):
        fabric, model = fabric_of("32-true"), task.Network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        module, optimizer = fabric.setup(model, optimizer)
        control = control_for(fabric, module, optimizer) if controlled else None
        for (batch,) in batches_for("32-true"):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = module(batch).mean()
                fabric.backward(loss)
                return loss

            optimizer.step(closure)
        return task.weights(model), control

    ours, control = trained(True)
    native, _ = trained(False)
    assert task.same(ours, native)
    assert control.outcome.step == task.STEPS


def test_a_closure_of_another_optimizer_is_run_once_and_stepped_on():
    def stepping(fabric, module, optimizer):
        control = control_for(fabric, module, optimizer)
        batch = task.batches(bad=None)[0]

        def closure():
            optimizer.zero_grad()
            loss = module(batch).mean()
            fabric.backward(loss)
            return loss

        told.append(optimizer.step(closure))
        return control

    told = []
    weights, control = by_fabric(fabric_of(), "fused adamw", [], control=stepping)
    assert told[0].item() == pytest.approx(control.outcome.tensors["norm"].item(), abs=1.0)
    assert control.outcome.step == 1
    assert not task.same(weights, task.weights(task.Network()))


def test_schedules_wait_for_skipped_steps():
    def scheduled(fabric, module, optimizer):
        control = control_for(fabric, module, optimizer)
        schedule = control.scheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
        for (batch,) in batches_for("16-mixed"):
            optimizer.zero_grad()
            fabric.backward(module(batch).mean())
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return control

    rates = []
    by_fabric(fabric_of(), "fused adamw", [], control=scheduled)
    assert [rate / 0.01 for rate in rates] == [0.5, 0.25, 0.25, 0.125, 0.0625, 0.03125]


def test_the_package_of_its_own_works_too():
    package = pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")
    native, _ = by_fabric(fabric_of(package=package), "fused adamw", batches_for("16-mixed"))
    ours, _ = by_fabric(
        fabric_of(package=package), "fused adamw", batches_for("16-mixed"), control=control_for
    )
    assert task.same(ours, native)


def test_an_optimizer_that_the_control_was_not_given_is_refused_before_anything_moves():
    fabric = fabric_of("32-true")
    first, second = task.Network(), task.Network(seed=4)
    module, optimizer = fabric.setup(first, task.OPTIMIZERS["sgd"](first.parameters()))
    other, probe = fabric.setup(second, task.OPTIMIZERS["sgd"](second.parameters()))
    control = control_for(fabric, module, optimizer)
    (batch,) = task.batches(1, bad=None)
    fabric.backward(module(batch).mean())
    optimizer.step()
    before = task.weights(first), task.weights(second)
    fabric.backward(other(batch).mean())
    with pytest.raises(ValueError, match="none of those that the control was given"):
        probe.step()
    assert task.same(task.weights(first), before[0])
    assert task.same(task.weights(second), before[1])
    assert control.outcome.step == 1


@each_precision
@pytest.mark.parametrize(("optimizer", "ours"), [("sgd", optim.SGD), ("fused adamw", optim.AdamW)])
def test_torchs_optimizers_are_adopted_if_asked_for(optimizer, ours, precision):
    def adopting(fabric, module, made):
        return control_for(fabric, module, made, clip=CLIP, adopt=True)

    batches = batches_for(precision)
    adopted, control = by_fabric(fabric_of(precision), optimizer, batches, control=adopting)
    native, _ = by_fabric(fabric_of(precision), optimizer, batches, control=clipping)
    assert type(control.optimizers[0]) is ours
    torch.testing.assert_close(adopted, native, rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_cannot_be_adopted_is_refused_and_fabric_stays_as_it_was():
    fabric, model = fabric_of("32-true"), task.Network()
    module, made = fabric.setup(model, torch.optim.RMSprop(model.parameters()))
    with pytest.raises(TypeError, match="got RMSprop"):
        control_for(fabric, module, made, adopt=True)
    assert control_for(fabric, module, made).optimizers == (made.optimizer,)
