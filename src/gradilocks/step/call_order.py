"""The order of calls: scaled loss, backward, perhaps unscale_, step, cleared gradients, again.

Gradients carry the scale from backward to step and lose it there. Whoever mixes the two kinds
trains on numbers that are wrong by a factor of the scale, and nothing else would ever say so. A
clip function called in between, torch's or ours, either takes scaled gradients for true ones or
clips what the control clips again: ours refuses the first, and of the rest a warning tells.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradilocks._torch import version, watch_clips
from gradilocks.eager import users_line
from gradilocks.errors import ScaleMisuse, SharedParameter
from gradilocks.kernels import native
from gradilocks.kernels.guards import Guard, attribute
from gradilocks.ranks.layout import has_other_ranks

__all__ = [
    "CallOrder",
    "UnscaledGuard",
    "own_write_begins",
    "own_write_ended",
    "refuse_scaled",
]


_Known = TypeVar("_Known")


class CallOrder:
    """Knows what the gradients are at the moment, and refuses a call that does not fit."""

    def __init__(self) -> None:
        self._parameters: Callable[[], Iterable[Tensor]] = tuple
        self._policies: _Policies | None = None
        self._warned: set[str] = set()
        self.never_scales = False
        """Whether gradients are true all the time, whoever runs backward."""
        self.by_scaler = False
        """Whether code that knows of a scaler alone has unscaled, and will clip by itself."""
        self.is_part = False
        """Whether another one knows its parameters too, which is behind it at times."""
        with _lock:
            _alive[id(self)] = self
        watch_clips(_clip_noticed)
        self.scaled = False
        """Whether a loss has been scaled since the last step."""
        self.handed_out = False
        """Whether a scaled loss was handed out, so that its backward may come at any time."""
        self.unscaled = False
        """Whether `unscale_` has made the gradients true already."""
        self.number = next(_numbers)
        """Whose gradients these are; parts of a control have that of the whole."""
        # A few gradients that its last step has used up.
        self._marks: Any = _fresh_marks(None)
        # It, and those that know parameters of its control: the whole, and parts of it.
        self._kin: list[weakref.ref[CallOrder]] = [weakref.ref(self)]
        # Some gradients and how often they were written to by then: those of the last step that
        # were still there at a loss; as they were made true; and such ones at a loss since.
        self._leftovers: list[tuple[Tensor, int]] = []
        self._stepped = -1  # How many gradients the last step has used up.
        self._made_true: list[tuple[Tensor, int]] = []
        self._true_at_loss: list[tuple[Tensor, int]] | None = None

    def __getstate__(self) -> dict[str, object]:
        # A copy knows other gradients.
        left: dict[str, object] = {"_leftovers": [], "_made_true": [], "_true_at_loss": None}
        return {**self.__dict__, **left, "_marks": None, "_kin": []}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, number=next(_numbers), _marks=_fresh_marks(None))
        self._kin = [weakref.ref(self)]
        with _lock:
            _alive[id(self)] = self
        watch_clips(_clip_noticed)

    def know(self, parameters: Callable[[], Iterable[Tensor]], policies: _Policies) -> None:
        """Whose gradients it knows, and what becomes of them.

        Args:
            parameters: returns them.
            policies: say whether a loss is scaled, and how `step` clips.
        """
        self._parameters, self._policies = parameters, policies
        self.never_scales = not policies.scales

    def forget(self) -> None:
        """It knows of no parameters from here on, and keeps no gradient."""
        self._parameters, self._stepped = tuple, -1
        self.scaled = self.handed_out = self.unscaled = self.by_scaler = False
        self._leftovers, self._made_true, self._true_at_loss = [], [], None

    def begin_like(self, whole: CallOrder) -> None:
        """Knows some of the parameters of `whole`, and is where that one is; marks are common."""
        self.scaled, self.handed_out = whole.scaled, whole.handed_out
        self.unscaled, self.number = whole.unscaled, whole.number
        self._warned, self.is_part = whole._warned, True
        whole._kin[:] = [*(each for each in whole._kin if each() is not None), weakref.ref(self)]
        self._kin = whole._kin

    def guards(self) -> list[Guard]:
        """What must be as it is now for the gradients to be of the same kind at the next step."""
        return attribute(self, "scaled", "unscaled")

    def check_backward(self, params: Sequence[Tensor]) -> None:
        """Before gradients are added to what is there: the first, the last and a few between."""
        if self.scaled and not self.unscaled:
            return
        if self.unscaled:
            self.unscaled = len(self._some(params)) > 0
        if self.unscaled:
            raise ScaleMisuse(
                "backward() after unscale_() would add scaled gradients to unscaled ones. Call "
                "control.step() first, or clear the gradients with control.zero_grad()."
            )
        # If all had a gradient, these of them were marked.
        some = _sample(params) if len(params) == self._stepped else self._some_of(params)
        if len(self._kin) == 1 and self._marks.first_marked(some, True) < 0:
            return  # As it is nearly always.
        if all(_cleared_unseen(grad) for grad in self._stepped_on(some)):
            return
        raise ScaleMisuse(
            "the gradients of the last step are still there, and backward() would add "
            "scaled gradients to them. Clear them with control.zero_grad() after every "
            "control.step()."
        )

    def check_leftovers(self, params: Sequence[Tensor]) -> None:
        """Before a step: raises if scaled gradients were added to some of the last step."""
        now = {id(grad) for grad in self._some(params)}
        for grad, writes in self._leftovers:
            if id(grad) in now and version(grad) != writes:
                raise ScaleMisuse(
                    "the gradients of this optimizer's last step were still there when a loss was "
                    "run backward, which has added scaled gradients to them. Clear them with "
                    "control.zero_grad(only=optimizer) after every control.step(only=optimizer)."
                )

    def is_stepped(self, params: Sequence[Tensor]) -> bool:
        """Whether there are no gradients but those of the last step."""
        some = self._some_of(params)
        return len(self._stepped_on(some)) == len(some)

    def waits(self, params: Sequence[Tensor]) -> bool:
        """Whether there are gradients that carry the scale and have not been stepped on."""
        return self.scaled and not self.unscaled and not self.is_stepped(params)

    @staticmethod
    def _some_of(params: Sequence[Tensor]) -> list[Tensor]:
        """Some parameters that have a gradient, the first and the last of them included."""
        first = next((param for param in params if param.grad is not None), None)
        if first is None:
            return []
        last = next(param for param in reversed(params) if param.grad is not None)
        between = params[:: max(1, len(params) // _MARKED)]
        return [first, last, *(param for param in between if param.grad is not None)]

    def _some(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of some parameters, the first and the last that have one among them."""
        return [grad for param in self._some_of(params) if (grad := param.grad) is not None]

    def _stepped_on(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Those gradients of the parameters that a step has used up, as that has left them."""
        marks = [order._marks for each in self._kin if (order := each()) is not None]
        return [
            grad
            for param in params
            if (grad := param.grad) is not None
            and any(each.first_marked((param,), True) == 0 for each in marks)
        ]

    def check_scaled(self, caller: str) -> None:
        """Before gradients are divided by the scale."""
        if not self.scaled:
            raise ScaleMisuse(
                f"{caller} without a backward() since the last step or zero_grad(): these "
                f"gradients do not carry the scale that {caller} would divide by. Call "
                f"control.backward(loss), or control.scale_loss(loss).backward(), before "
                f"control.{caller}, or inside the closure."
                + (_A_STAGE if has_other_ranks() else "")
            )

    def check_unscale(self, *, elsewhere: bool = False) -> None:
        """Before `unscale_`; `elsewhere` if another rank may have scaled the loss."""
        if self.unscaled:
            raise ScaleMisuse(
                "unscale_() has already been called since the last step(): the gradients are "
                "unscaled, and doing it twice would shrink them by the scale again."
            )
        if not elsewhere:
            self.check_scaled("unscale_()")

    def note_unscaled(self, params: Sequence[Tensor] = ()) -> None:
        """The gradients have been made true in place.

        Args:
            params: whose, if losses of other optimizers may come before their step.
        """
        self.unscaled = True
        self._made_true = [(grad, version(grad)) for grad in self._some(params)]
        self._true_at_loss = None

    def note_loss(self, params: Sequence[Tensor]) -> None:
        """Before a loss that may be another optimizer's, while others wait for their step."""
        self.look_again(params)
        if self.unscaled:
            self._true_at_loss = [(grad, version(grad)) for grad in self._some(params)]
        there = self._stepped_on(self._some_of(params))
        self._leftovers = [(grad, version(grad)) for grad in there if not _cleared_unseen(grad)]

    def look_again(self, params: Sequence[Tensor]) -> None:
        """Whether gradients that were made true still are, after losses that may be others'.

        New ones, and ones that were cleared in place and have had something added since, carry the
        scale. Something added to true ones is refused.
        """
        if not self.unscaled or self._true_at_loss is None:
            return
        now, then = self._some(params), self._true_at_loss
        if [(id(grad), version(grad)) for grad in now] == [(id(g), writes) for g, writes in then]:
            return  # The backward pass was another optimizer's.
        as_made = [(id(grad), writes) for grad, writes in self._made_true]
        if [id(grad) for grad in now] == [k for k, _ in as_made] and as_made == [
            (id(grad), writes) for grad, writes in then
        ]:
            raise ScaleMisuse(
                "gradients were unscaled for a step that has not come, and a loss that was run "
                "backward since has added scaled ones to them. Step that optimizer first, or clear "
                "its gradients with control.zero_grad(only=optimizer)."
            )
        self.unscaled, self._true_at_loss = False, None

    def note_step(self, params: Iterable[Tensor]) -> None:
        """The gradients of `params` have been used up; they should be cleared next.

        A few of them are marked, the first and the last among them: somebody may clear or replace
        some and forget the others, and marking 2,000 would take longer than a step should.
        """
        self.scaled = self.handed_out = self.unscaled = self.by_scaler = False
        listed = params if isinstance(params, list) else list(params)
        self._stepped = len(listed)
        if type(self._marks) is _AttributeMarks:
            self._marks = _fresh_marks(self._marks)
        self._marks.clear()
        self._marks.mark(_sample(listed))

    def note_cleared(self) -> None:
        """The gradients are gone. A loss that was handed out may still bring new ones."""
        self.scaled = self.handed_out
        self.unscaled = False

    def dropped(self, params: Iterable[Tensor]) -> bool:
        """Whether the gradients of the losses so far are gone, though nobody said so.

        As after `model.zero_grad()`. Of a loss that was handed out, its backward may be to come.
        """
        return not self.handed_out and all(param.grad is None for param in params)

    def clash(self) -> str:
        """What a clip by somebody else would be now.

        "scaled" if it took scaled gradients for true ones, "twice" beside a clip of the control's
        own, "before" if the control would take what it leaves for what there was; "" if it is no
        matter, as after `unscale_()`, which is there for writing to gradients.
        """
        policies = self._policies
        if policies is None:
            return ""
        if policies.scales and self.scaled and not self.unscaled:
            return "scaled"
        if not self.scaled and not self.never_scales:
            return ""
        if policies.clip_policy.policy_name != "NoClip":
            return "twice"
        return "" if policies.scales or self.by_scaler else "before"

    def has_warned(self, clash: str) -> bool:
        """Whether somebody has been told of this already."""
        return clash in self._warned

    def has_one_of(self, parameters: set[int]) -> bool:
        """Whether one of these ids is that of a parameter whose gradients it knows."""
        return not parameters.isdisjoint(map(id, self._parameters()))

    def gradients(self) -> set[int]:
        """The ids of the gradients that it knows; of none that the last step has used up."""
        params = list(self._parameters())
        if not self.scaled and self.is_stepped(params):
            return set()
        return {id(param.grad) for param in params if param.grad is not None}

    def warn(self, clash: str, caller: str) -> None:
        """Tells, once, of a clip by `caller`."""
        self._warned.add(clash)
        assert self._policies is not None
        clip = self._policies.clip_policy
        text = _CLIPPED_TWICE.format(caller=caller, clip=clip, who="GradientControl")
        if clash == "before":
            text = _CLIPPED_BEFORE.format(caller=caller)
        if clash == "scaled":
            own = "clips by nothing else" if clip.policy_name == "NoClip" else f"clips by {clip!r}"
            text = _CLIPPED_SCALED.format(caller=caller, own=own)
        warnings.warn(text, RuntimeWarning, stacklevel=users_line())


class _Policies(Protocol):
    """What an engine says of its policies."""

    scales: bool
    clip_policy: Any


# By their ids: a WeakSet takes ten times as long to go through.
_alive: weakref.WeakValueDictionary[int, CallOrder] = weakref.WeakValueDictionary()
# A mark travels with a gradient that is saved: in another process it must be nobody's.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "big"))
_MARKED = 8
"""About how many gradients are marked after a step."""
_MOST_MARKS = 8
"""How many may have marked one gradient; who has done so first is forgotten first."""
_MARKS = "_gradilocks_marks"
"""On the gradient itself: whose _AttributeMarks have it, and at which version. A weak reference
would do the same, but `torch.utils.swap_tensors` refuses tensors that have one."""
_lock = threading.Lock()


def _sample(params: list[Tensor] | Sequence[Tensor]) -> Sequence[Tensor]:
    """Some of the parameters, the first and the last among them."""
    return *params[:: max(1, len(params) // _MARKED)], *params[-1:]


def _living(known: weakref.WeakValueDictionary[int, _Known]) -> list[_Known]:
    with _lock:
        return [each for ref in known.valuerefs() if (each := ref()) is not None]


def refuse_scaled(params: Sequence[Tensor], caller: str, bound: float) -> None:
    """Raises if a clip function of ours is about to take scaled gradients for true ones.

    And warns if it clips what a control will clip again.

    Args:
        params: whose gradients.
        caller: the name of the function.
        bound: to which it clips; at infinity it only measures.
    """
    orders = [each for each in _living(_alive) if each.scaled or each.never_scales]
    guards = [each for each in _living(_guards) if each.clip is not None]
    clashes = [(order, order.clash()) for order in orders]
    if any(
        clash == "scaled" or (clash and bound < math.inf and not order.has_warned(clash))
        for order, clash in clashes
    ):
        # Who has none of the parameters need not look at gradients: another model's control.
        mine = set(map(id, params))
        orders = [order for order in orders if order.has_one_of(mine)]
        gradients = [grad for param in params if orders and (grad := param.grad) is not None]
        for order, clash in _clashes(orders, gradients):
            if clash == "scaled":
                raise ScaleMisuse(
                    "these gradients still carry the scale of a GradientControl and would be "
                    "clipped by that much too far. Use GradientControl(..., clip=1.0), or call "
                    "control.unscale_() first."
                )
            if bound < math.inf and not order.has_warned(clash):
                order.warn(clash, f"gradilocks.{caller}")
    if bound < math.inf:
        for guard in guards:
            guard.warn_of_clip(f"gradilocks.{caller}", params=params)


def _clip_noticed(caller: str, gradients: Sequence[Tensor], bound: float) -> None:
    """A clip function of torch's is about to write to these gradients."""
    if bound == math.inf:  # It only measures.
        return
    _warn_of_scalers(caller, gradients)
    orders = _living(_alive)
    if not any((clash := order.clash()) and not order.has_warned(clash) for order in orders):
        return
    for order, clash in _clashes(orders, gradients):
        if not order.has_warned(clash):
            order.warn(clash, caller)


def _warn_of_scalers(caller: str, gradients: Sequence[Tensor]) -> None:
    """Tells if one of our scalers will clip these gradients again."""
    for guard in [each for each in _living(_guards) if each.clip is not None]:
        guard.warn_of_clip(caller, gradients=gradients)


def _clashes(
    orders: Sequence[CallOrder], gradients: Sequence[Tensor]
) -> Iterator[tuple[CallOrder, str]]:
    """Those of the orders that know some of the gradients, and how a clip of them would clash.

    Where an optimizer of a control is stepped alone, its own order has the say.
    """
    if not any(order.clash() for order in orders):
        return
    every = {id(gradient) for gradient in gradients}
    left: dict[int, set[int]] = {}
    for order in sorted(orders, key=lambda each: not each.is_part):
        mine, clash = order.gradients(), order.clash()
        rest = left.setdefault(order.number, every)
        if mine & rest and clash:
            yield order, clash
        left[order.number] = rest - mine


def _cleared_unseen(grad: Tensor) -> bool:
    """Whether `grad` was zeroed through `.data`, which its version counter does not see.

    Asked on the CPU alone, where asking is free.
    """
    if grad.device.type != "cpu" or grad.layout is not torch.strided:
        return False
    return not bool(grad.count_nonzero())


_guards: weakref.WeakValueDictionary[int, UnscaledGuard] = weakref.WeakValueDictionary()


class UnscaledGuard:
    """Knows the gradients that a GradScaler has unscaled since its last `update()`."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self.clip: Any = None
        """The policy by which the scaler will clip what it has unscaled, if it has one."""
        self._marks: Any = None
        self.start_iteration()
        with _lock:
            _guards[id(self)] = self

    def start_iteration(self) -> None:
        """Nothing has been scaled or unscaled so far."""
        self._losses = 0
        self.clip = None
        self.has_marked = False
        self._marks = _fresh_marks(self._marks)
        self._marks.clear()

    def will_clip(self, clip: Any, warned: set[str]) -> None:
        """The scaler clips at its step, by a policy of its own.

        Args:
            clip: the policy.
            warned: what the scaler's user has been told already.
        """
        self.clip, self._warned = clip, warned
        watch_clips(_clip_noticed)

    def warn_of_clip(
        self, caller: str, *, params: Sequence[Tensor] = (), gradients: Sequence[Tensor] = ()
    ) -> None:
        """Tells, once, if `caller` clips gradients that the scaler has unscaled and clips again.

        Args:
            caller: the name of a function.
            params: whose gradients it clips,
            gradients: or the gradients.
        """
        if self._warned or not self.has_marked:
            return
        if self._marks.first_marked(params, False) < 0 and not self._marks.knows_one_of(gradients):
            return
        self._warned.add("twice")
        text = _CLIPPED_TWICE.format(caller=caller, clip=self.clip, who="GradScaler")
        warnings.warn(text, RuntimeWarning, stacklevel=users_line())

    def note_scaled(self, outputs: Any) -> None:
        """Losses have been scaled; with more than one, backward may come between two steps."""
        self._losses += 1 if isinstance(outputs, Tensor) else 2

    def mark(self, params: Sequence[Tensor]) -> None:
        """The gradients of `params` are unscaled now."""
        self.has_marked = True
        self._marks.mark(params)

    def refuse_twice(self, params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
        """Raises if one of them has been unscaled already.

        The same tensor may be unscaled again if somebody has written to it since, other than our
        own clip functions, and there was more than one loss to run backward on.
        """
        if not self.has_marked:
            return
        place = self._marks.first_marked(params, self._losses != 1)
        if place >= 0:
            raise SharedParameter(
                f"the gradient of {name(params[place])} has been unscaled already since the last "
                "update() and would be divided by the scale twice. Put each parameter into one "
                "optimizer, and give unscale_() and step() the same optimizer object."
            )

    def unwritten(self, params: Sequence[Tensor]) -> Callable[[], None]:
        """Those of their gradients that are as they were unscaled.

        Returns:
            To be called when they have been written to by ourselves: it makes them count as before.
        """
        marks = self._marks
        return partial(marks.renew, marks.unwritten(params))


def _fresh_marks(before: Any) -> Any:
    """Marks without any mark, or `before` if they are such already: in C++ where that is built."""
    library = native.library()
    if before is None or (library is not None and type(before) is _AttributeMarks):
        return _AttributeMarks() if library is None else library.GradientMarks()
    return before


class _AttributeMarks:
    """As GradientMarks in C++, where that is not built: a mark is an attribute of a gradient.

    Several may have marked it: its scaler, and the control that steps on it.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)

    def clear(self) -> None:
        self._number = next(_numbers)

    def mark(self, params: Sequence[Tensor]) -> None:
        for param in params:
            grad = param.grad
            if grad is not None and not grad.is_inference():  # Nobody counts the writes to those.
                marks: dict[int, int] = getattr(grad, _MARKS, {})
                latest = sorted(marks.items())[1 - _MOST_MARKS :]
                setattr(grad, _MARKS, {**dict(latest), self._number: version(grad)})

    def first_marked(self, params: Sequence[Tensor], unwritten_only: bool) -> int:
        for place, param in enumerate(params):
            grad = param.grad
            writes = getattr(grad, _MARKS, {}).get(self._number)
            if grad is None or writes is None:
                continue
            if not unwritten_only or version(grad) == writes:
                return place
        return -1

    def knows_one_of(self, gradients: Sequence[Tensor]) -> bool:
        return any(self._number in getattr(grad, _MARKS, {}) for grad in gradients)

    def unwritten(self, params: Sequence[Tensor]) -> list[Tensor]:
        number, grads = self._number, [param.grad for param in params]
        return [
            grad
            for grad in grads
            if grad is not None and getattr(grad, _MARKS, {}).get(number) == version(grad)
        ]

    def renew(self, gradients: Sequence[Tensor]) -> None:
        for grad in gradients:
            setattr(grad, _MARKS, {**getattr(grad, _MARKS), self._number: version(grad)})


def own_write_begins(params: Sequence[Tensor]) -> list[Callable[[], None]]:
    """Our own clip is about to write to the gradients of `params`; that makes no new gradients.

    Returns:
        For `own_write_ended`.
    """
    return [each.unwritten(params) for each in _living(_guards) if each.has_marked]


def own_write_ended(kept: Sequence[Callable[[], None]]) -> None:
    """Our own clip has written."""
    for count_as_before in kept:
        count_as_before()


_CLIPPED_SCALED = (
    "{caller} was called between backward() and step() of a GradientControl, on gradients that "
    "still carry its scale: they are clipped by that much too far, and what the control then "
    "measures and steps on is what is left of them. The control {own}. Use "
    "GradientControl(..., clip=1.0) in its place, or call control.unscale_() before it."
)

_CLIPPED_BEFORE = (
    "{caller} was called on gradients that a GradientControl is about to step on. They are "
    "clipped, but the norm that the control reports and records is the one that this clip leaves, "
    "and it knows of no limit. Give the clip to the control and leave the call out: "
    "GradientControl(..., clip=...)."
)

_CLIPPED_TWICE = (
    "{caller} clips gradients that a {who} clips again at its step(), by {clip!r}: the two stack, "
    "and the norm that it measures and records is that of clipped gradients. Leave one of them out."
)

_A_STAGE = (
    " The stages of a pipeline that have no loss take part if the control knows that they are "
    'stages: GradientControl(..., mesh=world_mesh, distinct="pp"), and the schedule has '
    "control.loss_fn(loss_fn)."
)
