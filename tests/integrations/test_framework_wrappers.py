"""Lightning's, Fabric's and Accelerate's own wrappers, under a control and under the drop-in.

The truth is the same loop over the bare optimizer. Every scale is a power of two, so that the
numbers are the same bit for bit wherever the gradients are unscaled.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradilocks import GradientControl, GradScaler
from tests.control.optimizer_wrappers import MAKERS
from tests.integrations.accelerate_on_cpu import forget

# Of the frameworks' own making: advice on workers and accelerators, deprecations inside them.
pytestmark = pytest.mark.filterwarnings("ignore")

each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
BATCHES = [1.0, math.inf, 0.5, math.nan, 2.0]
TAKEN = 3


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def loss_of(model, factor):
    return (model(torch.linspace(-1, 1, 12).view(3, 4)) * factor).square().mean()


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def by_control(model, optimizer, **settings):
    control = GradientControl(optimizer, **settings)
    for factor in BATCHES:
        before = weights(model)
        control.zero_grad()
        control.backward(loss_of(model, factor))
        assert control.step().skipped == (not math.isfinite(factor))
        assert same(weights(model), before) == (not math.isfinite(factor))
    return weights(model)


def by_scaler(model, optimizer):
    scaler = GradScaler("cpu")
    for factor in BATCHES:
        before = weights(model)
        model.zero_grad()
        scaler.scale(loss_of(model, factor)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome.skipped == (not math.isfinite(factor))
        assert same(weights(model), before) == (not math.isfinite(factor))
    return weights(model)


LOOPS = {
    "control": by_control,
    "clipping control": lambda *args: by_control(*args, scale=None, clip=1e-3),
    "scaler": by_scaler,
}
each_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


def bare(make, loop):
    model = network()
    return loop(model, make(model.parameters()))


def agree(got, make, loop):
    assert same(got, bare(make, loop))


@each_maker
@each_loop
def test_an_optimizer_that_fabric_has_set_up_steps_as_the_bare_one(make, loop):
    fabric_of = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1)
    model = network()
    module, optimizer = fabric.setup(model, make(model.parameters()))
    assert isinstance(optimizer, torch.optim.Optimizer)
    agree(loop(module, optimizer), make, loop)


@each_maker
@each_loop
def test_an_optimizer_that_accelerate_has_prepared_steps_as_the_bare_one(make, loop):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    forget()
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    module, optimizer = accelerator.prepare(model, make(model.parameters()))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"
    agree(loop(module, optimizer), make, loop)


@each_maker
def test_accelerate_learns_from_the_drop_in_which_steps_were_skipped(make):
    """It replaces `step` for the time of a step and looks whether its own was called."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.optimizer import AcceleratedOptimizer

    forget()

    accelerate.Accelerator(cpu=True)
    model, scaler = network(), GradScaler("cpu")
    optimizer = AcceleratedOptimizer(make(model.parameters()), scaler=scaler)
    skipped = []
    for factor in BATCHES:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, factor)).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [not math.isfinite(factor) for factor in BATCHES]
    assert same(weights(model), bare(make, by_scaler))


def counted(make):
    """Lightning counts calls of its wrapper's step, a skipped one too if the device skips it."""
    return TAKEN if make is MAKERS["Adam foreach"] else len(BATCHES)


def lit(make, loop=None):
    """A module for Lightning; `loop` makes what drives its optimizers by hand."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.automatic_optimization = loop is None
            self.skipped = []
            self.drive = None

        def training_step(self, batch, _):
            loss = loss_of(self.net, batch[0].item())
            if loop is None:
                return loss
            if self.drive is None:
                self.drive = loop(self.optimizers())
            self.skipped.append(self.drive(loss))
            return None

        def configure_optimizers(self):
            return make(self.net.parameters())

    return Lit()


def fitted(module, tmp_path, **settings):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.tensor(BATCHES))))
    return trainer


@each_maker
def test_lightnings_optimizer_under_a_control_steps_as_the_bare_one(make, tmp_path):
    def driven(optimizer):
        assert type(optimizer).__name__.startswith("Lightning")
        control = GradientControl(optimizer)

        def drive(loss):
            control.zero_grad()
            control.backward(loss)
            return control.step().skipped

        return drive

    module = lit(make, driven)
    trainer = fitted(module, tmp_path)
    assert module.skipped == [not math.isfinite(factor) for factor in BATCHES]
    assert same(weights(module.net), bare(make, by_control))
    assert trainer.global_step == counted(make)


@each_maker
def test_lightnings_optimizer_under_the_drop_in_steps_as_the_bare_one(make, tmp_path):
    def driven(optimizer):
        scaler = GradScaler("cpu")

        def drive(loss):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return scaler.outcome.skipped

        return drive

    module = lit(make, driven)
    trainer = fitted(module, tmp_path)
    assert module.skipped == [not math.isfinite(factor) for factor in BATCHES]
    assert same(weights(module.net), bare(make, by_scaler))
    assert trainer.global_step == counted(make)


@each_maker
def test_lightnings_trainer_with_our_scaler_steps_as_the_bare_optimizer(make, tmp_path):
    plugins = pytest.importorskip("lightning.pytorch.plugins", reason="lightning is not installed")
    scaler = GradScaler("cpu")
    module = lit(make)
    fitted(module, tmp_path, plugins=[_in_float32(plugins)("16-mixed", "cpu", scaler)])
    assert same(weights(module.net), bare(make, by_scaler))
    assert scaler.get_scale() == 65536.0 / 4


def _in_float32(plugins):
    class Scaling(plugins.MixedPrecision):
        """Scales the loss without autocast: on a CPU that computes float16 far too slowly."""

        def autocast_context_manager(self):
            return torch.autocast(self.device, enabled=False)

    return Scaling
