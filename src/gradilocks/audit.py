"""Histograms of a model's gradients, and the share of them that each number format would lose.

Gradients of parameters and of module outputs are counted by exponent. A format holds the gradients if one loss scale
keeps the underflow of every module below a threshold and avoids overflow. Zero gradients do not count as underflow:
ReLU, dropout and masks cause them in every format. Rounding of the mantissa is not examined.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.emulate import emulated_format, run_eagerly
from gradilocks.errors import GradilocksError, NoGradients
from gradilocks.formats import FORMATS, Format
from gradilocks.torch_private import is_fsdp1_shard, version_of
from gradilocks.trace import tensors_in
from gradilocks.view.text import align, clean, count, number, percent, scale_text, some_of

__all__ = ["Audit", "FormatResult", "Histogram", "ModuleGradients", "audit"]

_EXAMINED = ("fp16", "bf16", "fp8_e5m2", "fp8_e4m3")
HEADROOM = 4
"""Doublings left between the largest scaled gradient and the largest number of a format: a few batches do not show the
largest gradient of a run."""
MAX_LOST_SUM = 0.01
"""Share of the sum of a module's gradient magnitudes that a format may lose. (Character GPT in emulated fp16,
150 steps: with 0.03% lost the final loss is that of float32; with 4% it is 0.4% higher, with 25% 2%, with 70% 26%.)"""
MAX_LOST_PARAMETERS = 0.05
"""Share of the non-zero gradients of a module's parameters that a format may round to zero."""
MIN_SCALE, MAX_SCALE = 2.0**-24, 2.0**32
"""The range of a `DynamicScale`."""

_NONFINITE, _LARGEST, _CELLS = 2048, 2049, 2050
"""Cells of a row of counts: 0: zeros; 1 to 2047: exponents; 2048: NaN and Inf; 2049: bits of the largest magnitude."""
_INF_BITS = 0x7FF << 52
_CHUNK = 1 << 22
"""Values counted at a time; each takes about 30 bytes of memory."""


@dataclass(frozen=True)
class Histogram:
    """Counts of magnitudes by exponent."""

    bins: dict[int, int]
    """e -> number of values with 2^(e-1) < |value| <= 2^e."""
    zeros: int
    nonfinite: int
    largest: float
    """Largest finite magnitude; 0 without values."""

    @property
    def values(self) -> int:
        """Number of values that are finite and not zero."""
        return sum(self.bins.values())

    def underflow(self, format: Format, scale: float) -> float:
        """Share of the values that become zero in a format; `scale` is a power of two."""
        return self._share(format, scale, lambda exponent: 1.0)

    def lost_sum(self, format: Format, scale: float) -> float:
        """Share of the sum of magnitudes that becomes zero, where a value of bin e counts as 0.75 · 2^e."""
        top = max(self.bins, default=0)
        return self._share(format, scale, lambda exponent: 2.0 ** max(exponent - top, -1000))

    def _share(self, format: Format, scale: float, weight: Callable[[int], float]) -> float:
        # A magnitude of exactly half the smallest subnormal number becomes zero: ties go to even.
        limit = math.log2(format.smallest_subnormal / 2) - math.log2(scale)
        total = sum(amount * weight(exponent) for exponent, amount in self.bins.items())
        lost = sum(amount * weight(exponent) for exponent, amount in self.bins.items() if exponent <= limit)
        return lost / total if total else 0.0


@dataclass(frozen=True)
class ModuleGradients:
    """Gradient counts of one module."""

    name: str
    kind: str
    """Class of the module."""
    parameters: Histogram
    """Gradients of the module's own parameters."""
    outputs: Histogram
    """Gradients of the module's outputs."""
    largest_output: float
    """Largest finite magnitude of an output in the forward pass, which no loss scale changes."""

    @property
    def largest(self) -> float:
        """Largest finite gradient."""
        return max(self.parameters.largest, self.outputs.largest)

    @property
    def nonfinite(self) -> int:
        """Number of gradients that are NaN or Inf."""
        return self.parameters.nonfinite + self.outputs.nonfinite


@dataclass(frozen=True)
class FormatResult:
    """Loss scale and underflow of the gradients in one format."""

    format: Format
    scale: float
    """Largest power of two from 2^-24 to 2^32 that leaves HEADROOM doublings; 1 for formats with float32's range."""
    underflow: float
    """Share of all non-zero gradients that become zero at `scale`."""
    underflow_unscaled: float
    """The same without a scale."""
    failures: dict[str, str]
    """Module -> reason why the format does not hold its gradients or outputs."""

    @property
    def holds(self) -> bool:
        """True if every module can be trained in the format with this scale."""
        return not self.failures


@dataclass(frozen=True)
class Audit:
    """Gradient counts of each module and a result for each format. `print(audit)` shows both."""

    batches: int
    modules: tuple[ModuleGradients, ...]
    formats: tuple[FormatResult, ...]
    label: str = ""

    @property
    def recommended(self) -> FormatResult | None:
        """fp16 or else bf16, if it holds the gradients; None to train in float32, or if gradients are zero or NaN."""
        if any(m.nonfinite for m in self.modules) or not any(m.largest for m in self.modules):
            return None
        by_name = {result.format.name: result for result in self.formats if result.holds}
        return by_name.get("fp16", by_name.get("bf16"))

    def conclusion(self) -> str:
        """The recommendation in one or two sentences."""
        nonfinite = [module.name for module in self.modules if module.nonfinite]
        if nonfinite:
            return f"No recommendation: gradients contain NaN or Inf in {some_of(nonfinite)}. Find the cause first."
        if not any(module.largest for module in self.modules):
            return "No recommendation: all gradients are zero."
        results = {result.format.name: result for result in self.formats}
        best = self.recommended
        if best is None:
            return f"Train in fp32: the gradients do not fit {' or '.join(results)}."
        if best.format.name == "fp16":
            return (
                f"fp16 holds the gradients with a loss scale of {scale_text(best.scale)}. bf16 needs no loss scale, "
                "but has 8 significant bits where fp16 has 11."
            )
        (name, reason), *others = results["fp16"].failures.items()
        more = f" ({count(len(others), 'more module')})" if others else ""
        return f"Train in bf16, without a loss scale. fp16 does not hold {clean(name)}: {reason}{more}."

    def to_text(self) -> str:
        """The conclusion, a table of the formats and a table of the modules."""
        formats = [("format", "scale", "underflow, no scale", "underflow", "holds")]
        for result in self.formats:
            shares = percent(result.underflow_unscaled), percent(result.underflow)
            holds = f"no, not in {some_of(list(result.failures))}" if result.failures else "yes"
            formats.append((result.format.name, scale_text(result.scale), *shares, holds))
        modules = [("module", "type", "gradients", "zeros", "smallest", "largest", "largest output")]
        for module in self.modules:
            found = (module.parameters, module.outputs)
            values, zeros = sum(h.values for h in found), sum(h.zeros for h in found)
            exponents = [exponent for histogram in found for exponent in histogram.bins]
            modules.append(
                (
                    clean(module.name),
                    clean(module.kind),
                    f"{values:,}",
                    percent(zeros / (values + zeros)) if values + zeros else "–",
                    f"2^{min(exponents) - 1}" if exponents else "–",
                    number(module.largest) if exponents else "–",
                    number(module.largest_output),
                )
            )
        title = "Audit of 1 batch" if self.batches == 1 else f"Audit of {self.batches:,} batches"
        return "\n\n".join([title, self.conclusion(), align(formats), align(modules)])

    __str__ = to_text

    def to_json(self) -> str:
        """The audit as one line of JSON."""
        best = self.recommended
        content: dict[str, Any] = {
            "kind": "audit",
            "time": time.time(),
            "label": self.label,
            "batches": self.batches,
            "recommended": None if best is None else best.format.name,
            "conclusion": self.conclusion(),
            "formats": [{**vars(result), "format": result.format.name} for result in self.formats],
            "modules": [
                {**vars(module), "parameters": vars(module.parameters), "outputs": vars(module.outputs)}
                for module in self.modules
            ],
        }
        return json.dumps(content)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the audit to a new file, which `gradilocks ls` lists.

        Raises:
            GradilocksError: the file exists or cannot be written.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with Path(path).open("x", encoding="utf-8") as file:
                file.write(self.to_json() + "\n")
        except OSError as error:
            raise GradilocksError(f"{os.fspath(path)} cannot be written: {error.strerror}.") from error


def audit(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    label: str = "",
) -> Audit:
    """Counts a model's gradients on a few batches and finds the formats and loss scales that hold them.

    Nothing is trained: parameters, gradients, buffers and torch's random state are unchanged afterwards.

    Args:
        model: on any device, in float32 or bfloat16, in training mode. A compiled model runs uncompiled.
        loss_fn: takes the model and a batch, returns the unscaled loss. If training divides the loss by the number of
            micro-batches, divide it here, too.
        batches: arguments for `loss_fn`; ten are usually enough.
        steps: largest number of batches; None for all.
        label: a name for the audit.

    Raises:
        NoGradients: the loss does not depend on the parameters.
        GradilocksError: `loss_fn` changed a parameter, or the gradients are float16 or emulated and have underflowed
            already.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> result = gradilocks.audit(model, lambda model, x: model(x).mean(), [torch.full((8, 4), 1e-4)])
        >>> result.recommended.format.name, result.recommended.scale
        ('fp16', 2048.0)
    """
    if isinstance(batches, Tensor):
        raise GradilocksError("batches must be an iterable of batches, got a tensor. For one batch write [batch].")
    counter = _GradientCounter(model)
    batch_count = 0
    with contextlib.closing(counter), _unchanged(model), run_eagerly(), torch.enable_grad():
        for batch in islice(batches, steps):
            loss: Any = loss_fn(model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise GradilocksError(f"loss_fn must return a tensor of one element, got {found}.")
            if not loss.requires_grad:
                raise NoGradients("the loss does not depend on parameters that require gradients.")
            loss.backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
            batch_count += 1
    if not batch_count:
        raise GradilocksError("batches is empty. Pass at least one batch.")
    return counter.result(batch_count, label=label)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and torch's random number generators; raises if a parameter has changed."""
    grads = [(param, param.grad) for param in model.parameters()]
    versions = [(name, param, version_of(param)) for name, param in model.named_parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for param, _ in grads:
        param.grad = None
    try:
        with torch.random.fork_rng(devices={param.device for param, _ in grads if param.is_cuda}):
            yield
    finally:
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)
        for param, grad in grads:
            param.grad = grad
    for name, param, version in versions:
        if version_of(param) != version:
            raise GradilocksError(f"loss_fn changed the parameter {name}. Return the loss without an optimizer step.")


# --- counting ---------------------------------------------------------------------------------------------------------


class _GradientCounter:
    """Counts the gradients of a model in hooks until `close`.

    It uses tensor hooks: torch's backward hooks of modules fail if the next module writes in place.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise GradilocksError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        for name, param in model.named_parameters():
            if hasattr(param, "to_local") or is_fsdp1_shard(param):
                raise GradilocksError(f"{name} is sharded. Audit the whole model in one process.")
        named = [(name or type(module).__name__, module) for name, module in model.named_modules()]
        # The output of any other module is the output of one of these.
        self._names = {m: name for name, m in named if [*m.parameters(recurse=False)] or not [*m.children()]}
        self._parameters = {module: _new_row() for module in self._names}
        self._outputs = {module: _new_row() for module in self._names}
        self._largest_output = dict.fromkeys(self._names, 0.0)
        self._handles: list[Any] = []
        owned: set[Tensor] = set()
        for module in self._names:
            self._handles.append(module.register_forward_hook(self._after_forward))
            for param in module.parameters(recurse=False):
                if param.requires_grad and param not in owned:
                    owned.add(param)
                    self._count(param, self._parameters[module])

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def result(self, batches: int, *, label: str = "") -> Audit:
        """The audit of the gradients counted so far.

        Raises:
            NoGradients: no parameter had a gradient.
        """
        modules = tuple(
            ModuleGradients(
                name,
                type(module).__name__,
                _histogram(self._parameters[module]),
                _histogram(self._outputs[module]),
                self._largest_output[module],
            )
            for module, name in self._names.items()
        )
        if not any(row.any() for row in self._parameters.values()):
            raise NoGradients("no parameter of the model has a gradient. loss_fn must use the model that it receives.")
        return Audit(batches, modules, tuple(_examine(FORMATS[name], modules) for name in _EXAMINED), label)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if emulated_format() is not None:
            raise GradilocksError(
                "the model runs under emulate(), which has rounded the gradients. Call audit() outside of emulate()."
            )
        for tensor in tensors_in(output):
            if not tensor.is_floating_point():
                continue
            if tensor.dim() and tensor.numel():  # A single number is a loss, which stays in float32.
                size = tensor.detach().abs()
                largest = torch.where(size.isfinite(), size, 0.0).amax().item()
                self._largest_output[module] = max(self._largest_output[module], largest)
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                self._count(tensor, self._outputs[module])

    def _count(self, tensor: Tensor, row: Tensor) -> None:
        def hook(grad: Tensor) -> None:
            _add(row, grad)

        self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]


def _new_row() -> Tensor:
    return torch.zeros(_CELLS, dtype=torch.int64)


@torch.no_grad()
def _add(row: Tensor, grad: Tensor) -> None:
    """Adds the values of a gradient to a row of counts."""
    if grad.dtype.itemsize < 4 and grad.dtype != torch.bfloat16:
        raise GradilocksError(f"gradients are {grad.dtype}: small values are zero already. Run loss_fn in float32.")
    values = grad.coalesce().values() if grad.is_sparse else grad
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    values = values.cpu() if values.device.type == "mps" else values  # MPS has no float64.
    for chunk in torch.split(values.flatten(), _CHUNK):
        # The bits of positive floats, read as integers, have the order of the floats. Subtracting 1 moves each power of
        # two to the cell below, so that a cell includes its upper bound: a format rounds powers of two to zero, too.
        bits = chunk.double().abs().view(torch.int64)
        cells = torch.where(bits < _INF_BITS, ((bits - 1) >> 52) + 1, _NONFINITE)
        row[:_LARGEST] += torch.bincount(cells, minlength=_LARGEST).cpu()
        if bits.numel():
            row[_LARGEST] = max(int(row[_LARGEST]), int(torch.where(bits < _INF_BITS, bits, 0).amax()))


def _histogram(row: Tensor) -> Histogram:
    counts = row.tolist()
    bins = {cell - 1023: amount for cell, amount in enumerate(counts[1:_NONFINITE], start=1) if amount}
    (largest,) = struct.unpack("<d", struct.pack("<q", counts[_LARGEST]))
    return Histogram(bins, counts[0], counts[_NONFINITE], largest)


# --- formats ----------------------------------------------------------------------------------------------------------


def _examine(format: Format, modules: tuple[ModuleGradients, ...]) -> FormatResult:
    """Chooses the scale for a format and lists the modules that it does not hold."""
    scale = _scale_for(format, max(module.largest for module in modules))
    reasons = {module.name: _failure(module, format, scale) for module in modules}
    return FormatResult(
        format,
        scale,
        _underflow(modules, format, scale),
        _underflow(modules, format, 1.0),
        {name: reason for name, reason in reasons.items() if reason},
    )


def _scale_for(format: Format, largest: float) -> float:
    if format.has_range_of_float32 or not largest:
        return 1.0
    doublings = math.floor(math.log2(format.largest) - math.log2(largest)) - HEADROOM
    return min(max(2.0**doublings, MIN_SCALE), MAX_SCALE)


def _underflow(modules: tuple[ModuleGradients, ...], format: Format, scale: float) -> float:
    found = [histogram for module in modules for histogram in (module.parameters, module.outputs)]
    total = sum(histogram.values for histogram in found)
    return sum(h.underflow(format, scale) * h.values for h in found) / total if total else 0.0


def _failure(module: ModuleGradients, format: Format, scale: float) -> str:
    """The reason why a format does not hold a module; "" if it does."""
    if module.nonfinite:
        return "gradients contain NaN or Inf"
    if format.overflows(module.largest_output):
        return f"outputs up to {number(module.largest_output)} overflow at {format.largest:g}"
    if format.overflows(module.largest * scale):
        return f"gradients up to {number(module.largest)} overflow at a scale of {scale_text(scale)}"
    for kind, histogram in (("parameter", module.parameters), ("output", module.outputs)):
        lost = histogram.lost_sum(format, scale)
        if lost > MAX_LOST_SUM:
            return f"{percent(lost)} of the sum of its {kind} gradients underflows at a scale of {scale_text(scale)}"
    lost = module.parameters.underflow(format, scale)
    if lost > MAX_LOST_PARAMETERS:
        return f"{percent(lost)} of its non-zero parameter gradients underflow at a scale of {scale_text(scale)}"
    return ""
