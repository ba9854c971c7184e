"""Everything a step's launches need that stays the same while parameters and state do.

A plan holds the tensors whose addresses it has sent, so no address outlives its tensor, and `fits`
says when something has been replaced and a new plan is due.
"""

from __future__ import annotations

import importlib
from array import array
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import TensorBase, version
from gradilocks.kernels.chunks import layout_for, send
from gradilocks.kernels.cuda_graph import capturing, keep_if_captured
from gradilocks.optim.checks import check_parameters, check_settings
from gradilocks.optim.masters import Marks, follow, needs_master
from gradilocks.optim.tidy import alike, check_shapes, common_dtype, tidy
from gradilocks.step.gradients import Names
from gradilocks.step.roll import Called

__all__ = ["Plan"]

CHUNK = 1 << 12
"""Elements a program: 7.44 ms at 2^12, 7.55 at 2^13 (AdamW, 1.1 B float32, H200)."""
MOST_CHUNKS = 1 << 19
"""A table of 8 bytes a chunk: 4 megabytes at most, made once, for up to 2 billion parameters."""
SETTINGS = 8
"""Numbers a group, as the kernels count them."""
WATCHED = 64
"""How many state tensors every step looks at, in turns if there are more: `tensor.data = ...` tells
nobody. The plan holds their storages, so until then an address is out of date but never freed."""


_NUMBERS = {float, int}
_address = TensorBase.data_ptr


class Plan:
    """One optimizer's parameters with gradients, as its kernels see them."""

    def __init__(self, optimizer: Any, called: Called) -> None:
        self.called, self.device = called, called.device
        self._launches: Any = importlib.import_module("gradilocks.kernels.triton_optimizers")
        params = called.params
        self._shape = _shape(optimizer)
        number = {
            id(param): place
            for place, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        numbers = [number[id(param)] for param in params]
        groups = [optimizer.param_groups[place] for place in numbers]
        self._check(optimizer, dict(zip(numbers[::-1], params[::-1], strict=True)))
        self._odd = [i for i, p in enumerate(params) if not alike(p, called.grads[i])]
        mastered = [needs_master(p, group) for p, group in zip(params, groups, strict=True)]
        optimizer.fill_state(params, groups, mastered)
        self.states: list[dict[str, Any]] = [optimizer.state.watch(param) for param in params]
        odd, columns = set(self._odd), optimizer.columns
        for place, (param, state) in enumerate(zip(params, self.states, strict=True)):
            wide = torch.float32 if mastered[place] else common_dtype(param, state, columns)
            tidy(param, state, columns, dtype=wide, odd=place in odd)
        self._masters = [place for place, wide in enumerate(mastered) if wide]
        self._versions = [version(params[place]) for place in self._masters]
        names = (*columns, "master")
        self._columns = [[state.get(name) for state in self.states] for name in names]
        held: list[list[Tensor | None]] = [list(params), *self._columns]
        self._rows = [[0 if t is None else t.data_ptr() for t in column] for column in held]
        self.layout = layout_for(
            tuple(called.sizes),
            tuple(
                [
                    self._kind(place, mastered[place], optimizer.flags(groups[place]))
                    for place in range(len(params))
                ]
            ),
            CHUNK,
            MOST_CHUNKS,
            self.device,
        )
        self.places = send(_flat(self._rows), self.device)
        self.groups = send(torch.tensor(numbers, dtype=torch.int32, device="cpu"), self.device)
        self.rates = torch.empty(len(params), 8, dtype=torch.float64, device=self.device)
        self._numbers: list[float | None] = []
        self._every: list[list[Any]] = []
        self.settings = self.rates
        self.own, more = optimizer.plan_more(self)
        self._held = [*self._columns, more]
        # What a graph sends is there only when it is replayed: no other step can use such a plan.
        self._state, self._dropped, self._warm = optimizer.state, capturing(), False
        # One of each column beside the other, so that a turn sees something of all of them.
        rows = zip(*self._held, strict=True)
        self._watched = [tensor for row in rows for tensor in row if tensor is not None]
        self._homes = [tensor.data_ptr() for tensor in self._watched]
        self._storages = [tensor.untyped_storage() for tensor in self._watched]
        self._turn = 0
        optimizer.changes.tell(self)

    def _check(self, optimizer: Any, first: dict[int, Tensor]) -> None:
        """Refuses what no kernel can step, before anything is changed."""
        name, params = Names(None, (optimizer,)), self.called.params
        for place, param in first.items():
            check_settings(optimizer.param_groups[place], self.device, name, param)
        check_parameters(params, name)
        check_shapes(params, optimizer.state, optimizer.columns, name)

    def _kind(self, place: int, master: bool, flags: Any) -> tuple[Any, ...]:
        called = self.called
        state = self._columns[0][place]
        addresses = [row[place] for row in self._rows]
        if place in self._odd:  # Goes through copies, which are aligned.
            addresses = addresses[1:]
        else:
            addresses.append(called.addresses[place])
        param = called.params[place].dtype
        aligned = all(address % 16 == 0 for address in addresses)
        stored = param if state is None else state.dtype
        return (param, called.dtypes[place], stored, master, aligned, flags)

    def fits(self, optimizer: Any, called: Called) -> bool:
        """Whether parameters, groups and state are still those that this plan was made for."""
        if self._dropped or called is not self.called or _shape(optimizer) != self._shape:
            return False
        if optimizer.state is not self._state:
            return False
        begin = self._turn if self._turn < len(self._watched) else 0
        self._turn = begin + WATCHED
        turn = slice(begin, self._turn)
        return list(map(_address, self._watched[turn])) == self._homes[turn]

    def drop(self) -> None:
        """Lets go of the state, of which something is about to be replaced."""
        self._dropped = True
        self.states, self._columns, self._held = [], [], []
        self._watched, self._storages = [], []

    def hand_over(self, marks: Marks) -> None:
        """Notes how the parameters with masters were left, for the plan that follows."""
        for place, seen in zip(self._masters, self._versions, strict=True):
            marks[self.called.params[place]] = seen, self.called.homes[place]

    def run(self, optimizer: Any) -> None:
        """Launches one step, by what the optimizer has been told to do."""
        skip = self._flag(getattr(optimizer, "found_inf", None))
        divisor = self._flag(getattr(optimizer, "grad_scale", None))
        self.ready(optimizer)
        self.go(optimizer, skip, divisor, rated=False)

    def ready(self, optimizer: Any) -> None:
        """Takes over what has changed since the last step."""
        called = self.called
        if self._masters:
            now = [version(called.params[place]) for place in self._masters]
            if now != self._versions:
                places = zip(self._masters, now, self._versions, strict=True)
                with torch.no_grad():
                    self._follow([place for place, new, old in places if new != old])
        self._send_settings(optimizer)

    @property
    def tables(self) -> tuple[Tensor, ...] | None:
        """What working out the rates needs; None before the first step, which compiles."""
        return self._tables() if self._warm else None

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.own, self.groups, self.settings, self.rates

    def go(
        self, optimizer: Any, skip: Tensor | None, divisor: Tensor | None, *, rated: bool
    ) -> None:
        """Launches one step; the rates have been worked out already if `rated`."""
        called, launches = self.called, self._launches
        if not rated:
            launches.launch_rates(optimizer.kernel, self._tables(), skip)
        try:
            if self._odd:
                with torch.no_grad():
                    self._step_odd(optimizer, skip, divisor)
            else:
                self._launch(optimizer, self.places, called.located.pointers, skip, divisor)
        except BaseException:
            if not rated:  # Else whoever has had them worked out takes them back.
                optimizer.take_back(skip)
            raise
        torch.autograd.graph.increment_version(called.params)
        keep_if_captured(self, self.settings, skip, divisor, *self._held)
        self._warm = True
        if self._masters:
            self._versions = [version(called.params[place]) for place in self._masters]

    def _launch(
        self,
        optimizer: Any,
        places: Tensor,
        gradients: Tensor,
        skip: Tensor | None,
        divisor: Tensor | None,
    ) -> None:
        self._launches.launch_step(
            optimizer.kernel, self.layout, places, gradients, self.rates, skip, divisor
        )

    def _step_odd(self, optimizer: Any, skip: Tensor | None, divisor: Tensor | None) -> None:
        """Goes through dense copies of those few that do not lie as their gradient does."""
        called = self.called
        addresses, rows = list(called.addresses), [list(row) for row in self._rows]
        copies = []
        for place in self._odd:
            param = called.params[place].detach().clone(memory_format=torch.contiguous_format)
            grad = called.grads[place].contiguous()
            if grad.data_ptr() % 16:  # `_kind` has promised aligned copies.
                grad = grad.clone()
            rows[0][place], addresses[place] = param.data_ptr(), grad.data_ptr()
            copies.append((param, grad))
        places, gradients = send(_flat(rows), self.device), send(array("q", addresses), self.device)
        self._launch(optimizer, places, gradients, skip, divisor)
        for place, (param, _) in zip(self._odd, copies, strict=True):
            called.params[place].copy_(param)

    def _flag(self, given: Any) -> Tensor | None:
        if given is None:
            return None
        if given.device != self.device or given.dtype != torch.float32:
            given = given.to(self.device, torch.float32, non_blocking=True)
        return given  # type: ignore[no-any-return]

    def _send_settings(self, optimizer: Any) -> None:
        every = [optimizer.settings(group) for group in optimizer.param_groups]
        if all(set(map(type, settings)) <= _NUMBERS for settings in every):
            if every == self._every:
                return
            self._every = every
        else:
            self._every = []
        numbers: list[float | None] = []  # None: is on the device already.
        on_device: list[tuple[int, Tensor]] = []
        for group, settings in zip(optimizer.param_groups, every, strict=True):
            begin = len(numbers)
            if set(map(type, settings)) - _NUMBERS and group["params"]:
                name = Names(None, (optimizer,))
                check_settings(group, self.device, name, group["params"][0])
            for place, value in enumerate(settings):
                number = value.detach() if isinstance(value, Tensor) else value
                if isinstance(number, Tensor) and number.device.type != "cpu":
                    on_device.append((begin + place, number))
                    numbers.append(None)
                else:
                    numbers.append(float(number))
            numbers += [0.0] * (begin + SETTINGS - len(numbers))
        if numbers != self._numbers:
            self._numbers = numbers
            host = torch.tensor([n or 0.0 for n in numbers], dtype=torch.float64, device="cpu")
            self.settings = send(host, self.device)
            if capturing():
                self._numbers, self._every = [], []
        for place, value in on_device:
            self.settings[place].copy_(value.reshape(()))

    def _follow(self, places: list[int]) -> None:
        masters = [self.states[place]["master"] for place in places]
        follow([self.called.params[place] for place in places], masters)


def _shape(optimizer: Any) -> list[tuple[Any, ...]]:
    """What makes a new plan necessary: who belongs to which group, and the groups' flags."""
    return [
        (len(group["params"]), group["master_weights"], optimizer.flags(group))
        for group in optimizer.param_groups
    ]


def _flat(rows: list[list[int]]) -> array[int]:
    return array("q", [address for row in rows for address in row])
