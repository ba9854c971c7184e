"""Results enter, Verdicts leave: whether each claim of the experiment holds, and on which numbers.

Nothing is taken for granted: a claim that the numbers do not bear out is said not to hold. A claim
holds if it holds for every seed that was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from gradilocks.demo.arms import Result, arm_named

CLOSE_ENOUGH = 0.005
"""Just right: the final loss differs from fp32's by no more than this part of it."""
NEAR = 0.1
"""Too small: the loss ends less than this part of fp32's fall from its start, up or down."""

Pairs = Sequence[tuple[Result, Result]]


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
    return [_too_small(results), _too_large(results), _just_right(results)]


_SMALL = {
    "near": "ends near its start",
    "fell": "falls all the same",
    "rose": "rises above its start",
    "lost": "is not finite at the end",
    "idle": "shows nothing, for fp32 did not learn either,",
}


def _too_small(results: Sequence[Result]) -> Verdict:
    name = "too small"
    claim = (
        f"without a scale the loss ends near its start, less than {NEAR:.0%} of what fp32's falls "
        "by away from it"
    )
    pairs = _pairs(results, "too-small", "fp32")
    if not pairs:
        return _not_run(name, claim, "too-small and fp32")
    moved = {small.seed: _share_of_fall(small, reference) for small, reference in pairs}
    found = {small.seed: _case(small, reference) for small, reference in pairs}
    kinds = list(found.values())
    known = [small.lost for small, _ in pairs if small.lost is not None]
    rounded = (
        f"Without a scale fp16 rounds {fmean(known):.1%} of the gradients entering the last layer "
        "to zero at the first step, and the loss "
        if known
        else "Without a scale the loss "
    )
    told = cases([(words, kinds.count(kind)) for kind, words in _SMALL.items()], len(pairs))
    return Verdict(
        name,
        claim,
        all(kind == "near" for kind in kinds),
        f"{rounded}{told.rstrip(',')}: {losses([small.first_loss for small, _ in pairs])} at the "
        f"first step, {losses([small.least_loss for small, _ in pairs])} at best, "
        f"{losses([small.final_loss for small, _ in pairs])} at the end; fp32 goes from "
        f"{losses([reference.first_loss for _, reference in pairs])} to "
        f"{losses([reference.final_loss for _, reference in pairs])}{_on_average(pairs)}.",
        {
            "fell, as a part of what fp32's fell": _by_seed(moved),
            "claimed less than, up or down": NEAR,
            "the loss": {str(seed): _SMALL[kind].rstrip(",") for seed, kind in found.items()},
            "least loss": _by_seed({small.seed: small.least_loss for small, _ in pairs}),
            "rounded to zero": _by_seed({small.seed: small.lost for small, _ in pairs}),
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


def _too_large(results: Sequence[Result]) -> Verdict:
    name = "too large"
    claim = "without a clip the loss ends above its start, or as NaN; clipped it falls"
    pairs = _pairs(results, "too-large", "clipped")
    if not pairs:
        return _not_run(name, claim, "too-large and clipped")
    larges, tamed = ([pair[side] for pair in pairs] for side in (0, 1))
    diverged = [one for one in larges if one.diverged]
    learned = [one for one in tamed if one.learned]
    idle = len(tamed) - len(learned)
    clipped = (
        f"goes from {losses([one.first_loss for one in tamed])} to "
        f"{losses([one.final_loss for one in tamed])}"
    )
    if idle:
        clipped += f", and does not fall{counted(idle, len(tamed))}"
    return Verdict(
        name,
        claim,
        len(diverged) == len(learned) == len(pairs),
        "Without a clip the gradient norm "
        f"{norms([one.norm_first for one in larges], [one.norm_largest for one in larges])} and "
        f"the loss {_how_it_ends(larges)}; clipped at {arm_named('clipped').clip:g} the loss of "
        f"the same training {clipped}{_on_average(pairs)}.",
        {
            "diverged": _by_seed({one.seed: one.diverged for one in larges}),
            "first loss that is not finite, at step": _by_seed(
                {one.seed: one.first_nonfinite for one in larges}
            ),
            "final loss without a clip": _by_seed({one.seed: one.final_loss for one in larges}),
            "final loss, clipped": _by_seed({one.seed: one.final_loss for one in tamed}),
        },
    )


def _how_it_ends(larges: Sequence[Result]) -> str:
    lost = [one for one in larges if math.isnan(one.final_loss)]
    for_good = [one for one in lost if one.lost_for_good]
    returning = [one for one in lost if not one.lost_for_good]
    finite = [one for one in larges if math.isfinite(one.final_loss)]
    above = [one.final_loss for one in finite if one.diverged]
    below = [one.final_loss for one in finite if not one.diverged]
    return cases(
        [
            (f"is not finite from {_steps(for_good)} on", len(for_good)),
            (
                f"is first not finite at {_steps(returning)}, though not from there on, and its "
                "final mean is NaN",
                len(returning),
            ),
            (f"ends at {losses(above)}, above its start,", len(above)),
            (f"ends at {losses(below)}, no higher than its start,", len(below)),
        ],
        len(larges),
    ).rstrip(",")


def _steps(results: Sequence[Result]) -> str:
    """The steps at which the losses were first not finite."""
    found = sorted({one.first_nonfinite for one in results if one.first_nonfinite is not None})
    before = ", ".join(map(str, found[:-1]))
    return "step " + " or ".join(filter(None, [before, *map(str, found[-1:])]))


def _just_right(results: Sequence[Result]) -> Verdict:
    name = "just right"
    claim = f"scaled and clipped, fp16 ends within {CLOSE_ENOUGH:.1%} of fp32's final loss"
    pairs = _pairs(results, "just-right", "fp32")
    if not pairs:
        return _not_run(name, claim, "just-right and fp32")
    apart = {
        right.seed: abs(right.final_loss - fp32.final_loss) / (fp32.final_loss or math.nan)
        for right, fp32 in pairs
    }
    parts = [part for part in apart.values() if math.isfinite(part)]
    holds = all(part <= CLOSE_ENOUGH for part in apart.values())
    told = []
    if parts:
        most = "" if len(parts) == 1 else "at most "
        within = "within" if max(parts) <= CLOSE_ENOUGH else "more than"
        told.append(f"{most}{share(max(parts))} apart, {within} the {CLOSE_ENOUGH:.1%} claimed")
    if len(parts) < len(pairs):
        lost = len(pairs) - len(parts)
        told.append(f"a loss that is not finite has no distance{counted(lost, len(pairs))}")
    idle = [reference for _, reference in pairs if not reference.learned]
    if idle:
        told.append(f"fp32 itself did not learn{counted(len(idle), len(pairs))}")
    return Verdict(
        name,
        claim,
        holds,
        f"Scaled and clipped, fp16 ends at {losses([right.final_loss for right, _ in pairs], 4)}, "
        f"fp32 at {losses([reference.final_loss for _, reference in pairs], 4)}"
        f"{_on_average(pairs)}: {'; '.join(told)}.",
        {
            "apart from fp32, as a part of it": _by_seed(apart),
            "claimed at most": CLOSE_ENOUGH,
        },
    )


def _pairs(results: Sequence[Result], one: str, other: str) -> list[tuple[Result, Result]]:
    """The results of two arms, seed by seed, of the seeds that both were run with."""
    others = {result.seed: result for result in results if result.arm == other}
    return [
        (result, others[result.seed])
        for result in results
        if result.arm == one and result.seed in others
    ]


def _not_run(name: str, claim: str, arms: str) -> Verdict:
    return Verdict(name, claim, None, f"Not judged: that takes the arms {arms}.")


def _on_average(pairs: Pairs) -> str:
    return "" if len(pairs) == 1 else f" (means of {len(pairs)} seeds)"


def _by_seed(values: Mapping[int, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no numbers as keys."""
    return {
        str(seed): None if isinstance(value, float) and not math.isfinite(value) else value
        for seed, value in values.items()
    }


# --- the words of the sentences ------------------------------------------------------------------
#
# One seed is told as it is; of several, means over what is finite, and how many were not.


def losses(values: Sequence[float], digits: int = 3) -> str:
    """The mean of several losses, and how many of them were not finite.

    Example:
        >>> losses([2.0, 3.0]), losses([2.0, math.nan, math.nan])
        ('2.500', 'NaN in 2 of 3 seeds and 2.000 in the rest')
    """
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


def norm(value: float) -> str:
    """A gradient norm.

    Example:
        >>> norm(0.926), norm(385.26)
        ('0.93', '385')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def norms(first: Sequence[float], largest: Sequence[float]) -> str:
    """What the gradient norm does from the first step to its largest value.

    Example:
        >>> norms([0.9], [385.0]), norms([math.nan], [math.nan])
        ('goes from 0.90 to 385', 'is never finite')
    """
    first, largest = ([each for each in side if math.isfinite(each)] for side in (first, largest))
    if not largest:
        return "is never finite"
    if not first:
        return f"is not finite at the first step, {norm(fmean(largest))} at most after it"
    return f"goes from {norm(fmean(first))} to {norm(fmean(largest))}"


def share(value: float) -> str:
    """A percentage in two digits, however small.

    Example:
        >>> share(0.00001133), share(0.0697)
        ('0.0011%', '7%')
    """
    return f"{float(f'{value:.2g}') * 100:.6f}".rstrip("0").rstrip(".") + "%"
