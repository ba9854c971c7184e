"""What a CUDA graph sends is there only when it is replayed, so no other step may count on it.

The capture is pretended, because what is tested is which tables are kept, not what a graph does;
tests/control/test_cuda_graph.py captures real ones.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from gradilocks import GradientControl
from gradilocks.kernels import chunks, cuda_graph
from gradilocks.optim import fused_optimizer
from gradilocks.step import engine
from gradilocks.step import table as gradient_table
from tests.optim.twins import give, ours, parameters

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def capture(monkeypatch):
    """Turns a pretended capture on and off."""

    def turn(on):
        settling = importlib.import_module("gradilocks.kernels.triton_settle")
        for module in (cuda_graph, chunks, gradient_table, fused_optimizer, engine, settling):
            monkeypatch.setattr(module, "capturing", lambda: on)

    yield turn
    cuda_graph._for_good.clear()


def stepped(control, params, step, **kwargs):
    give(params, step, **kwargs)
    control.step()


def test_addresses_that_a_capture_sent_are_sent_again(triton_device, capture):
    params = parameters([(5,), (2, 3)], device=triton_device)
    optimizer = ours("SGD", params)
    control = GradientControl(optimizer, scale=None)
    stepped(control, params, 0)
    capture(True)
    give(params, 1)
    kept = [param.grad for param in params]
    control.step()
    found = optimizer._table._found
    sent = found.at.located.pointers
    capture(False)
    for param, grad in zip(params, kept, strict=True):
        param.grad = grad
    control.step()
    assert optimizer._table._found is found
    assert found.at.located.pointers is not sent
    again = found.at.located.pointers
    for param, grad in zip(params, kept, strict=True):
        param.grad = grad
    control.step()
    assert found.at.located.pointers is again


def test_plans_settings_rules_and_layouts_made_in_a_capture_serve_it_alone(triton_device, capture):
    params = parameters([(5,), (2, 3)], device=triton_device)
    optimizer = ours("SGD", params)
    control = GradientControl(optimizer, scale=None, clip=1.0)
    capture(True)
    stepped(control, params, 0)
    first, rules = optimizer._plan, control._engine._settler._numbers
    assert not chunks._chunkings
    capture(False)
    stepped(control, params, 1)
    assert optimizer._plan is not first
    assert control._engine._settler._numbers is not rules
    assert chunks._chunkings
    second = optimizer._plan
    settings = second.settings
    capture(True)
    optimizer.param_groups[0]["lr"] = 0.5
    stepped(control, params, 2)
    changed = second.settings
    assert changed is not settings
    capture(False)
    stepped(control, params, 3)
    assert optimizer._plan is second
    assert second.settings is not changed
    assert second.settings[0].item() == 0.5
    twins = parameters([(5,), (2, 3)], device=triton_device)
    other = ours("SGD", twins)
    for step in range(4):
        other.param_groups[0]["lr"] = 0.5 if step > 1 else other.defaults["lr"]
        stepped(GradientControl(other, scale=None, clip=1.0), twins, step)
    assert all(map(torch.equal, params, twins))


def test_a_loaded_checkpoint_leaves_the_graphs_of_before_what_they_need(triton_device, capture):
    params = parameters([(5,)], device=triton_device)
    optimizer = ours("SGD", params)
    give(params, 0)
    optimizer.step()
    capture(True)
    give(params, 1)
    optimizer.step()
    capture(False)
    needed = list(optimizer._table.captured)
    assert needed
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._table.captured == needed
