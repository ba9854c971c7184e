"""Random programs of calls end alike on every device path: plain torch, the C extension, the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import gradilocks
from control.given_gradients import INF, NAN, PATHS, assert_same, contents, loss_giving, use_path
from gradilocks import AdaGC, ClipByNorm, DynamicScale, GradientControl

OPTIMIZERS = {
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "own AdamW": lambda ps: gradilocks.optim.AdamW(ps, lr=0.01),
    "own SGD": lambda ps: gradilocks.optim.SGD(ps, lr=0.1, momentum=0.9),
    "own SGD dampening": lambda ps: gradilocks.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1),
}
CLIPS = [None, ClipByNorm(2.0), ClipByNorm(1.0, order=1.0), ClipByNorm(0.5, order=INF), AdaGC(warmup=2)]
SHAPES = [(5,), (1,), (2, 3)]


def clear(world, _):
    world.control.zero_grad()


def clear_in_place(world, _):
    world.control.zero_grad(set_to_none=False)


def freeze(world, index):
    param = world.params[index]
    param.requires_grad_(not param.requires_grad)


def swap_storage(world, index):
    param = world.params[index]
    world.kept.append(param.data)
    param.data = param.data.clone()


def change_rate(world, index):
    world.optimizer.param_groups[0]["lr"] *= 0.5


def resume(world, _):
    saved = world.control.state_dict()
    world.control.zero_grad()
    world.control = world.new_control()
    world.control.load_state_dict(saved)


CHANGES = [clear, clear_in_place, freeze, swap_storage, change_rate, resume]


class World:
    """One optimizer under one control, and what may happen to them."""

    def __init__(self, device, kind, clip):
        generator = torch.Generator().manual_seed(3)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
        self.optimizer = OPTIMIZERS[kind](list(self.params))
        self.clip, self.kept, self.number = clip, [], 0
        self.control = self.new_control()

    def new_control(self):
        policy = DynamicScale(init_scale=256.0, growth_interval=2, hysteresis=2)
        return GradientControl(self.optimizer, scale=policy, clip=self.clip, give_up_after=50)

    def backward(self, bad_index, bad):
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        pairs = []
        for i, param in enumerate(self.params):
            gradient = torch.randn(param.shape, generator=generator)
            if bad is not None and i == bad_index:
                gradient.view(-1)[gradient.numel() // 2] = bad
            if param.requires_grad:
                pairs.append((param, gradient))
        self.control.backward(loss_giving(*pairs))

    def run(self, program):
        reports = []
        for changes, backwards, unscale in program:
            for change, index in changes:
                change(self, index)
            if not any(param.requires_grad for param in self.params):
                self.params[0].requires_grad_(True)
            for bad_index, bad in backwards:
                self.backward(bad_index, bad)
            if unscale:
                self.control.unscale_()
            outcome = self.control.step()
            names = ("step", "skipped", "clipped", "limit", "scale", "culprits")
            reports.append([getattr(outcome, name) for name in names] + [list(outcome.counts.values()), outcome.norm])
            self.control.zero_grad()
        return reports, contents(self.optimizer)[0], self.control.state_dict()


indices = st.integers(0, len(SHAPES) - 1)
bads = st.sampled_from([None, None, None, INF, -INF, NAN, 1e38])
iterations = st.tuples(
    st.lists(st.tuples(st.sampled_from(CHANGES), indices), max_size=2),
    st.lists(st.tuples(indices, bads), min_size=1, max_size=2),
    st.booleans(),
)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "torch"])
@settings(max_examples=12, phases=[Phase.generate])  # Shrinking a program takes minutes.
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    clip=st.sampled_from(CLIPS),
    program=st.lists(iterations, min_size=1, max_size=5),
)
def test_a_program_ends_alike_with_kernels_and_with_plain_torch(path, kind, clip, program):
    results = []
    for name in ("torch", path):
        with pytest.MonkeyPatch.context() as monkeypatch:
            device = use_path(name, monkeypatch)
            results.append(World(device, kind, clip).run(program))
    (reports, params, state), (other_reports, other_params, other_state) = results
    for one, other in zip(reports, other_reports, strict=True):
        assert_same(one[:-1], other[:-1])
        # Only the order of the additions differs.
        assert one[-1] == pytest.approx(other[-1], rel=1e-6, nan_ok=True)
    for p, q in zip(params, other_params, strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-4, atol=1e-5)
    assert {**state, "gradilocks": None} == {**other_state, "gradilocks": None}
    assert state["gradilocks"]["scale_state"] == other_state["gradilocks"]["scale_state"]
    assert state["gradilocks"]["streak"] == other_state["gradilocks"]["streak"]
