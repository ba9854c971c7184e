"""One name for a parameter, whoever asks: without wrappers, with what the user has called so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gradilocks
from gradilocks.names import (
    Names,
    OwnedParameters,
    called_alike,
    name_modules,
    name_parameters,
    unwrapped,
)
from gradilocks.observe.script_models import owners_of


class Inner(nn.Module):
    """Has a part of its own that is called as DDP calls what it wraps, and one as torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.module(x))


EXPECTED = ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]
FLAT = ["_flat_param"]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def fsdp(module: nn.Module, **kwargs: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of one rank, and of a CPU.
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **kwargs)


def fabric(module: nn.Module) -> nn.Module:
    wrappers = pytest.importorskip("lightning.fabric.wrappers", reason="Lightning is not installed")
    return wrappers._FabricModule(nn.DataParallel(module), strategy=None, original_module=module)


WRAPPED = {
    "bare": lambda m: m,
    "DataParallel": nn.DataParallel,
    "DDP": nn.parallel.DistributedDataParallel,
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "compiled DDP": lambda m: torch.compile(
        nn.parallel.DistributedDataParallel(m), backend="eager"
    ),
    "FSDP1": lambda m: fsdp(m, use_orig_params=True),
    "FSDP1, flat": fsdp,
    "checkpointed": checkpoint_wrapper,
    "Fabric": fabric,
}


@pytest.fixture(params=WRAPPED)
def wrapped(request: pytest.FixtureRequest, group: None) -> tuple[nn.Module, nn.Module, list[str]]:
    """A wrapped model, what is in it, and the names of its parameters."""
    inner = Inner()
    return (
        WRAPPED[request.param](inner),
        inner,
        FLAT if request.param == "FSDP1, flat" else EXPECTED,
    )


def test_a_control_names_parameters_without_wrappers(wrapped):
    model, _, expected = wrapped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Names(model, (optimizer,)).of(model.parameters()) == expected
    assert Names({"net": model}, (optimizer,)).every() == [f"net.{name}" for name in expected]
    assert gradilocks.GradientControl(optimizer, model=model)._names.every() == expected


def test_a_watched_script_names_them_alike(wrapped):
    model, _, expected = wrapped
    params = list(model.parameters())
    assert list(name_parameters(owners_of(params), params).values()) == expected


def test_modules_are_named_as_their_parameters_are(wrapped):
    model, inner, _ = wrapped
    names = name_modules([model])
    assert names[id(model)] == names[id(unwrapped(model))] == ""
    assert unwrapped(model) is inner
    assert names[id(inner.module)] == "module"
    assert names[id(inner._orig_mod)] == "_orig_mod"


@pytest.mark.parametrize("wrap", ["bare", "DDP", "compiled", "checkpointed", "Fabric"])
def test_a_trace_names_modules_alike(wrap, group):
    class Bad(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._orig_mod(self.module(x).abs().neg().sqrt())

    inner = nn.Sequential(nn.Identity(), WRAPPED[wrap](Bad()) if wrap != "Fabric" else Bad())
    model = fabric(inner) if wrap == "Fabric" else inner
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        inner(torch.ones(1, 2)).sum().backward()
    (found,) = tracer.findings
    assert (found.module, found.kind) == ("1", "Bad")


def test_a_submodule_with_a_wrappers_name_keeps_it_in_a_trace():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    model = Net()
    with torch.no_grad():
        model.module[0].weight.fill_(3e38)
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model(torch.full((1, 2), 10.0)).sum().backward()
    assert [found.module for found in tracer.findings] == ["module.0"]


def test_what_a_clip_policy_has_learned_under_a_wrappers_names_is_found_again(caplog):
    assert called_alike(["module.a.weight"], ["a.weight"])
    assert not called_alike(["module.a.weight"], ["b.weight"])

    def trained(saved: dict | None) -> dict:
        model = nn.DataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = gradilocks.GradScaler("cpu", model=model, clip=gradilocks.AdaGC())
        if saved is not None:
            scaler.load_state_dict(saved)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.state_dict()

    saved = trained(None)
    (state,) = map(dict, saved["gradilocks_scaler"]["clip"]["states"])
    assert state["names"] == ["weight", "bias"]
    # As earlier versions named them, and saved them.
    state |= {"names": ["module.weight", "module.bias"], "memory": dict(state["memory"])}
    saved["gradilocks_scaler"]["clip"]["states"] = [state]
    trained(saved)
    assert not caplog.records


PLACES = "param_groups[0]['params'][{}]"


@pytest.mark.parametrize(
    ("mine", "saved", "apart", "found"),
    [
        # Names of a whole model: wherever they lie now.
        ([("b", "1")], [("a", "0"), ("b", "0")], True, [1]),
        ([("a", ""), ("b", "")], [("b", "1"), ("a", "0")], False, [1, 0]),
        # Names of their own on each stage: nowhere else.
        ([("a", "1")], [("a", "0"), ("a", "1")], True, [1]),
        ([("a", "2")], [("a", "0"), ("a", "1")], True, None),
        ([("b", "0")], [("a", "0"), ("a", "1"), ("b", "1")], True, None),
        ([("a", "")], [("a", "0"), ("a", "1")], False, None),
        # Without names, by the order if no rank holds others.
        ([(PLACES.format(0), ""), (PLACES.format(1), "")], [("a", ""), ("b", "")], False, [0, 1]),
        ([(PLACES.format(0), "")], [("a", "0")], False, None),
        ([(PLACES.format(0), "1")], [(PLACES.format(0), "")], True, None),
        ([("module.a", "")], [("a", "")], False, [0]),
        ([("b", "")], [("a", "")], False, None),
    ],
)
def test_parameters_are_found_in_a_checkpoint_by_name_or_not_at_all(mine, saved, apart, found):
    owned = OwnedParameters(mine, apart, alone=not apart)
    if found is not None:
        assert owned.places_among(saved) == found
    else:
        with pytest.raises(KeyError, match=mine[0][0].replace("[", r"\[").split("\\")[0]):
            owned.places_among(saved)
