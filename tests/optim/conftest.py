"""Where the optimizers run: by torch on a CPU, by the kernels interpreted there, and on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from gradilocks import kernels
from gradilocks.kernels import chunks
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
    if way == "cuda":
        kernels.BACKENDS["cuda"]  # Tries the kernels out the first time.
        return "cuda"
    return "cpu"


@pytest.fixture(params=["by torch", INTERPRETED, CUDA])
def device(request, monkeypatch):
    """Wherever the optimizers run."""
    yield _prepare(request.param, monkeypatch)
    chunks._chunkings.clear()


@pytest.fixture(params=[INTERPRETED, CUDA])
def kernel_device(request, monkeypatch):
    """Where our own kernels serve."""
    yield _prepare(request.param, monkeypatch)
    chunks._chunkings.clear()


@pytest.fixture
def cuda(monkeypatch):
    """A GPU; for tests marked `gpu`."""
    return _prepare("cuda", monkeypatch)
