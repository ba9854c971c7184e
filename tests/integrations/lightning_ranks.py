"""Programs that two ranks run under Lightning's strategies and Fabric's.

Each rank trains on every other row of each batch. At the bad step the gradient of `middle.weight` is Inf: on both ranks
under DDP, on the second alone under FSDP2, where each holds a part.
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gradilocks import HeadroomScale, ZScoreClip
from integrations import lightning_task as task
from integrations.planted_overflow import WIDTH

CLIP = 0.02
POLICIES = {"scale": HeadroomScale(), "clip": ZScoreClip(0.5, warmup=2)}


def _prepare(rank):
    """Lightning finds processes that somebody else has started."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in variables.items()})
    for text in (*task.WARNINGS, ".*torch.distributed._composable", "You have overridden", ".*FSDP"):
        warnings.filterwarnings("ignore", text)


def _spoil(net, step):
    gradient = net.middle.weight.grad
    if isinstance(gradient, DTensor):
        gradient, step = gradient.to_local(), step if dist.get_rank() else None
    if step == task.BAD:
        gradient.fill_(torch.inf)


def _whole(model):
    values = [param.detach() for param in model.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def _module(strategy):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = task.Network()

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

        def on_after_backward(self):
            _spoil(self.net, self.global_step)

        def configure_optimizers(self):
            return task.OPTIMIZERS["fused adamw"](self.parameters())

    if strategy == "fsdp2":

        def configure_model(self):
            if not isinstance(self.net.head.weight, DTensor):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        Module.configure_model = configure_model
    return Module()


def _fit(rank, strategy, *, max_steps=-1, ckpt_path=None, save=None, **options):
    import lightning.pytorch as pl

    from gradilocks.integrations.lightning import GradientControlCallback

    made = pl.strategies.DDPStrategy() if strategy == "ddp" else pl.strategies.ModelParallelStrategy(2, 1)
    module, callback = _module(strategy), GradientControlCallback(**options)
    saving = [pl.callbacks.ModelCheckpoint(save.parent, save.stem, every_n_train_steps=max_steps)] if save else []
    trainer = pl.Trainer(
        **{**task.QUIET, "devices": 2, "enable_checkpointing": bool(save)}, strategy=made,
        callbacks=[callback, *saving], max_steps=max_steps, use_distributed_sampler=False,
    )  # fmt: skip
    outcomes = []

    def on_train_batch_end(*_):
        outcomes.append((callback.control.outcome.skipped, callback.control.outcome.culprits))

    module.on_train_batch_end = on_train_batch_end
    batches = task.Stateful(slice(rank, None, 2))
    batches.batches = [torch.cat([rows[:, :WIDTH], 0 * rows[:, -1:]], 1) for rows in batches.batches]
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return _whole(module), callback.control.state_dict(), outcomes


def trainer(rank, strategy, folder):
    """A training to compare with one process, a whole one, and one that was stopped after three steps and resumed."""
    _prepare(rank)
    path = folder / "three.ckpt"
    compared, whole = _fit(rank, strategy, scale="dynamic", clip=CLIP), _fit(rank, strategy, **POLICIES)
    _fit(rank, strategy, max_steps=3, save=path, **POLICIES)
    return compared, whole, _fit(rank, strategy, ckpt_path=path, **POLICIES)


def _fabric(rank, strategy, first=0, last=task.STEPS, *, load=None, save=None, max_norm=None, **options):
    import lightning.fabric as lf

    from gradilocks.integrations import control_for

    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["data_parallel"])

    made = lf.strategies.DDPStrategy() if strategy == "ddp" else lf.strategies.ModelParallelStrategy(parallelize, 2, 1)
    fabric = lf.Fabric(accelerator="cpu", devices=2, strategy=made)
    fabric.launch()
    net = task.Network()
    module = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(task.OPTIMIZERS["fused adamw"](module.parameters()))
    control = control_for(fabric, module, optimizer, **options)
    state = {"model": module, "optimizer": optimizer, "control": control}
    if load is not None:
        fabric.load(load, state)
        assert state["control"] is control
    outcomes = []
    for step, (rows,) in list(enumerate(task.steps_of(task.rows(bad=None))))[first:last]:
        optimizer.zero_grad()
        fabric.backward(module(rows[rank::2]).mean())
        _spoil(net, step)
        if max_norm is not None:
            fabric.clip_gradients(module, optimizer, max_norm=max_norm)
        optimizer.step()
        outcomes.append((control.outcome.skipped, control.outcome.culprits))
    if save is not None:
        fabric.save(save, state)
    return _whole(net), control.state_dict(), outcomes


def fabric(rank, strategy, folder):
    """The same with Fabric, which clips by `fabric.clip_gradients` in the first training."""
    _prepare(rank)
    path = folder / "three"
    compared, whole = _fabric(rank, strategy, scale="dynamic", max_norm=CLIP), _fabric(rank, strategy, **POLICIES)
    _fabric(rank, strategy, last=3, save=path, **POLICIES)
    return compared, whole, _fabric(rank, strategy, first=3, load=path, **POLICIES)
