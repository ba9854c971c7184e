"""Whether the ranks hold one model in a way that is known, found out at a control's first steps.

What a rank says of itself, and a fingerprint of its plain gradients, go out in the step's own
collective; an error that every rank raises alike comes back, or nothing.

A plain tensor beside DTensors says nothing of who else holds it. Norms alone do not tell copies
from parts: experts of one size have equal norms by the law of large numbers. So each gradient is
projected on four fixed pseudo-random directions, which follow from its place and shape, and the
logarithm of its norm is added beside. Copies agree in all of these but for rounding; the
projections of others are of the size of 1 and differ by as much. It costs a few passes over each
gradient, until it has been compared with one that is not zero.

What was said of the ranks may be wrong: copies that were called parts count too often, parts that
were called copies not at all. Both are compared once, at the first step that is finite and not all
zero; under a dynamic scale that is seldom the very first.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks.errors import ScaleMisuse
from gradilocks.kernels.reference import measure, total_norm
from gradilocks.ranks.layout import lie_alike, local_of, shortened
from gradilocks.ranks.model_ranks import ModelRanks, checksum, is_trained, tell_all
from gradilocks.values import moved, wide

__all__ = [
    "ASKS",
    "FINGERPRINT",
    "REPORT",
    "Fingerprint",
    "RankAgreement",
    "Shown",
    "are_copies",
    "fingerprint",
    "refuse_different",
    "refuse_refused",
    "refuse_uncounted",
    "shown_by",
]

_DIRECTIONS = 4
_PIECE = 1 << 18  # Elements at a time: a large embedding must not need its size again in float64.
_HASHED = (1 << 31) - 1

_ROUNDING = 1e-3
"""By how much the numbers of one copy may differ: kernels that add in any order."""
_HALF_ROUNDING = 1e-2
"""The same in half precision: a bfloat16 that was rounded the other way is off by 0.8 %."""
_MOST = 0.1
"""And by how much those of all copies together: one tensor that is none differs by about 1."""

FINGERPRINT = (
    "norm",
    "compared",
    "allowed",
    *(f"projection {number}" for number in range(_DIRECTIONS)),
    *(f"logarithm {number}" for number in range(_DIRECTIONS)),
)
"""What a rank tells of its plain gradients: their norm, for the message; how many are finite and
not zero; the square of the rounding that is allowed between copies; and what is compared."""


REPORT = (
    *("refused", "unknown", "parts", "uncompared", "narrow", "scaled", "anew"),
    *FINGERPRINT,
)
"""What a rank tells of itself: that it refuses the step, that it does not know who holds what, that
its plain tensors are parts, how many plain ones have not been compared yet, that not all of its
gradients are float64, that it has scaled a loss or need not, that it has other parameters than the
others know of (ASKS if it can tell of them only together with all others), and the fingerprint of
the plain ones."""
ASKS = 2.0

_Names = Callable[[Sequence[Tensor]], Sequence[str]]


class Fingerprint(NamedTuple):
    """What stands for a list of gradients."""

    numbers: Tensor
    """1-d: the numbers that FINGERPRINT names."""
    compared: Tensor
    """For each gradient, 1 if it is finite and not zero, so that it was compared, else 0."""


@torch.no_grad()
def fingerprint(
    tensors: Sequence[Tensor],
    *,
    places: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    norms: Tensor,
) -> Fingerprint:
    """The fingerprint of gradients; nothing waits.

    Args:
        tensors: plain gradients' elements; may be empty.
        places: for each, the place of its parameter among the plain ones.
        shapes: for each, the shape of its parameter.
        norms: 1-d, their Euclidean norms, where the numbers are brought together.
    """
    home = norms.device
    usable = (norms > 0) & torch.isfinite(norms)
    numbers = norms.new_zeros(len(FINGERPRINT))
    for number, tensor in enumerate(tensors):
        seeds = [
            zlib.crc32(repr((places[number], tuple(shapes[number]), column)).encode()) & _HASHED
            for column in range(2 * _DIRECTIONS)
        ]
        norm = norms[number]
        projected = _projected(tensor, moved(norm, tensor.device), seeds[:_DIRECTIONS])
        weights = [0.5 + seed / _HASHED for seed in seeds[_DIRECTIONS:]]
        logarithms = torch.tensor(weights, dtype=norms.dtype, device="cpu")
        allowed = _HALF_ROUNDING if tensor.dtype.itemsize == 2 else _ROUNDING
        row = torch.cat(
            [
                torch.zeros_like(norm).reshape(1),
                torch.ones_like(norm).reshape(1),
                torch.full_like(norm, allowed**2).reshape(1),
                moved(projected, home),
                moved(logarithms, home) * norm.log(),
            ]
        )
        numbers = numbers + torch.where(usable[number], row, torch.zeros_like(row))
    numbers[0] = total_norm(torch.where(usable, norms, torch.zeros_like(norms)), 2.0)
    return Fingerprint(numbers, usable.to(norms.dtype))


def are_copies(rows: Sequence[Sequence[float]], *, at_most: float | None = None) -> bool:
    """Whether the ranks' gradients are the same but for rounding.

    Args:
        rows: for each rank the numbers that FINGERPRINT names, of finite gradients.
        at_most: by how much numbers of copies may differ; None for what their dtypes allow.
    """
    _, counts, allowed, *compared = zip(*rows, strict=True)
    if len(set(counts)) > 1:
        return False
    most = min(math.sqrt(max(allowed)), _MOST) if at_most is None else at_most
    return all(max(column) - min(column) <= most for column in compared)


def _same_gradients(rows: Sequence[Sequence[float]]) -> list[int]:
    """The places of the first two or more ranks with the same gradients, bit for bit; none if none.

    Args:
        rows: for each rank the numbers that FINGERPRINT names, of finite gradients.
    """
    for first, row in enumerate(rows):
        alike = [at for at, other in enumerate(rows) if other == row]
        if len(alike) > 1 and row[FINGERPRINT.index("compared")] and alike[0] == first:
            return alike
    return []


def _projected(tensor: Tensor, norm: Tensor, seeds: Sequence[int]) -> Tensor:
    """The products of `tensor`, divided by its norm, with pseudo-random numbers of variance 1."""
    real = wide(tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    values = tensor.reshape(-1)
    starts = torch.tensor(seeds, dtype=torch.int64, device="cpu").reshape(-1, 1)
    starts = moved(starts, tensor.device)
    total = torch.zeros(len(seeds), dtype=real, device=tensor.device)
    for begin in range(0, values.numel(), _PIECE):
        piece = values[begin : begin + _PIECE].to(real) / norm.to(real)
        total = total + (_random(begin, piece.numel(), starts).to(real) * piece).sum(dim=1)
    return total


def _random(begin: int, count: int, starts: Tensor) -> Tensor:
    """Numbers of variance 1 between -1.73 and 1.73, a row a start: a hash of the element's index.

    In whole numbers below 2^62, so that every device computes the same.
    """
    index = torch.arange(begin, begin + count, dtype=torch.int64, device=starts.device)
    mixed = ((index & _HASHED) * 1_013_904_223 + starts) & _HASHED
    for shift, factor in ((15, 1_597_334_677), (13, 747_796_405)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _HASHED
    mixed = (mixed ^ (mixed >> 16)) & 0xFFFF
    return (mixed.to(torch.float32) / 0x8000 - 1.0) * math.sqrt(3.0)


class RankAgreement:
    """What one control has learned of the other ranks, so that it need not ask again."""

    def __init__(self) -> None:
        self._agreed: int | None = None  # The shapes under which all was well.
        # Plain parameters by their id. Not weak: `torch.utils.swap_tensors` refuses tensors that
        # have a weak reference. One that was replaced is not kept past the next step.
        self._compared: dict[int, Tensor] = {}
        # Whether the ranks have met, and what they then had to show each other was not finite, or
        # zero: they do so at the first step that has it. They meet together, so it is alike on all.
        self._to_be_shown = False

    def __reduce__(self) -> Any:
        return RankAgreement, ()  # It is about these ranks; asking again costs one wait.

    def is_pending(self, ranks: ModelRanks) -> bool:
        """Whether the host has to read what the ranks say of themselves: it may have to wait."""
        return self._to_be_shown or self._agreed != ranks.shapes or bool(self.uncompared(ranks))

    def uncompared(self, ranks: ModelRanks) -> dict[int, int]:
        """The plain parameters that have not shown a gradient yet: by id, their places."""
        if ranks.plain_are_parts and self._agreed == ranks.shapes:
            return {}
        trained = [(at, param) for at, param in enumerate(ranks.plain) if is_trained(param)]
        there = {id(param): place for place, param in trained}
        self._compared = {key: p for key, p in self._compared.items() if key in there}
        return {key: place for key, place in there.items() if key not in self._compared}

    def report(
        self, ranks: ModelRanks, *, refused: bool, wide: bool, scaled: bool, anew: float
    ) -> list[float]:
        """What the other ranks have to know of this one: REPORT up to the fingerprint.

        Args:
            ranks: that hold the model together, as this one knows them.
            refused: whether this rank refuses the step.
            wide: whether all of its gradients are float64, or there are none.
            scaled: whether it has scaled a loss, or there is no scale.
            anew: whether it has other parameters than it has told of, or ASKS.
        """
        uncompared = len(self.uncompared(ranks)) if self.is_pending(ranks) else 0
        told = (
            refused,
            ranks.unknown is not None,
            ranks.plain_are_parts,
            uncompared,
            not wide,
            scaled,
            anew,
        )
        return [float(number) for number in told]

    def check(
        self,
        ranks: ModelRanks,
        reports: Sequence[Sequence[float]],
        *,
        compared: Sequence[Tensor],
        finite: bool,
        names: _Names,
    ) -> None:
        """Raises, on every rank alike, if the ranks do not hold one model in a way that is known.

        Args:
            ranks: that hold the model together, as this one knows them.
            reports: of each rank, the numbers that REPORT names.
            compared: this rank's plain parameters whose gradients are in its fingerprint.
            finite: whether all gradients are finite on all ranks.
            names: tells the names of parameters.
        """
        told = dict(zip(REPORT, zip(*reports, strict=True), strict=True))
        refuse_refused(ranks, told["refused"])
        if not any(told["scaled"]):
            raise ScaleMisuse(_NOT_SCALED)
        if any(told["unknown"]):
            raise ValueError(ranks.unknown or _ELSEWHERE)
        if len(set(told["parts"])) > 1:
            raise ValueError(_UNLIKE)
        if any(told["parts"]):
            if finite and any(told["compared"]):
                if all(told["anew"]) or self._to_be_shown:  # Only then all of them are here.
                    _refuse_same_parts(ranks, [row[-len(FINGERPRINT) :] for row in reports], names)
                self._agreed = ranks.shapes
            return
        if finite:
            if not are_copies([row[-len(FINGERPRINT) :] for row in reports]):
                raise ValueError(_no_copies(ranks, told["norm"], names))
            self._compared.update((id(param), param) for param in compared)
        # As long as a plain tensor has shown no gradient it may still turn out to be no copy.
        left = told["uncompared"]
        settled = left == told["compared"] if finite else not any(left)
        self._agreed = ranks.shapes if settled else None

    def compare(self, ranks: ModelRanks, shown: Sequence[Shown]) -> None:
        """Raises, on every rank alike, if copies were called parts, or parts copies.

        Args:
            ranks: that hold the model together.
            shown: of each rank, what `shown_by` returned.
        """
        _refuse_same_apart(ranks.rank_group.ranks, [each.apart for each in shown])
        _refuse_unlike_copies(ranks.rank_group.ranks, [each.alike for each in shown])
        self._to_be_shown = any(each.waits for each in shown)

    def compare_late(self, ranks: ModelRanks, *, usable: bool) -> None:
        """The same at a later step, if there was nothing to compare when the ranks met.

        Args:
            ranks: that hold the model together.
            usable: whether all gradients are finite on all ranks, and not all zero.
        """
        if self._to_be_shown and usable:
            (group,) = ranks.rank_group.groups
            shown = shown_by(ranks, usable=True)
            self.compare(ranks, tell_all(shown, ranks.rank_group.ranks, group))


def refuse_different(ranks: Sequence[int], settings: Sequence[Mapping[str, object]]) -> None:
    """Raises if the ranks have not the same settings, which all of them then do.

    Args:
        ranks: in the order of `settings`.
        settings: of each rank, by name.
    """
    for name, first in settings[0].items():
        for rank, theirs in zip(ranks, settings, strict=True):
            if theirs[name] != first:
                raise ValueError(
                    f"the ranks train one model and decide alike only with the same settings: "
                    f"{name} is {first} on rank {ranks[0]} and {theirs[name]} on rank {rank}. Make "
                    "the control, and load its state, in the same way on every rank."
                )


def refuse_uncounted(ranks: Sequence[int], told: Sequence[Mapping[Hashable, bool]]) -> None:
    """Raises, on every rank alike, if there are parameters that no rank counts.

    Of ranks that `mesh=` says to hold the same one counts. If that one has no such parameter, they
    do not hold the same: most often `distinct=` was forgotten.

    Args:
        ranks: in the order of `told`.
        told: of each rank, `ModelRanks.by_mesh`.
    """
    counted = {key for theirs in told for key, counts in theirs.items() if counts}
    for rank, theirs in zip(ranks, told, strict=True):
        for key in theirs:
            if key not in counted:
                raise ValueError(
                    f"{_name_in(key)} on rank {rank} is not on the rank that counts for it: of "
                    "ranks that hold the same the first along each dimension of mesh= counts. If "
                    "ranks along a dimension hold other parameters, such as pipeline stages, name "
                    "it: "
                    'GradientControl(..., mesh=world_mesh, distinct=("pp",)). If they hold the '
                    "same, give them the same names on all ranks, by model= or in the optimizer."
                )


class Shown(NamedTuple):
    """What a rank shows of parameters of which it was said who else holds them, by their keys."""

    waits: bool = False
    """Whether there is something to show, and the gradients do not serve yet."""
    apart: Mapping[Hashable, tuple[str, object]] = {}
    """Of those that were said to be other tensors than elsewhere: the name, and what follows from
    the bits of values and gradient. Only where these tell something: not all elements are equal."""
    alike: Mapping[Hashable, tuple[str, Sequence[float]]] = {}
    """Of those that were said to be copies: the name, and the fingerprint of the gradient."""


def shown_by(ranks: ModelRanks, *, usable: bool) -> Shown:
    """What this rank has to show. Waits for the device.

    Args:
        ranks: that hold the model together.
        usable: whether all gradients are finite on all ranks, and not all zero.
    """
    if not usable:
        return Shown(bool(ranks.told_apart or ranks.told_alike or ranks.plain_are_parts))
    keys = dict(zip(map(id, ranks.params), ranks.keys or (), strict=False))
    apart: dict[Hashable, tuple[str, object]] = {}
    for param in ranks.told_apart:
        value, grad = local_of(param), local_of(param.grad)
        if grad is not None and not grad.is_sparse and _is_drawn(value) and _is_drawn(grad):
            bits = tuple(value.shape), checksum(value), checksum(grad)
            key = keys[id(param)]
            apart[ranks.copied.get(id(param), key)] = _name_in(key), bits
    elements = dict(zip(map(id, ranks.params), ranks.elements(), strict=True))
    alike: dict[Hashable, tuple[str, Sequence[float]]] = {}
    for param in ranks.told_alike:
        grad = local_of(param.grad)
        if grad is not None and not lie_alike(param, param.grad):
            continue  # Its elements here are others than the parameter's, of which the key tells.
        if elements[id(param)] is not None and (grad is None or not grad.is_sparse):
            name, shape = _name_in(keys[id(param)]), tuple(param.shape)
            alike[elements[id(param)]] = name, _fingerprint_of(grad, shape)
    return Shown(False, apart, alike)


def _name_in(key: Hashable) -> str:
    """The name of a parameter, from its key."""
    return str(key[0] if isinstance(key, tuple) else key)


def _fingerprint_of(grad: Tensor | None, shape: tuple[int, ...]) -> list[float]:
    """The numbers of one gradient; zeros if there is none."""
    if grad is None or not grad.numel():
        return [0.0] * len(FINGERPRINT)
    found = fingerprint([grad], places=[0], shapes=[shape], norms=measure([grad]).norms)
    return [float(number) for number in found.numbers.tolist()]


def _refuse_same_apart(
    ranks: Sequence[int], shown: Sequence[Mapping[Hashable, tuple[str, object]]]
) -> None:
    """Raises if a parameter that was said to differ between ranks is a copy.

    Args:
        ranks: in the order of `shown`.
        shown: of each rank, `Shown.apart`.
    """
    # By their bits alone: tied embeddings have two names.
    seen: dict[object, tuple[int, Hashable, str]] = {}
    for rank, theirs in zip(ranks, shown, strict=True):
        for key, (name, bits) in theirs.items():
            first, first_key, first_name = seen.setdefault(bits, (rank, key, name))
            if first_key != key:
                tied = "" if name == first_name else f" (there as {first_name})"
                raise ValueError(
                    f"{name} has the same values and the same gradient on ranks {first}{tied} and "
                    f"{rank}, bit for bit, where distinct=, process_group= or copies= says that "
                    "they hold different parameters: it is a copy, and would count more than once. "
                    "Say who "
                    f"counts it by copies=: {len(ranks)} for a plain tensor that all {len(ranks)} "
                    "ranks hold, 0 on all but the first that holds it otherwise, None for all "
                    "others."
                )


def _refuse_unlike_copies(
    ranks: Sequence[int], shown: Sequence[Mapping[Hashable, tuple[str, Sequence[float]]]]
) -> None:
    """Raises if a parameter that was said to be the same on several ranks is not.

    Of one tensor at a time: any other one differs by about 1, so that much rounding is no matter.

    Args:
        ranks: in the order of `shown`.
        shown: of each rank, `Shown.alike`.
    """
    first: dict[Hashable, tuple[int, Sequence[float]]] = {}
    for rank, theirs in zip(ranks, shown, strict=True):
        for key, (name, row) in theirs.items():
            other, other_row = first.setdefault(key, (rank, row))
            if not are_copies([other_row, row], at_most=_MOST):
                raise ValueError(
                    f"{name} is the same on ranks {other} and {rank} by what mesh= or copies= "
                    f"says, and its gradients there are not: their norms are {other_row[0]:.6g} "
                    f"and {row[0]:.6g}. Only the first would count. If ranks along a dimension of "
                    "mesh= hold different parameters, such as pipeline stages, name it: "
                    'GradientControl(..., mesh=world_mesh, distinct=("pp",)). If they hold copies, '
                    "average the gradients over the ranks before step()."
                )


def _is_drawn(tensor: Tensor) -> bool:
    """Whether a tensor has different elements: zeros and ones are the same everywhere."""
    return tensor.numel() > 0 and bool((tensor != tensor.reshape(-1)[0]).any())


_ELSEWHERE = (
    "another rank has a DTensor on other ranks than these, and whether those hold copies of it or "
    "other parts of the model is not known: the error on that rank names it, and the way out."
)

_NOT_SCALED = (
    "no rank has scaled a loss since the last step, so the gradients do not carry the scale that "
    "step() would divide by. Call control.backward(loss), or give a pipeline's schedule "
    "control.loss_fn(loss_fn), on the rank that has the loss."
)

_UNLIKE = (
    "some ranks of process_group= hold DTensors and others plain tensors only, so which of their "
    "elements are the same is not known. Distribute every parameter over one mesh on all ranks, or "
    "on none."
)


def refuse_refused(ranks: ModelRanks, refused: Sequence[float]) -> None:
    """Raises if a rank refuses the step: `refused` is above 0 for those."""
    who = [rank for rank, told in zip(ranks.rank_group.ranks, refused, strict=True) if told]
    if who:
        named = f"rank {who[0]}" if len(who) == 1 else f"ranks {shortened(who)}"
        raise ValueError(
            f"{named} refused the step, and the error there says why. The ranks decide together, "
            "so nothing has moved here."
        )


def _refuse_same_parts(ranks: ModelRanks, rows: Sequence[Sequence[float]], names: _Names) -> None:
    """Raises if ranks that should hold parts hold the same values and have the same gradients.

    Values alone do not show it: stages that were made with one seed begin alike. Nor do gradients
    alone: the rows of a linear layer's are the same under a loss that is a sum. Of parameters that
    are all zeros or all ones nothing is concluded.
    """
    if not _same_gradients(rows):
        return
    (group,) = ranks.rank_group.groups
    mine = [(tuple(param.shape), checksum(param)) for param in ranks.plain]
    drawn = any(map(_is_drawn, ranks.plain))
    told = tell_all((mine, drawn), ranks.rank_group.ranks, group)
    together = list(zip(rows, told, strict=True))
    same = [at for at in _same_gradients(rows) if together.count(together[at]) > 1]
    if same and all(told[at][1] for at in same):
        raise ValueError(_no_parts(ranks, same, names))


def _no_parts(ranks: ModelRanks, same: Sequence[int], names: _Names) -> str:
    who = [ranks.rank_group.ranks[at] for at in same]
    return (
        "process_group= names ranks that hold other parts of the model, and the gradients on ranks "
        f"{shortened(who)} are the same bit for bit, and so are the parameters, "
        f"{names(ranks.plain[:1])[0]} among them: they are copies. Copies of a model (data "
        "parallel) need no process_group=; under FullyShardedDataParallel with NO_SHARD say "
        "copies= with their number. Where some ranks hold copies and others parts, give the group "
        "of the parts alone, or mesh= and distinct=."
    )


def _no_copies(ranks: ModelRanks, norms: Sequence[float], names: _Names) -> str:
    shown = ", ".join(names(ranks.plain[:3])) + (", ..." if len(ranks.plain) > 3 else "")
    seen = shortened([f"{norm:.6g}" for norm in norms])
    return (
        "plain tensors beside DTensors count once if every rank holds the same ones, and here "
        f"their gradients are not the same; their norms are {seen} on ranks "
        f"{shortened(ranks.rank_group.ranks)}: whether they are parts of the model, such as "
        "experts, or copies whose gradients were not averaged, is not known. Plain on this rank: "
        f"{shown or 'none'}. Make parts DTensors with Shard(), average the gradients of copies "
        "before step(), and list copies in the same order on every rank."
    )
