"""What two ranks run under Lightning's strategies and Fabric's, over loopback.

Each rank trains on every other row of the task's batches. At the bad step the gradient of one
tensor is Inf: on both ranks where both hold it, on the second alone where each holds a part.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gradilocks import GradientControl, HeadroomScale, ZScoreClip, read_run
from gradilocks.integrations.fabric import control_for
from gradilocks.integrations.lightning_precision import rank_options
from tests.integrations import task
from tests.integrations.lightning_task import QUIET, Resumable, half, module_of

CLIP = 0.02


def _package(rank):
    """Lightning, told that somebody else has started the processes."""
    import lightning.pytorch

    told = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in told.items()})
    return lightning.pytorch


def _folder():
    """One for all ranks."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])


def _part(rank):
    """This rank's rows, batch by batch, without the marker: `_spoil` plants what is bad."""
    made = Resumable(bad=None)
    made.batches = [batch[rank::2] for batch in made.batches]
    return made


def _spoil(net, step):
    gradient = net.middle.weight.grad
    if step == task.BAD and isinstance(gradient, DTensor):
        gradient, step = gradient.to_local(), step if dist.get_rank() else None
    if step == task.BAD:
        gradient.fill_(torch.inf)


def _on_after_backward(self):
    _spoil(self.net, self.global_step)


def _configure_model(self):
    if not isinstance(self.net.head.weight, DTensor):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def _whole(params):
    values = [param.detach() for param in params]
    return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]


def _fit(rank, make_strategy, *, max_steps=-1, ckpt_path=None, save=None, plugins=None, **options):
    from gradilocks.integrations.lightning import GradientControlCallback

    pl, strategy = _package(rank), make_strategy()
    methods = {"on_after_backward": _on_after_backward}
    if type(strategy).__name__ == "ModelParallelStrategy":
        methods["configure_model"] = _configure_model
    module = module_of(pl, **methods)("fused adamw")
    callback = GradientControlCallback(**{"clip": CLIP, **options})
    saving = [] if save is None else [
        pl.callbacks.ModelCheckpoint(save.parent, filename=save.stem, every_n_train_steps=max_steps)
    ]  # fmt: skip
    settings = {**QUIET, "devices": 2, "enable_checkpointing": bool(saving)}
    trainer = pl.Trainer(
        **settings, strategy=strategy, callbacks=[callback, *saving], max_steps=max_steps,
        use_distributed_sampler=False, plugins=plugins and plugins(pl),
    )  # fmt: skip
    trainer.fit(module, _part(rank), ckpt_path=ckpt_path)
    return _whole(module.parameters()), callback.control.state_dict()


def _run(folder):
    """What is in the one run file of the folder."""
    dist.barrier()
    (file,) = folder.iterdir()
    run = read_run(file)
    return [(s.loss, s.skipped, [c.name for c in s.culprits]) for s in run.steps], run.end.status


def _trained(rank, make_strategy):
    """In float32 with a scale, so that one process can be compared; with a run file."""
    folder = _folder()
    weights, state = _fit(rank, make_strategy, scale="dynamic", record=folder / "run.jsonl")
    half_weights, half_state = _fit(rank, make_strategy, plugins=lambda pl: [half(pl)])
    return {
        "weights": weights, "state": state, "run": _run(folder),
        "half weights": half_weights, "half state": half_state,
    }  # fmt: skip


def _resumed(rank, make_strategy):
    """A run that was stopped after three steps and resumed, and one that was not."""
    folder, policies = _folder(), {"scale": HeadroomScale(), "clip": ZScoreClip(0.5, warmup=2)}
    whole = _fit(rank, make_strategy, **policies)
    stopped = folder / "stopped.ckpt"
    _fit(rank, make_strategy, max_steps=3, save=stopped, **policies)
    return {"whole": whole, "resumed": _fit(rank, make_strategy, ckpt_path=stopped, **policies)}


def _ddp():
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy()


def _fsdp2():
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def ddp(rank):
    return _trained(rank, _ddp)


def ddp_resumed(rank):
    return _resumed(rank, _ddp)


def fsdp2_resumed(rank):
    return _resumed(rank, _fsdp2)


def fsdp2(rank):
    return _trained(rank, _fsdp2)


def _fabric_loop(rank, fabric, net, module, optimizer, folder):
    control = control_for(
        fabric, module, optimizer, clip=CLIP, scale="dynamic", record=folder / "run.jsonl"
    )
    for step, (rows,) in enumerate(_part(rank)):
        optimizer.zero_grad()
        fabric.backward(module(rows).mean())
        _spoil(net, step)
        optimizer.step()
    recorder = control.recorder
    if recorder is not None:
        recorder.close()
    return {"weights": _whole(net.parameters()), "state": control.state_dict(), "run": _run(folder)}


def fabric_ddp(rank):
    _package(rank)
    import lightning.fabric as lf

    net, folder = task.Network(), _folder()
    fabric = lf.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    module, optimizer = fabric.setup(net, task.OPTIMIZERS["fused adamw"](net.parameters()))
    return _fabric_loop(rank, fabric, net, module, optimizer, folder)


def fabric_fsdp2(rank):
    _package(rank)
    import lightning.fabric as lf
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["data_parallel"])

    net, folder = task.Network(), _folder()
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lf.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(task.OPTIMIZERS["fused adamw"](module.parameters()))
    return _fabric_loop(rank, fabric, net, module, optimizer, folder)


def fsdp1(rank):
    """What is found of FullyShardedDataParallel, which Lightning wraps models in on GPUs only."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def found(strategy):
        net = FullyShardedDataParallel(
            task.Network(), device_id=torch.device("cpu"), sharding_strategy=strategy
        )
        return net, rank_options({}, None, [net])

    net, options = found(ShardingStrategy.FULL_SHARD)
    group = options["process_group"]
    control = GradientControl(
        torch.optim.SGD(net.parameters(), lr=0.1), model=net, scale=None, clip=CLIP, **options
    )
    for rows in _part(rank).batches:
        control.zero_grad()
        control.backward(net(rows).mean())
        control.step()
    with FullyShardedDataParallel.summon_full_params(net):
        weights = [param.detach().clone() for param in net.parameters()]
    return {
        "ranks": dist.get_process_group_ranks(group),
        "copies": found(ShardingStrategy.NO_SHARD)[1],
        "said": rank_options({"process_group": group}, None, [net]),
        "weights": weights,
    }


def tensor_parallel(rank):
    """Two layers split over the ranks, the rest on both; all train on the whole batches."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from gradilocks.integrations.lightning import GradientControlCallback

    def configure_model(self):
        plan = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    pl = _package(rank)
    methods = {"configure_model": configure_model, "on_after_backward": _on_after_backward}
    module = module_of(pl, **methods)("sgd")  # torch's fused ones take no mixture.
    callback = GradientControlCallback(clip=CLIP, scale="dynamic")
    trainer = pl.Trainer(
        **{**QUIET, "devices": 2}, callbacks=[callback], use_distributed_sampler=False,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
    )  # fmt: skip
    trainer.fit(module, Resumable(bad=None))
    weights = _whole(module.parameters())
    return {"weights": weights, "state": callback.control.state_dict()}
