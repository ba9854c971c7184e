"""Lightning's Trainer with a GradientControlCallback, beside the Trainer as it is.

The truth is Lightning's own scaler and clip; where it refuses (a clip with a fused optimizer in
mixed precision) it is torch's loop by hand. On a CPU the plugin of 16-mixed has to be given.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import pickle
import signal
import sys

import pytest
import torch
from torch import nn

from gradilocks import (
    ClipByNorm,
    DynamicScale,
    GradientControl,
    GradScaler,
    HeadroomScale,
    Recorder,
    ZScoreClip,
    optim,
    read_run,
)
from gradilocks.errors import BadRunFile, MissingPackage, NonFiniteGradient
from tests.integrations import task
from tests.integrations.lightning_task import (
    PRECISIONS,
    QUIET,
    Resumable,
    fitted,
    half,
    loader,
    module_of,
    precision_of,
)

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
from gradilocks.integrations.lightning import GradientControlCallback  # noqa: E402

# Of Lightning's own making: advice on workers, loggers and accelerators.
pytestmark = pytest.mark.filterwarnings("ignore")

CLIP = 0.02
CULPRIT = f"net.{task.CULPRIT}"
Lit = module_of(pl)

each_optimizer = pytest.mark.parametrize("optimizer", task.OPTIMIZERS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)
each_accumulation = pytest.mark.parametrize("accumulate", [1, 2])


def bad_step(precision):
    """Inf is planted where there is a scaler that sees it: elsewhere Lightning takes the step."""
    return task.BAD if precision == "16-mixed" else None


def by_torch(optimizer, precision, *, accumulate=1, clip=CLIP):
    """Mixed precision with a clip as torch's documentation has it; Lightning refuses when fused."""
    is_half = precision == "16-mixed"
    model, scaler = task.Network(), torch.amp.GradScaler("cpu", enabled=is_half)
    made = task.OPTIMIZERS[optimizer](model.parameters())
    batches = task.batches(accumulate=accumulate, bad=bad_step(precision))
    for begin in range(0, len(batches), accumulate):
        made.zero_grad()
        for batch in batches[begin : begin + accumulate]:
            with torch.autocast("cpu", torch.float16 if is_half else torch.bfloat16):
                loss = model(batch).mean() / accumulate
            scaler.scale(loss).backward()
        scaler.unscale_(made)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(made)
        scaler.update()
    return task.weights(model)


@each_optimizer
@each_precision
@each_accumulation
def test_without_a_clip_the_weights_are_lightnings_own(optimizer, precision, accumulate):
    data = loader(accumulate=accumulate, bad=bad_step(precision))
    native, ours, callback = Lit(optimizer), Lit(optimizer), GradientControlCallback()
    settings = {"accumulate_grad_batches": accumulate, "data": data}
    before = task.weights(native)
    fitted(pl, native, **settings, **precision_of(pl, precision))
    trainer = fitted(pl, ours, **settings, **precision_of(pl, precision), callbacks=[callback])
    assert task.same(task.weights(ours), task.weights(native))
    assert not task.same(task.weights(ours), before)
    assert ours.losses == native.losses
    assert trainer.global_step == task.STEPS
    assert callback.control.outcome.step == task.STEPS
    assert callback.control.scale == (2.0**15 if precision == "16-mixed" else 1.0)


@each_optimizer
@each_precision
@each_accumulation
def test_gradient_clip_val_becomes_the_clip(optimizer, precision, accumulate):
    data = loader(accumulate=accumulate, bad=bad_step(precision))
    native, ours, also = Lit(optimizer), Lit(optimizer), Lit(optimizer)
    settings = {"accumulate_grad_batches": accumulate, "data": data}
    clip = {"gradient_clip_val": CLIP}
    callback = GradientControlCallback()
    fitted(pl, ours, **settings, **clip, **precision_of(pl, precision), callbacks=[callback])
    fitted(
        pl, also, **settings, **precision_of(pl, precision),
        callbacks=[GradientControlCallback(clip=CLIP)],
    )  # fmt: skip
    assert task.same(task.weights(ours), task.weights(also))
    if precision.endswith("mixed") and optimizer != "sgd":  # In bf16, without a scaler, too.
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fitted(pl, native, **settings, **clip, **precision_of(pl, precision))
        expected = by_torch(optimizer, precision, accumulate=accumulate)
    else:
        fitted(pl, native, **settings, **clip, **precision_of(pl, precision))
        expected = task.weights(native)
    torch.testing.assert_close(task.weights(ours), expected, rtol=1e-6, atol=1e-7)
    unclipped = Lit(optimizer)
    fitted(pl, unclipped, **settings, **precision_of(pl, precision))
    assert not task.same(task.weights(ours), task.weights(unclipped))
    assert callback.control.outcome.limit == pytest.approx(CLIP)


# --- clip ---------------------------------------------------------------------------------------


def test_two_clips_that_differ_are_refused():
    callback = GradientControlCallback(clip=1.0)
    with pytest.raises(ValueError, match=r"two clips.*clip=1\.0.*ClipByNorm.*0\.5"):
        fitted(pl, Lit(), gradient_clip_val=0.5, callbacks=[callback])
    with pytest.raises(ValueError, match="two clips"):
        fitted(pl, Lit(), gradient_clip_val=1.0, gradient_clip_algorithm="value",
               callbacks=[GradientControlCallback(clip=1.0)])  # fmt: skip
    with pytest.raises(ValueError, match="two clips"):
        fitted(
            pl, Lit(), gradient_clip_val=1.0, callbacks=[GradientControlCallback(clip=ZScoreClip())]
        )


@pytest.mark.parametrize("clip", [1, 1.0, ClipByNorm(1.0)])
def test_the_same_clip_twice_is_one(clip):
    callback = GradientControlCallback(clip=clip)
    fitted(pl, Lit(), gradient_clip_val=1.0, callbacks=[callback], data=loader(bad=None))
    assert callback.control.outcome.limit == 1.0


@each_optimizer
def test_a_clip_by_value_bounds_elements(optimizer):
    native, ours = Lit(optimizer), Lit(optimizer)
    clip = {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}
    fitted(pl, native, **clip, data=loader(bad=None))
    fitted(pl, ours, **clip, data=loader(bad=None), callbacks=[GradientControlCallback()])
    torch.testing.assert_close(task.weights(ours), task.weights(native), rtol=1e-6, atol=1e-7)


def clips_by_and_by(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    """None at the first two steps, then less and less."""
    if self.global_step > 1:
        self.clip_gradients(
            optimizer,
            gradient_clip_val=0.1 / (1 + self.global_step),
            gradient_clip_algorithm="norm",
        )


def test_a_module_may_choose_the_clip_of_each_step():
    Own = module_of(pl, configure_gradient_clipping=clips_by_and_by)  # noqa: N806
    native, ours, limits = Own(), Own(), []

    class Limits(pl.Callback):
        def on_train_batch_end(self, *_):
            limits.append(callback.control.outcome.limit)

    callback = GradientControlCallback()
    fitted(pl, native, plugins=[half(pl)])
    fitted(pl, ours, plugins=[half(pl)], callbacks=[callback, Limits()])
    torch.testing.assert_close(task.weights(ours), task.weights(native), rtol=1e-6, atol=1e-7)
    assert limits == [
        math.inf,
        math.inf,
        *(pytest.approx(0.1 / (1 + step)) for step in (2, 3, 4, 5)),
    ]


def test_a_module_that_asks_for_another_clip_than_the_callbacks_is_refused():
    Own = module_of(pl, configure_gradient_clipping=clips_by_and_by)  # noqa: N806
    with pytest.raises(ValueError, match=r"two clips.*self\.clip_gradients"):
        fitted(pl, Own(), callbacks=[GradientControlCallback(clip=7.0)])


def test_a_clip_by_hand_sees_true_gradients():
    def by_hand(self, optimizer, **_):
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)

    Own = module_of(pl, configure_gradient_clipping=by_hand)  # noqa: N806
    native, ours = Own(), Own()
    fitted(pl, native, plugins=[half(pl)])
    fitted(pl, ours, plugins=[half(pl)], callbacks=[GradientControlCallback()])
    torch.testing.assert_close(task.weights(ours), task.weights(native), rtol=1e-6, atol=1e-7)


# --- schedules ----------------------------------------------------------------------------------


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@each_optimizer
def test_a_schedule_of_steps_stands_still_on_a_skip(optimizer):
    def schedule(made):
        return {"scheduler": halving(made), "interval": "step"}

    native, ours = Lit(optimizer, schedule), Lit(optimizer, schedule)
    fitted(pl, native, plugins=[half(pl)])
    fitted(pl, ours, plugins=[half(pl)], callbacks=[GradientControlCallback()])
    factors = [rate / native.rates[0] for rate in ours.rates]
    assert factors == [1.0, 0.5, 0.5, 0.25, 0.125, 0.0625]
    assert native.rates[-1] == ours.rates[-1] / 2  # Lightning's own has run ahead.


@pytest.mark.parametrize(("steps", "moved"), [(1, False), (2, True)])
def test_a_schedule_of_epochs_stands_still_if_no_step_was_taken(steps, moved):
    module = Lit("sgd", halving)
    trainer = fitted(
        pl, module, plugins=[half(pl)], data=loader(steps, bad=0),
        callbacks=[GradientControlCallback()],
    )  # fmt: skip
    (group,) = trainer.optimizers[0].param_groups
    assert group["lr"] == (0.025 if moved else 0.05)


def test_a_schedule_on_a_plateau_gets_its_metric_and_waits_too():
    def schedule(made):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=10.0)
        return {"scheduler": plateau, "monitor": "loss", "interval": "step"}

    def training_step(self, batch, _):
        loss = self.net(batch[0]).mean()
        self.log("loss", loss)
        return loss

    module = module_of(pl, training_step=training_step)("sgd", schedule)
    trainer = fitted(pl, module, plugins=[half(pl)], callbacks=[GradientControlCallback()])
    (config,) = trainer.lr_scheduler_configs
    assert isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert config.scheduler.last_epoch == task.STEPS - 1  # One of the steps was skipped.
    assert module.rates[-1] < module.rates[0]


# --- what is logged, and what hooks see -----------------------------------------------------------


class Kept(pl.loggers.Logger):
    """Keeps what it is told."""

    name, version = "kept", 0

    def __init__(self):
        self.told = []

    def log_metrics(self, metrics, step=None):
        self.told.append(metrics)

    def log_hyperparams(self, *_, **__):
        pass


class Outcomes(pl.Callback):
    """Reads every outcome of a control; behind the callback whose control it is."""

    def __init__(self, callback):
        self.callback, self.read = callback, []

    def on_train_batch_end(self, trainer, *_):
        outcome = self.callback.control and self.callback.control.outcome
        if outcome is not None and trainer.global_step > len(self.read):
            self.read.append(outcome)


@each_accumulation
def test_norm_scale_and_skips_are_logged_as_the_outcomes_have_them(accumulate):
    callback, kept = GradientControlCallback(), Kept()
    outcomes = Outcomes(callback)
    fitted(
        pl, Lit(), plugins=[half(pl)], callbacks=[callback, outcomes], logger=kept,
        log_every_n_steps=1, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    told = [each for each in kept.told if "gradilocks/norm" in each]
    assert [each["gradilocks/norm"] for each in told] == [o.norm for o in outcomes.read]
    assert [each["gradilocks/scale"] for each in told] == [o.scale for o in outcomes.read]
    assert [each["gradilocks/skipped"] for each in told] == [0, 0, 1, 0, 0, 0]


def test_what_is_logged_can_be_chosen_named_and_switched_off():
    def logged(log):
        kept = Kept()
        callback = GradientControlCallback(clip=CLIP, log=log)
        fitted(pl, Lit(), callbacks=[callback], logger=kept, log_every_n_steps=1,
               data=loader(bad=None))  # fmt: skip
        return set().union(*kept.told) - {"epoch"}

    assert logged(None) == set()
    assert logged(["clipped", "limit"]) == {"gradilocks/clipped", "gradilocks/limit"}
    assert logged({"norm": "grad_norm"}) == {"grad_norm"}
    with pytest.raises(ValueError, match=r"log can have norm.*'loss'"):
        GradientControlCallback(log=["loss"])
    with pytest.raises(TypeError, match="log must be"):
        GradientControlCallback(log="norm")


def test_loggers_that_are_told_now_and_then_hear_of_every_skip():
    kept, callback = Kept(), GradientControlCallback()
    fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback], logger=kept, log_every_n_steps=2)
    told = [each for each in kept.told if "gradilocks/norm" in each]
    assert [each["gradilocks/skipped"] for each in told] == [0, 1, 0]
    assert told[-1]["gradilocks/norm"] == callback.control.outcome.norm


def test_loggers_are_told_of_the_step_at_hand_by_hand_and_when_resumed(tmp_path):
    def told(module, **settings):
        kept, callback = Kept(), GradientControlCallback(log=["norm"])
        norms = []

        class Norms(pl.Callback):
            def on_train_batch_end(self, trainer, *_):
                norms.append(callback.control.outcome.norm)

        trained(
            module, callback=callback, extra=[*settings.pop("extra", []), Norms()], logger=kept,
            log_every_n_steps=2, plugins=[half(pl)], **settings,
        )  # fmt: skip
        return [m for m in kept.told if any("norm" in key for key in m)], norms

    by_hand, norms = told(Gan(), data=loader())
    assert [metrics["gradilocks/norm-0"] for metrics in by_hand] == norms[1::2]
    told(Lit(), data=Resumable(), **stopping(tmp_path))
    resumed, norms = told(Lit(), data=Resumable(), ckpt_path=tmp_path / "stopped.ckpt")
    assert [metrics["gradilocks/norm"] for metrics in resumed] == [norms[0], norms[2]]


@pytest.mark.parametrize("settings", [{}, {"max_steps": 5}, {"log_every_n_steps": 4}])
def test_when_training_ends_the_metrics_are_those_of_the_last_step(settings):
    callback = GradientControlCallback()
    trainer = fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback], **settings)
    assert trainer.callback_metrics["gradilocks/norm"].item() == callback.control.outcome.norm


def test_a_number_that_is_monitored_is_there_at_every_step():
    seen = []

    class Watching(pl.callbacks.EarlyStopping):
        def on_train_batch_end(self, trainer, *_):
            seen.append(trainer.callback_metrics["gradilocks/norm"].item())

    callback = GradientControlCallback()
    outcomes, watching = Outcomes(callback), Watching("gradilocks/norm", check_finite=False)
    fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback, watching, outcomes])
    assert seen == [each.norm for each in outcomes.read]


def test_logging_reads_nothing_from_the_device_at_a_step(monkeypatch):
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "numpy", "cpu"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, real=real, name=name, **kwargs):
            reads.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    def reads_of(log):
        del reads[:]
        fitted(pl, Lit(), plugins=[half(pl)], callbacks=[GradientControlCallback(log=log)])
        return len(reads)

    silent = reads_of(None)
    # At its end `fit` brings all that was logged to the host, once.
    assert reads_of(["norm", "scale", "skipped"]) - silent <= 3


def norm_of(module):
    return torch.stack([p.grad.norm() for p in module.parameters()]).norm().item()


@each_optimizer
@pytest.mark.parametrize("whose", ["module", "callback", "lambda"])
def test_hooks_before_the_step_see_true_gradients(optimizer, whose):
    seen = []

    def look(self, *_):
        seen.append(norm_of(self))

    class Looks(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            look(pl_module)

    module = (module_of(pl, on_before_optimizer_step=look) if whose == "module" else Lit)(optimizer)
    callbacks = {
        "module": [],
        "callback": [Looks()],
        "lambda": [pl.callbacks.LambdaCallback(on_before_optimizer_step=lambda t, m, o: look(m))],
    }[whose]
    callback = GradientControlCallback()
    outcomes = Outcomes(callback)
    fitted(pl, module, plugins=[half(pl)], callbacks=[callback, *callbacks, outcomes])
    assert seen == pytest.approx([each.norm for each in outcomes.read], rel=1e-5, nan_ok=True)
    plain = Lit(optimizer)
    fitted(pl, plain, plugins=[half(pl)], callbacks=[GradientControlCallback()])
    assert task.same(task.weights(plain), task.weights(module))


def test_only_those_who_look_pay_for_it(monkeypatch):
    calls = []
    unscale = GradientControl.unscale_
    monkeypatch.setattr(
        GradientControl, "unscale_", lambda *a, **k: (calls.append(1), unscale(*a, **k))
    )
    fitted(pl, Lit(), plugins=[half(pl)], callbacks=[GradientControlCallback()])
    assert not calls
    looking = module_of(pl, on_before_optimizer_step=lambda *_: None)()
    fitted(pl, looking, plugins=[half(pl)], callbacks=[GradientControlCallback()])
    assert len(calls) == task.STEPS
    del calls[:]  # In float32 there is no scale to be seen.
    looking = module_of(pl, on_before_optimizer_step=lambda *_: None)()
    fitted(pl, looking, callbacks=[GradientControlCallback()], data=loader(bad=None))
    assert not calls


# --- optimization by hand, closures, steps that do not come ---------------------------------------


class Gan(pl.LightningModule):
    """Two networks with an optimizer each, stepped at different times by hand."""

    def __init__(self, optimizer="sgd", clip=None, factor=1.0):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.critic = task.Network(1), task.Network(2)
        self.optimizer, self.clip, self.factor = optimizer, clip, factor

    def configure_optimizers(self):
        make = task.OPTIMIZERS[self.optimizer]
        both = [make(self.maker.parameters()), make(self.critic.parameters())]
        return both, [torch.optim.lr_scheduler.StepLR(each, 1, self.factor) for each in both]

    def training_step(self, batch, index):
        (rows,) = batch
        for number, net in enumerate((self.maker, self.critic)):
            optimizer, schedule = self.optimizers()[number], self.lr_schedulers()[number]
            if number and index % 2:
                continue  # The critic learns every other time.
            self.toggle_optimizer(optimizer)
            # Of the bad batch only the critic's gradient is.
            loss = net(rows if number else rows * (rows.new_ones(7) - torch.eye(7)[6])).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip[number], "norm")
            optimizer.step()
            schedule.step()
            self.untoggle_optimizer(optimizer)


@each_optimizer
def test_two_optimizers_by_hand_are_stepped_by_themselves(optimizer):
    native, ours, kept = Gan(optimizer), Gan(optimizer), Kept()
    callback = GradientControlCallback()
    fitted(pl, native, plugins=[half(pl)])
    trainer = fitted(
        pl, ours, plugins=[half(pl)], callbacks=[callback], logger=kept, log_every_n_steps=1
    )
    assert task.same(task.weights(ours), task.weights(native))
    assert callback.control.scale == native.trainer.scaler.get_scale() == 2.0**15
    assert trainer.global_step == native.trainer.global_step == 9
    skipped = [each.get("gradilocks/skipped-1") for each in kept.told if "epoch" in each]
    assert skipped == [0, 0, 1, 1, 0, 0]  # The latest, as Lightning tells it at every step.
    assert all(each["gradilocks/skipped-0"] == 0 for each in kept.told if "epoch" in each)


def test_each_of_two_schedules_waits_for_its_own_optimizer():
    trainer = fitted(pl, Gan(factor=0.5), plugins=[half(pl)], callbacks=[GradientControlCallback()])
    rates = [each.param_groups[0]["lr"] for each in trainer.optimizers]
    assert [0.05 / rate for rate in rates] == [2.0**6, 2.0**2]


def test_clips_by_hand_are_each_optimizers_own():
    limits = []

    class Limits(pl.Callback):
        def on_train_batch_end(self, *_):
            limits.append(callback.control.outcome.limit)

    callback, ours = GradientControlCallback(), Gan(clip=(0.03, 0.5))
    fitted(pl, ours, callbacks=[callback, Limits()], data=loader(bad=None))
    native = Gan(clip=(0.03, 0.5))
    fitted(pl, native, data=loader(bad=None))
    torch.testing.assert_close(task.weights(ours), task.weights(native), rtol=1e-6, atol=1e-7)
    assert limits == pytest.approx([0.5, 0.03] * 3)


def test_lbfgs_evaluates_its_closure_by_the_control():
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    Own = module_of(pl, configure_optimizers=configure_optimizers)  # noqa: N806
    native, ours, clipped = Own(), Own(), Own()
    fitted(pl, native, data=loader(bad=None))
    fitted(pl, ours, data=loader(bad=None), callbacks=[GradientControlCallback()])
    assert task.same(task.weights(ours), task.weights(native))
    assert ours.losses == native.losses
    assert len(ours.losses) > task.STEPS
    callback = GradientControlCallback(scale="dynamic")
    fitted(pl, clipped, data=loader(bad=task.BAD), callbacks=[callback])
    assert callback.control.scale == 2.0**15


@each_precision
@each_accumulation
def test_a_training_step_without_a_loss_is_as_lightnings_own(precision, accumulate):
    def training_step(self, batch, index):
        return None if index in (1, 4, 6) else self.net(batch[0]).mean()

    Own = module_of(pl, training_step=training_step)  # noqa: N806
    native, ours = Own(), Own()
    settings = {
        "accumulate_grad_batches": accumulate,
        "data": loader(accumulate=accumulate, bad=None),
    }
    fitted(pl, native, **settings, **precision_of(pl, precision))
    callback = GradientControlCallback()
    trainer = fitted(pl, ours, **settings, **precision_of(pl, precision), callbacks=[callback])
    assert task.same(task.weights(ours), task.weights(native))
    assert trainer.global_step == native.trainer.global_step


def test_an_own_optimizer_step_goes_through_the_control():
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:  # A warm-up as Lightning's documentation has it.
            group["lr"] = 0.01 * (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    Own = module_of(pl, optimizer_step=optimizer_step)  # noqa: N806
    native, ours, callback = Own(), Own(), GradientControlCallback()
    fitted(pl, native, plugins=[half(pl)])
    fitted(pl, ours, plugins=[half(pl)], callbacks=[callback])
    assert task.same(task.weights(ours), task.weights(native))
    assert callback.control.outcome.step == task.STEPS


def test_max_steps_counts_as_lightning_does():
    trainer = fitted(
        pl,
        Lit(),
        plugins=[half(pl)],
        callbacks=[GradientControlCallback()],
        max_steps=4,
        max_epochs=-1,
    )
    assert trainer.global_step == 4


def test_a_module_without_optimizers_runs_as_it_does():
    class Idle(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization, self.seen = task.Network(), False, 0

        def training_step(self, batch, _):
            self.seen += 1

        def configure_optimizers(self):
            return None

    module, callback = Idle(), GradientControlCallback()
    fitted(pl, module, callbacks=[callback])
    assert module.seen == task.STEPS
    assert callback.control is None


def test_further_arguments_of_step_are_refused_with_their_names():
    def training_step(self, batch, _):
        self.manual_backward(self.net(batch[0]).mean())
        self.optimizers().step(noise=1.0)

    module = module_of(pl, training_step=training_step)()
    module.automatic_optimization = False
    with pytest.raises(TypeError, match=r"takes a closure alone; got noise"):
        fitted(pl, module, callbacks=[GradientControlCallback()])


# --- checkpoints ----------------------------------------------------------------------------------

POLICIES = {
    "as it is": {},
    "adaptive": {"clip": ZScoreClip(threshold=0.5, warmup=2), "scale": HeadroomScale()},
}
each_policy = pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)


def stopping(folder, **settings):
    """Stops after three of six steps, with a checkpoint by ModelCheckpoint."""
    saving = pl.callbacks.ModelCheckpoint(folder, filename="stopped", every_n_train_steps=3)
    return {"max_steps": 3, "enable_checkpointing": True, "extra": [saving], **settings}


def trained(module, *, extra=(), callback=None, **settings):
    callbacks = [*extra, *([] if callback is None else [callback])]
    return fitted(pl, module, callbacks=callbacks, **settings)


@each_optimizer
@each_policy
@pytest.mark.parametrize("bad", [1, 4], ids=["skip before", "skip after"])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(optimizer, policies, bad, tmp_path):
    def schedule(made):
        return {"scheduler": halving(made), "interval": "step"}

    whole, first, second = (Lit(optimizer, schedule) for _ in range(3))
    callback = GradientControlCallback(**policies)
    trained(whole, callback=callback, plugins=[half(pl)], data=Resumable(bad=bad))
    trained(
        first, callback=GradientControlCallback(**policies), plugins=[half(pl)],
        data=Resumable(bad=bad), **stopping(tmp_path),
    )  # fmt: skip
    resumed = GradientControlCallback(**policies)
    trained(
        second, callback=resumed, plugins=[half(pl)], data=Resumable(bad=bad),
        ckpt_path=tmp_path / "stopped.ckpt",
    )  # fmt: skip
    assert first.losses + second.losses == whole.losses
    assert first.rates + second.rates == whole.rates
    assert task.same(task.weights(second), task.weights(whole))
    assert resumed.control.state_dict() == callback.control.state_dict()
    assert resumed.control.outcome.step == task.STEPS


@each_optimizer
def test_a_checkpoint_of_lightnings_own_goes_on_under_the_callback(optimizer, tmp_path):
    whole, first, second = (Lit(optimizer) for _ in range(3))
    trained(whole, plugins=[half(pl)], data=Resumable(bad=1))
    trained(first, plugins=[half(pl)], data=Resumable(bad=1), **stopping(tmp_path))
    callback, scales = GradientControlCallback(), []

    class Scales(pl.Callback):
        def on_train_start(self, *_):
            scales.append(callback.control.scale)

    trained(
        second, callback=callback, plugins=[half(pl)], data=Resumable(bad=1), extra=[Scales()],
        ckpt_path=tmp_path / "stopped.ckpt",
    )  # fmt: skip
    assert scales == [2.0**15]
    assert task.same(task.weights(second), task.weights(whole))


@each_optimizer
@each_policy
def test_a_checkpoint_of_the_callbacks_goes_on_without_it(optimizer, policies, tmp_path):
    first, second = Lit(optimizer), Lit(optimizer)
    callback = GradientControlCallback(**policies)
    trained(
        first, callback=callback, plugins=[half(pl)], data=Resumable(bad=1), **stopping(tmp_path)
    )
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=True)  # No class of anybody's.
    assert saved["gradilocks"]["scale"] == saved["MixedPrecision"]["scale"]
    assert not any("gradilocks" in key.lower() for key in saved["callbacks"])
    trainer = trained(
        second, plugins=[half(pl)], data=Resumable(bad=1), max_steps=4,
        ckpt_path=tmp_path / "stopped.ckpt",
    )  # fmt: skip
    assert trainer.scaler.get_scale() == saved["gradilocks"]["scale"]
    assert not isinstance(trainer.scaler, type(callback.control.as_scaler()))
    if not policies:
        whole = Lit(optimizer)
        trained(whole, plugins=[half(pl)], data=Resumable(bad=1), max_steps=4)
        assert task.same(task.weights(second), task.weights(whole))


def test_in_float32_a_checkpoint_has_nothing_that_lightning_would_not_know(tmp_path):
    trained(
        Lit(), callback=GradientControlCallback(clip=CLIP), data=Resumable(bad=None),
        **stopping(tmp_path),
    )  # fmt: skip
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=True)
    assert "Precision" not in saved
    trained(Lit(), data=Resumable(bad=None), ckpt_path=tmp_path / "stopped.ckpt")


def test_a_checkpoint_after_fit_has_the_state_that_fit_ended_with(tmp_path):
    callback = GradientControlCallback()
    trainer = trained(Lit(), callback=callback, plugins=[half(pl)])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["gradilocks"] == callback.control.state_dict()
    assert saved["MixedPrecision"]["scale"] == 2.0**15


def test_another_clip_is_the_users_to_choose_when_a_run_is_resumed(tmp_path):
    old, new = GradientControlCallback(clip=CLIP), GradientControlCallback(clip=2 * CLIP)
    trained(Lit(), callback=old, plugins=[half(pl)], data=Resumable(bad=1), **stopping(tmp_path))
    trained(
        Lit(), callback=new, plugins=[half(pl)], data=Resumable(bad=1),
        ckpt_path=tmp_path / "stopped.ckpt",
    )  # fmt: skip
    assert new.control.outcome.limit == pytest.approx(2 * CLIP)
    assert new.control.scale == 2.0**15
    other = GradientControlCallback(clip=ZScoreClip())
    with pytest.warns(RuntimeWarning, match="saved with other options of GradientControlCallback"):
        trained(
            Lit(), callback=other, plugins=[half(pl)], data=Resumable(bad=1),
            ckpt_path=tmp_path / "stopped.ckpt",
        )  # fmt: skip
    assert other.control.scale == 2.0**15
    assert other.control.outcome.step == task.STEPS


OTHERS = {
    # Of the run before, of the one that goes on, its precision, and its first scale.
    "no scale": ({}, {}, "bf16-mixed", 1.0),
    "another policy": ({}, {"scale": HeadroomScale()}, "16-mixed", 2.0**15),
    "a fixed scale": ({}, {"scale": 2.0**5}, "16-mixed", 2.0**5),
    "a scale at last": ({"scale": None}, {}, "16-mixed", 2.0**16),
    "all": ({"scale": None, "clip": ZScoreClip()}, {"clip": CLIP}, "16-mixed", 2.0**16),
}


@pytest.mark.parametrize(("old", "new", "precision", "scale"), OTHERS.values(), ids=OTHERS)
def test_a_run_may_go_on_with_another_scale(old, new, precision, scale, tmp_path):
    scales = []

    class Scales(pl.Callback):
        def on_train_start(self, *_):
            scales.append(after.control.scale)

    before, after = GradientControlCallback(**old), GradientControlCallback(**new)
    settings = {"plugins": [half(pl)], "data": Resumable(bad=1)}
    trained(Lit(), callback=before, **settings, **stopping(tmp_path))
    with pytest.warns(RuntimeWarning, match="saved with other options of GradientControlCallback"):
        trained(
            Lit(), callback=after, **precision_of(pl, precision), data=Resumable(bad=1),
            extra=[Scales()], ckpt_path=tmp_path / "stopped.ckpt",
        )  # fmt: skip
    assert scales == [scale]
    assert after.control.outcome.step == task.STEPS  # Its count goes on.


@each_optimizer
def test_two_optimizers_by_hand_are_resumed_bit_for_bit(optimizer, tmp_path):
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2 and not trainer.ckpt_path:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def run(**more):
        callback = GradientControlCallback(**POLICIES["adaptive"])
        module = Gan(optimizer, factor=0.5)
        settings = {"plugins": [half(pl)], "data": Resumable(bad=4)}
        trained(module, callback=callback, extra=[Saving()], **settings, **more)
        return task.weights(module), callback.control.state_dict()

    weights, state = run()
    resumed, state_resumed = run(ckpt_path=tmp_path / "half.ckpt")
    assert task.same(resumed, weights)
    assert state_resumed == state
    assert state["gradilocks"]["parts"] is not None


@each_precision
def test_two_clips_that_a_module_asks_for_come_one_after_the_other(precision):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=0.002, gradient_clip_algorithm="value")

    found = []
    for callbacks in ([], [GradientControlCallback()]):
        made = module_of(pl, configure_gradient_clipping=configure_gradient_clipping)()
        fitted(pl, made, data=loader(bad=None), callbacks=callbacks, **precision_of(pl, precision))
        found.append(task.weights(made))
    for ours, native in zip(*found, strict=True):
        assert torch.allclose(ours, native, rtol=1e-6, atol=1e-7)


@each_precision
def test_schedules_go_on_where_lightning_steps_them_without_a_step(precision):
    def training_step(self, batch, number):
        return None if number % 3 == 1 else self.net(batch[0]).mean()

    found = []
    for callbacks in ([], [GradientControlCallback()]):
        lit = module_of(pl, training_step=training_step)(
            schedule=lambda made: {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(made, 0.5),
                "interval": "step",
            }
        )
        fitted(pl, lit, data=loader(bad=None), callbacks=callbacks, **precision_of(pl, precision))
        found.append((lit.rates, task.weights(lit)))
    (native, of_native), (ours, of_ours) = found
    assert ours == native
    assert len(set(ours)) == task.STEPS
    assert task.same(of_ours, of_native)


def test_evaluation_leaves_the_control_alone(tmp_path):
    def validation_step(self, batch, _):
        self.log("val_loss", self.net(batch[0]).mean())

    Own = module_of(pl, validation_step=validation_step, test_step=validation_step)  # noqa: N806
    callback, module = GradientControlCallback(), Own()
    trainer = pl.Trainer(**{**QUIET, "enable_checkpointing": True}, plugins=[half(pl)],
        callbacks=[callback, *stopping(tmp_path)["extra"]])  # fmt: skip
    trainer.validate(module, loader(), verbose=False)
    assert callback.control is None
    trainer.fit(module, Resumable(bad=4), loader())
    state = callback.control.state_dict()
    trainer.test(module, loader(), ckpt_path=tmp_path / "stopped.ckpt", verbose=False)
    assert callback.control.state_dict() == state


# --- one callback, many ways to use it ------------------------------------------------------------


def test_a_module_may_be_fitted_again_and_the_scale_goes_on():
    callback, module, native = GradientControlCallback(), Lit("fused adamw"), Lit("fused adamw")
    ours = fitted(pl, module, plugins=[half(pl)], callbacks=[callback])
    theirs = fitted(pl, native, plugins=[half(pl)])
    for trainer, each in ((ours, module), (theirs, native)):
        trainer.fit_loop.max_epochs = 2
        trainer.fit(each, loader())
    assert callback.control.scale == theirs.scaler.get_scale() == 2.0**14
    assert callback.control.outcome.step == 2 * task.STEPS
    assert task.same(task.weights(module), task.weights(native))


def test_one_callback_serves_several_trainers_one_after_another():
    callback, first, second = GradientControlCallback(), Lit(), Lit()
    one = fitted(pl, first, plugins=[half(pl)], callbacks=[callback])
    before = callback.control
    fitted(pl, second, plugins=[half(pl)], callbacks=[callback])
    assert task.same(task.weights(first), task.weights(second))
    assert callback.control is not before
    assert one.scaler.control is before  # Whose state is what its checkpoints tell.


def test_the_plugin_that_was_chosen_is_left_as_it_was():
    chosen = half(pl)
    trainer = fitted(pl, Lit(), plugins=[chosen], callbacks=[GradientControlCallback()])
    assert chosen.scaler.get_scale() == 2.0**16
    assert isinstance(trainer.precision_plugin, type(chosen))
    assert type(trainer.precision_plugin).__qualname__ == "MixedPrecision"
    assert trainer.scaler.get_scale() == 2.0**15  # As users and their callbacks read it.


def test_the_settings_of_a_chosen_scaler_are_where_the_control_begins():
    chosen = {"init_scale": 2.0**9, "growth_interval": 2, "growth_factor": 4.0}
    callback, native, ours = GradientControlCallback(), Lit(), Lit()
    theirs = fitted(pl, native, plugins=[half(pl, **chosen)])
    fitted(pl, ours, plugins=[half(pl, **chosen)], callbacks=[callback])
    assert callback.control.scale == theirs.scaler.get_scale() != 2.0**9
    assert task.same(task.weights(ours), task.weights(native))
    disabled = GradientControlCallback()
    fitted(
        pl, Lit(), plugins=[half(pl, enabled=False)], callbacks=[disabled], data=loader(bad=None)
    )
    assert disabled.control.scale == 1.0


def test_a_scale_may_be_chosen_in_any_precision():
    for precision in PRECISIONS:
        callback = GradientControlCallback(scale=DynamicScale(init_scale=2.0**5))
        fitted(pl, Lit(), **precision_of(pl, precision), callbacks=[callback])
        assert callback.control.scale == 2.0**4


def test_more_than_one_callback_is_refused():
    callback = GradientControlCallback()
    for both in ([callback, callback], [callback, GradientControlCallback()]):
        with pytest.raises(ValueError, match="more than one GradientControlCallback"):
            fitted(pl, Lit(), callbacks=both)


def test_a_module_may_bring_the_callback_itself():
    callback = GradientControlCallback()
    module = module_of(pl, configure_callbacks=lambda self: [callback])()
    fitted(pl, module, plugins=[half(pl)])
    assert callback.control.scale == 2.0**15


def test_a_second_scaler_of_ours_is_refused():
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", GradScaler("cpu", clip=1.0))
    with pytest.raises(ValueError, match=r"has a gradilocks\.GradScaler already"):
        fitted(pl, Lit(), plugins=[plugin], callbacks=[GradientControlCallback()])


def test_a_plugin_with_a_step_of_its_own_is_refused_by_name():
    class Stepping(pl.plugins.Precision):
        def optimizer_step(self, optimizer, model, closure, **kwargs):
            return super().optimizer_step(optimizer, model, closure, **kwargs)

    with pytest.raises(ValueError, match="Stepping has an optimizer_step of its own"):
        fitted(pl, Lit(), plugins=[Stepping()], callbacks=[GradientControlCallback()])
    plugin = pl.plugins.DeepSpeedPrecision("32-true")
    with pytest.raises(ValueError, match="DeepSpeedPrecision has an optimizer_step of its own"):
        fitted(pl, Lit(), plugins=[plugin], callbacks=[GradientControlCallback()])


def test_a_plugin_with_other_things_of_its_own_keeps_them():
    seen = []

    class Noting(pl.plugins.MixedPrecision):
        def pre_backward(self, tensor, module):
            seen.append(tensor.item())
            return super().pre_backward(tensor, module)

    ours, plugin = Lit(), Noting("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fitted(pl, ours, plugins=[plugin], callbacks=[GradientControlCallback()])
    assert seen == ours.losses


def test_what_is_wrong_is_said_when_the_callback_is_made():
    with pytest.raises(ValueError, match="on_nonfinite must be"):
        GradientControlCallback(on_nonfinite="ignore")
    with pytest.raises(TypeError, match="clipp"):
        GradientControlCallback(clipp=1.0)
    with pytest.raises(TypeError, match="scale must be 'dynamic'"):
        GradientControlCallback(scale="automatic")
    with pytest.raises(TypeError, match="clip"):
        GradientControlCallback(clip="1.0")
    with pytest.raises(TypeError, match="record must be a path"):
        GradientControlCallback(record=3)
    with pytest.raises(ValueError, match="config= goes into the header"):
        GradientControlCallback(config={"lr": 0.1})


def test_what_the_control_raises_ends_the_training():
    callback = GradientControlCallback(on_nonfinite="raise")
    with pytest.raises(NonFiniteGradient, match=CULPRIT):
        fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback])


def test_callbacks_and_trainers_can_be_copied_and_pickled():
    callback = GradientControlCallback(clip=ZScoreClip(), log={"norm": "grad_norm"})
    pickled = pickle.loads(pickle.dumps(callback))  # As ddp_spawn does, before `fit` begins.
    trainer = fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback])
    for twin in (copy.deepcopy(callback), pickled):
        assert twin.control is None
        fitted(pl, Lit(), plugins=[half(pl)], callbacks=[twin])
        assert twin.control.state_dict() == callback.control.state_dict()
    plugin = copy.deepcopy(trainer.precision_plugin)
    assert type(plugin) is pl.plugins.MixedPrecision
    assert plugin.scaler.get_scale() == 2.0**16


class Thawing(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.first)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.first, optimizer)


LIGHTNINGS = {
    "StochasticWeightAveraging": lambda: [
        pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    ],
    "WeightAveraging": lambda: [pl.callbacks.WeightAveraging()],
    "GradientAccumulationScheduler": lambda: [
        pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    ],
    "BaseFinetuning": lambda: [Thawing()],
}


@pytest.mark.parametrize("which", LIGHTNINGS)
def test_lightnings_own_callbacks_work_beside_it(which):
    def configure_optimizers(self):
        trained = [param for param in self.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    Own = module_of(pl, configure_optimizers=configure_optimizers)  # noqa: N806
    native, ours, callback = Own(), Own(), GradientControlCallback()
    settings = {"data": loader(bad=None), "max_epochs": 3}
    fitted(pl, native, **settings, plugins=[half(pl)], callbacks=LIGHTNINGS[which]())
    fitted(pl, ours, **settings, plugins=[half(pl)], callbacks=[*LIGHTNINGS[which](), callback])
    assert task.same(task.weights(ours), task.weights(native))
    assert callback.control.outcome.step > task.STEPS


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_other_precisions_are_as_lightnings_own(precision):
    native, ours = Lit("fused adamw"), Lit("fused adamw")
    settings = {"data": loader(bad=None), "precision": precision}
    fitted(pl, native, **settings)
    fitted(pl, ours, **settings, callbacks=[GradientControlCallback()])
    assert task.same(task.weights(ours), task.weights(native))
    assert ours.net.head.weight.dtype != torch.float32


def test_the_learning_rate_finder_leaves_no_trace(tmp_path):
    callback, module = GradientControlCallback(), Lit()
    module.lr = 0.05
    trainer = pl.Trainer(
        **QUIET, plugins=[half(pl)], callbacks=[callback], default_root_dir=tmp_path
    )
    tuner = pl.tuner.Tuner(trainer)
    tuner.lr_find(module, loader(bad=None), num_training=5, update_attr=False)
    trainer.fit(module, loader())
    native = Lit()
    fitted(pl, native, plugins=[half(pl)])
    assert callback.control.scale == 2.0**15
    assert task.same(task.weights(module), task.weights(native))


# --- the run file ---------------------------------------------------------------------------------


@each_optimizer
@each_precision
@each_accumulation
def test_the_run_file_has_every_step_its_loss_the_skip_and_the_culprit(
    optimizer, precision, accumulate, tmp_path
):
    callback = GradientControlCallback(clip=CLIP, record=tmp_path / "run.jsonl")
    outcomes, module = Outcomes(callback), Lit(optimizer)
    fitted(
        pl, module, **precision_of(pl, precision), callbacks=[callback, outcomes],
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    run = read_run(tmp_path / "run.jsonl")
    losses = torch.tensor(module.losses).view(task.STEPS, accumulate).mean(1)
    assert [step.step for step in run.steps] == list(range(1, task.STEPS + 1))
    assert [step.loss for step in run.steps] == pytest.approx(losses.tolist())
    assert [step.skipped for step in run.steps] == [k == task.BAD for k in range(task.STEPS)]
    assert [c.name for step in run.steps for c in step.culprits] == [CULPRIT]
    assert [step.norm for step in run.steps if not step.skipped] == [
        each.norm for each in outcomes.read if not each.skipped
    ]
    assert run.end.status == "finished"
    assert not callback.control.recorder.recording


def test_recording_and_logging_change_no_bit(tmp_path):
    plain, recorded = Lit("fused adamw"), Lit("fused adamw")
    fitted(pl, plain, plugins=[half(pl)], callbacks=[GradientControlCallback(log=None)])
    callback = GradientControlCallback(record=tmp_path / "run.jsonl", config={"lr": 0.01})
    fitted(pl, recorded, plugins=[half(pl)], callbacks=[callback])
    assert task.same(task.weights(plain), task.weights(recorded))
    assert read_run(tmp_path / "run.jsonl").header.config == {"lr": 0.01}


def test_a_resumed_run_continues_its_file_at_the_checkpoints_step(tmp_path):
    record, settings = tmp_path / "run.jsonl", {"plugins": [half(pl)], "data": Resumable()}
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="stopped", every_n_train_steps=3)
    trained(
        Lit(), callback=GradientControlCallback(record=record), extra=[saving], max_steps=5,
        enable_checkpointing=True, **settings,
    )  # fmt: skip
    resumed = GradientControlCallback(record=record)
    trained(
        Lit(), callback=resumed, plugins=[half(pl)], data=Resumable(),
        ckpt_path=tmp_path / "stopped.ckpt",
    )  # fmt: skip
    run = read_run(record)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.step for step in run.superseded] == [4, 5]


def test_fitted_again_the_file_goes_on(tmp_path):
    callback, module = GradientControlCallback(record=tmp_path / "run.jsonl"), Lit()
    trainer = fitted(pl, module, plugins=[half(pl)], callbacks=[callback])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    run = read_run(tmp_path / "run.jsonl")
    assert [step.step for step in run.steps] == list(range(1, 2 * task.STEPS + 1))
    assert run.end.status == "finished"


def test_a_file_that_is_there_is_not_overwritten_by_another_run(tmp_path):
    record = tmp_path / "run.jsonl"
    fitted(pl, Lit(), plugins=[half(pl)], callbacks=[GradientControlCallback(record=record)])
    before = record.read_bytes()
    with pytest.raises(BadRunFile, match="exists already"):
        fitted(pl, Lit(), plugins=[half(pl)], callbacks=[GradientControlCallback(record=record)])
    assert record.read_bytes() == before


def test_a_fast_dev_run_writes_no_file(tmp_path):
    record = tmp_path / "run.jsonl"
    callback = GradientControlCallback(record=record)
    fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback], fast_dev_run=2)
    assert callback.control.outcome.step == 2
    assert not record.exists()


def raising(error):
    def training_step(self, batch, index):
        if index == 4:
            raise error
        return self.net(batch[0]).mean()

    return module_of(pl, training_step=training_step)()


def test_an_exception_closes_the_file_as_an_error(tmp_path):
    callback = GradientControlCallback(record=tmp_path / "run.jsonl")
    with pytest.raises(ZeroDivisionError):
        fitted(pl, raising(ZeroDivisionError("by hand")), plugins=[half(pl)], callbacks=[callback])
    run = read_run(tmp_path / "run.jsonl")
    assert (run.end.status, len(run.steps)) == ("error", 4)
    assert "ZeroDivisionError: by hand" in run.end.error


def test_ctrl_c_closes_the_file_as_interrupted(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    callback = GradientControlCallback(record=tmp_path / "run.jsonl")
    try:
        with pytest.raises(SystemExit):
            fitted(pl, raising(KeyboardInterrupt()), plugins=[half(pl)], callbacks=[callback])
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning has it ignored from then on.
    run = read_run(tmp_path / "run.jsonl")
    assert (run.end.status, len(run.steps)) == ("interrupted", 4)


def test_a_recorder_of_the_users_own_stays_open(tmp_path):
    with Recorder(tmp_path / "run.jsonl") as recorder:
        callback = GradientControlCallback(record=recorder)
        trainer = fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback])
        assert recorder.recording
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module, loader())
        recorder.log(test_loss=0.5)
    run = read_run(tmp_path / "run.jsonl")
    assert [step.step for step in run.steps] == list(range(1, 2 * task.STEPS + 1))


def test_two_optimizers_are_recorded_each_by_itself(tmp_path):
    callback = GradientControlCallback(record=tmp_path / "run.jsonl")
    fitted(pl, Gan("fused adamw"), plugins=[half(pl)], callbacks=[callback])
    run = read_run(tmp_path / "run.jsonl")
    skipped = {number: [] for number in (0, 1)}
    for step in run.steps:
        skipped[step.optimizer].append(step.skipped)
    assert skipped == {0: [False] * 6, 1: [False, True, False]}
    culprits = [c.name for step in run.steps for c in step.culprits]
    assert culprits == [f"critic.{task.CULPRIT}"]


def test_the_first_bad_step_is_kept(tmp_path):
    callback = GradientControlCallback(keep_bad_step=tmp_path / "bad.pt")
    fitted(pl, Lit(), plugins=[half(pl)], callbacks=[callback])
    assert (tmp_path / "bad.pt").exists()


# --- both packages --------------------------------------------------------------------------------


@pytest.fixture
def other():
    return pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")


def imported_anew():
    """The module of the callback, as a process imports it that has imported what is there now."""
    spec = importlib.util.find_spec("gradilocks.integrations.lightning")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained_by(package, callback):
    ours, native = module_of(package)("fused adamw"), module_of(package)("fused adamw")
    fitted(package, native, plugins=[half(package)])
    trainer = fitted(package, ours, plugins=[half(package)], callbacks=callback)
    assert task.same(task.weights(ours), task.weights(native))
    assert trainer.callback_metrics["gradilocks/scale"] == 2.0**15


def test_the_other_package_alone_is_enough(other, monkeypatch):
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    made = imported_anew().GradientControlCallback()
    assert isinstance(made, other.Callback)
    assert not isinstance(made, pl.Callback)
    trained_by(other, made)  # Not in a list: Lightning looks whether it is a callback of its own.


def test_where_nobody_has_imported_lightning_yet_either_may_come(other, monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: {"lightning.pytorch": pl, "pytorch_lightning": other}[name],
    )
    kind = imported_anew().GradientControlCallback
    monkeypatch.undo()
    for package in (pl, other):
        assert isinstance(kind(), package.Callback)
        trained_by(package, kind())


def test_a_callback_of_the_one_serves_the_trainer_of_the_other(other):
    trained_by(other, [GradientControlCallback()])


def test_without_lightning_the_way_out_is_named(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.find_spec("gradilocks.integrations.lightning")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingPackage, match="pip install lightning"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# --- gradilocks.optim -----------------------------------------------------------------------------


@each_precision
@pytest.mark.parametrize(("optimizer", "ours"), [("sgd", optim.SGD), ("fused adamw", optim.AdamW)])
def test_torchs_optimizers_are_adopted_if_asked_for(optimizer, ours, precision, tmp_path):
    settings = {"data": loader(bad=bad_step(precision)), **precision_of(pl, precision)}

    def run(module, **options):
        callback = GradientControlCallback(clip=CLIP, **options)
        return fitted(pl, module, **settings, callbacks=[callback])

    schedule = lambda made: torch.optim.lr_scheduler.StepLR(made, 1)  # noqa: E731
    native, module = (Lit(optimizer, schedule) for _ in range(2))
    run(native)
    trainer = run(module, adopt=True)
    assert type(trainer.optimizers[0]) is ours
    assert isinstance(module.optimizers(), ours)  # Lightning's wrapper imitates it.
    torch.testing.assert_close(task.weights(module), task.weights(native), rtol=1e-6, atol=1e-7)
    assert module.rates == native.rates
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    settings |= {"max_epochs": 2, "ckpt_path": tmp_path / "whole.ckpt"}
    again, native = Lit(optimizer, schedule), Lit(optimizer, schedule)
    run(again, adopt=True)
    run(native)
    torch.testing.assert_close(task.weights(again), task.weights(native), rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_cannot_be_adopted_is_refused():
    module = Lit()
    module.configure_optimizers = lambda: torch.optim.RMSprop(module.parameters())
    with pytest.raises(TypeError, match="got RMSprop"):
        fitted(pl, module, callbacks=[GradientControlCallback(adopt=True)])
