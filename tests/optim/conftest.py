"""Where the optimizers run: on a CPU by torch, by C++ or by interpreted kernels, and on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from gradilocks import kernels
from gradilocks.kernels import chunks, native, reference
from gradilocks.optim import fused_optimizer

INTERPRETED = pytest.param(
    "interpreted",
    marks=[
        pytest.mark.skipif(
            torch.cuda.is_available(), reason="with a GPU the kernels are compiled, not read"
        ),
        pytest.mark.skipif(
            importlib.util.find_spec("triton") is None,
            reason="Triton is not installed, so there are no kernels to test",
        ),
    ],
)
NATIVE = pytest.param(
    "native",
    marks=pytest.mark.skipif(native.library() is None, reason="the native library is not there"),
)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def _prepare(way, monkeypatch):
    if way == "interpreted":
        from gradilocks.kernels import triton_backend, triton_measure, triton_optimizers

        monkeypatch.setitem(kernels.BACKENDS, "cpu", triton_backend)
        # So that the interpreter, which is slow, sees tensors of several chunks.
        monkeypatch.setattr(fused_optimizer, "CHUNK", 64)
        monkeypatch.setattr(triton_optimizers, "TILE", 32)
        monkeypatch.setattr(chunks, "CHUNK", 256)
        monkeypatch.setattr(triton_measure, "TILE", 128)
        monkeypatch.setattr(triton_backend, "CHANGE_CHUNK", 64)
        monkeypatch.setattr(triton_measure, "CHANGE_TILE", 32)
    if way == "by torch":
        monkeypatch.setitem(kernels.BACKENDS, "cpu", reference)
    if way == "native":
        from gradilocks.kernels import native_backend

        monkeypatch.setitem(kernels.BACKENDS, "cpu", native_backend)
        monkeypatch.setattr(fused_optimizer, "CHUNK", 64)
        monkeypatch.setattr(chunks, "CHUNK", 256)
    if way == "cuda":
        kernels.BACKENDS["cuda"]  # Tries the kernels out the first time.
        return "cuda"
    return "cpu"


@pytest.fixture(params=["by torch", NATIVE, INTERPRETED, CUDA])
def device(request, monkeypatch):
    """Wherever the optimizers run."""
    yield _prepare(request.param, monkeypatch)
    chunks._chunkings.clear()


@pytest.fixture(params=[NATIVE, INTERPRETED, CUDA])
def kernel_device(request, monkeypatch):
    """Where our own kernels serve."""
    yield _prepare(request.param, monkeypatch)
    chunks._chunkings.clear()


@pytest.fixture(params=[INTERPRETED, CUDA])
def triton_device(request, monkeypatch):
    """Where the kernels in Triton serve, whose launches can be counted and captured."""
    yield _prepare(request.param, monkeypatch)
    chunks._chunkings.clear()


@pytest.fixture
def cuda(monkeypatch):
    """A GPU; for tests marked `gpu`."""
    return _prepare("cuda", monkeypatch)
