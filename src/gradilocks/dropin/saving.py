"""The numbers of a drop-in scaler: set, saved, loaded and copied, as torch's are.

A state_dict has torch's five keys and, with a policy or a clip, what they keep besides. One that
does not fit is refused before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gradilocks.dropin.once import UnscaledOnce
from gradilocks.dropin.state import check_state
from gradilocks.dropin.unscaling import Unscaling
from gradilocks.errors import BadState
from gradilocks.scale import LARGEST, SMALLEST
from gradilocks.state.checkpoint import SCALERS as KEY
from gradilocks.state.checkpoint import check_scale
from gradilocks.state.other_scalers import OtherScaler, recognize
from gradilocks.step.outcome import fetch

__all__ = ["Saving"]

_DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": SMALLEST,
    "max_scale": LARGEST,
}
_TORCHS = ("growth_factor", "backoff_factor", "growth_interval")


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
            setattr(self, f"_{name}", getattr(policy.as_given, name, getattr(self, f"_{name}")))

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
        if self._clips is not None:
            clips = self._clips.policy, list[dict[str, Any]]()
            if ours["clip"] is not None:
                clips = self._clips.checked(ours["clip"], self._model)
        scale = None
        if self._enabled and len(state_dict):
            foreign = None if KEY in state_dict else recognize(state_dict, self._rule())
            if foreign is not None:
                state_dict = self._as_torchs(foreign)
            governed, policy, delay = self._governed, None, 0
            if governed is not None and _has_numbers(state_dict):
                policy = governed.policy_of(state_dict, ours["scale"], foreign)
                delay = policy.delay
            check_state(state_dict, lowest=self._min_scale, highest=self._max_scale, delay=delay)
            state_dict = {**state_dict, "scale": float(state_dict["scale"])}
            if governed is not None:
                fresh = governed.state_of(policy, state_dict, ours["scale"], foreign)
                state_dict["scale"] = fetch(fresh.scale)[0]  # Within the policy's bounds.
                scale = policy, fresh
        super().load_state_dict(state_dict)
        if self._governed is not None and scale is not None:
            self._governed.go_on(*scale)
        if self._clips is not None and clips is not None:
            self._clips.go_on(*clips)

    def __getstate__(self) -> dict[str, Any]:
        if self._process_group is not None:
            raise TypeError(
                "a GradScaler with a process_group cannot be pickled: the group belongs to this "
                "process, and without it the ranks would stop agreeing. Save state_dict() instead."
            )
        if self._model is not None and self._clips is not None and self._clips.goes_by_names:
            raise TypeError(
                f"a GradScaler with model= and clip={self._clips.policy.policy_name}(...) "
                "cannot be pickled: the model stays behind, and the policy goes by its names. Save "
                "state_dict() instead."
            )
        state: dict[str, Any] = super().__getstate__()
        state.update(_model=None, **self._nothing_yet())
        return state

    def __copy__(self) -> Saving:
        """Shares the model and the process group; steps of its own from here on."""
        made = type(self).__new__(type(self))
        made.__dict__.update(super().__getstate__())
        own = {name: copy.deepcopy(getattr(self, name)) for name in ("_governed", "_clips")}
        made.__dict__.update(self._nothing_yet(), **own)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Saving:
        made = self.__copy__()
        made._model = _copied(self._model, memo)
        shared = {"_model", "_process_group", "_once"}
        for name, value in made.__dict__.items():
            if name not in shared:
                made.__dict__[name] = copy.deepcopy(value, memo)
        return made

    @staticmethod
    def _nothing_yet() -> dict[str, Any]:
        """What belongs to a step, before there is one."""
        return {
            "_outcome": None,
            "_found": {},
            "_clipped": {},
            "_held": {},
            "_once": UnscaledOnce(),
            "_only_looking": None,
            "_hysteresis": None,
        }

    def _rule(self) -> Any:
        """How the scale grows, as `recognize` asks for it."""
        if self._governed is not None:
            return self._governed.policy
        return SimpleNamespace(growth_interval=self._growth_interval, delay=0)

    def _as_torchs(self, foreign: OtherScaler) -> dict[str, Any]:
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
        self._refuse_a_controls(state_dict)
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

    def _refuse_a_controls(self, state_dict: Mapping[str, Any]) -> None:
        """A GradientControl's state is taken as torch's, unless something would be lost by it."""
        theirs = state_dict.get("gradilocks")
        if not isinstance(theirs, Mapping):
            return
        policy = theirs.get("scale_policy")
        name = policy.get("name") if isinstance(policy, Mapping) else None
        if name != "DynamicScale":
            raise BadState(
                f"the state_dict is one of a GradientControl with the scale policy {name}; a "
                "GradScaler takes one with a DynamicScale. Start without the state_dict."
            )
        if theirs.get("clip_state") is not None:
            raise BadState(
                "the state_dict is one of a GradientControl whose clip policy has learned "
                "something, which a GradScaler would lose. Take 'gradilocks' out of the "
                "state_dict to go on without it."
            )


def _has_numbers(state_dict: Mapping[str, Any]) -> bool:
    """Whether torch's settings are there; `check_state` says what is missing."""
    return all(name in state_dict for name in _TORCHS)


def _copied(model: Any, memo: dict[int, Any]) -> Any:
    """The copy of the model if it was copied along, else the model itself."""
    if isinstance(model, Mapping):
        return {prefix: memo.get(id(module), module) for prefix, module in model.items()}
    return memo.get(id(model), model)
