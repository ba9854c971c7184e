"""Results enter, Verdicts leave: whether each claim of the experiment holds, and on which numbers.

Nothing is taken for granted: a claim that the numbers do not bear out is said not to hold. A claim
holds if it holds for every seed that was run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from gradilocks.demo.arms import Result, arm_named, finite_or_none

CLOSE_ENOUGH = 0.005
"""Just right: the final loss differs from fp32's by no more than this part of it."""
NEAR = 0.1
"""Too small: the loss ends less than this part of fp32's fall from its start, up or down."""

Results = Sequence[Result]
Found = tuple[bool | None, str, Mapping[str, Any]]
"""Whether a claim holds, what happened, and on which numbers that rests."""


@dataclass(frozen=True)
class Verdict:
    """What the numbers say about one claim.

    Args:
        name: "too small", "too large" or "just right".
        claim: what was to be shown.
        holds: whether it was; None if the arms that it takes were not run.
        sentence: what happened, with the numbers.
        numbers: what it rests on, seed by seed.
    """

    name: str
    claim: str
    holds: bool | None
    sentence: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """What ``json.dumps`` takes."""
        return asdict(self)


def judge(results: Sequence[Result]) -> list[Verdict]:
    """Judges the three claims, in the order of the tale."""
    verdicts = []
    for name, claim, (arm, other), judged in _CLAIMS:
        by_seed = {result.seed: result for result in results if result.arm == other}
        ran = [one for one in results if one.arm == arm and one.seed in by_seed]
        found: Found = None, f"Not judged: that takes the arms {arm} and {other}.", {}
        if ran:
            found = judged(ran, [by_seed[one.seed] for one in ran])
        verdicts.append(Verdict(name, claim, *found))
    return verdicts


_SMALL = {
    "near": "ends near its start",
    "fell": "falls all the same",
    "rose": "rises above its start",
    "lost": "is not finite at the end",
    "idle": "shows nothing, for fp32 did not learn either,",
}


def _too_small(smalls: Results, references: Results) -> Found:
    pairs = list(zip(smalls, references, strict=True))
    kinds = [_case(*pair) for pair in pairs]
    lost = [small.lost for small in smalls if small.lost is not None]
    rounded = (
        f"Without a scale fp16 rounds {fmean(lost):.1%} of the gradients entering the last layer "
        "to zero at the first step, and the loss "
        if lost
        else "Without a scale the loss "
    )
    told = cases([(words, kinds.count(kind)) for kind, words in _SMALL.items()], len(smalls))
    return (
        set(kinds) == {"near"},
        f"{rounded}{told.rstrip(',')}: {losses(smalls, 'first_loss')} at the first step, "
        f"{losses(smalls, 'least_loss')} at best, {losses(smalls, 'final_loss')} at the end; fp32 "
        f"goes from {losses(references, 'first_loss')} to {losses(references, 'final_loss')}"
        f"{_on_average(smalls)}.",
        {
            "fell, as a part of what fp32's fell": _by_seed(
                smalls, [_share_of_fall(*pair) for pair in pairs]
            ),
            "claimed less than, up or down": NEAR,
            "the loss": _by_seed(smalls, [_SMALL[kind].rstrip(",") for kind in kinds]),
            "least loss": _by_seed(smalls, [small.least_loss for small in smalls]),
            "rounded to zero": _by_seed(smalls, [small.lost for small in smalls]),
        },
    )


def _case(small: Result, reference: Result) -> str:
    if not reference.learned:
        return "idle"
    if not math.isfinite(small.final_loss):
        return "lost"
    part = _share_of_fall(small, reference)
    return "near" if abs(part) < NEAR else "fell" if part > 0 else "rose"


def _share_of_fall(small: Result, reference: Result) -> float:
    """How much the loss fell, as a part of what the reference's did; NaN if that did not fall."""
    if not reference.learned:
        return math.nan
    whole = reference.first_loss - reference.final_loss
    return (small.first_loss - small.final_loss) / whole


def _too_large(larges: Results, tamed: Results) -> Found:
    diverged = [one.diverged for one in larges]
    idle = sum(not one.learned for one in tamed)
    clipped = f"goes from {losses(tamed, 'first_loss')} to {losses(tamed, 'final_loss')}"
    if idle:
        clipped += f", and does not fall{counted(idle, len(tamed))}"
    return (
        all(diverged) and not idle,
        f"Without a clip the gradient norm {norms(larges)} and the loss {_how_it_ends(larges)}; "
        f"clipped at {arm_named('clipped').clip:g} the loss of the same training {clipped}"
        f"{_on_average(larges)}.",
        {
            "diverged": _by_seed(larges, diverged),
            "first loss that is not finite, at step": _by_seed(
                larges, [one.first_nonfinite for one in larges]
            ),
            "final loss without a clip": _by_seed(larges, [one.final_loss for one in larges]),
            "final loss, clipped": _by_seed(tamed, [one.final_loss for one in tamed]),
        },
    )


def _how_it_ends(larges: Results) -> str:
    lost = [one for one in larges if math.isnan(one.final_loss)]
    for_good = [one for one in lost if one.lost_for_good]
    returning = [one for one in lost if not one.lost_for_good]
    finite = [one for one in larges if math.isfinite(one.final_loss)]
    above = [one for one in finite if one.diverged]
    below = [one for one in finite if not one.diverged]
    told = [
        (f"is not finite from {_steps(for_good)} on", len(for_good)),
        (
            f"is first not finite at {_steps(returning)}, though not from there on, and its final "
            "mean is NaN",
            len(returning),
        ),
        (f"ends at {losses(above, 'final_loss')}, above its start,", len(above)),
        (f"ends at {losses(below, 'final_loss')}, no higher than its start,", len(below)),
    ]
    return cases(told, len(larges)).rstrip(",")


def _steps(results: Results) -> str:
    """The steps at which the losses were first not finite."""
    found = sorted({one.first_nonfinite for one in results if one.first_nonfinite is not None})
    before = ", ".join(map(str, found[:-1]))
    return "step " + " or ".join(filter(None, [before, *map(str, found[-1:])]))


def _just_right(rights: Results, references: Results) -> Found:
    apart = [
        abs(right.final_loss - fp32.final_loss) / (fp32.final_loss or math.nan)
        for right, fp32 in zip(rights, references, strict=True)
    ]
    parts = [part for part in apart if math.isfinite(part)]
    told = []
    if parts:
        most = "" if len(parts) == 1 else "at most "
        within = "within" if max(parts) <= CLOSE_ENOUGH else "more than"
        told.append(f"{most}{share(max(parts))} apart, {within} the {CLOSE_ENOUGH:.1%} claimed")
    if len(parts) < len(apart):
        lost = counted(len(apart) - len(parts), len(apart))
        told.append(f"a loss that is not finite has no distance{lost}")
    if idle := sum(not reference.learned for reference in references):
        told.append(f"fp32 itself did not learn{counted(idle, len(apart))}")
    return (
        all(part <= CLOSE_ENOUGH for part in apart),
        f"Scaled and clipped, fp16 ends at {losses(rights, 'final_loss', 4)}, fp32 at "
        f"{losses(references, 'final_loss', 4)}{_on_average(rights)}: {'; '.join(told)}.",
        {
            "apart from fp32, as a part of it": _by_seed(rights, apart),
            "claimed at most": CLOSE_ENOUGH,
        },
    )


# Names, claims, the arm that each is about and the one that it is compared with, seed by seed.
_CLAIMS: tuple[tuple[str, str, tuple[str, str], Callable[[Results, Results], Found]], ...] = (
    (
        "too small",
        f"without a scale the loss ends near its start, less than {NEAR:.0%} of what fp32's falls "
        "by away from it",
        ("too-small", "fp32"),
        _too_small,
    ),
    (
        "too large",
        "without a clip the loss ends above its start, or as NaN; clipped it falls",
        ("too-large", "clipped"),
        _too_large,
    ),
    (
        "just right",
        f"scaled and clipped, fp16 ends within {CLOSE_ENOUGH:.1%} of fp32's final loss",
        ("just-right", "fp32"),
        _just_right,
    ),
)


def _on_average(results: Results) -> str:
    return "" if len(results) == 1 else f" (means of {len(results)} seeds)"


def _by_seed(results: Results, values: Sequence[Any]) -> dict[str, Any]:
    """As JSON has it, whose keys are no numbers."""
    return {str(one.seed): finite_or_none(v) for one, v in zip(results, values, strict=True)}


# --- the words of the sentences ------------------------------------------------------------------
#
# One seed is told as it is; of several, means over what is finite, and how many were not.


def losses(results: Results, name: str, digits: int = 3) -> str:
    """The mean of a loss of several results, and in how many of them it was not finite."""
    values = [getattr(one, name) for one in results]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "NaN"
    mean = f"{fmean(finite):.{digits}f}"
    lost = len(values) - len(finite)
    return f"NaN{counted(lost, len(values))} and {mean} in the rest" if lost else mean


def counted(some: int, of: int) -> str:
    """In how many of the seeds; nothing if there is one.

    Example:
        >>> counted(2, 3), counted(3, 3), counted(1, 1)
        (' in 2 of 3 seeds', ' in all 3 seeds', '')
    """
    if of == 1:
        return ""
    return f" in all {of} seeds" if some == of else f" in {some} of {of} seeds"


def cases(told: Sequence[tuple[str, int]], of: int) -> str:
    """What happened, and in how many of the seeds; what happened in none is left out.

    Example:
        >>> cases([("falls", 2), ("is NaN", 0), ("rises", 1)], 3)
        'falls in 2 of 3 seeds and rises in 1 of 3 seeds'
    """
    return " and ".join(f"{words}{counted(some, of)}" for words, some in told if some)


def norms(results: Results) -> str:
    """What the gradient norm does from the first step to its largest value."""
    first, largest = (
        [norm for one in results if math.isfinite(norm := getattr(one, name))]
        for name in ("norm_first", "norm_largest")
    )
    if not largest:
        return "is never finite"
    start, most = (
        f"{m:,.0f}" if m >= 100 else f"{m:.2f}"
        for m in (fmean(first or [math.nan]), fmean(largest))
    )
    if not first:
        return f"is not finite at the first step, {most} at most after it"
    return f"goes from {start} to {most}"


def share(value: float) -> str:
    """A percentage in two digits, however small.

    Example:
        >>> share(0.00001133), share(0.0697)
        ('0.0011%', '7%')
    """
    return f"{float(f'{value:.2g}') * 100:.6f}".rstrip("0").rstrip(".") + "%"
