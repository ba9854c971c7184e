"""Gradients of this rank's stages enter; clipped ones, and the norm of the whole model, leave.

`clip_grad_norm_` has the signature of `torchtitan.distributed.utils.clip_grad_norm_`, which its
trainers look up there at every step, so that one line puts this in its place. torchtitan itself is
not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradilocks

__all__ = ["clip_grad_norm_"]


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
    """Shortens the gradients of `parameters` in place so that the whole model's norm is bounded.

    Every gradient is measured over the ranks of its own mesh, so dense layers and experts may lie
    on different ones, and over the stages of a pipeline. All ranks must call it, also those of a
    stage without gradients; none needs to have the same gradients as another.

    As torchtitan's, but for its faults: the norm of bf16 gradients is added in float64 and not
    in bf16, finite gradients do not overflow, and where the norm is NaN or Inf the gradients stay
    as they are, in place of all of them becoming NaN or zero.

    Args:
        parameters: a tensor or an iterable of tensors whose `.grad` is clipped: those of this
            rank's stages.
        max_norm: the bound, not negative; `math.inf` only measures.
        norm_type: the p of the norm; `math.inf` for the largest element.
        error_if_nonfinite: raise if the norm is NaN or inf; on every rank alike.
        foreach: taken for compatibility.
        pp_mesh: the mesh of the pipeline's stages, of one dimension; None without a pipeline.
        ep_enabled: whether there are experts on a mesh of their own. Then every parameter must be a
            DTensor, as torchtitan makes them: a plain one does not say which ranks hold it.

    Returns:
        The norm before clipping, whole on every rank, as a plain tensor: float32, or float64 if a
        gradient is float64.

    Example:
        >>> from torchtitan.distributed import utils as dist_utils  # doctest: +SKIP
        >>> dist_utils.clip_grad_norm_ = clip_grad_norm_  # doctest: +SKIP
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if ep_enabled:
        _refuse_plain(params)
    if pp_mesh is None:
        norm = gradilocks.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
        return _plain(norm)
    # By parameters and not by their gradients: which ranks meet must not depend on what is there.
    norm = _plain(gradilocks.clip_grad_norm_(params, math.inf, norm_type, foreach=foreach))
    norm = _over_stages(norm, pp_mesh, norm_type, error_if_nonfinite)
    gradilocks.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def _plain(norm: Tensor) -> Tensor:
    """A norm as this rank holds it; of a DTensor every rank holds all."""
    whole = getattr(norm, "full_tensor", None)
    return norm if whole is None else whole()


def _over_stages(norm: Tensor, pp_mesh: Any, order: float, error_if_nonfinite: bool) -> Tensor:
    """The norm of all stages: that of the list of their norms, on every rank in the same order."""
    if pp_mesh.ndim != 1:
        raise ValueError(
            f"pp_mesh must be the mesh of the pipeline's stages, with one dimension, got {pp_mesh}."
            " torchtitan has it as parallel_dims.get_optional_mesh('pp')."
        )
    # In float64 from all: one stage may have float64 gradients and another none at all, whose norm
    # is a 0 on the host.
    mine = norm if norm.device.type == pp_mesh.device_type else norm.to(pp_mesh.device_type)
    mine = mine.double().reshape(1)
    stages = [torch.empty_like(mine) for _ in range(pp_mesh.size())]
    dist.all_gather(stages, mine, group=pp_mesh.get_group())
    whole = gradilocks.get_total_norm([torch.cat(stages)], order, error_if_nonfinite)
    return whole.to(norm.dtype)


def _refuse_plain(params: Iterable[Tensor]) -> None:
    for place, param in enumerate(params):
        if not hasattr(param, "device_mesh"):
            raise TypeError(
                f"with ep_enabled=True every parameter must be a DTensor, and parameters[{place}] "
                f"of shape {tuple(param.shape)} is a {type(param).__name__}: nothing says which "
                "ranks hold it. Make it one with distribute_tensor, Replicate() on the mesh of "
                "those that hold the same; or use GradientControl(copies=...)."
            )
