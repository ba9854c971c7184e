"""What a forward pass shows: how large each module's output is, and which module takes it up.

The first, because a format can be too narrow for the outputs as well, and no loss scale helps
there. The second, because the gradient of an output is computed by whoever took the output: to
keep that gradient out of a format, both have to be kept out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradilocks.lab.tensors import measurable, tensors_in

__all__ = ["Flow"]

_MARK = "gradilocks.module"  # In the metadata of the node of the graph that made an output.
_FAR = 64  # Nodes that are looked at, at most, between a module's input and another's output.
_LARGEST = torch.finfo(torch.float32).max


class Flow:
    """Told of the modules that compute, as they are called.

    Attributes:
        called: the modules, by their id.
        takers: by the id of a module, those of the modules that took what it returned: the very
            tensor, or else, if functions came between, what the first of them got of it.
    """

    def __init__(self) -> None:
        self.called: dict[int, weakref.ref[nn.Module]] = {}
        self.takers: dict[int, dict[int, None]] = {}
        self._sizes: dict[int, dict[torch.device, Tensor]] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], set[int]]] = {}

    def entering(self, module: nn.Module, given: Any) -> None:
        """A module was called with these."""
        who = self._key(module)
        for tensor in _tensors(given):
            makers = self._makers(tensor)
            if makers:
                for maker in makers:
                    self.takers.setdefault(maker, {})[who] = None
                continue
            for maker in _behind(tensor.grad_fn):
                if maker in self.called:
                    self.takers.setdefault(maker, {who: None})

    def leaving(self, module: nn.Module, given: Any, output: Any) -> None:
        """A module has returned."""
        who = self._key(module)
        before = {id(tensor) for tensor in _tensors(given)}
        for tensor in _tensors(output):
            self._measure(who, tensor)
            # A tensor that was changed in place comes from here alone; one that an inner module
            # returned to this one comes from both.
            makers = set() if id(tensor) in before else self._makers(tensor)
            self._remember(tensor, makers | {who})

    def largest(self) -> dict[int, tuple[float, int]]:
        """By module, the largest finite magnitude of its outputs, and how many were not finite."""
        found: dict[int, tuple[float, int]] = {}
        for device in {device for sizes in self._sizes.values() for device in sizes}:
            keys = [key for key, sizes in self._sizes.items() if device in sizes]
            rows = torch.stack([self._sizes[key][device] for key in keys]).tolist()
            for key, (most, bad) in zip(keys, rows, strict=True):
                other = found.get(key, (0.0, 0))
                found[key] = max(most, other[0]), int(bad) + other[1]
        return found

    def _key(self, module: nn.Module) -> int:
        known = self.called.get(id(module))
        if known is None or known() is not module:
            self.called[id(module)] = weakref.ref(module)
            self.takers.pop(id(module), None)
            self._sizes.pop(id(module), None)
        return id(module)

    def _makers(self, tensor: Tensor) -> set[int]:
        ref, makers = self._made.get(id(tensor), (None, set()))
        return makers if ref is not None and ref() is tensor else set()

    def _remember(self, tensor: Tensor, makers: set[int]) -> None:
        key, made = id(tensor), self._made
        made[key] = weakref.ref(tensor, lambda _: made.pop(key, None)), makers
        if tensor.grad_fn is not None:
            cast("Any", tensor.grad_fn).metadata[_MARK] = makers

    @torch.no_grad()
    def _measure(self, who: int, tensor: Tensor) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return  # Under vmap a tensor stands for many, and cannot be read.
        values = measurable(tensor.detach())
        if values is None or not values.numel() or not tensor.dim():
            return  # A single number is a loss, which is kept in float32.
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        home = values.device
        sizes = self._sizes.setdefault(who, {})
        if home not in sizes:
            sizes[home] = torch.zeros(2, dtype=torch.float32, device=home)
        row = sizes[home]
        least, most = torch.aminmax(values)
        if home.type == "cpu" and least.isfinite() and most.isfinite():  # One pass is enough.
            row[0] = max(float(row[0]), min(max(-float(least), float(most)), _LARGEST))
            return
        finite = values.isfinite()
        size = torch.where(finite, values, 0.0).abs().amax()
        size = size.clamp(max=_LARGEST) if size.dtype is torch.float64 else size
        row[0] = torch.maximum(row[0], size.float())
        row[1] += (~finite).sum()


def _tensors(things: Any) -> Iterator[Tensor]:
    yield from {id(tensor): tensor for _, tensor in tensors_in(things, "")}.values()


def _behind(node: Any) -> Iterable[int]:
    """The modules whose outputs a tensor was made of by functions alone."""
    waiting: list[Any] = [node]
    seen: set[Any] = set()
    found: dict[int, None] = {}
    while waiting and len(seen) < _FAR:
        one = waiting.pop(0)
        if one is None or one in seen:
            continue
        seen.add(one)
        makers = getattr(one, "metadata", {}).get(_MARK)
        if makers:
            found.update(dict.fromkeys(makers))
        else:
            waiting += [before for before, _ in one.next_functions]
    return found
