"""The only finder of gradients: parameters enter, the gradients of this step leave.

What is measured and multiplied are a gradient's own elements: the values of a sparse gradient, the
local shard of a distributed one. A step must notice whatever has changed since the last one: a
parameter frozen, replaced, moved or given other storage, a gradient with another address, size or
memory layout. What has not changed (the tables of chunks on the device, an optimizer's own
pointers) is not worked out again.

Where the native library is built (`kernels/native.py`) C++ compares all that with the last step,
and makes no Python object of a gradient: 2,000 parameters take 0.1 ms of the host's time as they
were and 0.2 to 0.4 with new gradients, where Python takes 0.75 and 1.1 to 1.8 (two AMD cores). Both
say the same (`tests/engine/test_walks_agree.py`); what C++ does not know is looked at here.
"""

from __future__ import annotations

import bisect
import operator
import struct
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks._torch import TensorBase, sparse_values, tensor_guards
from gradilocks.errors import SharedParameter
from gradilocks.kernels import native
from gradilocks.kernels.chunks import (
    DTYPES,
    AddressedTensors,
    Addresses,
    all_aligned,
    as_numbers,
    kinds_of,
)
from gradilocks.kernels.cuda_graph import capturing, keeping
from gradilocks.kernels.guards import Guard, attribute
from gradilocks.kernels.host_numbers import stream_of
from gradilocks.kernels.pieces import has_memory
from gradilocks.ranks.layout import (
    Layout,
    Summand,
    dtensor_parts,
    is_distributed,
    layout_of,
    layout_on,
    lie_alike,
    local_of,
    with_sums_reduced,
    without_missing_summands,
)

__all__ = [
    "GradientTable",
    "Gradients",
    "Lists",
    "TableGradients",
    "addresses_of",
    "every_parameter",
    "first_parameter",
    "gradients_among",
    "gradients_of",
    "lists_of",
    "measurable",
    "measurable_gradients",
    "parameter_list",
    "peek_parameters",
    "refuse_shared_gradient",
    "refuse_twice",
    "requiring",
]

_Found = TypeVar("_Found")
Name = Callable[[Tensor], str]
Lists = Sequence[Sequence[list[Tensor]]]
"""For each optimizer, the lists of parameters of its groups."""

_address = TensorBase.data_ptr
_offset = TensorBase.storage_offset
_shape_of = operator.attrgetter("shape")
_device_of = operator.attrgetter("device")
_dtype_of = operator.attrgetter("dtype")
_requires_grad = operator.attrgetter("requires_grad")
_device_number = TensorBase.get_device
_PLAIN = {Tensor, torch.nn.Parameter}
_ONLY_DOUBLE = {torch.float64}
_LARGEST_SINGLE = torch.finfo(torch.float32).max
_LARGEST_DOUBLE = torch.finfo(torch.float64).max


class Gradients:
    """The parameters that have a gradient, in optimizer order, and that gradient's own elements."""

    def __init__(
        self,
        params: list[Tensor],
        tensors: Sequence[Tensor],
        *,
        ends: list[int],
        dtypes: Set[torch.dtype],
        device: torch.device | None,
        layouts: Sequence[Layout | None] = (),
    ) -> None:
        self.params = params
        self.tensors = tensors
        self.ends = ends
        """Where each optimizer's gradients end among all of them."""
        self.dtypes = dtypes
        """The dtypes that there are."""
        self.device = device
        """The device of all of them; None if they lie on several, or there are none."""
        self.layouts = layouts
        """How each lies on the ranks: None for a plain tensor; () if no gradient is distributed."""
        self._worked_out: dict[str, tuple[object, Any]] = {}
        self.largest_finite = _LARGEST_DOUBLE if dtypes == _ONLY_DOUBLE else _LARGEST_SINGLE
        """The largest number that all of them can hold; half precision is stepped in float32."""
        self.addressed = tensors if isinstance(tensors, AddressedTensors) else None
        """The gradients if kernels reach all of them by their addresses, else None."""
        self.found_by: Any = None
        """The optimizer that has found them in its own table, for its own step; else None."""

    def of_optimizer(self, number: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The parameters and the gradients of one optimizer."""
        begin, end = (0, *self.ends)[number], self.ends[number]
        return self.params[begin:end], self.tensors[begin:end]

    def every_layout(self) -> Sequence[Layout | None]:
        """How each gradient lies on the ranks; None for a plain one."""
        return self.layouts or [None] * len(self.tensors)

    def once(self, what: str, by: object, work_out: Callable[[], _Found]) -> _Found:
        """What is worked out of their parameters and layouts by something, as long as that is the
        same object: a table's gradients are the same from step to step.

        Args:
            what: a name for it.
            by: what it depends on besides.
            work_out: does it.
        """
        known = self._worked_out.get(what)
        if known is None or known[0] is not by:
            known = self._worked_out[what] = by, work_out()
        return cast("_Found", known[1])

    def release(self) -> None:
        """Lets go of the gradients, whose memory the next forward pass may need."""
        self.tensors, self.addressed, self.found_by = [], None, None


class TableGradients(Gradients):
    """Gradients that kernels reach by their addresses, as a table finds them.

    One object serves as long as nothing but the addresses changes from step to step.
    """

    device: torch.device

    def __init__(
        self,
        params: list[Tensor],
        tensors: AddressedTensors,
        ends: list[int],
        elements: list[Tensor],
        layouts: Sequence[Layout | None] = (),
    ) -> None:
        self.at = tensors.at
        """Where the gradients lie."""
        super().__init__(
            params,
            tensors,
            ends=ends,
            dtypes=self.at.dtypes,
            device=self.at.device,
            layouts=layouts,
        )
        self.elements = elements
        """The parameters' own elements: of a DTensor this rank's, in the same memory."""
        self.homes = list(map(_address, self.elements))
        """Where those lie."""
        self._make: list[tuple[object, ...]] = []
        self._guard: Any = None
        self._classes = list(map(type, params)) if layouts else []
        self._aligned = all(alignment == 16 for _, alignment in self.at.kinds)
        # What a graph sends is there only when it is replayed.
        self._sent_in_a_capture = capturing()
        self.shared = self._may_share = False
        self.walker: Any = None
        """What walks over the lists in C++; None if Python does."""
        self._asked: Any = None

    def may_share(self, allowed: bool) -> None:
        """Says whether two parameters may have one gradient, and finds out whether they do."""
        self._may_share = allowed
        self.shared = allowed and _coincide(self.at.addresses)

    def current(self) -> list[Tensor]:
        """The gradients that the parameters have now; raises TypeError if one lies otherwise."""
        grads: Any = [param.grad for param in self.params]
        if not self.layouts:
            return cast("list[Tensor]", grads)
        if list(map(type, self.params)) != self._classes:
            raise TypeError("a parameter is of another class than it was")
        self.elements = list(map(local_of, self.params))
        for param, grad, layout in zip(self.params, grads, self.layouts, strict=True):
            if (layout is not None) != is_distributed(grad) or (
                layout is not None and not lie_alike(param, grad)
            ):
                raise TypeError("a gradient does not lie as its parameter does")
        return list(map(local_of, grads))

    def renew(self, tensors: list[Tensor], addresses: list[int]) -> bool:
        """Takes this step's gradients if they are of the same make as the last step's."""
        if list(map(_address, self.elements)) != self.homes or not self._alike(tensors):
            return False
        if addresses != self.at.addresses or self._sent_in_a_capture:
            if not self._aligned or _freed(tensors, addresses) is not None:
                return False
            numbers = array("q", addresses)
            if not all_aligned(numbers):
                return False
            self.shared = _coincide(addresses)
            if self.shared and not self._may_share:
                return False
            self._sent_in_a_capture = capturing()
            self.at.change(as_numbers(numbers))
        self.tensors = self.addressed = AddressedTensors(tensors, self.at)
        return True

    def let_walk(self, lists: Lists) -> None:
        """Has C++ walk over the lists from here on, where it is built and can do it.

        Else Python remembers what it will compare.
        """
        library = native.library()
        if library is not None and library is not self._asked:
            self._asked = library
            assert isinstance(self.tensors, AddressedTensors)
            self.walker = library.walk_over(
                [list(groups) for groups in lists],
                self.params,
                self.tensors.held,
                self._aligned,
                self._may_share,
                dtensor_parts(),
            )
        if self.walker is None and not self._make:
            every = [*self.elements, *self.tensors]
            self._make, self._guard = list(map(_make_of, every)), tensor_guards(every)

    def walk(self, lists: Lists) -> bool:
        """As `renew` after all that is listed was compared, in C++: nothing is asked in Python."""
        answer = self.walker.renew(lists, self._sent_in_a_capture)
        if answer is None:
            return False
        tensors, numbers = answer
        if numbers is not None:
            self.shared = self.walker.shared
            self._sent_in_a_capture = capturing()
            self.at.change(numbers)
        self.tensors = self.addressed = AddressedTensors(tensors, self.at)
        return True

    def _alike(self, tensors: list[Tensor]) -> bool:
        every = self.elements + tensors
        if self._guard is not None and self._guard.check(*every):
            return True
        if [_make_of(tensor) for tensor in every] != self._make:
            return False
        # Under autocast, or with requires_grad turned off, the guard sees what is none of ours.
        self._guard = tensor_guards(every)
        return True


class Roster(list[Any]):
    """Parameters in order, as an Outcome names them later: one that was replaced becomes None.

    Not weak references: `torch.utils.swap_tensors` refuses tensors that have one. Only when their
    optimizer is gone are they turned into such, so that an Outcome keeps no parameter alive.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    owner: Any = None
    """A reference to the optimizer that the parameters are held with."""

    def weaken_with(self, optimizer: Any) -> None:
        """Holds the parameters no longer than `optimizer` lives."""
        mine = weakref.ref(self)

        def weaken(_: object) -> None:
            roster = mine()
            if roster is not None:
                roster[:] = [None if each is None else weakref.ref(each) for each in roster]

        try:
            self.owner = weakref.ref(optimizer, weaken)
        except TypeError:  # A class with slots and none for references: it is held anyway.
            self.owner = optimizer

    def living(self) -> list[Tensor | None]:
        """The parameters that are still there, each at its place."""
        return [each() if isinstance(each, weakref.ref) else each for each in self]


class GradientTable:
    """Finds the gradients of the same lists of parameters at every step.

    Args:
        refuse_twice: raise if a parameter is listed twice; else it counts once.
        may_share: whether two parameters may have one tensor as their gradient, as for an optimizer
            that does not write to it; else it would be unscaled twice, and is refused.
    """

    def __init__(self, *, refuse_twice: bool = True, may_share: bool = False) -> None:
        self._refuse_twice, self._may_share = refuse_twice, may_share
        self._lists: list[list[list[Tensor]]] = []
        self._lacking: list[Tensor] = []
        self._found: TableGradients | None = None
        # By id, parameters whose gradients the ranks of a mesh held summands of, in that order.
        self._summands: dict[int, Summand] = {}
        self._roster = Roster()
        self._roster_of: Sequence[Tensor] = ()
        self._rosters: weakref.WeakSet[Roster] = weakref.WeakSet()
        self.captured: list[object] = []
        """What the CUDA graphs of the steps need for as long as they are replayed."""
        self.keeping = keeping(self.captured)
        """A context in which it is kept there."""

    def __reduce__(self) -> Any:
        return _new_table, (self._refuse_twice, self._may_share)  # A copy is over other parameters.

    def find(self, lists: Lists, *, name: Name) -> Gradients:
        """The gradients that there are; raises if one of them cannot be measured.

        Args:
            lists: the parameters, by optimizer and group.
            name: tells a parameter's name, for the error message.
        """
        if self._summands:
            without_missing_summands(list(self._summands.values()))
        found = None
        if self._found is not None or _may_be_addressed(lists):
            found = self.find_addressed(lists, name=name)
        if found is not None:
            return found
        self._found = None
        return _walk(
            lists,
            name=name,
            refuse_twice=self._refuse_twice,
            refuse_shared=not self._may_share,
            summands=self._summands,
        )

    def find_addressed(self, lists: Lists, *, name: Name) -> TableGradients | None:
        """The gradients if the kernels can take all of them, else None.

        They can take plain, dense gradients of the dtypes they know, each on the device of its
        parameter, all on one device that the kernels serve. The same object comes back as long as
        nothing but addresses has changed.
        """
        found = self._found
        if (
            found is not None
            and kernels.BACKENDS[found.device.type].BY_ADDRESS
            and (self._renewed(found, lists) if found.walker is None else found.walk(lists))
        ):
            return found
        found = self._found = self._look(lists, name)
        # What was looked at piece by piece is seen again in one go, and its memory held.
        if found is not None and found.walker is not None and not found.walk(lists):
            self._found = None  # Another thread is at work on it.
        return self._found

    def guards(self) -> list[Guard]:
        """What must be as it is now for what it has found to be what it would find."""
        return attribute(self, "_found")

    def _renewed(self, found: TableGradients, lists: Lists) -> bool:
        """Whether nothing but addresses has changed since the last step, asked in Python."""
        if not self._same(lists):
            return False
        try:
            tensors = found.current()
            addresses = list(map(_address, tensors))
        except (TypeError, RuntimeError):  # None, or a gradient without an address.
            return False
        if not found.renew(tensors, addresses):
            return False
        found.let_walk(lists)  # Its library may have been built meanwhile.
        return True

    @property
    def adds_up(self) -> bool:
        """Whether the ranks of a mesh have added up summands of gradients (Partial) here."""
        return len(self._summands) > 0

    def forget(self) -> None:
        """Looks at everything again next time."""
        self._found = None

    def release(self) -> None:
        """Has no Outcome hold a parameter any longer."""
        for roster in list(self._rosters):
            roster[:] = [None] * len(roster)

    def roster(self, params: Sequence[Tensor], optimizers: Sequence[Any]) -> Roster:
        """`params`, for an Outcome to name later; it keeps no parameter that was replaced.

        Args:
            params: those that have a gradient now.
            optimizers: whose parameters they are; one that no optimizer lists any more is gone.
        """
        known = self._roster
        if params is self._roster_of:  # The list of the last step: 2,000 need not be compared.
            return known
        self._roster_of = params
        if len(known) != len(params) or any(map(operator.is_not, known, params)):
            there = set(map(id, every_parameter(optimizers)))
            for roster in list(self._rosters):
                roster[:] = [each if id(each) in there else None for each in roster]
            known = self._roster = Roster(params)
            self._rosters.add(known)
        return known

    def _same(self, lists: Lists) -> bool:
        # By identity, group by group: of tensors that are not the same object torch would compare
        # elements, of DTensors on all ranks.
        known = self._lists
        return (
            list(map(_lengths, known)) == list(map(_lengths, lists))
            and all(
                all(map(operator.is_, mine, given))
                for mine_of, given_of in zip(known, lists, strict=True)
                for mine, given in zip(mine_of, given_of, strict=True)
            )
            and all(param.grad is None for param in self._lacking)
        )

    def _look(self, lists: Lists, name: Name) -> TableGradients | None:
        if not _may_be_addressed(lists):
            return None
        params, ends = _flat(lists, name, twice_is_an_error=self._refuse_twice)
        reached = _reached(params, beside=True, may_share=self._may_share)
        if reached is None:
            return None
        having, places = reached.among(params), reached.places
        lacking: list[Tensor] = []
        if places is not None:
            ends = [bisect.bisect_left(places, end) for end in ends]
            taken = set(places)
            lacking = [param for place, param in enumerate(params) if place not in taken]
        self._lists = [[list(group) for group in groups] for groups in lists]
        self._lacking = lacking
        found = TableGradients(having, reached.tensors, ends, reached.elements, reached.layouts)
        found.may_share(self._may_share)
        found.let_walk(lists)
        return found


def _lengths(groups: Sequence[list[Tensor]]) -> list[int]:
    return list(map(len, groups))


def _new_table(refuse_twice: bool, may_share: bool) -> GradientTable:
    return GradientTable(refuse_twice=refuse_twice, may_share=may_share)


def gradients_of(params: Sequence[Tensor], *, name: Name) -> Gradients:
    """The gradients of `params`, each parameter once; refuses what cannot be measured."""
    listed = list(params)
    reached = _reached(listed) if listed and _by_address(listed[0].device) else None
    if reached is None:  # Also if a gradient is there twice, and so if a parameter is.
        return _walk([[listed]], name=name, refuse_twice=False, refuse_shared=False)
    having, at = reached.among(listed), reached.tensors.at
    return Gradients(
        having,
        reached.tensors,
        ends=[len(having)],
        dtypes=at.dtypes,
        device=at.device,
        layouts=reached.layouts,
    )


def gradients_among(tensors: Sequence[Tensor], *, name: Name) -> Gradients:
    """Tensors that are gradients themselves, as `gradients_of` has those of parameters."""
    return _elements(list(tensors), list(tensors), [len(tensors)], name)


def _may_be_addressed(lists: Lists) -> bool:
    """Whether the first parameter lies where kernels reach tensors by their addresses."""
    for groups in lists:
        for group in groups:
            if group:
                return _by_address(group[0].device)
    return False


def _by_address(device: torch.device) -> bool:
    return kernels.BACKENDS[device.type].BY_ADDRESS


class _Reached(NamedTuple):
    """Gradients that kernels reach by their addresses; those of DTensors lie as the parameters."""

    places: list[int] | None
    """The places of the parameters that have one; None if all have."""
    tensors: AddressedTensors
    """The gradients' own elements."""
    elements: list[Tensor]
    """The parameters' own elements, if they were asked for."""
    layouts: Sequence[Layout | None]
    """As Gradients has them."""

    def among(self, params: list[Tensor]) -> list[Tensor]:
        """Those of the parameters that have a gradient."""
        return params if self.places is None else [params[place] for place in self.places]


def _reached(
    params: list[Tensor], *, beside: bool = False, may_share: bool = False
) -> _Reached | None:
    """The gradients that there are if kernels reach all of them by their addresses, else None.

    Args:
        params: a list that nobody changes.
        beside: whether each must lie on the device of its parameter and have its shape: else no
            optimizer can step. The parameters' own elements are wanted then.
        may_share: whether two parameters may have one tensor as their gradient.
    """
    found = _collected(params, beside=beside, may_share=may_share)
    return _looked_at(params, beside=beside, may_share=may_share) if found is None else found


_COLLECTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""As `collect` in gradient_walk.h numbers them."""
_Laid = tuple[bytes, list[tuple[Any, tuple[Any, ...]]]]


class _Known(NamedTuple):
    """What is known of gradients of the same sizes and kinds, of which no tensor is held."""

    at: Addresses
    laid: _Laid | None
    """How they lie on the ranks, as `collect` says it: numbers, and what these stand for."""
    layouts: Sequence[Layout | None]


_known: dict[tuple[Any, ...], _Known] = {}
_MOST_KNOWN = 16
"""How many lists of gradients are known by their sizes and kinds."""


def _collected(
    params: list[Tensor],
    *,
    detached: bool = False,
    beside: bool = False,
    may_share: bool = False,
) -> _Reached | None:
    """As `_reached`, in one pass of C++: 2,000 take 0.2 ms where `_looked_at` takes 2.

    What kernels need besides the addresses is known by the gradients' sizes and kinds. So whoever
    looks at the same gradients, as `unscale_`, a clip and a step do one after another, looks anew
    and has that in common with the others; nothing is held of parameters, which may be replaced
    or let go at any time.

    Args:
        params, beside, may_share: as in `_reached`.
        detached: whether no gradient may need a gradient itself.

    Returns:
        None if C++ is not built, or has to leave it to Python; then nothing is said of what kernels
        can reach.
    """
    library = native.library()
    if library is None:
        return None
    found = library.collect(params, dtensor_parts(), detached, beside, may_share)
    if found is None:
        return None
    places, tensors, numbers, signature, elements, laid = found
    device = tensors[0].device
    if not kernels.BACKENDS[device.type].BY_ADDRESS:
        return None
    key, captured = (signature, device, stream_of(device)), capturing()
    known = None if captured else _known.get(key)
    layouts: Sequence[Layout | None] = ()
    if known is not None and laid is not None and _lie_as_before(laid, known.laid):
        layouts = known.layouts
    elif laid is not None:
        if any(placement.is_partial() for _, placements in laid[1] for placement in placements):
            return None  # Ranks hold summands, which are to be added up.
        layouts = _layouts(laid)
    if known is not None:
        at = known.at.moved(numbers)
    else:  # As C++ has seen them, in one go: another thread may be at work on them.
        each = list(struct.iter_unpack("=qb", signature))
        dtypes = [_COLLECTED[code >> 1] for _, code in each]
        aligned = [code & 1 for _, code in each]
        kinds = tuple([(d, 16 if a else d.itemsize) for d, a in zip(dtypes, aligned, strict=True)])
        at = Addresses(numbers, kinds, tuple([size for size, _ in each]), device)
    if not captured:
        while len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(list(_known))), None)  # Another thread may be here too.
        _known[key] = _Known(at, laid, layouts)
        if beside:  # A table's addresses change from step to step.
            at = at.moved(numbers)
    return _Reached(places, AddressedTensors(tensors, at), elements, layouts)


def _lie_as_before(laid: _Laid, before: _Laid | None) -> bool:
    """Whether these gradients lie on the same meshes in the same way; by identity of meshes: one
    that was made later, in another world, is equal and has other process groups."""
    if before is None or laid[0] != before[0] or len(laid[1]) != len(before[1]):
        return False
    return all(
        mesh is known_mesh and placements == known
        for (mesh, placements), (known_mesh, known) in zip(laid[1], before[1], strict=True)
    )


def _layouts(laid: _Laid) -> list[Layout | None]:
    """The layout of each gradient."""
    known = [layout_on(mesh, placements) for mesh, placements in laid[1]]
    numbers = array("i", laid[0])
    return [None if number < 0 else known[number] for number in numbers]


def _looked_at(params: list[Tensor], *, beside: bool, may_share: bool) -> _Reached | None:
    """As `_reached`, in Python."""
    places = [place for place, param in enumerate(params) if param.grad is not None]
    having = params if len(places) == len(params) else [params[place] for place in places]
    tensors = cast("list[Tensor]", [param.grad for param in having])
    elements: list[Tensor] = []
    layouts: Sequence[Layout | None] = ()
    if any(map(is_distributed, tensors)):
        if not all(map(lie_alike, having, tensors)):
            return None
        known: dict[tuple[int, Any], Layout] = {}
        layouts = [
            layout_of(param, grad, str, known) if is_distributed(grad) else None
            for param, grad in zip(having, tensors, strict=True)
        ]
        tensors = list(map(local_of, tensors))
    found = _addressed(tensors, may_share=may_share)
    if found is None:
        return None
    if beside:
        elements = list(map(local_of, having)) if layouts else having
        if any(map(torch.is_neg, tensors)):  # Its memory holds the opposite.
            return None
        if list(map(_device_of, elements)) != [found.at.device] * len(having):
            return None
        if list(map(_shape_of, elements)) != list(map(_shape_of, tensors)):
            return None
    return _Reached(None if having is params else places, found, elements, layouts)


def measurable_gradients(params: Sequence[Tensor]) -> tuple[list[int], Sequence[Tensor]]:
    """The places of the parameters whose gradient can be measured, and its elements.

    For whoever watches gradients that are not his: nothing is refused, coalesced or written.
    """
    collected = _collected(list(params), detached=True)
    if collected is not None:
        places = collected.places
        return list(range(len(params))) if places is None else places, collected.tensors
    grads = [param.grad for param in params]
    tensors = [None if grad is None else measurable(grad) for grad in grads]
    places = [place for place, tensor in enumerate(tensors) if tensor is not None]
    return places, [tensor for tensor in tensors if tensor is not None]


def _walk(
    lists: Lists,
    *,
    name: Name,
    refuse_twice: bool,
    refuse_shared: bool,
    summands: dict[int, Summand] | None = None,
) -> Gradients:
    params, ends = _flat(lists, name, twice_is_an_error=refuse_twice)
    tensors = [grad for param in params if (grad := param.grad) is not None]
    having = params
    if len(tensors) != len(params):
        ends = _ends_among(ends, params)
        having = [param for param in params if param.grad is not None]
    found = _elements(having, tensors, ends, name, summands)
    addresses = addresses_of(found.tensors)
    freed = _freed(found.tensors, addresses)
    if freed is not None:
        raise ValueError(
            f"the gradient of {name(having[freed])} has no memory: its storage has been freed or "
            "made smaller, as by untyped_storage().resize_(0). Bring it back before the step, or "
            "set param.grad = None."
        )
    if refuse_shared and _coincide(addresses):
        refuse_shared_gradient(having, found.tensors, name)
    return found


def _freed(tensors: Sequence[Tensor], addresses: Sequence[int]) -> int | None:
    """The place of a plain tensor whose memory was given back, if there is one.

    All are asked where C++ is built: it has left them to Python for some reason. Else those that
    show something: no address, or one that is counted from another tensor's, which would be 0.
    """
    asked: Iterable[int] = range(len(tensors))
    if native.library() is None:
        offsets = [_offset(t) if type(t) in _PLAIN and not t.is_sparse else 0 for t in tensors]
        if 0 not in addresses and not any(offsets):
            return None
        asked = [place for place in asked if offsets[place] or not addresses[place]]
    for place in asked:
        tensor = tensors[place]
        if type(tensor) in _PLAIN and tensor.layout is torch.strided and not has_memory(tensor):
            return place
    return None


def _flat(lists: Lists, name: Name, *, twice_is_an_error: bool) -> tuple[list[Tensor], list[int]]:
    """All parameters in order, and where each optimizer's end."""
    params: list[Tensor] = []
    ends: list[int] = []
    for groups in lists:
        for group in groups:
            params += group
        ends.append(len(params))
    if len(set(map(id, params))) == len(params):
        return params, ends
    if not twice_is_an_error:
        once = _each_once(params)
        return once, [len(once)]
    refuse_twice(params, name)
    raise AssertionError("no parameter is listed twice")


def refuse_twice(params: Sequence[Tensor], name: Name) -> None:
    """Raises if a parameter is listed twice."""
    if len(set(map(id, params))) == len(params):
        return
    seen: set[int] = set()
    for param in params:
        if id(param) in seen:
            raise SharedParameter(
                f"{name(param)} is listed twice among the optimizers' parameter groups and "
                "would be stepped twice. List it once."
            )
        seen.add(id(param))


def _each_once(params: Iterable[Tensor]) -> list[Tensor]:
    return list({id(param): param for param in params}.values())


def refuse_shared_gradient(params: Sequence[Tensor], tensors: Sequence[Tensor], name: Name) -> None:
    """Raises if the gradients of two parameters begin at one address, as one tensor or aliases."""
    first: dict[int, Tensor] = {}
    for param, address in zip(params, addresses_of(tensors), strict=True):
        other = first.setdefault(address, param) if address else param
        if other is not param:
            raise SharedParameter(
                f"{name(other)} and {name(param)} have one tensor as their gradient, which would "
                "be unscaled and clipped twice. Give each its own: param.grad = param.grad.clone()."
            )


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor's memory begins, 0 if it has no elements; its id if nobody can say."""
    try:
        return list(map(_address, tensors))
    except RuntimeError:  # A subclass without memory of its own.
        return [id(tensor) for tensor in tensors]


def _ends_among(ends: Sequence[int], params: Sequence[Tensor]) -> list[int]:
    """Where each optimizer's gradients end, if not all parameters have one."""
    counts, begin = [], 0
    for end in ends:
        counts.append(sum(param.grad is not None for param in params[begin:end]))
        begin = end
    return [sum(counts[: number + 1]) for number in range(len(counts))]


def _elements(
    params: list[Tensor],
    grads: list[Tensor],
    ends: list[int],
    name: Name,
    summands: dict[int, Summand] | None = None,
) -> Gradients:
    """The gradients' own elements; refuses what cannot be measured."""
    dtypes: set[torch.dtype] = set()
    devices: set[torch.device] = set()
    plain = True
    for kind, dtype, form, place in {(type(g), g.dtype, g.layout, g.device) for g in grads}:
        plain = plain and kind in _PLAIN and dtype in DTYPES and form is torch.strided
        plain = plain and place.type != "meta"
        dtypes.add(dtype)
        devices.add(place)
    if plain:
        device = devices.pop() if len(devices) == 1 else None
        return Gradients(params, grads, ends=ends, dtypes=dtypes, device=device)
    known: dict[tuple[int, Any], Layout] = {}
    tensors: list[Tensor] = []
    layouts: list[Layout | None] = []
    for param, grad in zip(params, grads, strict=True):
        layout = None
        if grad.layout is not torch.strided:
            grad = _sparse_values(param, grad, name)
        elif is_distributed(grad):
            grad = with_sums_reduced(param, grad, summands)
            layout = layout_of(param, grad, name, known)
            grad = local_of(grad)
        if grad.is_meta:
            raise ValueError(
                f"the gradient of {name(param)} is on the meta device and has no values. Give the "
                "model real storage first, for example model.to_empty(device='cpu')."
            )
        if grad.dtype.itemsize == 1 or not (grad.is_floating_point() or grad.is_complex()):
            raise TypeError(
                f"the gradient of {name(param)} is {grad.dtype}, in which nothing is computed. "
                "Keep parameters in float32, bfloat16, float16 or float64 and use narrower formats "
                "inside the forward pass only."
            )
        tensors.append(grad)
        layouts.append(layout)
    devices = {tensor.device for tensor in tensors}
    return Gradients(
        params,
        tensors,
        ends=ends,
        dtypes={tensor.dtype for tensor in tensors},
        device=devices.pop() if len(devices) == 1 else None,
        layouts=layouts if any(layouts) else (),
    )


def measurable(tensor: Tensor, *, any_subclass: bool = False) -> Tensor | None:
    """A tensor's own elements, or None if nothing can be measured; it stays as it is.

    The local shard of a DTensor, the values of a sparse tensor.

    Args:
        tensor: a gradient, an activation or a parameter.
        any_subclass: whether those of a class that nobody knows are taken as they are.
    """
    if type(tensor) not in _PLAIN:
        if is_distributed(tensor):
            tensor = local_of(tensor)
        if type(tensor) not in _PLAIN and not any_subclass:
            return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor if tensor.is_coalesced() else tensor.detach().coalesce()
        tensor = sparse_values(tensor)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype.itemsize == 1:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return tensor.detach()


def _sparse_values(param: Tensor, grad: Tensor, name: Name) -> Tensor:
    """The values of a sparse gradient, coalesced: the same index listed twice is one element."""
    if grad.layout is not torch.sparse_coo:
        raise ValueError(
            f"the gradient of {name(param)} has layout {grad.layout}; strided and sparse_coo "
            "gradients are supported. Convert it with grad.to_sparse() or grad.to_dense()."
        )
    if not grad.is_coalesced():
        coalesced = grad.coalesce()
        if param is not grad:
            param.grad = coalesced
        grad = coalesced
    return sparse_values(grad)


def _addressed(tensors: list[Tensor], *, may_share: bool = False) -> AddressedTensors | None:
    """The gradients if kernels can reach all of them, else None.

    A few walks in C: 2,000 gradients in 1.2 ms of the host's time, where asking each tensor for its
    device, dtype and shape in Python took 4.
    """
    if not tensors or not set(map(type, tensors)) <= _PLAIN:
        return None
    device = tensors[0].device
    if not _by_address(device) or len(set(map(_device_number, tensors))) != 1:
        return None
    if device.type != "cuda" and len(set(map(_device_of, tensors))) != 1:  # Numbers tell no kinds.
        return None
    dtypes = list(map(_dtype_of, tensors))
    if not set(dtypes) <= DTYPES:
        return None
    try:
        addresses = list(map(_address, tensors))
        contiguous = all(map(TensorBase.is_contiguous, tensors))
    except RuntimeError:  # A sparse one has neither.
        return None
    if not may_share and _coincide(addresses):
        return None
    if _freed(tensors, addresses) is not None:
        return None
    if contiguous and 0 not in addresses and all_aligned(array("q", addresses)):
        kinds: Any = tuple([(dtype, 16) for dtype in dtypes])
    else:
        kinds = kinds_of(tensors, addresses)
        if None in kinds:
            return None
    sizes = tuple(map(TensorBase.numel, tensors))
    numbers = as_numbers(array("q", addresses))
    return AddressedTensors(tensors, Addresses(numbers, kinds, sizes, device))


def _coincide(addresses: Sequence[int]) -> bool:
    """Whether two tensors begin at one address; those without elements have 0."""
    different = set(addresses)
    if len(different) == len(addresses):
        return False
    return len(different) - (0 in different) != sum(map(bool, addresses))


def _make_of(tensor: Tensor) -> tuple[object, ...]:
    """All that a kernel's tables depend on, but for the address."""
    shape, stride = tensor.shape, tensor.stride()
    return type(tensor), tensor.dtype, tensor.device, shape, stride, tensor.is_neg()


def lists_of(optimizers: Sequence[Any]) -> list[list[list[Tensor]]]:
    """The optimizers' parameters as GradientTable takes them."""
    return [[group["params"] for group in each.param_groups] for each in optimizers]


def parameter_list(optimizers: Sequence[Any]) -> list[Tensor]:
    """As `every_parameter`, for 2,000 of them at every step: whole lists are joined."""
    params: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params += group["params"]
    return params


def peek_parameters(optimizers: Sequence[Any]) -> list[Tensor]:
    """As `parameter_list`, for a look: nobody may keep it or change it.

    If there is one group it is that group's own list: joining 2,000 takes the host 0.03 ms.
    """
    if len(optimizers) == 1 and len(optimizers[0].param_groups) == 1:
        only: list[Tensor] = optimizers[0].param_groups[0]["params"]
        return only
    return parameter_list(optimizers)


def first_parameter(optimizers: Sequence[Any]) -> Tensor | None:
    """The first of `every_parameter`; None if there is none."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                first: Tensor = param
                return first
    return None


def requiring(params: list[Tensor]) -> bytes:
    """Which of the parameters require a gradient, a byte each: 2,000 in 0.02 ms, in Python 0.2."""
    library = native.library()
    marks: bytes | None = None if library is None else library.requiring(params)
    return bytes(map(_requires_grad, params)) if marks is None else marks


def every_parameter(optimizers: Sequence[Any]) -> Iterator[Tensor]:
    """All parameters of all optimizers, in order, as they are at this moment."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
