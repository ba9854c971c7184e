"""The phase of each optimizer within an iteration, and the errors for calls in the wrong order."""

from __future__ import annotations

import enum
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks.errors import ScaleMisuse
from gradilocks.step.decide import Decision
from gradilocks.step.gradients import elements
from gradilocks.torch_private import version_of


class Phase(enum.Enum):
    """The state of an optimizer's gradients."""

    CLEAR = "no scaled loss since the last step or zero_grad()"
    SCALED = "scaled gradients"
    UNSCALED = "gradients after unscale_()"
    USED = "gradients of a finished step, or of a scale that has changed since"


class _Mark(NamedTuple):
    """Weak reference to the gradient of a parameter, with the version that it had when it was marked."""

    param: Tensor
    reference: weakref.ref[Tensor]
    version: int

    def gradient(self) -> Tensor | None:
        """The gradient; None if the parameter now has a different one or none."""
        gradient = self.reference()
        return gradient if gradient is not None and self.param.grad is gradient else None

    def is_unchanged(self) -> bool:
        """True if the parameter still has this gradient and it has not been written to."""
        gradient = self.gradient()
        return gradient is not None and version_of(gradient) == self.version

    @torch.no_grad()
    def is_nonzero(self) -> Tensor:
        """0-d bool: True if any element is not 0.

        Some scripts clear gradients with `grad.data.zero_()`, which changes neither the object nor its version.
        """
        gradient = self.gradient()
        return torch.tensor(False) if gradient is None else elements(gradient).any()


class OptimizerPhase:
    """The phase of one optimizer.

    Attributes:
        phase: the current phase.
        overflow: 0-d flag that `unscale_` computed; None if it was not called.
        pending: the Decision of a `step(only=)`, until `update()`.
        is_stepping: True while the control steps the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._marks: list[_Mark] = []
        self._leftovers: list[tuple[_Mark, Tensor]] = []
        self._unscaled_marks: list[_Mark] = []
        self.phase = Phase.CLEAR
        self.overflow: Tensor | None = None
        self.pending: Decision | None = None
        self.is_stepping = False

    def begin_backward(self, *, may_be_for_another_optimizer: bool) -> None:
        """Checks and updates the phase before a scaled loss is differentiated.

        Args:
            may_be_for_another_optimizer: True if the gradients of another optimizer are not unscaled yet, so that the
                loss may belong to that optimizer.

        Raises:
            ScaleMisuse: scaled gradients would be added to unscaled ones.
        """
        if self.phase is Phase.UNSCALED and any(mark.is_nonzero() for mark in self._marks):
            if not may_be_for_another_optimizer:
                raise ScaleMisuse(_ONTO_UNSCALED)
            self._unscaled_marks = self._mark(all_gradients=True)
            return
        # With two optimizers, as in a GAN, a loss may add to old gradients of the other optimizer, which are cleared
        # before its step. So old gradients are an error, which needs a device read, only if the step finds them.
        if self.phase is Phase.USED:
            self._leftovers = [(mark, mark.is_nonzero()) for mark in self._marks if mark.is_unchanged()]
        elif self._leftovers:
            present = [(mark, flag) for mark, flag in self._leftovers if mark.gradient() is not None]
            self._leftovers = [(mark, flag & mark.is_nonzero()) for mark, flag in present]
        self.phase, self.overflow = Phase.SCALED, None

    def end_backward(self) -> None:
        """Checks after a scaled loss was differentiated that unscaled gradients have not changed.

        Raises:
            ScaleMisuse: scaled gradients were added to unscaled ones.
        """
        marks, self._unscaled_marks = self._unscaled_marks, []
        if not all(mark.is_unchanged() for mark in marks):
            raise ScaleMisuse(_ONTO_UNSCALED)

    def check_step(self) -> None:
        """Raises ScaleMisuse for a step without a scaled loss, or with gradients left over from an earlier step."""
        if self.pending is not None:
            raise ScaleMisuse(
                "step(only=) was already called for this optimizer since the last update(). Call update() first."
            )
        if self.phase is Phase.USED:
            raise ScaleMisuse(
                "step() without a scaled loss since the previous step(). Call zero_grad() and control.backward(loss) "
                "first, also after a skipped step."
            )
        if self.phase is Phase.CLEAR:
            raise ScaleMisuse(
                "step() without a scaled loss: the gradients are not scaled, so dividing them by the scale would make "
                "them too small. Call control.backward(loss) instead of loss.backward(), or pass scale=None."
            )
        if self._leftovers:
            self._check_leftovers()

    def check_unscale(self) -> None:
        """Raises ScaleMisuse for gradients that are not scaled, or are left over from an earlier step."""
        if self.phase is Phase.UNSCALED:
            raise ScaleMisuse("unscale_() was already called since the last step. Remove the second call.")
        if self.phase is not Phase.SCALED:
            raise ScaleMisuse("unscale_() without a scaled loss. Call control.backward(loss) first.")
        self._check_leftovers()

    def _check_leftovers(self) -> None:
        # A gradient that was cleared between scale_loss() and backward() is now another tensor; so is one to which a
        # backward() with create_graph has added.
        for mark, flag in self._leftovers:
            grad = mark.param.grad
            if grad is not None and (grad is mark.reference() or grad.requires_grad) and flag:
                raise ScaleMisuse(
                    "backward() has added to gradients from before the last step() or update(). Call zero_grad() after "
                    "every step()."
                )

    def enter(self, phase: Phase, overflow: Tensor | None = None) -> None:
        """Enters a phase other than SCALED, and marks the gradients to which it applies.

        Args:
            phase: the phase.
            overflow: the flag that `unscale_` computed.
        """
        self.phase, self.overflow, self._leftovers = phase, overflow, []
        self._marks = [] if phase is Phase.CLEAR else self._mark()

    def has_used_gradients(self) -> bool:
        """True if the gradients of a finished step have been neither cleared nor replaced."""
        return self.phase is Phase.USED and any(mark.is_unchanged() and mark.is_nonzero() for mark in self._marks)

    def _mark(self, *, all_gradients: bool = False) -> list[_Mark]:
        """Marks all gradients, or only the first and the last, since gradients are cleared together."""
        groups = self._optimizer.param_groups
        params = [p for group in groups for p in group["params"] if p.grad is not None] if all_gradients else []
        if not all_gradients:
            params += next(([p] for group in groups for p in group["params"] if p.grad is not None), [])
            backward = (p for group in reversed(groups) for p in reversed(group["params"]))
            params += next(([p] for p in backward if p.grad is not None), [])
        return [_Mark(p, weakref.ref(p.grad), version_of(p.grad)) for p in params]


_ONTO_UNSCALED = (
    "backward() adds scaled gradients to gradients that unscale_() has already unscaled. Call step() first, or "
    "zero_grad() to discard them."
)


class StepGuard:
    """A step pre-hook that rejects `optimizer.step()` while the gradients are scaled by a control.

    Args:
        phase: phase of the optimizer. The reference is weak, so that the hook does not keep the control alive.
    """

    def __init__(self, phase: OptimizerPhase) -> None:
        self._phase = weakref.ref(phase)

    def __call__(self, *_: Any) -> None:
        phase = self._phase()
        if phase is None or phase.is_stepping:
            return
        if phase.phase is Phase.SCALED:
            raise ScaleMisuse(
                "optimizer.step() while the gradients are scaled by a GradientControl. Call control.step() instead, or "
                "control.unscale_() first."
            )
        if phase.has_used_gradients():
            raise ScaleMisuse(
                "optimizer.step() after control.step(): the gradients were used and may still be scaled. Remove "
                "optimizer.step(); control.step() has already stepped the optimizer."
            )
