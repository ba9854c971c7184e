"""Findings about single tensors: without a gradient, vanishing, dominating, hardly moving."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gradilocks.report.curve_findings import converged
from gradilocks.report.formatting import clean, count, listed, number, percent, sentence_case
from gradilocks.report.health import Finding, Severity
from gradilocks.report.tracks import Tensor, Track, nanmedian, quantile

# A look at fewer steps than this may have met an odd one.
ENOUGH = 3
# Nine values in ten exactly zero. Dead ReLU units leave a third or half in healthy networks.
ZEROS = 0.9
# Rows of an embedding that no token asked for have no gradient: zeros are its nature.
SPARSE_BY_NATURE = ("emb", "wte", "wpe", "lookup", "expert")
# Of its tensors, a model asks for one or two by rows; more of them mostly zero are another matter.
EMBEDDINGS = 2
# A table of rows is among the largest tensors of a model: a quarter of the largest, or more.
LARGE_TABLE = 4
# A hundred thousandth of what the tensors with large gradients have, value by value: those of the
# tenth that is largest, for in a sick deep net the middle tensor has vanished too. Depth explains a
# hundredth.
VANISHING = 1e-5
LARGE = 0.9
# Below this many tensors one of them always has most of the norm.
SEVERAL = 8
# With nine tenths of the squared norm, one tensor alone decides whether everything is clipped.
DOMINATING = 0.9
# From a tenth of the steps clipped, that matters for the other tensors.
OFTEN = 0.1
# What the table of tokens is called, at either end of a language model: it often has most of the
# norm, always where both ends are one tensor.
TOKENS = ("emb", "wte", "lm_head", "tok", "shared.weight")
# About 1e-3 a step is usual. Small models with large learning rates go to a few 1e-2 in health.
MOVING_MUCH = 0.1
# A loss that fell to half of where it began: then such steps do no harm that shows.
LEARNED = 0.5
# A warm-up begins at a rate of 0 and a schedule ends there, for a step or two.
FEWEST_RESTING = 10
RESTING = 0.1
# At 1e-7 of itself a step, float32 rounds the change of a weight away.
MOVING_LITTLE = 1e-7


def gradientless(track: Track) -> Iterator[Finding]:
    """Names the parameters that no backward pass reached; an optimizer that has no others."""
    # A part of a model on several ranks may have none of its gradients here.
    alone = not any(step.of_rank for step in track.steps)
    counted = len(track.steps) >= ENOUGH and alone
    if counted and all(math.isnan(v) for v in track.norm) and not (track.nonfinite or track.lost):
        held = count(len(track.optimizer.names), "parameter")
        title = "No parameter of the optimizer ever had a gradient"
        told = (
            f"In {count(len(track.steps), 'step')} none of its {held} had one, so no step changed "
            "anything. "
        )
        if all(step.loss is None and step.loss_nonfinite is False for step in track.steps):
            title += ", and no backward was seen"
            told += "Nothing was seen to call backward: call `loss.backward()` before each step."
        else:
            told += (
                "Backward ran, and did not reach them: what they put out is detached or computed "
                "under `no_grad`, they are frozen, or the optimizer was made for another model, or "
                "before the model was built anew, copied or wrapped. Make it from the parameters "
                "of the model that the loss comes from."
            )
        evidence = {"parameters": len(track.optimizer.names), "steps": len(track.steps)}
        # Beside other optimizers it may wait for its turn.
        severity: Severity = "warning" if track.several else "problem"
        yield Finding("never-a-gradient", severity, title, told, evidence, step=1)
        return
    if len(track.detailed) < ENOUGH:
        return
    never = [
        tensor.name
        for row, tensor in enumerate(track.tensors)
        if math.isnan(tensor.usual_norm) and _never_measured(track, row)
    ]
    if never:
        title = f"{count(len(never), 'parameter')} never had a gradient"
        told = (
            f"The loss does not depend on {listed(never)}: unused, or frozen without leaving the "
            "optimizer."
        )
        evidence = {"parameters": len(never)}
        yield Finding("without-gradient", "note", title, told, evidence, culprit=never[0])


def vanishing(track: Track) -> Iterator[Finding]:
    """Names the layers whose gradients are zero, mostly zero, or next to nothing."""
    if len(track.detailed) < ENOUGH:
        return
    seen = [tensor for tensor in track.tensors if not math.isnan(tensor.usual_norm)]
    zero = [
        tensor
        for tensor in seen
        if tensor.usual_norm == 0
        or (tensor.usual_zeros >= ZEROS and not _is_sparse_by_nature(tensor))
    ]
    # What a bias adds may cancel: the last one of a critic whose losses are subtracted has none.
    if any(not tensor.name.endswith("bias") for tensor in zero):
        worst = max(zero, key=lambda tensor: tensor.usual_zeros)
        told = (
            f"{_names(zero)}: usually {percent(worst.usual_zeros)} of the values of "
            f"{clean(worst.name)} are exactly zero. "
        )
        scale = "a larger loss scale" if track.scaled else "a loss scale"
        cause = (
            f"either the format rounds them to zero, which {scale} cures, or the units are dead."
        )
        if not track.may_underflow:
            cause = "the units are dead, or nothing that reaches the loss comes from them."
        sparse = len(zero) <= EMBEDDINGS and all(_like_an_embedding(t, seen) for t in zero)
        if sparse:
            told += "That is usual in an embedding, where rows that no input asked for have none. "
        told += f"In another layer {cause}" if sparse else sentence_case(cause)
        told += "" if sparse else _died(track, zero)
        yield Finding(
            "vanishing-zeros",
            "note" if sparse else "warning",
            f"The gradients of {count(len(zero), 'tensor')} are mostly zero",
            told,
            {"tensors": len(zero), "zeros": worst.usual_zeros},
            culprit=worst.name,
        )
    values = sorted(map(_typical_value, seen))
    usual = quantile(values, LARGE) if values else 0.0
    faint = [
        tensor
        for tensor in seen
        # What a bias adds may be taken out again (before a normalization, a key's in attention):
        # its gradient is rounding noise in every healthy run.
        if 0 < _typical_value(tensor) < VANISHING * usual and not tensor.name.endswith("bias")
    ]
    if faint:
        faintest = min(faint, key=_typical_value)
        part = _typical_value(faintest) / usual
        title = f"The gradients of {count(len(faint), 'tensor')} vanish"
        told = (
            f"{_names(faint)}: a value of {clean(faintest.name)} is usually {number(part)} times "
            "one of a tensor with large gradients. These layers learn next to nothing with SGD; "
            "normalization, residual connections or another initialization help."
        )
        evidence = {"tensors": len(faint), "part of the usual": part}
        yield Finding("vanishing-norm", "warning", title, told, evidence, culprit=faintest.name)


def _died(track: Track, zero: Sequence[Tensor]) -> str:
    """Says so of tensors that had gradients at first, in a run that has learned nothing since."""
    alive = [t for t in zero if t.norm[0] > 0 and not t.zeros[0] >= ZEROS]
    first, last, _ = track.loss_ends
    if 2 * len(alive) <= len(zero) or not last >= first:
        return ""
    places = [
        next((i for i, zeros in enumerate(t.zeros) if zeros >= ZEROS), len(t.zeros) - 1)
        for t in alive
    ]
    step = track.steps[track.detailed[max(places)]].step
    rates = [track.lr[i] for i in range(track.detailed[max(places)] + 1)]
    highest = max((rate for rate in rates if not math.isnan(rate)), default=math.nan)
    used = "" if math.isnan(highest) else f" ({number(highest)})"
    return (
        f" At first they had gradients, up to about step {step:,}: likely steps that were too "
        f"large have killed the units. Lower the learning rate{used}, to a tenth."
    )


def dominating(track: Track) -> Iterator[Finding]:
    """Names the tensor that has nearly all of the norm, if one has, and clipping follows it alone.

    An embedding that is also the head (GPT-2, nanoGPT) has it in every healthy run: it gets the
    gradients of all tokens at both ends of the model.
    """
    if len(track.detailed) < ENOUGH or len(track.tensors) < SEVERAL:
        return
    totals = [
        math.fsum(value * value for value in row if not math.isnan(value))
        for row in zip(*(tensor.norm for tensor in track.tensors), strict=True)
    ]
    taken = max(1, len(track.steps) - len(track.skipped))
    clipped = sum(track.clipped) / taken
    for tensor in track.tensors:
        pairs = zip(tensor.norm, totals, strict=True)
        share = nanmedian(value * value / total for value, total in pairs if total > 0)
        if share >= DOMINATING and not _is_table_of_tokens(tensor):
            title = f"{clean(tensor.name)} dominates the gradients"
            told = (
                f"It usually has {percent(share)} of the squared norm of all "
                f"{len(track.tensors):,} tensors"
            )
            told += (
                f", and {percent(clipped)} of the steps were clipped: it alone decides how far the "
                "others move. ClipPerTensor or AdaptiveClip bound each tensor by itself."
                if clipped >= OFTEN
                else ". A limit on the norm of all would follow it alone."
            )
            matters: Severity = "warning" if clipped >= OFTEN else "note"
            evidence = {"share": share, "clipped": clipped}
            yield Finding("dominating", matters, title, told, evidence, culprit=tensor.name)


def moving(track: Track) -> Iterator[Finding]:
    """Names the layers that a step changes far more, or far less, than is usual."""
    if len(track.detailed) < ENOUGH:
        return
    # Biases begin at zero, and a part of nothing is large.
    weights = [
        tensor
        for tensor in track.tensors
        if not tensor.name.endswith("bias") and not math.isnan(tensor.usual_update)
    ]
    much = [tensor for tensor in weights if tensor.usual_update > MOVING_MUCH]
    # A gradient of zero moves nothing, and has been told of.
    little = [t for t in weights if t.usual_update < MOVING_LITTLE and t.usual_norm > 0]
    if much:
        most = max(much, key=lambda tensor: tensor.usual_update)
        title = f"A step changes {count(len(much), 'tensor')} by more than {percent(MOVING_MUCH)}"
        first, last, _ = track.loss_ends
        learns = 0 <= last < LEARNED * first
        told = f"{_change(much, most)} " + (
            "The loss fell all the same: small models bear that."
            if learns
            else "Lower the learning rate, or check the initialization of these layers."
        )
        evidence = {"tensors": len(much), "largest": most.usual_update}
        severe: Severity = "note" if learns else "warning"
        yield Finding("update-large", severe, title, told, evidence, culprit=most.name)
    held = [t for t in little if t.usual_update == 0]
    if held and len(held) == len([t for t in weights if t.usual_norm > 0]):
        yield _nothing_moves(track)
    elif little:
        least = min(little, key=lambda tensor: tensor.usual_update)
        done = converged(track)
        yield Finding(
            "update-small",
            "note" if done else "warning",
            f"A step hardly changes {count(len(little), 'tensor')}",
            f"{_change(little, least)} "
            + (
                "Loss and norm have fallen to next to nothing, so there is little left to change."
                if done
                else "The learning rate is too small for them, or the weights are too large."
            ),
            {"tensors": len(little), "smallest": least.usual_update},
            culprit=least.name,
        )


def resting(track: Track) -> Iterator[Finding]:
    """Says so if the learning rate was 0 for a good part of a run that else had one."""
    rests = [i for i, step in enumerate(track.steps) if step.lr == 0 and not step.skipped]
    # The rate is that of the first group: others may have trained.
    there = {*rests}
    seen = [row for row, place in enumerate(track.detailed) if place in there]
    moved = any(tensor.update[row] > 0 for tensor in track.tensors for row in seen)
    enough = len(rests) >= max(FEWEST_RESTING, RESTING * len(track.steps)) and len(seen) >= ENOUGH
    if not enough or moved or not any(rate > 0 for rate in track.lr):
        return
    first, last = (track.steps[i].step for i in (rests[0], rests[-1]))
    title = f"{count(len(rests), 'step')} changed no weight: the learning rate was 0"
    told = (
        f"The first was step {first:,}, the last step {last:,}; at others it was up to "
        f"{number(max(rate for rate in track.lr if not math.isnan(rate)))}. Look at the schedule: "
        "it is over before the run is, or multiplies by 0."
    )
    evidence = {"resting steps": len(rests), "share": len(rests) / len(track.steps)}
    yield Finding("rate-of-zero", "warning", title, told, evidence, step=first)


def _nothing_moves(track: Track) -> Finding:
    rates = {step.lr for step in track.steps if step.lr is not None}
    narrow = sorted({dtype for dtype in track.optimizer.dtypes if dtype in ("bfloat16", "float16")})
    title = "No step changes a weight"
    told = "There are gradients, the steps were taken, and the weights stay as they are. "
    if rates == {0} or rates == {0.0}:
        title += ": the learning rate is 0"
        told += "Set it, or look at the schedule that does."
    elif narrow:
        told += (
            f"The weights are held in {narrow[0]}, which rounds such small changes away: keep "
            "float32 copies (gradilocks.optim does), or raise the learning rate."
        )
        if track.optimizer.kind == "SGD":
            told += (
                " If they lie on a CPU and this SGD is fused, it is torch that leaves them as they "
                "are (pytorch issue 191763): fused=False moves them, and so does gradilocks.optim."
            )
    else:
        told += (
            "The learning rate is so small that the change is rounded away, or something writes "
            "the old weights back."
        )
    return Finding("nothing-moves", "problem", title, told, step=1)


def _names(tensors: Sequence[Tensor]) -> str:
    return listed([tensor.name for tensor in tensors])


def _change(tensors: Sequence[Tensor], one: Tensor) -> str:
    those = f"{_names(tensors)}: " if len(tensors) > 1 else ""
    return (
        f"{those}{clean(one.name)} usually changes by {number(one.usual_update)} of itself a step; "
        "about 0.001 is usual."
    )


def _never_measured(track: Track, row: int) -> bool:
    """Whether not even NaN was counted in a tensor's gradient: then there was none."""
    details = [track.steps[place].detail for place in track.detailed]
    return all(detail.nan[row] is None for detail in details if detail is not None)


def _typical_value(tensor: Tensor) -> float:
    return tensor.usual_norm / math.sqrt(max(1, tensor.size))


def _like_an_embedding(tensor: Tensor, seen: Sequence[Tensor]) -> bool:
    """Whether it may be a table that is asked for by rows: large, and it learns."""
    largest = max(other.size for other in seen)
    return (
        tensor.size * LARGE_TABLE >= largest
        and tensor.usual_norm > 0
        and not tensor.usual_update < MOVING_LITTLE
        and not tensor.name.endswith("bias")
    )


def _is_table_of_tokens(tensor: Tensor) -> bool:
    return any(part in tensor.name.lower() for part in TOKENS)


def _is_sparse_by_nature(tensor: Tensor) -> bool:
    return any(part in tensor.name.lower() for part in SPARSE_BY_NATURE)
