"""Parameters in, their names out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["Names"]


class Names:
    """Parameters' names: as the model names them, else as the optimizer does, else their place."""

    def __init__(
        self, model: nn.Module | Mapping[str, nn.Module] | None, optimizers: Sequence[Any]
    ) -> None:
        if not (model is None or isinstance(model, (nn.Module, Mapping))):
            raise TypeError(
                "model must be a torch.nn.Module, or a mapping from a prefix to one, got "
                f"{type(model).__name__}."
            )
        if isinstance(model, Mapping):
            for prefix, module in model.items():
                if not all((isinstance(prefix, str), isinstance(module, nn.Module))):
                    raise TypeError(
                        "a model mapping goes from a prefix (str) to a torch.nn.Module, got "
                        f"{type(prefix).__name__} to {type(module).__name__}."
                    )
        self._model = model
        self._optimizers = optimizers

    def of_optimizers(self, optimizers: Sequence[Any]) -> Names:
        """The same model's names, for the parameters of other optimizers."""
        return Names(self._model, optimizers)

    @property
    def optimizers(self) -> Sequence[Any]:
        """Whose parameters are named."""
        return self._optimizers

    @property
    def has_model(self) -> bool:
        """Whether a model names the parameters."""
        return self._model is not None

    def groups(self) -> list[tuple[int, str | None]]:
        """For each parameter the number of its group, counted over all optimizers, and its name."""
        every = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [(g, group.get("name")) for g, group in enumerate(every) for _ in group["params"]]

    def every(self) -> list[str]:
        """The names of all parameters of the model; none without a model."""
        return [name for name, _ in self._named_parameters()]

    def knows_all(self, params: Iterable[Tensor]) -> bool:
        """Whether all of `params` are the model's."""
        mine = {id(param) for _, param in self._named_parameters()}
        return all(id(param) in mine for param in params)

    def knows_any(self, params: Iterable[Tensor]) -> bool:
        """Whether one of `params` is the model's."""
        mine = {id(param) for _, param in self._named_parameters()}
        return any(id(param) in mine for param in params)

    def __call__(self, param: Tensor) -> str:
        return self.of([param])[0]

    def of(self, params: Iterable[Tensor]) -> list[str]:
        """The names of `params`, looked up now, so that replaced parameters are found too."""
        known = self._in_optimizers()
        known.update((id(param), name) for name, param in self._named_parameters())
        return [known.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in params]

    def in_backward_order(self, params: Sequence[Tensor | None]) -> list[tuple[int, str]]:
        """The places of `params` with their names, last gradient of the forward pass first.

        The model's own order, reversed; without a model, the optimizers' order, reversed. A
        parameter that is gone (None) has no name and is left out.
        """
        order = {id(param): place for place, (_, param) in enumerate(self._named_parameters())}
        living = [(i, param) for i, param in enumerate(params) if param is not None]
        living.sort(key=lambda pair: (order.get(id(pair[1]), -1), pair[0]), reverse=True)
        names = self.of(param for _, param in living)
        return [(place, name) for (place, _), name in zip(living, names, strict=True)]

    def _in_optimizers(self) -> dict[int, str]:
        """By parameter: the name that its optimizer was given, or else its place there."""
        known: dict[int, str] = {}
        taken: set[str] = set()
        for number, optimizer in enumerate(self._optimizers):
            prefix = f"optimizers[{number}]." if len(self._optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                given = group.get("param_names")
                for k, param in enumerate(group["params"]):
                    name = given[k] if given else f"{prefix}param_groups[{g}]['params'][{k}]"
                    if name in taken:  # Two optimizers whose models name their parts alike.
                        name = f"{prefix}{name}"
                    taken.add(name)
                    known[id(param)] = name
        return known

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        if isinstance(self._model, nn.Module):
            yield from self._model.named_parameters()
        elif self._model is not None:
            for prefix, module in self._model.items():
                yield from module.named_parameters(prefix=prefix)
