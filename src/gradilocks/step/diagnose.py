"""Many non-finite steps in, a diagnosis out: could a smaller scale cure them, and what to try.

An overflow that loss scaling caused goes away as the scale shrinks. A NaN that was born as a NaN,
an Inf in the loss itself, or a division by zero do not. As long as the scale is high, the gradients
of both look alike: gradients of 1000 in float16 overflow, all of them, from a scale of 2^32 down to
one of 128, and are finite at 64. So what is not known is called so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradilocks.errors import NeverFinite

__all__ = ["Diagnosis", "Symptom", "diagnose", "never_finite", "scale_path"]

_TINY = 2.0**-24
"""At this scale float16, whose largest number is 65504, holds gradients of up to 10^12: what is not
finite there is no overflow. It is float16's smallest number, and the floor of most policies."""
_ENOUGH = 3
"""Batches differ, and so do their numbers of NaN and Inf. That it falls with the scale so many
times, and never rises, is no accident."""
_FAR = 256.0
"""A fall of the scale that is worth a word, though it proves nothing."""
_LOOK = (
    "Look for 0/0, 0*inf, a division by zero, an exp that overflows, the gradient of sqrt or norm "
    "at zero, or an empty mean, in the culprits' modules or after them; "
    "torch.autograd.set_detect_anomaly(True) names the operation."
)
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
    loss_nonfinite: bool | None
    """Whether the loss itself was NaN or Inf; None if other ranks had losses that are not known."""


@dataclass(frozen=True)
class Diagnosis:
    """Whether a smaller scale could still help, why, and what to try."""

    curable: bool | None
    """None if it is not known."""
    why: str
    advice: str


def diagnose(symptoms: Sequence[Symptom], *, lowest: float, highest: float) -> Diagnosis:
    """Tells an overflow that a smaller scale cures from what no scale cures, where that is known.

    Args:
        symptoms: the non-finite steps in a row, oldest first; at least one.
        lowest: the smallest scale that the policy can reach, as float32 has it.
        highest: the largest.

    Returns:
        The diagnosis.
    """
    last = symptoms[-1]
    broken = [symptom for symptom in symptoms if symptom.loss_nonfinite]
    told = [symptom for symptom in symptoms if symptom.loss_nonfinite is not None]
    at = f"at {len(broken):,} of {len(told):,} steps"
    if len(told) < len(symptoms):
        at += " of which that is known"
    if len(broken) == len(symptoms):
        return Diagnosis(
            False,
            "The loss itself was NaN or Inf before it was scaled, so no scale can cure this.",
            "Check the batch and the forward pass: print the loss, look for log(0), a division by "
            "zero, float16 activations above 65504, or a learning rate that has already diverged.",
        )
    if last.loss_nonfinite:
        return Diagnosis(
            None,
            f"The loss itself was NaN or Inf {at}, the last among them, and no scale can cure "
            "that. Whether a smaller scale cures the others is not known.",
            "Check the batches and the forward pass first: print the loss, look for log(0), a "
            "division by zero, float16 activations above 65504, or inputs that are NaN.",
        )
    said = f"The loss itself was NaN or Inf {at}, which no scale can cure. " if broken else ""
    found = _of_gradients([s for s in symptoms if not s.loss_nonfinite], lowest, highest)
    return Diagnosis(found.curable, f"{said}{found.why}", found.advice)


def _of_gradients(symptoms: Sequence[Symptom], lowest: float, highest: float) -> Diagnosis:
    """The diagnosis of steps whose loss was finite, as far as that is known."""
    first, last = symptoms[0], symptoms[-1]
    fell = first.scale / last.scale
    if not last.nan and not last.inf:
        return Diagnosis(
            None,
            "The gradients as they stand hold neither NaN nor Inf: they did when they were "
            "unscaled, or they are too large for their format without the scale. Whether a smaller "
            "scale cures this is not known.",
            _TAME,
        )
    what = "NaN and Inf" if last.nan and last.inf else "Inf" if last.inf else "NaN and no Inf"
    if last.scale <= _TINY:
        return Diagnosis(
            False,
            f"The gradients hold {what} at a scale of {last.scale:.3g}, at which float16 has room "
            f"for gradients of up to {65504.0 / last.scale:.2g}: this is not an overflow that a "
            "smaller scale cures.",
            f"{_LOOK} {_TAME}",
        )
    # Such that DynamicScale takes it beside its other numbers.
    lower = f"DynamicScale(init_scale={min(max(last.scale / 16, lowest, _TINY), 2.0**32)!r})"
    if _fades(symptoms):
        many = [symptom.nan + symptom.inf for symptom in (first, last)]
        return Diagnosis(
            True,
            f"The NaN and Inf become fewer as the scale falls ({many[0]:,} at {first.scale:g}, "
            f"{many[1]:,} at {last.scale:g}), as those of an overflow do: a smaller scale cures "
            "this, unless some of them have another cause.",
            f"Start lower, for example {lower}, or give the scale more steps to fall with a larger "
            "give_up_after."
            if last.scale > lowest
            else f"min_scale sets the floor, which is reached: set a lower one. {_TAME}",
        )
    hint = "" if last.inf else ", which float16 also makes of an overflow on its way back"
    held = f"The gradients hold {what}{hint}"
    unknown = (
        "is not known: an overflow goes away as the scale falls, and a division by zero does not"
    )
    if lowest == highest == 1.0:
        return Diagnosis(
            None,
            f"{held}. The loss is not scaled, so no scale was too large. Whether one below 1 cures "
            "this is not known: it does if gradients above 65504 were computed in float16.",
            f"Print the loss, which is looked at only if it runs backward by the control. {_LOOK} "
            f"{_TAME} With float16, try scale='dynamic', which may fall below 1.",
        )
    if lowest == highest:
        return Diagnosis(
            None,
            f"{held}. The scale is fixed at {last.scale:g}; whether a smaller one cures this "
            f"{unknown}.",
            f"Use scale='dynamic', or a smaller StaticScale, to find out. {_LOOK}",
        )
    if last.scale <= lowest:
        return Diagnosis(
            None,
            f"{held}, and the scale is at its floor of {lowest:g}. Whether a smaller one cures "
            f"this {unknown}. To overflow here in float16, gradients must be above "
            f"{65504.0 / last.scale:.3g}.",
            f"{_LOOK} {_TAME} min_scale sets the floor.",
        )
    far = ""
    if fell >= _FAR:
        far = f" It has fallen {fell:g}-fold and they are still there, which alone proves nothing."
    return Diagnosis(
        None,
        f"{held}, and the scale of {last.scale:g} can still shrink to {lowest:g}: a smaller scale "
        f"may cure this. Whether it does {unknown}.{far}",
        f"Give the scale more steps to fall with a larger give_up_after, or start lower, for "
        f"example {lower}. If they are still there at 2^-24, no scale helps. {_LOOK}",
    )


def _fades(symptoms: Sequence[Symptom]) -> bool:
    """Whether there were fewer NaN and Inf each time after the scale had fallen."""
    levels: list[tuple[int, int]] = []
    scales: list[float] = []
    for scale, steps in itertools.groupby(symptoms, key=lambda symptom: symptom.scale):
        counts = [symptom.nan + symptom.inf for symptom in steps]
        scales.append(scale)
        levels.append((min(counts), max(counts)))
    pairs = list(itertools.pairwise(levels))
    falls = all(after < before for before, after in itertools.pairwise(scales))
    never_rises = all(most <= fewest for (fewest, _), (_, most) in pairs)
    fewer = sum(most < fewest for (fewest, _), (_, most) in pairs)
    return falls and never_rises and fewer >= _ENOUGH


def never_finite(
    symptoms: Sequence[Symptom],
    *,
    in_a_row: int,
    bounds: tuple[float, float],
    culprits: Sequence[str],
    described: str,
) -> NeverFinite:
    """The error that says what happened, why, and what to try.

    Args:
        symptoms: of the last steps of the streak; not of all of them if they were not kept.
        in_a_row: how many there were.
        bounds: of the scale, as float32 has them.
        culprits: of the last step.
        described: these, in words.
    """
    diagnosis = diagnose(symptoms, lowest=bounds[0], highest=bounds[1])
    scales = [symptom.scale for symptom in symptoms]
    kept = ""
    if len(scales) < in_a_row:
        kept = f", of the last {len(scales):,} of {in_a_row:,} steps: no more of them are kept"
    return NeverFinite(
        f"{_counted(in_a_row, 'step')} in a row had non-finite gradients; the parameters are as "
        f"they were before the first of them.\n"
        f"  culprits: {described}\n"
        f"  scale:    {scale_path(scales)}{kept}\n"
        f"  why:      {diagnosis.why}\n"
        f"  try:      {diagnosis.advice}",
        culprits=culprits,
        scales=scales,
        curable=diagnosis.curable,
        in_a_row=in_a_row,
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
    word = "halving" if halvings >= 0 else "doubling"  # Somebody may have set it.
    return f"{' → '.join(shown)} ({_counted(abs(halvings), word)})"


def _counted(number: float, noun: str) -> str:
    number = round(number, 2)
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
