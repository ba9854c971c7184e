"""Parameter names: from the model, else from the optimizer, else by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

WRAPPER_ATTRIBUTES = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module")
)
"""Attributes under which torch.compile, FSDP, activation checkpointing and Fabric hold the wrapped module."""


def named_parameters(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields `model.named_parameters()` without the parts that wrappers such as DDP or torch.compile add to names."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    for path, param in model.named_parameters():
        parts = [part for part in path.split(".") if part not in WRAPPER_ATTRIBUTES]
        yield ".".join([prefix, *parts] if prefix else parts), param


class Names:
    """Names of the parameters of one or more optimizers, looked up on demand.

    Args:
        model: the module, or a mapping from prefixes to modules, that names the parameters; None for no model.
        optimizers: the optimizers. Their parameter groups name the parameters that the model does not.
    """

    def __init__(self, model: nn.Module | Mapping[str, nn.Module] | None, optimizers: Sequence[Any]) -> None:
        models: Mapping[Any, Any] = model if isinstance(model, Mapping) else {"": model}
        for prefix, module in models.items():
            if not isinstance(prefix, str) or not (module is None or isinstance(module, nn.Module)):
                raise TypeError(
                    "model must be a torch.nn.Module or a mapping from a prefix (str) to one, "
                    f"got {type(model).__name__} with {type(prefix).__name__}: {type(module).__name__}."
                )
        self._models = {prefix: module for prefix, module in models.items() if module is not None}
        self._optimizers = optimizers
        self._names: dict[int, str] = {}

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The modules that name the parameters."""
        return tuple(self._models.values())

    def of(self, params: Sequence[Tensor]) -> list[str]:
        """The name of each parameter."""
        if any(id(param) not in self._names for param in params):
            names = self._by_position()
            names.update((id(param), name) for name, param in self._in_models())
            # The first names are kept: while FSDP2 is unsharded, the parameters of the model are not the optimizer's.
            self._names = {**names, **self._names}
        return [self._names.get(id(param), f"a parameter of shape {tuple(param.shape)}") for param in params]

    def backward_order(self, params: Sequence[Tensor]) -> list[int]:
        """Indices of `params` in backward order: the reverse of their order in the model, or else in the optimizers."""
        position = {id(param): i for i, (_, param) in enumerate(self._in_models())}
        return sorted(range(len(params)), key=lambda i: (position.get(id(params[i]), -1), i), reverse=True)

    def groups(self, params: Sequence[Tensor]) -> list[tuple[int, str | None]]:
        """For each parameter: the index of its param group, counted over all optimizers, and the group's name."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        found = {id(param): (i, group.get("name")) for i, group in enumerate(groups) for param in group["params"]}
        return [found[id(param)] for param in params]

    def _in_models(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, model in self._models.items():
            yield from named_parameters(model, prefix)

    def _by_position(self) -> dict[int, str]:
        names: dict[int, str] = {}
        used: set[str] = set()
        for number, optimizer in enumerate(self._optimizers):
            prefix = f"optimizers[{number}]." if len(self._optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                group_names = group.get("param_names")
                for i, param in enumerate(group["params"]):
                    # Two optimizers may use the same name; checkpoints need unique names.
                    is_unique = group_names and group_names[i] not in used
                    names[id(param)] = group_names[i] if is_unique else f"{prefix}param_groups[{g}]['params'][{i}]"
                    used.add(names[id(param)])
        return names
