"""`--guard`: prevents optimizer steps with non-finite gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradilocks.errors import NonFiniteGradient

__all__ = ["Guard"]


class Guard:
    """Skips a step by hiding its gradients from the optimizer, or stops the script.

    torch's optimizers ignore parameters whose gradient is None: parameters and state remain bit for bit unchanged.

    Args:
        mode: "skip" or "stop".
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._hidden_grads: list[tuple[Tensor, Tensor]] = []

    def apply(self, params: Sequence[Tensor], step: int, reason: str) -> None:
        """Hides the gradients. Called before a step with non-finite gradients.

        Raises:
            NonFiniteGradient: in mode "stop".
        """
        if self._mode == "stop":
            raise NonFiniteGradient(f"step {step}: {reason}. Stopped by --guard stop; parameters are unchanged.")
        for param in params:
            if param.grad is not None:
                self._hidden_grads.append((param, param.grad))
                param.grad = None

    def restore(self) -> bool:
        """Restores the hidden gradients; returns True if the step was skipped. Called after every step."""
        was_skipped = bool(self._hidden_grads)
        for param, grad in self._hidden_grads:
            param.grad = grad
        self._hidden_grads.clear()
        return was_skipped
