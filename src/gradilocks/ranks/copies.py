"""Ready rules for `GradientControl(copies=)`: how Megatron-LM and DeepSpeed mark their parameters.

Both hold parts of a model as plain tensors and say by attributes which of them are copies. Each
rule lets the first rank of a group count what the whole group holds. A DTensor says by its mesh who
holds it; of one only its being tied to another stage's is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradilocks.ranks.layout import is_distributed

__all__ = ["deepspeed_copies", "megatron_copies"]


def megatron_copies(
    *, tensor_group: Any = None, expert_group: Any = None
) -> Callable[[str, Tensor], int | None]:
    """Who counts what in a model of Megatron-Core, for `GradientControl(copies=)`.

    A parameter that is `shared` is the second copy of tied embeddings and counts on its first stage
    alone. One that is not `tensor_model_parallel` is the same on all ranks of the tensor-parallel
    group. One whose `allreduce` is False is an expert of its own on every rank of the
    expert-parallel group, where all others are copies.

    Args:
        tensor_group: `parallel_state.get_tensor_model_parallel_group()`; None if there is none.
        expert_group: `parallel_state.get_expert_model_parallel_group()`; None if there is none.

    Example:
        >>> rule = megatron_copies(tensor_group=parallel_state.get_tensor_model_parallel_group())
        >>> group = parallel_state.get_model_parallel_group()
        >>> control = GradientControl(optimizer, process_group=group, copies=rule)
    """
    first_of_tensor, first_of_experts = _is_first(tensor_group), _is_first(expert_group)

    def rule(name: str, param: Tensor) -> int | None:
        counts = not getattr(param, "shared", False)
        if is_distributed(param):
            return None if counts else 0
        if not getattr(param, "tensor_model_parallel", False):
            counts = counts and first_of_tensor
        if getattr(param, "allreduce", True):
            counts = counts and first_of_experts
        return 1 if counts else 0

    return rule


def deepspeed_copies(
    *, pipe_group: Any = None, tensor_group: Any = None
) -> Callable[[str, Tensor], int | None]:
    """Who counts what in a pipeline of DeepSpeed, for `GradientControl(copies=)`.

    A parameter with `ds_pipe_replicated` is held by several stages and counts on the first. One
    that is neither `model_parallel` nor `tensor_model_parallel` is the same on all ranks of the
    tensor-parallel group.

    Args:
        pipe_group: the ranks of one pipeline, `grid.get_pipe_parallel_group()`; None if there is
            none.
        tensor_group: the tensor-parallel ranks, `grid.get_slice_parallel_group()`; None if there
            are none.
    """
    first_of_pipe, first_of_tensor = _is_first(pipe_group), _is_first(tensor_group)

    def rule(name: str, param: Tensor) -> int | None:
        counts = first_of_pipe or not getattr(param, "ds_pipe_replicated", False)
        if is_distributed(param):
            return None if counts else 0
        spread = getattr(param, "model_parallel", getattr(param, "tensor_model_parallel", False))
        return 1 if counts and (spread or first_of_tensor) else 0

    return rule


def _is_first(group: Any) -> bool:
    """Whether this rank is the first of a group; of none, every rank is."""
    if group is None:
        return True
    import torch.distributed as dist

    return dist.get_rank(group) == 0
