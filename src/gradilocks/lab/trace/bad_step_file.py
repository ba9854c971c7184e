"""A bad step enters; a file from which it can be run again, on another day, leaves; and back.

It holds parameters and buffers, the optimizers' state, what the model was called with, where the
random generators stood and which gradients were NaN or Inf: tensors, numbers and texts alone, so
that `torch.load(path, weights_only=True)` reads it. `BadStep` brings it back into a model.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks._torch import buffers_of
from gradilocks.errors import GradilocksError
from gradilocks.lab.trace.kept_calls import (
    KeptCall,
    KeptInput,
    KeptOutput,
    KeptStep,
    Precision,
)
from gradilocks.lab.trace.replay import replay
from gradilocks.lab.unchanged import Generators, version_of
from gradilocks.names import named_modules, named_parameters, unwrapped
from gradilocks.ranks.layout import any_distributed, flattened_among
from gradilocks.runfile import Trace
from gradilocks.step.measure import measure
from gradilocks.step.table import measurable_gradients

__all__ = ["BadCall", "BadStep", "write_bad_step"]

VERSION = 1
_NUMBERS = (int, float, bool, complex, str, bytes, type(None))
_TORCHS = (torch.dtype, torch.device, torch.Size)
_DEPTH = 8
_MOST_RETURNED = 16 << 20


def write_bad_step(
    path: Path,
    *,
    step: int,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Any],
    kept: KeptStep,
    loss: float | None,
    found: str,
    doubt: str = "",
) -> int:
    """Writes the file, and returns its size in bytes.

    Args:
        path: where to; what is there is replaced at once, or not at all.
        step: its number.
        models: outermost modules, by what the names in them begin with.
        optimizers: that were to take it.
        kept: what the models were called with.
        loss: that was run backward, if it is known.
        found: what is known of where it arose, in a sentence.
        doubt: why parameters, state and gradients are of a later step, in half a sentence; "" if
            they are of this one. Gradients are left out then.

    Raises:
        GradilocksError: the model is spread over ranks, and this one has only a part of it.
        OSError, RuntimeError: it cannot be written.
    """
    params = [param for model in models.values() for param in model.parameters()]
    if any_distributed(params) or flattened_among(params):
        raise GradilocksError("the model is spread over ranks, and each has only a part of it")
    plain = _Plain()
    names = {id(m): n for prefix, each in models.items() for n, m in named_modules(each, prefix)}
    calls = [_call(at, call, names, plain) for at, call in enumerate(kept.calls)]
    written = {
        "gradilocks": VERSION,
        "step": step,
        "found": found,
        "doubt": doubt,
        "loss": loss,
        "models": {name: _model(model, plain) for name, model in models.items()},
        "optimizers": [plain(each.state_dict(), "optimizers") for each in optimizers],
        "calls": calls,
        "missing": kept.missing,
        "gradients": {} if doubt else _gradients(models),
        "generators": _generators(Generators.now()),
        "not_kept": plain.not_kept,
    }
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(written, partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return path.stat().st_size


def _model(model: nn.Module, plain: _Plain) -> dict[str, Any]:
    """Of the user's own model, without wrappers: parameters, buffers, and how its modules ran."""
    inner = unwrapped(model)
    state = {
        ".".join(filter(None, (name, key))): value
        for name, module in named_modules(inner)
        for key, value in _own_state(module).items()
    }
    return {
        "state": {name: plain(value, name) for name, value in state.items()},
        "evaluating": [name for name, module in named_modules(inner) if not module.training],
    }


def _own_state(module: nn.Module) -> dict[str, Any]:
    """The parameters and buffers of a module itself, also those that no checkpoint has."""
    held = {**dict(module.named_parameters(recurse=False, remove_duplicate=False))}
    return {**held, **{key: each for key, each in buffers_of(module).items() if each is not None}}


@torch.no_grad()
def _gradients(models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """By the name of a parameter with a gradient: how many NaN and Inf, or its norm and largest."""
    params: dict[Tensor, str] = {}
    for prefix, model in models.items():
        for name, param in named_parameters(model, prefix, remove_duplicate=False):
            params.setdefault(param, name)
    listed = list(params)
    places, tensors = measurable_gradients(listed)
    if not tensors:
        return {}
    found = measure(tensors, home=tensors[0].device, detail=True).tensors
    assert found.largest is not None
    columns = (found.nan, found.inf, found.norms, found.largest)
    told: dict[str, dict[str, Any]] = {}
    for place, *row in zip(places, *(column.tolist() for column in columns), strict=True):
        nan, inf, norm, largest = row
        finite = not (nan or inf)
        told[params[listed[place]]] = {
            "nan": nan,
            "inf": inf,
            "norm": norm if finite else None,
            "largest": largest if finite else None,
        }
    return told


def _call(at: int, call: KeptCall, names: Mapping[int, str], plain: _Plain) -> dict[str, Any]:
    module = call.module()
    where = f"calls[{at}]"
    return {
        "module": None if module is None else names.get(id(unwrapped(module))),
        "args": None if call.args is None else plain(call.args, f"{where}.args"),
        "kwargs": plain(dict(call.kwargs), f"{where}.kwargs"),
        "incomplete": call.incomplete
        or ("what it was given has been changed in place since" if call.inputs_changed else ""),
        "autocast": [
            {"device": kind, "enabled": enabled, "dtype": dtype}
            for kind, enabled, dtype in call.precision.states
        ],
        "autocast_caches": call.precision.caches,
        "generators": _generators(call.generators),
        "received": plain(call.received, f"{where}.received"),
        "returned": {
            place: plain(each.values, f"{where}.returned[{place!r}]")
            for place, each in call.returned.items()
            if each.values.nbytes <= _MOST_RETURNED and version_of(each.values) == each.version
        },
        "began": call.began,
        "came_back": call.came_back,
    }


def _generators(state: Generators) -> dict[str, Any]:
    numpy = None
    if state.numpy is not None:
        numpy = [each.tolist() if hasattr(each, "tolist") else each for each in state.numpy]
    return {"cpu": state.cpu, "cuda": state.devices, "python": state.python, "numpy": numpy}


class _Plain:
    """Makes of anything what `weights_only=True` reads.

    Attributes:
        not_kept: what became something else, and what that is, in words.
    """

    def __init__(self) -> None:
        self.not_kept: list[str] = []
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, thing: Any, where: str, depth: int = 0) -> Any:
        """`thing` with tensors, numbers and texts as they are; `where` names it."""
        if isinstance(thing, KeptInput):
            return self._tensor(thing.values, where, computed=thing.requires_grad)
        if isinstance(thing, Tensor):
            return self._tensor(thing, where, computed=thing.requires_grad)
        if type(thing) in _NUMBERS or isinstance(thing, _TORCHS):
            return thing
        kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
        if depth > _DEPTH:
            self.not_kept.append(f"{where}, a {kind}, lies too deep and is not kept")
            return kind
        if isinstance(thing, Mapping):
            if type(thing) is not dict:
                self._note(where, kind, "a dict")
            return {
                k if type(k) in _NUMBERS else str(k): self(v, f"{where}[{k!r}]", depth + 1)
                for k, v in thing.items()
            }
        if isinstance(thing, (list, tuple, set, frozenset)):
            made = tuple if isinstance(thing, tuple) else list
            if type(thing) not in (list, tuple):
                self._note(where, kind, f"a {made.__name__}")
            return made(self(each, f"{where}[{at}]", depth + 1) for at, each in enumerate(thing))
        if isinstance(thing, (int, float, str)):  # Of a class of its own, as an enum or a count.
            return next(base for base in (int, float, str) if isinstance(thing, base))(thing)
        if type(thing).__module__ == "numpy" and hasattr(thing, "__array__"):
            with suppress(Exception):  # As of texts, which no tensor holds.
                made_of = torch.as_tensor(thing).clone()
                self._note(where, kind, "a tensor")
                return made_of
        return self._object(thing, where, kind, depth)

    def _object(self, thing: Any, where: str, kind: str, depth: int) -> Any:
        fields: dict[str, Any] = {}
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            fields = {f.name: getattr(thing, f.name, None) for f in dataclasses.fields(thing)}
        elif not callable(thing):
            fields = dict(getattr(thing, "__dict__", {}))
        if not fields:
            self.not_kept.append(f"{where}, a {kind}, is not kept")
            return kind
        self._note(where, kind, "a dict of its attributes")
        return {key: self(value, f"{where}.{key}", depth + 1) for key, value in fields.items()}

    def _note(self, where: str, kind: str, instead: str) -> None:
        self.not_kept.append(f"{where}, a {kind}, is kept as {instead}")

    def _tensor(self, tensor: Tensor, where: str, *, computed: bool) -> Any:
        """The tensor by itself: torch writes all of the memory that one is a view of."""
        try:
            made = tensor.detach()
            if type(made) is not Tensor:
                made = made.as_subclass(Tensor)
            if made.layout is torch.strided:
                if made.untyped_storage().nbytes() > made.numel() * made.element_size():
                    # Tied weights stay tied.
                    key = (made.data_ptr(), made.dtype, made.device, made.shape, made.stride())
                    made = self._copies.setdefault(key, made.clone())
            elif made.layout is not torch.sparse_coo:
                raise NotImplementedError(str(made.layout))
            differentiable = made.is_floating_point() or made.is_complex()
            if computed and differentiable and not isinstance(tensor, nn.Parameter):
                made = made.detach().requires_grad_()
        except Exception as error:  # Of a kind that has no memory of its own.
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            self.not_kept.append(f"{where}, a {kind}, is not kept: {error}")
            return kind
        return made


# --- read again -------------------------------------------------------------------------------


@dataclass
class BadCall:
    """One call of the model in a bad step. What is not right in it may be replaced."""

    module: str | None
    """Its name in the model, "" for the model itself; None if it is no part of it."""
    args: tuple[Any, ...] | None
    """None if they were too large to be kept; likewise `kwargs`."""
    kwargs: dict[str, Any]
    received: dict[str, Tensor]
    """By its place in the output, the gradient that a tensor there got from the loss."""
    returned: dict[str, Tensor]
    """Likewise what the tensor held, if that is up to 16 MiB: a replay is compared with it."""
    autocast: list[dict[str, Any]]
    generators: Generators
    incomplete: str
    """Why it is not just as it was, in half a sentence; "" if it is."""
    began: int
    came_back: int
    autocast_caches: bool = True


@dataclass
class BadStep:
    """A bad step from its file: what `gradilocks run --guard` and `keep_bad_step=` have written.

    Example:
        >>> bad = gradilocks.BadStep.load("runs/train-20261115-111600-first-bad-step.pt")
        >>> model = build_model()
        >>> bad.load_into(model, optimizer)
        >>> print(bad.run(model).text)
    """

    step: int
    """Its number."""
    loss: float | None
    found: str
    """What was found when it happened, in a sentence; "" if it was not looked for."""
    doubt: str
    """Why parameters and state are not those of this step, in half a sentence; "" if they are."""
    calls: list[BadCall]
    """Of the model, oldest first."""
    gradients: dict[str, dict[str, Any]]
    """By parameter: how many are NaN (`nan`) and Inf (`inf`); if none are, `norm` and `largest`."""
    optimizers: list[dict[str, Any]]
    """The state_dict of each."""
    models: dict[str, dict[str, Any]]
    """By what the names in it begin with ("" for a single one): its `state`, parameters and buffers
    by name, and the modules that were `evaluating`, not training."""
    generators: Generators
    """Where the random generators stood when the step was to be taken."""
    not_kept: list[str] = field(default_factory=list)
    """What the file holds in another form than it had, or not at all, in words."""
    missing: str = ""
    """Why calls are not there, in half a sentence; "" if all are."""

    def __repr__(self) -> str:
        """Without its tensors, which are a whole model's."""
        held = f"calls={len(self.calls)}, gradients={len(self.gradients)}"
        return f"<BadStep step={self.step}, loss={self.loss}, found={self.found!r}, {held}>"

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, map_location: Any = "cpu") -> BadStep:
        """Reads the file.

        Args:
            path: as `gradilocks run` or the log has told it.
            map_location: where its tensors go, as in `torch.load`.

        Raises:
            GradilocksError: it is none, or is damaged.
        """
        try:
            read = torch.load(path, map_location=map_location, weights_only=True)
            version = read["gradilocks"]
        except FileNotFoundError:
            raise GradilocksError(f"{path} is not there.") from None
        except Exception as error:
            raise GradilocksError(
                f"{path} is no file of a bad step, or is damaged: {type(error).__name__}."
            ) from error
        if version != VERSION:
            raise GradilocksError(
                f"{path} is of version {version}, and this gradilocks reads version {VERSION}."
            )
        calls = [
            BadCall(**{**call, "generators": _generators_of(call["generators"])})
            for call in read["calls"]
        ]
        named = {each.name: read[each.name] for each in dataclasses.fields(cls)}
        return cls(**{**named, "calls": calls, "generators": _generators_of(read["generators"])})

    def load_into(self, model: nn.Module | Mapping[str, nn.Module], *optimizers: Any) -> None:
        """Gives a model the parameters, buffers and modes that it had, and optimizers their state.

        Args:
            model: built as in training, with or without its wrappers; of several models a mapping
                from what `models` calls them.
            optimizers: over the same parameters, in the order in which they were stepped.

        Raises:
            GradilocksError: it is another model.
        """
        for name, each in self._matched(model).items():
            saved, inner = self.models[name], unwrapped(each)
            modules = dict(named_modules(inner))
            slots = {
                ".".join(filter(None, (place, key))): value
                for place, module in modules.items()
                for key, value in _own_state(module).items()
            }
            if slots.keys() != saved["state"].keys():
                odd = sorted(slots.keys() ^ saved["state"].keys())
                raise GradilocksError(
                    f"the model is another than that of the bad step: {odd[0]} is only in "
                    f"{'the model' if odd[0] in slots else 'the file'}."
                )
            with torch.no_grad():
                for key, value in saved["state"].items():
                    if not isinstance(value, Tensor) or slots[key].shape != value.shape:
                        raise GradilocksError(
                            f"{key} has the shape {tuple(slots[key].shape)} in the model, and is "
                            f"{tuple(value.shape) if isinstance(value, Tensor) else value} in the "
                            "file."
                        )
                    slots[key].copy_(value)
            evaluating = set(saved["evaluating"])
            for place, module in modules.items():
                module.training = place not in evaluating
        for optimizer, state in zip(optimizers, self.optimizers, strict=False):
            optimizer.load_state_dict(state)

    def run(self, model: nn.Module | Mapping[str, nn.Module]) -> Trace | None:
        """Runs the step once more, under hooks, and says where NaN or Inf arose.

        With the random numbers, the autocast and, in backward, the gradients of the outputs that it
        had. Parameters, gradients, buffers and generators are left as they are.

        Args:
            model: as for `load_into`, which comes before.

        Returns:
            As in `gradilocks.trace(...).findings`; None if all was finite this time.

        Raises:
            GradilocksError: a call that cannot be made again. Its `args` may be replaced.
        """
        models = self._matched(model)
        if len(models) > 1:  # Under the names that they have here.
            whole: nn.Module = nn.ModuleDict({k.replace(".", "/"): m for k, m in models.items()})
        else:
            (whole,) = models.values()
        places: dict[str | None, nn.Module] = {
            name: module
            for prefix, each in models.items()
            for name, module in reversed(list(named_modules(each, prefix)))
        }
        kept = [self._kept(call, places) for call in self.calls if call.module in places]
        bad = self.loss is not None and self.loss - self.loss != 0
        given = KeptStep(kept, self.missing)
        found = replay(
            self.step,
            given,
            [whole],
            loss_is_bad=None if self.loss is None else bad,
            doubt=self.doubt,
        )
        if found.error is not None:
            others = "".join(f" {each}." for each in self.not_kept)
            raise GradilocksError(
                f"the step cannot be run again: {type(found.error).__name__}: {found.error}."
                f"{others} What a call is given may be replaced: bad.calls[0].args = (...)."
            ) from found.error
        if found.trace is None:
            return None
        text = found.trace.text
        if found.doubt:
            text += f". Likely, not certain: {found.doubt}"
        certainty = "likely" if found.doubt else "certain"
        return dataclasses.replace(found.trace, step=self.step, text=text, certainty=certainty)

    def _matched(self, model: nn.Module | Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
        models = model if isinstance(model, Mapping) else {next(iter(self.models), ""): model}
        if models.keys() != self.models.keys():
            raise GradilocksError(
                f"the bad step is of {len(self.models)} models: give a mapping from "
                f"{', '.join(map(repr, self.models))} to each of them."
            )
        return models

    def _kept(self, call: BadCall, places: Mapping[str | None, nn.Module]) -> KeptCall:
        states = [(each["device"], each["enabled"], each["dtype"]) for each in call.autocast]
        module = places[call.module]
        kept = KeptCall(
            module,
            () if call.args is None else _computed(call.args),
            began=call.began,
            generators=call.generators,
            precision=Precision(states, caches=call.autocast_caches),
        )
        kept.take(_computed(call.kwargs))
        kept.came_back, kept.received, kept.incomplete = (
            call.came_back,
            call.received,
            call.incomplete,
        )
        kept.returned = {
            place: KeptOutput(values, version_of(values)) for place, values in call.returned.items()
        }
        kept.module = weakref.ref(unwrapped(module))
        if call.args is None:
            kept.drop(call.incomplete)
        return kept


def _computed(thing: Any) -> Any:
    """Tensors that were computed from others look so again: what came into them is not known."""
    if isinstance(thing, Tensor):
        return thing.view_as(thing) if thing.requires_grad else thing
    if isinstance(thing, (list, tuple)) and type(thing) in (list, tuple):
        return type(thing)(map(_computed, thing))
    if type(thing) is dict:
        return {key: _computed(value) for key, value in thing.items()}
    return thing


def _generators_of(saved: Mapping[str, Any]) -> Generators:
    devices = {number: state.cpu() for number, state in saved["cuda"].items()}
    numpy = None if saved["numpy"] is None else tuple(saved["numpy"])
    return Generators(saved["cpu"].cpu(), devices, saved["python"], numpy)
