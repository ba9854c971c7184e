"""Whether the ranks hold one model in the way that was said, found out from their gradients.

What a rank says of itself goes out in the step's own collective; an error that every rank raises
alike comes back, or nothing.

What was said of the ranks may be wrong, and a plain tensor beside DTensors says nothing of who else
holds it: copies that are called parts count too often, parts that are called copies not at all. So
each tensor of which something was said, or taken for granted, is compared between the ranks at the
first step at which it has a gradient that is finite and not zero, whenever that is: a scale that
begins high overflows at first, a layer is thawed or first used later. In its row each rank tells of
how many tensors there is something new to see; where it is any, all of them show these in one
exchange more at that step. A step at which there is nothing new has none.

Copies: norms alone do not tell them from parts, as experts of one size have equal norms by the law
of large numbers. So a gradient is projected on four fixed pseudo-random directions, and the
logarithm of its norm is added. Copies agree in all of these but for rounding; the projections of
others are of the size of 1 and differ by as much.

Parts: two of one value and one gradient, bit for bit, are copies, unless that is little wonder. A
bias of zeros is the same everywhere, and so is its gradient where the loss is a sum. Then the ranks
go on and look again later, until enough different numbers were the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks._torch import is_flattened, sparse_indices, sparse_values
from gradilocks.errors import ScaleMisuse
from gradilocks.kernels.reference import measure
from gradilocks.ranks.layout import is_distributed, lie_alike, local_of, my_rank, shortened
from gradilocks.ranks.model_ranks import ModelRanks, checksum, is_trained, tell_all
from gradilocks.values import wide

__all__ = [
    "ASKS",
    "REPORT",
    "Fingerprint",
    "RankAgreement",
    "Shown",
    "are_copies",
    "fingerprint",
    "refuse_different",
    "refuse_refused",
    "refuse_uncounted",
]

_DIRECTIONS = 4
_PIECE = 1 << 18  # Elements at a time: a large embedding must not need its size again in float64.
_HASHED = (1 << 31) - 1

_ROUNDING = 1e-2
"""By how much the numbers of copies may differ, where ranks compute them each for itself: kernels
that add in any order, in activations of half precision. Those of others differ by about 1."""
_HALF_ROUNDING = 0.1
"""The same if the gradient is in half precision: a bfloat16 that was rounded the other way is off
by 0.8 %."""

_ENOUGH = 4
"""So many different numbers that are the same on two ranks are no chance."""
_SAMPLED = 4096

_FIRST_STEPS = 32
"""So many steps at least are looked at: a scale that begins at 2^16 may overflow at 16 of them."""

REPORT = ("refused", "unknown", "parts", "open", "narrow", "scaled", "anew")
"""What a rank tells of itself: that it refuses the step, that it does not know who holds what, that
its plain tensors are parts, how many trained tensors it has yet to show, that not all of its
gradients are float64, that it has scaled a loss or need not, and that it has other parameters than
the others know of (ASKS if it can tell of them only together with all others)."""
ASKS = 2.0

_Names = Callable[[Sequence[Tensor]], Sequence[str]]
_Shape = tuple[int, ...]


class Fingerprint(NamedTuple):
    """What stands for a gradient."""

    norm: float
    """0 if there is none, or nothing in it."""
    numbers: tuple[float, ...] = ()
    """The logarithm of the norm, and the projections."""
    allowed: float = 0.0
    """By how much those of copies may differ."""

    @property
    def usable(self) -> bool:
        """Whether it shows anything."""
        return 0.0 < self.norm < math.inf


@torch.no_grad()
def fingerprint(grad: Tensor | None, shape: tuple[int, ...]) -> Fingerprint:
    """The fingerprint of a gradient. Waits for the device.

    Args:
        grad: this rank's elements, strided or sparse.
        shape: of its parameter: the same numbers in another shape are another gradient.
    """
    if grad is None or not _elements(grad).numel():
        return Fingerprint(0.0)
    norm = measure([_elements(grad)]).norms[0]
    seeds = [
        zlib.crc32(repr((tuple(shape), column)).encode()) & _HASHED for column in range(_DIRECTIONS)
    ]
    starts = torch.tensor(seeds, dtype=torch.int64, device="cpu").reshape(-1, 1).to(grad.device)
    real = wide(grad.device)
    total = torch.zeros(_DIRECTIONS, dtype=real, device=grad.device)
    for index, piece in _pieces(grad):
        share = piece.to(real) / norm.to(real)
        total = total + (_random(index, starts).to(real) * share).sum(dim=1)
    heads = torch.stack([norm, norm.log()]).to(real)
    found, *numbers = torch.cat([heads, total]).tolist()
    allowed = _HALF_ROUNDING if grad.dtype.itemsize == 2 else _ROUNDING
    return Fingerprint(found, tuple(numbers), allowed)


def are_copies(found: Sequence[Fingerprint]) -> bool:
    """Whether finite gradients are the same but for rounding."""
    if not all(each.usable for each in found):
        return not any(each.usable for each in found)
    allowed = max(each.allowed for each in found)
    columns = zip(*(each.numbers for each in found), strict=True)
    return all(max(column) - min(column) <= allowed for column in columns)


def _elements(grad: Tensor) -> Tensor:
    """The elements of a gradient; of a sparse one those that it has."""
    return sparse_values(grad.coalesce()) if grad.is_sparse else grad


def _pieces(grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The elements of a gradient, some at a time, and where they are in it."""
    values = _elements(grad)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not grad.is_sparse:
        flat = values.reshape(-1)
        for begin in range(0, flat.numel(), _PIECE):
            piece = flat[begin : begin + _PIECE]
            yield torch.arange(begin, begin + piece.numel(), device=grad.device), piece
        return
    rows = torch.zeros(values.shape[0], dtype=torch.int64, device=grad.device)
    for size, index in zip(grad.shape, sparse_indices(grad.coalesce()), strict=False):
        rows = rows * size + index
    flat = values.reshape(values.shape[0], -1)
    width = flat.shape[1]
    columns, at_once = torch.arange(width, device=grad.device), max(1, _PIECE // max(1, width))
    for begin in range(0, flat.shape[0], at_once):
        index = rows[begin : begin + at_once, None] * width + columns
        yield index.reshape(-1), flat[begin : begin + at_once].reshape(-1)


def _random(index: Tensor, starts: Tensor) -> Tensor:
    """Numbers of variance 1 between -1.73 and 1.73, a row a start: a hash of the element's index.

    In whole numbers below 2^62, so that every device computes the same.
    """
    mixed = ((index & _HASHED) * 1_013_904_223 + starts) & _HASHED
    for shift, factor in ((15, 1_597_334_677), (13, 747_796_405)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _HASHED
    mixed = (mixed ^ (mixed >> 16)) & 0xFFFF
    return (mixed.to(torch.float32) / 0x8000 - 1.0) * math.sqrt(3.0)


class _Claim(NamedTuple):
    """What was said of a parameter, or is taken for granted."""

    param: Tensor
    name: str
    apart: Hashable | None = None
    """What tells it from tensors that are said to be others; None if nothing was said of others."""
    alike: Hashable | None = None
    """What it shares with its copies on other ranks; None if there is none."""
    place: int | None = None
    """Its place among plain ones beside DTensors, which every rank is to hold alike."""
    left: bool = False
    """Whether another rank is to count it."""


class Bits(NamedTuple):
    """What follows from the bits of a parameter that is said to be no copy."""

    name: str
    tells: int
    """How many different numbers it shows; two ranks may have the same of a few by themselves."""
    gradient: Hashable
    rest: Hashable
    """The shape and the values; if those are all equal, its name too."""


class Copy(NamedTuple):
    """What is shown of a parameter that is said to be a copy."""

    name: str
    found: Fingerprint
    flattened: bool = False
    """Whether FSDP1 has cut it."""


class Shown(NamedTuple):
    """What a rank shows of parameters of which it was said who else holds them, by their keys."""

    left: int = 0
    """How many trained ones show nothing yet."""
    said: int = 0
    """Of how many something was said."""
    apart: Mapping[Hashable, Bits] = {}
    alike: Mapping[tuple[str, Hashable], Copy] = {}
    """Also of those that have no gradient here; plain ones beside DTensors by their places."""
    left_to_others: Sequence[tuple[_Shape, Copy]] = ()
    """With their shapes, those that another rank is to count."""
    counted: Sequence[tuple[_Shape, Fingerprint | None]] = ()
    """With their shapes, those that this rank counts and that may be these; None of a DTensor."""


class RankAgreement:
    """What one control has learned of the other ranks, so that it need not ask again."""

    def __init__(self) -> None:
        self._ranks: ModelRanks | None = None  # What the claims were made of.
        self._claims: dict[int, _Claim] = {}  # By the id of the parameter.
        # Parameters by their id. Not weak: `torch.utils.swap_tensors` refuses tensors that have a
        # weak reference. One that was replaced is not kept past the next step.
        self._compared: dict[int, Tensor] = {}
        self._doubtful: dict[int, Tensor] = {}
        self._showing: list[int] = []  # Those that are being compared, by their ids.
        # What follows is alike on all ranks: they know it from what they have told each other.
        self._same: dict[Hashable, dict[Hashable, int]] = {}  # By two keys, what was the same.
        self._again_at: int | None = None  # The step at which they look at doubtful ones again.
        self._look_until = _FIRST_STEPS
        self._is_open = True  # Whether a rank has trained tensors that it has yet to show.

    def __reduce__(self) -> Any:
        return RankAgreement, ()  # It is about these ranks; asking again costs one wait.

    def consider(self, ranks: ModelRanks, names: _Names) -> None:
        """Takes note of what is said of the parameters that there are now."""
        if ranks is self._ranks:
            return
        self._ranks = ranks
        self._claims = {id(claim.param): claim for claim in _claims_of(ranks, names)}
        for known in (self._compared, self._doubtful):
            for key in [key for key in known if key not in self._claims]:
                del known[key]

    def looks(self, step: int) -> bool:
        """Whether the host reads what the ranks say of themselves, for which it may have to wait.

        Args:
            step: the number of the coming step since the ranks have met.
        """
        return (self._is_open and step <= self._look_until) or self.is_due(step)

    def is_due(self, step: int) -> bool:
        """Whether it is time to look at doubtful ones again."""
        return self._again_at is not None and step >= self._again_at

    def look_again(self, step: int) -> None:
        """There was something new to see: the coming steps are looked at."""
        self._is_open, self._look_until = True, step + _FIRST_STEPS

    def unseen(self, params: Sequence[Tensor]) -> list[int]:
        """The places of those that have not been compared, nor looked at in doubt."""
        if len(self._compared) + len(self._doubtful) == len(self._claims):
            return []
        return [at for at, param in enumerate(params) if self._is_unseen(id(param))]

    def _is_unseen(self, key: int) -> bool:
        return key in self._claims and key not in self._compared and key not in self._doubtful

    def _count_open(self) -> int:
        return sum(
            is_trained(claim.param) for key, claim in self._claims.items() if self._is_unseen(key)
        )

    def report(
        self,
        ranks: ModelRanks,
        *,
        step: int,
        refused: bool,
        wide: bool,
        scaled: bool,
        anew: float,
    ) -> list[float]:
        """What the other ranks have to know of this one: REPORT.

        Args:
            ranks: that hold the model together, as this one knows them.
            step: as in `looks`.
            refused: whether this rank refuses the step.
            wide: whether all of its gradients are float64, or there are none.
            scaled: whether it has scaled a loss, or there is no scale.
            anew: whether it has other parameters than it has told of, or ASKS.
        """
        told = (
            refused,
            ranks.unknown is not None,
            ranks.plain_are_parts,
            self._count_open() if anew or self.looks(step) else 0,
            not wide,
            scaled,
            anew,
        )
        return [float(number) for number in told]

    def check(
        self, ranks: ModelRanks, reports: Sequence[Sequence[float]], *, all_read: bool
    ) -> None:
        """Raises, on every rank alike, if what the ranks say of themselves does not fit together.

        Args:
            ranks: that hold the model together, as this one knows them.
            reports: of each rank, the numbers that REPORT names.
            all_read: whether all ranks read them at this step.
        """
        told = dict(zip(REPORT, zip(*reports, strict=True), strict=True))
        refuse_refused(ranks, told["refused"])
        if not any(told["scaled"]):
            raise ScaleMisuse(_NOT_SCALED)
        if any(told["unknown"]):
            raise ValueError(ranks.unknown or _ELSEWHERE)
        if len(set(told["parts"])) > 1:
            raise ValueError(_UNLIKE)
        if all_read:
            self._is_open = any(told["open"])

    def _show_what_is_new(self) -> set[Hashable]:
        """What there is to be compared: what all ranks have to show of their parameters."""
        self._showing = [
            key
            for key, claim in self._claims.items()
            if key not in self._compared and _is_usable(_gradient_of(claim.param))
        ]
        return {tag for key in self._showing for tag in _tags_of(self._claims[key])}

    def shown(
        self,
        ranks: ModelRanks,
        *,
        scale: float,
        usable: bool = True,
        wanted: set[Hashable] | None = None,
    ) -> Shown:
        """What this rank has to show. Waits for the device.

        Args:
            ranks: that hold the model together.
            scale: what the gradients carry; messages have it divided out.
            usable: whether all gradients are finite on all ranks.
            wanted: what is to be shown; None for all that there is.
        """
        if not usable:
            self._showing = []
            return Shown(left=self._count_open())
        if wanted is None:
            self._show_what_is_new()
        apart: dict[Hashable, Bits] = {}
        alike: dict[tuple[str, Hashable], Copy] = {}
        left_to_others: list[tuple[_Shape, Copy]] = []
        showing = set(self._showing)
        for key, claim in self._claims.items():
            grad, shape = _gradient_of(claim.param), tuple(claim.param.shape)
            for tag in _tags_of(claim):
                if wanted is not None and tag not in wanted:
                    continue
                if tag[0] == "apart":
                    shows = key in showing or (key in self._compared and _is_usable(grad))
                    if shows and grad is not None:
                        apart[claim.apart] = _bits_of(claim, grad)
                    continue
                found = fingerprint(grad, shape)
                found = found._replace(norm=found.norm / scale)
                shown = Copy(claim.name, found, is_flattened(claim.param))
                if tag[0] == "left":
                    left_to_others.append((shape, shown))
                else:
                    alike[tag] = shown
        counted: list[tuple[_Shape, Fingerprint | None]] = []
        for param in ranks.params if ranks.shapes_left else ():
            shape = tuple(param.shape)
            asked = wanted is None or ("left", shape) in wanted
            if asked and shape in ranks.shapes_left and ranks.counting[id(param)]:
                plain = not is_distributed(param)
                counted.append((shape, fingerprint(param.grad, shape) if plain else None))
        left = self._count_open() - sum(map(self._is_unseen, self._showing))
        return Shown(left, len(self._claims), apart, alike, left_to_others, counted)

    def compare(self, ranks: ModelRanks, shown: Sequence[Shown], *, step: int) -> None:
        """Raises, on every rank alike, if copies were called parts, or parts copies.

        Args:
            ranks: that hold the model together.
            shown: of each rank, what `shown` returned.
            step: as in `looks`.
        """
        _refuse_unlike(ranks, [each.alike for each in shown])
        _refuse_uncounted_gradients(ranks, shown)
        doubtful = self._refuse_same(ranks, shown)
        self._doubtful = {}  # One that has no gradient at this step is news when it has one.
        for key in self._showing:
            claim = self._claims[key]
            known = self._doubtful if claim.apart in doubtful else self._compared
            known[key] = claim.param
        self._is_open = any(each.left for each in shown)
        if step == 1:  # The ranks have met, and count anew.
            self._look_until = _FIRST_STEPS
        self._again_at = step + max(1, step // 2) if doubtful else None

    def compare_now(self, ranks: ModelRanks, *, step: int, scale: float) -> None:
        """All ranks show what at least one of them has to be compared; raises as `compare` does.

        Args:
            ranks: that hold the model together.
            step: as in `looks`.
            scale: as in `shown`.
        """
        who, (group,) = ranks.rank_group.ranks, ranks.rank_group.groups
        wanted = set().union(*tell_all(self._show_what_is_new(), who, group))
        shown = tell_all(self.shown(ranks, scale=scale, wanted=wanted), who, group)
        self.compare(ranks, shown, step=step)

    def _refuse_same(self, ranks: ModelRanks, shown: Sequence[Shown]) -> set[Hashable]:
        """Raises if a parameter that was said to differ between ranks is a copy.

        Args:
            ranks: that hold the model together.
            shown: of each rank, what `shown` returned.

        Returns:
            The keys of those that may be copies: what was the same so far may be chance.
        """
        who = ranks.rank_group.ranks
        doubtful: set[Hashable] = set()
        # By their bits alone: tied embeddings have two names.
        seen: dict[Hashable, tuple[int, Hashable, Bits]] = {}
        for rank, theirs in zip(who, shown, strict=True):
            for key, bits in theirs.apart.items():
                first, first_key, there = seen.setdefault(bits[2:], (rank, key, bits))
                if first_key == key or first == rank:
                    continue
                same = self._same.setdefault((first_key, key), {})
                same[bits.gradient] = min(bits.tells, there.tells)
                doubtful |= {first_key, key}
                if sum(same.values()) >= _ENOUGH:
                    mine = sorted(map(repr, theirs.apart.values()))
                    every = [sorted(map(repr, each.apart.values())) for each in shown]
                    like = [each for each, held in zip(who, every, strict=True) if held == mine]
                    if ranks.plain_are_parts and first in like and len(mine) == theirs.said:
                        raise ValueError(_no_parts(bits.name, like))
                    raise ValueError(_no_part(bits.name, there.name, first, rank, len(who)))
        return doubtful


def _claims_of(ranks: ModelRanks, names: _Names) -> Iterator[_Claim]:
    """What is said of the parameters, of those of which something is."""
    me, elements = my_rank(), ranks.elements()
    apart = {id(param) for param in ranks.told_apart}
    alike = {id(param) for param in ranks.told_alike}
    left = {id(param) for param in ranks.left_to_others}
    places = {id(param): place for place, param in enumerate(ranks.plain)}
    if ranks.plain_are_parts:
        apart, places = apart | set(places), {}
    keys = ranks.keys or (None,) * len(ranks.params)
    for at, (param, name) in enumerate(zip(ranks.params, names(ranks.params), strict=True)):
        each = id(param)
        key: Hashable = ranks.copied.get(each)
        if key is None:  # Of a group of parts each rank has its own; a mesh says which do.
            key = (name, me) if ranks.plain_are_parts or each in ranks.copied else keys[at]
        claim = _Claim(
            param,
            name,
            key if each in apart else None,
            elements[at] if each in alike else None,
            places.get(each),
            each in left,
        )
        if claim[2:] != (None, None, None, False) and param.numel():
            yield claim


def _gradient_of(param: Tensor) -> Tensor | None:
    """The elements of a parameter's gradient here; None if they are others than the parameter's."""
    grad = param.grad
    return None if grad is None or not lie_alike(param, grad) else local_of(grad)


def _tags_of(claim: _Claim) -> list[tuple[str, Hashable]]:
    """By what ranks tell each other which parameters are to be shown."""
    tags: dict[str, Hashable | None] = {
        "apart": None if claim.apart is None else tuple(claim.param.shape),
        "alike": claim.alike,
        "plain": claim.place,
        "left": tuple(claim.param.shape) if claim.left else None,
    }
    return [(kind, key) for kind, key in tags.items() if key is not None]


def _is_usable(grad: Tensor | None) -> bool:
    """Whether a gradient shows anything: it is finite, and not zero. Waits for the device."""
    if grad is None or not _elements(grad).numel():
        return False
    norm = measure([_elements(grad)]).norms[0]
    return bool((norm > 0) & torch.isfinite(norm))


def _bits_of(claim: _Claim, grad: Tensor) -> Bits:
    """What follows from the bits of a parameter and of its gradient."""
    value, elements = local_of(claim.param), _elements(grad)
    gradient: Hashable = checksum(elements)
    if grad.is_sparse:
        gradient = gradient, checksum(sparse_indices(grad.coalesce()))
    rest = tuple(value.shape), checksum(value)
    if _is_drawn(value):
        return Bits(claim.name, _ENOUGH if _is_drawn(elements) else 1, gradient, rest)
    # FSDP1 cuts tensors anywhere: a row that is in both of two parts is no wonder.
    tells = 0 if is_flattened(claim.param) else _numbers_in(elements)
    return Bits(claim.name, tells, gradient, (*rest, claim.name))


def _is_drawn(tensor: Tensor) -> bool:
    """Whether a tensor has different elements: zeros and ones are the same everywhere."""
    return tensor.numel() > 0 and bool((tensor != tensor.reshape(-1)[0]).any())


def _numbers_in(grad: Tensor) -> int:
    """How many different numbers a gradient has; 1 if all rows or columns are the same.

    They are under a loss that is a sum.
    """
    for dim, size in enumerate(grad.shape):
        if size > 1 and bool((grad == grad.narrow(dim, 0, 1)).all()):
            return 1
    sample = grad.reshape(-1)[:_SAMPLED]
    return len(set(sample[sample != 0].tolist()))


def _refuse_unlike(ranks: ModelRanks, shown: Sequence[Mapping[tuple[str, Hashable], Copy]]) -> None:
    """Raises if a parameter that is taken for the same on several ranks is not.

    Args:
        ranks: that hold the model together.
        shown: of each rank, `Shown.alike`.
    """
    who = ranks.rank_group.ranks
    first: dict[tuple[str, Hashable], tuple[int, Copy]] = {}
    for rank, theirs in zip(who, shown, strict=True):
        for tag, each in theirs.items():
            other, there = first.setdefault(tag, (rank, each))
            if tag[0] == "alike" and not are_copies([there.found, each.found]):
                raise ValueError(_no_copy(each, there, other, rank))
    nothing = Copy("", Fingerprint(0.0))
    for tag in first:
        # Every rank is to hold a plain tensor beside DTensors.
        held = [theirs.get(tag, nothing) for theirs in shown]
        if tag[0] == "plain" and not are_copies([each.found for each in held]):
            here = shown[who.index(my_rank())].items()
            mine = [each.name for (kind, _), each in here if kind == "plain"]
            raise ValueError(_no_copies(ranks, held, mine))


def _refuse_uncounted_gradients(ranks: ModelRanks, shown: Sequence[Shown]) -> None:
    """Raises if a gradient that another rank is to count is none of those that others count.

    DTensors may be cut differently: where one has the shape, nothing is concluded.

    Args:
        ranks: that hold the model together.
        shown: of each rank, what `shown` returned.
    """
    who = ranks.rank_group.ranks
    for rank, theirs in zip(who, shown, strict=True):
        for shape, left in theirs.left_to_others:
            there = [
                found
                for other, each in zip(who, shown, strict=True)
                for of_shape, found in each.counted
                if other != rank and of_shape == shape
            ]
            if left.found.usable and not any(
                found is None or are_copies([left.found, found]) for found in there
            ):
                raise ValueError(
                    f"copies= says 0 for {left.name} on rank {rank}: another rank counts its "
                    "elements, and none that counts has the same gradient, which has norm "
                    f"{left.found.norm:.6g} there. Add up, or average, the gradients of copies and "
                    "of tied tensors over the ranks before step()."
                )


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


def _name_in(key: Hashable) -> str:
    """The name of a parameter, from its key."""
    return str(key[0] if isinstance(key, tuple) else key)


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


def _no_parts(name: str, ranks: Sequence[int]) -> str:
    return (
        "process_group= names ranks that hold other parts of the model, and the gradients on ranks "
        f"{shortened(ranks)} are the same bit for bit, and so are the parameters, {name} among "
        "them: they are copies. Copies of a model (data parallel) need no process_group=; under "
        "FullyShardedDataParallel with NO_SHARD say copies= with their number. Where some ranks "
        "hold copies and others parts, give the group of the parts alone, or mesh= and distinct=."
    )


def _no_part(name: str, first_name: str, first: int, rank: int, count: int) -> str:
    tied = "" if name == first_name else f" (there as {first_name})"
    return (
        f"{name} has the same values and the same gradient on ranks {first}{tied} and {rank}, bit "
        "for bit, where distinct=, process_group= or copies= says that they hold different "
        "parameters: it is a copy, and would count more than once. Say who counts it by copies=: "
        f"{count} for a plain tensor that all {count} ranks hold, 0 on all but the first that "
        "holds it otherwise, None for all others. If these are different parameters that happen to "
        "be the same, begin with different values."
    )


def _no_copy(here: Copy, there: Copy, other: int, rank: int) -> str:
    way_out = (
        "If ranks along a dimension of mesh= hold different parameters, such as pipeline stages, "
        'name it: GradientControl(..., mesh=world_mesh, distinct=("pp",)).'
    )
    if here.flattened:
        way_out = (
            "It is a shard of FullyShardedDataParallel (FSDP1), another one on every rank: in the "
            "place of mesh= write GradientControl(..., process_group=model.process_group)."
        )
    return (
        f"{here.name} is the same on ranks {other} and {rank} by what mesh= or copies= says, and "
        f"its gradients there are not: their norms are {there.found.norm:.6g} and "
        f"{here.found.norm:.6g}. Only the first would count. {way_out} If they hold copies, "
        "average the gradients over the ranks before step()."
    )


def _no_copies(ranks: ModelRanks, held: Sequence[Copy], mine: Sequence[str]) -> str:
    name = next(each.name for each in held if each.name)
    seen = shortened([f"{each.found.norm:.6g}" for each in held])
    listed = ", ".join(mine[:3]) + (", ..." if len(mine) > 3 else "")
    return (
        "plain tensors beside DTensors count once if every rank holds the same ones, and here "
        f"their gradients are not the same: those of {name}; their norms are {seen} on ranks "
        f"{shortened(ranks.rank_group.ranks)}. Whether they are parts of the model, such as "
        "experts, or copies whose gradients were not averaged, is not known. Plain on this rank: "
        f"{listed or 'none'}. Make parts DTensors with Shard(), average the gradients of copies "
        "before step(), and list copies in the same order on every rank."
    )
