"""What AdamW, Adam and SGD share: which way a step takes, and state that survives a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from gradilocks.gradients import Names
from gradilocks.optim import masters
from gradilocks.optim.checks import check_parameters, check_settings, refuse_gradients
from gradilocks.optim.plan import Plan
from gradilocks.optim.watched import Changes, States, plain
from gradilocks.roll import Called, Roll

__all__ = ["Stepper"]


class Stepper(torch.optim.Optimizer):
    """Comes before one of torch's optimizers in the list of bases."""

    columns: ClassVar[tuple[str, ...]] = ()
    """The names of the state tensors, in the order in which the kernel wants their addresses."""
    _step_supports_amp_scaling = True

    def _prepare(self, master_weights: bool | None = None) -> None:
        """Ends every constructor, and every return from a pickle or a checkpoint."""
        self.changes = Changes()
        self.state: Any = States(self.changes, self.state)
        self._roll = Roll()
        self._plan: Plan | None = None
        self._held: Called | None = None
        self._step_supports_amp_scaling = True
        self.versions: dict[Tensor, int] = {}
        self.untrusted = master_weights is None
        if master_weights is not None:
            self.defaults["master_weights"] = bool(master_weights)
        for group in self.param_groups:
            group.setdefault("master_weights", self.defaults.get("master_weights", False))
            # torch's own step goes by the groups, and a checkpoint of an unfused optimizer brings
            # None; only the fused one takes `grad_scale` and `found_inf`.
            group["fused"], group["foreach"] = True, False

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()
        return {**kept, "state": defaultdict(dict, plain(kept["state"]))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses by name a parameter that no kernel can step."""
        super().add_param_group(param_group)
        group, name = self.param_groups[-1], Names(None, (self,))
        try:
            check_parameters(group["params"], name)
            check_settings(group, group["params"][0].device, name, group["params"][0])
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        packed: dict[str, Any] = super().state_dict()
        return {**packed, "state": plain(packed["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; masters and moments that were saved in float32 stay float32."""
        super().load_state_dict(state_dict)
        masters.restore(self, state_dict)
        self._prepare()

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
        with torch.no_grad():
            if not self._step_on_device():
                masters.step_with(self, self._torch_step)
        return loss

    def gradients(self) -> Called | None:
        """The gradients of this moment if the kernels can take them, for whoever measures them."""
        return self._roll.call([group["params"] for group in self.param_groups])

    def hold(self, called: Called | None) -> None:
        """Hands the next step gradients that were found a moment ago, so it need not look."""
        hooks = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        self._held = None if hooks else called

    def _step_on_device(self) -> bool:
        """Steps with the kernels; False if torch has to do it."""
        called, self._held = self._held, None
        if called is None:
            called = self.gradients()
        if called is None:
            refuse_gradients(self)
            return False
        if self._plan is None or not self._plan.fits(self, called):
            self._plan = Plan(self, called)
        self._plan.run(self)
        called.release()
        return True

    def _torch_step(self) -> None:
        """torch's own step, without the hooks, which have been called already."""
        inherited: Any = next(
            base.__dict__["step"]
            for base in type(self).__mro__
            if "step" in base.__dict__ and base.__module__.startswith("torch.optim.")
        )
        if getattr(inherited, "hooked", False):
            inherited = inherited.__wrapped__
        inherited(self)

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

    def plan_more(self, plan: Plan) -> Tensor:
        """The table that this optimizer alone needs."""
        raise NotImplementedError

    def launch(
        self,
        plan: Plan,
        places: Tensor,
        gradients: Tensor,
        skip: Tensor | None,
        divisor: Tensor | None,
    ) -> None:
        """Launches one step."""
        raise NotImplementedError


def make_master(param: Tensor, state: dict[str, Any]) -> None:
    """A float32 master for a parameter that has none."""
    if "master" not in state:
        state["master"] = param.detach().float()
