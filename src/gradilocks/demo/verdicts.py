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

from gradilocks.demo.arms import arm_named
from gradilocks.demo.values import Result

__all__ = ["CLOSE_ENOUGH", "LITTLE", "Verdict", "judge"]

CLOSE_ENOUGH = 0.005
"""Just right: the final loss differs from fp32's by no more than this part of it."""
LITTLE = 0.25
"""Too small: the loss fell by no more than this part of what it fell by in fp32."""


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


def _too_small(results: Sequence[Result]) -> Verdict:
    name = "too small"
    claim = f"without a scale the loss falls by less than {LITTLE:.0%} of what fp32's does"
    pairs = _pairs(results, "too-small", "fp32")
    if not pairs:
        return _not_run(name, claim, "too-small and fp32")
    shares = {
        small.seed: _ratio(
            small.first_loss - small.final_loss, reference.first_loss - reference.final_loss
        )
        for small, reference in pairs
    }
    holds = all(share < LITTLE for share in shares.values())
    small, reference = (_mean(side) for side in zip(*pairs, strict=True))
    lost = fmean(one.lost for one, _ in pairs if one.lost is not None)
    ends = "ends near where it began" if holds else "learns all the same"
    return Verdict(
        name,
        claim,
        holds,
        f"Without a scale fp16 rounds {lost:.1%} of the gradients entering the last layer to zero "
        f"at the first step, and the model {ends}: loss {small.first:.3f} at the start, "
        f"{_loss(small.least)} at best, {_loss(small.final)} at the end; fp32 ends at "
        f"{_loss(reference.final)}.",
        {
            "fell, as a part of what fp32's fell": _by_seed(shares),
            "claimed less than": LITTLE,
            "rounded to zero": _by_seed({one.seed: one.lost for one, _ in pairs}),
        },
    )


def _too_large(results: Sequence[Result]) -> Verdict:
    name = "too large"
    claim = "without a clip the loss ends above its start, or as NaN; clipped it falls"
    pairs = _pairs(results, "too-large", "clipped")
    if not pairs:
        return _not_run(name, claim, "too-large and clipped")
    diverged = [large for large, _ in pairs if large.diverged]
    learned = [tamed for _, tamed in pairs if tamed.final_loss < tamed.first_loss]
    large, tamed = (_mean(side) for side in zip(*pairs, strict=True))
    limit = arm_named("clipped").clip
    ends = f"the loss ends at {_loss(large.final)}"
    lost = [one.last_finite for one, _ in pairs if math.isnan(one.final_loss)]
    if len(lost) == len(pairs):
        latest = " at the latest" if min(lost) < max(lost) else ""
        ends = f"the loss is NaN from step {max(lost) + 1} on{latest}"
    counted = "" if len(pairs) == 1 else f", in {len(diverged)} of {len(pairs)} seeds"
    return Verdict(
        name,
        claim,
        len(diverged) == len(learned) == len(pairs),
        f"Without a clip the gradient norm goes from {large.norm_first:.2f} to "
        f"{large.norm_largest:.0f} and {ends}{counted}; clipped at {limit:g} the same training "
        f"goes from {tamed.first:.3f} to {_loss(tamed.final)}.",
        {
            "diverged": _by_seed({one.seed: one.diverged for one, _ in pairs}),
            "final loss without a clip": _by_seed({one.seed: one.final_loss for one, _ in pairs}),
            "final loss, clipped": _by_seed({one.seed: one.final_loss for _, one in pairs}),
        },
    )


def _just_right(results: Sequence[Result]) -> Verdict:
    name = "just right"
    claim = f"scaled and clipped, fp16 ends within {CLOSE_ENOUGH:.1%} of fp32's final loss"
    pairs = _pairs(results, "just-right", "fp32")
    if not pairs:
        return _not_run(name, claim, "just-right and fp32")
    apart = {
        right.seed: _ratio(abs(right.final_loss - reference.final_loss), reference.final_loss)
        for right, reference in pairs
    }
    holds = all(part <= CLOSE_ENOUGH for part in apart.values())
    right, reference = (_mean(side) for side in zip(*pairs, strict=True))
    worst = max(apart.values(), key=lambda part: math.inf if math.isnan(part) else part)
    most = "" if len(pairs) == 1 else "at most "
    within = f"within the {CLOSE_ENOUGH:.1%}" if holds else f"more than the {CLOSE_ENOUGH:.1%}"
    return Verdict(
        name,
        claim,
        holds,
        f"Scaled and clipped, fp16 ends at {_loss(right.final, 4)}, fp32 at "
        f"{_loss(reference.final, 4)}: {most}{_share(worst)} apart, {within} claimed.",
        {
            "apart from fp32, as a part of it": _by_seed(apart),
            "claimed at most": CLOSE_ENOUGH,
        },
    )


@dataclass(frozen=True)
class _Mean:
    first: float
    least: float
    final: float
    norm_first: float
    norm_largest: float


def _mean(results: Sequence[Result]) -> _Mean:
    return _Mean(
        first=fmean(one.first_loss for one in results),
        least=fmean(one.least_loss for one in results),
        final=fmean(one.final_loss for one in results),
        norm_first=fmean(one.norm_first for one in results),
        norm_largest=fmean(one.norm_largest for one in results),
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


def _ratio(some: float, whole: float) -> float:
    return some / whole if whole else math.nan


def _by_seed(values: Mapping[int, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no numbers as keys."""
    return {
        str(seed): None if isinstance(value, float) and not math.isfinite(value) else value
        for seed, value in values.items()
    }


def _loss(value: float, digits: int = 3) -> str:
    return "NaN" if math.isnan(value) else f"{value:.{digits}f}"


def _share(value: float) -> str:
    """A percentage in two digits, however small."""
    if math.isnan(value):
        return "NaN"
    return f"{float(f'{value:.2g}') * 100:.6f}".rstrip("0").rstrip(".") + "%"
