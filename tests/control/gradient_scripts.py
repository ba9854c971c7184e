"""Gradients written down step by step, and optimizers compared bit for bit.

`loss_making((p, g))` is a finite loss whose gradient with respect to `p` is exactly `g` times
whatever the loss was multiplied by, so "overflow at step 7" is one line of a test.
"""

from __future__ import annotations

import copy

import torch
from torch import nn, optim

INF, NAN = float("inf"), float("nan")


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, *params):
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_output):
        return None, *(_scaled(g, grad_output) for g in ctx.gradients)


def _scaled(gradient, by):
    """In float32 for half precision, then rounded: what a float16 backward would store."""
    if gradient.dtype in (torch.float16, torch.bfloat16):
        return (gradient.float() * by).to(gradient.dtype)
    return gradient * by.to(gradient.dtype)


def loss_making(*pairs):
    """A scalar loss of value 0 that gives each parameter the gradient written beside it."""
    params, gradients = zip(*pairs, strict=True)
    gradients = [
        g if isinstance(g, torch.Tensor) else torch.tensor(g, dtype=p.dtype).expand_as(p).clone()
        for p, g in pairs
    ]
    return _Given.apply(gradients, *params)


def parameter(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def control_step(control, *pairs):
    """One iteration of a training loop on given gradients."""
    control.zero_grad()
    control.backward(loss_making(*pairs))
    return control.step()


def same_bits(one, other):
    """Whether two tensors hold the same bits; NaN equals NaN, 0.0 does not equal -0.0."""
    if one.layout is not torch.strided:
        one, other = one.coalesce(), other.coalesce()
        return torch.equal(one.indices(), other.indices()) and same_bits(
            one.values(), other.values()
        )
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def contents(optimizer):
    """A copy of everything a step may change: parameters, and the state of each by position."""
    params = parameters(optimizer)
    place = {id(p): k for k, p in enumerate(params)}
    state = {place[id(p)]: copy.deepcopy(dict(s)) for p, s in optimizer.state.items()}
    return [p.detach().clone() for p in params], state


def gradients(optimizer):
    """A copy of the gradients as they stand."""
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters(optimizer)]


def assert_same(one, other, where="contents"):
    """Compares nested lists, dicts, tensors and numbers bit for bit and says where they differ."""
    assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        assert same_bits(one, other), f"{where}: {one} and {other}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"{where}: keys {list(one)} and {list(other)}"
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for k, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{k}]")
    else:
        assert one == other, f"{where}: {one} and {other}"


OPTIMIZERS = {
    "Adam": lambda params: optim.Adam(params, lr=0.01),
    "Adam fused": lambda params: optim.Adam(params, lr=0.01, fused=True),
    "Adam amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam amsgrad fused": lambda params: optim.Adam(
        params, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True
    ),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01),
    "AdamW fused": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "AdamW fused maximize": lambda params: optim.AdamW(params, lr=0.01, fused=True, maximize=True),
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD fused": lambda params: optim.SGD(params, lr=0.1, fused=True),
    "SGD momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD momentum fused": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "SGD nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "SGD nesterov fused": lambda params: optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, fused=True
    ),
    "SGD dampening": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD dampening fused": lambda params: optim.SGD(
        params, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1, fused=True
    ),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "Adagrad fused": lambda params: optim.Adagrad(params, lr=0.1, lr_decay=0.01, fused=True),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.01),
    "RMSprop centered": lambda params: optim.RMSprop(params, lr=0.01, centered=True, momentum=0.9),
}

MORE_OPTIMIZERS = {
    "Adadelta": lambda params: optim.Adadelta(params),
    "Adafactor": lambda params: optim.Adafactor(params),
    "Adamax": lambda params: optim.Adamax(params, lr=0.01),
    "ASGD": lambda params: optim.ASGD(params, lr=0.1),
    "NAdam": lambda params: optim.NAdam(params, lr=0.01),
    "RAdam": lambda params: optim.RAdam(params, lr=0.01),
    "Rprop": lambda params: optim.Rprop(params, lr=0.01),
}

EVERY_OPTIMIZER = OPTIMIZERS | MORE_OPTIMIZERS
