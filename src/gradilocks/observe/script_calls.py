"""A script's optimizers and steps enter; the calls of the models that they train leave.

The hooks that see them are put on a model when its optimizer is made, before the first forward pass
as a rule: code that is compiled with them there is not stale when they stay. All parts of a model
have hooks; those that were seen to run inside of another lose them at the next step, for what is
kept is the call of that one. On what has not run yet they stay, and cost nothing: the script may
call it by itself for the first time in the step that goes wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from gradilocks._torch import parameters_in, script_for_caller
from gradilocks.lab.tensors import Hook, tensors_in
from gradilocks.lab.trace import KeptCalls, called_modules
from gradilocks.names import is_compiled
from gradilocks.observe.between_steps import parameters_of
from gradilocks.observe.patches import Patches
from gradilocks.observe.script_models import modules_besides, owners_of
from gradilocks.step.events import PerDriver, Step, StepListener

__all__ = ["ScriptCalls"]

_MOST_SEARCHES = 4
"""How often it is looked for which modules a script calls, if none of those that it called before
was called again."""
_MOST_OPTIMIZERS = 16
"""For how many optimizers the models are looked for when they are made; for others at their first
step. A script may make one for every task that it trains."""
_LOOKS_FOR_OTHERS = 2
"""Steps at which it is looked for models that are there and not trained."""


class ScriptCalls(StepListener):
    """The models that a script trains, and their calls.

    Args:
        keeps: whether what it takes to run a call once more is kept.
        began: told whenever a model is called.

    Attributes:
        kept: the calls since the last step.
        met: how many models there were so far.
    """

    def __init__(self, *, keeps: bool, began: Callable[[], None] | None = None) -> None:
        self.kept = KeptCalls(keeps=keeps, began=began)
        self._models: list[ref[nn.Module]] = []
        self._drivers = PerDriver(_TrainedModels)
        self._fresh: WeakSet[Any] = WeakSet()  # Optimizers that have not stepped yet.
        self._made = self._searches = self.met = 0
        self._searching = True
        self._looks = 0
        self._others: list[Any] = []  # Hooks on models that are not trained.
        self._known_others: set[int] = set()
        self._patches = Patches()
        self._patches.everywhere(torch.jit.script, self._around_script(torch.jit.script))

    @property
    def models(self) -> list[nn.Module]:
        """Those that are known and still there."""
        return [model for find in self._models if (model := find()) is not None]

    def close(self) -> None:
        """Takes every hook away."""
        self._patches.undo()
        for handle in self._others:
            handle.remove()
        self.kept.close()

    def _around_script(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """torch.jit.script would compile the hooks of a module with it."""

        @functools.wraps(original)
        def script(*args: Any, **kwargs: Any) -> Any:
            with self.kept.aside():
                return script_for_caller(original, *args, **kwargs)

        return script

    def optimizer_made(self, optimizer: Any) -> None:
        self._fresh.add(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known = {id(param) for model in self.models for param in model.parameters()}
        if known.issuperset(map(id, params)):
            return
        self._made += 1
        if self._made <= _MOST_OPTIMIZERS:
            self._meet(owners_of(params))

    def _meet(self, models: Sequence[nn.Module]) -> None:
        known = {id(model) for model in self.models}
        fresh = [model for model in models if id(model) not in known]
        self._models = [find for find in self._models if find() is not None]
        self._models += map(ref, fresh)
        self.met += len(fresh)
        if fresh:
            self._searching = True
            self.kept.follow([*self.kept.followed, *_parts(fresh)])

    def gradients_clear(self, owner: Any) -> None:
        if self.kept.calls:
            # Whose gradients are cleared matters only to calls that have made some.
            made = any(call.came_back for call in self.kept.calls)
            self.kept.forget(set(map(id, parameters_of(owner))) if made else ())

    def step_begins(self, step: Step) -> None:
        if self._fresh:
            self._fresh.difference_update(step.optimizers)
        if not step.has_closure:
            self._look(step)

    def closure_ended(self, step: Step, loss: object, *, failed: bool) -> None:
        self._look(step)

    def _look(self, step: Step) -> None:
        """The calls of this step have been made: finds out which modules the script calls."""
        kept, driver = self.kept, self._drivers.of(step)
        if not driver.know(step):
            self._meet(driver.find(step))
        none_since, driver.calls = driver.calls == kept.count, kept.count
        if none_since and self._searches < _MOST_SEARCHES:
            self._searches += 1
            self._searching = True
            # It calls others, or has compiled them since.
            kept.search_again()
            kept.follow([*kept.followed, *_parts(self.models)])
        elif kept.inner_is_new if not self._searching else kept.called and not self._fresh:
            self._searching = False
            self._leave_inner()
        if self._looks <= _LOOKS_FOR_OTHERS:
            self._looks += 1
            self._watch_others()

    def _leave_inner(self) -> None:
        """Takes the hooks away from what runs inside of other modules, where they cost time."""
        kept = self.kept
        kept.inner_is_new = False
        # Compiled code that has hooks in it would be compiled again without them.
        compiled = {
            id(part)
            for model in self.models
            if any(map(is_compiled, model.modules()))
            for part in model.modules()
        }
        stay = [module for module in kept.followed if id(module) in compiled]
        outer = [module for module in kept.followed if not self._is_inner(module)]
        kept.follow([*called_modules([*kept.called, *outer]), *stay])

    def _is_inner(self, module: nn.Module) -> bool:
        """Whether a module was seen to run in training, or beside it, inside of another alone.

        In an evaluation the model may call what the script calls by itself in training.
        """
        find, called = self.kept.inner.get(module), self.kept.called
        outer = None if find is None else find()
        if outer is None or module in called:
            return False
        return outer in called or called.isdisjoint(outer.modules())

    def _watch_others(self) -> None:
        """Sees whether other models are called, as a frozen one that makes what a trained one is
        given. What came from there is not in the data."""
        for module in modules_besides(self.models):
            if id(module) in self._known_others:
                continue
            self._known_others.add(id(module))
            if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
                self.kept.others = True  # Nobody sees whether these are called.
            else:
                self._others.append(module.register_forward_hook(Hook(self._other_called)))

    def _other_called(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            made = [tensor for _, tensor in tensors_in(output, "")]
            self.kept.others = self.kept.others or any(
                tensor.is_floating_point() and not tensor.requires_grad for tensor in made
            )


def _parts(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The models and the modules in them; nothing of what is compiled but the outermost."""
    waiting = called_modules(models)
    for module in waiting:  # Which grows meanwhile.
        yield module
        if not is_compiled(module):
            waiting += module.children()


class _TrainedModels:
    """The models that a control or an optimizer trains."""

    def __init__(self) -> None:
        self.calls = 0
        """How many of all models there had been at its last step."""
        self._models: list[ref[nn.Module]] = []
        self._params: tuple[int, int] | None = None  # How many, and the id of the first.
        self._home: tuple[ref[nn.Module], str] | None = None  # Of the first: whose, and its name.

    def know(self, step: Step) -> bool:
        """Whether a step is of the same parameters as before, and their models are still there."""
        many, first = 0, None
        for optimizer in step.optimizers:
            for group in optimizer.param_groups:
                params = group["params"]
                many += len(params)
                if first is None and params:
                    first = params[0]
        if self._params != (many, id(first)):
            return False
        for find in self._models:
            if find() is None:
                return False
        if self._home is None:
            return not self._models
        # A model may have been given other parameters, and left the id of this one to somebody's.
        owner, name = self._home
        module = owner()
        return module is not None and parameters_in(module).get(name) is first

    def find(self, step: Step) -> list[nn.Module]:
        """The owners of its parameters."""
        params = list(step.parameters())
        models = owners_of(params)
        self._models = [ref(model) for model in models]
        self._params = len(params), id(params[0]) if params else id(None)
        parts = (part for model in models for part in model.modules())
        homes = (
            (ref(part), name)
            for part in parts
            for name, param in parameters_in(part).items()
            if param is params[0]
        )
        self._home = next(homes, None)
        return models
