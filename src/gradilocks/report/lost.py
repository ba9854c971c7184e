"""Steps of an optimizer → those whose loss was itself NaN or Inf.

A run file has nothing in place of a loss that was not finite, and nothing in place of one that
nobody knew. Newer files tell which; of older ones `BadSteps` guesses, once for everybody. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradilocks.runfile import BadSteps, Step, has_bad_gradients

__all__ = ["lost_places"]


def lost_places(steps: Sequence[Step], bad: BadSteps) -> list[int]:
    """Returns the places of the steps whose loss was itself NaN or Inf.

    Args:
        steps: of one optimizer.
        bad: what all of them together show.
    """
    guessed = bad.guesses_lost
    return [
        place
        for place, step in enumerate(steps)
        if step.loss is None
        and (
            guessed and has_bad_gradients(step)
            if step.loss_nonfinite is None
            else step.loss_nonfinite
        )
    ]
