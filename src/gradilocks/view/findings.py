"""Findings about a run, and its verdict.

Rules are ordered in tiers. A problem in one tier ends the search: later rules would find its consequences. Thresholds
are chosen so that the many kinds of healthy runs in the tests cause no problem or warning.

Titles and texts are templates, filled with the numbers of the finding, so that they cannot contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradilocks.view.columns import Columns, Floats, Summary, columns, json_number, median, summarize, to_float
from gradilocks.view.runfile import Record, Run
from gradilocks.view.text import clean, count, number, percent, scale_text, some_of

__all__ = ["NONFINITE_RULES", "Finding", "Verdict", "find", "verdict"]

Rows = NDArray[np.int64]
Severity = Literal["problem", "warning", "note"]

SKIP_ADVICE = "`gradilocks run --guard skip` or a GradientControl skips such steps."
SCALE_SEARCH_STEPS = 50
"""Steps in which a dynamic scale may still be falling from its first value: from 2^16 to 1 takes 16 skips."""


@dataclass(frozen=True)
class Finding:
    """One observation about a run."""

    rule: str
    """The name of the rule, as listed in docs/report.md."""
    severity: Severity
    """problem: the training is broken; warning: check it; note: for information."""
    title: str
    text: str
    """The evidence, then the advice."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The numbers in title and text, by name."""
    step: int | None = None
    """The first affected step."""
    culprit: str | None = None
    """The origin of NaN or Inf, or the affected tensor."""
    optimizer: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**vars(self), "numbers": {name: json_number(value) for name, value in self.numbers.items()}}


@dataclass(frozen=True)
class Verdict:
    """One sentence about a run."""

    text: str
    severity: Literal["ok", "warning", "problem"]


class _TemplateNumber:
    """A number in a template: `{x}` formats it by its name, `{x:step}` adds the noun."""

    def __init__(self, name: str, value: float) -> None:
        self.name, self.value = name, value

    def __format__(self, noun: str) -> str:
        if noun:
            return count(int(self.value), noun)
        if self.name.endswith("share"):
            return percent(self.value)
        if self.name.endswith("scale"):
            return scale_text(self.value)
        return f"{self.value:,}" if isinstance(self.value, int) else number(self.value)


def _finding(
    severity: Severity,
    title: str,
    text: str = "",
    *,
    values: dict[str, Any],
    rule: str = "",
    culprit: str | None = None,
) -> Finding:
    """Fills the templates with the values; the value `step` is the first affected step."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    numbers = {name: value for name, value in plain.items() if not isinstance(value, str)}
    shown = {**plain, **{name: _TemplateNumber(name, value) for name, value in numbers.items()}}
    title, text = title.format_map(shown), text.format_map(shown)
    return Finding(rule, severity, title, text, numbers, step=numbers.get("step"), culprit=culprit)


@dataclass(frozen=True)
class Case:
    """The steps of one optimizer and their summary, the input of the rules."""

    run: Run
    steps: Columns
    summary: Summary
    is_one_of_several: bool
    """True if the run has several optimizers. One of them may raise the loss that another lowers, as in a GAN."""

    def step(self, row: int | np.int64) -> int:
        """The step number of a row."""
        return int(self.steps.step[row])

    @property
    def is_maximized(self) -> bool:
        """True if the optimizer maximizes the loss."""
        settings = self.steps.info.get("settings")
        return isinstance(settings, dict) and settings.get("maximize") is True

    @property
    def gains(self) -> Floats:
        """Improvement of the loss of each step over the first loss; negative if it is worse."""
        return (self.steps.loss - self.summary.first_loss) * (1 if self.is_maximized else -1)

    @property
    def has_improved(self) -> bool:
        """True if the loss of the last tenth is better than the first by a tenth, and not worse than the beginning."""
        gains = self.gains[self.steps.finite_loss]
        tenth = max(1, len(gains) // 10)
        gain = median(gains[-tenth:])
        return len(gains) >= 10 and gain > 0.1 * abs(self.summary.first_loss) and gain >= median(gains[:tenth])


@np.errstate(all="ignore")
def find(run: Run) -> list[Finding]:
    """All findings of a run, problems first."""
    all_steps = columns(run)
    found: list[Finding] = []
    for steps in all_steps:
        found += _search(Case(run, steps, summarize(run, steps), is_one_of_several=len(all_steps) > 1))
    found += _end_findings(run)
    order = {"problem": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def _search(case: Case) -> list[Finding]:
    found: list[Finding] = []
    for tier in TIERS:
        for rule in tier:
            finding = rule(case)
            if finding is not None:
                title = f"{case.steps.label}: {finding.title}" if case.is_one_of_several else finding.title
                found.append(replace(finding, rule=rule.__name__, title=title, optimizer=case.steps.optimizer))
        if any(finding.severity == "problem" for finding in found):
            break
    return found


def verdict(run: Run, findings: list[Finding] | None = None) -> Verdict:
    """One sentence about a run: its worst finding with the culprit, or that there is no problem."""
    findings = find(run) if findings is None else findings
    worst = findings[0] if findings else None
    if worst is not None and worst.severity != "note":
        # With several optimizers, the earliest culprit is the cause; an earlier skip of the same optimizer is not.
        others = [f for f in findings if f.optimizer != worst.optimizer or worst.rule == "diverged"]
        explained = [f for f in [worst, *others] if f.culprit and f.rule in NONFINITE_RULES and f.severity != "note"]
        is_explained = explained and worst.rule in (*NONFINITE_RULES, "diverged")
        where = f"; {min(explained, key=lambda finding: finding.step or 0).culprit}" if is_explained else ""
        return Verdict(f"{worst.severity.capitalize()}: {worst.title.rstrip('.')}{where}.", worst.severity)
    cases = [Case(run, steps, summarize(run, steps), is_one_of_several=False) for steps in columns(run)]
    steps = count(sum(case.summary.steps for case in cases), "step")
    if len(cases) > 1:
        return Verdict(f"No problem found in {len(cases)} optimizers, {steps} in total.", "ok")
    first, final = cases[0].summary.first_loss, cases[0].summary.final_loss
    if math.isnan(first):
        return Verdict(f"No problem found in {steps}.", "ok")
    is_better = cases[0].gains[cases[0].steps.finite_loss][-1] > 0
    word = "Healthy:" if is_better and cases[0].has_improved else "No problem found:"
    return Verdict(f"{word} {steps}, loss {number(first)} → {number(final)}.", "ok")


# --- tier 1: NaN, Inf, divergence -------------------------------------------------------------------------------------


def diverged(case: Case) -> Finding | None:
    """The loss rose a hundredfold together with the gradient norm or the updates, or threefold without recovering.

    In healthy runs with moving targets (reinforcement learning) the loss may rise a hundredfold, but the norm only
    tenfold. When a task becomes harder both may rise, but not the updates.
    """
    steps, rows, first, final = case.steps, case.steps.finite_loss, case.summary.first_loss, case.summary.final_loss
    if len(rows) < 3 or not steps.applied.any() or case.is_maximized:
        return None
    losses, norms = steps.loss[rows], steps.norm[rows]
    ends_nonfinite = _nonfinite_loss_since(steps) is not None
    is_replaced = _weights_are_replaced(steps)
    early, tenth = max(1, len(rows) // 20), max(1, len(rows) // 10)
    late_mean = losses[len(losses) // 2 :].mean()
    # Before NaN the loss grows at every step, so its last values are used.
    level = losses[-3:].max() if ends_nonfinite else np.median(losses[-tenth:])
    usual = max(abs(first), float(np.median(np.abs(losses[:early]))))
    if is_replaced:
        # Some losses of such a model are small, so their mean is used.
        usual, level = abs(first), max(level, late_mean)
    norm_grew = median(norms[-tenth:]) >= 30 * median(norms[:early]) > 0 and _largest_update(steps) >= 0.05
    is_problem = level >= (1e4 if case.is_one_of_several else 100) * usual > 0 and (
        norm_grew or is_replaced or ends_nonfinite
    )
    # With normalization layers nothing overflows when the weights are replaced, but nothing is learned.
    stays_high = is_replaced and not case.is_one_of_several and 0 < first < min(final, late_mean)
    if not is_problem and not (stays_high and losses.max() >= 3 * first):
        return None
    row = int(rows[_rise(losses, (10 if is_problem else 1.5) * usual)])
    cause, numbers = _cause_of_rise(case, row)
    return _finding(
        "problem" if is_problem else "warning",
        ("The loss diverged" if is_problem else "The loss rose and did not recover")
        + ": first {first_loss}, highest {highest_loss}, final {final_loss}"
        + (", mean of the second half {late_mean}" if final < first and not ends_nonfinite else "")
        + (", then NaN or Inf" if ends_nonfinite else ""),
        "The rise began at step {step}. "
        + cause
        + (" Continue from a checkpoint before step {step}." if row >= 10 else ""),
        values={
            "first_loss": first,
            "highest_loss": losses.max(),
            "final_loss": final,
            "late_mean": late_mean,
            "step": case.step(row),
            **numbers,
        },
    )


def _rise(losses: Floats, bound: float) -> int:
    """Index of the first loss above a bound after which most losses are above it; if there is none, of the first."""
    above = losses > bound
    share = np.cumsum(above[::-1])[::-1] / np.arange(len(above), 0, -1)
    candidates = np.flatnonzero(above & (share > 0.5))
    return int(candidates[0]) if len(candidates) else int(np.argmax(above))


def _cause_of_rise(case: Case, row: int) -> tuple[str, dict[str, float]]:
    """A template for the likely cause of a rise (learning rate or batch) and its numbers."""
    loss, lr = case.steps.loss, case.steps.lr
    old, new = median(lr[max(0, row - 30) : max(0, row - 10)]), float(np.max(lr[max(0, row - 3) : row + 1]))
    before = median(loss[max(0, row - 10) : row])
    numbers = {"old_lr": old, "new_lr": new, "loss_before": before, "loss_at_rise": loss[row]}
    rate = "" if math.isnan(new) else " ({new_lr})"
    if new >= 2 * old > 0:
        cause = "The learning rate had just risen from {old_lr} to {new_lr}: lower its peak or lengthen the warm-up."
    elif row >= 10 and loss[row] >= 100 * before > 0 and before <= 3 * case.summary.first_loss:
        cause = "The loss rose in one step, from about {loss_before} to {loss_at_rise}: check the batch of that step "
        cause += f"first, then the learning rate{rate}. ClipByNorm or SkipSpikes limits the effect of one batch."
    else:
        cause = f"Lower the learning rate{rate} to a tenth, lengthen the warm-up, or clip the norm."
    return cause, numbers


def _weights_are_replaced(steps: Columns) -> bool:
    """True if one step changed a third of the weights by more than their own norm.

    Biases are left out: they often begin at zero, where the ratio is Inf.
    """
    updates = steps.updates[:, _weights(steps)]
    return updates.size > 0 and bool(((updates >= 1.5) & np.isfinite(updates)).mean(axis=1).max() >= 1 / 3)


def _largest_update(steps: Columns) -> float:
    """The largest update of a step, as the median over its weights; Inf if none is recorded."""
    medians = [median(row) for row in steps.updates[1:, _weights(steps)]]
    return max((value for value in medians if not math.isnan(value)), default=math.inf)


def _dense_updates(steps: Columns) -> Floats:
    """The updates; NaN where most of the gradient is zero: they are estimated from 128 elements of each tensor."""
    return np.where(steps.zeros > 0.9, np.nan, steps.updates)


def _weights(steps: Columns) -> Rows:
    """Columns of the tensors that are not biases."""
    return np.array([i for i, name in enumerate(steps.names) if not name.endswith("bias")], dtype=np.int64)


def corrupt_weights(case: Case) -> Finding | None:
    """Steps were applied with NaN or Inf in the gradients."""
    steps = case.steps
    rows = np.flatnonzero(steps.nonfinite & steps.applied)
    if not len(rows):
        return None
    first = rows[0]
    before = steps.loss[:first][np.isfinite(steps.loss[:first])]
    numbers = {"step": case.step(first), "applied": len(rows), "rank": steps.rank[first]}
    numbers |= {"loss_before": before[-1]} if len(before) else {}
    rank = " on rank {rank}" if steps.rank[first] >= 0 else ""
    origin, culprit = _origin(case, rows)
    if (~steps.nonfinite & ~steps.has_nonfinite_loss)[first + 1 :].any():
        return _finding(
            "warning",
            "{applied:step} applied with NaN or Inf in the gradients" + rank + " (first: step {step})",
            "{origin}Loss and gradients were finite again later, but some weights may contain NaN or Inf: check them "
            "before you use a checkpoint. " + SKIP_ADVICE,
            values={"origin": origin, **numbers},
            culprit=culprit,
        )
    # With a finite loss the weights were still good when the step began.
    earlier = "" if np.isfinite(steps.loss[first]) else " (or earlier)"
    return _finding(
        "problem",
        "Weights contain NaN or Inf since step {step}" + earlier,
        f"Step {{step}} was applied with NaN or Inf in the gradients{rank}. {{origin}}"
        + ("The last finite loss before this step was {loss_before}. " if len(before) else "")
        + ("Continue from a checkpoint before step {step}. " if first else "")
        + SKIP_ADVICE,
        values={"origin": origin, **numbers},
        culprit=culprit,
    )


def nonfinite_loss(case: Case) -> Finding | None:
    """The loss was NaN or Inf, but no step was applied with NaN or Inf in the gradients."""
    steps = case.steps
    rows = np.flatnonzero(steps.has_nonfinite_loss)
    if not len(rows) or (steps.nonfinite & steps.applied).any():
        return None
    text = "{origin}NaN or Inf did not reach the weights, but buffers such as BatchNorm's may contain them. "
    text += "Check the batches, and the divisions and logarithms in the loss."
    since = _nonfinite_loss_since(steps)
    if since == 0 or (since is not None and len(steps) - since >= 3):
        origin, culprit = _origin(case, rows[rows >= since])
        title = (
            "The loss is NaN or Inf in every step" if since == 0 else "The loss has been NaN or Inf since step {step}"
        )
        return _finding("problem", title, text, values={"step": case.step(since), "origin": origin}, culprit=culprit)
    where = "step {step}" if len(rows) == 1 else "{nonfinite_losses:step} (first: step {step})"
    title = "The loss was NaN or Inf in " + where
    origin, culprit = _origin(case, rows)
    values = {"step": case.step(rows[0]), "nonfinite_losses": len(rows), "origin": origin}
    return _finding("warning", title, text, values=values, culprit=culprit)


def skipped_steps(case: Case) -> Finding | None:
    """Steps were skipped for NaN or Inf in the gradients while the loss was finite.

    With torch's default rule a dynamic scale causes about one skip in 2,000 steps.
    """
    steps = case.steps
    rows = np.flatnonzero(steps.skipped & ~steps.rejected & ~steps.has_nonfinite_loss)
    if not len(rows):
        return None
    late = int((rows >= SCALE_SEARCH_STEPS).sum())
    late_share = late / max(1, len(steps) - SCALE_SEARCH_STEPS) if late >= 3 else 0.0
    # A short growth_interval causes many skips, but each of them after the scale has grown.
    has_grown = bool((steps.scale[rows[1:]] > steps.scale[rows[:-1] + 1]).mean() > 0.5) if late >= 3 else False
    longest = max(len(part) for part in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1))
    scale = steps.scale[rows[-1]]
    # The scale is applied after the forward pass, so it cannot cause NaN or Inf there.
    has_scale = bool((steps.scale[rows] > 1).any()) and _culprit(case, rows).get("phase") != "forward"
    is_stuck = longest >= 20 and rows[-1] == len(steps) - 1
    is_all = len(rows) == len(steps) >= 3
    severity: Severity = "note"
    advice = "A dynamic scale skips a step now and then."
    if is_stuck or late_share >= 0.1:
        severity = "problem"
    elif (late_share >= 0.01 and not has_grown) or not has_scale or is_all:
        severity = "warning"
    if not has_scale:
        advice = "Check the inputs, and divisions, logarithms and square roots."
    elif (is_stuck or is_all) and scale <= 1:
        advice = (
            "Values overflow even at a scale of {last_scale}: check the inputs, lower the learning rate, or train in "
        )
        advice += "bfloat16."
    elif is_stuck or is_all:
        advice = "The scale was still {last_scale}: start from a smaller one."
    elif severity != "note":
        advice = "HeadroomScale avoids overflows; a longer growth_interval makes them rarer."
    origin, culprit = _origin(case, rows)
    return _finding(
        severity,
        "{skipped} of {steps:step} ({skipped_share}) skipped for NaN or Inf in the gradients"
        + (" while the loss was finite" if steps.has_nonfinite_loss.any() else ""),
        "First: step {step}; longest streak: {longest:step}. {origin}" + advice,
        values={
            "step": case.step(rows[0]),
            "skipped": len(rows),
            "steps": len(steps),
            "skipped_share": len(rows) / len(steps),
            "longest": longest,
            "last_scale": scale,
            "origin": origin,
        },
        culprit=culprit,
    )


NONFINITE_RULES = ("corrupt_weights", "nonfinite_loss", "skipped_steps")


def _nonfinite_loss_since(steps: Columns) -> int | None:
    """First row of the NaN or Inf losses at the end of a run; None if the last loss is finite."""
    with_loss, finite = np.flatnonzero(steps.has_loss), steps.finite_loss
    later = with_loss[with_loss > finite[-1]] if len(finite) else with_loss
    return int(later[0]) if len(later) else None


def _culprit(case: Case, rows: Rows) -> Record:
    """The culprit of the first of these steps with a record, from a rank that found it; empty if there is none."""
    by_step: dict[int, list[Record]] = {}
    for key in sorted(case.run.culprits):
        if key[1] == case.steps.optimizer:
            by_step.setdefault(key[0], []).append(case.run.culprits[key])
    records: list[Record] = next((by_step[step] for step in map(case.step, rows) if step in by_step), [{}])
    return min(records, key=lambda record: not record.get("known"))


def _origin(case: Case, rows: Rows) -> tuple[str, str | None]:
    """The origin of the NaN or Inf in these steps: a sentence, and the culprit where it is known."""
    if record := _culprit(case, rows):
        step, text = int(record["step"]), clean(record.get("text", "")).rstrip(".")
        sentence = f"{text[:1].upper()}{text[1:]}. " if step == case.step(rows[0]) else f"Step {step:,}: {text}. "
        return sentence, text if record.get("known") else None
    if case.run.header.get("source") == "control":
        return "`gradilocks run` finds the operation that produced the NaN or Inf. ", None
    return "", None


# --- tier 2: the optimizer changes nothing ----------------------------------------------------------------------------


def no_gradient(case: Case) -> Finding | None:
    """No parameter has a gradient, or all gradients are zero although the loss is not.

    A hinge or triplet loss and its gradients are zero once every example satisfies the margin.
    """
    steps = case.steps
    if len(steps) < 5:
        return None
    has_norm = (np.nan_to_num(steps.norm) != 0).any() or np.isfinite(steps.norms).any()
    is_detailed = len(steps.detail) > 0 or np.isnan(steps.norm).all()
    if not has_norm and is_detailed and not (steps.nonfinite | steps.skipped).any():
        return _finding(
            "warning" if case.is_one_of_several else "problem",
            "No parameter had a gradient in {steps:step}",
            "backward() was not called or did not reach these parameters. They may be detached or frozen, or belong "
            "to another model.",
            values={"step": case.step(0), "steps": len(steps)},
        )
    zero = steps.applied & (steps.norm == 0)
    unsolved = zero if zero.all() else zero & steps.has_loss & ~_is_solved(case)
    if unsolved.mean() < 0.5:
        return None
    return _finding(
        "problem",
        "All gradients are zero in {zero_share} of the steps"
        + (", but the loss is not" if (steps.loss[unsolved] != 0).all() and steps.has_loss.all() else ""),
        "First: step {step}. Units may be dead, or the loss is clamped or multiplied by zero. In float16 small "
        "gradients are rounded to zero: use loss scaling.",
        values={"step": case.step(np.flatnonzero(unsolved)[0]), "zero_share": unsolved.mean()},
    )


def _is_solved(case: Case) -> NDArray[np.bool_]:
    """True where the loss is far better than the first and close to the best: zero gradients are normal there."""
    gains = case.gains
    best = np.max(gains[case.steps.finite_loss], initial=0.0)
    return np.asarray(gains >= max(0.1 * abs(case.summary.first_loss), 0.9 * best))


def unchanged_weights(case: Case) -> Finding | None:
    """Steps with gradients are applied, but the weights do not change."""
    steps, rows = case.steps, case.steps.detail
    moves = (np.nan_to_num(steps.updates) != 0).any(axis=1)
    has_gradient = steps.applied & (steps.norm > 0) & ~_is_solved(case)
    measured = has_gradient[rows] & ~np.isnan(_dense_updates(steps)).all(axis=1)
    if measured.sum() >= 3 and not moves[measured].any():
        is_zero = bool((steps.lr == 0).any() and not (steps.lr != 0)[~np.isnan(steps.lr)].any())
        return _finding(
            "problem",
            "No step changes the weights" + (": the learning rate is {lr}" if is_zero else ""),
            "The update is exactly zero in all {measured:measured step} with gradients. "
            + (
                "Check the optimizer and the schedule."
                if is_zero
                else "It may be too small for bfloat16 or float16 weights and rounded away: gradilocks.optim with "
                "master_weights=True keeps float32 copies. Or the script restores the old weights."
            ),
            values={"measured": int(measured.sum()), "step": case.step(0), "lr": 0.0},
        )
    resting = np.flatnonzero((steps.lr == 0) & steps.applied)
    # The recorded rate is that of the first param group; the updates show whether others train.
    at_rest = np.isin(rows, resting) & measured
    if len(resting) < max(10, 0.1 * len(steps)) or at_rest.sum() < 3 or moves[at_rest].any():
        return None
    return _finding(
        "warning",
        "The learning rate was {lr} in {resting:step}, which changed no weight",
        "First: step {step}; last: step {last_step}. Check that the schedule lasts until training ends.",
        values={
            "lr": 0.0,
            "resting": len(resting),
            "step": case.step(resting[0]),
            "last_step": case.step(resting[-1]),
        },
    )


def clipped_before_unscale(case: Case) -> Finding | None:
    """Gradients were clipped before they were unscaled, though their norm was below the limit.

    The recorded limit is in units of unscaled gradients: `max_norm / scale`. A script that multiplies `max_norm` by the
    scale is correct, and its limit is not a thousandth of the norm.
    """
    steps = case.steps
    max_norm = steps.limit * steps.scale
    wrong = steps.clipped & (steps.scale > 1) & (steps.limit < 1e-3 * steps.norm) & (steps.norm < 0.99 * max_norm)
    rows = np.flatnonzero(wrong)
    if len(rows) < max(5, 0.9 * steps.clipped.sum()):
        return None
    return _finding(
        "problem",
        "Gradients are clipped before they are unscaled",
        "In {wrong} of {clipped:clipped step} the norm (median {norm}) was below the limit of {max_norm}, but it was "
        "compared with the limit while multiplied by the scale ({last_scale}). The steps are far too small: call "
        "`scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
        values={
            "wrong": len(rows),
            "clipped": int(steps.clipped.sum()),
            "norm": median(steps.norm[rows]),
            "max_norm": median(max_norm[rows]),
            "last_scale": steps.scale[rows[-1]],
            "step": case.step(rows[0]),
        },
    )


# --- tier 3: warnings of a run that trains ----------------------------------------------------------------------------


def missing_zero_grad(case: Case) -> Finding | None:
    """Backward added to the gradients of the previous step."""
    rows = np.flatnonzero(case.steps.leftover)
    if len(rows) < max(3, 0.9 * (len(case.steps) - 1)):
        return None
    return _finding(
        "warning",
        "Gradients are not cleared between steps",
        "In {leftover} of {steps:step} backward added to gradients of the step before (first: step {step}). Call "
        "`optimizer.zero_grad()` once per step.",
        values={"leftover": len(rows), "steps": len(case.steps), "step": case.step(rows[0])},
    )


def not_learning(case: Case) -> Finding | None:
    """The loss did not change beyond its noise, although a change by a tenth would have been visible.

    A warning only if the size of the updates explains it: the loss is also constant while a curriculum becomes harder,
    or when training continues from good weights.
    """
    steps = case.steps
    losses = steps.loss[steps.applied & np.isfinite(steps.loss)]
    if len(losses) < 100 or case.is_one_of_several or losses.min() <= 0 <= losses.max() or _is_warming_up(steps):
        return None
    x = np.arange(len(losses)) - (len(losses) - 1) / 2
    slope = np.dot(x, losses - losses.mean()) / np.dot(x, x)
    noise = np.sqrt(np.mean((losses - losses.mean() - slope * x) ** 2))
    moved, error = abs(slope) * len(losses), noise * len(losses) / np.sqrt(np.dot(x, x))
    tenths = np.array([part.mean() for part in np.array_split(losses, 10)])
    # By chance, the means of ten windows span 3.1 standard errors on average, and hardly ever 5.
    is_wavy = np.ptp(tenths) > 5 * noise / math.sqrt(len(losses) / 10)
    level = abs(np.median(losses))
    # A loss that fell in the first step only, and converged, is learning.
    has_jumped = abs(losses[0] - np.median(losses)) > 10 * np.median(np.abs(losses - np.median(losses)))
    # Weights with zero gradients do not change at any learning rate.
    updates = np.where(steps.norms > 0, _dense_updates(steps), np.nan)[:, _weights(steps)]
    update = median(updates) if len(updates) >= 3 else math.nan
    is_unclear = noise > 0.3 * level or moved + 3 * error > 0.1 * level
    is_constant = not (moved > 2 * error or is_wavy or is_unclear)
    # All steps together changed no weight visibly, so they have not changed the loss, however noisy it is.
    sizes = [float(part.mean()) for part in (col[np.isfinite(col)] for col in updates.T) if len(part) >= 3]
    is_at_rest = len(losses) * max(sizes, default=math.nan) < 1e-4 and moved <= 4 * error
    if has_jumped or not (is_constant or is_at_rest):
        return None
    rate = "learning rate" if np.isnan(steps.lr).all() else "learning rate ({typical_lr})"
    size = "A step changes a weight tensor by {update} of its norm (usual: about 0.001): the " + rate
    reason = ""
    norms = {median(steps.norms[:, i]): clean(steps.names[i]) for i in _weights(steps)}
    smallest, largest = min(norms, default=math.nan), max(norms, default=math.nan)
    if update < 1e-5 and 0 <= smallest < 1e-6 * largest:
        reason = "Gradients vanish: the typical norm is {smallest_norm} in {smallest} and {largest_norm} in {largest}. "
        reason += "Use residual connections, normalization, or another initialization or activation."
    elif update < 1e-5:
        reason = size + " is too small."
        if case.summary.clipped_share > 0.9:
            reason = size + " or the clip limit is too small, for example if gradients are clipped before unscaling."
    elif update > 0.1:
        reason = size + " is too high."
    return _finding(
        "warning" if reason else "note",
        f"The {'loss did not change beyond its noise' if is_constant else 'weights hardly changed'} in {{losses:step}}",
        "The mean loss was {first_tenth} in the first tenth of the steps and {last_tenth} in the last; its noise is "
        "{noise}. " + (reason or "Check that inputs match their targets, unless the weights were already trained."),
        values={
            "losses": len(losses),
            "first_tenth": tenths[0],
            "last_tenth": tenths[-1],
            "noise": noise,
            "update": update,
            "smallest_norm": smallest,
            "smallest": norms.get(smallest, ""),
            "largest_norm": largest,
            "largest": norms.get(largest, ""),
            "typical_lr": median(steps.lr),
        },
    )


def _is_warming_up(steps: Columns) -> bool:
    """True if the learning rate was highest at the end."""
    rates = steps.lr[~np.isnan(steps.lr)]
    return len(rates) > 0 and rates[-1] > rates[0] and bool(rates[-1] >= 0.99 * rates.max())


def zero_gradients(case: Case) -> Finding | None:
    """Most gradient elements of some tensors are exactly zero: dead units, or underflow.

    This is normal for embeddings, experts and sparse models, so it is a warning only if half of the tensors are
    affected, with all elements if they are one or two, and the loss did not fall.
    """
    steps = case.steps
    rows = steps.norm[steps.detail] > 0
    norms, zeros = steps.norms[rows], steps.zeros[rows]
    weights = [i for i in _weights(steps) if not np.isnan(norms[:, i]).all()]
    if len(norms) < 3:
        return None
    typical = {i: median(np.where(norms[:, i] == 0, 1.0, zeros[:, i])) for i in weights}
    names = {i: steps.names[i] for i in weights if typical[i] >= 0.9}
    if not names:
        return None
    worst = max(names, key=lambda i: typical[i])
    is_whole = len(names) > 2 or min(typical[i] for i in names) == 1
    is_alarm = 2 * len(names) >= len(weights) and is_whole and len(steps.finite_loss) >= 10 and not case.has_improved
    return _finding(
        "warning" if is_alarm else "note",
        "The gradients of {tensors} of {weights:weight tensor} are mostly zero",
        "{names}: in a typical sampled step {zero_share} of the elements of {worst} are zero. "
        + (
            "In float16 small gradients are rounded to zero: use loss scaling, or a larger scale. Otherwise units may "
            "be dead, often from a learning rate that is too high."
            if is_alarm
            else "This is normal for embeddings, experts and other sparsely used parameters. Otherwise units may be "
            "dead, or gradients too small for float16."
        ),
        values={
            "tensors": len(names),
            "weights": len(weights),
            "zero_share": typical[worst],
            "names": some_of(list(names.values())),
            "worst": clean(names[worst]),
        },
        culprit=names[worst],
    )


def spikes(case: Case) -> Finding | None:
    """The norm was ten times its usual value or more."""
    steps = case.steps
    ratios = _spikes(steps.norm)
    if not ratios:
        return None
    worst = max(ratios, key=lambda row: ratios[row])
    guarded = sum(bool(steps.clipped[row] or steps.skipped[row]) for row in ratios)
    return _finding(
        "note",
        "{spikes:spike} in the gradient norm",
        "Most pronounced in step {step}: {norm}, {ratio} times the median before it{tensor}. "
        "Clipped or skipped: {guarded} of {spikes}.",
        values={
            "spikes": len(ratios),
            "guarded": guarded,
            "step": case.step(worst),
            "norm": steps.norm[worst],
            "ratio": ratios[worst],
            "tensor": _largest_tensor(steps, worst),
        },
    )


def _spikes(norm: Floats, *, window: int = 100, min_distance: int = 20) -> dict[int, float]:
    """Rows of spikes, at most one in `min_distance` steps, with their ratios to the median of the preceding window."""
    found: dict[int, float] = {}
    last = -min_distance
    smallest = norm[np.isfinite(norm) & (norm > 0)].min(initial=np.inf)
    for row in map(int, np.flatnonzero(np.isfinite(norm) & (norm > 10 * smallest))):
        recent = norm[max(0, row - window) : row]
        recent = recent[np.isfinite(recent) & (recent > 0)]
        if len(recent) < 30:
            continue
        usual = float(np.median(recent))
        # With one sample per batch, norms vary a hundredfold without spikes.
        spread = float(np.median(np.abs(np.log(recent / usual))))
        if norm[row] <= usual * max(10.0, math.exp(min(6 * spread, 700.0))):
            continue
        if row - last < min_distance and norm[row] > norm[last]:
            del found[last]
        if row - last >= min_distance or norm[row] > norm[last]:
            found[row], last = float(norm[row]) / usual, row
    return found


def _largest_tensor(steps: Columns, row: int) -> str:
    """The tensor with the largest gradient in a step, as the end of a sentence; "" if it is not recorded."""
    where = np.flatnonzero(steps.detail == row)
    if not len(where) or np.isnan(steps.norms[where[0]]).all():
        return ""
    return f", largest in {clean(steps.names[int(np.nanargmax(steps.norms[where[0]]))])}"


def rejected_steps(case: Case) -> Finding | None:
    """The clip policy rejected steps."""
    rows = np.flatnonzero(case.steps.rejected)
    if not len(rows):
        return None
    is_alarm = len(rows) >= max(3, 0.05 * len(case.steps))
    return _finding(
        "warning" if is_alarm else "note",
        "The clip policy rejected {rejected} of {steps:step} ({rejected_share})",
        "First: step {step}."
        + (" These are too many for outliers: raise the threshold, or clip instead of rejecting." if is_alarm else ""),
        values={
            "rejected": len(rows),
            "steps": len(case.steps),
            "rejected_share": len(rows) / len(case.steps),
            "step": case.step(rows[0]),
        },
    )


def unused_parameters(case: Case) -> Finding | None:
    """Some parameters of the optimizer had no gradient in the steps with per-tensor numbers."""
    steps = case.steps
    unused = [steps.names[i] for i in np.flatnonzero(np.isnan(steps.norms).all(axis=0))]
    if len(steps.detail) < 3 or not 0 < len(unused) < len(steps.names):
        return None
    text = "{names}: frozen, or not used in the loss of these steps."
    title = "{parameters:parameter} had no gradient in {sampled:sampled step}"
    values = {"parameters": len(unused), "sampled": len(steps.detail), "names": some_of(unused)}
    return _finding("note", title, text, values=values, culprit=unused[0])


Rule = Callable[[Case], Finding | None]

TIERS: tuple[tuple[Rule, ...], ...] = (
    (diverged, corrupt_weights, nonfinite_loss, skipped_steps),
    (no_gradient, unchanged_weights, clipped_before_unscale),
    (missing_zero_grad, not_learning, zero_gradients, spikes, rejected_steps),
    (unused_parameters,),
)


# --- end of the run ---------------------------------------------------------------------------------------------------

STOP_STATUSES = ("SIGINT", "SIGTERM", "SIGHUP", "KeyboardInterrupt")
"""Statuses of a run that was interrupted from outside."""


def _end_findings(run: Run) -> list[Finding]:
    """Findings about the end of the run and about its file."""
    found: list[Finding] = []
    steps = max((len(steps) for steps in run.steps.values()), default=0)
    if not steps:
        text = "Training has not begun, or no recorded optimizer has stepped."
        found.append(Finding("no_steps", "warning", "No optimizer step was recorded", text))
    end = run.end or {}
    status, code = clean(end.get("status", "finished")).rstrip("."), to_float(end.get("exit_code", 0))
    values = {"steps": steps, "status": status, "code": code, "lines": run.skipped_lines}
    if run.end is None:
        text = "It was killed or is still running. The report shows the lines written so far."
        found.append(Finding("not_closed", "note", "The run is not closed", text))
    elif status.startswith(STOP_STATUSES):
        found.append(_finding("note", "The run was stopped after {steps:step} ({status})", values=values, rule="ended"))
    elif code and status in ("finished", f"SystemExit: {code:g}"):
        title = "The script exited with status {code} after {steps:step}"
        found.append(_finding("warning", title, values=values, rule="ended"))
    elif status.startswith("recording stopped"):
        title = "Only the first {steps:step} are recorded ({status})"
        found.append(_finding("warning", title, values=values, rule="ended"))
    elif status != "finished":
        found.append(_finding("problem", "The script failed after {steps:step}: {status}", values=values, rule="ended"))
    if run.skipped_lines:
        title = "{lines:line} of the file could not be read"
        found.append(_finding("note", title, values=values, rule="unreadable_lines"))
    return found
