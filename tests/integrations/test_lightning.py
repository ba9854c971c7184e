"""Lightning's Trainer with GradientControlCallback, compared with a native loop."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import nn

from gradilocks import ClipByNorm, ClipByValue, GradientControl, HeadroomScale, ZScoreClip
from gradilocks.errors import ScaleMisuse
from gradilocks.integrations.lightning import GradientControlCallback
from gradilocks.record import Recorder
from gradilocks.view.runfile import read
from integrations import lightning_task as task
from integrations.lightning_task import QUIET, assert_same, loader, native, schedule, weights

CLIP = 0.02


class Module(pl.LightningModule):
    """The task with automatic optimization."""

    def __init__(self, optimizer="sgd", with_schedule=False):
        super().__init__()
        self.net = task.Network()
        self.kind, self.with_schedule = optimizer, with_schedule
        self.rates, self.skipped, self.culprits = [], [], []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        control = next(c.control for c in self.trainer.callbacks if isinstance(c, GradientControlCallback))
        if control.outcome is not None:
            self.skipped.append(control.outcome.skipped)
            self.culprits.append(control.outcome.culprits)

    def configure_optimizers(self):
        optimizer = task.OPTIMIZERS[self.kind](self.parameters())
        if not self.with_schedule:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}


def fit(module, data=None, callback=None, *, val=None, ckpt_path=None, callbacks=(), package=pl, **settings):
    """The control and the Trainer after `fit`."""
    callback = GradientControlCallback() if callback is None else callback
    trainer = package.Trainer(**{**QUIET, "callbacks": [callback, *callbacks], **settings})
    trainer.fit(module, loader() if data is None else data, val, ckpt_path=ckpt_path)
    return callback.control, trainer


def half(**settings):
    """The plugin of precision="16-mixed", which Lightning does not create on a CPU."""
    return pl.plugins.MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", **settings))


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_parameters_skips_and_rates_are_those_of_a_native_loop(precision, optimizer, clip, scale):
    expected, rates, control, skipped = native(
        optimizer, precision=precision, with_schedule=True, scale=scale, clip=clip
    )
    module = Module(optimizer, with_schedule=True)
    own, trainer = fit(module, callback=GradientControlCallback(clip=clip, scale=scale), precision=precision)
    assert_same(weights(module), expected, clip=clip)
    assert module.skipped == skipped == [step == task.BAD for step in range(task.STEPS)]
    assert module.culprits[task.BAD] == ("net.middle.weight",)
    assert module.rates == rates
    assert trainer.global_step == task.STEPS
    assert own.state_dict() == control.state_dict()


@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
def test_float16_starts_with_the_settings_of_the_plugins_scaler(optimizer):
    module = Module(optimizer)
    own, trainer = fit(module, plugins=[half(init_scale=256.0, growth_interval=2)])
    assert module.skipped == [step == task.BAD for step in range(task.STEPS)]
    assert own.scale == 512.0  # 256, 512 after two steps, 256 after the overflow, 512 after two more.
    assert trainer.precision_plugin.scaler.get_scale() == own.scale
    assert isinstance(trainer.precision_plugin, pl.plugins.MixedPrecision)


def test_float16_trains_like_lightnings_own_scaler():
    trained = []
    for callbacks in ([], [GradientControlCallback()]):

        class Plain(Module):
            def on_train_batch_end(self, *_):
                pass

        module = Plain()
        plugin = half(init_scale=1024.0)
        pl.Trainer(**QUIET, callbacks=callbacks, plugins=[plugin]).fit(module, loader())
        trained.append(weights(module))
    assert_same(*trained, clip=None)


@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_accumulation(scale):
    expected, _, _, skipped = native("fused adamw", accumulate=2, scale=scale)
    module = Module("fused adamw")
    control, trainer = fit(
        module, loader(accumulate=2), GradientControlCallback(scale=scale), accumulate_grad_batches=2
    )
    assert_same(weights(module), expected, clip=None)
    assert trainer.global_step == task.STEPS == control.outcome.step
    assert module.skipped[::2] == skipped


@pytest.mark.parametrize(("algorithm", "policy"), [("norm", ClipByNorm(CLIP)), ("value", ClipByValue(CLIP))])
@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
def test_the_trainers_clip_becomes_that_of_the_control(optimizer, algorithm, policy):
    expected, *_ = native(optimizer, scale="dynamic", clip=policy)
    module = Module(optimizer)
    callback = GradientControlCallback(scale="dynamic")
    fit(module, callback=callback, gradient_clip_val=CLIP, gradient_clip_algorithm=algorithm)
    assert_same(weights(module), expected, clip=CLIP)


def test_two_clips_are_rejected():
    with pytest.raises(ValueError, match=r"gradient_clip_val=0.5\) and GradientControlCallback\(clip=1.0"):
        fit(Module(), callback=GradientControlCallback(clip=1.0), gradient_clip_val=0.5)


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_module_that_configures_its_own_clipping(scale, algorithm):
    class Own(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm=algorithm)

    policy = ClipByNorm(CLIP) if algorithm == "norm" else ClipByValue(CLIP)
    expected, *_ = native("fused adamw", scale=scale, clip=policy)
    module = Own("fused adamw")
    fit(module, callback=GradientControlCallback(scale=scale))
    assert_same(weights(module), expected, clip=CLIP)
    assert module.culprits[task.BAD] == ("net.middle.weight",)
    with pytest.raises(ValueError, match="both clip the gradients"):
        fit(Own(), callback=GradientControlCallback(clip=1.0))


@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
def test_hooks_before_the_step_see_unscaled_gradients(optimizer):
    class Norms(Callback):
        def __init__(self):
            self.norms, self.ours = [], []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.norms.append(float(grad_norm(pl_module, 2)["grad_2.0_norm_total"]))

        def on_train_batch_end(self, trainer, *_):
            self.ours.append(trainer.callbacks[0].control.outcome.norm)

    norms, module = Norms(), Module(optimizer)
    callback = GradientControlCallback(scale="dynamic", clip=CLIP)
    fit(module, loader(bad=None), callback, callbacks=[norms])
    assert norms.norms == pytest.approx(norms.ours, rel=1e-3)
    assert_same(weights(module), native(optimizer, scale="dynamic", clip=CLIP, bad=None)[0], clip=CLIP)


def manual(training_step, count=2):
    """A module with manual optimization of several networks."""

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.nets = nn.ModuleList(task.Network(seed) for seed in range(count))

        def configure_optimizers(self):
            return [task.OPTIMIZERS["sgd"](net.parameters()) for net in self.nets]

    Manual.training_step = training_step
    return Manual()


def alternating(self, batch, batch_idx):
    """Each network is trained in turn, as in a GAN."""
    for net, optimizer in zip(self.nets, self.optimizers(), strict=True):
        optimizer.zero_grad()
        self.manual_backward(net(batch[0]).mean())
        optimizer.step()


def backward_first(self, batch, batch_idx):
    """Both losses are differentiated before either optimizer steps."""
    for net, optimizer in zip(self.nets, self.optimizers(), strict=True):
        optimizer.zero_grad()
        self.manual_backward(net(batch[0]).mean())
    for optimizer in self.optimizers():
        optimizer.step()


@pytest.mark.parametrize("training_step", [alternating, backward_first])
@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_manual_optimization_of_two_optimizers(training_step, scale):
    module = manual(training_step)
    control, trainer = fit(module, callback=GradientControlCallback(scale=scale))
    for seed, net in enumerate(module.nets):
        assert_same(weights(net), native("sgd", scale=scale, seed=seed)[0], clip=None)
    assert trainer.global_step == 2 * task.STEPS
    if scale is not None:
        assert control.scale == (2.0**14 if training_step is alternating else 2.0**15)


def test_manual_clipping_and_schedule():
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.nets[0](batch[0]).mean())
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()

    module = manual(training_step, count=1)

    def configure_optimizers():
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [schedule(optimizer)]

    module.configure_optimizers = configure_optimizers
    control, trainer = fit(module, callback=GradientControlCallback(scale="dynamic"))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9 ** (task.STEPS - 1))
    assert control.scale == 2.0**15


def test_lbfgs_takes_the_closure():
    def configure_optimizers():
        return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

    trained = []
    for callbacks in ([], [GradientControlCallback(scale="dynamic")]):
        module = Module()
        module.configure_optimizers, module.on_train_batch_end = configure_optimizers, lambda *_: None
        trainer = pl.Trainer(**QUIET, callbacks=callbacks)
        trainer.fit(module, loader(bad=None))
        trained.append(weights(module))
    assert_same(*trained, clip=CLIP)
    assert trainer.global_step == task.STEPS == callbacks[0].control.outcome.step


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_that_returns_none(scale, accumulate):
    class Skipping(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    trained = []
    for callback in (GradientControlCallback(scale=scale), None):
        module = Skipping()
        module.on_train_batch_end = lambda *_: None
        trainer = pl.Trainer(**QUIET, callbacks=callback, accumulate_grad_batches=accumulate)
        trainer.fit(module, loader(bad=None))
        trained.append((weights(module), trainer.global_step))
    assert trained[0][1] == trained[1][1]
    if accumulate == 1 or scale is None:
        assert_same(trained[0][0], trained[1][0], clip=None)


def test_max_steps_and_validation():
    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            self.log("loss", self.net(batch[0]).mean())

    module, stopping = Validated(), pl.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)
    control, trainer = fit(module, max_steps=4, max_epochs=-1, val=loader(bad=None))
    assert trainer.global_step == 4 == control.outcome.step
    control, trainer = fit(Validated(), val=loader(bad=None), callbacks=[stopping], max_epochs=9)
    assert trainer.current_epoch == 2
    assert control.outcome.step == 2 * task.STEPS
    before = weights(module)
    assert "loss" in trainer.validate(module, loader(), verbose=False)[0]
    assert_same(weights(module), before, clip=None)


POLICIES = {"scale": HeadroomScale(), "clip": ZScoreClip(0.5, warmup=2)}


@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
def test_a_resumed_training_continues_bit_for_bit(optimizer, tmp_path):
    whole = Module(optimizer, with_schedule=True)
    expected, _ = fit(whole, task.Stateful(), GradientControlCallback(**POLICIES))
    saving = ModelCheckpoint(tmp_path, filename="three", every_n_train_steps=3)
    first = Module(optimizer, with_schedule=True)
    fit(
        first, task.Stateful(), GradientControlCallback(**POLICIES), callbacks=[saving], max_steps=3,
        enable_checkpointing=True,
    )  # fmt: skip
    resumed = Module(optimizer, with_schedule=True)
    control, _ = fit(resumed, task.Stateful(), GradientControlCallback(**POLICIES), ckpt_path=tmp_path / "three.ckpt")
    assert_same(weights(resumed), weights(whole), clip=None)
    assert str(control.state_dict()) == str(expected.state_dict())
    assert resumed.rates == whole.rates[3:]


def test_checkpoints_are_exchanged_with_lightnings_own_scaler(tmp_path):
    _, trainer = fit(Module(), plugins=[half(init_scale=256.0)])
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    theirs = pl.Trainer(**{**QUIET, "max_epochs": 2}, plugins=[half()])
    module = Module()
    module.on_train_batch_end = lambda *_: None
    theirs.fit(module, loader(bad=None), ckpt_path=tmp_path / "ours.ckpt")
    assert theirs.precision_plugin.scaler.get_scale() == 128.0
    theirs.save_checkpoint(tmp_path / "theirs.ckpt")
    control, _ = fit(Module(), loader(bad=None), ckpt_path=tmp_path / "theirs.ckpt", plugins=[half()], max_epochs=3)
    assert control.scale == 128.0


def test_two_epochs_with_a_schedule_by_epoch_and_a_second_fit():
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.configure_optimizers = lambda: ([optimizer], [schedule(optimizer)])
    callback = GradientControlCallback(scale="dynamic")
    control, trainer = fit(module, callback=callback, max_epochs=2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.81)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    assert callback.control is not control
    assert callback.control.outcome.step == 3 * task.STEPS == trainer.global_step
    assert callback.control.scale == 2.0**13  # Continued like Lightning's own scaler.


def test_reduce_on_plateau_stays_what_it_is():
    class Plateau(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    _, trainer = fit(Plateau())
    assert isinstance(trainer.lr_scheduler_configs[0].scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
def test_a_second_control_is_rejected(optimizer, scale):
    def training_step(self, batch, batch_idx):
        if not hasattr(self, "control"):
            self.control = GradientControl(self.optimizers(use_pl_optimizer=False), scale=scale)
        self.control.zero_grad()
        self.control.backward(self.nets[0](batch[0]).mean())
        self.control.step()

    def configure_optimizers():
        made = task.OPTIMIZERS[optimizer](module.parameters())
        if optimizer == "ours":  # Whose steps bypass hooks.
            module.control = GradientControl(made, scale=scale)
        return made

    module = manual(training_step, count=1)
    module.configure_optimizers = configure_optimizers
    with pytest.raises((ValueError, ScaleMisuse), match=r"already has a GradientControl|without the GradientControl"):
        fit(module)


@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_a_step_without_the_control_is_rejected(scale):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.nets[0](batch[0]).mean())
        self.optimizers(use_pl_optimizer=False).step()

    with pytest.raises(ScaleMisuse, match=r"optimizer.step\(\)"):
        fit(manual(training_step, count=1), callback=GradientControlCallback(scale=scale, clip=1.0))


def test_a_second_callback_is_rejected():
    with pytest.raises(ValueError, match="several GradientControlCallbacks"):
        fit(Module(), callbacks=[GradientControlCallback()])


def test_a_plugin_with_a_step_of_its_own_is_rejected():
    class Own(pl.plugins.Precision):
        def optimizer_step(self, optimizer, model, closure, **kwargs):
            return optimizer.step(closure)

    with pytest.raises(ValueError, match="Own steps the optimizer itself"):
        fit(Module(), plugins=[Own()])


def test_a_run_file_is_continued_by_a_resumed_training(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)
    _, trainer = fit(Module(), callback=GradientControlCallback(record=recorder))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    recorder.close()
    recorder = Recorder(path)
    fit(Module(), callback=GradientControlCallback(record=recorder), ckpt_path=tmp_path / "one.ckpt", max_epochs=2)
    recorder.close()
    steps = read(path).steps[0]
    assert list(steps) == list(range(1, 2 * task.STEPS + 1))
    assert [step for step, line in steps.items() if line["skipped"]] == [task.BAD + 1, task.BAD + 1 + task.STEPS]


def test_pytorch_lightning():
    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = task.Network()

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

        def configure_optimizers(self):
            return task.OPTIMIZERS["sgd"](self.parameters())

    module = Other()
    callback = GradientControlCallback(scale="dynamic", clip=CLIP)
    _, trainer = fit(module, callback=callback, package=pytorch_lightning)
    assert_same(weights(module), native("sgd", scale="dynamic", clip=CLIP)[0], clip=CLIP)
    assert trainer.global_step == task.STEPS
