"""The backends that tests of optimizers run on."""

from __future__ import annotations

import pytest

from control.given_gradients import PATHS, use_path

CHUNK = 512


def use_interpreter(monkeypatch):
    """Runs the Triton kernels on CPU tensors, with small chunks, because the interpreter is slow."""
    device = use_path("Triton", monkeypatch)
    from gradilocks.kernels import recorded_step, triton_kernels

    for name in ("MEASURE_CHUNK", "OPTIMIZER_CHUNK"):
        monkeypatch.setattr(recorded_step, name, CHUNK)
    for name in ("MEASURE_TILE", "UPDATE_TILE", "_MAX_LANES"):
        monkeypatch.setattr(triton_kernels, name, 128)
    return device


@pytest.fixture(params=PATHS[1:])
def device(request, monkeypatch):
    """The device of the parameters; kernels serve it."""
    return use_interpreter(monkeypatch) if request.param == "Triton" else use_path(request.param, monkeypatch)


@pytest.fixture
def extension(monkeypatch):
    """CPU tensors, served by the C extension."""
    return use_path("C", monkeypatch)
