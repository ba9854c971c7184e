"""fastai: a Learner's losses and its optimizer's steps enter, the steps of a GradientControl leave.

One callback in the place of MixedPrecision and GradientClip. fastai's loop stays as it is: it runs
backward, asks callbacks before the step, steps, clears the gradients. What it steps by is the
control; a step that is skipped is a cancelled one to fastai.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradilocks import GradientControl, NoScale, Outcome
from gradilocks.errors import GradilocksError, MissingPackage

try:
    from fastai.callback.core import Callback, CancelStepException
    from fastai.callback.fp16 import MixedPrecision, NonNativeMixedPrecision
    from fastai.callback.training import GradientClip
    from fastai.optimizer import OptimWrapper
    from fastai.torch_core import to_float
except ImportError as error:
    raise MissingPackage(
        f"gradilocks.integrations.fastai needs fastai, and its import failed: {error}. "
        "pip install fastai"
    ) from error

__all__ = ["GradientControlCallback"]

_FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, None: None}
_STATE = "gradilocks"
"""In the state of the optimizer, which is what `learn.save` writes beside the model."""


class GradientControlCallback(Callback):  # type: ignore[misc] # fastai has no types.
    """Scales, measures, clips, decides and records the steps of a Learner.

    fastai's own optimizers and torch's (in OptimWrapper) are stepped alike. On a skipped step
    CancelStepException is raised, as by fastai's MixedPrecision: parameters and the optimizer's
    state stay, `after_cancel_step` runs. To know of a skip the device is waited for at each step,
    also as there. fastai's schedules go by the share of all batches that is done, so a skip neither
    stops nor shifts them.

    The state of the control is in what `learn.save` writes with the optimizer, and `learn.load`
    reads it. To fastai without Gradilocks such a file is like any other; and a file without it
    leaves the control as it is.

    Args:
        amp: "fp16" or "bf16" runs the model in that format by torch.autocast, as
            `learn.to_fp16()` and `learn.to_bf16()` do; None leaves it as it is.
        scale: "auto" scales dynamically in "fp16" and not at all else; or as GradientControl's.
        clip: None, a number (the largest norm) or a clip policy, in the place of GradientClip.
        options: the further options of GradientControl: record, config, on_nonfinite and so on.

    Attributes:
        control: the GradientControl, bound to the optimizer when a fit begins to train.

    Raises:
        ValueError: at the beginning of a fit, if the Learner has MixedPrecision or GradientClip.

    Example:
        >>> control = GradientControlCallback(amp="fp16", clip=1.0)  # doctest: +SKIP
        >>> learn = Learner(dls, model, cbs=control)  # doctest: +SKIP
        >>> learn.fit_one_cycle(3)  # doctest: +SKIP
    """

    order = MixedPrecision.order

    def __init__(
        self,
        *,
        amp: str | None = None,
        scale: object = "auto",
        clip: object = None,
        **options: Any,
    ) -> None:
        if amp not in _FORMATS:
            raise ValueError(f"amp must be 'fp16', 'bf16' or None, got {amp!r}.")
        self._format = _FORMATS[amp]
        if isinstance(scale, str) and scale == "auto":
            scale = "dynamic" if amp == "fp16" else None
        self.control = GradientControl(scale=scale, clip=clip, **options)
        self._autocast: contextlib.ExitStack = contextlib.ExitStack()
        self._scales = not (scale is None or isinstance(scale, NoScale))
        self._bound: Any = None
        self._unscales = self._has_stepped = False

    @property
    def outcome(self) -> Outcome | None:
        """What became of the latest step."""
        return self.control.outcome

    # --- the optimizer --------------------------------------------------------------------------

    def after_create(self) -> None:
        """The Learner is there: what it makes for an optimizer saves and loads our state too."""
        # With the Learner: a callback that was removed does not know it any more.
        self.learn.create_opt = functools.partial(self._create_opt, self.learn)

    def _create_opt(self, learn: Any) -> None:
        type(learn).create_opt(learn)
        if self in learn.cbs:
            self._carry(learn.opt)

    def _carry(self, optimizer: Any) -> None:
        """What the optimizer saves carries the state of the control."""
        if not isinstance(vars(optimizer).get("state_dict"), _Saving):
            optimizer.state_dict = _Saving(optimizer.state_dict, self)
            optimizer.load_state_dict = _Loading(optimizer.load_state_dict, self)

    def before_fit(self) -> None:
        """Refuses what would scale or clip a second time."""
        for cb in self.learn.cbs:
            if isinstance(cb, (MixedPrecision, NonNativeMixedPrecision)):
                raise ValueError(
                    f"the Learner has {type(cb).__name__} beside GradientControlCallback, and a "
                    "loss is scaled once. Leave learn.to_fp16() or learn.to_bf16() out, and write "
                    "GradientControlCallback(amp='fp16') or amp='bf16'."
                )
            if isinstance(cb, GradientClip):
                raise ValueError(
                    "the Learner has GradientClip beside GradientControlCallback, and gradients "
                    "are clipped once. Leave it out, and write "
                    f"GradientControlCallback(clip={cb.max_norm})."
                )
            if isinstance(cb, GradientControlCallback) and cb is not self:
                raise ValueError("the Learner has GradientControlCallback twice. Leave one out.")
        self._carry(self.learn.opt)
        self.learn._step = functools.partial(self._step, self.learn)

    def before_train(self) -> None:
        """All callbacks have begun, the model is in its wrappers: binds the control."""
        optimizer = self.learn.opt
        inner = optimizer.opt if isinstance(optimizer, OptimWrapper) else optimizer
        if self._bound is not inner:
            self.control.bind(inner, model=self.learn.model)
            self._bound = inner
        later = [cb for cb in self.learn.ordered_cbs("before_step") if cb.order > self.order]
        self._unscales = bool(later) and self._scales

    # --- a batch --------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """Begins to run the model in half precision."""
        if self._format is not None:
            device = next(self.learn.model.parameters()).device.type
            self._autocast.enter_context(torch.autocast(device, self._format))

    def after_pred(self) -> None:
        """The loss is computed in float32."""
        if self._format is not None:
            self.learn.pred = to_float(self.learn.pred)

    def after_loss(self) -> None:
        """Ends it: backward runs in the formats of forward by itself."""
        self._autocast.close()

    def after_cancel_batch(self) -> None:
        """Ends it also if another callback has left the batch before its loss."""
        self._autocast.close()

    def before_backward(self) -> None:
        """Scales the loss that is run backward."""
        self.learn.loss_grad = self.control.scale_loss(self.learn.loss_grad)

    def before_step(self) -> None:
        """Callbacks that come after this one see the gradients without the scale."""
        self._has_stepped = False
        if self._unscales:
            self.control.unscale_()

    def _step(self, learn: Any) -> None:
        """In the place of the Learner's own: the control steps, and fastai is told of a skip."""
        if self not in learn.cbs:  # A fit that has failed left it there, and we are gone since.
            del learn._step
            learn._step()
            return
        self._has_stepped = True
        if self.control.step().skipped:
            raise CancelStepException

    def after_cancel_step(self) -> None:
        """Another callback has cancelled the step: fastai clears the gradients, and so do we."""
        if not self._has_stepped:
            self.control.zero_grad(set_to_none=False)

    def after_fit(self) -> None:
        """Leaves the Learner as it was."""
        with contextlib.suppress(AttributeError):
            del self.learn._step

    # --- its state ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of the control: for checkpoints that are not made by `learn.save`."""
        return self.control.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict` of this callback, of a control or of torch's GradScaler."""
        self.control.load_state_dict(state_dict, policies="control")


class _Saving:
    """An optimizer's `state_dict`, with the state of the callback's control."""

    def __init__(self, original: Callable[[], Any], callback: GradientControlCallback) -> None:
        self._original, self._callback = original, callback

    def __call__(self) -> Any:
        state = self._original()
        if self._callback.learn is None:  # It was removed.
            return state
        return {**state, _STATE: self._callback.state_dict()}


class _Loading:
    """An optimizer's `load_state_dict`, which hands the control what is the control's."""

    def __init__(self, original: Callable[[Any], Any], callback: GradientControlCallback) -> None:
        self._original, self._callback = original, callback

    def __call__(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        saved = state.pop(_STATE, None)
        self._original(state)
        if saved is None or self._callback.learn is None:
            return
        try:
            self._callback.load_state_dict(saved)
        except GradilocksError as error:  # fastai would say that the optimizer's did not load.
            warnings.warn(
                f"the state of GradientControlCallback was not loaded, and it goes on as it is: "
                f"{error}",
                stacklevel=3,
            )
