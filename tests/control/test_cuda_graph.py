"""Backward and step in a CUDA graph: the scale moves and steps are skipped inside the replay."""

import gc
import weakref

import pytest
import torch
from torch import nn

from gradilocks import DynamicScale, GradientControl, clip_grad_norm_, optim
from gradilocks.kernels import cuda_graph

pytestmark = pytest.mark.gpu
BAD = {4, 5, 11}
STEPS = 20
INFINITE = float("inf")


def built(optimizer_class, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **settings)
    scale = DynamicScale(init_scale=2.0**10, growth_interval=3)
    control = GradientControl(optimizer, model=model, clip=0.5, scale=scale)
    return model, control


def batches():
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        factor = INFINITE if number in BAD else 1.0
        yield torch.randn(32, 64, generator=generator).cuda(), torch.tensor(factor).cuda()


def eagerly(optimizer_class, *, set_to_none, **settings):
    model, control = built(optimizer_class, **settings)
    outcomes = []
    for inputs, factor in batches():
        control.backward(model(inputs).square().mean() * factor)
        outcomes.append(control.step())
        control.zero_grad(set_to_none=set_to_none)
    return model, control, outcomes


def warmed_up(model, control, inputs, factor):
    """Three steps on a side stream, which compile and allocate; then everything is put back."""
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
        for state in control._optimizers[0].state.values():
            for value in state.values():
                value.zero_()
    control.load_state_dict(saved)


def in_a_graph(optimizer_class, *, set_to_none, **settings):
    model, control = built(optimizer_class, **settings)
    inputs, factor = torch.zeros(32, 64).cuda(), torch.ones(()).cuda()
    warmed_up(model, control, torch.randn(32, 64).cuda(), factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        control.backward(model(inputs).square().mean() * factor)
        outcome = control.step()
        control.zero_grad(set_to_none=set_to_none)
    seen = []
    for new_inputs, new_factor in batches():
        inputs.copy_(new_inputs)
        factor.copy_(new_factor)
        graph.replay()
        seen.append((outcome.step, outcome.skipped, outcome.scale, outcome.clipped, outcome.norm))
    return model, control, seen, graph


OPTIMIZERS = {
    "gradilocks AdamW": (optim.AdamW, {}),
    "gradilocks Adam with amsgrad": (optim.Adam, {"amsgrad": True}),
    "gradilocks SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "torch fused AdamW": (torch.optim.AdamW, {"fused": True, "capturable": True}),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_give_the_parameters_of_eager_steps(name, set_to_none):
    optimizer_class, settings = OPTIMIZERS[name]
    eager, control, outcomes = eagerly(optimizer_class, set_to_none=set_to_none, **settings)
    model, captured, seen, _ = in_a_graph(optimizer_class, set_to_none=set_to_none, **settings)
    for expected, actual in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(actual, expected)
    assert [skipped for _, skipped, *_ in seen] == [number in BAD for number in range(STEPS)]
    assert [scale for _, _, scale, *_ in seen] == [outcome.scale for outcome in outcomes]
    assert [clipped for *_, clipped, _ in seen] == [outcome.clipped for outcome in outcomes]
    assert [step for step, *_ in seen] == list(range(1, STEPS + 1))
    assert captured.state_dict() == control.state_dict()


def test_the_outcome_of_a_captured_step_names_the_culprits_of_the_latest_replay():
    model, control = built(optim.AdamW)
    inputs, factor = torch.randn(32, 64).cuda(), torch.ones(()).cuda()
    warmed_up(model, control, inputs, factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        control.backward(model(inputs).square().mean() * factor)
        outcome = control.step()
        control.zero_grad()
    for value, culprits in ((1.0, 0), (INFINITE, 4), (1.0, 0)):
        factor.fill_(value)
        graph.replay()
        assert len(outcome.culprits) == culprits
        assert outcome.skipped == bool(culprits)


def test_a_graph_outlives_tables_that_later_steps_replace():
    model, control = built(optim.AdamW)
    inputs, factor = torch.randn(32, 64).cuda(), torch.ones(()).cuda()
    warmed_up(model, control, inputs, factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        control.backward(model(inputs).square().mean() * factor)
        control.step()
        control.zero_grad()
    # Other models and other gradients make new tables and free old ones.
    for size in range(1, 80):
        other = nn.Linear(size, 3).cuda()
        another = GradientControl(optim.AdamW(other.parameters(), lr=0.1))
        another.backward(other(torch.ones(1, size).cuda()).sum())
        another.step()
    torch.cuda.synchronize()
    junk = [torch.full((1 << 16,), 7, dtype=torch.int64, device="cuda") for _ in range(50)]
    before = [param.detach().clone() for param in model.parameters()]
    graph.replay()
    torch.cuda.synchronize()
    changes = [
        (param - old).abs().amax().item()
        for param, old in zip(model.parameters(), before, strict=True)
    ]
    assert all(0 < change < 0.01 for change in changes), changes
    assert all(bool((tensor == 7).all()) for tensor in junk)


def test_eager_steps_may_follow_a_graph():
    model, control, _, graph = in_a_graph(optim.AdamW, set_to_none=True)
    before = control.state_dict()["gradilocks"]["steps"]
    control.backward(model(torch.randn(32, 64).cuda()).square().mean())
    outcome = control.step()
    control.zero_grad()
    assert outcome.step == before + 1
    assert not outcome.skipped
    graph.replay()
    assert control.state_dict()["gradilocks"]["steps"] == before + 2


def test_two_graphs_share_a_pool():
    """As several shapes of a model do; each finds what it has sent, replay by replay."""
    runs = []
    pool = None
    for _ in range(2):
        model, control = built(optim.AdamW)
        inputs, factor = torch.zeros(32, 64).cuda(), torch.ones(()).cuda()
        warmed_up(model, control, torch.randn(32, 64).cuda(), factor)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            control.backward(model(inputs).square().mean() * factor)
            control.step()
            control.zero_grad()
        pool = graph.pool()
        runs.append((model, control, inputs, factor, graph))
    for new_inputs, new_factor in batches():
        for _, _, inputs, factor, graph in runs:
            inputs.copy_(new_inputs)
            factor.copy_(new_factor)
            graph.replay()
    eager, control, _ = eagerly(optim.AdamW, set_to_none=True)
    for model, taken, *_ in runs:
        for expected, actual in zip(eager.parameters(), model.parameters(), strict=True):
            assert torch.equal(actual, expected)
        assert taken.state_dict() == control.state_dict()


def test_two_graphs_of_one_control_take_turns():
    """Two batch sizes, a graph each: one scale and one optimizer move on in both."""
    model, control = built(optim.AdamW)
    expected, plain = built(optim.AdamW)
    factor = torch.ones(()).cuda()
    warmed_up(model, control, torch.randn(32, 64).cuda(), factor)
    graphs = []
    for size in (32, 8):
        inputs = torch.zeros(size, 64).cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            control.backward(model(inputs).square().mean() * factor)
            control.step()
            control.zero_grad()
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
    assert control.state_dict() == plain.state_dict()


def test_what_a_graph_needs_goes_with_its_control():
    model, control, _, graph = in_a_graph(optim.AdamW, set_to_none=True)
    param = weakref.ref(next(model.parameters()))
    assert control._engine.table.captured
    before = len(cuda_graph._for_good)
    del model, control, graph
    gc.collect()
    assert param() is None
    assert len(cuda_graph._for_good) == before


def test_a_clip_in_a_graph_clips_at_every_replay():
    params = [nn.Parameter(torch.zeros(n, device="cuda")) for n in (5, 70_000)]
    for param in params:
        param.grad = torch.ones_like(param)
    clip_grad_norm_(params, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, 1.0)
    for factor in (1.0, 10.0, 1e-6, INFINITE, 3.0):
        for param in params:
            param.grad.fill_(factor)
        graph.replay()
        length = factor * 70_005**0.5
        assert norm.item() == pytest.approx(length, rel=1e-6)
        clipped = factor / length if 1.0 < length < INFINITE else factor
        for param in params:
            assert param.grad.max().item() == pytest.approx(clipped, rel=1e-5)
