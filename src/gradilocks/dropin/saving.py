"""The numbers of a drop-in scaler: set, saved and loaded, as torch's are.

A state_dict has torch's five keys and, with a policy or a clip, what they keep besides. One that
does not fit is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gradilocks.dropin.state import check_state
from gradilocks.dropin.unscaling import Unscaling
from gradilocks.errors import BadState
from gradilocks.foreign import Foreign, recognized
from gradilocks.plain import check_scale

__all__ = ["KEY", "Saving"]

KEY = "gradilocks_scaler"
"""Where a state_dict has what torch's does not; torch's scaler passes it over."""
_DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


class Saving(Unscaling):
    """The part of the drop-in scaler that has to do with its settings and its state_dict."""

    _min_scale: float
    _max_scale: float

    def set_growth_factor(self, new_factor: float) -> None:
        """As torch's; a scaler with a `policy` refuses it."""
        self._refuse_setting("growth_factor")
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """As torch's; a scaler with a `policy` refuses it."""
        self._refuse_setting("backoff_factor")
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's; a scaler with a `policy` refuses it."""
        self._refuse_setting("growth_interval")
        super().set_growth_interval(new_interval)

    def _follow(self, policy: Any) -> None:
        """Torch's own numbers, as far as the policy has them: they are shown and saved."""
        start = policy.start(torch.device("cpu"))
        self._init_scale = float(start.scale)
        self._init_growth_tracker = int(start.growth_tracker)
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, f"_{name}", getattr(policy, name, getattr(self, f"_{name}")))

    def _refuse_setting(self, name: str) -> None:
        if self._governed is not None:
            raise RuntimeError(
                f"the scale is ruled by policy={self._governed.policy!r}, which does not change. "
                f"Make a scaler with another policy, set its {name} there, and load the state_dict."
            )

    def _refuse_both(self, **given: float) -> None:
        """A policy has its own numbers."""
        for name, default in _DEFAULTS.items():
            if given[name] != default:
                assert self._governed is not None
                raise ValueError(
                    f"{name}={given[name]} stands beside policy={self._governed.policy!r}, which "
                    f"has numbers of its own. Say it there, or leave out policy=."
                )

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with `policy` or `clip`, what they keep is there besides."""
        saved: dict[str, Any] = super().state_dict()
        scale = None if self._governed is None or not self._enabled else self._governed.saved()
        clip = None if self._clips is None else self._clips.saved()
        if scale is not None or clip is not None:
            saved[KEY] = {"scale": scale, "clip": clip}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of this class, of torch's, or of another system's scaler.

        The settings of `policy` and `clip` come from the state_dict too, as torch's do. One that
        does not fit raises BadState and changes nothing.

        Args:
            state_dict: also of the scalers of Megatron-LM, DeepSpeed, fairseq and apex.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}.")
        ours = self._ours(state_dict)
        clips = None
        if self._clips is not None and ours["clip"] is not None:
            clips = self._clips.checked(ours["clip"])
        if not self._enabled:
            if self._clips is not None and clips is not None:
                self._clips.go_on(*clips)
            return
        scale = None
        if len(state_dict):
            foreign = None if KEY in state_dict else recognized(state_dict, self._rule())
            if foreign is not None:
                state_dict = self._as_torchs(foreign)
            ruled = None if self._governed is None else self._governed.policy
            check_state(
                state_dict,
                lowest=self._min_scale,
                highest=self._max_scale,
                delay=getattr(ruled, "delay", 0),
            )
            state_dict = {**state_dict, "scale": float(state_dict["scale"])}
            if self._governed is not None:
                scale = self._governed.checked(state_dict, ours["scale"], foreign)
        super().load_state_dict(state_dict)
        if self._governed is not None and scale is not None:
            self._governed.go_on(*scale)
        if self._clips is not None and clips is not None:
            self._clips.go_on(*clips)

    def _rule(self) -> Any:
        """How the scale grows, as `recognized` asks for it."""
        if self._governed is not None:
            return self._governed.policy
        return SimpleNamespace(growth_interval=self._growth_interval, delay=0)

    def _as_torchs(self, foreign: Foreign) -> dict[str, Any]:
        """What torch's scaler would have saved in the place of another system's."""
        settings = {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            **foreign.settings,
        }
        return {
            **settings,
            "scale": check_scale(foreign.scale),
            "_growth_tracker": foreign.growth_tracker,
        }

    def _ours(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the policies have saved, after checking that there are such policies here."""
        ours = state_dict.get(KEY, {"scale": None, "clip": None})
        if not isinstance(ours, Mapping) or set(ours) != {"scale", "clip"}:
            raise BadState(
                f"{KEY} in the state_dict must be what state_dict() made, got {ours!r:.80}."
            )
        here = {"scale": self._governed, "clip": self._clips}
        words = {"scale": "policy", "clip": "clip"}
        for name, part in ours.items():
            if part is not None and here[name] is None:
                what = part.get("policy") if isinstance(part, Mapping) else None
                kind = what.get("name") if isinstance(what, Mapping) else "?"
                raise BadState(
                    f"the state_dict was saved with {words[name]}={kind}(...), this scaler has "
                    f"none. Make it with {words[name]}={kind}(...), or take {KEY!r} out of the "
                    "state_dict to go on without what it has learned."
                )
        return ours
