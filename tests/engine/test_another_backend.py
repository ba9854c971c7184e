"""A back end that is no Triton: a module with the documented names, and a line in the table."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, kernels
from tests.engine.backends import COMPILED, serve

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    pytest.mark.skipif(COMPILED, reason="with a GPU the kernels are compiled, not read"),
]


def documented(protocol):
    """The names that a Protocol and those above it ask for."""
    names = set()
    for base in protocol.__mro__:
        names |= set(inspect.get_annotations(base))
        names |= {name for name, what in vars(base).items() if isinstance(what, types.FunctionType)}
    return {name for name in names if not name.startswith("_")}


@pytest.fixture
def native(monkeypatch):
    """Interpreted kernels under another name, with nothing but what the Protocols ask for."""
    pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels")
    serve("cpu", monkeypatch)
    served = kernels.BACKENDS["cpu"]
    monkeypatch.delitem(kernels.BACKENDS, "cpu")
    monkeypatch.setitem(kernels._reasons, "cpu", "put back afterwards")
    called = []

    def counting(name, function):
        def call(*args, **options):
            called.append(name)
            return function(*args, **options)

        return call

    optimizers = types.SimpleNamespace(
        **{
            name: counting(name, getattr(served.optimizers, name))
            for name in documented(kernels.OptimizerKernels)
        }
    )
    module = types.ModuleType("gradilocks.kernels.native_backend")
    for name in documented(kernels.SettlingBackend) - {"optimizers"}:
        what = getattr(served, name)
        setattr(module, name, counting(name, what) if callable(what) else what)
    module.optimizers = optimizers
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "_without_native", lambda: "")  # As if the library were there.
    return called


def trained(make, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    control = GradientControl(optimizer, model=model, clip=0.1, **settings)
    for step in range(3):
        control.backward(model(torch.full((2, 3), 0.5 * (step + 1))).square().sum())
        control.step()
        control.zero_grad()
    gradilocks.clip_grad_norm_(model.parameters(), 1.0)
    return [param.detach().clone() for param in model.parameters()]


MAKERS = {
    "our AdamW": lambda params: gradilocks.optim.AdamW(params, lr=0.1),
    "our SGD": lambda params: gradilocks.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch's SGD": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_module_with_the_documented_names_serves_everything(native, name):
    found = trained(MAKERS[name])
    assert kernels.describe()["cpu"] == "fused: C++'s kernels run on cpu"
    assert {"try_out", "settler"} <= set(native)
    assert ("launch_step" in native) == (name != "torch's SGD")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels.BACKENDS, "cpu", kernels.reference)
        alone = trained(MAKERS[name])
    for mine, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_one_that_fails_when_it_is_tried_out_leaves_plain_torch(native):
    def broken(device):
        raise RuntimeError("no such instruction")

    sys.modules["gradilocks.kernels.native_backend"].try_out = broken
    with pytest.warns(RuntimeWarning, match="C\\+\\+'s kernels do not run on cpu"):
        trained(MAKERS["our AdamW"])
    assert kernels.BACKENDS["cpu"] is kernels.reference
