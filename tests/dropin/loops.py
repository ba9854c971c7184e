"""Small training loops for the tests of the scaler."""

from __future__ import annotations

import math

import torch

from gradilocks import GradScaler

SCALERS = {"torch": torch.amp.GradScaler, "gradilocks": GradScaler}


def two_weights():
    return torch.nn.Parameter(torch.tensor([1.0, 2.0]))


def sgd(*params, lr=0.5, **settings):
    return torch.optim.SGD(list(params), lr=lr, **settings)


def backward(scaler, *params):
    """Makes gradients of [2, 4] times the scale for parameters of [1, 2]."""
    scaler.scale(sum((p * p).sum() for p in params)).backward()


def iterate(scaler, optimizer, *params, value=None):
    """One iteration; `value` replaces the first element of the first gradient."""
    optimizer.zero_grad()
    backward(scaler, *params)
    if value is not None:
        params[0].grad[0] = value
    scaler.step(optimizer)
    scaler.update()


def overflow(scaler, optimizer, *params):
    """One iteration whose gradient overflows."""
    iterate(scaler, optimizer, *params, value=math.inf)
