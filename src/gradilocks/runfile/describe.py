"""A step, a scale or an exception enters; words and plain numbers leave, for whoever shows them.

The terminal, the log, the report, TensorBoard and Weights & Biases say the same of the same step
because they all ask here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradilocks.runfile.bad_steps import (
    FORWARD_OR_LOSS,
    BadSteps,
    has_bad_gradients,
    origin_of,
)
from gradilocks.runfile.lines import MOST_CULPRITS
from gradilocks.runfile.records import Culprit, OptimizerInfo, Step, Trace

__all__ = [
    "describe_bad",
    "describe_damage",
    "describe_ending",
    "describe_error",
    "describe_skip",
    "describe_trace",
    "describe_weights",
    "format_scale",
    "named_numbers",
    "on_ranks",
]


def describe_damage(damaged: Mapping[int, str]) -> str:
    """Says which lines of a run file were left out, as `Run.damaged` has them; '' if none was.

    Example:
        >>> describe_damage({17: "not JSON"})
        'line 17 is damaged and was left out (not JSON)'
        >>> describe_damage({17: "not JSON", 20: "not JSON"})
        '2 lines are damaged and were left out: 17 and 20 (line 17: not JSON)'
    """
    if not damaged:
        return ""
    (first, why), *others = damaged.items()
    if not others:
        return f"line {first:,} is damaged and was left out ({why})"
    shown = [f"{number:,}" for number in list(damaged)[:8]]
    left = len(damaged) - len(shown)
    named = (
        f"{', '.join(shown)} and {left:,} more"
        if left
        else " and ".join([", ".join(shown[:-1]), shown[-1]])
    )
    return f"{len(damaged):,} lines are damaged and were left out: {named} (line {first:,}: {why})"


def describe_error(error: BaseException) -> str:
    """Names an exception in one line: its class, and the first line of what it says.

    Example:
        >>> describe_error(RuntimeError("in Linear:\\n\\tsize  mismatch"))
        'RuntimeError: in Linear: …'
    """
    kind = type(error)
    builtin = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if builtin else f"{kind.__module__}.{kind.__qualname__}"
    try:
        lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    except Exception:
        lines = []
    return name if not lines else f"{name}: {lines[0]}{' …' if len(lines) > 1 else ''}"


def describe_bad(
    step: Step, *, most: int = 1, lost: bool = False, others: Sequence[Step] = ()
) -> str:
    """Says which gradients of a step were NaN or Inf, naming up to `most`; '' if it does not know.

    Where they do not tell where it began, a name would pass for that place: none is given.

    Args:
        step: the step.
        most: so many parameters are named.
        lost: whether its loss was NaN or Inf by what the rest of its run shows.
        others: steps of other optimizers after the same backward pass, as far as they are known.

    Example:
        >>> describe_bad(step)  # doctest: +SKIP
        'Inf in blocks.11.attn.qkv.weight (+2 more)'
    """
    if step.loss_nonfinite or lost:
        return f"the loss itself was NaN or Inf{on_ranks(step)} ({FORWARD_OR_LOSS})"
    many = len(step.culprits)
    several = many > 1 or (many and any(map(has_bad_gradients, others)))
    if several and origin_of(step, others=others).where != "parameter":
        every = "all " if step.finite_gradients == 0 and many != MOST_CULPRITS else ""
        more = " or more" if many == MOST_CULPRITS else ""
        return f"{_kinds(step)} in {every}{many}{more} gradient{'s' if many > 1 else ''}"
    named = ", ".join(f"{_kinds(culprit)} in {culprit.name}" for culprit in step.culprits[:most])
    return named if many <= most else f"{named} (+{many - most} more)"


# What a trace has found, by its `where`.
_FOUND_BY_TRACE = {
    "module": "{what} first appeared in {who}",
    "input": "{what} was in the input",
    "before": "{what} first appeared between modules, before {who}",
    "outside": "{what} came into {who} from outside",
    "after": "{what} first appeared in the loss, or after {who}",
    "gradients": "{what} came back in gradients, but in no module's backward",
    "grown": "{what} came of weights that had grown too large, and was first seen in {who}",
}


def describe_trace(trace: Trace, *, what: str = "") -> str:
    """Where a trace saw NaN or Inf first, in half a sentence; '' if it names no such place.

    Args:
        trace: the trace.
        what: in place of 'NaN' or 'Inf'.
    """
    found = _FOUND_BY_TRACE.get(trace.where, "")
    told = found.format(what=what or trace.what, who=trace.module or "the model")
    return f"{told}{_listed(trace.ranks)}" if told else ""


def describe_weights(trace: Trace) -> str:
    """Says of a trace that found NaN or Inf in the weights themselves in which, and before when.

    Example:
        >>> describe_weights(trace)  # doctest: +SKIP
        'the weights held NaN before step 27, in h.2.attn.c_proj.weight'
    """
    many = len(trace.damaged or ())
    where = ""
    if many:  # Of several, a name would pass for the place where it began.
        more = " or more" if many >= MOST_CULPRITS else ""
        where = f"{many}{more} parameters" if many > 1 else (trace.damaged or ("",))[0]
    at = f", in {where}" if where else ""
    return f"the weights held {trace.what} before step {trace.step:,}{at}"


def describe_ending(
    bad: BadSteps,
    traces: Sequence[Trace] = (),
    *,
    others: Sequence[Step] | None = (),
    spoilt_before: str = "",
) -> str | None:
    """How a run ended in NaN or Inf, since when, and where that arose; None if it ended well.

    Args:
        bad: of one optimizer.
        traces: what traces found in the run. One of the first bad step, or of a later one while no
            weights were spoilt, counts more than what its gradients show.
        others: the steps of other optimizers after the same backward pass; None if there may be
            some that are not known.
        spoilt_before: whose weights were spoilt before the first bad step, in words: then nothing
            tells where it arose.
    """
    first = bad.first
    if bad.ending is None or first is None:
        return bad.ending
    if spoilt_before:
        return f"{bad.ending}; {spoilt_before}"
    for trace in traces:
        seen = trace.step == first.step or (first.skipped and trace.step > first.step)
        if seen and trace.where == "parameters":
            # Steps that were skipped have changed no weight, and none of them was good any more.
            return f"{bad.since}; {describe_weights(trace)} ({trace.certainty})"
        found = describe_trace(trace, what="it")
        if seen and found and not trace.damaged and trace.certainty != "unknown":
            return f"{bad.ending}; {found} ({trace.certainty})"
    origin = origin_of(first, lost=bad.guesses_lost, others=others or ())
    if origin.where == "forward":
        ranks = on_ranks(first)
        return f"{bad.ending}; {f'the loss{ranks}: ' if ranks else ''}{FORWARD_OR_LOSS}"
    if others is not None and origin.where in ("parameter", "ranks"):
        return f"{bad.ending}; likely it arose in backward at {origin.name} or just after it"
    return f"{bad.ending}; where it arose is not known"


def on_ranks(*steps: Step) -> str:
    """Whose losses were NaN or Inf at these steps: " on rank 1", or "" where that is not known."""
    return _listed(sorted({rank for step in steps for rank in step.bad_loss_ranks}))


def _listed(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f" on rank{'s' if len(ranks) > 1 else ''} {shown}"


def describe_skip(step: Step, *, most: int = 1, spoilt: str = "") -> str:
    """Says why a step was skipped, and names up to `most` culprits.

    Args:
        step: the step.
        most: so many culprits are named.
        spoilt: that weights were spoilt before it, as `SpoiltWeights.describe` has it: then nobody
            is named.

    Example:
        >>> describe_skip(step)  # doctest: +SKIP
        'Inf in blocks.11.attn.qkv.weight (+2 more); scale 2^16'
    """
    bad = spoilt or describe_bad(step, most=most)
    if bad and step.reason != "rejected":
        why = bad
    elif step.reason == "nonfinite":
        why = "non-finite gradients"
    elif step.reason == "rejected":
        why = "rejected by the clip policy"
        why += "" if step.norm is None else f", norm {step.norm:.4g}"
    else:
        why = step.reason or "no reason given"
    return why if step.scale in (None, 1.0) else f"{why}; scale {format_scale(step.scale)}"


def format_scale(scale: float | None) -> str:
    """Writes a power of two as one: ``2^16``; another number in a few digits.

    Example:
        >>> format_scale(65536.0), format_scale(1000.0), format_scale(None)
        ('2^16', '1000', '-')
    """
    if scale is None:
        return "-"
    fraction, exponent = math.frexp(scale)
    if fraction == 0.5 and exponent != 1:
        return f"2^{exponent - 1}"
    return f"{scale:.6g}"


def named_numbers(step: Step, info: OptimizerInfo | None) -> dict[str, float]:
    """Every number of a step by name: those of the step, then those of each tensor.

    A number that was not finite is left out. The names of a second optimizer begin with
    'optimizer1/', and so on. A norm of what one rank holds of the model is 'norm of one rank'.

    Args:
        step: the step.
        info: its optimizer, whose names the detail is in the order of; without it, no detail.
    """
    start = f"optimizer{step.optimizer}/" if step.optimizer else ""
    found = {
        f"{start}{name}{' of one rank' if name == 'norm' and step.of_rank else ''}": value
        for name in ("loss", "scale", "norm", "limit", "lr")
        if (value := getattr(step, name)) is not None
    }
    for name in ("clipped", "skipped", "nan", "inf"):
        found[f"{start}{name}"] = float(getattr(step, name))
    if step.detail is not None and info is not None:
        for measure, values in step.detail._asdict().items():
            for name, value in zip(info.names, values, strict=True):
                if value is not None:
                    found[f"{start}detail/{measure}/{name}"] = float(value)
    return found


def _kinds(found: Culprit | Step) -> str:
    kinds = [kind for kind in ("NaN", "Inf") if getattr(found, kind.lower())]
    return " and ".join(kinds) or "NaN or Inf"
