"""Ignite's trainers with the scaler of a control: the lines of docs/frameworks.md, tried out."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import DataLoader

import gradilocks
from gradilocks import GradientControl, HeadroomScale, ZScoreClip
from tests.integrations import task
from tests.observe.plain_loop import plain_loop, recorded

# On a CPU its autocast, which is for CUDA, says that it does nothing.
pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning")


def mean(losses, _):
    return losses.mean()


def loader(accumulate=1, steps=slice(None)):
    rows = task.rows(accumulate=accumulate).split(task.BATCH * accumulate)[steps]
    return DataLoader(
        [(row, torch.zeros(())) for part in rows for row in part], batch_size=task.BATCH
    )


def made(kind, **options):
    model = task.Network()
    optimizer = task.OPTIMIZERS[kind](model.parameters())
    return model, optimizer, GradientControl(optimizer, model=model, **options)


def trainer_of(model, optimizer, scaler, accumulate=1):
    return create_supervised_trainer(
        model,
        optimizer,
        mean,
        amp_mode="amp",
        scaler=scaler,
        gradient_accumulation_steps=accumulate,
    )


@pytest.mark.parametrize("kind", task.OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_a_clip_every_bit_is_ignites(kind, accumulate):
    native = task.Network()
    optimizer = task.OPTIMIZERS[kind](native.parameters())
    scaler = torch.amp.GradScaler("cpu")
    trainer_of(native, optimizer, scaler, accumulate).run(loader(accumulate))
    model, optimizer, control = made(kind)
    trainer_of(model, optimizer, control.as_scaler(), accumulate).run(loader(accumulate))
    assert task.same(task.weights(model), task.weights(native))
    assert control.scale == scaler.get_scale() == 32768.0


@pytest.mark.parametrize("kind", ["sgd", "fused adamw", "ours"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clip_record_and_schedule_are_those_of_a_plain_loop(kind, accumulate, tmp_path):
    model, optimizer, control = made(kind, clip=0.05, record=tmp_path / "a.jsonl")
    scheduler = control.scheduler(torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5))
    trainer = trainer_of(model, optimizer, control.as_scaler(), accumulate)
    # Not `scheduler.step` itself: Ignite would hand it the engine.
    trainer.on(Events.ITERATION_COMPLETED(every=accumulate))(lambda: scheduler.step())
    trainer.run(loader(accumulate))
    control.recorder.close()
    case = {
        "precision": "32-true",
        "optimizer": kind,
        "accumulate": accumulate,
        "clip": 0.05,
        "bad": task.BAD,
        "scaled": True,
        "schedule": "taken",
    }
    run = gradilocks.read_run(tmp_path / "a.jsonl")
    assert recorded(run, 0) == plain_loop(case)


@pytest.mark.parametrize("kind", task.OPTIMIZERS)
def test_a_checkpoint_of_ignites_goes_on_to_the_bit(kind, tmp_path):
    def parts():
        model, optimizer, control = made(kind, scale=HeadroomScale(), clip=ZScoreClip(warmup=2))
        trainer = trainer_of(model, optimizer, control.as_scaler())
        to_save = {"model": model, "optimizer": optimizer, "control": control, "trainer": trainer}
        return model, trainer, to_save

    whole, trainer, _ = parts()
    trainer.run(loader(), max_epochs=2)
    _, trainer, to_save = parts()
    saver = Checkpoint(to_save, DiskSaver(tmp_path))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    trainer.run(loader(), max_epochs=1)
    model, trainer, to_save = parts()
    Checkpoint.load_objects(to_save, torch.load(tmp_path / saver.last_checkpoint))
    trainer.run(loader(), max_epochs=2)
    assert task.same(task.weights(model), task.weights(whole))


def test_a_step_of_ones_own_needs_no_amp():
    model, _, control = made("sgd", scale=None, clip=0.05)
    norms = []

    def train_step(engine, batch):
        rows, targets = batch
        loss = mean(model(rows), targets)
        control.backward(loss)
        norms.append(control.step().norm)
        control.zero_grad()
        return loss.item()

    Engine(train_step).run(loader())
    assert all(each.isfinite().all() for each in task.weights(model))
    assert len(norms) == task.STEPS
