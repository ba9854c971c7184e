"""Many non-finite steps in, a diagnosis out: could a smaller scale cure them, and what to try.

An overflow that loss scaling caused goes away as the scale shrinks. A NaN that was born as a NaN,
an Inf in the loss itself, or an Inf that stays however far the scale falls, do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradilocks.errors import NeverFinite

__all__ = ["Diagnosis", "Symptom", "diagnose", "never_finite", "scale_path"]

# An overflow that the scale caused fades as the scale falls. So far is a fair chance to fade.
_FAIR_TRIAL = 256.0
_TAME = (
    "Lower the learning rate or add warm-up, check the inputs' size, or run the overflowing "
    "modules in float32."
)


@dataclass(frozen=True)
class Symptom:
    """One non-finite step, in numbers."""

    scale: float
    nan: int
    inf: int
    loss_nonfinite: bool


@dataclass(frozen=True)
class Diagnosis:
    """Whether a smaller scale could still help, why, and what to try."""

    curable: bool
    why: str
    advice: str


def diagnose(symptoms: Sequence[Symptom], *, lowest: float, highest: float) -> Diagnosis:
    """Tells an overflow that a smaller scale cures from what no scale cures.

    Args:
        symptoms: the non-finite steps in a row, oldest first; at least one.
        lowest: the smallest scale that the policy can reach.
        highest: the largest.

    Returns:
        The diagnosis.
    """
    first, last = symptoms[0], symptoms[-1]
    fell = first.scale / last.scale
    if last.loss_nonfinite:
        return Diagnosis(
            False,
            "The loss itself was NaN or Inf before it was scaled, so no scale can cure this.",
            "Check the batch and the forward pass: print the loss, look for log(0), a division by "
            "zero, float16 activations above 65504, or a learning rate that has already diverged.",
        )
    if (
        last.nan
        and not last.inf
        and (last.scale <= 1.0 or fell >= _FAIR_TRIAL or lowest == highest)
    ):
        return Diagnosis(
            False,
            "There are NaN and no Inf. This is not an overflow that a smaller scale cures: it "
            + (f"fell {fell:g}-fold and they stayed." if fell > 1.0 else f"is {last.scale:g}."),
            "Look for 0/0, 0*inf, the gradient of sqrt or norm at zero, or an empty mean; "
            "torch.autograd.set_detect_anomaly(True) names the operation.",
        )
    if lowest == highest == 1.0:
        return Diagnosis(
            False,
            "The loss is not scaled, so there is no scale to shrink: the gradients overflow by "
            "themselves.",
            _TAME,
        )
    if lowest == highest:
        return Diagnosis(
            True,
            f"The scale is fixed at {last.scale:g}; a smaller one may fit.",
            "Use scale='dynamic', or a smaller StaticScale.",
        )
    if last.scale <= lowest * (1 + 1e-6):  # The scale is a float32, the floor is not.
        return Diagnosis(
            False,
            f"The scale is at its floor of {lowest:g} and there is still an Inf, so shrinking it "
            "cannot cure this.",
            f"{_TAME} min_scale sets the floor.",
        )
    if fell >= _FAIR_TRIAL and last.inf >= first.inf:
        return Diagnosis(
            False,
            f"The scale fell {fell:g}-fold and the number of Inf did not ({first.inf} then, "
            f"{last.inf} now), so shrinking it does not cure this.",
            "Look for a division by zero or an exp that overflows, in the culprits' modules or "
            "after them; torch.autograd.set_detect_anomaly(True) helps to find the operation.",
        )
    what = "NaN and no Inf, which float16 makes of an overflow on its way back (Inf - Inf)"
    return Diagnosis(
        True,
        f"The loss is finite, the gradients hold {what if not last.inf else 'Inf'}, and the scale "
        f"of {last.scale:g} can still shrink to {lowest:g}: a smaller scale may cure this.",
        f"Start lower, for example DynamicScale(init_scale={max(last.scale / 16, lowest)!r}), or "
        "give the scale more steps to fall with a larger give_up_after.",
    )


def never_finite(
    symptoms: Sequence[Symptom],
    *,
    in_a_row: int,
    bounds: tuple[float, float],
    culprits: Sequence[str],
    described: str,
) -> NeverFinite:
    """The error that says what happened, why, and what to try."""
    diagnosis = diagnose(symptoms, lowest=bounds[0], highest=bounds[1])
    scales = [symptom.scale for symptom in symptoms]
    return NeverFinite(
        f"{_counted(in_a_row, 'step')} in a row had non-finite gradients; the parameters are as "
        f"they were before the first of them.\n"
        f"  culprits: {described}\n"
        f"  scale:    {scale_path(scales)}\n"
        f"  why:      {diagnosis.why}\n"
        f"  try:      {diagnosis.advice}",
        culprits=culprits,
        scales=scales,
        curable=diagnosis.curable,
    )


def scale_path(scales: Sequence[float]) -> str:
    """The scale's way in one short line: where it started, where it turned, where it ended."""
    steps = [scales[0]]
    for scale in scales[1:]:
        if scale != steps[-1]:
            steps.append(scale)
    if len(steps) > 6:
        shown = [f"{s:g}" for s in steps[:3]] + ["…"] + [f"{s:g}" for s in steps[-2:]]
    else:
        shown = [f"{s:g}" for s in steps]
    if len(steps) == 1:
        return f"{shown[0]} throughout"
    halvings = math.log2(steps[0] / steps[-1])
    return f"{' → '.join(shown)} ({_counted(halvings, 'halving')})"


def _counted(number: float, noun: str) -> str:
    number = round(number, 2)
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
