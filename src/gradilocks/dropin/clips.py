"""The clip policy of a GradScaler: judged for each optimizer on its own, on unscaled gradients.

A scaler meets its optimizers one by one, so what the policy has learned is kept beside weak
references to them, and found again after a checkpoint by their parameters.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradilocks.clip import AdaptiveClip
from gradilocks.eager import users_line
from gradilocks.errors import BadState
from gradilocks.names import Names, called_alike
from gradilocks.ranks.layout import meetings_of, refuse_flattened, team_of
from gradilocks.scale import NoScale
from gradilocks.state.plain import describe, plain, read_memory, rebuild
from gradilocks.step import update
from gradilocks.step.gradients import Gradients, every_parameter
from gradilocks.step.judge import Judge, Verdict
from gradilocks.step.own_step import weakly
from gradilocks.values import ROW

__all__ = ["Clipped", "Clips"]

_logger = logging.getLogger("gradilocks")

_FIELDS = {"names", "sizes", "memory"}
_IN_A_PATTERN = set("*?[.")


_FLATTENED = (
    "A GradScaler cannot clip it: use GradientControl(..., process_group=model.process_group) with "
    "the FSDP model, or torch's ShardedGradScaler and model.clip_grad_norm_."
)


class Clipped(NamedTuple):
    """What came of it."""

    skip: Tensor
    """float32, 0-d: 1 if the gradients are not finite or the policy rejects them, else 0."""
    rejected: Tensor | None
    """float32, 0-d: 1 if the policy rejects what is finite; None if it never does."""


class Clips:
    """One policy, and what it has learned of each optimizer."""

    def __init__(self, policy: Any, model: Any) -> None:
        self.policy = policy
        self._judges: list[tuple[Callable[[], Any], Judge]] = []
        self._loaded: list[dict[str, Any]] = []
        self.pending: dict[int, tuple[Judge, Verdict]] = {}
        """By optimizer: what was decided of a step that has not been taken yet."""
        self._warned = not hasattr(policy, "misfits")
        _refuse_patterns(policy, model)

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_judges": [], "pending": {}, "_warned": not hasattr(self.policy, "misfits")}
        return {**self.__dict__, **fresh, "_loaded": self._learned()}

    @property
    def goes_by_names(self) -> bool:
        """Whether parameters' names decide what it does, or where what it has learned belongs."""
        if hasattr(self.policy, "start"):
            return True
        return hasattr(self.policy, "misfits") and any(
            isinstance(key, str) for key in self.policy.misfits((), ())
        )

    def now(self, optimizer: Any, found: Gradients, names: Names, ranks: dict[str, Any]) -> Clipped:
        """Clips unscaled gradients in place.

        Args:
            optimizer: whose gradients they are.
            found: the gradients.
            names: of its parameters.
            ranks: as `over_ranks` returned it.
        """
        judge = self._judge_of(optimizer, names)
        params = list(every_parameter([optimizer]))
        judge.move_to((found.tensors or params)[0].device)
        verdict = judge.judge([found], unscaled=False, **ranks)
        decision = verdict.decision
        update.apply_factors(decision, found.tensors)
        update.apply_bound(decision, found.tensors)
        update.apply_in_place(decision, found.tensors)
        self.pending[id(optimizer)] = judge, verdict
        if decision.overflow is None:
            return Clipped(decision.skip, None)
        return Clipped(decision.skip, decision.skip - decision.overflow)

    def over_ranks(self, optimizer: Any, names: Names) -> dict[str, Any]:
        """Over which ranks `Judge.judge` is to measure; raises if it is not known.

        As `clip_grad_norm_`, each tensor over its own mesh; a policy that bounds tensors apart from
        each other needs all ranks to know all of them, as a GradientControl does.
        """
        params = list(every_parameter([optimizer]))
        if not getattr(self.policy, "apart", False):
            refuse_flattened(params, name=names, way_out=_FLATTENED)
            return {"meetings": meetings_of(params)}
        way_out = (
            f"{type(self.policy).__name__} bounds gradients apart from each other, for which a "
            "GradScaler needs every parameter on all ranks. Give clip= a policy that bounds the "
            "norm of all, such as ClipByNorm, which takes each tensor over its own mesh; or use "
            "GradientControl(process_group=)."
        )
        return {"team": team_of(params, group=None, name=names, way_out=way_out)}

    def bounds(self, optimizer: Any) -> tuple[Tensor | None, Tensor | None]:
        """The limit of the step that has not been learned from, and whether it was reached."""
        if id(optimizer) not in self.pending:
            return None, None
        row = self.pending[id(optimizer)][1].record.row
        return row[ROW.index("limit")], row[ROW.index("clipped")]

    def learn(self, optimizer: Any) -> None:
        """The optimizer has stepped, or was meant not to: the policy may learn from it."""
        if id(optimizer) in self.pending:
            judge, verdict = self.pending.pop(id(optimizer))
            judge.conclude(verdict)

    def forget(self) -> None:
        """A new iteration begins."""
        if self._judges and not self._warned:
            self._warned = True
            for message in self._misfits().values():
                warnings.warn(
                    f"{message} If it is meant for an optimizer that has not stepped yet, all is "
                    "well.",
                    stacklevel=users_line(),
                )
        self.pending.clear()

    def saved(self) -> dict[str, Any]:
        """The policy and what it has learned, in plain numbers."""
        return {"policy": describe(self.policy), "states": self._learned()}

    def checked(self, ours: Any, model: Any) -> tuple[Any, list[dict[str, Any]]]:
        """The policy and what it had learned, from `saved`; raises BadState, changes nothing."""
        if not isinstance(ours, Mapping) or set(ours) != {"policy", "states"}:
            raise BadState(f"the clip in the state_dict does not fit: {ours!r:.80}.")
        policy, states = (
            rebuild(self.policy, ours["policy"], "clip", owner="scaler"),
            ours["states"],
        )
        fit = isinstance(states, list)
        for state in states if fit else ():
            fit = fit and isinstance(state, Mapping) and set(state) == _FIELDS
            fit = fit and isinstance(state["names"], list) and isinstance(state["sizes"], list)
            fit = fit and len(state["names"]) == len(state["sizes"])
        if not fit:
            raise BadState(
                f"what the clip policy has learned, in the state_dict, does not fit: {states!r:.80}"
            )
        for state in states:
            read_memory(policy, state["memory"], len(state["names"]))
        try:
            _refuse_patterns(policy, model)
        except ValueError as error:
            raise BadState(f"the clip policy in the state_dict does not fit: {error}") from error
        return policy, [dict(state) for state in states]

    def go_on(self, policy: Any, states: list[dict[str, Any]]) -> None:
        """With what `checked` has found."""
        self.policy, self._judges, self._loaded = policy, [], states

    def _learned(self) -> list[dict[str, Any]]:
        known = []
        for ref, judge in self._judges:
            optimizer = ref()
            if optimizer is not None:
                known.append({**_signature(optimizer, judge.names), "memory": plain(judge.memory)})
        return known + self._loaded

    def _judge_of(self, optimizer: Any, names: Names) -> Judge:
        self._judges = [pair for pair in self._judges if pair[0]() is not None]
        for ref, judge in self._judges:
            if ref() is optimizer:
                return judge
        try:  # Must not keep it alive.
            shown = weakref.proxy(optimizer)
        except TypeError:  # A class with slots and none for references.
            shown = optimizer
        weak = names.of_optimizers((shown,))
        judge = Judge(NoScale(), self.policy, names=weak, give_up_after=None)
        place = self._place(_signature(optimizer, names)) if self._loaded else None
        if place is not None:
            judge.recall(self._loaded[place]["memory"])
            del self._loaded[place]
        self._judges.append((weakly(optimizer), judge))
        return judge

    def _place(self, mine: dict[str, list[Any]]) -> int | None:
        """Which of the loaded states is of these parameters; None if none is."""
        for place, state in enumerate(self._loaded):
            if all(state[key] == mine[key] for key in ("names", "sizes")):
                return place
        for place, state in enumerate(self._loaded):
            unnamed = _unnamed(mine["names"]) or _unnamed(state["names"])
            alike = unnamed or called_alike(mine["names"], state["names"])
            if alike and state["sizes"] == mine["sizes"]:
                return place
        _logger.warning(
            "%s starts afresh for an optimizer of %d parameters (%s, ...): the state_dict that was "
            "loaded does not know it.",
            type(self.policy).__name__,
            len(mine["names"]),
            mine["names"][0],
        )
        return None

    def _misfits(self) -> dict[Any, str]:
        names: list[str] = []
        groups: list[tuple[int, str | None]] = []
        for ref, judge in self._judges:
            optimizer = ref()
            if optimizer is not None:
                names += judge.names.of(every_parameter([optimizer]))
                groups += judge.names.groups()
        misfits: dict[Any, str] = self.policy.misfits(names, groups)
        return misfits


def _refuse_patterns(policy: Any, model: Any) -> None:
    """Raises if what is surely a pattern of names fits nothing; a group may still come."""
    if model is None or not hasattr(policy, "misfits"):
        return
    every = Names(model, ()).every()
    for key, message in policy.misfits(every, [(-1, None)] * len(every)).items():
        if isinstance(key, str) and (isinstance(policy, AdaptiveClip) or set(key) & _IN_A_PATTERN):
            raise ValueError(message)


def _unnamed(names: Sequence[str]) -> bool:
    """Whether these are only the parameters' places in the optimizer."""
    return all(name.startswith("param_groups[") for name in names)


def _signature(optimizer: Any, names: Names) -> dict[str, list[Any]]:
    params = list(every_parameter([optimizer]))
    return {"names": names.of(params), "sizes": [param.numel() for param in params]}
