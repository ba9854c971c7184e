"""A script's optimizers enter; steps with NaN or Inf leave no trace: `gradilocks run --guard`.

An optimizer that is called by itself takes whatever gradients it finds, and one that a scaler calls
whatever became of them after the scaler has looked. Here its own step is left out if they are not
finite: parameters and state stay bit for bit as they were, whichever optimizer it is. Where torch's
fused optimizers can leave it out on their device, they do; else the device is waited for. A closure
is evaluated by the optimizer as ever; an evaluation with NaN or Inf undoes the step.

What cannot be held back is said: steps inside compiled code or a CUDA graph, and those of a model
that is spread over ranks, which would have to decide together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import AMP_FLAG, unhooked
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.observe.fastai_hooks import told_step
from gradilocks.observe.gradient_reader import WatchedGradients, bad_elements
from gradilocks.observe.patches import Patches
from gradilocks.observe.script_models import are_whole, owners_of
from gradilocks.ranks.layout import has_other_ranks
from gradilocks.step.closure import BeforeStep
from gradilocks.step.events import PerDriver, Step, StepListener
from gradilocks.step.own_step import own_step, register_guard
from gradilocks.step.update import handing_over, must_skip_on_host, takes_decision
from gradilocks.values import moved

__all__ = ["HeldSteps"]

# They cannot ask each other: a collective of ours would hang where one of them does not step.
_SPREAD = (
    "--guard: the model is spread over ranks, and each of them holds back what is NaN or Inf in "
    "its own shards: one may skip a step that others take. A GradientControl decides for all"
)


class HeldSteps(StepListener):
    """Holds bad steps back.

    Args:
        bad: called with a step that is known to be bad, while the parameters are those that its
            gradients were made with; may raise, and is then called at every later step too.
        waits: whether every step is waited for, also where a device can leave it out by itself.
        warn: told what cannot be held back, once of each kind.
    """

    def __init__(
        self, bad: Callable[[Step], None], *, waits: bool, warn: Callable[[str], None]
    ) -> None:
        self._bad, self._waits, self._warn = bad, waits, warn
        self._patches = Patches()
        self._guarded: set[Any] = set()
        self._steps: dict[int, Step] = {}  # Those that go on, by optimizer; no control's.
        self._homes = PerDriver(_Home)
        self._told: set[str] = set()
        self._is_over = False
        self._held = 0
        self._on_device: Tensor | None = None

    def count(self) -> int:
        """How many were held back. Waits for those that a device has left out."""
        if self._on_device is not None:
            self._held += int(self._on_device)
            self._on_device = None
        return self._held

    def close(self) -> None:
        """Leaves the optimizers as they were."""
        self._patches.undo()

    def optimizer_made(self, optimizer: Any) -> None:
        """From here on its class asks before it steps; or that above it whose step it has."""
        owner, own = _step_of(optimizer)
        if own in self._guarded:
            return
        inner = unhooked(own)  # The hooks, which tell of the step, are put around it again.

        @functools.wraps(inner)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                tell_compiled(type(this).__name__)
                return inner(this, *args, **kwargs)
            return self._take(inner, this, args, kwargs)

        def compiled(kind: str) -> int:
            self._tell(f"a step of {kind} is compiled, and compiled steps cannot be held back")
            return 0

        # Runs when the code is compiled, and not in it.
        tell_compiled: Any = torch.compiler.assume_constant_result(compiled)  # type: ignore[no-untyped-call]

        register_guard(step)
        is_torchs = isinstance(optimizer, torch.optim.Optimizer)
        told: Any = torch.optim.Optimizer.profile_hook_step if is_torchs else told_step
        guarded: Any = told(step)
        guarded.hooked = True
        self._guarded.add(guarded)
        self._patches.attribute(owner, "step", guarded)

    def step_begins(self, step: Step) -> None:
        if step.is_of_control:
            return
        optimizer = step.optimizers[0]
        self._steps[id(optimizer)] = step
        step.guarded = self._can_hold(step)
        if isinstance(optimizer, torch.optim.Optimizer):
            if _step_of(optimizer)[1] not in self._guarded and step.driver is optimizer:
                kind = type(optimizer).__name__
                self._tell(
                    f"the first step of {kind} could not be held back: one that was unpickled is "
                    "not known before"
                )
            self.optimizer_made(optimizer)

    def step_ended(self, step: Step) -> None:
        self._steps.pop(id(step.optimizers[0]), None)

    def step_failed(self, step: Step) -> None:
        self._steps.pop(id(step.optimizers[0]), None)

    # --- in the place of an optimizer's own step -------------------------------------------------

    def _take(self, inner: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        step = self._steps.get(id(optimizer))
        alone = step is not None and step.driver is optimizer
        if (
            step is None
            or step.optimizers[0] is not optimizer
            or (not alone and getattr(optimizer, AMP_FLAG, False))
            or not self._can_hold(step)
        ):
            # A control drives it, a wrapper around it has been asked, a scaler has told it what to
            # leave out, or ranks cannot decide.
            if capturing():
                self._tell(
                    f"a step of {type(optimizer).__name__} is captured in a CUDA graph, and such "
                    "steps cannot be held back"
                )
            return inner(optimizer, *args, **kwargs)
        if self._is_over:
            self._bad(step)
        if step.has_closure:
            return self._with_closure(step, inner, optimizer, args, kwargs)
        flag = self._flag(step, fresh=False)
        if flag is None:
            return inner(optimizer, *args, **kwargs)
        on_device = alone and flag.device.type != "cpu" and not self._waits
        if on_device and takes_decision(optimizer):
            skip = flag.to(torch.float32).reshape(())
            if not must_skip_on_host(optimizer, skip, torch.ones_like(skip)):
                step.held = skip
                self._on_device = skip if self._on_device is None else self._on_device + skip
                with handing_over(optimizer, grad_scale=None, found_inf=skip):
                    return inner(optimizer, *args, **kwargs)
        if not bool(flag):
            return inner(optimizer, *args, **kwargs)
        self._hold(step)
        return None

    def _with_closure(
        self, step: Step, inner: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any
    ) -> Any:
        """The optimizer evaluates the closure as often as it likes, up to a bad evaluation."""
        losses: list[Any] = []

        def checked(closure: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(closure)
            def evaluate(*given: Any, **named: Any) -> Any:
                losses.append(closure(*given, **named))
                flag = self._flag(step, fresh=len(losses) > 1)
                if flag is not None and bool(flag):
                    raise _BadEvaluation
                return losses[-1]

            return evaluate

        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": checked(kwargs["closure"])}
        else:
            args = (checked(args[0]), *args[1:])
        before = None if _evaluates_first(optimizer) else BeforeStep(optimizer)
        try:
            return inner(optimizer, *args, **kwargs)
        except _BadEvaluation:
            self._hold(step, before)
        return losses[0]

    def _hold(self, step: Step, before: BeforeStep | None = None) -> None:
        self._held += 1
        step.held = True
        try:
            self._bad(step)
        except BaseException:
            self._is_over = True
            raise
        finally:
            if before is not None:
                before.restore()

    @torch.no_grad()
    def _flag(self, step: Step, *, fresh: bool) -> Tensor | None:
        """Whether the gradients have NaN or Inf, or had before they were clipped.

        Args:
            step: whose; None if there are none.
            fresh: whether they are others than the recorder has measured.
        """
        found = [each for each in (step.found, step.clipped_found) if each is not None]
        if fresh or step.found is None:  # The recorder of this rank has nothing to record.
            measured = WatchedGradients(list(step.parameters()), once=True).measure(detail=False)
            if measured is None:
                return None
            step.found, found = measured.record, [measured.record]
        home = found[0].row.device
        return torch.stack([moved(bad_elements(each), home) for each in found]).sum() > 0

    def _can_hold(self, step: Step) -> bool:
        if not has_other_ranks():
            return True
        home = self._homes.of(step)
        if home.is_whole is None:
            params = list(step.parameters())
            home.is_whole = are_whole(params, owners_of(params))
        if not home.is_whole:
            self._tell(
                f"steps of {type(step.driver).__name__} are not held back: nothing says that each "
                "rank holds the whole model, as under DistributedDataParallel, and ranks that hold "
                "parts of it would have to decide together. A GradientControl does that"
            )
        return home.is_whole

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._warn(f"--guard: {what}")


class _BadEvaluation(BaseException):
    """Leaves an optimizer's step from inside its closure."""


class _Home:
    """Of an optimizer: whether this process holds all of what it trains; None if not looked."""

    is_whole: bool | None = None


def _step_of(optimizer: Any) -> tuple[type, Any]:
    """The class whose step it has, and that step."""
    owner = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    return owner, vars(owner)["step"]


def _evaluates_first(optimizer: Any) -> bool:
    """Whether its closure is evaluated once, before anything changes, as torch's own do."""
    step = own_step(optimizer)
    return step is not None and step.is_proven and not isinstance(optimizer, torch.optim.LBFGS)
