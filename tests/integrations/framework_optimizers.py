"""Optimizers as frameworks hand them out: in the wrappers of Lightning, Accelerate and others.

`WRAPPERS` has them by name, one around the other too; `in_a_container` is like torchtitan's, which
is not installed here.
"""

from __future__ import annotations

import sys
import types

import accelerate
import lightning
import torch.distributed as dist

from tests.integrations.accelerate_on_cpu import forget


class Manual(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def in_lightning(inner, module=None, **settings):
    """As `self.optimizers()` hands it out in a LightningModule."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    module = Manual() if module is None else module
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    module.trainer = trainer
    wrapper = LightningOptimizer._to_lightning_optimizer(inner, trainer.strategy)
    wrapper.keeps = module, trainer  # The wrapper has its strategy by a weak reference.
    return wrapper


def in_fabric(inner, **settings):
    return lightning.Fabric(accelerator="cpu", devices=1, **settings).setup_optimizers(inner)


def in_accelerate(inner, scaler=None):
    forget()
    accelerate.Accelerator(cpu=True)
    from accelerate.optimizer import AcceleratedOptimizer

    return AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)


def in_zero(inner):
    """torch's, which makes the optimizer by itself."""
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    params = [param for group in inner.param_groups for param in group["params"]]
    kept = {
        key: inner.defaults[key] for key in ("lr", "momentum", "fused") if key in inner.defaults
    }
    return ZeroRedundancyOptimizer(params, optimizer_class=type(inner), **kept)


WRAPPERS = {
    "lightning": in_lightning,
    "fabric": in_fabric,
    "accelerate": in_accelerate,
    "zero": in_zero,
    "accelerate around zero": lambda inner: in_accelerate(in_zero(inner)),
    "fabric around accelerate": lambda inner: in_fabric(in_accelerate(inner)),
}


def around_zero(wrap):
    return wrap in (WRAPPERS["zero"], WRAPPERS["accelerate around zero"])


def no_group_is_left():
    """Ends what `in_zero` has begun."""
    if dist.is_initialized():
        dist.destroy_process_group()


def module_called(name, source, monkeypatch):
    """A module of that name, as if its framework were there."""
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(source, vars(module))
    return module


def in_a_container(optimizers, monkeypatch):
    """As torchtitan holds them."""
    titan = module_called("torchtitan.components.optimizer", _CONTAINER, monkeypatch)
    return titan.OptimizersContainer(optimizers)


_CONTAINER = """
from torch.optim import Optimizer

class OptimizersContainer(Optimizer):
    def __init__(self, optimizers):
        self.optimizers = optimizers
        every = [p for each in optimizers for g in each.param_groups for p in g["params"]]
        Optimizer.__init__(self, every, {"lr": 0.1})

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)
"""
