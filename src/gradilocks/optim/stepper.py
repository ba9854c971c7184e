"""What AdamW, Adam and SGD share: which way a step takes, and state that survives a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradilocks._torch import (
    AMP_FLAG,
    has_step_hooks,
    has_step_pre_hooks,
    is_profiling,
    note_stepped,
    unhooked,
)
from gradilocks.eager import eager
from gradilocks.kernels import KernelFailed
from gradilocks.kernels.cuda_graph import keeping
from gradilocks.optim import masters
from gradilocks.optim.bytorch import step_by_torch
from gradilocks.optim.checks import check_group
from gradilocks.optim.plan import Plan
from gradilocks.optim.watched import Changes, States, plain
from gradilocks.step.gradients import Names, parameters_of
from gradilocks.step.own_step import register_ours
from gradilocks.step.roll import Called, Roll
from gradilocks.step.update import handing_over

__all__ = ["Stepper"]


class Stepper(torch.optim.Optimizer):
    """Comes before one of torch's optimizers in the list of bases."""

    kernel: ClassVar[str] = ""
    """What `kernels.launches` calls its kernel."""
    columns: ClassVar[tuple[str, ...]] = ()
    """The names of the state tensors, in the order in which the kernel wants their addresses."""

    def _prepare(self, master_weights: bool | None = None) -> None:
        """Ends every constructor, and every return from a pickle or a checkpoint."""
        self.changes = Changes()
        self.state: Any = States(self.changes, self.state)
        before = self.__dict__.get("_roll")
        self._roll = Roll()
        if before is not None:  # Graphs from before a checkpoint was loaded go on.
            self._roll.captured = before.captured
        self._plan: Plan | None = None
        self._held: Called | None = None
        self._looked_at: Called | None = None
        setattr(self, AMP_FLAG, True)
        self.marks: masters.Marks = {}
        if master_weights is not None:
            self.defaults["master_weights"] = bool(master_weights)
        for group in self.param_groups:
            group.setdefault("master_weights", self.defaults.get("master_weights", False))
            _be_fused(group)

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()
        return {**kept, "state": defaultdict(dict, plain(kept["state"]))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        loading = self.__dict__.pop("_loading", None)
        super().__setstate__(state)
        if loading is not None:
            seen, wanted = loading
            for group, flag in zip(self.param_groups, wanted, strict=True):
                group.setdefault("master_weights", flag)
            masters.restore(self, seen[-1])
        self._prepare()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses by name a parameter that no kernel can step."""
        super().add_param_group(param_group)
        group, name = self.param_groups[-1], Names(None, (self,))
        _be_fused(group)
        try:
            check_group(group, name)
            parameters_of((self,), name=name)  # Refuses what is listed twice.
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        packed: dict[str, Any] = super().state_dict()
        return {**packed, "state": plain(packed["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; masters and moments that were saved in float32 stay float32."""
        # Noted after the user's own hooks have changed the checkpoint, and put back before those
        # of them are called that change what was loaded.
        seen: list[dict[str, Any]] = []
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        self._loading = seen, [group["master_weights"] for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient, unless `found_inf` says to skip.

        Args:
            closure: evaluates the loss again and returns it.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._keep_watching()
        with torch.no_grad(), keeping(self._roll.captured):
            if not self._step_on_device():
                step_by_torch(self, self._torch_step)
        return loss

    def _keep_watching(self) -> None:
        if type(self.state) is not States or self.state.changes is not self.changes:
            self.state = States(self.changes, self.state)  # Somebody has put another there.

    def gradients(self) -> Called | None:
        """The gradients of this moment if the kernels can take them, for whoever measures them."""
        called = self._roll.call([group["params"] for group in self.param_groups])
        if called is not self._looked_at:
            # A parameter that wraps other tensors has no address of its own.
            if called is not None and any(
                not home and size for home, size in zip(called.homes, called.sizes, strict=True)
            ):
                return None
            self._looked_at = called
        return called

    def hold(self, called: Called | None) -> None:
        """Hands the next step gradients that were found a moment ago, so it need not look."""
        self._held = None if has_step_pre_hooks(self) else called

    def is_direct(self) -> bool:
        """Whether `ready` and `take` do all that this class's `step` would do: nobody listens.

        They save what torch does around every step, a third of the host's time for a small model.
        """
        if has_step_hooks(self):
            return False
        for name in ("grad_scale", "found_inf"):
            if self.__dict__.get(name) is not None:
                return False
        return not is_profiling()

    def ready(self, called: Called) -> tuple[str, tuple[Tensor, ...]] | None:
        """Before `take`: raises what there is to raise, and has everything sent.

        Returns:
            The kernel and the tables for whoever can work out the rates on the way.
        """
        self._keep_watching()
        self._plan_for(called)
        assert self._plan is not None
        self._plan.ready(self)
        tables = self._plan.tables
        return None if tables is None else (self.kernel, tables)

    def take(self, skip: Tensor, divisor: Tensor, *, rated: bool) -> None:
        """Steps on the gradients that `ready` was given, or skips, as `skip` says."""
        assert self._plan is not None
        try:
            self._plan.go(self, skip, divisor, rated=rated)
        except BaseException as error:
            if rated:
                self.take_back(skip)
            if not isinstance(error, KernelFailed):
                raise
            self._plan_for(None)
            with torch.no_grad(), handing_over(self, grad_scale=divisor, found_inf=skip):
                step_by_torch(self, self._torch_step)
        note_stepped(self)

    def _step_on_device(self) -> bool:
        """Steps with the kernels; False if torch has to do it."""
        called, self._held = self._held, None
        if called is None or not called.grads:  # Held for a step that was not taken.
            called = self.gradients()
        try:
            self._plan_for(called)
            if self._plan is not None:
                self._plan.run(self)
        except KernelFailed:  # Which has been said, and nothing has been stepped.
            self._plan_for(None)
            return False
        finally:
            if called is not None:
                called.release()
        return called is not None

    def _plan_for(self, called: Called | None) -> None:
        """The plan that there is, if it still fits, or a new one."""
        plan = self._plan
        if plan is not None and called is not None and plan.fits(self, called):
            return
        self._plan = None
        if plan is not None:
            plan.hand_over(self.marks)
        self.forget_strangers()
        if called is not None:
            with torch.no_grad():
                self._plan = Plan(self, called)

    def forget_strangers(self) -> None:
        """Forgets parameters that have no state any more."""
        self.marks = {param: seen for param, seen in self.marks.items() if param in self.state}

    def _torch_step(self) -> None:
        """torch's own step, without the hooks, which have been called already."""
        inherited: Any = next(
            base.__dict__["step"]
            for base in type(self).__mro__
            if "step" in base.__dict__ and base.__module__.startswith("torch.optim.")
        )
        unhooked(inherited)(self)

    # What AdamW, Adam and SGD say of themselves.

    def flags(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        """What makes a kernel of its own for this group, as constants by name."""
        raise NotImplementedError

    def settings(self, group: dict[str, Any]) -> list[Any]:
        """The group's numbers, in the order in which the kernel wants them."""
        raise NotImplementedError

    def fill_state(
        self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]], mastered: Sequence[bool]
    ) -> None:
        """Makes the state that these parameters lack."""
        raise NotImplementedError

    def fill_for_torch(
        self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]], mastered: Sequence[bool]
    ) -> None:
        """As `fill_state`, but leaves what torch's own step makes by itself."""
        self.fill_state(params, groups, mastered)

    def needed_by_torch(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        """The moments that torch's own step finds in a group; None if more is to be looked at."""
        raise NotImplementedError

    def is_starting(self, param: Tensor, group: dict[str, Any]) -> bool:
        """Whether torch's own step would start this parameter's state."""
        return False

    def dtype_for_torch(self, param: Tensor) -> torch.dtype:
        """The dtype in which torch's own step is right for a tensor like this one."""
        return param.dtype

    def skips_on_host(self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> bool:
        """Whether torch's own step must not be called, because it could not skip cleanly."""
        return False

    def plan_more(self, plan: Plan) -> tuple[Tensor, list[Tensor | None]]:
        """The table that this optimizer alone needs, and the tensors it points at."""
        raise NotImplementedError

    def take_back(self, skip: Tensor | None) -> None:
        """After a launch failed: undoes what working out the rates has changed in the state."""
        raise NotImplementedError


register_ours(Stepper.step)


def _be_fused(group: dict[str, Any]) -> None:
    # torch's own step goes by the groups, and a checkpoint of an unfused optimizer brings None;
    # only the fused one takes `grad_scale` and `found_inf`.
    group["fused"], group["foreach"] = True, False
