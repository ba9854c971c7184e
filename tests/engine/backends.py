"""A step settled by the device, and the same step with the policies asked in Python.

On the CPU the Triton kernels are interpreted, and the CPU then counts as a device that they serve;
with `-m gpu` they are compiled for CUDA. "native" is the CPU with its own kernels, in C++.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradilocks import kernels
from gradilocks.kernels import native
from gradilocks.step.engine import Engine
from gradilocks.step.outcome import Streak

INF, NAN = float("inf"), float("nan")
COMPILED = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(COMPILED, reason="with a GPU the kernels are compiled, not read"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param(
        "native",
        marks=pytest.mark.skipif(
            native.library() is None, reason="the native library is not there"
        ),
    ),
]


def plain_and_served(names, *, served):
    """For `parametrize(("device", ...), indirect=["device"])`: plain torch with all of `names`.

    With the kernels, which are slow to interpret, only those of `served`.
    """
    plain = [pytest.param(None, *_parts(name), id=f"plain torch-{_label(name)}") for name in names]
    return plain + [
        pytest.param(
            *device.values,
            *_parts(name),
            marks=device.marks,
            id=f"kernels on {device.values[0]}-{_label(name)}",
        )
        for device in DEVICES
        for name in served
    ]


def _parts(name):
    return name if isinstance(name, tuple) else (name,)


def _label(name):
    return "-".join(_parts(name))


def serve(device, monkeypatch):
    """Lets the Triton kernels serve `device`, or C++ for "native"; in small chunks on a CPU.

    Returns the device's own name.
    """
    from gradilocks.kernels import chunks
    from gradilocks.optim import fused_optimizer

    if device == "native":
        from gradilocks.kernels import native_backend

        monkeypatch.setitem(kernels.BACKENDS, "cpu", native_backend)
        monkeypatch.setattr(chunks, "CHUNK", 64)
        monkeypatch.setattr(fused_optimizer, "CHUNK", 64)
        return "cpu"
    from gradilocks.kernels import triton_backend, triton_measure, triton_optimizers

    monkeypatch.setitem(kernels.BACKENDS, device, triton_backend)
    if device == "cpu":
        monkeypatch.setattr(chunks, "CHUNK", 64)
        monkeypatch.setattr(triton_measure, "TILE", 16)
        monkeypatch.setattr(triton_backend, "CHANGE_CHUNK", 64)
        monkeypatch.setattr(triton_measure, "CHANGE_TILE", 32)
        monkeypatch.setattr(fused_optimizer, "CHUNK", 64)
        monkeypatch.setattr(triton_optimizers, "TILE", 32)
    return device


class Settling:
    """Lets the device settle the next steps, or has the policies asked, and counts the former."""

    def __init__(self, monkeypatch):
        self.count = 0
        self.allowed = True
        begin, settle, again = Engine.begin, Engine._settled, Engine.again

        def guarded(*args):
            return self.allowed and begin(*args)

        def counted(*args, **options):
            self.count += 1
            return settle(*args, **options)

        def repeated(*args):
            verdict = again(*args) if self.allowed else None
            self.count += verdict is not None
            return verdict

        monkeypatch.setattr(Engine, "begin", guarded)
        monkeypatch.setattr(Engine, "_settled", counted)
        monkeypatch.setattr(Engine, "again", repeated)


def read_at_once(monkeypatch):
    """Lets the host wait for the count of non-finite steps on a GPU too, so that it is exact."""

    def counted(streak):
        streak._until_reading = 0
        return int(streak.count.item())

    monkeypatch.setattr(Streak, "_counted", counted)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, value, *params):
        ctx.gradients = gradients
        return torch.full((), value, device=params[0].device)

    @staticmethod
    def backward(ctx, by):
        def scaled(gradient):
            if gradient.dtype in (torch.float16, torch.bfloat16):
                return (gradient.float() * by).to(gradient.dtype)
            return gradient * by.to(gradient.dtype)

        return None, None, *(scaled(gradient) for gradient in ctx.gradients)


def loss_giving(*pairs, value=0.0):
    """A loss of `value` that gives each parameter the gradient beside it, times the scale."""
    params = [param for param, _ in pairs]
    gradients = [
        gradient.to(param)
        if isinstance(gradient, torch.Tensor)
        else torch.full_like(param, gradient)
        for param, gradient in pairs
    ]
    return _Given.apply([gradient.detach() for gradient in gradients], value, *params)


def step(control, *pairs, value=0.0):
    """One iteration of a training loop on given gradients."""
    control.zero_grad()
    control.backward(loss_giving(*pairs, value=value))
    return control.step()


def parameter(*shape, device="cpu", dtype=torch.float32, seed=3):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return nn.Parameter(values.to(device, dtype))


def gradient_for(param, number, bad=None):
    """Gradient number so and so of a parameter; with `bad` in its middle."""
    made = torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 + number))
    if bad is not None:
        made.view(-1)[made.numel() // 2] = bad
    return made.to(param)


def facts(outcome):
    """All that an Outcome says, but for the norm, whose last bits depend on the order of sums."""
    found = outcome.statistics
    told = {
        name: getattr(outcome, name)
        for name in ("step", "skipped", "clipped", "limit", "scale", "culprits")
    }
    told["counts"] = dict(outcome.counts)
    for name in ("norms", "nan", "inf", "largest", "zeros"):
        told[name] = getattr(found, name).clone()
    return told


__all__ = [
    "COMPILED",
    "DEVICES",
    "INF",
    "NAN",
    "Settling",
    "facts",
    "gradient_for",
    "loss_giving",
    "parameter",
    "plain_and_served",
    "read_at_once",
    "serve",
    "step",
]
