"""timm's `NativeScaler`: a loss and its optimizer enter, a step of a GradientControl leaves.

With timm's signature, so that its train.py and those made after it run with one other import. Their
`clip_grad` and `clip_mode` become the control's clip policy. timm itself is not imported.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from gradilocks import (
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    GradientControl,
    Outcome,
)

__all__ = ["NativeScaler"]

_MODES = ("norm", "value", "agc")


class NativeScaler:
    """Scales, clips, decides and steps, where timm's class of this name is called.

    Args:
        device: as timm's, and not needed: the scale goes where the loss is.
        model: the module that names the parameters, in the run file and where NaN or Inf are found.
        scale: as GradientControl's; None for bf16 and float32, where timm has no scaler at all.
        clip: a clip policy in the place of `clip_grad` and `clip_mode`, such as ZScoreClip().
        options: the further options of GradientControl: record, config, on_nonfinite and so on.

    Attributes:
        control: the GradientControl behind it; it steps the optimizer of the first call.

    Example:
        >>> loss_scaler = NativeScaler("cuda", model=model)  # doctest: +SKIP
        >>> loss_scaler(loss, optimizer, clip_grad=1.0)  # doctest: +SKIP
    """

    state_dict_key = "amp_scaler"

    def __init__(
        self,
        device: str = "cuda",
        *,
        model: nn.Module | None = None,
        scale: object = "dynamic",
        clip: object = None,
        **options: Any,
    ) -> None:
        # Without its wrappers, so that its own names are those that the control knows.
        self._model = None if model is None else _inside(model)
        self._clip = clip
        self.control = GradientControl(model=self._model, scale=scale, clip=clip, **options)
        self._scaler = self.control.as_scaler(policies="control")

    def __call__(
        self,
        loss: Tensor,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Tensor | Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> Outcome | None:
        """Runs the scaled loss backward, and steps unless gradients are accumulated.

        Args:
            loss: a scalar that requires grad.
            optimizer: what to step.
            clip_grad: the bound, as `clip_mode` has it; None for none.
            clip_mode: "norm" bounds the norm of all gradients, "value" each element, "agc" each
                unit by `clip_grad` times the norm of its weights.
            parameters: those that are clipped; None for all of the optimizer's. Others stay as they
                are, as the head does with "agc".
            create_graph: as in `Tensor.backward`.
            need_update: False if another loss is to be added first.

        Returns:
            The Outcome of the step, where timm returns nothing; None if there was none.
        """
        policy = self._clip
        if clip_grad is not None:
            if self._clip is not None:
                raise ValueError(
                    f"clip_grad={clip_grad} was given to a NativeScaler made with clip="
                    f"{self._clip!r}, and one of them can be the clip. Leave --clip-grad out."
                )
            policy = self._policy(clip_grad, clip_mode, parameters, optimizer)
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        self.control.set_clip(policy)
        self._scaler.step(optimizer)
        self._scaler.update()
        return self.control.outcome

    def _policy(
        self,
        bound: float,
        mode: str,
        parameters: Tensor | Iterable[Tensor] | None,
        optimizer: Any,
    ) -> object:
        """The clip policy that does what a mode of timm's does."""
        if mode not in _MODES:
            raise ValueError(f"clip_mode must be one of {', '.join(_MODES)}, got {mode!r}.")
        left_out = list(self._left_out(parameters, optimizer))
        patterns = tuple(map(glob.escape, left_out))
        if mode == "agc":
            return AdaptiveClip(bound, exclude=patterns)
        if not left_out:
            return ClipByNorm(bound) if mode == "norm" else ClipByValue(bound)
        if mode == "norm":
            return ClipPerGroup(dict.fromkeys(patterns), otherwise=bound)
        raise ValueError(
            "clip_mode='value' bounds the elements of all parameters of the optimizer, and "
            f"`parameters` leaves out {len(left_out)} of them, such as {left_out[0]}. Give all of "
            "them, or clip_mode='norm'."
        )

    def _left_out(
        self, parameters: Tensor | Iterable[Tensor] | None, optimizer: Any
    ) -> Iterable[str]:
        """The names of the optimizer's parameters that are not to be clipped."""
        if parameters is None:
            return
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        clipped = {id(param) for param in given}
        # Gradients are what is clipped: a frozen parameter has none.
        names: dict[int, str] = {}
        for place, group in enumerate(optimizer.param_groups):
            for number, param in enumerate(group["params"]):
                if id(param) not in clipped and param.requires_grad:
                    given_names = group.get("param_names")
                    names[id(param)] = (
                        given_names[number]
                        if given_names
                        else f"param_groups[{place}]['params'][{number}]"
                    )
        if names and self._model is not None:
            names |= {id(p): name for name, p in self._model.named_parameters() if id(p) in names}
        yield from names.values()

    def state_dict(self) -> dict[str, Any]:
        """Of the control; timm's own NativeScaler loads it too."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict` of this class or of timm's."""
        self._scaler.load_state_dict(dict(state_dict))


def _inside(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel or torch.compile are wrapped around."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
