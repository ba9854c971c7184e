"""Calls of a model enter as they happen; what it takes to run them once more is kept for a step.

Inputs and the gradients that outputs receive are kept by reference, where the random generators
stood and what autocast did by value. That costs two hooks on the model itself and one on its
output, and no wait: a few microseconds a call, and the memory of the inputs until the step is over.
Of modules that call each other the outermost is kept. Whatever goes wrong here ends the keeping,
and not the training.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradilocks._torch import (
    are_transforms_active,
    compiled_call,
    function_modes,
    hook_gradient,
    in_backward,
    is_autocast_enabled,
    is_jit_tracing,
    set_compiled_call,
)
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.lab.tensors import Hook, tensors_in
from gradilocks.lab.unchanged import Generators, version_of

__all__ = ["KeptCall", "KeptCalls", "KeptInput", "KeptOutput", "KeptStep", "Precision"]

_logger = logging.getLogger("gradilocks")
_MOST_BYTES = 256 << 20
"""Of inputs and gradients that are kept; what goes beyond is not."""
_MOST_CALLS = 64
_LOOKED_AT = 3
"""Calls of a module after which it is known which generators its forward draws from."""


class Precision:
    """What autocast did when a model was called.

    Args:
        states: by device: its name, whether autocast was on, and to which dtype.
        caches: whether it kept what it had cast.
    """

    def __init__(self, states: Sequence[tuple[str, bool, torch.dtype]], *, caches: bool) -> None:
        self.states, self.caches = states, caches

    @classmethod
    def now(cls, kinds: Iterable[str]) -> Precision:
        """What it does at this moment on these kinds of devices."""
        states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        return cls(states, caches=torch.is_autocast_cache_enabled())

    def again(self) -> ExitStack:
        """A context in which it does the same."""
        stack = ExitStack()
        for kind, enabled, dtype in self.states:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches)
            )
        return stack


class KeptInput(NamedTuple):
    """A tensor that a module was given, without what it was computed from."""

    values: Tensor
    version: int
    original: Callable[[], Tensor | None]
    """Finds the tensor itself, if it is still there: its graph may not be kept alive for us."""
    has_graph: bool
    """Whether it was computed from something that is trained."""
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> KeptInput:
        has_graph, requires_grad = tensor.grad_fn is not None, tensor.requires_grad
        # torch.utils.swap_tensors refuses weak references to a parameter.
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return cls(tensor, version_of(tensor), lambda: tensor, has_graph, requires_grad)
        values = tensor.detach() if requires_grad else tensor
        return cls(values, version_of(tensor), weakref.ref(tensor), has_graph, requires_grad)

    @property
    def changed(self) -> bool:
        """Whether it has been written to since."""
        return version_of(self.values) != self.version


class KeptOutput(NamedTuple):
    """A tensor that a module has returned, without its graph."""

    values: Tensor
    version: int


class _GradientHook:
    """Tells of the gradient that an output receives. It lives as long as the output's graph, which
    holds it, and nobody else does."""

    __slots__ = ("__weakref__", "_call", "_kept", "_place")

    def __init__(self, kept: KeptCalls, call: KeptCall, place: str) -> None:
        self._kept, self._call, self._place = kept, call, place

    def __call__(self, gradient: Tensor) -> None:
        self._kept.note_received(self._call, self._place, gradient)


class KeptCall:
    """One call of a module, with what it takes to run it once more.

    Attributes:
        module: finds it; None once it is gone.
        args, kwargs: what it was given, each tensor as a KeptInput; None if that was too large.
        began: its place in time; `came_back` likewise, of the gradient of its output.
        returned: by its name in the output, each tensor there that fits into memory.
        received: likewise the gradient that it got.
        modes: how many modes stood in the way of torch's functions.
        incomplete: why it cannot be run just as it was, in half a sentence; "" if it can.
    """

    __slots__ = (
        "args",
        "began",
        "bytes",
        "came_back",
        "generators",
        "graphs",
        "incomplete",
        "inputs",
        "kwargs",
        "modes",
        "module",
        "precision",
        "received",
        "returned",
        "training",
    )

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        *,
        began: int,
        generators: Generators,
        precision: Precision,
        find: weakref.ref[nn.Module] | None = None,
    ) -> None:
        self.module = weakref.ref(module) if find is None else find
        self.began, self.came_back = began, 0
        self.generators, self.precision = generators, precision
        self.training, self.modes = module.training, function_modes()
        self.received: dict[str, Tensor] = {}
        self.returned: dict[str, KeptOutput] = {}
        self.incomplete = ""
        self.bytes = 0
        self.inputs: list[KeptInput] = []
        self.graphs: list[weakref.ref[_GradientHook]] = []
        self.args: tuple[Any, ...] | None = tuple(map(self._kept, args))
        self.kwargs: Mapping[str, Any] = {}

    def take(self, kwargs: Mapping[str, Any]) -> None:
        """It was also given these."""
        self.kwargs = {name: self._kept(value) for name, value in kwargs.items()}

    def _kept(self, given: Any) -> Any:
        """What was given, with its tensors as KeptInputs. Lists and dicts are copied: forward may
        write into them."""
        if isinstance(given, Tensor):
            kept = KeptInput.of(given)
            self.inputs.append(kept)
            self.bytes += _bytes_of(given)
            return kept
        return _mapped(given, self._kept)

    @property
    def is_unused(self) -> bool:
        """Whether nobody can run its output backward any more, and nobody has."""
        return not self.came_back and not any(find() is not None for find in self.graphs)

    @property
    def inputs_changed(self) -> bool:
        """Whether what it was given has been written to since."""
        return any(each.changed for each in self.inputs)

    def again(self, make: Callable[[KeptInput], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it was given, with each tensor as `make` makes it."""

        def made(kept: Any) -> Any:
            return make(kept) if isinstance(kept, KeptInput) else _mapped(kept, made)

        assert self.args is not None
        return tuple(map(made, self.args)), {name: made(v) for name, v in self.kwargs.items()}

    def drop(self, why: str) -> None:
        """Lets go of what is large."""
        self.args, self.kwargs, self.inputs, self.returned, self.bytes = None, {}, [], {}, 0
        self.incomplete = why


def _mapped(thing: Any, act: Callable[[Any], Any]) -> Any:
    """A tuple, list or dict with `act` done to what is in it; anything else as it is."""
    kind = type(thing)
    if kind is tuple or kind is list:
        return kind(map(act, thing))
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return kind(*map(act, thing))
    if isinstance(thing, dict):
        copied = copy.copy(thing)
        for name, value in thing.items():
            copied[name] = act(value)
        return copied
    return thing


def _bytes_of(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


class KeptStep:
    """What was kept of one step.

    Attributes:
        calls: oldest first.
        missing: why calls of it are not there, in half a sentence; "" if all are.
        others: whether other modules were called besides, whose calls nobody keeps.
    """

    def __init__(self, calls: Sequence[KeptCall], missing: str, *, others: bool = False) -> None:
        self.calls, self.missing, self.others = calls, missing, others

    def forget(self) -> None:
        """Lets go of what it holds: it would take too long until it is needed."""
        self.calls, self.missing = (), "what it was called with had to be let go of"


class _Open(threading.local):
    """The module that is being called in this thread, and what is kept of that."""

    module: Callable[[], nn.Module | None] | None = None
    call: KeptCall | None = None


class KeptCalls:
    """The calls of some modules since a step.

    Args:
        most_bytes: of inputs and gradients that are kept.
        keeps: whether anything is kept at all, or calls are only told of.
        began: told whenever one begins.

    Attributes:
        called: the outermost modules that were called to train, since it was emptied.
        inner: modules that were called inside of another, and finds that one.
        inner_is_new: whether there are others in it than when this was last set to False.
        count: how many calls there were.
        calls: oldest first.
        missing: why calls of this step are not there, in half a sentence; "" if all are.
    """

    def __init__(
        self,
        most_bytes: int = _MOST_BYTES,
        *,
        keeps: bool = True,
        began: Callable[[], None] | None = None,
    ) -> None:
        self._most_bytes, self._keeps, self._began = most_bytes, keeps, began
        self.called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.inner: weakref.WeakKeyDictionary[nn.Module, Callable[[], nn.Module | None]]
        self.inner, self.inner_is_new = weakref.WeakKeyDictionary(), False
        self.count = 0
        self.calls: list[KeptCall] = []
        self.missing = ""
        self.paused = False
        """Whether calls are not looked at, as while they are run once more."""
        self._latest: KeptStep | None = None
        self._taken_by: set[int] = set()
        self._in_passing = False  # Whether something was computed that is not run backward.
        self._open = _Open()
        self._clock = itertools.count(1)
        self._bytes = 0
        self._followed: dict[int, tuple[weakref.ref[nn.Module], list[Callable[[], None]]]] = {}
        self._habits: dict[int, _Habits] = {}
        self.others = False
        """Whether modules are called besides those that are followed, a frozen one, say."""

    # --- whom it follows -----------------------------------------------------------------------

    @property
    def followed(self) -> list[nn.Module]:
        """Whose calls are kept."""
        return [module for find, _ in self._followed.values() if (module := find()) is not None]

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Keeps the calls of these, and of no others."""
        wanted = {id(module): module for module in modules}
        for key, (find, leave) in list(self._followed.items()):
            if wanted.get(key) is not find():
                for act in leave:
                    act()
                del self._followed[key]
        for key, module in wanted.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            _, leave = self._followed.setdefault(key, (weakref.ref(module), []))
            compiled = compiled_call(module)
            if compiled is not None and not isinstance(compiled, _AroundCompiled):
                # By `module.compile()`: its hooks, if it has some, are compiled with it.
                around = _AroundCompiled(compiled, weakref.ref(module), self._before, self._after)
                set_compiled_call(module, around)
                leave.append(around.leave)
            elif not leave:
                # Before hooks of the user's, which run again when it is called again.
                before = module.register_forward_pre_hook(Hook(self._before), prepend=True)
                after = module.register_forward_hook(
                    Hook(self._after), with_kwargs=True, always_call=True
                )
                leave += before.remove, after.remove

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, no module has a hook of this."""
        modules = self.followed
        self.follow(())
        try:
            yield
        finally:
            self.follow(modules)

    def close(self) -> None:
        """Takes the hooks away and forgets everything."""
        self.follow(())
        self.calls, self._latest = [], None

    def take(self, by: int = 0) -> KeptStep:
        """A step is over: what was kept of it. Another begins.

        With the calls whose output has not been run backward yet: the step of another optimizer may
        be of their gradients. If no model was called since another optimizer's step, both are of
        the same backward pass, and so are its calls. `by` tells optimizers apart.
        """
        if self._latest is not None and by not in self._taken_by:
            self._taken_by.add(by)
            return self._latest
        self._taken_by = {by}
        used = [call for call in self.calls if not call.is_unused]
        others = self.others or self._in_passing or len(used) < len(self.calls)
        step = self._latest = KeptStep(used, self.missing, others=others)
        self.calls = [call for call in used if not call.came_back]
        self._bytes = sum(call.bytes for call in self.calls) if self.calls else 0
        self.missing = ""
        self._in_passing = False
        return step

    def forget(self, params: Container[int]) -> None:
        """The gradients of these parameters, by their ids, are cleared: so is what made them."""
        self._latest = None
        self.calls = [call for call in self.calls if not _made_only(call, params)]
        self._bytes = sum(call.bytes for call in self.calls)

    # --- calls ---------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        opened = self._open
        if opened.module is not None:
            self._note_inner(module, opened.module)
            return  # A part of the module that is being called.
        if self.paused or not _is_trained_here():
            return
        call = None
        try:
            habits = self._habits.get(id(module))
            if habits is None or habits.module() is not module:
                habits = self._habits[id(module)] = _Habits(module)
            if self._began is not None:
                self._began()
            if torch.is_grad_enabled():
                if habits.search is not self.called:
                    self.called.add(module)
                    habits.search = self.called
                self.count += 1
                self._latest = None  # Which holds a batch until here.
                call = self._begin(module, args, habits) if self._keeps else None
            else:
                self._in_passing = True  # What it makes may be given to a model.
        except Exception as error:
            self._give_up(error)
        else:
            opened.module, opened.call = habits.module, call

    def _note_inner(self, module: nn.Module, outer: Callable[[], nn.Module | None]) -> None:
        known = self.inner.get(module)
        if module in self.called or known == outer:
            return
        if known is None or known() not in self.called:
            self.inner[module], self.inner_is_new = outer, True

    def _begin(self, module: nn.Module, args: Any, habits: _Habits) -> KeptCall:
        return KeptCall(
            module,
            args,
            began=next(self._clock),
            generators=habits.generators(),
            precision=habits.precision(),
            find=habits.module,
        )

    def search_again(self) -> None:
        """Forgets which modules were called, and which inside of others."""
        self.called, self.inner = weakref.WeakSet(), weakref.WeakKeyDictionary()

    def _after(
        self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any = None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        opened = self._open
        if opened.module is None or opened.module() is not module or in_backward():
            return
        call, opened.module, opened.call = opened.call, None, None
        if call is not None:
            try:
                self._end(module, call, kwargs, output)
            except Exception as error:
                self._give_up(error)

    def _end(
        self, module: nn.Module, call: KeptCall, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        habits = self._habits[id(module)]
        if habits.looks:
            habits.note(call)
        if kwargs:
            call.take(kwargs)
        if isinstance(output, Tensor):
            self._watch(call, "output", output)
        else:
            for place, tensor in tensors_in(output, "output"):
                self._watch(call, place, tensor)
            if not call.incomplete and _hides_tensors(output):
                call.incomplete = "it returned objects whose tensors cannot be seen"
        if call.graphs:
            self._keep(call)
        else:
            self._in_passing = True

    def _watch(self, call: KeptCall, place: str, tensor: Tensor) -> None:
        """Keeps what a module has returned, and the gradient that it will get."""
        if tensor.requires_grad and not tensor.is_leaf:
            hook = _GradientHook(self, call, place)
            call.graphs.append(weakref.ref(hook))
            hook_gradient(tensor, hook)
        size = _bytes_of(tensor)
        if self._bytes + call.bytes + size <= self._most_bytes:
            call.bytes += size
            call.returned[place] = KeptOutput(tensor.detach(), version_of(tensor))

    def _give_up(self, error: Exception) -> None:
        """Calls cannot be kept: training goes on without."""
        self.close()
        self.missing = f"the calls of the model could not be kept ({type(error).__name__}: {error})"
        _logger.warning("bad steps will not be run once more: %s", self.missing)

    def _keep(self, call: KeptCall) -> None:
        if len(self.calls) >= _MOST_CALLS or self._bytes + call.bytes > self._most_bytes:
            self._in_passing = self._in_passing or any(each.is_unused for each in self.calls)
            self.calls = [each for each in self.calls if not each.is_unused]
            self._bytes = sum(each.bytes for each in self.calls)
        if len(self.calls) >= _MOST_CALLS:
            self.missing = f"the model was called more than {_MOST_CALLS} times"
            return
        if self._bytes + call.bytes > self._most_bytes:
            call.drop(f"its inputs were more than the {self._most_bytes >> 20} MiB that are kept")
        self._bytes += call.bytes
        self.calls.append(call)

    def note_received(self, call: KeptCall, place: str, gradient: Tensor) -> None:
        """The output of a call has received this gradient."""
        if self.paused:
            return
        call.came_back = call.came_back or next(self._clock)
        if call.args is None:
            return
        size = _bytes_of(gradient)
        if place in call.received:  # Run backward a second time.
            call.incomplete = "its output was run backward more than once"
        elif self._bytes + size > self._most_bytes:
            call.incomplete = (
                f"the gradient of its output was more than the {self._most_bytes >> 20} MiB that "
                "are kept"
            )
        else:
            self._bytes += size
            call.bytes += size
            call.received[place] = gradient.detach()


def _made_only(call: KeptCall, params: Container[int]) -> bool:
    """Whether a call was run backward, into these parameters alone."""
    module = call.module()
    if not call.came_back or module is None:
        return bool(call.came_back)
    return all(id(param) in params for param in module.parameters() if param.requires_grad)


def _hides_tensors(thing: Any) -> bool:
    """Whether there may be tensors in what a module has returned that nobody finds."""
    if isinstance(thing, (Tensor, int, float, bool, str, bytes, type(None), torch.dtype)):
        return False
    if isinstance(thing, Mapping):
        return any(map(_hides_tensors, thing.values()))
    if isinstance(thing, (list, tuple)):
        return any(map(_hides_tensors, thing))
    return not (dataclasses.is_dataclass(thing) or isinstance(thing, (torch.device, torch.Size)))


def _is_trained_here() -> bool:
    """Whether a call is one that trains, and not one that is recorded, transformed or repeated."""
    return not (in_backward() or are_transforms_active() or is_jit_tracing() or capturing())


class _AroundCompiled:
    """Stands around what `module.compile()` has made, and tells of its calls."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        module: weakref.ref[nn.Module],
        before: Callable[..., None],
        after: Callable[..., None],
    ) -> None:
        self._compiled, self._module = compiled, module
        self._before, self._after = before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None or torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        self._before(module, args)
        output = None
        try:
            output = self._compiled(*args, **kwargs)
        finally:
            self._after(module, args, kwargs, output)
        return output

    def leave(self) -> None:
        """Puts back what was there, unless somebody has put something else there."""
        module = self._module()
        if module is not None and compiled_call(module) is self:
            set_compiled_call(module, self._compiled)


class _Habits:
    """What is looked at whenever a module is called.

    The generators of Python and NumPy take long to read. So they are read around its first few
    calls, and after these only those that its forward draws from.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.search: object = None
        """The set of called modules that it is in."""
        devices = {param.device for param in module.parameters()}
        self._cuda = sorted(each.index for each in devices if each.type == "cuda")
        kinds = sorted({"cpu", *(each.type for each in devices)})
        self._kinds = tuple(filter(torch.amp.is_autocast_available, kinds))
        self._without_autocast: Precision | None = None
        self._calls = 0
        self._python = self._numpy = False

    @property
    def looks(self) -> bool:
        """Whether it is not known yet which generators its forward draws from."""
        return self._calls < _LOOKED_AT

    def generators(self) -> Generators:
        """Where they stand."""
        looks = self.looks
        if not (looks or self._cuda or self._python or self._numpy):
            return Generators(torch.default_generator.get_state(), {}, None, None)
        return Generators.now(self._cuda, python=looks or self._python, numpy=looks or self._numpy)

    def precision(self) -> Precision:
        """What autocast does; read once for all calls without it."""
        if is_autocast_enabled():
            return Precision.now(self._kinds)
        if self._without_autocast is None:
            self._without_autocast = Precision.now(self._kinds)
        return self._without_autocast

    def note(self, call: KeptCall) -> None:
        """It has returned, while `looks`."""
        self._calls += 1
        python, numpy = call.generators.moved()
        self._python, self._numpy = self._python or python, self._numpy or numpy
