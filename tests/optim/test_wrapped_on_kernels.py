"""Ours inside a framework's wrapper, adopted there or not, steps by the kernels as it does bare.

The gradients are looked for once a step, and on a GPU nothing waits.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from gradilocks import GradientControl, optim
from gradilocks.step.engine import Engine
from gradilocks.step.table import GradientTable
from tests.integrations.framework_optimizers import in_accelerate, in_fabric
from tests.optim.twins import same

pytestmark = pytest.mark.filterwarnings("ignore")

FACTORS = [1.0, float("nan"), 0.5, 2.0]
KINDS = {"AdamW": {"lr": 0.1}, "SGD": {"lr": 0.1, "momentum": 0.9}}
WRAPS = {
    "bare": lambda inner: inner,
    "accelerate": in_accelerate,
    "fabric": in_fabric,
    "both": lambda inner: in_fabric(in_accelerate(inner)),
}


@contextlib.contextmanager
def not_waiting(device):
    """Inside, a GPU that is waited for raises."""
    before = torch.cuda.get_sync_debug_mode() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(before)


def trained(kind, wrap, device, found, *, adopted):
    made = [torch.tensor([1.0, -2.0, 0.5]), torch.linspace(-1, 1, 12).view(3, 4)]
    params = [torch.nn.Parameter(each.to(device)) for each in made]
    home = torch.optim if adopted else optim
    optimizer = wrap(getattr(home, kind)(params, **KINDS[kind]))
    if adopted:
        optim.adopt(optimizer)
    control = GradientControl(optimizer, clip=0.5)
    for step, factor in enumerate(FACTORS):
        control.zero_grad()
        control.backward(sum((param * param).sum() for param in params) * factor)
        before = len(found)
        with not_waiting(device) if step > 1 else contextlib.nullcontext():
            control.step()  # The first two compile the kernels.
        assert len(found) == before + 1
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("adopted", [False, True], ids=["ours", "adopted"])
def test_it_steps_as_the_bare_one(kernel_device, kind, wrap, adopted, monkeypatch):
    found = []
    real, again = GradientTable.find_addressed, Engine.again

    def repeated(engine, bound):
        verdict = again(engine, bound)
        found.extend([1] * (verdict is not None))
        return verdict

    monkeypatch.setattr(Engine, "again", repeated)
    monkeypatch.setattr(
        GradientTable,
        "find_addressed",
        lambda *args, **kwargs: (found.append(1), real(*args, **kwargs))[1],
    )
    expected = trained(kind, WRAPS["bare"], kernel_device, found, adopted=False)
    assert same(trained(kind, wrap, kernel_device, found, adopted=adopted), expected)
