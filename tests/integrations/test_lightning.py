"""Lightning's Trainer with a GradientControlCallback, beside the Trainer as it is.

The truth is Lightning's own scaler and clip; where it refuses (a clip with a fused optimizer in
16-mixed) it is torch's loop by hand. On a CPU Lightning has no 16-mixed: its plugin is given by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradilocks import read_run
from tests.integrations import task
from tests.integrations.lightning_task import (
    PRECISIONS,
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
