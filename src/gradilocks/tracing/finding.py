"""What was found, and the sentence that says it.

A module is named only if what it began with was finite: a model whose parameters are NaN or Inf
already has its first NaN wherever the first of them is used, which says nothing of where they came
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from gradilocks.runfile import Trace
from gradilocks.tracing.magnitudes import Magnitude, magnitude

__all__ = ["Finding", "TooLate", "damaged_parameters"]

MOST_INPUTS = 8
MOST_DAMAGED = 32


@dataclass(frozen=True)
class Finding:
    """The first value that was not finite, and where it came from."""

    where: str
    """'input', 'forward', 'between', 'backward', 'inside', 'parameter' or 'loss'."""
    name: str
    module: nn.Module
    seen: Magnitude
    inputs: Sequence[Magnitude] = field(default=())
    near: str = ""
    """The neighbour: a module or an argument, by where it was found."""

    def trace(self, *, step: int, time: float) -> Trace:
        """As a record of the run file."""
        weights = self._weights()
        own = [each for each in weights if not each.finite] + self._bad_buffers()
        if own:
            damaged = [each.named(_joined(self.name, each.name)) for each in own]
            return TooLate(damaged, type(self.module).__name__).trace(step=step, time=time)
        entered = [*weights, *self.inputs][:MOST_INPUTS]
        backward = self.where in ("backward", "inside", "parameter", "loss")
        return Trace(
            step=step,
            time=time,
            phase="backward" if backward else "forward",
            module=self.name,
            kind=type(self.module).__name__,
            what=self.seen.what,
            inputs=tuple(_entry(each) for each in entered),
            text=self._sentence(entered),
        )

    def _weights(self) -> list[Magnitude]:
        """The module's own parameters: they go into it as well."""
        named = self.module.named_parameters(recurse=False)
        found = [magnitude(param, key) for key, param in named]
        return [each for each in found if each is not None]

    def _bad_buffers(self) -> list[Magnitude]:
        """The module's own buffers with NaN, which no forward pass begins with on purpose."""
        named = self.module.named_buffers(recurse=False)
        found = [magnitude(buffer, key) for key, buffer in named]
        return [each for each in found if each is not None and each.nan]

    def _sentence(self, entered: Sequence[Magnitude]) -> str:
        what, who = self.seen.what, _called(self.name, self.module)
        if self.where == "input":
            return f"{what} in the input data: {_shown(self.seen)} came into {who}"
        told = {
            "forward": f"{what} first in the output of {who}",
            "between": (
                f"{what} first in forward, in what {who} computes itself, before {self.near}"
            ),
            "backward": f"{what} first in backward, in {who}: in the gradient of its {self.near}",
            "inside": (
                f"{what} first in backward, in what {who} computes itself with the output of "
                f"{self.near}"
            ),
            "parameter": f"{what} first in backward, in {who}: in the gradient of its {self.near}",
            "loss": (
                f"{what} first in backward, in the loss or what else follows {who}: in the "
                f"gradient of its {self.near}"
            ),
        }[self.where]
        if not entered:
            return told
        return f"{told}; into it went " + ", ".join(_shown(each) for each in entered)


@dataclass(frozen=True)
class TooLate:
    """The model held NaN or Inf before the step that was to be traced."""

    damaged: Sequence[Magnitude]
    """Parameters and buffers, by their full names."""
    kind: str
    """The class of the module, or of the model, that holds them."""

    def trace(self, *, step: int, time: float) -> Trace:
        """As a record of the run file."""
        names = [each.name for each in self.damaged]
        held = {name.rpartition(".")[0] for name in names}
        return Trace(
            step=step,
            time=time,
            phase="forward",
            module=held.pop() if len(held) == 1 else "",
            kind=self.kind,
            what=self._what,
            inputs=tuple(_entry(each) for each in self.damaged[:MOST_INPUTS]),
            text=self._sentence(names),
            damaged=tuple(names[:MOST_DAMAGED]),
        )

    @property
    def _what(self) -> str:
        nan, inf = (sum(getattr(each, kind) for each in self.damaged) for kind in ("nan", "inf"))
        return self.damaged[0]._replace(nan=nan, inf=inf).what

    def _sentence(self, names: Sequence[str]) -> str:
        # Of many, a name would pass for the place where it began.
        what = f"{names[0]} itself" if len(names) == 1 else f"{len(names):,} parameters themselves"
        return (
            f"{self._what} in {what}, before this step: where that came from a trace cannot see "
            "any more"
        )


def damaged_parameters(model: nn.Module) -> TooLate | None:
    """The parameters that the model trains and that hold NaN or Inf; None if all are finite.

    Those that it does not train are looked at only in the module that a trace names: a mask of -Inf
    may be one. Waits for the device.
    """
    found = (
        magnitude(param, name) for name, param in model.named_parameters() if param.requires_grad
    )
    damaged = [each for each in found if each is not None and not each.finite]
    return TooLate(damaged, type(model).__name__) if damaged else None


def _called(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{name} ({kind})" if name else f"the model ({kind})"


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _shown(seen: Magnitude) -> str:
    shape = "x".join(map(str, seen.shape)) or "scalar"
    if seen.finite:
        return f"{seen.name} ({seen.dtype} {shape}, largest {seen.largest:.4g})"
    counts = [f"{n} {word}" for word, n in (("NaN", seen.nan), ("Inf", seen.inf)) if n]
    return f"{seen.name} ({seen.dtype} {shape}, {' and '.join(counts)})"


def _entry(seen: Magnitude) -> dict[str, object]:
    return {**seen._asdict(), "shape": list(seen.shape)}
