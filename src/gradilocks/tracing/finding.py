"""What was found, and the sentence that says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from gradilocks.runfile import Trace
from gradilocks.tracing.magnitudes import Magnitude, magnitude

__all__ = ["Finding"]

MOST_INPUTS = 8


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
            text=self._sentence(weights, entered),
        )

    def _weights(self) -> list[Magnitude]:
        """The module's own parameters: they go into it as well."""
        named = self.module.named_parameters(recurse=False)
        found = [magnitude(param, key) for key, param in named]
        return [each for each in found if each is not None]

    def _sentence(self, weights: Sequence[Magnitude], entered: Sequence[Magnitude]) -> str:
        what, who = self.seen.what, _called(self.name, self.module)
        damaged = [each for each in weights if not each.finite]
        if damaged:
            return (
                f"{damaged[0].what} in {_joined(self.name, damaged[0].name)} itself: the parameter "
                "was damaged before this step"
            )
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
