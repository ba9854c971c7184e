"""How the drop-in scaler looks at gradients, unscales them and clips them: a flag a device.

Where all of an optimizer's gradients are plain and on one GPU it takes two launches; else they go
device by device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks import kernels
from gradilocks._torch import OptState
from gradilocks.dropin.clips import Clipped, Clips
from gradilocks.dropin.flags import agree_across_ranks, any_flag, refuse_overflow
from gradilocks.dropin.governed import Governed
from gradilocks.dropin.looked import Looked, gradients_of
from gradilocks.dropin.once import UnscaledOnce, writing_ourselves
from gradilocks.dropin.shortly import looked_shortly
from gradilocks.ranks.layout import any_distributed, covers_world, meetings_of
from gradilocks.step.gradients import Names, every_parameter
from gradilocks.values import NonFinite, moved

__all__ = ["Unscaling"]

_PLAIN = {Tensor, nn.Parameter}


class Unscaling(torch.amp.GradScaler):
    """The part of the drop-in scaler that touches gradients."""

    _model: nn.Module | Mapping[str, nn.Module] | None
    _process_group: Any
    _governed: Governed | None
    _clips: Clips | None
    _found: dict[int, Looked]
    _clipped: dict[int, Clipped]
    _held: dict[int, Any]
    _once: UnscaledOnce
    _only_looking: Tensor | None

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiplies the gradients by `inv_scale` while looking at them; a flag a device."""
        multiply = inv_scale is not self._only_looking
        names = Names(self._model, (optimizer,))
        if self._governed is not None:
            everything = gradients_of(optimizer, names, allow_fp16=True)
            self._governed.note_gradients(everything.tensors)
        short = self._looked_shortly(optimizer, inv_scale if multiply else None, allow_fp16)
        if short is not None:
            return short
        found = gradients_of(optimizer, names, allow_fp16=allow_fp16)
        if multiply:
            self._once.refuse_twice(found.params, names)
        self._held[id(optimizer)] = optimizer
        flags: dict[torch.device, Tensor] = {}
        looked = self._found[id(optimizer)] = Looked()
        with torch.no_grad():
            for device, places in kernels.by_device(found.tensors).items():
                tensors = [found.tensors[place] for place in places]
                factor = moved(inv_scale, device) if multiply else None
                counted = kernels.for_device(device).multiply_and_check_(tensors, factor)
                broken = (counted.nan + counted.inf).any()
                flags[device] = torch.maximum(broken, moved(found_inf, device))
                looked.add([found.params[place] for place in places], _telling(counted))
        if not multiply and self._scale is not None:  # Before the ranks agree on what is done.
            refuse_overflow(flags, found.tensors, self._scale)
        self._agree(optimizer, flags, found_inf)
        if multiply:
            self._once.mark(found.params)
        return flags

    def _agree(self, optimizer: Any, flags: dict[torch.device, Tensor], found_inf: Tensor) -> None:
        """Brings flags, and what the scale policy asks for, together where ranks hold parts."""
        params = list(every_parameter([optimizer]))
        meetings = meetings_of(params, group=self._process_group)
        if meetings:
            governed = self._governed
            beside = [] if governed is None else governed.noted(found_inf.device)
            told = agree_across_ranks(flags, found_inf, meetings, beside)
            if governed is not None:
                governed.hear(told, of_all=any(map(covers_world, meetings)))

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._governed is not None:
            self._scale, self._growth_tracker = self._governed.start(dev)
        else:
            super()._lazy_init_scale_growth_tracker(dev)

    def _clip(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Unscales if that has not been done, and clips."""
        assert self._clips is not None
        names = Names(self._model, (optimizer,))
        ranks = self._clips.over_ranks(optimizer, names)  # Refuses before anything is unscaled.
        if state["stage"] is OptState.READY and self._enabled:
            self.unscale_(optimizer)
        found = gradients_of(optimizer, names, allow_fp16=True)
        # A rank without gradients takes part where others hold parts of the same tensors.
        if found.tensors or any_distributed(every_parameter([optimizer])):
            with torch.no_grad(), writing_ourselves(found.params):
                self._clipped[id(optimizer)] = self._clips.now(optimizer, found, names, ranks)

    def _flag(self, optimizer: Any, state: dict[str, Any]) -> Tensor:
        """Exactly 1 if the step is to be skipped: not finite, or rejected by the clip."""
        flag = any_flag(list(state["found_inf_per_device"].values()))
        clipped = self._clipped.get(id(optimizer))
        return flag if clipped is None else torch.maximum(flag, moved(clipped.skip, flag.device))

    def _looked_shortly(
        self, optimizer: Any, multiplier: Tensor | None, allow_fp16: bool
    ) -> dict[torch.device, Tensor] | None:
        """`_unscale_grads_` in two launches, where all gradients are plain and on one GPU."""
        params = list(every_parameter([optimizer]))
        if self._process_group is not None or set(map(type, params)) - _PLAIN:
            return None
        if multiplier is not None:
            self._once.refuse_twice(params, Names(self._model, (optimizer,)))
        with torch.no_grad():
            look = looked_shortly(params, multiplier, allow_fp16=allow_fp16)
        if look is None:
            return None
        self._held[id(optimizer)] = optimizer
        looked = self._found[id(optimizer)] = Looked()
        looked.add(look.params, look.counted)
        if multiplier is not None:
            self._once.mark(look.params)
        flags = {look.device: look.flag}
        if multiplier is None and self._scale is not None:
            grads = [param.grad for param in look.params if param.grad is not None]
            refuse_overflow(flags, grads, self._scale)
        return flags

    def _check_inf_per_device(self, optimizer: Any) -> dict[str, Any]:
        """Looks at the gradients and leaves them as they are; a flag a device."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        self._only_looking = torch.ones_like(scale)
        flags: Any = self._unscale_grads_(
            optimizer, self._only_looking, torch.zeros_like(scale), True
        )
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags  # type: ignore[no-any-return]


def _telling(counted: NonFinite) -> Callable[[], NonFinite]:
    return lambda: counted
