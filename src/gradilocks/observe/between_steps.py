"""What a script ran backward since its last step enters; the loss of its next step leaves.

Every loss on which backward was called between two steps counts, so that micro-batches add up, also
those that are run backward inside the step, by its closure. Not those whose gradients were cleared.
Two optimizers that step after one backward share it; a backward after a step begins anew.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks._torch import sparse_values
from gradilocks.lab.tensors import storage_of
from gradilocks.observe.gradient_memory import REPLACED, GradientMemory, memory_of
from gradilocks.observe.parameter_marks import Marks, marks_of
from gradilocks.record.precision import formats_behind
from gradilocks.step.events import StepListener
from gradilocks.step.own_step import weakly
from gradilocks.step.table import every_parameter, parameter_list

__all__ = ["Losses", "parameters_of"]


def parameters_of(owner: Any) -> Iterator[Tensor]:
    """The parameters whose gradients `owner.zero_grad()` clears, of a module or an optimizer."""
    return owner.parameters() if isinstance(owner, nn.Module) else every_parameter([owner])


class Losses(StepListener):
    """What was run backward since the last step, unscaled, on its device.

    Args:
        latest_step: the number of the last step that there was.

    Attributes:
        formats: those in which the first loss of all was computed; empty if nobody knows.
    """

    def __init__(self, latest_step: Callable[[], int] = int) -> None:
        self._latest_step = latest_step
        self._left_out: Tensor | None = None  # How many, and after which step the first.
        self.formats: tuple[str, ...] = ()
        self._sum: Tensor | None = None
        self._is_taken = False
        self._is_unknown = False  # Whether the sum may hold a loss whose gradients are gone.
        self._unscaled: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # By scaled loss.
        self._optimizers: dict[int, Callable[[], Any]] = {}  # Also before their first step.
        # Of the parameters of several optimizers when the first of these losses came: where their
        # gradients lay, by which is seen whether the losses have changed them, and which had none.
        self._memory: GradientMemory | None = None
        self._before: Marks | None = None
        self._gave_gradients = False  # Whether the losses have given one to who had none.
        self._witness: Tensor | None = None  # One that had none, while backward runs.

    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer was made, or is met at its step: losses may be for it."""
        self._optimizers[id(optimizer)] = weakly(optimizer)

    def loss_scaled(self, driver: Any, loss: Any, scaled: Any, scale: Tensor) -> None:
        """A loss was multiplied: `scaled` will be run backward in place of `loss`."""
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            if loss is not scaled and loss.numel() == 1:
                if len(self._unscaled) > 64:
                    self._unscaled = {k: v for k, v in self._unscaled.items() if v[0]() is not None}
                self._unscaled[id(scaled)] = weakref.ref(scaled), loss.detach().clone()
        elif isinstance(loss, (list, tuple)) and isinstance(scaled, (list, tuple)):
            for one, other in zip(loss, scaled, strict=False):
                self.loss_scaled(driver, one, other, scale)

    def backward_begins(self, tensors: Any, gradients: Any) -> None:
        """If the losses that wait gave gradients to parameters, and those have none any more,
        nothing is left of those losses: the script has dropped them without `zero_grad`."""
        params = self.parameters()
        if self.are_waiting and self._gave_gradients and self._are_lacking(params):
            self._leave_out()
        if not self.are_waiting:
            self._gave_gradients = False
            several = len(self._optimizers) > 1
            self._memory = memory_of(params) if several else None
            self._before = marks_of(params) if several else None
        if not self._gave_gradients:
            self._witness = _without_gradient(params)
        if isinstance(tensors, Tensor):
            tensors = (tensors,)
        if gradients is not None:
            given = gradients if isinstance(gradients, (list, tuple)) else (gradients,)
            if any(each is not None for each in given):
                return
        if isinstance(tensors, (list, tuple)):
            self._add_all(tensors)

    def backward_ended(self) -> None:
        """Finds out whether it has given a gradient to a parameter that had none: as a rule to the
        first of them, else all are looked at."""
        witness, self._witness = self._witness, None
        if witness is not None and self.are_waiting:
            self._gave_gradients = witness.grad is not None or not self._are_lacking(
                self.parameters()
            )

    def _are_lacking(self, params: Sequence[Tensor]) -> bool:
        """Whether of the parameters that had no gradient before the losses none has one now.

        Of one optimizer these are all: they have gradients or lack them together, but for those
        that no loss uses.
        """
        now = marks_of(params)
        if self._before is None:
            return now.lacking == now.there
        then = now.along(self._before.ids)
        return not self._before.lacking & then.there & ~then.lacking

    def gradients_clear(self, owner: Any) -> None:
        """With the gradients go the losses that they came from, unless gradients of another
        optimizer came from those too: such have changed since the first of them was run backward.

        Views of one buffer, as DDP's `gradient_as_bucket_view` makes them, share one counter of
        writes. If that of another optimizer's gradient may have moved by a write to its neighbours
        alone, nobody knows whether the losses are gone, and the step's loss is not told.
        """
        if not self.are_waiting:
            return
        cleared = list(parameters_of(owner))
        if all(param.grad is None for param in cleared) or not self._optimizers:
            return
        ids = {id(param) for param in cleared}
        others = [p for p in self.parameters() if id(p) not in ids and p.grad is not None]
        changes = bytes([REPLACED]) * len(others)
        if self._memory is not None and self._before is not None:
            # By parameter: the row in which its gradient was looked at.
            then = {known: row for row, known in enumerate(array("q", self._before.ids))}
            changes = self._memory.changes(others, [then.get(id(p), -1) for p in others])
        changed = [p for p, change in zip(others, changes, strict=True) if change]
        if not changed:
            self._leave_out()
        elif REPLACED not in changes:
            self._is_unknown = self._is_unknown or not _fill_a_storage(changed)

    @property
    def are_waiting(self) -> bool:
        """Whether there are losses that no step has taken yet."""
        return self._sum is not None and not self._is_taken

    def start(self) -> None:
        """Forgets what came before: its gradients are gone, or somebody else tells of them."""
        self._sum, self._is_taken, self._is_unknown = None, False, False

    @torch.no_grad()
    def _leave_out(self) -> None:
        """The script has dropped what waits: counts it, on its device, if it is NaN or Inf."""
        if self._sum is not None and self.are_waiting and not self._is_unknown:
            bad = torch.logical_not(torch.isfinite(self._sum.detach())).long()
            found = torch.stack([bad, bad * self._latest_step()])
            if self._left_out is not None:
                before = self._left_out
                found = found.to(before.device, non_blocking=True)
                first = torch.where(before[0] > 0, before[1], found[1])
                found = torch.stack([before[0] + found[0], first])
            self._left_out = found
        self.start()

    def left_out(self) -> tuple[int, int] | None:
        """How many losses that were NaN or Inf no step has taken, and the number of the last step
        before the first of them; None if there is none. Waits for the device: at the end."""
        self._leave_out()
        many, after = (0, 0) if self._left_out is None else self._left_out.tolist()
        return (many, after) if many else None

    def end(self) -> None:
        """A step is over: what was run backward in it is no part of the next one."""
        self._is_taken = True

    def take(self) -> Tensor | None:
        """The loss of a step that is about to be taken; None if nobody knows."""
        self._is_taken = True
        total = None if self._is_unknown else self._sum
        return total.real if total is not None and total.is_complex() else total

    def _add_all(self, tensors: Iterable[Any]) -> None:
        if self._is_taken:
            self.start()
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1 and not tensor.is_meta:
                self.formats = self.formats or formats_behind(tensor)
                loss = None
                if self._unscaled:
                    scaled, loss = self._unscaled.pop(id(tensor), (None, None))
                    if scaled is None or scaled() is not tensor:
                        loss = None
                if loss is None:
                    loss = tensor.detach().clone()
                if loss.dim():
                    loss = loss.reshape(())
                if loss.dtype is not torch.float32:
                    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
                # Added up at once: a script may run backward for ever and never step.
                if self._sum is not None:
                    loss = self._sum + loss.to(self._sum.device, non_blocking=True)
                self._sum = loss

    def parameters(self) -> list[Tensor]:
        """Those of every optimizer that there is, each of them once."""
        there = []
        for key, find in list(self._optimizers.items()):
            optimizer = find()
            if optimizer is None:
                self._optimizers.pop(key, None)
            elif isinstance(getattr(optimizer, "param_groups", None), list):
                there.append(optimizer)
        params = parameter_list(there)
        if len(there) > 1:
            params = list({id(param): param for param in params}.values())
        return params


def _without_gradient(params: Sequence[Tensor]) -> Tensor | None:
    """The first without a gradient; None if there is none."""
    if params and params[0].grad is None:
        return params[0]
    now = marks_of(params)
    return params[now.first_lacking()] if now.lacking else None


def _fill_a_storage(params: Iterable[Tensor]) -> bool:
    """Whether the gradients of `params` are all that is in the memory of at least one of them."""
    left: dict[int, int] = {}  # By storage: how many of its bytes are in none of the gradients.
    for gradient in (param.grad for param in params):
        if gradient is not None:
            storage = storage_of(gradient)
            elements = sparse_values(gradient) if gradient.is_sparse else gradient
            rest = left.get(id(storage), _bytes_of(storage))
            left[id(storage)] = rest - elements.numel() * elements.element_size()
    return any(rest <= 0 for rest in left.values())


def _bytes_of(storage: Any) -> int:
    """How large a storage is, or a tensor that has none."""
    return int(storage.nbytes if isinstance(storage, Tensor) else storage.nbytes())
