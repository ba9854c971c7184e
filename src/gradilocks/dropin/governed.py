"""`GradScaler(policy=...)`: a scale policy that torch's scaler does not know.

The state of the scale takes the place of torch's two tensors, so that torch's own methods go on
with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.errors import BadState
from gradilocks.ranks.layout import has_other_ranks
from gradilocks.scale import DynamicScale, NoScale, resolve_scale
from gradilocks.state.checkpoint import load_scale, rebuild, refill, save_scale, with_settings
from gradilocks.state.other_scalers import OtherScaler
from gradilocks.values import ScaleState, moved

__all__ = ["Governed", "governed"]


def governed(policy: object) -> Governed | None:
    """What rules the scale of a scaler that was given a policy; None if none was given."""
    scale = None if policy is None else resolve_scale(policy, name="policy")
    if isinstance(scale, NoScale):
        raise TypeError(
            "policy must be a scale policy such as HeadroomScale(), got NoScale(). A GradScaler "
            "scales; use enabled=False, or GradientControl(scale=None)."
        )
    return None if scale is None else Governed(scale)


class Governed:
    """A scale policy and its state."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.state: ScaleState | None = None
        self._largest: Tensor | None = None
        self._loss: Tensor | None = None
        self._loss_anywhere: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_largest": None, "_loss": None, "_loss_anywhere": None}

    @property
    def _asks(self) -> bool:
        return bool(self.policy.needs_largest)

    def start(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The scale and its tracker, as torch's scaler holds them."""
        before = self.state
        if before is None:
            self.state = self.policy.start(device)
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
        """A loss is being scaled: a NaN in it is no overflow."""
        if self._asks and isinstance(outputs, Tensor):
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

    def noted(self, home: torch.device) -> list[Tensor]:
        """What the ranks that hold these gradients together must know: the peak, and the loss."""
        if not self._asks:
            return []
        nothing = torch.zeros((), dtype=torch.float32, device=home)
        return [nothing if each is None else each for each in (self._largest, self._loss)]

    def hear(self, numbers: Sequence[Tensor], *, of_all: bool) -> None:
        """The same of all those ranks.

        Args:
            numbers: as `noted` returned them, the largest of each.
            of_all: whether those are all the ranks that there are.
        """
        if numbers:
            self._largest, loss = numbers
            self._loss_anywhere = loss if of_all else self._loss_anywhere

    def advance(self, skip: Tensor) -> None:
        """Moves the scale on."""
        assert self.state is not None
        if self._asks:
            home = self.state.scale.device
            seen = {"largest": self._largest, "loss_nonfinite": self._loss}
            if has_other_ranks():  # A loss is a rank's own, and the ranks' scales must not part.
                seen["loss_nonfinite"] = self._loss_anywhere
            given = {name: moved(t, home) for name, t in seen.items() if t is not None}
            self.policy.advance(self.state, skip, **given)
        else:
            self.policy.advance(self.state, skip)
        self.forget()

    def forget(self) -> None:
        """A new iteration begins."""
        self._largest = self._loss = self._loss_anywhere = None

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs besides torch's five numbers."""
        state = self.policy.start(torch.device("cpu")) if self.state is None else self.state
        return save_scale(self.policy, state)

    def policy_of(
        self, state_dict: Mapping[str, Any], ours: Any, foreign: OtherScaler | None
    ) -> Any:
        """The policy with the settings of a checkpoint; raises BadState if it is another's.

        Args:
            state_dict: with torch's keys.
            ours: what `saved` had, or None if another scaler has saved it.
            foreign: what another system's scaler had besides, if it was one.
        """
        if ours is not None:
            if not isinstance(ours, Mapping) or set(ours) != {"policy", "hysteresis", "state"}:
                raise BadState(f"the scale policy in the state_dict does not fit: {ours!r:.80}.")
            return rebuild(self.policy, ours["policy"], "scale", owner="scaler")
        if not isinstance(self.policy, DynamicScale):
            system = "torch's GradScaler" if foreign is None else f"{foreign.system}'s scaler"
            raise BadState(
                f"the state_dict is one of {system} and needs a DynamicScale, this scaler has "
                f"policy={self.policy.policy_name}(...). Start without the state_dict."
            )
        if foreign is not None:
            return with_settings(self.policy, foreign.settings)
        names = ("growth_factor", "backoff_factor", "growth_interval")
        return with_settings(self.policy, {name: state_dict[name] for name in names})

    @staticmethod
    def state_of(
        policy: Any, state_dict: Mapping[str, Any], ours: Any, foreign: OtherScaler | None
    ) -> ScaleState:
        """The state of `policy_of`'s policy; raises BadState."""
        fresh = load_scale(policy, state_dict, ours)
        if foreign is not None and foreign.hysteresis is not None:
            fresh.hysteresis.fill_(foreign.hysteresis)
        return fresh

    def go_on(self, policy: Any, fresh: ScaleState) -> None:
        """With what was found."""
        self.policy = policy
        if self.state is None:
            self.state = fresh
        else:
            refill(self.state, fresh)


def _larger(before: Tensor | None, now: Tensor) -> Tensor:
    return now if before is None else torch.maximum(before, moved(now, before.device))
