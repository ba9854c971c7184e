"""Names of parameters: as the model has them, else as the optimizer has them, else by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["Names", "named_parameters"]

_WRAPPER_ATTRIBUTES = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module")
)
"""Attributes under which torch.compile, FSDP, activation checkpointing and Fabric hold the wrapped module."""


def named_parameters(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """`model.named_parameters()` without the parts that wrappers such as DDP or torch.compile add to names."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    for path, param in model.named_parameters():
        parts = [part for part in path.split(".") if part not in _WRAPPER_ATTRIBUTES]
        yield ".".join([prefix, *parts] if prefix else parts), param


class Names:
    """The names of the parameters of some optimizers, looked up on demand.

    Args:
        model: the module, or a mapping from a prefix to a module, that names the parameters; None for none.
        optimizers: their parameters are named.
    """

    def __init__(self, model: nn.Module | Mapping[str, nn.Module] | None, optimizers: Sequence[Any]) -> None:
        models = model if isinstance(model, Mapping) else {"": model}
        for prefix, module in models.items():
            if not isinstance(prefix, str) or not (module is None or isinstance(module, nn.Module)):
                raise TypeError(
                    "model must be a torch.nn.Module or a mapping from a prefix (str) to one, "
                    f"got {type(model).__name__} with {type(prefix).__name__}: {type(module).__name__}."
                )
        self._models = {prefix: module for prefix, module in models.items() if module is not None}
        self._optimizers = optimizers

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The modules that name the parameters."""
        return tuple(self._models.values())

    def of(self, params: Sequence[Tensor]) -> list[str]:
        """The name of each parameter."""
        names = self._by_position()
        names.update((id(param), name) for name, param in self._in_models())
        return [names.get(id(param), f"a parameter of shape {tuple(param.shape)}") for param in params]

    def backward_order(self, params: Sequence[Tensor]) -> list[int]:
        """Indices of `params`, last in the forward pass first: the reverse of the model's (or optimizers') order."""
        position = {id(param): i for i, (_, param) in enumerate(self._in_models())}
        return sorted(range(len(params)), key=lambda i: (position.get(id(params[i]), -1), i), reverse=True)

    def groups(self) -> list[tuple[int, str | None]]:
        """For each parameter of the optimizers: the number of its param group, over all optimizers, and its name."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [(number, group.get("name")) for number, group in enumerate(groups) for _ in group["params"]]

    def _in_models(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, model in self._models.items():
            yield from named_parameters(model, prefix)

    def _by_position(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for number, optimizer in enumerate(self._optimizers):
            prefix = f"optimizers[{number}]." if len(self._optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                given = group.get("param_names")
                for i, param in enumerate(group["params"]):
                    names[id(param)] = given[i] if given else f"{prefix}param_groups[{g}]['params'][{i}]"
        return names
