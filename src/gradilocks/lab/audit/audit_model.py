"""``gradilocks.audit``: a model, its loss and some batches enter, an Audit leaves.

Nothing is trained: the model leaves as it was, with its gradients, buffers, modes and hooks, and
so do the random generators.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.checks import check_scalar_loss
from gradilocks.eager import UNCOMPILED
from gradilocks.errors import NoGradients
from gradilocks.lab.audit.judging import formats_named
from gradilocks.lab.audit.module_hooks import Listener, gather
from gradilocks.lab.audit.result import Audit
from gradilocks.lab.unchanged import unchanged
from gradilocks.observe.session import check_target
from gradilocks.record import Recorder

__all__ = ["FORMATS", "audit"]

FORMATS = ("fp16", "bf16", "fp8 e5m2", "fp8 e4m3")
"""Those that an audit looks at unless others are asked for."""


def audit(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    formats: Iterable[Any] = FORMATS,
    record: str | os.PathLike[str] | Recorder | None = None,
) -> Audit:
    """Says what each number format would lose of a model's gradients, and what to train with.

    For every batch `loss_fn(model, batch)` is run backward, in its own precision, and the gradients
    of parameters and of modules' outputs are counted by their exponent, on their device. Nothing is
    trained: parameters, gradients, buffers, modes, hooks and random generators are left as they
    were.

    Args:
        model: the model, in the mode in which it is trained.
        loss_fn: takes the model and a batch, returns the loss as a scalar tensor, not scaled. A
            loss that is divided by a number of micro-batches in training is to be so here.
        batches: what `loss_fn` takes. Ten or so of real data are enough.
        steps: at most so many batches; None for all.
        formats: names of `gradilocks.lab.formats.FORMATS`, or torch dtypes.
        record: a run file, made or gone on with, or the Recorder of one that is open: the audit
            becomes a line of it, which `gradilocks report` shows.

    Returns:
        The Audit: `print` it, or ask for its `recommendation`, `shares`, `table` and picture.

    Raises:
        NoGradients: the loss reaches none of the model's parameters.
        GradilocksError: `loss_fn` has changed the parameters in a way that autograd notices; a
            change through `.data` is not noticed, and stays.
        BadRunFile: `record` names something that is no run file, or a place that cannot be written.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> batches = [torch.full((8, 4), 1e-4)]
        >>> found = gradilocks.audit(model, lambda model, x: model(x).mean(), batches)
        >>> found.recommendation.format
        'fp16'
    """
    _check_model(model)
    chosen = formats_named(formats)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise TypeError(f"steps must be an int or None, got {type(steps).__name__}.")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, or None for all batches, got {steps}.")
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of the model and a batch that returns the loss, got "
            f"{type(loss_fn).__name__}."
        )
    _check_record(record)
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be an iterable of batches, such as a list or a DataLoader, got "
            f"{type(batches).__name__}. For one batch write [batch]."
        )
    listener = Listener()
    done, reached = 0, False
    # Compiled code would run past the hooks.
    with unchanged([model], doing="audited"), UNCOMPILED, torch.enable_grad():
        try:
            listener.follow(model.modules())
            for batch in islice(batches, steps):
                listener.hook_parameters()
                loss = loss_fn(model, batch)
                check_scalar_loss(loss)
                listener.count_losses(loss)
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
                reached = reached or any(p.grad is not None for p in model.parameters())
                model.zero_grad(set_to_none=True)
                done += 1
        finally:
            listener.remove()
    if not done:
        raise ValueError("batches must hold at least one batch, got none.")
    if not reached:
        raise NoGradients(
            "the loss reaches no parameter of the model, so there are no gradients to audit. Does "
            "loss_fn use the model that it is given?"
        )
    counted = gather(listener, [model], reachable=True)
    found = counted.judged(steps=done, formats=chosen)
    if isinstance(record, Recorder):
        record.audit(found.to_plain())
    elif record is not None:
        with Recorder(record, exists="append") as recorder:
            recorder.audit(found.to_plain())
    return found


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    params = list(model.named_parameters())
    if not params:
        raise ValueError(f"model must have parameters, got {type(model).__name__} without any.")
    for name, param in params:
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise ValueError(
                f"{name} is lazy and has no values yet. Run one batch through the model first."
            )
        if param.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values. Give the model real storage "
                "first, for example model.to_empty(device='cpu')."
            )
    if not any(param.requires_grad for _, param in params):
        raise ValueError(
            f"none of the {len(params)} parameters of the model requires grad, so there are no "
            "gradients. Call model.requires_grad_() first."
        )


def _check_record(record: object) -> None:
    kinds = (str, os.PathLike, Recorder)
    if record is not None and not isinstance(record, kinds):
        raise TypeError(
            "record must be a path such as 'runs/a.jsonl', a gradilocks.Recorder or None, got "
            f"{type(record).__name__}."
        )
    if isinstance(record, (str, os.PathLike)):  # Now, and not after all batches.
        path = Path(record)
        check_target(path, path, "append", ways="Choose another name.")
