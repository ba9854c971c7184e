"""Parameters and what the user has said of the ranks in; who holds the model together out.

A GradientControl makes one decision for one model, so it must know of every parameter over which
ranks its elements are spread and which ranks hold the same ones. DTensors say it for the ranks of
their own mesh. What lies outside is either equal (data parallel) or distinct (pipeline stages,
experts), which the user says by `mesh=` and `distinct=`, of plain tensors also by `copies=`, or by
`process_group=`, whose ranks hold other parts. What is not known is refused, never guessed.

Who takes part follows from the parameters and from what was said, never from which gradients there
are, nor from which parameters are frozen: one rank may thaw some of its own. Only `copies=`, a
group that torch does not have yet, and a group beside meshes need to ask the other ranks, once.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from gradilocks._torch import groups_joined, root_mesh
from gradilocks.ranks.layout import (
    Layout,
    device_for,
    flattened_among,
    is_distributed,
    meshes_of,
    my_rank,
    ranks_in,
    ranks_on,
    refuse_fsdp1_shards,
    shortened,
    world_size,
)
from gradilocks.values import RankGroup

__all__ = [
    "Copies",
    "ModelRanks",
    "RankOptions",
    "asks_others",
    "checked_options",
    "checksum",
    "is_trained",
    "model_ranks_of",
    "refuse_thawed",
    "tell_all",
]

_Name = Callable[[Tensor], str]
Copies = int | Callable[[str, Tensor], int | None]
"""How many ranks hold the same elements of a plain parameter: one number, or by its name."""


@dataclass(frozen=True)
class RankOptions:
    """What the user has said of the ranks."""

    process_group: Any = None
    mesh: Any = None
    distinct: tuple[str, ...] = ()
    copies: Copies | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RankOptions:
        return self  # A copy is among the same ranks, and process groups cannot be copied.

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "a GradientControl with process_group= cannot be pickled: the group belongs to "
                "this process. Save control.state_dict() and load it into a new one; "
                "copy.deepcopy works, and shares the group."
            )
        return self.__dict__


NOTHING_SAID = RankOptions()


def checked_options(
    *, process_group: Any, mesh: Any, distinct: object, copies: object
) -> RankOptions:
    """What was said of the ranks; raises if it makes no sense, whatever the parameters are."""
    if isinstance(distinct, str):
        distinct = (distinct,)
    named = tuple(cast("Any", distinct))
    if process_group is not None and mesh is not None:
        raise ValueError(
            "mesh= and process_group= were both given. mesh= says of all its ranks who holds what, "
            "by distinct=; leave process_group= out."
        )
    if mesh is None and named:
        raise ValueError(
            f"distinct={named!r} names dimensions of mesh=, and there is none. Write "
            f"GradientControl(..., mesh=world_mesh, distinct={named!r}) with the mesh of all ranks."
        )
    if mesh is not None:
        _check_mesh(mesh, named)
    number = isinstance(copies, int) and not isinstance(copies, bool) and copies >= 0
    if not (copies is None or callable(copies) or number):
        raise TypeError(
            "copies= is how many ranks hold the same elements of each plain parameter: a number, "
            f"or a function of its name and the parameter. Got {copies!r}."
        )
    return RankOptions(process_group, mesh, named, cast("Copies | None", copies))


def _check_mesh(mesh: Any, distinct: Sequence[str]) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "mesh= takes the DeviceMesh of all ranks that train the model, as init_device_mesh "
            f"makes it. Got {type(mesh).__name__}."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            "mesh= names ranks of which this one is none. Give it on the ranks of the mesh only."
        )
    names = mesh.mesh_dim_names or ()
    missing = [name for name in distinct if name not in names]
    if missing:
        has = f"has {', '.join(names)}" if names else "has no names for its dimensions"
        raise ValueError(
            f"distinct= names {', '.join(missing)}, and the mesh {has}. Name the dimensions along "
            "which ranks hold different parameters, such as pipeline stages and experts."
        )


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that hold one model together, as far as this rank can know."""

    rank_group: RankGroup
    params: tuple[Tensor, ...]
    """All parameters of this rank."""
    counting: Mapping[int, bool]
    """By a parameter's id, whether this rank, or the mesh that it lies on, counts it. Of several
    that hold the same elements the first does."""
    keys: tuple[Hashable, ...] | None
    """For each parameter, what tells it from all others on all ranks: two with one key are parts or
    copies of one tensor. None if that is not known."""
    unknown: str | None = None
    """What this rank does not know, in words, if anything: all ranks have to be told."""
    plain: tuple[Tensor, ...] = ()
    """Plain parameters whose gradients are compared: those beside distributed ones, which nobody
    has said to be copies though they are taken for such, until each that is trained has shown one;
    and parts that process_group= names, once."""
    plain_are_parts: bool = False
    """Whether plain tensors are parts of the model, of which nothing more is known."""
    ambiguous: frozenset[Hashable] = frozenset()
    """Keys of plain parameters that several ranks hold, each in one copy, of which nobody has said
    whether they are different tensors or parts of one."""
    copied: Mapping[int, Hashable | None] = field(default_factory=dict)
    """By the id of a plain parameter that `copies=` is about, what its elements are known by on all
    ranks; None if another rank counts them and which one was not said."""
    told_apart: tuple[Tensor, ...] = ()
    """Parameters that are other tensors than those of the same name elsewhere, because it was said
    of the ranks and not of them."""
    told_alike: tuple[Tensor, ...] = ()
    """Parameters that other ranks hold too, because it was said: `elements` tells which do."""
    left_to_others: tuple[Tensor, ...] = ()
    """Plain parameters of which `copies=` says that another rank counts them."""
    shapes_left: frozenset[tuple[int, ...]] = frozenset()
    """The shapes of those of all ranks."""
    counting_each: Mapping[int, bool] | None = None
    """As `counting`, in the norm of the tensor by itself: what `copies=` leaves to others, such as
    the second of tied embeddings, counts there if it has a key of its own. None if all is alike."""
    by_mesh: Mapping[Hashable, bool] = field(default_factory=dict)
    """By the keys of trained parameters that `mesh=` alone is about, whether this rank counts: one
    of all ranks must, or the norm would lack them."""

    @functools.cached_property
    def shapes(self) -> int:
        """A number that stands for the shapes of all parameters, in order."""
        return hash(tuple(tuple(param.shape) for param in self.params)) & 0xFFFFFFFF

    def is_like(self, other: ModelRanks | None) -> bool:
        """Whether `other` is about the same parameters on the same ranks."""
        return other is self or (
            other is not None
            and len(other.params) == len(self.params)
            and not any(map(operator.is_not, other.params, self.params))
            and (other.rank_group.ranks, other.keys) == (self.rank_group.ranks, self.keys)
        )

    def counts(
        self, params: Sequence[Tensor], layouts: Sequence[Layout | None]
    ) -> tuple[bool, ...]:
        """Whether this rank's elements count, for the gradient of each of `params`."""
        return _with_layouts(self.counting, params, layouts)

    def counts_each(
        self, params: Sequence[Tensor], layouts: Sequence[Layout | None]
    ) -> tuple[bool, ...]:
        """Whether they count in the norm of that gradient by itself."""
        each = self.counting if self.counting_each is None else self.counting_each
        return _with_layouts(each, params, layouts)

    def elements(self) -> list[Hashable | None]:
        """For each parameter, what its elements on this rank are known by on all ranks.

        Ranks with the same hold the same elements. None if this rank holds none, or if who else
        does is not known.
        """
        keys = self.keys or [None] * len(self.params)
        return [self._elements(param, key) for param, key in zip(self.params, keys, strict=True)]

    def _elements(self, param: Tensor, key: Hashable | None) -> Hashable | None:
        if id(param) in self.copied:
            return self.copied[id(param)]
        if key is None:
            return None
        if is_distributed(param):
            spread: Any = param
            here = spread.device_mesh.get_coordinate()
            if here is None:
                return None
            return key, tuple(
                place
                for place, placement in zip(here, spread.placements, strict=True)
                if not placement.is_replicate()
            )
        return None if self.plain_are_parts else (key, ())


def _with_layouts(
    counting: Mapping[int, bool], params: Sequence[Tensor], layouts: Sequence[Layout | None]
) -> tuple[bool, ...]:
    return tuple(
        [
            counting.get(id(param), True) and (layout is None or layout.counts)
            for param, layout in zip(params, layouts, strict=True)
        ]
    )


def model_ranks_of(
    params: Sequence[Tensor],
    *,
    name: _Name,
    options: RankOptions = NOTHING_SAID,
    way_out: str = "",
) -> ModelRanks | None:
    """Which ranks hold one model together; None if each holds all of it.

    Args:
        params: all parameters of the model on this rank.
        name: tells a parameter's name.
        options: what the user has said.
        way_out: what to do where it cannot be known, in words, if not what a GradientControl needs.

    Raises:
        ValueError: if it cannot be known and no other rank would wait to hear of it.
    """
    group, mesh = options.process_group, options.mesh
    if group is None and mesh is None:
        refuse_fsdp1_shards(params, name=name, way_out=way_out or _NAME_THE_GROUP)
    if mesh is not None:
        return _by_mesh(params, options, name)
    if group is not None:
        return _by_group(params, options, name)
    return _by_tensors(params, options, name, way_out)


def asks_others(params: Sequence[Tensor], options: RankOptions) -> bool:
    """Whether `model_ranks_of` asks the other ranks, whatever it has asked before."""
    if options.copies is not None:
        return True
    group = options.process_group
    return group is not None and any(
        ranks_on(mesh) != ranks_in(group) for mesh, _ in meshes_of(params)
    )


def _by_mesh(params: Sequence[Tensor], options: RankOptions, name: _Name) -> ModelRanks:
    """The user has said which ranks there are, and along which dimensions they differ."""
    mesh = options.mesh
    coordinates = _coordinates(mesh)
    dims = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    equal = [at for at, dim in enumerate(dims) if dim not in options.distinct]
    apart = [at for at, dim in enumerate(dims) if dim in options.distinct]
    me = my_rank()
    counting: dict[int, bool] = {}
    keys: list[Hashable] = []
    alike: list[Tensor] = []
    for param in params:
        block = ranks_on(cast("Any", param).device_mesh) if is_distributed(param) else (me,)
        strangers = [rank for rank in block if rank not in coordinates]
        if strangers:
            raise ValueError(
                f"{name(param)} is a DTensor on {_described(cast('Any', param).device_mesh)}, and "
                f"mesh= has ranks {shortened(sorted(coordinates))} only. Give the mesh of all "
                "ranks that hold parts of the model."
            )
        # Of blocks that hold the same, the one that has the first rank of each equal dimension.
        counting[id(param)] = any(all(coordinates[rank][at] == 0 for at in equal) for rank in block)
        stage = tuple(coordinates[block[0]][at] for at in apart)
        keys.append((name(param), stage))
        if any(
            rank not in block and tuple(lies[at] for at in apart) == stage
            for rank, lies in coordinates.items()
        ):
            alike.append(param)
    ranks = tuple(sorted(coordinates))
    rank_group = _group_for(ranks, mesh.device_type, params, meet_by=mesh.get_all_groups())
    known = ModelRanks(
        rank_group=rank_group,
        params=tuple(params),
        counting=counting,
        keys=tuple(keys),
        told_apart=tuple(params) if apart else (),
        told_alike=tuple(alike),
    )
    known = _with_copies(known, options.copies, name, told_by_mesh=True)
    by_mesh = {
        key: counting[id(param)]
        for param, key in zip(params, keys, strict=True)
        if is_trained(param) and id(param) not in known.copied
    }
    return replace(known, by_mesh=by_mesh)


def _by_group(params: Sequence[Tensor], options: RankOptions, name: _Name) -> ModelRanks:
    """The user has named ranks that hold other parts of the model, or all of its parts."""
    group = options.process_group
    ranks = ranks_in(group)
    meshes = meshes_of(params)
    if len(ranks) > 1 and options.copies is None:
        _refuse_beside_flattened(params, name=name)
    if any(ranks_on(mesh) != ranks for mesh, _ in meshes):
        return _by_group_beside_meshes(params, options, name)
    device = meshes[0][1].device if meshes else params[0].device
    kind = meshes[0][0].device_type if meshes else device.type
    rank_group = RankGroup(ranks, (group,), device_for(group, kind, device))
    counting = {id(param): True for param in params}
    unproven = _plain(params) if meshes or options.copies is None else []
    if meshes:
        counting |= dict.fromkeys(map(id, unproven), my_rank() == ranks[0])
    known = ModelRanks(
        rank_group=rank_group,
        params=tuple(params),
        plain=tuple(unproven),
        plain_are_parts=not meshes and options.copies is None,
        told_apart=() if meshes or options.copies is None else tuple(params),
        counting=counting,
        keys=tuple(map(name, params)) if meshes or options.copies is not None else None,
    )
    return _with_copies(known, options.copies, name)


def _by_group_beside_meshes(
    params: Sequence[Tensor], options: RankOptions, name: _Name
) -> ModelRanks:
    """A group beside DTensors on other ranks, as of pipeline stages whose layers are sharded.

    The stages' meshes and the group span the model between them: every rank of the group tells its
    meshes, and all ranks of those take part.
    """
    group = options.process_group
    meshes = meshes_of(params)
    mine = sorted({rank for mesh, _ in meshes for rank in ranks_on(mesh)} | {my_rank()})
    problem = None
    unlike = [(mesh, param) for mesh, param in meshes if list(ranks_on(mesh)) != mine]
    plain = [p for p in _plain(params) if is_trained(p)] if meshes else []
    # What is wrong with copies= itself all ranks hear of later.
    said, *_ = _said_of(plain, options.copies, name, world_size())
    plain = [param for param in plain if said.get(id(param), 0) is None]
    if unlike:
        problem = _several_meshes(*unlike[0], name, mine)
    elif plain:
        problem = _plain_beside_group(plain[0], name)
    told = tell_all((mine, problem), ranks_in(group), group)
    raise_for_all(problem, ranks_in(group), [theirs for _, theirs in told])
    every = tuple(sorted({rank for theirs, _ in told for rank in theirs}))
    kind = meshes[0][0].device_type if meshes else params[0].device.type
    along = meshes[0][0].get_all_groups() if meshes else []
    # A stage is known by the first of its ranks: the same names on two stages are two tensors.
    known = ModelRanks(
        rank_group=_group_for(every, kind, params, meet_by=[*along, group]),
        params=tuple(params),
        counting={id(param): True for param in params},
        keys=tuple((name(param), mine[0]) for param in params),
        told_apart=tuple(params),
    )
    return _with_copies(known, options.copies, name)


def _by_tensors(
    params: Sequence[Tensor], options: RankOptions, name: _Name, way_out: str
) -> ModelRanks | None:
    """Nobody has said anything: DTensors on all ranks say enough."""
    meshes = meshes_of(params)
    if not meshes and options.copies is None:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        _refuse_copies_alone(params, options.copies, name)
        return None
    ranks = tuple(range(dist.get_world_size()))
    fitting = [(mesh, param) for mesh, param in meshes if ranks_on(mesh) == ranks]
    if meshes and not fitting:
        raise ValueError(_part_of_the_world(*meshes[0], name, way_out))
    strangers = [(mesh, param) for mesh, param in meshes if ranks_on(mesh) != ranks]
    unknown = _other_ranks(*strangers[0], name, ranks, way_out) if strangers else None
    # A slice of a mesh of all ranks: each has one, and refuses by itself. Of a mesh of its own the
    # others may know nothing, and hear of it at the first step.
    if unknown is not None and any(ranks_on(root_mesh(mesh)) == ranks for mesh, _ in strangers):
        raise ValueError(unknown)
    kind = fitting[0][0].device_type if fitting else params[0].device.type
    near = fitting[0][1].device if fitting else params[0].device
    rank_group = RankGroup(ranks, (None,), device_for(None, kind, near))
    counting = {id(param): True for param in params}
    plain = _plain(params)
    counting |= dict.fromkeys(map(id, plain), my_rank() == 0)
    known = ModelRanks(
        rank_group=rank_group,
        unknown=unknown,
        params=tuple(params),
        plain=tuple(plain),
        counting=counting,
        keys=tuple(map(name, params)),
    )
    return _with_copies(known, options.copies, name)


def _with_copies(
    known: ModelRanks, copies: Copies | None, name: _Name, *, told_by_mesh: bool = False
) -> ModelRanks:
    """What is known, with what `copies=` says of plain parameters, and of tied DTensors.

    Of the ranks that hold the same elements the first counts. Which ranks those are is found by
    what they hold: all parameters with as many copies are compared together, since one alone may be
    the same everywhere, as a bias of zeros is. Where that does not come out, each is compared by
    itself: tensor parallel ranks share other ones than data parallel ranks do.

    Two ranks that each hold one copy of a name may have two tensors (experts) or two parts of one
    (shards): a policy that bounds tensors apart must know which, and nobody has said.

    Args:
        known: without `copies=`.
        copies: what was said.
        name: tells a parameter's name.
        told_by_mesh: whether `known` says of every plain parameter who counts it.
    """
    if copies is None:
        return known
    ranks, me = known.rank_group.ranks, my_rank()
    keys = dict(zip(map(id, known.params), known.keys or map(name, known.params), strict=True))
    numbers, problem, cause = _said_of(known.params, copies, name, len(ranks))
    wanted: dict[int, list[Tensor]] = {}
    counting, each = dict(known.counting), dict(known.counting)
    copied: dict[int, Hashable | None] = {}
    for param in known.params:
        number = numbers.get(id(param))
        if is_distributed(param):  # Its mesh says who holds it; another mesh's ranks may count.
            counting[id(param)] = counting[id(param)] and number != 0
        elif number is None:
            if not told_by_mesh and not any(param is each for each in known.plain):
                copied[id(param)] = None
        else:
            wanted.setdefault(number, []).append(param)
            if number == len(ranks):  # One tensor, whatever mesh= calls distinct.
                keys[id(param)] = name(param)
    contents = {number: _contents(listed, name) for number, listed in wanted.items() if number > 1}
    roll = [(keys[id(param)], number) for number, listed in wanted.items() for param in listed]
    uncounted = [p for p in known.params if numbers.get(id(p)) == 0 and is_trained(p)]
    zeros = [(name(param), *_seen_of(param)) for param in uncounted]
    (group,) = known.rank_group.groups
    left = [tuple(param.shape) for param in wanted.get(0, ())]
    told = tell_all((contents, roll, left, zeros, problem), ranks, group)
    raise_for_all(problem, ranks, [theirs for *_, theirs in told], cause=cause)
    alike: dict[tuple[int, str], list[int]] = {}
    for rank, (theirs, *_) in zip(ranks, told, strict=True):
        for number, held in theirs.items():
            alike.setdefault((number, held), []).append(rank)
    partners = {
        id(param): alike[number, contents[number]]
        for number in contents
        for param in wanted[number]
    }
    if any(len(who) != number for (number, _), who in alike.items()):
        partners = _partners_of_each(known, {n: wanted[n] for n in contents}, name)
    _refuse_zeros(known, numbers, [theirs for *_, theirs, _ in told])
    holders: dict[Hashable, list[tuple[int, int]]] = {}
    for rank, (_, theirs, *_) in zip(ranks, told, strict=True):
        for key, number in theirs:
            holders.setdefault(key, []).append((rank, number))
    for number, listed in wanted.items():
        for param in listed:
            holder = partners[id(param)][0] if number > 1 else me if number else None
            counting[id(param)] = first = holder == me
            copied[id(param)] = None if holder is None else (name(param), holder)
            held_by = holders[keys[id(param)]]
            if number or any(theirs for _, theirs in held_by):
                each[id(param)] = first
            elif not told_by_mesh:
                each[id(param)] = me == held_by[0][0]
    ambiguous = [
        key
        for key, held_by in holders.items()
        if not _is_one_tensor([number for _, number in held_by], told_by_mesh)
    ]
    said = {key for key, number in numbers.items() if number is not None}
    several = [param for number, listed in wanted.items() if number > 1 for param in listed]
    grouped = [param for param in several if numbers[id(param)] != len(ranks)]
    return replace(
        known,
        plain=tuple(_without(known.plain, said)),
        counting=counting,
        counting_each=each,
        told_apart=(*_without(known.told_apart, said), *wanted.get(1, ()), *grouped),
        told_alike=(*_without(known.told_alike, said), *several),
        left_to_others=tuple(wanted.get(0, ())),
        shapes_left=frozenset(shape for _, _, theirs, *_ in told for shape in theirs),
        copied=copied,
        keys=tuple(keys[id(param)] for param in known.params),
        ambiguous=frozenset(ambiguous),
    )


def _without(params: Sequence[Tensor], said: set[int]) -> list[Tensor]:
    return [param for param in params if id(param) not in said]


def _said_of(
    params: Sequence[Tensor], copies: Copies | None, name: _Name, most: int
) -> tuple[dict[int, int | None], str | None, Exception | None]:
    """By a parameter's id what `copies=` says of it; what is wrong with that, and the cause.

    Of a DTensor, whose mesh says who holds it, only a 0 that a function returned is taken.
    """
    said: dict[int, int | None] = {}
    for param in params:
        try:
            number: Any = copies(name(param), param) if callable(copies) else copies
        except Exception as error:  # Raised on this rank alone, the others would wait for it.
            what = f"copies= raised {type(error).__name__} for {name(param)}: {error}"
            return said, what, error
        if is_distributed(param):
            number = 0 if callable(copies) and number == 0 else None
        elif number is not None and (type(number) is not int or not 0 <= number <= most):
            what = (
                f"copies= says {number!r} for {name(param)}: it is the number of ranks that hold "
                f"the same elements of it, 1 to {most} here; 0 if another rank counts them, "
                "None to go by what is known without it."
            )
            return said, what, None
        said[id(param)] = number
    return said, None, None


def _refuse_copies_alone(params: Sequence[Tensor], copies: Copies | None, name: _Name) -> None:
    """Raises if `copies=` speaks of other ranks and there are none."""
    said, problem, cause = _said_of(params, copies, name, 1)
    other = next((param for param in params if said.get(id(param)) == 0), None)
    if problem is None and other is not None:
        problem = f"copies= says 0 for {name(other)}: another rank counts it."
    if problem is not None:
        raise ValueError(
            f"{problem} No other rank runs: call torch.distributed.init_process_group() before "
            "the control is made, or leave copies= out."
        ) from cause


def _contents(params: Sequence[Tensor], name: _Name) -> str:
    """What stands for the names, shapes and values of parameters."""
    listed = [(name(param), tuple(param.shape), checksum(param)) for param in params]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _partners_of_each(
    known: ModelRanks, wanted: Mapping[int, Sequence[Tensor]], name: _Name
) -> dict[int, list[int]]:
    """By the id of a parameter that several ranks hold, which do, found for each by itself.

    One that more ranks have the same values of than was said, as of a bias of zeros, is held by the
    same ranks as another one: of its own module or, if that leaves one choice, of any. Whether that
    is right shows in its gradient.

    Args:
        known: the ranks.
        wanted: by how many ranks hold them, this rank's parameters.
        name: tells a parameter's name.

    Raises:
        ValueError: on every rank, if not as many ranks hold the same values as was said.
    """
    ranks, (group,) = known.rank_group.ranks, known.rank_group.groups
    listed = [(number, param) for number, each in wanted.items() for param in each]
    mine = {(number, name(param)): _contents([param], name) for number, param in listed}
    told: list[dict[tuple[int, str], str]] = tell_all(mine, ranks, group)
    same: dict[tuple[int, str], list[int]] = {}
    for rank, theirs in zip(ranks, told, strict=True):
        for (number, _), held in theirs.items():
            same.setdefault((number, held), []).append(rank)
    found: list[dict[tuple[int, str], list[int]]] = []
    for theirs in told:
        sure = {key: same[key[0], held] for key, held in theirs.items()}
        sure = {key: who for key, who in sure.items() if len(who) == key[0]}
        found.append({})
        for (number, what), held in theirs.items():
            who = same[number, held]
            if (number, what) not in sure:
                fitting = [
                    (its.rpartition(".")[0], each)
                    for (as_many, its), each in sure.items()
                    if as_many == number and set(each) <= set(who)
                ]
                near = [each for module, each in fitting if module == what.rpartition(".")[0]]
                choices = near or [each for _, each in fitting]
                if choices and all(each == choices[0] for each in choices):
                    who = choices[0]
            found[-1][number, what] = who
    problems: list[str | None] = [None] * len(ranks)
    for at, of_rank in enumerate(found):
        for (number, what), who in of_rank.items():
            agreed = all(found[ranks.index(rank)].get((number, what)) == who for rank in who)
            if problems[at] is None and (len(who) != number or not agreed):
                problems[at] = (
                    f"copies= says that {number} ranks hold the same elements of {what}, and ranks "
                    f"{shortened(same[number, told[at][number, what]])} hold the same values of "
                    "it. Make copies equal before the control is made (broadcast them), give "
                    "different parts different values, or say by mesh= and distinct= which ranks "
                    "hold what."
                )
    here = ranks.index(my_rank())
    raise_for_all(problems[here], ranks, problems)
    return {id(param): found[here][number, name(param)] for number, param in listed}


_Seen = tuple[tuple[int, ...], int | None]
"""The shape of a parameter, and what stands for its values; None for those of a DTensor."""


def _seen_of(param: Tensor) -> _Seen:
    return tuple(param.shape), None if is_distributed(param) else checksum(param)


def _refuse_zeros(
    known: ModelRanks,
    numbers: Mapping[int, int | None],
    told: Sequence[Sequence[tuple[str, tuple[int, ...], int | None]]],
) -> None:
    """Raises, on every rank, if `copies=` says 0 for what no other rank can count.

    A tensor that counts elsewhere is there under this name or another, as tied embeddings are, and
    has the same values; of DTensors, which may be cut differently, the same shape.

    Args:
        known: the ranks, and this one's parameters.
        numbers: what `copies=` says of them, by their ids.
        told: of each rank, the names of trained parameters with 0 and what is seen of them.
    """
    shapes = {shape for theirs in told for _, shape, _ in theirs}
    if not shapes:
        return
    ranks, (group,) = known.rank_group.ranks, known.rank_group.groups
    left = [p for p in known.params if numbers.get(id(p)) != 0 and is_trained(p)]
    counted = [_seen_of(param) for param in left if tuple(param.shape) in shapes]
    there = {each for theirs in tell_all(counted, ranks, group) for each in theirs}
    spread = {shape for shape, bits in there if bits is None}
    whole = {shape for shape, _ in there}
    for rank, theirs in zip(ranks, told, strict=True):
        for what, shape, bits in theirs:
            found = shape in whole if bits is None else (shape, bits) in there or shape in spread
            if not found:
                raise ValueError(
                    f"copies= says 0 for {what} on rank {rank}: another rank counts its elements, "
                    "and none holds a parameter with the same values that counts. Return 1 on the "
                    "rank that is to count it, or the number of ranks that hold the same on each "
                    "of them; make copies and tied tensors equal before the control is made."
                )


def _is_one_tensor(numbers: Sequence[int], told_by_mesh: bool) -> bool:
    """Whether ranks that hold parameters with one key, in so many copies, hold one tensor."""
    counted = [number for number in numbers if number]
    if not counted:
        return told_by_mesh or len(numbers) == 1
    return counted == [len(counted)] * len(counted)


def tell_all(mine: Any, ranks: Sequence[int], group: Any) -> list[Any]:
    """What every rank has to tell, in the order of `ranks`; the host waits for all of them."""
    import torch.distributed as dist

    told: list[Any] = [None] * len(ranks)
    dist.all_gather_object(told, mine, group=group)
    return told


def raise_for_all(
    mine: str | None,
    ranks: Sequence[int],
    problems: Sequence[str | None],
    *,
    cause: Exception | None = None,
) -> None:
    """Raises on every rank if one of them has a problem: its own, or that of the first that has."""
    if mine is not None:
        raise ValueError(mine) from cause
    for rank, theirs in zip(ranks, problems, strict=True):
        if theirs is not None:
            raise ValueError(f"rank {rank} refuses: {theirs}")


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A number that follows from a tensor's bits, in whole numbers: the same in any order."""
    total = 0
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.reshape(-1).view(bits[values.dtype.itemsize])
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE].to(torch.int64)
        index = torch.arange(begin, begin + piece.numel(), device=piece.device) % 65_521 + 1
        total = (total + int((piece * index).sum())) & ((1 << 62) - 1)
    return total


_PIECE = 1 << 20  # Elements at a time: a large embedding must not need its size again.


def _plain(params: Sequence[Tensor]) -> list[Tensor]:
    return [param for param in params if not is_distributed(param)]


def is_trained(param: Tensor) -> bool:
    """Whether a gradient of `param` may count, as things stand."""
    return (param.requires_grad or param.grad is not None) and param.numel() > 0


def _coordinates(mesh: Any) -> dict[int, tuple[int, ...]]:
    """Where each rank of a mesh lies on it."""
    shape = tuple(mesh.mesh.shape)
    found: dict[int, tuple[int, ...]] = {}
    for place, rank in enumerate(mesh.mesh.flatten().tolist()):
        at = []
        for size in reversed(shape):
            place, here = divmod(place, size)
            at.append(here)
        found[rank] = tuple(reversed(at))
    return found


_made: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""The groups that were made here, by their ranks, each after the default group of its time."""


def _group_for(
    ranks: tuple[int, ...], kind: str, params: Sequence[Tensor], *, meet_by: Sequence[Any]
) -> RankGroup:
    """One process group of these ranks; all of them make it if torch has none.

    Args:
        ranks: ascending.
        kind: of the devices that the model is on.
        params: of this rank.
        meet_by: groups by which each of the ranks reaches every other, one after the other.
    """
    import torch.distributed as dist

    if len(ranks) == dist.get_world_size():
        group = None
    elif len(meet_by) == 1:
        (group,) = meet_by
    else:
        world, group = _made.get(ranks, (None, None))
        if world is None or world is not dist.group.WORLD:
            group = _new_group(ranks, meet_by)
            _made[ranks] = dist.group.WORLD, group
    device = next((p.device for p in params if p.device.type == kind), params[0].device)
    return RankGroup(ranks, (group,), device_for(group, kind, device))


def _new_group(ranks: tuple[int, ...], meet_by: Sequence[Any]) -> Any:
    """A new process group, made by its own ranks alone.

    torch names such a group by how many groups the process is in, and ranks that are in more of
    them than others would wait for each other under different names. So each first makes groups of
    itself alone, until all are in as many.
    """
    import torch.distributed as dist

    mine = most = groups_joined()
    for group in meet_by:
        most = max(tell_all(most, dist.get_process_group_ranks(group), group))
    for _ in range(most - mine):
        dist.new_group([my_rank()], use_local_synchronization=True)
    return dist.new_group(list(ranks), use_local_synchronization=True)


def refuse_thawed(params: Sequence[Tensor], options: RankOptions, *, name: _Name) -> None:
    """Raises if parameters are trained now that were not, and nobody has said who holds them."""
    if options.process_group is not None and options.copies is None:
        _refuse_beside_flattened(params, name=name)


def _refuse_beside_flattened(params: Sequence[Tensor], *, name: _Name) -> None:
    """Raises if there are trained parameters that FSDP1 was told to leave alone, beside others."""
    flattened = {id(param) for param in flattened_among(params)}
    left = [p for p in params if flattened and id(p) not in flattened and is_trained(p)]
    if left:
        raise ValueError(
            f"{name(left[0])} is a plain tensor beside shards of FullyShardedDataParallel (FSDP1), "
            "which was told to ignore it. Whether the ranks of process_group= hold copies of it or "
            "other parts of the model is not known, and the norm depends on it. Say so: "
            "copies=lambda name, param: 1 for a shard, or the number of ranks that hold the same."
        )


def _described(mesh: Any) -> str:
    names = mesh.mesh_dim_names
    dims = "" if names is None else f" ({', '.join(names)})"
    return f"the mesh{dims} of ranks {shortened(ranks_on(mesh))}"


_NAME_THE_GROUP = (
    "Write GradientControl(..., process_group=model.process_group) with the FSDP model, or "
    "process_group=torch.distributed.group.WORLD if it is sharded over all ranks. With NO_SHARD "
    "every rank holds all of it: add copies= with the number of ranks, or use "
    "DistributedDataParallel."
)

_SAY_IT = (
    "Say it with the mesh of all ranks: GradientControl(..., mesh=world_mesh) if ranks outside "
    'hold copies, GradientControl(..., mesh=world_mesh, distinct=("pp",)) with the names of the '
    "dimensions along which they hold other parts."
)


def _part_of_the_world(mesh: Any, param: Tensor, name: _Name, way_out: str) -> str:
    import torch.distributed as dist

    return (
        f"{name(param)} is a DTensor on {_described(mesh)}, and {dist.get_world_size()} ranks run. "
        "Whether the others hold copies of the model (data parallel) or other parts of it "
        f"(pipeline stages, experts) is not known, and the norm depends on it. "
        f"{way_out or _SAY_IT}"
    )


def _other_ranks(
    mesh: Any, param: Tensor, name: _Name, ranks: tuple[int, ...], way_out: str
) -> str:
    return (
        f"{name(param)} is a DTensor on {_described(mesh)}, and other parameters lie on ranks "
        f"{shortened(ranks)}. Whether the ranks of one and not of the other hold copies of it or "
        f"other parts of the model is not known, and the norm depends on it. {way_out or _SAY_IT}"
    )


def _several_meshes(mesh: Any, param: Tensor, name: _Name, ranks: Sequence[int]) -> str:
    return (
        f"{name(param)} is a DTensor on {_described(mesh)}, and other parameters beside it lie on "
        f"ranks {shortened(ranks)}. Beside process_group= all of a rank's DTensors must lie on the "
        f"same ranks, or who holds copies is not known. {_SAY_IT}"
    )


def _plain_beside_group(param: Tensor, name: _Name) -> str:
    return (
        f"{name(param)} is a plain tensor beside DTensors, and process_group= names other ranks "
        "than their mesh has. Whether the ranks of the mesh hold copies of it is not known, and "
        f"the norm depends on it. {_SAY_IT}"
    )
