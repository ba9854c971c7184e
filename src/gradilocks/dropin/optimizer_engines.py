"""The engines of a GradScaler, one for each optimizer that it has met.

A scaler meets its optimizers one by one and owns none of them: engines are kept beside weak
references. What a clip policy has learned of an optimizer is found again after a checkpoint by the
names and sizes of its parameters. Into another process the names and shapes of a model's parameters
go along, and not the model: there it is given again, or a shape that only one of them has tells
which parameter this is. What a clip needs and nobody can tell is refused.
"""

from __future__ import annotations

import itertools
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradilocks.clip import AdaptiveClip, ClipPolicy
from gradilocks.eager import users_line
from gradilocks.errors import BadState
from gradilocks.names import Names, called_alike, is_unnamed
from gradilocks.scale import NoScale, ScalePolicy
from gradilocks.state.checkpoint import describe, load_memory, rebuild, save_memory
from gradilocks.step.engine import Engine
from gradilocks.step.table import GradientTable, every_parameter

__all__ = ["OptimizerEngines"]

_logger = logging.getLogger("gradilocks")
_FIELDS = {"names", "sizes", "memory"}
_IN_A_PATTERN = set("*?[.")


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
        self._loaded: list[dict[str, Any]] = []
        # The names and shapes of a model that stayed behind in another process.
        self._left_behind: list[tuple[str, tuple[int, ...]]] = []
        self._warned_of_misfits = False
        _refuse_patterns(clip, model)

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"known": {}, "_warned_of_misfits": False, "_model": None}
        if self._model is not None:
            fresh["_left_behind"] = Names(self._model, ()).shapes()
        return {**self.__dict__, **fresh, "_loaded": self._learned()}

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
        _refuse_patterns(self.clip, model)
        self.with_model(model)
        for _, engine in list(self.known.values()):
            engine.names.use(model, engine.names.optimizers)

    def of(self, optimizer: Any) -> Engine:
        """The engine of an optimizer, made when it is first met."""
        known = self.known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        mine, place = weakref.ref(self), id(optimizer)

        def forget(gone: object) -> None:
            """Its parameters are not kept either."""
            engines = mine()
            known = None if engines is None else engines.known.get(place)
            if engines is not None and known is not None and known[0] is gone:
                del engines.known[place]

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
        if self._loaded:
            signature = _signature(optimizer, engine.names)
            saved = self._place(signature)
            if saved is not None:
                state = self._loaded.pop(saved)
                params = list(every_parameter([optimizer]))
                if len(state["names"]) < len(params):  # Others have been added since.
                    at = {name: k for k, name in enumerate(signature["names"])}
                    params = [params[at[name]] for name in state["names"]]
                engine.recall(state["memory"], params)
        self.known[place] = ref, engine
        return engine

    def _refuse_untold(self, optimizer: Any, names: Names) -> None:
        """Raises if the clip goes by names, or its memory does, and they cannot be told here."""
        mine = _signature(optimizer, names)
        if not any(map(is_unnamed, mine["names"])):
            return
        groups = {group.get("name") for group in optimizer.param_groups}
        keys = [key for key in self.clip.misfits((), ()) if isinstance(key, str)]
        why = next((repr(key) for key in keys if key not in groups or set(key) & _IN_A_PATTERN), "")
        if self._loaded:
            alike = [state for state in self._loaded if state["sizes"] == mine["sizes"]]
            if len(alike) > 1 or self.clip.by_parameter:
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
        names: list[str] = []
        groups: list[tuple[int, str | None]] = []
        for ref, engine in list(self.known.values()):
            optimizer = ref()
            if optimizer is not None:
                names += engine.names.of(every_parameter([optimizer]))
                groups += engine.names.groups()
        for message in self.clip.misfits(names, groups).values():
            warnings.warn(
                f"{message} If it is meant for an optimizer that has not stepped yet, all is well.",
                stacklevel=users_line(),
            )

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
            fit = fit and isinstance(state, Mapping) and set(state) == _FIELDS
            fit = fit and isinstance(state["names"], list) and isinstance(state["sizes"], list)
            fit = fit and len(state["names"]) == len(state["sizes"])
        if not fit:
            raise BadState(
                f"what the clip policy has learned, in the state_dict, does not fit: {states!r:.80}"
            )
        for state in states:
            load_memory(policy, state["memory"], len(state["names"]))
        try:
            _refuse_patterns(policy, model)
        except ValueError as error:
            raise BadState(f"the clip policy in the state_dict does not fit: {error}") from error
        return policy, [dict(state) for state in states]

    def go_on_with(self, clip: ClipPolicy, memories: list[dict[str, Any]]) -> None:
        """Starts afresh with a policy and memories that `checked_clip` has found."""
        self.clip, self.known, self._loaded = clip, {}, memories

    def _learned(self) -> list[dict[str, Any]]:
        known = []
        for ref, engine in list(self.known.values()):
            optimizer = ref()
            if optimizer is not None:
                signature = _signature(optimizer, engine.names)
                memory = engine.memory_for(list(every_parameter([optimizer])))
                known.append({**signature, "memory": save_memory(memory)})
        return known + self._loaded

    def _place(self, mine: dict[str, list[Any]]) -> int | None:
        """Which of the loaded memories is of these parameters; None if none is."""
        for place, state in enumerate(self._loaded):
            if all(state[key] == mine[key] for key in ("names", "sizes")):
                return place
        for place, state in enumerate(self._loaded):
            if state["sizes"] == mine["sizes"]:
                pairs = zip(mine["names"], state["names"], strict=True)
                agree = all(
                    one == other or any(map(is_unnamed, (one, other))) for one, other in pairs
                )
                if agree or called_alike(mine["names"], state["names"]):
                    return place
        sizes = dict(zip(mine["names"], mine["sizes"], strict=True))
        for place, state in enumerate(self._loaded):
            known = dict(zip(state["names"], state["sizes"], strict=True))
            told = all(sizes.get(name) == size for name, size in known.items())
            if known and told and not any(map(is_unnamed, known)):
                return place  # Of these parameters before others were added to them.
        if self.clip.learns:
            _logger.warning(
                "%s starts afresh for an optimizer of %d parameters (%s, ...): the state_dict that "
                "was loaded does not know it. Parameters that were added since are told from the "
                "others by their names, GradScaler(model=...).",
                self.clip.policy_name,
                len(mine["names"]),
                mine["names"][0],
            )
        return None


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


def _refuse_patterns(policy: ClipPolicy, model: Any) -> None:
    """Raises if what is surely a pattern of names fits nothing; a group may still come."""
    if model is None:
        return
    every = Names(model, ()).every()
    for key, message in policy.misfits(every, [(-1, None)] * len(every)).items():
        if isinstance(key, str) and (isinstance(policy, AdaptiveClip) or set(key) & _IN_A_PATTERN):
            raise ValueError(message)


def _signature(optimizer: Any, names: Names) -> dict[str, list[Any]]:
    params = list(every_parameter([optimizer]))
    return {"names": names.of(params), "sizes": [param.numel() for param in params]}
