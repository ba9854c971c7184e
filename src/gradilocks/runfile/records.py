"""What a run file holds, as types; data only.

Numbers that were not finite are None here and ``null`` in the file: JSON has no NaN. How many
values were NaN or Inf stands beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "VERSION",
    "Culprit",
    "Detail",
    "End",
    "Header",
    "Logged",
    "OptimizerInfo",
    "Precision",
    "RankLosses",
    "Resume",
    "Run",
    "Step",
    "Trace",
]

VERSION = 1


class Culprit(NamedTuple):
    """A parameter whose gradient was not finite, and how many of its values were NaN and Inf."""

    name: str
    nan: int
    inf: int


class Detail(NamedTuple):
    """A step seen tensor by tensor: every list runs along its optimizer's `names`.

    An entry is None where the parameter had no gradient, or where the number was not finite.
    """

    norm: list[float | None]
    """L2 norm of the gradient, unscaled, before clipping."""
    largest: list[float | None]
    """Largest magnitude in the gradient, unscaled, before clipping."""
    zeros: list[float | None]
    """Share of exact zeros in the gradient, 0 to 1."""
    nan: list[int | None]
    """How many values of the gradient were NaN."""
    inf: list[int | None]
    """How many values of the gradient were Inf."""
    weight: list[float | None]
    """L2 norm of the parameter before the step."""
    update: list[float | None]
    """‖change of the parameter‖ / ‖parameter before‖; 0 for a skipped step."""


class Step(NamedTuple):
    """One call to an optimizer's step, taken or skipped."""

    step: int
    """Counts the calls of this optimizer from 1, skipped ones included."""
    time: float
    """Seconds of training since the run began: a session that goes on counts on."""
    optimizer: int
    """Which optimizer: an index into `Run.optimizers`."""
    loss: float | None
    """The loss, unscaled, if the run knew it."""
    scale: float | None
    """The scale that the gradients carried; 1 without loss scaling."""
    norm: float | None
    """Norm of all gradients, unscaled, before clipping."""
    limit: float | None
    """What the clip policy allowed the norm to be; None if nothing bounded it."""
    clipped: bool
    """Whether clipping made the gradients smaller."""
    skipped: bool
    """Whether parameters were left as they were."""
    reason: str | None
    """Why: 'nonfinite' (NaN or Inf in the gradients), 'rejected' (a clip policy), or None."""
    culprits: tuple[Culprit, ...]
    """Parameters with non-finite gradients, in backward order; at most 32 are written."""
    lr: float | None
    """Learning rate of the first parameter group."""
    nan: int
    """How many values of all gradients were NaN."""
    inf: int
    """How many values of all gradients were Inf."""
    detail: Detail | None
    """Per tensor, every `detail_every` steps; None at the others."""
    loss_nonfinite: bool | None = None
    """Of a loss that is None: True if it was NaN or Inf, False if nobody knew it; None if the file
    does not say which, as older ones do not."""
    finite_gradients: int | None = None
    """Of a step with culprits: how many gradients of its optimizer were finite; None if that is not
    known, as in older files and where gradients are spread over ranks."""
    finite_after: str | None = None
    """Of a step with culprits, if all gradients from the first of them on are bad in backward
    order, or it alone: the parameter next after it in the model's order whose gradient is finite.
    None if there is none, if the order is not known, or if finite and bad ones take turns."""
    loss_ranks: int | None = None
    """Of how many ranks' losses `loss` is the mean; None if it is that of one process: of several
    ranks the one that wrote the file."""
    bad_loss_ranks: tuple[int, ...] = ()
    """The ranks whose loss was NaN or Inf, as far as ranks have told each other."""
    of_rank: bool | None = None
    """True if the model is spread over ranks, and norm, NaN, Inf, culprits and detail are of what
    the rank that wrote the file holds of it; None if they are of the whole."""
    waited: float | None = None
    """Seconds between the end of the last step of any optimizer and the next call of a module, by
    the host's clock: loading data, and whatever else the script did there; with those that a
    DataLoader took at other times. None if not known."""
    memory: int | None = None
    """Bytes of physical memory that the process had held at most, up to here; at some steps."""
    gpu_memory: int | None = None
    """Bytes that tensors had taken at most on its GPU, up to here; at the same steps."""


@dataclass(frozen=True)
class RankLosses:
    """The losses of all ranks of steps that stand before it, told some steps later."""

    optimizer: int
    first: int
    """The number of the first of these steps; the others follow it one by one."""
    ranks: int
    """How many ranks have told theirs."""
    losses: tuple[float | None, ...]
    """For each step, the mean of the ranks' losses; None if one of them was not finite, or if none
    of them was known."""
    bad: Mapping[str, list[int]]
    """By the number of a step, as text: the ranks whose loss was NaN or Inf."""


@dataclass(frozen=True)
class OptimizerInfo:
    """An optimizer and its parameters, in the order in which it holds them."""

    index: int
    kind: str
    """The class, as in 'AdamW'."""
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    """As in 'float32'."""


@dataclass(frozen=True)
class Precision:
    """In which formats a run computes, as its first loss shows."""

    dtypes: tuple[str, ...]
    """As in ('bfloat16', 'float32'), sorted."""


@dataclass(frozen=True)
class Header:
    """What ran, and on what."""

    version: int
    started: float
    """Seconds since 1970."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    """Of python, torch, gradilocks and, where there is one, cuda."""
    hardware: Mapping[str, Any]
    """'machine', 'cpu', 'cores', 'memory' (bytes), 'gpus' (a list of names)."""
    settings: Mapping[str, Any]
    """'scale' and 'clip' (policies as text), 'detail_every', 'flush_every', ..."""
    rank: int
    ranks: int
    config: Mapping[str, Any] | None = None
    """What the user said of the run: `config=`, or under `gradilocks run` the script's 'argv'."""
    git: Mapping[str, Any] | None = None
    """Of the code's repository: 'commit', 'branch' (None if none is checked out) and 'dirty' (None
    if it is not known). None where there is no repository."""
    process: Mapping[str, Any] | None = None
    """The process that writes the file, by which a machine knows whether it still runs."""


@dataclass(frozen=True)
class Resume:
    """An optimizer goes on from an earlier step than the last before it, or in another session."""

    optimizer: int
    step: int
    """The last of its steps that counts: those with higher numbers that stand before this line
    are superseded, and with them what was logged since the first of them."""
    time: float
    """Seconds of training since the run began, as a step has it."""
    counted: int | None = None
    """How many steps a GradientControl had counted by itself there; None if nobody has counted."""


class Logged(NamedTuple):
    """Numbers of the user's own: what one call of `log` handed over."""

    step: int
    time: float
    """Seconds of training since the run began, as a step has it."""
    values: Mapping[str, float | None]
    """By name; None where the number was not finite."""


@dataclass(frozen=True)
class Trace:
    """Where a value first turned non-finite: found by `gradilocks.trace`."""

    step: int
    time: float
    phase: str
    """'forward' or 'backward'."""
    module: str
    """As `model.named_modules()` names it; '' is the model itself. It is the origin only if `where`
    is 'module'."""
    kind: str
    """The module's class, as in 'LayerNorm'."""
    what: str
    """'NaN', 'Inf' or 'NaN and Inf'."""
    inputs: tuple[Mapping[str, Any], ...]
    """What went in: 'name', 'shape', 'dtype', 'largest' (None if not finite), 'nan', 'inf'."""
    text: str
    """The finding as a sentence."""
    damaged: tuple[str, ...] | None = ()
    """Parameters and buffers that held NaN or Inf before the traced step: if there are any, the
    trace came too late, and no module is the origin. None: the file does not say."""
    where: str = "module"
    """'module': in `module`. 'input': in the data that came into it. 'before': between modules, and
    it came into `module`. 'outside': it came into `module` from outside the model. 'after': in the
    loss, or in what follows `module`. 'gradients': in gradients, but in no module. 'grown': in or
    after `module`, which overflowed because the weights had grown too large. 'parameters' or
    'buffers': those in `damaged` held it themselves. 'unknown': nobody knows."""
    certainty: str = "certain"
    """'certain': seen as it happened, or when the step was run once more just as it was. 'likely':
    something may have been different, which `text` says. 'unknown': it was not seen where, and
    `text` says why."""
    ranks: tuple[int, ...] = ()
    """The ranks on which it arose, where several train."""


@dataclass(frozen=True)
class End:
    """How the run ended; a run that was killed has none."""

    time: float
    status: str
    """'finished', 'error', 'interrupted' or 'exit' (an exit status other than 0)."""
    exit: int
    error: str | None
    """The exception's class and the first line of its message, as in 'ValueError: ...'."""
    unwatched: bool | None = None
    """True if the script went on when it could not be watched any more: steps after the last one
    that is written are not known. None if all of them are there."""
    left_out: int | None = None
    """How many backward passes on a loss that was NaN or Inf no step has taken: the script has left
    them out by itself. None if there was none, or nobody has looked."""
    left_out_after: int | None = None
    """The number of the last step before the first of them; 0 if there was none."""


@dataclass(frozen=True)
class Run:
    """A run file, read whole."""

    path: Path
    header: Header
    optimizers: tuple[OptimizerInfo, ...]
    steps: list[Step]
    traces: tuple[Trace, ...] = ()
    end: End | None = None
    audit: Mapping[str, Any] | None = None
    """What `gradilocks audit` found, if the run carries one."""
    resumed: tuple[Header, ...] = ()
    """Headers of later sessions that went on in the same file."""
    begins: tuple[int, ...] = ()
    """How many steps stand before each place where training did not go on from the step before it:
    a later session, or a resume."""
    resumes: tuple[Resume, ...] = ()
    """Where optimizers went on from an earlier step, as from a checkpoint, in the file's order."""
    superseded: tuple[Step, ...] = ()
    """Steps that are in the file and count no more: the run went on from one before them. They are
    not in `steps`."""
    superseded_logs: tuple[Logged, ...] = ()
    """Numbers of the user's own that were logged between such steps; they are not in `logs`."""
    computed_in: tuple[str, ...] | None = None
    """The formats in which the first loss was computed, as in ('bfloat16', 'float32'); None if the
    file does not say, as older ones do not."""
    torn: int = 0
    """How many torn lines were left out: a kill tears at most the last line of a session."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Further lines that were left out, by their number, and why: no JSON, or not as their kind
    must be."""
    logs: tuple[Logged, ...] = ()
    """Numbers of the user's own, in the order of the file."""
    notes: tuple[Mapping[str, Any], ...] = field(default=())
    """Other lines, as they are."""

    @property
    def process(self) -> Mapping[str, Any] | None:
        """The process that writes the file, or wrote it last: that of the last session."""
        return (self.resumed or (self.header,))[-1].process

    @cached_property
    def logged(self) -> dict[str, list[tuple[int, float]]]:
        """The user's own numbers by name: each as (step, value); NaN if it was not finite."""
        found: dict[str, list[tuple[int, float]]] = {}
        for each in self.logs:
            for name, value in each.values.items():
                found.setdefault(name, []).append((each.step, math.nan if value is None else value))
        return found
