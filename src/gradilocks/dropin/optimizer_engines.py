"""The engines of a GradScaler, one for each optimizer that it has met.

A scaler meets its optimizers one by one and owns none of them: engines are kept beside weak
references. What a clip policy has learned of an optimizer is found again after a checkpoint by the
names and shapes of its parameters. Into another process the names and shapes of a model's
parameters go along, and not the model: there it is given again, or a shape that only one of them
has tells which parameter this is. What a clip needs and nobody can tell is refused.

Groups of parameters are numbered over all optimizers, as a GradientControl numbers them, here in
the order in which they were met.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradilocks.checks import IN_A_PATTERN, refuse_patterns, warn_of_misfits
from gradilocks.clip import ClipPolicy, NoClip
from gradilocks.errors import BadState
from gradilocks.names import Names, is_unnamed
from gradilocks.scale import NoScale, ScalePolicy
from gradilocks.state.checkpoint import SCALERS, describe, load_memory, rebuild, save_memory
from gradilocks.state.optimizer_match import (
    FIELDS,
    fits_signature,
    known_places,
    may_be_as_well,
    places_of,
    signature_of,
    tell_of_a_stranger,
)
from gradilocks.step.engine import Engine, Remembered
from gradilocks.step.own_step import weakly
from gradilocks.step.table import GradientTable, every_parameter

__all__ = ["OptimizerEngines"]

_TELLING = ("names", "sizes", "shapes")


def _nobody() -> None:
    """In the place of a weak reference to an optimizer that is not there."""


@dataclass
class _Place:
    """The place of an optimizer among those that the scaler has met."""

    ref: Callable[[], Any] = _nobody
    """Returns the optimizer that has it as long as that lives."""
    saved: dict[str, Any] | None = None
    """What a checkpoint, or the scaler that this one was copied from, knows of the optimizer that
    is to have it: a signature, and the memory of the clip policy."""
    owner: Callable[[], Any] = _nobody
    """Returns the optimizer that `saved` is certainly of, if that is known and it lives."""
    signature: dict[str, Any] = field(default_factory=dict)
    """Of the optimizer that had it last."""
    guessed: dict[str, Any] | None = None
    """What of a checkpoint that optimizer was given because it fits, and not as its certain owner.
    """
    left: tuple[Any, list[Callable[[], Any]]] | None = None
    """What the clip policy remembered of that one when it went, and of which parameters."""

    def leave(self, kept: Remembered) -> None:
        """Its optimizer is gone. The parameters are not kept alive."""
        self.left = kept.memory, [weakref.ref(param) for param in kept.params]

    def left_of(self, params: Sequence[Tensor]) -> Remembered | None:
        """What is left of these very parameters, if that is all that is left here."""
        memory, refs = self.left or (None, [])
        whose = [ref() for ref in refs]
        same = memory is not None and set(map(id, whose)) == set(map(id, params))
        return Remembered(memory, whose) if same else None

    @property
    def groups(self) -> int:
        """How many groups of parameters its optimizer has, or had."""
        optimizer = self.ref()
        if optimizer is not None:
            self.signature["groups"] = len(optimizer.param_groups)
        known: int = (self.saved or self.signature).get("groups", 0)
        return known


class OptimizerEngines:
    """One scale policy and one clip policy, and an engine for each optimizer.

    Args:
        scale: the scale policy; None if the scale moves by torch's rule.
        clip: the clip policy.
        model: names the parameters.
    """

    def __init__(self, scale: ScalePolicy | None, clip: ClipPolicy, model: Any) -> None:
        self.scale, self.clip, self._model = scale, clip, model
        self.known: dict[int, tuple[Callable[[], Any], Engine]] = {}
        """By the id of the optimizer: what returns it as long as it lives, and its engine."""
        self._places: list[_Place] = []
        self._place_of: dict[int, _Place] = {}  # By the id of the optimizer.
        # The names and shapes of a model that stayed behind in another process.
        self._left_behind: list[tuple[str, tuple[int, ...]]] = []
        self._warned_of_misfits = False
        refuse_patterns(clip, model)

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"known": {}, "_place_of": {}, "_warned_of_misfits": False, "_model": None}
        if self._model is not None:
            fresh["_left_behind"] = Names(self._model, ()).shapes()
        return {**self.__dict__, **fresh, "_places": [_Place(saved=s) for s in self._learned()]}

    def copied(self, model: Any, memo: Mapping[int, Any]) -> OptimizerEngines:
        """A copy in this process, which knows the optimizers, or their copies, by themselves.

        Args:
            model: names the parameters.
            memo: what `copy.deepcopy` has copied, by the id of what it is a copy of.
        """
        made = copy.deepcopy(self).with_model(model)
        living = [place for place in self._places if place.saved or place.ref() is not None]
        for mine, place in zip(made._places, living, strict=True):
            optimizer = place.ref()
            if optimizer is None:
                optimizer = place.owner()
            if optimizer is not None:
                mine.owner = weakly(memo.get(id(optimizer), optimizer))
        return made

    def with_model(self, model: Any) -> OptimizerEngines:
        """Itself, naming parameters by `model` from here on; for a copy in this process."""
        self._model, self._left_behind = model, [] if model is not None else self._left_behind
        return self

    def take_model(self, model: Any) -> None:
        """Names parameters by `model` from here on; raises if it is not the one left behind."""
        names = Names(model, ())
        given = names.shapes()
        if self._left_behind and given != self._left_behind:
            pairs = itertools.zip_longest(given, self._left_behind)
            mine, theirs = next((one, other) for one, other in pairs if one != other)
            raise ValueError(
                "this GradScaler was pickled with another model. There the parameters have "
                f"{_described(theirs)} where this model has {_described(mine)}. Give it the model "
                "that it was made for, or make a new GradScaler."
            )
        refuse_patterns(self.clip, model)
        self.with_model(model)
        for _, engine in list(self.known.values()):
            engine.names.use(model, engine.names.optimizers)

    def of(self, optimizer: Any) -> Engine:
        """The engine of an optimizer, made when it is first met."""
        known = self.known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            if len(self._places) > 1:
                known[1].names.first_group = self._first_group(optimizer)
            return known[1]
        mine, number = weakref.ref(self), id(optimizer)

        def forget(gone: object) -> None:
            """Its parameters are not kept either."""
            engines = mine()
            known = None if engines is None else engines.known.get(number)
            if engines is not None and known is not None and known[0] is gone:
                del engines.known[number]
                place = engines._place_of.pop(number, None)
                if place is not None:
                    place.leave(known[1].all_remembered())

        try:
            ref: Callable[[], Any] = weakref.ref(optimizer, forget)
        except TypeError:  # A class with slots and none for references.
            ref = lambda: optimizer  # noqa: E731
        names = Names(self._model, _IfAlive(ref))
        if self._left_behind:
            names = _NamesByShape(self._left_behind, _IfAlive(ref))
            self._refuse_untold(optimizer, names)
        engine = Engine(self.scale or NoScale(), self.clip, names=names)
        engine.table, engine.owner = GradientTable(refuse_twice=False), ref
        if not isinstance(self.clip, NoClip):  # Else nothing is learned, and nothing numbered.
            self._place_of[number] = self._take_place(optimizer, ref, engine)
            names.first_group = self._first_group(optimizer)
        self.known[number] = ref, engine
        return engine

    def _take_place(self, optimizer: Any, ref: Callable[[], Any], engine: Engine) -> _Place:
        """Gives an optimizer its place, and its engine what is known there."""
        signature = signature_of(optimizer, engine.names)
        place = self._place_for(optimizer, signature)
        params = list(every_parameter([optimizer]))
        left = place.left_of(params)
        place.guessed = None if place.owner() is optimizer else place.saved
        if place.saved is not None:
            known = known_places(signature, place.saved)
            if known is not None:
                engine.recall(place.saved["memory"], [params[k] for k in known])
            elif not self.clip.by_parameter:
                engine.recall(place.saved["memory"], params)
            else:
                tell_of_a_stranger(signature, self.clip.policy_name, "GradScaler")
        elif left is not None:
            engine.remember(left)
        place.ref, place.saved, place.owner, place.signature = ref, None, _nobody, signature
        place.left = None
        return place

    def _first_group(self, optimizer: Any) -> int:
        """The number of the first of its groups: they are counted over all optimizers."""
        mine = self._place_of[id(optimizer)]
        before = itertools.takewhile(lambda place: place is not mine, self._places)
        return sum(place.groups for place in before)

    def _place_for(self, optimizer: Any, mine: dict[str, Any]) -> _Place:
        """The place of an optimizer that is met for the first time.

        The one that a checkpoint kept for it; or that of one that is gone, over the same parameters
        if there is such a one, as where an optimizer is made anew; or a new one. Two that live are
        two, over the same parameters too: each has its own norms.
        """
        waiting = [place for place in self._places if place.saved is not None]
        for place in waiting:
            if place.owner() is optimizer:
                return place
        if waiting:
            found = self._told_apart(optimizer, mine, waiting)
            if found is not None:
                return found
        self._refuse_guesses(optimizer, mine)
        params = list(every_parameter([optimizer]))
        gone = [place for place in self._places if place.saved is None and place.ref() is None]
        same = [place for place in gone if place.left_of(params) is not None]
        again = [place for place in gone if places_of(mine, [place.signature])]
        if not gone:
            self._places.append(_Place())
        return (same or again or gone or self._places[-1:])[0]

    def _told_apart(
        self, optimizer: Any, mine: dict[str, Any], waiting: Sequence[_Place]
    ) -> _Place | None:
        """The one of `waiting` that was kept for this optimizer; None if none was.

        Raises:
            BadState: it may be each of several, which have learned different things.
        """
        saved = [place.saved for place in waiting if place.saved is not None]
        places = places_of(mine, saved)
        if not places:
            if self.clip.learns:
                tell_of_a_stranger(mine, self.clip.policy_name, "GradScaler")
            return None
        if _must_tell(self.clip, [saved[place] for place in places]):
            raise _untold(self.clip, len(places), mine["names"])
        return waiting[places[0]]

    def _refuse_guesses(self, optimizer: Any, mine: dict[str, Any]) -> None:
        """Raises if another optimizer was given what may as well be of this one.

        Over the same parameters it is of both.
        """
        params = set(map(id, every_parameter([optimizer])))
        for place in self._places:
            holder = place.ref()
            if holder is None or place.guessed is None:
                continue
            fits = may_be_as_well(mine, place.guessed, place.signature)
            matters = _must_tell(self.clip, [place.guessed, {"memory": None}])
            if fits and matters and params != set(map(id, every_parameter([holder]))):
                raise _untold(self.clip, 1, mine["names"])

    def _refuse_untold(self, optimizer: Any, names: Names) -> None:
        """Raises if the clip goes by names, or its memory does, and they cannot be told here."""
        mine = signature_of(optimizer, names)
        if not any(map(is_unnamed, mine["names"])):
            return
        groups = {group.get("name") for group in optimizer.param_groups}
        keys = [key for key in self.clip.misfits((), ()) if isinstance(key, str)]
        why = next((repr(key) for key in keys if key not in groups or set(key) & IN_A_PATTERN), "")
        waiting = [place for place in self._places if place.saved is not None]
        if waiting and all(place.owner() is not optimizer for place in waiting):
            sizes = [place.saved["sizes"] for place in waiting if place.saved is not None]
            if sizes.count(mine["sizes"]) > 1 or self.clip.by_parameter:
                why = why or "what it has learned so far"
        if why:
            place = next(filter(is_unnamed, mine["names"]))
            raise ValueError(
                "this GradScaler came from another process without its model, and "
                f"clip={self.clip.policy_name}(...) needs the names of parameters, for {why}. "
                f"Which of the model's parameters {place} is cannot be told: several have its "
                "shape, or none. Say it before the first step: scaler.model = model."
            )

    def warn_of_misfits(self) -> None:
        """Warns, once, of groups and patterns of the clip policy that fit no parameter so far."""
        if not self.known or self._warned_of_misfits:
            return
        self._warned_of_misfits = True
        alive = [engine for ref, engine in list(self.known.values()) if ref() is not None]
        warn_of_misfits(self.clip, [engine.names for engine in alive])

    def saved_clip(self) -> dict[str, Any]:
        """The clip policy and what it has learned, in plain numbers.

        Of the optimizers in a tuple, which torch.distributed.checkpoint takes for one value: of a
        list it would ask a fresh scaler for every key, and that one has not met them yet.
        """
        return {"policy": describe(self.clip), "states": tuple(self._learned())}

    def checked_clip(self, saved: Any, model: Any) -> tuple[ClipPolicy, list[dict[str, Any]]]:
        """The policy and its memories from `saved_clip`; raises BadState and changes nothing."""
        if not isinstance(saved, Mapping) or set(saved) != {"policy", "states"}:
            raise BadState(f"the clip in the state_dict does not fit: {saved!r:.80}.")
        policy = rebuild(self.clip, saved["policy"], "clip", owner="scaler")
        states = saved["states"]
        fit = isinstance(states, (list, tuple))
        for state in states if fit else ():
            fit = fit and isinstance(state, Mapping) and "memory" in state
            fit = fit and set(state) <= {*FIELDS, "memory"} and fits_signature(state)
        if not fit:
            raise BadState(
                f"what the clip policy has learned, in the state_dict, does not fit: {states!r:.80}"
            )
        load_memory(policy, None, 0)  # Whether it can start at all.
        for state in states:
            load_memory(policy, state["memory"], len(state["names"]))
            same = [each for each in states if all(each.get(k) == state.get(k) for k in _TELLING)]
            if _must_tell(policy, same):
                raise _untold(policy, len(same), state["names"])
        try:
            refuse_patterns(policy, model)
        except ValueError as error:
            raise BadState(
                f"the clip policy in the state_dict does not fit: {error} To keep the one that "
                "this scaler was made with: load_state_dict(..., policies='scaler')."
            ) from error
        return policy, [dict(state) for state in states]

    def go_on_with(self, clip: ClipPolicy, memories: list[dict[str, Any]]) -> None:
        """Starts afresh with a policy and memories that `checked_clip` has found."""
        self.clip, self.known, self._place_of = clip, {}, {}
        self._places = [_Place(saved=memory) for memory in memories]

    def _learned(self) -> list[dict[str, Any]]:
        """What is known of each optimizer, in the order of their places."""
        states: list[dict[str, Any]] = []
        for place in self._places:
            optimizer = place.ref()
            if place.saved is not None:
                states.append(place.saved)
            elif optimizer is not None:
                engine = self.known[id(optimizer)][1]
                memory = engine.memory_for(list(every_parameter([optimizer])))
                signature = signature_of(optimizer, engine.names)
                states.append({**signature, "memory": save_memory(memory)})
        return states


class _IfAlive(Sequence[Any]):
    """The optimizer that a weak reference is to; nothing when it is gone."""

    def __init__(self, ref: Callable[[], Any]) -> None:
        self._ref = ref

    def __len__(self) -> int:
        return int(self._ref() is not None)

    def __getitem__(self, place: Any) -> Any:
        optimizer = self._ref()
        return ([] if optimizer is None else [optimizer])[place]


class _NamesByShape(Names):
    """The names of a model that stayed behind, where a parameter's shape tells which one it is.

    What its optimizer calls it has the say, if it was given names itself.
    """

    def __init__(self, left_behind: list[tuple[str, tuple[int, ...]]], optimizers: Any) -> None:
        super().__init__(None, optimizers)
        shapes = Counter(shape for _, shape in left_behind)
        self._places = {
            shape: (place, name)
            for place, (name, shape) in enumerate(left_behind)
            if shapes[shape] == 1
        }

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        if self.has_model:  # It has been given since.
            return super()._named_parameters()
        found: list[tuple[int, str, Tensor]] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if not group.get("param_names"):
                    found += [
                        (*self._places[tuple(param.shape)], param)
                        for param in group["params"]
                        if tuple(param.shape) in self._places
                    ]
        shapes = Counter(place for place, *_ in found)  # Two of one shape, of which one is known.
        found.sort(key=lambda each: each[0])
        return [(name, param) for place, name, param in found if shapes[place] == 1]


def _described(parameter: tuple[str, tuple[int, ...]] | None) -> str:
    return "no more" if parameter is None else f"{parameter[0]} of shape {parameter[1]}"


def _must_tell(clip: ClipPolicy, alike: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it matters to `clip` which of these states an optimizer gets."""
    if len(alike) < 2:
        return False
    by_number = any(isinstance(key, int) for key in clip.misfits((), ()))
    return by_number or any(state["memory"] != alike[0]["memory"] for state in alike)


def _untold(clip: ClipPolicy, count: int, names: Sequence[str]) -> BadState:
    """What to raise if it cannot be told which of several states is an optimizer's."""
    named = ", ".join(names[:2])
    way_out = (
        "Name the parameters, in the run that saves and in the one that loads: "
        'GradScaler(..., model={"one": model, "other": other}). '
    )
    if not any(map(is_unnamed, names)):
        way_out += "Of two over the same parameters, keep one, or give each a scaler of its own. "
    whose = f"{count} optimizers" if count > 1 else "one of two optimizers"
    return BadState(
        f"what clip={clip.policy_name}(...) knows, from a state_dict or from the scaler that this "
        f"one is a copy of, is of {whose} whose parameters have the same names and "
        f"shapes ({named}, ...). Which optimizer is which cannot be told, and the order of their "
        f"steps is no proof. {way_out}To go on from a state_dict without "
        f"what was learned: state_dict[{SCALERS!r}]['clip']['states'] = ()."
    )
