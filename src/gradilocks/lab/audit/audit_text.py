"""An audit in words and tables, as plain text: judgements enter and sentences leave; a whole record
enters and what `print` and the terminal show leaves. Imports no torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from gradilocks.lab.audit.judging import HIGHEST, LOWEST, Judgement, shares_of
from gradilocks.lab.audit_record import (
    AuditRecord,
    FormatFinding,
    Histogram,
    ModuleGradients,
    Shares,
)

__all__ = ["as_text", "describe_format", "explain", "footnotes", "heading", "tables"]

_NAMES_IN_A_SENTENCE = 4
_LONGEST_NAME = 28
_MOST_MODULES = 24
_WIDTH = 80
_FORMAT_COLUMNS = (
    "format", "scale", "lost at 1", "lost", "subnormal", "overflow", "headroom", "holds",
)  # fmt: skip
_MODULE_COLUMNS = ("module", "values", "largest", "lost at 1", "lost", "headroom")

Row = tuple[str, ...]
Modules = Mapping[str, ModuleGradients]


# --- sentences -----------------------------------------------------------------------------------


def describe_format(judged: Judgement) -> str:
    """One sentence about one format."""
    name, shares = judged.format.name, judged.scaled
    if shares.headroom is None:
        return f"There is nothing to judge {name} by."
    said = f"At scale {_scale(judged.scale)} {name} loses {percent(shares.lost)} of the gradients "
    said += "to zero"
    if judged.scale != 1.0:
        said += f" ({percent(judged.unscaled.lost)} at scale 1)"
    if shares.overflow:
        said += f" and overflows in {percent(shares.overflow)}"
    if shares.headroom >= 0:
        said += f"; {shares.headroom:.1f} doublings of headroom are left"
    if not judged.holds:
        said += ". It does not hold them."
        forward = judged.with_fault("outputs")
        return f"{said} Nor does it hold what {_returns(forward)}." if forward else said
    if judged.keep:
        said += f"; without {_listed(judged.keep)} it loses {percent(judged.rest.lost)}"
    return f"{said}."


def explain(
    judged: Sequence[Judgement],
    chosen: Judgement | None,
    modules: Sequence[ModuleGradients],
    *,
    precision: str,
    loss_scale: float,
    lost_passes: tuple[int, int] = (0, 0),
) -> list[str]:
    """Why this format, in sentences."""
    total = Histogram.total(module.together for module in modules)
    if total.values:
        words = _on_choice(judged, chosen, {module.name: module for module in modules})
    elif total.zeros and total.nonfinite:
        words = ["Every gradient is zero, NaN or Inf, so there is nothing to judge a format by."]
    elif total.zeros:
        words = [
            f"All {total.zeros:,} gradients are zero, so there is nothing to judge a format by."
            " Does the loss depend on the parameters?"
        ]
    else:
        words = ["No gradient is finite, so there is nothing to judge a format by."]
    before = _on_nonfinite(modules, loss_scale, *lost_passes) if total.nonfinite else []
    return [*before, *words, *_on_half_precision(total, precision, loss_scale)]


def _on_nonfinite(
    modules: Sequence[ModuleGradients], loss_scale: float, lost: int, passes: int
) -> list[str]:
    counts = {m.name: m.together.nonfinite for m in modules if m.together.nonfinite}
    why = (
        f" The loss itself was NaN or Inf in {lost:,} of {passes:,} backward passes: that arose in "
        "forward or in the loss, and a loss scale has nothing to do with it. "
        "`gradilocks run --trace` names the module."
        if lost
        else f" The loss was multiplied by {_scale(loss_scale)}: a smaller scale may do."
        if loss_scale > 1.0
        else " `gradilocks.trace` finds where they are born."
    )
    return [
        f"{sum(counts.values()):,} values were NaN or Inf, in {_listed([*counts])}; the rest was "
        f"judged without them.{why}"
    ]


def _on_half_precision(total: Histogram, precision: str, loss_scale: float) -> list[str]:
    if "float16" not in precision.replace("bfloat16", "") and "float8" not in precision:
        return []
    every = total.values + total.zeros
    share = percent(total.zeros / every) if every else percent(0.0)
    scaled = f" at a loss scale of {_scale(loss_scale)}" if loss_scale != 1.0 else ""
    return [
        f"The gradients were computed in {precision}{scaled}: what it had lost already shows only "
        f"as zeros, {share} of all values. Audit in float32 to see the rest."
    ]


def _on_choice(
    judged: Sequence[Judgement], chosen: Judgement | None, modules: Modules
) -> list[str]:
    refusals = [
        sentence
        for each in judged
        if not each.holds
        and (chosen is None or each.format.mantissa_bits > chosen.format.mantissa_bits)
        for sentence in _refusal(each, modules)
    ]
    if chosen is None:
        wide = [each.format.name for each in judged if each.holds]
        if wide and not refusals:
            return [
                f"Of what was asked for, {' and '.join(wide)} hold these gradients; that saves no "
                "room over float32. Ask for fp16 or bf16 to find out what fewer bits would lose."
            ]
        return [*refusals, "None of the formats holds these gradients: stay with float32."]
    name = chosen.format.name
    if chosen.format.exponent_bits >= 8:
        words = [f"Take {name}: it has float32's range and needs no loss scale."]
    else:
        words = [
            f"Take {name} with an initial loss scale of {_scale(chosen.scale)}.",
            _on_scale(chosen),
            *_on_headroom(chosen, modules),
        ]
    return [*words, *_on_rival(judged, chosen), *_on_kept(chosen, modules), *refusals]


def _on_rival(judged: Sequence[Judgement], chosen: Judgement) -> list[str]:
    """Why fp16 and not bf16, or the other way round, if both were asked for.

    Of formats that hold the gradients the one with the finest steps is taken; why one that has
    finer steps does not hold them, the refusals say.
    """
    rivals = {"fp16": "bf16", "bf16": "fp16"}
    wanted = rivals.get(chosen.format.name)
    other = next((each for each in judged if each.format.name == wanted), None)
    if other is None:
        return []
    if chosen.format.name == "bf16":
        return [
            "Why not fp16, whose steps are 8 times as fine: it does not hold them. bf16's range is "
            "worth the coarser steps here."
        ]
    if not other.holds:
        return ["Why not bf16: it does not hold them, and its steps are 8 times as coarse."]
    whole = " and every module" if chosen.keep and not other.keep else ""
    return [
        f"Why not bf16: it would hold them{whole} without a loss scale, but its steps are 8 times "
        "as coarse (8 significant bits, fp16 has 11). It is the choice if you want no scale to "
        "look after."
    ]


def _on_scale(chosen: Judgement) -> str:
    """What the scale is for."""
    name, scale = chosen.format.name, _scale(chosen.scale)
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
    # Many values may be lost and count for nothing: gradients that vanish over time, say.
    mass = f", which carry {percent(chosen.lost_mass)} of the sum of all magnitudes"
    return (
        f"At scale 1 {name} would round {percent(before.lost)} of the gradients to zero; at "
        f"{scale} {percent(after.lost)}{'' if after.lost < 0.01 else mass}."
    )


def _on_headroom(chosen: Judgement, modules: Modules) -> list[str]:
    rest = {
        name: module.together.largest or 0.0
        for name, module in modules.items()
        if name not in chosen.keep and module.together.values
    }
    if not rest or chosen.rest.headroom is None:
        return []
    largest = max(rest, key=lambda name: rest[name])
    return [
        f"The largest, {rest[largest]:.2g} in {_called(largest)}, leaves "
        f"{chosen.rest.headroom:.1f} doublings of headroom there."
    ]


def _on_kept(chosen: Judgement, modules: Modules) -> list[str]:
    """Which modules to keep in float32, each with the one reason that weighs most."""
    reasons = (
        (
            chosen.too_large,
            "gradients up to {largest:.2g} there would force a scale at which others are lost.",
        ),
        (chosen.with_fault("outputs"), "{outputs}, which no loss scale changes."),
        (
            chosen.with_fault("overflow"),
            "gradients up to {largest:.2g} there overflow at this scale.",
        ),
        (
            chosen.with_fault("mass"),
            "at this scale too much of what counts there would be lost to zero.",
        ),
        (
            chosen.keep,
            "at this scale too many of the parameters there would have their gradients rounded to "
            "zero.",
        ),
    )
    words = []
    left = [name for name in chosen.keep if name not in chosen.takers]
    for concerned, reason in reasons:
        names = [name for name in left if name in concerned]
        left = [name for name in left if name not in concerned]
        if names:
            why = reason.format(
                largest=_largest(modules, names), outputs=_too_much(chosen, modules, names)
            )
            words.append(f"Keep {_listed(names)} in float32: {why}")
    if chosen.takers:
        words.append(
            f"Keep {_listed(chosen.takers)} as well: what is returned there goes in here, and its "
            "gradient comes from here."
        )
    return words


def _refusal(judged: Judgement, modules: Modules) -> list[str]:
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
            f"{_largest(modules, over):.2g} in {_listed(over)}"
        )
    if lost:
        reasons.append(
            f"it loses {percent(shares.lost)} of the gradients to zero, too much in {_listed(lost)}"
        )
    if reasons:
        words.append(f"{name} does not hold them: {_at_most(judged)}{', and '.join(reasons)}.")
    return words


def _at_most(judged: Judgement) -> str:
    """At which scale, and why at no better one."""
    scale = f"at scale {_scale(judged.scale)}"
    if judged.format.exponent_bits >= 8:
        return ""
    if judged.scale == HIGHEST:
        return f"{scale}, the largest that a DynamicScale takes, "
    if judged.scale == LOWEST:
        return f"even {scale}, the smallest that a DynamicScale takes, "
    return f"{scale}, the most that the largest allow, "


def _too_much(judged: Judgement, modules: Modules, names: Sequence[str]) -> str:
    outputs = [modules[name].outputs for name in names]
    largest = max((each.largest for each in outputs if each is not None), default=0.0)
    who = "it returns" if len(names) == 1 else "they return"
    format = judged.format
    return f"{who} values up to {largest:.2g}, and {format.name} ends at {format.largest:g}"


def _returns(names: Sequence[str]) -> str:
    return f"{_listed(names)} return{'s' if len(names) == 1 else ''}"


def _largest(modules: Modules, names: Iterable[str]) -> float:
    return max(modules[name].together.largest or 0.0 for name in names)


# --- the whole audit -----------------------------------------------------------------------------


def as_text(audit: AuditRecord) -> str:
    """What `print(audit)` shows, in at most 80 columns: the words, then two tables."""

    def filled(sentences: Iterable[str]) -> str:
        return "\n".join(textwrap.fill(each, _WIDTH) for each in sentences)

    words, notes = audit.recommendation.words, footnotes(audit)
    parts = [filled([heading(audit)]), filled(words), *map(_aligned, tables(audit)), filled(notes)]
    return "\n\n".join(filter(None, parts))


def heading(audit: AuditRecord) -> str:
    """What was looked at."""
    steps = f"{audit.steps:,} step" + ("s" if audit.steps != 1 else "")
    counts = f"{audit.parameters.values:,} gradients of parameters and "
    counts += f"{audit.activations.values:,} of activations"
    scale = f", loss scale {_scale(audit.loss_scale)}" if audit.loss_scale != 1.0 else ""
    return f"{steps} in {audit.precision}{scale}: {counts}, other than zero."


def tables(audit: AuditRecord) -> list[list[Row]]:
    """A table of the formats and, if there are modules, one of those; columns' names come first."""
    made = [[_FORMAT_COLUMNS, *map(_format_row, audit.formats)]]
    finding = _shown(audit)
    if finding is not None and audit.modules:
        made.append([_MODULE_COLUMNS, *_module_rows(audit, finding)])
    return made


def footnotes(audit: AuditRecord) -> list[str]:
    """What the tables leave out."""
    finding = _shown(audit)
    if finding is None:
        return []
    notes = [f"The modules are shown in {finding.name} at scale {_scale(finding.scale)}."]
    if len(audit.modules) > _MOST_MODULES:
        more = len(audit.modules) - _MOST_MODULES
        notes[0] += f" {more:,} more lose no more than these; JSON has all."
    notes += [
        f"* {each.name} holds if {_listed(each.keep)} "
        f"stay{'s' if len(each.keep) == 1 else ''} in float32."
        for each in audit.formats
        if each.holds and each.keep
    ]
    return notes


def _format_row(each: FormatFinding) -> Row:
    holds = "no"
    if each.holds:
        holds = f"without {len(each.keep)} *" if each.keep else "yes"
    shares = each.scaled
    lost = map(_cell, (each.unscaled.lost, shares.lost, shares.subnormal, shares.overflow))
    return (each.name, _scale(each.scale), *lost, _headroom(shares), holds)


def _module_rows(audit: AuditRecord, finding: FormatFinding) -> list[Row]:
    """A row a module; of many, those that lose most."""

    def at(scale: float, module: ModuleGradients) -> Shares:
        return shares_of(module.together, finding.format, scale)

    def rank(module: ModuleGradients) -> tuple[bool, float, float]:
        shares = at(finding.scale, module)
        return module.name in finding.keep, shares.lost, -(shares.headroom or 0.0)

    worst = sorted(audit.modules, key=rank, reverse=True)[:_MOST_MODULES]
    names = {module.name for module in worst}
    return [
        (
            _shortened(_called(module.name)) + (" *" if module.name in finding.keep else ""),
            f"{module.together.values:,}",
            "-" if module.together.largest is None else f"{module.together.largest:.2g}",
            _cell(at(1.0, module).lost),
            _cell(at(finding.scale, module).lost),
            _headroom(at(finding.scale, module)),
        )
        for module in audit.modules
        if module.name in names
    ]


def _shown(audit: AuditRecord) -> FormatFinding | None:
    """The format that comes into question first: fp16 if it is there."""
    for each in audit.formats:
        if each.name == "fp16":
            return each
    return audit.formats[0] if audit.formats and audit.modules else None


def _aligned(rows: Sequence[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


# --- numbers and names ---------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share as it is read: '99.1 %', '0.02 %', 'under 0.001 %', '0 %'."""
    if share == 0.0:
        return "0 %"
    if share < 1e-5:
        return "under 0.001 %"
    if 0.9999 < share < 1.0:
        return "over 99.99 %"
    value = 100.0 * share
    digits = 1 if value >= 1.0 else 1 - math.floor(math.log10(value))
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") + " %"


def _cell(share: float) -> str:
    return percent(share).replace("under ", "<").replace("over ", ">")


def _headroom(shares: Shares) -> str:
    return "-" if shares.headroom is None else f"{shares.headroom:.1f}"


def _scale(scale: float) -> str:
    """A scale as it can be typed: 65536, or 2^20 where digits get many."""
    exponent = math.log2(scale)
    if exponent.is_integer() and (exponent > 16 or exponent < -3):
        return f"2^{int(exponent)}"
    return f"{scale:g}"


def _called(name: str) -> str:
    """A module's name as it reads in a sentence; the model itself has none."""
    if not name:
        return "the model itself"
    return f"module {name}" if name.isdigit() else name


def _listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    shown = [_called(name) for name in names[:_NAMES_IN_A_SENTENCE]]
    if len(names) > _NAMES_IN_A_SENTENCE:
        return f"{', '.join(shown)} and {len(names) - _NAMES_IN_A_SENTENCE} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _shortened(name: str) -> str:
    """A name of at most 28 characters: where it begins, and what it is."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:10]}…{name[11 - _LONGEST_NAME :]}"
