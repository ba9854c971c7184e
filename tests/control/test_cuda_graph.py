"""Backward and step in a user's CUDA graph: the scale moves and steps are skipped inside the replay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradilocks import DynamicScale, GradientControl, optim

pytestmark = pytest.mark.gpu
BAD, STEPS = {4, 5, 11}, 16
OPTIMIZERS = {
    "own AdamW": (optim.AdamW, {}),
    "own Adam amsgrad": (optim.Adam, {"amsgrad": True, "capturable": True}),
    "own SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True, "capturable": True}),
}


def build(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    optimizer_class, settings = OPTIMIZERS[name]
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **settings)
    scale = DynamicScale(init_scale=2.0**10, growth_interval=3)
    return model, optimizer, GradientControl(optimizer, model=model, clip=0.5, scale=scale)


def batches():
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        factor = math.inf if number in BAD else 1.0
        yield torch.randn(32, 64, generator=generator).cuda(), torch.tensor(factor).cuda()


def warm_up(model, optimizer, control, inputs, factor):
    """Three steps on a side stream, which compile and allocate; then everything is restored."""
    weights = [param.detach().clone() for param in model.parameters()]
    saved = control.state_dict()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            control.backward(model(inputs).square().mean() * factor)
            control.step()
            control.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    with torch.no_grad():
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.copy_(weight)
        for entry in optimizer.state.values():
            for value in entry.values():
                value.zero_()
    control.load_state_dict(saved)


def capture(model, control, inputs, factor, *, set_to_none=True, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        control.backward(model(inputs).square().mean() * factor)
        outcome = control.step()
        control.zero_grad(set_to_none=set_to_none)
    return graph, outcome


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_give_the_parameters_of_eager_steps(name, set_to_none):
    eager, _, control = build(name)
    outcomes = []
    for inputs, factor in batches():
        control.backward(eager(inputs).square().mean() * factor)
        outcomes.append(control.step())
        control.zero_grad()
    model, optimizer, captured = build(name)
    inputs, factor = torch.zeros(32, 64).cuda(), torch.ones(()).cuda()
    warm_up(model, optimizer, captured, torch.randn(32, 64).cuda(), factor)
    graph, outcome = capture(model, captured, inputs, factor, set_to_none=set_to_none)
    found = []
    for new_inputs, new_factor in batches():
        inputs.copy_(new_inputs)
        factor.copy_(new_factor)
        graph.replay()
        found.append((outcome.skipped, outcome.scale, outcome.clipped, bool(outcome.culprits)))
    for expected, actual in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(actual, expected)
    assert found == [(o.skipped, o.scale, o.clipped, bool(o.culprits)) for o in outcomes]
    assert [skipped for skipped, *_ in found] == [number in BAD for number in range(STEPS)]
    assert captured.scale == control.scale


def test_a_graph_outlives_tables_that_later_steps_replace():
    model, optimizer, control = build("own AdamW")
    inputs, factor = torch.randn(32, 64).cuda(), torch.ones(()).cuda()
    warm_up(model, optimizer, control, inputs, factor)
    graph, _ = capture(model, control, inputs, factor)
    for size in range(1, 60):
        other = nn.Linear(size, 3).cuda()
        another = GradientControl(optim.AdamW(other.parameters(), lr=0.1))
        another.backward(other(torch.ones(1, size).cuda()).sum())
        another.step()
    torch.cuda.synchronize()
    junk = [torch.full((1 << 16,), 7, dtype=torch.int64, device="cuda") for _ in range(50)]
    before = [param.detach().clone() for param in model.parameters()]
    graph.replay()
    torch.cuda.synchronize()
    changes = [(p - old).abs().amax().item() for p, old in zip(model.parameters(), before, strict=True)]
    assert all(0 < change < 0.01 for change in changes), changes
    assert all(bool((tensor == 7).all()) for tensor in junk)


def test_eager_steps_and_replays_may_alternate():
    model, optimizer, control = build("own AdamW")
    inputs, factor = torch.randn(32, 64).cuda(), torch.ones(()).cuda()
    warm_up(model, optimizer, control, inputs, factor)
    graph, _ = capture(model, control, inputs, factor)
    graph.replay()
    before = control.state_dict()["gradilocks"]["steps"]
    control.backward(model(inputs).square().mean())
    outcome = control.step()
    control.zero_grad()
    assert outcome.step == before + 1
    assert not outcome.skipped
    graph.replay()
    assert control.state_dict()["gradilocks"]["steps"] == before + 2


def test_two_graphs_of_one_control_share_a_scale_and_a_pool():
    model, optimizer, control = build("own AdamW")
    expected, _, plain = build("own AdamW")
    factor = torch.ones(()).cuda()
    warm_up(model, optimizer, control, torch.randn(32, 64).cuda(), factor)
    graphs, pool = [], None
    for size in (32, 8):
        inputs = torch.zeros(size, 64).cuda()
        graph, _ = capture(model, control, inputs, factor, pool=pool)
        pool = graph.pool()
        graphs.append((inputs, graph))
    for number, (new_inputs, new_factor) in enumerate(batches()):
        inputs, graph = graphs[number % 2]
        inputs.copy_(new_inputs[: len(inputs)])
        factor.copy_(new_factor)
        graph.replay()
        plain.backward(expected(new_inputs[: len(inputs)]).square().mean() * new_factor)
        plain.step()
        plain.zero_grad()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert control.scale == plain.scale
