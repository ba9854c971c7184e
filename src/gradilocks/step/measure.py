"""Measurement of gradients, for steps of a control and for other training loops."""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks import kernels
from gradilocks.checks import check_order
from gradilocks.names import Names
from gradilocks.ranks.collective import combine, first_culprits, gather_rows, handshake, reduce_powers
from gradilocks.ranks.layout import Layout, ShareFunction, is_dtensor, layout_of, reduce_partial
from gradilocks.step.decide import StepInputs, local_row
from gradilocks.step.gradients import device_indices, elements, indexed_by_device
from gradilocks.step.state import StepState


def statistics_of(tensors: Sequence[Tensor | None], *, order: float = 2.0, detail: bool = False) -> Tensor:
    """Measures gradients on any number of devices.

    Args:
        tensors: dense, real, local; None where there is no gradient. At least one is a tensor.
        order: p of the norms.
        detail: see `kernels.measure`.

    Returns:
        float64 [5, n] on the device of the first tensor, one row for each of `kernels.STATISTICS`; zeros for None.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) == len(tensors) and len({tensor.device for tensor in present}) == 1:
        return kernels.measure(present, order=order, detail=detail)
    target = present[0].device
    statistics = torch.zeros(len(kernels.STATISTICS), len(tensors), dtype=torch.float64, device=target)
    for on_device, indices in indexed_by_device(tensors):
        part = kernels.measure(on_device, order=order, detail=detail)
        statistics.index_copy_(1, device_indices(indices, target), part.to(target))
    return statistics


@dataclass(frozen=True)
class Measurement:
    """Norms of gradients over all ranks. The tensors are on the device of the gradients."""

    norm: Tensor
    """0-d: global norm; NaN or inf if a gradient on any rank is not finite."""
    norms: Mapping[str, Tensor]
    """0-d, by name: norm of each parameter's gradient over the ranks that hold a part of it; parameters without a
    gradient on this rank are missing. The norms cover only this rank's part if `share=` is given and ranks list
    different parameters, or if a parameter is spread along a `distinct=` dimension."""
    _find_culprits: Callable[[], tuple[str, ...]]

    @property
    def culprits(self) -> tuple[str, ...]:
        """Names of parameters with NaN or Inf: all on this rank, the first on each other rank. Waits for the device."""
        return self._find_culprits()


@torch.no_grad()
def measure(
    params: nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    *,
    grad: Callable[[Tensor], Tensor | None] | None = None,
    order: float = 2.0,
    mesh: Any = None,
    distinct: str | Iterable[str] = (),
    share: ShareFunction | None = None,
) -> Measurement:
    """Measures gradients without stepping, for training loops that you cannot change.

    With several ranks this is a collective that all of them must call. The first call with a list of parameters also
    compares the lists over ranks, so all ranks must change theirs at the same call. Does not wait for the device.

    Args:
        params: a module, a parameter, parameters, or pairs of name and parameter. Duplicates count once.
        grad: returns the gradient of a parameter; by default `param.grad`. Megatron: `lambda p: p.main_grad`.
        order: p of the norms, from 1 to 8, or inf.
        mesh, distinct, share: the ranks; as for GradientControl.

    Examples:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> measurement = measure(layer)
        >>> measurement.norm.item(), measurement.culprits
        (5.0, ())
    """
    check_order(order)
    names, tensors, models = _names_and_tensors(params)
    if not tensors:
        raise ValueError("measure() was given no parameters that require grad.")
    read = grad or attrgetter("grad")
    layout, by_rank = _layout_and_names(tensors, names, models, mesh, distinct, share)
    grads: list[Tensor | None] = [read(param) for param in tensors]
    for i, (value, param) in enumerate(zip(grads, tensors, strict=True)):
        if value is not None:  # The share of a DTensor follows from the placements of its parameter.
            grads[i] = elements(reduce_partial(value, param) if is_dtensor(value) else value)
    if any(gradient is not None for gradient in grads):
        statistics = statistics_of(grads, order=order)
    elif layout is None:
        raise ValueError(f"none of the {len(names)} parameters has a gradient; call measure() after backward().")
    else:  # The other ranks wait for this one, so it contributes zeros.
        statistics = torch.zeros(len(kernels.STATISTICS), len(names), dtype=torch.float64, device=layout.device)
    state = StepState(None)
    state.to(statistics.device)
    row = local_row(statistics, order, layout, state, StepInputs())
    norms = statistics[0]
    if layout is not None and layout.has_tensor_norms and (len(by_rank) == 1 or layout.distinct_groups):
        powers = norms if order == math.inf else norms**order * layout.weights(norms)
        norms = reduce_powers(powers, layout, order, over="spmd")
        norms = norms if order == math.inf else norms ** (1.0 / order)
    rows = row.unsqueeze(0) if layout is None else gather_rows(row, layout)
    total, nonfinite, _ = combine(rows, order)
    bad = statistics[3] + statistics[4]
    total = torch.where(nonfinite > 0, torch.where(statistics[3].sum() > 0, math.nan, math.inf), total)

    def find_culprits() -> tuple[str, ...]:
        culprits = [name for name, count in zip(names, bad.tolist(), strict=True) if count]
        return tuple(dict.fromkeys([*culprits, *first_culprits(rows, by_rank)]))

    present = {
        name: norm for name, norm, gradient in zip(names, norms.unbind(), grads, strict=True) if gradient is not None
    }
    return Measurement(total, present, find_culprits)


_layouts: dict[Any, tuple[list[weakref.ref[Tensor]], Layout | None, tuple[Sequence[str], ...]]] = {}
"""Cache of layouts. Finding one may search all objects of the process (0.1 s) and exchanges names between ranks."""
# A gloo process group that is still referenced when the interpreter ends aborted the process in 1 of 5 runs.
atexit.register(_layouts.clear)


def _layout_and_names(
    params: Sequence[Tensor], names: Sequence[str], models: Iterable[nn.Module], mesh: Any, distinct: Any, share: Any
) -> tuple[Layout | None, tuple[Sequence[str], ...]]:
    """Returns the layout, and the names on every rank, or one list if all are equal."""
    distributed = torch.distributed
    world = distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None
    distinct = (distinct,) if isinstance(distinct, str) else tuple(distinct)
    shares = None if share is None else tuple(map(share, names, params))
    # Python reuses ids, so the parameters are compared below. Either all ranks find their entry or none does.
    key = (world, mesh, distinct, shares, tuple(names), *map(id, params))
    if key in _layouts and all(reference() is param for reference, param in zip(_layouts[key][0], params, strict=True)):
        return _layouts[key][1:]
    layout = layout_of(params, names, mesh=mesh, distinct=distinct, share=share, models=models)
    by_rank = (names,) if layout is None else handshake(layout, {}, names)
    # Live entries stay: a rank that has lost one would wait for the others to compare names.
    for old in [old for old, (references, *_) in _layouts.items() if any(ref() is None for ref in references)]:
        del _layouts[old]
    _layouts[key] = [weakref.ref(param) for param in params], layout, by_rank
    return layout, by_rank


def _names_and_tensors(params: Any) -> tuple[list[str], list[Tensor], tuple[nn.Module, ...]]:
    if isinstance(params, nn.Module):
        tensors: list[Tensor] = [param for param in params.parameters() if param.requires_grad]
        return Names(params, ()).of(tensors), tensors, (params,)
    items = [params] if isinstance(params, Tensor) else list(params)
    pairs = [item if isinstance(item, tuple) else (f"parameter {i}", item) for i, item in enumerate(items)]
    if not all(len(pair) == 2 and isinstance(pair[1], Tensor) for pair in pairs):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise TypeError(f"measure() takes a module, parameters or (name, parameter) pairs, got items of type {kinds}.")
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in pairs:
        unique.setdefault(id(tensor), (name, tensor))
    names = [name for name, _ in unique.values()]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two parameters have the name {name!r}. Add a prefix: named_parameters(prefix='encoder').")
    return names, [tensor for _, tensor in unique.values()], ()
