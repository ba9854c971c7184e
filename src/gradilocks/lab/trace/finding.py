"""What was found, and the sentence that says it.

A module is named only if what it began with was finite: a model whose parameters are NaN or Inf
already has its first NaN wherever the first of them is used, which says nothing of where they came
from. What came into it from outside, or arose after it, is no fault of its own either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from gradilocks._torch import NORMS_WITH_STATISTICS
from gradilocks.lab.trace.magnitudes import Magnitude, magnitude
from gradilocks.names import named_parameters
from gradilocks.runfile import Trace

__all__ = [
    "Finding",
    "NoModule",
    "TooLate",
    "damaged_gradients",
    "damaged_parameters",
    "nan_buffers",
]

MOST_INPUTS = 8
MOST_DAMAGED = 32
MOST_NAMES = 4


@dataclass(frozen=True)
class Finding:
    """The first value that was not finite, and where it came from."""

    where: str
    """'input', 'before', 'outside', 'forward', 'between', 'backward', 'inside', 'parameter' or
    'loss'."""
    name: str
    module: nn.Module
    seen: Magnitude
    inputs: Sequence[Magnitude] = field(default=())
    near: str = ""
    """The neighbour: a module or an argument, by where it was found."""
    buffers: Sequence[Magnitude] = field(default=())
    """The module's own that held NaN before it ran."""
    lost: bool | None = None
    """Whether what was run backward was itself NaN or Inf; None if that is not known."""

    def trace(self, *, step: int, time: float) -> Trace:
        """As a record of the run file."""
        where = _ORIGINS.get(self.where, "module")
        entered: Sequence[Magnitude] = ()
        if where == "module":
            weights = self._weights()
            own = [each for each in weights if not each.finite]
            if own or self.buffers:
                return self._too_late(own).trace(step=step, time=time)
            entered = [*weights, *self.inputs][:MOST_INPUTS]
        elif self.where == "loss":
            entered = self.inputs[:MOST_INPUTS]
        else:
            entered = [self.seen]
        return Trace(
            step=step,
            time=time,
            phase=self._phase(),
            module=self.name,
            kind=type(self.module).__name__,
            what=self.seen.what,
            inputs=tuple(_entry(each) for each in entered),
            text=self._sentence(entered),
            where=where,
        )

    def _phase(self) -> str:
        if self.where == "loss":
            return "forward" if self.lost else "backward"
        return "backward" if self.where in ("backward", "inside", "parameter") else "forward"

    def _weights(self) -> list[Magnitude]:
        """The module's own parameters: they go into it as well."""
        named = self.module.named_parameters(recurse=False)
        found = [magnitude(param, key) for key, param in named]
        return [each for each in found if each is not None]

    def _too_late(self, own: Sequence[Magnitude]) -> TooLate:
        held = [each.named(_joined(self.name, each.name)) for each in own or self.buffers]
        kind = type(self.module).__name__
        if own:
            return TooLate(held, kind, "not trained")
        return TooLate(held, kind, "before it ran", buffers=_called(self.name, self.module))

    def _sentence(self, entered: Sequence[Magnitude]) -> str:
        what, who = self.seen.what, _called(self.name, self.module)
        if self.where == "input":
            return (
                f"{what} in the input data: {_shown(self.seen)} came into {who}, before any module "
                "of the model had run"
            )
        if self.where == "before":
            return (
                f"{what} first in forward, between modules, before {who}: {_shown(self.seen)} came "
                "into it"
            )
        if self.where == "outside":
            return (
                f"{what} came into {who} from outside: {_shown(self.seen)}. Whether it was in the "
                "data, came from another model or arose between modules is not known"
            )
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
            "loss": f"{what} in the loss, or in what follows {who}, {self._when_lost()}",
        }[self.where]
        if not entered or self.where == "loss":
            return told
        return f"{told}; into it went " + ", ".join(_shown(each) for each in entered)

    def _when_lost(self) -> str:
        if self.lost:
            return "in forward: what was run backward was not finite"
        if self.lost is None:
            return f"in forward or backward: first seen in the gradient of its {self.near}"
        return f"first in backward: in the gradient of its {self.near}"


# Of what a Finding is called, what a Trace is; all others arose in the module.
_ORIGINS = {"input": "input", "before": "before", "outside": "outside", "loss": "after"}


@dataclass(frozen=True)
class TooLate:
    """The model held NaN or Inf itself, so that what was traced tells nothing."""

    damaged: Sequence[Magnitude]
    """Parameters or buffers, by their full names."""
    kind: str
    """The class of the module, or of the model, that holds them."""
    when: str
    """What is known of when they did."""
    buffers: str = ""
    """If they are buffers: the module that holds them, in words."""

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
            where="buffers" if self.buffers else "parameters",
        )

    @property
    def _what(self) -> str:
        return _what_of(self.damaged)

    def _sentence(self, names: Sequence[str]) -> str:
        if self.buffers:
            word = "buffer" if len(names) == 1 else "buffers"
            return (
                f"{self._what} in the {word} {_listed(names)} of {self.buffers} {self.when}: the "
                "forward of a skipped step may have written it"
            )
        # Of many, a name would pass for the place where it began.
        what = f"{names[0]} itself" if len(names) == 1 else f"{len(names):,} parameters themselves"
        return (
            f"{self._what} in {what}, {self.when}: where that came from a trace cannot see any more"
        )


@dataclass(frozen=True)
class NoModule:
    """Gradients hold NaN or Inf after a step in which no module, and no backward, made any."""

    damaged: Sequence[Magnitude]
    """The gradients, by the full names of their parameters."""
    kind: str
    """The model's class."""

    def trace(self, *, step: int, time: float) -> Trace:
        """As a record of the run file."""
        what, many = _what_of(self.damaged), len(self.damaged)
        whose = self.damaged[0].name if many == 1 else f"{many:,} parameters"
        return Trace(
            step=step,
            time=time,
            phase="backward",
            module="",
            kind=self.kind,
            what=what,
            inputs=tuple(_entry(each) for each in self.damaged[:MOST_INPUTS]),
            text=(
                f"{what} came back in the gradient{'s' * (many > 1)} of {whose}, but in no module: "
                "likely it gets there after backward, where gradients are added up, reduced over "
                "ranks or written by the script"
            ),
            where="gradients",
        )


def damaged_parameters(model: nn.Module, when: str) -> TooLate | None:
    """The parameters that the model trains and that hold NaN or Inf; None if all are finite.

    Those that it does not train are looked at only in the module that a trace names: a mask of -Inf
    may be one. Waits for the device.

    Args:
        model: the model.
        when: when this is looked at, in words.
    """
    found = (
        magnitude(param, name) for name, param in named_parameters(model) if param.requires_grad
    )
    damaged = [each for each in found if each is not None and not each.finite]
    return TooLate(damaged, type(model).__name__, when) if damaged else None


def damaged_gradients(model: nn.Module) -> NoModule | None:
    """The gradients of the model's parameters that hold NaN or Inf; None if all are finite.

    For a step in which nothing was found. Waits for the device.
    """
    found = (
        magnitude(param.grad, name)
        for name, param in named_parameters(model)
        if param.grad is not None
    )
    damaged = [each for each in found if each is not None and not each.finite]
    return NoModule(damaged, type(model).__name__) if damaged else None


def nan_buffers(module: nn.Module) -> list[Magnitude]:
    """The module's own buffers with NaN, which no forward pass begins with on purpose.

    Not the running statistics of a norm that is training: it writes them and does not read them.
    """
    if isinstance(module, NORMS_WITH_STATISTICS) and module.training:
        return []
    named = module.named_buffers(recurse=False)
    found = [magnitude(buffer, key) for key, buffer in named]
    return [each for each in found if each is not None and each.nan]


def _what_of(seen: Sequence[Magnitude]) -> str:
    nan, inf = (sum(getattr(each, kind) for each in seen) for kind in ("nan", "inf"))
    return seen[0]._replace(nan=nan, inf=inf).what


def _listed(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMES:
        return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES:,} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


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
