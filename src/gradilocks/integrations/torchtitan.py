"""torchtitan: its clip function with float64 norms, and a GradientControl inside its Trainer."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradilocks.control import GradientControl
from gradilocks.dropin import clip_functions
from gradilocks.ranks.collective import gather_flat
from gradilocks.ranks.layout import is_dtensor
from gradilocks.step.gradients import parameters as find_parameters

__all__ = ["clip_grad_norm_", "control_for"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: Any = None,
    ep_enabled: bool = False,
) -> Tensor:
    """Replacement for `torchtitan.distributed.utils.clip_grad_norm_`: clips by the norm of the whole model.

    Norms are accumulated in float64, and NaN or Inf leaves the gradients unchanged. All ranks must call it.

    Args:
        parameters, max_norm, norm_type, error_if_nonfinite, foreach: as in `gradilocks.clip_grad_norm_`.
        pp_mesh: 1-d mesh of the pipeline stages; None without a pipeline.
        ep_enabled: True if experts have a mesh of their own. Every parameter must then be a DTensor.

    Returns:
        The norm before clipping, the same on every rank, as a plain tensor.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    plain = [param for param in params if param.grad is not None and not is_dtensor(param)]
    if ep_enabled and plain:
        shape = tuple(plain[0].shape)
        raise TypeError(f"with ep_enabled=True every parameter must be a DTensor; one of shape {shape} is plain.")
    norm: Any = clip_functions.clip_grad_norm_(params, math.inf, norm_type)
    norm = norm.full_tensor() if is_dtensor(norm) else norm
    stages = norm.double().reshape(1)
    if pp_mesh is not None:
        stages = gather_flat(stages.to(pp_mesh.device_type), pp_mesh.get_group())
    total = clip_functions.get_total_norm([stages], norm_type, error_if_nonfinite).to(norm.dtype)
    clip_functions.clip_grads_with_norm_(params, max_norm, total)
    return total


def control_for(trainer: Any, *, clip: object = None, **options: Any) -> GradientControl:
    """Creates a GradientControl that steps the optimizers of a torchtitan Trainer. Call it before `trainer.train()`.

    - `trainer.optimizers.step()` clips, and skips steps with NaN or Inf and those that the clip policy rejects, without
      waiting for the device if the optimizers are fused, which is torchtitan's default.
    - `trainer.lr_schedulers.step()` does not advance for skipped steps.
    - `dist_utils.clip_grad_norm_` returns the norm without clipping for parameters of this trainer.
    - Checkpoints contain the state of the control as "gradilocks".

    Args:
        trainer: a `torchtitan.trainer.Trainer`.
        clip: a number or a clip policy; by default `config.training.max_norm`.
        options: further arguments of GradientControl.
    """
    from torchtitan.distributed import utils as dist_utils

    optimizers, schedulers = trainer.optimizers, trainer.lr_schedulers
    if "step" in vars(optimizers):
        raise ValueError("this trainer already has a control. Call control_for() once per trainer.")
    options = {"clip": trainer.config.training.max_norm if clip is None else clip, **_ranks(trainer), **options}
    control = GradientControl(*optimizers, scale=None, **options)
    ids = set(map(id, find_parameters(optimizers)))
    wrapped_schedulers = [control.scheduler(scheduler) for scheduler in schedulers]
    original_clip, original_state_dict = dist_utils.clip_grad_norm_, schedulers.state_dict

    def clip_or_measure(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if ids.isdisjoint(map(id, params)):
            return original_clip(params, *args, **kwargs)  # type: ignore[no-any-return]
        return control.norm()

    def step(self: Any, closure: None = None) -> None:
        control.step()

    def advance() -> None:
        for scheduler in wrapped_schedulers:
            scheduler.step()

    def state_dict() -> dict[str, Any]:
        # On a GPU the skip flags arrive a few steps late; until then the schedule is ahead.
        ahead = wrapped_schedulers[0].state_dict().get("gradilocks_debt", 0)
        return {"last_epoch": original_state_dict()["last_epoch"] - ahead}

    # The methods are replaced on the objects, because the trainer's checkpointer holds references to them.
    optimizers.step = types.MethodType(torch.optim.Optimizer.profile_hook_step(step), optimizers)
    schedulers.step, schedulers.state_dict = advance, state_dict
    dist_utils.clip_grad_norm_ = clip_or_measure
    if trainer.checkpointer.enable:
        trainer.checkpointer.states["gradilocks"] = control
    return control


def _ranks(trainer: Any) -> dict[str, Any]:
    """The arguments of GradientControl that describe the ranks of a trainer."""
    dims = trainer.parallel_dims
    if dims.pp > 1:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (dims.pp, dims.world_size // dims.pp)  # Stages are the outermost dimension of torchtitan's meshes.
        mesh = init_device_mesh(trainer.device.type, sizes, mesh_dim_names=("pp", "stage"))
        return {"mesh": mesh, "distinct": "pp"}
    return {"mesh": torch.distributed.group.WORLD} if torch.distributed.is_initialized() else {}
