"""`GradScaler(policy=..., clip=...)`: a scale and a clip that torch's scaler does not know.

The state of the scale takes the place of torch's two tensors, so that torch's own methods go on
with it. The clip is judged as a control judges it, for each optimizer on its own, on gradients that
have been unscaled.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks import kernels, update
from gradilocks.clip import resolve_clip
from gradilocks.errors import BadState
from gradilocks.gradients import Gradients, Names
from gradilocks.judge import Judge, Verdict
from gradilocks.plain import describe, load_scale, plain, rebuild, save_scale
from gradilocks.scale import NoScale, resolve_scale
from gradilocks.values import ScaleState, moved

__all__ = ["KEY", "Governed", "governed"]

KEY = "gradilocks_scaler"
"""Where a scaler's state_dict has what torch's does not; torch's scaler passes it over."""


def governed(policy: object, clip: object, process_group: Any) -> Governed | None:
    """What rules a scaler that was given a policy or a clip; None if neither was given."""
    if policy is None and clip is None:
        return None
    if process_group is not None:
        raise ValueError(
            "policy= and clip= of a GradScaler do not know process_group=: a rank would clip and "
            "scale by its own part of the gradients. Use GradientControl(process_group=...)."
        )
    scale = None if policy is None else resolve_scale(policy)
    if isinstance(scale, NoScale):
        raise TypeError(
            "policy must be a scale policy such as HeadroomScale(), got NoScale(). A GradScaler "
            "scales; use enabled=False, or GradientControl(scale=None)."
        )
    return Governed(scale, None if clip is None else resolve_clip(clip))


class Governed:
    """The policies of one scaler, and what they have learned."""

    def __init__(self, scale: Any, clip: Any) -> None:
        self.scale, self.clip = scale, clip
        self.state: ScaleState | None = None
        self._judges: list[tuple[weakref.ref[Any], Judge]] = []
        self._loaded: list[Any] = []
        self._largest: Tensor | None = None
        self._loss: Tensor | None = None
        self._pending: dict[int, tuple[Judge, Verdict]] = {}

    def __getstate__(self) -> dict[str, Any]:
        learned = {"_judges": [], "_loaded": self._memories(), "_largest": None, "_loss": None}
        return {**self.__dict__, **learned, "_pending": {}}

    @property
    def _asks(self) -> bool:
        return bool(getattr(self.scale, "needs_largest", False))

    def start(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The scale and its tracker, as torch's scaler holds them."""
        before = self.state
        if before is None:
            self.state = self.scale.start(device)
        else:  # From a checkpoint, or a pickle.
            more = {name: moved(tensor, device) for name, tensor in before.more.items()}
            self.state = ScaleState(
                scale=moved(before.scale, device),
                growth_tracker=moved(before.growth_tracker, device),
                hysteresis=moved(before.hysteresis, device),
                more=more,
            )
        return self.state.scale, self.state.growth_tracker

    def note_loss(self, outputs: Any) -> None:
        """A loss is about to be scaled: a NaN in it is no overflow."""
        if self._asks and isinstance(outputs, (list, tuple)):
            for each in outputs:
                self.note_loss(each)
        elif self._asks and isinstance(outputs, Tensor):
            broken = torch.logical_not(torch.isfinite(outputs.detach()).all()).to(torch.float32)
            self._loss = _larger(self._loss, broken)

    def note_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Scaled gradients are about to be looked at."""
        if self._asks:
            for device, places in kernels.by_device(tensors).items():
                on_device = [tensors[place] for place in places]
                found = kernels.for_device(device).measure(on_device, detail=True).largest
                assert found is not None
                self._largest = _larger(self._largest, found.amax())

    def advance(self, skip: Tensor) -> None:
        """Moves the scale on."""
        assert self.state is not None
        if self._asks:
            home = self.state.scale.device
            seen = {"largest": self._largest, "loss_nonfinite": self._loss}
            if in_company():  # A loss is a rank's own, and the ranks' scales must not part.
                seen["loss_nonfinite"] = None
            given = {name: moved(t, home) for name, t in seen.items() if t is not None}
            self.scale.advance(self.state, skip, **given)
        else:
            self.scale.advance(self.state, skip)
        self.forget()

    def forget(self) -> None:
        """A new iteration begins."""
        self._largest = self._loss = None
        self._pending.clear()

    def learn(self, optimizer: Any) -> None:
        """The optimizer has stepped, or was meant not to: the clip may learn from it."""
        if id(optimizer) in self._pending:
            judge, verdict = self._pending.pop(id(optimizer))
            judge.conclude(verdict)

    def clip_now(self, optimizer: Any, found: Gradients, names: Names) -> Tensor:
        """Clips unscaled gradients in place.

        Returns:
            float32, 0-d: 1 if the clip rejects the step, else 0.
        """
        judge = self._judge_of(optimizer, names)
        judge.move_to(found.tensors[0].device)
        verdict = judge.judge([found], unscaled=False, has_ranks=found.replicas is not None)
        decision = verdict.decision
        update.apply_factors(decision, found.tensors)
        update.apply_bound(decision, found.tensors)
        update.apply_in_place(decision, found.tensors)
        self._pending[id(optimizer)] = judge, verdict
        if decision.overflow is None:
            return torch.zeros_like(decision.skip)
        return decision.skip - decision.overflow

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs besides torch's five numbers."""
        scale = None
        if self.scale is not None:
            state = self.scale.start(torch.device("cpu")) if self.state is None else self.state
            scale = save_scale(self.scale, state)
        clip = None if self.clip is None else describe(self.clip)
        return {"scale": scale, "clip_policy": clip, "clip_states": self._memories()}

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint of the same policies, or of torch's; raises if it is bad."""
        ours = state_dict.get(KEY, {"scale": None, "clip_policy": None, "clip_states": []})
        if not isinstance(ours, Mapping) or not isinstance(ours.get("clip_states"), list):
            raise BadState(
                f"{KEY} in the state_dict must be what state_dict() made, got {ours!r:.80}."
            )
        if self.clip is not None and ours["clip_policy"] is not None:
            rebuild(self.clip, ours["clip_policy"], "clip")
        if self.scale is not None:
            fresh = self.scale.start(torch.device("cpu"))
            load_scale(self.scale, fresh, state_dict, ours["scale"])
            if self.state is None:
                self.state = fresh
            else:
                _fill(self.state, fresh)
        self._judges, self._loaded = [], list(ours["clip_states"])

    def _memories(self) -> list[Any]:
        """What the clip has learned of each optimizer, in the order in which they came."""
        known = [plain(judge.memory) for _, judge in self._judges]
        return known + self._loaded[len(known) :]

    def _judge_of(self, optimizer: Any, names: Names) -> Judge:
        for ref, judge in self._judges:
            if ref() is optimizer:
                return judge
        if hasattr(self.clip, "check"):
            every = [param for group in optimizer.param_groups for param in group["params"]]
            self.clip.check(names.of(every), names.groups())
        weak = names.of_optimizers((weakref.proxy(optimizer),))  # Must not keep it alive.
        judge = Judge(NoScale(), self.clip, names=weak, give_up_after=None, process_group=None)
        place = len(self._judges)
        if place < len(self._loaded):
            judge.recall(self._loaded[place])
        self._judges.append((weakref.ref(optimizer), judge))
        return judge


def in_company() -> bool:
    """Whether other ranks train along."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    return int(dist.get_world_size()) > 1


def _larger(before: Tensor | None, now: Tensor) -> Tensor:
    return now if before is None else torch.maximum(before, moved(now, before.device))


def _fill(state: ScaleState, fresh: ScaleState) -> None:
    """In place: a captured graph, and torch's scaler, hold these tensors."""
    pairs = [(state.scale, fresh.scale), (state.growth_tracker, fresh.growth_tracker)]
    pairs.append((state.hysteresis, fresh.hysteresis))
    pairs += [(state.more[name], tensor) for name, tensor in fresh.more.items()]
    for tensor, new in pairs:
        tensor.copy_(new)
