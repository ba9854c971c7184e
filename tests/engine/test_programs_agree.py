"""Programs drawn at random end alike, whoever decides their steps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
pytest.importorskip("hypothesis", reason="the programs are drawn by hypothesis")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from gradilocks import ClipByNorm, DynamicScale, GradientControl, optim
from tests.control.gradient_scripts import assert_same, contents
from tests.engine.backends import (
    DEVICES,
    INF,
    NAN,
    Settling,
    facts,
    gradient_for,
    loss_giving,
    parameter,
    serve,
)

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OPTIMIZERS = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "our AdamW": lambda params: optim.AdamW(params, lr=0.01),
    "our SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
}
SHAPES = [(5,), (1,), (2, 3)]


def _clear(world, _):
    world.control.zero_grad()


def _zero(world, _):
    world.control.zero_grad(set_to_none=False)


def _freeze(world, place):
    param = world.params[place]
    param.requires_grad_(not param.requires_grad)


def _replace(world, place):
    old = world.params[place]
    new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    world.params[place] = new
    group = world.optimizer.param_groups[0]["params"]
    group[next(k for k, param in enumerate(group) if param is old)] = new
    world.optimizer.state.pop(old, None)


def _swap_storage(world, place):
    param = world.params[place]
    world.kept.append(param.data)
    param.data = param.data.clone()


def _reorder(world, _):
    world.optimizer.param_groups[0]["params"].reverse()


def _resume(world, _):
    saved = world.control.state_dict()
    world.control.zero_grad()
    world.control = world.new_control()
    world.control.load_state_dict(saved)


BETWEEN = [_clear, _zero, _freeze, _replace, _swap_storage, _reorder, _resume]


class World:
    """One optimizer under one control, and what may happen to them."""

    def __init__(self, device, kind, order):
        self.device, self.order = device, order
        self.params = [parameter(*shape, device=device) for shape in SHAPES]
        self.optimizer = OPTIMIZERS[kind](list(self.params))
        self.control = self.new_control()
        self.kept, self.told, self.number = [], [], 0

    def new_control(self):
        policy = DynamicScale(init_scale=256.0, growth_interval=2, hysteresis=2)
        return GradientControl(
            self.optimizer, scale=policy, clip=ClipByNorm(2.0, order=self.order), give_up_after=50
        )

    def backward(self, bad_place, bad):
        self.number += 1
        pairs = [
            (param, gradient_for(param, 10 * self.number + k, bad if k == bad_place else None))
            for k, param in enumerate(self.params)
            if param.requires_grad
        ]
        self.control.backward(loss_giving(*pairs))

    def run(self, program):
        for changes, backwards, unscale in program:
            for change, place in changes:
                change(self, place)
            if not any(param.requires_grad for param in self.params):
                self.params[0].requires_grad_(True)
            for bad_place, bad in backwards:
                self.backward(bad_place, bad)
            if unscale:
                self.control.unscale_()
            self.told.append(facts(self.control.step()))
            self.control.zero_grad()
        # Not the state itself: ours may have made buffers that no step has filled yet.
        state = self.optimizer.state_dict()["state"]
        return self.told, contents(self.optimizer)[0], state, self.control.state_dict()


places = st.integers(0, len(SHAPES) - 1)
bads = st.sampled_from([None, None, None, INF, -INF, NAN, 1e38])
iterations = st.tuples(
    st.lists(st.tuples(st.sampled_from(BETWEEN), places), max_size=2),
    st.lists(st.tuples(places, bads), min_size=1, max_size=2),
    st.booleans(),
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10, phases=[Phase.generate])  # To shrink a program takes minutes.
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    order=st.sampled_from([1.0, 2.0, INF]),
    program=st.lists(iterations, min_size=1, max_size=4),
)
def test_a_program_ends_alike_with_either_back_end(device, kind, order, program):
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = serve(device, monkeypatch)
        settling = Settling(monkeypatch)
        settled = World(device, kind, order).run(program)
        assert settling.count == len(program)
        settling.allowed = False
        assert_same(settled, World(device, kind, order).run(program))
        assert settling.count == len(program)
