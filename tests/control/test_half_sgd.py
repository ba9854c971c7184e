"""torch's fused SGD on a CPU hardly moves float16 and bfloat16 weights (pytorch issue 191763).

Only the elements at the end of a tensor that fill no vector are moved. So parameters of 3 elements
are moved by torch itself, and tell what larger ones must become.
"""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import ClipPerTensor, GradientControl, GradScaler, SkipSpikes
from gradilocks.step import half_sgd
from tests.control.gradient_scripts import assert_same, contents

HALF = [torch.float16, torch.bfloat16]
PIECE = 3
SIZE = 23 * PIECE
SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
}


def fused(params, **settings):
    return torch.optim.SGD(params, lr=0.1, fused=True, **settings)


class Wrapper:
    """Hands everything on, and is not known to."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, closure=None):
        return self.inner.step(closure)


def by_control(optimizer, loss, **options):
    control = GradientControl(optimizer, scale=64.0, **options)
    for number in range(4):
        control.zero_grad()
        control.backward(loss(number))
        outcome = control.step()
        assert outcome.skipped == (number == 1)


def by_scaler(optimizer, loss, *, unscale=False, **options):
    if options.get("enabled", True):
        options["init_scale"] = 64.0
    scaler = GradScaler("cpu", growth_interval=100, **options)
    for number in range(4):
        if number == 1 and not scaler.is_enabled():
            continue
        optimizer.zero_grad()
        scaler.scale(loss(number)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(64.0 if scaler.is_enabled() else None)


WAYS = {
    "control": by_control,
    "control that clips": lambda o, loss: by_control(o, loss, clip=1e6),
    "control that clips each": lambda o, loss: by_control(o, loss, clip=ClipPerTensor(1e6)),
    "scaler": by_scaler,
    "scaler that clips": lambda o, loss: by_scaler(o, loss, clip=1e6),
    "scaler that may reject": lambda o, loss: by_scaler(o, loss, clip=SkipSpikes()),
    "disabled scaler": lambda o, loss: by_scaler(o, loss, enabled=False),
    "disabled scaler that clips": lambda o, loss: by_scaler(o, loss, enabled=False, clip=1e6),
    "disabled scaler that may reject": lambda o, loss: by_scaler(
        o, loss, enabled=False, clip=SkipSpikes()
    ),
}


def trained(way, dtype, settings, *, pieces):
    """All elements after some steps, of one parameter or of many small ones; one overflows."""
    torch.manual_seed(0)
    start, *gradients = torch.randn(5, SIZE).to(dtype)
    split = start.split(PIECE) if pieces else [start]
    params = [nn.Parameter(piece.clone()) for piece in split]

    def loss(number):
        row = gradients[number].float() * (float("inf") if number == 1 else 1.0)
        return sum(map(lambda p, g: (p.float() * g).sum(), params, row.split(len(split[0]))))

    optimizer = fused(params, **settings)
    WAYS[way](optimizer, loss)
    states = [list(optimizer.state[p].values()) for p in params]
    kinds = [params, [p.grad for p in params], *zip(*states, strict=True)]
    return start, [torch.cat([t.detach() for t in kind]) for kind in kinds if None not in kind]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("way", WAYS)
def test_every_element_moves_as_torch_moves_those_at_the_end(way, dtype, settings):
    start, whole = trained(way, dtype, SETTINGS[settings], pieces=False)
    _, expected = trained(way, dtype, SETTINGS[settings], pieces=True)
    assert len(whole) == len(expected) == (2 if settings == "plain" else 3)
    for one, other in zip(whole, expected, strict=True):
        assert torch.equal(one, other)
    assert (whole[0] != start).sum() > 0.9 * SIZE  # One may come back by chance.


@pytest.mark.parametrize("by", ["control", "scaler", "closure"])
def test_it_moves_inside_a_wrapper_and_with_a_closure(by):
    start = torch.randn(SIZE).bfloat16()
    param = nn.Parameter(start.clone())
    optimizer = fused([param], momentum=0.9)

    def loss():
        return (param.float() * 2.0).sum()

    if by == "scaler":
        scaler = GradScaler("cpu")
        scaler.scale(loss()).backward()
        scaler.step(Wrapper(optimizer))
    elif by == "control":
        control = GradientControl(Wrapper(optimizer))
        control.backward(loss())
        control.step()
    else:
        control = GradientControl(optimizer)

        def closure():
            control.zero_grad()
            value = loss()
            control.backward(value)
            return value

        control.step(closure)
    assert torch.equal(param, (start.float() - 0.2).bfloat16())


def test_parameters_that_lie_otherwise_than_their_gradients_are_moved_right():
    param = nn.Parameter(torch.randn(4, 3, 5, 5).bfloat16().to(memory_format=torch.channels_last))
    start = param.detach().clone()
    control = GradientControl(fused([param]), scale=None)
    gradient = torch.arange(300.0).reshape(4, 3, 5, 5).bfloat16()
    param.grad = gradient.clone()
    control.step()
    assert torch.equal(param, (start.float() - 0.1 * gradient.float()).bfloat16())


def test_it_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(half_sgd, "_moves_half", lambda: False)
    monkeypatch.setattr(half_sgd, "_tell", functools.cache(half_sgd._tell.__wrapped__))
    with caplog.at_level(logging.WARNING, logger="gradilocks"):
        for _ in range(2):
            trained("control", torch.bfloat16, {}, pieces=False)
    assert caplog.text.count("pytorch issue 191763") == 1


def test_a_torch_that_moves_them_is_left_alone(monkeypatch):
    monkeypatch.setattr(half_sgd, "_moves_half", lambda: True)
    params = [nn.Parameter(torch.zeros(SIZE, dtype=dtype)) for dtype in HALF]
    optimizer = fused(params)
    step = optimizer.step
    assert half_sgd.moving(optimizer, step) is step
    assert not half_sgd.hardly_steps(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: gradilocks.optim.SGD(p, lr=0.1),
    ],
)
def test_who_moves_them_by_himself_is_not_taken_for_one_who_does_not(make):
    assert not half_sgd.hardly_steps(make([nn.Parameter(torch.zeros(SIZE).bfloat16())]))


def test_float32_is_stepped_as_ever():
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    control = GradientControl(fused(models[0].parameters()))
    control.backward(models[0](torch.ones(2, 4)).sum())
    control.step()
    plain = fused(models[1].parameters())
    models[1](torch.ones(2, 4)).sum().backward()
    plain.step()
    assert_same(contents(control.optimizers[0]), contents(plain))
