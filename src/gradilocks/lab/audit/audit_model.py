"""``gradilocks.audit``: a model, its loss and some batches enter, an Audit leaves.

Nothing is trained: the model leaves as it was, with its gradients, buffers, modes and hooks, and
so do the random generators.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks._torch import buffers_of, post_accumulate_hooks, set_buffer, version
from gradilocks.checks import check_scalar_loss
from gradilocks.eager import UNCOMPILED
from gradilocks.errors import GradilocksError, NoGradients
from gradilocks.lab.audit.judging import formats_named
from gradilocks.lab.audit.module_hooks import Listener, gather
from gradilocks.lab.audit.result import Audit
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
    with _unchanged(model), UNCOMPILED, torch.enable_grad():
        try:
            listener.follow(model.modules())
            for batch in islice(batches, steps):
                listener.hook_parameters()
                loss = loss_fn(model, batch)
                check_scalar_loss(loss)
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


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, gradients are None, and hooks that would step an optimizer are out of the way.

    Raises:
        GradilocksError: a parameter was changed inside, which is beyond repair.
    """
    restore_generators = _generators()
    training = [(module, module.training) for module in model.modules()]
    # BatchNorm's statistics and the like, by object and by value.
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
    ]
    gradients = [(param, param.grad) for param in model.parameters()]
    # An optimizer that steps inside backward does so by a hook after a gradient is added up.
    late_hooks = [post_accumulate_hooks(param) for param in model.parameters()]
    held = [dict(hooks) for hooks in late_hooks]
    before = {name: _version_of(param) for name, param in model.named_parameters()}
    try:
        for param, _ in gradients:
            param.grad = None
        for hooks in late_hooks:
            hooks.clear()
        yield
        after = {name: _version_of(param) for name, param in model.named_parameters()}
    finally:
        for hooks, were in zip(late_hooks, held, strict=True):
            hooks.update(were)
        for param, gradient in gradients:
            param.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                set_buffer(module, name, buffer)
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for module, was in training:
            module.training = was
        restore_generators()
    for name, counted in after.items():
        if before.get(name) != counted:
            raise GradilocksError(
                f"{name} was changed while the model was audited. loss_fn must return the loss and "
                "leave the optimizer alone: nothing is trained here."
            )


def _version_of(param: nn.Parameter) -> int:
    """torch's count of the writes into a tensor; -1 for an inference tensor, which has none."""
    return -1 if param.is_inference() else version(param)


def _generators() -> Callable[[], None]:
    """Notes those that torch, Python and NumPy draw from when nobody names one; puts them back."""
    cpu = torch.get_rng_state()
    on_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if on_gpus else None
    python = random.getstate()
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    drawn = numpy.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(drawn)

    return restore
