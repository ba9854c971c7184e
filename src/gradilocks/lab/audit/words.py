"""Judgements enter, sentences leave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from gradilocks.lab.audit.histogram import Histogram
from gradilocks.lab.audit.judging import HIGHEST, LOWEST, Judgement
from gradilocks.lab.audit.modules import ModuleGradients

__all__ = ["called", "describe_format", "explain", "listed", "percent", "scale_text"]

_NAMES_SHOWN = 4


def describe_format(judged: Judgement) -> str:
    """One sentence about one format."""
    name = judged.format.name
    shares = judged.scaled
    if shares.headroom is None:
        return f"There is nothing to judge {name} by."
    at = f"At scale {scale_text(judged.scale)} {name}"
    lost = f"loses {percent(shares.lost)} of the gradients to zero"
    if judged.scale != 1.0:
        lost += f" ({percent(judged.unscaled.lost)} at scale 1)"
    over = f" and overflows in {percent(shares.overflow)}" if shares.overflow else ""
    room = f"; {_doublings(shares.headroom)} of headroom are left"
    if shares.headroom < 0:
        room = ""
    if not judged.holds:
        said = f"{at} {lost}{over}{room}. It does not hold them."
        forward = judged.with_fault("outputs")
        return f"{said} Nor does it hold what {_returns(forward)}." if forward else said
    if judged.keep:
        rest = percent(judged.rest.lost)
        return f"{at} {lost}{over}{room}; without {listed(judged.keep)} it loses {rest}."
    return f"{at} {lost}{over}{room}."


def explain(
    judged: Sequence[Judgement],
    chosen: Judgement | None,
    modules: Sequence[ModuleGradients],
    *,
    precision: str,
    loss_scale: float,
) -> list[str]:
    """Why this format, in sentences."""
    seen = {module.name: module.together for module in modules}
    total = Histogram.total(seen.values())
    words = [*_of_nonfinite(total, seen, loss_scale)]
    if not total.values:
        if total.zeros and total.nonfinite:
            words.append(
                "Every gradient is zero, NaN or Inf, so there is nothing to judge a format by."
            )
        elif total.zeros:
            words.append(
                f"All {total.zeros:,} gradients are zero, so there is nothing to judge a format by."
                " Does the loss depend on the parameters?"
            )
        else:
            words.append("No gradient is finite, so there is nothing to judge a format by.")
        return [*words, *_of_half(total, precision, loss_scale)]
    words += _of_choice(judged, chosen, {module.name: module for module in modules})
    return [*words, *_of_half(total, precision, loss_scale)]


def _of_choice(
    judged: Sequence[Judgement],
    chosen: Judgement | None,
    modules: Mapping[str, ModuleGradients],
) -> list[str]:
    seen = {name: module.together for name, module in modules.items()}
    words = [
        sentence
        for each in judged
        if not each.holds
        and (chosen is None or each.format.mantissa_bits > chosen.format.mantissa_bits)
        for sentence in _refused(each, modules)
    ]
    if chosen is None:
        wide = [each.format.name for each in judged if each.holds]
        if wide and not words:
            return [
                f"Of what was asked for, {' and '.join(wide)} hold these gradients; that saves no "
                "room over float32. Ask for fp16 or bf16 to find out what fewer bits would lose."
            ]
        return [*words, "None of the formats holds these gradients: stay with float32."]
    name, scale = chosen.format.name, chosen.scale
    first = f"Take {name}"
    if chosen.format.exponent_bits >= 8:
        first += ": it has float32's range and needs no loss scale."
    else:
        first += f" with an initial loss scale of {scale_text(scale)}."
    said = [first]
    if chosen.format.exponent_bits < 8:
        said += [_of_scale(chosen), *_of_headroom(chosen, seen)]
    if name == "bf16" and any(each.format.name == "fp16" for each in judged):
        said.append("Its steps are 8 times as coarse as those of fp16.")
    said += _of_kept(chosen, modules)
    return [*said, *words] if words else said


def _of_scale(chosen: Judgement) -> str:
    """What the scale is for."""
    name, scale = chosen.format.name, scale_text(chosen.scale)
    before, after = chosen.unscaled, chosen.rest
    if before.overflow:
        return (
            f"At scale 1 {percent(before.overflow)} of the gradients would overflow in {name}; at "
            f"{scale} {percent(after.overflow)}, and {percent(after.lost)} are lost to zero."
        )
    if before.lost == after.lost == 0.0:
        return (
            f"At scale 1 {name} would lose none of them either, and store "
            f"{percent(before.subnormal)} with fewer bits; {scale} makes room for smaller ones to "
            "come."
        )
    return (
        f"At scale 1 {name} would round {percent(before.lost)} of the gradients to zero; at "
        f"{scale} {percent(after.lost)}{_of_mass(chosen)}."
    )


def _of_mass(chosen: Judgement) -> str:
    """Many values that are lost and count for nothing: gradients that vanish over time, say."""
    if chosen.rest.lost < 0.01:
        return ""
    return f", which carry {percent(chosen.lost_mass)} of the sum of all magnitudes"


def _of_headroom(chosen: Judgement, seen: Mapping[str, Histogram]) -> list[str]:
    rest = {name: h for name, h in seen.items() if name not in chosen.keep and h.values}
    if not rest or chosen.rest.headroom is None:
        return []
    loudest = max(rest, key=lambda name: rest[name].largest or 0.0)
    return [
        f"The largest, {rest[loudest].largest:.2g} in {called(loudest)}, leaves "
        f"{_doublings(chosen.rest.headroom)} of headroom there."
    ]


def _of_kept(chosen: Judgement, modules: Mapping[str, ModuleGradients]) -> list[str]:
    """Which modules to keep in float32, each with the one reason that weighs most."""
    words = []
    left = [name for name in chosen.keep if name not in chosen.takers]
    loud, left = _parted(left, chosen.loud)
    forward, left = _parted(left, chosen.with_fault("outputs"))
    over, left = _parted(left, chosen.with_fault("overflow"))
    mass, values = _parted(left, chosen.with_fault("mass"))
    if loud:
        words.append(
            f"Keep {listed(loud)} in float32: gradients up to {_largest(modules, loud):.2g} there "
            "would force a scale at which others are lost."
        )
    if forward:
        words.append(
            f"Keep {listed(forward)} in float32: {_too_much(chosen, modules, forward)}, which no "
            "loss scale changes."
        )
    if over:
        words.append(
            f"Keep {listed(over)} in float32: gradients up to {_largest(modules, over):.2g} there "
            "overflow at this scale."
        )
    if mass:
        words.append(
            f"Keep {listed(mass)} in float32: at this scale too much of what counts there would "
            "be lost to zero."
        )
    if values:
        words.append(
            f"Keep {listed(values)} in float32: at this scale too many of the parameters there "
            "would have their gradients rounded to zero."
        )
    if chosen.takers:
        words.append(
            f"Keep {listed(chosen.takers)} as well: what is returned there goes in here, and its "
            "gradient comes from here."
        )
    return words


def _refused(judged: Judgement, modules: Mapping[str, ModuleGradients]) -> list[str]:
    """Why a format does not hold them: what it loses, what overflows, what is returned."""
    name, shares, words = judged.format.name, judged.scaled, []
    forward = judged.with_fault("outputs")
    if forward:
        words.append(
            f"{name} does not hold what {_returns(forward)}: "
            f"{_too_much(judged, modules, forward)}, which no loss scale changes."
        )
    over, lost = judged.with_fault("overflow"), judged.with_fault("mass", "values")
    reasons = []
    if over:
        reasons.append(
            f"{percent(shares.overflow)} of the gradients overflow, up to "
            f"{_largest(modules, over):.2g} in {listed(over)}"
        )
    if lost:
        reasons.append(
            f"it loses {percent(shares.lost)} of the gradients to zero, too much in {listed(lost)}"
        )
    if reasons:
        words.append(f"{name} does not hold them: {_at_most(judged)}{', and '.join(reasons)}.")
    return words


def _at_most(judged: Judgement) -> str:
    """At which scale, and why at no better one."""
    scale = f"at scale {scale_text(judged.scale)}"
    if judged.format.exponent_bits >= 8:
        return ""
    if judged.scale == HIGHEST:
        return f"{scale}, the largest that a DynamicScale takes, "
    if judged.scale == LOWEST:
        return f"even {scale}, the smallest that a DynamicScale takes, "
    return f"{scale}, the most that the largest allow, "


def _too_much(
    judged: Judgement, modules: Mapping[str, ModuleGradients], names: Sequence[str]
) -> str:
    outputs = [modules[name].outputs for name in names]
    largest = max(each.largest for each in outputs if each is not None)
    verb = "returns" if len(names) == 1 else "return"
    name = judged.format.name
    it = "it" if len(names) == 1 else "they"
    return f"{it} {verb} values up to {largest:.2g}, and {name} ends at {judged.format.largest:g}"


def _returns(names: Sequence[str]) -> str:
    return f"{listed(names)} return{'s' if len(names) == 1 else ''}"


def _largest(modules: Mapping[str, ModuleGradients], names: Iterable[str]) -> float:
    return max(modules[name].together.largest or 0.0 for name in names)


def _parted(names: Sequence[str], some: Sequence[str]) -> tuple[list[str], list[str]]:
    return [name for name in names if name in some], [name for name in names if name not in some]


def _of_nonfinite(total: Histogram, seen: Mapping[str, Histogram], loss_scale: float) -> list[str]:
    if not total.nonfinite:
        return []
    where = [name for name, histogram in seen.items() if histogram.nonfinite]
    why = (
        f" The loss was multiplied by {scale_text(loss_scale)}: a smaller scale may do."
        if loss_scale > 1.0
        else " `gradilocks.trace` finds where they are born."
    )
    return [
        f"{total.nonfinite:,} values were NaN or Inf, in {listed(where)}; the rest was judged "
        f"without them.{why}"
    ]


def _of_half(total: Histogram, precision: str, loss_scale: float) -> list[str]:
    if "float16" not in precision.replace("bfloat16", "") and "float8" not in precision:
        return []
    every = total.values + total.zeros
    share = percent(total.zeros / every) if every else percent(0.0)
    scaled = f" at a loss scale of {scale_text(loss_scale)}" if loss_scale != 1.0 else ""
    return [
        f"The gradients were computed in {precision}{scaled}: what it had lost already shows only "
        f"as zeros, {share} of all values. Audit in float32 to see the rest."
    ]


def percent(share: float) -> str:
    """A share as it is read: '99.1 %', '0.02 %', 'under 0.001 %', '0 %'."""
    if share == 0.0:
        return "0 %"
    if share < 1e-5:
        return "under 0.001 %"
    if share > 0.9999 and share < 1.0:
        return "over 99.99 %"
    value = 100.0 * share
    digits = 1 if value >= 1.0 else 1 - math.floor(math.log10(value))
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".")
    return f"{text} %"


def scale_text(scale: float) -> str:
    """A scale as it can be typed: 65536, or 2^20 where digits get many."""
    exponent = math.log2(scale)
    if exponent.is_integer() and (exponent > 16 or exponent < -3):
        return f"2^{int(exponent)}"
    return f"{scale:g}"


def called(name: str) -> str:
    """A module's name as it reads in a sentence; the model itself has none."""
    if not name:
        return "the model itself"
    return f"module {name}" if name.isdigit() else name


def listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    shown = [called(name) for name in names[:_NAMES_SHOWN]]
    if len(names) > _NAMES_SHOWN:
        return f"{', '.join(shown)} and {len(names) - _NAMES_SHOWN} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _doublings(headroom: float) -> str:
    return f"{headroom:.1f} doublings"
